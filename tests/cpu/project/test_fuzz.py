"""Bad input for everything that is read, forty times as much in make test-all. tests/fuzz.py says which."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from flashgen import paths
from tests import fuzz

PARTS = 4
"""Parts of the long run of a target, for several workers."""


@pytest.fixture(autouse=True)
def _shipped_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "shipped_configs_dir", lambda: Path("/nonexistent"))
    for name in ("FLASHGEN_GPU", "FLASHGEN_CONFIGS", "FLASHGEN_GENERATED"):
        monkeypatch.delenv(name, raising=False)
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_bad_input_is_one_sentence(target: str) -> None:
    fuzz.cases(target, range(fuzz.TARGETS[target][1]))


@pytest.mark.slow("20,000 cases of bad input: minutes of CPU time")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_bad_input_is_one_sentence_40_times_as_often(target: str, part: int) -> None:
    count = fuzz.TARGETS[target][1] * 40 // PARTS
    fuzz.cases(target, range(part * count, (part + 1) * count))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda *_: 1 / 0, "ZeroDivisionError"),
        (lambda *_: fuzz.demand_printable("\x1b[2J"), "ESC reaches the terminal"),
        (lambda _, folder: (folder.parent / "planted").touch(), "files outside of --out"),
        (lambda *_: exec("raise SystemExit(3)"), "SystemExit"),
    ],
    ids=["exception", "escape", "outside", "exit"],
)
def test_the_fuzzer_finds(monkeypatch: pytest.MonkeyPatch, broken: object, said: str) -> None:
    monkeypatch.setitem(fuzz.TARGETS, "broken", (broken, 1))
    with pytest.raises(
        AssertionError, match=rf"{said}[\s\S]*repeat: python -m tests.fuzz broken 0"
    ):
        fuzz.cases("broken", range(1))
