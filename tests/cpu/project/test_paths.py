"""Which tables, templates and kernels are found, from where a program is started."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

from flashgen import paths
from flashgen.errors import InvalidArgument

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys
import flashgen
from flashgen import paths
from flashgen.runtime import folders
for path in (flashgen.__file__, paths.templates_dir(), paths.shipped_configs_dir(), folders.default_folder()):
    print(path)
assert folders.why_not_generated(folders.default_folder()) is None
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


def words(command: str) -> tuple[str, list[str]]:
    """The pip of a command, and what it installs."""
    pip, _, needs = command.partition(" install ")
    return pip, shlex.split(needs)


def test_the_command_that_installs_names_what_pyproject_has() -> None:
    """Of a clone, installed or not. tests/cpu/project/test_wheel.py has it of a wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in ("tune", "offline", "cluster"):
        _, needs = words(paths.install_command(extra))
        assert needs == project["optional-dependencies"][extra]
        assert not any("flashgen" in need for need in needs)  # no index has it
    assert words(paths.install_command())[1] == project["dependencies"]


@pytest.mark.parametrize(
    ("module", "extra"),
    [("scipy.stats", "tune"), ("numba", "offline"), ("ray", "cluster"), ("yaml", "")],
)
def test_a_module_that_was_not_found_is_of_a_package(module: str, extra: str) -> None:
    assert paths.install_command_for(module) == paths.install_command(extra)


def broken(importer: str, module: str) -> ModuleNotFoundError:
    """What is raised where a module of this name imports what is not there."""
    lines = f"raise ModuleNotFoundError('No module', name={module!r})"
    try:
        exec(lines, {"__name__": importer})
    except ModuleNotFoundError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("importer", "module", "extra"),
    [
        ("optuna.storages", "sqlalchemy", "tune"),
        ("numba.core", "llvmlite", "offline"),
        ("flashgen.evaluate", "pynvml", "tune"),
        ("ray.util", "msgpack", "cluster"),
    ],
)
def test_a_part_that_a_package_lacks_is_of_that_package(
    importer: str, module: str, extra: str
) -> None:
    found = paths.install_command_after(broken(importer, module))
    assert found == paths.install_command(extra)


def test_what_flashgen_lacks_itself_is_a_bug_whoever_called_it() -> None:
    assert paths.install_command_after(broken("flashgen.cli", "flashgen.gone")) is None
    assert paths.install_command_for("ra") is None  # of ray


def test_a_module_of_nobodys_has_no_command() -> None:
    assert [paths.install_command_for(name) for name in ("flashgen.gone", "vllm", None)] == [
        None
    ] * 3


def test_the_command_is_of_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, pip = tmp_path / "my bin" / "python", tmp_path / "my bin" / "pip"
    pip.parent.mkdir()
    pip.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(sys, "prefix", "an environment")
    monkeypatch.setattr(sys, "base_prefix", "another")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert words(paths.install_command("tune"))[0] == f'"{python}" -m pip'
    monkeypatch.setenv("PATH", str(pip.parent))  # as activate does
    assert words(paths.install_command("tune"))[0] == "pip"
    monkeypatch.setattr(sys, "base_prefix", "an environment")  # of a system, with several Pythons
    assert words(paths.install_command("tune"))[0] == f'"{python}" -m pip'
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)  # what uv makes
    assert paths.install_command("offline").startswith(f'uv pip install --python "{python}" "numba')


def test_no_page_asks_the_index_for_flashgen_before_it_is_there() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.ipynb")]
    asking = re.compile(r"pip install [^`\n]*\bflashgen(?![\w.-]*whl)[\[ `'\"]")
    assert [path.name for path in pages if asking.search(path.read_text())] == []


PROGRAM_OF_A_USER = """
import sys
site, torch = sys.argv[1:]
import site as sites
sites.addsitedir(site)
sys.path.append(torch)  # without its .pth files, which may install another flashgen
from flashgen import attention
import flashgen
print(flashgen.__file__)
"""


@pytest.mark.slow("programs that import torch: 4 s")
def test_it_is_found_in_the_folder_above_a_clone_named_flashgen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After pip install -e, as make does it or by hand. The folder of the clone is found first, as a
    namespace package; only an entry of sys.path after it has the package.
    """
    tree = clone(tmp_path / "flashgen")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("kernels", "tables"):
        (tree / "generated" / name).mkdir()
    site = tmp_path / "site"
    site.mkdir()
    build = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, str(site)], cwd=tree, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = site.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    found = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM_OF_A_USER, site, Path(torch.__file__).parents[1]],
        cwd=tmp_path, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout == f"{tree / 'flashgen' / '__init__.py'}\n", found.stderr
