"""Explorer: which configs are evaluated, in which order, and when that ends.

docs/searching.md says what is compiled and measured next on a GPU with estimates. Without any
estimate, and with no GPU, nobody waits, and each config that is evaluated is a trial of the budget.

The incumbent is evaluated first but costs nothing, and plays no part before its own turn comes: so
a search that is run again, with its own winner for an incumbent, takes the same path.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING

from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Outcome, Stage, Status, Timing
from flashgen.search.decide import believable, can_win, median_us, to_measure
from flashgen.search.evidence import RIGHT_ALL_THE_SAME, Evidence
from flashgen.search.goal import RUNNERS_UP
from flashgen.search.points import ILLEGAL, ListedSpace
from flashgen.search.space import DROP_ABOVE, Budget, Method
from flashgen.search.study import LEAST, Trials

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

BATCH = 12
"""Configs proposed and measured at a time. The same on any machine, so that searches end alike."""

LOOK_AHEAD = 4
"""Configs compiled for one that is measured, where a sampler proposes. They compile side by side
and are measured one by one; more would keep a machine of few cores from measuring."""

DOUBT = 3
"""One trial in so many disregards the estimates, while they are believed."""


class Explorer:
    """Evaluates the configs of one goal, each a trial of a study. explored: all configs that were
    started, in order. storage: where the study is kept, if anywhere, by the name of the goal.
    """

    def __init__(
        self,
        evidence: Evidence,
        budget: Budget,
        method: Method,
        storage: BaseStorage | None = None,
    ) -> None:
        self.explored: dict[KernelConfig, None] = {}
        self._goal = goal = evidence.goal
        self._evidence = evidence
        self._to_the_last = method.sampler == "exhaustive"
        self._configs = tuple(dict.fromkeys((*goal.legal, *goal.space)))
        self._number = {config: number for number, config in enumerate(self._configs)}
        points = [vars(config) for config in self._configs]
        space = ListedSpace(points[: (size := len(set(goal.legal)))])
        self._trials = Trials(
            space, method, others=points[size:], storage=storage, name=goal.title, fresh=True
        )
        self._launched: dict[KernelConfig, KernelConfig] = {}
        evidence.judge, evidence.report = self._judged, self._report
        self._budget = budget.trials
        self._enumerated = self._to_the_last or len(goal.order) <= budget.trials
        self._most = len(goal.order) if self._enumerated else budget.trials
        self._waiting: dict[KernelConfig, None] = {}  # compiled, in the order of their trials
        self._tried: dict[KernelConfig, None] = {}  # measured, the incumbent at its own position
        self._measured = self._doubts = 0
        now, seconds = time.monotonic(), math.inf if budget.seconds is None else budget.seconds
        self._half_time, self._end = now + seconds / 2, now + seconds

    def run(self, enough: Callable[[], bool]) -> None:
        """Evaluate until the budget is used up; if nothing can be estimated, until `enough`."""
        goal = self._goal
        self._plan()
        self._pass(goal.rivals, self._evidence.stages)
        if self._evidence.best_us < math.inf:
            self._trials.study.set_user_attr(LEAST, self._evidence.best_us)
        if self._enumerated:
            self._walk(goal.space)
        elif not self._blind:
            self._walk(goal.warm[: self._budget])
        if self._blind:
            self._walk(goal.order[: self._budget], enough)
        else:
            while self._measured < self._most and not self._late and self._round():
                pass

    @property
    def evaluated(self) -> int:
        """The number of evaluated configs; one that waits to be measured does not count. Where a
        budget limits them, these are trials, and rivals count only where they were one.
        """
        if self._enumerated or not self._trials.ids:
            return len(self.explored.keys() - (self._waiting.keys() - {*self._goal.rivals}))
        return sum(c not in self._waiting and self._met(c) for c in self.explored)

    @property
    def cut_short(self) -> bool:
        """Whether the time budget ended the exploration."""
        return self._late and self._measured < self._most

    @property
    def _late(self) -> bool:
        return time.monotonic() >= self._end

    @property
    def _blind(self) -> bool:
        """Whether configs compile but none has an estimate, without a GPU."""
        timed = self._evidence.of("timed")
        return bool(timed) and all(outcome.status is Status.NO_ESTIMATE for outcome in timed)

    @property
    def _guided(self) -> bool:
        """Whether there is a GPU, and an estimate of any config considered so far."""
        configs = (self._configs[number] for number in self._trials.ids)
        return self._evidence.on_gpu and any(map(self._estimate_us, configs))

    def _met(self, config: KernelConfig) -> bool:
        """Whether a config has a trial."""
        return self._number.get(config, ILLEGAL) in self._trials.ids

    @property
    def _trusted(self) -> bool:
        """Whether there are estimates, and nothing speaks against them."""
        return self._guided and believable(self._pairs())

    def _walk(
        self, configs: Iterable[KernelConfig], enough: Callable[[], bool] = lambda: False
    ) -> None:
        """Admit configs in batches, unless `enough`. After half of the time budget, what is
        promising is measured after each batch.
        """
        rest = iter(configs)
        while not enough():
            ahead = LOOK_AHEAD if self._guided else 1
            if not (batch := list(islice(rest, ahead * BATCH))):
                break
            self._admit(batch)
            while self._half_time <= time.monotonic() < self._end and (best := self._best(BATCH)):
                self._measure(best)

    def _round(self) -> bool:
        """Choose a batch and evaluate it. Returns whether there was anything to do."""
        before = self._measured, len(self._trials.ids)
        left = self._most - self._measured
        count = min(BATCH, left)
        chosen, doubts = list[KernelConfig](), count
        if self._to_the_last or self._trusted:
            untried = sum(config in self._goal.first for config in self._waiting)
            doubts = min(count // DOUBT, self._most // DOUBT - self._doubts)
            by_estimate = max(0, min(count - doubts, left - untried))
            for _ in range(0 if self._enumerated else LOOK_AHEAD):
                self._admit(self._proposed(by_estimate, estimates=True))
            ended = before[1] == len(self._trials.ids)
            chosen = self._best(by_estimate) or self._best(by_estimate * ended, postponed=True)
            doubts = max(doubts, min(untried, count - by_estimate))
        if not self._to_the_last:
            chosen += self._doubted(doubts, chosen)
        self._measure(chosen)
        return before != (self._measured, len(self._trials.ids))

    def _doubted(self, count: int, chosen: Collection[KernelConfig]) -> list[KernelConfig]:
        """Configs to measure whatever is estimated of them: those that the search started with, one
        of each tile that was never measured, then what the sampler proposes from measured times.
        """
        found = [c for c in self._waiting if c in self._goal.warm and c not in chosen][:count]
        if len(found) < count:
            found += self._of_new_tiles(count - len(found), [*chosen, *found])
        if missing := count - len(found):
            taken = [*chosen, *found, *(self._best(len(self._waiting)) if self._trusted else ())]
            proposed = self._proposed(missing, but=taken)
            self._admit([config for config in proposed if config not in self._waiting])
            found += [config for config in proposed if config in self._waiting]
        self._doubts += len(found)
        return found

    def _of_new_tiles(self, count: int, chosen: Collection[KernelConfig]) -> list[KernelConfig]:
        """Configs of tiles of which none was measured, one each: an estimator errs by tile, because
        the loop that it replays is a tile's. It is the one most like the best measured.
        """
        times = self._times()
        if not times or not self._guided:
            return []
        like = vars(min(times, key=times.__getitem__)).items()
        known = {_tile(config) for config in (*self._tried, *chosen)}
        found: dict[tuple[int, int], KernelConfig] = {}
        for config in sorted(
            dict.fromkeys(self._goal.legal), key=lambda c: -len(vars(c).items() & like)
        ):
            if _tile(config) not in known and (not self._met(config) or config in self._waiting):
                found.setdefault(_tile(config), config)
        first = list(found.values())[:count]
        new = [config for config in first if not self._met(config)]
        self._admit(new[: max(0, self._room)])
        return [config for config in first if config in self._waiting]

    def _proposed(
        self, count: int, *, estimates: bool = False, but: Iterable[KernelConfig] = ()
    ) -> list[KernelConfig]:
        """The sampler's proposals from all results so far, and from the estimates of those that
        wait, or in disregard of them.
        """
        waiting = {self._number[config] for config in self._waiting}
        waiting = {number for number in waiting if number < self._trials.space.size}
        expected = self._expected_us() if estimates else {}
        values = {self._number[config]: us for config, us in expected.items()}
        closed = {self._number[config] for config in but}
        found: list[KernelConfig] = []
        most = min(count, self._room)
        while len(found) < most:
            again = set() if estimates else waiting - closed
            if (number := self._trials.ask(again, values, closed)) is None:
                break
            if number in waiting:
                closed.add(number)
            found.append(self._configs[number])
        return found

    @property
    def _room(self) -> int:
        """How many configs may still be compiled."""
        return LOOK_AHEAD * self._budget - len(self._trials.ids)

    def _admit(self, batch: Sequence[KernelConfig]) -> None:
        """Compile configs. They wait to be measured, or proceed if nothing is to wait for."""
        for config in batch:
            self._trials.begin(self._number[config])
        compiled = self._pass(batch, self._evidence.stages[:1])
        if self._guided:
            self._waiting.update(dict.fromkeys(compiled))
            self._plan()
        else:
            self._measured += len(batch)
            self._try(compiled)

    def _measure(self, batch: Sequence[KernelConfig]) -> None:
        """Take configs that wait through all stages."""
        self._measured += len(batch)
        for config in batch:
            del self._waiting[config]
        self._try(batch)

    def _best(self, count: int, *, postponed: bool = False) -> list[KernelConfig]:
        """The next configs to measure by their estimates."""
        expected, pairs, first = self._expected_us(), self._pairs(), self._goal.first
        least_us = min([*expected.values(), *self._times().values()], default=math.inf)
        compiled = zip(self._waiting, self._evidence.ask("compile", self._waiting), strict=True)
        bands, outcomes = {}, []
        for config, outcome in compiled:
            us, bands[config] = expected.get(config), outcome.estimate
            timing = Timing(median_us=us, low_us=us, high_us=us) if us else outcome.estimate
            outcomes.append(replace(outcome, config=config, estimate=timing))
        promising, others = to_measure(outcomes, least_us, first)
        return [
            outcome.config
            for outcome in (promising + others if postponed else promising)
            if self._to_the_last or outcome.config in first or can_win(bands[outcome.config], pairs)
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
                self.explored |= dict.fromkeys(configs)
            self._launched = {self._evidence.launched(config): config for config in configs}
            outcomes = self._evidence.ask(stage, configs)
            for config, outcome in zip(configs, outcomes, strict=True):
                if self._met(config):
                    self._record(config, outcome)
            configs = [c for c, outcome in zip(configs, outcomes, strict=True) if outcome.ok]
        return configs

    def _judged(self, outcome: Outcome) -> Outcome:
        """The outcome, which the study's pruner may end after this rough time."""
        config = self._launched.get(outcome.config, outcome.config)
        us, best_us = median_us(outcome.timing), self._evidence.best_us
        if self._met(config):
            dropped = self._trials.prunes(self._number[config], us, 0)
        else:
            dropped = us > DROP_ABOVE * best_us
        why = f"{us / best_us:.2f} times the best so far, {best_us:.1f} us"
        return replace(outcome, status=Status.DROPPED, detail=why) if dropped else outcome

    def _report(self, launched: KernelConfig, us: float) -> None:
        config = self._launched.get(launched, launched)
        if self._met(config):
            self._trials.report(self._number[config], us, 0)

    def _record(self, config: KernelConfig, outcome: Outcome) -> None:
        """Report the outcome of a stage to the trial of a config, and end it after the last."""
        number = self._number[config]
        us = outcome.timing.median_us if outcome.timing else None
        if us:
            self._trials.report(number, us, int(outcome.stage == "timed"))
        if outcome.ok and outcome.stage != self._evidence.stages[-1]:
            return
        attrs = {
            "config": config.label,
            "stage": outcome.stage,
            "status": str(outcome.status),
            "detail": outcome.detail,
            "digest": outcome.digest,
            "registers": self._evidence.full(config).registers,
            "estimate_us": self._estimate_us(config),
        }
        right = outcome.ok or outcome.status in RIGHT_ALL_THE_SAME
        self._trials.tell(number, us if outcome.ok else None, attrs, pruned=right)

    def close(self, winner: KernelConfig) -> None:
        """End the study: with rivals as trials, too, and those that were never measured pruned."""
        for config in self._goal.rivals:
            if not self._met(config):
                self._trials.begin(self._number[config])
                for stage in self._evidence.stages:
                    if outcome := self._evidence.get(stage, config):
                        self._record(config, outcome)
        self._trials.close("not measured")
        self._trials.study.set_user_attr("winner", winner.label)

    def _expected_us(self) -> dict[KernelConfig, float]:
        """Expected microseconds of the waiting configs that have estimates: the estimate, times
        what the estimates of its tile were off by, and of all tiles as far as few were measured.
        """
        errors: dict[tuple[int, int], list[float]] = defaultdict(list)
        for config, actual in self._times().items():
            if estimate := self._estimate_us(config):
                errors[_tile(config)].append(math.log(actual / estimate))
        common = statistics.median(chain.from_iterable(errors.values())) if errors else 0.0
        expected = {}
        for config in self._waiting:
            if estimate := self._estimate_us(config):
                own = errors.get(_tile(config), [])
                expected[config] = estimate * math.exp((sum(own) + common) / (len(own) + 1))
        return expected

    def _times(self) -> dict[KernelConfig, float]:
        """Measured medians of the configs tried, in microseconds."""
        return {config: us for config in self._tried if (us := self._evidence.us(config))}

    def _pairs(self) -> list[tuple[float, float]]:
        """Estimated and measured medians of the configs tried, in microseconds."""
        times = self._times().items()
        return [(estimate, us) for c, us in times if (estimate := self._estimate_us(c))]

    def _estimate_us(self, config: KernelConfig) -> float | None:
        outcome = self._evidence.get("compile", config)
        return outcome.estimate.median_us if outcome and outcome.ok and outcome.estimate else None

    def _plan(self) -> None:
        """Set the number of candidates for the progress; compiling is a part of one."""
        planned = float(self._most)
        if self._guided and not self._enumerated:
            planned += (LOOK_AHEAD - 1) * planned / len(self._evidence.stages)
        self._evidence.planned = planned + len(self._goal.rivals) + 1 + RUNNERS_UP
        self._evidence.trials = self._most


def _tile(config: KernelConfig) -> tuple[int, int]:
    return config.br, config.bc
