"""QuarantiningEvaluator: keeps from another evaluator what has cost it a process before."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any, Self

from flashgen.config import KernelConfig
from flashgen.evaluate import Evaluator, Request
from flashgen.evaluators.build import draft
from flashgen.outcome import Outcome, Stage, Status
from flashgen.problem import Problem
from flashgen.quarantine import Quarantine
from flashgen.spec import AttentionSpec


class QuarantiningEvaluator:
    """`inner`, but for the configs whose kernel is held: they are QUARANTINED, with the reason.

    What costs a process now is in the quarantine before its outcome is handed on. All that `inner`
    has besides an Evaluator's, as `conditions`, is found here, too.
    """

    def __init__(self, inner: Evaluator, quarantine: Quarantine) -> None:
        self.source = inner.source
        self.gpu = inner.gpu
        self._inner = inner
        self._quarantine = quarantine

    def evaluate(
        self,
        stage: Stage,
        spec: AttentionSpec,
        problem: Problem,
        configs: Sequence[KernelConfig],
    ) -> Iterator[Outcome]:
        """As Evaluator.evaluate. Raises what writing the quarantine raises, too."""
        held = [self._held(spec, config) for config in configs]
        request = Request(
            stage=stage, spec=spec, problem=problem, gpu=self.gpu.slug, source=self.source
        )
        free = [config for config, why in zip(configs, held, strict=True) if why is None]
        with closing(_generator(self._inner.evaluate(stage, spec, problem, free))) as outcomes:
            for config, why in zip(configs, held, strict=True):
                if why is not None:
                    digest, reason = why
                    yield request.outcome(config, Status.QUARANTINED, reason, digest=digest)
                    continue
                outcome = next(outcomes)
                self._quarantine.note(outcome)
                yield outcome

    def _held(self, spec: AttentionSpec, config: KernelConfig) -> tuple[str, str] | None:
        """The digest of a kernel that is held, and why."""
        if not len(self._quarantine):  # as a rule: then nothing is rendered
            return None
        digest = draft(spec, config, self.gpu).digest
        reason = self._quarantine.reason(digest, self.source)
        return None if reason is None else (digest, reason)

    def close(self) -> None:
        """As Evaluator.close."""
        self._inner.close()

    def __getattr__(self, name: str) -> Any:
        """What only `inner` has. (Its own name is missing while a copy is being made.)"""
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _generator(outcomes: Iterator[Outcome]) -> Generator[Outcome, None, None]:
    """The same, as something that can be closed, and then closes `outcomes` if that can be."""
    yield from outcomes
