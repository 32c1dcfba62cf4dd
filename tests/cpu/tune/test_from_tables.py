"""tune --from-tables: first the least estimate of what other GPUs chose, then a search from there."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Outcome, Stage, Status
from flashgen.schedules.space import own_seeds, seed_configs, tuned_default
from flashgen.search.goal import Budget, rendered_digest
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS, Gpu
from flashgen.spec.problem import BUCKETS, workload
from flashgen.table.entry import Entry, Run, short_digest
from flashgen.table.table import APART, Table
from flashgen.table.table_file import dump, load_with_evidence, parse, save
from flashgen.tune import workloads
from flashgen.tune.donors import DEFAULT, is_derived
from tests.cpu.tune.test_tune import Served, emitted, no_shipped_tables, run  # noqa: F401
from tests.fakes import Killed
from tests.tables import AHEAD, FA2, SPEC, made_entry, made_run, made_table, with_evidence

pytestmark = pytest.mark.usefixtures("emitted")

L40S, H100, H200 = (TARGETS[f"nvidia_{name}"] for name in ("l40s", "h100_80gb_hbm3", "h200"))
DEFAULTS = tuned_default(SPEC, L40S)
OWN = own_seeds(SPEC, L40S)
SMALL, LARGE = replace(FA2, br=64, bc=32, num_warps=4), replace(FA2, bc=32)
HOPPER = replace(FA2, bc=128, schedule="hopper", loads="descriptor")
ONLY = Budget(trials=1)
Patch = pytest.MonkeyPatch


def lent(config: KernelConfig, bucket: int = 1, floors: float = 0.5, **fields: Any) -> Entry:
    digest = short_digest(rendered_digest(SPEC, config))
    entry = made_entry(SPEC, BUCKETS[bucket], config, **{"digest": digest} | fields)
    entry = with_evidence(entry, runners_up=())
    return replace(entry, result=replace(entry.result, max_abs_err_floors=floors))


def table(slug: str, *entries: Entry, source: Any = "estimated") -> Table:
    made = Table(gpu=TARGETS[slug])
    for entry in entries:
        made = made.with_entry(entry, made_run(source=source))
    return made


def evaluator(us: dict[KernelConfig, float], **options: Any) -> Served:
    return Served(
        us=lambda config: us.get(config, 1000.0),
        **{"gpu": L40S, "source": "estimated"} | options,
    )


def derived(
    patch: Patch, out: Path, fake: Served, *tables: Table, budget: Budget = ONLY, **options: Any
) -> tuple[Table, str]:
    """The table of the evaluator's GPU, and what was printed."""
    for each in tables:
        save(each, out / "configs" / f"{each.gpu.slug}.yaml")
    pieces = workloads.of_tables(tables)
    return run(
        patch, out, fake, specs=(), pieces=pieces, from_tables=True, budget=budget, **options
    )


class TestWhatIsChosen:
    def test_the_least_estimate_of_what_any_table_chose(
        self, tmp_path: Path, monkeypatch: Patch
    ) -> None:
        """Of any bucket, with the donor's error, which is not checked again."""
        fake = evaluator({SMALL: 100.0, LARGE: 90.0})
        found, printed = derived(
            monkeypatch,
            tmp_path,
            fake,
            table("nvidia_l4", lent(SMALL), lent(LARGE, 3, 0.75)),
            table("nvidia_a100_sxm4_80gb", lent(LARGE, 1, 0.25)),
        )
        assert [(e.bucket, e.config) for e in found.entries] == [
            (BUCKETS[1], LARGE),
            (BUCKETS[3], LARGE),
        ]
        for entry in found.entries:
            assert (entry.result.median_us, entry.result.speedup) == (
                90.0,
                pytest.approx(1000 / 90),
            )
            assert entry.result.max_abs_err_floors == 0.75  # of the nearest GPU that has the kernel
            assert is_derived(found, entry)
            assert [other.config for other in entry.evidence.runners_up] == [SMALL, DEFAULTS]
            assert entry.evidence.candidates == 3 + len(OWN)
            assert (entry.evidence.legal or 0) > 100
        # The entry of the first bucket is lent by a GPU whose table has it for that bucket.
        assert {run.donor for run in found.runs} == {"nvidia_l4", "nvidia_a100_sxm4_80gb"}
        assert "lent by nvidia_l4" in printed
        assert fake.configs("check") == []

    @pytest.mark.parametrize("seed", range(20))
    def test_no_entry_is_slower_by_estimate_than_the_default_or_its_donors(
        self, tmp_path: Path, monkeypatch: Patch, seed: int
    ) -> None:
        drawn = random.Random(seed)
        times = {config: drawn.uniform(90, 110) for config in (SMALL, LARGE, FA2, DEFAULTS)}
        slugs = ("nvidia_l4", "nvidia_a100_sxm4_80gb", "nvidia_geforce_rtx_4090")
        donors = [
            table(slug, *(lent(drawn.choice([SMALL, LARGE, FA2]), b) for b in range(4)))
            for slug in slugs
        ]
        found, _ = derived(monkeypatch, tmp_path, evaluator(times), *donors)
        assert len(found.entries) == 4
        for entry in found.entries:
            rivals = [donor.find(SPEC, entry.bucket) for donor in donors]
            limits = [times[DEFAULTS], *(times[rival.config] for rival in rivals if rival)]
            assert times[entry.config] <= min(limits)

    def test_the_default_where_it_is_estimated_faster(
        self, tmp_path: Path, monkeypatch: Patch
    ) -> None:
        fake = evaluator({SMALL: 100.0, DEFAULTS: 50.0})
        found, printed = derived(monkeypatch, tmp_path, fake, table("nvidia_l4", lent(SMALL)))
        (entry,) = found.entries
        assert (entry.config, entry.result.speedup) == (DEFAULTS, 1.0)
        assert entry.result.max_abs_err_floors == 1.0  # it was checked: no table has it
        assert [run.donor for run in found.runs] == [DEFAULT]
        assert "lent by" not in printed

    def test_what_does_not_fit_or_is_slow_is_not_lent(
        self, tmp_path: Path, monkeypatch: Patch
    ) -> None:
        """Descriptors of an H200 are illegal here; a kernel that spills is passed over."""

        def failing(stage: Stage, config: KernelConfig) -> Status | None:
            return Status.SPILLS if config == LARGE else None

        fake = evaluator({SMALL: 100.0, LARGE: 10.0}, failing=failing)
        l4 = table("nvidia_l4", lent(SMALL), lent(LARGE, 2))
        found, _ = derived(monkeypatch, tmp_path, fake, l4, table("nvidia_h200", lent(AHEAD)))
        assert {entry.config for entry in found.entries} == {SMALL}
        assert AHEAD not in fake.configs("timed")

    @pytest.mark.parametrize("wrong", [False, True])
    def test_a_text_that_changed_since_is_checked_again(
        self, tmp_path: Path, monkeypatch: Patch, wrong: bool
    ) -> None:
        def failing(stage: Stage, config: KernelConfig) -> Status | None:
            return Status.WRONG if wrong and (stage, config) == ("check", SMALL) else None

        old = lent(SMALL, digest="sha256:" + "0" * 12)
        fake = evaluator({SMALL: 100.0, DEFAULTS: 200.0}, failing=failing)
        found, _ = derived(monkeypatch, tmp_path, fake, table("nvidia_l4", old))
        (entry,) = found.entries
        assert entry.config == (DEFAULTS if wrong else SMALL)
        assert entry.result.max_abs_err_floors == 1.0

    def test_without_estimates_facts_decide(self, tmp_path: Path, monkeypatch: Patch) -> None:
        fake = evaluator(
            {}, failing=lambda stage, _: Status.NO_ESTIMATE if stage == "timed" else None
        )
        found, _ = derived(monkeypatch, tmp_path, fake, table("nvidia_l4", lent(LARGE)))
        (entry,) = found.entries
        assert (entry.result.source, entry.result.median_us) == ("untimed", None)

    def test_a_descriptor_kernel_needs_a_twin_that_serves(
        self, tmp_path: Path, monkeypatch: Patch
    ) -> None:
        gpu = TARGETS["nvidia_h100_pcie"]
        twin = AHEAD.pointer_twin(SPEC)
        fake = evaluator(
            {AHEAD: 10.0, tuned_default(SPEC, gpu): 20.0},
            gpu=gpu,
            failing=lambda _, c: Status.OUT_OF_RESOURCES if c == twin else None,
        )
        found, _ = derived(monkeypatch, tmp_path, fake, table("nvidia_h200", lent(AHEAD)))
        assert found.entries[0].config == tuned_default(SPEC, gpu)

    def test_a_twin_is_as_right_as_it_was(self, tmp_path: Path, monkeypatch: Patch) -> None:
        fake = evaluator({AHEAD: 10.0}, gpu=TARGETS["nvidia_h100_pcie"])
        found, _ = derived(monkeypatch, tmp_path, fake, table("nvidia_h200", lent(AHEAD)))
        assert found.entries[0].config == AHEAD
        assert fake.configs("check") == []

    def test_what_was_lent_is_not_lent_again(self, tmp_path: Path, monkeypatch: Patch) -> None:
        fake = evaluator({SMALL: 100.0, LARGE: 10.0})
        a10 = made_run(source="estimated")
        lent_on = Table(gpu=TARGETS["nvidia_l40"]).with_entry(
            lent(LARGE), replace(a10, donor="nvidia_l4")
        )
        found, _ = derived(monkeypatch, tmp_path, fake, table("nvidia_l4", lent(SMALL)), lent_on)
        assert [entry.config for entry in found.entries] == [SMALL]
        assert LARGE not in fake.configs("compile")

    @pytest.mark.parametrize(("slug", "trusted"), [(H100.slug, True), ("nvidia_h100_pcie", False)])
    def test_a_measurement_on_the_same_chip_comes_before_an_estimate(
        self, tmp_path: Path, monkeypatch: Patch, slug: str, trusted: bool
    ) -> None:
        """Also before what was tuned here by estimate."""
        measured = table("nvidia_h200", lent(SMALL, source="measured"), source="measured")
        held = table(slug, lent(LARGE))
        fake = evaluator({SMALL: 100.0, LARGE: 90.0}, gpu=TARGETS[slug])
        found, _ = derived(monkeypatch, tmp_path, fake, held, measured)
        (entry,) = found.entries
        assert entry.config == (SMALL if trusted else LARGE)
        assert entry.result.source == "estimated"

    def test_what_must_have_run_is_not_lent(self, tmp_path: Path, monkeypatch: Patch) -> None:
        measured = table("nvidia_h200", lent(HOPPER, source="measured"), source="measured")
        fake = evaluator({HOPPER: 1.0}, gpu=H100)
        found, _ = derived(monkeypatch, tmp_path, fake, measured)
        assert [entry.config for entry in found.entries] == [tuned_default(SPEC, H100)]
        assert HOPPER not in fake.configs("compile")

    def test_its_runners_up_are_lent_instead(self, tmp_path: Path, monkeypatch: Patch) -> None:
        second = replace(made_entry().evidence.runners_up[0], config=LARGE)
        entry = with_evidence(lent(HOPPER, source="measured"), runners_up=(second,))
        measured = table("nvidia_h200", entry, source="measured")
        fake = evaluator({LARGE: 1.0}, gpu=H100)
        found, _ = derived(monkeypatch, tmp_path, fake, measured)
        assert [entry.config for entry in found.entries] == [LARGE]

    def test_a_padded_head_dim_is_lent_what_the_padded_one_has(
        self, tmp_path: Path, monkeypatch: Patch
    ) -> None:
        narrow = replace(SPEC, head_dim=96, head_dim_v=96)
        held = table("nvidia_l4", lent(SMALL), replace(lent(LARGE), spec=narrow))
        fake = evaluator({SMALL: 1.0, LARGE: 2.0})
        found, _ = derived(monkeypatch, tmp_path, fake, held)
        assert {entry.spec: entry.config for entry in found.entries} == {SPEC: SMALL, narrow: SMALL}

    @pytest.mark.parametrize(
        ("lacking", "lent_as"),
        [
            ({"varlen": True}, FA2),
            ({"varlen": True, "dtype": "float16"}, FA2),
            ({"window": True}, replace(FA2, loads="descriptor", num_stages=3)),
            ({"dtype": "float16"}, replace(FA2, loads="descriptor", num_stages=3)),
        ],
    )
    def test_a_spec_that_no_table_has_is_lent_what_like_ones_have(
        self, tmp_path: Path, monkeypatch: Patch, lacking: dict[str, Any], lent_as: KernelConfig
    ) -> None:
        """In the form that it can have: packed sequences have pointers and two stages."""
        wanted = replace(SPEC, **lacking)
        described = replace(FA2, loads="descriptor", num_stages=3)
        donor = table(H100.slug, lent(described))
        save(donor, tmp_path / "configs" / f"{H100.slug}.yaml")
        fake = evaluator({lent_as: 1.0}, gpu=H200)
        found, printed = run(
            monkeypatch, tmp_path, fake, specs=(), pieces=((wanted, workload(wanted, 2048)),),
            from_tables=True, budget=ONLY,
        )  # fmt: skip
        assert [(entry.spec, entry.config) for entry in found.entries] == [(wanted, lent_as)]
        assert "lent by nvidia_h100_80gb_hbm3" in printed

    @pytest.mark.parametrize(("dtype", "bucket"), [("float16", 1), (SPEC.dtype, 2), ("float16", 3)])
    def test_what_a_chip_was_measured_with_serves_the_other_half_and_other_buckets(
        self, tmp_path: Path, monkeypatch: Patch, dtype: Any, bucket: int
    ) -> None:
        spec = replace(SPEC, dtype=dtype)
        held = table(H200.slug, lent(SMALL, source="measured"), source="measured")
        save(held, tmp_path / "configs" / f"{H200.slug}.yaml")
        fake = evaluator({SMALL: 100.0, DEFAULTS: 90.0}, gpu=H200)
        piece = (spec, workload(spec, (512, 2048, 8192, 16384)[bucket]))
        found, _ = run(
            monkeypatch, tmp_path, fake, specs=(), pieces=(piece,), from_tables=True, budget=ONLY
        )
        entry = found.find(spec, BUCKETS[bucket])
        assert entry
        assert (entry.config, entry.result.source) == (SMALL, "estimated")

    def test_what_the_table_has_is_a_rival(self, tmp_path: Path, monkeypatch: Patch) -> None:
        held = table(L40S.slug, lent(LARGE, source="untimed"))
        for us, chosen in ((80.0, LARGE), (120.0, SMALL)):
            out = tmp_path / str(us)
            fake = evaluator({SMALL: 100.0, LARGE: us})
            found, _ = derived(monkeypatch, out, fake, held, table("nvidia_l4", lent(SMALL)))
            (entry,) = found.entries
            assert (entry.config, entry.result.source) == (chosen, "estimated")
            assert is_derived(found, entry) is (chosen == SMALL)

    def test_a_table_is_read_as_it_was_written(self, tmp_path: Path, monkeypatch: Patch) -> None:
        fake = evaluator({SMALL: 100.0})
        found, _ = derived(monkeypatch, tmp_path, fake, table("nvidia_l4", lent(SMALL)))
        text = dump(found)
        assert "  from nvidia_l4: 20" in text
        assert dump(parse(text, Path("nvidia_l40s.yaml"))) == text


class TestTilesOfTheirSchedule:
    """Of schedule ampere on an L40S: no table lends them, and each is compared."""

    L4 = table("nvidia_l4", lent(SMALL))

    def test_the_least_estimate_is_chosen_and_belongs_to_the_run(
        self, tmp_path: Path, monkeypatch: Patch
    ) -> None:
        """So the table may lend it."""
        least = OWN[-1]
        fake = evaluator({SMALL: 100.0, least: 99.0})
        found, printed = derived(monkeypatch, tmp_path, fake, self.L4)
        (entry,) = found.entries
        assert (entry.config, entry.result.median_us) == (least, 99.0)
        assert entry.result.max_abs_err_floors == 1.0  # it was checked here
        assert not is_derived(found, entry)
        assert "lent by" not in printed

    def test_one_that_a_table_has_is_lent(self, tmp_path: Path, monkeypatch: Patch) -> None:
        fake = evaluator({OWN[0]: 99.0})
        found, printed = derived(monkeypatch, tmp_path, fake, table("nvidia_l4", lent(OWN[0])))
        assert [entry.config for entry in found.entries] == [OWN[0]]
        assert "lent by nvidia_l4" in printed
        assert fake.configs("check") == []

    def test_one_that_is_wrong_is_passed_over(self, tmp_path: Path, monkeypatch: Patch) -> None:
        def failing(stage: Stage, config: KernelConfig) -> Status | None:
            return Status.WRONG if stage == "check" and config in OWN else None

        fake = evaluator({SMALL: 100.0} | dict.fromkeys(OWN, 10.0), failing=failing)
        found, _ = derived(monkeypatch, tmp_path, fake, self.L4)
        assert [entry.config for entry in found.entries] == [SMALL]

    @pytest.mark.parametrize(
        ("gpu", "source"), [(L40S, "measured"), (H200, "measured"), (H200, "estimated")]
    )
    def test_none_where_a_gpu_measures_or_is_not_their_schedules(
        self, tmp_path: Path, monkeypatch: Patch, gpu: Gpu, source: Any
    ) -> None:
        """On a GPU ten minutes are for twenty specs; a search tries these tiles among the first."""
        fake = evaluator({SMALL: 100.0}, gpu=gpu, source=source)
        derived(monkeypatch, tmp_path, fake, self.L4)
        assert not set(OWN) & set(fake.configs("timed"))


FUSED = SPEC.for_direction("backward_fused")


@pytest.mark.parametrize(
    ("fused", "dkv", "source", "kept"),
    [(10.0, 4.0, "estimated", False), (8.0, 4.0, "estimated", False), (7.9, 4.0, "estimated", True),
     (10.0, 4.0, "untimed", True), (10.0, None, "estimated", True)],
)  # fmt: skip
def test_a_fused_backward_that_no_call_gets_is_not_written(
    fused: float, dkv: float | None, source: Any, kept: bool
) -> None:
    """It serves where dK/dV and dQ take longer together, by times of one source."""
    entries = [made_entry(FUSED, config=FA2, median_us=fused)]
    entries.append(made_entry(SPEC.for_direction("backward_dq"), config=FA2, median_us=4.0))
    if dkv is not None:
        spec = SPEC.for_direction("backward_dkv")
        entries.append(made_entry(spec, config=FA2, median_us=dkv, source=source))
    found = made_table(*entries)
    assert (FUSED in {entry.spec for entry in found.without_idle().entries}) == kept


@pytest.mark.parametrize(("us", "kept"), [(9.0, False), (7.0, True)])
def test_a_run_writes_a_fused_backward_only_where_two_kernels_are_slower(
    tmp_path: Path, monkeypatch: Patch, us: float, kept: bool
) -> None:
    apart = [made_entry(SPEC.for_direction(each), config=FA2, median_us=4.0) for each in APART]
    apart = [with_evidence(entry, runners_up=()) for entry in apart]
    save(made_table(*apart), tmp_path / "configs" / f"{H200.slug}.yaml")
    fake = Served(us=lambda config: us, gpu=H200, source="estimated")
    found, printed = run(monkeypatch, tmp_path, fake, specs=(FUSED,), seqs=(2048,), budget=ONLY)
    assert (FUSED in {entry.spec for entry in found.entries}) == kept
    assert ("not written: dK/dV and dQ of the table take no longer" in printed) == (not kept)


class TestTheSearchThatFollows:
    L4 = table("nvidia_l4", lent(SMALL, 1), lent(LARGE, 2))

    def test_it_begins_when_all_have_what_tables_hold(
        self, tmp_path: Path, monkeypatch: Patch
    ) -> None:
        best = seed_configs(SPEC, L40S)[-1]
        fake = evaluator({SMALL: 100.0, LARGE: 90.0, best: 50.0})
        found, printed = derived(
            monkeypatch, tmp_path, fake, self.L4, budget=Budget(trials=60), max_regret=0.0
        )
        lines = [line for line in printed.splitlines() if " configs tried" in line]
        tried = f"{3 + len(OWN)} of"
        assert [tried in line for line in lines] == [True, True, False, False]
        assert "2 searches go on from there, of 60 configs each" in printed
        assert [entry.config for entry in found.entries] == [best, best]
        assert [run.donor for run in found.runs] == [None]
        assert {entry.evidence.candidates for entry in found.entries} == {60}

    def test_it_keeps_what_was_lent_where_nothing_is_better(
        self, tmp_path: Path, monkeypatch: Patch
    ) -> None:
        """Configs within 5 % of the best tie in a search; none here is as near."""
        fake = evaluator({SMALL: 100.0, LARGE: 90.0})
        found, _ = derived(monkeypatch, tmp_path, fake, self.L4, budget=Budget(trials=20))
        assert {entry.config for entry in found.entries} == {LARGE}
        assert not any(is_derived(found, entry) for entry in found.entries)

    def test_runners_up_come_before_the_seeds(self, tmp_path: Path, monkeypatch: Patch) -> None:
        runner_up = replace(SMALL, num_stages=3)
        second = made_entry().evidence.runners_up[0]
        entry = with_evidence(lent(SMALL), runners_up=(replace(second, config=runner_up),))
        first = 2 + len(OWN)
        for trials in (1, first + 1):
            fake = evaluator({SMALL: 100.0})
            out = tmp_path / str(trials)
            derived(monkeypatch, out, fake, table("nvidia_l4", entry), budget=Budget(trials=trials))
            assert (runner_up in fake.configs("timed")) is (trials > 1)
            assert len(set(fake.configs("timed"))) == max(first, trials)

    def test_none_where_trials_are_used_up(self, tmp_path: Path, monkeypatch: Patch) -> None:
        fake = evaluator({SMALL: 100.0, LARGE: 90.0})
        _, printed = derived(monkeypatch, tmp_path, fake, self.L4, budget=Budget(trials=3))
        assert "go on from there" not in printed

    def test_also_where_no_config_of_a_table_is_right(
        self, tmp_path: Path, monkeypatch: Patch
    ) -> None:
        def failing(stage: Stage, config: KernelConfig) -> Status | None:
            return Status.SPILLS if config in (SMALL, LARGE, DEFAULTS, *OWN) else None

        fake = evaluator({}, failing=failing)
        found, printed = derived(monkeypatch, tmp_path, fake, self.L4, budget=Budget(trials=20))
        assert "no config of" in printed
        assert len(found.entries) == 2

    def test_a_killed_run_ends_as_if_nothing_had_been(
        self, tmp_path: Path, monkeypatch: Patch
    ) -> None:
        def go(name: str, **options: Any) -> tuple[Table, Served]:
            fake = evaluator({SMALL: 100.0, LARGE: 90.0}, **options)
            made = derived(monkeypatch, tmp_path / name, fake, self.L4, budget=Budget(trials=12))
            return made[0], fake

        whole, fake = go("whole")
        for kill_after in (3, 8, len(fake.asked) - 1):
            name = f"killed {kill_after}"
            with pytest.raises(Killed):
                go(name, kill_after=kill_after)
            again, rest = go(name)
            assert len(rest.asked) == len(fake.asked) - kill_after
            assert [with_evidence(entry, run="") for entry in again.entries] == [
                with_evidence(entry, run="") for entry in whole.entries
            ]


class TestTime:
    """A clock that the evaluator turns: each outcome takes a second."""

    def tuned(
        self, patch: Patch, out: Path, seconds: float, source: Any = "estimated"
    ) -> tuple[Table, str]:
        now = [0.0]

        class Slow(Served):
            def outcome(self, stage: Stage, *asked: Any) -> Outcome:
                now[0] += 1.0
                return super().outcome(stage, *asked)

        patch.setattr("time.monotonic", lambda: now[0])
        gpu = H200 if source == "measured" else L40S
        fake = Slow(us=lambda c: 1000.0 - c.br, gpu=gpu, source=source)
        donor = table("nvidia_l4", *(lent(SMALL, bucket) for bucket in range(4)))
        budget = Budget(seconds=seconds)
        return derived(patch, out, fake, donor, budget=budget)

    def test_a_run_begins_what_it_has_time_for(self, tmp_path: Path, monkeypatch: Patch) -> None:
        found, printed = self.tuned(monkeypatch, tmp_path, 7.0)
        assert BUCKETS[2] in [entry.bucket for entry in found.entries]  # the most used
        left = 4 - len(found.entries)
        assert 0 < left < 4
        assert f"{left} of them did not begin: the time was over" in printed

    @pytest.mark.parametrize("source", ["estimated", "measured"])
    def test_what_remains_is_for_the_searches(
        self, tmp_path: Path, monkeypatch: Patch, source: str
    ) -> None:
        """The table holds all after what tables hold; a search that would begin late does not."""
        found, printed = self.tuned(monkeypatch, tmp_path, 60.0, source)
        assert len(found.entries) == 4
        assert "did not begin" not in printed
        assert "4 searches go on from there" in printed
        assert 1 <= printed.count(" configs tried") - 4 <= 4
        assert {entry.result.source for entry in found.entries} == {source}


def test_on_a_gpu_what_was_lent_is_measured_and_belongs_to_it(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Checked there, whatever the donor knows; the run is the GPU's own."""
    fake = Served(us=lambda c: 90.0 if c == LARGE else 100.0 + c.br, gpu=L40S)
    donor = table("nvidia_l4", lent(SMALL), lent(LARGE, 2))
    found, printed = derived(monkeypatch, tmp_path, fake, donor)
    assert [entry.config for entry in found.entries] == [LARGE, LARGE]
    assert {entry.result.source for entry in found.entries} == {"measured"}
    assert {SMALL, LARGE, DEFAULTS} == set(fake.configs("check"))
    assert [run.donor for run in found.runs] == [None]
    assert "lent by" not in printed


def test_what_to_tune_comes_from_the_tables_the_most_used_first() -> None:
    half = replace(SPEC, dtype="float16")
    gradients = SPEC.for_direction("backward_dkv")
    wide = replace(SPEC, head_dim=256, head_dim_v=256)
    specs: list[AttentionSpec] = [half, gradients, replace(SPEC, window=True), wide, SPEC]
    entries = [made_entry(spec, bucket) for spec in specs for bucket in (BUCKETS[0], BUCKETS[2])]
    tables = [Table(gpu=H200, entries=tuple(entries))]
    work = workloads.of_tables(tables)
    order = [SPEC, wide, replace(SPEC, window=True), gradients, half]
    assert [spec for spec, _ in work] == order * 2
    assert [problem.seq_k for _, problem in work] == [8192] * 5 + [512] * 5
    only = workloads.of_tables(tables, lambda spec: spec == half, (1000, 2000))
    assert only == ((half, workload(half, 1000)),)


def test_the_length_is_that_of_most_tables() -> None:
    """Those of AMD come first, and have 4096 where the others have 8192."""
    here = BUCKETS[2]
    entries = [
        with_evidence(made_entry(SPEC, here), problem=workload(SPEC, seq))
        for seq in (4096, 8192, 8192)
    ]
    tables = [Table(gpu=L40S, entries=(entry,)) for entry in entries]
    assert workloads.of_tables(tables) == ((SPEC, workload(SPEC, 8192)),)


def test_tables_of_the_folder_are_read_with_their_evidence(tmp_path: Path) -> None:
    from flashgen.table.emit import tables_for

    entry = lent(SMALL)
    save(table("nvidia_l4", entry), tmp_path / "configs" / "nvidia_l4.yaml")
    found = tables_for(tmp_path, evidence=True)["nvidia_l4"]
    assert found == load_with_evidence(tmp_path / "configs" / "nvidia_l4.yaml")
    assert isinstance(found.run_of(found.entries[0]), Run)
