"""Vocabulary: what is asked, specs, sizes and GPUs. Standard library only."""

from flashgen.lazy import attach
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS, Gpu
from flashgen.spec.problem import Problem

__all__ = ["TARGETS", "AttentionSpec", "Gpu", "KernelConfig", "Outcome", "Problem", "why_illegal"]

__getattr__, __dir__ = attach(  # of flashgen.schedules, which builds on this package
    __name__,
    {
        "KernelConfig": "flashgen.schedules.config",
        "Outcome": "flashgen.schedules.outcome",
        "why_illegal": "flashgen.schedules.legality",
    },
)
