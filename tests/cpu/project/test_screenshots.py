"""The screenshots that docs/ shows: there, of the widths they claim, and shown."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from flashgen.errors import ToolchainError
from tests.screenshots import ROOT, SHOTS, Shot, take


@pytest.mark.parametrize("shot", SHOTS, ids=lambda shot: shot.file.name)
def test_a_screenshot_has_its_size_and_is_shown(shot: Shot) -> None:
    head = shot.file.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:24]) == (shot.width, shot.height)
    pages = (ROOT / "docs").glob("*.md")
    assert any(f"images/{shot.file.name}" in page.read_text() for page in pages)


def _browser(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program chromium on the path, and no other browser."""
    program = folder / "chromium"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr("tests.screenshots.BROWSERS", ("chromium",))


def test_chromium_needs_no_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _browser(tmp_path, f'printf "%s\\n" "$@" > {tmp_path}/options', monkeypatch)
    take(SHOTS[0], tmp_path / "page.html", tmp_path / "shot.png")
    options = (tmp_path / "options").read_text().splitlines()
    assert "--headless" in options
    assert options[-1] == f"file://{tmp_path}/page.html"


def test_what_chromium_says_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _browser(tmp_path, "echo Missing X server >&2; exit 1", monkeypatch)
    with pytest.raises(ToolchainError, match=r"chromium.*Missing X server"):
        take(SHOTS[0], tmp_path / "page.html", tmp_path / "shot.png")
