"""Importance: how much each field of a config decides whether it is among the fastest."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields

from flashgen.errors import ToolchainError
from flashgen.paths import install_command
from flashgen.schedules.config import KernelConfig

LEAST_CONFIGS = 10
"""With fewer configs there is no result."""

FASTEST = 0.1
LEAST_FASTEST = 5
"""What counts as fast: a tenth of the configs, and so many at least: Optuna's documentation advises
five."""


def fastest_share(configs: int) -> float:
    """The share of this number of configs that counts as fast: FASTEST, or more if that is too
    few.
    """
    return min(0.5, max(FASTEST, LEAST_FASTEST / configs))


def importances(times_us: Mapping[KernelConfig, float]) -> dict[str, float]:
    """The importance of each field that varies, the greatest first; they sum to 1.

    By PED-ANOVA (Watanabe, Bansal and Hutter, arXiv 2304.10255) as implemented in Optuna: how much
    the fastest configs differ from all timed ones in a field. It ranks fields and explains nothing.
    Empty for fewer than LEAST_CONFIGS configs, for equal times, and if no field varies. Raises
    ToolchainError if optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise ToolchainError(f"importances need optuna: {install_command('tune')}") from None
    values = {
        field.name: list(dict.fromkeys(getattr(config, field.name) for config in times_us))
        for field in fields(KernelConfig)
    }
    space = {
        name: optuna.distributions.CategoricalDistribution(choices)
        for name, choices in values.items()
        if len(choices) > 1
    }
    if len(times_us) < LEAST_CONFIGS or len(set(times_us.values())) == 1 or not space:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(
            target_quantile=fastest_share(len(times_us))
        )
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    study.add_trials(
        [
            optuna.trial.create_trial(
                params={name: getattr(config, name) for name in space},
                distributions=dict(space),
                value=us,
            )
            for config, us in times_us.items()
        ]
    )
    return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))
