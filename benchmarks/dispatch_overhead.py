"""What a call costs in Python before a kernel starts, beside torch SDPA. Needs no GPU.

    python benchmarks/dispatch_overhead.py [--json FILE]

Rows, each the time of one call on CPU tensors of shape (1, 1, 16, 64), the median and the least
over many batches:

    lookup         Dispatcher.lookup: from the tensors of a resolved spec to its launcher
    attention      attention() with the launcher replaced by one that returns at once: argument
                   checks, specification, strides, lookup
    bound launch   all that the launcher adds but Triton's own launch: O and LSE allocated,
                   arguments laid out, and a kernel that does nothing
    torch SDPA     scaled_dot_product_attention as it is, its CPU kernel's arithmetic included

attention + bound launch is what flashgen adds to Triton's launch. Triton's launch itself, and what
CUDA's allocator and driver add, are not in these figures: they need a GPU. The tensors are so small
that SDPA's arithmetic is a small part of its row.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# CPU tensors then take the way of GPU tensors. Triton reads its variable when it is imported.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["FLASHGEN_GPU"] = "nvidia_h200"

import torch
from torch.nn.functional import scaled_dot_product_attention

import flashgen
from flashgen import launch
from flashgen.asked import from_tensors
from flashgen.config import default_config
from flashgen.runtime import Dispatcher
from flashgen.runtime.launcher import Launcher
from generated.defaults import DEFAULTS
from generated.table import ARCHS, CHOICES

SHAPE = (1, 1, 16, 64)
BATCH = 2000
BATCHES = 25
BATCHES_OF_SLOW = 9


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Microseconds of one call: the median and the least of the means of all batches."""

    name: str
    median_us: float
    least_us: float


def cost(name: str, call: Callable[[], object], *, batches: int = BATCHES_OF_SLOW) -> Cost:
    """Time `call` in batches, after one that warms caches and the interpreter."""
    means = []
    for _ in range(batches + 1):
        began = time.perf_counter()
        for _ in range(BATCH):
            call()
        means.append((time.perf_counter() - began) / BATCH * 1e6)
    means = means[1:]
    return Cost(name=name, median_us=statistics.median(means), least_us=min(means))


class NoKernel:
    """Stands for a kernel where its launch is not to be timed: kernel[grid](...) does nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    @staticmethod
    def _launch(*_: object, **__: object) -> None:
        return None


def costs() -> list[Cost]:
    """All rows."""
    torch.set_num_threads(1)
    q, k, v = (torch.randn(SHAPE, dtype=torch.bfloat16) for _ in range(3))
    dispatcher = Dispatcher(package="generated", archs=ARCHS, choices=CHOICES, defaults=DEFAULTS)
    # Resolves the spec, and runs its kernel in the interpreter.
    result = dispatcher.attention(q, k, v, causal=True, return_lse=True)
    if dispatcher.lookup(q, v, True, "ieee") is None:
        raise SystemExit("the spec was not resolved, so that there is no look-up to measure")
    rows = [cost("lookup", lambda: dispatcher.lookup(q, v, True, "ieee"), batches=BATCHES)]
    # A function and no mock: mocks record their calls, which costs more than what is timed.
    with mock.patch.object(Launcher, "__call__", _returns(result)):
        rows.append(cost("attention", lambda: dispatcher.attention(q, k, v, causal=True)))
    spec, _ = from_tensors(q, k, v, causal=True)
    bound = launch.bind(NoKernel(), spec, default_config(spec))
    rows.append(cost("bound launch", lambda: bound(q, k, v, 0.125, 0)))
    rows.append(cost("torch SDPA", lambda: sdpa(q, k, v)))
    return rows


def _returns(result: object) -> Callable[..., object]:
    return lambda *_: result


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The call people write."""
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    with torch.no_grad():
        rows = costs()
    print(f"{'':14}{'median us':>11}{'least us':>11}")
    for row in rows:
        print(f"{row.name:14}{row.median_us:11.2f}{row.least_us:11.2f}")
    if options.json:
        record: dict[str, Any] = {
            "shape": SHAPE, "dtype": "bfloat16", "flashgen": flashgen.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(), "rows": [asdict(row) for row in rows],
        }  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
