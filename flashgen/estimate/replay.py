"""What replaying a kernel on a model of one SM (estimate/sm.py) gave, and a cache of it beside the
kernel's binary.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashgen.compile.compiler import Compiled, cache_file
from flashgen.compile.sass import disassemble
from flashgen.errors import InvalidArgument, NoEstimate, ToolchainError
from flashgen.estimate.machines import (
    MACHINES,
    machine_of,
    narrow_rates,
)
from flashgen.estimate.sm import Scoreboard, Usage, equal_parts
from flashgen.files import content_of, write_whole
from flashgen.spec.gpu import Gpu
from flashgen.spec.records import Record, parsed, record_of, value_of

REPLAY = 12
"""Version of the contents of a Replay; other versions are not reused."""


@dataclass(frozen=True, kw_only=True)
class Replay(Record):
    """The result of replaying one kernel on one target; all its times follow from it.

    phases: numbers of the main loops, in order of address, that run at the same time. cycles: by
    blocks on an SM, from 1 to residents, the cycles of a trip of each phase; far_cycles: where its
    loads come from memory and not from L2; lone_cycles: of one block while few SMs are busy.
    loaded_bytes: what a block loads in a trip of each phase. usage: of each phase, with the SM
    full. For a block's trip of each main loop, block_flops: of its matrix instructions; block_work:
    the 16-bit operations that would take as long; least_cycles: for which it occupies the busiest
    arithmetic pipe of the SM; equal_parts: trips of the source that it can hold. block_cycles, by
    blocks on an SM: of a block beside its trips; far_block_cycles: where its loads come from
    memory; tile_cycles: of each further tile of a persistent program. firm: whether kernels of this
    type were validated.
    """

    residents: int
    phases: tuple[tuple[int, ...], ...]
    cycles: tuple[tuple[float, ...], ...]
    far_cycles: tuple[tuple[float, ...], ...]
    lone_cycles: tuple[float, ...]
    loaded_bytes: tuple[float, ...]
    usage: tuple[Usage, ...]
    block_flops: tuple[int, ...]
    block_work: tuple[float, ...]
    least_cycles: tuple[float, ...]
    equal_parts: tuple[int, ...]
    block_cycles: tuple[float, ...]
    far_block_cycles: tuple[float, ...]
    tile_cycles: float
    firm: bool

    def must_agree(self) -> None:
        """Raise InvalidArgument where lengths or signs contradict each other."""
        of_phase = (*self.cycles, *self.far_cycles, self.lone_cycles, self.loaded_bytes, self.usage)
        of_loop = (self.block_flops, self.block_work, self.least_cycles, self.equal_parts)
        # Warps whose loops are fewer than others' stay in their last one, so it is in several.
        loops = sorted({loop for phase in self.phases for loop in phase})
        if (
            not all(self.phases)
            or not self.phases
            or {len(each) for each in of_phase} != {len(self.phases)}
            or {len(each) for each in of_loop} != {len(loops)}
            or loops != list(range(len(loops)))
            or not 1 <= self.residents == len(self.cycles) == len(self.far_cycles)
            or not self.residents == len(self.block_cycles) == len(self.far_block_cycles)
        ):
            raise InvalidArgument("a replay must have as many figures as blocks, phases and loops")
        times = (*self.cycles, *self.far_cycles, self.lone_cycles)
        of_block = (self.block_cycles, self.far_block_cycles, (self.tile_cycles,))
        rest = (self.loaded_bytes, *of_loop, *of_block)
        if min(x for each in times for x in each) <= 0 or min(x for y in rest for x in y) < 0:
            raise InvalidArgument("the cycles of a replay must be > 0, and its figures >= 0")


def replay_cubin(cubin: bytes, gpu: Gpu, *, num_warps: int, shared_bytes: int) -> Replay:
    """Replay a kernel's main loops on one SM of `gpu`.

    num_warps are those of a block, shared_bytes its dynamic shared memory. Raises NoEstimate with
    the reason if there is no reliable figure, InvalidArgument if the kernel was compiled for
    another architecture, ToolchainError if cuobjdump or numba is missing.
    """
    machine = machine_of(gpu)
    listing = disassemble(cubin)
    if not listing.arch:
        raise NoEstimate("the cubin does not say what it was compiled for")
    if listing.arch != gpu.arch:
        raise InvalidArgument(
            f"the kernel must be compiled for {gpu.arch}, which {gpu.slug} is: "
            f"it is for {listing.arch}"
        )
    board = Scoreboard(listing, gpu, num_warps=num_warps, shared_bytes=shared_bytes)
    full = board.residents
    loads_by_tma = any(i.is_bulk_load for body in board.main for i in body)
    return Replay(
        residents=full,
        phases=board.phases,
        cycles=tuple(board.trip_cycles(number) for number in range(1, full + 1)),
        far_cycles=tuple(board.trip_cycles(number, far=True) for number in range(1, full + 1)),
        lone_cycles=board.lone_cycles(),
        loaded_bytes=tuple(board.loaded_bytes(phase) for phase in range(len(board.phases))),
        usage=tuple(board.usage(phase, full) for phase in range(len(board.phases))),
        block_flops=tuple(board.matrix_flops(loop) for loop in range(len(board.main))),
        block_work=tuple(board.matrix_work(loop) for loop in range(len(board.main))),
        least_cycles=tuple(board.least_cycles(loop) for loop in range(len(board.main))),
        equal_parts=tuple(map(equal_parts, board.main)),
        block_cycles=_by_residents(board, far=False),
        far_block_cycles=_by_residents(board, far=True),
        tile_cycles=board.tile_cycles(full),
        firm=machine.known and not loads_by_tma and len(board.phases[0]) == 1,
    )


def _by_residents(board: Scoreboard, *, far: bool) -> tuple[float, ...]:
    """The block_cycles by blocks on an SM: of one and of all replayed, in between on a line."""
    full = board.residents
    lone, last = board.block_cycles(1, far=far), board.block_cycles(full, far=far)
    step = (last - lone) / max(full - 1, 1)
    return tuple(lone + step * more for more in range(full))


def cached_replay(compiled: Compiled, gpu: Gpu, cache: Path) -> Replay:
    """The Replay of a kernel whose binary is in folder `cache`, where the result is cached too.

    Raises the errors of replay_cubin, and ToolchainError if the folder cannot be read or written.
    """
    found = recall_replay(compiled, gpu, cache)
    if found is not None:
        return found
    binary = _file_of(compiled, cache, "cubin")
    if not gpu.is_nvidia:
        machine_of(gpu)
    try:
        cubin = binary.read_bytes()
    except OSError as error:
        raise ToolchainError(f"the compile cache {cache} cannot be read: {error}") from error
    replayed = replay_cubin(
        cubin,
        gpu,
        num_warps=compiled.num_warps,
        shared_bytes=compiled.shared_bytes,
    )
    record = {"made_by": _made_by(gpu), "replay": replayed.to_json()}
    write_whole(_replay_file(compiled, gpu, cache), json.dumps(record))
    return replayed


def recall_replay(compiled: Compiled, gpu: Gpu, cache: Path) -> Replay | None:
    """The cached Replay of a kernel on `gpu`; None if there is none, or the file is incomplete
    or outdated.
    """
    try:
        file = _replay_file(compiled, gpu, cache)
        record = value_of(dict[str, Any], parsed(content_of(file)), "the record")
        if record.get("made_by") != _made_by(gpu):
            return None
        found = record_of(Replay, record.get("replay"))
        found.must_agree()
        return found
    except (OSError, ValueError):
        return None


OF_THE_CHIP = ("name", "sms", "l2_bytes", "clock_mhz", "bandwidth_gbs")
"""Fields of a Gpu on which no Replay depends, which is of one SM and in cycles."""


def _made_by(gpu: Gpu) -> dict[str, Any]:
    """All that a Replay depends on besides the binary: GPUs of one SM share it."""
    sm = {name: value for name, value in asdict(gpu).items() if name not in OF_THE_CHIP}
    if gpu.matrix_flops_per_clock:
        sm["narrow"] = narrow_rates(gpu)
    machine = MACHINES.get(gpu.arch)
    return {"replay": REPLAY, "sm": sm, "machine": machine and asdict(machine)}


def _replay_file(compiled: Compiled, gpu: Gpu, cache: Path) -> Path:
    made_by = hashlib.sha256(json.dumps(_made_by(gpu)).encode()).hexdigest()
    return _file_of(compiled, cache, f"{made_by[:8]}.replay.json")


def _file_of(compiled: Compiled, cache: Path, suffix: str) -> Path:
    digest, whole = compiled.digest, compiled.whole
    return cache_file(digest, compiled.arch, compiled.triton, cache, suffix, whole=whole)
