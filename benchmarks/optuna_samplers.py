"""Optuna's samplers as contenders that hear of failures, which they ignore by themselves.

TPE learns from pruned trials, which it takes for worse than all others; the other two learn from
values alone, so a failure is the worst value so far.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import optuna
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, NSGAIISampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)


class _Informed(BaseSampler):
    """Adds a trial for each that failed."""

    prunes = False

    def after_trial(
        self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """As BaseSampler.after_trial."""
        super().after_trial(study, trial, state, values)
        if state != TrialState.FAIL:
            return
        known = [each.values[0] for each in study.get_trials(deepcopy=False) if each.values]
        if self.prunes or known:
            told = create_trial(
                state=TrialState.PRUNED if self.prunes else TrialState.COMPLETE,
                value=None if self.prunes else max(known),
                params=trial.params,
                distributions=trial.distributions,
            )
            study.add_trial(told)


class Tpe(_Informed, TPESampler):
    """TPE of all parameters together."""

    prunes = True

    def __init__(self, seed: int) -> None:
        super().__init__(multivariate=True, constant_liar=True, seed=seed)


class Gp(_Informed, GPSampler):
    """A Gaussian process. It takes a tenth of a second for each proposal and repeats itself."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)


class Cmaes(_Informed, CmaEsSampler):
    """CMA-ES. It draws what is no number at random."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed, warn_independent_sampling=False)


class Genetic(_Informed, NSGAIISampler):
    """NSGA-II with one objective, of generations of 12."""

    def __init__(self, seed: int) -> None:
        super().__init__(population_size=12, seed=seed)
