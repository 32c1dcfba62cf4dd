"""tune/donors.py: what tables of other GPUs lend, in which order, and whose check still counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Stage
from flashgen.schedules.space import tuned_default
from flashgen.search.goal import rendered_digest
from flashgen.spec.gpu import TARGETS, Gpu
from flashgen.spec.problem import BUCKETS, workload
from flashgen.table.entry import RunnerUp, short_digest
from flashgen.table.table import Table
from flashgen.tune.donors import ALIKE, CheckedByDonors, Donors
from flashgen.tune.transfer import measured_on_chip
from tests.fakes import FakeEvaluator
from tests.makers import make_config, make_spec
from tests.tables import DIGEST, H200, made_entry, made_table, with_evidence

SPEC = make_spec()
HERE, THERE = BUCKETS[1], BUCKETS[2]
TILE, OTHER = make_config(128, 64), make_config(64, 64)
H100, L4 = TARGETS["nvidia_h100_80gb_hbm3"], TARGETS["nvidia_l4"]


def of(gpu: Gpu, config: KernelConfig, source: Any = "estimated", **fields: Any) -> Table:
    """A table of one entry."""
    spec, bucket = fields.get("spec", SPEC), fields.get("bucket", HERE)
    entry = made_entry(spec, bucket, config, source=source)
    entry = with_evidence(entry, runners_up=fields.get("runners_up", ()))
    return Table(gpu=gpu, entries=(entry,))


def chosen(tables: list[Table], gpu: Gpu = H200, *, on_gpu: bool = False) -> list[KernelConfig]:
    return list(Donors(tables, gpu).chosen(SPEC, HERE, on_gpu=on_gpu))


def test_this_bucket_then_the_same_architecture_then_what_was_measured_and_none_twice() -> None:
    far, near, again = make_config(32, 32), make_config(64, 32), make_config(128, 32)
    tables = [
        of(H100, OTHER, bucket=THERE),
        of(L4, far),
        of(TARGETS["nvidia_a100_sxm4_80gb"], again, "measured"),
        of(TARGETS["nvidia_geforce_rtx_4090"], near),
        of(H100, near),
    ]
    assert chosen(tables) == [near, again, far, OTHER]
    assert Donors(tables, H200).chosen(SPEC, HERE, on_gpu=False)[near] == H100.slug


def test_what_this_gpu_chose_for_another_bucket_comes_first() -> None:
    """It is the kernel that calls of this bucket run until it has an entry."""
    own = of(H200, OTHER, "untimed", bucket=THERE)
    assert chosen([of(H100, TILE, "untimed"), own]) == [OTHER, TILE]


def test_of_an_architecture_the_same_matrix_rate_comes_first_as_where_entries_serve() -> None:
    """An L40S has more SMs than a GeForce RTX 4070, whose SMs multiply at half the rate of an L4's."""
    tables = [
        of(TARGETS["nvidia_geforce_rtx_4070"], OTHER),
        of(TARGETS["nvidia_l40s"], TILE),
    ]
    assert chosen(tables, L4) == [TILE, OTHER]


def test_an_invariant_spec_is_lent_what_the_plain_one_has_after_its_own() -> None:
    own, rows = replace(SPEC, invariant=True), make_config(128, 64, num_warps=8)
    tables = [of(L4, OTHER), of(L4, make_config(64, 128)), of(H100, rows, bucket=THERE, spec=own)]
    assert list(Donors(tables, H200).chosen(own, HERE, on_gpu=False)) == [rows, OTHER]
    assert chosen([of(H100, OTHER, spec=own)]) == []


@pytest.mark.parametrize(
    ("gpu", "spec"),
    [
        (L4, make_spec(mask="causal")),
        (L4, make_spec(dtype="float32", precision="tf32")),
        (L4, SPEC.for_direction("backward_dq")),
    ],
    ids=["mask", "dtype", "direction"],
)
def test_what_computes_something_else_lends_nothing(gpu: Gpu, spec: Any) -> None:
    assert chosen([of(gpu, TILE, spec=spec)]) == []
    assert chosen([of(L4, TILE)]) == [TILE]


def test_like_specs_lend_after_the_spec_itself_and_no_more_than_alike() -> None:
    """In the form that the spec can have: packed sequences have pointers, and schedule fa2."""
    half, packed = make_spec(dtype="float16"), make_spec(varlen=True)
    tables = [of(L4, OTHER, spec=half), of(H100, TILE, bucket=THERE)]
    assert chosen(tables) == [TILE, OTHER]
    described = replace(OTHER, loads="descriptor", schedule="s_ahead", num_stages=2)
    donors = Donors([of(H100, described)], H200)
    assert list(donors.chosen(packed, HERE, on_gpu=False)) == [OTHER.pointer_twin(packed)]
    tiles = [
        make_config(br, bc, num_warps=warps)
        for br in (32, 64, 128)
        for bc in (16, 32, 64)
        for warps in (2, 4)
    ]
    many = [
        replace(of(L4, tile, spec=half), gpu=replace(L4, name=f"L4 {tile.label}")) for tile in tiles
    ]
    assert len(chosen(many)) == ALIKE < len(tiles)


def test_what_no_time_chose_on_amd_is_not_lent_to_nvidia() -> None:
    mi300x = TARGETS["amd_instinct_mi300x"]
    tables = [of(H100, TILE), of(mi300x, OTHER)]
    assert list(Donors(tables, H200).chosen(SPEC, HERE, on_gpu=False)) == [TILE]
    assert list(Donors([of(H100, TILE)], mi300x).chosen(SPEC, HERE, on_gpu=False)) == [TILE]


def test_what_no_time_chose_comes_only_where_nothing_else_is_legal() -> None:
    b200, by_descriptor = TARGETS["nvidia_b200"], replace(OTHER, loads="descriptor")
    untimed = of(b200, TILE, "untimed", bucket=THERE)
    assert chosen([untimed, of(H100, OTHER)], L4) == [OTHER]
    assert chosen([untimed, of(H100, by_descriptor)], L4) == [TILE]
    assert chosen([untimed], L4) == [TILE]
    gb200 = TARGETS["nvidia_gb200"]
    assert set(chosen([untimed, of(H100, OTHER)], gb200)) == {TILE, OTHER}, "nothing is estimated"


def test_what_is_illegal_here_does_not_come() -> None:
    by_descriptor = replace(TILE, loads="descriptor")
    tables = [of(H100, by_descriptor)]
    assert chosen(tables) == [by_descriptor]
    assert chosen(tables, L4) == []


def test_what_must_run_first_comes_only_where_it_runs() -> None:
    hopper = make_config(128, 64, num_warps=8, schedule="hopper", loads="descriptor")
    tables = [of(H100, hopper, "measured")]
    assert chosen(tables) == []
    assert chosen(tables, on_gpu=True) == [hopper]


@pytest.mark.parametrize("fields", [{"window": True}, {"chunk": True}, {}], ids=str)
def test_a_tile_comes_last_in_the_other_order_where_blocks_have_the_same_work(
    fields: dict[str, bool],
) -> None:
    spec, first = make_spec(mask="causal", **fields), replace(TILE, order="longest_first")
    donors = Donors([of(L4, first, spec=spec), of(H100, OTHER, spec=spec)], H200)
    lent = [OTHER, first]
    others = [replace(OTHER, order="longest_first"), TILE] if fields else []
    found = donors.chosen(spec, HERE, on_gpu=False)
    assert list(found) == lent + others
    assert [found[config] for config in others] == [H100.slug, L4.slug][: len(others)]
    assert list(donors.chosen(spec, HERE, on_gpu=True)) == lent, "a search measures them"


@pytest.mark.parametrize(
    ("direction", "lent", "other"),
    [
        ("backward_dkv", "plain", "grouped"),
        ("backward_dq", "longest_first", "grouped"),
        ("backward_dq", "grouped", "plain"),
        ("backward_dq_of_ds", "plain", "longest_first"),
    ],
)
def test_a_gradient_comes_in_the_likeliest_order_too(direction: Any, lent: Any, other: Any) -> None:
    spec = make_spec(mask="causal", direction=direction)
    config = replace(TILE, order=lent)
    donors = Donors([of(L4, config, spec=spec)], H200)
    found = list(donors.chosen(spec, HERE, on_gpu=False))
    assert found == [config, replace(config, order=other)]
    assert list(donors.chosen(spec, HERE, on_gpu=True)) == [config]
    full = replace(spec, mask="none")
    plain = Donors([of(L4, TILE, spec=full)], H200)
    assert list(plain.chosen(full, HERE, on_gpu=False)) == [TILE]


def test_runners_up_are_in_the_order_of_their_winners() -> None:
    second, third = make_config(32, 64), make_config(32, 32)
    ups = [
        (RunnerUp(config=config, source="untimed", digest=DIGEST),) for config in (second, third)
    ]
    donors = Donors([of(L4, TILE, runners_up=ups[0]), of(H100, OTHER, runners_up=ups[1])], H200)
    assert donors.runners_up(SPEC, HERE, on_gpu=False) == (third, second)


class TestWhatWasChecked:
    """Nothing is checked again whose text is that of a donor's entry."""

    CASES = workload(SPEC, 2048)

    def checked(self, *configs: KernelConfig, stale: bool = False) -> tuple[list[float], list[Any]]:
        """The errors, and which configs the evaluator was asked for."""
        digest = DIGEST if stale else short_digest(rendered_digest(SPEC, TILE))
        table = of(L4, TILE)
        entry = with_evidence(table.entries[0], digest=digest)
        fake = FakeEvaluator(us=lambda _: 1.0, gpu=H200, source="estimated")
        donors = Donors([replace(table, entries=(entry,))], H200)
        with CheckedByDonors(fake, donors) as evaluator:
            found = list(evaluator.evaluate("check", SPEC, self.CASES, configs))
        assert [outcome.config for outcome in found] == list(configs)
        assert all(outcome.ok for outcome in found)
        return [o.check.floors if o.check else -1.0 for o in found], fake.configs("check")

    def test_its_error_is_the_donor_s_and_others_are_checked(self) -> None:
        assert self.checked(OTHER, TILE) == ([1.0, 1.25], [OTHER])

    def test_a_text_that_changed_since_is_checked(self) -> None:
        assert self.checked(TILE, stale=True) == ([1.0], [TILE])

    @pytest.mark.parametrize("stage", ["compile", "timed"])
    def test_the_other_stages_are_the_evaluator_s(self, stage: Stage) -> None:
        fake = FakeEvaluator(us=lambda _: 1.0, gpu=H200, source="estimated")
        evaluator = CheckedByDonors(fake, Donors([of(L4, TILE)], H200))
        assert len(list(evaluator.evaluate(stage, SPEC, self.CASES, [TILE, OTHER]))) == 2
        assert fake.configs(stage) == [TILE, OTHER]


def test_a_cache_in_pages_is_lent_what_one_without_has_and_its_launch_is_its_own() -> None:
    """How many blocks have room on an SM is another GPU's figure."""
    flat = make_spec("bfloat16", 128, direction="decode")
    paged = replace(flat, paged=True)
    here, there = (make_config(16, bc, blocks_per_sm=3) for bc in (32, 64))
    tables = [of(L4, there, spec=flat), of(H100, here, spec=paged)]
    lent = Donors(tables, H200).chosen(paged, HERE, on_gpu=False)
    assert lent == {here.kernel: H100.slug, there.kernel: L4.slug}
    assert list(Donors(tables, H200).chosen(flat, HERE, on_gpu=False)) == [
        there.kernel,
        here.kernel,
    ]
    own = replace(flat, invariant=True)
    of_class = tuned_default(own, H200)
    plain = of(H100, replace(of_class, blocks_per_sm=3), spec=flat)
    assert list(Donors([plain], H200).chosen(own, HERE, on_gpu=False)) == [of_class]


def test_of_like_specs_those_of_this_bucket_come_first() -> None:
    half = make_spec(dtype="float16")
    entries = [made_entry(half, THERE, OTHER), made_entry(half, HERE, TILE)]
    assert chosen([Table(gpu=L4, entries=tuple(entries))]) == [TILE, OTHER]


def test_a_runner_up_that_must_run_is_none_without_a_gpu() -> None:
    gluon = make_config(128, 128, num_warps=8, schedule="hopper", loads="descriptor")
    row = RunnerUp(config=gluon, source="measured", median_us=9.0, digest=DIGEST)
    donors = Donors([of(H100, TILE, "measured", spec=SPEC, runners_up=(row,))], H200)
    assert donors.runners_up(SPEC, HERE, on_gpu=False) == ()
    assert donors.runners_up(SPEC, HERE, on_gpu=True) == (gluon,)


def test_what_a_table_was_lent_by_another_it_does_not_lend_but_what_it_lent_itself() -> None:
    held = made_table(made_entry(SPEC, HERE, TILE, run="a"))
    for donor, lent in ((H100.slug, []), (H200.slug, [TILE])):
        runs = (replace(held.runs[0], donor=donor),)
        assert chosen([replace(held, runs=runs)], H100) == lent


def test_only_the_same_chip_was_measured_with_it() -> None:
    own, l40s = of(L4, TILE, "measured"), of(TARGETS["nvidia_l40s"], OTHER, "measured")
    assert measured_on_chip(L4, [own, l40s]) == {(SPEC, HERE): TILE}
    assert measured_on_chip(H200, [of(H100, OTHER, "measured")]) == {(SPEC, HERE): OTHER}
