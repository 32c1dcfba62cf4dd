"""examples/gemm: a kernel of one's own is checked, tuned, and resumed."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flashgen.evaluate.workers import pool
from flashgen.evaluate.workers.answers import Answer, Died, Done, Task
from tests import programs

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "gemm"
POINT = {"ROWS": 128, "COLUMNS": 128, "DEPTH": 64, "GROUP": 8, "num_warps": 8, "num_stages": 3}


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "broken"),
    [("", ""), ("range(0, k, DEPTH)", "range(DEPTH, k, DEPTH)"), ("total.to", "(2 * total).to")],
)
def test_a_wrong_kernel_is_found(text: str, broken: str, tmp_path: Path) -> None:
    source = (FOLDER / "matmul.py").read_text()
    assert text in source
    path = tmp_path / "matmul.py"
    path.write_text(source.replace(text, broken))
    assert loaded(path).check({"point": POINT}) == {"found": not text}


class Fake:
    """Workers without processes: kernels of 4 warps are wrong, those of DEPTH 32 kill theirs."""

    tasks: list[str] = []  # noqa: RUF012

    def __init__(self, count: int, *, env: Any) -> None:
        assert count >= 1

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, task: Task) -> Future[Answer]:
        self.tasks.append(task.function)
        point, future = task.payload["point"], Future[Answer]()
        value: Any = 100.0 + point["ROWS"] + abs(point["COLUMNS"] - 128) + point["num_stages"]
        if task.function == "matmul:check":
            value = point["num_warps"] != 4
        dies = point["DEPTH"] == 32 and task.function == "matmul:check"
        future.set_result(Died("it is gone") if dies else Done({"found": value}))
        return future


def tuned(
    record: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[list[str], str]:
    """What was asked of the workers, and what was printed."""
    monkeypatch.setattr(pool, "Workers", Fake)
    monkeypatch.setattr(Fake, "tasks", [])
    monkeypatch.setattr(sys, "argv", ["tune.py", "--record", str(record), "--trials", "9"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    runpy.run_path(str(FOLDER / "tune.py"), run_name="__main__")
    return Fake.tasks, capsys.readouterr().out


def test_it_finds_the_best_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "gemm.json"
    asked, printed = tuned(record, monkeypatch, capsys)
    assert asked.count("matmul:estimate") == 8 * 2 * 2 * 3
    assert asked.count("matmul:check") == 9
    *rows, best = printed.splitlines()
    assert len(rows) == 2 + 9  # of which two are the header
    assert "failed" in printed
    assert best.endswith("166.0 us, estimated")
    assert "'ROWS': 64, 'COLUMNS': 128, 'DEPTH': 64" in best

    answers = json.loads(record.read_text())
    last = next(key for key in reversed(answers) if key.startswith("check"))
    record.write_text(json.dumps({key: answers[key] for key in answers if key != last}))
    assert tuned(record, monkeypatch, capsys) == (["matmul:check"], printed)


@pytest.mark.slow("it compiles for a GPU in processes of its own: 15 s")
def test_it_runs(tmp_path: Path) -> None:
    text = (FOLDER / "tune.py").read_text()
    small = text.replace("(64, 128, 256)", "(128,)").replace("(32, 64)", "(64,)")
    small = small.replace("(2, 3, 4)", "(3,)").replace("__file__", repr(str(FOLDER / "tune.py")))
    assert small != text
    (tmp_path / "tune.py").write_text(small)
    (tmp_path / "matmul.py").write_text((FOLDER / "matmul.py").read_text())
    done = programs.run([tmp_path / "tune.py", "--trials", "2"], cwd=tmp_path, env={})
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stdout
    assert "The best: {'ROWS': 128, 'COLUMNS': 128" in done.stdout


def test_a_study_of_optuna_tunes_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a stand-in for the estimates, which take a compiler a second each."""
    asked: list[dict[str, int]] = []

    def estimate(payload: dict[str, Any]) -> dict[str, float]:
        asked.append(payload["point"])
        return {"found": 100.0 + sum(abs(POINT[n] - v) for n, v in payload["point"].items())}

    module = ModuleType("matmul")
    module.estimate = estimate  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "matmul", module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["study.py"])  # not those of pytest
    runpy.run_path(str(FOLDER / "study.py"), run_name="__main__")
    assert len(asked) == len({str(point) for point in asked}) == 12
    assert all(point["ROWS"] * point["COLUMNS"] <= 128 * 256 for point in asked)
    assert "The best: {'ROWS': 128, 'COLUMNS': 128," in capsys.readouterr().out
