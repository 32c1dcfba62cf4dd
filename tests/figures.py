"""The figures of docs/architecture.md, from the tree: python -m tests.figures. Lines are in hundreds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    package, tests = ROOT / "flashgen", ROOT / "tests"
    modules = sorted(package.rglob("*.py"))
    packages = [path for path in package.iterdir() if (path / "__init__.py").exists()]
    kernels = [
        path for path in (ROOT / "generated").rglob("kernels/*.py") if path.stem != "__init__"
    ]
    of_tests = [path for path in tests.rglob("*.py") if "golden" not in path.parts]
    functions = sum(len(re.findall(r"^ *def test_", path.read_text(), re.M)) for path in of_tests)
    contracts = (ROOT / ".importlinter").read_text().count("[importlinter:contract:")
    for name, value in (
        ("packages of flashgen/", len(packages)),
        ("modules", len(modules)),
        ("lines without ptx/", lines(path for path in modules if "ptx" not in path.parts)),
        ("lines of ptx/", lines((package / "ptx").rglob("*.py"))),
        ("templates", len(list((ROOT / "templates").glob("*.jinja")))),
        ("tables in configs/", len(list((ROOT / "configs").glob("*.yaml")))),
        ("their lines", lines((ROOT / "configs").glob("*.yaml"))),
        ("committed kernels", len(kernels)),
        ("their lines", lines(kernels)),
        ("test functions", functions),
        ("lines of tests", lines(of_tests)),
        ("contracts of imports", contracts),
    ):
        print(f"{name:22}{value:>8}")


def lines(paths: Iterable[Path]) -> int:
    """The lines of files, to the nearest hundred."""
    return round(sum(len(path.read_text().splitlines()) for path in paths), -2)


if __name__ == "__main__":
    main()
