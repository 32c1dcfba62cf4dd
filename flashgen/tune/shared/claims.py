"""Pages: outcomes that all workers of a run share, and claims of those to come.

A run is a few studies of one Optuna storage, all named after it:

    flashgen: run                   what all workers agree on: the first to say it is believed
    flashgen: workers               a running trial for each worker that lives (tune/shared/run.py)
    flashgen: SPEC SIZES            a search: a trial for each stage and config that was claimed

A page is the part of a search's study that has one stage, an attribute of its trials.

A claim is a running trial that carries key and owner. It is made first and looked at afterwards:
of the running trials of one key that with the lowest number holds, and the others are ended as
failed at once. This is sound on any storage which numbers trials one after the other. Whoever holds
evaluates, writes the answer into the trial, and ends it: complete with microseconds, or pruned
where there are none. The trial of a dead worker is ended by whoever needs its key: as its worker
would have, if the answer is in it already; else as failed, and the key is claimed anew. What has
ended cannot be changed, so a worker that was taken for dead finds its claims lost, and no key is
answered twice.
"""

from __future__ import annotations

import contextlib
import functools
import typing
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from flashgen.spec.config import KernelConfig
from flashgen.spec.outcome import Outcome, Stage
from flashgen.spec.records import record_of
from flashgen.tune.shared.storage import Storage, StorageError

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

LARGEST = 4096
"""No number of a config is larger: the range of the trials' parameters."""

Alive = Callable[[Collection[str]], tuple[list[str], str]]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What is claimed and answered as one: a config, or a whole final round."""

    key: str
    configs: tuple[KernelConfig, ...]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A unit that this worker holds until it answers or releases it. deaths: workers that died
    at it.
    """

    unit: Unit
    trial: FrozenTrial
    deaths: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One outcome per config of a unit, and the conditions of a final round as JSON."""

    outcomes: tuple[Outcome, ...]
    conditions: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """The record from which from_json makes an equal Answer."""
        conditions = None if self.conditions is None else dict(self.conditions)
        return {"outcomes": [o.to_json() for o in self.outcomes], "conditions": conditions}

    @classmethod
    def from_json(cls, record: object) -> Self:
        """The Answer of a record that to_json made. Raises InvalidArgument."""
        return record_of(cls, record)

    @property
    def best_us(self) -> float | None:
        """The least measured time, else the least estimate; None if there is none."""
        timings = (outcome.timing or outcome.estimate for outcome in self.outcomes if outcome.ok)
        return min((timing.median_us for timing in timings if timing), default=None)


@dataclass(frozen=True, kw_only=True)
class State:
    """A page at one moment, by key: the trial that answers it, the number of the trial that a
    living worker holds, the number of workers that died at it. orphans: trials that dead
    workers left running. workers: how many live; rank: the index of this one among them.
    """

    answered: Mapping[str, FrozenTrial]
    held: Mapping[str, int]
    deaths: Mapping[str, int]
    orphans: tuple[FrozenTrial, ...]
    workers: int
    rank: int

    def answer(self, key: str) -> Answer | None:
        """The answer of a key, if it has one. Raises InvalidArgument if it cannot be read."""
        trial = self.answered.get(key)
        return Answer.from_json(trial.user_attrs.get("answer")) if trial else None


class Page:
    """The claims and answers of one stage of one search."""

    def __init__(self, storage: Storage, study: Study, stage: Stage, alive: Alive) -> None:
        from optuna.trial import TrialState

        self._states = TrialState
        self._storage = storage
        self._study = study
        self._stage = stage
        self._alive = alive
        self._left: list[FrozenTrial] = []  # released when the storage answers again

    def state(self) -> State:
        """The current state."""
        return self._look()[1]

    def claim(self, units: Sequence[Unit]) -> list[Claim]:
        """Claim those of these units that have no answer and that no living worker holds."""
        while self._left:
            self._storage.finish(self._left[-1], self._states.FAIL)
            self._left.pop()
        mark = uuid.uuid4().hex
        for unit in units:
            self._announce(unit, mark)
        wanted = {unit.key: unit for unit in units}
        trials, state = self._look()
        while orphans := [o for o in state.orphans if self._key(o) in wanted]:
            for orphan in orphans:
                self._bury(orphan)
            trials, state = self._look()
        claims = []
        for trial in trials:
            if trial.state is self._states.RUNNING and self._claim(trial).endswith(mark):
                key = self._key(trial)
                if key not in state.answered and state.held.get(key) == trial.number:
                    deaths = state.deaths.get(key, 0)
                    claims.append(Claim(unit=wanted[key], trial=trial, deaths=deaths))
                else:
                    self._storage.finish(trial, self._states.FAIL)
        return claims

    def record(self, claim: Claim, answer: Answer) -> bool:
        """Answer a unit that this worker holds; False if it lost it because it was taken for
        dead.
        """
        trial = claim.trial
        if self._storage.put(trial, "answer", answer.to_json()) and self._end(trial, answer):
            return True
        # It has ended: perhaps by this worker, and the reply was lost.
        return self._has_answer(self._storage.trials(self._study)[trial.number])

    def release(self, claims: Sequence[Claim]) -> None:
        """Release what this worker holds: at once, or else with the next claim."""
        self._left += [claim.trial for claim in claims]
        with self._storage.hurried(), contextlib.suppress(StorageError):
            self.claim([])

    def _look(self) -> tuple[list[FrozenTrial], State]:
        every = self._storage.trials(self._study)
        trials = [trial for trial in every if self._storage.said(trial, "stage") == self._stage]
        running = [trial for trial in trials if trial.state is self._states.RUNNING]
        living, me = self._alive(set(map(self._owner, running)))
        held: dict[str, int] = {}
        for trial in running:
            if self._owner(trial) in living:
                held.setdefault(self._key(trial), trial.number)
        died = [trial for trial in trials if trial.user_attrs.get("died")]
        return trials, State(
            answered={self._key(t): t for t in reversed(trials) if self._has_answer(t)},
            held=held,
            deaths=Counter(map(self._key, died)),
            orphans=tuple(trial for trial in running if self._owner(trial) not in living),
            workers=len(living),
            rank=living.index(me),
        )

    def _key(self, trial: FrozenTrial) -> str:
        return str(self._storage.said(trial, "key"))

    def _claim(self, trial: FrozenTrial) -> str:
        return str(self._storage.said(trial, "claim"))

    def _owner(self, trial: FrozenTrial) -> str:
        """The token of the worker that made a claim."""
        return self._claim(trial).partition(" ")[0]

    def _has_answer(self, trial: FrozenTrial) -> bool:
        return trial.state in (self._states.COMPLETE, self._states.PRUNED)

    def _announce(self, unit: Unit, mark: str) -> None:
        """Add a running trial that claims a unit. A final round has no config of its own."""
        _, me = self._alive(())
        attributes = {"stage": self._stage, "key": unit.key, "claim": f"{me} {mark}"}
        params, shapes = {}, {}
        if len(unit.configs) == 1:
            params, shapes = asdict(unit.configs[0]), _distributions()
        else:
            attributes["configs"] = ", ".join(config.label for config in unit.configs)
        self._storage.add(self._study, self._states.RUNNING, attributes, params, shapes)

    def _bury(self, orphan: FrozenTrial) -> None:
        """End the trials of a dead worker: as it would have, if they have an answer."""
        record = orphan.user_attrs.get("answer")
        if record is not None:
            try:
                answer = Answer.from_json(record)
            except ValueError as error:
                raise self._storage.spoiled(error) from None
            self._end(orphan, answer)
        elif self._storage.put(orphan, "died", True):
            self._storage.finish(orphan, self._states.FAIL)

    def _end(self, trial: FrozenTrial, answer: Answer) -> bool:
        value = answer.best_us
        state = self._states.PRUNED if value is None else self._states.COMPLETE
        return self._storage.finish(trial, state, value)


def fields_of_configs() -> dict[str, list[str]]:
    """The fields of a config and the words that each may hold: "False" and "True" for flags,
    none for numbers.
    """
    hints = typing.get_type_hints(KernelConfig)
    found: dict[str, list[str]] = {}
    for field in fields(KernelConfig):
        hint = hints[field.name]
        found[field.name] = list(map(str, (False, True) if hint is bool else typing.get_args(hint)))
    return found


@functools.cache
def _distributions() -> dict[str, Any]:
    """The fields of a config for Optuna: words, and numbers on a logarithmic scale, but one that
    may be 0.
    """
    from optuna.distributions import CategoricalDistribution, IntDistribution

    may_be_0 = {field.name for field in fields(KernelConfig) if field.default == 0}
    switch = {"False": False, "True": True}
    return {
        name: CategoricalDistribution([switch.get(word, word) for word in words])
        if words
        else IntDistribution(0, LARGEST)
        if name in may_be_0
        else IntDistribution(1, LARGEST, log=True)
        for name, words in fields_of_configs().items()
    }
