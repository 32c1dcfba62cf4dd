"""No public call or drop-in accepts, or leaves to torch, tensors of which one has a size that contradicts another's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flashgen.runtime.torch as hook
from flashgen.errors import InvalidArgument
from flashgen.runtime import flash_attn
from flashgen.runtime.api import attention, decode
from flashgen.runtime.sdpa import scaled_dot_product_attention
from flashgen.runtime.transformers import attention_forward

SIZES = {
    "B": 2, "H": 4, "K": 2, "S": 6, "T": 9, "D": 32, "E": 64, "1": 1, "P": 4, "G": 16, "N": 5, "L": 12, "M": 12,
}  # fmt: skip
"""batch, heads, heads of K and V, queries, keys, head dims of K and V, one, pages, their size, new keys, tokens of Q
and of K."""

BOUNDS = torch.tensor([0, 5, 12], dtype=torch.int32)
LENGTHS = torch.tensor([3, 5], dtype=torch.int32)
PAGES = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)


def of_layer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **others: Any) -> Any:
    return attention_forward(nn.Module(), q, k, v, mask, **others)


CALLS: dict[str, tuple[Callable[..., Any], dict[str, str], dict[str, Any]]] = {
    "attention": (
        attention,
        {"q": "BHSD", "k": "BKTD", "v": "BKTE", "bias": "BHST", "sinks": "H", "alibi_slopes": "BH"}, {},
    ),
    "decode": (decode, {"q": "BH1D", "k": "BKTD", "v": "BKTE"}, {"lengths": LENGTHS}),
    "sdpa": (
        scaled_dot_product_attention, {"query": "BHSD", "key": "BHTD", "value": "BHTE", "attn_mask": "BHST"}, {},
    ),
    "sdpa, five dimensions": (
        scaled_dot_product_attention, {"query": "BHKSD", "key": "BHKTD", "value": "BHKTE"}, {},
    ),
    "flash_attn": (
        flash_attn.flash_attn_func, {"q": "BSHD", "k": "BTKD", "v": "BTKE", "s_aux": "H", "alibi_slopes": "BH"}, {},
    ),
    "flash_attn, packed": (
        flash_attn.flash_attn_varlen_func, {"q": "LHD", "k": "MKD", "v": "MKE", "s_aux": "H"},
        {"cu_seqlens_q": BOUNDS, "cu_seqlens_k": BOUNDS, "max_seqlen_q": 7, "max_seqlen_k": 7},
    ),
    "flash_attn, pages": (
        flash_attn.flash_attn_varlen_func, {"q": "LHD", "k": "PGKD", "v": "PGKE"},
        {"cu_seqlens_q": BOUNDS, "cu_seqlens_k": BOUNDS, "max_seqlen_q": 7, "max_seqlen_k": 7, "block_table": PAGES},
    ),
    "flash_attn, cache": (
        flash_attn.flash_attn_with_kvcache,
        {"q": "B1HD", "k_cache": "BGKD", "v_cache": "BGKD", "k": "BNKD", "v": "BNKD"}, {"cache_seqlens": LENGTHS},
    ),
    "flash_attn, cache in pages": (
        flash_attn.flash_attn_with_kvcache,
        {"q": "B1HD", "k_cache": "PGKD", "v_cache": "PGKD", "k": "BNKD", "v": "BNKD"},
        {"cache_seqlens": LENGTHS, "block_table": PAGES},
    ),
    "transformers": (of_layer, {"q": "BHSD", "k": "BKTD", "v": "BKTE"}, {}),
    "transformers, a mask": (of_layer, {"q": "BHSD", "k": "BKTD", "v": "BKTE", "mask": "BHST"}, {}),
    "transformers, a bias": (
        of_layer, {"q": "BHSD", "k": "BKTD", "v": "BKTE", "mask": "BHST", "position_bias": "BHST", "s_aux": "H"}, {},
    ),
    "transformers, invariant": (of_layer, {"q": "BHSD", "k": "BKTD", "v": "BKTE"}, {"invariant": True}),
    "transformers, packed": (
        of_layer, {"q": "1HLD", "k": "1KMD", "v": "1KME"},
        {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS, "max_length_q": 7, "max_length_k": 7},
    ),
    "torch's flash": (hook._sdpa_forward, {"query": "BHSD", "key": "BHTD", "value": "BHTD"}, {}),
}  # fmt: skip
"""A call, the shapes of its tensors in letters of SIZES, and its other arguments."""


def contradictions(shapes: dict[str, str]) -> Iterator[tuple[str, int]]:
    """The argument and the dimension whose size another argument has too, or must divide (K divides H)."""
    for name, shape in shapes.items():
        others = "".join(x for other, x in shapes.items() if other != name).replace("K", "KH")
        yield from ((name, at) for at, letter in enumerate(shape) if letter in others)


@pytest.mark.parametrize("name", CALLS)
def test_a_size_that_contradicts_another_is_refused(name: str) -> None:
    function, shapes, options = CALLS[name]
    sizes = {each: [SIZES[letter] for letter in shape] for each, shape in shapes.items()}
    function(**{each: torch.randn(size) for each, size in sizes.items()}, **options)
    for each, at in contradictions(shapes):
        for change in (-1, 1, 7):
            wrong = [n + change * (place == at) for place, n in enumerate(sizes[each])]
            if wrong[at] in (0, 1):  # it may broadcast
                continue
            given = {x: torch.randn(wrong if x == each else size) for x, size in sizes.items()}
            assert refused(function, given | options), f"{each} of {wrong} beside {sizes}"


def refused(function: Callable[..., Any], arguments: dict[str, Any]) -> bool:
    try:
        function(**arguments)
    except InvalidArgument:
        return True
    return False
