"""The study of a search: an Optuna study, in which each config is a trial.

Any sampler of Optuna's may propose. A proposal that is illegal, or that the study has already, is
told PRUNED and asked again, which costs no evaluation; after ASKS of them a legal point is drawn at
random. A study that a killed run left in a journal goes on: as long as it has trials that this run
has not asked for, these are the answers, so the same decisions lead to the same trials.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import optuna
from numpy.random import RandomState
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from flashgen.errors import InvalidArgument, ToolchainError
from flashgen.paths import install_command
from flashgen.search.journal import JournalFile
from flashgen.search.points import ILLEGAL, Parameter, Space, parameters_of
from flashgen.search.sampler import KernelSampler
from flashgen.search.space import DROP_ABOVE, Method, Point, Value

ASKS = 20
"""Proposals of a sampler for one that is legal and new; then one is drawn by chance."""

DRAWN = 100
"""Random points that are drawn at a time."""

LEAST = "least_us"
"""The user attribute of a study that has a value from outside of it, which trials compete with."""

OF_NAMES = ("auto", "exhaustive", "tpe", "random", "brute-force")
"""Samplers that get the values of every parameter as names; others get the ranks of numbers."""

CLASSES = {
    "tpe": "optuna.samplers:TPESampler",
    "gp": "optuna.samplers:GPSampler",
    "cmaes": "optuna.samplers:CmaEsSampler",
    "qmc": "optuna.samplers:QMCSampler",
    "random": "optuna.samplers:RandomSampler",
    "brute-force": "optuna.samplers:BruteForceSampler",
}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "tpe": {"multivariate": True, "constant_liar": True},
    "cmaes": {"warn_independent_sampling": False},
    "qmc": {"warn_independent_sampling": False, "warn_asynchronous_seeding": False},
}


class Drop(BasePruner):
    """Prunes a trial whose last report is worse than the best of its study by a factor. Values are
    above 0 and minimized.
    """

    def __init__(self, factor: float = DROP_ABOVE) -> None:
        self.factor = factor

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """As BasePruner.prune."""
        if trial.last_step is None:
            return False
        known = [
            min([*each.intermediate_values.values(), *(each.values or ())])
            for each in study.get_trials(deepcopy=False)
            if each.intermediate_values or each.values
        ]
        best = min([*known, study.user_attrs.get(LEAST, float("inf"))])
        return bool(trial.intermediate_values[trial.last_step] > self.factor * best)


def sampler_for(name: str, seed: int) -> BaseSampler:
    """A sampler of Optuna's by its name, or of `module:Class`, seeded. Raises InvalidArgument if
    there is none, ToolchainError if a package is missing.
    """
    module, _, kind = CLASSES.get(name, name).partition(":")
    try:
        found = getattr(importlib.import_module(module), kind)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            made = found(seed=seed, **OPTIONS.get(name, {}))
    except ImportError as error:
        if name in CLASSES or not module.startswith(error.name or " "):
            raise ToolchainError(
                f"the sampler {name} needs {error.name}: {install_command('tune')}"
            ) from None
        raise InvalidArgument(f"sampler: there is no module {module}") from None
    except (AttributeError, TypeError) as error:
        raise InvalidArgument(
            f"sampler {name} must be a class with the argument seed: {error}"
        ) from None
    if not isinstance(made, BaseSampler):
        raise InvalidArgument(f"sampler {name} must be an optuna.samplers.BaseSampler: got {found}")
    return made


class Trials:
    """The trials of one study, by their points. Raises InvalidArgument if the sampler does not
    apply, ToolchainError if a package is missing.

    Args:
        space: the points that may be proposed.
        method: the sampler and its seed.
        points: further points that may be begun.
        guesses: as KernelSampler's.
        storage: where the study is kept; otherwise in memory.
        name: of the study, which goes on if the storage has it.
        fresh: make a sampler of Optuna's anew for each trial, so that a resumed study goes on as
            an undisturbed one.
    """

    def __init__(
        self,
        space: Space,
        method: Method,
        *,
        points: Sequence[Point] = (),
        guesses: Callable[[Point], float | None] | None = None,
        storage: BaseStorage | None = None,
        name: str | None = None,
        fresh: bool = False,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space = space
        self._method = method
        self._own: KernelSampler | None = None
        if method.sampler in ("auto", "exhaustive"):
            self._own = KernelSampler(
                space, seed=method.seed, guesses=guesses, likely_first=method.likely_first
            )
        self._fresh = fresh and self._own is None
        union = parameters_of(points) if points else space.parameters
        self._ranks = method.sampler not in OF_NAMES
        self._parameters = {each.name: each for each in union}
        self._distributions = {each.name: self._distribution(each) for each in union}
        open_study = functools.partial(
            optuna.create_study, sampler=self._own or self._sampler(0), pruner=Drop(),
            storage=storage, study_name=name, load_if_exists=True,
        )  # fmt: skip
        self.study = open_study()
        self._kept = deque(self.study.get_trials(deepcopy=False))
        spaces = (each.distributions for each in self._kept if each.distributions)
        if any(each[n] != self._distributions.get(n) for each in spaces for n in each):
            optuna.delete_study(study_name=self.study.study_name, storage=self.study._storage)
            self.study, self._kept = open_study(), deque()
        self._trials: dict[tuple[Value, ...], Trial] = {}
        self._taken: set[int] = set()
        self._by_chance = self._drawn(RandomState(method.seed))

    def __contains__(self, point: Point) -> bool:
        return self._key(point) in self._trials

    def ask(self, again: Collection[int] = ()) -> int | None:
        """The number of a point that the sampler proposes, which has a trial from now on; None if
        all have one. again: points under way that may come again.
        """
        for _ in range(ASKS):
            if len(self._taken) >= self.space.size and not again:
                return None
            with self._batch():
                trial = self._next()
            found = self._settled(trial, again)
            if found is not None:
                return found
        for number in self._by_chance:
            self.begin(self.space.point(number))
            return number
        return None

    def begin(self, point: Point) -> None:
        """Ask for the trial of a point, whatever the sampler would propose."""
        if point in self:
            return
        params = self._shown(point)
        if self._kept and _params(self._kept[0]) != params:
            self._forget()
        with self._batch():
            if not self._kept:
                self.study.enqueue_trial(params)
            trial = self._next()
        self._add(point, trial)

    def prunes(self, point: Point, value: float, step: int) -> bool:
        """Whether the pruner would end a trial that reports this value."""
        trial = copy.copy(self._frozen(self._trials[self._key(point)]))
        trial.intermediate_values = {**trial.intermediate_values, step: value}
        return self.study.pruner.prune(self.study, trial)

    def report(self, point: Point, value: float, step: int) -> None:
        """Report an intermediate value to a trial, unless it has that or has ended."""
        trial = self._trials[self._key(point)]
        frozen = self._frozen(trial)
        if step not in frozen.intermediate_values and not frozen.state.is_finished():
            trial.report(value, step)

    def tell(
        self,
        point: Point,
        value: float | None,
        attrs: Mapping[str, Any] | None = None,
        *,
        pruned: bool = False,
    ) -> None:
        """End the trial of a point: COMPLETE with a value, else FAIL, or PRUNED. One that the study
        has ended stays as it is.
        """
        state = TrialState.PRUNED if pruned else TrialState.FAIL
        state = state if value is None else TrialState.COMPLETE
        self._tell(self._trials[self._key(point)], value, attrs or {}, state)

    def assume(
        self, values: Mapping[int, float], ignored: Collection[int], closed: Collection[int]
    ) -> None:
        """As KernelSampler.assume; other samplers make their own of running trials."""
        if self._own is not None:
            self._own.assume(values, ignored, closed)

    def close(self, status: str) -> None:
        """Prune what has not ended, for this reason."""
        for trial in self._trials.values():
            self._tell(trial, None, {"status": status}, TrialState.PRUNED)

    def _batch(self) -> contextlib.AbstractContextManager[None]:
        backend = getattr(self.study._storage, "_backend", None)
        return backend.batch() if isinstance(backend, JournalFile) else contextlib.nullcontext()

    def _next(self) -> Trial:
        """The next trial: one that the study has, or one that is asked for now."""
        kept = self._kept.popleft() if self._kept else None
        if self._fresh:
            number = kept.number if kept else len(self.study.get_trials(deepcopy=False))
            self.study.sampler = self._sampler(number)
        if kept is None or kept.state == TrialState.WAITING:
            return self.study.ask(self._distributions)
        self.study._thread_local.cached_all_trials = None  # as Study.ask
        trial = Trial(self.study, kept._trial_id)
        for name, each in self._distributions.items():
            trial._suggest(name, each)  # what a kill left out
        return trial

    def _settled(self, trial: Trial, again: Collection[int]) -> int | None:
        """The number of a proposal that is legal and new, or may come again; others end."""
        point = self._point(trial.params)
        number = self.space.find(point) if set(point) == set(self._parameters) else ILLEGAL
        if number != ILLEGAL and any(self.space.point(number)[n] != v for n, v in point.items()):
            number = ILLEGAL
        if number == ILLEGAL or number in self._taken:
            status = "illegal" if number == ILLEGAL else "repeated"
            self._tell(trial, None, {"status": status}, TrialState.PRUNED)
            return number if number in again else None
        self._add(self.space.point(number), trial)
        return number

    def _add(self, point: Point, trial: Trial) -> None:
        self._trials[self._key(point)] = trial
        number = self.space.number(point)
        if number != ILLEGAL:
            self._taken.add(number)

    def _tell(
        self, trial: Trial, value: float | None, attrs: Mapping[str, Any], state: TrialState
    ) -> None:
        if self._frozen(trial).state.is_finished():
            return
        for name, each in attrs.items():
            if each is not None:
                trial.set_user_attr(name, each)
        with contextlib.suppress(RuntimeError):  # brute-force stops a study
            self.study.tell(trial, value, state)

    def _forget(self) -> None:
        """End what a run before left under way, which took another path."""
        for each in self._kept:
            if not each.state.is_finished():
                self.study._storage.set_trial_state_values(each._trial_id, TrialState.FAIL)
        self._kept.clear()

    def _frozen(self, trial: Trial) -> FrozenTrial:
        return self.study._storage.get_trial(trial._trial_id)

    def _drawn(self, random: RandomState) -> Iterator[int]:
        """New points by chance; if none is found, in their order."""

        def new(number: int) -> bool:
            return number not in self._taken

        while found := list(filter(new, self.space.draw(random, DRAWN).tolist())):
            yield from filter(new, found)
        yield from filter(new, self.space)

    def _sampler(self, number: int) -> BaseSampler:
        return sampler_for(self._method.sampler, (self._method.seed + number) % 2**32)

    def _key(self, point: Point) -> tuple[Value, ...]:
        return tuple(point[name] for name in self._parameters)

    def _distribution(self, parameter: Parameter) -> BaseDistribution:
        if self._is_rank(parameter):
            return IntDistribution(0, len(parameter.values) - 1)
        return CategoricalDistribution(parameter.values)

    def _is_rank(self, parameter: Parameter) -> bool:
        return self._ranks and parameter.ordered

    def _shown(self, point: Point) -> dict[str, Any]:
        """The parameters of a point as the sampler gets them."""
        return {
            name: each.values.index(point[name]) if self._is_rank(each) else point[name]
            for name, each in self._parameters.items()
        }

    def _point(self, params: Mapping[str, Any]) -> dict[str, Value]:
        """The point of a trial's parameters."""
        return {
            name: each.values[params[name]] if self._is_rank(each) else params[name]
            for name, each in self._parameters.items()
            if name in params
        }


def _params(trial: FrozenTrial) -> dict[str, Any]:
    """The parameters of a trial, or those that it is enqueued with."""
    return {**trial.system_attrs.get("fixed_params", {}), **trial.params}
