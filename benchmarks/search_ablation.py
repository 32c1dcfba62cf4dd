"""What a part of the sampler auto is worth: the sampler with other constants, or of another commit.

    python benchmarks/search_ablation.py [FILE ...] [--set MODULE.NAME=VALUE ...] [--seeds 8]
    python benchmarks/search_ablation.py --tree ../before        the same of a git worktree

MODULE is auto or surrogate; VALUE is Python. FILE is anything benchmarks/recorded.py reads; without
one, the made landscapes and those that ship. A search knows a space and nothing else: no seeds and
no guesses. Printed are the median regrets over seeds, in per cent, after 5, 10, 20, 40 and 80
evaluations: their geometric mean over the landscapes, and the landscapes whose median is above
20 per cent after 80. RANDOM in place of all is a random search.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import ast
import importlib
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path

AFTER = (5, 10, 20, 40, 80)
LEAST, MOST = 1e-3, 10.0
"""What regrets are clipped to before a geometric mean."""


def main() -> None:
    """Print the figures of one variant."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--set", action="append", default=[], metavar="MODULE.NAME=VALUE")
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--sampler", default="auto")
    asked = parser.parse_args()
    sys.path.insert(0, str(asked.tree.resolve()))
    from benchmarks import made_landscapes, recorded, search_efficiency
    from flashgen.search.space import Method

    for each in asked.set:
        name, _, value = each.partition("=")
        module, _, constant = name.partition(".")
        found = importlib.import_module(f"flashgen.search.samplers.{module}")
        assert hasattr(found, constant), name
        setattr(found, constant, ast.literal_eval(value))
    read = [landscape for path in asked.files for landscape in recorded.read(path)]
    landscapes = read or [*made_landscapes.landscapes(), *search_efficiency.shipped()]
    medians = []
    for landscape in map(search_efficiency.cold, landscapes):
        runs = []
        for seed in range(asked.seeds):
            method = Method(sampler=asked.sampler, seed=seed)
            regrets = recorded.replay(replace(landscape), method, AFTER[-1], warm=False)
            runs.append([regrets[min(after, len(regrets)) - 1] for after in AFTER])
        medians.append([statistics.median(column) for column in zip(*runs, strict=True)])
        cells = " ".join(f"{100 * value:6.1f}" for value in medians[-1])
        print(f"{cells}  {landscape.name}", flush=True)
    means = [
        math.exp(statistics.fmean(math.log(min(max(value, LEAST), MOST)) for value in column))
        for column in zip(*medians, strict=True)
    ]
    print(" ".join(f"{100 * mean:6.1f}" for mean in means), " all")
    print("above 20 % after 80:", sum(row[-1] > 0.2 for row in medians), "of", len(medians))


if __name__ == "__main__":
    main()
