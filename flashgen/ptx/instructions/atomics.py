"""Atomic operations on memory (PTX ISA 9.7.13.7 "red" and 9.7.13.8 "atom"), lane by lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flashgen.ptx import poll
from flashgen.ptx.access import active, find_global, shared_offsets, spread
from flashgen.ptx.decode import Form, instruction
from flashgen.ptx.instructions.move import CACHING, memory_order, vector_length
from flashgen.ptx.memory import Buffer, Words
from flashgen.ptx.releases import MemoryOrder, synchronize
from flashgen.ptx.types import FORMATS, Array, DecodedStep, LaneMask
from flashgen.ptx.warp import Warp

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "exch": lambda old, new: new,
    "cas": lambda old, expected, new: np.where(old == expected, new, old),
    "add": np.add, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "inc": lambda old, limit: np.where(old >= limit, 0, old + 1),
    "dec": lambda old, limit: np.where((old == 0) | (old > limit), limit, old - 1),
}  # fmt: skip


@instruction("atom", "red")
def atomic(form: Form) -> DecodedStep:
    """Read, combine, write, for one lane after another; the order of lanes is theirs."""
    space = form.choice("global", "shared", "shared::cta")
    form.hint(*CACHING, "noftz")
    order = memory_order(form, atomic=True) or MemoryOrder()
    name = form.choice(*_OPERATIONS)
    count = vector_length(form)
    kind = FORMATS[form.type()]
    shift = form.opcode == "atom"
    shared = space.startswith("shared")
    address = form.address(int(shift), 4 if shared else 8)
    sources = [
        [form.numbers(item, kind) for item in form.group(at)]
        for at in range(1 + shift, len(form.operands))
    ]
    if len(sources) < 1 + (name == "cas") or len(sources[0]) != count:
        form.wrong("an atomic operation needs as many values as its vector has")
    targets = [form.store(item) for item in form.group(0)] if shift else []
    combine = _OPERATIONS[name]

    def update(words: Array, first: Array, values: list[Array]) -> Array:
        """Replace the words of lanes that do not share one; returns what was there."""
        at = first[:, None] + np.arange(count)
        old: Array = words[at]
        held = kind.load(old)
        new = np.asarray(combine(held, *values), dtype=held.dtype)
        words[at] = kind.store(new).reshape(old.shape)
        return old

    def step(warp: Warp, mask: LaneMask) -> None:
        values = [np.concatenate([r(warp).reshape(32, -1) for r in group], 1) for group in sources]
        values = [active(value, mask) for value in values]
        addresses = active(address(warp), mask)
        words, offsets, buffer = _place(warp, addresses, kind.size * count, mask, shared)
        first, content = offsets // kind.size, words.of(kind.size)
        if len(np.unique(first)) == len(first):
            old = update(content, first, values)
        else:
            lanes = [slice(n, n + 1) for n in range(len(first))]
            old = np.concatenate(
                [update(content, first[n], [value[n] for value in values]) for n in lanes]
            )
        if buffer is not None:
            stores = kind.load(old).reshape(values[0].shape) == values[0] if name == "cas" else True
            written = addresses[np.broadcast_to(stores, old.shape).all(1)]
            synchronize(warp, addresses, order, written=written)
            at = first[:, None] + np.arange(count)
            if (content[at] == old).all():
                poll.note(warp, buffer, at, old)
            else:
                warp.poll.repeats = 0
        for target, column in zip(targets, spread(old, mask).T.copy(), strict=False):
            target(warp, column, mask)

    return step


def _place(
    warp: Warp, addresses: Array, size: int, mask: LaneMask, shared: bool
) -> tuple[Words, Array, Buffer | None]:
    """The memory of the active lanes' operands, their offsets in it, and the buffer of global
    memory.
    """
    if shared:
        at = shared_offsets(warp, addresses, size, mask, "updates")
        return warp.block.shared.words, at, None
    buffer = find_global(warp, addresses, size, mask, "updates")
    if buffer is None:
        raise warp.fault("memcheck", "it updates several tensors at once, which is not supported")
    return buffer.words, (addresses - np.uint64(buffer.address)).astype(np.int64), buffer
