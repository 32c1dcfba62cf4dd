"""Tensor maps that a program makes (PTX ISA 9.7.9.28, "tensormap.replace", and 9.7.13.16,
"tensormap.cp_fenceproxy").
"""

from __future__ import annotations

import numpy as np

from flashgen.ptx.access import active, read_shared, write_global, write_shared
from flashgen.ptx.decode import Form, instruction
from flashgen.ptx.tensor_map import ENCODED
from flashgen.ptx.types import RAW, DecodedStep, LaneMask
from flashgen.ptx.warp import LANES, Warp, whole_warp


@instruction("tensormap.replace")
def replace(form: Form) -> DecodedStep:
    """Write a field of a map, or one dimension of it."""
    form.hint("tile", "b1024")
    space, field = form.choice("global", "shared", "shared::cta"), form.choice(*ENCODED.names or ())
    size = 8 if form.type() == "b64" else 4
    dtype, offset = ENCODED.fields[field][:2]  # type: ignore[index]
    if dtype.base.itemsize != size:
        form.wrong(f"{field} has {8 * dtype.base.itemsize} bits")
    if dtype.shape:
        dimension = form.constant(1)
        if not 0 <= dimension < dtype.shape[0]:
            form.wrong(f"{field} has {dtype.shape[0]} dimensions")
        offset += dimension * size
    shared = space != "global"
    address, value = form.address(0, 4 if shared else 8), form.bits(form.operands[-1], size)
    write, beyond = (write_shared if shared else write_global), RAW[4 if shared else 8](offset)

    def step(warp: Warp, mask: LaneMask) -> None:
        values = active(value(warp), mask)[:, None].copy()
        write(warp, active(address(warp), mask) + beyond, values, mask)

    return step


@instruction("tensormap.cp_fenceproxy")
def copy(form: Form) -> DecodedStep:
    """Copy a map from shared to global memory, and make it visible to the TMA unit."""
    form.hint("global", "shared::cta", "tensormap::generic", "release", "gpu", "sync", "aligned")
    to, of = form.address(0, 8), form.address(1, 4)
    if form.constant(2) != ENCODED.itemsize:
        form.wrong(f"a tensor map has {ENCODED.itemsize} bytes")

    def step(warp: Warp, mask: LaneMask) -> None:
        whole_warp(warp, mask)
        words = (4 * LANES).astype(np.uint32)
        values = read_shared(warp, of(warp)[:1] + words, 4, 1, None)
        write_global(warp, to(warp)[:1] + words.astype(np.uint64), values, None)

    return step
