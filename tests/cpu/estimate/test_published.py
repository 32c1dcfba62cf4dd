"""The estimator held against landscapes and tile choices that others measured and published.

tests/data/published_timings.yaml has them with their sources. The two landscapes are of an A100 and
of one published kernel; tests/data/single_phase.py, written for this, stands in for it.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from flashgen.compile.sass import Listing, disassemble
from flashgen.errors import NoEstimate
from flashgen.estimate import estimate, machines
from flashgen.estimate.estimate import estimate_cubin
from flashgen.estimate.machines import MACHINES, ArchModel
from flashgen.estimate.replay import Replay, replay_cubin
from flashgen.schedules.legality import why_illegal
from flashgen.search.decide import spearman
from flashgen.spec.gpu import TARGETS, Gpu
from flashgen.spec.problem import Problem, flops, workload
from tests import cubins
from tests.makers import make_config, make_spec

PUBLISHED = yaml.safe_load(
    (Path(__file__).parents[2] / "data" / "published_timings.yaml").read_text()
)
LANDSCAPES: list[dict[str, Any]] = PUBLISHED["landscapes"]
A100 = TARGETS["nvidia_a100_sxm4_40gb"]
Tile = tuple[int, int, int, int]

LEAST_CORRELATION, TOP = 0.80, 0.20
DRAWS, OFF = 20, 0.3


THIRDS = [{**landscape, "rows_ms": landscape["rows_ms"][1::3]} for landscape in LANDSCAPES]
"""Every third config, the best one of each landscape among them."""
SHARED = pytest.mark.slow("make test has every third config, by the machine as it is")
OTHER = pytest.mark.slow("make test has the other landscape")
BOTH_SIZES = [
    *(
        pytest.param(third, id=f"a third of {third['id']}", marks=OTHER if place else ())
        for place, third in enumerate(THIRDS)
    ),
    *(pytest.param(landscape, id=landscape["id"], marks=SHARED) for landscape in LANDSCAPES),
]


class Kernels(dict[Tile, cubins.Cubin]):
    """The stand-in, compiled once for each config that is needed; both landscapes have the same."""

    def __missing__(self, tile: Tile) -> cubins.Cubin:
        self[tile] = cubins.single_phase(*tile)
        return self[tile]


@pytest.fixture(scope="module")
def kernels() -> dict[Tile, cubins.Cubin]:
    return Kernels()


@pytest.fixture(scope="module")
def replayed() -> Callable[..., Replay]:
    return functools.cache(replay_cubin)


@pytest.fixture(scope="module")
def listing() -> Callable[[bytes], Listing]:
    return functools.cache(disassemble)


@pytest.fixture
def quick(listing: Callable[[bytes], Listing], monkeypatch: pytest.MonkeyPatch) -> None:
    """estimate_cubin, but that no kernel is disassembled a second time."""
    monkeypatch.setattr("flashgen.estimate.replay.disassemble", listing)


@pytest.fixture
def known(replayed: Callable[..., Replay], monkeypatch: pytest.MonkeyPatch) -> None:
    """estimate_cubin, but that no kernel is replayed a second time."""
    monkeypatch.setattr(estimate, "replay_cubin", replayed)


def tiles_of(landscape: dict[str, Any]) -> list[Tile]:
    return [tuple(row[:4]) for row in landscape["rows_ms"]]


def measured(landscape: dict[str, Any]) -> list[float]:
    return [1e3 * row[4] for row in landscape["rows_ms"]]


def trips_of(landscape: dict[str, Any], br: int, bc: int) -> list[tuple[int]]:
    """One trip a tile of keys up to the diagonal, for all tiles of rows of all heads."""
    rows = range(math.ceil(landscape["N"] / br))
    return [(math.ceil((row + 1) * br / bc),) for row in rows] * landscape["B"] * landscape["H"]


def estimated(landscape: dict[str, Any], kernels: dict[Tile, cubins.Cubin]) -> list[float]:
    """Microseconds of every config of a landscape."""
    found = []
    for tile in tiles_of(landscape):
        cubin = kernels[tile]
        blocks = trips_of(landscape, *tile[:2])
        timing = estimate_cubin(cubin.code, **cubin.geometry(), blocks=blocks, target=A100)
        found.append(timing.median_us)
    return found


def faults(landscape: dict[str, Any], times: list[float]) -> list[str]:
    """The bars that estimates of a landscape miss."""
    truth = measured(landscape)
    found = []
    correlation = spearman(truth, times)
    if correlation < LEAST_CORRELATION:
        found.append(f"{landscape['id']}: Spearman {correlation:.2f}")
    best = times[truth.index(min(truth))]
    place = sum(time < best for time in times) + 1
    if place > TOP * len(times):
        found.append(f"{landscape['id']}: the measured best is predicted {place}th")
    return found


@pytest.mark.usefixtures("quick", "known")
@pytest.mark.parametrize("landscape", BOTH_SIZES)
class TestLandscapes:
    def test_the_order_is_right(
        self, landscape: dict[str, Any], kernels: dict[Tile, cubins.Cubin]
    ) -> None:
        times = estimated(landscape, kernels)
        assert faults(landscape, times) == []
        # What the first pick costs is no bar of its own: 1.05 and 1.09 were seen.
        truth = measured(landscape)
        assert truth[times.index(min(times))] < 1.15 * min(truth)

    def test_shuffled_estimates_fail(
        self, landscape: dict[str, Any], kernels: dict[Tile, cubins.Cubin]
    ) -> None:
        times = estimated(landscape, kernels)
        for seed in range(20):
            random.Random(seed).shuffle(times)
            assert faults(landscape, times) != []


UNCERTAIN = tuple(
    field.name
    for field in fields(ArchModel)
    if field.name.endswith(("_late", "_bytes")) and field.name not in ("l1_bytes", "memory_late")
)


def drawn(known: ArchModel, seed: int) -> ArchModel:
    """The machine with every latency and bandwidth up to 30 % off, each on its own."""
    off = random.Random(seed)
    return replace(
        known,
        **{name: getattr(known, name) * off.uniform(1 - OFF, 1 + OFF) for name in UNCERTAIN},
    )


def test_all_latencies_and_bandwidths_are_drawn() -> None:
    assert {"load_late", "copy_late", "exp2_late", "l2_bytes", "shared_bytes"} <= set(UNCERTAIN)
    assert len(UNCERTAIN) == 17


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("seed", "landscapes"),
    [pytest.param(seed, LANDSCAPES, id=str(seed), marks=SHARED) for seed in range(DRAWS)],
)
def test_ranks_do_not_hang_on_latencies_and_bandwidths(
    seed: int,
    landscapes: list[dict[str, Any]],
    kernels: dict[Tile, cubins.Cubin],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(machines.MACHINES, "sm_80", drawn(MACHINES["sm_80"], seed))
    # A kernel's replay is the same for both landscapes; without this it would be made twice.
    monkeypatch.setattr(estimate, "replay_cubin", functools.cache(replay_cubin))
    found = [fault for each in landscapes for fault in faults(each, estimated(each, kernels))]
    assert found == []


def test_draws_change_the_estimates(
    kernels: dict[Tile, cubins.Cubin], quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cubin = kernels[64, 64, 4, 3]
    arguments = cubin.geometry() | {"blocks": [(16,)] * 500, "target": A100}
    plain = estimate_cubin(cubin.code, **arguments)
    monkeypatch.setitem(machines.MACHINES, "sm_80", drawn(MACHINES["sm_80"], 0))
    assert estimate_cubin(cubin.code, **arguments) != plain


LIBRARIES = PUBLISHED["tile_choices"]
WITHIN = 1.35
MISSES = {
    # Library, head dim, arch, mask. The bar is not met here: with Triton 3.7.1, 1.43 is seen, and a
    # hair above that is allowed, so that nothing gets worse unseen: FlashAttention-2's kernels keep
    # in registers what ours spill at this tile.
    ("flash_attention_2", 128, "sm_90", "causal"): 1.45,
}
"""FlashAttention-3's other tiles are no powers of two, and Triton cannot make them."""


def grid() -> Iterator[Tile]:
    return product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4))


@functools.cache
def own_kernels(head_dim: int, mask: str, gpu: Gpu, cache: Path) -> dict[Tile, float]:
    """Microseconds of flashgen's own fa2 kernels by pointer, at sequence length 2048."""
    spec = make_spec("float16", head_dim, mask)
    problem = workload(spec, 2048)
    found = {}
    for tile in grid():
        config = make_config(*tile[:2], num_warps=tile[2], num_stages=tile[3])
        if why_illegal(spec, config, gpu):
            continue
        cubin, _ = cubins.own(spec, config, gpu.arch, cache)
        replayed = replay_cubin(
            cubin.code, gpu, num_warps=cubin.num_warps, shared_bytes=cubin.shared_bytes
        )
        timing = estimate.estimate(replayed, spec, config, problem, gpu)
        found[tile] = timing.median_us
        assert flops(spec, problem) / timing.low_us * 1e-6 <= (gpu.peak_tflops or 0) * (1 + 1e-9)
    return found


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow("make test proves a sample of it")
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("slug", ["nvidia_a100_sxm4_40gb", "nvidia_h100_80gb_hbm3"])
def test_the_tiles_that_libraries_chose_are_near_the_predicted_best(
    slug: str, head_dim: int, mask: str, cache: Path
) -> None:
    gpu = TARGETS[slug]
    times = own_kernels(head_dim, mask, gpu, cache)
    third = ("flash_attention_3_causal",)
    same_tile = (gpu.arch, head_dim, mask) == ("sm_90", 128, "causal")
    for library in ("pytorch_flex", "flash_attention_2", *(third if same_tile else ())):
        *tile, stages = LIBRARIES[library][gpu.arch][head_dim]
        legal = [times[t] for t in times if list(t[:3]) == tile and stages in (None, t[3])]
        within = MISSES.get((library, head_dim, gpu.arch, mask), WITHIN)
        assert min(legal) <= within * min(times.values()), (
            library,
            min(legal),
            min(times.values()),
        )


@pytest.mark.slow("make test proves a sample of it")
@pytest.mark.parametrize("landscape", LANDSCAPES, ids=lambda landscape: landscape["id"])
def test_our_own_kernels_do_not_stand_in_for_the_published_one(
    landscape: dict[str, Any], cache: Path
) -> None:
    """docs/estimates.md says so: 0.60 and 0.62, and a first pick that is 1.4 times as slow.

    They have half the instructions a score; what was best for that kernel is not best for them.
    """
    spec = make_spec("float16", landscape["d"], "causal")
    length = landscape["N"]
    problem = Problem(
        batch=landscape["B"], heads=landscape["H"], kv_heads=landscape["H"],
        seq_q=length, seq_k=length,
    )  # fmt: skip
    times = []
    for br, bc, warps, stages in tiles_of(landscape):
        config = make_config(br, bc, num_warps=warps, num_stages=stages)
        cubin, _ = cubins.own(spec, config, A100.arch, cache)
        replayed = replay_cubin(cubin.code, A100, num_warps=warps, shared_bytes=cubin.shared_bytes)
        times.append(estimate.estimate(replayed, spec, config, problem, A100).median_us)
    assert 0.4 < spearman(measured(landscape), times) < 0.7


def test_a_figure_above_the_peak_is_how_the_trap_was_found() -> None:
    """The largest published set implies 13,000 TFLOP/s; no landscape kept here is above a peak."""
    (trap,) = PUBLISHED["traps"]
    assert A100.peak_tflops is not None
    assert trap["implied_tflops"] > 40 * A100.peak_tflops
    for landscape in LANDSCAPES:
        length = landscape["N"]
        operations = 2 * landscape["B"] * landscape["H"] * length * length * landscape["d"]
        assert operations / min(measured(landscape)) * 1e-6 < A100.peak_tflops


def test_every_figure_names_a_source() -> None:
    assert {each["source"] for each in LANDSCAPES} <= set(PUBLISHED["sources"])
    assert {each["source"] for each in PUBLISHED["small_tables"]} <= set(PUBLISHED["sources"])
    assert all(len(each["rows_ms"]) == 36 for each in LANDSCAPES)
    assert len({tuple(tile) for tile in map(tuple, tiles_of(LANDSCAPES[0]))}) == 36
    assert tiles_of(LANDSCAPES[0]) == tiles_of(LANDSCAPES[1])


def test_no_estimate_is_a_number_the_tests_could_miss(
    kernels: dict[Tile, cubins.Cubin], monkeypatch: pytest.MonkeyPatch
) -> None:
    cubin = kernels[64, 64, 4, 3]
    monkeypatch.delitem(machines.MACHINES, "sm_80")
    with pytest.raises(NoEstimate, match="does not know sm_80"):
        estimate_cubin(cubin.code, **cubin.geometry(), blocks=[(1,)], target=A100)
