"""Landscapes: recorded times of all points of a space, to test a search on.

Two kinds of file, each gzipped or not:

  - A log of flashgen (.jsonl): a landscape for each spec and problem, and for each GPU, Triton,
    protocol and source. What was compiled and never timed is no point of it.
  - T4, the results format of the auto-tuning community, which its hub of brute-forced spaces keeps
    (.json). `dump` writes it.
"""

from __future__ import annotations

import contextlib
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flashgen.errors import FlashgenError, InvalidArgument
from flashgen.files import unpacked_content_of
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Outcome, Stage, Status
from flashgen.schedules.space import legal_configs, seed_configs, tuned_default
from flashgen.search import Budget, Evaluation, Method, NoMinimum, minimize
from flashgen.search.log import outcomes_of
from flashgen.search.points import ListedSpace
from flashgen.search.space import Point
from flashgen.spec.gpu import TARGETS
from flashgen.spec.records import parsed

NEVER = 1e20
"""What some versions of Kernel Tuner write for the time of a config that failed."""

TRUST: dict[Stage, int] = {"rough": 0, "final": 1, "timed": 2}
"""Which of a config's times counts, where a log has several: what most configs have, under one
procedure."""

UNKNOWN = (Status.NO_ESTIMATE, Status.UNSTEADY, Status.QUARANTINED)
"""Outcomes that say neither how long a config takes nor that it fails."""


@dataclass(frozen=True, kw_only=True)
class Landscape:
    """Points in the order of their space, each with a time in `unit`, or None if it failed.

    source: measured, estimated, or recorded if the file does not say. seeds: numbers of the points
    that a search starts with. guesses: what a model predicted for each point. likely_first: the
    order of the points means something (Method.likely_first), as that of flashgen's own spaces.
    """

    name: str
    source: str
    unit: str
    points: tuple[Point, ...]
    times: tuple[float | None, ...]
    seeds: tuple[int, ...] = ()
    guesses: tuple[float | None, ...] | None = None
    likely_first: bool = False

    def __post_init__(self) -> None:
        ListedSpace(self.points)  # raises
        for seed in self.seeds:
            if seed not in range(len(self.points)):
                raise InvalidArgument(
                    f"seeds are numbers of points, 0 to {len(self.points) - 1}: "
                    f"{self.name} has {seed!r:.80}"
                )
        if not any(self.times):
            raise InvalidArgument(f"a landscape needs a point with a time: {self.name} has none")

    @property
    def best(self) -> float:
        """The least time."""
        return min(time for time in self.times if time is not None)


def read(path: Path, notice: Callable[[str], None] = lambda _: None) -> list[Landscape]:
    """The landscapes of a file. notice is called with what is left out of a log.

    Raises InvalidArgument if there is no such file, FlashgenError if it has neither
    format, is damaged, or holds no time.
    """
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        found = from_outcomes(outcomes_of(path, notice))
        if not found:
            raise FlashgenError(f"{path}: a log must hold the time of a config: it holds none")
        return found
    try:
        record = parsed(unpacked_content_of(path).decode(), finite=False)
    except FileNotFoundError:
        raise InvalidArgument(f"{path}: there is no such file of a landscape") from None
    except OSError as error:
        raise FlashgenError(f"{path} cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error, ValueError) as error:
        raise FlashgenError(f"{path} must be JSON, gzipped or not: {error}") from None
    try:
        return [_from_json(record, path.name.split(".")[0])]
    except FlashgenError as error:
        raise FlashgenError(f"{path}: {error}") from None
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FlashgenError(
            f"{path} must be results in the T4 format: {type(error).__name__}: {error}"
        ) from None


def from_outcomes(outcomes: Iterable[Outcome]) -> list[Landscape]:
    """The landscapes of the outcomes of a log. TRUST decides between several times of a config."""
    broken: dict[tuple[object, ...], dict[tuple[Stage, KernelConfig], bool]] = defaultdict(dict)
    timed: dict[tuple[object, ...], dict[KernelConfig, Outcome]] = defaultdict(dict)
    for outcome in outcomes:
        kernels = outcome.gpu, outcome.triton, outcome.spec
        config, stage = outcome.config, outcome.stage
        if outcome.status in UNKNOWN:
            continue
        if stage not in TRUST:
            broken[kernels][stage, config] = not outcome.ok
            continue
        times = timed[(*kernels, outcome.problem, outcome.protocol, outcome.source)]
        if config not in times or TRUST[stage] >= TRUST[times[config].stage]:
            times[config] = outcome
    return [
        _landscape(times, [config for (_, config), failed in broken[key[:3]].items() if failed])
        for key, times in timed.items()
        if any(outcome.timing for outcome in times.values())
    ]


def dump(landscape: Landscape) -> str:
    """The landscape in the T4 format, one result per line. `read` returns an equal one.

    The additional key `flashgen` has name, source, seeds and likely_first. A guess is a measurement
    named estimate.
    """
    guesses = landscape.guesses or [None] * len(landscape.points)
    results = [
        json.dumps(_result(*each, landscape.unit))
        for each in zip(landscape.points, landscape.times, guesses, strict=True)
    ]
    names = ("name", "source", "seeds", "likely_first")
    about = {name: getattr(landscape, name) for name in names}
    head = f'{{"schema_version": "1.0.0",\n"flashgen": {json.dumps(about)},\n"results": [\n'
    return head + ",\n".join(results) + "\n]}\n"


def replay(
    landscape: Landscape, method: Method, evaluations: int, *, warm: bool = True
) -> tuple[float, ...]:
    """The regret of a search after 1, 2, ... evaluations, or until the space is exhausted.

    Regret is how much slower the best so far is than the best of the landscape: 0.04 is 4 %,
    infinite if all have failed so far. warm: with the landscape's seeds and guesses.
    """
    number_of = {id(point): number for number, point in enumerate(landscape.points)}
    guesses, best = landscape.guesses or (), landscape.best
    regrets: list[float] = []

    def note(done: Evaluation) -> None:
        now = math.inf if done.value is None else done.value / best - 1
        regrets.append(min([now, *regrets[-1:]]))

    with contextlib.suppress(NoMinimum):
        minimize(
            landscape.points,
            lambda point: landscape.times[number_of[id(point)]],
            Budget(trials=evaluations),
            method=replace(method, likely_first=landscape.likely_first),
            seeds=[landscape.points[number] for number in landscape.seeds] if warm else (),
            guesses=(lambda point: guesses[number_of[id(point)]]) if warm and guesses else None,
            notify=note,
        )
    return tuple(regrets[:evaluations])


def _landscape(times: Mapping[KernelConfig, Outcome], broken: Sequence[KernelConfig]) -> Landscape:
    """One landscape: the timed configs, and those of the same kernels that failed before."""
    first = next(iter(times.values()))
    spec, gpu = first.spec, TARGETS.get(first.gpu)
    seeds = (tuned_default(spec, gpu), *seed_configs(spec, gpu)) if gpu else ()
    known = dict.fromkeys((*times, *broken))
    order = [*(legal_configs(spec, gpu) if gpu else ()), *known]
    configs = [config for config in dict.fromkeys(order) if config in known]
    found = [times.get(config) for config in configs]
    guesses = [o.estimate.median_us if o and o.estimate else None for o in found]
    return Landscape(
        name=f"{first.gpu} {spec.name} seq {first.problem.seq_k}",
        source=first.source,
        unit="us",
        points=tuple(asdict(config) for config in configs),
        times=tuple(o.timing.median_us if o and o.timing else None for o in found),
        seeds=tuple(configs.index(seed) for seed in dict.fromkeys(seeds) if seed in known),
        guesses=tuple(guesses) if first.source != "estimated" and any(guesses) else None,
        likely_first=gpu is not None,
    )


def _from_json(record: Mapping[str, Any], name: str) -> Landscape:
    """The landscape of T4 results. Of duplicate configs the last counts."""
    about: Mapping[str, Any] = record.get("flashgen", {})
    kept, units = {}, []
    for result in record["results"]:
        time, unit, guess = _measured(result)
        point = result["configuration"]
        kept[json.dumps(point, sort_keys=True)] = point, time, guess
        units += [unit] * bool(unit)
    guesses = tuple(guess for *_, guess in kept.values())
    return Landscape(
        name=about.get("name", name),
        source=about.get("source", "recorded"),
        unit=units[0] if units else "",
        points=tuple(point for point, *_ in kept.values()),
        times=tuple(time for _, time, _ in kept.values()),
        seeds=tuple(about.get("seeds", ())),
        guesses=guesses if any(guesses) else None,
        likely_first=about.get("likely_first", False),
    )


def _measured(result: Mapping[str, Any]) -> tuple[float | None, str, float | None]:
    """Time, its unit and the guess of a T4 result. Raises FlashgenError if it lacks a time that it
    should have.
    """
    measurements = {each["name"]: each for each in result.get("measurements", ())}
    guess = _time(measurements["estimate"]["value"]) if "estimate" in measurements else None
    if result.get("invalidity", "correct") != "correct":
        return None, "", guess
    if "time" not in measurements:
        raise FlashgenError(
            f"a correct result must have a measurement named time: "
            f"{result['configuration']} has {', '.join(measurements) or 'none'}"
        )
    time = measurements["time"]
    return _time(time["value"]), time.get("unit", ""), guess


def _time(value: Any) -> float | None:
    """A time, or None for anything else: a failure."""
    is_time = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < NEVER
    return float(value) if is_time else None


def _result(point: Point, time: float | None, guess: float | None, unit: str) -> dict[str, Any]:
    """A T4 result. T4 distinguishes kinds of failure; a landscape does not."""
    named = {"time": time, "estimate": guess}
    return {
        "configuration": dict(point),
        "times": {},
        "invalidity": "runtime" if time is None else "correct",
        "correctness": 0 if time is None else 1,
        "measurements": [
            {"name": name, "value": value, "unit": unit}
            for name, value in named.items()
            if value is not None
        ],
        "objectives": ["time"],
    }
