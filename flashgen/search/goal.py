"""Goal, Budget and Method of a search, its Progress, what it Found; and the final round's rule.

THE RULE: a challenger is chosen only if it beats the incumbent and the default; and it beats
another where its 80th percentile lies below the other's 20th.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from flashgen.config import KernelConfig
from flashgen.errors import FlashgenError, InvalidArgument
from flashgen.gpu import Gpu
from flashgen.outcome import Outcome, Stage
from flashgen.render import render
from flashgen.space import legal_configs, seed_configs, tuned_default
from flashgen.spec import AttentionSpec, Problem

RUNNERS_UP = 2
"""Configs that a result names after the winner."""

Sampler = Literal["auto", "exhaustive", "random", "tpe", "genetic"]


class NothingRight(FlashgenError, RuntimeError):
    """No config of this search may be chosen; the message gives the last reason."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """trials: the most configs that are evaluated. seconds: no new one is begun after so long.

    On a GPU, where configs have estimates, those count that go past the compiler.
    """

    trials: int = 60
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise InvalidArgument(f"trials must be at least 1: got {self.trials}")
        if self.seconds is not None and not 0 <= self.seconds < math.inf:
            raise InvalidArgument(f"time_budget must be finite and >= 0: got {self.seconds}")


@dataclass(frozen=True, kw_only=True)
class Method:
    """How candidates are proposed: auto is tpe. Raises InvalidArgument."""

    sampler: Sampler = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sampler not in get_args(Sampler):
            known = ", ".join(get_args(Sampler))
            raise InvalidArgument(f"sampler must be one of {known}: got {self.sampler!r}")
        if not 0 <= self.seed < 2**32:
            raise InvalidArgument(f"seed must be 0 to {2**32 - 1}: got {self.seed}")


def rendered_digest(spec: AttentionSpec, config: KernelConfig) -> str:
    """The digest of the kernel's text."""
    return render(spec, config).digest


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What one search is for: a spec at these sizes, its legal configs, those to try first.

    neighbours are the configs chosen for what is much alike, one as often as it was chosen.
    """

    spec: AttentionSpec
    problem: Problem
    legal: tuple[KernelConfig, ...]
    seeds: tuple[KernelConfig, ...]
    default: KernelConfig
    incumbent: KernelConfig | None = None
    neighbours: tuple[KernelConfig, ...] = ()
    digest_of: Callable[[AttentionSpec, KernelConfig], str] = rendered_digest

    @property
    def first(self) -> tuple[KernelConfig, ...]:
        """What the budget is spent on first: the seeds and the default; none twice."""
        return tuple(dict.fromkeys((*self.seeds, self.default)))

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
) -> Goal:
    """The goal over the whole space of a spec on a GPU."""
    return Goal(
        spec=spec,
        problem=problem,
        legal=legal_configs(spec, gpu),
        seeds=seed_configs(spec, gpu),
        default=tuned_default(spec),
        incumbent=incumbent,
        neighbours=neighbours,
    )


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a search is, counted in candidates; best_us is the best time so far.

    A check on its own and a kernel of the final round count as one. A search may end before total.
    """

    done: float
    total: float
    stage: Stage
    best_us: float | None


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search chose. Outcomes are of the last stage, with all facts of the earlier ones.

    default and incumbent may have failed. candidates leaves out what was compiled and estimated and
    then not measured. exhaustive: every legal config was evaluated. replaced: the winner is not the
    incumbent, or there was none.
    """

    winner: Outcome
    runners_up: tuple[Outcome, ...]
    default: Outcome
    incumbent: Outcome | None
    candidates: int
    legal: int
    exhaustive: bool
    replaced: bool


def beats(challenger: Outcome, other: Outcome) -> bool:
    """Whether the challenger is faster beyond the spread: their bands do not overlap."""
    if challenger.timing is None or other.timing is None:
        return False
    return challenger.timing.high_us < other.timing.low_us


def choose(finals: Sequence[Outcome], held: Sequence[Outcome]) -> Outcome | None:
    """The winner of a final round, by THE RULE. finals are sorted by median and include `held`.

    held: the incumbent, if any, then the default, as far as they ran. A challenger must beat all of
    them; failing that the default wins if it beats the incumbent, else the incumbent stays.
    """
    if not held:
        return finals[0] if finals else None
    for final in finals:
        others = [rival for rival in held if rival.config != final.config]
        if final not in held and all(beats(final, rival) for rival in others):
            return final
    incumbent, default = held[0], held[-1]
    return default if beats(default, incumbent) else incumbent
