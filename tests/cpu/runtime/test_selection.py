"""The ladder: which kernel serves, on which rung, and why."""

from __future__ import annotations

import dataclasses

from flashgen.runtime.selection import Served, ladder, tune_command
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import BUCKETS
from tests.makers import make_config, make_spec
from tests.package import make_choice

SPEC = make_spec("bfloat16", 64, "causal")
H100, H200 = "nvidia_h100_80gb_hbm3", "nvidia_h200"
SMALL, BIG = make_config(64, 64), make_config(128, 64, num_warps=8)


def served(**tables: object) -> Served:
    archs = {slug: TARGETS[slug].arch for slug in tables}
    return Served(archs=archs, choices=tables)  # type: ignore[arg-type]


def rungs(table: Served, slug: str, seq: int) -> list[tuple[str, str]]:
    found = ladder(table, slug, TARGETS[slug], SPEC, seq)
    return [(s.rung, s.choice.config.label) for s in found.rungs]


def test_exact_then_nearest_then_default() -> None:
    table = served(
        nvidia_h200=(make_choice(SPEC, SMALL, BUCKETS[1]), make_choice(SPEC, BIG, BUCKETS[3]))
    )
    assert rungs(table, H200, 2000)[0] == ("exact", SMALL.label)
    assert rungs(table, H200, 20000)[0] == ("exact", BIG.label)
    assert rungs(table, H200, 100)[0] == ("nearest_bucket", SMALL.label)
    # Between two as near, the entry of the longer lengths.
    assert rungs(table, H200, 5000)[0] == ("nearest_bucket", BIG.label)
    assert rungs(table, H200, 2000)[-1][0] == "default"


def test_a_relative_serves_a_gpu_without_a_table() -> None:
    table = served(nvidia_h100_80gb_hbm3=(make_choice(SPEC, BIG, BUCKETS[2]),))
    assert [rung for rung, _ in rungs(table, H200, 5000)] == ["relative", "default"]
    assert [rung for rung, _ in rungs(table, "nvidia_l4", 5000)] == ["default"]


def test_the_relative_of_a_gpu_nobody_listed_is_the_nearest_in_size() -> None:
    choice = make_choice(SPEC, SMALL, BUCKETS[2])
    table = served(nvidia_l4=(choice,), nvidia_geforce_rtx_4090=(choice,))
    l40 = dataclasses.replace(TARGETS["nvidia_l40s"], name="NVIDIA L40")
    found = ladder(table, l40.slug, l40, SPEC, 5000)
    assert [s.slug for s in found.rungs] == ["nvidia_geforce_rtx_4090", "nvidia_l4", None]


def test_head_dim_and_dtype_never_match_loosely() -> None:
    table = served(nvidia_h200=(make_choice(SPEC, BIG, BUCKETS[2]),))
    other = make_spec("bfloat16", 128, "causal")
    found = ladder(table, H200, TARGETS[H200], other, 5000)
    assert [s.rung for s in found.rungs] == ["default"]
    assert found.rungs[0].choice.spec == other


def test_what_was_compiled_too_large_is_skipped_with_a_reason() -> None:
    table = served(nvidia_h200=(make_choice(SPEC, BIG, BUCKETS[2], shared_bytes=1 << 20),))
    found = ladder(table, H200, TARGETS[H200], SPEC, 5000)
    assert [s.rung for s in found.rungs] == ["default"]
    assert "1048576 bytes of shared memory" in found.skipped[0]


def test_an_entry_with_descriptors_never_serves_an_a100() -> None:
    choice = make_choice(SPEC, make_config(loads="descriptor"), BUCKETS[2])
    table = Served(archs={"a": "sm_80"}, choices={"a": (choice,)})
    found = ladder(table, "nvidia_a100_sxm4_80gb", TARGETS["nvidia_a100_sxm4_80gb"], SPEC, 5000)
    assert [s.rung for s in found.rungs] == ["default"]
    assert "TMA" in found.skipped[0]


def test_the_command_to_improve_it_is_complete() -> None:
    command = tune_command(
        make_spec("float32", 192, "causal", head_dim_v=128, precision="tf32"), 5000
    )
    assert command == "flashgen tune --gpu --dtype tf32 --head-dim 192x128 --causal --seq 5000"


def test_where_no_tf32_kernel_runs_the_ieee_one_does() -> None:
    tf32 = make_spec("float32", 64, precision="tf32")
    table = Served(archs={}, choices={})
    for slug, precision in (("amd_instinct_mi355x", "ieee"), ("amd_instinct_mi300x", "tf32")):
        found = ladder(table, slug, TARGETS[slug], tf32, 100)
        assert found.rungs[0].choice.spec.precision == precision
