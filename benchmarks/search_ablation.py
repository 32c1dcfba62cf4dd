"""What each constant of the sampler auto is worth: the sampler with one changed or removed.

    git worktree add ../before bda60d35                     the search that the table is of
    python benchmarks/search_ablation.py --tree ../before --public FOLDER --record runs.jsonl
    python benchmarks/search_ablation.py --variant "MODULE.NAME=VALUE; ..." [--way order]

The first prints a table in Markdown: a row a variant of VARIANTS whose constants the tree has. A
search that is in the record is not repeated. MODULE is auto or surrogate; VALUE is Python.

The landscapes are those of benchmarks/made_landscapes.py, the three of flashgen's own kernels that
ship, and those of search_peers.PUBLIC that FOLDER has. A way says what a search knows of them:

    cold        a space, and nothing else
    order       the three, whose order puts likely configs first
    reversed    all, sorted from failures and slow to fast, as if the likely came first
    guesses     all, with guesses that are right but for a factor whose logarithm deviates by 0.25
    inverted    the same with guesses that say the opposite
    small       24 random points of each, of which some have a time

The figure of a search is the geometric mean of its regrets after 5, 10, 20, 40 and 80 evaluations,
each between 0.1 % and 1,000 %. Printed is its mean over searches and landscapes, as a multiple of
that of the search as it is, with a band of 95 %.
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
WAYS = ("cold", "order", "reversed", "guesses", "inverted", "small")
SMALL = 24
POOLS = 'auto.TURNS = (("pool", True), ("pool", False))'
NO_PRIORS = "surrogate.LENGTH_PRIOR = (-0.69, 1e9); surrogate.NOISE_PRIOR = (-4.61, 1e9)"
VARIANTS: tuple[tuple[str, str, str], ...] = (
    ("START 5, now 3", "guesses", "auto.START = 3"),
    ("LEAST_KNOWN 3, now 1", "cold", "auto.LEAST_KNOWN = 1"),
    ("SAMPLE 2000, now 400", "cold", "auto.SAMPLE = 400"),
    ("CENTRAL 0.05, now 0.1", "cold", "auto.CENTRAL = 0.1"),
    ("CENTRAL, now anywhere", "cold", "auto.CENTRAL = 1.0"),
    ("MIDDLE 8, now 5; no SPREAD", "cold", "auto.MIDDLE = 5; auto.SPREAD = 0"),
    ("no SPREAD (3)", "cold", "auto.SPREAD = 0"),
    ("no INNER (0.5)", "cold", "auto.INNER = 1.0"),
    ("no PART (4)", "small", "auto.PART = 1"),
    *(
        (
            f"SAMPLE = POOL = WHOLE = {n}",
            "cold",
            f"auto.SAMPLE = {n}; auto.POOL = {n}; auto.WHOLE = {n}",
        )
        for n in (400, 1000)
    ),
    ("BEST 3, now 1", "cold", "auto.BEST = 1"),
    *(
        ("WHOLE 1000, now 400; BEST 1", way, "auto.WHOLE = 400; auto.BEST = 1")
        for way in ("order", "guesses", "reversed")
    ),
    ("MIDDLE 8, now 5", "cold", "auto.MIDDLE = 5"),
    (
        "no ELITES (3), no ELITE_GAP (3)",
        "cold",
        'auto.TURNS = (("pool", True), ("pool", False), ("valley", True))',
    ),
    (
        "TURNS without valleys",
        "cold",
        'auto.TURNS = (("pool", True), ("elites", False), ("pool", False))',
    ),
    ("TURNS without both", "cold", POOLS),
    ("TURNS, all ordered", "cold", 'auto.TURNS = (("pool", False),)'),
    ("TURNS, all names", "cold", 'auto.TURNS = (("pool", True),)'),
    ("no TRUST (10)", "order", "auto.TRUST = 0.0"),
    ("DECAY 10, now 1", "order", "auto.DECAY = 1.0"),
    ("no LIKELY (0.1)", "order", "auto.LIKELY = 1.0"),
    ("CAP 0.3, now 0", "cold", "surrogate.CAP = 0.0"),
    ("CAP 0.3, now 1", "cold", "surrogate.CAP = 1.0"),
    ("LEAST_CAP 0.1, now 0.01", "cold", "surrogate.LEAST_CAP = 0.01"),
    ("3 LENGTHS, not 6", "cold", "surrogate.LENGTHS = (0.1, 0.4, 1.6)"),
    ("1 of NOISES, not 3", "cold", "surrogate.NOISES = (1e-2,)"),
    ("2 SLOPES, not 3", "inverted", "surrogate.SLOPES = (1.0, 0.0)"),
    ("no LENGTH_PRIOR", "cold", "surrogate.LENGTH_PRIOR = (-0.69, 1e9)"),
    ("no NOISE_PRIOR", "cold", "surrogate.NOISE_PRIOR = (-4.61, 1e9)"),
    *(("no LENGTH_PRIOR, no NOISE_PRIOR", way, NO_PRIORS) for way in ("cold", "reversed")),
    (
        "no ENOUGH_TO_FIT, ALWAYS_FITTED, SWEPT_TWICE; USUAL_LENGTH 0.4, PRIOR_COUNT 1",
        "cold",
        "surrogate.ENOUGH_TO_FIT = 1; surrogate.ALWAYS_FITTED = 0; surrogate.GROWTH = 1.1; "
        "surrogate.SWEPT_TWICE = 0; surrogate.USUAL_LENGTH = 0.4; surrogate.PRIOR_COUNT = 1.0",
    ),
    ("MOST_TO_FIT 120, now 40", "cold", "surrogate.MOST_TO_FIT = 40"),
    ("TIE 1e-6, now 1e-12", "cold", "surrogate.TIE = 1e-12"),
    ("FAR -1e5, now -1e3", "cold", "surrogate.FAR = -1e3"),
    ("LEAST_LEFT 1e-9, now 1e-6", "cold", "surrogate.LEAST_LEFT = 1e-6"),
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
def changed(settings: str) -> Iterator[bool]:
    """Set constants, `MODULE.NAME = VALUE; ...`; False if the tree has one of them not."""
    before: list[tuple[Any, str, Any]] = []
    try:
        for each in filter(None, settings.split(";")):
            name, _, value = each.partition("=")
            module, _, constant = name.strip().partition(".")
            found = importlib.import_module(f"flashgen.search.samplers.{module}")
            if not hasattr(found, constant):
                yield False
                return
            before.append((found, constant, getattr(found, constant)))
            setattr(found, constant, ast.literal_eval(value.strip()))
        yield True
    finally:
        for module, constant, value in reversed(before):
            setattr(module, constant, value)


def figures(landscapes: list[Landscape], seeds: int) -> list[list[list[float]]]:
    """Logarithms of clipped regrets: landscapes x seeds x AFTER."""
    from benchmarks.recorded import replay
    from flashgen.search.space import Method

    found = []
    for landscape in landscapes:
        runs = []
        for seed in range(seeds):
            regrets = replay(landscape, Method(seed=seed), AFTER[-1])
            at = [regrets[min(after, len(regrets)) - 1] for after in AFTER]
            runs.append([round(math.log(min(max(each, LEAST), MOST)), 4) for each in at])
        found.append(runs)
    return found


def row(name: str, way: str, logs: np.ndarray, base: np.ndarray) -> str:
    """A row of the table: median regrets over seeds, geometric means over landscapes, in per cent,
    and the figure as a multiple.
    """
    medians = 100 * np.exp(np.median(logs, axis=1).mean(axis=0))
    apart = logs.mean() - base.mean()
    variance = sum(
        (each.mean(axis=2).var(axis=1, ddof=1) / each.shape[1]).sum() / len(each) ** 2
        for each in (logs, base)
    )
    low, high = (math.exp(apart + sign * 1.96 * math.sqrt(variance)) for sign in (-1, 1))
    cells = ", ".join(f"{each:.1f}" for each in medians)
    return f"| {name} | {way} | {cells} | {math.exp(apart):.2f} ({low:.2f} to {high:.2f}) |"


def main() -> None:
    """Search, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--public", type=Path, metavar="FOLDER")
    parser.add_argument("--record", type=Path, metavar="FILE", help="searches that are done")
    parser.add_argument("--done", action="store_true", help="only what the record has")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--variant", action="append", default=[], metavar="SETTINGS")
    parser.add_argument("--way", action="append", choices=WAYS)
    asked = parser.parse_args()
    sys.path.insert(0, str(asked.tree.resolve()))
    from benchmarks import search_efficiency
    from benchmarks.recorded import read
    from benchmarks.search_peers import public

    given = [(each, way, each) for each in asked.variant for way in asked.way or WAYS[:1]]
    variants = given or [each for each in VARIANTS if each[1] in (asked.way or WAYS)]
    found_public, skipped = public(asked.public)
    every = [*search_efficiency.compared(), *map(search_efficiency.cold, found_public)]
    files = sorted(search_efficiency.ESTIMATED.glob("*.json*"))
    shipped = [each for path in files for each in read(path)]
    done: dict[str, list[list[list[float]]]] = {}
    if asked.record and asked.record.exists():
        done = dict(json.loads(line) for line in asked.record.read_text().splitlines())
    print(f"{len(every)} landscapes, {asked.seeds} searches each. {' '.join(skipped)}\n")
    print(f"| changed | a search knows | after {', '.join(map(str, AFTER))} | multiple |")
    print("|---|---|---|---|")
    for name, way, settings in variants:
        logs = []
        for each in ("", settings):
            key = f"{way}: {' '.join(each.split())}"
            with changed(each) as has:
                if has and key not in done and not asked.done:
                    done[key] = figures(landscapes_of(way, every, shipped), asked.seeds)
                    if asked.record:
                        with asked.record.open("a") as file:
                            file.write(json.dumps([key, done[key]]) + "\n")
            logs.append(np.array(done.get(key, [])))
        if all(each.size for each in logs):
            print(row(name, way, logs[1], logs[0]), flush=True)


if __name__ == "__main__":
    main()
