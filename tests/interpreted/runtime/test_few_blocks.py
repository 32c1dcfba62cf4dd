"""Forwards of few blocks by the decode's kernels, through the public functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.inputs.cache import Cache
from flashgen.inputs.features import PLAIN, features_of
from flashgen.kernels import launch_cache
from flashgen.kernels.launch_cache import Combine, Decode
from flashgen.reference.attention import judge
from flashgen.runtime import Dispatcher, few_blocks
from flashgen.runtime.eager import attention as eager
from flashgen.runtime.varlen import attention_varlen
from tests.serving import leaves, record_directions, serve

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SPLIT = ["decode", "combine"]
INF = float("inf")


@pytest.fixture
def splitting(monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    """The dispatcher of an H200, where everything that may be split is worth it."""
    monkeypatch.setattr(few_blocks, "WORTH_MERGING", INF)
    return serve(monkeypatch)


def draw(
    seq_q: int = 70, seq_k: int = 333, heads: int = 4, kv_heads: int = 2, dim: int = 64,
    dim_v: int = 0, batch: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    torch.manual_seed(seq_q + seq_k + dim)
    shapes = (heads, seq_q, dim), (kv_heads, seq_k, dim), (kv_heads, seq_k, dim_v or dim)
    q, k, v = (torch.randn(batch, *shape).bfloat16() for shape in shapes)
    return q, k, v


def is_right(own: Dispatcher, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> bool:
    """Whether O and LSE of attention() pass the float64 check."""
    o, lse = own.attention(q, k, v, return_lse=True, **options)
    causal, scale = options.pop("causal", False), options.pop("scale", q.shape[3] ** -0.5)
    assert (o.dtype, o.shape) == (q.dtype, (*q.shape[:3], v.shape[3]))
    features = features_of(causal=causal is not False, **options) if options else PLAIN
    offset = 0 if causal == "top_left" else k.shape[2] - q.shape[2]
    diagonal = None if causal is False else offset
    found = judge(o, lse, q, k, v, scale=scale, diagonal=diagonal, features=features)
    return bool(found.passed)


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({}, {"causal": True}),
    "no mask": ({"batch": 2}, {}),
    "many splits": ({"seq_q": 5, "seq_k": 1500, "heads": 1, "kv_heads": 1}, {"causal": True}),
    "one query": ({"seq_q": 1, "heads": 8}, {"causal": True}),
    "more queries than keys": ({"seq_q": 200, "seq_k": 130}, {"causal": True}),
    "other scale": ({}, {"causal": True, "scale": -0.3}),
    "two head dims": ({"dim": 64, "dim_v": 40}, {"causal": True}),
    "head dim 96": ({"dim": 96, "heads": 2}, {}),
    "window": ({"seq_k": 700}, {"causal": True, "window": (300, 0)}),
    "window without a mask": ({"seq_k": 700}, {"window": (300, 20)}),
    "chunks": ({"seq_k": 700}, {"causal": True, "chunk": 300}),
    "softcap": ({}, {"causal": True, "softcap": 5.0}),
    "sinks": ({}, {"causal": True, "sinks": torch.tensor([0.5, -1.0, 3.0, 9.0])}),
    "slopes": ({}, {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.1, 0.01, 1.0])}),
    "bias": ({}, {"causal": True, "bias": torch.randn(1, 4, 70, 333).bfloat16()}),
    "boolean": ({}, {"bias": torch.rand(1, 1, 70, 333) > 0.5}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_split_call_is_right(
    name: str, splitting: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    directions = record_directions(monkeypatch)
    sizes, options = CALLS[name]
    assert is_right(splitting, *draw(**sizes), **options)
    assert directions == SPLIT


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {"causal": "top_left"}),
        ({}, {"causal": True, "invariant": True}),
        ({}, {"dropout_p": 0.1}),
        ({"seq_k": 64}, {}),
        ({"heads": 132, "kv_heads": 132, "seq_q": 1}, {}),
        ({"dim": 32}, {}),
    ],
    ids=["another diagonal", "invariant", "dropout", "one tile", "no SM is idle", "unknown speed"],
)
def test_what_is_not_split(
    sizes: dict[str, int], options: dict[str, Any], splitting: Dispatcher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    directions = record_directions(monkeypatch)
    splitting.attention(*draw(**sizes), **options)
    assert directions == ["forward"]


LENGTHS: dict[str, list[tuple[int, int]]] = {
    "one chunk": [(70, 333)],
    "ragged": [(37, 500), (0, 90), (64, 64), (3, 0), (70, 33)],
}


@pytest.mark.parametrize("options", [{}, {"window": (200, 0)}, {"sinks": torch.ones(4)}])
@pytest.mark.parametrize("pages", [0, 16])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_packed_sequences_are_split(
    lengths: str, pages: int, options: dict[str, Any], splitting: Dispatcher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With places of no sequence between them, behind which is NaN."""
    directions = record_directions(monkeypatch)
    assert packed_is_right(LENGTHS[lengths], pages, options)
    assert directions == SPLIT


def packed_is_right(
    lengths: list[tuple[int, int]], pages: int, options: dict[str, Any], spare: int = 3
) -> bool:
    """Whether attention_varlen() of sequences passes the float64 check, and what is no sequence's
    has O = 0 and LSE = -inf. spare: places behind each sequence.
    """
    torch.manual_seed(pages)
    count, heads, kv_heads, dim = len(lengths), 4, 2, 64
    longest_q, longest_k = (max(each) for each in zip(*lengths, strict=True))
    used_q, used_k = torch.tensor(lengths, dtype=torch.int32).unbind(1)
    bounds_q, bounds_k = (
        torch.cat((x.new_zeros(1), (x + spare).cumsum(0))).int() for x in (used_q, used_k)
    )
    table = None
    if pages:
        each = -(-longest_k // pages)
        table = torch.randperm(count * each).int().view(count, each)
        shape: tuple[int, ...] = (count * each, pages)
    else:
        shape = (int(bounds_k[-1]),)
    q = torch.randn(int(bounds_q[-1]), heads, dim).bfloat16()
    k, v = (torch.randn(*shape, kv_heads, dim).bfloat16() for _ in range(2))
    of_keys = []
    for number, (_, keys) in enumerate(lengths):
        if table is None:
            begin = int(bounds_k[number])
            own = slice(begin, begin + keys)
            k[begin + keys : begin + keys + spare] = v[begin + keys : begin + keys + spare] = float(
                "nan"
            )
            of_keys.append((k[own], v[own]))
        else:
            of_keys.append(tuple(x[table[number].long()].flatten(0, 1)[:keys] for x in (k, v)))
    o, lse = attention_varlen(
        q, k, v, bounds_q, None if pages else bounds_k, longest_q, longest_k, seqused_q=used_q,
        seqused_k=used_k, block_table=table, causal=True, return_lse=True, **options,
    )  # fmt: skip
    features = features_of(causal=True, **options) if options else PLAIN
    right, seen = [], torch.zeros(len(q), dtype=torch.bool)
    for number, (queries, keys) in enumerate(lengths):
        own = slice(int(bounds_q[number]), int(bounds_q[number]) + queries)
        seen[own] = True
        if not queries:
            continue
        inputs = (x.transpose(0, 1)[None] for x in (q[own], *of_keys[number]))
        found = judge(
            o[own].transpose(0, 1)[None], lse[None, :, own], *inputs, scale=dim**-0.5,
            diagonal=keys - queries, features=features,
        )  # fmt: skip
        right.append(bool(found.passed))
    return all(right) and bool((o[~seen] == 0).all()) and bool((lse[:, ~seen] == -INF).all())


def test_a_call_that_would_not_be_faster_is_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    own, directions = serve(monkeypatch), record_directions(monkeypatch)
    own.attention(*draw(), causal=True)
    assert directions == ["forward"]


def test_splits_have_the_same_bits_each_time_and_where_torch_traces(splitting: Dispatcher) -> None:
    qkv = draw()
    first = splitting.attention(*qkv, causal=True, return_lse=True)
    again = splitting.attention(*qkv, causal=True, return_lse=True)

    def traced(*tensors: Tensor) -> Any:
        return splitting.attention(*tensors, causal=True, return_lse=True)

    compiled = torch.compile(traced, backend="aot_eager", fullgraph=True)(*qkv)
    for other in (again, compiled):
        assert all(map(torch.equal, first, other))


def test_gradients_of_a_split_forward(
    splitting: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    directions = record_directions(monkeypatch)
    given = draw()
    q, k, v = leaves(*given)
    do = torch.randn_like(q)
    splitting.attention(q, k, v, causal=True).backward(do)
    assert directions[:2] == SPLIT
    exact = leaves(*(x.double() for x in given))
    o, _ = eager.attention(
        *exact, scale=0.125, diagonal=given[1].shape[2] - given[0].shape[2], features=PLAIN
    )
    o.backward(do.double())
    for found, wanted in zip((q, k, v), exact, strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        torch.testing.assert_close(found.grad.double(), wanted.grad, atol=0.03, rtol=0.03)


def test_explain_says_so(splitting: Dispatcher) -> None:
    q, k, v = draw()
    found = splitting.explain(q, k, v, causal=True)
    assert found.split is not None
    assert found.split in str(found)
    assert "8 blocks leave SMs idle, so keys are split: decode_bf16_d64_causal" in found.split
    assert "in 6 splits" in found.split
    assert splitting.explain(q, k, v, causal="top_left").split is None


def _without_a_part(call: Combine) -> Combine:
    parts = call.parts
    return replace(call, parts=parts._replace(o=parts.o[:-1], lse=parts.lse[:-1]))


def _with_a_part_twice(call: Combine) -> Combine:
    twice = [*range(len(call.parts.lse)), 2]
    o, lse, _ = call.parts
    return replace(call, parts=call.parts._replace(o=o[twice], lse=lse[twice]))


def _with_lse_of_another_split(call: Combine) -> Combine:
    return replace(call, parts=call.parts._replace(lse=call.parts.lse.roll(1, 0)))


def _with_o_of_another_split(call: Combine) -> Combine:
    return replace(call, parts=call.parts._replace(o=call.parts.o.roll(1, 0)))


def _with_a_key_less(call: Decode) -> Decode:
    lengths = torch.full_like(call.cache.lengths, call.cache.capacity - 1)
    return replace(call, cache=replace(call.cache, lengths=lengths))


def _with_keys_of_another_head(call: Decode) -> Decode:
    cache: Cache = replace(call.cache, k=call.cache.k.flip(1))
    return replace(call, cache=cache)


def _negated(call: Decode) -> Decode:
    return replace(call, scale=-call.scale)


BROKEN: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a part is lost": ("run_combine", _without_a_part),
    "a part is taken twice": ("run_combine", _with_a_part_twice),
    "LSE of another part": ("run_combine", _with_lse_of_another_split),
    "O of another part": ("run_combine", _with_o_of_another_split),
    "the last key is not seen": ("run_decode", _with_a_key_less),
    "keys of another head": ("run_decode", _with_keys_of_another_head),
    "the scale's sign": ("run_decode", _negated),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_check_finds_a_broken_launch(
    name: str, splitting: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, broken = BROKEN[name]
    run = getattr(launch_cache, function)
    monkeypatch.setattr(launch_cache, function, lambda plan, call: run(plan, broken(call)))
    assert not is_right(splitting, *draw(), causal=True)


def test_the_check_finds_another_diagonal(
    splitting: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a mask that begins at the first key were a decode's."""
    split = few_blocks.ForwardLauncher.split
    aligned = lambda self, call: split(self, replace(call, diagonal=None))  # noqa: E731
    monkeypatch.setattr(few_blocks.ForwardLauncher, "split", aligned)
    assert not is_right(splitting, *draw(), causal="top_left")
