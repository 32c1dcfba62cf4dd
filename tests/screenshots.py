"""Writes the screenshots that docs/ shows, with Chromium.

    make screenshots

A report of a small offline run and the page of flashgen paper, each at the widths of a desk and of a phone, one light
and one dark. Needs a program chromium, chromium-headless-shell or google-chrome on the path.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from flashgen.errors import ToolchainError
from tests.docs_output import ROOT, commands_environment

FOLDER = ROOT / "docs" / "images"
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
TUNE = "flashgen tune --target nvidia_h100_80gb_hbm3 --dtype bf16 --head-dim 128 --causal --seq 4096 --trials 20 --out ."
COMMANDS = {
    "report": f"{TUNE} >/dev/null; flashgen report nvidia_h100_80gb_hbm3 --out .",
    "paper": "flashgen paper --out paper.html",
}
SCHEMES = {"light": 1, "dark": 0}
"""The numbers that Chromium's engine has for them."""


@dataclass(frozen=True, kw_only=True)
class Shot:
    """The first screen of a page, width x height pixels."""

    page: str
    width: int
    height: int
    scheme: str

    @property
    def file(self) -> Path:
        """Where it is committed."""
        return FOLDER / f"{self.page}-{self.width}.png"


SHOTS = [
    Shot(page=page, width=width, height=height, scheme=scheme)
    for page in COMMANDS
    for width, height, scheme in ((1280, 900, "light"), (390, 844, "dark"))
]


def browser() -> str:
    """The path of Chromium. Raises ToolchainError."""
    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    raise ToolchainError(f"screenshots need one of {', '.join(BROWSERS)} on the path")


def take(shot: Shot, page: Path, file: Path) -> None:
    """Write the first screen of a page, a file. Raises ToolchainError."""
    options = [
        "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1",
        f"--window-size={shot.width},{shot.height}",
        f"--blink-settings=preferredColorScheme={SCHEMES[shot.scheme]}",
        f"--screenshot={file}", page.as_uri(),
    ]  # fmt: skip
    program = browser()
    done = subprocess.run([program, *options], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise ToolchainError(f"{program} failed: {done.stderr.strip()}")


def main() -> int:
    """Run the commands and write all screenshots; the exit code."""
    browser()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for command in COMMANDS.values():
            shell = ["bash", "-euo", "pipefail", "-c", command]
            subprocess.run(
                shell, cwd=folder, env=commands_environment(folder), check=True, stdout=sys.stderr
            )
        for shot in SHOTS:
            take(shot, folder / f"{shot.page}.html", shot.file)
            print(shot.file.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
