"""Limits: how long a child may take for a task before it counts as hung."""

from __future__ import annotations

import logging
import threading

from flashgen.evaluators.answers import Task

logger = logging.getLogger(__name__)

FIRST_TASK_S = 30.0
"""What the first task of a child gets besides: it imports torch and Triton, from a cold disk or a
network, and makes a device ready. No kernel is to blame for that."""

PATIENCE = 3.0
"""How many times as long as the slowest that succeeded a task may take, if that is more."""


class Limits:
    """The limits of a pool's tasks, each kind by its own successes. Threads may share it.

    A task's own limit holds on a machine where its kind takes up to a third of it. On a slower one
    it grows to PATIENCE times the slowest success. It never shrinks, neither below its base nor
    back: it costs time only where something hangs, while too short a one, learned from small
    kernels, would end the first large one, and what was ended at its limit is not tried again.
    Successes count in shares of what was allowed, so that a round of many kernels, which is allowed
    more, says nothing else than a round of few.
    """

    def __init__(self) -> None:
        self._slowest: dict[str, float] = {}
        self._lock = threading.Lock()

    def seconds(self, task: Task, *, first: bool) -> float:
        """How long a task may take; first: it is its child's first."""
        return _base(task, first) * max(1.0, PATIENCE * self._slowest.get(task.function, 0.0))

    def learn(self, task: Task, seconds: float, *, first: bool) -> None:
        """A task was done in so many seconds."""
        share = seconds / _base(task, first)
        with self._lock:
            known = self._slowest.get(task.function, 0.0)
            self._slowest[task.function] = max(share, known)
        if share > max(known, 1 / PATIENCE):
            logger.info("%s took %.0f s: its limit grows", task.function, seconds)


def _base(task: Task, first: bool) -> float:
    return task.limit_s + (FIRST_TASK_S if first else 0.0)
