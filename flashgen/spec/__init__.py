"""Vocabulary: specs, configs, legality and outcomes. Standard library only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen import lazily

if TYPE_CHECKING:
    from flashgen.spec.attention import AttentionSpec
    from flashgen.spec.config import KernelConfig
    from flashgen.spec.gpu import TARGETS, Gpu
    from flashgen.spec.legality import why_illegal
    from flashgen.spec.outcome import Outcome
    from flashgen.spec.problem import Problem

__all__ = ["TARGETS", "AttentionSpec", "Gpu", "KernelConfig", "Outcome", "Problem", "why_illegal"]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "AttentionSpec": "attention:AttentionSpec",
        "KernelConfig": "config:KernelConfig",
        "TARGETS": "gpu:TARGETS",
        "Gpu": "gpu:Gpu",
        "why_illegal": "legality:why_illegal",
        "Outcome": "outcome:Outcome",
        "Problem": "problem:Problem",
    },
)
