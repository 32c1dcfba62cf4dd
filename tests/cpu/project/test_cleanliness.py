"""Nothing of one person's machine stands in a file that everybody gets."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# Written in pieces, so that this file does not find itself.
FORBIDDEN = (
    "/" + r"(work|root|home|Users|opt|mnt)/\w",
    "/" + r"tmp/\w",
    r"files\.python" + "hosted",
    r"pypi\." + "org",
    r"registry\." + "npmjs",
    r"(?<!@)\blocal" + r"host:\d",
    r"^(<{7}|>{7}) ",
)
LARGEST_FILE = 1_000_000


def tracked() -> list[Path]:
    """Files that are committed, or would be by `git add .`."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a clone: it reads the files that git knows")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_path_and_no_host_of_one_machine() -> None:
    pattern = re.compile("|".join(FORBIDDEN), re.MULTILINE)
    found = []
    for path in tracked():
        text = path.read_text(errors="replace")
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{path.relative_to(ROOT)}:{line}: {match.group()}")
    assert found == []


def test_no_file_is_huge() -> None:
    assert [str(path) for path in tracked() if path.stat().st_size > LARGEST_FILE] == []


def test_a_test_that_a_comment_or_a_page_names_is_there() -> None:
    texts = [path for path in tracked() if path.relative_to(ROOT).parts[0] != "tests"]
    named = {
        name
        for path in texts
        if path.suffix in (".py", ".md", ".jinja", ".toml")
        for name in re.findall(r"\btests/[\w/]+\.py\b", path.read_text())
    }
    assert len(named) > 10
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_environment_is_read_in_one_place() -> None:
    """The variables of flashgen's own are all in settings.py; os.environ elsewhere only to pass it on to a child."""
    own = re.compile(r"(?:environ(?:\.get)?[\[(]|getenv\()\s*f?[\"'](FLASHGEN_\w+)")
    readers = {
        (path.name, name)
        for path in (ROOT / "flashgen").rglob("*.py")
        for name in own.findall(path.read_text())
    }
    assert readers == {
        ("settings.py", f"FLASHGEN_{name}")
        for name in (
            "AOT",
            "CONFIGS",
            "DIRECT",
            "GENERATED",
            "GPU",
            "INVARIANT",
            "KEEP_KERNELS",
            "LOG",
            "PLAIN",
            "WORKSPACE_MB",
        )
    }


def test_every_slow_test_says_why() -> None:
    """`make -f tests/sessions.mk slow` lists the reasons."""
    bare = re.compile(r"mark\.slow(?!\()|mark\.slow\(\s*\)")
    found = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != Path(__file__) and bare.search(path.read_text())
    ]
    assert found == []
