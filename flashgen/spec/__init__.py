"""Vocabulary: specs, configs, legality and outcomes. Standard library only."""

from typing import TYPE_CHECKING, Any

from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig
from flashgen.spec.gpu import TARGETS, Gpu
from flashgen.spec.legality import why_illegal
from flashgen.spec.problem import Problem

if TYPE_CHECKING:
    from flashgen.spec.outcome import Outcome

__all__ = ["TARGETS", "AttentionSpec", "Gpu", "KernelConfig", "Outcome", "Problem", "why_illegal"]


def __getattr__(name: str) -> Any:
    """Outcome, which calls of attention do without."""
    if name != "Outcome":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flashgen.spec.outcome import Outcome

    return Outcome


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
