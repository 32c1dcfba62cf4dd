"""The study of a search: an Optuna study, in which each config is a trial.

Any sampler of Optuna's may propose. A proposal that is illegal, or that the study has already, is
told PRUNED and asked again, which costs no evaluation; after ASKS of them a legal point is drawn at
random. A study that a killed run left in a journal goes on. As long as it has trials that this run
has not asked for, these are the answers. So the same decisions lead to the same trials.
"""

from __future__ import annotations

import copy
import functools
import importlib
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import optuna
from numpy.random import RandomState
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.trial import FrozenTrial, TrialState

from flashgen.errors import InvalidArgument, ToolchainError
from flashgen.paths import install_command
from flashgen.search.journal import Journal
from flashgen.search.points import ILLEGAL, Space, parameters_of
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

QUIET = {"warn_independent_sampling": False}
CLASSES: Mapping[str, tuple[str, Mapping[str, bool]]] = {
    "tpe": ("TPESampler", {"multivariate": True, "constant_liar": True}),
    "gp": ("GPSampler", {}),
    "cmaes": ("CmaEsSampler", QUIET),
    "qmc": ("QMCSampler", {**QUIET, "warn_asynchronous_seeding": False}),
    "random": ("RandomSampler", {}),
    "brute-force": ("BruteForceSampler", {}),
}
"""Optuna's samplers by name, with their options."""


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
        best = study.user_attrs.get(LEAST, float("inf"))
        for each in study.get_trials(deepcopy=False):
            best = min([best, *each.intermediate_values.values(), *(each.values or ())])
        return bool(trial.intermediate_values[trial.last_step] > self.factor * best)


def sampler_for(name: str, seed: int) -> BaseSampler:
    """A sampler of Optuna's by its name, or of `module:Class`, seeded. Raises InvalidArgument if
    there is none, ToolchainError if a package is missing.
    """
    kind, options = CLASSES.get(name, (name, {}))
    module, _, kind = kind.rpartition(":")
    module = module or "optuna.samplers"
    try:
        found = getattr(importlib.import_module(module), kind)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            made = found(seed=seed, **options)
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
    """The trials of one study, by the numbers of their points; `ids` are Optuna's. Raises
    InvalidArgument if the sampler does not apply, ToolchainError if a package is missing.

    Args:
        space: the points that may be proposed.
        method: the sampler and its seed.
        others: further points that may be begun; their numbers follow those of the space.
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
        others: Sequence[Point] = (),
        guesses: Callable[[Point], float | None] | None = None,
        storage: BaseStorage | None = None,
        name: str | None = None,
        fresh: bool = False,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space = space
        self._others = others
        self._method = method
        union = space.parameters
        if others:
            union = parameters_of([*map(space.point, space), *others])
        own = method.sampler in ("auto", "exhaustive")
        self._fresh = fresh and not own
        sampler = self._sampler(0) if not own else KernelSampler(
            space, seed=method.seed, guesses=guesses, likely_first=method.likely_first
        )  # fmt: skip
        self._ranked: dict[str, tuple[Value, ...]] = {
            each.name: each.values
            for each in union
            if each.ordered and method.sampler not in OF_NAMES
        }
        self._distributions: dict[str, BaseDistribution] = {
            each.name: IntDistribution(0, len(each.values) - 1)
            if each.name in self._ranked
            else CategoricalDistribution(each.values)
            for each in union
        }
        self._storage = storage or InMemoryStorage()
        open_study = functools.partial(
            optuna.create_study, sampler=sampler, pruner=Drop(), storage=self._storage,
            study_name=name, load_if_exists=True,
        )  # fmt: skip
        self.study = open_study()
        self._left = deque(self.study.get_trials(deepcopy=False))
        if any(not self._distributions.items() >= t.distributions.items() for t in self._left):
            optuna.delete_study(study_name=self.study.study_name, storage=self._storage)
            self.study, self._left = open_study(), deque()
        self._study_id = self._storage.get_study_id_from_name(self.study.study_name)
        self.ids: dict[int, int] = {}
        self._by_chance = self._drawn(RandomState(method.seed))

    def ask(
        self,
        again: Collection[int] = (),
        values: Mapping[int, float] | None = None,
        closed: Collection[int] = (),
    ) -> int | None:
        """The number of a point that the sampler proposes, which has a trial from now on; None if
        all have one.

        again: points under way that may come again. Only a KernelSampler is told of them, and of
        values and closed, as its assume() has them; others judge what is under way themselves.
        """
        if isinstance(self.study.sampler, KernelSampler):
            self.study.sampler.assume(values, again, closed)
        for _ in range(ASKS):
            if sum(n < self.space.size for n in self.ids) >= self.space.size and not again:
                return None
            trial_id = self._next()
            number = self._number_of(self._storage.get_trial(trial_id))
            if number != ILLEGAL and number not in self.ids:
                self.ids[number] = trial_id
                return number
            status = "illegal" if number == ILLEGAL else "repeated"
            self._tell(trial_id, None, {"status": status}, TrialState.PRUNED)
            if number in again:
                return number
        found = next(self._by_chance, None)
        if found is not None:
            self.begin(found)
        return found

    def begin(self, number: int) -> None:
        """Ask for the trial of a point, whatever the sampler would propose."""
        if number not in self.ids:
            size = self.space.size
            point = self.space.point(number) if number < size else self._others[number - size]
            values = {name: point[name] for name in self._distributions}
            ranks = {name: some.index(values[name]) for name, some in self._ranked.items()}
            self.ids[number] = self._next(values | ranks)

    def prunes(self, number: int, value: float, step: int) -> bool:
        """Whether the pruner would end the trial of a point that reports this value."""
        trial = copy.copy(self._storage.get_trial(self.ids[number]))
        trial.intermediate_values = {**trial.intermediate_values, step: value}
        return self.study.pruner.prune(self.study, trial)

    def report(self, number: int, value: float, step: int) -> None:
        """Report an intermediate value to a trial, unless it has that or has ended."""
        trial = self._storage.get_trial(self.ids[number])
        if step not in trial.intermediate_values and not trial.state.is_finished():
            self._storage.set_trial_intermediate_value(self.ids[number], step, value)

    def tell(
        self,
        number: int,
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
        self._tell(self.ids[number], value, attrs or {}, state)

    def close(self, status: str) -> None:
        """Prune what has not ended, for this reason."""
        for trial_id in self.ids.values():
            self._tell(trial_id, None, {"status": status}, TrialState.PRUNED)

    def _next(self, params: Mapping[str, Any] | None = None) -> int:
        """The id of the next trial, of these parameters or as the sampler proposes: one that a run
        before left, or one that is asked for now.
        """
        if self._left:
            left = self._left[0].params
            if len(left) < len(self._distributions) or params not in (None, left):
                self._forget()
        if self._left:
            return self._id_of(self._left.popleft().number)
        if self._fresh:
            self.study.sampler = self._sampler(self._storage.get_n_trials(self._study_id))
        whole = self._storage.batch if isinstance(self._storage, Journal) else nullcontext
        with whole():
            if params is not None:
                self.study.enqueue_trial(dict(params))
            return self._id_of(self.study.ask(self._distributions).number)

    def _id_of(self, trial_number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study_id, trial_number)

    def _number_of(self, trial: FrozenTrial) -> int:
        """The number of the point of a trial, or ILLEGAL."""
        values = {name: some[trial.params[name]] for name, some in self._ranked.items()}
        point = trial.params | values
        number = self.space.find(point)
        same = number != ILLEGAL and point.items() <= dict(self.space.point(number)).items()
        return number if same else ILLEGAL

    def _tell(
        self, trial_id: int, value: float | None, attrs: Mapping[str, Any], state: TrialState
    ) -> None:
        trial = self._storage.get_trial(trial_id)
        if trial.state.is_finished():
            return
        for name, each in attrs.items():
            if each is not None:
                self._storage.set_trial_user_attr(trial_id, name, each)
        with suppress(RuntimeError):  # brute-force stops a study
            self.study.tell(trial.number, value, state)

    def _forget(self) -> None:
        """End what a run before left under way, which took another path."""
        for each in self._left:
            if not each.state.is_finished():
                self._storage.set_trial_state_values(self._id_of(each.number), TrialState.FAIL)
        self._left.clear()

    def _drawn(self, random: RandomState) -> Iterator[int]:
        """New points by chance; if none is found, in their order."""
        while found := [n for n in self.space.draw(random, DRAWN).tolist() if n not in self.ids]:
            yield from (number for number in found if number not in self.ids)
        yield from (number for number in self.space if number not in self.ids)

    def _sampler(self, number: int) -> BaseSampler:
        return sampler_for(self._method.sampler, (self._method.seed + number) % 2**32)
