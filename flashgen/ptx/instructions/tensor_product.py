"""Products of tcgen05: D = A B + D in tensor memory (PTX ISA 9.7.16.10).

Products are summed in float32, or int32, in the order of numpy's matmul; D is added last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from flashgen.ptx.clocks import ASYNC, Engine
from flashgen.ptx.decode import Form, instruction
from flashgen.ptx.fragments import ELEMENTS, Descriptor, Element
from flashgen.ptx.instructions.tensor_work import HINTS, issue, start
from flashgen.ptx.program import Address, Group
from flashgen.ptx.shared_matrix import SharedMatrix
from flashgen.ptx.tensor_access import (
    address_parts,
    check_region,
    memory_of,
    note_read,
    note_write,
)
from flashgen.ptx.tensor_memory import ALL_LANES, Region
from flashgen.ptx.types import RAW, Array, DecodedStep, LaneMask
from flashgen.ptx.warp import Warp, only_lane

_TYPES: dict[str, dict[int, str]] = {
    "kind::f16": {0: "f16", 1: "bf16"},
    "kind::tf32": {2: "tf32"},
    "kind::f8f6f4": {0: "e4m3", 1: "e5m2"},
    "kind::i8": {0: "u8", 1: "s8"},
}
"""Element types by kind and field of the instruction descriptor (9.7.16.4.2)."""

_K_BYTES = 32
"""Of a row of A or B that one product reads (9.7.16.2.1)."""


@dataclass(frozen=True, kw_only=True)
class TcgenShape:
    """What an instruction descriptor says (9.7.16.4.2)."""

    m: int
    n: int
    a: Element
    b: Element
    dtype: np.dtype[np.generic]
    sign: int
    a_k_major: bool
    b_k_major: bool

    @property
    def k(self) -> int:
        """Elements along K."""
        return _K_BYTES // self.a.size


def shape_of(kind: str, bits: int) -> TcgenShape:
    """The fields of an instruction descriptor. Raises ValueError for what has no semantics here."""
    types, of_d = _TYPES[kind], bits >> 4 & 3
    m, n = (bits >> 24 & 0x1F) << 4, (bits >> 17 & 0x3F) << 3
    step = 16 if m == 128 else 8
    if m not in (64, 128) or not step <= n <= 256 or n % step:
        raise ValueError(f"a product of {m} by {n}")
    if of_d != (2 if kind == "kind::i8" else 1):
        raise ValueError("an accumulator that is not of float32, or of int32 for .kind::i8")
    if bits >> 7 & 7 not in types or bits >> 10 & 7 not in types:
        raise ValueError(f"an element type of number {bits >> 7 & 7} or {bits >> 10 & 7}")
    if bits & 0xC080004F:  # sparsity, saturation, reserved bits and .ws
        raise ValueError(f"sparsity, saturation or reserved bits: {bits:#x}")
    return TcgenShape(
        m=m,
        n=n,
        a=ELEMENTS[types[bits >> 7 & 7]],
        b=ELEMENTS[types[bits >> 10 & 7]],
        dtype=np.dtype(np.int32 if kind == "kind::i8" else np.float32),
        sign=-1 if (bits >> 13 ^ bits >> 14) & 1 else 1,
        a_k_major=not bits >> 15 & 1,
        b_k_major=not bits >> 16 & 1,
    )


@instruction("tcgen05.mma")
def multiply(form: Form) -> DecodedStep:
    """9.7.16.10.9.1, "tcgen05.mma", dense and without scales of blocks; one thread issues it."""
    form.hint(*HINTS)
    kind = form.choice(*_TYPES)
    if not kind:
        form.unknown("a product of this kind")
    form.hint("collector::a::*")
    target, in_memory = form.address(0, 4), isinstance(form.operands[1], Address)
    of_a = form.address(1, 4) if in_memory else form.bits(form.operands[1], 8)
    of_b, descriptor = form.bits(form.operands[2], 8), form.number(3, "u32")
    at = 4  # of enable-input-d, behind disable-output-lane if that is there
    masks = []
    if isinstance(form.operands[at], Group):
        masks = [form.bits(item, 4) for item in form.group(at)]
        at += 1
    accumulates = form.predicate(form.operands[at])
    scale = 2.0 ** -form.constant(at + 1) if len(form.operands) > at + 1 else 1.0
    shapes: dict[int, TcgenShape] = {}

    def step(warp: Warp, mask: LaneMask) -> None:
        lane = only_lane(warp, mask)
        bits = int(descriptor(warp)[lane])
        if bits not in shapes:
            try:
                shapes[bits] = shape_of(kind, bits)
            except ValueError as error:
                raise warp.fault("memcheck", f"an instruction descriptor: {error}") from None
        product = TcgenProduct(
            shape=shapes[bits],
            target=int(target(warp)[lane]),
            a=int(of_a(warp)[lane]),
            b=int(of_b(warp)[lane]),
            in_memory=in_memory,
            adds=bool(accumulates(warp)[lane]),
            scale=scale,
            left_out=_lanes([int(read(warp)[lane]) for read in masks]),
        )
        product.issue(warp)

    return step


def _lanes(masks: list[int]) -> Array | None:
    """The lanes whose bits are set in words of 32 bits; None without words."""
    if not masks:
        return None
    found: Array = np.array([masks[lane // 32] >> lane % 32 & 1 for lane in ALL_LANES], bool)
    return found


@dataclass(frozen=True, kw_only=True)
class TcgenProduct:
    """One tcgen05.mma with its operands: addresses, or descriptors of shared memory. left_out:
    lanes that it does not write.
    """

    shape: TcgenShape
    target: int
    a: int
    b: int
    in_memory: bool
    adds: bool
    scale: float
    left_out: Array | None

    def issue(self, warp: Warp) -> None:
        """Check and record what it reads and writes; it runs at once or later."""
        shape, number = self.shape, issue(warp)
        order = warp.block.agents.pipelined(warp.view, warp.number)
        target = self._region(warp, self.target, shape.n)
        right = self._matrix(warp, self.b, shape.n, shape.b, number, k_major=shape.b_k_major)
        if self.in_memory:
            held = self._region(warp, self.a, _K_BYTES // 4)
            note_read(warp, held, Engine.TENSOR, number, order)
            left: Callable[[], Array] = partial(_from_tensor_memory, warp, held, shape.a)
        else:
            left = self._matrix(warp, self.a, shape.m, shape.a, number, k_major=shape.a_k_major)
        if self.adds:
            note_read(warp, target, Engine.TENSOR, number, order)
        note_write(warp, target, Engine.TENSOR, number, order)
        start(warp, lambda: self._run(warp, target, left() @ right().T))

    def _run(self, warp: Warp, target: Region, product: Array) -> None:
        """Write A B, or add it to what the accumulator holds."""
        held, at = memory_of(warp.block).bits, target.index
        dtype = self.shape.dtype
        result = (self.shape.sign * product).astype(dtype, copy=False)
        if self.adds:
            result = result + held[at].view(dtype) * dtype.type(self.scale)
        bits = result.view(np.uint32)
        if self.left_out is not None:
            bits = np.where(self.left_out[target.lanes, None], held[at], bits)
        held[at] = bits

    def _matrix(
        self, warp: Warp, bits: int, rows: int, element: Element, number: int, *, k_major: bool
    ) -> Callable[[], Array]:
        """Note the read of an operand in shared memory by instruction `number` of the warp."""
        matrix = SharedMatrix(
            read=Descriptor.of_tcgen05, bits=bits, rows=rows, columns=self.shape.k,
            element=element, k_major=k_major,
        )  # fmt: skip
        order = warp.block.agents.order(warp.view, ASYNC)
        return matrix.note_read(warp, Engine.TENSOR, number, order)

    def _region(self, warp: Warp, address: int, columns: int) -> Region:
        """Where M rows lie (9.7.16.10.5): in all lanes, or in 16 of each 32 if M is 64."""
        lane, column = address_parts(address)
        rows = ALL_LANES[: self.shape.m]
        if self.shape.m == 64:
            rows = rows // 16 * 32 + rows % 16
        if lane not in ((0, 16) if self.shape.m == 64 else (0,)):
            raise warp.fault("memcheck", f"{self.shape.m} rows cannot begin in lane {lane}")
        region = Region(rows + lane, column + np.arange(columns))
        check_region(warp, region, "multiplies in")
        return region


def _from_tensor_memory(warp: Warp, region: Region, element: Element) -> Array:
    """The values of A in tensor memory: elements along K lie in one lane."""
    bits = memory_of(warp.block).bits[region.index]
    return element.load(np.ascontiguousarray(bits).view(RAW[element.size]))
