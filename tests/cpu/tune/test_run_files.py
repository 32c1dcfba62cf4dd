"""tune/run_files.py, tune/alone.py: a run is resumed by the request that began it, and is alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashgen.errors import FlashgenError
from flashgen.table.table import Table
from flashgen.tune.alone import alone_in
from flashgen.tune.run_files import Session
from tests.tables import H200, made_run, made_table, named

REQUEST: dict[str, Any] = {"specs": ["fwd_bf16_d128_causal"], "trials": 40}


def begin(path: Path, request: dict[str, Any], run: str, table: Table) -> Session:
    notices: list[str] = []
    session = Session.begin(
        path, request=request, run=made_run(run), table=table, notice=notices.append
    )
    assert not notices
    return session


def test_the_same_request_resumes(tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    assert not begin(path, REQUEST, "a", made_table()).resumed
    again = begin(path, dict(reversed(REQUEST.items())), "b", Table(gpu=H200))
    assert again.resumed
    assert again.run.id == named("a")
    assert len(again.found(H200).entries) == 1


def test_another_request_starts_anew_and_takes_the_place(tmp_path: Path) -> None:
    path, other = tmp_path / "session.json", REQUEST | {"trials": 41}
    begin(path, REQUEST, "a", made_table())
    started = begin(path, other, "b", Table(gpu=H200))
    assert not started.resumed
    assert started.run.id == named("b")
    assert started.found(H200).entries == ()
    assert begin(path, other, "c", made_table()).run.id == named("b")
    assert not begin(path, REQUEST, "d", made_table()).resumed


def test_a_second_tuner_in_the_folder_says_so_and_stops(tmp_path: Path) -> None:
    with alone_in(tmp_path):
        said = rf"another flashgen tunes in .* \(process {os.getpid()}\): wait .* --out"
        with pytest.raises(FlashgenError, match=said), alone_in(tmp_path):
            pass
    with alone_in(tmp_path):
        pass


def test_a_killed_tuner_leaves_no_lock(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, pathlib; from flashgen.tune.alone import alone_in\n"
        "with alone_in(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, tmp_path], cwd=Path(__file__).parents[3], check=False
    )
    assert ended.returncode == -9
    with alone_in(tmp_path):
        pass
