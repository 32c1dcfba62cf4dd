"""Block masks: each kernel on masks of each kind, the public call, what is skipped, and mutants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.inputs.features import Features
from flashgen.kernels.launch import bind, launch
from flashgen.kernels.launch_backward import Backward
from flashgen.kernels.loader import load_kernel
from flashgen.kernels.render import render
from flashgen.reference import gradients
from flashgen.reference.cases import CheckCase
from flashgen.runtime import Dispatcher
from flashgen.runtime.block_mask import BlockMask, document, from_boolean, prefix_lm
from flashgen.runtime.eager import attention as eager
from flashgen.schedules.defaults import default_config, default_spec
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem
from tests.makers import make_config, make_spec
from tests.proving import alternating, mutant_passes, prove, sampled
from tests.serving import leaves, record_directions

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DIRECTIONS = ("forward", "backward_dkv", "backward_dq")
FORWARD, DKV, DQ = DIRECTIONS


def case(seq_q: int, seq_k: int, batch: int = 1, heads: int = 1, kv_heads: int = 1) -> CheckCase:
    problem = Problem(batch=batch, heads=heads, kv_heads=kv_heads, seq_q=seq_q, seq_k=seq_k)
    return CheckCase(problem=problem, layout="bshd")


RAGGED = case(133, 263, batch=2)


@pytest.mark.parametrize(("direction", "kind"), alternating(DIRECTIONS, range(4)))
def test_each_kind(direction: Any, kind: int, seed: int) -> None:
    """Prefixes, documents, causal documents, random blocks, by what the seed says."""
    spec = make_spec("bfloat16", 16, block_mask=True).for_direction(direction)
    prove(spec, make_config(64, 64), seed // 4 * 4 + kind, [RAGGED])


@pytest.mark.parametrize(
    ("tile", "loads"),
    [
        ((128, 32), "pointer"),
        ((32, 128), "descriptor"),
        pytest.param(
            (128, 32), "descriptor", marks=pytest.mark.slow("make test proves a sample of it")
        ),
        pytest.param(
            (32, 128), "pointer", marks=pytest.mark.slow("make test proves a sample of it")
        ),
    ],
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_tiles_of_a_block(direction: Any, tile: tuple[int, int], loads: str, seed: int) -> None:
    """Several tiles to a block of either side, by descriptors too, which are addressed as well."""
    spec = make_spec("float16", 40, head_dim_v=24, block_mask=True).for_direction(direction)
    prove(spec, make_config(*tile, loads=loads), seed // 4 * 4 + 3, [case(140, 130, heads=2)])


@pytest.mark.slow("make test proves a sample of it")
@pytest.mark.parametrize("direction", [*DIRECTIONS, "backward_fused"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "tf32"])
def test_what_tuning_checks(direction: Any, dtype: str, seed: int) -> None:
    precision: dict[str, Any] = {"precision": "tf32"} if dtype == "tf32" else {}
    name = "float32" if precision else dtype
    spec = make_spec(name, 24, block_mask=True, **precision).for_direction(direction)
    prove(spec, make_config(32, 64), seed)
    prove(default_spec(spec), default_config(spec), seed)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_beside_other_features(direction: Any, seed: int) -> None:
    features: dict[str, Any] = {"alibi": True, "softcap": True, "dropout": True, "sink": True}
    spec = make_spec("float16", 16, block_mask=True, **features).for_direction(direction)
    prove(spec, make_config(64, 64), seed // 4 * 4 + 1, [case(131, 140, heads=2, kv_heads=1)])


def of(direction: Any) -> AttentionSpec:
    return make_spec("float16", 16, block_mask=True).for_direction(direction)


MUTANTS: dict[str, tuple[AttentionSpec, str, str]] = {
    "partial blocks taken for whole": (of(FORWARD), "s = tl.where(tl.load(tile) != 0", "s = tl.where(tl.load(tile) >= 0"),
    "partial blocks left out": (of(FORWARD), "tl.load(block_counts_ptr + lists * 2 + 1) * STEPS", "0 * STEPS"),
    "whole blocks left out": (of(DQ), "end = whole if phase == 1", "end = 0 * whole if phase == 1"),
    "blocks in a row": (of(FORWARD), "tl.load(blocks + step // STEPS)", "(step // STEPS)"),
    "one tile of a block": (of(FORWARD), "step % STEPS * BC", "0"),
    "elements of the first tile": (of(FORWARD), "tl.load(block_tiles + step // STEPS)", "tl.load(block_tiles_ptr)"),
    "elements of the first rows": (of(DQ), "(rows % BLOCK * BLOCK)", "(rows % BR * BLOCK)"),
    "elements of the first keys": (of(FORWARD), "((start + keys) % BLOCK)", "(keys % BLOCK)"),
    "elements turned around": (of(DKV), "(rows % BLOCK * BLOCK)[None, :] + (keys % BLOCK)[:, None]", "(rows % BLOCK)[None, :] + (keys % BLOCK * BLOCK)[:, None]"),
    "lists of the first batch": (of(FORWARD), "batch * mask_step_b", "0 * mask_step_b"),
    "lists of the first head": (of(DKV), "head * mask_step_h", "0 * mask_step_h"),
    "list of the first block": (of(DKV), "lists += key_start // BLOCK", "lists += 0"),
    "V not moved to the block": (of(FORWARD), "v_base + start.to(tl.int64)", "v_base + 0 * start.to(tl.int64)"),
    "dO not moved to the block": (of(DKV), "do_base + row_start.to(tl.int64)", "do_base + 0 * row_start.to(tl.int64)"),
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(MUTANTS))
def test_mutant_is_caught(name: str) -> None:
    spec, line, broken = MUTANTS[name]
    # Of the kind that is random by batch and head.
    cases = [case(263, 263, 2, 2, 2)]
    assert not mutant_passes(spec, make_config(64, 64), line, broken, cases, seed=3)


def masks() -> dict[str, tuple[BlockMask, Tensor]]:
    """Each with what it means, bool (batch or 1, heads or 1, 150, 270)."""
    rows, keys = torch.arange(150)[:, None], torch.arange(270)[None]
    prefix = torch.tensor([200, 3])
    of_q, of_k = torch.arange(150) // 60, torch.arange(270) // 100
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand((2, 4, 150, 270), generator=generator) > 0.7
    drawn[:, :, :128, :128] = False
    return {
        "prefix": (
            prefix_lm(prefix, 150, 270),
            ((keys < prefix[:, None, None]) | (keys <= rows + 120))[:, None],
        ),
        "documents": (
            document(of_q, of_k, causal=True),
            ((of_q[:, None] == of_k) & (keys <= rows + 120))[None, None],
        ),
        "boolean": (from_boolean(drawn), drawn),
    }


@pytest.mark.parametrize(
    "name",
    [
        "documents",
        *(
            pytest.param(n, marks=pytest.mark.slow("make test proves a sample of it"))
            for n in ("prefix", "boolean")
        ),
    ],
)
def test_the_public_call_is_a_boolean_mask(
    dispatcher: Dispatcher, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and gradients, beside torch's own autograd of the masked softmax."""
    directions = record_directions(monkeypatch)
    mask, meant = masks()[name]
    torch.manual_seed(3)
    q, k, v = leaves(
        torch.randn(2, 4, 150, 16), torch.randn(2, 2, 270, 16), torch.randn(2, 2, 270, 16)
    )
    o, lse = dispatcher.attention(q, k, v, block_mask=mask, return_lse=True)
    x = [t.detach().double().requires_grad_() for t in (q, k, v)]
    exact, exact_lse = eager.attention(
        *x, scale=0.25, diagonal=None, features=Features(bias=meant.expand(2, 4, 150, 270))
    )
    torch.testing.assert_close(o, exact.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, exact_lse.float(), rtol=1e-5, atol=1e-5)
    do = torch.randn_like(o)
    found = torch.autograd.grad(o, (q, k, v), do)
    for grad, want in zip(found, torch.autograd.grad(exact, x, do.double()), strict=True):
        torch.testing.assert_close(grad, want.float(), rtol=1e-4, atol=1e-5)
    assert directions == ["forward", "backward_delta", "backward_dkv", "backward_dq"]


@pytest.mark.parametrize("loads", ["pointer", "descriptor"])
def test_skipped_blocks_are_not_read(tmp_path: Path, loads: str) -> None:
    """NaN in the keys and values of blocks that a block of queries does not see, and in the queries
    and dO that a block of keys does not: 0 times it would be NaN."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 1, 256, 16) for _ in range(4))
    mask = document(torch.arange(256) // 128)  # two documents, of a block each
    call: dict[str, Any] = {
        "scale": 0.25, "diagonal": None, "features": Features(block_mask=mask),
    }  # fmt: skip
    inputs = gradients.GradientInputs(q=q, k=k, v=v, do=do, dlse=torch.zeros(1, 1, 256), **call)
    want, lse, delta = gradients.forward(inputs)
    exact = gradients.exact_gradients(inputs)
    config = make_config(64, 64, loads=loads)

    def poisoned(x: Tensor) -> Tensor:
        return torch.cat((x[:, :, :128], torch.full_like(x[:, :, 128:], float("nan"))), 2)

    def kernel(direction: Any) -> tuple[Any, AttentionSpec]:
        spec = make_spec("float32", 16, block_mask=True).for_direction(direction)
        rendered = render(spec, config)
        path = tmp_path / f"{rendered.name}.py"
        path.write_text(rendered.source)
        return load_kernel(path, rendered.text_name, rendered.name), spec

    def assert_first(found: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(
            found[:, :, :128].double(), wanted[:, :, :128].double(), rtol=1e-4, atol=1e-5
        )

    forward, spec = kernel(FORWARD)
    o, _ = launch(forward, spec, config, q, poisoned(k), poisoned(v), **call)
    assert_first(o, want)
    backward: dict[str, Any] = {"lse": lse, "delta": delta, **call}
    of_rows, spec = kernel(DQ)
    given = Backward(q=q, k=poisoned(k), v=poisoned(v), do=do, **backward)
    assert_first(bind(of_rows, spec, config)(given)[0], exact["dq"])
    of_keys, spec = kernel(DKV)
    given = Backward(q=poisoned(q), k=k, v=v, do=poisoned(do), **backward)
    for grad, name in zip(bind(of_keys, spec, config)(given), ("dk", "dv"), strict=True):
        assert_first(grad, exact[name])


def test_rows_that_see_nothing(dispatcher: Dispatcher) -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 16).unbind()
    ids = torch.arange(40) // 10
    ids[:10] = -1
    o, lse = dispatcher.attention(q, k, v, block_mask=document(ids), return_lse=True)
    assert (o[:, :, :10] == 0).all()
    assert (lse[:, :, :10] == float("-inf")).all()
    assert torch.isfinite(lse[:, :, 10:]).all()
