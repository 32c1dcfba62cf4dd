"""Ledger: a run that workers share, and what all of them agree on."""

from __future__ import annotations

import contextlib
import json
import logging
import time
import uuid
from collections.abc import Collection, Mapping
from typing import Any, Self

import flashgen
from flashgen.errors import FlashgenError
from flashgen.ledger.claims import Page, fields_of_configs
from flashgen.ledger.storage import Notice, Pace, Storage, StorageError
from flashgen.ledger.workers import Roster
from flashgen.outcome import Stage
from flashgen.problem import Problem
from flashgen.spec import AttentionSpec

_logger = logging.getLogger(__name__)

SHORT = 60
"""Characters of a request's value that an error still shows."""


class Ledger:
    """A run that workers share at `url`; a context manager, or closed.

    request is all that must be the same on all workers, as JSON, beside `gpu`, the slug. study is
    the run's name: a storage can hold several. Raises StorageError, ToolchainError and
    InvalidArgument where the storage cannot be used, and FlashgenError where its run is another.
    """

    def __init__(
        self,
        url: str,
        *,
        gpu: str,
        request: Mapping[str, Any],
        study: str = "flashgen",
        pace: Pace | None = None,
        notice: Notice = _logger.warning,
    ) -> None:
        self.pace = pace or Pace()
        self._notice = notice
        self._name = study
        self._storage = Storage(url, self.pace, notice)
        self._agreed: dict[str, Any] = {}
        self._pages: dict[tuple[Stage, AttentionSpec, Problem], Page] = {}
        self._living: tuple[float, list[str]] = (0.0, [])
        self._run = self._storage.study(f"{study}: run")
        self._demand({"gpu": gpu, "flashgen": flashgen.__version__, **request})
        self.id = str(self.agree("id", uuid.uuid4().hex))
        self._roster = Roster(self._storage, f"{study}: workers")
        self._roster.join()

    @property
    def shown(self) -> str:
        """The storage as people may see it: with no password."""
        return self._storage.shown

    def agree(self, name: str, value: Any) -> Any:
        """What all workers take `name` for: `value`, if this one is the first to say; as JSON."""
        if name not in self._agreed:
            from optuna.trial import TrialState

            said = self._said(name)
            if not said:
                self._storage.add(self._run, TrialState.PRUNED, {"name": name, "value": value})
                said = self._said(name)
                self._storage.note(self._run, name, said[0])
            self._agreed[name] = said[0]
        return self._agreed[name]

    def page(self, stage: Stage, spec: AttentionSpec, problem: Problem) -> Page:
        """The page of one stage of one search."""
        key = stage, spec, problem
        if key not in self._pages:
            p = problem
            sizes = f"b{p.batch} h{p.heads}/{p.kv_heads} q{p.seq_q} k{p.seq_k}"
            study = self._storage.study(f"{self._name}: {spec.name} {sizes}: {stage}")
            self._pages[key] = Page(self._storage, study, self._alive)
        return self._pages[key]

    def close(self) -> None:
        """Leave: what this worker held may be taken at once. May be called again."""
        with self._storage.hurried():
            with contextlib.suppress(StorageError):  # else the others see it, a little later
                self._roster.leave()
            self._storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _said(self, name: str) -> list[Any]:
        trials = self._storage.trials(self._run)
        return [t.user_attrs["value"] for t in trials if t.user_attrs["name"] == name]

    def _demand(self, request: Mapping[str, Any]) -> None:
        """See to it that the run in the storage is this one. Raises FlashgenError."""
        here = json.loads(json.dumps({**request, "configs": fields_of_configs()}))
        there = self.agree("request", here)
        for name in [*here, *there]:
            if here.get(name) != there.get(name):
                raise FlashgenError(
                    f"{self.shown} holds a run of another {name}{_both(there, here, name)}: "
                    f"all workers of a run must have the same; "
                    f"start this one like them, or give it a storage of its own"
                )

    def _alive(self, owners: Collection[str]) -> tuple[list[str], str]:
        """The tokens of the workers that live, and this one's.

        `owners` were seen before this is called: so an owner that is not among them is dead.
        """
        seen, living = self._living
        late = time.monotonic() - seen > self.pace.look_s
        if late or not {*owners, self._roster.token} <= set(living):
            living = self._roster.living()
            self._living = time.monotonic(), living
        return living, self._roster.token


def _both(there: Mapping[str, Any], here: Mapping[str, Any], name: str) -> str:
    """Both values of what differs, where they are short enough to be read."""
    texts = [json.dumps(request.get(name)).strip('"') for request in (there, here)]
    return "" if max(map(len, texts)) > SHORT else f" ({texts[0]} there, {texts[1]} here)"
