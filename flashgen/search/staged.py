"""search(): evaluate configs of one spec in stages, then choose.

On a GPU a candidate is compiled, checked, timed roughly and timed well; a final round follows.
Without a GPU candidates are compiled and estimated, then checked until a winner, two runners-up and
the default are correct. For tensors without descriptors the pointer twin of a winner is served
instead, so it must be correct too.

All decisions depend only on outcomes, which are in the log, and seed: a killed search repeats
nothing and ends the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import dropwhile
from typing import TYPE_CHECKING

from flashgen.evaluate.evaluator import Evaluator
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.outcome import Outcome, Status
from flashgen.search.decide import by_estimate, by_facts, by_loss, choose, median_us, p_value
from flashgen.search.evidence import Evidence
from flashgen.search.explore import Explorer
from flashgen.search.goal import (
    RUNNERS_UP,
    Budget,
    Found,
    Goal,
    Method,
    NothingRight,
    Progress,
)
from flashgen.search.log import Log

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

FINALISTS = 4
"""Challengers of a final round, in addition to incumbent and default."""

FINALISTS_LENT = 2
"""The same where only what tables hold is tried, three configs in the mean. With them a
simulation had twenty specs measured in ten minutes (docs/notes)."""


def search(
    goal: Goal,
    evaluator: Evaluator,
    log: Log,
    *,
    budget: Budget,
    method: Method,
    notify: Callable[[Progress], None] = lambda _: None,
    on_interrupt: Callable[[], None] = lambda: None,
    storage: BaseStorage | None = None,
) -> Found:
    """Find the config of a goal.

    Ctrl-C ends the exploration: the best known config is chosen as usual. A second one, or one
    before anything but the rivals was timed, is raised.

    Args:
        goal: the spec, its problem and the configs that may serve it.
        evaluator: builds, checks and times configs.
        log: where outcomes are kept, and where those of earlier runs are.
        budget: how many evaluations, or how long.
        method: the sampler and its seed.
        notify: is called with each step of the search.
        on_interrupt: is called at the first Ctrl-C.
        storage: keeps the study of the search, and has that of a killed one.

    Returns:
        The chosen config with its evidence.

    Raises:
        NothingRight: if no config is right.
        FlashgenError: whatever evaluator and log raise.

    Examples:
        >>> from flashgen.search import search
        >>> found = search(goal, evaluator, log, budget=budget, method=method)  # doctest: +SKIP
    """
    if not goal.legal:
        reason = why_illegal(goal.spec, goal.default, evaluator.gpu)
        raise NothingRight(
            f"no config of {goal.spec.name} is legal on {evaluator.gpu.slug}: {reason}"
        )
    evidence = Evidence(goal, evaluator, log, notify)
    explorer = Explorer(evidence, budget, method, storage)
    offline = _least_right if goal.derived else _right_in_order
    chosen = _final_round if evidence.on_gpu else offline
    interrupted = False

    def enough() -> bool:
        """Where no time is known: whether the seeds are compared, and some kernels are right."""
        compared = not goal.derived and set(goal.first) <= explorer.explored.keys()
        return compared and len(_right_in_order(explorer, evidence)) > RUNNERS_UP

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        on_interrupt()

    def serving() -> list[Outcome]:
        ranked = chosen(explorer, evidence)
        return list(dropwhile(lambda o: not evidence.twin_serves(o.config), ranked))

    try:
        explorer.run(enough=enough)
    except KeyboardInterrupt:
        if not any(o.ok and o.config not in goal.rivals for o in evidence.of("timed")):
            raise
        interrupt()
    try:
        best = serving()
    except KeyboardInterrupt:
        if interrupted:
            raise
        interrupt()
        best = serving()
    found = _found(best, explorer, evidence)
    if not interrupted:
        explorer.close(found.winner.config)
    return replace(found, interrupted=interrupted)


def _usable(explorer: Explorer, evidence: Evidence) -> list[KernelConfig]:
    """Without a GPU: the configs, as they are launched, that compile and are not refused."""
    timed = map(partial(evidence.get, "timed"), explorer.explored)
    usable = (o.config for o in timed if o and (o.ok or o.status is Status.NO_ESTIMATE))
    return list(dict.fromkeys(usable))


def _least_right(explorer: Explorer, evidence: Evidence) -> list[Outcome]:
    """Without a GPU, of configs that tables hold: by estimate, or else by facts, from the first
    that is right. So no entry is estimated slower than the default, or than what another table
    would lend. What the same chip was measured with comes before all estimates.
    """

    def wrong(config: KernelConfig) -> bool:
        return not (evidence.ask("check", [config])[0].ok and evidence.twin_serves(config))

    full = [evidence.full(config) for config in _usable(explorer, evidence)]
    timed = [outcome for outcome in full if outcome.timing]
    ranked = by_loss(timed) if timed else by_facts(full)
    ranked.sort(key=lambda outcome: outcome.config != evidence.goal.trusted)
    right = dropwhile(wrong, [outcome.config for outcome in ranked])
    return [evidence.full(config) for config in right]


def _right_in_order(explorer: Explorer, evidence: Evidence) -> list[Outcome]:
    """Without a GPU: the correct configs, best first, checked until there are enough, and the
    rivals.

    The config with the best estimate is checked too: ties are relative to it, if it is correct.
    """
    goal = evidence.goal
    usable = _usable(explorer, evidence)
    order = goal.space if any(evidence.passed("timed", c) for c in usable) else goal.order
    place = {evidence.launched(config): -number for number, config in enumerate(reversed(order))}
    usable.sort(key=place.__getitem__)
    while True:
        full = [
            evidence.full(config)
            for config in usable
            if evidence.passed("check", config) or not evidence.get("check", config)
        ]
        blind = full and not any(outcome.timing for outcome in full)
        order_of = by_facts(full) if blind else by_estimate(full, goal.neighbours)
        ranked = [outcome.config for outcome in order_of]
        fastest = sorted(full, key=lambda outcome: median_us(outcome.timing))[:1]
        wanted = ranked[: 1 + RUNNERS_UP] + [outcome.config for outcome in fastest]
        wanted += [c for c in map(evidence.launched, goal.rivals) if c in ranked]
        unchecked = [c for c in dict.fromkeys(wanted) if not evidence.get("check", c)]
        if not unchecked:
            return [evidence.full(c) for c in ranked if evidence.passed("check", c)]
        evidence.ask("check", unchecked)


def _final_round(explorer: Explorer, evidence: Evidence) -> list[Outcome]:
    """On a GPU: time the best few and their rivals in alternation. The chosen one comes first;
    none is chosen if the round failed as a whole.
    """
    timed = [evidence.full(c) for c in explorer.explored if evidence.passed("timed", c)]
    timed.sort(key=lambda outcome: median_us(outcome.timing))
    best = [outcome.config for outcome in timed]
    rivals = [
        evidence.launched(config)
        for config in evidence.goal.rivals
        if evidence.passed("check", config)
    ]
    most = FINALISTS_LENT if evidence.goal.derived else FINALISTS
    finalists = list(dict.fromkeys([*best[:most], *rivals]))
    finals = by_loss(outcome for outcome in evidence.ask_round(finalists) if outcome.ok)
    if not finals:
        return []
    while winner := choose(finals, _held(finals, evidence)):
        if evidence.twin_serves(winner.config):
            break
        finals.remove(winner)
    order = [outcome.config for outcome in ([winner] if winner else []) + finals]
    order += [config for config in best if config not in finalists]
    return [evidence.full(config) for config in dict.fromkeys(order)]


def _held(finals: Sequence[Outcome], evidence: Evidence) -> list[Outcome]:
    """The incumbent, if any, then the default, if they are among these."""
    rivals = map(evidence.launched, evidence.goal.rivals)
    return [o for config in rivals for o in finals if o.config == config]


def _found(ranked: Sequence[Outcome], explorer: Explorer, evidence: Evidence) -> Found:
    """The result, best first in `ranked`. Raises NothingRight if that is empty."""
    goal, explored = evidence.goal, explorer.explored
    if not ranked:
        why = evidence.last_failure()
        if why is not None and why.stage == "final" and why.status is Status.UNSTEADY:
            raise NothingRight(
                f"{goal.spec.name}: the clock of {evidence.gpu.slug} did not hold for as long as a "
                f"final round takes ({why.detail}); all else is in the log, so run it again"
            )
        reason = f"; the last was {why.config.label}, {why.status}: {why.detail}" if why else ""
        raise NothingRight(
            f"no config of {goal.spec.name} is right and fits {evidence.gpu.slug}, "
            f"of {len(explored)} tried{reason}"
        )
    finals = [outcome for outcome in ranked if outcome.stage == "final"]
    return Found(
        winner=ranked[0],
        p_value=p_value(ranked[0], finals, _held(finals, evidence)),
        runners_up=tuple(ranked[1 : 1 + RUNNERS_UP]),
        default=_verdict(evidence, goal.default),
        incumbent=_verdict(evidence, goal.incumbent) if goal.incumbent else None,
        candidates=explorer.evaluated,
        legal=len(goal.order),
        exhaustive=explorer.evaluated == len(goal.order),
        replaced=ranked[0].config != goal.incumbent,
        late=explorer.cut_short,
    )


def _verdict(evidence: Evidence, config: KernelConfig) -> Outcome:
    """The outcome of a rival; if its pointer twin has no verdict, that of the twin."""
    twin = config.pointer_twin(evidence.goal.spec)
    asked = (evidence.get(stage, twin) for stage in ("compile", "check"))
    undecided = (outcome for outcome in asked if outcome and outcome.undecided)
    return next(undecided, evidence.full(config))
