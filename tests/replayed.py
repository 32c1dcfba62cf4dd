"""ReplayEvaluator: answers from recorded outcomes, for tests and for comparing searches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Self

from flashgen.evaluate.evaluator import Request
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Outcome, Source, Stage, Status
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import Problem

Key = tuple[Stage, AttentionSpec, Problem | None, KernelConfig]


class ReplayEvaluator:
    """Returns the recorded outcomes of `gpu`; of several with one key, the last.

    Compiles and checks do not depend on the problem and are returned for any. A landscape has one
    time per config, of stage timed: it also stands for missing rough and final ones. An outcome
    that was not recorded is a RUN_ERROR that says so.
    """

    source: Source = "replayed"

    def __init__(self, outcomes: Iterable[Outcome], gpu: Gpu) -> None:
        self.gpu = gpu
        self._recorded = {
            _key(outcome.stage, outcome.spec, outcome.problem, outcome.config): outcome
            for outcome in outcomes
            if outcome.gpu == gpu.slug
        }

    def evaluate(
        self,
        stage: Stage,
        spec: AttentionSpec,
        problem: Problem,
        configs: Sequence[KernelConfig],
    ) -> Iterator[Outcome]:
        """As Evaluator.evaluate; an outcome keeps its own date, digest and Triton version."""
        request = Request(
            stage=stage, spec=spec, problem=problem, gpu=self.gpu.slug, source=self.source
        )
        for config in configs:
            recorded = self._recorded.get(_key(stage, spec, problem, config))
            if recorded is None and stage in ("rough", "final"):
                timed = self._recorded.get(_key("timed", spec, problem, config))
                recorded = timed and replace(timed, stage=stage)
            if recorded is None:
                yield request.outcome(config, Status.RUN_ERROR, "not recorded", digest="")
            else:
                # NO_ESTIMATE stays untimed: there is no figure to replay
                source = "untimed" if recorded.source == "untimed" else self.source
                same = recorded.problem == problem
                yield replace(
                    recorded,
                    problem=problem,
                    source=source,
                    # An estimate holds for one problem only.
                    estimate=recorded.estimate if same else None,
                )

    def close(self) -> None:
        """As Evaluator.close; there is nothing to end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _key(stage: Stage, spec: AttentionSpec, problem: Problem, config: KernelConfig) -> Key:
    return (stage, spec, None if stage in ("compile", "check") else problem, config)
