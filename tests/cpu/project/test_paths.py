"""Which tables, templates and kernels are found, from where a program is started."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flashgen
from flashgen import paths
from flashgen.errors import InvalidArgument

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys
import flashgen
from flashgen import paths
from flashgen.runtime import registry
for path in (flashgen.__file__, paths.templates_dir(), paths.shipped_configs_dir(), registry.default_folder()):
    print(path)
assert registry.why_not_generated(registry.default_folder()) is None
assert not any(name.split(".")[0] in ("generated", "torch") for name in sys.modules)
"""


def test_flashgen_configs_is_taken_and_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHGEN_CONFIGS", str(tmp_path))
    assert paths.shipped_table("nvidia_l4") == tmp_path / "nvidia_l4.yaml"
    assert paths.table_file(Path("elsewhere"), "nvidia_l4") == tmp_path / "nvidia_l4.yaml"
    monkeypatch.setenv("FLASHGEN_CONFIGS", str(tmp_path / "gone"))
    with pytest.raises(InvalidArgument, match="FLASHGEN_CONFIGS must name a folder"):
        paths.shipped_configs_dir()


def clone(folder: Path) -> Path:
    """An uninstalled checkout, without kernels."""
    shutil.copytree(
        ROOT / "flashgen", folder / "flashgen", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("templates", "configs", "generated"):
        (folder / name).mkdir()
    shutil.copy(ROOT / "generated" / "__init__.py", folder / "generated")
    (folder / "program.py").write_text(PROGRAM)
    return folder


def folders(*arguments: str, cwd: Path, path: Path | None = None, **more: str) -> list[Path]:
    """What PROGRAM prints. -S: without what is installed, flashgen itself or its dependencies."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FLASHGEN_")} | more
    environment["PYTHONPATH"] = "" if path is None else str(path)
    done = subprocess.run(
        [sys.executable, "-S", *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [Path(line) for line in done.stdout.splitlines()]


def of(folder: Path) -> list[Path]:
    names = ("flashgen/__init__.py", "templates", "configs", "generated")
    return [folder / name for name in names]


def test_a_checkout_serves_its_own_folders_wherever_it_is_called_from(tmp_path: Path) -> None:
    """Uninstalled, with a second clone and somebody else's `generated` as the working directory."""
    one, two = clone(tmp_path / "one"), clone(tmp_path / "two")
    script = tmp_path / "elsewhere" / "program.py"
    script.parent.mkdir()
    shutil.copy(one / "program.py", script)
    foreign = tmp_path / "foreign" / "generated"
    foreign.mkdir(parents=True)
    (foreign / "__init__.py").write_text("raise SystemExit('imported')\n")

    assert folders(str(script), cwd=two, path=one) == of(one)
    assert folders("-c", PROGRAM, cwd=foreign.parent, path=one) == of(one)
    assert folders("-c", PROGRAM, cwd=two, path=one) == of(two)  # Python takes that flashgen
    assert folders(str(two / "program.py"), cwd=one, path=one) == of(two)
    named = folders(str(script), cwd=two, path=one, FLASHGEN_GENERATED=str(two))
    assert named == [*of(one)[:3], two / "generated"]


def test_the_command_that_installs_an_extra_works_where_flashgen_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_clone = shlex.quote(f"{ROOT}[tune]")
    assert paths.install_command("tune") == f"pip install -e {of_clone}"
    monkeypatch.setattr(paths, "ROOT", tmp_path / "site-packages")  # of a wheel
    wheel = f"flashgen-{flashgen.__version__}-py3-none-any.whl"
    assert paths.install_command("tune") == f"pip install '{wheel}[tune]'"
    monkeypatch.setattr(paths, "ON_INDEX", True)
    assert paths.install_command("tune") == "pip install 'flashgen[tune]'"


def test_no_page_asks_the_index_for_flashgen_before_it_is_there() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.ipynb")]
    asking = re.compile(r"pip install [^`\n]*\bflashgen(?![\w.-]*whl)[\[ `'\"]")
    named = [path.name for path in pages if asking.search(path.read_text())]
    assert paths.ON_INDEX or not named
