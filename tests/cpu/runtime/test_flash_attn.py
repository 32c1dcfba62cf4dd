"""flash_attn's functions on CPU tensors, beside the package's own words; append() and its refusals."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashgen.runtime.flash_attn as flash_attn
from flashgen import attention
from flashgen.errors import InvalidArgument, NotDifferentiable
from flashgen.runtime import flash_attn_3, flash_attn_4, general_path
from flashgen.runtime.kv_cache import append

COMMON = "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 alibi_slopes=None deterministic=False return_attn_probs=False"
SIGNATURES = {
    "flash_attn_func": "q k v " + COMMON,
    "flash_attn_qkvpacked_func": "qkv " + COMMON,
    "flash_attn_kvpacked_func": "q kv " + COMMON,
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    + COMMON
    + " block_table=None",
    "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    + COMMON,
    "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen " + COMMON,
    "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None "
    "cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1, -1) "
    "softcap=0.0 rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False",
}  # FlashAttention 2.7, flash_attn_interface.py


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_order_and_defaults_are_the_packages(name: str) -> None:
    words = []
    for parameter in inspect.signature(getattr(flash_attn, name)).parameters.values():
        default = "" if parameter.default is parameter.empty else f"={parameter.default}"
        words.append(parameter.name + default)
    sinks = [] if "packed" in name else ["s_aux=None"]
    assert " ".join(words) == " ".join([SIGNATURES[name], *sinks, "invariant=False"])
    assert name in flash_attn.__all__


@pytest.mark.parametrize("name", ["func", "varlen_func", "with_kvcache"])
def test_sinks_are_summed(name: str) -> None:
    q, k, v = draw(1, 5, 4, 16), draw(1, 9, 2, 16), draw(1, 9, 2, 16, seed=1)
    sinks = draw(4)
    want = attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, sinks=sinks)
    if name == "varlen_func":
        of_q, of_k = (torch.tensor([0, n], dtype=torch.int32) for n in (5, 9))
        o = flash_attn.flash_attn_varlen_func(
            q[0], k[0], v[0], of_q, of_k, 5, 9, causal=True, s_aux=sinks
        )[None]
    else:
        o = getattr(flash_attn, f"flash_attn_{name}")(q, k, v, causal=True, s_aux=sinks)
    torch.testing.assert_close(o.transpose(1, 2), want)


@pytest.mark.parametrize("name", SIGNATURES)
def test_invariant_is_handed_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = torch.tensor([0, 5], dtype=torch.int32)
    x = draw(1, 5, 2, 16)
    if "kvpacked" in name:  # that of qkv, too
        x = draw(1, 5, 2 if "_kv" in name else 3, 2, 16)
    given = {
        "qkv": x, "kv": x, "q": draw(1, 5, 2, 16), "k": x, "v": x, "k_cache": x, "v_cache": x,
        "cu_seqlens": bounds, "cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen": 5,
        "max_seqlen_q": 5, "max_seqlen_k": 5, "cache_seqlens": bounds[1:],
    }  # fmt: skip
    function = getattr(flash_attn, name)
    needed = inspect.signature(function).parameters
    with_new = "with_kvcache" in name
    call = {
        key: value[0]
        if "varlen" in name and isinstance(value, Tensor) and value.ndim > 1
        else value
        for key, value in given.items()
        if key in needed and not (with_new and key in ("k", "v"))
    }
    plain = function(**call, causal=True)
    taken: list[bool] = []
    features = general_path.features_of

    def features_of(**fields: Any) -> Any:
        taken.append(fields["invariant"])
        return features(**fields)

    monkeypatch.setattr(general_path, "features_of", features_of)
    torch.testing.assert_close(function(**call, causal=True, invariant=True), plain)
    assert taken == [True]
    with pytest.raises(InvalidArgument, match="invariant must be True or False: got 1"):
        function(**call, causal=True, invariant=1)


def expected(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Bottom-right attention in the package's layout; rows that see nothing are 0."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    rows = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    sees = (torch.arange(k.shape[2])[None, :] <= rows) | (not causal)
    o = scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True)
    return torch.where(sees.any(1)[:, None], o, 0.0).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(5, 5), (3, 9), (9, 4)])
def test_flash_attn_func(seq_q: int, seq_k: int, causal: bool) -> None:
    q, k, v = draw(2, seq_q, 4, 16), draw(2, seq_k, 2, 16), draw(2, seq_k, 2, 16, seed=1)
    o = flash_attn.flash_attn_func(q, k, v, causal=causal)
    torch.testing.assert_close(o, expected(q, k, v, causal))
    again, lse, probs = flash_attn.flash_attn_func(
        q, k, v, 0.0, None, causal, return_attn_probs=True
    )
    torch.testing.assert_close(again, o)
    assert lse.shape == (2, 4, seq_q)
    assert probs is None
    packed = flash_attn.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), causal=causal)
    torch.testing.assert_close(packed, o)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(2, 1), (0, 0), (3, -1), (-1, 2), (-1, -1)])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(6, 6), (3, 9), (9, 4)])
def test_windows_count_from_the_bottom_right_diagonal(
    seq_q: int, seq_k: int, window: tuple[int, int], causal: bool
) -> None:
    """Under a causal mask the right side is 0 whatever is asked."""
    q, k, v = draw(2, seq_q, 4, 16), draw(2, seq_k, 2, 16), draw(2, seq_k, 2, 16, seed=1)
    left, right = (1000 if side < 0 else side for side in window)
    offset = torch.arange(seq_k)[None, :] - torch.arange(seq_q)[:, None] - (seq_k - seq_q)
    sees = (offset >= -left) & (offset <= (0 if causal else right))
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    o = scaled_dot_product_attention(*heads_first, attn_mask=sees, enable_gqa=True)
    o = torch.where(sees.any(1)[:, None], o, 0.0).transpose(1, 2)
    found = flash_attn.flash_attn_func(q, k, v, causal=causal, window_size=window)
    torch.testing.assert_close(found, o)


def test_softcap_comes_before_the_mask_and_has_gradients() -> None:
    q, k, v = (draw(1, 5, 2, 16, seed=seed).requires_grad_() for seed in range(3))
    cap = 0.5
    s = torch.einsum("bihd,bjhd->bhij", q, k) / 4
    s = (cap * torch.tanh(s / cap)).masked_fill(~torch.ones(5, 5).tril().bool(), float("-inf"))
    o = torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v)
    found = flash_attn.flash_attn_func(q, k, v, causal=True, softcap=cap)
    torch.testing.assert_close(found, o)
    wanted = torch.autograd.grad(o.square().sum(), (q, k, v))
    given = torch.autograd.grad(found.square().sum(), (q, k, v))
    torch.testing.assert_close(given, wanted)


def test_qkv_packed_has_gradients() -> None:
    qkv = draw(1, 6, 3, 2, 16).requires_grad_()
    o = flash_attn.flash_attn_qkvpacked_func(qkv, causal=True, softmax_scale=0.5)
    q, k, v = qkv.unbind(2)
    torch.testing.assert_close(o, expected(q * 2, k, v, True))  # 0.5 is twice 1/sqrt(16)
    o.sum().backward()
    assert qkv.grad is not None
    assert qkv.grad.abs().sum() > 0


def rotated(
    x: Tensor, cos: Tensor, sin: Tensor, first: int, interleaved: bool, step: int = 1
) -> Tensor:
    """Rotary embedding by complex numbers: x (seq, heads, d) turned by places first, first + step..."""
    half = cos.shape[1]
    pairs = x[..., : 2 * half].double()
    if interleaved:
        z = torch.complex(pairs[..., 0::2], pairs[..., 1::2])
    else:
        z = torch.complex(pairs[..., :half], pairs[..., half:])
    places = torch.arange(x.shape[0]) * step + first
    z = z * torch.complex(cos, sin)[places][:, None]
    turned = (
        torch.stack((z.real, z.imag), -1).flatten(-2)
        if interleaved
        else torch.cat((z.real, z.imag), -1)
    )
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), -1)


@pytest.mark.parametrize("dim", [4, 8, 20, 36])
def test_head_dims_between_those_of_kernels_are_padded(dim: int) -> None:
    """As the package pads them: the scale is that of the dim, gradients are of the given elements."""
    q, k, v = (draw(2, 5, 2, dim, seed=seed).requires_grad_() for seed in range(3))
    want = expected(q, k, v, True)
    found = flash_attn.flash_attn_func(q, k, v, causal=True)
    cu = torch.tensor([0, 5, 10], dtype=torch.int32)
    packed = flash_attn.flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)), cu, cu, 5, 5, causal=True
    )
    for o in (found, packed.view(2, 5, 2, dim)):
        torch.testing.assert_close(o, want)
        given = torch.autograd.grad(o.square().sum(), (q, k, v), retain_graph=True)
        wanted = torch.autograd.grad(want.square().sum(), (q, k, v), retain_graph=True)
        torch.testing.assert_close(given, wanted)
    with pytest.raises(InvalidArgument, match=f"k must have the head_dim of q, {dim}: got 16"):
        flash_attn.flash_attn_func(q, draw(2, 5, 2, 16), draw(2, 5, 2, 16))


@pytest.mark.parametrize("window", [(24, 24), (24, -1), (-1, 30)])
@pytest.mark.parametrize("paged", [False, True])
def test_a_window_as_wide_as_the_cache_is_none(window: tuple[int, int], paged: bool) -> None:
    """Then all queries are rotated by the place of the first new key; one key fewer, and each by
    its own.
    """
    angles = torch.rand(24, 4, generator=torch.Generator().manual_seed(1))
    new = draw(2, 3, 2, 16)

    def call(window: tuple[int, int]) -> Tensor:
        shape, table = ((2, 24), None)
        if paged:
            shape, table = (6, 8), torch.arange(6, dtype=torch.int32).view(2, 3)
        k_cache, v_cache = (torch.ones(*shape, 2, 16).mul(seed) for seed in (0.5, 2.0))
        return flash_attn.flash_attn_with_kvcache(
            draw(2, 3, 4, 16), k_cache, v_cache, new, new, angles.cos(), angles.sin(),
            cache_seqlens=20, window_size=window, block_table=table,
        )  # type: ignore[return-value]  # fmt: skip

    plain = call((-1, -1))
    assert torch.equal(call(window), plain)
    assert not torch.allclose(call((23, 23)), plain)


LENGTHS = (0, 7, 20)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", [None, 4])
def test_with_kvcache_appends_rotates_and_attends(
    page_size: int | None, causal: bool, interleaved: bool
) -> None:
    capacity, new, heads = 24, 3, 2
    q, k, v = draw(3, new, 4, 16), draw(3, new, heads, 16), draw(3, new, heads, 16, seed=1)
    angles = torch.rand(
        capacity, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    cos, sin = angles.cos(), angles.sin()
    shape = (3, capacity, heads, 16) if page_size is None else (20, page_size, heads, 16)
    k_cache, v_cache = draw(*shape, seed=2), draw(*shape, seed=3)
    table = None
    if page_size is not None:
        table = torch.randperm(20, generator=torch.Generator().manual_seed(0))[:18].view(3, 6).int()
    before = k_cache.clone(), v_cache.clone()

    def held(cache: Tensor, b: int, keys: int) -> Tensor:
        if table is None:
            return cache[b, :keys]
        return (
            torch.stack([cache[table[b, j // 4], j % 4] for j in range(keys)])
            if keys
            else cache[0, :0]
        )

    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    o, lse = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cos, sin, cache_seqlens=lengths, block_table=table,
        causal=causal, rotary_interleaved=interleaved, return_softmax_lse=True,
    )  # fmt: skip
    assert lengths.tolist() == list(LENGTHS)
    assert lse.shape == (3, 4, new)
    for b, length in enumerate(LENGTHS):
        keys = torch.cat((held(before[0], b, length), rotated(k[b], cos, sin, length, interleaved)))
        values = torch.cat((held(before[1], b, length), v[b]))
        turned = rotated(q[b], cos, sin, length, interleaved, step=int(causal))
        torch.testing.assert_close(held(k_cache, b, length + new), keys)
        torch.testing.assert_close(held(v_cache, b, length + new), values)
        torch.testing.assert_close(
            o[b : b + 1], expected(turned[None], keys[None], values[None], causal)
        )


def test_with_kvcache_of_a_full_cache_and_of_a_number() -> None:
    q, k, v = draw(2, 1, 4, 16), draw(2, 9, 2, 16), draw(2, 9, 2, 16, seed=1)
    o = flash_attn.flash_attn_with_kvcache(q, k, v, causal=True)
    torch.testing.assert_close(o, expected(q, k, v, False))
    o = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=4, num_splits=3)
    torch.testing.assert_close(o, expected(q, k[:, :4], v[:, :4], False))


def test_a_cache_has_no_gradients() -> None:
    """Whether or not somebody records them."""
    q, k = draw(2, 1, 4, 16).requires_grad_(), draw(2, 9, 2, 16)
    o = flash_attn.flash_attn_with_kvcache(q, k, k, causal=True)
    assert not o.requires_grad  # type: ignore[union-attr]
    with torch.no_grad():
        assert torch.equal(flash_attn.flash_attn_with_kvcache(q, k, k, causal=True), o)  # type: ignore[arg-type]
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    "side", [np.int32, np.int64, torch.tensor, int], ids=["int32", "int64", "tensor", "int"]
)
@pytest.mark.parametrize("window", [(2, 1), (2, -7), (-(2**40), 0), (-2, -3)])
def test_a_side_of_a_window_is_any_integer(window: tuple[int, int], side: Any) -> None:
    """A negative one has no end, as FlashAttention has it."""
    q, k, v = draw(1, 6, 2, 16), draw(1, 6, 2, 16, seed=1), draw(1, 6, 2, 16, seed=2)
    known = tuple(max(-1, x) for x in window)
    given = [side(x) for x in window] if side is not np.int32 else np.array(known, np.int32)
    cu = torch.tensor([0, 6], dtype=torch.int32)
    want = flash_attn.flash_attn_func(q, k, v, window_size=known)  # type: ignore[arg-type]
    calls = (
        flash_attn.flash_attn_func(q, k, v, window_size=given),  # type: ignore[arg-type]
        flash_attn.flash_attn_with_kvcache(q, k, v, window_size=given),  # type: ignore[arg-type]
        flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 6, 6, window_size=given)[None],  # type: ignore[arg-type,index]
    )
    for o in calls:
        torch.testing.assert_close(o, want)


@pytest.mark.parametrize("length", [-5, 9, 2**31 - 1, -(2**31)])
def test_a_length_beyond_the_cache_is_the_cache(length: int) -> None:
    """Also where the sum with the new keys is beyond int32."""
    q, cache, new = draw(1, 1, 2, 16), draw(1, 9, 2, 16, seed=1), draw(1, 2, 2, 16, seed=2)
    within = min(max(length, 0), 9)
    k, same = cache.clone(), cache.clone()
    o = with_cache(q, k, k.clone(), new, new, cache_seqlens=length)
    torch.testing.assert_close(o, with_cache(q, same, same.clone(), new, new, cache_seqlens=within))
    assert torch.equal(k, same)
    assert o.abs().sum() > 0  # type: ignore[union-attr]


def test_pages_have_no_gradient_and_say_so_in_the_backward() -> None:
    q = draw(3, 2, 16).requires_grad_()
    cu = torch.tensor([0, 3], dtype=torch.int32)
    arguments = (POOLS["k_cache"], POOLS["v_cache"], cu, cu, 3, 3)
    o = flash_attn.flash_attn_varlen_func(q, *arguments, block_table=IN_PAGES[:1])
    with torch.no_grad():
        assert torch.equal(
            flash_attn.flash_attn_varlen_func(q, *arguments, block_table=IN_PAGES[:1]), o
        )  # type: ignore[arg-type]
    assert o.requires_grad  # type: ignore[union-attr]
    with pytest.raises(NotDifferentiable, match="with block_table, has no gradient"):
        o.sum().backward()  # type: ignore[union-attr]


def test_keys_beyond_the_capacity_are_dropped() -> None:
    cache, new = torch.zeros(1, 1, 4, 16), draw(1, 1, 3, 16)
    append(cache, cache.clone(), new, new, torch.tensor([2], dtype=torch.int32))
    torch.testing.assert_close(cache[0, 0], torch.cat((torch.zeros(2, 16), new[0, 0, :2])))


Q, K = draw(2, 1, 4, 16), draw(2, 9, 2, 16)
NEW, N, TURNS = draw(2, 1, 2, 16), torch.zeros(2, dtype=torch.int32), torch.zeros(9, 8)
POOLS = {"k_cache": draw(3, 8, 2, 16), "v_cache": draw(3, 8, 2, 16)}
IN_PAGES = torch.tensor([[0, 1], [2, 0]], dtype=torch.int32)
func, with_cache = flash_attn.flash_attn_func, flash_attn.flash_attn_with_kvcache


def append_one(q: Any, k: Any, v: Any) -> None:
    """append() without rotary embedding, to which q says nothing."""
    append(draw(2, 2, 9, 16), draw(2, 2, 9, 16), *[NEW.transpose(1, 2)] * 2, N, q=q)


REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "window": (func, {"window_size": (3, 2.5)}, r"window must be \(left, right\)"),
    "softcap": (func, {"softcap": -30.0}, "softcap must be"),
    "softcap of a cache": (with_cache, {"softcap": -30.0}, "softcap must be finite"),
    "probabilities": (func, {"dropout_p": 0.1, "return_attn_probs": True}, "return_attn_probs must be False"),
    "rank": (func, {"q": Q[0]}, "q must have four dimensions"),
    "window of a cache": (with_cache, {"window_size": [0, True]}, r"window must be \(left, right\)"),
    "batch index": (with_cache, {"cache_batch_idx": N.long()}, r"cache_batch_idx must be int32 of shape \(2,\)"),
    "batch index of pages": (with_cache, {"cache_batch_idx": N, "cache_seqlens": N, "block_table": N[:, None], "k_cache": draw(3, 8, 2, 16), "v_cache": draw(3, 8, 2, 16)}, "cache_batch_idx must be None with block_table"),
    "left padding": (with_cache, {"cache_leftpad": N[:1]}, r"cache_leftpad must be int32 of shape \(2,\)"),
    "slopes": (with_cache, {"alibi_slopes": torch.ones(3)}, r"alibi_slopes must be float32 of shape \(4,\)"),
    "splits": (with_cache, {"num_splits": -1}, "num_splits must be 0 to 128"),
    "many splits": (with_cache, {"num_splits": 129}, "num_splits must be 0 to 128"),
    "half of what is new": (with_cache, {"k": NEW}, "k and v go together"),
    "rotary alone": (with_cache, {"rotary_cos": TURNS, "rotary_sin": TURNS}, "need new k and v"),
    "window of three": (func, {"window_size": (3, 2, 1)}, r"window must be \(left, right\)"),
    "length beyond the pages": (with_cache, {"cache_seqlens": 17, "block_table": IN_PAGES, **POOLS}, "cache_seqlens must be at most 16, .* 16 keys and 0 are new: got 17"),
    "new keys beyond the pages": (with_cache, {"cache_seqlens": N + 16, "block_table": IN_PAGES, "k": NEW, "v": NEW, **POOLS}, "cache_seqlens must be at most 15, .* 16 keys and 1 are new: got 16"),
    "lengths beyond int32": (with_cache, {"cache_seqlens": 2**40}, "cache_seqlens must be a number of keys, within int32"),
    "rows that are not there": (with_cache, {"cache_seqlens": N, "cache_batch_idx": N + 7}, "cache_batch_idx must name rows of the cache, 0 to 1: got 7"),
    "head dim of a cache": (with_cache, {"q": Q[..., :12], "k_cache": K[..., :12], "v_cache": K[..., :12]}, "the head_dim of q must be a multiple of 8"),
    "one memory": (with_cache, {"k": NEW, "v": NEW, "cache_seqlens": N, "v_cache": K}, "v_cache must lie elsewhere than k_cache"),
    "expanded cache": (with_cache, {"k": NEW, "v": NEW, "cache_seqlens": N, "k_cache": K[:1].expand(2, -1, -1, -1)}, "k_cache must not be expanded"),
    "expanded values": (with_cache, {"k": NEW, "v": NEW, "cache_seqlens": N, "v_cache": K[:, :1].expand(-1, 9, -1, -1)}, "v_cache must not be expanded"),
    "negated cache": (with_cache, {"k": NEW, "v": NEW, "cache_seqlens": N, "k_cache": torch._neg_view(K)}, "k_cache must not be a view of negatives"),
    "queries of append": (append_one, {"q": [1]}, "q must be a tensor: got list"),
    "heads dim of append": (append_one, {"q": draw(2, 4, 1, 8)}, "q must have the batch size, head_dim"),
    "no lengths": (with_cache, {"k": NEW, "v": NEW}, "cache_seqlens must be given"),
    "lengths of another type": (with_cache, {"cache_seqlens": N.long()}, "cache_seqlens must be int32"),
    "heads of k": (with_cache, {"k": Q, "v": Q, "cache_seqlens": N}, r"k must be torch.float32 of shape \(2, 2, 1, 16\)"),
    "half of rotary": (with_cache, {"k": NEW, "v": NEW, "cache_seqlens": N, "rotary_cos": TURNS}, "cos and sin go together"),
    "few positions": (with_cache, {"k": NEW, "v": NEW, "cache_seqlens": N, "rotary_cos": TURNS[:8], "rotary_sin": TURNS[:8]}, "at least 9 positions"),
    "sin of another shape": (with_cache, {"k": NEW, "v": NEW, "cache_seqlens": N, "rotary_cos": TURNS, "rotary_sin": TURNS[:, :4]}, "sin must have the shape"),
    "strided cache": (with_cache, {"k": NEW, "v": NEW, "cache_seqlens": N, "k_cache": draw(2, 9, 16, 2).mT}, "k_cache must have a contiguous last dimension"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_by_name(name: str) -> None:
    function, change, sentence = REFUSED[name]
    in_a_cache = {"q": Q, "k_cache": K, "v_cache": K.clone()}
    arguments = in_a_cache if function is with_cache else {"q": Q, "k": K, "v": K}
    with pytest.raises(InvalidArgument, match=sentence) as refused:
        function(**arguments | change)
    assert isinstance(refused.value, RuntimeError)  # as theirs, which callers catch


CHECKED: dict[str, dict[str, Any]] = {
    "must have the same dtype": {"k": K.half()},
    "Number of heads in key/value must divide number of heads in query": {"k": Q[:, :, :3], "v": Q[:, :, :3]},
    "must have shape (batch_size, seqlen_k, num_heads_k, head_size)": {"v": K[:, :-1]},
    "must have shape (batch_size, seqlen_k, num_heads_k, head_size), of k": {"k": K[..., :8]},
    "must be on CUDA": {"v": K.to("meta")},
}  # fmt: skip
"""What each TORCH_CHECK of FlashAttention says, and a call that it refuses."""


@pytest.mark.parametrize("check", CHECKED)
@pytest.mark.parametrize("package", [flash_attn, flash_attn_3, flash_attn_4])
def test_what_flash_attention_checks_is_a_runtime_error(package: Any, check: str) -> None:
    given = {"q": Q, "k": K, "v": K} | CHECKED[check]
    packed = {name: x[0] for name, x in given.items()}
    lengths = torch.tensor([0, Q.shape[1]]).int(), torch.tensor([0, K.shape[1]]).int()
    bounds: dict[str, Any] = {"cu_seqlens_q": lengths[0], "cu_seqlens_k": lengths[1]}
    bounds |= {"max_seqlen_q": Q.shape[1], "max_seqlen_k": K.shape[1]}
    with pytest.raises(RuntimeError) as refused:
        package.flash_attn_func(**given)
    assert isinstance(refused.value, InvalidArgument)
    with pytest.raises(RuntimeError):
        package.flash_attn_varlen_func(**packed, **bounds)


def test_packed_shapes_are_refused_by_name() -> None:
    with pytest.raises(
        InvalidArgument, match=r"qkv must have shape \(batch, seq, 3, heads, head_dim\)"
    ):
        flash_attn.flash_attn_qkvpacked_func(torch.zeros(1, 2, 2, 1, 16))


def test_what_is_derived_takes_its_arguments_and_no_others() -> None:
    """By place as by name; sinks are no argument of it, although the function that it calls has
    them; and its documentation has a line for each.
    """
    qkv = draw(1, 5, 3, 2, 16)
    by_place = flash_attn.flash_attn_qkvpacked_func(qkv, 0.0, 0.5, True)
    by_name = flash_attn.flash_attn_qkvpacked_func(qkv=qkv, causal=True, softmax_scale=0.5)
    torch.testing.assert_close(by_place, by_name, rtol=0, atol=0)
    with pytest.raises(TypeError, match=r"qkvpacked_func.* unexpected keyword argument 's_aux'"):
        flash_attn.flash_attn_qkvpacked_func(qkv, s_aux=draw(2))
    with pytest.raises(TypeError, match="takes 9 positional arguments but 10 were given"):
        flash_attn.flash_attn_qkvpacked_func(qkv, *(0,) * 9)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'qkv'"):
        flash_attn.flash_attn_qkvpacked_func(qkv, qkv=qkv)
    for name in SIGNATURES:
        function = getattr(flash_attn, name)
        lines = re.findall(r"^ {8}(\w+): ", function.__doc__, re.MULTILINE)
        assert lines[:-1] == list(inspect.signature(function).parameters)  # the last: Raises


def test_torch_compile_traces_what_is_derived() -> None:
    qkv = draw(1, 5, 3, 2, 16)
    compiled = torch.compile(
        lambda x: flash_attn.flash_attn_qkvpacked_func(x, causal=True), fullgraph=True,
        backend="eager",
    )  # fmt: skip
    torch.testing.assert_close(
        compiled(qkv), flash_attn.flash_attn_qkvpacked_func(qkv, causal=True)
    )
