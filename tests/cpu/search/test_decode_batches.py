"""A decode is searched for several numbers of sequences, and launched for what an SM has room for."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Outcome, Source, Timing
from flashgen.search.decide import by_estimate, by_loss, losses
from flashgen.search.goal import Goal
from flashgen.spec.problem import Problem, mean_work, timed_problems, workload
from tests.fakes import FakeEvaluator, digest_of
from tests.makers import make_config, make_spec
from tests.searches import fake, run

SPEC = make_spec("bfloat16", 128, direction="decode")
SPACE = tuple(make_config(16, bc, num_stages=n) for bc in (32, 64, 128) for n in (2, 3))
DEFAULT = make_config(16, 64, num_stages=4, blocks_per_sm=2)
A, B, C = SPACE[:3]


def goal(**changes: Any) -> Goal:
    made = Goal(
        spec=SPEC,
        problem=workload(SPEC, 8192),
        legal=SPACE,
        seeds=SPACE[:1],
        default=DEFAULT,
        digest_of=lambda spec, config: digest_of(spec, config.kernel),
    )
    return replace(made, **changes)


def residents(config: KernelConfig) -> int:
    return {32: 5, 64: 3, 128: 1}[config.bc]


def us(config: KernelConfig) -> float:
    """As many blocks as fit are fast; more and fewer are slow."""
    return 100.0 + config.bc + 50.0 * abs(config.blocks_per_sm - residents(config))


def searched(folder: Path, source: Source, **changes: Any) -> tuple[Any, FakeEvaluator]:
    class OneKernel(FakeEvaluator):
        def outcome(self, *asked: Any) -> Outcome:
            made = super().outcome(*asked)
            return replace(made, digest=digest_of(SPEC, made.config.kernel))

    evaluator = OneKernel(us=us, gpu=fake().gpu, source=source, residents=residents)
    return run(folder, evaluator, goal=goal(**changes), trials=20), evaluator


@pytest.mark.parametrize("source", ["estimated", "measured"])
class TestBlocksOnAnSm:
    def test_a_kernel_is_launched_for_as_many_as_have_room(
        self, tmp_path: Path, source: Source
    ) -> None:
        found, evaluator = searched(tmp_path, source)
        assert found.winner.config == replace(found.winner.config.kernel, blocks_per_sm=5)
        for config in evaluator.configs("timed"):
            wanted = 2 if config == DEFAULT else residents(config)
            assert config.blocks_per_sm == wanted

    def test_the_default_stays_what_runs_untuned(self, tmp_path: Path, source: Source) -> None:
        found, _ = searched(tmp_path, source)
        assert found.default.config == DEFAULT
        assert found.default.timing is not None
        assert found.default.timing.median_us == us(DEFAULT)

    def test_launches_of_one_kernel_are_checked_once(self, tmp_path: Path, source: Source) -> None:
        held = replace(A, blocks_per_sm=4)
        found, evaluator = searched(tmp_path, source, incumbent=held)
        checked = evaluator.configs("check")
        assert len(checked) == len(set(checked)) == len({config.kernel for config in checked})
        assert found.incumbent is not None
        assert found.incumbent.config == held
        assert found.winner.config == replace(A, blocks_per_sm=5)
        assert found.winner.check is not None

    def test_an_incumbent_that_is_launched_so_competes_once(
        self, tmp_path: Path, source: Source
    ) -> None:
        found, evaluator = searched(tmp_path, source, incumbent=replace(A, blocks_per_sm=5))
        assert not found.replaced
        chosen = [found.winner.config, *(other.config for other in found.runners_up)]
        assert len(set(chosen)) == len(chosen)
        stages = [(stage, config) for stage, config in evaluator.asked if stage != "compile"]
        assert len(set(stages)) == len(stages)

    def test_a_search_that_is_repeated_asks_nothing(self, tmp_path: Path, source: Source) -> None:
        first, _ = searched(tmp_path, source)
        again, evaluator = searched(tmp_path, source)
        assert again.winner.config == first.winner.config
        assert evaluator.asked == []


def test_invariant_decodes_have_fixed_parts(tmp_path: Path) -> None:
    spec, default = replace(SPEC, invariant=True), DEFAULT.kernel
    evaluator = FakeEvaluator(us=us, gpu=fake().gpu, source="estimated", residents=lambda config: 5)
    plain = replace(goal(spec=spec, default=default), digest_of=digest_of)
    run(tmp_path, evaluator, goal=plain, trials=20)
    assert {config.blocks_per_sm for _, config in evaluator.asked} == {1}


def test_a_decode_is_timed_for_1_4_16_and_64_sequences() -> None:
    problem = workload(SPEC, 8192)
    assert [each.batch for each in timed_problems(SPEC, problem)] == [1, 4, 16, 64]
    assert timed_problems(SPEC, problem)[-1] == problem
    few = replace(problem, batch=5)
    assert [each.batch for each in timed_problems(SPEC, few)] == [1, 4, 5]
    forward = make_spec()
    assert timed_problems(forward, problem) == (problem,)


def test_times_of_batches_are_a_geometric_mean() -> None:
    timings = [Timing(median_us=us, low_us=us / 2, high_us=us * 3) for us in (1.0, 4.0, 16.0, 64.0)]
    mean = Timing.of_batches(timings)
    assert mean.median_us == pytest.approx(8.0)
    assert (mean.low_us, mean.high_us) == (pytest.approx(4.0), pytest.approx(24.0))
    assert mean.batches_us == (1.0, 4.0, 16.0, 64.0)
    assert Timing.of_batches(timings[:1]) == timings[0]

    def keys(_: Any, problem: Problem) -> float:
        return float(problem.batch)

    assert mean_work(keys, SPEC, workload(SPEC, 512)) == pytest.approx(8.0)


def estimated(config: KernelConfig, *batches_us: float, registers: int = 128) -> Outcome:
    each = [Timing(median_us=time, low_us=time, high_us=time) for time in batches_us]
    timing = Timing.of_batches(each)
    made = fake(us, source="estimated").outcome("timed", SPEC, workload(SPEC, 512), config)
    return replace(made, timing=timing, registers=registers)


class TestLosses:
    def test_a_loss_is_that_of_the_worst_batch(self) -> None:
        found = losses([estimated(A, 10.0, 100.0), estimated(B, 11.0, 80.0)])
        assert found == {A: pytest.approx(1.25), B: pytest.approx(1.1)}
        missing = replace(estimated(C, 1.0), timing=None)
        assert losses([missing]) == {C: math.inf}

    def test_the_least_mean_loses_to_the_least_worst_ratio(self) -> None:
        """C has the least mean, and takes 1.5 times the best for one sequence."""
        outcomes = [
            estimated(A, 10.0, 100.0), estimated(B, 10.7, 90.0), estimated(C, 15.0, 62.0),
        ]  # fmt: skip
        means = {o.config: o.timing.median_us for o in outcomes if o.timing}
        assert min(means, key=means.__getitem__) == C
        assert [o.config for o in by_loss(outcomes)] == [B, C, A]
        assert [o.config for o in by_estimate(outcomes)] == [B, C, A]

    def test_a_tie_holds_for_every_batch(self) -> None:
        """B has fewer registers and the same mean within 5 %, but loses 8 % for one sequence."""
        outcomes = [
            estimated(A, 10.0, 100.0), estimated(B, 10.8, 98.0, registers=64),
            estimated(C, 10.4, 99.0, registers=96),
        ]  # fmt: skip
        assert [o.config for o in by_estimate(outcomes)] == [C, A, B]
        near = [outcomes[0], estimated(B, 10.4, 100.0, registers=64)]
        assert by_estimate(near)[0].config == B
