"""torch.ops.flash_attn_3 on CPU tensors, beside the functions of flash_attn_3 and their gradients."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import parse_schema

from flashgen.errors import InvalidArgument
from flashgen.runtime import flash_attn_3
from flashgen.runtime import flash_attn_3_operators as operators
from tests.serving import leaves

OPS = torch.ops.flash_attn_3
CAUSAL_WINDOW: dict[str, Any] = {"is_causal": True, "window_size_left": 3, "softcap": 1.5}
WANTED: dict[str, Any] = {"causal": True, "window_size": (3, -1), "softcap": 1.5}


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


Q, K, V = draw(2, 7, 4, 16), draw(2, 9, 2, 16), draw(2, 9, 2, 24)
BOUNDS, KEYS = torch.tensor([0, 3, 3, 7]).int(), torch.tensor([0, 4, 6, 9]).int()


@pytest.mark.parametrize("name", operators.SCHEMAS)
def test_schemas_are_those_of_flash_attention(name: str) -> None:
    """As its own test_flash3_bw_compatibility has them."""
    schema = parse_schema(f"flash_attn_3::{name}{operators.SCHEMAS[name]}")
    found = getattr(OPS, name).default._schema
    assert found.is_backward_compatible_with(schema)
    assert len(schema.arguments) == {"fwd": 34, "bwd": 22, "fwd_combine": 4}.get(name, 24)


def test_a_batch_and_its_gradients() -> None:
    tensors = leaves(Q, K, V)
    wanted, wanted_lse = flash_attn_3.flash_attn_func(*tensors, return_attn_probs=True, **WANTED)
    out = torch.empty_like(wanted)
    with torch.no_grad():
        o, lse, *others = OPS.fwd(Q, K, V, out=out, **CAUSAL_WINDOW)
    assert o.data_ptr() == out.data_ptr()
    torch.testing.assert_close((out, lse), (wanted, wanted_lse))
    assert others == [None, None]
    grads = torch.autograd.grad(wanted.square().sum(), tensors)
    places = [torch.empty_like(x) for x in (Q, K, V)]
    found = OPS.bwd(2 * o, Q, K, V, o, lse, *places, **CAUSAL_WINDOW)
    torch.testing.assert_close(found[:3], grads, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(tuple(places), grads, rtol=1e-5, atol=1e-5)


def test_packed_sequences_and_their_gradients() -> None:
    tensors = leaves(Q[0], K[0], V[0])
    bounds = {"cu_seqlens_q": BOUNDS, "cu_seqlens_k": KEYS, "max_seqlen_q": 4, "max_seqlen_k": 4}
    wanted, wanted_lse = flash_attn_3.flash_attn_varlen_func(
        *tensors, **bounds, return_attn_probs=True, **WANTED
    )
    with torch.no_grad():
        o, lse, *_ = OPS.fwd(*tensors, **bounds, **CAUSAL_WINDOW)
        found = OPS.bwd(2 * o, *tensors, o, lse, **bounds, **CAUSAL_WINDOW)[:3]
    torch.testing.assert_close((o, lse), (wanted.detach(), wanted_lse.detach()))
    grads = torch.autograd.grad(wanted.square().sum(), tensors)
    torch.testing.assert_close(found, grads, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("paged", [True, False])
def test_a_cache(paged: bool) -> None:
    pool, table = draw(3, 8, 2, 16), torch.tensor([[2, 0], [1, 2]]).int()
    lengths = torch.tensor([11, 5]).int() if paged else torch.tensor([6, 3]).int()
    cache = pool if paged else pool[:2]
    pages = {"page_table": table} if paged else {}
    o, lse, *_ = OPS.fwd(Q[:, :1], cache, cache, seqused_k=lengths, is_causal=True, **pages)
    wanted = flash_attn_3.flash_attn_with_kvcache(
        Q[:, :1], cache, cache, cache_seqlens=lengths, causal=True, return_softmax_lse=True, **pages
    )
    torch.testing.assert_close((o, lse), tuple(wanted))
    if paged:  # and packed queries over it
        bounds = torch.tensor([0, 3, 7]).int()
        more = {"cu_seqlens_q": bounds, "max_seqlen_q": 4, **pages}
        o, *_ = OPS.fwd(Q[0], pool, pool, seqused_k=lengths, is_causal=True, **more)
        wanted = flash_attn_3.flash_attn_with_kvcache(
            Q[0], pool, pool, cache_seqlens=lengths, causal=True, **more
        )
        torch.testing.assert_close(o, wanted)


def test_new_keys_are_written_into_the_cache() -> None:
    ours, theirs = ([draw(2, 8, 2, 16) for _ in range(2)] for _ in range(2))
    new, lengths = draw(2, 2, 2, 16), torch.tensor([5, 1]).int()
    o, *_ = OPS.fwd(Q[:, :2], *ours, new, new, seqused_k=lengths, is_causal=True)
    wanted = flash_attn_3.flash_attn_with_kvcache(
        Q[:, :2], *theirs, new, new, cache_seqlens=lengths, causal=True
    )
    torch.testing.assert_close(o, wanted)
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(ours[0][0, 5:7], new[0])


def test_parts_of_split_keys_and_no_plan() -> None:
    parts, lse = draw(3, 2, 5, 4, 16), draw(3, 2, 5, 4)
    found = OPS.fwd_combine(parts, lse, out_dtype=torch.bfloat16)
    torch.testing.assert_close(
        found, tuple(flash_attn_3.flash_attn_combine(parts, lse, out_dtype=torch.bfloat16))
    )
    plan = OPS.get_scheduler_metadata(2, 1, 9, 4, 2, 16, 16, torch.bfloat16, BOUNDS)
    assert (plan.numel(), plan.dtype) == (0, torch.int32)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"q_v": Q}, "qv must be None"),
        ({"seqused_q": KEYS}, "seqused_q needs cu_seqlens_q"),
        ({"cu_seqlens_k": KEYS}, "cu_seqlens_k needs cu_seqlens_q"),
        ({"k_descale": V}, "must be None but in flash_attn_func of float8"),
    ],
)
def test_what_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        OPS.fwd(Q, K, V, **given)
    with pytest.raises(InvalidArgument, match="cu_seqlens_q must be given"):
        OPS.bwd(Q, Q, K, K, Q, Q, seqused_k=KEYS)


@pytest.mark.slow("a program that imports torch: 3 s")
def test_flash_attention_itself_comes_first() -> None:
    program = (
        "import torch; own = torch.library.Library('flash_attn_3', 'DEF'); own.define('fwd() -> ()')\n"
        "import flashgen.runtime.flash_attn_3_operators"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "torch.ops.flash_attn_3 must be free" in done.stderr, done.stderr
