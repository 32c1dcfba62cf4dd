"""What sanitize() and ExecutedKernel make of the reports of launches, which a fake makes here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashgen.compile.ptx import CompiledPtx
from flashgen.errors import FlashgenError, LaunchError
from flashgen.evaluate import executed, sanitize
from flashgen.evaluate.executed import ExecutedKernel
from flashgen.kernels.render import render
from flashgen.ptx import FaultsFound, Report
from flashgen.ptx.findings import Finding
from flashgen.ptx.text import parse
from flashgen.schedules.outcome import CheckResult
from flashgen.spec.data_sheets import LIMITS
from tests.makers import make_config, make_spec

SPEC, CONFIG = make_spec("bfloat16", 32, "causal"), make_config(32, 16)
LIMIT = LIMITS["sm_90"].shared_per_block
BAR = parse(".version 8.8 .target sm_90 .entry k() .reqntid 32 { bar.sync 0; ret; }")


def finding(message: str) -> Finding:
    where: Any = {"instruction": BAR.instructions[0], "block": (0, 0, 0), "warp": 0}
    return Finding(check="synccheck", message=message, **where)


class Machine:
    """Stands for the compiler and the executor: what was built, and what ran with which seed."""

    def __init__(self) -> None:
        self.built: list[dict[str, str]] = []
        self.ran: list[tuple[int, Any]] = []
        self.reports: list[Report] = []
        self.shared_bytes = 1024

    def build(self, *_: Any, types: dict[str, str] | None = None) -> CompiledPtx:
        self.built.append(types or {})
        of = {"q_ptr": "*bf16", "starts_ptr": "*i32", "k_desc": "tensordesc<bf16[1, 1, 16, 64],f>"}
        return CompiledPtx(
            ptx="", arg_names=(*of, "BC"), types=of | {"BC": "constexpr"} | (types or {}),
            shared_bytes=self.shared_bytes, descriptors=(),
        )  # fmt: skip

    def execute(self, *_: Any, seed: int, checks: Any) -> Report:
        self.ran.append((seed, checks))
        return self.reports.pop(0) if self.reports else Report(steps=10)


class Described:
    def __init__(self, *block_shape: int) -> None:
        self.block_shape = block_shape


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    monkeypatch.setattr(executed, "build_ptx", made.build)
    monkeypatch.setattr(executed, "execute", made.execute)
    monkeypatch.setattr(executed, "loaded_text", lambda text: text)
    monkeypatch.setattr(executed, "launch_of", lambda given, *_: list(given))
    return made


def kernel(**options: Any) -> ExecutedKernel:
    return ExecutedKernel(render(SPEC, CONFIG), SPEC, CONFIG, "sm_90", **options)


def launch(made: ExecutedKernel, starts: torch.dtype = torch.int32, keys: int = 16) -> None:
    q, bounds = torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=starts)
    made[(1,)](q, bounds, Described(1, 1, keys, 64), 16)


def test_each_launch_takes_the_next_seed_and_adds_to_the_report(machine: Machine) -> None:
    made = kernel(seed=5, checks=("racecheck",))
    for _ in range(3):
        launch(made)
    assert machine.ran == [(seed, ("racecheck",)) for seed in (5, 6, 7)]
    assert (made.launches, made.report.steps) == (3, 30)


@pytest.mark.parametrize("raises", [True, False])
def test_a_finding_is_raised_where_that_is_asked_for(machine: Machine, raises: bool) -> None:
    machine.reports = [Report(findings=[finding("it waits for ever")])]
    made = kernel(raises=raises)
    if raises:
        with pytest.raises(FaultsFound, match="it waits for ever"):
            launch(made)
    else:
        launch(made)
    assert list(made.report.lines())


@pytest.mark.parametrize("more", [0, 1])
def test_a_block_has_so_much_shared_memory_and_no_more(machine: Machine, more: int) -> None:
    machine.shared_bytes = LIMIT + more
    made = kernel()
    if more:
        with pytest.raises(LaunchError, match=f"{LIMIT + 1} bytes of shared memory"):
            launch(made)
    else:
        launch(made)
    assert len(machine.ran) == 1 - more


def test_other_types_are_another_kernel_which_is_built_once(machine: Machine) -> None:
    made = kernel()
    for _ in range(2):
        for starts, keys in ((torch.int32, 16), (torch.int64, 16), (torch.int32, 32)):
            launch(made, starts, keys)
    larger = {"k_desc": "tensordesc<bf16[1, 1, 32, 64],f>"}
    assert machine.built == [{}, {"starts_ptr": "*i64"}, larger]


def verdict(seed: int, floors: float = 1.0) -> CheckResult:
    return CheckResult(
        passed=floors <= 2, floors=floors, lse_error=0.0, cases=1, seed=seed, where="executed"
    )


def sanitized(monkeypatch: pytest.MonkeyPatch, *floors: float, launches: int = 1) -> Any:
    """What is found of a kernel that has these errors, one a seed, in so many launches each."""

    def check(made: ExecutedKernel, *_: Any, seed: int, **__: Any) -> CheckResult:
        for _launch in range(launches):
            launch(made)
        return verdict(seed, floors[seed])

    monkeypatch.setattr(sanitize, "check_loaded", check)
    return sanitize.sanitize(SPEC, CONFIG, "sm_90", seeds=len(floors))


def test_every_seed_counts(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    found = sanitized(monkeypatch, 1.0, 1.5, 0.5, launches=2)
    assert found.holds
    assert (found.floors, found.launches, found.instructions) == (1.5, 6, 60)
    wrong = sanitized(monkeypatch, 1.0, 9.0, 0.5)
    assert (wrong.holds, wrong.floors) == (False, 9.0)
    assert sanitized(monkeypatch, 1.0, math.inf).floors is None


def test_a_finding_is_a_failure_although_the_result_is_right(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.reports = [Report(findings=[finding("a race")], remarks=[finding("a late fence")])]
    found = sanitized(monkeypatch, 1.0)
    assert found.passed
    assert not found.holds
    head, first, remark = found.lines()
    assert head.startswith("FAILED")
    assert "a race" in first
    assert "remark, " in remark
    assert "a late fence" in remark


def test_an_error_of_the_compiler_is_the_verdict(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise FlashgenError("the compiler crashed")

    monkeypatch.setattr(sanitize, "ExecutedKernel", refuse)
    found = sanitize.sanitize(SPEC, CONFIG, "sm_90")
    assert (found.holds, found.error) == (False, "the compiler crashed")
    assert "the compiler crashed" in found.lines()[0]
