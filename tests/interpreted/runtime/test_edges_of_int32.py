"""Lengths, tables and offsets at the edges of int32: the kernels read and write what the reference does, and nothing
outside of their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashgen import append, decode
from flashgen.inputs.cache import Cache
from flashgen.inputs.features import features_of
from flashgen.runtime.eager import cache as eager_cache
from flashgen.runtime.varlen import attention_varlen
from tests.memory_watch import watched
from tests.serving import serve

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

LEAST, MOST = -(2**31), 2**31 - 1
EDGES = (LEAST, LEAST + 1, LEAST + 7, -17, -1, MOST - 130, MOST - 16, MOST - 3, MOST - 1, MOST)
DIM = 16


def lengths_up_to(capacity: int) -> st.SearchStrategy[int]:
    near = st.sampled_from((0, 1, capacity - 1, capacity, capacity + 1))
    return st.one_of(st.sampled_from(EDGES), near, st.integers(0, capacity))


def pairs(values: st.SearchStrategy[int]) -> st.SearchStrategy[list[int]]:
    return st.lists(values, min_size=2, max_size=2)


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


@pytest.fixture(autouse=True)
def _served(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch)


def table_of(pages: int, size: int, lengths: list[int], data: st.DataObject) -> Tensor:
    """Pages of their own for the keys of each sequence; anything in what no key needs."""
    others = st.sampled_from((*EDGES, 0, pages))
    table = [[data.draw(others) for _ in range(size)] for _ in lengths]
    free = list(range(pages))
    for row, used in zip(table, lengths, strict=True):
        row[:used] = [free.pop() for _ in row[:used]]
    return torch.tensor(table, dtype=torch.int32)


PAGES, PAGE, ROW = 9, 4, 3


def page_count(length: int) -> int:
    return -(-min(max(length, 0), PAGE * ROW) // PAGE)


def append_writes_what_fits(data: st.DataObject) -> None:
    """Into places, pages and rows that there are, and into nothing else."""
    lengths, new = data.draw(pairs(lengths_up_to(12))), data.draw(st.integers(1, 20))
    layout, rotates = (
        data.draw(st.sampled_from(("plain", "paged", "rows"))),
        data.draw(st.booleans()),
    )
    anywhere = st.sampled_from((*EDGES, 0, 1, 2, 3))
    options: dict[str, Any] = {}
    cache, table, rows = torch.zeros(2, 1, 12, DIM).half(), None, None
    if layout == "paged":
        cache = torch.zeros(PAGES, PAGE, 1, DIM).half()
        table = table_of(PAGES, ROW, [ROW, ROW], data)
        lost = data.draw(st.sampled_from((None, 0, 1, 2)))
        if lost is not None:
            table[1, lost] = data.draw(st.sampled_from((*EDGES, PAGES)))
        options["block_table"] = table
    if layout == "rows":
        cache = torch.zeros(3, 1, 12, DIM).half()
        rows = [0, data.draw(anywhere)]
        rows[1] = 1 if rows[1] == 0 else rows[1]
        options["cache_batch_idx"] = int32(rows)
    if rotates:
        options |= {"cos": torch.ones(12, 8), "sin": torch.zeros(12, 8), "q": draw(2, 1, 3, DIM)}
    values, k = cache.clone(), draw(2, 1, new, DIM, seed=1)
    with watched():
        q = append(cache, values, k, -k, int32(lengths), **options)
    assert torch.equal(values, -cache)
    if rotates:
        assert torch.equal(q, options["q"])  # by an angle of 0
    want = torch.zeros_like(cache)
    for number, length in enumerate(lengths):
        for key in range(new):
            place = max(length, 0) + key
            if place >= 12:
                continue
            if table is not None:
                page = int(table[number, place // PAGE])
                if 0 <= page < PAGES:
                    want[page, place % PAGE] = k[number, :, key]
            elif rows is None or 0 <= rows[number] < 3:
                want[number if rows is None else rows[number], :, place] = k[number, :, key]
    assert torch.equal(cache, want)


def decode_reads_what_is_there(data: st.DataObject) -> None:
    """Lengths beyond the capacity are the capacity, those below 0 none; a window is any number of keys."""
    lengths, seq_q = data.draw(pairs(lengths_up_to(12))), data.draw(st.integers(1, 3))
    layout, windowed = (
        data.draw(st.sampled_from(("plain", "paged", "padded"))),
        data.draw(st.booleans()),
    )
    q, k, v = draw(2, 2, seq_q, DIM), draw(2, 1, 12, DIM, seed=1), draw(2, 1, 12, DIM, seed=2)
    options: dict[str, Any] = {}
    leftpad = None
    if windowed:
        sides = st.sampled_from((0, 1, 5, MOST, 2**40))
        options["window"] = (data.draw(sides), data.draw(sides))
    if layout == "padded":
        leftpad = int32([data.draw(lengths_up_to(12)) for _ in lengths])
        options["cache_leftpad"] = leftpad
    held, table = (k, v), None
    if layout == "paged":
        held = (draw(PAGES, PAGE, 1, DIM, seed=1), draw(PAGES, PAGE, 1, DIM, seed=2))
        table = table_of(PAGES, ROW, [page_count(length) for length in lengths], data)
        options["block_table"] = table
        k, v = (x.transpose(1, 2) for x in held)
    with watched():
        o = decode(q, *held, lengths=int32(lengths), causal=True, **options)
    cache = Cache(k=k, v=v, lengths=int32(lengths), block_table=table, leftpad=leftpad)
    features = features_of(causal=True, window=options.get("window"))
    want, _ = eager_cache.cached_attention(q, cache, scale=0.25, causal=True, features=features)
    torch.testing.assert_close(o, want, atol=2e-3, rtol=0)


def packed_sequences_stay_in_their_range(data: st.DataObject) -> None:
    """A seqused beyond the range of its sequence is all of it, one below 0 none."""
    lengths, causal = data.draw(pairs(st.integers(0, 9))), data.draw(st.booleans())
    dtype = data.draw(st.sampled_from((torch.int32, torch.int64)))
    used = [[data.draw(lengths_up_to(n)) for n in lengths] for _ in "qk"]
    cu = torch.tensor([0, lengths[0], sum(lengths)], dtype=dtype)
    q, k, v = (draw(sum(lengths) + 2, 1, DIM, seed=n).requires_grad_() for n in range(3))
    longest = data.draw(st.sampled_from((9, MOST, 2**40)))
    with watched():
        o = attention_varlen(
            q, k, v, cu, cu, longest, longest, causal=causal,
            seqused_q=int32(used[0]), seqused_k=int32(used[1]),
        )  # fmt: skip
        o.backward(torch.ones_like(o))
    clamped = [
        int32([min(max(x, 0), n) for x, n in zip(side, lengths, strict=True)]) for side in used
    ]
    found = [o.detach(), *(x.grad for x in (q, k, v))]
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    want = attention_varlen(
        q, k, v, cu, cu, 9, 9, causal=causal, seqused_q=clamped[0], seqused_k=clamped[1]
    )
    want.backward(torch.ones_like(want))
    for x, y in zip(found, [want.detach(), *(x.grad for x in (q, k, v))], strict=True):
        assert torch.equal(x, y)  # type: ignore[arg-type]


def bounds_that_are_none_harm_nothing(data: st.DataObject) -> None:
    """Results are undefined, but the kernels stay within their tensors."""
    edges = st.sampled_from((*EDGES, 0, 3, 5, 8, 2**40, -(2**62), 2**63 - 1))
    cu_q, cu_k = (torch.tensor([data.draw(edges) for _ in range(3)]) for _ in "qk")
    causal = data.draw(st.booleans())
    q, k, v = (draw(8, 1, DIM, seed=n).requires_grad_() for n in range(3))
    with watched():
        o = attention_varlen(q, k, v, cu_q, cu_k, 8, 8, causal=causal)
        o.backward(torch.ones_like(o))


def pages_end_where_the_table_does(data: st.DataObject) -> None:
    """Of a paged prefill: a length beyond the pages is as many keys as they hold."""
    lengths, used = data.draw(pairs(lengths_up_to(12))), data.draw(st.booleans())
    pool = draw(PAGES, PAGE, 1, DIM, seed=1), draw(PAGES, PAGE, 1, DIM, seed=2)
    table = table_of(PAGES, ROW, [page_count(length) for length in lengths], data)
    q, cu_q = draw(5, 2, DIM), int32([0, 3, 5])
    bounds: dict[str, Any] = {"cu_seqlens_k": None, "seqused_k": int32(lengths)}
    if not used:
        bounds = {"cu_seqlens_k": torch.tensor([0, *lengths]).cumsum(0)}
    with watched():
        o = attention_varlen(
            q,
            *pool,
            cu_q,
            max_seqlen_q=3,
            max_seqlen_k=MOST,
            causal=True,
            block_table=table,
            **bounds,
        )
    held = int32([min(max(length, 0), PAGE * ROW) for length in lengths])
    cache = Cache(
        k=pool[0].transpose(1, 2), v=pool[1].transpose(1, 2), lengths=held, block_table=table
    )
    for number, rows in enumerate((slice(0, 3), slice(3, 5))):
        own = q[rows].transpose(0, 1)[None]
        one = Cache(
            k=cache.k,
            v=cache.v,
            lengths=held[number : number + 1],
            block_table=table[number : number + 1],
        )
        want, _ = eager_cache.cached_attention(own, one, scale=0.25, causal=True)
        torch.testing.assert_close(o[rows], want[0].transpose(0, 1), atol=2e-3, rtol=0)


PROPERTIES = (
    append_writes_what_fits,
    decode_reads_what_is_there,
    packed_sequences_stay_in_their_range,
    bounds_that_are_none_harm_nothing,
    pages_end_where_the_table_does,
)


@pytest.mark.parametrize("holds", PROPERTIES)
@settings(max_examples=12, phases=[Phase.generate])
@given(data=st.data())
def test_at_the_edges(holds: Callable[[st.DataObject], None], data: st.DataObject) -> None:
    holds(data)


@pytest.mark.slow("draws 400 calls a property")
@pytest.mark.parametrize("holds", PROPERTIES)
@settings(max_examples=400, phases=[Phase.generate])
@given(data=st.data())
def test_far_and_wide(holds: Callable[[st.DataObject], None], data: st.DataObject) -> None:
    holds(data)
