"""The GPU evaluator and the stopwatch on a device: the contract, faults, and figures that make sense."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgen.evaluate.inputs import make_inputs
from flashgen.evaluate.measure import Ceiling, CudaStopwatch, clocks_and_power, measure
from flashgen.evaluate.on_gpu import GpuEvaluator
from flashgen.evaluate.payloads import DEVICE_ENV
from flashgen.evaluate.workers.answers import Done, Raised, Task, TimedOut
from flashgen.evaluate.workers.pool import Workers
from flashgen.kernels.launch import device_gpu
from flashgen.schedules.outcome import Status
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import flops, workload
from tests.evaluator_contract import EvaluatorContract
from tests.makers import make_config, make_spec


class TestGpuEvaluatorContract(EvaluatorContract):
    def make(self, tmp_path: Path) -> GpuEvaluator:
        return GpuEvaluator(device_gpu(0), 0, tmp_path)


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_right_and_timed_below_the_peak(dtype: str, mask: str, gpu: Gpu, tmp_path: Path) -> None:
    spec = make_spec(dtype, 64, mask)
    problem = workload(spec, 2048)
    configs = (make_config(64, 64), make_config(128, 64))
    with GpuEvaluator(gpu, 0, tmp_path) as evaluator:
        checks = list(evaluator.evaluate("check", spec, problem, configs))
        finals = list(evaluator.evaluate("final", spec, problem, configs))
        conditions = evaluator.conditions
    assert [o.status for o in checks] == [Status.OK] * 2, [o.detail for o in checks]
    assert all(o.check is not None and o.check.where == "gpu" for o in checks)
    assert [o.status for o in finals] == [Status.OK] * 2, [o.detail for o in finals]
    for outcome in finals:
        assert outcome.timing is not None
        assert outcome.source == "measured"
        assert outcome.timing.low_us <= outcome.timing.median_us <= outcome.timing.high_us
        rate = outcome.timing.tflops(flops(spec, problem))
        assert rate > 5
        assert gpu.peak_tflops is None or rate < 1.2 * gpu.peak_tflops
    assert conditions is not None


def test_timed_twice_it_comes_out_the_same(gpu: Gpu, tmp_path: Path) -> None:
    spec = make_spec("bfloat16", 64)
    problem = workload(spec, 4096)
    config = make_config(128, 64)
    with GpuEvaluator(gpu, 0, tmp_path) as evaluator:
        medians = [
            outcome.timing.median_us
            for _ in range(3)
            for outcome in evaluator.evaluate("timed", spec, problem, (config,))
            if outcome.timing is not None
        ]
    assert len(medians) == 3
    assert max(medians) < 1.1 * min(medians), medians


def stopwatch_of(gpu: Gpu) -> CudaStopwatch:
    return CudaStopwatch(0, gpu.l2_bytes)


def test_a_sample_holds_no_launch_overhead(gpu: Gpu) -> None:
    """An empty kernel's sample stays far under the 100 us and more that the host takes for it here."""
    stopwatch = stopwatch_of(gpu)
    tiny = torch.ones(1, device="cuda:0")

    def slow_to_launch() -> None:
        for _ in range(20_000):
            pass
        tiny.add_(1)

    stopwatch.time(slow_to_launch, 4)
    samples = sorted(stopwatch.time(slow_to_launch, 8))
    assert samples[len(samples) // 2] < 50.0, samples


def test_samples_find_a_cold_cache(gpu: Gpu) -> None:
    """Reading a buffer that fits half the L2 takes longer than doing so twice in a row."""
    buffer = torch.ones(max(1, gpu.l2_bytes // 8), device="cuda:0", dtype=torch.float32)
    stopwatch = stopwatch_of(gpu)
    stopwatch.time(buffer.sum, 3)
    cold = sorted(stopwatch.time(buffer.sum, 15))[7]

    def twice() -> None:
        buffer.sum()
        buffer.sum()

    warm = sorted(stopwatch.time(twice, 15))[7] - cold
    assert warm < cold, (warm, cold)


def test_known_work_is_timed_at_a_known_rate(gpu: Gpu) -> None:
    """A large matrix product reaches between a fifth of the peak and the peak."""
    if gpu.peak_tflops is None:
        pytest.skip(f"the peak of {gpu.slug} is not known")
    size = 8192
    a = torch.randn(size, size, device="cuda:0", dtype=torch.bfloat16)
    b = torch.randn(size, size, device="cuda:0", dtype=torch.bfloat16)
    ceiling = Ceiling(operations=2.0 * size**3, peak_tflops=gpu.peak_tflops)
    timing = measure(lambda: a @ b, effort="timed", stopwatch=stopwatch_of(gpu), ceiling=ceiling)
    assert 0.2 * gpu.peak_tflops < timing.tflops(ceiling.operations) < 1.2 * gpu.peak_tflops


def test_conditions_are_read(gpu: Gpu) -> None:
    pytest.importorskip("pynvml")
    conditions = clocks_and_power(0)
    assert conditions.driver
    assert conditions.sm_mhz is None or 100 <= conditions.sm_mhz <= 4000
    assert conditions.power_w is None or 1 < conditions.power_w < 2000


def test_inputs_on_the_device_repeat(gpu: Gpu) -> None:
    spec = make_spec("bfloat16", 64)
    problem = workload(spec, 512)
    first = make_inputs(spec, problem, 5, "cuda:0")
    again = make_inputs(spec, problem, 5, "cuda:0")
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert first[0].device == torch.device("cuda", 0)


# Tasks for the child that owns the device.


def sane(payload: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {"sum": float(torch.ones(10, device="cuda:0").sum())}


def illegal_access(payload: dict[str, Any]) -> dict[str, Any]:
    """An index out of bounds on the device: from then on every call of this process fails."""
    from flashgen.evaluate import tasks

    with tasks._guarded("cuda:0"):
        torch.zeros(4, device="cuda:0")[torch.tensor([1 << 20], device="cuda:0")].sum().item()
    return {}


def endless_kernel(payload: dict[str, Any]) -> dict[str, Any]:
    for _ in range(100):
        torch.cuda._sleep(1 << 40)  # some minutes each
    torch.cuda.synchronize()
    return {}


def ask(workers: Workers, function: str, limit_s: float = 60.0) -> Any:
    task = Task(function=f"tests.gpu.test_evaluator_gpu:{function}", payload={}, limit_s=limit_s)
    return workers.submit(task).result()


def test_a_fresh_child_follows_an_illegal_access(gpu: Gpu) -> None:
    with Workers(1, env=DEVICE_ENV) as workers:
        assert ask(workers, "sane") == Done({"sum": 10.0})
        (before,) = workers._children
        got = ask(workers, "illegal_access")
        assert isinstance(got, Raised)
        assert got.ended
        assert ask(workers, "sane") == Done({"sum": 10.0})
        (after,) = workers._children
        assert before is not after


def test_a_kernel_that_never_ends_is_killed(gpu: Gpu) -> None:
    with Workers(1, env=DEVICE_ENV) as workers:
        assert ask(workers, "sane") == Done({"sum": 10.0})
        assert ask(workers, "endless_kernel", limit_s=10.0) == TimedOut(10.0)
        assert ask(workers, "sane") == Done({"sum": 10.0})


def test_compiling_opens_no_context_on_the_device() -> None:
    """A compile child sees no device, so that it cannot disturb the one that measures."""
    from flashgen.evaluate.payloads import COMPILE_ENV
    from flashgen.evaluate.workers.pool import child_environment

    seen = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"],
        env=child_environment(COMPILE_ENV),
        capture_output=True,
        text=True,
        check=True,
    )
    assert seen.stdout.strip() == "0"


def test_what_does_not_fit_is_an_outcome(gpu: Gpu, tmp_path: Path) -> None:
    """The largest tiles with the deepest pipeline: legal by the bound or not, never an exception."""
    spec: AttentionSpec = make_spec("bfloat16", 256)
    configs = [
        make_config(br, bc, num_warps=8, num_stages=stages)
        for br in (128, 256)
        for bc in (64, 128, 256)
        for stages in (2, 4)
    ]
    with GpuEvaluator(gpu, 0, tmp_path) as evaluator:
        outcomes = list(evaluator.evaluate("rough", spec, workload(spec, 512), configs))
    assert len(outcomes) == len(configs)
    assert all(outcome.ok or outcome.detail for outcome in outcomes)
    assert any(not outcome.ok for outcome in outcomes)
