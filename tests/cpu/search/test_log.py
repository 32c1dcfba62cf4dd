"""search/log.py: what was found out is never asked again, a torn end costs one record, the rest is an error."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from flashgen.compile import compiler
from flashgen.errors import FlashgenError
from flashgen.estimate import estimate
from flashgen.evaluate import check, measure
from flashgen.evaluate.evaluator import protocol_of
from flashgen.schedules.outcome import CheckResult, Outcome, Source, Stage, Status, Timing
from flashgen.search.log import Log, outcomes_of
from flashgen.spec.problem import workload
from tests.makers import make_config, make_spec

SPEC = make_spec()
SHORT, LONG = workload(SPEC, 512), workload(SPEC, 4096)
CONFIG = make_config()
ESTIMATE = Timing(median_us=9.0, low_us=7.0, high_us=14.0)


def outcome(stage: Stage = "timed", **changes: object) -> Outcome:
    made = Outcome(
        spec=SPEC,
        problem=LONG,
        config=CONFIG,
        stage=stage,
        status=Status.OK,
        source="measured",
        gpu="nvidia_h200",
        triton="3.7.1",
        digest="sha256:" + "0" * 64,
        protocol=protocol_of(stage, str(changes.get("source", "measured"))),  # type: ignore[arg-type]
        timing=Timing(median_us=10.5, low_us=10.0, high_us=11.0, samples=20),
        check=CheckResult(passed=True, floors=1.1, lse_error=0.2, cases=7, seed=3, where="gpu"),
        detail="as found",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def open_log(folder: Path, **changes: object) -> Log:
    fields = {"gpu": "nvidia_h200", "triton": "3.7.1"} | changes
    return Log(folder / "nvidia_h200.jsonl", **fields)  # type: ignore[arg-type]


def recall(log: Log, like: Outcome, **changes: object) -> Outcome | None:
    wanted = replace(like, **changes)  # type: ignore[arg-type]
    return log.recall(
        wanted.stage,
        wanted.spec,
        wanted.problem,
        wanted.config,
        wanted.digest,
        source=wanted.source,
    )


def test_a_record_is_one_json_line_and_the_later_counts(tmp_path: Path) -> None:
    made = outcome(estimate=ESTIMATE, spill_bytes=16)
    with open_log(tmp_path) as log:
        log.append(outcome(detail="first"))
        log.append(made)
        assert recall(log, made) == made
        _, line = log.path.read_text().splitlines()  # on the disk before close
    record = json.loads(line)
    wanted = {*"spec problem config stage status source timing digest detail".split()}
    assert wanted <= record.keys()
    assert Outcome.from_json(record) == made
    with open_log(tmp_path) as log:
        assert recall(log, made) == made


@pytest.mark.parametrize(
    "changes",
    [
        {"stage": "rough"},
        {"problem": SHORT},
        {"config": make_config(128, 64)},
        {"digest": "sha256:" + "1" * 64},
        {"source": "estimated"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_part_of_the_key_counts(tmp_path: Path, changes: dict[str, object]) -> None:
    with open_log(tmp_path) as log:
        log.append(outcome())
        assert recall(log, outcome(), **changes) is None


def test_what_another_triton_found_is_not_recalled(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.append(outcome())
    with open_log(tmp_path, triton="3.8.0") as log:
        assert recall(log, outcome()) is None


@pytest.mark.parametrize(
    ("stage", "source", "decides"),
    [
        # What was compiled carries its estimate, so both decide.
        ("compile", "measured", {(compiler, "FACTS"), (estimate, "PROTOCOL")}),
        ("compile", "estimated", {(compiler, "FACTS"), (estimate, "PROTOCOL")}),
        ("check", "measured", {(check, "PROTOCOL")}),
        ("check", "estimated", {(check, "PROTOCOL")}),
        ("timed", "measured", {(measure, "PROTOCOL")}),
        ("final", "measured", {(measure, "PROTOCOL")}),
        ("timed", "estimated", {(estimate, "PROTOCOL")}),
        ("timed", "untimed", {(estimate, "PROTOCOL")}),
    ],
)
def test_an_outcome_is_recalled_until_what_decides_its_stage_changes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: Stage,
    source: Source,
    decides: set[tuple[ModuleType, str]],
) -> None:
    made = outcome(stage, source=source)
    with open_log(tmp_path) as log:
        log.append(made)
    for module, name in (
        (compiler, "FACTS"),
        *((m, "PROTOCOL") for m in (check, estimate, measure)),
    ):
        with monkeypatch.context() as patched, open_log(tmp_path) as before:
            assert recall(before, made) == made
            before.close()
            patched.setattr(module, name, getattr(module, name) + 1)
            with open_log(tmp_path) as after:
                assert (recall(after, made) is None) == ((module, name) in decides)


@pytest.mark.parametrize("stage", ["compile", "check"])
def test_compiles_and_checks_hold_for_every_problem(tmp_path: Path, stage: Stage) -> None:
    with open_log(tmp_path) as log:
        log.append(outcome(stage))
        assert recall(log, outcome(stage), problem=SHORT) == outcome(stage, problem=SHORT)


@pytest.mark.parametrize("reopened", [False, True])
def test_an_estimate_holds_for_its_own_problem_alone(tmp_path: Path, reopened: bool) -> None:
    built, checked = (outcome(stage, estimate=ESTIMATE) for stage in ("compile", "check"))
    slow = outcome("compile", config=make_config(128), status=Status.SPILLS, estimate=ESTIMATE)
    bare = replace(ESTIMATE, median_us=1.0)
    with open_log(tmp_path) as log:
        for made in (built, checked, slow):
            log.append(made)
        log.append(outcome("compile", config=make_config(32)))
    with open_log(tmp_path) as log:
        assert recall(log, built) == built
        # a GPU's search wants an estimate, so what had one is asked for again; all else is known
        assert recall(log, built, problem=SHORT) is None
        assert recall(log, slow, problem=SHORT) == replace(slow, problem=SHORT, estimate=None)
        assert recall(log, built, problem=SHORT, config=make_config(32)) is not None
        for made, source in (
            (checked, "measured"),
            (replace(built, source="estimated"), "estimated"),
        ):
            again = recall(log, made, problem=SHORT)
            assert again is not None, source
            assert (again.problem, again.estimate) == (SHORT, None)
        log.append(replace(built, problem=SHORT, estimate=bare))
        if reopened:
            log.close()
            log = open_log(tmp_path)
        assert recall(log, built) == built
        assert recall(log, built, problem=SHORT) == replace(built, problem=SHORT, estimate=bare)
        log.close()


def test_a_check_in_the_interpreter_is_not_one_on_the_gpu(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.append(outcome("check", source="estimated"))
        assert recall(log, outcome("check"), source="measured") is None
        broken = outcome("compile", source="estimated", status=Status.COMPILE_ERROR)
        log.append(broken)
        assert recall(log, broken, source="measured") == broken


def test_a_gpu_asks_for_the_estimates_that_compiling_with_none_left_out(tmp_path: Path) -> None:
    offline = outcome("compile", source="estimated")
    here = outcome("compile", estimate=ESTIMATE)
    with open_log(tmp_path) as log:
        log.append(offline)
        assert recall(log, offline) == offline
        assert recall(log, here) is None
        log.append(here)
        assert recall(log, here) == here
        assert recall(log, offline) == here


def test_no_estimate_is_recalled_by_the_offline_evaluator(tmp_path: Path) -> None:
    none = outcome(source="untimed", status=Status.NO_ESTIMATE, timing=None)
    with open_log(tmp_path) as log:
        log.append(none)
        assert recall(log, none, source="estimated") == none


def test_the_clock_is_that_of_the_first_time(tmp_path: Path) -> None:
    time = outcome().timing
    assert time is not None
    for _ in range(2):
        with open_log(tmp_path) as log:
            for mhz in (1500.0, 1700.0):
                log.append(outcome(timing=replace(time, clock_mhz=mhz)))
                assert log.clock_mhz == 1500.0


def test_a_final_round_counts_only_whole(tmp_path: Path) -> None:
    first, second, third = (
        outcome("final", config=make_config(br), digest="sha256:" + digit * 64)
        for br, digit in ((32, "1"), (64, "2"), (128, "3"))
    )

    def round_of(log: Log, *members: Outcome) -> list[Outcome] | None:
        kernels = [(member.config, member.digest) for member in members]
        return log.recall_round(SPEC, LONG, kernels, source="measured")

    with open_log(tmp_path) as log:
        log.append(first)
        log.append(second)
        assert round_of(log, second, first) == [second, first]
        assert round_of(log, first, second, third) is None
        log.append(third)
        assert round_of(log, first, third) is None  # another's time stands between
        log.append(second)
        assert round_of(log, first, second) is None  # of two rounds now
        assert round_of(log, third, second) == [third, second]


@pytest.mark.parametrize("lost", [1, 40], ids=["only the line break", "half a record"])
def test_a_torn_last_record_is_dropped_with_one_notice(tmp_path: Path, lost: int) -> None:
    with open_log(tmp_path) as log:
        log.append(outcome(detail="whole"))
        log.append(outcome("rough"))
    content = log.path.read_bytes()
    log.path.write_bytes(content[:-lost])
    notices: list[str] = []
    with open_log(tmp_path, notice=notices.append) as log:
        assert recall(log, outcome()) is not None
        assert recall(log, outcome("rough")) is None
        log.append(outcome("rough"))
    assert len(notices) == 1
    assert str(log.path) in notices[0]
    assert log.path.read_bytes() == content
    with open_log(tmp_path, notice=notices.append):
        pass
    assert len(notices) == 1


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "{}", '{"status": "ok"}', "\xff"],
    ids=["cut", "list", "empty", "few", "bytes"],
)
def test_any_other_unreadable_line_is_named(tmp_path: Path, line: str) -> None:
    with open_log(tmp_path) as log:
        log.append(outcome())
    good = log.path.read_bytes()
    log.path.write_bytes(good + line.encode("latin-1") + b"\n" + good)
    with pytest.raises(FlashgenError, match=r"nvidia_h200\.jsonl, line 2: .* delete the line"):
        open_log(tmp_path)
    assert log.path.read_bytes() == good + line.encode("latin-1") + b"\n" + good


def test_a_log_of_another_gpu_is_refused(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.append(outcome(gpu="nvidia_l4"))
    with pytest.raises(FlashgenError, match=r"line 1: .* nvidia_h200 alone: got nvidia_l4"):
        open_log(tmp_path)


@pytest.mark.parametrize("failing", ["write", "fsync"])
def test_a_full_disk_is_one_sentence_and_leaves_whole_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    write = os.write

    def full(descriptor: int, *content: bytes) -> int:
        if failing == "write" and len(content[0]) > 100:
            return write(descriptor, content[0][:100])  # what fits; the next call finds no room
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with open_log(tmp_path) as log:
        log.append(outcome())
        before = log.path.read_bytes()
        with monkeypatch.context() as patched:
            patched.setattr(os, failing, full)
            with pytest.raises(FlashgenError, match=r"No space left .* --out") as caught:
                log.append(outcome("rough", detail="x" * 200))
        assert "\n" not in str(caught.value)
        assert log.path.read_bytes() == before
        assert recall(log, outcome("rough")) is None
        log.append(outcome("rough"))


def test_a_folder_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    (tmp_path / "file").write_text("")
    with pytest.raises(FlashgenError, match="cannot be written"):
        open_log(tmp_path / "file")
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(FlashgenError, match=r"Read-only file system.* --out"):
        open_log(tmp_path)


def test_records_of_many_threads_stay_whole(tmp_path: Path) -> None:
    """Each is on disk when its append returns, and a round's records are adjacent."""

    def write(log: Log, writer: int) -> None:
        for number in range(20):
            several = [outcome("final", detail=f"{writer} {number} {each}") for each in range(3)]
            log.append(*several)
            assert several[-1].detail.encode() in log.path.read_bytes()

    with open_log(tmp_path) as log, ThreadPoolExecutor() as threads:
        for each in [threads.submit(write, log, writer) for writer in range(6)]:
            each.result()
    found = [each.detail for each in outcomes_of(tmp_path / "nvidia_h200.jsonl", pytest.fail)]
    assert len(found) == len(set(found)) == 6 * 20 * 3
    assert [detail[-1] for detail in found] == list("012") * 120


def test_what_waits_for_the_disk_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes, gate = [], threading.Event()

    def flushed(_: int) -> None:
        flushes.append(0)
        gate.wait()

    monkeypatch.setattr(os, "fsync", flushed)
    with open_log(tmp_path) as log, ThreadPoolExecutor(8) as threads:
        first = threads.submit(log.append, outcome())
        while not flushes:
            time.sleep(0.001)
        rest = [threads.submit(log.append, outcome(detail=str(n))) for n in range(7)]
        while len(log._waiting) < 7:
            time.sleep(0.001)
        gate.set()
        for each in (first, *rest):
            each.result()
    assert len(flushes) == 2
