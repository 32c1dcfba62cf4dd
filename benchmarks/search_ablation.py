"""What each constant of the sampler auto is worth: the sampler with one changed or removed.

    python benchmarks/search_ablation.py --public FOLDER --record runs.jsonl
    python benchmarks/search_ablation.py --variant "MODULE.NAME=VALUE; ..." [--way order]

The first prints a table in Markdown: a row a variant of VARIANTS. A search that is in the record is
not repeated. MODULE is auto or surrogate; VALUE is Python.

The landscapes are those of benchmarks/made_landscapes.py, the three of flashgen's own kernels that
ship, and those of search_peers.PUBLIC that FOLDER has. A way says what a search knows of them:

    cold        a space, and nothing else
    order       the three, whose order puts likely configs first
    reversed    all, sorted from failures and slow to fast, as if the likely came first
    guesses     all, with guesses that are right but for a factor whose logarithm deviates by 0.25
    inverted    the same with guesses that say the opposite
    small       24 random points of each, of which some have a time
    long        a product of 100,000 points, which costs nothing: proposals are timed

The figure of a search is the geometric mean of its regrets after 5, 10, 20, 40 and 80 evaluations,
each between 0.1 % and 1,000 %. Printed is its mean over searches and landscapes, as a multiple of
that of the search as it is, with a band of 95 %. The last column has the same after one of these
numbers of evaluations: the one where a loss is surest, with a band of 99 %, if any is above 1.
Searches with the same seed are paired. The figure of `long` is the CPU time of all proposals.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import ast
import importlib
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from benchmarks.recorded import Landscape

AFTER = (5, 10, 20, 40, 80)
LEAST, MOST = 1e-3, 10.0
"""What regrets are clipped to before a geometric mean."""

DEVIATION = 0.25
WAYS = ("cold", "order", "reversed", "guesses", "inverted", "small", "long")
SMALL = 24
LONG, LONG_SPACE = 300, 5
"""Proposals that are timed, and parameters of ten values in the space of them."""

VARIANTS: tuple[tuple[str, str, str], ...] = (
    ("START 5, now 1", "order", "acquisition.START = 1"),
    ("MIDDLE 8, now 5", "cold", "acquisition.MIDDLE = 5"),
    ("no PART (4)", "small", "acquisition.PART = 1"),
    ("SAMPLE 2000, now 200", "guesses", "acquisition.SAMPLE = 200"),
    ("CENTRAL 0.05, now anywhere", "cold", "acquisition.CENTRAL = 1.0"),
    ("POOL 400, now 10", "cold", "acquisition.POOL = 10"),
    ("BEST 3, now 1", "cold", "acquisition.BEST = 1"),
    ("BEST 3, now 1", "reversed", "acquisition.BEST = 1"),
    ("ELITE_GAP 3, now 2", "reversed", "acquisition.ELITE_GAP = 2"),
    (
        "TURNS, all ordered",
        "cold",
        "acquisition.TURNS = (('pool', 0), ('elites', 0), ('pool', 0), ('valley', 0))",
    ),
    (
        "TURNS, all names",
        "cold",
        'acquisition.TURNS = (("pool", True), ("elites", True), ("pool", True), ("valley", True))',
    ),
    (
        "TURNS without elites",
        "reversed",
        'acquisition.TURNS = (("pool", True), ("pool", False), ("valley", True))',
    ),
    ("no TRUST (10)", "order", "acquisition.TRUST = 0.0"),
    ("no LIKELY (0.1)", "order", "acquisition.LIKELY = 1.0"),
    ("CAP 0.3, now 0", "guesses", "surrogate.CAP = 0.0"),
    ("1 of LENGTHS, not 6", "cold", "surrogate.LENGTHS = (0.8,)"),
    ("1 of NOISES, not 3", "cold", "surrogate.NOISES = (1e-2,)"),
    ("no LENGTH_PRIOR", "cold", "surrogate.LENGTH_PRIOR = (-0.69, 1e9)"),
    ("no LENGTH_PRIOR", "reversed", "surrogate.LENGTH_PRIOR = (-0.69, 1e9)"),
    ("no NOISE_PRIOR", "reversed", "surrogate.NOISE_PRIOR = (-4.61, 1e9)"),
    ("no MOST_KNOWN (120)", "long", "surrogate.MOST_KNOWN = 10000"),
    ("no GROWTH (1.2)", "long", "acquisition.GROWTH = 1.0"),
)
"""What a row is called, the way, and what is set."""


def from_slow_to_fast(landscape: Landscape) -> Landscape:
    """The landscape from failures and slow to fast."""
    times = landscape.times
    order = sorted(range(len(times)), key=lambda n: (times[n] is not None, -(times[n] or 0.0)))
    return replace(
        landscape,
        points=tuple(landscape.points[n] for n in order),
        times=tuple(times[n] for n in order),
        likely_first=True,
    )


def _guessed(landscape: Landscape, *, right: bool) -> Landscape:
    """The landscape with guesses; a failure gets that of the median."""
    known = [time for time in landscape.times if time is not None]
    middle = float(np.median(known))
    off = np.exp(np.random.RandomState(7).normal(0, DEVIATION, len(landscape.times)))
    times = [middle if time is None else time for time in landscape.times]
    guesses = [time if right else middle**2 / time for time in times]
    return replace(landscape, guesses=tuple((guesses * off).tolist()))


def _small(landscape: Landscape) -> Landscape:
    """SMALL points of the landscape."""
    timed = np.array([time is not None for time in landscape.times])
    random = np.random.RandomState(7)
    some = random.choice(np.flatnonzero(timed), 1), random.choice(len(timed), SMALL - 1)
    numbers = sorted(set(np.concatenate(some).tolist()))
    return replace(
        landscape,
        points=tuple(landscape.points[n] for n in numbers),
        times=tuple(landscape.times[n] for n in numbers),
    )


def landscapes_of(way: str, every: list[Landscape], shipped: list[Landscape]) -> list[Landscape]:
    """What is searched. every: as a cold search knows them; shipped: flashgen's, in their order."""
    if way == "cold":
        return every
    if way == "order":
        return [replace(each, seeds=(), guesses=None) for each in shipped]
    if way == "reversed":
        return [from_slow_to_fast(each) for each in every]
    if way == "small":
        return [_small(each) for each in every]
    return [_guessed(each, right=way == "guesses") for each in every]


@contextmanager
def changed(settings: str) -> Iterator[None]:
    """Set constants, `MODULE.NAME = VALUE; ...`. Raises AttributeError if there is none."""
    before: list[tuple[Any, str, Any]] = []
    try:
        for each in filter(None, settings.split(";")):
            name, _, value = each.partition("=")
            module, _, constant = name.strip().partition(".")
            found = importlib.import_module(f"flashgen.search.{module}")
            before.append((found, constant, getattr(found, constant)))
            setattr(found, constant, ast.literal_eval(value.strip()))
        yield
    finally:
        for module, constant, value in reversed(before):
            setattr(module, constant, value)


Logs = list[list[list[float]]]
"""Landscapes x seeds x AFTER."""


def figures(landscapes: list[Landscape], seeds: range) -> Logs:
    """Logarithms of clipped regrets."""
    from benchmarks.recorded import replay
    from flashgen.search.space import Method

    found = []
    for landscape in landscapes:
        runs = []
        for seed in seeds:
            regrets = replay(landscape, Method(seed=seed), AFTER[-1])
            at = [regrets[min(after, len(regrets)) - 1] for after in AFTER]
            runs.append([round(math.log(min(max(each, LEAST), MOST)), 4) for each in at])
        found.append(runs)
    return found


def proposal_seconds(seeds: range) -> Logs:
    """Logarithms of the CPU seconds of LONG trials, of one landscape after one number."""
    from flashgen.search.points import ProductSpace
    from flashgen.search.space import Method
    from flashgen.search.study import Trials

    space = ProductSpace({f"p{number}": range(10) for number in range(LONG_SPACE)})
    runs = []
    for seed in seeds:
        trials, began = Trials(space, Method(seed=seed)), time.process_time()
        for _ in range(LONG):
            number = trials.ask()
            assert number is not None
            point = space.point(number)
            trials.tell(number, 1.0 + sum(abs(int(value) - 3) for value in point.values()))
        spent = time.process_time() - began
        runs.append([round(math.log(spent), 4)])
    return [runs]


def row(name: str, way: str, logs: np.ndarray, base: np.ndarray) -> str:
    """A row of the table: median regrets over seeds, geometric means over landscapes, in per cent;
    the figure as a multiple; and the multiple of the regret after one number of evaluations, where
    a loss is surest, if any is. Of `long`: the seconds before and after.
    """
    apart = logs - base
    whole = multiple(apart.mean(axis=2), 1.96)
    lows = [_band(apart[:, :, k], 2.58)[1] for k in range(apart.shape[2])]
    at = int(np.argmax(lows))
    medians = np.exp(np.median(logs, axis=1).mean(axis=0))
    cells = ", ".join(f"{100 * each:.1f}" for each in medians)
    one = f"{AFTER[at]}: {multiple(apart[:, :, at], 2.58)}" if lows[at] > 0 else "-"
    if way == "long":
        cells, one = f"{np.exp(np.median(base)):.1f} s, now {medians[0]:.1f} s", ""
    return f"| {name} | {way}, {apart[:, :, 0].size} | {cells} | {whole} | {one} |"


def multiple(apart: np.ndarray, deviations: float) -> str:
    """A mean of differences of logarithms (landscapes x seeds) as a factor, with its band."""
    middle, low, high = (math.exp(each) for each in _band(apart, deviations))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _band(apart: np.ndarray, deviations: float) -> tuple[float, float, float]:
    variance = (apart.var(axis=1, ddof=1) / apart.shape[1]).sum() / len(apart) ** 2
    half = deviations * math.sqrt(variance)
    middle = float(apart.mean())
    return middle, middle - half, middle + half


class Searches:
    """Figures by way and settings, one line of JSON each in a record; the last of a key counts."""

    def __init__(self, record: Path | None, public_folder: Path | None) -> None:
        from benchmarks import search_efficiency
        from benchmarks.recorded import read
        from benchmarks.search_peers import public

        found, self.skipped = public(public_folder)
        files = sorted(search_efficiency.ESTIMATED.glob("*.json*"))
        self._shipped = [each for path in files for each in read(path)]
        self._every = [*search_efficiency.compared(), *map(search_efficiency.cold, found)]
        self._record = record
        self._done: dict[str, Logs] = {}
        if record and record.exists():
            self._done = dict(json.loads(line) for line in record.read_text().splitlines())

    def of(self, way: str, settings: str, seeds: int) -> np.ndarray:
        """The figures of at least so many seeds, or as many as are done if that is 0. The search
        ways of few landscapes get more, so that about as many searches are made.
        """
        key = f"{way}: {' '.join(settings.split())}"
        done = self._done.get(key, [])
        have, wanted = len(done[0]) if done else 0, seeds * (3 if way == "order" else 1)
        if have < wanted:
            with changed(settings):
                new = self._search(way, range(have, wanted))
            done = [old + more for old, more in zip(done or [[]] * len(new), new, strict=True)]
            self._done[key] = done
            if self._record:
                with self._record.open("a") as file:
                    file.write(json.dumps([key, done]) + "\n")
        return np.array(done)

    def _search(self, way: str, seeds: range) -> Logs:
        if way == "long":
            return proposal_seconds(seeds)
        return figures(landscapes_of(way, self._every, self._shipped), seeds)


def main() -> None:
    """Search, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--public", type=Path, metavar="FOLDER")
    parser.add_argument("--record", type=Path, metavar="FILE", help="searches that are done")
    parser.add_argument("--seeds", type=int, default=8, help="0: only what the record has")
    parser.add_argument("--variant", action="append", default=[], metavar="SETTINGS")
    parser.add_argument("--way", action="append", choices=WAYS)
    asked = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    given = [(each, way, each) for each in asked.variant for way in asked.way or WAYS[:1]]
    variants = given or [each for each in VARIANTS if each[1] in (asked.way or WAYS)]
    searches = Searches(asked.record, asked.public)
    print(f"{' '.join(searches.skipped)}\n")
    after = ", ".join(map(str, AFTER))
    print(f"| changed | a search knows, searches | after {after} | multiple | after one |")
    print("|---|---|---|---|---|")
    for name, way, settings in variants:
        base, logs = (searches.of(way, each, asked.seeds) for each in ("", settings))
        if base.size and logs.size:
            least = min(base.shape[1], logs.shape[1])
            print(row(name, way, logs[:, :least], base[:, :least]), flush=True)


if __name__ == "__main__":
    main()
