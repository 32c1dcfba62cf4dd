"""The screenshots that docs/ shows: of the sizes that their names state, with the text of their page."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from flashgen.errors import ToolchainError
from tests.docs_output import PAGES, ROOT, outputs
from tests.screenshots import SCREENS, SHOWN_CHARACTERS, shown, take, text_of, width_of

FILES = sorted((ROOT / "docs" / "images").glob("*.png"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_screenshot_has_its_size_and_its_text(file: Path) -> None:
    width = width_of(file)
    with Image.open(file) as image:
        assert image.size == (width, SCREENS[width].height)
    assert len(shown(file)) > SHOWN_CHARACTERS / 2


def test_each_screenshot_is_compared_with_todays_page() -> None:
    compared = [output.file for page in PAGES for output in outputs(page) if output.is_screenshot]
    assert sorted(str(file) for file in compared) == [str(file) for file in FILES]


def test_the_text_of_a_page_is_what_a_reader_sees() -> None:
    page = "<style>a{}</style><h1>One &amp; two</h1>\n<script>1</script><p>three</p>"
    assert text_of(page) == "One & two three\n"
    assert [len(line) for line in text_of("word " * 2000).splitlines()][:49] == [99] * 49


def _browser(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program chromium on the path, and no other browser."""
    program = folder / "chromium"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr("tests.screenshots.BROWSERS", ("chromium",))


def test_a_screenshot_is_taken_without_a_display_and_carries_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shot = tmp_path / "page-390.png"
    Image.new("RGB", (390, 844), "red").save(shot)  # as if the browser had written it
    (tmp_path / "page.html").write_text("<p>four &times; two</p>")
    _browser(tmp_path, f'printf "%s\\n" "$@" > {tmp_path}/options', monkeypatch)
    take(tmp_path / "page.html", shot)
    options = (tmp_path / "options").read_text().splitlines()
    assert {"--headless", "--window-size=390,844", f"--screenshot={shot}"} < set(options)
    assert options[-1] == f"file://{tmp_path}/page.html"
    assert shown(shot) == "four \u00d7 two\n"
    with Image.open(shot) as image:
        assert image.getpixel((0, 0)) == (255, 0, 0)


def test_what_chromium_says_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _browser(tmp_path, "echo Missing X server >&2; exit 1", monkeypatch)
    with pytest.raises(ToolchainError, match=r"chromium.*Missing X server"):
        take(tmp_path / "page.html", tmp_path / "shot-390.png")
