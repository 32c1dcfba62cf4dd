"""OptunaProposer: Optuna's samplers over a space in which not every combination is legal.

The only module that imports optuna here.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.random import RandomState

from flashgen.errors import InvalidArgument, ToolchainError
from flashgen.paths import install_command
from flashgen.search.points import ILLEGAL, Parameter, Space
from flashgen.search.samplers import Proposer
from flashgen.search.space import Method, Sampler

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import Trial

ASKS, MOST_ASKS = 20, 240
"""Proposals asked of the sampler for one that is legal and new, and for any number of them; then
one is drawn by chance: a sampler is slow where few are left."""

GP_ASKS = 3
"""The same for gp, which takes a tenth of a second for each and repeats itself."""

POPULATION = 12
"""Points of one generation of the genetic sampler."""

BY_PLACE: tuple[Sampler, ...] = ("gp", "cmaes")
"""Samplers that get the ranks of ordered values. They do not learn from pruned trials, so a
failure is reported as the worst value so far."""

NEEDED = {"gp": ("scipy", "torch"), "cmaes": ("cmaes",)}
"""Packages that Optuna imports for a sampler, beside its own."""


DRAWN = 100
"""Random points that are drawn at a time."""


class OptunaProposer(Proposer):
    """Presents a space to Optuna: one parameter of a study for each one that varies.

    A proposal that is illegal or already learnt is answered at once and costs no evaluation. A
    failure is reported as pruned, which most samplers treat as worse than any value. If a point is
    learnt again, the first value counts.
    """

    def __init__(self, space: Space, method: Method) -> None:
        super().__init__(space)
        self._optuna = optuna = _optuna()
        self._by_place = method.sampler in BY_PLACE
        self._asks = GP_ASKS if method.sampler == "gp" else ASKS
        self._parameters = space.parameters
        _check_applies(method.sampler, self._parameters)
        self._study = optuna.create_study(sampler=_sampler(optuna, method))
        self._distributions = {each.name: self._distribution(each) for each in self._parameters}
        self._pending: dict[int, Trial] = {}
        self._worst: float | None = None
        self._by_chance = self._drawn(RandomState(method.seed))

    def propose(self, count: int) -> list[int]:
        """As Proposer.propose."""
        batch: list[int] = []
        for _ in range(min(MOST_ASKS, self._asks * count)):
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
        while new := self._new(self._space.draw(random, DRAWN).tolist()):
            yield from (number for number in new if self._new([number]))
        for number in self._space:
            yield from self._new([number])

    def _new(self, numbers: Sequence[int]) -> list[int]:
        """Those that were neither proposed nor learnt."""
        return [n for n in numbers if n not in self._learnt and n not in self._pending]

    def _ask(self) -> list[int]:
        """One proposal: a new point, or none if it was answered at once."""
        trial = self._study.ask(self._distributions)
        codes = [
            trial.params[each.name]
            if self._is_place(each)
            else each.values.index(trial.params[each.name])
            for each in self._parameters
        ]
        number = int(self._space.numbers(np.array([codes], dtype=np.int64))[0])
        if number == ILLEGAL:
            self._tell(trial, None)
        elif number in self._pending:
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        elif number in self._learnt:
            self._tell(trial, self._learnt[number])
        else:
            self._pending[number] = trial
            return [number]
        return []

    def _tell(self, trial: Trial, value: float | None) -> None:
        if value is None and self._by_place:
            value = self._worst
        if value is None:
            self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
        else:
            self._worst = value if self._worst is None else max(value, self._worst)
            self._study.tell(trial, value)

    def _is_place(self, parameter: Parameter) -> bool:
        """Whether the sampler gets the ranks of this parameter's values."""
        return self._by_place and parameter.ordered

    def _distribution(self, parameter: Parameter) -> BaseDistribution:
        distributions = self._optuna.distributions
        found: BaseDistribution
        if self._is_place(parameter):
            found = distributions.IntDistribution(0, len(parameter.values) - 1)
        else:
            found = distributions.CategoricalDistribution(parameter.values)
        return found

    def _values_of(self, number: int) -> dict[str, Any]:
        """The parameters of a trial of this point."""
        codes = self._space.codes([number])[0].tolist()
        return {
            each.name: code if self._is_place(each) else each.values[code]
            for each, code in zip(self._parameters, codes, strict=True)
        }


def _optuna() -> Any:
    """Optuna with logging off. Raises ToolchainError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise ToolchainError(
            f"this sampler needs optuna: {install_command('tune')}, or choose the sampler auto"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _check_applies(sampler: Sampler, parameters: Sequence[Parameter]) -> None:
    """Raise if this sampler cannot search these parameters or lacks a package."""
    if sampler == "cmaes" and not any(parameter.ordered for parameter in parameters):
        names = ", ".join(parameter.name for parameter in parameters) or "none at all"
        raise InvalidArgument(
            f"the sampler cmaes needs a parameter that varies and whose values are numbers: "
            f"got {names}; choose another sampler"
        )
    for package in NEEDED.get(sampler, ()):
        if importlib.util.find_spec(package) is None:
            raise ToolchainError(
                f"the sampler {sampler} needs {package}: {install_command('tune')}"
            )


def _sampler(optuna: Any, method: Method) -> Any:
    """The sampler of this name, seeded."""
    samplers, seed = optuna.samplers, method.seed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if method.sampler == "random":
            return samplers.RandomSampler(seed=seed)
        if method.sampler == "gp":
            return samplers.GPSampler(seed=seed)
        if method.sampler == "cmaes":
            return samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
        if method.sampler == "genetic":
            return samplers.NSGAIISampler(population_size=POPULATION, seed=seed)
        return samplers.TPESampler(multivariate=True, seed=seed)
