"""search/decide.py: the order that estimates give, on a GPU and without one, and what cannot win any more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Outcome, Status, Timing
from flashgen.search.decide import (
    ENOUGH_RATIOS,
    PROMISING,
    by_estimate,
    by_facts,
    can_win,
    ranks,
    to_measure,
)
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import workload
from tests.fakes import FakeEvaluator
from tests.makers import make_config, make_spec

SPEC = make_spec()
A, B, C, D, E = (make_config(br, 32) for br in (16, 32, 64, 128, 256))
GUESS = {A: 100.0, B: 149.0, C: 151.0, D: 400.0}


def timing(us: float, low_us: float | None = None) -> Timing:
    return Timing(median_us=us, low_us=us if low_us is None else low_us, high_us=us)


def outcome(config: KernelConfig, us: float | None, **fields: object) -> Outcome:
    """Compiled, and estimated at `us`; timing and estimate are the same, as with no GPU."""
    fake = FakeEvaluator(us=lambda _: 1.0, gpu=TARGETS["nvidia_h200"])
    made = fake.outcome("compile", SPEC, workload(SPEC, 512), config)
    estimate = None if us is None else timing(us)
    changes = {"timing": estimate, "estimate": estimate, "registers": 128} | fields
    return replace(made, **changes)  # type: ignore[arg-type]


class TestToMeasure:
    COMPILED = tuple(outcome(config, GUESS.get(config)) for config in (D, E, C, B, A))

    def order(self, least_us: float, *always: KernelConfig) -> list[list[KernelConfig]]:
        parts = to_measure(self.COMPILED, least_us, always)
        return [[outcome.config for outcome in part] for part in parts]

    def test_the_promising_come_by_estimate_and_one_without_keeps_its_place(self) -> None:
        """D and C, of those before and after it, are postponed: E was given before B and A."""
        assert self.order(100.0) == [[E, A, B], [C, D]]
        last = [*(o for o in self.COMPILED if o.config != E), outcome(E, None)]
        promising, _ = to_measure(last, 100.0, ())
        assert [each.config for each in promising] == [A, B, E]

    def test_between_the_estimated_it_keeps_its_place_too(self) -> None:
        given = [outcome(c, GUESS.get(c)) for c in (B, E, A)]
        promising, _ = to_measure(given, 100.0, ())
        assert [each.config for each in promising] == [A, E, B]

    def test_seeds_without_an_estimate_lead_in_their_order(self) -> None:
        """Of the space and the seeds only these are what only a GPU can judge."""
        given = [outcome(c, us) for c, us in ((A, 100.0), (D, None), (B, 90.0), (E, None))]
        promising, _ = to_measure(given, 90.0, (B, E, D))
        assert [each.config for each in promising] == [D, E, B, A]

    def test_of_those_without_an_estimate_the_sound_come_first(self) -> None:
        slow = {D: 2, C: 1}
        given = [outcome(c, us, shortcomings=slow.get(c, 0)) for c, us in ((D, None), (A, 100.0))]
        given += [outcome(c, None, shortcomings=slow.get(c, 0)) for c in (C, E)]
        promising, _ = to_measure(given, 100.0, ())
        assert [each.config for each in promising] == [E, A, C, D]

    def test_the_limit_itself_is_promising(self) -> None:
        at, above = outcome(A, PROMISING * 80.0), outcome(B, PROMISING * 80.0 + 0.1)
        assert to_measure([above, at], 80.0, ()) == ([at], [above])

    def test_the_least_estimate_may_be_that_of_another(self) -> None:
        assert self.order(90.0) == [[E, A], [B, C, D]]

    def test_what_must_be_measured_is_never_postponed(self) -> None:
        assert self.order(100.0, D) == [[A, E, B, D], [C]]

    def test_equal_estimates_keep_the_order_given(self) -> None:
        equal = [outcome(config, 100.0) for config in (C, A, B)]
        assert to_measure(equal, 100.0, ()) == (equal, [])


class TestCanWin:
    """Measured times are 2 to 3 times the estimates, and the best is 200 us."""

    MEASURED = ((100.0, 200.0), *((100.0, 300.0) for _ in range(ENOUGH_RATIOS - 1)))

    @pytest.mark.parametrize(("low_us", "can"), [(99.0, True), (100.0, True), (101.0, False)])
    def test_the_lower_edge_times_the_least_ratio_decides(self, low_us: float, can: bool) -> None:
        assert can_win(timing(500.0, low_us), self.MEASURED) is can

    def test_few_measurements_prove_nothing(self) -> None:
        assert can_win(timing(1e9), self.MEASURED[:-1])

    def test_without_an_estimate_anything_can_win(self) -> None:
        assert can_win(None, self.MEASURED)


class TestByEstimate:
    def order(self, *outcomes: Outcome, neighbours: tuple[KernelConfig, ...] = ()) -> list[object]:
        return [outcome.config for outcome in by_estimate(outcomes, neighbours)]

    def test_nothing(self) -> None:
        assert by_estimate([]) == []

    def test_beyond_a_tie_the_estimate_decides(self) -> None:
        spills = outcome(A, 100.0, registers=255, spill_bytes=64)
        assert self.order(outcome(B, 106.0), outcome(C, 105.1), spills) == [A, C, B]

    def test_in_a_tie_registers_decide(self) -> None:
        assert self.order(outcome(A, 100.0), outcome(B, 105.0, registers=96)) == [B, A]

    def test_then_the_estimate_then_the_order_given(self) -> None:
        tied = outcome(B, 101.0), outcome(A, 101.0), outcome(C, 100.0)
        assert self.order(*tied) == [C, B, A]

    def test_neighbours_come_before_registers_and_the_most_of_them_first(self) -> None:
        tied = outcome(A, 100.0, registers=64), outcome(B, 102.0), outcome(C, 104.0)
        assert self.order(*tied, neighbours=(B,)) == [B, A, C]
        assert self.order(*tied, neighbours=(B, C, C)) == [C, B, A]

    def test_what_the_interpreter_runs_comes_before_all_else(self) -> None:
        modelled = replace(A, schedule="ampere", num_stages=1)
        assert not modelled.interpretable
        spills = outcome(B, 105.0, spill_bytes=8)
        assert self.order(outcome(modelled, 100.0), spills, neighbours=(modelled,)) == [B, modelled]
        beyond = outcome(B, 105.1)
        assert self.order(outcome(modelled, 100.0), beyond) == [modelled, B]

    def test_no_spill_comes_before_neighbours(self) -> None:
        spills = outcome(A, 100.0, spill_bytes=8)
        assert self.order(spills, outcome(B, 104.0), neighbours=(A, A)) == [B, A]

    def test_all_ties_are_with_the_best_not_with_the_next(self) -> None:
        chain = outcome(A, 100.0), outcome(B, 104.0, registers=96), outcome(C, 108.0, registers=32)
        assert self.order(*chain) == [B, A, C]

    def test_those_without_an_estimate_are_last_in_the_order_given(self) -> None:
        none = [
            outcome(c, None, status=Status.NO_ESTIMATE, registers=r) for c, r in ((E, 200), (D, 32))
        ]
        assert self.order(*none, outcome(A, 100.0)) == [A, E, D]
        assert self.order(*none, neighbours=(D,)) == [E, D]

    def test_where_none_is_near_the_best_at_all_sizes_a_tie_is_with_the_least_loss(self) -> None:
        one, other = timing(100.0), timing(110.0)
        given = (
            outcome(A, 100.0, timing=replace(one, batches_us=(100.0, 120.0)), registers=200),
            outcome(B, 110.0, timing=replace(other, batches_us=(120.0, 100.0)), registers=96),
            outcome(C, 100.0, timing=replace(one, batches_us=(100.0, 150.0)), registers=32),
        )
        assert self.order(*given) == [B, A, C]


def test_equal_values_share_their_mean_rank() -> None:
    assert ranks([3.0, 1.0, 3.0, 2.0]) == [3.5, 1.0, 3.5, 2.0]


class TestByFacts:
    """Where no time is known: signs of trouble, cycles a score, warps of an SM, stages, the order."""

    def order(self, *facts: tuple[KernelConfig, int, tuple[float, ...], int]) -> list[KernelConfig]:
        """facts: config, shortcomings, cycles a score and residents."""
        given = [
            outcome(c, None, shortcomings=slow, cycles=cycles, residents=blocks)
            for c, slow, cycles, blocks in facts
        ]
        return [each.config for each in by_facts(given)]

    def test_one_with_signs_of_trouble_comes_last(self) -> None:
        assert self.order((D, 1, (0.1, 0.1), 2), (A, 0, (0.2, 0.2), 1)) == [A, D]

    def test_what_the_interpreter_runs_comes_before_all_else(self) -> None:
        modelled = replace(A, schedule="ampere", num_stages=1)
        few, many = (0.1, 0.1), (0.2, 0.2)
        assert self.order((modelled, 0, few, 2), (A, 1, many, 1)) == [A, modelled]

    def test_the_pipe_that_bounds_comes_before_instructions(self) -> None:
        assert self.order((D, 0, (0.07, 0.05), 2), (C, 0, (0.06, 0.06), 1)) == [C, D]
        assert self.order((D, 0, (0.06, 0.06), 2), (C, 0, (0.06, 0.05), 1)) == [C, D]

    def test_then_warps_of_an_sm_and_stages(self) -> None:
        few = make_config(64, 64, num_warps=4)
        many = make_config(64, 64, num_warps=8)
        staged = replace(few, num_stages=4)
        same = (0.06, 0.05)
        assert self.order((few, 0, same, 2), (many, 0, same, 2)) == [many, few]
        assert self.order((few, 0, same, 2), (staged, 0, same, 2)) == [staged, few]

    def test_without_cycles_the_larger_tile_leads_on_its_own_side(self) -> None:
        wide, tall = make_config(32, 128), make_config(128, 32)
        assert self.order((wide, 0, (), 1), (tall, 0, (), 1)) == [tall, wide]
        dkv = SPEC.for_direction("backward_dkv")
        made = [replace(outcome(c, None, residents=1), spec=dkv) for c in (tall, wide)]
        assert [each.config for each in by_facts(made)] == [wide, tall]
