"""Exchange between the lanes of a warp (PTX ISA 9.7.9.6 and 9.7.13)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import numpy as np

from flashgen.ptx.decode import Form, OperandReader, instruction
from flashgen.ptx.program import Number, Operand
from flashgen.ptx.types import FORMATS, Array, DecodedStep, LaneMask
from flashgen.ptx.warp import ALL, LANES, Warp


def members(form: Form, operand: Operand) -> Callable[[Warp, LaneMask], Array]:
    """The lanes of a member mask, which must all execute the instruction."""
    read = form.numbers(operand, FORMATS["u32"])

    def found(warp: Warp, mask: LaneMask) -> Array:
        named = int(read(warp)[int(np.argmax(ALL if mask is None else mask))])
        lanes = (named >> LANES & 1).astype(bool)
        absent = lanes & ~(ALL if mask is None else mask)
        if absent.any():
            lane = int(np.argmax(absent))
            raise warp.fault(
                "synccheck", f"lane {lane} is in the member mask {named:#x} and elsewhere", lane
            )
        return lanes

    return found


@instruction("shfl")
def shuffle(form: Form) -> DecodedStep:
    """9.7.9.6, "shfl.sync": each lane reads the register of another one."""
    form.flag("sync")
    mode = form.choice("up", "down", "bfly", "idx")
    form.type()
    target, valid = form.pair(0)
    value, by, clamp = (form.number(n, "u32") for n in (1, 2, 3))
    named = members(form, form.operands[4])
    write, write_valid = form.store(target), form.store(valid)

    def sources(warp: Any) -> tuple[Array, Array]:
        amount, limits = by(warp).astype(int) & 31, clamp(warp).astype(int)
        lanes, first = _lanes(len(amount))
        segment = (limits >> 8) & 31
        last = (lanes & segment) | (limits & 31 & ~segment)
        if mode == "up":
            source, inside = lanes - amount, lanes - amount >= last
        elif mode == "down":
            source, inside = lanes + amount, lanes + amount <= last
        elif mode == "bfly":
            source, inside = lanes ^ amount, (lanes ^ amount) <= last
        else:
            source = (lanes & segment) | (amount & ~segment)
            inside = source <= last
        return first + np.where(inside, source, lanes), inside

    # Nearly always they are in the text.
    known = sources(None) if all(isinstance(o, Number) for o in form.operands[2:4]) else None

    def step(warp: Warp, mask: LaneMask) -> None:
        source, inside = known or sources(warp)
        if mask is not None:
            named(warp, mask)
            if not mask[source[mask]].all():
                raise warp.fault("synccheck", "it reads the register of a lane that is elsewhere")
        write(warp, value(warp)[source], mask)
        write_valid(warp, inside, mask)

    return step


@cache
def _lanes(count: int) -> tuple[Array, Array]:
    """For so many lanes, of several instructions, their numbers and the first of each 32."""
    every = np.arange(count)
    return every % 32, every // 32 * 32


@instruction("vote")
def vote(form: Form) -> DecodedStep:
    """9.7.13.9, "vote.sync"."""
    form.flag("sync")
    mode = form.choice("all", "any", "uni", "ballot")
    form.types()
    condition, named = form.predicate(form.operands[1]), members(form, form.operands[2])
    write = form.store(form.operands[0])

    def step(warp: Warp, mask: LaneMask) -> None:
        lanes, holds = named(warp, mask), condition(warp)
        if mode == "ballot":
            bits = int((holds & lanes) @ (1 << LANES))
            write(warp, np.full(32, bits, np.uint32), mask)
            return
        votes = holds[lanes]
        found = {"all": votes.all(), "any": votes.any(), "uni": votes.all() or not votes.any()}
        write(warp, np.full(32, found[mode], bool), mask)

    return step


@instruction("match")
def match(form: Form) -> DecodedStep:
    """9.7.13.10, "match.sync": the lanes that hold the same value."""
    form.flag("sync")
    mode, kind = form.choice("any", "all"), form.type()
    target, predicate = form.pair(0)
    value, named = form.numbers(form.operands[1], FORMATS[kind]), members(form, form.operands[2])
    write, write_predicate = form.store(target), form.store(predicate)

    def step(warp: Warp, mask: LaneMask) -> None:
        lanes, values = named(warp, mask), value(warp)
        same = (values[:, None] == values[None, :]) & lanes[None, :]
        if mode == "all":
            equal = bool(same[int(np.argmax(lanes))][lanes].all())
            same = same if equal else np.zeros_like(same)
            write_predicate(warp, np.full(32, equal), mask)
        write(warp, (same @ (1 << LANES)).astype(np.uint32), mask)

    return step


@instruction("activemask")
def active_mask(form: Form) -> DecodedStep:
    """9.7.13.11: the lanes that execute it."""
    form.types()
    write = form.store(form.operands[0])
    return lambda warp, mask: write(
        warp,
        np.full(32, int((ALL if mask is None else mask) @ (1 << LANES)), np.uint32),
        mask,
    )


@instruction("elect")
def elect(form: Form) -> DecodedStep:
    """9.7.13.13, "elect.sync": one lane of the mask; the lowest here."""
    form.flag("sync")
    target, predicate = form.pair(0)
    named, write = members(form, form.operands[1]), form.store(target)
    if predicate is None:
        form.wrong("elect.sync has two destinations")
    write_predicate = form.store(predicate)
    everybody = np.zeros(32, np.uint32), np.equal(LANES, 0)  # elects lane 0
    of_all = isinstance(form.operands[1], Number) and form.constant(1) & 1

    def step(warp: Warp, mask: LaneMask) -> None:
        if mask is None and of_all:
            leader, elected = everybody
        else:
            lane = int(np.argmax(named(warp, mask)))
            leader, elected = np.full(32, lane, np.uint32), np.equal(LANES, lane)
        write(warp, leader, mask)
        write_predicate(warp, elected, mask)

    return step


_REDUCTIONS: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip

_OF_NUMBERS: dict[str, Callable[[Array, Array], Array]] = {"min": np.fmin, "max": np.fmax}
"""Of floats: what is no number loses."""


@instruction("redux")
def reduction(form: Form) -> DecodedStep:
    """9.7.13.12, "redux.sync": one value of all lanes of the mask."""
    form.flag("sync")
    name = form.choice(*_REDUCTIONS)
    absolute, keeps_nan = form.flag("abs"), form.flag("NaN")
    kind = form.format()
    function = (_OF_NUMBERS if kind.floating and not keeps_nan else _REDUCTIONS)[name]
    value: OperandReader = form.numbers(form.operands[1], kind)
    named, write = members(form, form.operands[2]), form.result(kind)

    def step(warp: Warp, mask: LaneMask) -> None:
        values = value(warp)[named(warp, mask)]
        values = np.abs(values) if absolute else values
        write(warp, np.full(32, reduce(function, values), values.dtype), mask)

    return step
