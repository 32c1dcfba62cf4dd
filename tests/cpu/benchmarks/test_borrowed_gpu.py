"""benchmarks/borrowed_gpu.sh run: resumes from the file of an earlier run, and brings one file back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "borrowed_gpu.sh"

CAMPAIGN = """
import os, pathlib, sys
folder = pathlib.Path("campaign")
compiled = folder / ".flashgen" / "compiled"
compiled.mkdir(parents=True, exist_ok=True)
(compiled / "large.cubin").write_text("machine code")
with (folder / "steps").open("a") as file:
    print(*sys.argv[1:], os.environ["PYTHONPATH"].count("/tmp"), file=file)
sys.exit(1)
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A bare copy of the repository with a campaign that records its arguments."""
    made = tmp_path / "machine"
    (made / "benchmarks").mkdir(parents=True)
    shutil.copy(SCRIPT, made / "benchmarks")
    (made / "benchmarks" / "gpu_campaign.py").write_text(CAMPAIGN)
    (made / ".wheels").mkdir()
    (made / ".wheels" / "pytest-9.2.0-py3-none-any.whl").write_text("not read: pytest is installed")
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python3"  # not a link, by which Python 3.13 finds no environment
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return made


def run(machine: Path, *words: str) -> subprocess.CompletedProcess[str]:
    bin_, tmp = machine.parent / "bin", machine.parent / "tmp"
    tmp.mkdir(exist_ok=True)
    env = os.environ | {"PATH": f"{bin_}:{os.environ['PATH']}", "TMPDIR": str(tmp)}
    return subprocess.run(
        [machine / "benchmarks" / "borrowed_gpu.sh", *words],
        env=env, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.slow("seven seconds of a shell script; who edits it runs this")
def test_a_run_resumes_from_the_file_and_packs_all_but_what_is_compiled(machine: Path) -> None:
    first, second = machine.parent / "first.tar.gz", machine.parent / "second.tar.gz"
    assert run(machine, "run", "9", str(first)).returncode == 1
    shutil.rmtree(machine / "campaign")
    done = run(machine, "run", "8", str(second), str(first))
    assert done.returncode == 1, done.stderr
    with tarfile.open(second) as packed:
        steps = packed.extractfile("campaign/steps")
        assert steps is not None
        lines = steps.read().decode().splitlines()
        assert not [name for name in packed.getnames() if name.endswith(".cubin")]
    assert [line.rsplit(" ", 1)[0] for line in lines] == [
        "--minutes 9 --out campaign", "--minutes 8 --out campaign",
    ]  # fmt: skip


@pytest.mark.slow("a campaign in a copy of the repository: 7 s")
def test_newer_results_on_the_machine_are_kept(machine: Path) -> None:
    file = machine.parent / "one.tar.gz"
    run(machine, "run", "9", str(file))
    steps = machine / "campaign" / "steps"
    steps.write_text("newer\n")
    os.utime(steps, (2e9, 2e9))
    run(machine, "run", "8", str(file))
    assert steps.read_text().splitlines()[0] == "newer"


def test_other_words_print_what_it_does(machine: Path) -> None:
    done = run(machine, "runs")
    assert done.returncode == 2
    assert done.stdout.startswith("Uses a GPU that is lent for minutes at a time")
