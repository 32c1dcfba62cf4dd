"""Estimates the time of a launch that has not run, from SASS, grid and target. No GPU.

The main loops are replayed on a model of one SM (estimate/sm.py), and the blocks of the grid are
scheduled over all SMs, each with its own number of iterations. estimate_cubin() takes any Triton
kernel; estimate() takes those of flashgen, whose trip counts follow from spec, config and problem.

How reliable it is: on published landscapes the order is right (tests/cpu/estimate/test_published.py
and test_landscapes.py have the bounds, docs/estimates.md the results). Differences under 10 % mean
nothing, and times are good within their band. Not modelled: launch gaps, L2 misses of long
sequences, power.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Integral, Real

from flashgen.errors import InvalidArgument, NoEstimate, cut
from flashgen.estimate.machines import MACHINES, held_clock_mhz, machine_of
from flashgen.estimate.replay import Replay, replay_cubin
from flashgen.estimate.sm import clock
from flashgen.estimate.trip_counts import dealt_out, empty_programs, grid, handed_out, tuned_splits
from flashgen.schedules.config import SCHEDULES, KernelConfig
from flashgen.schedules.outcome import Timing
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu, known_target
from flashgen.spec.problem import Problem, bytes_moved, flops
from flashgen.spec.records import LARGEST, shown

PROTOCOL = 10
"""Version of the model, and of the problems that are estimated for an entry; estimates of other
versions are not reused."""

BAND = (0.8, 1.6)
"""The true time is expected within these multiples of the estimate for forward kernels of
flashgen's on architectures that were validated: 321 of 336 published times of kernels with
contiguous K and V were in it (an A100, an H100, an RTX 3090 and a 3060 Laptop), and 65 of another
72 that hold 66 us of Python."""

WIDE_BAND = (0.6, 2.0)
"""The same for all others: kernels that are not flashgen's, other architectures, TMA loads, warp
specialization, other directions. By hand; 99 % of 1,160 published times of matrix products were in
it (tests/cpu/estimate/test_gemm.py)."""

LAUNCH_US = 3.0
"""Time of a launch that does nothing, as CUDA events show it: a round figure, no measurement."""

EMPTY_CYCLES = 1500.0
"""A program of packed sequences that finds no row of its own: its start and two trips to memory in
turn. A round figure."""

SEARCH_LOADS = 3
"""Loads that wait for one another until a scheduler knows its first tile of packed sequences. Later
ones are looked for beside the tile before."""

TRIP_CYCLES = 25.0
"""What a trip of each block on an SM takes beyond its replay: a round figure, chosen among 0 to 40
with 20 of the 40 landscapes of products on an H100 in sight; 20 to 30 are as good there."""


def estimate_cubin(
    cubin: bytes,
    *,
    arch: str,
    num_warps: int,
    shared_bytes: int,
    blocks: Sequence[Sequence[int]],
    target: str | Gpu,
    tile_flops: Sequence[float] | None = None,
    least_bytes: float = 0.0,
) -> Timing:
    """The time of one launch of any kernel that Triton compiled, in microseconds.

    Deterministic; never above the target's peak for the operands. The main loops are the innermost
    ones with matrix instructions; one that branches over its mask counts as two, with the mask and
    then without. With tile_flops a loop that ptxas unrolled is found, and its trips
    are counted right. Without it the trips must be those of the machine code, and a loop unrolled
    fourfold takes four times as long as it should. Without least_bytes a launch that memory limits
    is estimated too fast.

    Args:
        cubin: the compiled kernel.
        arch: the architecture it was compiled for, such as "sm_90".
        num_warps: warps of a block.
        shared_bytes: the dynamic shared memory of a block.
        blocks: for each block in launch order, the trips of the main loops in order of address.
        target: the GPU, a known slug or a Gpu.
        tile_flops: what a block must multiply in one trip of each main loop, as the source has it.
        least_bytes: what the launch must at least read from memory and write to it.

    Returns:
        The time, and the interval that the model gives it.

    Raises:
        NoEstimate: with the reason, if the model has no reliable figure.
        InvalidArgument: for contradicting arguments.
        ToolchainError: if cuobjdump or numba is missing.

    Examples:
        >>> from flashgen.estimate import estimate_cubin
        >>> timing = estimate_cubin(  # doctest: +SKIP
        ...     cubin, arch="sm_90", num_warps=8, shared_bytes=98304, blocks=[[32]] * 264,
        ...     target="nvidia_h200",
        ... )
    """
    _check_arguments(cubin, num_warps, shared_bytes, least_bytes, tile_flops)
    gpu = known_target(target) if isinstance(target, str) else target
    if not isinstance(gpu, Gpu):
        raise InvalidArgument(f"target must be a known slug or a Gpu: got {shown(target)}")
    if arch != gpu.arch:
        raise InvalidArgument(
            f"arch must be that of the target: {gpu.slug} is {gpu.arch}, not {cut(str(arch))}"
        )
    blocks = _trip_counts(blocks)
    replayed = replay_cubin(cubin, gpu, num_warps=num_warps, shared_bytes=shared_bytes)
    if tile_flops is not None:
        replayed = rolled_up(replayed, tile_flops)
    return time_of(replayed, blocks, gpu, least_bytes=least_bytes)


def _check_arguments(
    cubin: object, num_warps: object, shared_bytes: object, least_bytes: object, flops: object
) -> None:
    """Raise InvalidArgument for what is no argument of estimate_cubin."""
    if not isinstance(cubin, bytes | bytearray):
        raise InvalidArgument(f"cubin must be bytes: got {type(cubin).__name__}")
    for name, value, least in (("num_warps", num_warps, 1), ("shared_bytes", shared_bytes, 0)):
        if not isinstance(value, Integral) or not least <= int(value) <= LARGEST:
            raise InvalidArgument(f"{name} must be a whole number >= {least}: got {shown(value)}")
    if flops is not None and not isinstance(flops, Iterable):
        raise InvalidArgument(f"tile_flops must be a list of numbers: got {shown(flops)}")
    for value in (least_bytes, *(() if flops is None else flops)):
        if not isinstance(value, Real) or not 0 <= value <= LARGEST:  # type: ignore[operator]
            raise InvalidArgument(
                f"tile_flops and least_bytes must be finite and >= 0: got {shown(value)}"
            )


def _trip_counts(blocks: Iterable[Iterable[object]]) -> list[tuple[int, ...]]:
    """The trips of each block as ints. Raises InvalidArgument."""
    try:
        found = [tuple(operator.index(trips) for trips in block) for block in blocks]  # type: ignore[arg-type]
        largest = max((abs(trips) for block in found for trips in block), default=0)
    except TypeError:
        raise InvalidArgument(
            f"blocks must be a list of lists of trip counts: got {shown(blocks)}"
        ) from None
    if largest > MOST_TRIPS:
        raise InvalidArgument(f"a block must make at most {MOST_TRIPS} trips: got {largest:.3g}")
    return found


MOST_TRIPS = 1 << 31
"""Of a main loop: its counter has 32 bits."""

FOUND_AGAIN = 0.15
"""By how much of a tile's matrix work the work of several trips may fall short."""


def rolled_up(replayed: Replay, tile_flops: Sequence[float]) -> Replay:
    """The replay with its cycles for one trip of the source's loops, of which a loop of the machine
    code may hold several. tile_flops: the matrix work of a block in such a trip, of each main loop;
    0 if it is not known. A loop that multiplies less is taken as it is: a compiler leaves out the
    padding. One that multiplies more, but whose barriers and loads do not divide into trips,
    repeats products in several warps, as Triton does where the warps cover more than the tile.

    Raises InvalidArgument for another number of loops.
    """
    if len(tile_flops) != len(replayed.block_flops):
        raise InvalidArgument(
            f"tile_flops must name {len(replayed.block_flops)} main loops: got {len(tile_flops)}"
        )
    held = [
        _trips_in(flops, tile, parts)
        for flops, tile, parts in zip(
            replayed.block_flops, tile_flops, replayed.equal_parts, strict=True
        )
    ]
    of_phase = [max(held[loop] for loop in phase) for phase in replayed.phases]

    def of_one_trip(row: Sequence[float]) -> tuple[float, ...]:
        return tuple(cycles / trips for cycles, trips in zip(row, of_phase, strict=True))

    return replace(
        replayed,
        cycles=tuple(map(of_one_trip, replayed.cycles)),
        far_cycles=tuple(map(of_one_trip, replayed.far_cycles)),
        lone_cycles=of_one_trip(replayed.lone_cycles),
        loaded_bytes=of_one_trip(replayed.loaded_bytes),
        block_flops=tuple(f // n for f, n in zip(replayed.block_flops, held, strict=True)),
        block_work=tuple(w / n for w, n in zip(replayed.block_work, held, strict=True)),
        least_cycles=tuple(c / n for c, n in zip(replayed.least_cycles, held, strict=True)),
    )


def _trips_in(flops: float, tile: float, parts: int) -> int:
    """How many trips of the source a loop holds that multiplies so much, in so many equal parts."""
    most = int(flops / tile + FOUND_AGAIN) if tile else 1
    return max((trips for trips in range(1, most + 1) if parts % trips == 0), default=1)


def time_of(
    replayed: Replay,
    blocks: Sequence[Sequence[int]],
    gpu: Gpu,
    *,
    least_bytes: float = 0.0,
    least_flops: float = 0.0,
    empty: int = 0,
    tiles: Sequence[int] | None = None,
    firm: bool = False,
) -> Timing:
    """The time of a grid of blocks, in microseconds; blocks as for estimate_cubin.

    least_bytes: lower bound of the memory traffic; least_flops: lower bound of the computation, as
    so many operations at the 16-bit matrix rate. empty: more blocks, which end at once. tiles: how
    many tiles each block begins and ends, one unless given. firm: kernels of this type were
    validated; all others get the wide band.
    Of the loads, those of the first wave come from memory, since its blocks run side by side and
    wait for the same tiles; or the first load of each byte, if those are more. Others find L2.
    Raises InvalidArgument if a block has another number of trip counts than the kernel has main
    loops.
    """
    machine = machine_of(gpu)
    loops = len(replayed.block_flops)
    placed: dict[tuple[tuple[int, ...], int], int] = {}
    kind_of = [
        placed.setdefault((tuple(map(int, block)), begun), len(placed))
        for block, begun in zip(blocks, tiles or [1] * len(blocks), strict=True)
    ]
    kinds = [kind for kind, _ in placed]
    for kind in kinds:
        if len(kind) != loops or min(kind) < 0:
            raise InvalidArgument(
                f"each block must have {loops} trip counts >= 0, one a main loop: got {list(kind)}"
            )
    assert gpu.clock_mhz is not None  # machine_of() has seen
    assert gpu.bandwidth_gbs is not None  # that all
    assert gpu.peak_tflops is not None  # are known
    counts = [0] * len(kinds)
    for number in kind_of:
        counts[number] += 1
    cycles, idle = 0.0, 0.0
    # Loops of one phase run concurrently: the longest decides.
    trips = [[max(kind[loop] for loop in phase) for phase in replayed.phases] for kind in kinds]
    loaded = _total(trips, counts, replayed.loaded_bytes)
    first = min(least_bytes / loaded, 1.0) if loaded else 0.0
    if kind_of:
        waves = len(kind_of) / (gpu.sms * replayed.residents)
        far = max(1.0 / max(waves, 1.0), first)
        begun_of = [begun for _, begun in placed]
        cycles, idle = _grid_cycles(replayed, trips, begun_of, kind_of, gpu, far)
        cycles += EMPTY_CYCLES * empty / (gpu.sms * replayed.residents)
    multiplied = _total(kinds, counts, replayed.block_work)
    clock_mhz = held_clock_mhz(machine, gpu, multiplied / cycles if cycles else 0.0)
    least_moved_us = least_bytes / (gpu.bandwidth_gbs * 1e3)
    # While SMs idle at the end of the grid, memory that all of them need is not busy.
    moved_us = least_moved_us / machine.memory_share + first * idle / clock_mhz
    least_us = max(
        max(least_flops, multiplied) / gpu.peak_tflops * 1e-6,
        _total(kinds, counts, replayed.least_cycles) / (gpu.sms * gpu.clock_mhz),
        least_moved_us,
    )
    median_us = LAUNCH_US + max(cycles / clock_mhz, moved_us)
    return _timing(median_us, least_us, firm=firm and replayed.firm)


def _total(
    kinds: Iterable[Sequence[int]], counts: Sequence[int], of_a_trip: Sequence[float]
) -> float:
    """The sum over all blocks of what each trip of each main loop counts."""
    return sum(
        count * trips * one
        for kind, count in zip(kinds, counts, strict=True)
        for trips, one in zip(kind, of_a_trip, strict=True)
    )


def _grid_cycles(
    replayed: Replay,
    trips: Sequence[Sequence[int]],
    begun: Sequence[int],
    kind_of: Sequence[int],
    gpu: Gpu,
    far: float,
) -> tuple[float, float]:
    """The cycles of a grid, and how many of them an SM idles on average before the last is done.

    trips: of each phase, and begun: the tiles, by kind of block; far: the share of loads that come
    from memory.
    """
    clock()  # raises ToolchainError without numba
    import numpy as np

    from flashgen.estimate.grid_schedule import list_schedule

    busy_sms = min(len(kind_of), gpu.sms)
    residents = min(replayed.residents, math.ceil(len(kind_of) / gpu.sms))
    near = np.array([_with_idle_sms(replayed, busy_sms / gpu.sms), *replayed.cycles[1:residents]])
    slower = np.array(replayed.far_cycles[:residents]) - np.array(replayed.cycles[:residents])
    cycles_of = near + far * slower + TRIP_CYCLES * np.arange(1, residents + 1)[:, None]
    near_block, far_block = (
        each[residents - 1] for each in (replayed.block_cycles, replayed.far_block_cycles)
    )
    more_tiles = np.array(begun, float) - 1.0
    overhead = near_block + far * (far_block - near_block) + replayed.tile_cycles * more_tiles
    end: float = list_schedule(
        np.array(kind_of), np.array(trips, float), cycles_of, overhead, gpu.sms, residents
    )
    # Not a matrix product: the order in which BLAS adds depends on the CPU and may break a tie.
    cycles = np.array(trips, float) * cycles_of[residents - 1]
    of_a_kind = cycles.sum(axis=1) + overhead
    busy = float(of_a_kind[np.array(kind_of)].sum()) / (residents * gpu.sms)
    return end, max(end - busy, 0.0)


def _with_idle_sms(replayed: Replay, busy: float) -> tuple[float, ...]:
    """Cycles of one block's trips while this share of the SMs is busy: what the idle ones leave of
    L2's bandwidth is shared by the others.
    """
    return tuple(
        min(full, max(lone, full * busy))
        for lone, full in zip(replayed.lone_cycles, replayed.cycles[0], strict=True)
    )


def _timing(median_us: float, least_us: float, *, firm: bool) -> Timing:
    """The Timing with its band, in which no value is below least_us, the target's peak."""
    low, high = BAND if firm else WIDE_BAND
    return Timing(
        median_us=max(median_us, least_us),
        low_us=max(median_us * low, least_us),
        high_us=max(median_us * high, least_us),
    )


def estimate(
    replayed: Replay, spec: AttentionSpec, config: KernelConfig, problem: Problem, gpu: Gpu
) -> Timing:
    """The time of one launch of a flashgen kernel in microseconds.

    Raises NoEstimate if gpu's architecture or rates are not known, for some schedules, and if
     the kernel's main loops differ from its template's.
    """
    its = SCHEDULES[config.schedule]
    if reason := its.unestimated:
        raise NoEstimate(reason)
    machine_of(gpu)
    if problem.empty:
        return _timing(LAUNCH_US, 0.0, firm=False)
    tiles = _trips(replayed, spec, config, problem, gpu)
    blocks, begun = tiles, None
    if config.persistent:
        programs = (handed_out if its.hands_out else dealt_out)(tiles, gpu.sms)
        blocks = [tuple(map(sum, zip(*each, strict=True))) for each in programs]
        begun = list(map(len, programs))
    timing = time_of(
        replayed,
        blocks,
        gpu,
        tiles=begun,
        least_bytes=bytes_moved(spec, problem),
        least_flops=flops(spec, problem) / spec.matrix_rate,
        empty=empty_programs(spec, config, problem),
        firm=spec.direction == "forward",
    )
    if spec.varlen and config.persistent:
        return _with_search(timing, gpu)
    if spec.direction != "decode":
        return timing
    return _with_combine(timing, spec, config, problem, gpu)


def _trips(
    replayed: Replay, spec: AttentionSpec, config: KernelConfig, problem: Problem, gpu: Gpu
) -> list[tuple[int, ...]]:
    """The trips of the main loops of each tile. Every consumer has the loops of a kernel without
    roles, and does as many trips.
    """
    consumers, loops = max(1, config.consumers), len(replayed.block_flops)
    if loops % consumers:
        raise NoEstimate(f"{loops} main loops were found in the SASS, of {consumers} consumers")
    blocks = grid(spec, config, problem, gpu, loops=loops // consumers)
    if spec.direction in SCHEDULES[config.schedule].mask_first:
        blocks = [trips[::-1] for trips in blocks]
    return [trips * consumers for trips in blocks]


def _with_search(timing: Timing, gpu: Gpu) -> Timing:
    """The time of a persistent kernel whose scheduler looks for the sequence of each tile: it looks
    for the first one before anything is loaded.
    """
    assert gpu.clock_mhz is not None  # it has a time
    us = SEARCH_LOADS * machine_of(gpu).load_late / gpu.clock_mhz
    low, high = timing.low_us + us, timing.high_us + us
    return replace(timing, median_us=timing.median_us + us, low_us=low, high_us=high)


def _with_combine(
    timing: Timing, spec: AttentionSpec, config: KernelConfig, problem: Problem, gpu: Gpu
) -> Timing:
    """The time of a decode with the kernel that merges its splits."""
    splits = tuned_splits(spec, config, problem, gpu.sms)
    if splits == 1:
        return timing
    merging = estimate_streaming(spec.for_direction("combine"), replace(problem, seq_k=splits), gpu)
    return Timing(
        median_us=timing.median_us + merging.median_us,
        low_us=timing.low_us + merging.low_us,
        high_us=timing.high_us + merging.high_us,
    )


def estimate_streaming(spec: AttentionSpec, problem: Problem, gpu: Gpu) -> Timing:
    """The time of a kernel that only reads and writes its tensors, backward_delta and combine, with
    any config.

    Raises NoEstimate if gpu's architecture or rates are not known.
    """
    machine_of(gpu)
    assert gpu.bandwidth_gbs is not None  # machine_of() has seen it
    moved_us = bytes_moved(spec, problem) / (gpu.bandwidth_gbs * 1e3)
    return _timing(LAUNCH_US + moved_us, moved_us, firm=False)


def estimable(arch: str) -> bool:
    """Whether the model knows this architecture."""
    return arch in MACHINES
