"""Vocabulary: specs, configs, legality and outcomes. Standard library only."""

from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig
from flashgen.spec.gpu import TARGETS, Gpu
from flashgen.spec.legality import why_illegal
from flashgen.spec.outcome import Outcome
from flashgen.spec.problem import Problem

__all__ = ["TARGETS", "AttentionSpec", "Gpu", "KernelConfig", "Outcome", "Problem", "why_illegal"]
