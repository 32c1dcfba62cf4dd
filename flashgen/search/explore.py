"""Explorer: which configs are evaluated, in which order, and when that ends.

A candidate passes the stages one after the other, in batches; a stage that it fails ends it. On a
GPU with estimates, compiling runs ahead of measuring: compiled candidates wait, and those that rank
says are best go on, as trials. In full:

  - All of an enumerated space are compiled before the first is measured; where time is limited,
    within half of it, and then a batch at a time.
  - Of a larger space, what other GPUs chose, the seeds and what was chosen for similar specs are
    compiled, and then measured. After that a sampler proposes, and LOOK_AHEAD times as many are
    compiled as are measured, in rounds of a batch: the best of all that wait. Before each round it
    learns about all: the measured time; for one that waits, its estimate, scaled by the ratio of
    measured times to theirs; for a failure, that it failed.
  - The promising go first. The postponed go last, if trials and time are left.
  - A config that cannot win any more is not measured, unless `exhaustive` was asked for by name.
  - Incumbent, default and seeds are measured whatever is estimated of them.
  - Only what goes on to be measured is a trial.

Without any estimate, and with no GPU, nobody waits, and each config that is evaluated is a trial.

The incumbent is evaluated first but costs nothing, and plays no part before its own turn comes: so
a search that is run again, with its own winner for an incumbent, takes the same path.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import islice

from flashgen.search.decide import can_win, to_measure
from flashgen.search.evidence import Evidence
from flashgen.search.goal import RUNNERS_UP, Goal
from flashgen.search.points import ListedSpace
from flashgen.search.samplers import Proposer, proposer_for
from flashgen.search.space import Budget, Method
from flashgen.spec.config import KernelConfig
from flashgen.spec.outcome import Stage, Status

BATCH = 12
"""Configs proposed and measured at a time. The same on any machine, so that searches end alike."""

LOOK_AHEAD = 4
"""Configs compiled for one that is measured, where a sampler proposes. They compile side by side
and are measured one by one; more would keep a machine of few cores from measuring."""


class Explorer:
    """Evaluates the configs of one goal. explored: all configs that were started, in order."""

    def __init__(self, evidence: Evidence, budget: Budget, method: Method) -> None:
        self.explored: list[KernelConfig] = []
        self._goal: Goal = evidence.goal
        self._evidence = evidence
        self._budget = budget
        self._method = method
        self._to_the_last = method.sampler == "exhaustive"
        self._enumerated = self._to_the_last or len(self._goal.order) <= budget.trials
        self._met: dict[KernelConfig, None] = {}  # in the order in which they were considered
        self._waiting: dict[KernelConfig, None] = {}
        self._tried: dict[
            KernelConfig, None
        ] = {}  # in that order, including the incumbent at its own position
        self._trials = 0
        now, seconds = time.monotonic(), math.inf if budget.seconds is None else budget.seconds
        self._half_time, self._end = now + seconds / 2, now + seconds

    def run(self, enough: Callable[[], bool]) -> None:
        """Evaluate until the budget is used up; if nothing can be estimated, until `enough`."""
        goal, trials = self._goal, self._budget.trials
        self._plan()
        self._pass(goal.rivals, self._evidence.stages)
        if self._enumerated:
            self._walk(goal.space)
        elif not self._blind:
            self._walk(goal.warm[:trials])
        if self._blind:
            self._walk(goal.order[:trials], enough)
        elif not self._enumerated:
            self._sample()
        if self._evidence.on_gpu:
            left = len(self._waiting) if self._enumerated else trials - self._trials
            self._measure(left, postponed=True)

    @property
    def evaluated(self) -> int:
        """The number of evaluated configs; one that waits to be measured does not count. Where a
        budget limits them, these are trials, and rivals count only where they were one.
        """
        waiting = self._waiting
        if self._enumerated or not self._met:
            held = self._goal.rivals
            return sum(config not in waiting or config in held for config in self.explored)
        return sum(config in self._met and config not in waiting for config in self.explored)

    @property
    def _late(self) -> bool:
        """Whether the time budget is used up."""
        return time.monotonic() >= self._end

    @property
    def _blind(self) -> bool:
        """Whether configs compile but none has an estimate, without a GPU."""
        timed = self._evidence.of("timed")
        return bool(timed) and all(outcome.status is Status.NO_ESTIMATE for outcome in timed)

    @property
    def _guided(self) -> bool:
        """Whether there is a GPU, and an estimate of any config considered so far."""
        return self._evidence.on_gpu and any(self._estimate_us(c) for c in self._met)

    def _walk(
        self, configs: Iterable[KernelConfig], enough: Callable[[], bool] = lambda: False
    ) -> None:
        """Evaluate configs in batches, unless `enough`; then measure the promising ones that
        wait.
        """
        rest = iter(configs)
        while not enough() and (batch := list(islice(rest, self._ahead(BATCH)))):
            self._admit(batch)
            if self._waiting and time.monotonic() >= self._half_time:
                self._measure(len(self._waiting))
        self._measure(len(self._waiting))

    def _sample(self) -> None:
        """Evaluate what the sampler proposes."""
        legal = list(dict.fromkeys(self._goal.legal))
        proposer = proposer_for(self._method, ListedSpace([asdict(config) for config in legal]))
        number_of = {config: number for number, config in enumerate(legal)}
        while True:
            self._tell(proposer, number_of)
            count = min(BATCH, self._budget.trials - self._trials)
            room = LOOK_AHEAD * self._budget.trials - len(self._met)
            if count <= 0 or room <= 0 or self._late:
                return
            new = [legal[number] for number in proposer.propose(min(room, self._ahead(count)))]
            if not new:
                return
            self._admit(new)
            self._measure(count)

    def _tell(self, proposer: Proposer, number_of: Mapping[KernelConfig, int]) -> None:
        """Pass the results of all configs considered so far to the sampler, except pending ones."""
        for config in self._met:
            value = self._value_us(config)
            if config in number_of and (value is not None or config not in self._waiting):
                proposer.learn(number_of[config], value)

    def _ahead(self, count: int) -> int:
        """The number of configs to compile for this number to measure."""
        return LOOK_AHEAD * count if self._guided else count

    def _admit(self, batch: Sequence[KernelConfig]) -> None:
        """Compile configs. They wait to be measured, or proceed if nothing is to wait for."""
        compiled = self._pass(batch, self._evidence.stages[:1])
        self._met.update(dict.fromkeys(batch))
        if self._guided:
            self._waiting.update(dict.fromkeys(compiled))
            self._plan()
        else:
            self._trials += len(batch)
            self._try(compiled)

    def _measure(self, most: int, *, postponed: bool = False) -> None:
        """Take the best waiting configs, at most `most`, through all stages, a batch at a time."""
        while (batch := self._next(min(most, BATCH), postponed)) and not self._late:
            most -= len(batch)
            self._trials += len(batch)
            for config in batch:
                del self._waiting[config]
            self._try(batch)

    def _next(self, count: int, postponed: bool) -> list[KernelConfig]:
        """The next waiting configs to measure."""
        compiled = self._evidence.ask("compile", self._waiting)
        first, last = to_measure(compiled, self._least_us(), self._goal.first)
        pairs = self._pairs()
        return [
            outcome.config
            for outcome in (first + last if postponed else first)
            if self._to_the_last
            or outcome.config in self._goal.first
            or can_win(outcome.estimate, pairs)
        ][:count]

    def _try(self, configs: Sequence[KernelConfig]) -> None:
        """Take compiled candidates through the remaining stages."""
        self._tried.update(dict.fromkeys(configs))
        self._pass(configs, self._evidence.stages[1:])

    def _pass(
        self, configs: Sequence[KernelConfig], stages: Sequence[Stage]
    ) -> Sequence[KernelConfig]:
        """Take candidates through these stages; returns those that pass them all.

        After the time budget only the incumbent and the default proceed: without them there is
        nothing to choose.
        """
        for stage in stages:
            if self._late:
                configs = [config for config in configs if config in self._goal.rivals]
            if stage == self._evidence.stages[0]:
                self.explored += [config for config in configs if config not in self.explored]
            outcomes = self._evidence.ask(stage, configs)
            configs = [outcome.config for outcome in outcomes if outcome.ok]
        return configs

    def _least_us(self) -> float:
        """The least estimate of the configs considered so far, without failed ones.

        The estimate of a config that was wrong, or was dropped as slow, does not describe it.
        """
        failed, stages = self._evidence.failed, self._evidence.stages
        sound = (c for c in self._met if not any(failed(stage, c) for stage in stages))
        return min((self._estimate_us(c) or math.inf for c in sound), default=math.inf)

    def _pairs(self) -> list[tuple[float, float]]:
        """Estimated and measured medians of the configs tried, in microseconds."""
        pairs = ((self._estimate_us(c), self._measured_us(c)) for c in self._tried)
        return [(estimated, actual) for estimated, actual in pairs if estimated and actual]

    def _value_us(self, config: KernelConfig) -> float | None:
        """Microseconds for the sampler to learn from; None if there are none."""
        if config not in self._waiting:
            return self._measured_us(config)
        estimated, pairs = self._estimate_us(config), self._pairs()
        scale = statistics.median(actual / guess for guess, actual in pairs) if pairs else 1.0
        return scale * estimated if estimated else None

    def _estimate_us(self, config: KernelConfig) -> float | None:
        outcome = self._evidence.get("compile", config)
        return outcome.estimate.median_us if outcome and outcome.ok and outcome.estimate else None

    def _measured_us(self, config: KernelConfig) -> float | None:
        outcome = self._evidence.get("timed", config) or self._evidence.get("rough", config)
        return outcome.timing.median_us if outcome and outcome.timing else None

    def _plan(self) -> None:
        """Set the number of candidates for the progress; compiling is a part of one."""
        goal = self._goal
        planned = float(len(goal.order) if self._enumerated else self._budget.trials)
        if self._guided and not self._enumerated:
            planned += (LOOK_AHEAD - 1) * planned / len(self._evidence.stages)
        self._evidence.planned = planned + len(goal.rivals) + 1 + RUNNERS_UP
