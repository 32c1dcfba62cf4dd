"""flashgen where Python lacks what only POSIX has: a Python of this machine from which it is taken away.

What Windows adds, such as its own locks and signals, is not seen here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WITHOUT = """
import os, select, signal, subprocess, sys

sys.modules["fcntl"] = sys.modules["pwd"] = sys.modules["resource"] = None
for module, names in (
    (os, "pread pwrite getuid geteuid killpg waitid sysconf sched_getaffinity O_NOFOLLOW O_CLOEXEC"),
    (signal, "pthread_sigmask"),
    (select, "poll epoll"),
):
    for name in names.split():
        delattr(module, name)
started = subprocess.Popen.__init__

def start(self, *args, **fields):
    for name in ("pass_fds", "process_group", "preexec_fn", "start_new_session"):
        assert not fields.get(name) and fields.get(name) != 0, f"{name} is POSIX only"
    started(self, *args, **fields)

subprocess.Popen.__init__ = start
"""


@pytest.fixture
def windows(tmp_path: Path) -> dict[str, str]:
    """The environment of such a Python, which its children inherit."""
    (tmp_path / "without" / "sitecustomize.py").parent.mkdir()
    (tmp_path / "without" / "sitecustomize.py").write_text(WITHOUT)
    path = os.pathsep.join((str(tmp_path / "without"), str(ROOT)))
    return os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}


def run(windows: dict[str, str], folder: Path, *arguments: str, **more: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env=windows | more, cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow("a run of flashgen tune: 20 s")
def test_tuning_offline_and_the_command_line(windows: dict[str, str], tmp_path: Path) -> None:
    """Children, their limits, the log, the quarantine and the lock."""
    said = run(
        windows, tmp_path, "-m", "flashgen", "tune", "--target", "nvidia_l4", "--head-dim", "16",
        "--no-causal", "--seq", "512", "--trials", "1", "--out", "out",
    )  # fmt: skip
    assert "Written: " in said
    assert (tmp_path / "out/configs/nvidia_l4.yaml").is_file()
    assert "nvidia_l4" in run(windows, tmp_path, "-m", "flashgen", "targets")
    said = run(windows, tmp_path, "-m", "flashgen", "doctor")
    assert "torch" in said


def test_the_drop_ins_serve(windows: dict[str, str], tmp_path: Path) -> None:
    program = """
import torch
from flashgen import attention
from flashgen.runtime import flash_attn, sdpa
q, k, v = (torch.randn(1, 2, 33, 32, dtype=torch.float16) for _ in range(3))
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
found = [attention(q, k, v, causal=True), sdpa.scaled_dot_product_attention(q, k, v, is_causal=True)]
found.append(flash_attn.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).transpose(1, 2))
print([(o - expected).abs().max().item() < 1e-2 for o in found])
"""
    assert run(windows, tmp_path, "-c", program, TRITON_INTERPRET="1") == "[True, True, True]\n"
