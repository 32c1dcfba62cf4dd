"""decode() on CPU tensors, where torch serves; and what every call is refused for, by name."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flashgen.cli.options import cache_fields, with_cache
from flashgen.errors import FlashgenError, InvalidArgument
from flashgen.reference.attention import merge
from flashgen.runtime import Dispatcher
from flashgen.runtime.selection import tune_command
from flashgen.spec.features import KV_WORDS
from flashgen.spec.problem import bytes_moved, workload
from flashgen.table.entry import NO_EVIDENCE
from flashgen.table.table_file import dump, parse
from tests.makers import make_config, make_spec
from tests.serving import SHIPPED
from tests.tables import made_entry, made_table

DISPATCHER = Dispatcher(package="generated", archs=SHIPPED.archs, choices=SHIPPED.choices)
LENGTHS = (0, 1, 5, 16, 40)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(shape)))


def contiguous(seq_q: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch = len(LENGTHS)
    k, v = draw(batch, 2, 40, 16, seed=1), draw(batch, 2, 40, 24, seed=2)
    return draw(batch, 6, seq_q, 16), k, v, torch.tensor(LENGTHS, dtype=torch.int32)


def paged(k: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """A cache as a pool (pages, page_size, heads, dim) and a table; its pages in reverse."""
    batch, _, seq, _ = k.shape
    each = -(-seq // size)
    pool = torch.full((batch * each + 1, size, *k.shape[1::2]), float("nan"))
    table = torch.arange(batch * each).flip(0).int().view(batch, each)
    for b in range(batch):
        for j in range(seq):
            pool[table[b, j // size], j % size] = k[b, :, j]
    return pool, table


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seq_q", [1, 3])
def test_a_decode_is_attention_over_each_sequence(seq_q: int, causal: bool) -> None:
    q, k, v, lengths = contiguous(seq_q)
    o, lse = DISPATCHER.decode(q, k, v, lengths=lengths, causal=causal, return_lse=True)
    for b, length in enumerate(LENGTHS):
        rows = torch.arange(seq_q)[:, None] + length - seq_q
        sees = torch.arange(length)[None, :] <= (rows if causal else length + 0 * rows)
        blind = ~sees.any(1)
        expected = scaled_dot_product_attention(
            q[b : b + 1], k[b : b + 1, :, :length], v[b : b + 1, :, :length],
            attn_mask=sees, enable_gqa=True,
        )[0]  # fmt: skip
        expected = torch.where(blind[:, None], 0.0, expected) if length else torch.zeros_like(o[b])
        torch.testing.assert_close(o[b], expected)
        assert lse[b, :, blind].eq(float("-inf")).all()
        assert lse[b, :, ~blind].isfinite().all()


@pytest.mark.parametrize("size", [1, 4, 64])
def test_pages_are_found_by_the_table(size: int) -> None:
    q, k, v, lengths = contiguous(2)
    (pool_k, table), (pool_v, _) = paged(k, size), paged(v, size)
    expected = DISPATCHER.decode(q, k, v, lengths=lengths)
    found = DISPATCHER.decode(q, pool_k, pool_v, lengths=lengths, block_table=table)
    torch.testing.assert_close(found, expected)


def test_without_lengths_the_cache_is_full_and_lengths_are_bounded() -> None:
    q, k, v, lengths = contiguous()
    full = DISPATCHER.decode(q, k, v)
    torch.testing.assert_close(full, DISPATCHER.attention(q, k, v))
    torch.testing.assert_close(full, DISPATCHER.decode(q, k, v, lengths=lengths * 0 + 1000))
    assert DISPATCHER.decode(q, k, v, lengths=lengths * 0 - 3).eq(0).all()


def test_parts_merge_to_the_whole() -> None:
    """Of float64 parts nothing is lost; one that saw no key counts for nothing, whatever it holds."""
    s, v = draw(3, 40).double(), draw(40, 8, seed=5).double()
    bounds = ((0, 7), (7, 7), (7, 40))
    o = torch.stack([torch.softmax(s[:, a:b], -1) @ v[a:b] for a, b in bounds])
    o[1] = float("nan")
    lse = torch.stack([torch.logsumexp(s[:, a:b], -1) for a, b in bounds])
    merged, total = merge(o, lse)
    torch.testing.assert_close(merged, torch.softmax(s, -1) @ v)
    torch.testing.assert_close(total, torch.logsumexp(s, -1))
    merged, total = merge(o[1:2], lse[1:2])
    assert merged.eq(0).all()
    assert total.eq(float("-inf")).all()


Q, K, V, N = contiguous()
TABLE = torch.zeros(5, 3, dtype=torch.int32)
POOL = draw(7, 16, 2, 16)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "list": ({"q": [1.0]}, "q must be a tensor: got list"),
    "rank of q": ({"q": Q[0]}, r"q must have shape \(batch, heads, seq_q, head_dim\)"),
    "rank of k": ({"k": K[0]}, r"k must have shape \(batch, kv_heads, capacity, head_dim\)"),
    "rank of a pool": ({"k": POOL[0], "v": POOL, "block_table": TABLE}, r"k must have shape \(pages, page_size"),
    "batch": ({"k": K[:2], "v": V[:2]}, "k must have the batch size of q, 5: got 2"),
    "lengths of v": ({"v": V[:, :, :3]}, "v must have the shape of k but for the last dimension"),
    "head dim": ({"k": V}, "k must have the head_dim of q, 16: got 24"),
    "odd head dim": ({"q": Q[..., :12], "k": K[..., :12]}, "the head_dim of q must be a multiple of 8"),
    "heads": ({"q": Q[:, :5]}, "q must have a multiple of the heads of k and v: got 5 and 2"),
    "dtype": ({"q": Q.double(), "k": K.double(), "v": V.double()}, "q must be float16, bfloat16 or float32: got float64"),
    "mixed dtypes": ({"v": V.half()}, "v must have the dtype of q"),
    "device": ({"k": K.to("meta")}, "k must be on the device of q"),
    "lengths int64": ({"lengths": N.long()}, r"lengths must be int32 of shape \(5,\): got torch.int64"),
    "lengths shape": ({"lengths": N[:3]}, r"lengths must be int32 of shape \(5,\)"),
    "lengths list": ({"lengths": [1, 2]}, "lengths must be a tensor: got list"),
    "lengths device": ({"lengths": N.to("meta")}, "lengths must be on the device of q"),
    "table int64": ({"k": POOL, "v": POOL, "block_table": TABLE.long()}, r"block_table must be int32 of shape \(5, pages\)"),
    "table shape": ({"k": POOL, "v": POOL, "block_table": TABLE[:2]}, "block_table must be int32"),
    "no lengths": ({"k": POOL, "v": POOL, "block_table": TABLE, "lengths": None}, "lengths must be given with block_table"),
    "page size": ({"k": POOL[:, :12], "v": POOL[:, :12], "block_table": TABLE}, "must be a power of two: got 12"),
    "causal": ({"causal": "top_left"}, "causal must be True, False or 'bottom_right'"),
    "scale": ({"scale": float("nan")}, "scale must be a finite number"),
    "causal 0": ({"causal": 0}, "causal must be True, False or 'bottom_right' where keys are cached: got 0"),
    "causal 0.0": ({"causal": 0.0}, "causal must be True, False"),
    "causal 1": ({"causal": 1}, "causal must be True, False"),
    "causal of numpy": ({"causal": np.False_}, "causal must be True, False"),
    "causal tensor": ({"causal": torch.tensor(False)}, "causal must be True, False"),
    "causal array": ({"causal": np.array([1, 2])}, "causal must be True, False"),
    "scale word": ({"scale": "x"}, "scale must be a finite number: got 'x'"),
    "heads of none": ({"q": Q[:, :0]}, "q must have a multiple of the heads of k and v: got 0 and 2"),
    "sparse": ({"v": V.to_sparse()}, "v must be dense: got torch.sparse_coo"),
    "rows": ({"cache_batch_idx": torch.tensor([0, 1, 2, 3, 7], dtype=torch.int32)}, "cache_batch_idx must name rows of the cache, 0 to 4: got 7"),
    "pages": ({"k": POOL, "v": POOL, "block_table": TABLE + 7}, "block_table must name pages of the pool, 0 to 6, .* got 7 to 7"),
    "list for a precision": ({"precision": ["ieee"]}, "precision must be ieee or tf32"),
    "precision": ({"precision": "fp8"}, "precision must be ieee or tf32"),
    "gradient": ({"q": Q.clone().requires_grad_()}, "q, k, v must not require gradients"),
    "gradient of k": ({"k": K.clone().requires_grad_()}, "must not require gradients"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_misuse_is_named(name: str) -> None:
    change, sentence = REFUSED[name]
    arguments: dict[str, Any] = {"q": Q, "k": K, "v": V, "lengths": N} | change
    with pytest.raises(InvalidArgument, match=sentence):
        DISPATCHER.decode(**arguments)


def test_transforms_are_refused_and_no_grad_is_not() -> None:
    with pytest.raises(FlashgenError, match="must not be traced or transformed"):
        torch.func.vmap(lambda x: DISPATCHER.decode(x, K, V))(Q[None])
    with torch.no_grad():
        DISPATCHER.decode(Q.clone().requires_grad_(), K, V)


def test_explain_says_that_torch_serves() -> None:
    assert "served by torch" in str(DISPATCHER.explain_decode(Q, K, V, lengths=N))
    assert "decode_fp32_d16v24" in str(DISPATCHER.explain_decode(Q, K, V, lengths=N))


def test_explain_takes_what_decode_takes() -> None:
    """All its arguments, with their defaults; and refuses what decode() refuses."""
    taken, explained = (
        inspect.signature(function).parameters
        for function in (Dispatcher.decode, Dispatcher.explain_decode)
    )
    assert dict(taken) == dict(explained)
    DISPATCHER.explain_decode(Q, K, V, lengths=N, scale=0.5, return_lse=True)
    for change, sentence in REFUSED.values():
        if "cache_batch_idx" in change or sentence.startswith("block_table must name"):
            continue  # it reads no rows
        with pytest.raises(InvalidArgument, match=sentence):
            DISPATCHER.explain_decode(**{"q": Q, "k": K, "v": V, "lengths": N} | change)


def test_bytes_are_those_of_the_cache() -> None:
    spec = make_spec("bfloat16", 128, direction="decode")
    kv, q_and_o = 2 * 64 * 8 * 4096 * 128 * 2, 64 * 32 * (2 * 128 * 2 + 4)
    assert bytes_moved(spec, workload(spec, 4096)) == kv + q_and_o
    parts = workload(spec.for_direction("combine"), 8)
    of_parts = 64 * 32 * 8 * (128 + 1) * 4
    assert bytes_moved(spec.for_direction("combine"), parts) == of_parts + q_and_o - 64 * 32 * 256


def test_the_command_that_is_advised_names_the_direction_and_the_pages() -> None:
    spec = make_spec("bfloat16", 128, direction="decode", paged=True)
    assert "--direction decode --paged --dtype bf16" in tune_command(spec, 4096)
    paged = cache_fields(True, None)
    assert with_cache(make_spec("bfloat16", 128, direction="decode"), paged) == spec
    with pytest.raises(InvalidArgument, match="--paged needs --direction decode"):
        with_cache(make_spec(), paged)


KINDS: dict[str, dict[str, Any]] = {
    "features": {"window": True, "softcap": True, "alibi": True, "sink": True, "bias": "boolean"},
    "places": {"indexed": True, "leftpad": True},
    "fp8": {"kv_dtype": "float8_e4m3"},
    "int8-page": {"kv_dtype": "int8", "paged": True, "kv_scales": "page"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_keeps_features_places_and_elements(kind: str) -> None:
    spec = make_spec("bfloat16", 128, direction="decode", **KINDS[kind])
    native = {"widening": "native"} if kind == "fp8" else {}
    entry = made_entry(spec=spec, config=make_config(16, 64, **native), source="untimed")
    table = made_table(replace(entry, evidence=NO_EVIDENCE))
    text = dump(table)
    assert parse(text, Path(f"{table.gpu.slug}.yaml")) == table
    assert ("_native " in text) == (kind == "fp8")
    assert (f"--kv {kind}" in tune_command(spec, 4096)) == ("kv_dtype" in KINDS[kind])


def test_the_words_of_narrow_caches() -> None:
    spec = make_spec("bfloat16", 128, direction="decode", paged=True)
    for word, (kv_dtype, kv_scales) in KV_WORDS.items():
        found = with_cache(spec, cache_fields(False, word))
        assert (found.kv_dtype, found.kv_scales) == (kv_dtype, kv_scales)
    with pytest.raises(InvalidArgument, match="--kv must be one of fp8, fp8-page, int8, int8-page"):
        cache_fields(False, "fp16")
    with pytest.raises(InvalidArgument, match="--kv needs --direction decode"):
        with_cache(make_spec(), cache_fields(False, "fp8"))


def test_bytes_of_narrow_caches() -> None:
    whole = make_spec("bfloat16", 128, direction="decode")
    narrow = replace(whole, kv_dtype="int8")
    kv = 2 * 64 * 8 * 4096 * 128
    assert (
        bytes_moved(whole, workload(whole, 4096)) - bytes_moved(narrow, workload(whole, 4096)) == kv
    )


NARROW = {"k": K.to(torch.float8_e4m3fn), "v": V.to(torch.float8_e4m3fn), "q": Q.half()}
ONE = {"k_scale": torch.ones(1), "v_scale": torch.ones(2)}
REFUSED_NARROW: dict[str, tuple[dict[str, Any], str]] = {
    "no scales": (NARROW, "k_scale must be a tensor: got NoneType"),
    "float32 queries": (NARROW | {"q": Q} | ONE, "q must be float16 or bfloat16 over a cache of 8 bits"),
    "two types": (NARROW | {"v": V.to(torch.int8)} | ONE, "v must have the dtype of q, torch.float16, or with k"),
    "scales of halves": (ONE, "k_scale and v_scale need k and v of float8_e4m3fn or int8"),
    "scales of other heads": (NARROW | ONE | {"v_scale": torch.ones(3)}, r"v_scale must be float32 of shape \(2,\)"),
    "scales of pages that are none": (NARROW | ONE | {"k_scale": torch.ones(5, 2)}, "k_scale must be float32 of shape"),
    "half scales": (NARROW | ONE | {"k_scale": torch.ones(2).half()}, "k_scale must be float32"),
    "the other float8": ({"k": K.to(torch.float8_e5m2), "v": V.to(torch.float8_e5m2), "q": Q.half()}, "or with k be float8_e4m3fn or int8"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_NARROW)
def test_misuse_of_narrow_caches_is_named(name: str) -> None:
    change, sentence = REFUSED_NARROW[name]
    arguments: dict[str, Any] = {"q": Q, "k": K, "v": V, "lengths": N} | change
    with pytest.raises(InvalidArgument, match=sentence):
        DISPATCHER.decode(**arguments)


def test_a_narrow_cache_on_a_cpu() -> None:
    """Over elements times scales, of heads and of pages alike."""
    scale = torch.tensor([0.5, 2.0])
    o = DISPATCHER.decode(**NARROW, lengths=N, k_scale=scale, v_scale=scale * 3)
    k, v = (NARROW[x].float() * scale[:, None, None] for x in "kv")
    want = DISPATCHER.decode(Q.half().float(), k, 3 * v, lengths=N)
    torch.testing.assert_close(o.float(), want, rtol=2e-3, atol=2e-3)
    (pool_k, table), (pool_v, _) = paged(NARROW["k"].float(), 4), paged(NARROW["v"].float(), 4)
    of_pages = scale.expand(pool_k.shape[0], 2)
    found = DISPATCHER.decode(
        NARROW["q"], pool_k.to(torch.float8_e4m3fn), pool_v.to(torch.float8_e4m3fn), lengths=N,
        block_table=table, k_scale=of_pages, v_scale=of_pages * 3,
    )  # fmt: skip
    torch.testing.assert_close(found, o)


def test_a_table_keeps_for_how_many_blocks_keys_are_split() -> None:
    spec, config = make_spec("bfloat16", 128, direction="decode"), make_config(16, 64)
    for blocks in (1, 5):
        filled = replace(config, blocks_per_sm=blocks)
        made = made_entry(spec=spec, config=filled, source="untimed")
        table = made_table(replace(made, evidence=NO_EVIDENCE))
        text = dump(table)
        assert ("_x5 " in text) == (blocks == 5)
        assert parse(text, Path(f"{table.gpu.slug}.yaml")) == table


def test_a_table_keeps_split_keys_and_pages() -> None:
    """Written where they are not at their defaults, so that older tables stay as they are."""
    spec = make_spec("bfloat16", 128, direction="decode", paged=True)
    config = make_config(16, 64, split_keys=1024)
    entry = replace(made_entry(spec=spec, config=config, source="untimed"), evidence=NO_EVIDENCE)
    table = made_table(entry)
    text = dump(table)
    assert "_split1024 " in text
    assert parse(text, Path(f"{table.gpu.slug}.yaml")) == table
    plain = dump(made_table())
    assert "_split" not in plain
    assert "paged" not in plain
