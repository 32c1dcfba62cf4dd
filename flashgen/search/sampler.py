"""KernelSampler: an Optuna sampler for a finite space in which not every combination is legal."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, RandomSampler
from optuna.search_space import intersection_search_space
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial

from flashgen.search.acquisition import Acquisition, Seen
from flashgen.search.points import ILLEGAL, ProductSpace, Space, space_of
from flashgen.search.space import Point
from flashgen.search.surrogate import Fit

MOST_VALUES = 1000
"""A parameter with more values is none of a finite space: it is drawn at random."""

FIT = "kernel_sampler:fit"
"""The user attributes of a study that keep the last fits, so that a resumed study goes on with
them. They are texts, because Optuna copies attributes whenever they are read."""


class KernelSampler(BaseSampler):
    """Proposes legal points that no trial of the study has, by their expected improvement.

    A trial that failed counts as slow, and so does one that was pruned without a value. Running
    trials are believed to come out as expected. The same seed, trial number and history give the
    same point, so a resumed study goes on as an undisturbed one; the last fits are attributes of
    the study. Without a space, all combinations of the finite parameters that the trials so far
    have in common are legal.

    Args:
        space: the legal points, mappings of the same names or a ProductSpace; or None.
        seed: fixes the random choices.
        guesses: gives a model's prediction for a point, lower is better, above 0, or None.
        likely_first: the earlier a point of the space, the likelier it is fast.

    Raises:
        InvalidArgument: for a space that is none.
        ValueError: by Optuna's study, if it has several objectives, or distributions of which a
            value of the space is no part.

    Examples:
        >>> import optuna
        >>> from flashgen.search import KernelSampler
        >>> space = [{"tile": 32, "warps": 4}, {"tile": 64, "warps": 4}, {"tile": 64, "warps": 8}]
        >>> study = optuna.create_study(sampler=KernelSampler(space))
        >>> study.sampler.seed
        0
    """

    def __init__(
        self,
        space: Space | Sequence[Point] | None = None,
        *,
        seed: int = 0,
        guesses: Callable[[Point], float | None] | None = None,
        likely_first: bool = False,
    ) -> None:
        self.seed = seed
        self._acquisition: Acquisition | None = None
        if space is not None:
            self._space = space_of(space)
            self._acquisition = Acquisition(self._space, seed, guesses, likely_first=likely_first)
            self._sample = self._acquisition.sample
        self._chosen: dict[tuple[str, int], int] = {}  # points by study and trial
        self._of_products: dict[str, KernelSampler] = {}
        self.assume()

    def assume(
        self,
        values: Mapping[int, float] | None = None,
        ignored: Collection[int] = (),
        closed: Collection[int] = (),
    ) -> None:
        """Say what running trials are worth from now on, by the numbers of their points.

        Args:
            values: estimates that count as values.
            ignored: these count for nothing, and may be proposed again.
            closed: these may not be proposed; they count for nothing either.
        """
        self._assumed, self._ignored, self._closed = dict(values or {}), set(ignored), set(closed)

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """As BaseSampler: empty with a space, whose names are the trial's parameters."""
        if self._acquisition:
            return {}
        common = intersection_search_space(study.get_trials(deepcopy=False))
        return {n: each for n, each in common.items() if not each.single()}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """As BaseSampler: a point of the product of these distributions."""
        _check_directions(study)
        finite = {name: some for name, each in search_space.items() if (some := _values_of(each))}
        inner, key = self, repr(finite)
        if finite and not self._acquisition:
            if key not in self._of_products:
                self._of_products[key] = KernelSampler(ProductSpace(finite), seed=self.seed)
            inner = self._of_products[key]
        return {n: inner.sample_independent(study, trial, n, d) for n, d in search_space.items()}

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """As BaseSampler: the value of the point that the trial gets, which is chosen at its first
        parameter; of a name that the space has not, a random one.
        """
        _check_directions(study)
        point = self._point_of(study, trial) if self._acquisition else {}
        if param_name not in point:
            seed = (self.seed + 7919 * trial.number + zlib.crc32(param_name.encode())) % 2**32
            by_chance = RandomSampler(seed)
            return by_chance.sample_independent(study, trial, param_name, param_distribution)
        value = point[param_name]
        if not _contains(param_distribution, value):
            raise ValueError(
                f"the distribution of {param_name} must contain the space's values: got {value!r} "
                f"and {param_distribution}"
            )
        return float(value) if isinstance(param_distribution, FloatDistribution) else value

    def _point_of(self, study: Study, trial: FrozenTrial) -> Point:
        """The point of a trial: where none is new, one is repeated; empty if none is known."""
        key = study.study_name, trial.number
        if key not in self._chosen:
            found, fixed = self._choose(study, trial), params_of(trial)
            some = self._sample if found is None else [found, *self._sample]
            fitting = (n for n in some if _agree(self._space.point(n), fixed))
            self._chosen[key] = next(fitting, next(iter(some), ILLEGAL))
        number = self._chosen[key]
        return {} if number == ILLEGAL else self._space.point(number)

    def _choose(self, study: Study, trial: FrozenTrial) -> int | None:
        """A new point, if there is one. A new fit is kept with the study."""
        assert self._acquisition is not None
        kept = study.user_attrs
        before = {n: Fit.of(kept[name]) for n in (False, True) if (name := f"{FIT}{n:d}") in kept}
        fits = dict(before)
        found = self._acquisition.choose(self._seen(study, trial), trial.number, fits)
        for names, fit in fits.items():
            if fit is not before.get(names):
                study.set_user_attr(f"{FIT}{names:d}", json.dumps(asdict(fit)))
        return found

    def _seen(self, study: Study, trial: FrozenTrial) -> Seen:
        """What the other trials say. Of several trials of a point, the last value counts."""
        sign, name = 1 if study.direction == StudyDirection.MINIMIZE else -1, study.study_name
        seen, running = Seen(closed=set(self._closed)), dict[int, None]()
        for each in study.get_trials(deepcopy=False):
            number = ILLEGAL if each.number == trial.number else self._number_of(name, each)
            if number == ILLEGAL:
                continue
            if not each.state.is_finished():
                running[number] = None
            elif (known := each.values) and math.isfinite(known[0]):
                seen.values[number] = sign * known[0]
            else:
                seen.values.setdefault(number, None)
        for number in running:
            if number in self._assumed:
                seen.values[number] = self._assumed[number]
            elif seen.values.get(number) is None:
                seen.values.pop(number, None)  # a trial that asked for it again failed
                if number not in self._ignored and number not in self._closed:
                    seen.under_way.append(number)
        return seen

    def _number_of(self, study: str, trial: FrozenTrial) -> int:
        """The number of a trial's point; ILLEGAL if it is none, or not known yet."""
        key = study, trial.number
        number = self._chosen.get(key)
        if number is None:
            number = self._space.find(params_of(trial))
            if number != ILLEGAL or trial.state.is_finished():
                self._chosen[key] = number
        return number


def params_of(trial: FrozenTrial) -> dict[str, Any]:
    """The parameters of a trial, with those that it was enqueued with. Optuna keeps the latter
    under this name, and no public call gives them.
    """
    return {**trial.system_attrs.get("fixed_params", {}), **trial.params}


def _check_directions(study: Study) -> None:
    if len(study.directions) > 1:
        raise ValueError("KernelSampler minimizes or maximizes one objective: got several")


def _agree(point: Point, fixed: Mapping[str, Any]) -> bool:
    return all(point.get(name, each) == each for name, each in fixed.items())


def _contains(distribution: BaseDistribution, value: Any) -> bool:
    if isinstance(distribution, CategoricalDistribution):
        return value in distribution.choices
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    return bool(distribution.low <= value <= distribution.high)


def _values_of(distribution: BaseDistribution) -> list[Any]:
    """All values of a distribution, if it has no more than MOST_VALUES; otherwise none."""
    if isinstance(distribution, CategoricalDistribution):
        plain = all(isinstance(each, bool | int | float | str) for each in distribution.choices)
        return list(distribution.choices) if plain else []
    step = getattr(distribution, "step", None)
    if not step or not isinstance(distribution, FloatDistribution | IntDistribution):
        return []
    count = round((distribution.high - distribution.low) / step) + 1
    return [distribution.low + step * n for n in range(count)] if count <= MOST_VALUES else []
