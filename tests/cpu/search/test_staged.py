"""search against a landscape made up here: what is evaluated, in what order, and what is chosen."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import PASSING, Source, Stage, Status
from flashgen.search.evidence import Evidence
from flashgen.search.goal import Found, NothingRight, Progress
from flashgen.search.study import Trials
from flashgen.spec.problem import workload
from tests.fakes import Failing, FakeEvaluator, Killed
from tests.makers import each, make_config
from tests.searches import (
    BEST,
    DEFAULT,
    GPU,
    SPACE,
    SPEC,
    fake,
    landscape,
    make_goal,
    noisy,
    open_log,
    run,
)


class TestWhatIsEvaluated:
    def test_all_are_taken_when_they_fit_the_budget(self, tmp_path: Path) -> None:
        evaluator = fake()
        found = run(tmp_path, evaluator, trials=len(SPACE))
        assert found.exhaustive
        assert found.candidates == found.legal == len(SPACE)
        assert sorted(evaluator.configs("compile"), key=SPACE.index) == list(SPACE)
        assert found.winner.config == BEST

    def test_exhaustive_by_name_takes_all_beyond_the_budget(self, tmp_path: Path) -> None:
        found = run(tmp_path, fake(), trials=3, sampler="exhaustive")
        assert found.exhaustive
        assert found.candidates == len(SPACE)

    @pytest.mark.parametrize("sampler", ["tpe", "random", "auto"])
    @pytest.mark.parametrize("estimates", [True, False])
    def test_no_more_are_counted_than_the_budget_has(
        self, tmp_path: Path, sampler: str, estimates: bool
    ) -> None:
        """The incumbent, and where nothing can be estimated the default, cost no trial."""

        def failing(stage: str, _: KernelConfig) -> Status | None:
            return Status.NO_ESTIMATE if stage == "timed" and not estimates else None

        evaluator = fake(source="estimated", failing=failing)
        goal = make_goal(incumbent=SPACE[-1], seeds=SPACE[:4])
        assert run(tmp_path, evaluator, goal=goal, trials=3, sampler=sampler).candidates == 3

    @pytest.mark.parametrize("sampler", ["tpe", "random"])
    def test_illegal_and_seen_proposals_cost_no_budget(
        self, tmp_path: Path, sampler: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        thirds = [config for number, config in enumerate(SPACE) if number % 3 == 0]
        goal = make_goal(legal=tuple(thirds), default=thirds[0], seeds=(thirds[1],))
        answered: list[Any] = []
        tell = Trials._tell

        def counted(self: Trials, trial: Any, value: float | None, attrs: Any, state: Any) -> None:
            answered.append(attrs["status"])
            tell(self, trial, value, attrs, state)

        monkeypatch.setattr(Trials, "_tell", counted)
        trials = len(thirds) - 2
        evaluator = fake()
        found = run(tmp_path, evaluator, goal=goal, trials=trials, sampler=sampler)
        compiled = evaluator.configs("compile")
        assert len(set(compiled)) == len(compiled) == trials == found.candidates
        assert set(compiled) <= set(thirds)
        assert not found.exhaustive
        assert {"illegal", "repeated"} & {
            *answered
        }  # the sampler proposed others, and was answered

    def test_seeds_come_first_and_the_incumbent_before_them(self, tmp_path: Path) -> None:
        incumbent = make_config(64, 16)  # of another space, so no sampler proposes it
        evaluator = fake(lambda config: 100.0 + config.br - config.bc / 10)
        run(tmp_path, evaluator, goal=make_goal(incumbent=incumbent))
        expected = [incumbent, DEFAULT, make_config(32, 32)]
        assert evaluator.configs("compile")[:3] == expected
        assert len(evaluator.configs("compile")) == 20 + 1  # the incumbent costs no trial

    def test_one_trial_still_has_incumbent_and_default(self, tmp_path: Path) -> None:
        incumbent = make_config(128, 32)
        found = run(tmp_path, fake(), goal=make_goal(incumbent=incumbent), trials=1)
        assert found.candidates == 1
        assert {found.default.config, found.incumbent and found.incumbent.config} == {
            DEFAULT,
            incumbent,
        }

    def test_compiles_are_asked_for_in_batches(self, tmp_path: Path) -> None:
        evaluator = fake()
        run(tmp_path, evaluator, trials=27)
        assert [size for stage, size in evaluator.batches if stage == "compile"] == [
            1,
            1,
            12,
            12,
            1,
        ]

    def test_a_failed_stage_ends_a_candidate(self, tmp_path: Path) -> None:
        ends: dict[int, tuple[Stage, Status]] = {
            0: ("compile", Status.SPILLS), 1: ("check", Status.WRONG), 2: ("rough", Status.RUN_ERROR),
        }  # fmt: skip

        def failing(stage: Stage, config: KernelConfig) -> Status | None:
            where, status = ends.get(SPACE.index(config) % 4, ("final", Status.OK))
            return status if stage == where else None

        evaluator = fake(failing=failing)
        default = SPACE[3]
        found = run(tmp_path, evaluator, goal=make_goal(default=default), trials=len(SPACE))
        for number, stage in enumerate(("compile", "check", "rough")):
            after = ("compile", "check", "rough", "timed", "final")[number + 1 :]
            ended = {config for config in SPACE if SPACE.index(config) % 4 == number}
            assert ended <= set(evaluator.configs(stage))
            assert all(ended.isdisjoint(evaluator.configs(later)) for later in after)
        assert SPACE.index(found.winner.config) % 4 == 3

    def test_what_is_far_from_the_best_is_dropped_and_recorded(self, tmp_path: Path) -> None:
        evaluator = fake(us=lambda config: 100.0 if config == DEFAULT else 151.0)
        found = run(tmp_path, evaluator, trials=len(SPACE))
        assert evaluator.configs("timed") == [DEFAULT]
        assert found.winner.config == DEFAULT
        assert (tmp_path / "log.jsonl").read_text().count('"dropped"') == len(SPACE) - 1

    def test_a_failure_is_no_reason_to_stop_and_all_failing_is_one_sentence(
        self, tmp_path: Path
    ) -> None:
        evaluator = fake(failing=lambda stage, config: Status.COMPILE_CRASH)
        with pytest.raises(NothingRight, match=r"of 20 tried; .* compile_crash: made to fail"):
            run(tmp_path, evaluator)

    def test_a_spec_without_a_legal_config_says_why(self, tmp_path: Path) -> None:
        goal = make_goal(legal=(), seeds=(), default=make_config(256, 256, num_stages=4))
        with pytest.raises(
            NothingRight, match=f"no config .* is legal on {GPU.slug}: .* shared memory"
        ):
            run(tmp_path, fake(), goal=goal)

    @pytest.mark.parametrize("source", ["measured", "estimated"])
    def test_late_it_ends_with_the_best_so_far(self, tmp_path: Path, source: Source) -> None:
        found = run(tmp_path, fake(source=source), seconds=0.0)
        assert found.winner.config == DEFAULT
        assert found.candidates == 1

    def test_no_candidate_is_begun_after_the_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = itertools.count()
        monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
        found = run(tmp_path, fake(), trials=40, seconds=12.0)
        assert 2 < found.candidates < 40
        assert found.winner.timing is not None

    def test_an_outcome_is_asked_for_and_told_once_and_the_latest_time_counts(
        self, tmp_path: Path
    ) -> None:
        turn, told = itertools.count(100), list[Progress]()
        evaluator = fake(us=lambda _: float(next(turn)))
        with open_log(tmp_path) as log:
            evidence = Evidence(make_goal(), evaluator, log, told.append)
            for stage in ("compile", "check", "rough", "timed", "rough"):
                evidence.ask(stage, [DEFAULT])  # type: ignore[arg-type]
            assert [each.stage for each in told] == ["compile", "check", "rough", "timed"]
            (timed,) = evidence.of("timed")
            assert timed.timing is not None
            assert evidence.us(DEFAULT) == told[-1].default_us == timed.timing.median_us

    def test_what_fails_in_its_rough_time_is_not_said_to_be_slow(self, tmp_path: Path) -> None:
        evaluator = fake(
            failing=lambda *asked: Status.RUN_ERROR if asked == ("rough", SPACE[0]) else None
        )
        with open_log(tmp_path) as log:
            evidence = Evidence(make_goal(), evaluator, log, lambda _: None)
            evidence.judge = lambda outcome: replace(outcome, status=Status.DROPPED)
            statuses = [each.status for each in evidence.ask("rough", SPACE[:2])]
        assert statuses == [Status.RUN_ERROR, Status.DROPPED]


class TestKilled:
    @pytest.mark.parametrize(
        ("fields", "sampler"),
        each(
            [
                ({"guess": noisy}, "auto"),
                ({"source": "measured"}, "auto"),
                ({"source": "estimated"}, "auto"),
                ({"guess": noisy}, "exhaustive"),
            ],
            2,
            "a second and a half a search",
        ),
    )
    def test_a_resumed_search_repeats_nothing_and_ends_alike(
        self, tmp_path: Path, fields: dict[str, Any], sampler: str
    ) -> None:
        whole = fake(**fields)
        expected = run(tmp_path / "whole", whole, sampler=sampler)
        kept = [item for item in whole.asked if item[0] != "final"]
        for kill_after in (0, 5, 41, len(kept) - 1):
            folder = tmp_path / str(kill_after)
            killed, resumed, again = (fake(**fields) for _ in range(3))
            killed.kill_after = kill_after
            with pytest.raises(Killed):
                run(folder, killed, sampler=sampler)
            assert run(folder, resumed, sampler=sampler) == expected
            assert killed.asked + resumed.asked == whole.asked
        assert run(folder, again, sampler=sampler) == expected
        assert again.asked == []  # a finished search

    def test_a_final_round_that_was_cut_is_timed_again_whole(self, tmp_path: Path) -> None:
        whole = fake()
        expected = run(tmp_path / "whole", whole)
        killed = fake(kill_after=len(whole.asked) - 1)
        with pytest.raises(Killed):
            run(tmp_path, killed)
        resumed = fake()
        assert run(tmp_path, resumed) == expected
        assert resumed.asked == [item for item in whole.asked if item[0] == "final"]

    @pytest.mark.parametrize("source", ["measured", "estimated"])
    def test_run_again_with_its_own_winner_it_takes_the_same_path(
        self, tmp_path: Path, source: Source
    ) -> None:
        first = run(tmp_path, fake(source=source))
        again = fake(source=source)
        second = run(tmp_path, again, goal=make_goal(incumbent=first.winner.config))
        assert again.asked == []
        assert second.winner == first.winner
        assert not second.replaced

    def test_another_length_shares_compiles_and_checks(self, tmp_path: Path) -> None:
        run(tmp_path, fake(), trials=len(SPACE))
        other = fake()
        run(tmp_path, other, goal=make_goal(problem=workload(SPEC, 512)), trials=len(SPACE))
        assert {stage for stage, _ in other.asked} == {"rough", "timed", "final"}

    @pytest.mark.slow("ten searches: 3 s")
    def test_tpe_learns(self, tmp_path: Path) -> None:
        """Over five seeds, the mean of what TPE proposes last is well below that of chance."""
        means = {}
        for sampler in ("tpe", "random"):
            late: list[float] = []
            for seed in range(5):
                evaluator = fake()
                run(tmp_path / f"{sampler}{seed}", evaluator, sampler=sampler, seed=seed, trials=40)
                late += [landscape(config) for config in evaluator.configs("compile")[26:]]
            means[sampler] = sum(late) / len(late)
        assert means["tpe"] < means["random"] - 5.0


class TestOffline:
    def test_only_the_best_and_the_default_are_checked(self, tmp_path: Path) -> None:
        evaluator = fake(source="estimated")
        found = run(tmp_path, evaluator, trials=len(SPACE))
        ranked = sorted(SPACE, key=landscape)
        assert evaluator.configs("check") == [*ranked[:3], DEFAULT]
        assert all(o.check and o.check.passed for o in (found.winner, *found.runners_up))
        assert [o.config for o in (found.winner, *found.runners_up)] == ranked[:3]
        winner = found.winner
        assert (winner.stage, winner.registers, winner.shared_bytes) == ("timed", 128, 65536)
        assert "final" not in {stage for stage, _ in evaluator.asked}

    def test_checks_go_on_in_order_until_three_are_right(self, tmp_path: Path) -> None:
        ranked = sorted(SPACE, key=landscape)
        wrong = {ranked[0], ranked[2], ranked[3], ranked[5]}
        evaluator = fake(
            source="estimated",
            failing=lambda stage, c: Status.WRONG if stage == "check" and c in wrong else None,
        )
        found = run(tmp_path, evaluator, trials=len(SPACE))
        chosen = [o.config for o in (found.winner, *found.runners_up)]
        assert chosen == [ranked[1], ranked[4], ranked[6]]
        assert set(evaluator.configs("check")) == {*ranked[:7], DEFAULT}

    def test_without_any_estimate_the_order_is_seeds_then_space(self, tmp_path: Path) -> None:
        spilling = {DEFAULT, SPACE[1]}
        wrong = {SPACE[0]}

        def failing(stage: Stage, config: KernelConfig) -> Status | None:
            if stage == "compile":
                return Status.SPILLS if config in spilling else None
            if stage == "check":
                return Status.WRONG if config in wrong else None
            return Status.NO_ESTIMATE

        evaluator = fake(source="estimated", failing=failing)
        seed = make_config(32, 32)
        found = run(tmp_path, evaluator, trials=20)
        right = [config for config in (seed, *SPACE[2:]) if config not in wrong]
        assert [o.config for o in (found.winner, *found.runners_up)] == right[:3]
        assert found.winner.source == "untimed"
        assert found.winner.timing is None
        assert found.winner.check is not None
        assert found.default.status is Status.SPILLS
        assert found.candidates < 20  # three are right: there is nothing to rank the others by

    def test_without_any_estimate_facts_of_all_seeds_are_compared(self, tmp_path: Path) -> None:
        """The last seed fills an SM; many that are right come before it."""
        seeds = tuple(SPACE[n] for n in (7, 3, 5, 2, 9, 4, 8, 6))
        evaluator = fake(
            source="estimated",
            failing=lambda stage, _: Status.NO_ESTIMATE if stage == "timed" else None,
            residents=lambda config: 256 // config.br if config == seeds[-1] else 1,
        )
        found = run(tmp_path, evaluator, goal=make_goal(seeds=seeds), trials=20)
        assert found.winner.config == seeds[-1]
        assert len(seeds) < found.candidates < 20  # in batches of four

    def test_what_the_same_chip_was_measured_with_comes_before_estimates(
        self, tmp_path: Path
    ) -> None:
        goal = make_goal(derived=True, trusted=SPACE[5])
        found = run(tmp_path, fake(source="estimated"), goal=goal, trials=len(SPACE))
        assert found.winner.config == SPACE[5]

    FASTEST, LEAN, NEAR, NEXT = SPACE[20:24]
    TIED: ClassVar = {FASTEST: 100.0, LEAN: 104.0, NEAR: 103.0, NEXT: 104.5}

    def tied(self, **fields: Any) -> FakeEvaluator:
        """Four lie within 5 % of the best, all others at 5 % and more of the second best."""
        return fake(
            us=lambda config: self.TIED.get(config, 108.5 + SPACE.index(config)),
            source="estimated",
            registers=lambda config: {self.LEAN: 90, self.NEAR: 120}.get(config, 128),
            **fields,
        )

    def test_in_a_tie_what_neighbours_share_wins_before_that(self, tmp_path: Path) -> None:
        goal = make_goal(neighbours=(self.NEXT, SPACE[0], SPACE[0]))
        evaluator = self.tied()
        found = run(tmp_path, evaluator, goal=goal, trials=len(SPACE))
        chosen = [o.config for o in (found.winner, *found.runners_up)]
        assert chosen == [self.NEXT, self.LEAN, self.NEAR]  # SPACE[0] is no tie
        assert set(evaluator.configs("check")) == {*chosen, self.FASTEST, DEFAULT}

    def test_a_tie_is_with_the_best_that_is_right(self, tmp_path: Path) -> None:
        """Without FASTEST, the limit is 108.15: LEAN and NEXT stay in, and one more comes in."""
        lean = SPACE[0]
        evaluator = self.tied(
            failing=lambda *asked: Status.WRONG if asked == ("check", self.FASTEST) else None
        )
        evaluator.us = lambda config: 107.0 if config == lean else self.tied().us(config)
        evaluator.registers = lambda config: 80 if config == lean else self.tied().registers(config)
        found = run(tmp_path, evaluator, trials=len(SPACE))
        chosen = [o.config for o in (found.winner, *found.runners_up)]
        assert chosen == [lean, self.LEAN, self.NEAR]


class TestFinalRound:
    def test_it_holds_the_best_few_the_incumbent_and_the_default(self, tmp_path: Path) -> None:
        incumbent = max(SPACE, key=landscape)
        evaluator = fake()
        goal = make_goal(incumbent=incumbent)
        found = run(tmp_path, evaluator, goal=goal, trials=len(SPACE))
        finals = evaluator.configs("final")
        assert set(finals) == {*sorted(SPACE, key=landscape)[:4], incumbent, DEFAULT}
        assert ("final", len(finals)) in evaluator.batches  # one round, asked for at once
        assert found.replaced
        for outcome in (found.winner, found.default, found.incumbent):
            assert outcome is not None
            assert outcome.stage == "final"

    def test_of_what_tables_hold_fewer_race(self, tmp_path: Path) -> None:
        evaluator = fake()
        run(tmp_path, evaluator, goal=make_goal(derived=True), trials=len(SPACE))
        assert {*evaluator.configs("final")} == {*sorted(SPACE, key=landscape)[:2], DEFAULT}

    def test_an_unbeaten_incumbent_stays(self, tmp_path: Path) -> None:
        incumbent = sorted(SPACE, key=landscape)[1]
        goal = make_goal(incumbent=incumbent)
        found = run(tmp_path, fake(spread=60.0), goal=goal, trials=len(SPACE))
        assert found.winner.config == incumbent
        assert not found.replaced
        assert found.runners_up[0].config == BEST

    def test_a_finalist_that_fails_is_not_chosen(self, tmp_path: Path) -> None:
        evaluator = fake(
            failing=lambda stage, c: Status.RUN_ERROR if (stage, c) == ("final", BEST) else None
        )
        found = run(tmp_path, evaluator, trials=len(SPACE))
        assert found.winner.config != BEST
        assert BEST not in [outcome.config for outcome in found.runners_up]

    def test_where_all_others_fail_runners_up_are_those_of_before(self, tmp_path: Path) -> None:
        ranked = sorted(SPACE, key=landscape)
        evaluator = fake(
            failing=lambda stage, c: Status.RUN_ERROR if stage == "final" and c != BEST else None
        )
        found = run(tmp_path, evaluator, trials=len(SPACE))
        assert found.winner.config == BEST
        assert [outcome.config for outcome in found.runners_up] == ranked[4:6]

    def test_a_default_that_was_dropped_races_all_the_same(self, tmp_path: Path) -> None:
        goal = make_goal(default=max(SPACE, key=landscape), incumbent=BEST)
        evaluator = fake()
        found = run(tmp_path, evaluator, goal=goal, trials=len(SPACE))
        assert found.default.ok
        assert found.default.stage == "final"
        assert goal.default not in evaluator.configs("timed")

    def test_an_incumbent_that_fails_now_is_replaced(self, tmp_path: Path) -> None:
        incumbent = make_config(128, 32)
        evaluator = fake(
            failing=lambda stage, c: Status.WRONG if (stage, c) == ("check", incumbent) else None
        )
        found = run(tmp_path, evaluator, goal=make_goal(incumbent=incumbent))
        assert found.replaced
        assert found.incumbent is not None
        assert found.incumbent.status is Status.WRONG


class TestTwin:
    """A winner that loads by descriptors ships with its pointer twin, or not at all."""

    AHEAD = replace(BEST, loads="descriptor")
    NEXT = make_config(128, 32)
    GOAL = make_goal(legal=(AHEAD, NEXT, DEFAULT), seeds=())
    TIMES: ClassVar = {AHEAD: 100.0, NEXT: 110.0, DEFAULT: 120.0}

    def run(
        self, folder: Path, source: Source, *failing: tuple[Stage, Status], **changes: Any
    ) -> tuple[Found, FakeEvaluator]:
        statuses = {(stage, self.AHEAD.pointer_twin(SPEC)): status for stage, status in failing}
        evaluator = fake(
            us=lambda config: self.TIMES[config],
            source=source,
            failing=lambda *asked: statuses.get(asked),
        )
        return run(folder, evaluator, goal=replace(self.GOAL, **changes)), evaluator

    @pytest.mark.parametrize("source", ["measured", "estimated"])
    @pytest.mark.parametrize(
        ("failing", "ships"),
        [
            ([], True),
            ([("compile", Status.SPILLS)], True),
            ([("compile", Status.SERIALIZED)], True),
            ([("compile", Status.SPILLS), ("check", Status.WRONG)], False),
            ([("check", Status.WRONG)], False),
            ([("check", Status.RUN_ERROR)], False),
            ([("compile", Status.OUT_OF_RESOURCES)], False),
            ([("compile", Status.COMPILE_CRASH)], False),
        ],
    )
    def test_it_may_be_slow_and_nothing_else(
        self, tmp_path: Path, source: Source, failing: list[tuple[Stage, Status]], ships: bool
    ) -> None:
        found, _ = self.run(tmp_path, source, *failing)
        assert found.winner.config == (self.AHEAD if ships else self.NEXT)
        if not any(status in PASSING for _, status in failing):
            again, evaluator = self.run(tmp_path, source)
            assert again == found
            assert evaluator.asked == []  # the log has the twin's outcomes, too

    def test_what_comes_next_must_beat_the_default_as_well(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(self.TIMES, self.NEXT, 119.9)
        found, _ = self.run(tmp_path, "measured", ("check", Status.WRONG))
        assert found.winner.config == DEFAULT

    @pytest.mark.parametrize("source", ["measured", "estimated"])
    def test_where_no_other_is_right_there_is_nothing(self, tmp_path: Path, source: Source) -> None:
        only = {"legal": (self.AHEAD,), "default": self.AHEAD}
        with pytest.raises(
            NothingRight, match=rf"{self.AHEAD.pointer_twin(SPEC).label}, wrong: made"
        ):
            self.run(tmp_path, source, ("check", Status.WRONG), **only)


def test_a_sampler_that_is_made_anew_for_each_trial_takes_the_last_seed(tmp_path: Path) -> None:
    assert run(tmp_path, fake(), sampler="tpe", seed=2**32 - 1).candidates == 20


class TestInterrupt:
    """Ctrl-C: the best of what is known is found, and said to be of an interrupted search."""

    @staticmethod
    def at(stage: Stage, turn: int, times: int = 1) -> Failing:
        """Ctrl-C when this stage is asked for the turn-th time, and the next times - 1 times."""
        count = 0

        def interrupt(asked: Stage, config: KernelConfig) -> Status | None:
            nonlocal count
            count += asked == stage
            if turn <= count < turn + times and asked == stage:
                raise KeyboardInterrupt
            return None

        return interrupt

    @pytest.mark.parametrize("source", ["measured", "estimated"])
    def test_the_best_so_far_is_found(self, tmp_path: Path, source: Source) -> None:
        evaluator = fake(failing=self.at("timed", 12), source=source)
        found = run(tmp_path, evaluator, trials=40)
        assert found.interrupted
        timed = {config for stage, config in evaluator.asked if stage == "timed"}
        assert found.winner.config == min(timed, key=landscape)
        assert found.candidates < 40
        whole = run(tmp_path, fake(source=source), trials=40)
        assert not whole.interrupted
        assert whole == run(tmp_path / "undisturbed", fake(source=source), trials=40)

    def test_nothing_but_the_rivals_is_nothing_to_save(self, tmp_path: Path) -> None:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, fake(failing=self.at("timed", 2)), trials=40)

    def test_a_second_one_ends_at_once(self, tmp_path: Path) -> None:
        once = self.at("timed", 12)
        again = self.at("final", 1)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, fake(failing=lambda *asked: once(*asked) or again(*asked)), trials=40)
