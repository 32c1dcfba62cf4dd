"""Every outcome of one search, from the log or else from the evaluator, which is asked once."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

from flashgen.evaluate.evaluator import SLOW, Evaluator
from flashgen.evaluate.steadily import steadily
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.decode import BLOCKS_PER_SM
from flashgen.schedules.outcome import Outcome, Stage, Status
from flashgen.search.decide import median_us
from flashgen.search.goal import Goal, Progress
from flashgen.search.log import Log

GPU_STAGES: tuple[Stage, ...] = ("compile", "check", "rough", "timed")
OFFLINE_STAGES: tuple[Stage, ...] = ("compile", "timed")
ALL_STAGES: tuple[Stage, ...] = (*GPU_STAGES, "final")
"""Ordered: a later one says more about a config."""

RIGHT_ALL_THE_SAME = (Status.DROPPED, Status.NO_ESTIMATE, Status.UNSTEADY)
"""Statuses without a usable time, although the kernel is not at fault."""

FACTS = (
    "registers", "spill_bytes", "shared_bytes", "tensor_columns", "residents", "shortcomings",
    "estimate", "check",
)  # fmt: skip
"""What the first stage says that knows it."""


class Evidence:
    """The known outcomes of the configs of one goal. `planned` and `trials`: numbers of candidates,
    for progress. judge: may end a config after a rough time; report: is told each, once logged.
    stages: those that a candidate passes, in order. on_gpu: whether they are measured.
    """

    def __init__(
        self,
        goal: Goal,
        evaluator: Evaluator,
        log: Log,
        notify: Callable[[Progress], None],
    ) -> None:
        self.goal = goal
        self.gpu = evaluator.gpu
        self.on_gpu = evaluator.source != "estimated"
        self.stages = GPU_STAGES if self.on_gpu else OFFLINE_STAGES
        self.planned = 0.0
        self.trials = 0
        self.best_us = math.inf
        self.judge: Callable[[Outcome], Outcome] = lambda outcome: outcome
        self.report: Callable[[KernelConfig, float], None] = lambda *_: None
        self._evaluator = evaluator
        self._log = log
        self._notify = notify
        self._seen: dict[tuple[Stage, KernelConfig], Outcome] = {}
        self._digest = cache(partial(goal.digest_of, goal.spec))
        self._launched: dict[KernelConfig, KernelConfig] = {}
        self._done = 0.0
        self._tried: set[KernelConfig] = set()
        self._rejected: set[KernelConfig] = set()

    def ask(self, stage: Stage, configs: Iterable[KernelConfig]) -> list[Outcome]:
        """One outcome per config, from the log or else from the evaluator, in the order given; of
        the config as it is launched.
        """
        configs = list(configs)
        if stage == "compile":
            self._fill(configs)
        asked = [self._asked(stage, config) for config in configs]
        self._ask(stage, dict.fromkeys(asked))
        return [self._seen[stage, config] for config in asked]

    def launched(self, config: KernelConfig) -> KernelConfig:
        """A config as it is launched: of a decode for as many blocks as an SM holds together, once
        its kernel is compiled. One that says itself for how many stays as it is.
        """
        return self._launched.get(config, config)

    def _fill(self, configs: Sequence[KernelConfig]) -> None:
        """Compile the kernels of a decode, to know for how many blocks on an SM each is launched:
        fewer leave memory idle, more wait for one another.
        """
        spec = self.goal.spec
        if spec.direction != "decode" or spec.invariant:
            return
        free = [c for c in configs if c.blocks_per_sm == c.split_keys == 1]
        self._ask("compile", dict.fromkeys(c for c in free if c not in self._launched))
        for config in free:
            outcome = self._seen["compile", config]
            if outcome.ok and outcome.residents:
                blocks = min(outcome.residents, BLOCKS_PER_SM[-1])
                self._launched[config] = replace(config, blocks_per_sm=blocks)

    def _asked(self, stage: Stage, config: KernelConfig) -> KernelConfig:
        """What an outcome is of: a check holds for every launch of a kernel."""
        return config.kernel if stage == "check" else self.launched(config)

    def _ask(self, stage: Stage, configs: Iterable[KernelConfig]) -> None:
        """Have an outcome of each."""
        goal, source = self.goal, self._evaluator.source
        unknown = []
        recall = partial(self._log.recall, stage, goal.spec, goal.problem, source=source)
        for config in configs:
            if (stage, config) not in self._seen:
                if known := recall(config, self._digest(config)):
                    self._take(known)
                else:
                    unknown.append(config)
        if unknown:
            self._evaluate(stage, unknown)

    def ask_round(self, finalists: Sequence[KernelConfig]) -> list[Outcome]:
        """One whole final round: from the log if it has all records, otherwise measured."""
        goal, source = self.goal, self._evaluator.source
        kernels = [(config, self._digest(config)) for config in finalists]
        known = self._log.recall_round(goal.spec, goal.problem, kernels, source=source)
        if known is None and finalists:
            self._evaluate("final", finalists)
        for outcome in known or ():
            self._take(outcome)
        return [self._seen["final", config] for config in finalists]

    def get(self, stage: Stage, config: KernelConfig) -> Outcome | None:
        """The outcome of this stage, if it has run."""
        return self._seen.get((stage, self._asked(stage, config)))

    def of(self, stage: Stage) -> list[Outcome]:
        """All outcomes of this stage."""
        return [outcome for (of_stage, _), outcome in self._seen.items() if of_stage == stage]

    def passed(self, stage: Stage, config: KernelConfig) -> bool:
        """Whether this stage has run and succeeded."""
        outcome = self.get(stage, config)
        return outcome is not None and outcome.ok

    def full(self, config: KernelConfig) -> Outcome:
        """The outcome that ended a config, or else its last, with the facts of the earlier ones."""
        outcomes = [found for stage in ALL_STAGES if (found := self.get(stage, config))]
        failed = (o for o in outcomes if not o.ok and o.status not in RIGHT_ALL_THE_SAME)
        facts: dict[str, Any] = {}
        for name, outcome in product(FACTS, outcomes):
            if facts.get(name) is None:
                facts[name] = getattr(outcome, name)
        last = next(failed, outcomes[-1])
        return replace(last, config=self.launched(config), **facts)

    def twin_serves(self, config: KernelConfig) -> bool:
        """Whether this config's pointer twin, if it has one, is correct and fits; it may be
        slow.
        """
        twin = config.pointer_twin(self.goal.spec)
        if twin == config:
            return True
        (built,) = self.ask("compile", [twin])
        return (built.ok or built.status in SLOW) and self.ask("check", [twin])[0].ok

    def last_failure(self) -> Outcome | None:
        """The latest outcome that excludes its config."""
        return next((o for o in reversed(self._seen.values()) if not o.ok), None)

    def _evaluate(self, stage: Stage, configs: Sequence[KernelConfig]) -> None:
        """Evaluate configs; each outcome is logged before the next is awaited. A final round is one
        measurement: it is logged whole or not at all.
        """
        goal = self.goal
        ask = partial(self._evaluator.evaluate, stage, goal.spec, goal.problem)
        answers = steadily(ask, configs, whole=stage == "final", mark=self._log.append)
        left = deque(configs)
        for outcomes in [list(answers)] if stage == "final" else ([each] for each in answers):
            in_order = all(outcome.config == left.popleft() for outcome in outcomes)
            assert in_order, "an evaluator answers in the order of the requests"
            found = [self.judge(o) if o.stage == "rough" and o.ok else o for o in outcomes]
            self._log.append(*found)
            for outcome in found:
                self._take(outcome)
        assert not left, "an evaluator answers all requests"

    def _take(self, outcome: Outcome) -> None:
        """Store an outcome and report progress. Twins of candidates count as none."""
        self._seen[outcome.stage, outcome.config] = outcome
        if outcome.stage == "rough" and outcome.timing:
            self.report(outcome.config, outcome.timing.median_us)
        self.best_us = min(self.best_us, median_us(outcome.timing))
        self._done += self._share(outcome)
        if not outcome.ok and outcome.status not in RIGHT_ALL_THE_SAME:
            self._rejected.add(outcome.config)
        if not outcome.ok or outcome.stage == self.stages[-1]:
            self._tried.add(outcome.config)
        goal = self.goal
        self._notify(
            Progress(
                done=self._done,
                total=max(self._done, self.planned),
                stage=outcome.stage,
                best_us=None if self.best_us == math.inf else self.best_us,
                default_us=self.us(goal.default),
                incumbent_us=self.us(goal.incumbent) if goal.incumbent else None,
                tried=min(len(self._tried), self.trials),
                trials=self.trials,
                rejected=len(self._rejected),
                on_gpu=self.on_gpu,
                outcome=outcome,
            )
        )

    def us(self, config: KernelConfig) -> float | None:
        """The latest time of a config, if it has one."""
        outcomes = (self.get(stage, config) for stage in reversed(ALL_STAGES))
        return next((o.timing.median_us for o in outcomes if o and o.timing), None)

    def _share(self, outcome: Outcome) -> float:
        """The share of a candidate that this outcome completes: a failure completes it."""
        if outcome.stage not in self.stages:
            return 1.0
        if outcome.stage == "compile" and outcome.config in self._launched.values():
            return 0.0  # compiled before it was known how it is launched
        passed = self.stages.index(outcome.stage) / len(self.stages)
        return 1 / len(self.stages) if outcome.ok else 1.0 - passed
