"""`flashgen bench` as a user runs it: without a GPU it walks all its paths, and claims to have measured nothing."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgen.evaluate.measure import PROTOCOL
from tests import programs

ROOT = Path(__file__).resolve().parents[3]
DIRECTIONS = ("forward", "backward", "decode")
STEPS = [
    "fa1",
    "fa2",
    "fa2, descriptors",
    "s_ahead",
    "s_ahead, descriptors",
    "longest first",
    "head reversal",
    "grouped",
    "persistent",
]


def program(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`flashgen bench` with a direction."""
    inherited = {
        n: v for n, v in os.environ.items() if n not in ("TRITON_INTERPRET", "FLASHGEN_GPU")
    }
    return programs.run(["-m", "flashgen", "bench", "--direction", name, *arguments], env=inherited)


def record(folder: Path) -> Any:
    found = json.loads((folder / "bench.json").read_text())
    (run,) = found["runs"]
    assert (run["measured"], run["gpu"], run["protocol"]) == (False, None, PROTOCOL)
    assert (run["matmul_tflops"], run["copy_gbs"]) == (None, None)
    assert run["command"].startswith("flashgen bench --direction")
    for case in found["cases"]:
        for line in case["lines"]:
            assert line["timing"] is line["tflops"] is line["gbs"] is None
            if line["status"] == "ok":
                assert 0 < line["floors"] <= 2
    return found


def names(case: Any, status: str = "ok") -> list[str]:
    return [line["name"] for line in case["lines"] if line["status"] == status]


@pytest.mark.slow("a whole benchmark: a minute, and test_all_directions runs a smaller one")
def test_forward(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    done = program("forward", "--smoke", "--causal", "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing is measured" in done.stdout.splitlines()[0]
    assert "To improve it" not in done.stderr  # the default is there to be compared with
    (case,) = record(out)["cases"]
    found = names(case)
    assert found[:4] == ["flashgen", "flashgen default", "SDPA math", "FlexAttention"]
    assert [f"ladder: {step}" for step in STEPS] == found[4:13]
    assert "ladder: hopper" in names(case, "left out")
    details = {line["name"]: line["detail"] for line in case["lines"]}
    assert "fwd_bf16_d64_causal" in details["flashgen"]  # kernels ran, in the interpreter
    assert "_fa1_ptr" in details["ladder: fa1"]
    assert (out / "forward_causal.png").read_bytes()[:4] == b"\x89PNG"
    assert "## forward, bfloat16, head dim 64, causal" in (out / "bench.md").read_text()
    # The same command goes on: there is nothing left to do.
    again = program("forward", "--smoke", "--causal", "--out", out)
    assert again.returncode == 0
    assert "floors  " not in again.stdout
    other = program("forward", "--smoke", "--causal", "--dtype", "fp16", "--out", out)
    assert (other.returncode, other.stderr.count("\n")) == (1, 1)
    assert "made with dtype bfloat16, here it is float16" in other.stderr


def test_all_directions(tmp_path: Path) -> None:
    others = ["--direction", "backward", "--direction", "decode", "--batch", "2", "--seq", "17"]
    few = ["--contender", "flashgen", "--contender", "sdpa"]
    done = program(
        "forward", "--smoke", "--causal", "--head-dim", "16", *others, *few, "--out", tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    forward, backward, decode = record(tmp_path)["cases"]
    assert names(forward) == names(backward) == ["flashgen", "SDPA math"]
    assert names(decode) == ["flashgen", "flashgen, pages of 16", "flashgen, pages of 256", "SDPA"]
    prefixes = {"fwd_": forward, "bwd_delta": backward, "decode_": decode}
    for prefix, case in prefixes.items():
        assert case["lines"][0]["detail"].startswith(prefix)  # kernels ran, in the interpreter


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    done = program("backward", "--out", tmp_path / "new")
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert "needs a GPU" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--direction", "sideways"], "--direction must be one of forward, backward, both, decode"),
        (["--contender", "cudnn"], "--contender must be one of flashgen, default, ladder, sdpa"),
        (["--head-dim", "7"], "--head-dim must be a multiple of 8"),
        (["--seq", "0"], "--seq must be at least 1"),
        (["--time-budget", "0"], "--time-budget must be more than 0"),
        (["--tuned", "nowhere"], "--tuned must name a folder that tune --out wrote"),
        (["--dtype", "fp64"], "dtype must be one of"),
    ],
)
def test_bad_usage_is_one_sentence(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = programs.run(["-m", "flashgen", "bench", *arguments, "--out", tmp_path / "new"])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []
