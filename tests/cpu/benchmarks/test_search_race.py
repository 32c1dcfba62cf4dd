"""benchmarks/search_race.py: the same start for all, and searches that are done are not repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import search_race
from benchmarks.recorded import Landscape
from benchmarks.search_runs import Runs

TINY = Landscape(
    name="tiny",
    source="made",
    unit="s",
    points=tuple({"x": x, "y": y} for x in range(6) for y in range(5)),
    times=tuple(None if x == y else 1.0 + x + 2.0 * y for x in range(6) for y in range(5)),
)


def test_all_begin_with_the_same_points(tmp_path: Path) -> None:
    firsts = [
        [
            regrets[: search_race.SEEDS]
            for regrets in search_race.regrets_of(TINY, contender, 2, Runs(None))
        ]
        for contender in search_race.CONTENDERS
        if contender.name != "gp, warm"
    ]
    assert len(firsts) == 3
    assert firsts[0] == firsts[1] == firsts[2]
    assert firsts[0][0] != firsts[0][1]


def test_what_is_done_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, contender = tmp_path / "race.runs.jsonl", search_race.CONTENDERS[0]
    done = search_race.regrets_of(TINY, contender, 3, Runs(path))
    monkeypatch.setattr(search_race.search_efficiency, "replay", None)
    assert search_race.regrets_of(TINY, contender, 3, Runs(path)) == done


def test_landscapes_keep_their_own_seeds() -> None:
    assert search_race.started(TINY, 3).seeds == search_race.started(TINY, 3).seeds
    warm = search_race.started(TINY, 1)
    assert search_race.started(warm, 2) == warm
