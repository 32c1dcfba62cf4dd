"""A decode is timed for several numbers of sequences: what is launched, and what becomes of the times."""

from __future__ import annotations

import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgen.evaluate import inputs, measure, payloads, tasks
from flashgen.evaluate.inputs import first_sequences, make_decode, make_forward
from flashgen.schedules.outcome import Timing
from flashgen.spec.problem import Problem, timed_problems
from flashgen.spec.records import record_of
from tests.makers import make_config, make_spec

SPEC = make_spec("float16", 16, direction="decode")
PROBLEM = Problem(batch=20, heads=4, kv_heads=2, seq_q=1, seq_k=48)
BATCHES = [1, 4, 16, 20]


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
def test_fewer_sequences_are_the_first_of_all(paged: bool, narrow: bool) -> None:
    spec = replace(SPEC, paged=paged, kv_dtype="int8" if narrow else "same")
    every = make_decode(spec, PROBLEM, 0, "cpu", sms=20)
    few = first_sequences(every, 4)
    assert few.problem == replace(PROBLEM, batch=4)
    assert torch.equal(few.q, every.q[:4])
    assert few.q.data_ptr() == every.q.data_ptr()
    cache = few.cache
    assert cache.k.data_ptr() == every.cache.k.data_ptr()
    assert cache.lengths.shape == (4,)
    if paged:
        assert torch.equal(cache.block_table, every.cache.block_table[:4])
        assert cache.k.shape == every.cache.k.shape  # of all pages
    else:
        assert cache.k.shape[0] == cache.v.shape[0] == 4
    assert every.problem == PROBLEM


def test_other_calls_have_one_problem() -> None:
    spec = make_spec("float16", 16)
    problem = Problem(batch=8, heads=1, kv_heads=1, seq_q=16, seq_k=16)
    call = make_forward(spec, problem, 0, "cpu")
    assert first_sequences(call, 8) is call
    assert timed_problems(spec, problem) == (problem,)


class Clock:
    """Each launch takes as many microseconds as its call has sequences, and SDPA ten times that."""

    def time(self, run: Any, count: int) -> list[float]:
        return [float(run())] * count

    def now(self) -> float:
        return 0.0

    def clock_mhz(self) -> float | None:
        return 1980.0


@pytest.fixture
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> payloads.Launches:
    def run_of(kernel: Any, spec: Any, config: Any, call: Any, folder: Path) -> Any:
        assert call.cache.lengths.shape[0] == len(call.q)
        return lambda: len(call.q) * (config.bc // 32)

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> int:
        assert len(q) == len(k) == len(v)
        return 10 * len(q)

    few = measure.MeasureBudget(warm_s=0.0, sample_s=0.0, least=3, most=3)
    for effort in ("rough", "timed", "final"):
        monkeypatch.setitem(measure.BUDGETS, effort, few)
    monkeypatch.setattr(tasks, "_stopwatch", lambda *_: Clock())
    monkeypatch.setattr(tasks, "_conditions_under_load", lambda *_: measure.Conditions())
    monkeypatch.setattr(tasks, "_call", lambda asked: make_decode(SPEC, PROBLEM, 0, "cpu", sms=20))
    monkeypatch.setattr(inputs, "run_of", run_of)
    monkeypatch.setattr(inputs, "kernel_in", lambda *_: None)
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", sdpa)
    return payloads.Launches(
        spec=SPEC,
        problem=PROBLEM,
        device="cpu",
        seed=0,
        l2_bytes=1 << 20,
        peak_tflops=None,
        cache=str(tmp_path),
    )


def test_a_time_is_of_every_batch(launches: payloads.Launches) -> None:
    asked = payloads.Measure(launches=launches, config=make_config(16, 64), effort="rough")
    timing = record_of(Timing, tasks.measure_one(asdict(asked)))
    assert timing.batches_us == tuple(2.0 * batch for batch in BATCHES)
    assert timing.median_us == pytest.approx(2 * statistics.geometric_mean(BATCHES))
    assert timing.samples == 3 * len(BATCHES)


def test_a_round_is_of_every_batch_pass_by_pass(launches: payloads.Launches) -> None:
    configs = (make_config(16, 32), make_config(16, 64))
    answer = tasks.measure_round(asdict(payloads.Final(launches=launches, configs=configs)))
    mean = statistics.geometric_mean(BATCHES)
    for factor, timing, passes in zip((1, 2), answer["timings"], answer["passes"], strict=True):
        assert timing["batches_us"] == tuple(float(factor * batch) for batch in BATCHES)
        assert passes == pytest.approx([factor * mean] * 3, abs=1e-3)
    assert answer["sdpa"]["median_us"] == pytest.approx(10 * mean)
