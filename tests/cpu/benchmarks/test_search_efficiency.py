"""benchmarks/search_efficiency.py: auto earns its place on recorded landscapes, and the program tells where it does not."""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import re
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest

from benchmarks.recorded import Landscape, dump, read
from tests import programs

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "benchmarks" / "search_efficiency.py"
LANDSCAPES = sorted((ROOT / "benchmarks" / "landscapes").glob("*.json*"))
RESULTS = ROOT / "benchmarks" / "results" / "search_efficiency.json"
PEERS = ROOT / "benchmarks" / "results" / "search_peers.json"


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """benchmarks/search_efficiency.py as a module."""
    spec = importlib.util.spec_from_file_location("search_efficiency", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["search_efficiency"] = module
    spec.loader.exec_module(module)
    return module


def searched(
    program: ModuleType, landscapes: Sequence[Landscape], names: Sequence[str], seeds: int
) -> list[tuple[Landscape, list[Any]]]:
    contenders = [each for each in program.CONTENDERS if each.name in names]
    return list(program.curves(landscapes, contenders, seeds, 1))


def thinned(landscape: Landscape) -> Landscape:
    """Its points of the schedule fa2, and the seeds among them."""
    kept = [n for n, point in enumerate(landscape.points) if point["schedule"] == "fa2"]
    return replace(
        landscape,
        points=tuple(landscape.points[number] for number in kept),
        times=tuple(landscape.times[number] for number in kept),
        seeds=tuple(kept.index(seed) for seed in landscape.seeds if seed in kept),
    )


BARS = ("auto", "tpe", "random", "exhaustive")


@pytest.mark.slow("searches three landscapes by four ways: four seconds")
def test_auto_meets_its_bars_on_what_was_measured_and_on_a_thinned_space(
    program: ModuleType,
) -> None:
    measured, (large,) = program.published(), read(LANDSCAPES[0])
    assert [each.source for each in measured] == ["measured"] * 2
    small = thinned(large)
    assert 100 < len(small.points) < len(large.points)
    done = searched(program, [*measured, small], BARS, seeds=3)
    assert [
        each for landscape, found in done for each in program.shortfalls(landscape, found)
    ] == []
    assert done[-1][1][0].median[19] < done[-1][1][1].median[19]  # not because all are at 0


@pytest.mark.slow("make test proves a sample of it")
def test_auto_meets_its_bars_on_all_that_ships(program: ModuleType) -> None:
    done = searched(program, program.shipped(), (*BARS, "auto, cold"), seeds=20)
    assert len(done) == 5
    for landscape, found in done:
        assert program.shortfalls(landscape, found) == []
        # Without its seeds it is still better than chance and TPE, if not than the space's order.
        after_20 = {curve.contender: curve.median[19] for curve in found}
        least = min(after_20["random"], after_20["tpe"])
        assert after_20["auto, cold"] < least or after_20["auto, cold"] == 0.0


class TestPeers:
    """Kernel Tuner's strategies, where it is installed."""

    def test_the_order_of_seeds_changes_nothing_and_failures_count(
        self, program: ModuleType
    ) -> None:
        pytest.importorskip("kernel_tuner", reason="pip install '.[peers]'")
        (large,) = read(LANDSCAPES[0])
        small = thinned(large)
        for name in program.STRATEGIES:
            runs = {seed: program.replay_peer(small, name, seed, 40) for seed in (0, 1, 2)}
            again = {seed: program.replay_peer(small, name, seed, 40) for seed in (2, 1, 0)}
            assert runs == again
            assert len(set(runs.values())) > 1
            for regrets in runs.values():
                assert 20 < len(regrets) <= 40  # a strategy may end by itself
                assert list(regrets) == sorted(regrets, reverse=True)

    def test_without_kernel_tuner_it_says_so(
        self, program: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
        monkeypatch.setattr(sys, "argv", ["search_efficiency.py", "--peers"])
        with pytest.raises(SystemExit, match="--peers needs Kernel Tuner: pip install"):
            program.main()


class TestPublic:
    """Files of others, which --peers reads where they are."""

    def test_what_is_not_there_is_skipped_with_its_reason(
        self, program: ModuleType, tmp_path: Path
    ) -> None:
        made = dump(TestShortfalls.LANDSCAPE).replace('"flashgen"', '"others"')
        (tmp_path / "gemm_milo__A100_T4.json.gz").write_bytes(gzip.compress(made.encode()))
        (tmp_path / "hotspot_milo").mkdir()
        (tmp_path / "hotspot_milo" / "W6600_T4.json.gz").write_bytes(gzip.compress(made.encode()))
        found, skipped = program.public(tmp_path)
        assert [(each.name, each.source) for each in found] == [
            ("gemm A100", "measured"),
            ("hotspot W6600", "measured"),
        ]
        hub, mock = skipped
        assert hub.startswith("convolution_milo/A100_T4.json.gz, ")
        assert "gemm_milo/A100" not in hub
        assert hub.endswith(": not in the folder; see cachefiles of github.com/AutoTuningAssociation/benchmark_hub")  # fmt: skip
        assert mock.startswith("mock_gpu_T4.json: not in the folder; see tests/")
        assert program.public(None) == ([], ["public landscapes: --public FOLDER was not given"])

    def test_only_points_and_times_are_compared(self, program: ModuleType) -> None:
        (large,) = read(LANDSCAPES[0])
        assert large.seeds
        assert large.likely_first
        found = program.cold(replace(large, guesses=large.times))
        assert found == replace(large, seeds=(), guesses=None, likely_first=False)


class TestScore:
    """The performance score: a random search has 0, the best at once has 1."""

    @pytest.fixture
    def scores(self, program: ModuleType) -> ModuleType:
        """benchmarks/search_scores.py, which the program has loaded."""
        return sys.modules[program.summary.__module__]

    LANDSCAPE = Landscape(
        name="made", source="made", unit="ms",
        points=tuple({"x": x} for x in range(1001)), times=tuple(1.0 + x for x in range(1001)),
    )  # fmt: skip

    def test_the_best_at_once_and_a_random_search(self, scores: ModuleType) -> None:
        evaluations = 60
        assert scores.score(self.LANDSCAPE, np.zeros((3, evaluations))) == 1.0
        after = np.arange(1, evaluations + 1)
        random = 1000 - np.round(after * 1002 / (after + 1))
        assert scores.score(self.LANDSCAPE, random[None, :]) == pytest.approx(0.0, abs=0.02)
        half = scores.score(self.LANDSCAPE, random[None, :] / 2)
        assert half == pytest.approx(0.5, abs=0.02)

    def test_what_failed_counts_as_the_slowest(self, scores: ModuleType) -> None:
        failed = np.full((1, 60), math.inf)
        slowest = np.full((1, 60), 1000.0)
        assert scores.score(self.LANDSCAPE, failed) == scores.score(self.LANDSCAPE, slowest) < 0

    def test_a_space_that_a_random_search_solves_at_once_has_none(self, scores: ModuleType) -> None:
        assert scores.score(TestShortfalls.LANDSCAPE, np.zeros((1, 80))) is None

    def test_the_summary_has_geometric_means_and_the_worst(self, scores: ModuleType) -> None:
        def curve(name: str, regret: float) -> Any:
            every = (regret,) * 80
            return scores.Curve(
                contender=name, runs=1, median=every, low=every, high=every, score=regret
            )

        found = [[curve("auto", 0.0), curve("tpe", 0.1)], [curve("auto", 0.4), curve("tpe", 0.9)]]
        auto, tpe = scores.summary(found, (5, 80))
        assert auto["geometric_mean"] == [0.02, 0.02]  # none counts as 0.1 %
        assert tpe == {
            "contender": "tpe", "landscapes": 2, "geometric_mean": [0.3, 0.3], "worst": 0.9,
            "score": 0.5,
        }  # fmt: skip
        assert "| tpe | 30.0 | 30.0 | 90.0 | 0.50 |" in scores.summary_table([auto, tpe], (5, 80))


class TestRuns:
    """Searches that are done are not repeated."""

    def test_a_file_that_was_cut_off_goes_on(self, program: ModuleType, tmp_path: Path) -> None:
        path = tmp_path / "found.runs.jsonl"
        contenders = [each for each in program.CONTENDERS if each.name == "random"]
        landscape = replace(TestShortfalls.LANDSCAPE, seeds=())
        whole = list(program.curves([landscape], contenders, 3, 1, 4, program.Runs(path)))
        lines = path.read_text().splitlines(keepends=True)
        assert len(lines) == 3
        path.write_text("".join(lines[:2]) + lines[2][:20])
        again = list(program.curves([landscape], contenders, 3, 1, 4, program.Runs(path)))
        assert again == whole
        assert path.read_text().splitlines(keepends=True) == lines

    def test_what_is_kept_is_not_searched_again(
        self, program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "found.runs.jsonl"
        contenders = [each for each in program.CONTENDERS if each.name == "random"]
        landscape = TestShortfalls.LANDSCAPE
        whole = list(program.curves([landscape], contenders, 2, 1, 4, program.Runs(path)))
        monkeypatch.setattr(program, "_search", lambda task: (9.0,) * 4)
        again = list(program.curves([landscape], contenders, 2, 1, 4, program.Runs(path)))
        assert again == whole
        (other,) = program.curves(
            [replace(landscape, times=(2.0, 1.0))], contenders, 2, 1, 4, program.Runs(path)
        )
        assert other[1][0].median == (9.0,) * 4


class TestShortfalls:
    LANDSCAPE = Landscape(
        name="made", source="recorded", unit="ms", points=({"x": 1}, {"x": 2}), times=(1.0, 2.0)
    )

    def sentences(self, program: ModuleType, **regrets: Sequence[float]) -> list[str]:
        """regrets: those of each contender after 5, 10, 20, 40 and 80."""

        def curve(name: str, at: Sequence[float]) -> Any:
            steps = zip(at, (5, 5, 10, 20, 40), strict=True)
            every = tuple(regret for regret, times in steps for _ in range(times))
            return program.Curve(contender=name, runs=1, median=every, low=every, high=every)

        found = [curve(name, at) for name, at in regrets.items()]
        listed: list[str] = program.shortfalls(self.LANDSCAPE, found)
        return listed

    GOOD = (0.5, 0.4, 0.3, 0.2, 0.0)

    @pytest.mark.parametrize("name", ["random", "exhaustive"])
    @pytest.mark.parametrize("place", range(5))
    def test_being_worse_anywhere_is_told(self, program: ModuleType, name: str, place: int) -> None:
        at = (5, 10, 20, 40, 80)[place]
        worse = [regret + 0.1 * (number == place) for number, regret in enumerate(self.GOOD)]
        figures = f"auto {100 * worse[place]:.1f} %, {name} {100 * self.GOOD[place]:.1f} %"
        assert self.sentences(program, auto=worse, **{name: self.GOOD}) == [
            f"made, after {at}: {figures}"
        ]
        assert self.sentences(program, auto=self.GOOD, **{name: self.GOOD}) == []

    def test_being_no_better_than_tpe_after_20_is_told(self, program: ModuleType) -> None:
        assert self.sentences(program, auto=self.GOOD, tpe=self.GOOD) == [
            "made, after 20: auto 30.0 %, tpe 30.0 %"
        ]
        better = (9.0, 9.0, 0.2, 9.0, 9.0)
        assert self.sentences(program, auto=better, tpe=self.GOOD) == []
        nothing = (0.0,) * 5
        assert self.sentences(program, auto=nothing, tpe=nothing) == []

    def test_where_nothing_ran_yet_it_is_told(self, program: ModuleType) -> None:
        late = (float("inf"), *self.GOOD[1:])
        assert self.sentences(program, auto=late, random=self.GOOD) == [
            "made, after 5: auto - %, random 50.0 %"
        ]

    def test_the_verdict_counts_them(self, program: ModuleType) -> None:
        exact = (0.5,) * 80
        curves = [
            program.Curve(contender=name, runs=1, median=exact, low=exact, high=exact)
            for name in ("auto", "tpe")
        ]
        text = program.verdict([(self.LANDSCAPE, curves)])
        assert "It falls short in 1 places.\n- made, after 20:" in text
        assert program.verdict([]).endswith("It falls short nowhere.")


class TestShipped:
    def test_those_of_our_kernels_say_that_they_are_estimated(self) -> None:
        assert len(LANDSCAPES) == 3
        for path in LANDSCAPES:
            (found,) = read(path)
            assert found.source == "estimated"
            assert len(found.points) > 200
            assert len(found.seeds) >= 10
            assert path.name.startswith(found.name.split()[0])

    def test_they_name_no_path_and_are_small(self) -> None:
        for path in LANDSCAPES:
            content = path.read_bytes()
            assert len(content) < 150_000
            if path.suffix == ".gz":
                assert content[4:8] == bytes(4)  # no time of packing
                content = gzip.decompress(content)
            assert b"/" not in content
            assert set(json.loads(content)) == {"schema_version", "flashgen", "results"}

    def test_results_are_of_them_and_fall_short_nowhere(self, program: ModuleType) -> None:
        record = json.loads(RESULTS.read_text())
        told = [(each["name"], each["points"], each["best"]) for each in record["landscapes"]]
        assert told == [(each.name, len(each.points), each.best) for each in program.shipped()]
        assert record["shortfalls"] == []
        for landscape in record["landscapes"]:
            runs = {each["name"]: each["runs"] for each in landscape["contenders"]}
            assert list(runs) == [each.name for each in program.CONTENDERS]
            assert set(runs.values()) == {50, 1}
        for suffix in (".md", ".png"):
            assert RESULTS.with_suffix(suffix).exists()

    def test_the_page_shows_the_figures_of_the_results(self) -> None:
        page = (ROOT / "docs" / "lab-notes.md").read_text()
        record = json.loads(RESULTS.read_text())
        for place, contender in enumerate(record["landscapes"][0]["contenders"]):
            found = [each["contenders"][place]["median"] for each in record["landscapes"]]
            figures = [f"{100 * median[19]:.1f}" for median in found]
            assert f"| {contender['name']} | {' | '.join(figures)} |" in page


class TestPeersResults:
    """What --peers found: docs/lab-notes.md."""

    RECORD: ClassVar[dict[str, Any]] = json.loads(PEERS.read_text())

    def test_all_contenders_searched_all_landscapes(self, program: ModuleType) -> None:
        names = [each.name for each in program.PEERS]
        assert self.RECORD["evaluations"] == [5, 10, 20, 40, 80, 160, 320]
        assert len(self.RECORD["landscapes"]) == 10
        for landscape in self.RECORD["landscapes"]:
            runs = {each["name"]: each["runs"] for each in landscape["contenders"]}
            assert runs == dict.fromkeys(names, 30)
        for suffix in (".md", ".png"):
            assert PEERS.with_suffix(suffix).exists()

    def test_the_page_has_its_summary(self, program: ModuleType) -> None:
        page = (ROOT / "docs" / "lab-notes.md").read_text()
        for which in ("all", "measured"):
            record = self.RECORD["summary"][which]
            assert program.summary_table(record, self.RECORD["evaluations"]) in page

    def test_auto_is_below_both_strategies_after_any_number_of_evaluations(self) -> None:
        """And its worst median after 80 is at most 20 %."""
        for which in ("all", "measured"):
            of = {each["contender"]: each for each in self.RECORD["summary"][which]}
            auto = of.pop("auto")
            strategies = [each for name, each in of.items() if name.startswith("kernel tuner")]
            assert len(strategies) == 2
            assert auto["worst"] <= 0.2
            for each in strategies:
                pairs = zip(auto["geometric_mean"], each["geometric_mean"], strict=True)
                assert all(ours < theirs or ours == theirs == 0.001 for ours, theirs in pairs)


def run(*arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return programs.run([SCRIPT, *arguments], cwd=folder)


@pytest.mark.slow("make test proves a sample of it")
def test_the_data_of_the_picture_is_what_the_program_makes_today(tmp_path: Path) -> None:
    """Of the two quick contenders; the others take half an hour: make docs-output."""
    quick = ("random", "exhaustive")
    options = [word for name in quick for word in ("--contender", name)]
    done = run(*options, "--out", tmp_path / "made", folder=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    made, kept = (json.loads(path.read_text()) for path in (tmp_path / "made.json", RESULTS))
    for new, old in zip(made["landscapes"], kept["landscapes"], strict=True):
        medians = {each["name"]: each["median"] for each in old["contenders"]}
        assert {each["name"]: each["median"] for each in new["contenders"]} == {
            name: medians[name] for name in quick
        }


class TestProgram:
    @pytest.fixture
    def tiny(self, tmp_path: Path) -> Path:
        """Six points, the third the best, the last a seed, one failing."""
        made = Landscape(
            name="tiny", source="measured", unit="us",
            points=tuple({"x": x, "y": y} for x in (1, 2, 3) for y in (1, 2)),
            times=(3.0, None, 2.0, 5.0, 4.0, 2.5), seeds=(5,),
        )  # fmt: skip
        path = tmp_path / "tiny.json"
        path.write_text(dump(made))
        return path

    def test_it_writes_figures_tables_and_a_picture(self, tiny: Path, tmp_path: Path) -> None:
        names = ("auto", "auto, cold", "random", "exhaustive")
        chosen = [word for name in names for word in ("--contender", name)]
        out = tmp_path / "new" / "found"
        done = run(tiny, "--seeds", "2", "--jobs", "2", *chosen, "--out", out, folder=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        record = json.loads(out.with_suffix(".json").read_text())
        (landscape,) = record["landscapes"]
        assert (landscape["name"], landscape["points"], landscape["failing"]) == ("tiny", 6, 1)
        curves = {each["name"]: each for each in landscape["contenders"]}
        assert tuple(curves) == names
        assert [curves[name]["runs"] for name in names] == [2, 2, 2, 1]
        assert curves["exhaustive"]["median"] == [0.5, 0.5] + [0.0] * 78
        assert curves["exhaustive"]["low"] == curves["exhaustive"]["high"]
        assert curves["auto"]["median"][0] == 0.25  # the seed
        text = out.with_suffix(".md").read_text()
        exhaustive = " | ".join(["0.0 [0.0, 0.0]"] * 5)
        assert f"| exhaustive | {exhaustive} |" in text
        assert "## tiny: measured, 6 points, 1 failing, 1 seeds" in text
        assert "It falls short nowhere." in text
        assert f"| exhaustive | {exhaustive} |" in done.stdout
        picture = out.with_suffix(".png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", picture[16:24])
        assert min(width, height) > 400

    def test_a_panel_has_eight_lines_at_most_and_its_whole_title(
        self, tmp_path: Path, program: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        figures: list[Any] = []
        monkeypatch.setattr(
            "flashgen.report.charts.save", lambda figure, *_: figures.append(figure)
        )
        names, regrets = program.names(), (0.5, 0.0)
        shown = [name for name in names if "kernel tuner" not in name]
        found = [
            program.Curve(contender=name, runs=1, median=regrets, low=regrets, high=regrets)
            for name in shown
        ]
        title = "nvidia_a100_sxm4_80gb bwd_dkv_bf16_d128_causal_window seq 4096: ESTIMATED, 276 points, 78 failing, 12 seeds"
        program.draw([(title, found)] * 2, names, (2,), tmp_path / "picture.png")
        figure = figures[0]
        figure.draw_without_rendering()
        for axes in figure.axes:
            assert len(axes.lines) == min(len(shown), 8)
            box = axes.title.get_window_extent()
            assert box.x0 >= 0
            assert box.x1 <= figure.bbox.x1
        looks = {(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}
        assert len(looks) == len(figure.axes[0].lines)

    def test_a_landscape_without_seeds_has_no_warm_contender(
        self, tiny: Path, tmp_path: Path, program: ModuleType
    ) -> None:
        (landscape,) = read(tiny)
        names = ("auto", "auto, cold", "tpe, warm", "exhaustive")
        ((_, found),) = searched(program, [replace(landscape, seeds=())], names, seeds=1)
        assert [curve.contender for curve in found] == ["auto", "exhaustive"]

    def test_jobs_change_nothing(self, tiny: Path, program: ModuleType) -> None:
        contenders = program.CONTENDERS[:1]
        one, two = (list(program.curves(read(tiny), contenders, 3, jobs)) for jobs in (1, 2))
        assert one == two

    @pytest.mark.parametrize(
        ("arguments", "code", "sentence"),
        [
            (["none.json"], 2, r"none\.json: there is no such file of a landscape"),
            (["damaged.json"], 1, r"damaged\.json must be JSON, gzipped or not: .*"),
        ],
    )
    def test_bad_input_is_one_sentence_and_writes_nothing(
        self, arguments: list[str], code: int, sentence: str, tmp_path: Path
    ) -> None:
        (tmp_path / "damaged.json").write_text("{")
        before = sorted(tmp_path.iterdir())
        done = run(*arguments, "--seeds", "1", "--jobs", "1", folder=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (code, 1)
        assert re.search(f"{sentence}$", done.stderr.strip())
        assert sorted(tmp_path.iterdir()) == before
