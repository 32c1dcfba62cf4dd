"""Compares the samplers on recorded landscapes, in repeated searches. CPU only; a replay.

    python benchmarks/search_efficiency.py [FILE ...] [--seeds 50] [--jobs N] [--out NAME]
    python benchmarks/search_efficiency.py --peers [FILE ...] [--public FOLDER] [--seeds 30]

FILE is anything benchmarks/recorded.py reads: a log of flashgen, a cache of Kernel Tuner, T4
results. Without one, the landscapes that ship: two of an A100 that others measured and published
(tests/data/published_timings.yaml), and spaces of flashgen's own kernels in landscapes/, whose
times are ESTIMATES: they show how a search copes with such a space, and nothing about a GPU.

Each contender searches each landscape once per seed. Regret is how much slower the best config
found so far is than the best of the landscape. The output is the median over seeds, with its 95 %
band by the percentile bootstrap in brackets (RESAMPLES resamples); the plot shows the same. A
contender without randomness has a band of no width. The end lists the goals of auto, and where it
misses them: see `shortfalls`.

    auto          flashgen's own, with a landscape's seeds: what `flashgen tune` starts with
    auto, cold    the same without them
    tpe, warm     Optuna's TPE with those seeds
    the others    without; exhaustive goes through the space in its order

--peers compares auto with strategies of Kernel Tuner (benchmarks/search_peers.py), TPE and random,
for 320 evaluations. All of them know a space and nothing else: no seeds, no guesses, no order. The
landscapes are those that FOLDER has of search_peers.PUBLIC, those of benchmarks/made_landscapes.py,
and our estimated ones. What is not there is skipped, and the output says why. Each search of a peer
has a space of its own, and the first of each is repeated at the end: if it differs, the program
stops. The summary is by benchmarks/search_scores.py. Without Kernel Tuner it says so and ends.

Each search is kept in NAME.runs.jsonl when it is done, so a run that was cut off goes on.
NAME.json, NAME.md and NAME.png are written; the picture needs matplotlib.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # there are as many processes as cores

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import yaml

import flashgen
from benchmarks.recorded import Landscape, read, replay
from flashgen.errors import FlashgenError, ToolchainError
from flashgen.schedules.space import seed_configs, tuned_default
from flashgen.search import Method
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS

sys.path.insert(0, str(Path(__file__).parent))
import made_landscapes
from search_peers import STRATEGIES, public, replay_peer
from search_plot import draw
from search_runs import Runs, digest_of, digest_of_search
from search_scores import Curve, curve_of, per_cent, summary, summary_table

AT = (5, 10, 20, 40, 80)
AT_WITH_PEERS = (*AT, 160, 320)
BETTER_AT = 20
PACKAGES = ("optuna", "numpy", "scipy")
PUBLISHED = ROOT / "tests" / "data" / "published_timings.yaml"
ESTIMATED = ROOT / "benchmarks" / "landscapes"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A sampler, with the seeds of a landscape or without; None is a strategy of Kernel Tuner.

    by_chance: whether its seed matters.
    """

    name: str
    sampler: str | None
    warm: bool = False
    by_chance: bool = True

    @property
    def package(self) -> str:
        """What proposes."""
        return "kernel_tuner" if self.sampler is None else "optuna"


OPTUNAS = "benchmarks.optuna_samplers"
CONTENDERS = (
    Contender(name="auto", sampler="auto", warm=True),
    Contender(name="auto, cold", sampler="auto"),
    Contender(name="tpe, warm", sampler=f"{OPTUNAS}:Tpe", warm=True),
    Contender(name="tpe", sampler=f"{OPTUNAS}:Tpe"),
    Contender(name="gp", sampler=f"{OPTUNAS}:Gp"),
    Contender(name="cmaes", sampler=f"{OPTUNAS}:Cmaes"),
    Contender(name="genetic", sampler=f"{OPTUNAS}:Genetic"),
    Contender(name="random", sampler="random"),
    Contender(name="exhaustive", sampler="exhaustive", by_chance=False),
)


PEERS = (
    *(replace(each, warm=False) for each in CONTENDERS if each.name in ("auto", "tpe", "random")),
    *(Contender(name=name, sampler=None) for name in STRATEGIES),
)
"""Contenders of --peers. All of them search cold."""


def published() -> list[Landscape]:
    """The measured landscapes that ship, with those of our seeds that are points of theirs."""
    found = []
    for record in yaml.safe_load(PUBLISHED.read_text())["landscapes"]:
        names = ("br", "bc", "num_warps", "num_stages")
        rows = {tuple(row[:4]): row[4] for row in record["rows_ms"]}
        spec = AttentionSpec(
            dtype="float16", head_dim=record["d"], head_dim_v=record["d"], mask="causal"
        )
        a100 = TARGETS["nvidia_a100_sxm4_40gb"]
        seeds = (tuned_default(spec, a100), *seed_configs(spec, a100))
        tiles = dict.fromkeys(tuple(getattr(seed, name) for name in names) for seed in seeds)
        found.append(
            Landscape(
                name=record["id"],
                source="measured",
                unit="ms",
                points=tuple(dict(zip(names, tile, strict=True)) for tile in rows),
                times=tuple(rows.values()),
                seeds=tuple(list(rows).index(tile) for tile in tiles if tile in rows),
            )
        )
    return found


def shipped() -> list[Landscape]:
    """All that ship."""
    return published() + [each for path in sorted(ESTIMATED.glob("*.json*")) for each in read(path)]


def compared() -> list[Landscape]:
    """Landscapes for --peers that ship or are made, without what only flashgen knows of them."""
    estimated = [each for path in sorted(ESTIMATED.glob("*.json*")) for each in read(path)]
    return [*made_landscapes.landscapes(), *map(cold, estimated)]


def cold(landscape: Landscape) -> Landscape:
    """The landscape without seeds, guesses and a meaning of its order."""
    return replace(landscape, seeds=(), guesses=None, likely_first=False)


Task = tuple[int, Contender, int, int]
"""Number of a landscape, contender, seed, evaluations."""

_held: list[Landscape] = []


def _hold(landscapes: Sequence[Landscape]) -> None:
    """Give a worker what it searches."""
    _held[:] = landscapes


def _search(task: Task) -> tuple[float, ...]:
    number, contender, seed, evaluations = task
    if contender.sampler is None:
        regrets = replay_peer(_held[number], contender.name, seed, evaluations)
    else:
        method = Method(sampler=contender.sampler, seed=seed)
        regrets = replay(_held[number], method, evaluations, warm=contender.warm)
    return regrets + regrets[-1:] * (evaluations - len(regrets))


def curves(
    landscapes: Sequence[Landscape],
    contenders: Sequence[Contender],
    seeds: int,
    jobs: int,
    evaluations: int = AT[-1],
    runs: Runs | None = None,
) -> Iterator[tuple[Landscape, list[Curve]]]:
    """Each landscape with its curves, when it is done. runs: keeps searches, and has some."""
    tasks = [
        (number, contender, seed, evaluations)
        for number, landscape in enumerate(landscapes)
        for contender in contenders
        if landscape.seeds or landscape.guesses or not contender.name.endswith(("cold", "warm"))
        for seed in range(seeds if contender.by_chance else 1)
    ]
    done = zip(tasks, _searched(tasks, landscapes, jobs, runs or Runs(None)), strict=True)
    for number, of_one in groupby(done, key=lambda each: each[0][0]):
        grouped = groupby(of_one, key=lambda each: each[0][1])
        found = [
            curve_of(contender.name, landscapes[number], np.array([regrets for _, regrets in some]))
            for contender, some in grouped
        ]
        yield landscapes[number], found


def _searched(
    tasks: Sequence[Task], landscapes: Sequence[Landscape], jobs: int, runs: Runs
) -> Iterator[tuple[float, ...]]:
    """The regrets of all tasks, in their order; one job is this process."""
    digests, search = [digest_of(each) for each in landscapes], digest_of_search()

    def key(task: Task) -> tuple[str, ...]:
        number, contender, seed, evaluations = task
        by = search if contender.sampler == "auto" else version(contender.package)
        words = contender.name, contender.warm, by, seed, evaluations
        return digests[number], *map(str, words)

    def looked_up(new: Iterable[tuple[float, ...]]) -> Iterator[tuple[float, ...]]:
        each = iter(new)
        for task in tasks:
            regrets = runs.get(key(task))
            if regrets is None:
                regrets = next(each)
                runs.add(key(task), regrets)
            yield regrets

    missing = [task for task in tasks if runs.get(key(task)) is None]
    if jobs == 1:
        _hold(landscapes)
        yield from looked_up(map(_search, missing))
        return
    with ProcessPoolExecutor(jobs, initializer=_hold, initargs=(landscapes,)) as workers:
        yield from looked_up(workers.map(_search, missing))


def check_that_runs_are_apart(
    landscapes: Sequence[Landscape], runs: Runs, evaluations: int
) -> None:
    """Repeat the first search of each peer after all others. Exits if it differs from the first."""
    _hold(landscapes)
    tasks = [
        (number, contender, 0, evaluations)
        for number in range(len(landscapes))
        for contender in PEERS
        if contender.sampler is None
    ]
    kept = _searched(tasks, landscapes, 1, runs)
    for task, before in zip(tasks, kept, strict=True):
        if _search(task) != before:
            sys.exit(f"{task[1].name} on {landscapes[task[0]].name}: other seeds change seed 0")


def shortfalls(landscape: Landscape, found: Sequence[Curve]) -> list[str]:
    """Where auto misses its goals; a sentence each.

    Its median regret may nowhere exceed that of random nor of exhaustive, and must be below that of
    tpe after BETTER_AT, or zero.
    """
    medians = {curve.contender: curve.median for curve in found}
    bars = [(name, at) for name in ("random", "exhaustive") for at in AT] + [("tpe", BETTER_AT)]
    fallen = []
    for name, at in bars:
        if "auto" not in medians or name not in medians:
            continue
        auto, other = medians["auto"][at - 1], medians[name][at - 1]
        if auto > other or (name == "tpe" and auto == other > 0):
            figures = f"auto {per_cent(auto)} %, {name} {per_cent(other)} %"
            fallen.append(f"{landscape.name}, after {at}: {figures}")
    return fallen


def verdict(done: Sequence[tuple[Landscape, list[Curve]]]) -> str:
    """What is asked of auto, and where it falls short."""
    fallen = [each for landscape, found in done for each in shortfalls(landscape, found)]
    asked = (
        f"auto should be at least as good as random and exhaustive everywhere, and better than "
        f"tpe after {BETTER_AT}, or at no regret, by the median."
    )
    where = f"in {len(fallen)} places" if fallen else "nowhere"
    return "\n".join([f"{asked} It falls short {where}.", *(f"- {each}" for each in fallen)])


def title(landscape: Landscape) -> str:
    """What it is, in a line."""
    failed = sum(time is None for time in landscape.times)
    source = landscape.source.upper() if landscape.source == "estimated" else landscape.source
    return (
        f"{landscape.name}: {source}, {len(landscape.points)} points, {failed} failing, "
        f"{len(landscape.seeds)} seeds"
    )


def table(found: Sequence[Curve], at: Sequence[int] = AT) -> str:
    """Markdown: a row a contender."""
    rows = [
        f"| median regret, % | {' | '.join(f'after {after}' for after in at)} |",
        "|---" * (len(at) + 1) + "|",
    ]
    for curve in found:
        rows.append(f"| {curve.contender} | {' | '.join(curve.text(after) for after in at)} |")
    return "\n".join(rows)


def record(landscape: Landscape, found: Sequence[Curve]) -> dict[str, object]:
    """The JSON of one landscape. A regret is null if nothing had run yet."""

    def rounded(regrets: Sequence[float]) -> list[float | None]:
        return [round(regret, 5) if math.isfinite(regret) else None for regret in regrets]

    return {
        "name": landscape.name,
        "source": landscape.source,
        "points": len(landscape.points),
        "failing": sum(time is None for time in landscape.times),
        "seeds": len(landscape.seeds),
        "best": landscape.best,
        "unit": landscape.unit,
        "contenders": [
            {
                "name": curve.contender,
                "runs": curve.runs,
                "median": rounded(curve.median),
                "low": rounded(curve.low),
                "high": rounded(curve.high),
            }
            for curve in found
        ],
    }


def names() -> list[str]:
    """All contenders, each of which has its own colour."""
    return [*(contender.name for contender in CONTENDERS), *STRATEGIES]


def main() -> None:
    """Replay, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--seeds", type=int, help="searches a contender: 50, with --peers 30")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--contender", action="append", choices=names(), help="all unless given")
    parser.add_argument("--out", type=Path, default=Path("search_efficiency"), metavar="NAME")
    parser.add_argument("--peers", action="store_true", help="with strategies of Kernel Tuner")
    parser.add_argument("--public", type=Path, metavar="FOLDER", help="of files for --peers")
    asked = parser.parse_args()
    seeds = asked.seeds if asked.seeds is not None else 30 if asked.peers else 50
    if seeds < 1 or asked.jobs < 1:
        parser.error("--seeds and --jobs must be at least 1")
    if asked.peers and importlib.util.find_spec("kernel_tuner") is None:
        sys.exit("--peers needs Kernel Tuner: pip install '.[peers]'")
    all_of_them = PEERS if asked.peers else CONTENDERS
    contenders = [each for each in all_of_them if each.name in (asked.contender or names())]
    packages = ("kernel_tuner", *PACKAGES) if asked.peers else PACKAGES
    others = ", ".join(f"{name} {version(name)}" for name in packages)
    about = (
        f"A replay of recorded landscapes on a CPU by flashgen {flashgen.__version__} "
        f"({others}): {seeds} searches each, one where nothing is left to chance. Median "
        f"regret in per cent, and the 95 % band of the median by bootstrap."
    )
    print(about)
    try:
        given = [each for path in asked.files for each in read(path, print)]
        if asked.peers:
            compare(given, contenders, seeds, asked, about)
        else:
            replay_all(given or shipped(), contenders, seeds, asked, about)
    except FlashgenError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def replay_all(
    landscapes: Sequence[Landscape],
    contenders: Sequence[Contender],
    seeds: int,
    asked: argparse.Namespace,
    about: str,
) -> None:
    """Without --peers: search, print and write."""
    done = []
    for landscape, found in curves(landscapes, contenders, seeds, asked.jobs):
        print(f"\n{title(landscape)}\n\n{table(found)}", flush=True)
        done.append((landscape, found))
    print(f"\n{verdict(done)}")
    fallen = [each for landscape, found in done for each in shortfalls(landscape, found)]
    write(asked.out, about, done, AT, {"shortfalls": fallen}, end=verdict(done))


def compare(
    given: Sequence[Landscape],
    contenders: Sequence[Contender],
    seeds: int,
    asked: argparse.Namespace,
    about: str,
) -> None:
    """With --peers: search, print and write."""
    found_public, skipped = public(asked.public)
    landscapes = [*map(cold, given)] or [*map(cold, found_public), *compared()]
    print("\n".join(f"skipped: {each}" for each in skipped))
    runs = Runs(asked.out.with_suffix(".runs.jsonl"))
    last, done = AT_WITH_PEERS[-1], []
    for landscape, found in curves(landscapes, contenders, seeds, asked.jobs, last, runs):
        print(f"\n{title(landscape)}\n\n{table(found, AT_WITH_PEERS)}", flush=True)
        done.append((landscape, found))
    check_that_runs_are_apart(landscapes, runs, last)
    sums, texts = {}, []
    for name in ("all", *dict.fromkeys(landscape.source for landscape in landscapes)):
        some = [found for landscape, found in done if name in ("all", landscape.source)]
        sums[name] = summary(some, AT_WITH_PEERS)
        count = f"{len(some)} landscapes, {name}"
        texts.append(f"## {count}\n\n{summary_table(sums[name], AT_WITH_PEERS)}\n")
    print("\n" + "\n".join(texts))
    write(
        asked.out, about, done, AT_WITH_PEERS, {"summary": sums, "skipped": skipped},
        start="\n".join(texts), end="\n".join(f"Skipped: {each}" for each in skipped),
    )  # fmt: skip


def write(
    out: Path,
    about: str,
    done: Sequence[tuple[Landscape, list[Curve]]],
    at: Sequence[int],
    more: dict[str, object],
    *,
    start: str = "",
    end: str = "",
) -> None:
    """NAME.json, NAME.md and, where there is matplotlib, NAME.png."""
    out.parent.mkdir(parents=True, exist_ok=True)
    records = [record(landscape, found) for landscape, found in done]
    content = {"about": about, "evaluations": at, **more, "landscapes": records}
    out.with_suffix(".json").write_text(json.dumps(content) + "\n")
    tables = [f"## {title(landscape)}\n\n{table(found, at)}\n" for landscape, found in done]
    parts = [f"# Search efficiency\n\n{about}\n", *([start] if start else []), *tables, f"{end}\n"]
    out.with_suffix(".md").write_text("\n".join(parts))
    try:
        panels = [(title(landscape), found) for landscape, found in done]
        draw(panels, names(), at, out.with_suffix(".png"))
    except ToolchainError as error:
        print(f"no picture: {error}")
    print(f"\nWritten: {out.with_suffix('.json')} and, beside it, .md and .png")


if __name__ == "__main__":
    main()
