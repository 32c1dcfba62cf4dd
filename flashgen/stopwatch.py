"""Stopwatch: what times launches on a device and tells its clock; and when a row of times jumps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

Run = Callable[[], object]
"""Launches a kernel once, without waiting for it."""

ASIDE = 0.2
"""The share of the samples that may lie above, or below, all others at any clock: outliers."""

LEAST_SIDE = 3
"""Fewer samples in a row are no clock that has changed: another program may have come between."""

PLACES = 20
"""Where a jump is looked for, at most; a side that has a few samples of the other is told all the
same, within ASIDE."""


class Stopwatch(Protocol):
    """What times launches: CudaStopwatch, or one made up for a test."""

    def time(self, run: Run, count: int) -> list[float]:
        """Microseconds of each of `count` launches, every one with a cold L2."""

    def now(self) -> float:
        """Seconds of a clock that never goes back."""

    def clock_mhz(self) -> float | None:
        """What the device clocks at, whatever it ran just before; None if it does not tell."""


def jump(times: Sequence[float]) -> float:
    """How many times longer, or shorter, times are after one place than before it: at most.

    The outermost fifth of either side does not count, so that neither noise nor a slow drift is a
    jump, and each side is a fifth of all, at least. 1.0 where there are too few times.
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
    """Linear between the two samples around the place; of a sorted, not empty sequence."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


class CudaStopwatch:
    """Times launches on a CUDA or ROCm device by its events, on the current stream."""

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
        self._flush = torch.empty(2 * max(l2_bytes, 1 << 20), dtype=torch.int8, device=self._device)
        self._enqueue_s = 0.001  # of one launch, as last seen; the first one's is a guess
        self._highest_mhz = 0.0

    def time(self, run: Run, count: int) -> list[float]:
        """As Stopwatch says. Raises what a failed launch makes torch raise."""
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
                self._flush.zero_()
                start.record()
                run()
                end.record()
            self._enqueue_s = (time.perf_counter() - began) / count
            cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in pairs]

    def now(self) -> float:
        """As Stopwatch says."""
        return time.perf_counter()

    def clock_mhz(self) -> float | None:
        """As Stopwatch says: by a kernel that does nothing but count so many cycles of its SM.

        A kernel that draws much power holds the clock down while it runs and a little longer; that
        is its own, and no fault. So the highest clock counts that is seen until it is near the
        usual one, or CLOCK_LIMIT_S is over, as the first time. (Where a device counts another clock
        than that of its SMs, no change is ever seen.)
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
