"""The Evaluator protocol: what the search requests, and what it may rely on."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol, Self

from flashgen.compile import compiler
from flashgen.compile.known_bugs import installed_triton
from flashgen.estimate import estimate
from flashgen.evaluate import check, measure
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Outcome, Source, Stage, Status
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import Problem

SLOW = (Status.SPILLS, Status.SERIALIZED, Status.NO_OVERLAP)
"""Statuses of kernels that run, but not fast: allowed for a pointer twin, not for a winner."""


class Evaluator(Protocol):
    """Evaluates configs at one stage. A context manager, or call close().

    `source` is the source of its timings, `gpu` the GPU that they are for.
    """

    source: Source
    gpu: Gpu

    def evaluate(
        self,
        stage: Stage,
        spec: AttentionSpec,
        problem: Problem,
        configs: Sequence[KernelConfig],
    ) -> Iterator[Outcome]:
        """One Outcome per config, in the order of `configs`, each yielded as soon as that order
        allows.

        A config that is illegal, does not compile, crashes the compiler, hangs, is wrong or fails
        at the launch is an outcome with a status and a sentence, and does not affect the others.
        Only errors that no config causes are raised: ToolchainError, if the machine lacks
        something, and bugs. An abandoned iterator drops its queued work. Stages may be evaluated in
        any order:

            compile   legal, compiled, and judged by compile.judge
            check     against float64, SLOW kernels too; independent of the problem's lengths
            rough     a few samples, or an estimate
            timed     many samples, or an estimate
            final     all of `configs` timed in alternation, so that their differences are reliable
        """

    def close(self) -> None:
        """End the child processes. May be called again; evaluate may not be called after it."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Request:
    """What one call of evaluate requests of each of its configs."""

    stage: Stage
    spec: AttentionSpec
    problem: Problem
    gpu: str  # slug
    source: Source

    @property
    def search(self) -> tuple[AttentionSpec, Problem]:
        """What the requests of one search have in common."""
        return self.spec, self.problem

    def outcome(
        self,
        config: KernelConfig,
        status: Status,
        detail: str = "",
        *,
        digest: str,
        **found: Any,
    ) -> Outcome:
        """A new Outcome of one config. digest is "" if no kernel was rendered; found: those of its
        other fields that are known.
        """
        untimed = status is Status.NO_ESTIMATE
        return Outcome(
            spec=self.spec,
            problem=self.problem,
            config=config,
            stage=self.stage,
            status=status,
            source="untimed" if untimed else self.source,
            gpu=self.gpu,
            triton=triton_version(),
            digest=digest,
            protocol=protocol_of(self.stage, self.source),
            detail=detail,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            **found,
        )


class BaseEvaluator(Evaluator):
    """What evaluators share: a call as a Request, and the end of a context."""

    def evaluate(
        self,
        stage: Stage,
        spec: AttentionSpec,
        problem: Problem,
        configs: Sequence[KernelConfig],
    ) -> Iterator[Outcome]:
        """As Evaluator.evaluate."""
        slug, source = self.gpu.slug, self.source
        request = Request(stage=stage, spec=spec, problem=problem, gpu=slug, source=source)
        return self.answers(request, configs)

    @abstractmethod
    def answers(
        self, request: Request, configs: Sequence[KernelConfig]
    ) -> Generator[Outcome, None, None]:
        """The outcomes that a call of evaluate requests. Closed, they drop what is queued."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WrappingEvaluator(BaseEvaluator):
    """One that adds something to `inner`, and ends with it."""

    def __init__(self, inner: Evaluator) -> None:
        self.source = inner.source
        self.gpu = inner.gpu
        self._inner = inner

    def close(self) -> None:
        """As Evaluator.close."""
        self._inner.close()

    def _beside(
        self,
        known: Mapping[KernelConfig, Outcome],
        request: Request,
        configs: Sequence[KernelConfig],
    ) -> Generator[Outcome, None, None]:
        """The outcomes of these configs, in order: those that are known, and those of `inner` for
        all others.
        """
        rest = [config for config in configs if config not in known]
        answers = self._inner.evaluate(request.stage, request.spec, request.problem, rest)
        with closing(closable(answers)) as outcomes:
            for config in configs:
                yield known[config] if config in known else next(outcomes)


def closable(outcomes: Iterator[Outcome]) -> Generator[Outcome, None, None]:
    """The same as a generator, which can be closed and then closes `outcomes`."""
    yield from outcomes


class Ranks:
    """The rank of each search, in the order in which they begin: its tasks go before those of
    later ones, so that searches end one after the other.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[AttentionSpec, Problem], int] = {}

    def of(self, request: Request) -> int:
        """The rank of the tasks of a request."""
        return self._known.setdefault(request.search, len(self._known))


def protocol_of(stage: Stage, source: Source) -> int:
    """The protocol version of this stage: outcomes of other versions are not reused."""
    if stage == "compile":
        return 100 * compiler.FACTS + estimate.PROTOCOL  # it carries the estimate
    if stage == "check":
        return check.PROTOCOL
    return estimate.PROTOCOL if source in ("estimated", "untimed") else measure.PROTOCOL


@functools.cache
def triton_version() -> str:
    """Triton's version, without importing it."""
    return installed_triton()
