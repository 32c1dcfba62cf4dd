"""Kernels of flashgen as they were compiled, executed on the CPU."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashgen import paths
from flashgen.evaluate import sanitize as sanitizing
from flashgen.evaluate.check import cases_of
from flashgen.evaluate.check_attention import packed_case
from flashgen.evaluate.check_cache import DecodeCase
from flashgen.evaluate.evaluator import triton_version
from flashgen.evaluate.sanitize import Sanitized, executed_cases, sanitize
from flashgen.evaluate.workers.answers import Done
from flashgen.kernels.render import render
from flashgen.ptx.program import InvalidPtx
from flashgen.reference.cases import CheckCase
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.outcome import CheckResult
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import Problem
from flashgen.spec.records import record_of
from flashgen.spec.vocabulary import Direction
from flashgen.table.table_file import load
from flashgen.tune import verify as verifying
from flashgen.tune.verify import execute
from tests.makers import each, make_config, make_spec
from tests.tables import made_entry, made_table

B200 = TARGETS["nvidia_b200"]
CASE = CheckCase(problem=Problem(batch=1, heads=1, kv_heads=1, seq_q=70, seq_k=140))


def of_table(slug: str, direction: str) -> tuple[AttentionSpec, KernelConfig]:
    """The first plain entry of a direction."""
    entries = load(paths.shipped_table(slug)).entries
    return next(
        (entry.spec, entry.config)
        for entry in entries
        if entry.spec.direction == direction and not entry.spec.featured
    )


@pytest.mark.parametrize(
    ("slug", "arch", "direction"),
    [
        ("nvidia_h100_80gb_hbm3", "sm_90", "forward"),
        ("nvidia_h100_80gb_hbm3", "sm_90", "backward_dkv"),
        ("nvidia_a100_sxm4_80gb", "sm_80", "forward"),
        ("nvidia_b200", "sm_100", "forward"),
        *each(
            [
                ("nvidia_h100_80gb_hbm3", "sm_90", "backward_delta"),
                ("nvidia_h100_80gb_hbm3", "sm_90", "backward_dq"),
                ("nvidia_h100_80gb_hbm3", "sm_90", "backward_fused"),
                ("nvidia_geforce_rtx_5090", "sm_120", "forward"),
            ]
        ),
    ],
)
def test_a_kernel_of_a_table_is_right_as_it_was_compiled(
    slug: str, arch: str, direction: str
) -> None:
    result = sanitize(*of_table(slug, direction), arch, cases=[CASE])
    assert result.holds, result.lines()
    assert result.instructions > 1000


def test_a_kernel_of_schedule_hopper_is_right_as_it_was_compiled() -> None:
    spec = AttentionSpec(
        direction="forward", dtype="bfloat16", head_dim=64, head_dim_v=64, mask="causal"
    )
    config = KernelConfig(
        br=128, bc=128, num_warps=8, num_stages=2, schedule="hopper", loads="descriptor",
        order="longest_first",
    )  # fmt: skip
    result = sanitize(spec, config, "sm_90", cases=[CASE], seeds=2)
    assert result.holds, result.lines()


@pytest.mark.parametrize("varlen", [False, True])
def test_the_case_of_many_heads_is_executed_on_fewer_blocks(varlen: bool) -> None:
    spec = make_spec("bfloat16", 64, mask="causal", varlen=varlen)
    config = make_config(64, 32)
    checked, executed = cases_of(spec, config), executed_cases(spec, config)
    many, fewer = checked[0].problem, executed[0].problem
    assert (many.heads, fewer.heads) == (8, 4)
    assert replace(fewer, heads=8) == many
    for case, other in zip(checked[1:], executed[1:], strict=True):
        p = case.problem
        group = min(2, p.heads // p.kv_heads)
        assert other == replace(case, problem=replace(p, batch=1, heads=group, kv_heads=1))


def test_the_cases_of_a_decode_are_executed_on_fewer_blocks() -> None:
    spec, config = make_spec("bfloat16", 64, direction="decode"), make_config(16, 32)
    cases = executed_cases(spec, config)
    checked = cases_of(spec, config)
    assert cases[2:] == checked[2:]
    edges, shared = cases[:2]
    assert isinstance(edges, DecodeCase)
    assert isinstance(shared, DecodeCase)
    assert replace(edges, kv_heads=2) == checked[0]
    assert (shared.kv_heads, shared.shared) == (2, True)
    tiles = [-(-length // config.bc) for length in shared.lengths]
    of_a_split = [-(-count // shared.splits) for count in tiles]
    assert (tiles, of_a_split, shared.splits) == ([4, 2], [1, 1], 4), "two splits have no key"


@pytest.mark.parametrize("direction", ["combine", "append"])
def test_other_kernels_of_a_cache_are_executed_on_all_blocks(direction: Direction) -> None:
    spec, config = make_spec("bfloat16", 64, direction=direction), make_config(16, 16)
    assert executed_cases(spec, config) == cases_of(spec, config)


def test_bounds_in_int64_are_read_as_such() -> None:
    spec = make_spec("bfloat16", 64, mask="causal", varlen=True)
    config = make_config(64, 32, num_warps=4, num_stages=2)
    case = packed_case([(64, 64), (64, 32)], index="int64")
    result = sanitize(spec, config, "sm_80", cases=[case])
    assert result.holds, result.lines()


def test_a_table_is_executed_and_a_run_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    spec = make_spec("bfloat16", 64, direction="backward_delta")
    config = make_config(16, 16, num_warps=2, num_stages=1)
    table, log = made_table(made_entry(spec, config=config)), tmp_path / "executed.jsonl"
    ((name, found),) = execute(table, log, 1)
    assert (name, found.holds) == (spec.name, True)
    assert not log.exists(), "the run came to its end"
    held = replace(found, findings=("memcheck: of the log",))
    lines = [{"triton": triton_version()} | asdict(held), {"triton": "3.5.0"} | asdict(found)]
    log.write_text("\n".join(map(json.dumps, lines)) + '\n{"triton": "3.')
    ((_, again),) = execute(table, log, 1)
    assert again == held


def test_a_record_is_trusted_and_lends_the_same_ptx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec("bfloat16", 64, direction="backward_delta")
    table = made_table(made_entry(spec, config=make_config(16, 16, num_warps=2, num_stages=1)))
    log, record, asked = tmp_path / "log.jsonl", tmp_path / "record.jsonl", []
    found = Sanitized(
        name="kernel", digest=render(spec, table.entries[0].config).digest, passed=True
    )

    class Children:
        def __init__(self, *_: object) -> None: ...
        def close(self) -> None: ...
        def submit(self, task: object) -> SimpleNamespace:
            asked.append(task)
            return SimpleNamespace(result=lambda: Done(asdict(found)))

    monkeypatch.setattr(verifying, "Children", Children)
    gpus = [replace(table.gpu, arch=arch) for arch in ("sm_80", "sm_80", "sm_86", "sm_90", "sm_86")]
    counts = []
    for gpu in gpus:
        ((_, verdict),) = execute(replace(table, gpu=gpu), log, 1, record=record)
        assert verdict.holds
        counts.append(len(asked))
    assert counts == [1, 1, 1, 2, 2]  # sm_86 has the instructions of sm_80, sm_90 has not
    record.write_text(record.read_text().replace('"faults": 0', '"faults": 1'))
    list(execute(replace(table, gpu=gpus[0]), log, 1, record=record))
    assert len(asked) == 3


def test_what_cannot_be_executed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> object:
        raise InvalidPtx("the instruction tcgen05 is not known")

    monkeypatch.setattr(sanitizing, "ExecutedKernel", refused)
    result = sanitize(*of_table("nvidia_b200", "forward"), "sm_100", cases=[CASE])
    assert not result.holds
    assert result.lines() == [f"FAILED  {result.name}: the instruction tcgen05 is not known"]


@pytest.mark.slow("a large kernel: 3.5 s")
def test_a_kernel_that_does_not_fit_a_block_is_not_executed() -> None:
    spec, config = make_spec("bfloat16", 256), make_config(128, 128, num_warps=8, num_stages=2)
    result = sanitize(spec, config, "sm_100", cases=[CASE])
    assert not result.holds
    assert "takes 328704 bytes of shared memory: sm_100 has 232448 a block" in result.error


def test_a_result_of_nan_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_nan(*_: object, seed: int, **__: object) -> CheckResult:
        found = math.nan if seed else 1.0
        return CheckResult(
            passed=not seed, floors=found, lse_error=0.0, cases=1, seed=seed, where="executed"
        )

    monkeypatch.setattr(sanitizing, "check_loaded", of_nan)
    spec, config = make_spec("bfloat16", 64, direction="backward_delta"), make_config(16, 16)
    result = sanitize(spec, replace(config, num_stages=1), "sm_80", seeds=3)
    assert (result.passed, result.floors) == (False, None)
    assert result.lines()[0].startswith(f"FAILED  {result.name}: NaN floors, 0 instructions")
    record = json.loads(json.dumps(asdict(result), allow_nan=False))
    assert record_of(Sanitized, record, "an answer") == result


@pytest.mark.slow("ten seconds: it executes two kernels")
@pytest.mark.skipif(triton_version() != "3.7.1", reason="a fault of Triton 3.7.1")
def test_s_ahead_is_refused_in_tensor_memory_because_s_is_overwritten() -> None:
    """The warp that issues the next product does not wait for the others to read S."""
    spec = make_spec("bfloat16", 128, "causal")
    case = CheckCase(problem=Problem(batch=1, heads=1, kv_heads=1, seq_q=128, seq_k=193))
    config = make_config(128, 64, num_warps=8, num_stages=3, loads="descriptor")
    ahead = replace(config, schedule="s_ahead")
    result = sanitize(spec, ahead, "sm_100", cases=[case])
    assert not result.passed
    assert any(f.startswith("racecheck") and "tensor memory" in f for f in result.findings)
    assert "s_ahead is wrong in tensor memory" in (why_illegal(spec, ahead, B200) or "")
    assert sanitize(spec, config, "sm_100", cases=[case]).holds
