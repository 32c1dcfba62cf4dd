"""evaluate/workers/: how long a child may take, how much it may hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashgen.evaluate.workers import pool, usage
from flashgen.evaluate.workers.answers import Task
from flashgen.evaluate.workers.pool import FIRST_TASK_S, PATIENCE, TaskLimits


def task(function: str = "module:compile", limit_s: float = 60.0) -> Task:
    return Task(function=function, payload={}, limit_s=limit_s)


def test_a_limit_is_its_base_where_the_machine_is_fast() -> None:
    made = TaskLimits()
    assert made.seconds(task(), first=False) == 60.0
    made.learn(task(), 60.0 / PATIENCE, first=False)
    assert made.seconds(task(), first=False) == pytest.approx(60.0)


def test_it_grows_to_so_many_times_the_slowest_success_and_does_not_shrink() -> None:
    made = TaskLimits()
    for seconds in (30.0, 50.0, 1.0, 40.0):
        made.learn(task(), seconds, first=False)
    assert made.seconds(task(), first=False) == pytest.approx(50.0 * PATIENCE)
    assert made.seconds(task("module:check"), first=False) == 60.0


def test_a_child_s_first_task_gets_more_and_says_no_more_for_that() -> None:
    made = TaskLimits()
    assert made.seconds(task(), first=True) == 60.0 + FIRST_TASK_S
    made.learn(task(), (60.0 + FIRST_TASK_S) / PATIENCE, first=True)
    assert made.seconds(task(), first=False) == pytest.approx(60.0)


def test_a_round_of_many_says_of_a_round_of_few_what_it_says_of_itself() -> None:
    made = TaskLimits()
    made.learn(task(limit_s=200.0), 100.0, first=False)  # half of what it was allowed
    assert made.seconds(task(limit_s=60.0), first=False) == pytest.approx(PATIENCE * 30.0)


def test_growth_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    made = TaskLimits()
    with caplog.at_level("INFO", logger=pool.logger.name):
        for seconds in (1.0, 40.0, 39.0):
            made.learn(task(), seconds, first=False)
    assert [record.getMessage() for record in caplog.records] == [
        "module:compile took 40 s: its limit grows"
    ]


def test_children_share_half_of_the_machine_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "machine", lambda: 256 << 30)
    assert usage.share(1) == 128 << 30
    assert usage.share(16) == 8 << 30
    assert usage.share(192) == usage.LEAST_BYTES


def test_the_machine_s_memory_is_what_its_cgroups_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, mounted = tmp_path / "cgroup", tmp_path / "sys"
    monkeypatch.setattr(usage, "_CGROUPS", mounted)
    for folder, file, limit in (
        ("job", "memory.max", "8000"),
        ("job/step", "memory.max", "max"),
        ("memory", "memory.limit_in_bytes", "9000"),
    ):
        (mounted / folder).mkdir(parents=True, exist_ok=True)
        (mounted / folder / file).write_text(limit + "\n")
    groups.write_text("3:cpuset:/\n4:memory:/not/mounted/here\n0::/job/step\n")
    assert sorted(usage._cgroup_limits(groups)) == [8000, 9000]
    assert list(usage._cgroup_limits(tmp_path / "nowhere")) == []
    monkeypatch.setattr(usage, "_cgroup_limits", lambda: iter([1 << 30]))
    assert usage.machine() == 1 << 30
    monkeypatch.setattr(usage, "_cgroup_limits", lambda: iter([1 << 62]))
    assert 1 << 28 < usage.machine() < 1 << 62


def test_what_a_process_started_counts_as_its_own() -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    held = "held = b'x' * (64 << 20); print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program, held], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert usage.resident(process.pid) > 64 << 20
        process.communicate(b"\n")
    assert usage.resident(process.pid) == 0
    assert usage.resident(os.getpid()) > 1 << 20
