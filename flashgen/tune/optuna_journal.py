"""The Optuna journal of a run: what became of each config, for the Optuna dashboard to show.

One study a search, one trial a config; flashgen writes it and never reads it.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from flashgen.search.log import Log
from flashgen.spec.config import KernelConfig
from flashgen.spec.outcome import Outcome, Status

LARGEST = 4096
"""No number of a config is larger: the range of the trials' parameters."""


class SeenLog(Log):
    """`inner` for one search, which keeps all outcomes that pass: recalled and new ones."""

    def __init__(self, inner: Log) -> None:
        self._inner = inner
        self.seen: list[Outcome] = []

    def recall(self, *asked: Any, **by: Any) -> Outcome | None:
        """As Log.recall."""
        found = self._inner.recall(*asked, **by)
        self.seen += [found] if found else []
        return found

    def recall_round(self, *asked: Any, **by: Any) -> list[Outcome] | None:
        """As Log.recall_round."""
        found = self._inner.recall_round(*asked, **by)
        self.seen += found or []
        return found

    def append(self, *outcomes: Outcome) -> None:
        """As Log.append."""
        self._inner.append(*outcomes)
        self.seen += outcomes


class OptunaJournal:
    """The journal in `path`, begun anew. Without Optuna nothing is written. record() is of one
    thread.
    """

    def __init__(self, path: Path) -> None:
        self._storage = _storage(path)

    def record(self, title: str, outcomes: Iterable[Outcome]) -> None:
        """Add a search as a study of this name: a trial for each config, in the order in which they
        were met, ended by its last outcome.
        """
        if self._storage is None:
            return
        import optuna

        last: dict[KernelConfig, Outcome] = {}
        for outcome in outcomes:
            held = last.get(outcome.config)
            if held is None or held.ok or held.status is Status.DROPPED:
                last[outcome.config] = outcome
        study = optuna.create_study(
            storage=self._storage, study_name=title, direction="minimize", load_if_exists=True
        )
        study.add_trials([_trial(outcome) for outcome in last.values()])


def _storage(path: Path) -> Any:
    """The storage of an empty journal; None without Optuna."""
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend
    except ImportError:
        return None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for old in path.parent.glob(f"{path.name}*"):  # and the lock of a killed run
        old.unlink()
    return optuna.storages.JournalStorage(JournalFileBackend(str(path)))


def _trial(outcome: Outcome) -> Any:
    """The trial of a config: complete with microseconds, pruned if it was dropped, else failed."""
    from optuna.trial import TrialState, create_trial

    timing = outcome.timing or outcome.estimate
    state = TrialState.FAIL
    if outcome.ok and timing is not None:
        state = TrialState.COMPLETE
    elif outcome.ok or outcome.status in (Status.DROPPED, Status.NO_ESTIMATE):
        state = TrialState.PRUNED
    return create_trial(
        state=state,
        value=timing.median_us if timing and state is TrialState.COMPLETE else None,
        params=asdict(outcome.config),
        distributions=_distributions(),
        user_attrs={"stage": outcome.stage, "status": outcome.status, "detail": outcome.detail},
    )


@functools.cache
def _distributions() -> dict[str, Any]:
    """The fields of a config for Optuna: words, and numbers on a logarithmic scale, but one that
    may be 0.
    """
    from optuna.distributions import CategoricalDistribution, IntDistribution

    hints = typing.get_type_hints(KernelConfig)
    found: dict[str, Any] = {}
    for field in fields(KernelConfig):
        words = (False, True) if hints[field.name] is bool else typing.get_args(hints[field.name])
        if words:
            found[field.name] = CategoricalDistribution(words)
        elif field.default == 0:
            found[field.name] = IntDistribution(0, LARGEST)
        else:
            found[field.name] = IntDistribution(1, LARGEST, log=True)
    return found
