"""The current device and stream, several GPUs, GPUs of another kind, a MIG instance, and no NVML."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import flashgen
from flashgen.evaluate.gpu_state import Conditions, clocks_and_power
from tests.driver import events
from tests.driver.cases import tensors
from tests.driver.events import Fault, Launch, Recording
from tests.driver.programs import command, run


def test_a_launch_goes_to_the_current_stream(recording: Recording) -> None:
    q, k, v = tensors(2, 8, 512, 128)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(3):
        flashgen.attention(q, k, v)
    for stream in streams:
        with torch.cuda.stream(stream):
            flashgen.attention(q, k, v)
    found = [each.stream for each in recording.of(Launch)]
    assert found == [0, 0, 0, *(stream.cuda_stream for stream in streams)]


TWO_GPUS = """
    import json, torch, flashgen
    q, k, v = (torch.empty(2, 8, 512, 128, device="cuda:1", dtype=torch.bfloat16) for _ in range(3))
    assert torch.cuda.current_device() == 0
    for _ in range(4):
        o = flashgen.attention(q, k, v)
    assert o.device.index == 1
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        for _ in range(2):
            flashgen.attention(q, k, v)
    x, y, z = (a.to("cuda:0") for a in (q, k, v))
    for _ in range(4):
        flashgen.attention(x, y, z)
    lengths = torch.full((2,), 512, dtype=torch.int32, device="cuda:1")
    for _ in range(4):
        flashgen.decode(q[:, :, :1].contiguous(), k, v, lengths=lengths)
"""


def test_a_launch_goes_to_the_device_of_its_tensors(tmp_path: Path) -> None:
    done, found = run(TWO_GPUS, tmp_path, RECORDING_CUDA_DEVICES="h200 h200")
    assert done.returncode == 0, done.stderr
    assert events.of(Fault, found) == []
    attention = [each.device for each in events.of(Launch, found) if each.kernel.startswith("fwd")]
    assert attention == [1] * 6 + [0] * 4
    others = {each.device for each in events.of(Launch, found) if not each.kernel.startswith("fwd")}
    assert others == {1}


def test_visible_devices_are_counted_from_0(tmp_path: Path) -> None:
    program = """
    import torch
    from flashgen.kernels.launch import device_gpu
    print(torch.cuda.device_count(), device_gpu(0).slug)
    """
    done, _ = run(
        program, tmp_path, RECORDING_CUDA_DEVICES="h200 rtx4090", CUDA_VISIBLE_DEVICES="1"
    )
    assert done.stdout == "1 nvidia_geforce_rtx_4090\n", done.stderr


SERVED = """
    import json, torch, flashgen
    q, k, v = (torch.empty(2, 8, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for _ in range(4):
        flashgen.attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    print(str(flashgen.explain(q, k, v, causal=True)))
"""


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("h100", "nvidia_h100_80gb_hbm3"),
        ("b200", "nvidia_b200"),
        ("a100", "nvidia_a100_sxm4_80gb"),
        ("rtx4090", "nvidia_geforce_rtx_4090"),
        ("mig", "nvidia_h200"),  # an instance has the SMs of the whole, only fewer
    ],
)
def test_other_gpus_are_served(tmp_path: Path, device: str, said: str) -> None:
    done, found = run(SERVED, tmp_path, RECORDING_CUDA_DEVICES=device)
    assert done.returncode == 0, done.stderr
    assert events.of(Fault, found) == []
    assert len(events.of(Launch, found)) == 4
    assert said in done.stdout


UNTUNED = """
    import torch, flashgen
    mask = torch.zeros(512, 512, device="cuda", dtype=torch.bfloat16)
    lengths = torch.full((2,), 512, dtype=torch.int32, device="cuda")
    for dim in (64, 128, 256):
        q, k, v = (torch.empty(2, 8, 512, dim, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
        for given in (
            {}, {"bias": mask}, {"bias": mask > 0}, {"dropout_p": 0.1}, {"window": (64, 0)},
            {"alibi_slopes": torch.ones(8, device="cuda"), "softcap": 5.0},
        ):
            assert flashgen.attention(q, k, v, **given).shape == q.shape
        flashgen.decode(q[:, :, :1].contiguous(), k, v, lengths=lengths)
        flashgen.attention(q, k, v, causal=True)
"""


@pytest.mark.parametrize("device", ["rtx3090", "rtx4090", "a100"])
def test_what_no_table_has_is_served(tmp_path: Path, device: str) -> None:
    """On a GPU that nobody tuned, and on others what nobody tuned there."""
    done, found = run(UNTUNED, tmp_path, RECORDING_CUDA_DEVICES=device)
    assert done.returncode == 0, done.stderr
    assert events.of(Fault, found) == []
    forward = [each for each in events.of(Launch, found) if each.kernel.startswith("fwd")]
    assert len(forward) == 3 * 7


def test_a_b200_computes_with_schedule_blackwell(tmp_path: Path) -> None:
    """What its table serves, and kernels that are launched directly: their results, executed."""
    chosen = "equals_float64 or launched_again"
    words = [sys.executable, "-m", "pytest", "-q", "tests/driver/test_results.py", "-k", chosen]
    done, _ = command(words, tmp_path, RECORDING_CUDA_DEVICES="b200")
    assert done.returncode == 0, done.stdout
    assert "5 passed" in done.stdout


@pytest.mark.parametrize("device", ["a100", "rtx4090"])
def test_every_kernel_of_other_gpus_is_launched(tmp_path: Path, device: str) -> None:
    words = [sys.executable, "-m", "pytest", "-v", "tests/driver/test_launches.py"]
    done, _ = command(words, tmp_path, RECORDING_CUDA_DEVICES=device)
    assert done.returncode == 0, done.stdout
    passed = [line for line in done.stdout.splitlines() if line.rstrip().endswith("%]")]
    for schedule in ("ampere", "fa2", "s_ahead"):
        assert any(schedule in line and "PASSED" in line for line in passed), done.stdout


def test_without_nvml_conditions_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none here: neither libnvidia-ml.so.1 nor nvidia-smi."""
    assert clocks_and_power(0) == Conditions()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert clocks_and_power(0) == Conditions()
