"""Derived tables: the least estimate of what other GPUs chose, never slower than the default."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.errors import FlashgenError
from flashgen.spec.config import KernelConfig
from flashgen.spec.gpu import TARGETS
from flashgen.spec.outcome import Stage, Status
from flashgen.spec.problem import BUCKETS
from flashgen.spec.space import tuned_default
from flashgen.table.entry import Entry, Run, short_digest
from flashgen.table.table import Table, dump, parse
from flashgen.tune.derive import DEFAULT, derived_table, is_derived
from tests.fakes import FakeEvaluator, digest_of
from tests.tables import AHEAD, FA2, SPEC, made_entry, made_run

L40S, L4, A100 = (TARGETS[f"nvidia_{name}"] for name in ("l40s", "l4", "a100_sxm4_80gb"))
DEFAULTS = tuned_default(SPEC, L40S)
SMALL, LARGE = replace(FA2, br=64, bc=32, num_warps=4), replace(FA2, bc=32)
RUN = made_run("now")


def lent(config: KernelConfig, bucket: int = 1, floors: float = 0.5) -> Entry:
    entry = made_entry(SPEC, BUCKETS[bucket], config, digest=digest_of(SPEC, config))
    return replace(entry, result=replace(entry.result, max_abs_err_floors=floors))


def table(slug: str, *entries: Entry) -> Table:
    made = Table(gpu=TARGETS[slug])
    for entry in entries:
        made = made.with_entry(entry, made_run())
    return made


def evaluator(us: dict[KernelConfig, float], **options: object) -> FakeEvaluator:
    return FakeEvaluator(
        us=lambda config: us.get(config, 1000.0), gpu=L40S, source="estimated", **options  # type: ignore[arg-type]
    )  # fmt: skip


def derived(fake: FakeEvaluator, *tables: Table, held: Table | None = None) -> Table:
    return derived_table(held or Table(gpu=L40S), tables, fake, RUN)


def test_the_least_estimate_of_what_any_table_chose() -> None:
    """Of any bucket, with the donor's error; the run says whose it is."""
    fake = evaluator({SMALL: 100.0, LARGE: 90.0})
    found = derived(
        fake,
        table("nvidia_l4", lent(SMALL), lent(LARGE, 3, 0.75)),
        table("nvidia_a100_sxm4_80gb", lent(LARGE, 1, 0.25)),
    )
    assert [(e.bucket, e.config) for e in found.entries] == [
        (BUCKETS[1], LARGE),
        (BUCKETS[3], LARGE),
    ]
    for entry in found.entries:
        assert (entry.result.median_us, entry.result.speedup) == (90.0, pytest.approx(1000 / 90))
        assert entry.result.max_abs_err_floors == 0.75  # of the nearest GPU that has the kernel
        assert entry.evidence.digest == short_digest(digest_of(SPEC, LARGE))
        assert is_derived(found, entry)
        assert [other.config for other in entry.evidence.runners_up] == [SMALL, DEFAULTS]
    assert [run.donor for run in found.runs] == ["nvidia_l4"]
    assert fake.configs("check") == []


def test_the_default_where_it_is_estimated_faster() -> None:
    found = derived(evaluator({SMALL: 100.0, DEFAULTS: 50.0}), table("nvidia_l4", lent(SMALL)))
    (entry,) = found.entries
    assert (entry.config, entry.result.speedup) == (DEFAULTS, 1.0)
    assert entry.result.max_abs_err_floors == 1.0  # it was checked: no table has it
    assert [run.donor for run in found.runs] == [DEFAULT]


def test_what_does_not_fit_or_is_slow_is_not_lent() -> None:
    """Descriptors of an H200 are illegal here; a kernel that spills is passed over."""

    def failing(stage: Stage, config: KernelConfig) -> Status | None:
        return Status.SPILLS if config == LARGE else None

    fake = evaluator({SMALL: 100.0, LARGE: 10.0}, failing=failing)
    found = derived(
        fake, table("nvidia_l4", lent(SMALL), lent(LARGE, 2)), table("nvidia_h200", lent(AHEAD))
    )
    assert {entry.config for entry in found.entries} == {SMALL}
    assert AHEAD not in fake.configs("timed")


def test_a_text_that_changed_since_is_checked_again() -> None:
    old = replace(lent(SMALL), evidence=replace(lent(SMALL).evidence, digest="sha256:" + "0" * 12))
    fake = evaluator({SMALL: 100.0})
    (entry,) = derived(fake, table("nvidia_l4", old)).entries
    assert entry.result.max_abs_err_floors == 1.0
    wrong = evaluator(
        {SMALL: 100.0, DEFAULTS: 200.0},
        failing=lambda stage, c: Status.WRONG if (stage, c) == ("check", SMALL) else None,
    )
    (entry,) = derived(wrong, table("nvidia_l4", old)).entries
    assert entry.config == DEFAULTS


def test_without_estimates_facts_decide() -> None:
    fake = evaluator({}, failing=lambda stage, _: Status.NO_ESTIMATE if stage == "timed" else None)
    (entry,) = derived(fake, table("nvidia_l4", lent(LARGE))).entries
    assert (entry.result.source, entry.result.median_us) == ("untimed", None)


def test_a_descriptor_kernel_needs_a_twin_that_serves() -> None:
    gpu = TARGETS["nvidia_h100_pcie"]
    fake = FakeEvaluator(
        us=lambda config: 10.0 if config == AHEAD else 20.0, gpu=gpu, source="estimated",
        failing=lambda stage, c: Status.OUT_OF_RESOURCES if c == AHEAD.pointer_twin() else None,
    )  # fmt: skip
    found = derived_table(Table(gpu=gpu), [table("nvidia_h200", lent(AHEAD))], fake, RUN)
    assert found.entries[0].config == tuned_default(SPEC, gpu)


def test_what_was_tuned_stays_and_lends_what_was_derived_does_not() -> None:
    tuned = lent(SMALL, 1)
    held = table("nvidia_l40s", tuned)
    fake = evaluator({SMALL: 100.0, LARGE: 90.0})
    one = derived(fake, held, table("nvidia_l4", lent(LARGE), lent(LARGE, 2)), held=held)
    assert [(e.bucket, e.config) for e in one.entries] == [(BUCKETS[1], SMALL), (BUCKETS[2], LARGE)]
    again = derived(fake, one, table("nvidia_l4", lent(SMALL), lent(SMALL, 2)), held=one)
    assert {entry.config for entry in again.entries} == {SMALL}
    other = derived_table(Table(gpu=A100), [one], replace(fake, gpu=A100), RUN)
    assert {e.bucket for e in other.entries} == {BUCKETS[1]}


H100, H200 = TARGETS["nvidia_h100_80gb_hbm3"], TARGETS["nvidia_h200"]
HOPPER = replace(FA2, bc=128, schedule="hopper", loads="descriptor")


def measured_on_h200(config: KernelConfig) -> Table:
    entry = made_entry(source="measured", config=config, digest=digest_of(SPEC, config))
    return Table(gpu=H200).with_entry(entry, made_run(source="measured"))


def test_a_measurement_on_the_same_chip_comes_before_an_estimate() -> None:
    """Also before what a search estimated here; what was executed stays."""
    executed = replace(made_entry(), config=HOPPER, tritons=("3.7",))
    held = table(H100.slug, made_entry(config=LARGE), executed, made_entry(bucket=BUCKETS[2]))
    fake = replace(evaluator({SMALL: 100.0, LARGE: 90.0, AHEAD: 80.0}), gpu=H100)
    found = derived_table(held, [held, measured_on_h200(SMALL)], fake, RUN)
    assert [(e.bucket, e.config) for e in found.entries] == [
        (BUCKETS[1], SMALL),
        (BUCKETS[2], AHEAD),
    ]
    assert (found.entries[0].result.source, found.entries[0].result.median_us) == (
        "estimated",
        100.0,
    )
    assert found.executed == (executed,)
    assert [run.donor for run in found.runs] == [None, H200.slug]


@pytest.mark.parametrize("slug", ["nvidia_h100_pcie", "nvidia_l40s"])
def test_a_measurement_on_another_chip_does_not(slug: str) -> None:
    held = table(slug, made_entry(config=LARGE))
    fake = replace(evaluator({SMALL: 100.0, LARGE: 90.0}), gpu=TARGETS[slug])
    found = derived_table(held, [held, measured_on_h200(SMALL)], fake, RUN)
    assert [entry.config for entry in found.entries] == [LARGE]


def test_what_was_untimed_is_chosen_anew_where_there_are_estimates() -> None:
    """Its own config is a candidate, and stays one when the table is derived again."""
    held = table(L40S.slug, made_entry(config=SMALL, source="untimed"))
    fake = evaluator({SMALL: 80.0, LARGE: 90.0})
    one = derived(fake, held, table("nvidia_l4", lent(LARGE)), held=held)
    for again in (one, derived(fake, one, table("nvidia_l4", lent(LARGE)), held=one)):
        (entry,) = again.entries
        assert (entry.config, entry.result.source, entry.result.median_us) == (
            SMALL,
            "estimated",
            80.0,
        )
    b200 = TARGETS["nvidia_b200"]
    held = table(b200.slug, made_entry(config=SMALL, source="untimed"))
    other = derived_table(
        held, [held, table("nvidia_l4", lent(LARGE))], replace(fake, gpu=b200), RUN
    )
    assert other == held


def test_a_kernel_that_must_have_run_is_not_lent() -> None:
    held = table(H100.slug, made_entry(config=LARGE))
    found = derived_table(held, [held, measured_on_h200(HOPPER)], evaluator({}), RUN)
    assert found == held


def test_a_derived_table_is_read_as_it_was_written() -> None:
    found = derived(evaluator({SMALL: 100.0}), table("nvidia_l4", lent(SMALL)))
    text = dump(found)
    assert "donor: nvidia_l4" in text
    assert dump(parse(text, Path("nvidia_l40s.yaml"))) == text


def test_nothing_to_lend() -> None:
    with pytest.raises(FlashgenError, match="no kernel of the tables is right and fits"):
        derived(evaluator({}))


def test_runs_are_of_their_run() -> None:
    run: Run = derived(evaluator({SMALL: 1.0}), table("nvidia_l4", lent(SMALL))).runs[0]
    assert (run.id, run.date) == ("now-nvidia_l4", RUN.date)
