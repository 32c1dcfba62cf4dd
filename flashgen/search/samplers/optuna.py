"""OptunaProposer: Optuna's samplers over a space in which not every combination is legal.

The only module that imports optuna here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.random import RandomState

from flashgen.errors import ToolchainError
from flashgen.search.points import ILLEGAL, Parameter, Space
from flashgen.search.samplers import Proposer
from flashgen.search.space import Method, Value

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import Trial

ASKS, MOST_ASKS = 20, 240
"""Proposals asked of the sampler for one that is legal and new, and for any number of them; then
one is drawn by chance: a sampler is slow where few are left."""

DRAWN = 100
"""Random points that are drawn at a time."""


class OptunaProposer(Proposer):
    """Presents a space to Optuna: one parameter of a study for each one that varies.

    A proposal that is illegal or already learnt is answered at once and costs no evaluation. A
    failure is reported as pruned, which its samplers treat as worse than any value. If a point
    is learnt again, the first value counts.
    """

    asks = ASKS

    def __init__(self, space: Space, method: Method) -> None:
        super().__init__(space)
        self._optuna = optuna = _optuna()
        self._parameters = space.parameters
        self._study = optuna.create_study(sampler=self._sampler(optuna, method))
        self._distributions = {each.name: self._distribution(each) for each in self._parameters}
        self._by_chance = self._drawn(RandomState(method.seed))

    def propose(self, count: int) -> list[int]:
        """As Proposer.propose."""
        batch: list[int] = []
        for _ in range(min(MOST_ASKS, self.asks * count)):
            if len(batch) == count or len(self._learnt) + len(self._pending) >= self._space.size:
                break
            batch += self._ask()
        while len(batch) < count and (number := next(self._by_chance, None)) is not None:
            self._study.enqueue_trial(self._values_of(number))
            batch += self._ask()
        return batch

    def _told(self, number: int, value: float | None, *, first: bool) -> None:
        if not first:
            return
        trial = self._pending.pop(number, None)
        if trial is None:
            self._study.enqueue_trial(self._values_of(number))
            trial = self._study.ask(self._distributions)
        self._tell(trial, value)

    def _drawn(self, random: RandomState) -> Iterator[int]:
        """New points by chance; if none is found, in their order."""
        while new := list(filter(self._is_new, self._space.draw(random, DRAWN).tolist())):
            yield from filter(self._is_new, new)
        yield from filter(self._is_new, self._space)

    def _ask(self) -> list[int]:
        """One proposal: a new point, or none if it was answered at once."""
        trial = self._study.ask(self._distributions)
        codes = [self._code_of(each, trial.params[each.name]) for each in self._parameters]
        number = int(self._space.numbers(np.array([codes], dtype=np.int64))[0])
        if number == ILLEGAL:
            self._tell(trial, None)
        elif number in self._pending or number in self._excluded:
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        elif number in self._learnt:
            self._tell(trial, self._learnt[number])
        else:
            self._pending[number] = trial
            return [number]
        return []

    def _tell(self, trial: Trial, value: float | None) -> None:
        if value is None:
            self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
        else:
            self._study.tell(trial, value)

    def _sampler(self, optuna: Any, method: Method) -> BaseSampler:
        """The sampler of this method, seeded."""
        found: BaseSampler
        if method.sampler == "random":
            found = optuna.samplers.RandomSampler(seed=method.seed)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                found = optuna.samplers.TPESampler(multivariate=True, seed=method.seed)
        return found

    def _distribution(self, parameter: Parameter) -> BaseDistribution:
        """How the sampler sees a parameter: its values have no order."""
        found: BaseDistribution = self._optuna.distributions.CategoricalDistribution(
            parameter.values
        )
        return found

    def _code_of(self, parameter: Parameter, shown: Value) -> int:
        """The number of the value that the sampler proposes."""
        return parameter.values.index(shown)

    def _shown(self, parameter: Parameter, code: int) -> Value:
        """A value as the sampler sees it, by its number."""
        return parameter.values[code]

    def _values_of(self, number: int) -> dict[str, Any]:
        """The parameters of a trial of this point."""
        codes = self._space.codes([number])[0].tolist()
        return {
            each.name: self._shown(each, code)
            for each, code in zip(self._parameters, codes, strict=True)
        }


def _optuna() -> Any:
    """Optuna with logging off. Raises ToolchainError if it is not installed."""
    try:
        import optuna
    except ImportError:
        from flashgen.paths import install_command

        raise ToolchainError(
            f"this sampler needs optuna: {install_command('tune')}, or choose the sampler auto"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
