"""Packed sequences on CPU tensors: the reference beside slices, flash_attn's functions and their
edge rules, what is refused, and what such a spec is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen.runtime.flash_attn as flash_attn
from flashgen.errors import InvalidArgument
from flashgen.evaluate.check_attention import in_pages, packed_case, packed_cases
from flashgen.evaluate.inputs import make_features, make_inputs
from flashgen.inputs.features import Features
from flashgen.inputs.from_call import from_tensors
from flashgen.inputs.packed import from_bounds
from flashgen.reference import cases as reference_cases
from flashgen.runtime.call import Call
from flashgen.runtime.eager import attention as eager
from flashgen.runtime.eager.visibility import random_words
from flashgen.runtime.general_path import GeneralPath
from flashgen.runtime.varlen import attention_varlen
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.space import legal_configs
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import Problem
from tests.makers import make_config, make_spec
from tests.serving import leaves

OF_Q, OF_K = [5, 0, 7, 3, 0], [4, 3, 9, 0, 0]


def cumulative(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def draw(heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(7)
    of_k = (sum(OF_K), kv_heads, 16)
    return torch.randn(sum(OF_Q), heads, 16), torch.randn(of_k), torch.randn(of_k)


def alone(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """flash_attn_func of each sequence alone."""
    found, row, key = [], 0, 0
    for rows, keys in zip(OF_Q, OF_K, strict=True):
        one = (q[row : row + rows], k[key : key + keys], v[key : key + keys])
        found.append(flash_attn.flash_attn_func(*(x[None] for x in one), **options)[0])  # type: ignore[index]
        row, key = row + rows, key + keys
    return torch.cat(found)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (2, 0)},
    "both sides": {"window_size": (3, 1), "softcap": 2.0},
    "scale": {"softmax_scale": -0.3},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.1, 0.0, 0.2])},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_flash_attn_varlen_func_is_flash_attn_func_of_each(name: str, index: torch.dtype) -> None:
    q, k, v = draw()
    bounds = (cumulative(OF_Q, index), cumulative(OF_K, index), max(OF_Q), max(OF_K))
    want = alone(q, k, v, **OPTIONS[name])
    o, lse, probs = flash_attn.flash_attn_varlen_func(
        q, k, v, *bounds, return_attn_probs=True, **OPTIONS[name]
    )
    torch.testing.assert_close(o, want)
    assert lse.shape == (4, sum(OF_Q))
    assert probs is None
    kv = torch.stack((k, v), 1)
    again = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, *bounds, **OPTIONS[name])
    torch.testing.assert_close(again, want)


def test_qkv_in_one() -> None:
    torch.manual_seed(1)
    qkv = torch.randn(12, 3, 2, 16)
    cu = cumulative([5, 7])
    o = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 7, causal=True)
    want = flash_attn.flash_attn_varlen_func(*qkv.unbind(1), cu, cu, 7, 7, causal=True)
    assert isinstance(o, Tensor)
    torch.testing.assert_close(o, want)


def test_bottom_right_is_each_sequences_own() -> None:
    """FlashAttention's rules: the last query sees the last key; with more queries than keys the
    first ones see none, and have 0."""
    q, k, v = (torch.ones(n, 1, 16) for n in (7, 7, 7))
    v = torch.arange(7.0)[:, None, None].expand(7, 1, 16)
    cu_q, cu_k = cumulative([5, 2]), cumulative([2, 5])
    o = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 5, causal=True)
    assert isinstance(o, Tensor)
    assert o[:, 0, 0].tolist() == [0, 0, 0, 0, 0.5, 3.5, 4.0]


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_those_of_each_alone(causal: bool) -> None:
    one, other = leaves(*draw()), leaves(*draw())
    o = flash_attn.flash_attn_varlen_func(
        *one, cumulative(OF_Q), cumulative(OF_K), 7, 9, causal=causal
    )
    assert isinstance(o, Tensor)
    want = alone(*other, causal=causal)
    do = torch.randn_like(o)
    found, wanted = torch.autograd.grad(o, one, do), torch.autograd.grad(want, other, do)
    for grad, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_keys_in_pages(page_size: int) -> None:
    """The same as packed; seqused_k says how many keys there are, without cu_seqlens_k too."""
    q, k, v = draw()
    packed = from_bounds(cumulative(OF_Q), cumulative(OF_K), 7, 9)
    pairs = list(zip(OF_Q, OF_K, strict=True))
    case = packed_case(pairs, heads=4, kv_heads=2, page_size=page_size)
    heads_first = (x.transpose(0, 1)[None] for x in (k, v))
    *pools, features = in_pages(*heads_first, Features(sequences=packed), case, 0)
    k_pool, v_pool = (x.transpose(1, 2) for x in pools)
    assert features.sequences is not None
    table = features.sequences.block_table
    bounds = (cumulative(OF_Q), cumulative(OF_K), 7, 9)
    want = flash_attn.flash_attn_varlen_func(q, k, v, *bounds, causal=True)
    o = flash_attn.flash_attn_varlen_func(
        q, k_pool, v_pool, *bounds, causal=True, block_table=table
    )
    torch.testing.assert_close(o, want)
    used = torch.tensor(OF_K, dtype=torch.int32)
    o = attention_varlen(
        q, k_pool, v_pool, cumulative(OF_Q), None, 7, 9, seqused_k=used, block_table=table,
        causal=True,
    )  # fmt: skip
    torch.testing.assert_close(o, want)


@pytest.mark.parametrize("cu_seqlens_k", [None, cumulative([20, 1])])
def test_what_a_table_has_no_room_for_is_not_there(cu_seqlens_k: Tensor | None) -> None:
    """A kernel reads the table as far as k_ends says: never behind its row."""
    packed = from_bounds(
        cumulative([1, 1]), cu_seqlens_k, 1, 64, seqused_k=torch.tensor([64, -3]),
        block_table=torch.zeros(2, 2, dtype=torch.int32), page_size=16,
    )  # fmt: skip
    assert [keys for *_, keys in packed.lengths()] == [32, 0]
    assert packed.most_keys(16) == 32
    assert from_bounds(cumulative([1]), cumulative([9]), 1, 9).most_keys(9) == 9


def test_the_longest_lengths_may_be_tensors() -> None:
    q, k, v = draw()
    longest = torch.tensor(7), torch.tensor(9)
    flash_attn.flash_attn_varlen_func(q, k, v, cumulative(OF_Q), cumulative(OF_K), *longest)


def test_no_more_is_launched_than_there_are_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the bounds say; of pages no more keys than a row of the table holds."""
    seen: list[tuple[int, int]] = []

    def launched(
        _: object, call: Call, q: Tensor, *__: Tensor, **___: object
    ) -> tuple[Tensor, Tensor]:
        packed = call.features.sequences
        assert packed is not None
        seen.append((packed.max_q, packed.max_k))
        return q, q[..., 0]

    monkeypatch.setattr(GeneralPath, "serve_eager", launched)
    q, k, v = draw()
    bounds = (cumulative(OF_Q), cumulative(OF_K))
    attention_varlen(q, k, v, *bounds, 2**40, 2**40)
    attention_varlen(q, k, v, *bounds, 7, 9)
    pool, table = torch.zeros(4, 8, 2, 16), torch.zeros(5, 2, dtype=torch.int32)
    attention_varlen(q, pool, pool, *bounds, 7, 100, block_table=table)
    assert seen == [(15, 16), (7, 9), (7, 16)]


def test_top_left_is_for_the_own_call() -> None:
    q, k, v = draw(1, 1)
    o = attention_varlen(q, k, v, cumulative(OF_Q), cumulative(OF_K), 7, 9, causal="top_left")
    torch.testing.assert_close(o[0], v[0])  # the first query sees the first key alone
    torch.testing.assert_close(o[5], v[7])


PLACED = torch.zeros(4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 6, 2, 16)}, "q must have shape"),
        ({"k": torch.zeros(6, 3, 16)}, "v must have the heads"),
        ({"cu_seqlens_q": [0, 6]}, "cu_seqlens_q must be a tensor"),
        ({"cu_seqlens_q": PLACED.float()}, "cu_seqlens_q must be int32 or int64"),
        ({"cu_seqlens_k": PLACED[:3]}, "cu_seqlens_k must be int32 or int64 of shape"),
        ({"cu_seqlens_k": None}, "cu_seqlens_k must be given"),
        ({"cu_seqlens_k": PLACED.to("meta")}, "cu_seqlens_k must be on the device"),
        ({"seqused_q": PLACED}, "seqused_q must be .* of shape"),
        ({"seqused_k": torch.zeros(3)}, "seqused_k must be int32"),
        ({"max_seqlen_q": -1}, "max_seqlen_q must be a whole number"),
        ({"max_seqlen_k": 2.5}, "max_seqlen_k must be a whole number"),
        ({"q": torch.zeros(6, 2, 0), "k": torch.zeros(6, 2, 0)}, "the head_dim of q must be"),
        ({"k": torch.zeros(6, 2, 16).to_sparse()}, "k must be dense: got torch.sparse_coo"),
        ({"scale": "x"}, "scale must be a finite number"),
        ({"scale": torch.ones((), requires_grad=True)}, "scale has no gradient"),
        ({"alibi_slopes": torch.zeros(4, 2)}, "alibi_slopes must be"),
        ({"causal": "left"}, "causal must be"),
        ({"block_table": PLACED}, "k must have shape"),
        ({"dropout_p": 2.0}, "dropout_p"),
        ({"sinks": torch.zeros(3)}, "sinks must be"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    x = torch.zeros(6, 2, 16)
    call: dict[str, Any] = {
        "q": x, "k": x, "v": x, "cu_seqlens_q": PLACED, "cu_seqlens_k": PLACED, "max_seqlen_q": 6,
        "max_seqlen_k": 6,
    }  # fmt: skip
    with pytest.raises(InvalidArgument, match=message):
        attention_varlen(**(call | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, "block_table must be int32"),
        ({"block_table": torch.zeros(3, 1)}, "block_table must be int32"),
        ({"k": torch.zeros(5, 3, 2, 16)}, "page size"),
        ({"dropout_p": 0.5}, "dropout_p must be 0 with block_table"),
        ({"v": torch.zeros(4, 4, 2, 16)}, "v must have the pages of k"),
    ],
    ids=str,
)
def test_what_does_not_fit_pages_is_named(change: dict[str, Any], message: str) -> None:
    pool = torch.zeros(5, 4, 2, 16)
    call: dict[str, Any] = {
        "q": torch.zeros(6, 2, 16), "k": pool, "v": pool, "cu_seqlens_q": PLACED,
        "cu_seqlens_k": PLACED, "max_seqlen_q": 6, "max_seqlen_k": 6,
        "block_table": torch.zeros(3, 2, dtype=torch.int32),
    }  # fmt: skip
    with pytest.raises(InvalidArgument, match=message):
        attention_varlen(**(call | change))


@pytest.mark.parametrize("case", packed_cases(make_spec(), make_config(16, 16)), ids=str)
def test_the_reference_is_each_sequence_alone(case: Any) -> None:
    """Who sees whom, slopes, windows, and what lies between the sequences."""
    spec = make_spec("float32", 16, "causal", varlen=True, alibi=True, window=True, sink=True)
    q, k, v = (x.double() for x in reference_cases.make_inputs(spec, case, 1, "cpu"))
    features = reference_cases.make_features(spec, case, 1, "cpu")
    packed, options = features.sequences, {"scale": 0.25}
    assert packed is not None
    o, lse = eager.attention(q, k, v, diagonal=0, features=features, **options)
    owned = torch.zeros(q.shape[2], dtype=torch.bool)
    for number, (row, rows, key, keys) in enumerate(packed.lengths()):
        own = slice(row, row + rows), slice(key, key + keys)
        owned[own[0]] = True
        slopes = features.slopes
        assert slopes is not None
        alone = Features(
            slopes=slopes[number] if slopes.ndim == 2 else slopes, window=features.window,
            sinks=features.sinks,
        )  # fmt: skip
        want, want_lse = eager.attention(
            q[:, :, own[0]], k[:, :, own[1]], v[:, :, own[1]],
            diagonal=keys - rows if packed.bottom_right else 0, features=alone, **options,
        )  # fmt: skip
        torch.testing.assert_close(o[:, :, own[0]], want)
        torch.testing.assert_close(lse[:, :, own[0]], want_lse)
    assert (o[:, :, ~owned] == 0).all()
    assert (lse[:, :, ~owned] == float("-inf")).all()


def test_no_two_elements_share_a_draw() -> None:
    """Of one head: the words of a block-diagonal S are all different."""
    cu_q, cu_k = cumulative([17, 30, 9]), cumulative([40, 3, 21])
    packed = from_bounds(cu_q, cu_k, 30, 40)
    words = random_words(torch.tensor([3, 4]), 1, 2, 56, 64, packed)
    own = [
        words[0, head, row : row + rows, key : key + keys].flatten()
        for head in range(2)
        for row, rows, key, keys in packed.lengths()
    ]
    drawn = torch.cat(own)
    assert len(drawn.unique()) >= len(drawn) - 1  # two of 2 ** 32 may be alike


def test_the_spec_of_a_call() -> None:
    q, k = torch.zeros(1, 4, 12, 32), torch.zeros(1, 2, 30, 32)
    packed = from_bounds(cumulative([5, 7]), cumulative([10, 20]), 7, 20)
    spec, problem = from_tensors(q, k, k, causal=True, features=Features(sequences=packed))
    assert spec == make_spec("float32", 32, "causal", varlen=True)
    assert spec.name == "fwd_fp32_d32_causal_varlen"
    assert spec.with_features(spec.feature_words) == spec
    assert problem == Problem(batch=2, heads=4, kv_heads=2, seq_q=7, seq_k=20)
    assert not spec.for_direction("backward_delta").varlen
    assert spec.for_direction("backward_dq").varlen


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"varlen": True, "bias": "additive"}, "varlen excludes bias"),
        ({"varlen": 1}, "varlen must be true or false"),
        ({"paged": True}, "paged needs"),
        ({"varlen": True, "paged": True, "dropout": True}, "excludes dropout"),
        ({"varlen": True, "paged": True, "direction": "backward_dq"}, "paged needs"),
        ({"varlen": True, "direction": "append"}, "kernels without scores have no queries"),
    ],
)
def test_what_no_kernel_is_of(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make_spec("float16", 32, **fields)


def test_what_is_legal() -> None:
    """Tiles end where their sequence does: no descriptor, which knows the tensor's end alone."""
    gpu = TARGETS["nvidia_h200"]
    spec = make_spec("bfloat16", 128, "causal", varlen=True)
    configs = legal_configs(spec, gpu)
    assert {c.loads for c in configs} == {"pointer"}
    assert {c.schedule for c in configs} == {"fa2", "s_ahead"}
    paged = AttentionSpec(**(vars(spec) | {"paged": True}))
    assert {c.schedule for c in legal_configs(paged, gpu)} == {"fa2"}
    assert "fa1" in str(why_illegal(spec, make_config(schedule="fa1"), gpu))
    window = make_spec("bfloat16", 128, "causal", varlen=True, window=True)
    reason = why_illegal(window, make_config(schedule="s_ahead"), gpu)
    assert reason is not None
    assert "(window)" in reason


def test_what_is_tuned_is_packed() -> None:
    spec = make_spec("bfloat16", 64, "causal", varlen=True)
    problem = Problem(batch=3, heads=4, kv_heads=2, seq_q=8, seq_k=16)
    q, k, v = make_inputs(spec, problem, 0, "cpu")
    assert q.shape == (1, 4, 19, 64)
    assert k.shape == v.shape == (1, 2, 36, 64)
    assert q.stride()[1:] == (64, 256, 1)
    packed = make_features(spec, problem, 0, "cpu").sequences
    assert packed is not None
    assert packed.lengths() == [(0, 8, 0, 16), (8, 4, 16, 7), (12, 7, 23, 13)]
    assert (packed.max_q, packed.max_k) == (8, 16)
