"""Numerics at the edge, as docs/numerics.md states them: calls of attention() with what their first row must be. The
CPU path and the kernels are held to the same table."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flashgen import attention

NAN, INF = float("nan"), float("inf")
SCALE = 0.25
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, kw_only=True)
class Edge:
    """first_q: the first query, ones elsewhere and in K; keys: what keys 0 and 1 are multiplied by. o: the first row
    of O, "torch" for that of scaled_dot_product_attention; lse: its LSE; options: of the call, as a function of S.
    """

    o: float | str
    lse: float | None = None
    first_q: float = 1.0
    keys: tuple[float, float] = (1.0, 1.0)
    options: Callable[[int], dict[str, Any]] = lambda _: {}


def _bias(first: float) -> Callable[[int], dict[str, Any]]:
    """A bias of this in the first row, 0 in the others."""

    def options(size: int) -> dict[str, Any]:
        bias = torch.zeros(size, size)
        bias[0] = first
        return {"bias": bias}

    return options


def _sink(value: float) -> Callable[[int], dict[str, Any]]:
    return lambda _: {"sinks": torch.tensor([value])}


EDGES = {
    "NaN in a query": Edge(first_q=NAN, o=NAN, lse=NAN),
    "NaN in a key": Edge(keys=(NAN, 1.0), o=NAN, lse=NAN),
    # Sums of 16 such products are exact in any order: equal keys have equal scores on every CPU.
    "scores of -128": Edge(first_q=-32.0, o="torch"),
    "scores below -7e29": Edge(first_q=-(2.0**100), o="torch"),
    "scores about -6e37": Edge(first_q=-1.5 * 2.0**123, keys=(1.0, 0.875), o="torch"),
    "scores about 6e37": Edge(first_q=1.5 * 2.0**123, keys=(1.0, 0.875), o="torch"),
    "all scores -inf": Edge(first_q=-INF, o="torch", lse=-INF),
    "all scores inf": Edge(first_q=INF, o="torch", lse=NAN),
    "a score of inf": Edge(first_q=1e38, keys=(1e10, 1.0), o=NAN, lse=NAN),
    "a score of -inf": Edge(first_q=1e38, keys=(-1e10, 1.0), o="torch"),
    "a row of finfo.min": Edge(options=_bias(LOWEST), o=0.0, lse=-INF),
    "a row of -inf": Edge(options=_bias(-INF), o=0.0, lse=-INF),
    "a row of -1e30": Edge(options=_bias(-1e30), o="torch"),
    "a row of float16's least": Edge(options=_bias(-65504.0), o="torch"),
    "a row of NaN": Edge(options=_bias(NAN), o=NAN, lse=NAN),
    "a sink of inf": Edge(options=_sink(INF), o=NAN, lse=NAN),
    "a sink of NaN": Edge(options=_sink(NAN), o=NAN, lse=NAN),
    "a row of 2.4e38": Edge(options=_bias(2.4e38), o=NAN, lse=NAN),
    "a row of -2.4e38": Edge(options=_bias(-2.4e38), o=0.0, lse=-INF),
    "a row of 2.3e38": Edge(options=_bias(2.3e38), o="torch"),
    "a sink of 2.3e38": Edge(options=_sink(2.3e38), o=0.0, lse=2.3e38),
    "a sink of 2.4e38": Edge(options=_sink(2.4e38), o=NAN, lse=NAN),
    "a sink of finfo.max": Edge(options=_sink(-LOWEST), o=NAN, lse=NAN),
    "a sink of -2.4e38": Edge(options=_sink(-2.4e38), o="torch"),
    "a sink of finfo.min": Edge(options=_sink(LOWEST), o="torch"),
    "a sink of -inf": Edge(options=_sink(-INF), o="torch"),
}
"""By what is at the edge."""


def check(name: str, dtype: torch.dtype, size: int) -> None:
    """O and LSE of a call, and O of the call without LSE, which the CPU serves in another way."""
    edge = EDGES[name]
    v = torch.randn(1, 1, size, 16, generator=torch.Generator().manual_seed(size)).to(dtype)
    q, k = torch.ones_like(v), torch.ones_like(v)
    q[0, 0, 0] = edge.first_q
    for number, factor in enumerate(edge.keys):
        k[0, 0, number] *= factor
    options = edge.options(size)
    want = _torch(q, k, v, options.get("bias")) if edge.o == "torch" else None
    o, lse = attention(q, k, v, scale=SCALE, return_lse=True, **options)
    for found in (o, attention(q, k, v, scale=SCALE, **options)):
        row = found[0, 0, 0].float()
        expected = torch.full((16,), float(edge.o)) if want is None else want
        torch.testing.assert_close(row, expected, atol=2e-2, rtol=0, equal_nan=True)
    if edge.lse is not None:
        torch.testing.assert_close(lse[0, 0, 0].item(), edge.lse, equal_nan=True)
    if "key" not in name:
        assert o[0, 0, 1:].isfinite().all() == ("sink" not in name or edge.o is not NAN)
    if "sinks" in options:  # a row of no key has the sink alone
        none = k[:, :, :0]
        o, lse = attention(q, none, none, scale=SCALE, return_lse=True, **options)
        assert (o == 0).all() or edge.o is NAN
        alone = -INF if edge.lse is None else edge.lse
        torch.testing.assert_close(lse[0, 0, 0].item(), alone, equal_nan=True)


def _torch(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """The first row of O by torch, in one piece: its kernel for short rows loses NaN."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        mask = None if bias is None else bias.to(q.dtype)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE)[0, 0, 0].float()


def check_hidden_key(dtype: torch.dtype, size: int) -> None:
    """NaN in a key that the first query may not see: its O is finite and its dQ NaN, as with torch's flash attention."""
    q, k, v = (torch.ones(1, 1, size, 16, dtype=dtype) for _ in range(3))
    k[0, 0, 1] = NAN
    found = []
    for function in (functools.partial(attention, causal=True), _flash):
        leaf = q.clone().requires_grad_()
        o = function(leaf, k, v)
        (dq,) = torch.autograd.grad(o[0, 0, 0].sum(), leaf)
        found.append((o[0, 0, 0].isfinite().all().item(), dq[0, 0, 0].isnan().all().item()))
    assert found == [(True, True)] * 2


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=True)
