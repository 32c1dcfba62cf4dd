"""Schedule auto: where it is legal, that Triton deals its loop out to warps, and that only a GPU's word counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashgen.compile import compiler
from flashgen.compile.loops import hidden_roles, main_bodies, roles
from flashgen.compile.sass import disassemble
from flashgen.compile.verdict import judge
from flashgen.errors import InvalidArgument, NoEstimate
from flashgen.estimate.estimate import estimate, estimate_cubin
from flashgen.evaluate.offline import OfflineEvaluator
from flashgen.kernels.render import render
from flashgen.schedules import space
from flashgen.schedules.auto import BLOCK_WARPS as AUTO_BLOCK_WARPS
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.outcome import Status
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import workload
from tests.compiled import compile_one
from tests.makers import each, make_config, make_spec
from tests.tables import made_entry

H200, B200 = TARGETS["nvidia_h200"], TARGETS["nvidia_b200"]
AUTO: dict[str, Any] = {"schedule": "auto", "loads": "descriptor"}
SPEC = make_spec(head_dim=128, mask="causal")
CONFIG = make_config(64, 64, order="longest_first", **AUTO)


@pytest.mark.parametrize(
    ("spec", "config", "gpu", "reason"),
    [
        (SPEC, CONFIG, H200, None),
        (SPEC, make_config(128, 128, **AUTO), B200, None),
        (SPEC, make_config(128, 64, **AUTO), H200, "br 64 at most on sm_90"),
        (SPEC, CONFIG, TARGETS["nvidia_geforce_rtx_5090"], "nvidia_geforce_rtx_5090 is sm_120"),
        (SPEC, make_config(64, 64, schedule="auto"), H200, "descriptor loads"),
        (SPEC, make_config(64, 64, num_warps=8, **AUTO), H200, "num_warps 4"),
        (SPEC, make_config(64, 64, num_stages=1, **AUTO), H200, "num_stages 2"),
        (SPEC, make_config(64, 32, **AUTO), H200, "64 keys"),
        (make_spec(head_dim=32), make_config(64, 64, **AUTO), H200, "head dims padded to 64"),
        (make_spec("float32", 64), make_config(64, 64, **AUTO), H200, "16-bit"),
        (make_spec(window=True), make_config(64, 64, **AUTO), H200, "features (window) need schedule fa2"),
        (SPEC.for_direction("backward_dq"), make_config(64, 64, **AUTO), H200, "has schedules fa2, s_ahead, hopper and blackwell alone"),
        (SPEC, make_config(64, 64, persistent=True, **AUTO), H200, "persistent needs"),
    ],
)  # fmt: skip
def test_where_it_is_legal(
    spec: AttentionSpec, config: KernelConfig, gpu: Any, reason: str | None
) -> None:
    found = why_illegal(spec, config, gpu)
    assert found is None if reason is None else found is not None and reason in found


def test_it_is_searched_where_a_gpu_measures_alone() -> None:
    for gpu in (H200, B200):
        assert "auto" not in {config.schedule for config in space.legal_configs(SPEC, gpu)}
        found = [c for c in space.legal_configs(SPEC, gpu, on_gpu=True) if c.schedule == "auto"]
        assert {config.br for config in found} == ({64} if gpu is H200 else {64, 128})


def test_a_table_takes_it_as_measured_alone() -> None:
    assert made_entry(SPEC, config=CONFIG, source="measured").config == CONFIG
    with pytest.raises(InvalidArgument, match="schedule auto needs source measured"):
        made_entry(SPEC, config=CONFIG, source="estimated")


@pytest.mark.slow("ten seconds, of a schedule that no table has")
def test_offline_its_program_is_executed_and_found_at_fault(tmp_path: Path) -> None:
    """Triton 3.7.1 initialises mbarriers again that nobody has invalidated, and has two partitions
    write all of O.
    """
    problem = workload(SPEC, 2048)
    with OfflineEvaluator(H200, tmp_path, 1) as evaluator:
        (checked,) = evaluator.evaluate("check", SPEC, problem, [CONFIG])
        (timed,) = evaluator.evaluate("timed", SPEC, problem, [CONFIG])
    assert checked.status is Status.RUN_ERROR
    assert "it initialises an mbarrier that is in use" in checked.detail
    assert timed.status is Status.NO_ESTIMATE
    with pytest.raises(NoEstimate, match="its compiler deals them out"):
        estimate(None, SPEC, CONFIG, problem, H200)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gpu", "config"),
    each([(H200, CONFIG), (B200, make_config(64, 128, **AUTO))]),
    ids=["sm_90", "sm_100"],
)
@pytest.mark.parametrize("mask", each(["causal", "none"], 2))
def test_triton_deals_the_loop_out(
    gpu: Any, config: KernelConfig, mask: str, tmp_path: Path
) -> None:
    """A Triton that took no notice of the loop's mark would make a block of 4 warps."""
    spec = make_spec(head_dim=128, mask=mask)
    if mask == "none":
        config = make_config(config.br, config.bc, **AUTO)
    rendered = render(spec, config)
    assert judge(compile_one(spec, config, gpu.arch), spec, config, gpu) == (
        Status.OK,
        "",
    )
    file = tmp_path / f"{rendered.name}.py"
    file.write_text(rendered.source)
    built, _ = compiler.build(file, rendered, spec, config, gpu.arch)
    assert built.metadata.num_warps == AUTO_BLOCK_WARPS == config.block_warps(spec)
    assert "setmaxnreg" in built.asm["ptx"]
    if gpu is H200:
        _is_refused_or_has_roles(built)
    alone = rendered.source.replace(", warp_specialize=True", "")
    file.write_text(alone)
    built, _ = compiler.build(file, rendered, spec, config, gpu.arch)
    assert built.metadata.num_warps == 4


def _is_refused_or_has_roles(built: Any) -> None:
    """Never is it replayed as if all warps ran one loop. Triton 3.7.1 makes no jump table here."""
    code = disassemble(built.asm["cubin"])
    hidden = hidden_roles(code)
    assert hidden or len(roles(code, main_bodies(code))) > 1
    if hidden:
        with pytest.raises(NoEstimate, match="its warps have roles"):
            estimate_cubin(
                built.asm["cubin"], arch="sm_90", num_warps=built.metadata.num_warps,
                shared_bytes=built.metadata.shared, blocks=[(8,)], target=H200,
            )  # fmt: skip
