"""The semantics of instructions, a module a chapter of the PTX ISA."""

from __future__ import annotations


def load_all() -> None:
    """Import every module, so that decode.TABLE is complete."""
    from flashgen.ptx.instructions import (  # noqa: F401
        arithmetic,
        atomics,
        barrier,
        bits,
        compare,
        control,
        convert,
        copy,
        functions,
        matrix,
        mbarrier,
        move,
        stack,
        tcgen05,
        tensor_copy,
        tensor_maps,
        tensor_move,
        tensor_product,
        tensor_work,
        warpwide,
        wgmma,
    )
