"""benchmarks/campaign_clock.py: its compilers, its models of steps, and the table of docs/lab-notes.md."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from benchmarks import campaign_clock, first_checks
from benchmarks.campaign_clock import (
    COMPILE_HOPPER_S,
    COMPILE_S,
    START_S,
    Machine,
    Searches,
    Unit,
    Walk,
    simulated,
    table,
)
from benchmarks.campaign_steps import STEPS
from flashgen.spec.gpu import TARGETS

ROOT = Path(__file__).resolve().parents[3]


@cache
def pairs() -> list[first_checks.Pair]:
    """The kernels of the first checks that are compiled as fast as most."""
    return [p for p in first_checks.kernels(campaign_clock.GPU) if p[1].schedule != "hopper"]


def machine(workers: int, ahead: int) -> Machine:
    made = Machine(workers, pairs()[:ahead])
    made.begin_run()
    return made


def test_compilers_work_ahead_and_take_what_is_needed_first() -> None:
    one = machine(2, ahead=6)
    assert one.need(pairs()[:1]) == START_S + COMPILE_S
    one.now = START_S + 1.6 * COMPILE_S  # both are busy with the second two
    assert one.need(pairs()[5:6]) == START_S + 3 * COMPILE_S
    one.now = 1000.0
    assert one.need(pairs()[:6]) == 1000.0


def test_a_new_run_keeps_what_was_compiled_and_loses_the_rest() -> None:
    one = machine(1, ahead=3)
    one.need(pairs()[:3])
    one.now = START_S + 1.5 * COMPILE_S
    one.begin_run()
    assert one.need(pairs()[:1]) == one.now
    assert one.need(pairs()[:2]) == one.now + START_S + COMPILE_S


def test_hopper_kernels_take_longer_to_compile() -> None:
    (first, *_) = first_checks.kernels(campaign_clock.GPU)
    one = Machine(1, [first])
    one.begin_run()
    assert one.need([first]) == START_S + COMPILE_HOPPER_S


def test_a_unit_that_does_not_fit_is_not_recorded_and_comes_again() -> None:
    one, walk = machine(1, ahead=0), Walk([Unit(seconds=10.0)] * 3)
    assert not walk.turn(one, 25.0, 0.0)
    assert (walk.times, one.now) == ([10.0, 20.0], 25.0)
    assert walk.turn(one, 40.0, 0.0)
    assert walk.times == [10.0, 20.0, 35.0]


def test_a_bench_begins_no_case_that_would_take_too_long() -> None:
    one, walk = machine(1, ahead=0), Walk([Unit(seconds=10.0)] * 3, whole=True)
    assert not walk.turn(one, 25.0, 0.0)
    assert (walk.times, one.now) == ([10.0, 20.0], 20.0)


def test_searches_share_the_time_and_each_is_chosen() -> None:
    (tune,) = (step for step in STEPS if step.name == "tune")
    model = campaign_clock.model_of(tune)
    assert isinstance(model, Searches)
    assert model.total == 160
    one = Machine(16, campaign_clock.ahead())
    one.begin_run()
    assert not model.turn(one, 100.0, 400.0)
    assert model.chosen == []
    one.now = 1000.0
    assert not model.turn(one, 1019.0, 1000.0)  # its time is over, and the final round takes longer
    assert model.chosen == []
    one.now = 100.0
    assert model.turn(one, 800.0, one.now + 250.0)
    assert len(model.chosen) == 4
    assert 40 < len(model.times) < 160


@pytest.mark.slow("ten campaigns are simulated")
def test_less_compilers_never_reach_more() -> None:
    for step in STEPS[:5]:
        many, few = (simulated(workers)[step.name].times for workers in (16, 2))
        assert all(a <= b for a, b in zip(many, few, strict=False))


def test_the_first_ten_minutes_answer_what_matters() -> None:
    """Correct in three minutes, head dim 128 of the ladder in ten, all searches in twenty."""
    for workers in campaign_clock.WORKERS:
        found = simulated(workers)
        assert found["first_checks"].times[-1] <= 180
        assert len(found["first_checks"].times) == found["first_checks"].total
        assert found["ladder_d128"].times[1] <= 600
        assert found["ladder_d64"].times[1] <= 1200
        tune = found["tune"]
        assert isinstance(tune, Searches)
        assert len(tune.chosen) == 4
        assert tune.chosen[-1] <= 1200
        assert found["forward_tuned"].times[-1] <= 1620


def test_the_table_is_that_of_the_page() -> None:
    page = (ROOT / "docs" / "lab-notes.md").read_text()
    assert "\n".join(table()) + "\n" in page, "python benchmarks/campaign_clock.py prints it"


@pytest.mark.slow("collects the GPU tests in a process of its own")
def test_the_counts_of_tests_are_those_of_the_files() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", "tests/gpu"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    lines = [line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line]
    found = {Path(file).name: lines.count(file) for file in dict.fromkeys(lines)}
    assert found == campaign_clock.TESTS


OTHERS = pytest.mark.slow("make test has the RTX 3090")


@pytest.mark.parametrize(
    "slug",
    [
        "nvidia_geforce_rtx_3090",
        pytest.param("nvidia_l40s", marks=OTHERS),
        pytest.param("nvidia_h200", marks=OTHERS),
    ],
)
def test_the_twenty_most_used_specs_are_measured_in_ten_minutes(slug: str) -> None:
    """On a GPU without a table, with two compile workers too."""
    _, _, *rows = campaign_clock.from_tables(TARGETS[slug], (5, 10))
    for row in rows:
        after = [int(cell) for cell in row.strip("|").split("|")]
        assert after[2] >= 20 > after[1]
