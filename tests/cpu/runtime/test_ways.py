"""Which way computes dQ, dK and dV of a call: by the times of a table, and by the runs of dS."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen import settings
from flashgen.errors import InvalidArgument
from flashgen.inputs.features import Features
from flashgen.kernels import ds_runs
from flashgen.kernels.ds_runs import DsSizes
from flashgen.kernels.stream_memory import workspace
from flashgen.runtime.call import Call, Saved, WantedGradients
from flashgen.runtime.choice import by_spec
from flashgen.runtime.selection import Selection, Served, ladder
from flashgen.runtime.ways import WAYS, Ways, ways_of
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import BUCKETS
from tests import launches
from tests.makers import make_config, make_spec
from tests.package import make_choice

H100, H200 = "nvidia_h100_80gb_hbm3", "nvidia_h200"
SPEC = make_spec("bfloat16", 128)
MB = 1 << 20
DS = "[1, 2, 256, 256]"
"""The shape of dS, in a descriptor."""
US: dict[str, tuple[float | None, ...]] = {
    "pair": (10.0, 10.0),
    "ds": (10.0, 4.0),
    "fused": (13.0,),
}


def sizes(
    seq: int, heads: int = 32, group: int = 1, *, causal: bool = False, **other: Any
) -> DsSizes:
    given = {"sequences": 1, "diagonal": 0 if causal else None} | other
    return DsSizes(
        heads=heads, kv_heads=heads // group, seq_q=seq, seq_k=seq, head_dim=128, element_bytes=2,
        **given,
    )  # fmt: skip


def windowed(seq: int, **other: Any) -> DsSizes:
    return sizes(seq, causal=True, **({"reach": 1024} | other))


PLAIN = make_config(64, 128, num_warps=8)
ROLES = make_config(128, 128, num_warps=8, num_stages=2, schedule="blackwell", loads="descriptor")


def ways(
    us: dict[str, tuple[float | None, ...]] = US,
    spec: Any = SPEC,
    config: Any = PLAIN,
    gpu: str = H200,
    **other: Any,
) -> Ways:
    """The ways of kernels with such times; `other` is what dQ of dS has otherwise."""
    held = []
    for way, times in us.items():
        for direction, time in zip(WAYS[way], times, strict=True):
            its = PLAIN if direction == "backward_dq_of_ds" else config
            choice = make_choice(spec.for_direction(direction), its, BUCKETS[2])
            held.append(replace(choice, median_us=time))
    choices = by_spec(held)
    target = TARGETS[gpu]
    served = Served(archs={gpu: target.arch}, choices={gpu: choices})

    def ladder_of(each: Any) -> Any:
        found = ladder(served, gpu, target, each, 5000)
        if each.direction != "backward_dq_of_ds" or not other:
            return found
        first: Selection = found.rungs[0]
        slug = other.get("slug", first.slug)
        fields = {name: value for name, value in other.items() if name != "slug"}
        changed = replace(first, slug=slug, choice=replace(first.choice, **fields))
        return replace(found, rungs=(changed,))

    return ways_of(spec, target, choices.__contains__, ladder_of)


@pytest.mark.parametrize(
    ("us", "deterministic", "expected"),
    [
        (US, True, "ds"),
        (US, False, "fused"),
        (US | {"fused": (15.0,)}, False, "ds"),
        (US | {"ds": (16.5, 4.0)}, True, "pair"),
        (US | {"ds": (None, 4.0)}, True, "pair"),
        ({"pair": US["pair"], "fused": (20.0,)}, False, "pair"),
        ({"pair": (None, 10.0), "fused": (1.0,), "ds": (1.0, 1.0)}, False, "pair"),
    ],
)
def test_the_fastest_way_that_is_admitted_serves(
    us: dict[str, tuple[float | None, ...]], deterministic: bool, expected: str
) -> None:
    found = ways(us)
    if len(found.times) < 2:  # the resolver asks no further
        assert expected == "pair"
        return
    assert found.chosen(sizes(4096), 256 * MB, deterministic=deterministic).way == expected


@pytest.mark.parametrize(
    "other",
    [{"slug": H100}, {"bucket": BUCKETS[1]}, {"source": "measured"}],
    ids=["GPU", "bucket", "source"],
)
def test_times_of_two_origins_do_not_compare(other: dict[str, Any]) -> None:
    assert ways(**other).times.keys() == {"pair", "fused"}


@pytest.mark.parametrize(
    ("longer", "times"),
    [
        ({"ds": (None, 9.0)}, {"pair": (10.0, 10.0), "ds": (10.0, 4.0), "fused": (13.0,)}),
        ({"pair": (30.0, 50.0)}, {"pair": (30.0, 50.0), "ds": (40.0, 16.0), "fused": (52.0,)}),
        ({"pair": (30.0, None)}, {"pair": (10.0, 10.0), "ds": (10.0, 4.0), "fused": (13.0,)}),
    ],
)
def test_ways_compare_in_the_nearest_bucket_that_has_them_all(
    longer: dict[str, tuple[float | None, ...]], times: dict[str, tuple[float, ...]]
) -> None:
    """Of a call of the bucket `longer`, where the table has not all kernels."""
    held = [
        replace(make_choice(SPEC.for_direction(direction), PLAIN, bucket), median_us=time)
        for bucket, us in ((BUCKETS[2], US), (BUCKETS[3], longer))
        for way, of_way in us.items()
        for direction, time in zip(WAYS[way], of_way, strict=True)
        if time is not None
    ]
    choices = by_spec(held)
    served = Served(archs={H200: "sm_90"}, choices={H200: choices})
    found = ways_of(
        SPEC, TARGETS[H200], choices.__contains__,
        lambda each: ladder(served, H200, TARGETS[H200], each, BUCKETS[3].low),
    )  # fmt: skip
    assert found.times == times


UNTIMED: dict[str, tuple[float | None, ...]] = {"pair": (None, None), "ds": (None, None)}


@pytest.mark.parametrize(
    ("dim", "mask", "config", "megabytes", "way"),
    [
        (128, "none", ROLES, 1024, "ds"),
        (128, "none", ROLES, 256, "pair"),  # bounds of 1.00
        (64, "none", ROLES, 1024, "pair"),  # as many bytes, for half of the products
        (128, "none", PLAIN, 1024, "pair"),
    ],
)
def test_where_a_table_has_no_times_products_and_bytes_choose(
    dim: int, mask: Any, config: Any, megabytes: int, way: str
) -> None:
    found = ways(UNTIMED, make_spec("bfloat16", dim, mask), config=config, gpu="nvidia_b200")
    of = replace(sizes(4096, 64), head_dim=dim)
    said = found.described(of, megabytes * MB, deterministic=True)
    if config is PLAIN:  # whose times are far from them
        assert said == "gradients by pair: the table has no other way whose times compare"
        return
    assert found.chosen(of, megabytes * MB, deterministic=True).way == way
    assert said.startswith(f"gradients by {way} by products and bytes: pair")


def test_invariant_calls_and_block_masks_have_no_ds() -> None:
    assert ways({"pair": US["pair"]}, spec=replace(SPEC, invariant=True)).times.keys() <= {"pair"}
    blocks = {way: US[way] for way in ("pair", "fused")}
    assert ways(blocks, spec=replace(SPEC, block_mask=True)).times.keys() == {"pair", "fused"}


@pytest.mark.parametrize(
    ("of", "megabytes", "way", "runs"),
    [
        (sizes(4096), 0, "pair", 0),
        (sizes(4096), 256, "ds", 4),  # of 8 heads of 32 blocks each, for 132 SMs
        (sizes(8192), 256, "ds", 16),
        (sizes(8192), 255, "pair", 0),  # one head fills half of the GPU
        (sizes(8192, group=4), 256, "pair", 0),
        (sizes(8192, group=4), 1024, "ds", 4),
        (sizes(8192, causal=True), 256, "pair", 0),  # a run lasts as long as its longest block
        (sizes(8192, causal=True), 512, "ds", 8),
        (sizes(2048, 128, causal=True), 256, "ds", 4),
        (sizes(16384, 8), 256, "pair", 0),  # a range of 64 blocks of a head
        (sizes(0), 256, "pair", 0),
        (windowed(8192), 256, "ds", 3),  # 12 heads of 21 MB
        (windowed(65536, heads=8), 256, "ds", 8),
        (windowed(65536, group=8), 256, "pair", 0),  # the sum of a range alone is 268 MB
        (windowed(65536, group=8), 512, "ds", 24),  # ranges of 102 blocks
        (windowed(8192, reach=None), 256, "pair", 0),  # to the right alone: as causal
        # Packed: of one length; one that is long among short ones; of a window.
        (sizes(1024, sequences=32), 256, "ds", 9),  # of 115 heads
        (sizes(1024, sequences=32, mean=0.9), 256, "ds", 8),
        (sizes(1024, sequences=32, mean=0.2), 256, "pair", 0),
        (sizes(1024, sequences=4, mean=0.2), 256, "ds", 1),
        (windowed(8192, sequences=4, mean=0.6), 256, "ds", 11),
        (windowed(8192, sequences=4, mean=0.1), 256, "pair", 0),
    ],
)
def test_ds_serves_where_its_runs_fill_the_gpu(
    of: DsSizes, megabytes: int, way: str, runs: int
) -> None:
    found = ways().chosen(of, megabytes * MB, deterministic=True)
    assert (found.way, len(found.plan.runs) if found.plan else 0) == (way, runs)
    if found.plan is not None:
        assert max(map(of.run_bytes, found.plan.runs)) <= megabytes * MB
        whole = [run.heads for run in found.plan.runs if not run.keys_follow]
        assert sum(whole) == of.whole.heads


@pytest.mark.parametrize("keys", [900, 256])
@pytest.mark.parametrize(
    ("rows", "features"),
    [
        (900, {"window": (5, -1)}),
        (899, {"window": (2, -1)}),  # 130 rows from the last of a tile on
        (700, {"window": (130, 7)}),
        (700, {"window": (0, 0)}),
        (900, {"window": (-1, 40)}),
        (900, {"chunk": 100, "chunk_start": torch.tensor([-37])}),
        (650, {"chunk": 1}),
    ],
    ids=str,
)
def test_no_two_scores_share_memory(rows: int, features: dict[str, Any], keys: int) -> None:
    """Of the tiles in which a row sees a key, of keys to the end of the last tile."""
    of_call, causal = Features(**features), features != {"window": (-1, 40)}
    q, k = torch.empty(1, 4, rows, 16), torch.empty(1, 2, 900, 16)
    of = DsSizes.of(q, k, 900 - rows if causal else None, of_call)
    row, key = torch.arange(1024)[:, None] + 900 - rows, torch.arange(1024)
    left, right = of_call.bounds(rows, 900)
    seen = (key <= row + (0 if causal else right)) & (key >= row - left) & (row < 900)
    if of_call.chunk:
        start = 0 if of_call.chunk_start is None else int(of_call.chunk_start)
        seen &= (row - start) // of_call.chunk == (key - start) // of_call.chunk
    tiles = seen.view(8, 128, 8, 128).any(3).any(1)
    whole = tiles.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :keys]
    run = ds_runs.DsRun(first_head=0, heads=2, keys=keys)
    _, of_head, of_key, of_row = of.ds_strides(run)
    heads = torch.arange(2)[:, None, None] * of_head
    places = (heads + torch.arange(1024)[:, None] * of_row + torch.arange(keys) * of_key)[:, whole]
    assert places.unique().numel() == places.numel()
    assert int(places.max()) < of.ds_bytes(run) // of.element_bytes


def test_runs_leave_few_sms_idle() -> None:
    """Three heads of 64 blocks would take two waves, as four do; two take one."""
    found = ways().plan(sizes(8192), 384 * MB)
    assert found is not None
    assert {run.heads for run in found.runs} == {2}


def test_runs_of_many_short_sequences_are_found_at_once() -> None:
    """Each number of heads up to 8,192 would take seconds to compare, in a training step."""
    ds_runs._of_run.cache_clear()
    of = replace(sizes(128), sequences=4096)
    found = ways().plan(of, 256 * MB)
    assert found is not None
    assert max(run.heads for run in found.runs) > 8192 - ds_runs.TRIED
    assert sum(run.heads for run in found.runs) == 4096 * 32
    assert ds_runs._of_run.cache_info().misses <= 2 * ds_runs.TRIED + 3


def test_more_runs_than_pay_are_not_planned() -> None:
    """As of packed sequences, whose lengths are others at each step."""
    long = replace(sizes(32768, group=4), sequences=20, mean=0.4)
    assert ways().plan(long, 256 * MB) is None
    assert len(ds_runs.runs_of(long, 2048 * MB)) <= ds_runs.MOST_RUNS
    assert ways().chosen(long, 256 * MB, deterministic=True).way == "pair"
    few = sizes(131072, 8)
    assert len(ds_runs.runs_of(few, 4096 * MB)) == 8 * 9


@pytest.mark.parametrize("value", ["-1", "1.5", "256MB", "many"])
def test_a_bad_limit_says_so(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("FLASHGEN_WORKSPACE_MB", value)
    with pytest.raises(InvalidArgument, match="FLASHGEN_WORKSPACE_MB must be a whole number: got"):
        settings.workspace_bytes()


def test_the_limit_is_256_unless_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHGEN_WORKSPACE_MB", raising=False)
    assert settings.workspace_bytes() == 256 * MB
    monkeypatch.setenv("FLASHGEN_WORKSPACE_MB", "0")
    assert settings.workspace_bytes() == 0


def test_calls_of_a_thread_share_a_workspace() -> None:
    near = torch.empty(1)
    first = workspace(1000, near)
    assert workspace(60, near).data_ptr() == first.data_ptr()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(workspace, 60, near).result().data_ptr() != first.data_ptr()
    longer = workspace(5000, near)
    assert longer.numel() >= 5000
    assert workspace(1000, near).data_ptr() == longer.data_ptr()


def test_a_kept_call_launches_with_the_workspace_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at first, but not in another thread."""
    q, k, v, o, do = (torch.randn(1, 2, 256, 128, dtype=torch.bfloat16) for _ in range(5))
    lse = torch.zeros(1, 2, 256)
    saved, wanted = Saved(q, k, v, o, lse), WantedGradients(True, True, True, False, False)
    with launches.served(monkeypatch) as driver:
        dispatcher = launches.dispatcher(monkeypatch)

        def launched() -> list[tuple[str, object]]:
            """Each kernel, and the descriptor of dS that it has."""
            driver.launches.clear()
            dispatcher.passes.backward(Call(), saved, do, None, wanted)
            return [
                (
                    name.partition("_bf16")[0],
                    [x[1] for x in given if type(x) is tuple and DS in str(x)],
                )
                for (name, _), _, _, given in driver.launches
            ]

        first = launched()
        assert [name for name, _ in first] == ["bwd_delta", "bwd_ds", "bwd_dq_of_ds"]
        assert [len(found) for _, found in first] == [0, 1, 1]
        assert launched() == first
        (kept,) = dispatcher.calls.young.values()
        assert kept.replay.__name__ == "replay"
        assert launched() == first
        assert kept.replay(q, k, v, o, lse, do, None) is not None
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(kept.replay, q, k, v, o, lse, do, None).result() is None
