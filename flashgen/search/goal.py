"""Goal of a search of configs, its Progress, and what it Found. THE RULE by which a final round is
decided stands in rule.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from flashgen.errors import FlashgenError
from flashgen.kernels.render import render
from flashgen.search.space import Budget as Budget
from flashgen.search.space import Method as Method
from flashgen.search.space import Sampler as Sampler
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig
from flashgen.spec.gpu import Gpu
from flashgen.spec.outcome import Outcome, Stage
from flashgen.spec.problem import Problem
from flashgen.spec.space import legal_configs, seed_configs, tuned_default

RUNNERS_UP = 2
"""Configs that a result names after the winner."""


class NothingRight(FlashgenError, RuntimeError):
    """No config of this search may be chosen; the message gives the last reason."""


def rendered_digest(spec: AttentionSpec, config: KernelConfig) -> str:
    """The digest of the kernel's text."""
    return render(spec, config).digest


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What one search is for: a spec at these sizes, its legal configs, those to try first.

    neighbours are the configs chosen for what is much alike, one as often as it was chosen;
    elsewhere those chosen for the same on other GPUs.
    """

    spec: AttentionSpec
    problem: Problem
    legal: tuple[KernelConfig, ...]
    seeds: tuple[KernelConfig, ...]
    default: KernelConfig
    incumbent: KernelConfig | None = None
    neighbours: tuple[KernelConfig, ...] = ()
    elsewhere: tuple[KernelConfig, ...] = ()
    digest_of: Callable[[AttentionSpec, KernelConfig], str] = rendered_digest

    @property
    def first(self) -> tuple[KernelConfig, ...]:
        """What the budget is spent on first: the seeds and the default; none twice."""
        return tuple(dict.fromkeys((*self.seeds, self.default)))

    @property
    def alike(self) -> tuple[KernelConfig, ...]:
        """What to try after those: the legal ones that tables hold for what is much alike."""
        legal = frozenset(self.legal)
        chosen = dict.fromkeys((*self.neighbours, *self.elsewhere))
        return tuple(config for config in chosen if config in legal)

    @functools.cached_property
    def order(self) -> tuple[KernelConfig, ...]:
        """All candidates there are, none twice: the incumbent, the seeds, the default, then the
        space in its order.

        Where nothing can be timed, the first that is right is taken: so the default stands last of
        those that are tried first.
        """
        held = () if self.incumbent is None else (self.incumbent,)
        return tuple(dict.fromkeys((*held, *self.seeds, self.default, *self.legal)))

    @functools.cached_property
    def space(self) -> tuple[KernelConfig, ...]:
        """The same candidates in an order that no incumbent changes: it stands last if it is none
        of the others.
        """
        return tuple(dict.fromkeys((*self.first, *self.legal, *self.order)))

    @property
    def rivals(self) -> tuple[KernelConfig, ...]:
        """What a challenger must beat: the incumbent, if any, and the default."""
        held = () if self.incumbent is None else (self.incumbent,)
        return tuple(dict.fromkeys((*held, self.default)))


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
        default=tuned_default(spec),
        incumbent=incumbent,
        neighbours=neighbours,
        elsewhere=elsewhere,
    )


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a search is, counted in candidates; best_us is the best time so far.

    default_us and incumbent_us are the times of what a winner must beat, as far as they are known.
    A check on its own and a kernel of the final round count as one. A search may end before total.
    """

    done: float
    total: float
    stage: Stage
    best_us: float | None
    default_us: float | None = None
    incumbent_us: float | None = None


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search chose. Outcomes are of the last stage, with all facts of the earlier ones.

    default and incumbent may have failed. candidates leaves out what was compiled and estimated and
    then not measured. exhaustive: every legal config was evaluated. replaced: the winner is not the
    incumbent, or there was none. p_value: the winner's against the strongest of its rivals, by THE
    RULE; None where it has none, or nothing was timed in passes. interrupted: by Ctrl-C, so that
    less was tried than was asked.
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
