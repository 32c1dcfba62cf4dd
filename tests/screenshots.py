"""Screenshots that docs/ shows: the first screen of a page, taken by Chromium.

Each carries the text of its page, as a comment of the PNG. tests/docs_output.py compares it with
today's, which needs no browser. Colours and layout are not compared: to take a screenshot again,
delete it and run make -f tests/sessions.mk docs-output.
"""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngImageFile, PngInfo

from flashgen.errors import ToolchainError

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
SHOWN_CHARACTERS = 5000
"""Of a page's text: more than its first screen shows."""


@dataclass(frozen=True, kw_only=True)
class Screen:
    """A browser's window, in pixels. scheme: the number that Chromium's engine has for it."""

    height: int
    scheme: int


SCREENS = {1280: Screen(height=900, scheme=1), 390: Screen(height=844, scheme=0)}
"""By width: a desk with light colours, a phone with dark ones. NAME-WIDTH.png names its screen."""


def width_of(file: Path) -> int:
    """The width that a screenshot's name states."""
    return int(file.stem.rpartition("-")[2])


def browser() -> str:
    """The path of Chromium. Raises ToolchainError."""
    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    raise ToolchainError(f"screenshots need one of {', '.join(BROWSERS)} on the path")


def take(page: Path, file: Path) -> None:
    """Write the first screen of a page, with its text. Raises ToolchainError."""
    width = width_of(file)
    screen = SCREENS[width]
    options = [
        "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1",
        f"--window-size={width},{screen.height}",
        f"--blink-settings=preferredColorScheme={screen.scheme}",
        f"--screenshot={file}", page.as_uri(),
    ]  # fmt: skip
    program = browser()
    done = subprocess.run([program, *options], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise ToolchainError(f"{program} failed: {done.stderr.strip()}")
    info = PngInfo()
    info.add_itxt("Comment", text_of(page.read_text()), zip=True)
    with Image.open(file) as image:
        image.save(file, optimize=True, pnginfo=info)


def text_of(page: str) -> str:
    """The beginning of a page's text, a line for each 100 characters."""
    visible = re.sub(r"<(style|script)\b.*?</\1>", "", page, flags=re.DOTALL)
    words = html.unescape(re.sub(r"<[^>]+>", " ", visible)).split()
    return re.sub(r"(.{1,100})(?: |$)", r"\1\n", " ".join(words)[:SHOWN_CHARACTERS])


def shown(file: Path) -> str:
    """The text that a screenshot carries."""
    with Image.open(file) as image:
        assert isinstance(image, PngImageFile)
        return str(image.text.get("Comment", ""))
