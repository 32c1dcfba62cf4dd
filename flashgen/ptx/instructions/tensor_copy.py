"""The TMA unit: cp.async.bulk and cp.async.bulk.tensor (PTX ISA 9.7.9.25.4 and 9.7.9.25.5)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flashgen.ptx.access import note_global, note_shared_read, note_shared_write, read_global
from flashgen.ptx.clocks import ASYNC, Engine
from flashgen.ptx.decode import Form, instruction
from flashgen.ptx.findings import Fault
from flashgen.ptx.instructions import mbarrier
from flashgen.ptx.memory import PARAMETER_BASE, PARAMETER_STRIDE, SHARED_BASE, BadAddress, Buffer
from flashgen.ptx.program import Box
from flashgen.ptx.tensor_map import PIECE, TensorMap, decoded
from flashgen.ptx.types import FORMATS, Array, DecodedStep, LaneMask
from flashgen.ptx.warp import Warp, only_lane

DESTINATION_ALIGNMENT = 128
"""Bytes, of a tensor copy in shared memory (9.7.9.25.5.2)."""

Boxed = Callable[[Warp, int], tuple[TensorMap, tuple[int, ...]]]


@instruction("cp.async.bulk")
def bulk(form: Form) -> DecodedStep:
    """9.7.9.25.4.1, whose copies Triton does not make."""
    form.unknown("a bulk copy without a tensor map")


@instruction("cp.async.bulk.tensor")
def copy(form: Form) -> DecodedStep:
    """9.7.9.25.5.2: a copy by tensor map, to or from shared memory."""
    dims = form.choice("1d", "2d", "3d", "4d", "5d")
    form.hint("tile", "L2::cache_hint")
    target = form.choice("shared::cta", "shared::cluster", "global")
    if target == "global":
        form.hint("shared::cta", "bulk_group")
        return _store(form, int(dims[0]))
    form.hint("global", "mbarrier::complete_tx::bytes", "cta_group::1")
    return _load(form, int(dims[0]))


def _boxed(form: Form, at: int, dims: int) -> Boxed:
    """The tensor map of an operand and where its box begins, outermost coordinate first."""
    operand = form.operands[at]
    if not isinstance(operand, Box) or len(operand.coordinates) != dims:
        form.wrong(f"operand {at} must be a tensor map with {dims} coordinates")
    address = form.bits(operand.tensor_map, 8)
    coordinates = [form.numbers(item, FORMATS["s32"]) for item in operand.coordinates]

    def found(warp: Warp, lane: int) -> tuple[TensorMap, tuple[int, ...]]:
        tensor_map = _map_at(warp, int(address(warp)[lane]), lane)
        begin = tuple(int(read(warp)[lane]) for read in reversed(coordinates))
        if len(begin) != len(tensor_map.box):
            raise warp.fault(
                "memcheck", f"a tensor map of {len(tensor_map.box)} dimensions, {dims} asked for"
            )
        return tensor_map, begin

    return found


def _map_at(warp: Warp, place: int, lane: int) -> TensorMap:
    """The tensor map at a generic address: a parameter, or one in global memory that the program
    has made.
    """
    machine = warp.block.machine
    number, rest = divmod(place - PARAMETER_BASE, PARAMETER_STRIDE)
    if not rest and number in machine.tensor_maps:
        return machine.tensor_maps[number]
    try:
        content = read_global(warp, np.array([place], np.uint64), 8, 16, None)
        return decoded(content.tobytes())
    except (Fault, ValueError) as error:
        said = f"there is no tensor map at {place:#x}" if isinstance(error, Fault) else str(error)
        raise warp.fault("memcheck", said, lane) from None


def _shared_places(warp: Warp, tensor_map: TensorMap, begin: int, piece: int, lane: int) -> Array:
    """Offsets in shared memory of the pieces of a box."""
    size = warp.block.shared.size
    if begin % DESTINATION_ALIGNMENT:
        raise warp.fault("memcheck", f"byte {begin - SHARED_BASE} is not aligned to 128", lane)
    width = tensor_map.box[-1] * tensor_map.size
    if tensor_map.swizzle and width > tensor_map.swizzle:
        raise warp.fault(
            "memcheck", f"a row of {width} bytes under a swizzle of {tensor_map.swizzle}", lane
        )
    if begin < SHARED_BASE or begin + tensor_map.bytes > SHARED_BASE + size:
        raise warp.fault(
            "memcheck",
            f"a box of {tensor_map.bytes} bytes at byte {begin - SHARED_BASE} of shared memory, "
            f"of which the block has {size}",
            lane,
        )
    return tensor_map.shared_places(begin, piece) - SHARED_BASE


def _buffer_of(
    warp: Warp, tensor_map: TensorMap, piece: int, inside: Array, offsets: Array
) -> Buffer | None:
    """The buffer of the pieces that lie inside of the tensor; None if there is none."""
    if not inside.any():
        return None
    low, high = int(offsets[inside].min()), int(offsets[inside].max())
    addresses = np.array([tensor_map.address + low, tensor_map.address + high], np.uint64)
    try:
        return warp.block.machine.memory.find(addresses, piece)
    except (BadAddress, LookupError) as error:
        raise warp.fault("memcheck", f"the box of a tensor map: {error}") from None


def _load(form: Form, dims: int) -> DecodedStep:
    """Global to shared memory; the bytes complete on an mbarrier."""
    target, barrier = form.address(0, 4), form.address(2, 4)
    boxed = _boxed(form, 1, dims)
    if len(form.operands) > 4 or isinstance(form.operands[0], Box):
        form.unknown("a copy to several blocks")

    def step(warp: Warp, mask: LaneMask) -> None:
        lane = only_lane(warp, mask)
        tensor_map, begin = boxed(warp, lane)
        place = int(barrier(warp)[lane])
        completes = mbarrier.find(warp, place)
        piece, inside, offsets = tensor_map.places(begin)
        at = _shared_places(warp, tensor_map, int(target(warp)[lane]), piece, lane)
        buffer = _buffer_of(warp, tensor_map, piece, inside, offsets)
        note_shared_write(
            warp, *_rows(at, tensor_map, piece), agent=completes.agent,
            count=completes.phase + 1, proxy=ASYNC,
        )  # fmt: skip
        if buffer is not None:
            first = (offsets + (tensor_map.address - buffer.address))[inside]
            note_global(warp, buffer, first, piece, writes=False)

        def land() -> None:
            values = np.full(len(at), tensor_map.filled(piece))
            if buffer is not None:
                values[inside] = buffer.words.of(piece)[first // piece]
            warp.block.shared.words.of(piece)[at // piece] = values
            completes.bytes -= tensor_map.bytes
            completes.settle()

        warp.block.copies.append(land)

    return step


def _rows(at: Array, tensor_map: TensorMap, piece: int) -> tuple[Array, int]:
    """The offsets of what a box has in shared memory, and the bytes of each: 16 if it can be."""
    if tensor_map.box[-1] * tensor_map.size % PIECE:
        return at, piece
    return at[:: PIECE // piece], PIECE


def _store(form: Form, dims: int) -> DecodedStep:
    """Shared to global memory, in a group."""
    boxed, source = _boxed(form, 0, dims), form.address(1, 4)
    reduction = form.choice("add", "min", "max")
    if reduction:
        form.unknown(f".{reduction} of a tensor copy")

    def step(warp: Warp, mask: LaneMask) -> None:
        lane = only_lane(warp, mask)
        tensor_map, begin = boxed(warp, lane)
        piece, inside, offsets = tensor_map.places(begin)
        at = _shared_places(warp, tensor_map, int(source(warp)[lane]), piece, lane)
        buffer = _buffer_of(warp, tensor_map, piece, inside, offsets)
        queue = warp.queues[Engine.STORE]
        note_shared_read(
            warp, *_rows(at, tensor_map, piece), engine=Engine.STORE, count=queue.current
        )
        if buffer is None:
            queue.open.append(lambda: None)
            return
        first = (offsets + (tensor_map.address - buffer.address))[inside]
        note_global(warp, buffer, first, piece, writes=True)
        here, there = at[inside] // piece, first // piece

        def land() -> None:
            buffer.words.of(piece)[there] = warp.block.shared.words.of(piece)[here]

        warp.perform(Engine.STORE, land)

    return step


@instruction("cp.async.bulk.commit_group")
def commit(form: Form) -> DecodedStep:
    """9.7.9.25.4.2: closes the group of the stores so far."""
    return lambda warp, mask: warp.queues[Engine.STORE].commit()


@instruction("cp.async.bulk.wait_group")
def wait(form: Form) -> DecodedStep:
    """9.7.9.25.4.3: .read waits for the reads of shared memory alone, which is the same here."""
    form.flag("read")
    pending = form.constant(0)
    return lambda warp, mask: warp.await_groups(Engine.STORE, pending)
