"""Asynchronous products of a warpgroup (PTX ISA 9.7.15).

A product is one operation of four warps. It reads shared memory at any time between the issue by
the last of them and the first wait for it. Until a warp has waited, its accumulators hold nothing,
and the registers of A must not change.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from flashgen.ptx.clocks import ASYNC, Engine
from flashgen.ptx.decode import Form, OperandReader, instruction
from flashgen.ptx.fragments import (
    ELEMENTS,
    Descriptor,
    Element,
    accumulator,
    accumulator_registers,
    matrix_a,
)
from flashgen.ptx.program import Group, Register
from flashgen.ptx.shared_matrix import SharedMatrix
from flashgen.ptx.types import Array, DecodedStep, LaneMask
from flashgen.ptx.undefined import Uninitialised
from flashgen.ptx.warp import Wait, Warp, whole_warp

_SHAPE = re.compile(r"m64n(\d+)k(\d+)$")
WARPS = 4
"""Warps of a warpgroup."""


@dataclass(frozen=True, kw_only=True)
class WgmmaShape:
    """What an instruction multiplies: n and k, the element types, and how operands lie."""

    n: int
    k: int
    a: Element
    b: Element
    dtype: np.dtype[np.generic]
    a_k_major: bool
    b_k_major: bool
    scale: int


@dataclass
class Chain:
    """Products that accumulate in the same registers without a wait between them. initial: the
    registers of each warp before the first; remaining: products that a warp has not waited for.
    """

    registers: tuple[Register, ...]
    initial: list[list[Array] | None]
    values: Array | None = None
    remaining: list[int] = field(default_factory=lambda: [0] * WARPS)


Key = tuple[int, ...]
"""The numbers of the registers of an accumulation."""


@dataclass
class WgmmaProduct:
    """One wgmma.mma_async while it is under way. shared: what reads A, unless it is in registers,
    and B. The other lists have an item a warp.
    """

    position: int
    shape: WgmmaShape
    chain: Chain
    descriptors: tuple[int | None, int]
    accumulates: bool
    fragments: list[list[Array] | None] = field(default_factory=lambda: [None] * WARPS)
    orders: list[Array] = field(default_factory=list)
    shared: list[Callable[[], Array]] = field(default_factory=list)
    issued: int = 0
    done: bool = False


class Warpgroup:
    """The products of four warps in their order, and how many each warp has issued."""

    def __init__(self) -> None:
        self.products: list[WgmmaProduct] = []
        self.issued = [0] * WARPS
        self.performed = 0
        self.chains: list[dict[Key, Chain]] = [{} for _ in range(WARPS)]


def _warpgroup(warp: Warp) -> Warpgroup:
    groups: dict[int, Warpgroup] = warp.block.warpgroups
    return groups.setdefault(warp.number // WARPS, Warpgroup())


@instruction("wgmma.commit_group")
def commit(form: Form) -> DecodedStep:
    """9.7.15.7.2: closes the group of the products so far."""
    form.hint("sync", "aligned")
    return lambda warp, mask: warp.queues[Engine.WGMMA].commit()


@instruction("wgmma.fence")
def fence(form: Form) -> DecodedStep:
    """9.7.15.7.1: what the registers hold now may be used by products."""
    form.hint("sync", "aligned")

    def step(warp: Warp, mask: LaneMask) -> None:
        whole_warp(warp, mask)
        warp.fenced = list(warp.registers)

    return step


def _shape(form: Form) -> WgmmaShape:
    found = next((each for m in form.modifiers if (each := _SHAPE.match(m))), None)
    if found is None:
        form.unknown("a wgmma of this shape")
    form.modifiers.remove(found[0])
    kinds = [kind for kind in form.modifiers if kind in ELEMENTS or kind in ("f32", "s32")]
    form.hint(*kinds, "satfinite")
    if len(kinds) != 3 or kinds[0] not in ("f32", "s32") or not set(kinds[1:]) <= set(ELEMENTS):
        form.unknown("a wgmma of " + ", ".join(kinds))
    rest = form.operands[4:]
    signs = [form.constant(at) for at in range(4, min(6, 4 + len(rest)))]
    transposed = [form.constant(at) == 1 for at in range(6, len(form.operands))]
    in_registers = isinstance(form.operands[1], Group)
    return WgmmaShape(
        n=int(found[1]),
        k=int(found[2]),
        a=ELEMENTS[kinds[1]],
        b=ELEMENTS[kinds[2]],
        dtype=np.dtype(np.int32 if kinds[0] == "s32" else np.float32),
        a_k_major=in_registers or not (transposed and transposed[0]),
        b_k_major=not (transposed and transposed[-1]),
        scale=int(np.prod(signs)) if signs else 1,
    )


@instruction("wgmma.mma_async")
def multiply(form: Form) -> DecodedStep:
    """9.7.15.5.2, "wgmma.mma_async"."""
    form.hint("sync", "aligned")
    shape = _shape(form)
    registers = form.registers(0)
    if len(registers) * 2 != shape.n:
        form.wrong(f"{shape.n} columns need {shape.n // 2} registers")
    in_registers = isinstance(form.operands[1], Group)
    of_a = form.registers(1) if in_registers else ()
    key = tuple(register.index for register in registers)
    address_a: OperandReader | None = None if in_registers else form.bits(form.operands[1], 8)
    address_b, accumulates = form.bits(form.operands[2], 8), form.predicate(form.operands[3])

    def step(warp: Warp, mask: LaneMask) -> None:
        whole_warp(warp, mask)
        rank, group = warp.number % WARPS, _warpgroup(warp)
        uses = bool(accumulates(warp)[0])
        descriptors = (
            None if address_a is None else int(address_a(warp)[0]),
            int(address_b(warp)[0]),
        )
        fragments = [_fragment(warp, register) for register in of_a]
        product = _join(warp, group, shape, registers, key, descriptors, uses)
        product.chain.remaining[rank] += 1
        product.fragments[rank] = fragments
        if warp.block.shadow is not None:
            product.orders.append(warp.block.agents.order(warp.view, ASYNC))
        product.issued += 1
        queue = warp.queues[Engine.WGMMA]
        if product.issued == WARPS:
            _note_reads(warp, product, queue.current)
            if warp.block.coin():
                _perform(group, product)
        queue.open.append(_retirement(warp, group, product, of_a))

    return step


def _fragment(warp: Warp, register: Register) -> Array:
    """A register of A as it is issued."""
    held: Array | None = warp.registers[register.index]
    if held is None:
        raise Uninitialised(register)
    _check_fenced(warp, register)
    return held


def _check_fenced(warp: Warp, register: Register) -> None:
    """9.7.15.7.1 asks for a fence between a write of a register and its use by wgmma. It is only a
    remark: ptxas knows the registers, waits, and says so (advisories C7510 to C7518).
    """
    if warp.fenced is None or warp.fenced[register.index] is not warp.registers[register.index]:
        machine = warp.block.machine
        message = (
            f"it multiplies {machine.program.names[register.index]}, to which the warp has written "
            "since the last wgmma.fence: ptxas serializes the product"
        )
        warp.remark("synccheck", message)


def _join(
    warp: Warp,
    group: Warpgroup,
    shape: WgmmaShape,
    registers: tuple[Register, ...],
    key: Key,
    descriptors: tuple[int | None, int],
    accumulates: bool,
) -> WgmmaProduct:
    """The product that the warpgroup issues now: its first warp makes it, the others join."""
    rank = warp.number % WARPS
    number = group.issued[rank]
    chain = _chain(warp, group, registers, key, accumulates)
    group.issued[rank] += 1
    if number == len(group.products):
        made = WgmmaProduct(warp.position, shape, chain, descriptors, accumulates)
        group.products.append(made)
        return made
    product = group.products[number]
    same = (warp.position, descriptors[1], accumulates)
    if (product.position, product.descriptors[1], product.accumulates) != same:
        raise warp.fault("synccheck", "the warps of its warpgroup issue different products")
    if descriptors[0] != product.descriptors[0]:
        raise warp.fault("synccheck", "the warps of its warpgroup multiply different matrices")
    if product.chain is not chain:
        chain_of_group = product.chain
        chain_of_group.initial[rank] = chain.initial[rank]
        group.chains[rank][key] = chain_of_group
    return product


def _chain(
    warp: Warp, group: Warpgroup, registers: tuple[Register, ...], key: Key, accumulates: bool
) -> Chain:
    """The accumulation that these registers take part in, from now on."""
    rank = warp.number % WARPS
    if key in group.chains[rank]:
        return group.chains[rank][key]
    if overlap := warp.in_flight & set(key):
        name = warp.block.machine.program.names[min(overlap)]
        raise warp.fault("synccheck", f"it accumulates in {name}, which another wgmma writes")
    initial = None
    if accumulates:
        for register in registers:
            if warp.registers[register.index] is None:
                raise Uninitialised(register)
            _check_fenced(warp, register)
        initial = [warp.registers[index] for index in key]
    chain = Chain(registers, [None] * WARPS)
    chain.initial[rank] = initial
    for index in key:
        warp.registers[index] = None
    warp.in_flight.update(key)
    group.chains[rank][key] = chain
    return chain


def _note_reads(warp: Warp, product: WgmmaProduct, group: int) -> None:
    """Check and record what the product reads, as soon as all warps have issued it."""
    order = np.minimum.reduce(product.orders) if product.orders else None
    shape, (a, b) = product.shape, product.descriptors
    for bits, rows, element, k_major in (
        (a, 64, shape.a, shape.a_k_major),
        (b, shape.n, shape.b, shape.b_k_major),
    ):
        if bits is not None:
            matrix = SharedMatrix(
                read=Descriptor.of_wgmma, bits=bits, rows=rows, columns=shape.k, element=element,
                k_major=k_major,
            )  # fmt: skip
            product.shared.append(matrix.note_read(warp, Engine.WGMMA, group, order))


def _perform(group: Warpgroup, last: WgmmaProduct) -> None:
    """Perform the products up to `last`, in their order."""
    while not last.done:
        product = group.products[group.performed]
        group.performed += 1
        shape, chain = product.shape, product.chain
        *of_a, b = (values() for values in product.shared)
        a = of_a or [matrix_a(each or [], shape.a)[0] for each in product.fragments]
        result = np.vstack(a) @ b.T
        if shape.scale < 0:
            result = -result
        if product.accumulates:
            if chain.values is None:
                chain.values = np.vstack(
                    [accumulator(each or [], shape.dtype) for each in chain.initial]
                )
            result = chain.values + result
        chain.values = result
        product.done = True


def _retirement(
    warp: Warp, group: Warpgroup, product: WgmmaProduct, of_a: tuple[Register, ...]
) -> Callable[[], None]:
    """What happens when a warp has waited for a product: its registers have the result, once no
    later product accumulates in them.
    """
    rank = warp.number % WARPS

    def retire() -> None:
        _perform(group, product)
        for register, held in zip(of_a, product.fragments[rank] or [], strict=True):
            if warp.registers[register.index] is not held:
                name = warp.block.machine.program.names[register.index]
                warp.report("synccheck", f"it has written {name} before the wgmma that reads it")
        chain = product.chain
        chain.remaining[rank] -= 1
        if chain.remaining[rank]:
            return
        assert chain.values is not None
        rows = accumulator_registers(chain.values[16 * rank : 16 * rank + 16])
        key = tuple(register.index for register in chain.registers)
        for index, row in zip(key, rows, strict=True):
            if warp.registers[index] is not None:
                name = warp.block.machine.program.names[index]
                warp.report("synccheck", f"it has written {name} before the wgmma that writes it")
            warp.registers[index] = row
            if warp.fenced is not None:
                warp.fenced[index] = row
        warp.in_flight.difference_update(key)
        del group.chains[rank][key]

    return retire


@instruction("wgmma.wait_group")
def wait(form: Form) -> DecodedStep:
    """9.7.15.7.3: all groups but the newest `pending` are complete."""
    form.hint("sync", "aligned")
    pending = form.constant(0)

    def step(warp: Warp, mask: LaneMask) -> int | None:
        whole_warp(warp, mask)
        queue, group = warp.queues[Engine.WGMMA], _warpgroup(warp)
        needed = group.issued[warp.number % WARPS] - len(queue.open)
        needed -= (
            sum(map(len, queue.groups[max(len(queue.groups) - pending, 0) :])) if pending else 0
        )

        def issued() -> bool:
            return not needed or group.products[needed - 1].issued == WARPS

        if not issued():
            warp.wait = Wait(lambda: "its warpgroup to issue its wgmma", issued)
            return warp.position
        warp.await_groups(Engine.WGMMA, pending)
        return None

    return step
