"""Calls over tensors of odd strides: the kept ones are launched as the first, on the caller's tensors or on a new copy.

tests/cpu/runtime/test_call_cache_strides.py has the property with any strides, and looks at what a kernel would read.
Here Triton's own launcher hands over, and copies are kernels of torch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.errors import InvalidArgument
from flashgen.kernels import stream_memory
from flashgen.runtime.flash_attn import flash_attn_with_kvcache
from tests.driver.events import Launch, Recording, TorchKernel

CALLS = 4
"""By Triton, directly, and twice by the bound launch."""
POINTERS = 1 << 32
"""Every address lies above it, and every number of these calls below."""
MAP_BYTES = 128
BATCH, HEADS, KV_HEADS, SEQ, DIM = 2, 8, 2, 64, 64

Shape = tuple[int, ...]
Outputs = tuple[Tensor, ...]

OF_HEADS: dict[str, Shape] = {"sinks": (HEADS,), "alibi_slopes": (BATCH, HEADS)}
ROWS: dict[str, Shape] = {
    "q": (BATCH, HEADS, SEQ, DIM), "k": (BATCH, KV_HEADS, SEQ, DIM), "v": (BATCH, KV_HEADS, SEQ, DIM)
}  # fmt: skip
CACHE = ROWS | {"q": (BATCH, HEADS, 1, DIM), "lengths": (BATCH,)}
PAGES: dict[str, Shape] = {
    "k": (8, 16, KV_HEADS, DIM),
    "v": (8, 16, KV_HEADS, DIM),
    "block_table": (BATCH, 4),
}
PACKED: dict[str, Shape] = {
    "q": (SEQ, HEADS, DIM), "k": (SEQ, KV_HEADS, DIM), "v": (SEQ, KV_HEADS, DIM),
    "cu_seqlens_q": (BATCH + 1,), "cu_seqlens_k": (BATCH + 1,),
}  # fmt: skip
CHOSEN = "cache_batch_idx", "cache_leftpad", "chunk_start"
SCALES: dict[str, Shape] = {"k_scale": (8, KV_HEADS), "v_scale": (8, KV_HEADS)}
NEW: dict[str, Shape] = {"k": (BATCH, KV_HEADS, 2, DIM), "v": (BATCH, KV_HEADS, 2, DIM)}
REFUSED = "varlen_paged", "block_table"
"""Where elements of a row lie apart."""
DTYPES = dict.fromkeys(
    ("lengths", "block_table", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", *CHOSEN), torch.int32
) | dict.fromkeys((*OF_HEADS, *SCALES), torch.float32)


def attention(call: dict[str, Tensor]) -> Outputs:
    return flashgen.attention(**call, causal=True, return_lse=True)


def varlen(call: dict[str, Tensor]) -> Outputs:
    return flashgen.attention_varlen(
        **call, max_seqlen_q=SEQ, max_seqlen_k=SEQ, causal=True, return_lse=True
    )


def decode(call: dict[str, Tensor]) -> Outputs:
    return flashgen.decode(**call, return_lse=True)


def in_chunks(call: dict[str, Tensor]) -> Outputs:
    return flashgen.attention(**call, causal=True, chunk=16, return_lse=True)


def decode_in_chunks(call: dict[str, Tensor]) -> Outputs:
    return flashgen.decode(**call, chunk=16, return_lse=True)


def decode_of_8_bits(call: dict[str, Tensor]) -> Outputs:
    k, v = torch.empty(2, *PAGES["k"], dtype=torch.int8, device="cuda")
    return flashgen.decode(k=k, v=v, **call, return_lse=True)


def append(call: dict[str, Tensor]) -> Outputs:
    pages = torch.empty(2, *PAGES["k"], dtype=torch.bfloat16, device="cuda")
    angles = torch.empty(SEQ, DIM // 2, dtype=torch.bfloat16, device="cuda")
    rotated = flashgen.append(*pages, **call, cos=angles, sin=angles)
    assert rotated is not None
    return (rotated,)


def with_kvcache(call: dict[str, Tensor]) -> Outputs:
    o, lse = flash_attn_with_kvcache(
        call["q"].transpose(1, 2), call["k"], call["v"], cache_seqlens=call["lengths"],
        block_table=call["block_table"], alibi_slopes=call["alibi_slopes"], s_aux=call["sinks"],
        return_softmax_lse=True,
    )  # fmt: skip
    return o, lse


SERVED: dict[str, tuple[Callable[[dict[str, Tensor]], Outputs], dict[str, Shape]]] = {
    "attention": (attention, ROWS | OF_HEADS),
    "attention_in_chunks": (in_chunks, ROWS | {"chunk_start": (BATCH,)}),
    "attention_with_bias": (attention, ROWS | {"bias": (BATCH, HEADS, SEQ, SEQ)}),
    "varlen": (varlen, PACKED | OF_HEADS),
    "varlen_paged": (varlen, PACKED | PAGES | {"seqused_k": (BATCH,)}),
    "decode": (decode, CACHE | OF_HEADS),
    "decode_with_bias": (decode, CACHE | {"bias": (BATCH, HEADS, 1, SEQ)}),
    "decode_in_chunks": (decode_in_chunks, CACHE | dict.fromkeys(CHOSEN, (BATCH,))),
    "decode_of_8_bits": (
        decode_of_8_bits,
        {name: (CACHE | PAGES)[name] for name in ("q", "lengths", "block_table")} | SCALES,
    ),
    "append": (
        append,
        {name: (CACHE | PAGES)[name] for name in ("q", "lengths", "block_table")} | NEW,
    ),
    "decode_paged": (decode, CACHE | PAGES | OF_HEADS),
    "flash_attn_with_kvcache": (with_kvcache, CACHE | PAGES | OF_HEADS),
}


LAYOUTS: dict[str, Callable[[Callable[[Shape], Tensor], Shape], Tensor]] = {
    "turned": lambda empty, shape: empty(shape[::-1]).permute(*reversed(range(len(shape)))),
    "every second element": lambda empty, shape: empty((*shape[:-1], 2 * shape[-1]))[..., ::2],
    "every second of the first": lambda empty, shape: empty((2 * shape[0], *shape[1:]))[::2],
    "rows with gaps": lambda empty, shape: empty((*shape[:-1], shape[-1] + 16))[..., : shape[-1]],
    "one for all": lambda empty, shape: empty((1, *shape[1:])).expand(shape),
}
"""Tensors of a shape whose elements do not lie one behind the other. Strides that kernels take are multiples of 16 as
those without gaps are, so that Triton compiles nothing anew."""


def empty_as(name: str) -> Callable[[Shape], Tensor]:
    dtype = DTYPES.get(name, torch.bfloat16)
    return lambda shape: torch.empty(shape, dtype=dtype, device="cuda")


def tensors_of(shapes: dict[str, Shape], odd: str, layout: str) -> dict[str, Tensor]:
    """The tensors of a call; one of them has odd strides."""
    plain = {name: empty_as(name)(shape) for name, shape in shapes.items() if name != odd}
    return plain | {odd: LAYOUTS[layout](empty_as(odd), shapes[odd])}


def handed_over(launch: Launch, named: dict[int, str]) -> Launch:
    """A launch with names in place of addresses."""

    def told(parameter: str) -> str:
        content = bytes.fromhex(parameter)
        if len(content) not in (8, MAP_BYTES):
            return parameter
        (address,) = struct.unpack("<Q", content[:8])
        if address < POINTERS:
            return parameter
        return named.get(address, "elsewhere") + parameter[16:]

    return replace(launch, parameters=tuple(map(told, launch.parameters)))


def done_by(
    recording: Recording, make: Callable[[dict[str, Tensor]], Outputs], call: dict[str, Tensor]
) -> tuple[list[Launch], list[str]]:
    """The launches of one call, and the names of torch's own kernels, which copy."""
    launches, copies = len(recording.of(Launch)), len(recording.of(TorchKernel))
    outputs = make(call)
    named = {x.data_ptr(): f"output {number}" for number, x in enumerate(outputs)}
    named |= {x.data_ptr(): name for name, x in call.items()}
    made = [handed_over(each, named) for each in recording.of(Launch)[launches:]]
    return made, [each.name for each in recording.of(TorchKernel)[copies:]]


@pytest.fixture(scope="module", autouse=True)
def _zeros() -> None:
    """At which keys of pages begin: whichever call needs them first makes them for all of a process."""
    stream_memory.zeros(1, torch.empty(1, dtype=torch.int32, device="cuda"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("served", "odd"), [(served, name) for served, (_, shapes) in SERVED.items() for name in shapes]
)
def test_kept_calls_are_launched_as_the_first(
    recording: Recording, served: str, odd: str, layout: str
) -> None:
    make, shapes = SERVED[served]
    made = []
    for _ in range(CALLS):  # each of its own tensors
        call = tensors_of(shapes, odd, layout)
        if (served, odd) == REFUSED and call[odd].stride(1) != 1:
            with pytest.raises(InvalidArgument, match="block_table must have contiguous rows"):
                make(call)
            return
        made.append(done_by(recording, make, call))
    launches, copies = made[0]
    assert launches
    assert made[1:] == [(launches, copies)] * (CALLS - 1)
