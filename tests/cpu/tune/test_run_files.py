"""tune/run_files.py: an unfinished run is resumed by the request that began it, and by no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashgen.table.table import Table
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
