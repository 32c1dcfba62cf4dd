"""evaluate/measure.py's stopwatch and kernels/launch.py's device_gpu() on the recording driver."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from flashgen.evaluate.measure import CudaStopwatch
from flashgen.kernels.launch import device_gpu
from flashgen.spec.gpu import TARGETS
from tests.driver.events import Recording, TorchKernel

L2 = 60 << 20


def test_a_sample_follows_a_write_and_a_read_of_buffers_larger_than_the_l2(
    recording: Recording,
) -> None:
    stopwatch = CudaStopwatch(0, L2)
    assert stopwatch._written.nbytes == stopwatch._read.nbytes == 2 * L2
    begin = len(recording.of(TorchKernel))
    times = stopwatch.time(lambda: torch.cuda._sleep(198_000), 3)  # 100 us at 1980 MHz
    kernels = [each.name for each in recording.of(TorchKernel)[begin:]]
    spins = [i for i, name in enumerate(kernels) if "spin_kernel" in name]
    for spin in spins[1:]:  # the first makes the device wait for the batch
        assert "FillFunctor" in kernels[spin - 2]
        assert "reduce_kernel" in kernels[spin - 1]
    assert times == pytest.approx([100.0] * 3, rel=0.05)


def test_the_clock_is_that_of_the_device() -> None:
    assert CudaStopwatch(0, L2).clock_mhz() == pytest.approx(1980, rel=0.01)


def test_a_clock_that_drops_is_seen() -> None:
    """Of the whole process, and for good."""
    program = """
import ctypes, torch, flashgen
from flashgen.evaluate.measure import CudaStopwatch
stopwatch = CudaStopwatch(0, 60 << 20)
before = stopwatch.clock_mhz()
ctypes.CDLL("libcuda.so.1").recording_fail(b"slow@")
flashgen.attention(*(torch.empty(1, 1, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv"))
print(round(before / stopwatch.clock_mhz(), 1))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ.copy()
    )
    assert done.stdout == "2.0\n", done.stderr


def test_a_clock_that_drops_in_the_middle_spoils_a_measurement() -> None:
    """About the 20th of 40 samples. The tuner's evaluator says unsteady of it, and goes on."""
    program = """
import torch, flashgen
from flashgen.evaluate import measure
measure.BUDGETS["timed"] = measure.MeasureBudget(warm_s=0.0, sample_s=0.0, least=40, most=40)
qkv = [torch.empty(1, 1, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv"]
measure.measure(
    lambda: flashgen.attention(*qkv), effort="timed", stopwatch=measure.CudaStopwatch(0, 60 << 20),
    ceiling=measure.Ceiling(operations=1.0, peak_tflops=None),
)
"""
    slow = {"RECORDING_CUDA_US": "400", "RECORDING_CUDA_FAIL": "slow@fwd#22"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | slow
    )
    assert "Unsteady: times changed 2.00-fold for good in the middle" in done.stderr, done.stderr


def test_a_device_is_read_where_torch_did_not_initialize_cuda() -> None:
    """PYTORCH_NVML_BASED_CUDA_CHECK makes is_available() ask NVML, where it is there."""
    program = """
import torch
torch.cuda.is_available = lambda: True
from flashgen.kernels.launch import device_gpu
gpu = device_gpu(0)
print(gpu.slug, gpu.sms, gpu.shared_per_block, gpu.registers_per_sm, gpu.l2_bytes)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ.copy()
    )
    assert done.stdout == f"nvidia_h200 132 232448 65536 {L2}\n", done.stderr


def test_the_gpu_that_is_read_is_the_known_target() -> None:
    assert device_gpu(0) == TARGETS["nvidia_h200"]
