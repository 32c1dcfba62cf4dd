"""Moves between registers and memories (PTX ISA 9.7.9)."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashgen.ptx.access import active, read_global, read_shared, spread, write_global, write_shared
from flashgen.ptx.decode import Form, Store, instruction
from flashgen.ptx.instructions import stack
from flashgen.ptx.memory import LOCAL_BASE, PARAMETER_BASE, PARAMETER_STRIDE
from flashgen.ptx.program import Group, Operand, Register
from flashgen.ptx.releases import MemoryOrder
from flashgen.ptx.types import RAW, TYPE_BYTES, Array, DecodedStep, LaneMask
from flashgen.ptx.warp import Warp

CACHING = (
    "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc",
    "L1::*", "L2::*", "level::*", "unified",
)  # fmt: skip
"""Hints to the caches, which have no semantics (PTX ISA 9.7.9.1)."""


def memory_order(form: Form, *, atomic: bool = False) -> MemoryOrder | None:
    """Take .sem and .scope; None of a weak access (8.3, "Memory operations"). .volatile is
    .relaxed.sys there.
    """
    sem = form.choice("relaxed", "acquire", "release", "acq_rel", "volatile", "weak")
    scope = form.choice("cta", "cluster", "gpu", "sys")
    if sem in ("", "weak") and not atomic:
        return None
    return MemoryOrder(
        acquires=sem in ("acquire", "acq_rel"),
        releases=sem in ("release", "acq_rel"),
        in_block=scope == "cta",
    )


@instruction("mov")
def move(form: Form) -> DecodedStep:
    """9.7.9.4 and 9.7.9.5: a register, a constant, an address, or a vector packed or unpacked."""
    kind = form.type()
    target, source = form.operands
    if kind == "pred":
        chosen, put = form.predicate(source), form.store(target)
        return lambda warp, mask: put(warp, chosen(warp), mask)
    size = TYPE_BYTES[kind]
    if isinstance(source, Group):
        return _pack(form, size, source.items)
    if isinstance(target, Group):
        return _unpack(form, size, target.items)
    read, write = form.bits(source, size), form.store(target)
    return lambda warp, mask: write(warp, read(warp), mask)


def _pack(form: Form, size: int, parts: tuple[Operand, ...]) -> DecodedStep:
    raw, part_size = RAW[size], size // len(parts)
    reads = [form.bits(part, part_size) for part in parts]
    write = form.store(form.operands[0])

    def step(warp: Warp, mask: LaneMask) -> None:
        packed = np.empty((form.lanes, len(reads)), RAW[part_size])
        for n, read in enumerate(reads):
            packed[:, n] = read(warp)
        write(warp, packed.view(raw).reshape(-1), mask)

    return step


def _unpack(form: Form, size: int, parts: tuple[Operand, ...]) -> DecodedStep:
    read = form.bits(form.operands[1], size)
    writes = [form.store(part) for part in parts]
    raw = RAW[size // len(parts)]

    def step(warp: Warp, mask: LaneMask) -> None:
        columns = np.ascontiguousarray(read(warp)).view(raw).reshape(-1, len(writes)).T.copy()
        for write, column in zip(writes, columns, strict=True):
            write(warp, column, mask)

    return step


@instruction("cvta", "mapa")
def convert_address(form: Form) -> DecodedStep:
    """9.7.9.20: generic addresses are those of each state space here, which do not overlap, but for
    parameters and the stack. 9.7.9.22: a cluster has one block here, so that every address is the
    block's own.
    """
    to = form.flag("to")
    space = form.choice(
        "global", "shared", "param", "const", "local", "shared::cta", "shared::cluster"
    )
    size = TYPE_BYTES[form.type()]
    read, write = form.bits(form.operands[1], size), form.store(form.operands[0])
    if space not in _BASES:
        return lambda warp, mask: write(warp, read(warp), mask)
    if size != 8:
        form.wrong("a generic address has 64 bits")
    base = np.uint64((-_BASES[space] if to else _BASES[space]) % (1 << 64))
    return lambda warp, mask: write(warp, read(warp) + base, mask)


_BASES = {"param": PARAMETER_BASE, "local": LOCAL_BASE}


def vector_length(form: Form) -> int:
    """Take .v2, .v4 or .v8."""
    return int(form.choice("v2", "v4", "v8").removeprefix("v") or 1)


@instruction("ld", "ldu")
def load(form: Form) -> DecodedStep:
    """9.7.9.8: of a parameter, of the stack, of shared or of global memory."""
    space = form.choice(
        "param", "global", "shared", "shared::cta", "const", "param::entry", "local"
    )
    form.hint(*CACHING)
    order, count, kind = memory_order(form), vector_length(form), form.type()
    size = TYPE_BYTES[kind]
    targets = form.group(0)
    if len(targets) != count:
        form.wrong(f"a vector of {len(targets)}")
    writes = [_extended(form, target, kind) for target in targets]
    if space.startswith("param") and not form.on_stack(1):
        return _load_parameter(form, size, writes)
    shared = space.startswith("shared")
    address = form.address(1, 4 if shared else 8)
    used = form.used()
    of_vector = used if shared and len(used) < count else []

    def read(warp: Warp, addresses: Array, mask: LaneMask) -> Array:
        if shared:
            return read_shared(warp, addresses, size, count, mask, of_vector)
        return read_global(warp, addresses, size, count, mask, order)

    def step(warp: Warp, mask: LaneMask) -> None:
        values = spread(read(warp, active(address(warp), mask), mask), mask)
        if len(writes) == 1:
            writes[0](warp, values[:, 0], mask)
            return
        for write, column in zip(writes, values.T.copy(), strict=True):
            write(warp, column, mask)

    if space in ("param", "local"):
        return stack.load(form, size, writes, base=0)
    return (
        step
        if space
        else stack.generic(form, step, stack.load(form, size, writes, base=LOCAL_BASE))
    )


def _extended(form: Form, target: Operand, kind: str) -> Store:
    """A store of a loaded value, extended to the width of its register (PTX ISA 9.4.1)."""
    store = form.store(target)
    if not isinstance(target, Register) or TYPE_BYTES[target.type] == TYPE_BYTES[kind]:
        return store
    raw = RAW[TYPE_BYTES[target.type]]
    if not kind.startswith("s"):
        return lambda warp, bits, mask: store(warp, bits.astype(raw), mask)
    signed, wide = np.dtype(f"i{TYPE_BYTES[kind]}"), np.dtype(f"i{TYPE_BYTES[target.type]}")
    return lambda warp, bits, mask: store(
        warp, np.ascontiguousarray(bits).view(signed).astype(wide).view(raw), mask
    )


def _load_parameter(form: Form, size: int, writes: list[Store]) -> DecodedStep:
    """By the name of the parameter, or by an address that all lanes have."""
    address, raw = form.address(1, 8), RAW[size]
    bytes_read = size * len(writes)
    named = form.parameter(1)
    known: list[Any] = [None, ()]  # what it reads by name in a launch

    def step(warp: Warp, mask: LaneMask) -> None:
        parameters = warp.block.machine.parameters
        if known[0] is not parameters or named is None:
            known[:] = parameters, columns(warp, mask)
        for write, column in zip(writes, known[1], strict=True):
            write(warp, column, mask)

    def columns(warp: Warp, mask: LaneMask) -> list[Array]:
        place = named
        if place is None:
            addresses = active(address(warp), mask)
            place = int(addresses[0])
            if (addresses != addresses[0]).any():
                raise warp.fault("memcheck", "its lanes read a parameter at different addresses")
        which, begin = divmod(place, PARAMETER_STRIDE)
        parameters = warp.block.machine.parameters
        if not 0 <= which < len(parameters):
            raise warp.fault("memcheck", f"there is no parameter at {place:#x}")
        content = parameters[which]
        if begin + bytes_read > len(content):
            raise warp.fault(
                "memcheck", f"it reads byte {begin} of a parameter that has {len(content)}"
            )
        return [np.full(32, value) for value in np.frombuffer(content, raw, len(writes), begin)]

    return step


@instruction("st")
def store(form: Form) -> DecodedStep:
    """9.7.9.11: to the stack, shared or global memory."""
    space = form.choice("global", "shared", "shared::cta", "param", "local")
    form.hint(*CACHING)
    order, count, kind = memory_order(form), vector_length(form), form.type()
    size = TYPE_BYTES[kind]
    reads = [form.bits(source, size) for source in form.group(1)]
    if len(reads) != count:
        form.wrong(f"a vector of {len(reads)}")
    shared = space.startswith("shared")
    address = form.address(0, 4 if shared else 8)

    def step(warp: Warp, mask: LaneMask) -> None:
        values: Array = active(np.stack([read(warp) for read in reads], 1), mask)
        if shared:
            write_shared(warp, active(address(warp), mask), values, mask)
        else:
            write_global(warp, active(address(warp), mask), values, mask, order)

    if space in ("param", "local"):
        return stack.store(form, size, base=0)
    return step if space else stack.generic(form, step, stack.store(form, size, base=LOCAL_BASE))


@instruction("prefetch", "prefetchu", "discard", "applypriority")
def hint(form: Form) -> DecodedStep:
    """9.7.9.15 and others: hints to the caches."""
    form.modifiers.clear()
    return lambda warp, mask: None


@instruction("createpolicy")
def policy(form: Form) -> DecodedStep:
    """9.7.9.18: a cache policy, a number that has no meaning here."""
    form.modifiers.clear()
    write = form.store(form.operands[0])
    return lambda warp, mask: write(warp, np.zeros(32, np.uint64), mask)
