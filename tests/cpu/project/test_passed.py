"""pytest --passed FILE: a run that is cut off repeats only what has not passed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

TESTS = """
import os, signal
import pytest

@pytest.mark.parametrize("n", range(5))
def test_number(n):
    if n == 1:
        assert "MENDED" in os.environ
    if n == 2:
        pytest.skip("always")
    if n == 3 and "MENDED" not in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
"""


LOSING = """
import os, signal, time
import pytest

@pytest.mark.parametrize("n", range(12))
def test_number(n):
    if n == 4:
        with open("started", "a") as file:
            print(n, file=file)
        time.sleep(0.5)  # others pass meanwhile, which a new worker must not notice
        os.kill(os.getpid(), signal.SIGKILL)
    if n == 5:
        assert n == "wrong"
    if n > 5:
        time.sleep(1)  # some are left when the new worker has started
"""


def run(folder: Path, *options: str, **env: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider",
         "--passed", "passed.txt", *options, "test_it.py"],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)} | env, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_what_passed_is_left_out_after_a_kill(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    assert run(tmp_path)[0] == -9
    assert (tmp_path / "passed.txt").read_text() == "test_it.py::test_number[0]\n"
    code, said = run(tmp_path, MENDED="1")
    assert (code, "3 passed, 1 skipped, 1 deselected" in said) == (0, True), said
    assert "passed in earlier runs: 1" in said


def test_a_run_in_which_all_have_passed_before_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_one(): pass\n")
    (tmp_path / "passed.txt").write_text("test_it.py::test_one\n")
    assert run(tmp_path)[0] == pytest.ExitCode.OK
    (tmp_path / "test_it.py").write_text("")
    (tmp_path / "passed.txt").unlink()
    assert run(tmp_path)[0] == pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.mark.slow("a run of pytest whose workers die: nine seconds")
def test_a_lost_worker_ends_neither_the_run_nor_another_worker(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(LOSING)
    code, said = run(tmp_path, "-n", "2")
    assert (code, "2 failed, 10 passed" in said) == (1, True), said
    assert (tmp_path / "started").read_text() == "4\n", "it was run once"
    assert len((tmp_path / "passed.txt").read_text().splitlines()) == 10
    failed = (tmp_path / "passed.txt.failed").read_text()
    assert "crashed while running 'test_it.py::test_number[4]'" in failed
    assert "test_it.py::test_number[5] (call)" in failed
    assert "assert 5 == 'wrong'" in failed


def test_a_failure_is_written_before_the_run_ends(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    assert run(tmp_path)[0] == -9
    assert "test_number[1] (call)" in (tmp_path / "passed.txt.failed").read_text()
