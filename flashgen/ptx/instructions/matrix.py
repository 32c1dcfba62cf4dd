"""Products of a warp and the moves of their fragments (PTX ISA 9.7.14)."""

from __future__ import annotations

import re

import numpy as np

from flashgen.ptx.access import read_shared, write_shared
from flashgen.ptx.decode import Form, instruction
from flashgen.ptx.fragments import (
    ELEMENTS,
    matrix_a,
    matrix_b,
)
from flashgen.ptx.types import FORMATS, Array, DecodedStep, LaneMask
from flashgen.ptx.warp import Warp, whole_warp

_SHAPE = re.compile(r"m16n8k(\d+)$")
_SHAPE_OF_DOUBLES = re.compile(r"m(8|16)n8k(\d+)$")


@instruction("mma")
def multiply(form: Form) -> DecodedStep:
    """9.7.14.5.14, "mma": D = A B + C of 16 by 8, A by rows and B by columns. Products are summed
    in float32, or int32, in the order of numpy's matmul; C is added last.
    """
    form.hint("sync", "aligned", "row", "col", "satfinite")
    if "f64" in form.modifiers:
        return _of_doubles(form)
    shape = next((found for m in form.modifiers if (found := _SHAPE.match(m))), None)
    if shape is None:
        form.unknown("an mma of this shape")
    form.modifiers.remove(shape[0])
    kinds = list(form.modifiers)
    form.modifiers.clear()
    if len(kinds) != 4 or kinds[0] != kinds[3] or kinds[0] not in ("f32", "s32", "f16"):
        form.unknown("an mma of " + ", ".join(kinds))
    if kinds[1] not in ELEMENTS or kinds[2] not in ELEMENTS:
        form.unknown("an mma of " + ", ".join(kinds))
    of_a, of_b, halves = ELEMENTS[kinds[1]], ELEMENTS[kinds[2]], kinds[0] == "f16"
    dtype = np.dtype(np.int32 if kinds[0] == "s32" else np.float32)
    a, b, c = ([form.bits(item, 4) for item in form.group(at)] for at in (1, 2, 3))
    writes = [form.store(item) for item in form.group(0)]
    if len(a) * 4 // of_a.size * 2 != int(shape[1]) or len(b) * 2 != len(a):
        form.wrong("the fragments do not fit the shape")

    def step(warp: Warp, mask: LaneMask) -> None:
        whole_warp(warp, mask)
        left = matrix_a([read(warp) for read in a], of_a)
        product = left @ matrix_b([read(warp) for read in b], of_b)
        held = np.array([read(warp) for read in c]).reshape(len(c), -1, 32)
        # Of several instructions that run as one, each sum has the next products added.
        for added in product.reshape(-1, held.shape[1], 16, 8):
            if halves:
                held = _halves(_from_halves(held) + added)
            else:
                held = (held.view(dtype) + _registers(added).view(dtype)).view(np.uint32)
        for write, row in zip(writes, held, strict=True):
            write(warp, row.reshape(-1), mask)

    return step


def _registers(values: Array) -> Array:
    """4 registers of n times 32 lanes, of (n, 16, 8) values."""
    return values.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1, 32)


def _of_doubles(form: Form) -> DecodedStep:
    """Products of float64, 8 or 16 by 8 (9.7.14.5.9 to 9.7.14.5.11): a lane holds one element of
    every 8 rows and 4 columns of A, one of every 4 rows of B, and two neighbours of D.
    """
    form.hint("rn")
    rows, k = next(
        (int(found[1]), int(found[2]))
        for m in form.modifiers
        if (found := _SHAPE_OF_DOUBLES.match(m))
    )
    form.modifiers.clear()
    a, b, c = ([form.numbers(item, FORMATS["f64"]) for item in form.group(at)] for at in (1, 2, 3))
    writes = [form.store(item) for item in form.group(0)]
    if len(a) * 32 != rows * k or len(b) * 4 != k or len(c) * 4 != rows:
        form.wrong("the fragments do not fit the shape")

    def step(warp: Warp, mask: LaneMask) -> None:
        whole_warp(warp, mask)
        left = np.array([read(warp) for read in a]).reshape(k // 4, rows // 8, 8, 4)
        right = np.array([read(warp) for read in b]).reshape(k // 4, 8, 4)
        held = np.array([read(warp) for read in c]).reshape(rows // 8, 2, 8, 4)
        product = np.einsum("krgt,kct->rgc", left, right)  # rows / 8, row, column
        total = held + product.reshape(rows // 8, 8, 4, 2).transpose(0, 3, 1, 2)
        for write, row in zip(writes, total.reshape(-1, 32), strict=True):
            write(warp, row.copy().view(np.uint64), mask)

    return step


def _from_halves(registers: Array) -> Array:
    """(n, 16, 8) values of accumulators of float16 pairs: 2 registers of n times 32 lanes."""
    pairs = registers.view(np.float16).reshape(2, -1, 8, 8)
    return pairs.transpose(1, 0, 2, 3).reshape(-1, 16, 8).astype(np.float32)


def _halves(values: Array) -> Array:
    """The inverse of _from_halves()."""
    pairs = values.astype(np.float16).reshape(-1, 2, 64).transpose(1, 0, 2)
    return np.ascontiguousarray(pairs).view(np.uint32)


def _matrices(form: Form) -> tuple[int, bool]:
    """Take the modifiers of ldmatrix and stmatrix: how many matrices, and whether transposed."""
    form.hint("sync", "aligned", "shared", "shared::cta")
    if form.choice("m8n8", "m16n16", "m16n8") != "m8n8" or form.type() != "b16":
        form.unknown("a matrix of this shape")
    return int(form.choice("x1", "x2", "x4")[1:]), form.flag("trans")


@instruction("ldmatrix")
def load(form: Form) -> DecodedStep:
    """9.7.14.5.15: matrices of 8 by 8 elements of 16 bits; lanes 0 to 7 have the rows of the first,
    and so on.
    """
    count, transposed = _matrices(form)
    address = form.address(1, 4)
    writes = [form.store(item) for item in form.group(0)]
    if len(writes) != count:
        form.wrong(f"{count} matrices need as many registers")

    def step(warp: Warp, mask: LaneMask) -> None:
        whole_warp(warp, mask)
        tiles = read_shared(warp, _rows(address(warp), count), 2, 8, None).reshape(-1, count, 8, 8)
        rows = (tiles.swapaxes(2, 3) if transposed else tiles).swapaxes(0, 1)
        held = np.ascontiguousarray(rows).reshape(count, -1).view(np.uint32)
        for write, row in zip(writes, held, strict=True):
            write(warp, row, mask)

    return step


@instruction("stmatrix")
def store(form: Form) -> DecodedStep:
    """9.7.14.5.16: the inverse of ldmatrix."""
    count, transposed = _matrices(form)
    address = form.address(0, 4)
    reads = [form.bits(item, 4) for item in form.group(1)]
    if len(reads) != count:
        form.wrong(f"{count} matrices need as many registers")

    def step(warp: Warp, mask: LaneMask) -> None:
        whole_warp(warp, mask)
        held = np.array([read(warp) for read in reads]).view(np.uint16).reshape(count, -1, 8, 8)
        tiles = (held.swapaxes(2, 3) if transposed else held).swapaxes(0, 1)
        write_shared(warp, _rows(address(warp), count), tiles.reshape(-1, 8), None)

    return step


def _rows(addresses: Array, count: int) -> Array:
    """The addresses of the rows of so many matrices: those of the first lanes."""
    return addresses.reshape(-1, 32)[:, : 8 * count].reshape(-1)


@instruction("movmatrix")
def transpose(form: Form) -> DecodedStep:
    """9.7.14.5.17: a matrix of 8 by 8 elements of 16 bits, transposed across the warp."""
    form.hint("sync", "aligned", "m8n8", "trans")
    form.type()
    read, write = form.bits(form.operands[1], 4), form.store(form.operands[0])

    def step(warp: Warp, mask: LaneMask) -> None:
        whole_warp(warp, mask)
        tiles = np.ascontiguousarray(read(warp)).view(np.uint16).reshape(-1, 8, 8)
        write(warp, tiles.swapaxes(1, 2).reshape(-1).view(np.uint32), mask)

    return step
