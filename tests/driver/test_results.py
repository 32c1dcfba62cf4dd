"""CUDA tensors of real torch, filled from the CPU, go through the public functions and come back
right: the recording driver hands launches to flashgen.ptx, which executes what Triton compiled.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen import paths, settings
from flashgen.evaluate import check
from flashgen.kernels.launch import bind
from flashgen.kernels.loader import load_text
from flashgen.kernels.render import render
from flashgen.reference import attention as reference
from flashgen.spec.problem import bucket_of
from flashgen.table.entry import Entry
from flashgen.table.table_file import load
from tests.driver import cases
from tests.driver.events import Launch, Recording
from tests.driver.executing import Executing
from tests.makers import make_config, make_spec

CLOSE = {"rtol": 2e-2, "atol": 2e-2}
"""Of results in bfloat16 with those of the same inputs in float32."""


@pytest.fixture
def executing() -> Iterator[Executing]:
    with Executing().active() as made:
        yield made
    torch.cuda.empty_cache()  # other tests expect zeros in memory that nobody has written


def drawn(*shape: int, count: int = 3, seed: int = 0) -> list[Tensor]:
    """Tensors of one shape on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).bfloat16() for _ in range(count)]


def on_gpu(*tensors: Tensor) -> list[Tensor]:
    """Copies on the GPU."""
    return [x.cuda() for x in tensors]


@pytest.mark.parametrize(("head_dim", "causal"), [(64, True), (128, False), (256, True)])
def test_attention_equals_float64(
    executing: Executing, recording: Recording, head_dim: int, causal: bool
) -> None:
    (q,) = drawn(2, 4, 150, head_dim, count=1)
    k, v = drawn(2, 2, 150, head_dim, count=2, seed=1)
    for _ in range(3):  # by Triton, then directly, then the bound launch
        o, lse = flashgen.attention(*on_gpu(q, k, v), causal=causal, return_lse=True)
        diagonal = 0 if causal else None
        found = reference.judge(
            o.cpu(), lse.cpu(), q, k, v, scale=head_dim**-0.5, diagonal=diagonal
        )
        assert found.passed, found
    assert executing.launches == 3
    kernels = {launch.kernel for launch in recording.of(Launch)}
    triton, arch = settings.compiling_triton(), cases.GPU.arch
    label = chosen(f"fwd_bf16_d{head_dim}{'_causal' * causal}", 150).config.label
    assert all(label in kernel for kernel in kernels)
    blackwell = arch == "sm_100" and triton == "3.7"
    assert all("_blackwell_" in kernel for kernel in kernels) is blackwell


def chosen(spec: str, keys: int) -> Entry:
    """The entry of the GPU's table that serves: an executed one, if it holds under this Triton."""
    triton, bucket = settings.compiling_triton(), bucket_of(keys)
    table = load(paths.shipped_table(cases.GPU.slug))
    return [
        entry
        for entry in table.everything
        if (entry.spec.name, entry.bucket) == (spec, bucket)
        and (not entry.tritons or entry.serves_under(triton))
    ][-1]


def test_gradients_equal_those_of_float32(executing: Executing) -> None:
    q, k, v, do = drawn(1, 2, 150, 64, count=4)
    mine = [x.detach().requires_grad_() for x in on_gpu(q, k, v)]
    flashgen.attention(*mine, causal=True, deterministic=True).backward(do.cuda())
    theirs = [x.float().requires_grad_() for x in (q, k, v)]
    flashgen.attention(*theirs, causal=True).backward(do.float())
    for one, other in zip(mine, theirs, strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.cpu().float(), other.grad, rtol=3e-2, atol=3e-2)
    assert executing.launches == 4, "the forward, delta, dK/dV and dQ"


def test_packed_sequences_equal_those_of_float32(executing: Executing) -> None:
    q, k, v = drawn(180, 2, 64)
    bounds = torch.tensor([0, 70, 71, 180], dtype=torch.int32)
    arguments: dict[str, Any] = {"causal": True}
    mine = flashgen.attention_varlen(*on_gpu(q, k, v, bounds, bounds), 109, 109, **arguments)
    theirs = flashgen.attention_varlen(
        q.float(), k.float(), v.float(), bounds, bounds, 109, 109, **arguments
    )
    torch.testing.assert_close(mine.cpu().float(), theirs, **CLOSE)
    assert executing.launches == 1


def test_paged_append_and_decode_equal_those_of_float32(executing: Executing) -> None:
    k, v = drawn(12, 16, 2, 64, count=2)
    new_k, new_v = drawn(2, 2, 1, 64, count=2, seed=1)
    (q,) = drawn(2, 8, 1, 64, count=1, seed=2)
    table = torch.tensor([[3, 1, 7, 0], [2, 9, 11, 5]], dtype=torch.int32)
    lengths = torch.tensor([37, 60], dtype=torch.int32)

    def served(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> list[Tensor]:
        new_k, new_v, table, before, after = more
        flashgen.append(k, v, new_k, new_v, lengths=before, block_table=table)
        return [k, v, flashgen.decode(q, k, v, lengths=after, block_table=table)]

    rest = (table, lengths, lengths + 1)
    mine = served(*on_gpu(q, k, v, new_k, new_v, *rest))
    floats = [x.float() for x in (q, k.clone(), v.clone(), new_k, new_v)]
    theirs = served(*floats, *rest)  # type: ignore[arg-type]
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.cpu().float(), other, **CLOSE)
    assert executing.launches >= 2


SPECIALIZED = {
    "sm_90": make_config(128, 64, num_warps=8, schedule="hopper", loads="descriptor"),
    "sm_100": make_config(
        256, 64, num_warps=8, schedule="blackwell", loads="descriptor", rescale_log2=8
    ),
}


@pytest.mark.parametrize("persistent", [False, True])
def test_a_kernel_whose_warps_have_roles_is_launched_again_directly(
    executing: Executing, persistent: bool
) -> None:
    if cases.GPU.arch not in SPECIALIZED:
        pytest.skip("warps have roles on sm_90 and sm_100")
    spec = make_spec("bfloat16", 64, "causal")
    config = SPECIALIZED[cases.GPU.arch]
    config = replace(config, order="longest_first", persistent=persistent)
    run = bind(load_text(render(spec, config)), spec, config)
    q, k, v = drawn(1, 2, 200, 64)
    for _ in range(3):
        call = cases.Forward(q=q.cuda(), k=k.cuda(), v=v.cuda(), scale=0.125, diagonal=0)
        o, lse = run(call)
        found = reference.judge(o.cpu(), lse.cpu(), q, k, v, scale=0.125, diagonal=0)
        assert found.passed, found
    assert executing.launches == 3


def moved(value: Any, device: str) -> Any:
    """A value with all its tensors on a device: a call, its features, its cache."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        parts = [moved(each, device) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    there = copy.copy(value)
    for field in fields(value):
        object.__setattr__(there, field.name, moved(getattr(value, field.name), device))
    return there


KERNELS = cases.kernels()
WITH_TORCH = ("append", "backward_fused")
"""Directions whose check or launch needs a CUDA kernel of torch: dQ is scaled by one."""


@pytest.mark.parametrize(
    "name", [name for name, (spec, _) in KERNELS.items() if spec.direction not in WITH_TORCH]
)
def test_every_schedule_load_and_order_is_right(executing: Executing, name: str) -> None:
    """As tests/gpu/test_gpu_schedules.py has it on a GPU, where torch computes the reference."""
    spec, config = KERNELS[name]
    if config.schedule == "auto":
        pytest.skip("Triton initialises its mbarriers twice, which synccheck finds")
    run = bind(load_text(render(spec, config)), spec, config)
    case = check.cases_of(spec, config)[-1]
    trial = check.trial_of(spec, case, 0)
    found = moved(run(moved(trial.call, "cuda")), "cpu")
    verdict = trial.compare(found)
    assert verdict.passed, (config.label, verdict)
    assert executing.launches >= 1
