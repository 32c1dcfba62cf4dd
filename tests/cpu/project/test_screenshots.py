"""The screenshots that docs/ shows: there, of the widths they claim, and shown."""

from __future__ import annotations

import struct

import pytest

from tests.screenshots import ROOT, SHOTS, Shot


@pytest.mark.parametrize("shot", SHOTS, ids=lambda shot: shot.file.name)
def test_a_screenshot_has_its_size_and_is_shown(shot: Shot) -> None:
    head = shot.file.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:24]) == (shot.width, shot.height)
    pages = (ROOT / "docs").glob("*.md")
    assert any(f"images/{shot.file.name}" in page.read_text() for page in pages)
