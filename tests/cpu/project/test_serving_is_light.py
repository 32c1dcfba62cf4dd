"""What `import generated.dispatcher` loads and touches. Who may import whom is import-linter's: `make lint`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ("jinja2", "optuna", "yaml", "typer", "rich", "numba", "flashgen.compile", "flashgen.table")

LIGHT = """
import os, sys
done = []

def watch(event, arguments):
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    if event in ("os.mkdir", "os.rename", "os.remove", "os.symlink", "os.link", "socket.connect"):
        done.append((event, arguments))
    elif event == "open" and isinstance(arguments[2], int) and arguments[2] & writes:
        done.append((event, arguments))

sys.addaudithook(watch)
import generated.dispatcher  # which imports flashgen.runtime
import torch
loaded = [name for name in {heavy!r} if name in sys.modules]
print(loaded, torch.cuda.is_initialized(), done)
"""


def test_serving_loads_little_and_does_nothing(tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", LIGHT.format(heavy=TOOLS)],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (done.stdout.strip(), done.stderr) == ("[] False []", "")
    assert list(tmp_path.rglob("*")) == []


IMPORT = """
import gc, os, sys, time
import torch, triton
from tests.yardstick import yardstick

gc.collect()
gc.freeze()  # a pass over torch's own objects, which comes when it comes
sys.dont_write_bytecode = False
sys.pycache_prefix = sys.argv[1]
for _ in range(10):
    print(end="", flush=True)
    if not (child := os.fork()):
        start = time.process_time()
        from generated.dispatcher import attention
        took = time.process_time() - start
        took /= yardstick()
        print(took, flush=True)
        os._exit(took < float(sys.argv[2]))
    _, light = os.waitpid(child, 0)
    if light:
        break
"""
MOST = 1.8
"""Yardsticks: 65 ms on a machine on which the import takes 40 ms."""


@pytest.mark.slow("measures time, which a busy machine spoils")
def test_the_dispatcher_adds_little_to_torch_and_triton(tmp_path: Path) -> None:
    """In CPU time, of the first process that shows it, of ten: what else runs slows some down."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, str(tmp_path), str(MOST)],
        env=environment, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    found = [float(line) for line in done.stdout.split()]
    assert min(found) < MOST, found
