"""The evaluators against their contract, with stand-ins for the slow tasks, and for real on two configs."""

from __future__ import annotations

import json
import math
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.errors import NoEstimate, ToolchainError
from flashgen.evaluate import offline
from flashgen.evaluate.evaluator import Evaluator
from flashgen.evaluate.measure import Conditions
from flashgen.evaluate.offline import OfflineEvaluator
from flashgen.evaluate.on_gpu import GpuEvaluator
from flashgen.evaluate.payloads import (
    FINAL_LIMIT_PER_CONFIG_S,
    INTERPRET_ENV,
    MEASURE_LIMIT_S,
    Tasks,
)
from flashgen.evaluate.pools import Device
from flashgen.evaluate.workers.answers import Answer, Task
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Status, Timing
from flashgen.spec.gpu import known_target
from flashgen.spec.problem import Problem, flops, workload
from tests.evaluator_contract import STAGES, EvaluatorContract, FaultsContract, played
from tests.makers import each, make_config, make_spec

H200 = known_target("nvidia_h200")
SPEC = make_spec(head_dim=64)
PROBLEM = workload(SPEC, 512)
FAULTY = make_config(64, 32, num_stages=5)  # the one that tests.worker_faults misbehaves on
GOOD = (make_config(64, 32), make_config(64, 64), make_config(128, 32))

FAKE_TASKS = Tasks(
    compile="tests.worker_faults:compile_one",
    check="tests.worker_faults:check_one",
    measure="tests.worker_faults:measure_one",
    final="tests.worker_faults:measure_round",
    answers="tests.worker_faults:device_answers",
)


def offline_evaluator(cache: Path) -> OfflineEvaluator:
    return OfflineEvaluator(H200, cache, 2, tasks=FAKE_TASKS)


def gpu_evaluator(cache: Path) -> GpuEvaluator:
    return GpuEvaluator(H200, 0, cache, 2, tasks=FAKE_TASKS)


@pytest.fixture
def estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates of the stand-ins' facts, which are of no real kernel."""
    timing = Timing(median_us=10.0, low_us=5.0, high_us=20.0)
    monkeypatch.setattr(offline, "estimated", lambda *_: timing)


@pytest.mark.usefixtures("estimates")
class TestOfflineContract(EvaluatorContract):
    def make(self, tmp_path: Path) -> OfflineEvaluator:
        return offline_evaluator(tmp_path)


class TestGpuContract(EvaluatorContract):
    def make(self, tmp_path: Path) -> GpuEvaluator:
        return gpu_evaluator(tmp_path)


@pytest.mark.usefixtures("estimates")
class TestOfflineFaults(FaultsContract):
    fault_stages = ("compile", "check")
    slow_stages = ("compile",)

    def make(self, tmp_path: Path) -> OfflineEvaluator:
        return offline_evaluator(tmp_path)


class TestGpuFaults(FaultsContract):
    fault_stages = ("compile", "check", "timed", "final")
    slow_stages = ("compile", "check", "timed")

    def make(self, tmp_path: Path) -> GpuEvaluator:
        return gpu_evaluator(tmp_path)


BOTH = pytest.mark.parametrize(
    "make", each([gpu_evaluator, offline_evaluator], 2, "make test has that of a GPU")
)


@BOTH
@pytest.mark.parametrize(
    ("behaviour", "status", "words"),
    [
        ("abort", Status.COMPILE_CRASH, "LLVM ERROR: Broken invariant"),
        ("refuse", Status.COMPILE_ERROR, "ValueError: tile too odd"),
        ("out_of_memory", Status.COMPILE_CRASH, "OutOfMemoryError"),
    ],
)
@pytest.mark.usefixtures("estimates")
def test_a_kernel_that_does_not_compile_is_kept_and_asked_for_once(
    make, behaviour: str, status: Status, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setenv("STAGE", "compile")
    monkeypatch.setenv("BEHAVIOUR", behaviour)
    monkeypatch.setenv("FAULTS_FOLDER", str(tmp_path))
    with make(tmp_path) as evaluator:
        for stage in ("compile", "timed"):
            outcomes = list(evaluator.evaluate(stage, SPEC, PROBLEM, (GOOD[0], FAULTY, GOOD[1])))
            assert [o.status for o in outcomes] == [Status.OK, status, Status.OK]
            assert words in outcomes[1].detail
    kept = Path(outcomes[1].detail.partition("kernel kept in ")[2])
    assert "@triton.jit" in kept.read_text()
    # For want of memory, it is asked again where others had used the child.
    assert played(tmp_path)[behaviour] in ((1, 2) if behaviour == "out_of_memory" else (1,))


@BOTH
@pytest.mark.parametrize(
    ("behaviour", "status"),
    [
        ("refuse", Status.RUN_ERROR),
        ("spoil", Status.CRASHED),
        ("out_of_memory", Status.OUT_OF_RESOURCES),
        ("out_of_resources", Status.OUT_OF_RESOURCES),
    ],
)
def test_a_check_that_fails_is_one_outcome(
    make, behaviour: str, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGE", "check")
    monkeypatch.setenv("BEHAVIOUR", behaviour)
    with make(tmp_path) as evaluator:
        outcomes = list(evaluator.evaluate("check", SPEC, PROBLEM, (GOOD[0], FAULTY, GOOD[1])))
    assert [o.status for o in outcomes] == [Status.OK, status, Status.OK]
    assert outcomes[1].check is None
    assert outcomes[1].detail


@BOTH
def test_a_wrong_kernel_is_wrong_and_says_how_much(make, tmp_path: Path) -> None:
    wrong = make_config(16, 32, num_warps=1)
    with make(tmp_path) as evaluator:
        (outcome,) = evaluator.evaluate("check", SPEC, PROBLEM, (wrong,))
    assert outcome.status is Status.WRONG
    assert outcome.check is not None
    assert not outcome.check.passed
    assert "1e+04 floors" in outcome.detail


@BOTH
def test_a_slow_kernel_is_checked_all_the_same(make, tmp_path: Path) -> None:
    """A pointer twin may be slow: so whether it is right must be known. That it spills is a reason
    only where no GPU measures what that costs.
    """
    right, wrong = make_config(64, 16), make_config(16, 16, num_warps=1)
    with make(tmp_path) as evaluator:
        for stage in ("compile", "timed"):
            outcomes = list(evaluator.evaluate(stage, SPEC, PROBLEM, (right, wrong)))
            offline = evaluator.source == "estimated"
            slow = Status.SPILLS if offline else Status.SERIALIZED
            assert [o.status for o in outcomes] == [slow] * 2
        outcomes = list(evaluator.evaluate("check", SPEC, PROBLEM, (right, wrong)))
    assert [o.status for o in outcomes] == [Status.OK, Status.WRONG]


@BOTH
def test_what_does_not_fit_the_gpu_is_judged_so_and_carries_the_facts(make, tmp_path: Path) -> None:
    too_large = make_config(64, 256)
    with make(tmp_path) as evaluator:
        (outcome,) = evaluator.evaluate("timed", SPEC, PROBLEM, (too_large,))
    assert outcome.status is Status.OUT_OF_RESOURCES
    assert (outcome.shared_bytes, outcome.registers) == (1 << 20, 104)
    assert outcome.timing is None


@BOTH
def test_a_full_disk_is_raised_not_blamed_on_a_config(
    make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGE", "compile")
    monkeypatch.setenv("BEHAVIOUR", "disk_full")
    with make(tmp_path) as evaluator, pytest.raises(ToolchainError, match="No space left"):
        list(evaluator.evaluate("compile", SPEC, PROBLEM, (FAULTY,)))


class TestOffline:
    def test_a_check_is_made_once_for_all_buckets_gpus_and_runs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = tmp_path / "log"
        monkeypatch.setenv("CHECK_LOG", str(log))
        wrong = make_config(16, 32, num_warps=1)
        statuses = []
        for slug in ("nvidia_h200", "nvidia_h200", "nvidia_a100_sxm4_80gb"):
            with OfflineEvaluator(known_target(slug), tmp_path, 1, tasks=FAKE_TASKS) as evaluator:
                for seq in (512, 8192):
                    outcomes = evaluator.evaluate(
                        "check", SPEC, workload(SPEC, seq), (GOOD[0], wrong, GOOD[0])
                    )
                    statuses.append([o.status for o in outcomes])
        assert statuses == [[Status.OK, Status.WRONG, Status.OK]] * 6
        assert log.read_text().count("checked") == 2

    def test_a_crash_of_a_check_is_not_remembered(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("STAGE", "check")
        for behaviour, status in (("segfault", Status.CRASHED), ("echo", Status.OK)):
            monkeypatch.setenv("BEHAVIOUR", behaviour)
            with offline_evaluator(tmp_path) as evaluator:
                (outcome,) = evaluator.evaluate("check", SPEC, PROBLEM, (FAULTY,))
            assert outcome.status is status

    def test_figures_that_are_none_are_not_remembered(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A NaN of the process is not laid to the kernel for ever."""
        monkeypatch.setenv("STAGE", "check")
        for behaviour, status in (("nan", Status.WRONG), ("echo", Status.OK)):
            monkeypatch.setenv("BEHAVIOUR", behaviour)
            with offline_evaluator(tmp_path) as evaluator:
                (outcome,) = evaluator.evaluate("check", SPEC, PROBLEM, (FAULTY,))
            assert outcome.status is status
            assert (outcome.check is None) == (behaviour == "nan")

    @pytest.mark.parametrize("spoiled", ["{", '{"check": {}}'])
    def test_a_torn_cache_file_is_made_again(self, tmp_path: Path, spoiled: str) -> None:
        with offline_evaluator(tmp_path) as evaluator:
            (first,) = evaluator.evaluate("check", SPEC, PROBLEM, GOOD[:1])
            (file,) = (tmp_path / "checks").iterdir()
            file.write_text(spoiled)
            (second,) = evaluator.evaluate("check", SPEC, PROBLEM, GOOD[:1])
        assert second.check == first.check
        assert json.loads(file.read_text())["check"]["passed"]

    def test_a_check_of_another_triton_is_made_again(self, tmp_path: Path) -> None:
        with offline_evaluator(tmp_path) as evaluator:
            list(evaluator.evaluate("check", SPEC, PROBLEM, GOOD[:1]))
            (file,) = (tmp_path / "checks").iterdir()
            record = json.loads(file.read_text())
            record["check"]["passed"] = False
            file.write_text(json.dumps(record))
            (recalled,) = evaluator.evaluate("check", SPEC, PROBLEM, GOOD[:1])
            file.write_text(json.dumps(record | {"triton": "0.0.1"}))
            (again,) = evaluator.evaluate("check", SPEC, PROBLEM, GOOD[:1])
        assert (recalled.status, again.status) == (Status.WRONG, Status.OK)

    def test_a_check_of_another_protocol_is_made_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = tmp_path / "log"
        monkeypatch.setenv("CHECK_LOG", str(log))
        for protocol in (1, 2, 2, 1):
            monkeypatch.setattr("flashgen.evaluate.check.PROTOCOL", protocol)
            with offline_evaluator(tmp_path) as evaluator:
                (outcome,) = evaluator.evaluate("check", SPEC, PROBLEM, GOOD[:1])
            assert outcome.protocol == protocol
        assert log.read_text().count("checked") == 2

    def test_no_estimate_is_untimed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> Timing:
            raise NoEstimate("the estimator does not know sm_100")

        monkeypatch.setattr(offline, "estimated", refuse)
        with offline_evaluator(tmp_path) as evaluator:
            (outcome,) = evaluator.evaluate("timed", SPEC, PROBLEM, GOOD[:1])
        assert (outcome.status, outcome.source) == (Status.NO_ESTIMATE, "untimed")
        assert outcome.timing is None
        assert outcome.detail == "the estimator does not know sm_100"

    def test_children_interpret_or_compile_whatever_this_process_does(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        names = ["TRITON_INTERPRET", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"]
        with offline_evaluator(tmp_path) as evaluator:
            seen = []
            for workers in evaluator._cpu._workers.values():
                seen.append([workers._env.get(name) for name in names])
        assert seen == [[None, "1", ""], ["1", "1", ""]]


class TestGpu:
    def test_it_only_times_a_slower_one_the_search_drops_it(self, tmp_path: Path) -> None:
        with gpu_evaluator(tmp_path) as evaluator:
            fast, slow = evaluator.evaluate("rough", SPEC, PROBLEM, (GOOD[0], GOOD[2]))
        assert fast.timing is not None
        assert slow.timing is not None
        assert (fast.timing.median_us, slow.timing.median_us) == (100.0, 151.0)
        assert (fast.status, slow.status) == (Status.OK, Status.OK)

    def test_the_limit_of_the_final_round_leaves_time_for_sdpa(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        limits: list[float] = []
        submit = Device.submit

        def noted(self: Device, task: Task) -> Future[Answer]:
            limits.append(task.limit_s)
            return submit(self, task)

        monkeypatch.setattr(Device, "submit", noted)
        with gpu_evaluator(tmp_path) as evaluator:
            list(evaluator.evaluate("final", SPEC, PROBLEM, GOOD))
        assert limits == [MEASURE_LIMIT_S + FINAL_LIMIT_PER_CONFIG_S * (len(GOOD) + 1)]

    def test_rough_takes_few_samples_and_timed_many(self, tmp_path: Path) -> None:
        with gpu_evaluator(tmp_path) as evaluator:
            (rough,) = evaluator.evaluate("rough", SPEC, PROBLEM, GOOD[:1])
            (timed,) = evaluator.evaluate("timed", SPEC, PROBLEM, GOOD[:1])
        assert rough.timing is not None
        assert timed.timing is not None
        assert (rough.timing.samples, timed.timing.samples) == (5, 50)

    def test_the_final_round_keeps_the_conditions_and_the_yardstick(self, tmp_path: Path) -> None:
        with gpu_evaluator(tmp_path) as evaluator:
            assert evaluator.conditions is None
            outcomes = list(evaluator.evaluate("final", SPEC, PROBLEM, GOOD))
            assert evaluator.conditions == Conditions(sm_mhz=1980, power_w=650.5)
            assert [outcome.sdpa_us for outcome in outcomes] == [123.0] * len(GOOD)

    @pytest.mark.parametrize(
        ("behaviour", "status"), [("refuse", Status.RUN_ERROR), ("spoil", Status.CRASHED)]
    )
    def test_one_bad_kernel_does_not_spoil_the_final_round(
        self, behaviour: str, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("STAGE", "measure")
        monkeypatch.setenv("BEHAVIOUR", behaviour)
        with gpu_evaluator(tmp_path) as evaluator:
            outcomes = list(evaluator.evaluate("final", SPEC, PROBLEM, (GOOD[0], FAULTY, GOOD[1])))
        assert [o.status for o in outcomes] == [Status.OK, status, Status.OK]
        assert [o.timing and o.timing.samples for o in outcomes] == [100, None, 100]

    def test_of_a_round_that_dies_though_each_runs_alone_none_is_called_a_killer(
        self, tmp_path: Path
    ) -> None:
        tasks = replace(FAKE_TASKS, final="tests.worker_faults:segfault")
        with GpuEvaluator(H200, 0, tmp_path, 2, tasks=tasks) as evaluator:
            outcomes = list(evaluator.evaluate("final", SPEC, PROBLEM, GOOD))
        assert [o.status for o in outcomes] == [Status.RUN_ERROR] * len(GOOD)
        for outcome in outcomes:
            assert "it runs by itself" in outcome.detail
            assert "SIGSEGV" in outcome.detail

    @pytest.mark.parametrize(
        ("behaviour", "status"),
        [("spoil", Status.CRASHED), ("out_of_resources", Status.OUT_OF_RESOURCES)],
    )
    def test_a_kernel_that_fails_is_one_outcome(
        self, behaviour: str, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("STAGE", "measure")
        monkeypatch.setenv("BEHAVIOUR", behaviour)
        with gpu_evaluator(tmp_path) as evaluator:
            outcomes = list(evaluator.evaluate("rough", SPEC, PROBLEM, (GOOD[0], FAULTY, GOOD[1])))
        assert [o.status for o in outcomes] == [Status.OK, status, Status.OK]


@pytest.mark.parametrize("slug", each(["nvidia_h200", "nvidia_a100_sxm4_80gb"], 2, "6 s"))
def test_offline_for_real(slug: str, tmp_path: Path) -> None:
    """No stand-ins: a kernel compiled, interpreted and estimated, in children."""
    with OfflineEvaluator(known_target(slug), tmp_path, 1) as evaluator:
        run(evaluator, make_config(64, 32))


def test_the_tasks_of_a_gpu_in_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real tasks, payloads and launches, on CPU tensors: all of the GPU evaluator but the GPU."""
    monkeypatch.setattr("flashgen.evaluate.pools.DEVICE_ENV", INTERPRET_ENV)
    tasks = Tasks(
        compile="tests.worker_faults:compile_one",
        check="tests.worker_faults:check_interpreted",
        measure="tests.worker_faults:measure_interpreted",
        final="tests.worker_faults:final_interpreted",
        answers="tests.worker_faults:device_answers",
    )
    spec = make_spec(head_dim=64, mask="causal")
    problem = Problem(batch=1, heads=2, kv_heads=1, seq_q=70, seq_k=90)
    configs = (make_config(64, 32), make_config(64, 64))
    with GpuEvaluator(H200, 0, tmp_path, 1, tasks=tasks) as evaluator:
        for stage in ("check", "timed", "final"):
            outcomes = list(evaluator.evaluate(stage, spec, problem, configs))
            assert [o.status for o in outcomes] == [Status.OK] * 2, [o.detail for o in outcomes]
            if stage == "check":
                assert all(o.check is not None and 0 < o.check.floors <= 2 for o in outcomes)
            else:  # a pass of the final round takes as many as a faster machine has time for
                most = 3 if stage == "timed" else math.inf
                assert all(o.timing and 2 <= o.timing.samples <= most for o in outcomes)
        assert evaluator.conditions == Conditions()
        assert all((o.sdpa_us or 0) > 0 for o in outcomes)


def run(evaluator: Evaluator, config: KernelConfig) -> None:
    for stage in STAGES:
        (found,) = evaluator.evaluate(stage, SPEC, PROBLEM, (config,))
        assert found.ok, found.detail
        if stage == "check":
            assert found.check is not None
            assert 0 < found.check.floors <= 2
        else:
            assert found.registers
            assert found.shared_bytes
        if stage in ("rough", "timed", "final"):
            assert found.timing is not None
            assert 0 < found.timing.tflops(flops(SPEC, PROBLEM)) < evaluator.gpu.peak_tflops
