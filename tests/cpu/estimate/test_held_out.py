"""Landscapes that nothing of the model was chosen with, nor looked at before it stood: products on
an A100, and attention on an RTX 3090, forward and backward (benchmarks/landscapes names the
sources). `python -m tests.cpu.estimate.test_held_out` prints the scores.
"""

from __future__ import annotations

import csv
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashgen.compile.sass import disassemble
from flashgen.estimate.estimate import rolled_up, time_of
from flashgen.estimate.replay import Replay, replay_cubin
from flashgen.search.decide import spearman
from flashgen.spec.gpu import TARGETS, Gpu
from tests import cubins

FOLDER = Path(__file__).parents[3] / "benchmarks" / "landscapes"
A100, RTX_3090 = TARGETS["nvidia_a100_sxm4_80gb"], TARGETS["nvidia_geforce_rtx_3090"]
Config = tuple[int, ...]
Times = dict[Config, float]

GROUPS = {
    # Mean rank correlation, and mean first pick over the best: 0.95 and 1.00, 0.77 and 1.06, 0.76
    # and 1.01, 0.82 and 1.00, 0.91 and 1.03 were seen.
    "products": (0.94, 1.01),
    "forward none": (0.75, 1.07),
    "forward causal": (0.73, 1.02),
    "forward grouped": (0.80, 1.01),
    "backward causal": (0.88, 1.04),
}
HEADS = {"forward grouped": (2, 32, 8, 128)}
"""Batch, query heads, key heads and head dim, where they are not 4, 12, 12, 64."""


def rows(name: str) -> Iterator[dict[str, str]]:
    lines = (FOLDER / name).read_text().splitlines()
    yield from csv.DictReader(line for line in lines if not line.startswith("#"))


class Replays:
    """Compiles and replays each kernel once."""

    def __init__(self) -> None:
        self._known: dict[object, Replay] = {}

    def of(self, key: object, gpu: Gpu, make: Callable[[], cubins.Cubin]) -> Replay:
        if key not in self._known:
            cubin = make()
            self._known[key] = replay_cubin(
                cubin.code, gpu, num_warps=cubin.num_warps, shared_bytes=cubin.shared_bytes
            )
        return self._known[key]


def products(replays: Replays) -> Iterator[tuple[Times, Times]]:
    """The measured and the estimated microseconds of each landscape on the A100."""
    for row in rows("a100_gemm.csv"):
        m, k, n = (int(row[name]) for name in "mkn")
        times, estimates = {}, {}
        for name, text in row.items():
            if " " not in name:
                continue
            config = tuple(map(int, name.translate(str.maketrans("xsw", "   ")).split()))
            of = functools.partial(cubins.product, "sm_80", config, by_columns=False, whole=True)
            tile, columns, depth = config[:3]
            once = rolled_up(replays.of(config, A100, of), [2 * tile * columns * depth])
            blocks = [(k // depth,)] * (math.ceil(m / tile) * math.ceil(n / columns))
            moved = 2 * (m * k + k * n + m * n)
            times[config] = float(text)
            estimates[config] = time_of(once, blocks, A100, least_bytes=moved).median_us
        yield times, estimates


def attention(kind: str, replays: Replays) -> Iterator[tuple[Times, Times]]:
    """The same on the RTX 3090. A backward's forward part is alike for all configs and left out."""
    found: dict[int, Times] = defaultdict(dict)
    for row in rows("rtx3090_attention.csv"):
        if row["kernel"] == kind:
            config = tuple(int(row[name]) for name in ("br", "bc", "warps", "stages"))
            found[int(row["length"])][config] = float(row["us"])
    us = backward_us if kind.startswith("backward") else forward_us
    for length, times in found.items():
        yield times, {config: us(kind, length, config, replays) for config in times}


def forward_us(kind: str, length: int, config: Config, replays: Replays) -> float:
    batch, heads, kv_heads, dim = HEADS.get(kind, (4, 12, 12, 64))
    causal = kind != "forward none"
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim}
    variant = {"bounds": 1, "natural": 1, "by_rows": 1, "causal": int(causal)}
    of = functools.partial(cubins.published, "sm_86", config, shape=shape, **variant)
    replayed = replays.of((config, dim, causal), RTX_3090, of)
    br, bc = config[:2]
    trips = [
        (math.ceil((min(row + br, length) if causal else length) / bc),)
        for row in range(0, length, br)
    ]
    moved = 4 * batch * length * dim * (heads + kv_heads)
    blocks = trips * (batch * heads)
    return time_of(replayed, blocks, RTX_3090, least_bytes=moved).median_us


def backward_us(kind: str, length: int, config: Config, replays: Replays) -> float:
    br, bc = config[:2]
    by_keys = [(math.ceil((length - start // br * br) / br),) for start in range(0, length, bc)]
    by_rows = [(math.ceil(min(start + br, length) / bc),) for start in range(0, length, br)]
    total = 0.0
    for name, trips, tensors in (("key_gradients", by_keys, 6), ("query_gradients", by_rows, 5)):
        of = functools.partial(cubins.backward, "sm_86", config, name)
        replayed = replays.of((name, config), RTX_3090, of)
        moved = 2 * tensors * 48 * length * 64
        total += time_of(replayed, trips * 48, RTX_3090, least_bytes=moved).median_us
    return total


def scores(kind: str, replays: Replays) -> tuple[float, float]:
    """The mean rank correlation, and the geometric mean of first pick over best."""
    found = list(products(replays) if kind == "products" else attention(kind, replays))
    ranks = [spearman(list(true.values()), list(made.values())) for true, made in found]
    firsts = [
        true[min(made, key=lambda c, made=made: made[c])] / min(true.values())  # type: ignore[misc]
        for true, made in found
    ]
    return sum(ranks) / len(found), math.exp(sum(map(math.log, firsts)) / len(found))


@pytest.fixture(scope="module")
def replays() -> Iterator[Replays]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flashgen.estimate.replay.disassemble", functools.cache(disassemble))
        yield Replays()


@pytest.mark.slow("it compiles 75 kernels")
@pytest.mark.parametrize("kind", GROUPS)
def test_what_was_held_out_is_ranked(kind: str, replays: Replays) -> None:
    correlation, first = scores(kind, replays)
    least, slowest = GROUPS[kind]
    assert correlation >= least
    assert first <= slowest


if __name__ == "__main__":
    held = Replays()
    for each in GROUPS:
        ranked, pick = scores(each, held)
        print(f"{each}: rank correlation {ranked:.2f}, first pick {pick:.3f}")
