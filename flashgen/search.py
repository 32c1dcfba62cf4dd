"""Search: propose configs of one spec, evaluate them in stages, stop. Only importer of optuna.

On a GPU a candidate is compiled, checked, timed roughly, timed well; then comes the final round, in
which the best few, the incumbent and the default are timed in alternation, and goal.choose decides.

With no GPU all candidates are compiled and estimated, then checked in order of estimate until a
winner, two runners-up and the default are right. Where nothing can be estimated, the order is that
of the seeds, then of the space.

A winner's pointer twin is served in its place to tensors without descriptors, so it is compiled and
checked, too: a candidate whose twin is wrong or does not fit is passed over.

Outcomes are looked up in the log before they are asked for, and all decisions follow from outcomes
and seed: a search that was killed repeats nothing and ends as it would have.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from itertools import dropwhile, islice
from typing import TYPE_CHECKING, Any

from flashgen.config import KernelConfig
from flashgen.errors import ToolchainError
from flashgen.evaluate import SLOW, Evaluator
from flashgen.goal import Budget, Found, Goal, Method, NothingRight, Progress, choose
from flashgen.log import Log
from flashgen.outcome import Outcome, Stage, Status

if TYPE_CHECKING:
    from optuna.distributions import CategoricalDistribution
    from optuna.trial import Trial

BATCH = 12
"""Configs proposed and compiled at a time: on any machine, so that a search ends alike on all."""

DROP_ABOVE = 1.5
"""A candidate so many times slower than the best, after a few samples, is timed no further."""

FINALISTS, RUNNERS_UP = 4, 2

GPU_STAGES: tuple[Stage, ...] = ("compile", "check", "rough", "timed")
OFFLINE_STAGES: tuple[Stage, ...] = ("compile", "timed")
ALL_STAGES: tuple[Stage, ...] = (*GPU_STAGES, "final")
"""In the order in which a later one says more of a config."""

RIGHT_ALL_THE_SAME = (Status.DROPPED, Status.NO_ESTIMATE)
"""No time to be chosen by; but nothing is wrong with the kernel."""

ASKS = 20
"""Proposals asked of the sampler for one that is legal and new; then one is drawn by chance."""


def search(
    goal: Goal,
    evaluator: Evaluator,
    log: Log,
    *,
    budget: Budget,
    method: Method,
    notify: Callable[[Progress], None] = lambda _: None,
) -> Found:
    """Find the config of a goal. Raises NothingRight, and what evaluator and log raise."""
    run = _Search(goal, evaluator, log, budget, notify)
    run.exhaustive = method.sampler == "exhaustive" or len(goal.order) <= budget.trials
    run.explore(goal.rivals)
    seeds = tuple(dict.fromkeys((goal.default, *goal.first)))[: budget.trials]
    if run.exhaustive:
        run.walk(goal.order)
    elif not run.blind:
        run.walk(seeds)
    if run.blind:
        run.walk(goal.order[: budget.trials], enough=1 + RUNNERS_UP)
    elif not run.exhaustive:
        _explore(run, _Proposer(method, goal.legal), seeds)
    ranked = run.final_round() if run.on_gpu else run.right_in_order()
    return run.found(list(dropwhile(lambda outcome: not run.twin_serves(outcome.config), ranked)))


def _explore(run: _Search, proposer: _Proposer, new: Sequence[KernelConfig]) -> None:
    """Evaluate what the sampler proposes, in batches, until the budget is used up; first the seeds.

    The incumbent is no seed, and costs nothing: else a search that is run again, with its own
    winner for an incumbent, would take another path.
    """
    left = run.budget.trials
    while new:
        left -= len(new)
        for config in new:
            proposer.learn(config, run.value(config))
        new = proposer.propose(min(left, BATCH)) if left > 0 and not run.late else ()
        run.explore(new)


class _Search:
    """One search under way: every outcome it has seen, and the steps it asks for."""

    def __init__(
        self,
        goal: Goal,
        evaluator: Evaluator,
        log: Log,
        budget: Budget,
        notify: Callable[[Progress], None],
    ) -> None:
        self.goal = goal
        self.evaluator = evaluator
        self.log = log
        self.budget = budget
        self.notify = notify
        self.explored: list[KernelConfig] = []
        self.exhaustive = False
        self.on_gpu = evaluator.source != "estimated"
        self._stages = GPU_STAGES if self.on_gpu else OFFLINE_STAGES
        self._seen: dict[tuple[Stage, KernelConfig], Outcome] = {}
        self._digests: dict[KernelConfig, str] = {}
        self._best_us = math.inf
        self._done = 0.0
        self._end = math.inf if budget.seconds is None else time.monotonic() + budget.seconds

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self._end

    @property
    def blind(self) -> bool:
        """Whether configs compile, and the estimator has no figure for any of them."""
        timed = [outcome for (stage, _), outcome in self._seen.items() if stage == "timed"]
        return bool(timed) and all(outcome.status is Status.NO_ESTIMATE for outcome in timed)

    def walk(self, configs: Iterable[KernelConfig], *, enough: int | None = None) -> None:
        """Explore configs in their order, in batches; with no GPU, until `enough` are right."""
        rest = iter([config for config in configs if config not in self.explored])
        while enough is None or len(self.right_in_order()) < enough:
            batch = list(islice(rest, BATCH))
            if not batch:
                return
            self.explore(batch)

    def explore(self, configs: Sequence[KernelConfig]) -> None:
        """Take new candidates through all stages; each stage sees those that passed the one before.

        Late, only the incumbent and the default go on: without them there is nothing to choose.
        """
        for stage in self._stages:
            if self.late:
                configs = [config for config in configs if config in self.goal.rivals]
            if stage == self._stages[0]:
                self.explored += [config for config in configs if config not in self.explored]
            configs = [outcome.config for outcome in self.ask(stage, configs) if outcome.ok]

    def ask(self, stage: Stage, configs: Iterable[KernelConfig]) -> list[Outcome]:
        """One outcome a config, from the log or else from the evaluator, in the order given."""
        goal, source = self.goal, self.evaluator.source
        configs, unknown = list(configs), []
        for config in configs:
            if (stage, config) in self._seen:
                continue
            kernel = config, self.digest(config)
            known = self.log.recall(stage, goal.spec, goal.problem, *kernel, source=source)
            if known is None:
                unknown.append(config)
            else:
                self._take(known)
        if unknown:
            self._evaluate(stage, unknown)
        return [self._seen[stage, config] for config in configs]

    def _evaluate(self, stage: Stage, configs: Sequence[KernelConfig]) -> None:
        """Have configs evaluated; each outcome is in the log before the next is waited for."""
        goal = self.goal
        outcomes = self.evaluator.evaluate(stage, goal.spec, goal.problem, configs)
        for config, outcome in zip(configs, outcomes, strict=True):
            assert outcome.config == config, "an evaluator answers in the order it was asked"
            outcome = self._dropped(outcome) if stage == "rough" else outcome
            self.log.append(outcome)
            self._take(outcome)

    def digest(self, config: KernelConfig) -> str:
        """The digest of a candidate's text, rendered once."""
        if config not in self._digests:
            self._digests[config] = self.goal.digest_of(self.goal.spec, config)
        return self._digests[config]

    def value(self, config: KernelConfig) -> float | None:
        """Microseconds for the sampler to learn from; None where the config failed."""
        outcome = self._seen.get(("timed", config)) or self._seen.get(("rough", config))
        return outcome.timing.median_us if outcome and outcome.timing else None

    def right_in_order(self) -> list[Outcome]:
        """No GPU: the right ones, best first: checked until there are enough, and the rivals."""
        ranked = self._ranked()
        rivals = [config for config in self.goal.rivals if config in ranked]
        self.ask("check", dict.fromkeys([*ranked[: 1 + RUNNERS_UP], *rivals]))
        for start in range(len(ranked)):
            right = [config for config in ranked[:start] if self._passed("check", config)]
            missing = 1 + RUNNERS_UP - len(right)
            if missing <= 0:
                break
            self.ask("check", ranked[start : start + missing])
        return [self._full(config) for config in ranked if self._passed("check", config)]

    def _ranked(self) -> list[KernelConfig]:
        """No GPU: the candidates that compiled, by estimate; the rest in the goal's order, last."""
        place = {config: number for number, config in enumerate(self.goal.order)}
        timed = [self._seen["timed", c] for c in self.explored if ("timed", c) in self._seen]
        usable = [o for o in timed if o.ok or o.status is Status.NO_ESTIMATE]
        return [o.config for o in sorted(usable, key=lambda o: (_us(o), place[o.config]))]

    def final_round(self) -> list[Outcome]:
        """GPU: time the best few and their rivals in alternation. The chosen one comes first."""
        timed = [self._seen["timed", c] for c in self.explored if self._passed("timed", c)]
        best = [outcome.config for outcome in sorted(timed, key=_us)]
        rivals = [config for config in self.goal.rivals if self._passed("check", config)]
        finalists = list(dict.fromkeys([*best[:FINALISTS], *rivals]))
        finals = sorted((o for o in self._final(finalists) if o.ok), key=_us)
        while winner := choose(finals, [o for c in rivals for o in finals if o.config == c]):
            if self.twin_serves(winner.config):
                break
            finals.remove(winner)
        order = [outcome.config for outcome in ([winner] if winner else []) + finals]
        order += [config for config in best if config not in finalists]
        return [self._full(config) for config in dict.fromkeys(order)]

    def _final(self, finalists: list[KernelConfig]) -> list[Outcome]:
        """One whole round: from the log if all its records are there, else measured anew."""
        goal = self.goal
        kernels, source = [(c, self.digest(c)) for c in finalists], self.evaluator.source
        known = self.log.recall_round(goal.spec, goal.problem, kernels, source=source)
        if known is None and finalists:
            self._evaluate("final", finalists)
        for outcome in known or ():
            self._take(outcome)
        return [self._seen["final", config] for config in finalists]

    def twin_serves(self, config: KernelConfig) -> bool:
        """Whether this config's pointer twin, if it has one, is right and fits; it may be slow."""
        twin = config.pointer_twin()
        if twin == config:
            return True
        (built,) = self.ask("compile", [twin])
        return (built.ok or built.status in SLOW) and self.ask("check", [twin])[0].ok

    def found(self, ranked: Sequence[Outcome]) -> Found:
        """The result, best first in `ranked`. Raises NothingRight where that is empty."""
        goal = self.goal
        if not ranked:
            why = next((o for o in reversed(self._seen.values()) if not o.ok), None)
            reason = f"; the last was {why.config.label}, {why.status}: {why.detail}" if why else ""
            raise NothingRight(
                f"no config of {goal.spec.name} is right and fits {self.evaluator.gpu.slug}, "
                f"of {len(self.explored)} tried{reason}"
            )
        return Found(
            winner=ranked[0],
            runners_up=tuple(ranked[1 : 1 + RUNNERS_UP]),
            default=self._full(goal.default),
            incumbent=self._full(goal.incumbent) if goal.incumbent else None,
            candidates=len(self.explored),
            legal=len(goal.order),
            exhaustive=len(self.explored) == len(goal.order),
            replaced=ranked[0].config != goal.incumbent,
        )

    def _passed(self, stage: Stage, config: KernelConfig) -> bool:
        outcome = self._seen.get((stage, config))
        return outcome is not None and outcome.ok

    def _full(self, config: KernelConfig) -> Outcome:
        """What ended a config, or else its last outcome, with all that the earlier ones found."""
        outcomes = [self._seen[s, config] for s in ALL_STAGES if (s, config) in self._seen]
        failed = (o for o in outcomes if not o.ok and o.status not in RIGHT_ALL_THE_SAME)
        last = next(failed, outcomes[-1])
        return replace(
            last,
            registers=_known(o.registers for o in outcomes),
            shared_bytes=_known(o.shared_bytes for o in outcomes),
            check=_known(o.check for o in outcomes),
        )

    def _dropped(self, outcome: Outcome) -> Outcome:
        """End a candidate whose rough time is far from the best so far, resumed or not."""
        slower = _us(outcome) / self._best_us
        if not outcome.ok or slower <= DROP_ABOVE:
            return outcome
        why = f"{slower:.2f} times the best so far, {self._best_us:.1f} us"
        return replace(outcome, status=Status.DROPPED, detail=why)

    def _take(self, outcome: Outcome) -> None:
        """Remember an outcome and tell of it."""
        self._seen[outcome.stage, outcome.config] = outcome
        self._best_us = min(self._best_us, _us(outcome))
        self._done += self._share(outcome)
        candidates = len(self.goal.order) if self.exhaustive else self.budget.trials
        self.notify(
            Progress(
                done=self._done,
                total=max(self._done, candidates + len(self.goal.rivals) + RUNNERS_UP + 1),
                stage=outcome.stage,
                best_us=None if self._best_us == math.inf else self._best_us,
            )
        )

    def _share(self, outcome: Outcome) -> float:
        """The part of a candidate that this outcome settles: one that fails has no stage to go."""
        if outcome.stage not in self._stages:
            return 1.0
        passed = self._stages.index(outcome.stage) / len(self._stages)
        return 1 / len(self._stages) if outcome.ok else 1.0 - passed


def _us(outcome: Outcome) -> float:
    return outcome.timing.median_us if outcome.timing else math.inf


def _known(values: Iterable[Any]) -> Any:
    return next((value for value in values if value is not None), None)


class _Proposer:
    """Optuna's view of the space: one categorical parameter a field that varies.

    A proposal that is illegal, or was learnt already, is answered at once and costs no evaluation:
    what failed is told as pruned, which a sampler takes as worse than any time.
    """

    def __init__(self, method: Method, legal: Sequence[KernelConfig]) -> None:
        self._optuna = optuna = _optuna()
        self._study = optuna.create_study(sampler=_sampler(optuna, method))
        self._legal = frozenset(legal)
        self._learnt: dict[KernelConfig, float | None] = {}
        self._pending: dict[KernelConfig, Trial] = {}
        names = [field.name for field in fields(KernelConfig)]
        values = {name: list(dict.fromkeys(getattr(c, name) for c in legal)) for name in names}
        self._fixed = {name: choices[0] for name, choices in values.items() if len(choices) == 1}
        self._space: dict[str, CategoricalDistribution] = {
            name: optuna.distributions.CategoricalDistribution(choices)
            for name, choices in values.items()
            if len(choices) > 1
        }
        self._by_chance = list(dict.fromkeys(legal))
        random.Random(method.seed).shuffle(self._by_chance)

    def propose(self, count: int) -> list[KernelConfig]:
        """Up to `count` legal configs, never proposed nor learnt; fewer where none are left."""
        batch: list[KernelConfig] = []
        for _ in range(ASKS * count):
            if len(batch) == count or len(self._learnt) + len(self._pending) >= len(self._legal):
                break
            batch += self._ask()
        while len(batch) < count and self._by_chance:
            config = self._by_chance.pop()
            if config not in self._learnt and config not in self._pending:
                self._study.enqueue_trial(self._params(config))
                batch += self._ask()
        return batch

    def learn(self, config: KernelConfig, value: float | None) -> None:
        """Tell the sampler what became of a config: microseconds, or None for a failure."""
        if config not in self._legal or config in self._learnt:
            return
        self._learnt[config] = value
        trial = self._pending.pop(config, None)
        if trial is None:
            self._study.enqueue_trial(self._params(config))
            trial = self._study.ask(self._space)
        self._tell(trial, value)

    def _ask(self) -> list[KernelConfig]:
        """One proposal: a new config, or nothing where it could be answered at once."""
        trial = self._study.ask(self._space)
        config = KernelConfig(**self._fixed, **trial.params)
        if config in self._pending:
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        elif config not in self._legal or config in self._learnt:
            self._tell(trial, self._learnt.get(config))
        else:
            self._pending[config] = trial
            return [config]
        return []

    def _tell(self, trial: Trial, value: float | None) -> None:
        if value is None:
            self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
        else:
            self._study.tell(trial, value)

    def _params(self, config: KernelConfig) -> dict[str, Any]:
        return {name: getattr(config, name) for name in self._space}


def _optuna() -> Any:
    """Optuna, quiet. Raises ToolchainError where it is not installed."""
    try:
        import optuna
    except ImportError:
        raise ToolchainError(
            "a search of more configs than --trials needs optuna: pip install 'flashgen[tune]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _sampler(optuna: Any, method: Method) -> Any:
    """The sampler of this name, seeded."""
    if method.sampler == "random":
        return optuna.samplers.RandomSampler(seed=method.seed)
    if method.sampler == "genetic":
        return optuna.samplers.NSGAIISampler(population_size=BATCH, seed=method.seed)
    return optuna.samplers.TPESampler(multivariate=True, seed=method.seed)
