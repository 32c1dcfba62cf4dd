"""evaluate/arrivals.py: what a worker answers is read by types with bounds, wherever it works."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from flashgen.errors import FlashgenError, InvalidArgument, ToolchainError
from flashgen.evaluate.arrivals import Built, check_of
from flashgen.evaluate.payloads import (
    Asked,
    Check,
    Compile,
    Final,
    Launches,
    Measure,
    Payload,
    task,
)
from flashgen.evaluate.workers.answers import (
    Answer,
    Died,
    Done,
    Raised,
    TimedOut,
    WorkerLost,
    WrongAnswer,
    why_wrong,
)
from flashgen.evaluate.workers.pool import TaskLimits, Workers
from flashgen.schedules.outcome import Timing
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import workload
from flashgen.tune import actor_seat
from flashgen.tune.actor_seat import Seat
from tests import worker_faults
from tests.makers import make_config, make_spec
from tests.ray_fakes import Actor, AtOnce, Ray

H200 = TARGETS["nvidia_h200"]
SPEC, DECODE = make_spec(head_dim=64), make_spec(head_dim=64, direction="decode")
CONFIG = make_config(64, 64)
DIGEST = "sha256:" + "a" * 64


def launches(spec: Any = SPEC, seq: int = 512) -> Launches:
    return Launches(
        spec=spec, problem=workload(spec, seq), device="cuda:0", seed=0, l2_bytes=H200.l2_bytes,
        peak_tflops=H200.peak_tflops, cache="",
    )  # fmt: skip


COMPILE = Compile(spec=SPEC, config=CONFIG, gpu=H200, cache="", whole=False, digest=DIGEST)
CHECK = Check(spec=SPEC, config=CONFIG, device="cuda:0", seed=0)
MEASURE = Measure(launches=launches(), config=CONFIG, effort="timed")
FINAL = Final(launches=launches(), configs=(CONFIG, make_config(64, 32)))
BY_TASK: dict[str, tuple[Asked, Callable[[Payload], Payload]]] = {
    "compile": (COMPILE, worker_faults.compile_one),
    "check": (CHECK, worker_faults.check_one),
    "measure": (MEASURE, worker_faults.measure_one),
    "final": (FINAL, worker_faults.measure_round),
}
USAGE = dict.fromkeys(("matrix", "exp2", "issue", "shared", "memory"), 0.5)
REPLAY: dict[str, Any] = {
    "residents": 2, "phases": [[0], [1]], "cycles": [[400.0, 500.0], [500.0, 600.0]],
    "far_cycles": [[400.0, 500.0], [500.0, 600.0]], "lone_cycles": [400.0, 500.0],
    "loaded_bytes": [0.0, 16.0], "usage": [USAGE, USAGE], "block_flops": [1000, 1000],
    "block_work": [1000.0, 1000.0], "least_cycles": [0.0, 0.0], "equal_parts": [1, 1],
    "block_cycles": [100.0, 200.0], "far_block_cycles": [100.0, 200.0], "tile_cycles": 90.0,
    "firm": True,
}  # fmt: skip
LIES: dict[str, list[tuple[str, Any]]] = {
    "compile": [
        ("compiled.digest", "sha256:" + "b" * 64),
        ("compiled.arch", "sm_80"),
        ("compiled.whole", True),
        ("compiled.registers", -1),
        ("compiled.registers", math.nan),
        ("compiled.registers", "128"),
        ("compiled.spill_bytes", 1e308),
        ("compiled.shared_bytes", -4096),
        ("compiled.num_warps", 0),
        ("compiled", None),
        ("compiled", []),
        ("replay", {}),
        ("replay", REPLAY | {"residents": 3}),
        ("replay", REPLAY | {"lone_cycles": [1.0]}),
        ("replay", REPLAY | {"cycles": [[400.0, -5.0], [500.0, 600.0]]}),
        ("replay", REPLAY | {"equal_parts": [1, 1, 1]}),
        ("replay", REPLAY | {"phases": [[0], [7]]}),
        ("no_estimate", 5),
        ("more", "a key that nobody knows"),
    ],
    "check": [
        ("passed", "yes"),
        ("passed", 1),
        ("floors", -0.5),
        ("floors", 7.0),
        ("lse_error", 1e308),
        ("seed", 1),
        ("cases", 0),
        ("cases", math.nan),
        ("where", "interpreter"),
        ("where", "elsewhere"),
        ("detail", 3),
    ],
    "measure": [
        ("median_us", 0.001),
        ("median_us", -100.0),
        ("median_us", math.nan),
        ("median_us", math.inf),
        ("median_us", 1e308),
        ("median_us", 500.0),
        ("low_us", 300.0),
        ("samples", 0),
        ("samples", 2**70),
        ("clock_mhz", 0.0),
        ("batches_us", [100.0, 100.0]),
        ("median_us", [100.0]),
    ],
    "final": [
        ("timings", []),
        ("timings.0.median_us", 1e-9),
        ("timings.1.high_us", 1.0),
        ("passes", [[100.0] * 25]),
        ("passes.1", [100.0] * 24),
        ("passes.0.3", -1.0),
        ("passes.0.3", math.nan),
        ("passes.0", [1e14] * 25),
        ("passes.0", "100"),
        ("sdpa.median_us", 0.0),
        ("sdpa.samples", 0),
        ("conditions", {"sm_mhz": "fast"}),
        ("conditions", None),
    ],
}  # fmt: skip


def honest(name: str) -> tuple[Any, dict[str, Any]]:
    asked, answer = BY_TASK[name]
    payload = json.loads(json.dumps(asdict(asked)))
    return task("any:thing", asked, 60.0), answer(payload)


def told(value: dict[str, Any], place: str, lie: Any) -> dict[str, Any]:
    """The answer with another value at a place."""
    changed: Any = json.loads(json.dumps(value))
    *way, last = place.split(".")
    inner = changed
    for step in way:
        inner = inner[int(step)] if isinstance(inner, list) else inner[step]
    inner[int(last) if isinstance(inner, list) else last] = lie
    return dict(changed)


EVERY = [(name, *lie) for name, lies in LIES.items() for lie in lies]
assert len(EVERY) >= 25


@pytest.mark.parametrize("name", BY_TASK)
def test_an_honest_answer_is_taken(name: str) -> None:
    asked, value = honest(name)
    assert why_wrong(asked, Done(value)) is None
    for other in (Raised("ValueError", "no", ""), Died("by SIGSEGV"), TimedOut(60.0)):
        assert why_wrong(asked, other) is None


@pytest.mark.parametrize(("name", "place", "lie"), EVERY)
def test_what_cannot_be_is_found_where_it_arrives(name: str, place: str, lie: Any) -> None:
    """From an actor it makes that worker unfit, by name; the task goes to another."""
    asked, value = honest(name)
    wrong = Done(told(value, place, lie))
    assert why_wrong(asked, wrong)
    actor = Actor(lambda future: future.set_result((wrong, {})))
    with pytest.raises(WrongAnswer, match="n1: it answers what cannot be: "):
        Seat(Ray(), actor, "n1", TaskLimits(), AtOnce()).submit(asked).result()


def test_a_replay_that_agrees_is_taken() -> None:
    asked, value = honest("compile")
    assert why_wrong(asked, Done(told(value, "replay", REPLAY))) is None
    assert Built.from_json(told(value, "replay", REPLAY)).replay is not None


def test_a_decode_is_timed_for_all_its_problems_whose_mean_its_time_is() -> None:
    asked = task(
        "any:thing", Measure(launches=launches(DECODE), config=CONFIG, effort="rough"), 1.0
    )
    times = [
        Timing(median_us=us, low_us=us, high_us=us, samples=5) for us in (90.0, 200.0, 400.0, 800.0)
    ]
    found = [
        why_wrong(asked, Done(asdict(Timing.of_batches(times[:count])))) for count in (1, 2, 3, 4)
    ]
    assert found.count(None) == 1
    number = found.index(None) + 1
    spoiled = asdict(Timing.of_batches(times[:number])) | {"median_us": 300.0, "high_us": 900.0}
    assert "must be the mean" in str(why_wrong(asked, Done(spoiled)))


def test_a_check_may_find_nan_and_says_so() -> None:
    _, value = honest("check")
    for figure in ("floors", "rms", "lse_error"):
        assert math.isnan(getattr(check_of(value | {figure: math.nan}, 0), figure))
    with pytest.raises(InvalidArgument, match="cases must be a whole number"):
        check_of(value | {"cases": math.inf}, 0)


@pytest.mark.parametrize(
    "said",
    [
        None,
        "garbage",
        (),
        (Done({}),),
        ({"us": 1.0}, {}),
        (Done([1]), {}),  # type: ignore[arg-type]
        (Raised("ValueError", 5, ""), {}),  # type: ignore[arg-type]
        (Raised("ValueError", "x" * (2 << 20), ""), {}),
        (Died(None), {}),  # type: ignore[arg-type]
        (TimedOut("late"), {}),  # type: ignore[arg-type]
        (Died("it ended"), []),
        (Died("it ended"), {"../planted.json": "{}"}),
        (Died("it ended"), {"planted.py": "import os"}),
        (Died("it ended"), {"b" * 32 + "-sm_90.json": "{}"}),
        (Died("it ended"), {"a" * 32 + "-sm_90.json": "x" * (2 << 20)}),
        (Died("it ended"), {"a" * 32 + "-sm_90.json": 5}),
    ],
)
def test_a_worker_that_answers_garbage_is_unfit_and_writes_nothing(
    said: object, tmp_path: Path
) -> None:
    asked = task("any:thing", replace(COMPILE, cache=str(tmp_path / "cache")), 60.0)
    actor = Actor(lambda future: future.set_result(said))
    with pytest.raises(WrongAnswer, match="n1: it answers what cannot be"):
        Seat(Ray(), actor, "n1", TaskLimits(), AtOnce()).submit(asked).result()
    assert not list(tmp_path.rglob("*.*"))


def test_the_driver_s_full_disk_is_no_worker_s_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise ToolchainError(f"{path} cannot be written (No space left on device)")

    monkeypatch.setattr(actor_seat, "write_whole", full)
    asked = task("any:thing", replace(COMPILE, cache=str(tmp_path)), 60.0)
    said = Died("it ended"), {"a" * 32 + "-sm_90.json": "{}"}
    actor = Actor(lambda future: future.set_result(said))
    with pytest.raises(FlashgenError, match="No space left") as caught:
        Seat(Ray(), actor, "n1", TaskLimits(), AtOnce()).submit(asked).result()
    assert not isinstance(caught.value, WorkerLost)


def test_a_child_that_answers_what_cannot_be_fails_its_task_alone() -> None:
    """Its kernel may have spoiled its memory."""
    with Workers(1) as workers:
        answers: list[Answer] = [
            workers.submit(replace(honest("check")[0], function=function)).result()
            for function in ("tests.worker_faults:echo", "tests.worker_faults:check_one")
        ]
    assert isinstance(answers[0], Raised)
    assert answers[0].kind == "ValueError"
    assert isinstance(answers[1], Done)
