"""What the replay of a kernel on one SM found out, kept beside its binary for the next time."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashgen.compile import Compiled, cache_file, write_whole
from flashgen.errors import InvalidArgument, NoEstimate, ToolchainError
from flashgen.gpu import Gpu
from flashgen.machine import MACHINES, machine_of
from flashgen.sass import disassemble
from flashgen.scoreboard import Scoreboard, Usage
from flashgen.spec import AttentionSpec

REPLAY = 5
"""Version of what a Replay holds; one of another version is made anew."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What the replay found out of one kernel on one target: all that its times follow from.

    phases: numbers of the main loops, in order of address, that run at the same time. cycles: by
    blocks on an SM, from 1 to residents, the cycles of a trip of each phase. usage: of each phase,
    with the SM full. Of a block's trip of each main loop, block_flops: of its matrix instructions;
    least_cycles: for which it occupies the fullest arithmetic pipe of the SM.
    outside: instructions that a warp runs but once. firm: of the kind that was held against
    measurements.
    """

    residents: int
    phases: tuple[tuple[int, ...], ...]
    cycles: tuple[tuple[float, ...], ...]
    usage: tuple[Usage, ...]
    block_flops: tuple[int, ...]
    least_cycles: tuple[float, ...]
    outside: int
    firm: bool

    def to_json(self) -> dict[str, Any]:
        """A dictionary that json can write; from_json reads it back to an equal Replay."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Replay:
        """The Replay of a record that to_json made. Raises KeyError, TypeError or ValueError."""
        fields = dict(record)
        fields["phases"] = tuple(tuple(phase) for phase in fields["phases"])
        fields["cycles"] = tuple(tuple(row) for row in fields["cycles"])
        fields["usage"] = tuple(Usage(**usage) for usage in fields["usage"])
        fields["block_flops"] = tuple(fields["block_flops"])
        fields["least_cycles"] = tuple(fields["least_cycles"])
        return cls(**fields)


def streams(spec: AttentionSpec) -> bool:
    """Whether a kernel reads K and V but once, so that they come from memory and not from L2."""
    return spec.direction == "decode"


def replay_cubin(
    cubin: bytes, gpu: Gpu, *, num_warps: int, shared_bytes: int, streams: bool = False
) -> Replay:
    """Replay a kernel's main loops on one SM of `gpu`.

    num_warps are those of a block, shared_bytes its dynamic shared memory; streams: what it loads
    comes from memory, not from L2. Raises NoEstimate with
    the reason where there is no honest figure, InvalidArgument where the kernel was compiled for
    another architecture, ToolchainError where cuobjdump or numba is missing.
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
    board = Scoreboard(
        listing, gpu, num_warps=num_warps, shared_bytes=shared_bytes, streams=streams
    )
    full = board.residents
    loads_by_tma = any(i.is_bulk_load for body in board.main for i in body)
    return Replay(
        residents=full,
        phases=board.phases,
        cycles=tuple(board.trip_cycles(number) for number in range(1, full + 1)),
        usage=tuple(board.usage(phase, full) for phase in range(len(board.phases))),
        block_flops=tuple(board.matrix_flops(loop) for loop in range(len(board.main))),
        least_cycles=tuple(board.least_cycles(loop) for loop in range(len(board.main))),
        outside=board.outside,
        firm=machine.known and not loads_by_tma and len(board.phases[0]) == 1,
    )


def cached_replay(compiled: Compiled, gpu: Gpu, cache: Path, *, streams: bool = False) -> Replay:
    """The Replay of a kernel whose binary lies in folder `cache`, kept there for the next time;
    streams as in replay_cubin.

    Raises what replay_cubin raises, and ToolchainError where the folder cannot be read or written.
    """
    found = recall_replay(compiled, gpu, cache, streams=streams)
    if found is not None:
        return found
    binary = cache_file(compiled.digest, compiled.arch, compiled.triton, cache, "cubin")
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
        streams=streams,
    )
    record = {"made_by": _made_by(gpu), "replay": replayed.to_json()}
    write_whole(_replay_file(compiled, gpu, cache, streams), json.dumps(record).encode())
    return replayed


def recall_replay(
    compiled: Compiled, gpu: Gpu, cache: Path, *, streams: bool = False
) -> Replay | None:
    """What the cache holds of a kernel on `gpu`; None if nothing, or a file torn or outdated."""
    try:
        file = _replay_file(compiled, gpu, cache, streams)
        record = json.loads(file.read_text(encoding="utf-8"))
        if record["made_by"] != _made_by(gpu):
            return None
        return Replay.from_json(record["replay"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _made_by(gpu: Gpu) -> dict[str, Any]:
    """All that a Replay follows from besides the binary."""
    machine = MACHINES.get(gpu.arch)
    return {"replay": REPLAY, "gpu": asdict(gpu), "machine": machine and asdict(machine)}


def _replay_file(compiled: Compiled, gpu: Gpu, cache: Path, streams: bool) -> Path:
    suffix = f"{gpu.slug}.{'stream' if streams else 'replay'}.json"
    return cache_file(compiled.digest, compiled.arch, compiled.triton, cache, suffix)
