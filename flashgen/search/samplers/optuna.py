"""OptunaProposer: Optuna's samplers over a space in which not every combination is legal.

The only module that imports optuna here.
"""

from __future__ import annotations

import importlib.util
import random
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from flashgen.errors import InvalidArgument, ToolchainError
from flashgen.search.samplers import P, Proposer
from flashgen.search.space import Method, Parameter, Point, Sampler, Value, parameters_of

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


class OptunaProposer(Proposer[P]):
    """Presents a space to Optuna: one parameter of a study for each one that varies.

    A proposal that is illegal or already learnt is answered at once and costs no evaluation. A
    failure is reported as pruned, which most samplers treat as worse than any value. If a point is
    learnt again, the first value counts.
    """

    def __init__(self, legal: Sequence[P], point_of: Callable[[P], Point], method: Method) -> None:
        super().__init__(legal)
        self._optuna = optuna = _optuna()
        self._by_place = method.sampler in BY_PLACE
        self._asks = GP_ASKS if method.sampler == "gp" else ASKS
        points = [point_of(point) for point in self._legal]
        self._parameters = parameters_of(points)
        _check_applies(method.sampler, self._parameters)
        self._study = optuna.create_study(sampler=_sampler(optuna, method))
        self._values = {
            point: tuple(values[parameter.name] for parameter in self._parameters)
            for point, values in zip(self._legal, points, strict=True)
        }
        self._by_values = {values: point for point, values in self._values.items()}
        self._space = {each.name: self._distribution(each) for each in self._parameters}
        self._pending: dict[P, Trial] = {}
        self._worst: float | None = None
        self._by_chance = list(self._legal)
        random.Random(method.seed).shuffle(self._by_chance)

    def propose(self, count: int) -> list[P]:
        """As Proposer.propose."""
        batch: list[P] = []
        for _ in range(min(MOST_ASKS, self._asks * count)):
            if len(batch) == count or len(self._learnt) + len(self._pending) >= len(self._legal):
                break
            batch += self._ask()
        while len(batch) < count and self._by_chance:
            point = self._by_chance.pop()
            if point not in self._learnt and point not in self._pending:
                self._study.enqueue_trial(self._parameters_of(point))
                batch += self._ask()
        return batch

    def _told(self, point: P, value: float | None, *, first: bool) -> None:
        if not first:
            return
        trial = self._pending.pop(point, None)
        if trial is None:
            self._study.enqueue_trial(self._parameters_of(point))
            trial = self._study.ask(self._space)
        self._tell(trial, value)

    def _ask(self) -> list[P]:
        """One proposal: a new point, or None if it was answered at once."""
        trial = self._study.ask(self._space)
        point = self._by_values.get(self._values_of(trial.params))
        if point is None:
            self._tell(trial, None)
        elif point in self._pending:
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        elif point in self._learnt:
            self._tell(trial, self._learnt[point])
        else:
            self._pending[point] = trial
            return [point]
        return []

    def _tell(self, trial: Trial, value: float | None) -> None:
        if value is None and self._by_place:
            value = self._worst
        if value is None:
            self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
        else:
            self._worst = value if self._worst is None else max(value, self._worst)
            self._study.tell(trial, value)

    def _distribution(self, parameter: Parameter) -> BaseDistribution:
        distributions = self._optuna.distributions
        found: BaseDistribution
        if self._by_place and parameter.ordered:
            found = distributions.IntDistribution(0, len(parameter.values) - 1)
        else:
            found = distributions.CategoricalDistribution(parameter.values)
        return found

    def _parameters_of(self, point: P) -> dict[str, Any]:
        """The parameters of a trial of this point."""
        return {
            each.name: each.values.index(value) if self._by_place and each.ordered else value
            for each, value in zip(self._parameters, self._values[point], strict=True)
        }

    def _values_of(self, parameters: dict[str, Any]) -> tuple[Value, ...]:
        """The values of the point that a trial proposes."""
        return tuple(
            each.values[parameters[each.name]]
            if self._by_place and each.ordered
            else parameters[each.name]
            for each in self._parameters
        )


def _optuna() -> Any:
    """Optuna with logging off. Raises ToolchainError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise ToolchainError(
            "this sampler needs optuna: pip install 'flashgen[tune]', or choose the sampler auto"
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
                f"the sampler {sampler} needs {package}: pip install 'flashgen[tune]'"
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
