"""A race of samplers on recorded landscapes: auto, and Optuna's. CPU only; a replay.

    python benchmarks/search_race.py [FILE ...] [--seeds 30] [--contender NAME] [--out NAME]

Each contender searches each landscape once per seed, for 80 evaluations. All search the same legal
points, and first the same seeds: those of the landscape or, where it has none, SEEDS random points,
which are others in each search; with --cold all start without. Only auto knows that the order of
flashgen's own spaces means something, or gets estimates where times are measured. Optuna's samplers
hear of failures and of what is illegal as of the worst value, TPE as of pruned trials. CMA-ES
starts from the best seed.

FILE is anything that benchmarks/recorded.py reads. Without one, the landscapes are two of an A100
that others measured (tests/data/published_timings.yaml), the searches of an H200 that the
repository has, which are small, and those of landscapes/: of our kernels, with ESTIMATES for times,
and made ones.

Regret is how much slower the best config so far is than the best of the landscape. The output is
its median over seeds in per cent, with a 95 % band by the percentile bootstrap. Each search is in
NAME.runs.jsonl when it is done, so a run that was cut off goes on. NAME.md is written at the end.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import hashlib
import json
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import optuna
import yaml
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

from benchmarks.recorded import Landscape, dump, from_outcomes, read, replay
from flashgen.errors import FlashgenError
from flashgen.files import whole_lines
from flashgen.schedules.space import seed_configs, tuned_default
from flashgen.search import Method
from flashgen.search.log import outcomes_of
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS

AT = (5, 10, 20, 40, 80)
"""After how many evaluations the tables have a column."""
SEEDS = 8
GP_SEARCHES = 5
"""Of gp, at most: each of its proposals takes 0.2 s, and that of the others 0.01 s."""
LEAST_POINTS = 40
"""Of a search of the H200, to be a landscape."""
RESAMPLES = 2000
LEAST, MOST = 1e-3, 10.0
"""What regrets are clipped to before a geometric mean."""
PUBLISHED = ROOT / "tests" / "data" / "published_timings.yaml"
LANDSCAPES = ROOT / "benchmarks" / "landscapes"
H200 = ROOT / "benchmarks" / "results" / "nvidia_h200" / "tuning.jsonl.gz"
Curve = list[list[float]]
"""Of each of AT the median regret, and its 95 % band: low and high."""
CONTENDERS = {
    "auto": "auto",
    "tpe": "benchmarks.search_race:Tpe",
    "gp": "benchmarks.search_race:Gp",
    "cmaes": "benchmarks.search_race:Cmaes",
    "random": "random",
}
"""Names, and what Method calls the sampler."""

warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)


class _Informed(BaseSampler):
    """Tells the sampler of failures and of what is illegal: a trial more for each, which is pruned
    or has the worst value so far.
    """

    prunes = False

    def after_trial(
        self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """As BaseSampler.after_trial."""
        super().after_trial(study, trial, state, values)
        illegal = trial.user_attrs.get("status") == "illegal" and not self.prunes
        known = [each.values[0] for each in study.get_trials(deepcopy=False) if each.values]
        if (state == TrialState.FAIL or illegal) and (self.prunes or known):
            study.add_trial(
                create_trial(
                    state=TrialState.PRUNED if self.prunes else TrialState.COMPLETE,
                    value=None if self.prunes else max(known),
                    params=trial.params,
                    distributions=trial.distributions,
                    system_attrs=trial.system_attrs,  # of which generation it is
                )
            )


class Tpe(_Informed, TPESampler):
    """TPE of all parameters together, which takes pruned trials for worse than all others."""

    prunes = True

    def __init__(self, seed: int) -> None:
        super().__init__(multivariate=True, constant_liar=True, seed=seed)


class Gp(_Informed, GPSampler):
    """A Gaussian process, by GPSampler."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)


class Cmaes(_Informed, CmaEsSampler):
    """CMA-ES from the best seed. It draws what is no number at random."""

    def __init__(self, seed: int, x0: dict[str, Any] | None = None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # x0 goes with Optuna 6
            super().__init__(x0=x0, seed=seed, warn_independent_sampling=False)
        self._start = None if x0 else seed

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """As BaseSampler.sample_relative."""
        done = [each for each in study.get_trials(deepcopy=False) if each.values]
        if done and search_space and self._start is not None:
            best = min(done, key=lambda each: each.values[0]).params
            Cmaes.__init__(self, self._start, {name: best[name] for name in search_space})
        return super().sample_relative(study, trial, search_space)


def published() -> list[Landscape]:
    """The measured landscapes that ship, with those of our seeds that are points of theirs."""
    found = []
    names = ("br", "bc", "num_warps", "num_stages")
    a100 = TARGETS["nvidia_a100_sxm4_40gb"]
    for record in yaml.load(PUBLISHED.read_text(), yaml.CSafeLoader)["landscapes"]:
        dim, rows = record["d"], {tuple(row[:4]): row[4] for row in record["rows_ms"]}
        spec = AttentionSpec(dtype="float16", head_dim=dim, head_dim_v=dim, mask="causal")
        seeds = (tuned_default(spec, a100), *seed_configs(spec, a100))
        tiles = dict.fromkeys(tuple(getattr(seed, name) for name in names) for seed in seeds)
        points = tuple(dict(zip(names, tile, strict=True)) for tile in rows)
        found.append(
            Landscape(
                name=record["id"], source="measured", unit="ms", points=points,
                times=tuple(rows.values()),
                seeds=tuple(list(rows).index(tile) for tile in tiles if tile in rows),
            )
        )  # fmt: skip
    return found


def of_folder(source: str) -> list[Landscape]:
    """Those of landscapes/ that are estimated, or made."""
    pattern = "made_*.json.gz" if source == "made" else "[!m]*.json*"
    return [each for path in sorted(LANDSCAPES.glob(pattern)) for each in read(path)]


def shipped() -> list[Landscape]:
    """All of attention that ship, but for the searches of an H200."""
    return published() + of_folder("estimated")


def measured() -> list[Landscape]:
    """Of the searches of an H200 those with enough points."""
    found = from_outcomes(outcomes_of(H200, print))
    return [e for e in found if len(e.points) >= LEAST_POINTS and e.source == "measured"]


def started(landscape: Landscape, seed: int) -> Landscape:
    """The landscape with seeds, for the search of this seed."""
    if landscape.seeds:
        return landscape
    drawn = np.random.RandomState(seed).choice(len(landscape.points), SEEDS, replace=False)
    return replace(landscape, seeds=tuple(map(int, drawn)))


class Runs:
    """Regrets of searches by key, a line of JSON each; a line that was cut off is left out. Without
    a path nothing is kept.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        content = path.read_bytes() if path is not None and path.exists() else b""
        lines, whole = whole_lines(content)
        self.known = {tuple(key): tuple(regrets) for key, regrets in map(json.loads, lines)}
        if path is not None and whole < len(content):
            path.write_bytes(content[:whole])

    def add(self, key: tuple[str, ...], regrets: tuple[float, ...]) -> None:
        """Keep the regrets of a search."""
        self.known[key] = regrets
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                print(json.dumps([key, regrets]), file=file)


def regrets_of(
    landscape: Landscape, contender: str, seeds: int, runs: Runs, *, warm: bool = True
) -> list[tuple[float, ...]]:
    """The regrets of its searches, those of `runs` and new ones."""
    by = version("optuna")
    if contender == "auto":  # with the code of flashgen's search
        code = sorted((ROOT / "flashgen" / "search").glob("*.py"))
        by = hashlib.sha256(b"".join(path.read_bytes() for path in code)).hexdigest()[:12]
    of = hashlib.sha256(dump(landscape).encode()).hexdigest()[:12]
    found = []
    for seed in range(seeds):
        key = of, contender, by, str(warm), str(SEEDS), str(seed)
        regrets = runs.known.get(key)
        if regrets is None:
            cold = replace(landscape, seeds=(), guesses=None, likely_first=False)
            searched = started(landscape, seed) if warm else cold
            method = Method(sampler=CONTENDERS[contender], seed=seed)
            some = replay(searched, method, AT[-1], warm=warm)
            regrets = some + some[-1:] * (AT[-1] - len(some))
            runs.add(key, regrets)
        found.append(regrets)
    return found


def curve_of(regrets: Sequence[Sequence[float]]) -> Curve:
    """The curve of these regrets (searches x evaluations)."""
    runs = np.array(regrets)[:, [after - 1 for after in AT]]
    draws = np.random.default_rng(0).integers(len(runs), size=(RESAMPLES, len(runs)))
    medians = np.median(runs[draws], axis=1)
    band = np.quantile(medians, (0.025, 0.975), axis=0, method="nearest")
    return np.stack([np.median(runs, axis=0), *band], axis=1).tolist()  # type: ignore[no-any-return]


def per_cent(regret: float) -> str:
    """A regret as a table shows it; nothing ran yet where it is infinite."""
    return f"{100 * regret:.1f}" if math.isfinite(regret) else "-"


def table(found: Mapping[str, Curve]) -> Iterator[str]:
    """Markdown: a row a contender."""
    yield f"| median regret, % | {' | '.join(f'after {after}' for after in AT)} |"
    yield "|---" * (len(AT) + 1) + "|"
    for name, curve in found.items():
        cells = ("{} [{}, {}]".format(*map(per_cent, figures)) for figures in curve)
        yield f"| {name} | {' | '.join(cells)} |"


def summary(done: Sequence[Mapping[str, Curve]]) -> Iterator[str]:
    """Markdown: of each contender the geometric means of its medians over all landscapes, and its
    worst after all evaluations.
    """
    after = " | ".join(f"after {after}" for after in AT)
    yield f"| geometric mean of median regrets, % | {after} | worst after {AT[-1]} |"
    yield "|---" * (len(AT) + 2) + "|"
    for name in done[0]:
        medians = np.array([curves[name] for curves in done])[:, :, 0]
        means = np.exp(np.log(np.clip(medians, LEAST, MOST)).mean(axis=0)).tolist()
        yield f"| {name} | {' | '.join(map(per_cent, [*means, medians[:, -1].max()]))} |"


def main() -> None:
    """Search, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--seeds", type=int, default=30, help="searches of each contender")
    parser.add_argument("--cold", action="store_true", help="without seeds")
    parser.add_argument("--contender", action="append", choices=CONTENDERS, help="all unless given")
    parser.add_argument("--out", type=Path, default=Path("search_race"), metavar="NAME")
    asked = parser.parse_args()
    try:
        every = [each for path in asked.files for each in read(path, print)]
    except FlashgenError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    every = every or [*shipped(), *measured(), *of_folder("made")]
    runs, done = Runs(asked.out.with_suffix(".runs.jsonl")), []
    lines = [
        f"Optuna {version('optuna')}, {asked.seeds} searches each"
        f"{', without seeds' if asked.cold else ''}; of gp {min(asked.seeds, GP_SEARCHES)}: "
        "median regret in per cent, and its 95 % band."
    ]
    for landscape in every:
        curves = {}
        for name in asked.contender or CONTENDERS:
            count = min(asked.seeds, GP_SEARCHES) if name == "gp" else asked.seeds
            found = regrets_of(landscape, name, count, runs, warm=not asked.cold)
            curves[name] = curve_of(found)
        done.append(curves)
        source = landscape.source.upper() if landscape.source == "estimated" else landscape.source
        counts = f"{len(landscape.points)} points, {landscape.times.count(None)} failing"
        told = f"{landscape.name}: {source}, {counts}, {len(landscape.seeds)} seeds"
        new = ["", told, "", *table(curves)]
        print("\n".join(new), flush=True)
        lines += new
    lines += ["", f"All {len(every)} landscapes:", "", *summary(done)]
    print("\n".join(lines[-3 - len(done[0]) :]))
    asked.out.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
