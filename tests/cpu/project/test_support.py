"""docs/features.md is what templates and tests say."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashgen.errors import FlashgenError
from tests import support


def test_the_page_is_the_one_that_is_committed() -> None:
    assert support.PAGE.read_text() == support.page(), f"run {support.COMMAND}"


def test_what_nothing_proves_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    unproven = tuple((s, c) for s, c in support._all() if not (s.window and s.softcap))
    monkeypatch.setattr(support, "_all", lambda: unproven)
    with pytest.raises(
        FlashgenError, match=r"tests/pairs.py has no kernel with {.*}, which renders"
    ):
        support.page()


def test_a_page_that_differs_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(support, "PAGE", tmp_path / "support.md")
    monkeypatch.setattr(support, "page", lambda: "as the templates say")
    assert support.main(["--check"]) == 1
    assert support.COMMAND in capsys.readouterr().err
    assert support.main([]) == 0
    assert support.main(["--check"]) == 0
