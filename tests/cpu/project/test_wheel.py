"""The wheel holds all it needs: installed alone, away from the checkout, it serves and tunes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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

# One worker builds the wheel for all tests of this file.


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: setuptools writes into the tree it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    tree.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(tree), cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the content of the wheel: what pip makes of one that holds only Python."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run(*arguments: str, cwd: Path, program: str = sys.executable, **environment: str) -> str:
    """What a Python program printed; the checkout is neither its folder nor on its path."""
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
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


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
        "from flashgen.runtime import folders, registry, sdpa\n"
        "from flashgen.table import table\n"
        "from flashgen.kernels.render import render\n"
        "from flashgen.report.html import environment\n"
        "held = table.load(paths.shipped_table('nvidia_l4'))\n"
        "specs = {entry.spec: entry.config for entry in held.entries}\n"
        "assert len({render(*pair).template for pair in specs.items()}) >= 4\n"
        "for page in ('report', 'paper'):\n"
        "    folder = paths.Path(flashgen.__file__).parent / page\n"
        "    assert environment(folder).get_template(f'{page}.html.jinja')\n"
        "q = torch.randn(1, 2, 5, 64)\n"
        "assert attention(q, q, q, causal=True).shape == q.shape\n"
        "assert sdpa.scaled_dot_product_attention(q, q, q).shape == q.shape\n"
        "assert digest().startswith('sha256:')\n"
        "served = sys.modules['flashgen._generated'].__file__\n"
        "print(flashgen.__file__, served, registry.default_folder(), paths.templates_dir(), sep='\\n')"
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


@pytest.mark.slow("installs or tunes in an environment of its own: a minute")
def test_installed_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """With the extras' own dependencies and no others: one that they do not name would be missing."""
    run("-m", "venv", str(tmp_path / "venv"), cwd=tmp_path)
    program = str(tmp_path / "venv" / "bin" / "python")
    pins = ["-c", str(ROOT / "constraints.txt")]
    run(
        "-m",
        "pip",
        "install",
        "--quiet",
        *pins,
        f"{wheel}[tune,offline]",
        cwd=tmp_path,
        program=program,
    )
    run("-c", "from flashgen import attention", cwd=tmp_path, program=program)
    told = run(
        "-m", "flashgen", "tune", "--target", "nvidia_l4", "--head-dim", "24", "--no-causal",
        "--seq", "512", "--trials", "2", "--out", "out",
        cwd=tmp_path, program=program,
    )  # fmt: skip
    assert "fwd_bf16_d24 seq 512: " in told
    assert "1 search, 1 entry changed" in told
    assert (tmp_path / "out" / "configs" / "nvidia_l4.yaml").is_file()
