"""The wheel holds all it needs: installed alone, away from the checkout, it serves and tunes."""

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

ROOT = Path(__file__).resolve().parents[3]
SOURCES = (
    "flashgen",
    "templates",
    "configs",
    "generated",
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
)

EXTRAS = "optuna scipy matplotlib pynvml numba ray"
PLAIN = {
    "show nvidia_l4 --head-dim 64 --dtype fp16 --no-causal": "fwd_fp16_d64 ",
    "explain --head-dim 64 --seq 4096 --target nvidia_l4": "fwd_bf16_d64 on nvidia_l4: ",
    "targets": "nvidia_l4 ",
    "warmup --help": "Triton's cache",
}
"""Commands that need no extra, and something that each prints."""
VERIFY = "verify --target nvidia_l4 --out one"
ONE_ENTRY = """
import dataclasses, pathlib, sys
from flashgen import paths
from flashgen.table import table_file
shipped = table_file.load_with_evidence(paths.shipped_table("nvidia_l4"))
entry = next(entry for entry in shipped.entries if entry.spec.name == "fwd_fp16_d64")
one = table_file.Table(gpu=shipped.gpu).with_entry(entry, shipped.run_of(entry))
table_file.save(one, paths.table_file(pathlib.Path(sys.argv[1]), "nvidia_l4"))
"""
NEEDING = {
    "tune --target nvidia_l4 --head-dim 24 --no-causal --seq 512 --trials 2 --out out": "Written: ",
}
"""Commands of the extras offline and tune."""

# One worker builds the wheel for all tests of this file.


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: setuptools writes into the tree it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    copy_sources(tree)
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(tree), cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the content of the wheel: what pip makes of one that holds only Python."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def copy_sources(tree: Path) -> None:
    """What pip installs of the checkout."""
    tree.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)


def run(
    *arguments: str,
    cwd: Path,
    program: str = sys.executable,
    fails: bool = False,
    **environment: str,
) -> str:
    """What a Python program printed, or its errors if it is to fail; the checkout is neither its
    folder nor on its path.
    """
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("FLASHGEN_", "TRITON_INTERPRET"))
    }
    inherited.pop("PYTHONPATH", None)
    done = subprocess.run(
        [program, *arguments],
        cwd=cwd,
        env=inherited | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == fails, f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stderr if fails else done.stdout


def packed(folder: str, pattern: str, inside: str) -> set[str]:
    """The files of a folder of the checkout, by the names they must have in the wheel."""
    found = (ROOT / folder).rglob(pattern)
    return {f"{inside}/{path.relative_to(ROOT / folder).as_posix()}" for path in found}


@pytest.mark.parametrize(
    ("folder", "pattern", "inside"),
    [
        ("flashgen", "*.py", "flashgen"),
        ("flashgen", "py.typed", "flashgen"),
        ("flashgen", "*.jinja", "flashgen"),
        ("templates", "*.jinja", "flashgen/_templates"),
        ("configs", "*.yaml", "flashgen/_configs"),
        ("configs", "*.jsonl", "flashgen/_configs"),
        ("generated", "*.py", "flashgen/_generated"),
    ],
)
def test_wheel_holds_every_file(wheel: Path, folder: str, pattern: str, inside: str) -> None:
    expected = packed(folder, pattern, inside)
    assert expected, f"the checkout has no {pattern} in {folder}"
    assert expected - set(zipfile.ZipFile(wheel).namelist()) == set()


def test_wheel_holds_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"flashgen"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_wheel_is_small(wheel: Path) -> None:
    """It holds the tables of all GPUs."""
    assert wheel.stat().st_size < 3_000_000


def test_installed_wheel_serves(site: Path, tmp_path: Path) -> None:
    """And has what tune reads: the shipped tables, the templates, the page of a report. A package
    `generated` of somebody else's, first on the path, is not imported.
    """
    (tmp_path / "generated").mkdir()
    (tmp_path / "generated" / "__init__.py").write_text("raise SystemExit('imported')\n")
    program = (
        "import sys\n"
        "import flashgen\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "from flashgen import attention, digest, paths\n"
        "from flashgen.runtime import folders, sdpa\n"
        "from flashgen.table import table_file\n"
        "from flashgen.kernels.render import render\n"
        "from flashgen.report.html import environment\n"
        "held = table_file.load(paths.shipped_table('nvidia_l4'))\n"
        "specs = {entry.spec: entry.config for entry in held.entries}\n"
        "assert len({render(*pair).template for pair in specs.items()}) >= 4\n"
        "folder = paths.Path(flashgen.__file__).parent / 'report'\n"
        "assert environment(folder).get_template('report.html.jinja')\n"
        "q = torch.randn(1, 2, 5, 64)\n"
        "assert attention(q, q, q, causal=True).shape == q.shape\n"
        "assert sdpa.scaled_dot_product_attention(q, q, q).shape == q.shape\n"
        "assert digest().startswith('sha256:')\n"
        "served = sys.modules['flashgen._generated'].__file__\n"
        "print(flashgen.__file__, served, folders.default_folder(), paths.templates_dir(), sep='\\n')"
    )
    for line in run("-c", program, cwd=tmp_path, PYTHONPATH=str(site)).splitlines():
        assert Path(line).is_relative_to(site), f"{line} is not of the wheel"


@pytest.mark.slow("installs or tunes in an environment of its own: a minute")
def test_installed_wheel_tunes(site: Path, tmp_path: Path) -> None:
    options = (
        "--target", "nvidia_l4", "--dtype", "fp16", "--head-dim", "16", "--no-causal",
        "--seq", "512", "--trials", "1",
    )  # fmt: skip
    environment = {"PYTHONPATH": str(site), "COLUMNS": "200"}
    run("-m", "flashgen", "tune", *options, "--out", str(tmp_path), cwd=tmp_path, **environment)
    assert (tmp_path / "configs" / "nvidia_l4.yaml").is_file()
    # What it wrote is importable, and serves beside the shipped tables or in their place.
    program = (
        "import flashgen, generated.dispatcher\n"
        "from flashgen.runtime import folders\n"
        "own = generated.dispatcher._dispatcher\n"
        "assert own is not folders.current() and own.digest() != flashgen.digest()\n"
        "flashgen.use('.')\n"
        "assert own is folders.current() and own.digest() == flashgen.digest()\n"
        "print(generated.dispatcher.__file__, flashgen.__file__, sep='\\n')"
    )
    dispatcher, tool = run("-c", program, cwd=tmp_path, PYTHONPATH=str(site)).splitlines()
    assert Path(dispatcher) == tmp_path / "generated" / "dispatcher.py"
    assert Path(tool).is_relative_to(site)


def test_installed_wheel_names_the_packages_of_an_extra(site: Path, tmp_path: Path) -> None:
    """As pyproject.toml has them: there is no clone, and perhaps no wheel file any more."""
    program = "import sys; from flashgen import paths; print(paths.install_command(sys.argv[1]))"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    expected = {**project["optional-dependencies"], "": project["dependencies"]}
    for extra in ("tune", "offline", ""):
        told = run("-c", program, extra, cwd=tmp_path, PYTHONPATH=str(site))
        assert shlex.split(told.partition(" install ")[2]) == expected[extra]


def test_the_commands_of_a_plain_install_need_no_extra(site: Path, tmp_path: Path) -> None:
    """The slow test below installs nothing else, and has all of them."""
    program = (
        "import sys\n"
        "for module in sys.argv[1].split():\n"
        "    sys.modules[module] = None\n"
        "from flashgen.__main__ import main\n"
        "for command in sys.argv[2:]:\n"
        "    try:\n"
        "        main(command.split())\n"
        "    except SystemExit as ended:\n"
        "        assert not ended.code\n"
    )
    said = run("-c", program, EXTRAS, *PLAIN, cwd=tmp_path, PYTHONPATH=str(site))
    assert [told for told in PLAIN.values() if told not in said] == []


@pytest.mark.slow("installs torch in an environment of its own, and tunes there: minutes")
def test_installed_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """Alone, it runs the commands that need no extra. Of the others a sentence says what to install,
    which works as printed. A clone in its place is found from the folder above it.
    """
    run("-m", "venv", "venv", cwd=tmp_path)
    pinned = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_QUIET": "1"}

    def python(*arguments: str, fails: bool = False) -> str:
        program = str(tmp_path / "venv" / "bin" / "python")
        return run(*arguments, cwd=tmp_path, program=program, fails=fails, **pinned)

    python("-m", "pip", "install", str(wheel))
    python("-c", "from flashgen import attention")
    python("-c", ONE_ENTRY, "one")
    for command, told in (
        PLAIN | {"doctor": "can compile   yes", VERIFY: "1 of 1 entries"}
    ).items():
        assert told in python("-m", "flashgen", *command.split())

    for command, told in NEEDING.items():
        refused = python("-m", "flashgen", *command.split(), fails=True)
        printed = re.search(r'\S+ -m pip install( "[^"]+")+', refused)
        assert printed, refused
        subprocess.run(printed[0], shell=True, check=True, env=os.environ | pinned)
        assert told in python("-m", "flashgen", *command.split())

    copy_sources(tmp_path / "flashgen")
    python("-m", "pip", "install", "-e", "flashgen[tune]")
    served = python(
        "-c", "from flashgen import attention; import flashgen; print(flashgen.__file__)"
    )
    assert Path(served.strip()).is_relative_to(tmp_path / "flashgen")
