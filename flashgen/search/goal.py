"""Goal of a search, its Progress, and what it Found. decide.py has the rule of the final round."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from flashgen.errors import FlashgenError
from flashgen.kernels.render import render
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Outcome, Stage
from flashgen.schedules.space import legal_configs, seed_configs, tuned_default
from flashgen.search.space import Budget as Budget
from flashgen.search.space import Method as Method
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import Problem

RUNNERS_UP = 2
"""Configs that a result names after the winner."""


class NothingRight(FlashgenError, RuntimeError):
    """No config of this search may be chosen; the message gives the last reason."""


def rendered_digest(spec: AttentionSpec, config: KernelConfig) -> str:
    """The digest of the kernel's text."""
    return render(spec, config).digest


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What to search: a spec at these sizes, its legal configs, and those to try first.

    neighbours: configs chosen for similar specs, repeated as often as they were chosen; elsewhere:
    those that other GPUs chose for this spec. derived: nothing is searched, the legal configs are
    what tables hold; trusted: of these, what the same chip was measured with.
    """

    spec: AttentionSpec
    problem: Problem
    legal: tuple[KernelConfig, ...]
    seeds: tuple[KernelConfig, ...]
    default: KernelConfig
    incumbent: KernelConfig | None = None
    neighbours: tuple[KernelConfig, ...] = ()
    elsewhere: tuple[KernelConfig, ...] = ()
    derived: bool = False
    trusted: KernelConfig | None = None
    digest_of: Callable[[AttentionSpec, KernelConfig], str] = rendered_digest

    @property
    def title(self) -> str:
        """The name of its study."""
        tables = ", from tables" if self.derived else ""
        return f"{self.spec.name} seq {self.problem.seq_k}{tables}"

    @property
    def first(self) -> tuple[KernelConfig, ...]:
        """What the budget is spent on first: the seeds and the default, without duplicates."""
        return tuple(dict.fromkeys((*self.seeds, self.default)))

    @functools.cached_property
    def warm(self) -> tuple[KernelConfig, ...]:
        """What a search of a large space starts with: the default, what other GPUs chose for this
        spec, the seeds, and what was chosen for similar specs; without duplicates.
        """
        legal = frozenset(self.legal)
        others, alike = (
            [c for c in each if c in legal] for each in (self.elsewhere, self.neighbours)
        )
        return tuple(dict.fromkeys((self.default, *others, *self.seeds, *alike)))

    @functools.cached_property
    def order(self) -> tuple[KernelConfig, ...]:
        """All candidates: the incumbent, the seeds, the default, then the space in its order. If
        nothing can be timed, the first correct one is taken.
        """
        return tuple(dict.fromkeys((*filter(None, [self.incumbent]), *self.space)))

    @functools.cached_property
    def space(self) -> tuple[KernelConfig, ...]:
        """The same in an order that does not depend on the incumbent: only if it is no other
        candidate, it comes last.
        """
        return tuple(dict.fromkeys((*self.first, *self.legal, *self.rivals)))

    @property
    def rivals(self) -> tuple[KernelConfig, ...]:
        """What a challenger must beat: the incumbent, if any, and the default."""
        return tuple(dict.fromkeys(filter(None, (self.incumbent, self.default))))


def goal_for(
    spec: AttentionSpec,
    problem: Problem,
    gpu: Gpu,
    incumbent: KernelConfig | None = None,
    neighbours: tuple[KernelConfig, ...] = (),
    elsewhere: tuple[KernelConfig, ...] = (),
    *,
    on_gpu: bool = False,
) -> Goal:
    """The goal over the whole space of a spec on a GPU; on_gpu as in space.legal_configs."""
    return Goal(
        spec=spec,
        problem=problem,
        legal=legal_configs(spec, gpu, on_gpu=on_gpu),
        seeds=seed_configs(spec, gpu, on_gpu=on_gpu),
        default=tuned_default(spec, gpu),
        incumbent=incumbent,
        neighbours=tuple(config.kernel for config in neighbours),
        elsewhere=tuple(config.kernel for config in elsewhere),
    )


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a search is, in candidates; it may end before total. A separate check and a kernel of
    the final round count as one. best_us: the best time so far; default_us, incumbent_us: what a
    winner must beat, if known. tried, rejected: configs, of a budget of `trials`; on_gpu: their
    times are measured. outcome: the last one.
    """

    done: float
    total: float
    stage: Stage
    best_us: float | None
    default_us: float | None = None
    incumbent_us: float | None = None
    tried: int = 0
    trials: int = 0
    rejected: int = 0
    on_gpu: bool = True
    outcome: Outcome | None = None


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a search. Outcomes are of the last stage, with all facts of the earlier ones;
    default and incumbent may have failed.

    candidates: without those that were not measured, and rivals that cost no trial. exhaustive:
    every legal config was evaluated. replaced: the winner is not the incumbent. p_value: of the
    winner against the strongest of its rivals; None without rivals or passes. interrupted: ended
    early by Ctrl-C; late: by the time budget.
    """

    winner: Outcome
    runners_up: tuple[Outcome, ...]
    default: Outcome
    incumbent: Outcome | None
    candidates: int
    legal: int
    exhaustive: bool
    replaced: bool
    p_value: float | None = None
    interrupted: bool = False
    late: bool = False

    @property
    def undecided(self) -> tuple[str, ...]:
        """Which of the winner's rivals have no verdict: "the incumbent", "the default"."""
        rivals = {"the incumbent": self.incumbent, "the default": self.default}
        return tuple(name for name, rival in rivals.items() if rival and rival.undecided)
