"""SharedEvaluator: workers that take the same path share the work.

A search decides only by outcomes and seed. So workers that get the same outcomes request the same
configs in the same order, and each needs to evaluate only a part. What the storage has is returned
from it, what nobody works on is claimed and evaluated, and what another worker holds is awaited. A
final round is one claim: its times compare only on one GPU, in alternation.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any, Protocol, Self

from flashgen.errors import InvalidArgument
from flashgen.evaluate.build import cpu_count
from flashgen.evaluate.evaluator import Evaluator, Request
from flashgen.evaluate.measure import Conditions
from flashgen.kernels.render import render
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig
from flashgen.spec.outcome import Outcome, Source, Stage, Status
from flashgen.spec.problem import Problem
from flashgen.spec.records import record_of
from flashgen.tune.shared import Answer, Claim, Ledger, Page, State, Unit

MOST_AT_ONCE = 4
"""Configs claimed at once to be checked or timed: one by one, but what another worker has compiled
compiles here side by side."""

MOST_DEATHS = 3
"""Workers that may die at a config before it is given up: it may be what kills them."""

FIRST_PAUSE_S = 0.02
"""The first wait for another worker; each next one is twice as long, up to Pace.look_s."""

AGAIN = " again "
"""Stands in the key of a config that is timed anew because the clock dropped the time before."""

DigestOf = Callable[[AttentionSpec, KernelConfig], str]
Notice = Callable[[str], None]

_logger = logging.getLogger(__name__)


class Memory(Protocol):
    """Outcomes on this worker's own disk: a shared Log."""

    def remembered(
        self,
        stage: Stage,
        spec: AttentionSpec,
        problem: Problem,
        kernels: Sequence[tuple[KernelConfig, str]],
        *,
        source: Source,
    ) -> list[Outcome] | None:
        """The outcomes that an earlier run has of all these kernels, or None."""

    def append(self, *outcomes: Outcome) -> None:
        """Store outcomes before others see them."""


@functools.cache
def rendered_digest(spec: AttentionSpec, config: KernelConfig) -> str:
    """The digest of the kernel's text; "" if there is none."""
    try:
        return render(spec, config).digest
    except InvalidArgument:
        return ""


def _checked(answer: Answer, unit: Unit) -> Answer:
    """The answer. Raises InvalidArgument if it is not of the configs of this unit."""
    if tuple(outcome.config for outcome in answer.outcomes) != unit.configs:
        raise InvalidArgument(
            f"the answer to {unit.key} in the storage must be of its configs, in their order: "
            "begin with an empty storage"
        )
    return answer


class SharedEvaluator:
    """`inner`, shared with all workers of `ledger`, which stays open when this is closed.

    jobs: how many kernels `inner` compiles in parallel. Outcomes are in `memory` before they are in
    the storage. own and others count outcomes evaluated here and elsewhere. conditions are those of
    the latest final round, wherever it ran. Raises StorageError, and the errors of `inner` and
    `memory`.
    """

    def __init__(
        self,
        inner: Evaluator,
        ledger: Ledger,
        *,
        memory: Memory | None = None,
        jobs: int | None = None,
        digest_of: DigestOf = rendered_digest,
        notice: Notice = _logger.warning,
    ) -> None:
        self.source: Source = inner.source
        self.gpu = inner.gpu
        self.conditions: Conditions | None = None
        self.own = 0
        self.others = 0
        self._inner = inner
        self._ledger = ledger
        self._memory = memory
        self._jobs = jobs or cpu_count()
        self._digest_of = digest_of
        self._notice = notice
        self._times: dict[tuple[Request, str], int] = {}  # that a key's answer was unsteady

    def evaluate(
        self,
        stage: Stage,
        spec: AttentionSpec,
        problem: Problem,
        configs: Sequence[KernelConfig],
    ) -> Iterator[Outcome]:
        """As Evaluator.evaluate."""
        request = Request(
            stage=stage, spec=spec, problem=problem, gpu=self.gpu.slug, source=self.source
        )
        units = self._units(request, configs)
        batch = _Batch(
            self._ledger.page(stage, spec, problem),
            units,
            most=2 * self._jobs if stage == "compile" else MOST_AT_ONCE,
            look_s=self._ledger.pace.look_s,
            find_out=functools.partial(self._find_out, request),
            notice=self._notice,
        )
        try:
            for unit in units:
                answer = batch.answer(unit.key)
                self._heed(request, unit, answer, is_own=unit.key in batch.own)
                yield from answer.outcomes
        finally:
            batch.release()

    def _units(self, request: Request, configs: Sequence[KernelConfig]) -> list[Unit]:
        """The units to claim: each config, or all configs of a final round together."""
        names = [
            f"{c.label} {self._digest_of(request.spec, c).removeprefix('sha256:')[:16]}"
            for c in configs
        ]
        if request.stage == "final" and configs:
            every = hashlib.sha256("\n".join(names).encode()).hexdigest()
            return [self._unit(request, f"round of {len(configs)} {every[:16]}", configs)]
        return [self._unit(request, *pair) for pair in zip(names, zip(configs), strict=True)]

    def _unit(self, request: Request, name: str, configs: Sequence[KernelConfig]) -> Unit:
        times = self._times.get((request, name), 0)
        return Unit(key=f"{name}{AGAIN}{times}" if times else name, configs=tuple(configs))

    def _heed(self, request: Request, unit: Unit, answer: Answer, *, is_own: bool) -> None:
        """Count an answer, and make sure that an unsteady one is repeated."""
        if is_own:
            self.own += len(answer.outcomes)
        else:
            self.others += len(answer.outcomes)
        if answer.conditions is not None:
            self.conditions = record_of(Conditions, answer.conditions, "conditions")
        if any(outcome.status is Status.UNSTEADY for outcome in answer.outcomes):
            name, _, times = unit.key.partition(AGAIN)
            self._times[request, name] = int(times or 0) + 1

    def _find_out(self, request: Request, claims: Sequence[Claim]) -> Generator[Answer]:
        """The answers to claims, in order."""
        known = [self._given_up(request, c) or self._remembered(request, c) for c in claims]
        new = [claim for claim, found in zip(claims, known, strict=True) if not found]
        configs = [config for claim in new for config in claim.unit.configs]
        arguments = request.stage, request.spec, request.problem, configs
        outcomes = self._inner.evaluate(*arguments) if configs else iter(())
        for claim, found in zip(claims, known, strict=True):
            if found:
                yield Answer(outcomes=tuple(found))
                continue
            fresh = tuple(islice(outcomes, len(claim.unit.configs)))
            if self._memory is not None:
                self._memory.append(*fresh)
            conditions = self._conditions_here() if request.stage == "final" else None
            yield Answer(outcomes=fresh, conditions=conditions)
        assert next(outcomes, None) is None, "an evaluator answers every request"

    def _conditions_here(self) -> dict[str, Any] | None:
        """The conditions of the latest final round of `inner`, known only on a GPU."""
        conditions: Conditions | None = getattr(self._inner, "conditions", None)
        return asdict(conditions) if conditions else None

    def _given_up(self, request: Request, claim: Claim) -> list[Outcome] | None:
        """Outcomes of a unit at which too many workers died; otherwise None."""
        if claim.deaths < MOST_DEATHS:
            return None
        why = f"{claim.deaths} workers died while they evaluated it"
        return [
            request.outcome(
                config, Status.CRASHED, why, digest=self._digest_of(request.spec, config)
            )
            for config in claim.unit.configs
        ]

    def _remembered(self, request: Request, claim: Claim) -> list[Outcome] | None:
        """The outcome of an earlier run on this machine."""
        if self._memory is None:
            return None
        spec = request.spec
        kernels = [(config, self._digest_of(spec, config)) for config in claim.unit.configs]
        return self._memory.remembered(
            request.stage, spec, request.problem, kernels, source=self.source
        )

    def close(self) -> None:
        """As Evaluator.close."""
        self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Batch:
    """The units of one call. own: the keys that this worker has answered."""

    def __init__(
        self,
        page: Page,
        units: Sequence[Unit],
        *,
        most: int,
        look_s: float,
        find_out: Callable[[Sequence[Claim]], Generator[Answer]],
        notice: Notice,
    ) -> None:
        self.own: set[str] = set()
        self._page = page
        self._units = {unit.key: unit for unit in units}
        self._most = most
        self._look_s = look_s
        self._find_out = find_out
        self._notice = notice
        self._answers: dict[str, Answer] = {}
        self._held: list[Claim] = []
        self._coming = find_out([])
        self._pause = FIRST_PAUSE_S

    def answer(self, key: str) -> Answer:
        """The answer of a unit; meanwhile this worker takes its share of the others."""
        while key not in self._answers:
            if self._held:
                self._settle(next(self._coming))
                continue
            state = self._page.state()
            for other in self._open():
                found = state.answer(other)
                if found is not None:
                    self._answers[other] = _checked(found, self._units[other])
            if key not in self._answers:
                self._take(state)
        return self._answers[key]

    def release(self) -> None:
        """Release what is held and not answered."""
        if self._held:
            self._coming.close()
            self._page.release(self._held)
            self._held = []

    def _open(self) -> list[str]:
        """The keys without an answer, in order."""
        return [key for key in self._units if key not in self._answers]

    def _take(self, state: State) -> None:
        """Claim this worker's share of what nobody works on; if there is nothing, wait a little.

        Workers start at different positions, so that they seldom claim the same.
        """
        free = [self._units[key] for key in self._open() if key not in state.held]
        share = math.ceil(len(free) / state.workers)
        start = len(free) * state.rank // state.workers
        self._held = (
            self._page.claim([*free[start:], *free[:start]][: min(share, self._most)])
            if free
            else []
        )
        if self._held:
            self._coming = self._find_out(tuple(self._held))
            self._pause = FIRST_PAUSE_S
        else:
            time.sleep(self._pause)
            self._pause = min(2 * self._pause, self._look_s)

    def _settle(self, answer: Answer) -> None:
        """Record the answer to the first held claim."""
        claim = self._held.pop(0)
        key = claim.unit.key
        if self._page.record(claim, answer):
            self._answers[key] = answer
            self.own.add(key)
        else:
            self._notice(
                f"{key}: this worker showed no life for too long while it evaluated this; "
                f"another one does it anew"
            )
