"""Child processes: one failed answer for one bad task, nobody else blamed, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from flashgen.errors import ToolchainError, ToolKilled
from flashgen.evaluate.workers import child, pool
from flashgen.evaluate.workers.answers import Answer, Died, Done, Raised, Task, TimedOut, killed
from flashgen.evaluate.workers.pool import Turns, Workers
from tests.hung import end_what_hangs

ROOT = Path(__file__).resolve().parents[3]
WORKER = "flashgen.evaluate.workers.child"
PATIENT_S = 200.0
"""Of what ends by itself: a busy machine takes its time."""


def task(function: str, limit_s: float = PATIENT_S, **payload: Any) -> Task:
    return Task(function=f"tests.worker_faults:{function}", payload=payload, limit_s=limit_s)


def answer(workers: Workers, function: str, limit_s: float = PATIENT_S, **payload: Any) -> Answer:
    return workers.submit(task(function, limit_s, **payload)).result(timeout=2 * PATIENT_S)


def running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def eventually(condition: Callable[[], bool], limit_s: float = PATIENT_S) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


MUCH = 1000.0


@pytest.fixture(autouse=True)
def _what_computes_may_be_much_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "HANGS", MUCH)


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(1) as made:
        yield made


def test_a_child_answers_and_stays_warm(workers: Workers) -> None:
    first = answer(workers, "echo", number=1)
    second = answer(workers, "echo", number=2)
    assert isinstance(first, Done)
    assert isinstance(second, Done)
    assert (first.value["number"], second.value["number"]) == (1, 2)
    assert first.value["pid"] == second.value["pid"] != os.getpid()


def test_no_child_is_started_before_the_first_task() -> None:
    with Workers(4) as workers:
        assert not workers._children
        answer(workers, "echo")
        assert len(workers._children) == 1


def test_what_a_task_prints_is_no_answer(workers: Workers) -> None:
    got = answer(workers, "chatter", number=7)
    assert isinstance(got, Done)
    assert got.value["number"] == 7


def test_an_exception_is_an_answer_and_the_child_lives_on(workers: Workers) -> None:
    before = answer(workers, "echo")
    got = answer(workers, "refuse")
    assert isinstance(got, Raised)
    assert (got.kind, got.message, got.ended) == ("ValueError", "tile too odd", False)
    assert got.where.startswith("worker_faults.py:")
    assert answer(workers, "echo") == before


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("segfault", "SIGSEGV"),
        ("abort", "SIGABRT: LLVM ERROR: Broken invariant"),
        ("leave", "exit code 3"),
        ("garbage", "garbage"),
        ("forge", "garbage"),
    ],
)
def test_a_death_is_one_failed_answer(workers: Workers, fault: str, words: str) -> None:
    before = answer(workers, "echo")
    got = answer(workers, fault)
    after = answer(workers, "echo")
    assert isinstance(got, Died)
    assert words in got.detail
    assert isinstance(before, Done)
    assert isinstance(after, Done)
    assert before.value["pid"] != after.value["pid"]
    assert not running(before.value["pid"])


def test_an_answer_too_many_reaches_no_other_task(workers: Workers) -> None:
    assert answer(workers, "extra_answer") == Done({"first": True})
    got = answer(workers, "echo", number=3)
    assert isinstance(got, Done)
    assert got.value["number"] == 3


def test_a_hang_is_killed_at_its_limit_with_all_it_started(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pids"
    end_what_hangs(monkeypatch, file)
    answer(workers, "echo")
    got = answer(workers, "hang", limit_s=2.0, file=str(file))
    assert got == TimedOut(2.0 * MUCH, hung=True)
    child, grandchild = map(int, file.read_text().split())
    assert not running(child)
    assert eventually(lambda: not running(grandchild))
    assert isinstance(answer(workers, "echo"), Done)


def test_a_hang_ends_by_the_clock(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "HANGS", 2.0)
    answer(workers, "echo")
    assert answer(workers, "nap", limit_s=0.1, seconds=600.0) == TimedOut(0.2, hung=True)


def test_a_limit_counts_what_the_child_computes_and_not_what_goes_by(workers: Workers) -> None:
    """Stopped for longer than its limit, as a child is on a machine with too much to do."""
    first = answer(workers, "echo")
    assert isinstance(first, Done)
    slow = workers.submit(task("spin", limit_s=1.5, seconds=0.3))
    os.kill(first.value["pid"], signal.SIGSTOP)
    time.sleep(2.0)
    os.kill(first.value["pid"], signal.SIGCONT)
    assert isinstance(slow.result(timeout=PATIENT_S), Done)
    assert answer(workers, "spin", limit_s=0.5, seconds=60.0) == TimedOut(0.5)


def test_what_ran_out_of_time_is_tried_once_more_while_nothing_else_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_what_hangs(monkeypatch, tmp_path / "hung")
    folder, turns = str(tmp_path), Turns()
    with Workers(1, turns=turns) as one, Workers(2, turns=turns) as others:

        def beside() -> Future[Answer]:
            return others.submit(task("busy", folder=folder, seconds=0.1))

        busy = [beside() for _ in range(3)]
        assert eventually(lambda: any(tmp_path.glob("busy*")))
        late = one.submit(task("hang_once", folder=folder))
        while not late.done():  # others always run, or wait for it
            busy.append(beside())
            busy[-3].result(timeout=PATIENT_S)
        assert late.result() == Done({"beside": 0})
        assert all(future.result(timeout=PATIENT_S) == Done({}) for future in busy)
        never = one.submit(task("hang", file=str(tmp_path / "hung"))).result(timeout=PATIENT_S)
    assert isinstance(never, TimedOut)
    assert never.hung
    assert (
        len((tmp_path / "hung").read_text().splitlines()) == 3
    )  # the first task, and this one twice


def test_what_was_killed_from_outside_is_tried_once_more_while_nothing_else_runs(
    tmp_path: Path,
) -> None:
    folder, turns = str(tmp_path), Turns()
    with Workers(1, turns=turns) as one, Workers(1, turns=turns) as others:
        busy = [others.submit(task("busy", folder=folder, seconds=0.3)) for _ in range(3)]
        assert eventually(lambda: any(tmp_path.glob("busy*")))
        again = one.submit(task("killed_once", folder=folder)).result(timeout=PATIENT_S)
        assert again == Done({"beside": 0})
        assert all(future.result(timeout=PATIENT_S) == Done({}) for future in busy)
        twice = answer(one, "killed")
        blamed = [answer(one, fault) for fault in ("segfault", "abort", "leave", "garbage")]
        tool = answer(one, "tool_killed")
    assert isinstance(twice, Died)
    assert "SIGKILL" in twice.detail
    assert killed(twice)
    assert killed(tool)
    assert not any(map(killed, blamed))


def test_a_child_killed_as_it_starts_is_replaced_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[int] = []
    wait = child.Child.wait_until_ready

    def shot(self: child.Child) -> None:
        waited.append(self._process.pid)
        if len(waited) in deadly:
            os.kill(self._process.pid, signal.SIGKILL)
            assert eventually(lambda: not running(self._process.pid))
            self._arrived = SimpleQueue()
            self._arrived.put(b"")
        wait(self)

    monkeypatch.setattr(child.Child, "wait_until_ready", shot)
    deadly = {1}
    with Workers(1) as workers:
        assert isinstance(answer(workers, "echo"), Done)
    deadly = {3, 4}
    with Workers(1) as workers, pytest.raises(ToolKilled, match="SIGKILL"):
        answer(workers, "echo")
    assert len(waited) == len(set(waited)) == 4


def test_neighbours_of_a_crash_are_not_blamed() -> None:
    with Workers(2) as workers:
        names = ["echo", "segfault", "echo", "abort", "echo", "garbage", "spoil", "echo", "echo"]
        futures = [workers.submit(task(name, number=i)) for i, name in enumerate(names)]
        for i, (name, future) in enumerate(zip(names, futures, strict=True)):
            got = future.result(timeout=PATIENT_S)
            if name == "echo":
                assert isinstance(got, Done)
                assert got.value["number"] == i
            else:
                assert isinstance(got, Raised if name == "spoil" else Died)


@pytest.mark.parametrize("fault", ["leak", "leak_elsewhere"])
def test_a_leak_is_killed_at_the_limit_with_all_it_started(fault: str) -> None:
    with Workers(1, memory_bytes=256 << 20) as workers:
        first = answer(workers, "echo")
        got = answer(workers, fault)
        after = answer(workers, "echo")
    assert isinstance(got, Died)
    assert "GiB of memory, over its limit of 0.25" in got.detail
    assert isinstance(first, Done)
    assert isinstance(after, Done)
    assert first.value["pid"] != after.value["pid"]


def test_what_tasks_leave_behind_is_not_laid_to_the_last_of_them() -> None:
    """Ten that keep 40 MiB each hold 400, of 256: each is innocent, and gets its answer."""
    with Workers(1, memory_bytes=256 << 20) as workers:
        answers = [answer(workers, "grow", mib=40) for _ in range(10)]
    assert all(isinstance(got, Done) for got in answers), answers
    pids = [got.value["pid"] for got in answers if isinstance(got, Done)]
    assert 2 <= len(set(pids)) <= 9  # replaced when it has grown, and only then


@pytest.mark.parametrize("error", ["host", "fork", "torch", "driver"])
def test_for_want_of_memory_a_fresh_child_is_asked_before_the_task_is_blamed(
    error: str, tmp_path: Path
) -> None:
    file = tmp_path / "failures"
    with Workers(1) as workers:
        first = answer(workers, "grow", mib=1)
        innocent = answer(workers, "allocate", error=error)  # fails where the first has been
        guilty = answer(workers, "out_of_memory", error=error, file=str(file))
        after = answer(workers, "echo")
    with Workers(1) as workers:
        assert answer(workers, "out_of_memory", error=error, file=str(file)) == guilty
    pids = [got.value["pid"] for got in (first, innocent, after) if isinstance(got, Done)]
    assert len(set(pids)) == 3
    assert isinstance(guilty, Raised)
    assert (guilty.kind, guilty.ended) == ("OutOfMemoryError", True)
    assert file.read_text().count("failed") == 2 + 1


def test_a_signal_to_all_processes_of_a_job_is_left_to_the_parent(workers: Workers) -> None:
    first = answer(workers, "echo")
    assert isinstance(first, Done)
    slow = workers.submit(task("nap", seconds=0.5))
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(first.value["pid"], number)
    got = slow.result(timeout=PATIENT_S)
    assert isinstance(got, Done)
    assert got.value["pid"] == first.value["pid"]


def test_a_limit_grows_where_tasks_of_its_kind_are_slow_and_for_no_other(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashgen.evaluate.workers.pool.FIRST_TASK_S", 20.0)
    assert isinstance(answer(workers, "echo", 1.0), Done)  # takes the first task's grace
    assert isinstance(answer(workers, "spin", 0.5, seconds=0.3), Done)
    assert isinstance(answer(workers, "spin", 0.5, seconds=0.6), Done)
    for _ in range(2):  # what failed says nothing of how long to wait
        assert answer(workers, "leave_never", 0.3) == TimedOut(0.3)
        assert isinstance(answer(workers, "echo", 1.0), Done)


def test_the_first_task_of_a_child_has_time_to_import(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashgen.evaluate.workers.pool.FIRST_TASK_S", 5.0)
    assert isinstance(answer(workers, "spin", 0.2, seconds=0.4), Done)
    assert answer(workers, "spin", 0.2, seconds=20.0) == TimedOut(0.2)


def test_a_child_killed_between_tasks_is_replaced_without_blame(workers: Workers) -> None:
    first = answer(workers, "echo")
    assert isinstance(first, Done)
    os.kill(first.value["pid"], signal.SIGKILL)
    assert eventually(lambda: not running(first.value["pid"]))
    second = answer(workers, "echo")
    assert isinstance(second, Done)
    assert second.value["pid"] != first.value["pid"]


def test_a_child_that_ended_takes_no_task_though_its_pipe_has_not_said_so(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(SimpleQueue[bytes]):
        """A pipe whose reading thread has not run since."""

        def empty(self) -> bool:
            return True

    monkeypatch.setattr(child.queue, "SimpleQueue", Late)
    first = answer(workers, "echo")
    assert isinstance(first, Done)
    os.kill(first.value["pid"], signal.SIGKILL)
    assert eventually(lambda: not running(first.value["pid"]))
    assert isinstance(answer(workers, "echo"), Done)


def test_a_task_that_spoiled_its_process_gets_its_answer_and_a_fresh_one_follows(
    workers: Workers,
) -> None:
    before = answer(workers, "echo")
    got = answer(workers, "spoil")
    assert isinstance(got, Raised)
    assert (got.kind, got.message, got.ended) == (
        "RuntimeError",
        "an illegal memory access was encountered",
        True,
    )
    after = answer(workers, "echo")
    assert isinstance(before, Done)
    assert isinstance(after, Done)
    assert before.value["pid"] != after.value["pid"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [("disk_full", "No space left"), ("missing_package", "a_package_nobody_has")],
)
def test_a_fault_of_the_machine_is_raised_not_blamed(
    workers: Workers, fault: str, words: str
) -> None:
    with pytest.raises(ToolchainError, match=words):
        answer(workers, fault)
    assert isinstance(answer(workers, "echo"), Done)


@pytest.mark.parametrize("program", ["/bin/false", "/nonexistent/python"])
def test_children_that_cannot_start_are_an_error_of_the_machine(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", program)
        for _ in range(2):
            with pytest.raises(ToolchainError, match="cannot be started"):
                answer(workers, "echo")
    assert isinstance(answer(workers, "echo"), Done)


def _starts_late(folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Children wait before they start, without computing, as on a machine with too much to do."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nsleep {seconds}\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


def test_a_child_that_starts_late_on_a_busy_machine_serves(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "START_LIMIT_S", 1.5)
    _starts_late(tmp_path, monkeypatch, 2.0)
    assert isinstance(answer(workers, "echo"), Done)


def test_a_child_that_never_starts_is_not_said_to_have_run_out_of_memory(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "START_HANGS_S", 0.5)
    _starts_late(tmp_path, monkeypatch, 600.0)
    with pytest.raises(ToolchainError, match=r"cannot be started: .* not ready after 0\.5 s,"):
        answer(workers, "echo")


def test_environment_is_added_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TO_REMOVE", "1")
    with Workers(1, env={"TO_REMOVE": None, "TO_ADD": "2"}) as workers:
        got = answer(workers, "environment", names=["TO_REMOVE", "TO_ADD"])
    assert got == Done({"TO_REMOVE": None, "TO_ADD": "2"})


def test_close_ends_children_at_work_and_drops_the_queue(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    workers = Workers(1)
    busy = workers.submit(task("hang", 600.0, file=str(file)))
    queued = workers.submit(task("echo"))
    assert eventually(lambda: file.exists() and " " in file.read_text())
    workers.close()
    workers.close()
    assert isinstance(busy.result(timeout=PATIENT_S), Died)  # long before its limit of 600 s
    assert queued.cancelled()
    child, grandchild = map(int, file.read_text().split())
    assert not Path(f"/proc/{child}").exists(), "the child is a zombie"
    assert eventually(lambda: not running(grandchild))
    assert not any(thread.is_alive() for thread in workers._threads)
    with pytest.raises(RuntimeError, match="after close"):
        workers.submit(task("echo"))


def test_pipes_do_not_leak() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with Workers(1) as workers:
        answer(workers, "echo")
        before = descriptors()
        for _ in range(3):
            answer(workers, "leave")
            answer(workers, "echo")
        assert descriptors() == before


PARENT = """
import sys, time
from flashgen.evaluate.workers.answers import Task
from flashgen.evaluate.workers.pool import Workers
workers = Workers(1)
workers.submit(Task(function="tests.worker_faults:hang", payload={"file": sys.argv[1]}, limit_s=600.0))
print("started", flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    pass
"""


def start_parent(file: Path) -> tuple[subprocess.Popen[str], int]:
    """A process with a child at work, and the child's pid."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(file)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert eventually(lambda: file.exists() and " " in file.read_text())
    return parent, int(file.read_text().split()[0])


def test_children_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    parent, child = start_parent(tmp_path / "pids")
    grandchild = int((tmp_path / "pids").read_text().split()[1])
    assert running(child)
    parent.kill()
    parent.communicate(timeout=PATIENT_S)
    assert eventually(lambda: not running(child))
    # What the child itself had started is not covered by a kill -9 of its parent.
    os.kill(grandchild, signal.SIGKILL)


def test_ctrl_c_in_the_terminal_prints_no_traceback_of_a_child(tmp_path: Path) -> None:
    parent, child = start_parent(tmp_path / "pids")
    os.killpg(parent.pid, signal.SIGINT)  # what a terminal does: the whole foreground group
    printed, _ = parent.communicate(timeout=PATIENT_S)
    assert printed == "started\n"
    assert parent.returncode == 0
    assert eventually(lambda: not running(child))
    os.kill(int((tmp_path / "pids").read_text().split()[1]), signal.SIGKILL)


def child_of(parent: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", WORKER, str(parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )


def test_an_idle_child_ends_at_the_end_of_its_requests() -> None:
    with child_of(os.getpid()) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert b"ready" in child.stdout.readline()
        child.stdin.close()
        assert child.wait(timeout=PATIENT_S) == 0


def test_a_child_started_by_a_parent_that_is_gone_ends_at_once() -> None:
    with child_of(1) as child:
        assert child.wait(timeout=PATIENT_S) == 0


def test_the_import_path_is_handed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    path = pool.child_environment({})["PYTHONPATH"].split(os.pathsep)
    assert path[0] == str(tmp_path)
    assert "" not in path
