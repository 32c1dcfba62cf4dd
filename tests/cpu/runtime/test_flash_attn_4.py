"""The functions of FlashAttention 4's flash_attn.cute on CPU tensors: names, order and defaults, and
what each computes, beside flashgen's own functions.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen.runtime.flash_attn_4 as cute
from flashgen import attention, attention_varlen
from flashgen.errors import InvalidArgument
from flashgen.runtime import flash_attn
from tests.serving import leaves

MODS = "score_mod=None score_mod_bwd=None mask_mod=None"
GATHERED = "gather_bwd_recompute_p=False gather_bwd_token_chunk=None"
MIDDLE = (
    "softmax_scale=None causal=False window_size=(None, None) learnable_sink=None softcap=0.0 "
    f"num_splits=1 pack_gqa=None deterministic=False {MODS}"
)
SIGNATURES = {
    "flash_attn_func": f"q k v qv=None gather_kv_indices=None {MIDDLE} aux_tensors=None "
    "aux_scalars=None block_sparse_tensors=None block_sparse_tensors_bwd=None return_lse=False "
    + GATHERED,
    "flash_attn_varlen_func": "q k v qv=None cu_seqlens_q=None cu_seqlens_k=None max_seqlen_q=None "
    "max_seqlen_k=None min_seqlen_k=None seqused_q=None seqused_k=None gather_kv_indices=None "
    f"page_table=None {MIDDLE} block_sparse_tensors=None aux_tensors=None aux_scalars=None "
    "return_lse=False scheduler_metadata=None seqlen_k_per_split=None "
    f"disable_scheduler_metadata=False {GATHERED}",
}  # flash_attn/cute/interface.py of flash-attn-4 4.0.0b36


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


Q, K, V = draw(2, 7, 4, 16), draw(2, 9, 2, 16), draw(2, 9, 2, 16, seed=1)
SINKS = draw(4)
BOUNDS, KEYS = torch.tensor([0, 3, 3, 7]).int(), torch.tensor([0, 4, 6, 9]).int()


def ours(*tensors: Tensor) -> list[Tensor]:
    """In flashgen's layout."""
    return [x.transpose(1, 2) for x in tensors]


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_order_and_defaults_are_the_packages(name: str) -> None:
    parameters = list(inspect.signature(getattr(cute, name)).parameters.values())
    assert (parameters[-1].name, parameters[-1].kind) == ("invariant", parameters[-1].KEYWORD_ONLY)
    words = [
        each.name + ("" if each.default is each.empty else f"={each.default}")
        for each in parameters[:-1]
    ]
    assert " ".join(words) == SIGNATURES[name]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {}),
        ({"causal": True, "softmax_scale": 0.3}, {"causal": True, "scale": 0.3}),
        ({"window_size": (2, None), "softcap": 1.5}, {"window": (2, -1), "softcap": 1.5}),
        ({"learnable_sink": SINKS}, {"sinks": SINKS}),
        ({"num_splits": 5, "pack_gqa": True}, {}),
    ],
    ids=lambda x: "-".join(x),
)
def test_dense_and_packed(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    o, lse = cute.flash_attn_func(Q, K, V, return_lse=True, **given)
    want, want_lse = attention(*ours(Q, K, V), return_lse=True, **wanted)
    torch.testing.assert_close(o.transpose(1, 2), want)
    torch.testing.assert_close(lse, want_lse)
    assert cute.flash_attn_func(Q, K, V, **given)[1] is None

    tensors = Q[0], K[0], V[0]
    bounds = {"cu_seqlens_q": BOUNDS, "cu_seqlens_k": KEYS}
    want, want_lse = attention_varlen(*tensors, BOUNDS, KEYS, 4, 4, return_lse=True, **wanted)
    for longest in ({}, {"max_seqlen_q": 4, "max_seqlen_k": 4}):
        o, lse = cute.flash_attn_varlen_func(
            *tensors, **bounds, **longest, return_lse=True, **given
        )
        torch.testing.assert_close(o, want)
        torch.testing.assert_close(lse, want_lse)


def test_rows_of_a_batch_of_which_some_places_are_used() -> None:
    used = {"seqused_q": torch.tensor([7, 2]).int(), "seqused_k": torch.tensor([5, 9]).int()}
    o, lse = cute.flash_attn_varlen_func(Q, K, V, **used, causal=True, return_lse=True)
    assert (o.shape, lse.shape) == (Q.shape, (2, 4, 7))
    for n, (rows, keys) in enumerate(zip(*(used[name].tolist() for name in used), strict=True)):
        tensors = ours(Q[n : n + 1, :rows], K[n : n + 1, :keys], V[n : n + 1, :keys])
        want, want_lse = attention(*tensors, causal=True, return_lse=True)
        torch.testing.assert_close(o[n : n + 1, :rows].transpose(1, 2), want)
        torch.testing.assert_close(lse[n : n + 1, :, :rows], want_lse)


def test_keys_in_pages() -> None:
    pool_k, pool_v = draw(6, 4, 2, 16), draw(6, 4, 2, 16, seed=2)
    table, lengths = torch.tensor([[4, 1], [0, 0], [5, 2]]).int(), torch.tensor([7, 1, 6]).int()
    o, _ = cute.flash_attn_varlen_func(
        Q[0], pool_k, pool_v, cu_seqlens_q=BOUNDS, seqused_k=lengths, page_table=table, causal=True
    )
    want = attention_varlen(
        Q[0], pool_k, pool_v, BOUNDS, None, 4, 8, block_table=table, seqused_k=lengths, causal=True
    )
    torch.testing.assert_close(o, want)


def test_gradients_of_a_sink_of_another_dtype() -> None:
    """Sinks are float32 for kernels, whatever they and q are."""
    q, k, v = (x.bfloat16().requires_grad_() for x in (Q, K, V))
    sinks = SINKS.half().requires_grad_()
    cute.flash_attn_func(q, k, v, learnable_sink=sinks)[0].float().square().sum().backward()
    held = sinks.detach().float().requires_grad_()
    attention(*ours(q, k, v), sinks=held).float().square().sum().backward()
    assert sinks.grad is not None
    assert held.grad is not None
    assert torch.equal(sinks.grad, held.grad.half())
    o = flash_attn.flash_attn_func(q, k, v, s_aux=sinks)
    assert torch.equal(o, flash_attn.flash_attn_func(q, k, v, s_aux=sinks.float()))


@pytest.mark.parametrize("packed", [True, False])
def test_what_torchs_own_hook_looks_up(packed: bool) -> None:
    """The forward and backward of flash_attn.cute.interface: as the public functions and their gradients."""
    tensors = leaves(*((x[0] for x in (Q, K, V)) if packed else (Q, K, V)))
    bounds = {"cu_seqlens_q": BOUNDS, "cu_seqlens_k": KEYS} if packed else {}
    function = cute.flash_attn_varlen_func if packed else cute.flash_attn_func
    options: dict[str, Any] = {"causal": True, "softmax_scale": 0.3}
    wanted = function(*tensors, **bounds, window_size=(2, None), return_lse=True, **options)
    grads = torch.autograd.grad(wanted[0].square().sum(), tensors)
    given = {**bounds, **options, "window_size_left": 2, "window_size_right": None}
    out = torch.empty_like(wanted[0])
    unused = {"max_seqlen_q": 4, "max_seqlen_k": 4, "page_table": None, "num_splits": 1}
    found = cute._flash_attn_fwd(*tensors, **given, **unused, out=out, return_lse=True)
    torch.testing.assert_close(found, tuple(x.detach() for x in wanted))
    assert found[0] is out
    place = torch.empty_like(tensors[1])
    made = cute._flash_attn_bwd(*tensors, out, 2 * out, found[1], **given, dk=place)
    torch.testing.assert_close(made, grads, rtol=1e-5, atol=1e-5)
    assert made[1] is place
    with pytest.raises(InvalidArgument, match="cu_seqlens_k must be given with cu_seqlens_q"):
        cute._flash_attn_bwd(*tensors, out, out, out, cu_seqlens_q=BOUNDS)


def test_parts_of_split_keys() -> None:
    rows = (slice(5), slice(5, 9))
    halves = [cute.flash_attn_func(Q, K[:, x], V[:, x], return_lse=True) for x in rows]
    parts = torch.stack([o for o, _ in halves]), torch.stack([lse.mT for _, lse in halves])
    o, lse = cute.flash_attn_func(Q, K, V, return_lse=True)
    torch.testing.assert_close(cute.flash_attn_combine(*parts), (o, lse.mT))
    out = torch.empty_like(o[0], dtype=torch.float64)
    found, none = cute.flash_attn_combine(*(x[:, 0] for x in parts), out, return_lse=False)
    torch.testing.assert_close(out.float(), o[0])
    assert found.data_ptr() == out.data_ptr()
    assert none is None
    with pytest.raises(InvalidArgument, match="lse_partial must have three dimensions"):
        cute.flash_attn_combine(parts[0][:, 0], parts[1])


@pytest.mark.parametrize("name", SIGNATURES)
@pytest.mark.parametrize("word", ["qv", "gather_kv_indices", *"score_mod mask_mod".split()])
def test_what_computes_something_else_is_refused(name: str, word: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{word} must be None"):
        getattr(cute, name)(Q, K, V, **{word: Q})


@pytest.mark.parametrize("sides", [(3,), (3, 2, 1), 3])
def test_a_window_that_is_no_pair_is_named(sides: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"window must be \(left, right\)"):
        cute.flash_attn_func(Q, K, V, window_size=sides)


def test_pages_need_lengths() -> None:
    with pytest.raises(InvalidArgument, match="page_table needs seqused_k"):
        cute.flash_attn_varlen_func(Q[0], K, V, cu_seqlens_q=BOUNDS, page_table=BOUNDS[None])


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "page_table"])
def test_what_is_no_tensor_is_named(name: str) -> None:
    tensors = (Q[0], K, V) if name == "page_table" else (Q[0], K[0], V[0])
    given: dict[str, Any] = {"cu_seqlens_q": BOUNDS, "cu_seqlens_k": KEYS}
    if name == "page_table":
        given = {"cu_seqlens_q": BOUNDS, "seqused_k": BOUNDS[1:]}
    with pytest.raises(InvalidArgument, match=f"^{name} must be a tensor"):
        cute.flash_attn_varlen_func(*tensors, **given | {name: [0, 1]})
