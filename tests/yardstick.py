"""A yardstick for CPU time: what a fixed piece of Python takes in this process, now.

The CPU seconds of one and the same work differ by a factor of two between machines, and on one machine
with what runs beside it. So limits are multiples of this, and are asked of the same process.
"""

from __future__ import annotations

import time


def yardstick() -> float:
    """The least CPU seconds of five times 200,000 steps of dictionary and string work."""
    found = []
    for _ in range(5):
        start = time.process_time()
        held: dict[str, int] = {}
        for number in range(200_000):
            key = f"{number % 997}"
            held[key] = held.get(key, 0) + number
        found.append(time.process_time() - start)
    return min(found)
