"""Vocabulary: what is asked, specs, sizes and GPUs. Standard library only."""

import importlib
from typing import Any

from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS, Gpu
from flashgen.spec.problem import Problem

__all__ = ["TARGETS", "AttentionSpec", "Gpu", "KernelConfig", "Outcome", "Problem", "why_illegal"]

_OF_SCHEDULES = {"KernelConfig": "config", "Outcome": "outcome", "why_illegal": "legality"}
"""Names of flashgen.schedules, which builds on this package, that are public here."""


def __getattr__(name: str) -> Any:
    if name not in _OF_SCHEDULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"flashgen.schedules.{_OF_SCHEDULES[name]}")
    found = globals()[name] = getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
