"""The measuring protocol against a clock made up for the test: no GPU, no waiting, no luck."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashgen.evaluate import gpu_state, inputs, measure
from flashgen.evaluate.measure import BUDGETS, Ceiling, Conditions, Implausible, Unsteady, jump
from flashgen.evaluate.payloads import FINAL_LIMIT_PER_CONFIG_S, MEASURE_LIMIT_S
from flashgen.schedules.outcome import Timing
from flashgen.spec.problem import Problem, workload
from tests.makers import make_spec

NO_CEILING = Ceiling(operations=1.0, peak_tflops=None)
FLUSH_US = 25.0


class FakeStopwatch:
    """A GPU on which launch n of a run takes run(n) microseconds, and every flush FLUSH_US."""

    def __init__(self, mhz: float | None = None) -> None:
        self.seconds = 0.0
        self.mhz = mhz
        self.launched: list[Callable[[], object]] = []
        self.batches: list[int] = []

    def time(self, run: Callable[[], object], count: int) -> list[float]:
        times = [float(run()) for _ in range(count)]  # type: ignore[arg-type]
        self.launched += [run] * count
        self.batches.append(count)
        self.seconds += sum(times) * 1e-6 + count * FLUSH_US * 1e-6
        return times

    def now(self) -> float:
        return self.seconds

    def clock_mhz(self) -> float | None:
        return self.mhz


def kernel(times: Iterator[float] | float) -> Callable[[], float]:
    """A run that takes the next of these times, or always the same."""
    endless = itertools.repeat(times) if isinstance(times, float) else times
    return lambda: next(endless)


def after(first: list[float], then: float) -> Iterator[float]:
    return itertools.chain(first, itertools.repeat(then))


def test_median_and_percentiles_are_those_of_the_samples() -> None:
    timing = measure.summarize([5.0, 1.0, 2.0, 4.0, 3.0, 6.0], NO_CEILING)
    assert (timing.median_us, timing.low_us, timing.high_us, timing.samples) == (3.5, 2.0, 5.0, 6)
    one = measure.summarize([7.0], NO_CEILING)
    assert (one.median_us, one.low_us, one.high_us) == (7.0, 7.0, 7.0)


@pytest.mark.parametrize("effort", ["rough", "timed"])
@pytest.mark.parametrize("microseconds", [5.0, 500.0, 20_000.0, 2_000_000.0])
def test_counts_follow_from_time_within_their_bounds(effort: Any, microseconds: float) -> None:
    stopwatch, budget = FakeStopwatch(), BUDGETS[effort]
    timing = measure.measure(
        kernel(microseconds), effort=effort, stopwatch=stopwatch, ceiling=NO_CEILING
    )
    assert budget.least <= timing.samples <= budget.most
    assert timing.median_us == microseconds
    fitting = budget.sample_s * 1e6 / (microseconds + FLUSH_US)
    expected = min(max(fitting, budget.least), budget.most)
    assert abs(timing.samples - expected) <= measure.LARGEST_BATCH
    assert max(stopwatch.batches) <= measure.LARGEST_BATCH


@pytest.mark.parametrize("effort", ["rough", "timed"])
def test_a_launch_of_a_second_fits_the_limit(effort: Any) -> None:
    stopwatch = FakeStopwatch()
    measure.measure(kernel(1e6), effort=effort, stopwatch=stopwatch, ceiling=NO_CEILING)
    assert stopwatch.now() < MEASURE_LIMIT_S / 3  # the rest is for compiling and the first use


def test_launches_of_a_second_fit_the_limit_of_the_final_round() -> None:
    stopwatch, runs = FakeStopwatch(), [kernel(1e6) for _ in range(6)]
    measure.interleave(runs, stopwatch=stopwatch, ceilings=[NO_CEILING] * 6)
    assert stopwatch.now() < 0.75 * FINAL_LIMIT_PER_CONFIG_S * 6


@pytest.mark.parametrize(
    ("medians", "launches"),
    [
        ([1e6, 2e6], [1, 0]),  # a launch is enough
        ([150_000.0, 100.0], [2, 1]),
        ([1000.0, 3000.0], [50, 50]),
        ([1.0], [4000]),  # the host queues no faster
    ],
)
def test_the_gpu_is_kept_busy_for_a_time_not_a_count(
    medians: list[float], launches: list[int]
) -> None:
    counts = [0] * len(medians)

    def launch(number: int) -> None:
        counts[number] += 1

    timings = [Timing(median_us=us, low_us=us, high_us=us) for us in medians]
    runs = [functools.partial(launch, number) for number in range(len(medians))]
    measure.keep_busy(runs, timings)
    assert counts == launches


def test_long_kernels_run_in_short_batches() -> None:
    stopwatch = FakeStopwatch()
    assert measure.warm_up(kernel(30_000.0), stopwatch, 1.0) == 1
    assert measure.warm_up(kernel(5_000.0), stopwatch, 1.0) == 4
    assert measure.warm_up(kernel(5.0), stopwatch, 1.0) == measure.LARGEST_BATCH


def test_samples_are_taken_only_once_times_are_steady() -> None:
    slow_start = [300.0 - i for i in range(100)]  # falls by more than 2 % in three batches
    timing = measure.measure(
        kernel(after(slow_start, 100.0)),
        effort="timed",
        stopwatch=FakeStopwatch(),
        ceiling=NO_CEILING,
    )
    assert (timing.low_us, timing.median_us, timing.high_us) == (100.0, 100.0, 100.0)


def test_the_launch_that_compiles_decides_nothing() -> None:
    stopwatch = FakeStopwatch()
    compiles = kernel(after([900_000.0], 10.0))
    assert measure.warm_up(compiles, stopwatch, 1.0) == measure.LARGEST_BATCH


def test_warming_ends_although_times_never_settle() -> None:
    stopwatch = FakeStopwatch()
    restless = kernel(100.0 * (1 + (i // 16) % 2) for i in itertools.count())
    measure.warm_up(restless, stopwatch, 0.5)
    assert 0.5 <= stopwatch.now() < 0.6


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_final_round_treats_all_alike(count: int) -> None:
    stopwatch = FakeStopwatch()
    runs = [kernel(100.0 + number) for number in range(count)]
    raced = measure.interleave(runs, stopwatch=stopwatch, ceilings=[NO_CEILING] * count)
    assert [r.timing.median_us for r in raced] == [100.0 + number for number in range(count)]
    assert len({(r.timing.samples, len(r.passes_us)) for r in raced}) == 1
    for number, each in enumerate(raced):
        assert set(each.passes_us) == {100.0 + number}
        assert len(each.passes_us) * measure.FINAL_BATCH == each.timing.samples
        assert each.timing.samples == BUDGETS["final"].most  # a kernel so short has the time


def test_a_round_of_the_slowest_kernels_has_passes_enough_for_its_test() -> None:
    """So few cannot be sampled longer, and THE RULE must be able to prove something by them."""
    runs = [kernel(1e6) for _ in range(6)]
    raced = measure.interleave(runs, stopwatch=FakeStopwatch(), ceilings=[NO_CEILING] * 6)
    assert {len(each.passes_us) for each in raced} == {10}


def test_a_pass_is_the_median_of_its_own_samples_in_their_order() -> None:
    """Launch n of a kernel takes 1000 + n us, so each pass has the median of its place."""
    counter = itertools.count(1000)
    raced = measure.interleave(
        [kernel(1000.0), lambda: float(next(counter))],
        stopwatch=FakeStopwatch(),
        ceilings=[NO_CEILING] * 2,
    )
    passes = raced[1].passes_us
    assert len(passes) > 10
    assert {later - earlier for earlier, later in itertools.pairwise(passes)} == {
        float(measure.FINAL_BATCH)
    }
    assert passes[0] % 1 == 0.5  # the median of four in a row


def test_a_drift_hits_all_candidates_of_the_final_round_alike() -> None:
    """Two kernels of one speed on a GPU that slows steadily come out the same."""
    stopwatch = FakeStopwatch()

    def drifting() -> float:
        return 100.0 + 100.0 * stopwatch.now()

    first, second = measure.interleave(
        [lambda: drifting(), lambda: drifting()],
        stopwatch=stopwatch,
        ceilings=[NO_CEILING] * 2,
    )
    assert math.isclose(first.timing.median_us, second.timing.median_us, rel_tol=1e-4)
    assert first.timing.high_us > 1.1 * first.timing.low_us, "the drift was too small to show it"
    # Each of the two comes first in every second pass, and gains by it as often as it loses.
    faster = [a < b for a, b in zip(first.passes_us, second.passes_us, strict=True)]
    assert faster[0]
    assert all(one != other for one, other in itertools.pairwise(faster))


def test_the_final_round_alternates_in_both_directions() -> None:
    stopwatch = FakeStopwatch()
    runs = [kernel(1000.0) for _ in range(3)]
    measure.interleave(runs, stopwatch=stopwatch, ceilings=[NO_CEILING] * 3)
    sampled = stopwatch.launched[-6 * measure.FINAL_BATCH :]
    order = [runs.index(run) for run, _ in itertools.groupby(sampled)]
    assert order in ([0, 1, 2, 1, 0], [2, 1, 0, 1, 2])


HALF_TIME = 2.0
"""The stopwatch's second at which the clock of these tests drops."""


def at_the_clock(stopwatch: FakeStopwatch, us: float, slower: float) -> Callable[[], float]:
    """A kernel of `us` until HALF_TIME, and so many times slower from then on."""
    return lambda: us * (slower if stopwatch.seconds >= HALF_TIME else 1.0)


class TestTheClock:
    @pytest.mark.parametrize("slower", [2.0, 0.5, 1.6])
    @pytest.mark.parametrize(("us", "sampling_s"), [(100.0, 0.06), (20_000.0, 0.4)])
    def test_a_change_in_the_middle_is_refused(
        self, us: float, sampling_s: float, slower: float
    ) -> None:
        stopwatch = FakeStopwatch()
        warming_s = (2 + 3 * min(16, 20_000 / us)) * us * 1e-6
        stopwatch.seconds = HALF_TIME - warming_s - sampling_s / 2
        with pytest.raises(Unsteady, match=r"changed \d\.\d\d-fold for good in the middle"):
            measure.measure(
                at_the_clock(stopwatch, us, slower),
                effort="timed",
                stopwatch=stopwatch,
                ceiling=NO_CEILING,
            )

    @pytest.mark.parametrize("slower", [2.0, 0.5])
    def test_in_a_final_round_too(self, slower: float) -> None:
        stopwatch = FakeStopwatch()
        runs = [at_the_clock(stopwatch, us, slower) for us in (1000.0, 1100.0, 4000.0)]
        stopwatch.seconds = HALF_TIME - 1.5 * BUDGETS["final"].sample_s
        with pytest.raises(Unsteady):
            measure.interleave(runs, stopwatch=stopwatch, ceilings=[NO_CEILING] * 3)

    @pytest.mark.parametrize("slower", [1.2, 1 / 1.2])
    def test_what_heat_and_power_do_is_not(self, slower: float) -> None:
        stopwatch = FakeStopwatch()
        stopwatch.seconds = HALF_TIME - 0.03  # it samples 0.06 s
        timing = measure.measure(
            at_the_clock(stopwatch, 100.0, slower),
            effort="timed",
            stopwatch=stopwatch,
            ceiling=NO_CEILING,
        )
        assert timing.high_us / timing.low_us == pytest.approx(1.2)

    def test_one_candidate_that_changes_alone_is_not_the_clock(self) -> None:
        stopwatch = FakeStopwatch()
        steady = [kernel(1000.0) for _ in range(3)]
        stopwatch.seconds = HALF_TIME - 2 * BUDGETS["final"].sample_s
        moody, *others = measure.interleave(
            [at_the_clock(stopwatch, 1000.0, 3.0), *steady],
            stopwatch=stopwatch,
            ceilings=[NO_CEILING] * 4,
        )
        assert set(moody.passes_us) == {1000.0, 3000.0}
        assert all(set(other.passes_us) == {1000.0} for other in others)

    @pytest.mark.parametrize("mhz", [None, 990.0])
    def test_every_figure_says_what_the_clock_was_after_it(self, mhz: float | None) -> None:
        watch = FakeStopwatch(mhz)
        alone = measure.measure(kernel(100.0), effort="rough", stopwatch=watch, ceiling=NO_CEILING)
        raced = measure.interleave([kernel(100.0)] * 2, stopwatch=watch, ceilings=[NO_CEILING] * 2)
        assert [t.clock_mhz for t in (alone, *(r.timing for r in raced))] == [mhz] * 3


class TestJump:
    def noisy(self, count: int, spread: float = 0.03) -> list[float]:
        """Times around 100, the same each time."""
        return [100.0 * (1 + spread * math.sin(37.0 * n * n)) for n in range(count)]

    @pytest.mark.parametrize("count", [6, 8, 20, 97, 500])
    @pytest.mark.parametrize("at", [0.25, 0.5, 0.7])
    def test_it_is_found_wherever_it_is(self, count: int, at: float) -> None:
        place = min(max(round(at * count), 3), count - 3)
        times = [us if n < place else 2 * us for n, us in enumerate(self.noisy(count))]
        for row in (times, times[::-1]):
            assert jump(row) == pytest.approx(2.0, rel=0.08)

    @pytest.mark.parametrize("count", [0, 1, 5, 6, 50, 500])
    def test_noise_is_none(self, count: int) -> None:
        assert 1.0 <= jump(self.noisy(count)) < 1.02
        assert jump(self.noisy(count, spread=0.3)) < 1.2

    def test_a_slow_drift_is_none(self) -> None:
        ramp = [100.0 + n for n in range(50)]  # to 1.5 times, in all
        assert jump(ramp) < 1.25

    def test_outliers_are_none_even_in_a_row(self) -> None:
        times = self.noisy(50)
        assert jump([*times[:20], *[500.0] * 8, *times[28:]]) < 1.02
        assert jump([*times[:44], *[500.0] * 6]) < 1.02

    def test_times_of_nothing_do_no_harm(self) -> None:
        assert jump([0.0] * 10) == 1.0 or math.isinf(jump([0.0] * 10))


def test_an_empty_round_is_no_error() -> None:
    assert measure.interleave([], stopwatch=FakeStopwatch(), ceilings=[]) == []


def test_a_figure_above_the_peak_is_refused() -> None:
    ceiling = Ceiling(operations=1e12, peak_tflops=1000.0)  # 1000 us at the peak
    assert measure.summarize([1001.0], ceiling).median_us == 1001.0
    assert measure.summarize([900.0], ceiling).median_us == 900.0  # a board above its boost clock
    with pytest.raises(Implausible, match="13000 TFLOP/s, and the peak is 1000"):
        measure.summarize([1e6 / 13000], ceiling)
    assert measure.summarize([1.0], Ceiling(operations=1e12, peak_tflops=None)).median_us == 1.0


@pytest.mark.parametrize("nothing", [0.0, -1.0, math.nan])
def test_a_time_of_nothing_is_refused(nothing: float) -> None:
    with pytest.raises(Implausible, match="cannot have run"):
        measure.summarize([nothing], NO_CEILING)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_inputs_have_the_problem_s_shapes_and_are_never_zeros(dtype: str) -> None:
    spec = make_spec(dtype, 40, head_dim_v=24)
    problem = Problem(batch=2, heads=4, kv_heads=2, seq_q=33, seq_k=65)
    q, k, v = inputs.make_inputs(spec, problem, 3, "cpu")
    assert [tuple(x.shape) for x in (q, k, v)] == [(2, 4, 33, 40), (2, 2, 65, 40), (2, 2, 65, 24)]
    for x in (q, k, v):
        assert x.dtype == getattr(torch, dtype)
        assert x.is_contiguous()
        assert abs(float(x.double().mean())) < 0.1
        assert abs(float(x.double().std()) - 1) < 0.1
    again = inputs.make_inputs(spec, problem, 3, "cpu")
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), again, strict=True))
    assert not torch.equal(q, inputs.make_inputs(spec, problem, 4, "cpu")[0])


@pytest.mark.parametrize(
    ("fields", "tflops"), [({}, 989), ({"fp8": True}, 1979), ({"dtype": "float32", "precision": "tf32"}, 495)]
)  # fmt: skip
def test_a_ceiling_is_the_peak_of_the_operands(fields: dict[str, Any], tflops: float) -> None:
    from flashgen.evaluate.payloads import Launches
    from flashgen.evaluate.tasks import ceilings
    from flashgen.spec.gpu import known_target

    spec = make_spec(head_dim=128, **fields)
    asked = Launches(
        spec=spec, problem=workload(spec, 8192), device="cuda:0", seed=0, l2_bytes=0,
        peak_tflops=known_target("nvidia_h200").peak_tflops, cache="",
    )  # fmt: skip
    (ceiling,) = ceilings(asked)
    assert ceiling.peak_tflops == pytest.approx(tflops, rel=0.01)
    (unknown,) = ceilings(replace(asked, peak_tflops=None))
    assert unknown.peak_tflops is None


def test_the_workload_s_peak_is_what_a_ceiling_compares() -> None:
    from flashgen.spec.gpu import known_target
    from flashgen.spec.problem import flops

    spec = make_spec(head_dim=128)
    h200 = known_target("nvidia_h200")
    ceiling = Ceiling(operations=flops(spec, workload(spec, 8192)), peak_tflops=h200.peak_tflops)
    at_600_tflops = ceiling.operations / 600e6
    assert measure.summarize([at_600_tflops], ceiling).tflops(ceiling.operations) == pytest.approx(
        600
    )
    with pytest.raises(Implausible):
        measure.summarize([at_600_tflops / 3], ceiling)


class NvmlError(Exception):
    pass


def fake_nvml(**answers: Any) -> SimpleNamespace:
    """A pynvml that answers these functions, and refuses all others."""

    def refuse(*_: Any) -> None:
        raise NvmlError

    names = (
        "nvmlSystemGetDriverVersion nvmlDeviceGetPowerUsage nvmlDeviceGetEnforcedPowerLimit "
        "nvmlDeviceGetClockInfo nvmlDeviceGetTemperature nvmlDeviceGetFieldValues nvmlInit "
        "nvmlShutdown"
    ).split()
    module = SimpleNamespace(
        NVMLError=NvmlError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        NVML_FI_DEV_POWER_INSTANT=186,
    )
    for name in names:
        setattr(module, name, answers.get(name, refuse))
    return module


def test_conditions_are_none_without_a_driver_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert measure.clocks_and_power(0) == Conditions()
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    assert measure.clocks_and_power(0) == Conditions()


def test_conditions_hold_what_the_driver_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = fake_nvml(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: b"580.1",
        nvmlDeviceGetPowerUsage=lambda handle: 651_200,
        nvmlDeviceGetClockInfo=lambda handle, kind: {1: 1755, 2: 3201}[kind],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(gpu_state, "_nvml_handle", lambda nvml, index: index)
    assert measure.clocks_and_power(0) == Conditions(
        driver="580.1", sm_mhz=1755, memory_mhz=3201, power_w=651.2
    )


def test_power_is_that_of_now_where_the_driver_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nvmlDeviceGetPowerUsage gives is the mean of a second, most of it before the load."""
    now = SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=690_100))
    nvml = fake_nvml(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetPowerUsage=lambda handle: 301_000,
        nvmlDeviceGetFieldValues=lambda handle, fields: [now] if fields == [186] else None,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(gpu_state, "_nvml_handle", lambda nvml, index: index)
    assert measure.clocks_and_power(0).power_w == 690.1
    now.nvmlReturn = 3  # not supported
    assert measure.clocks_and_power(0).power_w == 301.0


class FakeCuda:
    """torch.cuda as CudaStopwatch uses it: a queue, in which an event notes the time it is reached."""

    def __init__(self, mhz: Callable[[float], float] = lambda us: 1000.0) -> None:
        self.microseconds = 0.0
        self.mhz = mhz
        self.journal: list[str] = []

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at=0.0)

        def record() -> None:
            event.at = self.microseconds
            self.journal.append("event")

        event.record = record
        event.elapsed_time = lambda end: (end.at - event.at) / 1e3
        return event

    def device(self, device: Any) -> Any:
        return torch.device("cpu")  # a device is a context manager, too

    def synchronize(self) -> None:
        self.journal.append("synchronize")

    def _sleep(self, cycles: int) -> None:
        assert cycles > 0
        self.microseconds += cycles / self.mhz(self.microseconds)
        self.journal.append("wait")


def stopwatch_on(cuda: FakeCuda) -> measure.CudaStopwatch:
    """A CudaStopwatch of this device; its own clock is the device's."""
    stopwatch = measure.CudaStopwatch.__new__(measure.CudaStopwatch)
    stopwatch._torch = SimpleNamespace(cuda=cuda)  # type: ignore[assignment]
    stopwatch._device = torch.device("cuda", 0)
    stopwatch._enqueue_s = 0.001
    stopwatch._highest_mhz = 0.0
    stopwatch.now = lambda: cuda.microseconds * 1e-6  # type: ignore[method-assign]
    return stopwatch


class TestTheClockOfADevice:
    """Told by a kernel that counts its SM's cycles."""

    LIMIT_US = measure.CudaStopwatch.CLOCK_LIMIT_S * 1e6

    def test_it_is_cycles_over_time(self) -> None:
        stopwatch = stopwatch_on(FakeCuda(lambda us: 1755.0))
        assert stopwatch.clock_mhz() == pytest.approx(1755.0)

    def test_the_first_time_the_highest_of_a_while_counts(self) -> None:
        """The kernel before held it down, and nothing tells yet what is usual."""
        cuda = FakeCuda(lambda us: 900.0 if us < 0.8 * self.LIMIT_US else 1980.0)
        assert stopwatch_on(cuda).clock_mhz() == pytest.approx(1980.0)
        assert cuda.microseconds >= self.LIMIT_US

    def test_later_one_look_is_enough(self) -> None:
        cuda = FakeCuda(lambda us: 1980.0)
        stopwatch = stopwatch_on(cuda)
        stopwatch.clock_mhz()
        before = cuda.microseconds
        assert stopwatch.clock_mhz() == pytest.approx(1980.0)
        assert cuda.microseconds - before < 2000  # a spin takes a millisecond

    def test_what_a_hot_kernel_holds_down_for_a_while_is_waited_for(self) -> None:
        cuda = FakeCuda(lambda us: 1980.0 if us < 2e6 or us > 2.1e6 else 900.0)
        stopwatch = stopwatch_on(cuda)
        stopwatch.clock_mhz()
        cuda.microseconds = 2e6
        assert stopwatch.clock_mhz() == pytest.approx(1980.0)
        assert cuda.microseconds < 2.2e6

    def test_a_drop_that_stays_is_told(self) -> None:
        cuda = FakeCuda(lambda us: 1980.0 if us < 2e6 else 990.0)
        stopwatch = stopwatch_on(cuda)
        stopwatch.clock_mhz()
        cuda.microseconds = 2e6
        assert stopwatch.clock_mhz() == pytest.approx(990.0)
        assert cuda.microseconds < 2e6 + 1.1 * self.LIMIT_US


def test_a_sample_holds_the_launch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch: wait, then flush, event, launch, event for every sample, then one synchronize."""
    cuda = FakeCuda()

    def flush() -> None:
        cuda.microseconds += 40.0
        cuda.journal.append("flush")

    def run() -> None:
        cuda.microseconds += 123.0
        cuda.journal.append("launch")

    stopwatch = stopwatch_on(cuda)
    stopwatch._flush = flush  # type: ignore[method-assign]
    assert stopwatch.time(run, 3) == pytest.approx([123.0] * 3)
    sample = ["flush", "event", "launch", "event"]
    assert cuda.journal == ["synchronize", "wait", *sample * 3, "synchronize"]


@pytest.mark.parametrize(("l2_bytes", "each_bytes"), [(3 << 20, 6 << 20), (0, 2 << 20)])
def test_twice_the_l2_is_written_and_read_before_a_launch(
    monkeypatch: pytest.MonkeyPatch, l2_bytes: int, each_bytes: int
) -> None:
    monkeypatch.setattr(torch, "device", lambda kind, index: "cpu")
    stopwatch = measure.CudaStopwatch(0, l2_bytes)
    assert (stopwatch._written.nbytes, stopwatch._read.nbytes) == (each_bytes, each_bytes)
    stopwatch._written.fill_(1.0)
    stopwatch._read.fill_(1.0)
    stopwatch._flush()
    assert not stopwatch._written.any()
    assert stopwatch._sum == each_bytes // 4
