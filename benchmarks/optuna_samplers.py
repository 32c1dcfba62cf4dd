"""Samplers of Optuna that flashgen does not offer, to compare it with: gp, cmaes and genetic."""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal

from benchmarks.recorded import Landscape
from flashgen.errors import InvalidArgument
from flashgen.search.points import ListedSpace, Parameter, Space
from flashgen.search.samplers import Proposer
from flashgen.search.samplers.optuna import OptunaProposer
from flashgen.search.space import Method, Value

Foreign = Literal["gp", "cmaes", "genetic"]

POPULATION = 12
"""Points of one generation of the genetic sampler."""


class Genetic(OptunaProposer):
    """NSGA-II with one objective."""

    def _sampler(self, optuna: Any, method: Method) -> Any:
        return optuna.samplers.NSGAIISampler(population_size=POPULATION, seed=method.seed)


class ByPlace(OptunaProposer):
    """A sampler that gets the ranks of ordered values. It does not learn from pruned trials, so a
    failure is reported as the worst value so far.
    """

    _worst: float | None = None

    def _tell(self, trial: Any, value: float | None) -> None:
        value = self._worst if value is None else value
        if value is not None:
            self._worst = value if self._worst is None else max(value, self._worst)
        super()._tell(trial, value)

    def _distribution(self, parameter: Parameter) -> Any:
        if not parameter.ordered:
            return super()._distribution(parameter)
        return self._optuna.distributions.IntDistribution(0, len(parameter.values) - 1)

    def _code_of(self, parameter: Parameter, shown: Value) -> int:
        return int(shown) if parameter.ordered else super()._code_of(parameter, shown)

    def _shown(self, parameter: Parameter, code: int) -> Value:
        return code if parameter.ordered else super()._shown(parameter, code)


class Gp(ByPlace):
    """A Gaussian process. It takes a tenth of a second for each proposal and repeats itself."""

    asks = 3

    def _sampler(self, optuna: Any, method: Method) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.GPSampler(seed=method.seed)


class Cmaes(ByPlace):
    """CMA-ES. It draws what is no number at random."""

    def _sampler(self, optuna: Any, method: Method) -> Any:
        if not any(parameter.ordered for parameter in self._parameters):
            names = ", ".join(parameter.name for parameter in self._parameters) or "none at all"
            raise InvalidArgument(
                f"the sampler cmaes needs a parameter that varies and whose values are numbers: "
                f"got {names}; choose another sampler"
            )
        return optuna.samplers.CmaEsSampler(seed=method.seed, warn_independent_sampling=False)


CLASSES: dict[Foreign, type[OptunaProposer]] = {"gp": Gp, "cmaes": Cmaes, "genetic": Genetic}


def foreign_proposer(sampler: Foreign, space: Space, seed: int) -> Proposer:
    """The proposer of a sampler. Raises InvalidArgument if it does not apply to the space."""
    return CLASSES[sampler](space, Method(sampler="tpe", seed=seed))


def replay_foreign(
    landscape: Landscape, sampler: Foreign, seed: int, evaluations: int
) -> tuple[float, ...]:
    """The regrets of a search without seeds, as recorded.replay has them."""
    proposer = foreign_proposer(sampler, ListedSpace(landscape.points), seed)
    regrets: list[float] = []
    while len(regrets) < evaluations and (proposed := proposer.propose(1)):
        (number,) = proposed
        time = landscape.times[number]
        proposer.learn(number, time)
        now = math.inf if time is None else time / landscape.best - 1
        regrets.append(min([now, *regrets[-1:]]))
    return tuple(regrets)
