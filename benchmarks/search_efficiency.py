"""Compares the samplers on recorded landscapes, in repeated searches. CPU only; a replay.

    python benchmarks/search_efficiency.py [FILE ...] [--seeds 50] [--jobs N] [--out NAME]

FILE is anything flashgen.search.landscape reads: a log of flashgen, a cache of Kernel Tuner, T4
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

--peers adds strategies of Kernel Tuner (benchmarks/search_peers.py) and goes on to 320 evaluations;
without Kernel Tuner it says so and ends.

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
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import yaml

import flashgen
from flashgen.errors import FlashgenError
from flashgen.search import Method
from flashgen.search.landscape import Landscape, read, replay
from flashgen.search.space import Sampler
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from flashgen.spec.space import seed_configs, tuned_default

sys.path.insert(0, str(Path(__file__).parent))
from search_peers import STRATEGIES, replay_peer

AT: tuple[int, ...] = (5, 10, 20, 40, 80)
AT_WITH_PEERS = (*AT, 160, 320)
BETTER_AT = 20
RESAMPLES = 2000
PUBLISHED = ROOT / "tests" / "data" / "published_timings.yaml"
ESTIMATED = ROOT / "benchmarks" / "landscapes"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A sampler, with the seeds of a landscape or without; None is a strategy of Kernel Tuner.

    by_chance: whether its seed matters.
    """

    name: str
    sampler: Sampler | None
    warm: bool = False
    by_chance: bool = True


CONTENDERS = (
    Contender(name="auto", sampler="auto", warm=True),
    Contender(name="auto, cold", sampler="auto"),
    Contender(name="tpe, warm", sampler="tpe", warm=True),
    Contender(name="tpe", sampler="tpe"),
    Contender(name="gp", sampler="gp"),
    Contender(name="cmaes", sampler="cmaes"),
    Contender(name="genetic", sampler="genetic"),
    Contender(name="random", sampler="random"),
    Contender(name="exhaustive", sampler="exhaustive", by_chance=False),
)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Regrets of one contender after 1, 2, ... evaluations: their median, and its band."""

    contender: str
    runs: int
    median: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    def text(self, after: int) -> str:
        """The figures after so many evaluations, in per cent."""
        place = after - 1
        median, low, high = self.median[place], self.low[place], self.high[place]
        return f"{_per_cent(median)} [{_per_cent(low)}, {_per_cent(high)}]"


def published() -> list[Landscape]:
    """The measured landscapes that ship, with those of our seeds that are points of theirs."""
    found = []
    for record in yaml.safe_load(PUBLISHED.read_text())["landscapes"]:
        names = ("br", "bc", "num_warps", "num_stages")
        rows = {tuple(row[:4]): row[4] for row in record["rows_ms"]}
        spec = AttentionSpec(
            dtype="float16", head_dim=record["d"], head_dim_v=record["d"], mask="causal"
        )
        seeds = (tuned_default(spec), *seed_configs(spec, TARGETS["nvidia_a100_sxm4_40gb"]))
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
    landscapes: Sequence[Landscape], contenders: Sequence[Contender], seeds: int, jobs: int
) -> Iterator[tuple[Landscape, list[Curve]]]:
    """Each landscape with its curves, when it is done."""
    tasks = [
        (number, contender, seed, AT[-1])
        for number, landscape in enumerate(landscapes)
        for contender in contenders
        if landscape.seeds or landscape.guesses or not contender.name.endswith(("cold", "warm"))
        for seed in range(seeds if contender.by_chance else 1)
    ]
    done = zip(tasks, _searched(tasks, landscapes, jobs), strict=True)
    for number, of_one in groupby(done, key=lambda each: each[0][0]):
        grouped = groupby(of_one, key=lambda each: each[0][1])
        found = [
            _curve(contender, np.array([regrets for _, regrets in runs]))
            for contender, runs in grouped
        ]
        yield landscapes[number], found


def _searched(
    tasks: Sequence[Task], landscapes: Sequence[Landscape], jobs: int
) -> Iterator[tuple[float, ...]]:
    """The regrets of all tasks, in their order; one job is this process."""
    if jobs == 1:
        _hold(landscapes)
        yield from map(_search, tasks)
        return
    with ProcessPoolExecutor(jobs, initializer=_hold, initargs=(landscapes,)) as workers:
        yield from workers.map(_search, tasks)


def _curve(contender: Contender, regrets: np.ndarray) -> Curve:
    """regrets: runs x evaluations."""
    draws = np.random.default_rng(0).integers(len(regrets), size=(RESAMPLES, len(regrets)))
    medians = np.median(regrets[draws], axis=1)
    low, high = np.quantile(medians, (0.025, 0.975), axis=0, method="nearest")
    return Curve(
        contender=contender.name,
        runs=len(regrets),
        median=tuple(np.median(regrets, axis=0).tolist()),
        low=tuple(low.tolist()),
        high=tuple(high.tolist()),
    )


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
            figures = f"auto {_per_cent(auto)} %, {name} {_per_cent(other)} %"
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


def _per_cent(regret: float) -> str:
    return f"{100 * regret:.1f}" if math.isfinite(regret) else "-"


def title(landscape: Landscape) -> str:
    """What it is, in a line."""
    failed = sum(time is None for time in landscape.times)
    source = landscape.source.upper() if landscape.source == "estimated" else landscape.source
    return (
        f"{landscape.name}: {source}, {len(landscape.points)} points, {failed} failing, "
        f"{len(landscape.seeds)} seeds"
    )


def table(found: Sequence[Curve]) -> str:
    """Markdown: a row a contender."""
    rows = [
        f"| median regret, % | {' | '.join(f'after {at}' for at in AT)} |",
        "|---" * (len(AT) + 1) + "|",
    ]
    for curve in found:
        rows.append(f"| {curve.contender} | {' | '.join(curve.text(at) for at in AT)} |")
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


COLOURS = (
    "#D55E00", "#E69F00", "#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#999999", "#000000",
    "#7F3C8D", "#11A579", "#3969AC",
)  # fmt: skip
DASHES = ("-", "--", "-", "--", "-.", "-.", ":", "-", "--", "-.", ":")
FLOOR = 1e-3
"""The regret that a logarithmic axis ends at; 0 is drawn there."""


def _names() -> list[str]:
    """All contenders, each of which has its own colour."""
    return [*(contender.name for contender in CONTENDERS), *STRATEGIES]


def draw(done: Sequence[tuple[Landscape, list[Curve]]], path: Path) -> None:
    """A panel a landscape."""
    from matplotlib.figure import Figure

    columns = min(2, len(done))
    rows = -(-len(done) // columns)
    figure = Figure(figsize=(6.5 * columns, 4.4 * rows + 0.6), dpi=120, layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, (landscape, found) in zip(panels, done, strict=False):
        _draw_panel(axes, landscape, found)
    for axes in panels[len(done) :]:
        axes.remove()
    handles, labels = panels[0].get_legend_handles_labels()
    of_label = dict(zip(labels, handles, strict=True))
    for axes in panels[1 : len(done)]:
        of_label |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    order = [name for name in _names() if name in of_label]
    figure.legend(
        [of_label[name] for name in order], order,
        loc="outside lower center", ncols=min(5, len(order)), fontsize=9, frameon=False,
    )  # fmt: skip
    figure.savefig(path)


def _draw_panel(axes: Any, landscape: Landscape, found: Sequence[Curve]) -> None:
    """Regrets of one landscape. auto lies below the others, and broad, so that it is seen there."""
    names = _names()
    for curve in found:
        look, is_auto = names.index(curve.contender), curve.contender == "auto"
        after = range(1, len(curve.median) + 1)
        low, median, high = (
            [100 * max(FLOOR, regret) for regret in regrets]
            for regrets in (curve.low, curve.median, curve.high)
        )
        axes.fill_between(
            after, low, high, step="post", color=COLOURS[look], alpha=0.1, linewidth=0
        )
        axes.plot(
            after, median, color=COLOURS[look], linestyle=DASHES[look], drawstyle="steps-post",
            linewidth=6 if is_auto else 1.3, alpha=0.55 if is_auto else 1.0,
            zorder=1.5 if is_auto else 2, label=curve.contender,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=(1, AT[-1]), ylim=(75 * FLOOR, 1000))
    axes.set_xticks([1, 2, *AT], labels=[str(at) for at in (1, 2, *AT)])
    axes.minorticks_off()
    axes.set_title(title(landscape), fontsize=9)
    axes.set_xlabel("evaluations")
    axes.set_ylabel("median regret, %")
    axes.grid(color="0.85", linewidth=0.5)
    axes.yaxis.set_major_formatter(lambda value, _: "0" if value <= 100 * FLOOR else f"{value:g}")


def main() -> None:
    """Replay, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--seeds", type=int, default=50, help="searches a contender")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    names = [contender.name for contender in CONTENDERS]
    parser.add_argument("--contender", action="append", choices=names, help="all unless given")
    parser.add_argument("--out", type=Path, default=Path("search_efficiency"), metavar="NAME")
    parser.add_argument("--peers", action="store_true", help="Kernel Tuner too, to 320 evaluations")
    asked = parser.parse_args()
    if asked.seeds < 1 or asked.jobs < 1:
        parser.error("--seeds and --jobs must be at least 1")
    contenders = [each for each in CONTENDERS if each.name in (asked.contender or names)]
    if asked.peers:
        if importlib.util.find_spec("kernel_tuner") is None:
            sys.exit("--peers needs Kernel Tuner: pip install 'flashgen[peers]'")
        global AT
        AT = AT_WITH_PEERS
        contenders += [Contender(name=name, sampler=None) for name in STRATEGIES]
    others = ", ".join(f"{name} {version(name)}" for name in ("optuna", "numpy", "scipy"))
    about = (
        f"A replay of recorded landscapes on a CPU by flashgen {flashgen.__version__} "
        f"({others}): {asked.seeds} searches each, one where nothing is left to chance. Median "
        f"regret in per cent, and the 95 % band of the median by bootstrap."
    )
    print(about)
    done = []
    try:
        landscapes = [each for path in asked.files for each in read(path, print)] or shipped()
        for landscape, found in curves(landscapes, contenders, asked.seeds, asked.jobs):
            print(f"\n{title(landscape)}\n\n{table(found)}", flush=True)
            done.append((landscape, found))
    except FlashgenError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    print(f"\n{verdict(done)}")
    write(asked.out, about, done)


def write(out: Path, about: str, done: Sequence[tuple[Landscape, list[Curve]]]) -> None:
    """NAME.json, NAME.md and, where there is matplotlib, NAME.png."""
    out.parent.mkdir(parents=True, exist_ok=True)
    records = [record(landscape, found) for landscape, found in done]
    fallen = [each for landscape, found in done for each in shortfalls(landscape, found)]
    content = {"about": about, "evaluations": AT, "shortfalls": fallen, "landscapes": records}
    out.with_suffix(".json").write_text(json.dumps(content) + "\n")
    tables = [f"## {title(landscape)}\n\n{table(found)}\n" for landscape, found in done]
    text = "\n".join([f"# Search efficiency\n\n{about}\n", *tables, f"{verdict(done)}\n"])
    out.with_suffix(".md").write_text(text)
    try:
        draw(done, out.with_suffix(".png"))
    except ImportError:
        print("no picture: it needs matplotlib, pip install 'flashgen[plots]'")
    print(f"\nWritten: {out.with_suffix('.json')} and, beside it, .md and .png")


if __name__ == "__main__":
    main()
