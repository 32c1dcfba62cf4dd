"""benchmarks/search_race.py: the same start for all, and searches that are done are not repeated."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from optuna.samplers import CmaEsSampler
from optuna.trial import TrialState

from benchmarks import search_race
from benchmarks.recorded import Landscape, dump, read
from benchmarks.search_race import Runs, curve_of, regrets_of
from flashgen.search import Method
from flashgen.search.points import ListedSpace
from flashgen.search.study import Trials

TINY = Landscape(
    name="tiny",
    source="made",
    unit="s",
    points=tuple({"x": x, "y": y} for x in range(6) for y in range(5)),
    times=tuple(None if x == y else 1.0 + x + 2.0 * y for x in range(6) for y in range(5)),
)


def test_all_begin_with_the_same_points() -> None:
    some = set(search_race.CONTENDERS) - {"gp"}  # it takes seconds
    found = [regrets_of(TINY, name, 2, Runs(None)) for name in some]
    firsts = [[regrets[: search_race.SEEDS] for regrets in of_one] for of_one in found]
    assert all(each == firsts[0] for each in firsts)
    assert firsts[0][0] != firsts[0][1]


@pytest.mark.parametrize("name", ["tpe", "cmaes"])
def test_samplers_hear_of_failures_and_of_what_is_illegal(name: str) -> None:
    """As of pruned trials, or of the worst value."""
    space = ListedSpace(TINY.points[::2])  # every other point is illegal
    trials = Trials(space, Method(sampler=search_race.CONTENDERS[name]))
    trials.begin(0)
    trials.tell(0, 5.0)
    for value in [None, 3.0] * 5:
        number = trials.ask()
        assert number is not None
        trials.tell(number, value)
    told = trials.study.get_trials()
    heard = [
        t.params for t in told if t.value == 5 or (t.state == TrialState.PRUNED and name == "tpe")
    ]
    silent = [
        t for t in told if t.state == TrialState.FAIL or t.user_attrs.get("status") == "illegal"
    ]
    assert len(silent) > 5
    assert all(trial.params in heard for trial in silent)


def test_cmaes_starts_at_the_best_seed() -> None:
    trials = Trials(ListedSpace(TINY.points), Method(sampler=search_race.CONTENDERS["cmaes"]))
    for number, value in ((7, 3.0), (23, 1.0), (4, 2.0)):
        trials.begin(number)
        trials.tell(number, value)
    trials.ask()
    assert isinstance(sampler := trials.study.sampler, CmaEsSampler)
    assert sampler._x0 == trials.study.best_trial.params


def test_what_is_done_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "race.runs.jsonl"
    done = regrets_of(TINY, "auto", 3, Runs(path))
    path.write_text(path.read_text()[:-5])  # the last is cut off
    again = regrets_of(TINY, "auto", 3, Runs(path))
    monkeypatch.setattr(search_race, "replay", None)
    assert regrets_of(TINY, "auto", 3, Runs(path)) == again == done


def test_landscapes_keep_their_own_seeds() -> None:
    assert search_race.started(TINY, 3).seeds == search_race.started(TINY, 3).seeds
    warm = search_race.started(TINY, 1)
    assert search_race.started(warm, 2) == warm


def test_a_summary_has_geometric_means_and_the_worst() -> None:
    medians = ((1.0, 0.4, 0.1, 0.0, 0.0), (0.25, 0.1, 0.1, 0.0, 0.3))
    done = [{"auto": [[median] * 3 for median in each]} for each in medians]
    *_, row = search_race.summary(done)
    assert row == "| auto | 50.0 | 20.0 | 10.0 | 0.1 | 1.7 | 30.0 |"


def test_a_curve_has_the_median_in_its_band() -> None:
    runs = np.linspace(2.0, 0.0, 80)[None] * np.array([[1.0], [2.0], [3.0]])
    curve = curve_of(runs)
    assert curve[0][0] == pytest.approx(2 * runs[0, 4])
    assert all(low <= median <= high for median, low, high in curve)


def test_the_program_writes_a_table_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "tiny.json", tmp_path / "race"
    file.write_text(dump(TINY))
    words = [str(file), "--seeds", "2", "--contender", "random", "--cold", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["search_race.py", *words])
    search_race.main()
    page = (tmp_path / "race.md").read_text()
    assert "tiny: made, 30 points, 5 failing, 0 seeds" in page
    assert page.count("| random |") == 2
    monkeypatch.setattr(search_race, "replay", None)
    search_race.main()
    assert (tmp_path / "race.md").read_text() == page
    monkeypatch.setattr(sys, "argv", ["search_race.py", str(tmp_path / "none.json")])
    with pytest.raises(SystemExit):
        search_race.main()
    assert capsys.readouterr().err.endswith("there is no such file of a landscape\n")


def test_the_made_landscapes_are_there() -> None:
    assert len(list(search_race.LANDSCAPES.glob("made_*.json.gz"))) == 4
    (polygon,) = read(search_race.LANDSCAPES / "made_polygon.json.gz")
    assert (polygon.name, polygon.source, len(polygon.points)) == ("made polygon", "made", 8184)
    assert {each.source for each in search_race.shipped()} == {"measured", "estimated"}
