"""tune/executed.py: which kernels of schedules hopper and blackwell enter a table, and leave it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from flashgen import settings
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.hopper import HOPPER
from flashgen.schedules.outcome import Status, Timing
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import BUCKETS, Bucket
from flashgen.spec.vocabulary import Direction
from flashgen.tune import executed as program
from tests.makers import make_config
from tests.tables import DIGEST, SPEC, made_entry, made_run, made_table, with_evidence

FAST, WRONG = (
    make_config(br, 128, num_warps=br // 16, schedule="hopper", loads="descriptor")
    for br in (128, 192)
)


class Evaluator:
    """WRONG is the fastest and fails its check; FAST beats 812.3 us in the first bucket alone."""

    def __init__(self, spills: bool = False, wrong_us: float = 500.0) -> None:
        self.spills, self.wrong_us = spills, wrong_us
        self.right, self.gpu = FAST, TARGETS["nvidia_h200"]

    def is_right(self, config: KernelConfig) -> bool:
        return config == self.right

    def evaluate(
        self, stage: str, spec: Any, problem: Any, configs: Sequence[KernelConfig]
    ) -> Iterator[Any]:
        for config in configs:
            us = self.wrong_us if config == WRONG else 0.05 * problem.seq_k + 600
            ok = stage != "check" or self.is_right(config)
            yield SimpleNamespace(
                config=config, ok=ok, status=Status.OK if ok else Status.WRONG,
                detail="" if ok else "7 floors",
                timing=Timing(median_us=us, low_us=us, high_us=us), digest=DIGEST + 52 * "0",
                registers=168, shared_bytes=1024, shortcomings=int(self.spills),
                cycles=(0.1, 0.04 if config == FAST else 0.05),
                check=SimpleNamespace(floors=0.5) if stage == "check" else None,
            )  # fmt: skip


def chosen() -> list[Any]:
    entries = [made_entry(bucket=bucket) for bucket in BUCKETS[1:3]]
    return list(program.faster(entries, (FAST, WRONG), Evaluator(), made_run("b")))  # type: ignore[arg-type]


def test_the_fastest_that_passes_serves_the_buckets_where_it_is_faster() -> None:
    (entry,) = chosen()
    assert (entry.config, entry.bucket) == (FAST, BUCKETS[1])
    assert entry.tritons == (settings.compiling_triton(),)
    assert entry.result.median_us == 0.05 * entry.problem.seq_k + 600


@pytest.mark.parametrize(("us", "first"), [(500.0, WRONG), (681.0, FAST)])
def test_of_times_that_are_near_the_fewest_instructions_serve(
    us: float, first: KernelConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """FAST takes 702.4 us and WRONG issues more; what is checked first is printed first."""
    entries = [made_entry(bucket=BUCKETS[1])]
    list(program.faster(entries, (WRONG, FAST), Evaluator(wrong_us=us), made_run("b")))  # type: ignore[arg-type]
    assert first.label in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(("entry_us", "taken"), [(700.0, True), (670.0, False)])
def test_fewer_instructions_serve_in_a_time_that_is_near(entry_us: float, taken: bool) -> None:
    """FAST takes 702.4 us, and issues in 0.04 cycles; the entry's kernel in 0.05."""
    entry = made_entry(bucket=BUCKETS[1], median_us=entry_us)
    found = list(program.faster([entry], (FAST,), Evaluator(), made_run("b")))  # type: ignore[arg-type]
    assert [each.config for each in found] == [FAST] * taken


@pytest.mark.parametrize(
    ("config", "bucket", "taken"),
    [(FAST, BUCKETS[1], True), (FAST, BUCKETS[0], False), (WRONG, BUCKETS[1], False)],
)
def test_what_the_same_chip_was_measured_with_needs_no_estimate(
    config: KernelConfig, bucket: Bucket, taken: bool
) -> None:
    """FAST is estimated slower than the entry in its bucket."""
    held = made_entry(bucket=BUCKETS[1], median_us=1.0)
    measured = {bucket: config, BUCKETS[2]: make_config(64, 64)}
    found = list(program.as_measured([held], measured, Evaluator(), made_run("b")))  # type: ignore[arg-type]
    assert [(each.config, each.bucket) for each in found] == [(FAST, BUCKETS[1])] * taken


def test_candidates_are_few_and_float16_takes_what_bfloat16_took() -> None:
    table = made_table(made_entry())
    found = program.candidates(SPEC, table, ())
    assert len(found) == HOPPER.admitted
    assert {config.order for config in found} == {"longest_first"}
    twin = replace(SPEC, dtype="float16")
    assert program.candidates(twin, table, chosen()) == (FAST,)


@pytest.mark.parametrize(
    ("entry_us", "spills", "taken"),
    [(800.0, False, True), (720.0, False, False), (800.0, True, False)],
)
def test_a_persistent_kernel_serves_what_it_beats_by_more_than_near(
    entry_us: float, spills: bool, taken: bool
) -> None:
    """It takes 702.4 us: less than the entry, whose tile it has, but not by 4 % of 720."""
    (held,) = chosen()
    held = replace(held, result=replace(held.result, median_us=entry_us))
    evaluator = Evaluator(spills)
    evaluator.right = replace(FAST, persistent=True)
    found = list(program.handed_out([held], (), evaluator, made_run("b")))  # type: ignore[arg-type]
    assert [each.config for each in found] == [evaluator.right] * taken


@pytest.mark.parametrize("place", [0, 5])
def test_a_persistent_kernel_of_the_first_candidates_may_beat_a_plain_one(place: int) -> None:
    """Though without a persistent grid they do not."""
    found = [
        config
        for config in program.candidates(SPEC, made_table(made_entry()), ())
        if config != FAST
    ]
    found.insert(place, FAST)
    evaluator = Evaluator()
    evaluator.right = replace(FAST, persistent=True)
    held = made_entry(bucket=BUCKETS[1], median_us=800.0)
    made = list(program.handed_out([held], found, evaluator, made_run("b")))  # type: ignore[arg-type]
    assert [each.config for each in made] == [evaluator.right] * (place == 0)


@pytest.mark.parametrize(
    ("direction", "tried"),
    [("forward", True), ("backward_dkv", True), ("backward_dq", True), ("backward_ds", False)],
)
def test_a_persistent_kernel_of_the_executed_entry_is_tried(
    direction: Direction, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the 702.4 us of the kernel that the same chip was measured with: 4 % less than the
    older time of the table's executed entry, which stays where it is as fast. Not of a direction
    that has none.
    """
    spec = replace(SPEC, head_dim=64, head_dim_v=64).for_direction(direction)
    monkeypatch.setattr(program, "run_now", lambda _: made_run("b-estimated"))
    monkeypatch.setattr(program, "measured_on_chip", lambda *_: {(spec, BUCKETS[1]): FAST})
    found = {}
    for us in (702.4, 800.0):
        (held,) = chosen()
        held = replace(held, spec=spec, result=replace(held.result, median_us=us))
        evaluator = Evaluator()
        evaluator.right = replace(FAST, persistent=True)
        entry = replace(made_entry(bucket=BUCKETS[1]), spec=spec)
        table = made_table(made_entry()).of([entry, held])
        found[us] = [e.config for e in program.choose(table, evaluator).executed]  # type: ignore[arg-type]
    assert found == {702.4: [FAST], 800.0: [evaluator.right if tried else FAST]}


@pytest.mark.parametrize(("us", "stays"), [(700.0, True), (730.0, False)])
def test_what_the_entry_beats_by_more_than_near_goes(
    us: float, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry takes 690 us, and nothing is found that is faster. Of another spec it stays."""
    monkeypatch.setattr(program, "run_now", lambda _: made_run("b-estimated"))
    monkeypatch.setattr(program, "candidates", lambda *_: ())
    (held,) = chosen()
    held = replace(held, result=replace(held.result, median_us=us))
    table = made_table(made_entry(bucket=BUCKETS[1], median_us=690.0))
    table = table.of([*table.entries, held])
    found = program.choose(table, Evaluator())  # type: ignore[arg-type]
    assert bool(found.executed) == stays
    other = program.choose(table, Evaluator(), specs="bwd_*")  # type: ignore[arg-type]
    assert other.executed == table.executed


def test_a_kernel_that_serves_another_bucket_keeps_its_versions_of_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(program, "run_now", lambda _: made_run("b-estimated"))
    monkeypatch.setattr(settings, "compiling_triton", lambda: "3.7")
    monkeypatch.setattr(program, "candidates", lambda *_: (FAST,))
    (held,) = chosen()
    older = replace(held, bucket=BUCKETS[3], tritons=("3.6",))
    entries = [made_entry(bucket=bucket) for bucket in BUCKETS[1:4]]
    for digest, tritons in (
        (older.evidence.digest, ("3.6", "3.7")),
        ("sha256:" + 12 * "0", ("3.7",)),
    ):
        had = replace(older, evidence=replace(older.evidence, digest=digest))
        table = program.choose(made_table(made_entry()).of([*entries, had]), Evaluator())  # type: ignore[arg-type]
        found = table.executed_for(SPEC, BUCKETS[1], "3.7")
        assert found is not None
        assert found.tritons == tritons


def test_a_kernel_of_another_bucket_takes_no_version_from_the_one_that_serves_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FAST serves one bucket under 3.6 alone, where GROUPED does under 3.7, and another under both."""
    monkeypatch.setattr(program, "run_now", lambda _: made_run("b-estimated"))
    monkeypatch.setattr(settings, "compiling_triton", lambda: "3.6")
    monkeypatch.setattr(program, "candidates", lambda *_: (FAST,))
    (held,) = chosen()
    entries = [made_entry(bucket=bucket) for bucket in BUCKETS[1:4]]
    grouped = replace(held, config=replace(FAST, order="grouped"), tritons=("3.7",))
    for of_fast in (("3.6",), ("3.6", "3.8")):
        mine = replace(held, tritons=of_fast)
        elsewhere = replace(held, bucket=BUCKETS[3], tritons=("3.6", "3.7"))
        table = made_table(made_entry()).of([*entries, mine, grouped, elsewhere])
        after = program.choose(table, Evaluator())  # type: ignore[arg-type]
        found = {e.tritons: e.config for e in after.executed if e.bucket == BUCKETS[1]}
        assert found == {of_fast: FAST, ("3.7",): grouped.config}


@pytest.mark.parametrize(
    ("spills", "us", "tritons"),
    [
        (False, 600.0, ("3.7", "3.10")),
        (True, 680.0, ("3.7", "3.10")),  # within 4 % of what it takes there, 702.4 us
        (True, 670.0, ("3.7",)),
    ],
)
def test_a_triton_is_admitted_where_a_kernel_holds(
    spills: bool, us: float, tritons: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "compiling_triton", lambda: "3.10")
    entry = replace(chosen()[0], tritons=("3.7",))
    entry = replace(entry, result=replace(entry.result, median_us=us))
    table = made_table(made_entry()).of([made_entry(), entry])
    after = program.admit(table, Evaluator(spills))  # type: ignore[arg-type]
    assert [each.tritons for each in after.executed] == [tritons]
    other = program.admit(table, Evaluator(spills), "bwd_*")  # type: ignore[arg-type]
    assert [each.tritons for each in other.executed] == [("3.7",)]
    assert after.entries == table.entries


def test_of_two_for_a_bucket_the_latest_chosen_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "compiling_triton", lambda: "3.8")
    old = replace(chosen()[0], tritons=("3.6", "3.8"))
    new = with_evidence(
        replace(old, config=replace(FAST, order="grouped"), tritons=("3.7",)), run="c"
    )
    table = made_table(made_entry()).of([made_entry(), old, new])
    for right, found in (
        ({old.config, new.config}, {("3.6",): old.config, ("3.7", "3.8"): new.config}),
        ({old.config}, {("3.6", "3.8"): old.config, ("3.7",): new.config}),
    ):
        evaluator = Evaluator()
        monkeypatch.setattr(evaluator, "is_right", lambda config, right=right: config in right)
        after = program.admit(table, evaluator)  # type: ignore[arg-type]
        assert {each.tritons: each.config for each in after.executed} == found


class Counting:
    """A candidate issues in 0.04 cycles a score, on a pipe that takes 0.1; an entry in 0.05."""

    def __init__(self, bound: float, right: bool) -> None:
        self.bound, self.right = bound, right

    def evaluate(
        self, stage: str, spec: Any, problem: Any, configs: Sequence[KernelConfig]
    ) -> Iterator[Any]:
        for config in configs:
            ok = self.right or stage != "check"
            cycles = (0.1, 0.04) if config.schedule == "blackwell" else (self.bound, 0.05)
            yield SimpleNamespace(
                ok=ok, status=Status.OK if ok else Status.WRONG, detail="", config=config,
                cycles=cycles, timing=None, digest=DIGEST + 52 * "0", registers=128,
                shared_bytes=1024, check=SimpleNamespace(floors=0.5) if stage == "check" else None,
            )  # fmt: skip


@pytest.mark.parametrize(
    ("bound", "right", "taken"),
    [(0.2, True, True), (0.1, True, True), (0.09, True, False), (0.2, False, False)],
)
def test_without_times_the_fewest_cycles_serve(bound: float, right: bool, taken: bool) -> None:
    table = replace(made_table(made_entry(source="untimed")), gpu=TARGETS["nvidia_b200"])
    (config,) = program.candidates(SPEC, table, ())
    assert (config.schedule, config.order) == ("blackwell", "longest_first")
    found = list(program.leaner(table.entries, (config,), Counting(bound, right), made_run("b")))  # type: ignore[arg-type]
    assert [each.config for each in found] == [config] * taken
    assert all((e.result.source, e.result.median_us) == ("untimed", None) for e in found)
