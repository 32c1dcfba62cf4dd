"""Proposer: configs that a sampler proposes, each legal and new. The only importer of optuna."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from flashgen.config import KernelConfig
from flashgen.errors import ToolchainError
from flashgen.search.goal import Method

if TYPE_CHECKING:
    from optuna.distributions import CategoricalDistribution
    from optuna.trial import Trial

ASKS = 20
"""Proposals asked of the sampler for one that is legal and new; then one is drawn by chance."""

MOST_ASKS = 240
"""Proposals asked of the sampler for any number of configs: it is slow where few are left."""

POPULATION = 12
"""Configs of one generation of the genetic sampler."""


class Proposer:
    """Optuna's view of the space: one categorical parameter a field that varies.

    A proposal that is illegal, or was learnt already, is answered at once and costs no evaluation:
    what failed is told as pruned, which a sampler takes as worse than any time.
    """

    def __init__(self, method: Method, legal: Sequence[KernelConfig]) -> None:
        self._optuna = optuna = _optuna()
        self._study = optuna.create_study(sampler=_sampler(optuna, method))
        self._legal = frozenset(legal)
        self._learnt: dict[KernelConfig, float | None] = {}
        self._pending: dict[KernelConfig, Trial] = {}
        names = [field.name for field in fields(KernelConfig)]
        values = {name: list(dict.fromkeys(getattr(c, name) for c in legal)) for name in names}
        self._fixed = {name: choices[0] for name, choices in values.items() if len(choices) == 1}
        self._space: dict[str, CategoricalDistribution] = {
            name: optuna.distributions.CategoricalDistribution(choices)
            for name, choices in values.items()
            if len(choices) > 1
        }
        self._by_chance = list(dict.fromkeys(legal))
        random.Random(method.seed).shuffle(self._by_chance)

    def propose(self, count: int) -> list[KernelConfig]:
        """Up to `count` legal configs, never proposed nor learnt; fewer where none are left."""
        batch: list[KernelConfig] = []
        for _ in range(min(MOST_ASKS, ASKS * count)):
            if len(batch) == count or len(self._learnt) + len(self._pending) >= len(self._legal):
                break
            batch += self._ask()
        while len(batch) < count and self._by_chance:
            config = self._by_chance.pop()
            if config not in self._learnt and config not in self._pending:
                self._study.enqueue_trial(self._params(config))
                batch += self._ask()
        return batch

    def learn(self, config: KernelConfig, value: float | None) -> None:
        """Tell the sampler what became of a config: microseconds, or None for a failure."""
        if config not in self._legal or config in self._learnt:
            return
        self._learnt[config] = value
        trial = self._pending.pop(config, None)
        if trial is None:
            self._study.enqueue_trial(self._params(config))
            trial = self._study.ask(self._space)
        self._tell(trial, value)

    def _ask(self) -> list[KernelConfig]:
        """One proposal: a new config, or nothing where it could be answered at once."""
        trial = self._study.ask(self._space)
        config = KernelConfig(**self._fixed, **trial.params)
        if config in self._pending:
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        elif config not in self._legal or config in self._learnt:
            self._tell(trial, self._learnt.get(config))
        else:
            self._pending[config] = trial
            return [config]
        return []

    def _tell(self, trial: Trial, value: float | None) -> None:
        if value is None:
            self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
        else:
            self._study.tell(trial, value)

    def _params(self, config: KernelConfig) -> dict[str, Any]:
        return {name: getattr(config, name) for name in self._space}


def _optuna() -> Any:
    """Optuna, quiet. Raises ToolchainError where it is not installed."""
    try:
        import optuna
    except ImportError:
        raise ToolchainError(
            "a search of more configs than --trials needs optuna: pip install 'flashgen[tune]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _sampler(optuna: Any, method: Method) -> Any:
    """The sampler of this name, seeded."""
    if method.sampler == "random":
        return optuna.samplers.RandomSampler(seed=method.seed)
    if method.sampler == "genetic":
        return optuna.samplers.NSGAIISampler(population_size=POPULATION, seed=method.seed)
    return optuna.samplers.TPESampler(multivariate=True, seed=method.seed)
