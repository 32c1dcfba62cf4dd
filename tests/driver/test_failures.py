"""What fails on a GPU is what the tuner, the runtime and the bench say: memory, resources, an illegal access, a hang, a
lost device.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.driver.events import Ordered, of
from tests.driver.programs import command, run

BLAMED = "br64"
"""In the name of the kernel that fails; the other one of failing.py is sound."""


def evaluated(stage: str, tmp_path: Path, **environment: str) -> tuple[list[list[object]], str]:
    """[br, status, detail] of each kernel of failing.py, and what it wrote to stderr."""
    words = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.driver.failing",
        stage,
        str(tmp_path / "cache"),
    ]
    done, found = command(words, tmp_path, RECORDING_CUDA_US="200", **environment)
    if "RECORDING_CUDA_FAIL" in environment:
        assert of(Ordered, found), "the failure did not happen"
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.mark.parametrize(
    ("order", "status", "said"),
    [
        ("illegal", "crashed", "an illegal memory access was encountered"),
        ("resources", "run_error", "too many resources requested for launch"),
        ("memory", "out_of_resources", "out of memory"),
        ("hang", "timeout", "no answer within"),
    ],
)
@pytest.mark.parametrize("stage", ["timed"])
def test_a_kernel_that_fails_costs_itself_alone(
    tmp_path: Path, stage: str, order: str, status: str, said: str
) -> None:
    found, errors = evaluated(stage, tmp_path, RECORDING_CUDA_FAIL=f"{order}@{BLAMED}")
    assert len(found) == 2, errors
    (br, first, detail), (_, second, _) = found
    assert (br, first, second) == (64, status, "ok")
    assert said in str(detail)


def test_a_lost_device_is_not_the_fault_of_the_kernels_after_it(tmp_path: Path) -> None:
    found, errors = evaluated("timed", tmp_path, RECORDING_CUDA_FAIL=f"lost@{BLAMED}")
    assert [each[:2] for each in found] == [[64, "crashed"]]
    assert "DeviceLost: cuda:0 no longer answers" in errors


def test_a_problem_too_large_for_the_memory_says_so(tmp_path: Path) -> None:
    found, _ = evaluated("timed", tmp_path, RECORDING_CUDA_MEMORY_MIB="1100")
    assert [each[1] for each in found] == ["out_of_resources"] * 2
    assert all("CUDA out of memory" in str(each[2]) for each in found)


CALLED = """
    import torch, flashgen
    q, k, v = (torch.empty(2, 8, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for number in range(4):
        flashgen.attention(q, k, v, causal=True)
        torch.cuda.synchronize()
        print(number, flush=True)
"""


@pytest.mark.parametrize("nth", [1, 2, 4], ids=["by Triton", "directly", "kept"])
@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("illegal", "an illegal memory access was encountered"),
        ("resources", "too many resources requested for launch"),
        ("memory", "out of memory"),
    ],
)
def test_a_call_raises_what_the_driver_says(
    tmp_path: Path, nth: int, order: str, said: str
) -> None:
    done, _ = run(CALLED, tmp_path, RECORDING_CUDA_FAIL=f"{order}@fwd#{nth}")
    assert done.returncode == 1
    assert done.stdout.split() == [str(number) for number in range(nth - 1)]
    assert said in done.stderr
