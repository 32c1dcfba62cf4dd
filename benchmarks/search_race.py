"""A race of samplers with the same start: auto, and TPE, GPSampler and CMA-ES of Optuna.

    python benchmarks/search_race.py [--public FOLDER] [--seeds 30] [--contender NAME] [--out NAME]

All contenders search the same legal points, first the same seeds: those of the landscape or, where
it has none, SEEDS random points, which are others in each search. Only auto knows that the order of
flashgen's own spaces means something. The landscapes are those of search_efficiency.py and of
made_landscapes.py, what of search_peers.PUBLIC is in FOLDER, and the searches of an H200 that the
repository has, which are small. Each search of 80 evaluations is kept in NAME.runs.jsonl when it is
done, so a run that was cut off goes on. NAME.md is written when all are done.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import made_landscapes
import numpy as np
import search_efficiency
from search_peers import public
from search_runs import Runs
from search_scores import Curve, summary, summary_table

from benchmarks.recorded import Landscape, from_outcomes
from flashgen.search.history import outcomes_of

AT = (10, 20, 40, 80)
SEEDS = 8
LEAST_POINTS = 40
H200 = ROOT / "benchmarks" / "results" / "nvidia_h200" / "tuning.jsonl.gz"
CONTENDERS = tuple(
    replace(each, warm=True, name=each.name if each.warm else f"{each.name}, warm")
    for each in search_efficiency.CONTENDERS
    if each.name in ("auto", "tpe, warm", "gp", "cmaes")
)


def landscapes(folder: Path | None) -> tuple[list[Landscape], list[str]]:
    """All landscapes, and a sentence for each of the public ones that is not in the folder."""
    found, skipped = public(folder)
    timed = [
        each
        for each in from_outcomes(outcomes_of(H200, print))
        if len(each.points) >= LEAST_POINTS and each.source == "measured"
    ]
    return [*search_efficiency.shipped(), *timed, *found, *made_landscapes.landscapes()], skipped


def started(landscape: Landscape, seed: int) -> Landscape:
    """The landscape with seeds, for the search of this seed."""
    if landscape.seeds:
        return landscape
    drawn = np.random.RandomState(seed).choice(len(landscape.points), SEEDS, replace=False)
    return replace(landscape, seeds=tuple(map(int, drawn)))


def regrets_of(
    landscape: Landscape, contender: search_efficiency.Contender, seeds: int, runs: Runs
) -> list[tuple[float, ...]]:
    """The regrets of its searches, those of `runs` and new ones."""
    digest, mine = search_efficiency.digest_of(landscape), contender.name == "auto"
    by = search_efficiency.digest_of_search() if mine else version("optuna")
    found = []
    for seed in range(seeds):
        key = digest, contender.name, by, str(SEEDS), str(seed)
        regrets = runs.get(key)
        if regrets is None:
            method = search_efficiency.Method(sampler=str(contender.sampler), seed=seed)
            some = search_efficiency.replay(started(landscape, seed), method, AT[-1])
            regrets = some + some[-1:] * (AT[-1] - len(some))
            runs.add(key, regrets)
        found.append(regrets)
    return found


def table(found: list[Curve]) -> str:
    """Markdown: medians in per cent, a row a contender."""
    return search_efficiency.table(found, AT)


def main() -> None:
    """Search, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--public", type=Path, metavar="FOLDER")
    parser.add_argument("--seeds", type=int, default=30, help="searches of each contender")
    names = [each.name for each in CONTENDERS]
    parser.add_argument("--contender", action="append", choices=names, help="all unless given")
    parser.add_argument("--out", type=Path, default=Path("search_race"), metavar="NAME")
    asked = parser.parse_args()
    every, skipped = landscapes(asked.public)
    runs = Runs(asked.out.with_suffix(".runs.jsonl"))
    chosen = [each for each in CONTENDERS if each.name in (asked.contender or names)]
    lines = [
        f"Optuna {version('optuna')}, {asked.seeds} searches each: median regret in per cent, and "
        "its 95 % band by bootstrap.",
        *(f"skipped: {each}" for each in skipped),
    ]
    done = []
    for landscape in every:
        curves = [
            search_efficiency.curve_of(
                each.name, landscape, np.array(regrets_of(landscape, each, asked.seeds, runs))
            )
            for each in chosen
        ]
        done.append(curves)
        lines += ["", search_efficiency.title(landscape), "", table(curves)]
        print("\n".join(lines[-3:]), flush=True)
    lines += ["", f"All {len(every)} landscapes:", "", summary_table(summary(done, AT), AT)]
    print("\n".join(lines[-3:]))
    asked.out.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
