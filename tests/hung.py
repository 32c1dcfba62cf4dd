"""Children that hang, whatever the clock says."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from flashgen.evaluate.workers.child import Child


def end_what_hangs(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """A child counts as hung when its pid is in the file, and not before: how long a machine takes until
    a task hangs says nothing.
    """
    spending = Child._spending

    def told(child: Child) -> Callable[[], tuple[float, float]]:
        spent = spending(child)

        def both() -> tuple[float, float]:
            cpu_s, _ = spent()
            pids = file.read_text().split() if file.exists() else []
            return cpu_s, math.inf if str(child._process.pid) in pids else 0.0

        return both

    monkeypatch.setattr(Child, "_spending", told)
