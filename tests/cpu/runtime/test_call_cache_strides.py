"""Calls over tensors of any strides: the second and third are launched as the first, on the same elements."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flashgen.runtime.flash_attn as flash_attn
from flashgen.runtime import Dispatcher
from flashgen.runtime.kv_cache import append
from flashgen.runtime.varlen import attention_varlen
from tests.launches import Written, dispatcher, served
from tests.serving import make_current

READ = 16
"""Bytes that are compared where a kernel is handed an address: two copies lie at two addresses."""
POINTERS = 1 << 32
"""Every address lies above it, and every number of these calls below."""
SHAPES = {
    "q": (4, 8, 2, 64), "k": (4, 2, 64, 64), "v": (4, 2, 64, 64), "lengths": (4,), "sinks": (8,),
    "alibi_slopes": (4, 8), "block_table": (4, 4), "bias": (4, 8, 2, 64), "do": (4, 8, 2, 64),
    "chunk_start": (4,), "cache_batch_idx": (4,), "cache_leftpad": (4,), "k_scale": (16, 2), "v_scale": (16, 2),
}  # fmt: skip
DTYPES = dict.fromkeys(
    ("lengths", "block_table", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "chunk_start",
     "cache_batch_idx", "cache_leftpad"), torch.int32,
) | dict.fromkeys(("sinks", "alibi_slopes", "k_scale", "v_scale"), torch.float32)  # fmt: skip
PAGED = {"k": (16, 16, 2, 64), "v": (16, 16, 2, 64)}
NEW = {"k": (4, 2, 2, 64), "v": (4, 2, 2, 64)}
PACKED = {
    "q": (64, 8, 64), "k": (64, 2, 64), "v": (64, 2, 64), "do": (64, 8, 64), "cu_seqlens_q": (5,),
    "cu_seqlens_k": (5,), "seqused_k": (4,),
}  # fmt: skip


class Reading(Written):
    """The driver; what lies at an address is written down with it."""

    def compiled(self, kernel: Any, key: str, device: int) -> Any:
        made = super().compiled(kernel, key, device)
        run = made.run

        def reading(*arguments: Any) -> None:
            run(*arguments)
            *others, given = self.launches.pop()
            self.launches.append((*others, [_read(argument) for argument in given]))

        made.run = reading
        return made


def _read(argument: Any) -> Any:
    """What an argument says to a kernel: an address, what lies there."""
    if isinstance(argument, tuple) and isinstance(argument[-1], dict):  # a descriptor
        return {name: _read(value) for name, value in argument[-1].items()}
    if isinstance(argument, int) and argument > POINTERS:
        return argument, ctypes.string_at(argument, READ)
    return argument


@st.composite
def strided(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of this shape whose dimensions lie in memory in any order, with gaps, from anywhere on."""
    order = draw(st.permutations(range(len(shape))))
    steps = draw(st.tuples(*(st.sampled_from((1, 1, 2, 3)) for _ in shape)))
    begin = draw(st.sampled_from((0, 0, 8, 1)))
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step * steps[dim]
        step *= shape[dim] * steps[dim]
    store = torch.arange(begin + step + READ).remainder(251).to(dtype)
    return store.as_strided(shape, strides, begin)


@st.composite
def calls(
    draw: st.DrawFn, names: tuple[str, ...], others: dict[str, tuple[int, ...]] | None = None
) -> dict[str, Tensor]:
    """The tensors of a call of which one or two have odd strides, the others none; others: shapes
    in place of SHAPES.
    """
    shapes = SHAPES | (others or {})
    odd = draw(st.sets(st.sampled_from(names), min_size=1, max_size=2))
    made = {}
    for name in names:
        dtype = DTYPES.get(name, torch.bfloat16)
        if name in odd:
            made[name] = draw(strided(shapes[name], dtype))
        else:
            made[name] = torch.arange(math.prod(shapes[name])).to(dtype).view(shapes[name])
    return made


def told(launches: list[Any], outputs: tuple[Tensor, ...]) -> list[Any]:
    """The launches of one call. Instead of addresses: which output lies there, that it is what one
    launch leaves for the next, or what a kernel reads there. Without outputs always the last.
    """
    addresses = [{x[0] for x in _pointers(each[3])} for each in launches]
    places: dict[int, str] = {}
    if outputs:
        places = dict.fromkeys(set[int]().union(*addresses[1:]) & addresses[0], "left for the next")
        places |= {x.data_ptr(): f"output {i}" for i, x in enumerate(outputs)}

    def named(argument: Any) -> Any:
        if isinstance(argument, dict):
            return {name: named(value) for name, value in argument.items()}
        if isinstance(argument, tuple) and isinstance(argument[-1], bytes):
            return places.get(argument[0], argument[1])
        return argument

    return [(*others, [named(x) for x in given]) for *others, given in launches]


def _pointers(arguments: list[Any]) -> list[tuple[int, bytes]]:
    return [x for x in arguments if isinstance(x, tuple) and isinstance(x[-1], bytes)]


@contextmanager
def filled() -> Iterator[None]:
    """Memory that nobody has written is NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check_gradients(attend: Callable[..., Tensor], do: Tensor, *tensors: Tensor) -> None:
    """As check() of a call and its backward. A gradient may be a copy of what a kernel left, whose
    address another tensor then has, so only what lies there is compared.
    """

    def make(own: Dispatcher) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        torch.autograd.grad(attend(own, *leaves), leaves, do)
        return ()

    with filled():
        check(make)


def check(make: Callable[[Dispatcher], tuple[Tensor, ...]]) -> None:
    """Four calls launch the same, on the same elements."""
    with pytest.MonkeyPatch.context() as patch, served(patch, Reading()) as driver:
        own, made = dispatcher(patch), []
        make_current(patch, own)
        for _ in range(4):
            before = len(driver.launches)
            outputs = make(own)
            made.append(told(driver.launches[before:], outputs))
        assert made[0]
        assert made[1:] == made[:1] * 3


LONGEST: dict[str, Any] = {"max_seqlen_q": 16, "max_seqlen_k": 16, "causal": True}
FORWARD = "q", "k", "v", "sinks", "alibi_slopes"
DECODED = "q", "k", "v", "lengths", "sinks", "alibi_slopes"


@settings(max_examples=25)
@given(calls(FORWARD))
def test_attention(call: dict[str, Tensor]) -> None:
    check(lambda own: own.attention(**call, causal=True, return_lse=True))


@settings(max_examples=25)
@given(calls(("q", "k", "v", "bias")))
def test_attention_with_a_bias(call: dict[str, Tensor]) -> None:
    check(lambda own: own.attention(**call, return_lse=True))


@settings(max_examples=12)
@given(calls(("q", "k", "v", "chunk_start")))
def test_attention_in_chunks(call: dict[str, Tensor]) -> None:
    check(lambda own: own.attention(**call, causal=True, chunk=16, return_lse=True))


@settings(max_examples=15)
@given(calls(("q", "k", "v", "do")))
def test_gradients(call: dict[str, Tensor]) -> None:
    q, k, v, do = call.values()
    check_gradients(lambda own, *leaves: own.attention(*leaves, causal=True), do, q, k, v)


PLACES = "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"


@settings(max_examples=25)
@given(calls((*PLACES, "seqused_k", "sinks", "alibi_slopes"), PACKED))
def test_packed_sequences(call: dict[str, Tensor]) -> None:
    check(lambda _: attention_varlen(**call, **LONGEST, return_lse=True))


@settings(max_examples=15)
@given(calls((*PLACES, "do"), PACKED))
def test_gradients_of_packed_sequences(call: dict[str, Tensor]) -> None:
    q, k, v, *bounds, do = call.values()
    check_gradients(
        lambda _, *leaves: attention_varlen(*leaves, *bounds, **LONGEST), do, q, k, v
    )  # fmt: skip


@settings(max_examples=25)
@given(calls(DECODED))
def test_decode_over_rows(call: dict[str, Tensor]) -> None:
    check(lambda own: own.decode(**call, return_lse=True))


@settings(max_examples=40)
@given(calls((*DECODED, "block_table"), PAGED))
def test_decode_over_pages(call: dict[str, Tensor]) -> None:
    check(lambda own: own.decode(**call, return_lse=True))


@settings(max_examples=12)
@given(calls((*DECODED[:4], "cache_batch_idx", "cache_leftpad", "chunk_start")))
def test_decode_over_chosen_rows(call: dict[str, Tensor]) -> None:
    check(lambda own: own.decode(**call, chunk=16, return_lse=True))


@settings(max_examples=12)
@given(calls(("q", "lengths", "block_table", "k_scale", "v_scale")))
def test_decode_over_pages_of_8_bits(call: dict[str, Tensor]) -> None:
    k, v = torch.zeros(2, *PAGED["k"], dtype=torch.int8)
    check(lambda own: own.decode(k=k, v=v, **call, return_lse=True))


@settings(max_examples=12)
@given(calls(("q", "k", "v", "lengths", "block_table"), NEW))
def test_append_over_pages(call: dict[str, Tensor]) -> None:
    pages = torch.zeros(2, *PAGED["k"], dtype=torch.bfloat16)
    angles = torch.zeros(64, 32, dtype=torch.bfloat16)
    check(lambda _: (append(*pages, **call, cos=angles, sin=angles),))


@settings(max_examples=25)
@given(calls(("q", "k", "v", "lengths", "alibi_slopes", "block_table"), PAGED))
def test_flash_attn_with_kvcache(call: dict[str, Tensor]) -> None:
    q, k, v, lengths = (call[name] for name in ("q", "k", "v", "lengths"))

    def make(own: Dispatcher) -> tuple[Tensor, ...]:
        o, lse = flash_attn.flash_attn_with_kvcache(
            q.transpose(1, 2), k, v, cache_seqlens=lengths, block_table=call["block_table"],
            alibi_slopes=call["alibi_slopes"], return_softmax_lse=True,
        )  # fmt: skip
        return o, lse

    check(make)
