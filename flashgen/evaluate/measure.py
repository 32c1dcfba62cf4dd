"""A kernel on a GPU -> Timing: the protocol and its reasons. Two protocols' figures do not compare.

PROTOCOL 4
- A decode is timed for several numbers of sequences (problem.timed_problems), and its time is their
  geometric mean: of 64 alone, as protocol 3 had it, a config was chosen that wastes half of the
  time of one.
- Inputs are random normal numbers. Never zeros: a matrix product of zeros draws less power, clocks
  higher, and seems faster than it is.
- Warm first: launches until three batches in a row agree within 2 %, or the time for it is over.
  The first launch compiles, and clocks take a while to rise, then to fall under load.
- Every sample finds a cold L2: a buffer of twice its size is written before, then a second one is
  read, which replaces the written lines, or their write-back would fall into short samples. A tuned
  kernel runs between others, whose data fill the cache; and no length fits it by luck.
- A sample is one launch between two events of the device. Batches are queued behind a kernel that
  waits, so that no sample holds the host's time to launch.
- Median, 20th and 80th percentile: means follow the outliers of clock changes and of other users.
- Counts follow from time, not the other way: short kernels get many samples, long ones still a few.
- The final round interleaves its candidates, every second pass in reverse order, so that a drift of
  clock or temperature hits all of them alike. The median of each pass is kept: candidates compare
  within a pass, where the clock was the same for all.
- A clock that changes in the middle spoils a measurement: where times change for good by more than
  JUMP, it is Unsteady. What the clock was at the end is kept with every figure, so that those of a
  run can be compared.
- A figure above the peak of the GPU is refused: it says that the kernel did not do the work.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from flashgen.errors import FlashgenError
from flashgen.evaluate.gpu_state import Conditions as Conditions
from flashgen.evaluate.gpu_state import clocks_and_power as clocks_and_power
from flashgen.schedules.outcome import LONGEST_US, Timing

LaunchOnce = Callable[[], object]
"""Launches a kernel once, without waiting for it."""

ASIDE = 0.2
"""The share of the samples that may lie above, or below, all others at any clock: outliers."""

LEAST_SIDE = 3
"""Fewer samples in a row are no clock that has changed: another program may have come between."""

PLACES = 20
"""Where a jump is looked for, at most; it is found even if a side has a few samples of the other,
within ASIDE."""


class Stopwatch(Protocol):
    """Times launches: CudaStopwatch, or a fake in a test."""

    def time(self, run: LaunchOnce, count: int) -> list[float]:
        """Microseconds of each of `count` launches, every one with a cold L2."""

    def now(self) -> float:
        """Seconds of a clock that never goes back."""

    def clock_mhz(self) -> float | None:
        """The device's clock, whatever it ran just before; None if unknown."""


def jump(times: Sequence[float]) -> float:
    """The largest ratio of the times after one position to those before it, or the inverse.

    The outermost fifth of each side is ignored, so that neither noise nor a slow drift counts, and
    each side has at least a fifth of all times. 1.0 if there are too few times.
    """
    side = max(LEAST_SIDE, math.ceil(ASIDE * len(times)))
    step = max(1, len(times) // PLACES)
    largest = 1.0
    for place in range(side, len(times) - side + 1, step):
        before, after = sorted(times[:place]), sorted(times[place:])
        for high, low in ((after, before), (before, after)):
            least = quantile(low, 1 - ASIDE)
            largest = max(largest, quantile(high, ASIDE) / least if least > 0 else math.inf)
    return largest


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest samples of a sorted, non-empty sequence."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


class CudaStopwatch:
    """Times launches on a CUDA or ROCm device by its events, on the current stream.

    Args:
        index: of the device.
        l2_bytes: of its L2, which is flushed before each launch.

    Raises:
        RuntimeError: torch's, if there is no such device.

    Examples:
        >>> from flashgen.evaluate.measure import CudaStopwatch
        >>> stopwatch = CudaStopwatch(0, 50 << 20)  # doctest: +SKIP
    """

    SPIN_CYCLES_PER_S = 2.5e9  # above any GPU's clock, so that the wait is never short
    LONGEST_SPIN_S = 0.05

    CLOCK_CYCLES = 2_000_000  # 1 ms: the events' microsecond is a thousandth of it
    CLOCK_LIMIT_S = 0.5
    USUAL = 0.9  # of the highest clock seen: not held down by the kernel before

    def __init__(self, index: int, l2_bytes: int) -> None:
        import torch

        self._torch = torch
        self._device = torch.device("cuda", index)
        # Twice the L2: a write as large as the cache leaves some of the old lines in it.
        words = 2 * max(l2_bytes, 1 << 20) // 4
        self._written = torch.empty(words, dtype=torch.float32, device=self._device)
        self._read = torch.zeros(words, dtype=torch.float32, device=self._device)
        self._sum = torch.empty((), dtype=torch.float32, device=self._device)
        self._enqueue_s = 0.001  # of one launch, as last seen; the first one's is a guess
        self._highest_mhz = 0.0

    def time(self, run: LaunchOnce, count: int) -> list[float]:
        """As Stopwatch says. Raises the errors that torch raises for a failed launch."""
        cuda = self._torch.cuda
        with cuda.device(self._device):
            pairs = [
                (cuda.Event(enable_timing=True), cuda.Event(enable_timing=True))
                for _ in range(count)
            ]
            cuda.synchronize()
            # The device waits until the batch is queued, or the gaps between launches would be
            # timed.
            wait_s = min(1.5 * count * self._enqueue_s, self.LONGEST_SPIN_S)
            cuda._sleep(int(wait_s * self.SPIN_CYCLES_PER_S))
            began = time.perf_counter()
            for start, end in pairs:
                self._flush()
                start.record()
                run()
                end.record()
            self._enqueue_s = (time.perf_counter() - began) / count
            cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in pairs]

    def _flush(self) -> None:
        """Leave the L2 without lines of the next launch, and without lines to write back."""
        self._written.zero_()
        self._torch.sum(self._read, dim=0, out=self._sum)

    def now(self) -> float:
        """As Stopwatch says."""
        return time.perf_counter()

    def clock_mhz(self) -> float | None:
        """As Stopwatch says: by a kernel that only counts cycles of its SM.

        A kernel that draws much power lowers the clock while it runs and a little longer, which is
        its own and no fault. So this takes the highest clock seen until it is near the usual one,
        or CLOCK_LIMIT_S is over, as the first time. (On a device whose counter is not its SMs'
        clock, no change is ever seen.)
        """
        enough = self.USUAL * self._highest_mhz or math.inf
        highest, end = 0.0, self.now() + self.CLOCK_LIMIT_S
        while highest < enough and self.now() < end:
            highest = max(highest, self.CLOCK_CYCLES / self._spin_us())
        self._highest_mhz = max(self._highest_mhz, highest)
        return highest

    def _spin_us(self) -> float:
        """Microseconds that the device takes for CLOCK_CYCLES."""
        cuda = self._torch.cuda
        with cuda.device(self._device):
            start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            start.record()
            cuda._sleep(self.CLOCK_CYCLES)
            end.record()
            cuda.synchronize()
        return float(start.elapsed_time(end) * 1e3)


PROTOCOL = 4
"""Version of the protocol above; every outcome and every table records it."""

Effort = Literal["rough", "timed", "final"]


BATCH_US = (
    20_000.0  # long compared with the pause between batches, short compared with the least budget
)
LARGEST_BATCH = 16  # some six entries of the launch queue each: the queue holds 1024
STEADY_BATCHES = 3
STEADY_WITHIN = 0.02  # the spread of medians of a GPU at rest clocks; final winners differ by more
LOAD_US = 200_000.0  # queued while clocks and power are read, which takes milliseconds
ENQUEUE_US = 50.0  # lower bound of a launch: the time that the host takes to queue it
FINAL_BATCH = 4  # few in a row, so that candidates alternate faster than clocks drift

JUMP = 1.5
"""Times that change for good by so much were taken at two clocks. One that drops by half makes a
kernel twice as slow, or 1.5 times where half of its time is the memory's. Limits of power and heat
are taken to move a warm GPU's clock by less within a second."""

PEAK_MARGIN = 1.2
"""Boards clock above the boost clock of their data sheet (H200: 1980 to 1830 MHz; an RTX 3090 to
1950 of 1695), so a little above the data sheet's peak is possible. What the test is for is off by
factors."""


class Implausible(FlashgenError, RuntimeError):
    """A time in which the GPU cannot have done the work."""


class Unsteady(FlashgenError, RuntimeError):
    """The clock changed in the middle of a measurement; it must be repeated."""


@dataclass(frozen=True, kw_only=True)
class MeasureBudget:
    """Seconds of wall clock for warming and sampling, and the least and most samples.

    For a final round, least counts passes: as many as its rank test needs.
    """

    warm_s: float
    sample_s: float
    least: int
    most: int


BUDGETS: dict[Effort, MeasureBudget] = {
    # Enough to see a factor of 1.5; the GPU is warm from the candidate before.
    "rough": MeasureBudget(warm_s=0.2, sample_s=0.05, least=3, most=50),
    # Enough to rank within 1 to 2 %.
    "timed": MeasureBudget(warm_s=1.0, sample_s=0.4, least=5, most=500),
    # For each candidate of the round. Ten passes, the least: one that won all of them is beyond
    # chance (p 1/1024) though ten such were tried.
    "final": MeasureBudget(warm_s=2.0, sample_s=1.0, least=10, most=1000),
}


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """The work of one launch, which no time may undercut.

    Args:
        operations: floating-point operations of matrix products.
        peak_tflops: of the GPU; None if unknown.

    Examples:
        >>> from flashgen.evaluate.measure import Ceiling
        >>> Ceiling(operations=1e12, peak_tflops=989.0).operations
        1000000000000.0
    """

    operations: float
    peak_tflops: float | None

    def refuse_above(self, timing: Timing) -> None:
        """Raise Implausible if the median implies a rate that the GPU cannot reach."""
        rate = timing.tflops(self.operations)
        if self.peak_tflops is not None and rate > PEAK_MARGIN * self.peak_tflops:
            raise Implausible(
                f"{timing.median_us:.1f} us would be {rate:.0f} TFLOP/s, and the peak is "
                f"{self.peak_tflops:.0f}: the kernel cannot have done the work"
            )


@dataclass(frozen=True, kw_only=True)
class Raced:
    """One candidate of a final round. passes_us: the median of each pass, in their order."""

    timing: Timing
    passes_us: tuple[float, ...]

    @classmethod
    def of_batches(cls, raced: Sequence[Raced]) -> Raced:
        """Several problems of one candidate together; of one its own."""
        if len(raced) == 1:
            return raced[0]
        passes = zip(*(each.passes_us for each in raced), strict=True)
        return cls(
            timing=Timing.of_batches([each.timing for each in raced]),
            passes_us=tuple(round(statistics.geometric_mean(medians), 3) for medians in passes),
        )


def measure(
    run: LaunchOnce, *, effort: Literal["rough", "timed"], stopwatch: Stopwatch, ceiling: Ceiling
) -> Timing:
    """Time one kernel by itself.

    Args:
        run: launches it once, without waiting.
        effort: "rough", or "timed" for what a table may hold.
        stopwatch: what it times with, such as a CudaStopwatch.
        ceiling: the work of a launch and the peak of the GPU.

    Returns:
        The median with its percentiles.

    Raises:
        Implausible: for a time that is impossible at the GPU's peak.
        Unsteady: if times do not settle.

    Examples:
        >>> from flashgen.evaluate.measure import CudaStopwatch, measure
        >>> watch = CudaStopwatch()  # doctest: +SKIP
        >>> measure(run, effort="timed", stopwatch=watch, ceiling=ceiling)  # doctest: +SKIP
    """
    budget = BUDGETS[effort]
    batch = warm_up(run, stopwatch, budget.warm_s)
    samples: list[float] = []
    end = stopwatch.now() + budget.sample_s
    while len(samples) < budget.least or (len(samples) < budget.most and stopwatch.now() < end):
        samples += stopwatch.time(run, min(batch, budget.most - len(samples)))
    timing = summarize(samples, ceiling)
    _refuse_jump(samples)
    return replace(timing, clock_mhz=stopwatch.clock_mhz())


def interleave(
    runs: Sequence[LaunchOnce], *, stopwatch: Stopwatch, ceilings: Sequence[Ceiling]
) -> list[Raced]:
    """Time several kernels in alternation, with equal numbers of samples.

    Raises Implausible and Unsteady.
    """
    if not runs:
        return []
    budget = BUDGETS["final"]
    # Warming all in turn leaves the GPU at the clock of this mix, not of the first kernel.
    batch = min((FINAL_BATCH, *(warm_up(run, stopwatch, budget.warm_s) for run in runs)))
    samples: list[list[float]] = [[] for _ in runs]
    passes: list[list[float]] = [[] for _ in runs]
    end = stopwatch.now() + budget.sample_s * len(runs)
    done, order = 0, list(range(len(runs)))
    while done < budget.least or (done * batch < budget.most and stopwatch.now() < end):
        for number in order:
            taken = stopwatch.time(runs[number], batch)
            samples[number] += taken
            passes[number].append(round(statistics.median(taken), 3))  # nanoseconds
        done += 1
        order.reverse()
    timings = [summarize(each, ceiling) for each, ceiling in zip(samples, ceilings, strict=True)]
    _refuse_jump(_common_trace(passes))
    clock_mhz = stopwatch.clock_mhz()
    return [
        Raced(timing=replace(timing, clock_mhz=clock_mhz), passes_us=tuple(medians))
        for timing, medians in zip(timings, passes, strict=True)
    ]


def _common_trace(passes: Sequence[Sequence[float]]) -> list[float]:
    """The common course of all times: the middle one of each pass, relative to its own median."""
    usual = [statistics.median(medians) for medians in passes]
    return [
        statistics.median(us / own for us, own in zip(times, usual, strict=True))
        for times in zip(*passes, strict=True)
    ]


def _refuse_jump(trace: Sequence[float]) -> None:
    change = jump(trace)
    if change > JUMP:
        raise Unsteady(
            f"times changed {change:.2f}-fold for good in the middle of the measurement: "
            f"the GPU's clock did"
        )


def warm_up(run: LaunchOnce, stopwatch: Stopwatch, limit_s: float) -> int:
    """Launch until times are steady or limit_s is over; returns the number of launches per
    batch.
    """
    stopwatch.time(run, 1)  # compiles
    once_us = stopwatch.time(run, 1)[0]
    batch = max(1, min(LARGEST_BATCH, int(BATCH_US / max(once_us, 1.0))))
    end = stopwatch.now() + limit_s
    medians: list[float] = []
    while not _steady(medians) and stopwatch.now() < end:
        medians.append(statistics.median(stopwatch.time(run, batch)))
    return batch


def keep_busy(runs: Sequence[LaunchOnce], timings: Sequence[Timing]) -> None:
    """Queue launches in turn, LOAD_US of them by their timings, without waiting."""
    queued_us = 0.0
    for run, timing in itertools.cycle(zip(runs, timings, strict=True)):
        if queued_us >= LOAD_US:
            break
        run()
        queued_us += max(timing.median_us, ENQUEUE_US)


def _steady(medians: Sequence[float]) -> bool:
    last = medians[-STEADY_BATCHES:]
    return len(last) == STEADY_BATCHES and max(last) <= (1 + STEADY_WITHIN) * min(last)


def summarize(samples: Sequence[float], ceiling: Ceiling) -> Timing:
    """Median, 20th and 80th percentile of samples in microseconds. Raises Implausible."""
    ordered = sorted(samples)
    median_us = quantile(ordered, 0.5)
    if not 0 < median_us < LONGEST_US:
        raise Implausible(f"a launch was timed at {median_us} us: it cannot have run")
    timing = Timing(
        median_us=median_us,
        low_us=quantile(ordered, 0.2),
        high_us=quantile(ordered, 0.8),
        samples=len(ordered),
    )
    ceiling.refuse_above(timing)
    return timing
