"""Gradients by dS in memory as Triton compiles their two kernels, executed in runs: results, and broken texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch

from flashgen.evaluate.check_attention import attention_trial, packed_case
from flashgen.evaluate.executed import ExecutedKernel
from flashgen.kernels.ds_runs import DsRun, DsSizes, runs_of
from flashgen.kernels.launch import bind
from flashgen.kernels.launch_backward import Backward
from flashgen.kernels.launch_ds import ds_sizes, gradients_in_runs
from flashgen.ptx import FaultsFound
from flashgen.reference import gradients
from flashgen.reference.cases import CheckCase
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.legality import DS_TILE, why_illegal
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS, Gpu
from tests.executed import case, compiled
from tests.makers import make_config, make_spec

GPUS: dict[str, Gpu] = {
    "hopper": TARGETS["nvidia_h200"],
    "blackwell": TARGETS["nvidia_b200"],
    "fa2": TARGETS["nvidia_a100_sxm4_80gb"],
}
"""What the kernels of a schedule are compiled for."""
WHOLE = 1 << 40
"""A limit of memory that no case reaches."""


def of_rows(loads: Any = "descriptor", br: int = 128, bc: int = 64) -> KernelConfig:
    return make_config(br, bc, num_warps=8, num_stages=2, loads=loads)


def spec_of(dim: int, mask: str, **features: Any) -> AttentionSpec:
    return make_spec("bfloat16", dim, mask, direction="backward_ds", **features)


PACKED = [
    packed_case([(133, 135), (0, 3), (3, 0), (1, 128)], heads=4, kv_heads=2, varied=True),
    packed_case(
        [(129, 128), (2, 127), (127, 1)],
        spare=(3, 5), tail=(130, 259), alignment="top_left", layout="sliced",
    ),
]  # fmt: skip
RAGGED = [
    case(300, 200, heads=2),
    case(200, 330, heads=4, kv=2, batch=2),
    case(330, 200, "top_left"),
]
FEW = [case(200, 330, heads=2), case(70, 20, "top_left", heads=2, kv=2)]
LONG = case(597, 600)
WINDOWS = (
    [case(200, 330)] * 2 + [LONG] + [case(129, 129, "top_left")] * 2 + [case(300, 70), case(1, 400)]
)
"""Each place draws another window, or another chunk. The third is short: of LONG a key has memory for fewer rows than there are."""
FEW_WINDOWS = [case(200, 330), case(129, 129, "top_left"), LONG]
PACKED_WINDOWS = [*PACKED, packed_case([(130, 70), (597, 600)])]


@dataclass(frozen=True)
class Kernels:
    """Both kernels of a spec, compiled, and what launches them."""

    dkv: ExecutedKernel
    dq: ExecutedKernel
    of_dkv: Any
    of_dq: Any

    def gradients(self, call: Backward, most: int = WHOLE) -> tuple[torch.Tensor, ...]:
        """dq, dk and dv of runs of so many bytes at most, in memory that is NaN before."""
        of = ds_sizes(call)
        runs = runs_of(of, most)
        memory = torch.full((max(map(of.run_bytes, runs)),), 0xFF, dtype=torch.uint8)
        return gradients_in_runs(call, runs, memory, self.of_dkv, self.of_dq)


def kernels(
    spec: AttentionSpec,
    config: KernelConfig,
    of_dq: KernelConfig,
    broken: tuple[str, str] = ("", ""),
    broken_dq: tuple[str, str] = ("", ""),
) -> Kernels:
    """Both, or with the text of one broken, for the GPU of the schedule of dK and dV."""
    its, gpu = spec.for_direction("backward_dq_of_ds"), GPUS[config.schedule]
    for one, way in ((spec, config), (its, of_dq)):
        assert (reason := why_illegal(one, way, gpu)) is None, reason
    dkv = compiled(spec, config, 0, *broken, arch=gpu.arch)
    dq = compiled(its, of_dq, 0, *broken_dq, arch=gpu.arch)
    return Kernels(dkv, dq, bind(dkv, spec, config), bind(dq, its, of_dq))


def assert_gradients(
    both: Kernels, spec: AttentionSpec, cases: Sequence[CheckCase], ranges: bool = False
) -> None:
    """That gradients are right; ranges: and the same bits where a run has 128 keys."""
    for seed, each_case in enumerate(cases):
        trial = attention_trial(spec, each_case, seed, "cpu")
        inputs = trial.compare.keywords["inputs"]  # type: ignore[attr-defined]
        found = both.gradients(trial.call)
        verdict = gradients.judge("backward_fused", found, inputs)
        assert verdict.passed, (each_case, verdict)
        of = DsSizes.of(inputs.q, inputs.k, inputs.diagonal, inputs.features)
        if of.seq_q == LONG.problem.seq_q:
            assert of.ds_bytes(of.whole) < 2 * prod(of.ds_shape(of.whole))
        if ranges and of.seq_k > DS_TILE:
            part = of.run_bytes(DsRun(first_head=0, heads=of.group, keys=DS_TILE))
            again = both.gradients(trial.call, part)
            assert all(map(torch.equal, found, again)), each_case


CASES = [case(330, 330, heads=4, kv=2), case(330, 230)]


def assert_found(both: Kernels, spec: AttentionSpec) -> None:
    for seed in range(3):  # what no check finds, not every order shows
        both.dkv.seed = both.dq.seed = 10 * seed
        try:
            assert_gradients(both, spec, CASES, ranges=True)
        except (AssertionError, FaultsFound):
            return
    pytest.fail("nobody noticed")
