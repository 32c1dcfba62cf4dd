"""Mutants: texts with one place broken, which tests must find.

broken() breaks a text: of a template, of a kernel, of PTX. tests/data/mutants has mutants of
flashgen's modules, written from the source before its tests were read: of each area a file, a line
a mutant. `python -m tests.mutants AREA [PART OF A LINE [TESTS]]` runs the area's tests, or these, on
each, in a copy of the tree, and names those that live. Each run is a fork that has torch and Triton loaded.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "tests" / "data" / "mutants"
LOADED = ("torch", "triton", "jinja2", "yaml", "hypothesis", "pytest", "rich", "typer", "filelock")
"""What most tests import."""
LOOK = "MUTANTS_LOOK"
"""In the environment: tests of mutants look only whether their texts are there, and are skipped."""


def broken(text: str, old: str, new: str, *, times: int = 0) -> str:
    """The text with `new` for each `old`, which must stand there, or so many times: else the mutant
    is stale.
    """
    found = text.count(old)
    assert found == times if times else found, f"a stale mutant, {found} times there: {old}"
    if LOOK in os.environ:
        import pytest

        pytest.skip("its text is there")
    return text.replace(old, new)


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A module of flashgen with one place changed, and the tests that must find it."""

    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path}: {self.old} => {self.new}".replace("\n", "\\n")

    @property
    def whole(self) -> str:
        """The module's text."""
        return (ROOT / self.path).read_text()

    def text(self) -> str:
        """The same, broken."""
        return broken(self.whole, self.old, self.new, times=1)


def areas() -> list[str]:
    """The names of all areas."""
    return sorted(path.stem for path in FOLDER.glob("*.txt"))


def mutants_of(area: str) -> Iterator[Mutant]:
    """Those of an area. Its file has `tests: PATHS`, `module: PATH`, and lines OLD => NEW of the
    module named last; \\n is the end of a line, # begins a comment.
    """
    tests, path = (), ""
    for line in (FOLDER / f"{area}.txt").read_text().splitlines():
        old, arrow, new = line.partition(" =>")
        if arrow:
            old, new = (each.replace("\\n", "\n") for each in (old, new.removeprefix(" ")))
            yield Mutant(path=path, old=old, new=new, tests=tests)
        elif line.startswith("tests: "):
            tests = tuple(f"tests/{each}" for each in line.split()[1:])
        elif line.startswith("module: "):
            path = f"flashgen/{line.split()[1]}"
        else:
            assert line.startswith("#") or not line, f"{area}: {line}"


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """A copy of the tree, as git has it, for one process."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for name in filter(None, listed.split("\0")):
            to = Path(folder, name)
            to.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_file():
                shutil.copy2(ROOT / name, to)
        yield Path(folder)


def passes(tree: Path, tests: tuple[str, ...], limit_s: float = 600.0) -> bool:
    """Whether these tests pass in a copy, run in a fork, in this time."""
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setpgid(0, 0)
            signal.alarm(math.ceil(limit_s))  # also where this process is killed
            code = _run(tree, tests)
        finally:
            os._exit(code)
    end = time.monotonic() + limit_s
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # and what it started
    status = ended[1] if ended[0] else os.waitpid(child, 0)[1]
    assert status not in (4 << 8, 5 << 8), f"pytest ran none of {tests}"
    return status == 0


def _run(tree: Path, tests: tuple[str, ...]) -> int:
    """In a fork: as if it had begun in the copy."""
    log = os.open(tree / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
    for name in [each for each in sys.modules if each.partition(".")[0] in ("tests", "flashgen")]:
        del sys.modules[name]
    import pytest

    return int(pytest.main(["-xq", "-m", "not slow", "-p", "no:cacheprovider", *tests]))


def living(area: str, part: str = "", *tests: str) -> Iterator[tuple[Mutant, bool, float]]:
    """Of each mutant of an area whether it lives, and the seconds that its tests took."""
    for name in LOADED:
        importlib.import_module(name)
    chosen = [each for each in mutants_of(area) if part in str(each)]
    chosen = [replace(each, tests=tests or each.tests) for each in chosen]
    with copied() as tree:
        limits_s = {}
        for ran in dict.fromkeys(each.tests for each in chosen):
            began = time.monotonic()
            assert passes(tree, ran), (tree / "log").read_text()[-2000:]
            limits_s[ran] = 30 + 3 * (time.monotonic() - began)
        for number, mutant in enumerate(chosen, 1):
            place = tree / mutant.path
            whole, stamp = place.read_text(), place.stat().st_mtime
            place.write_text(mutant.text())
            os.utime(place, (stamp + number, stamp + number))  # no bytecode of another text serves
            began = time.monotonic()
            lives = passes(tree, mutant.tests, limits_s[mutant.tests])
            place.write_text(whole)
            os.utime(place, (stamp, stamp))
            yield mutant, lives, time.monotonic() - began


def main() -> None:
    area, *chosen = sys.argv[1:]
    lived = tried = 0
    for mutant, lives, seconds in living(area, *chosen):
        tried, lived = tried + 1, lived + lives
        if lives or chosen:
            print(f"{'lives' if lives else 'found'} {seconds:.1f} s  {mutant}", flush=True)
    print(f"{area}: {tried - lived} of {tried} found", flush=True)


if __name__ == "__main__":
    main()
