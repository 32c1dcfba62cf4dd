"""The semantics of instructions, a module a chapter of the PTX ISA."""

from __future__ import annotations

import importlib

_MODULES = (
    "arithmetic", "bits", "functions", "compare", "convert", "move", "control", "warpwide",
    "atomics", "barrier", "mbarrier", "copy", "tensor_copy", "matrix", "wgmma",
)  # fmt: skip


def load_all() -> None:
    """Import every module, so that decode.TABLE is complete."""
    for name in _MODULES:
        importlib.import_module(f"{__name__}.{name}")
