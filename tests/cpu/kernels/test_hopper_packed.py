"""Schedule hopper's forward over packed sequences, as Triton compiles it: results, neighbours, mutants."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.inputs.features import Features
from flashgen.inputs.packed import Sequences
from flashgen.kernels.descriptors import descriptor_of
from flashgen.kernels.launch import launch
from flashgen.ptx import FaultsFound
from flashgen.reference.attention import judge
from flashgen.schedules.config import KernelConfig
from tests.executed import assert_right, compiled
from tests.makers import each, hopper, make_spec

VARIANTS: dict[str, tuple[Any, ...]] = {
    "gpt-oss": (64, "causal", hopper(), {"window": True, "sink": True}),
    "causal": (64, "causal", hopper(order="longest_first"), {}),
    "no mask": (128, "none", hopper(128, 128), {}),
    "Gemma 2": (256, "causal", hopper(128, 64), {"window": True, "softcap": True}),
    "Llama 4": (128, "causal", hopper(192, 64), {"chunk": True}),
    "slopes of a sequence": (64, "causal", hopper(192, 32, 3), {"alibi": True}),
    "a padded head dim": (96, "causal", hopper(192, 64), {}),
}


@pytest.mark.parametrize("name", each(VARIANTS))
def test_every_variant_is_right(name: str) -> None:
    dim, mask, config, features = VARIANTS[name]
    assert_right(make_spec("bfloat16", dim, mask, varlen=True, **features), config)


@pytest.mark.slow("a kernel of wide heads")
def test_latent_heads_and_half_precision() -> None:
    assert_right(make_spec("float16", 192, "none", head_dim_v=128, varlen=True), hopper())


CAUSAL = make_spec("bfloat16", 64, "causal", varlen=True)
Lengths = Sequence[int]


def ran(
    lengths_q: Lengths,
    lengths_k: Lengths,
    broken: tuple[str, str] = ("", ""),
    gap: int = 0,
    config: KernelConfig = hopper(128, 32),  # noqa: B008
) -> tuple[Tensor, list[Tensor]]:
    """Run CAUSAL over sequences with `gap` places of none behind each: the largest error of each
    sequence in units of its limit, and O and LSE where no sequence is. The neighbours of each are,
    in turn, infinite and NaN.
    """
    generator = torch.Generator().manual_seed(0)
    begins = [[0, *itertools.accumulate(n + gap for n in x)] for x in (lengths_q, lengths_k)]
    ends = [
        [b + n for b, n in zip(b, x, strict=False)]
        for b, x in zip(begins, (lengths_q, lengths_k), strict=True)
    ]
    places = {
        f"{x}_{name}": torch.tensor(found, dtype=torch.int32)
        for x, pair in zip("qk", zip(begins, ends, strict=True), strict=True)
        for name, found in zip(("begins", "ends"), pair, strict=True)
    }
    packed = Sequences(**places, max_q=max(lengths_q), max_k=max(lengths_k))
    q, k, v = (
        torch.randn(1, heads, bounds[-1], 64, generator=generator).bfloat16()
        for heads, bounds in ((2, begins[0]), (1, begins[1]), (1, begins[1]))
    )
    kernel, worst, rest = compiled(CAUSAL, config, 0, *broken), [], []
    for b, bad in zip(range(len(lengths_q)), itertools.cycle((math.inf, math.nan))):
        of_q, of_k = (slice(x[0][b], x[1][b]) for x in zip(begins, ends, strict=True))
        bad_k, bad_v = torch.full_like(k, bad), torch.full_like(v, bad)
        bad_k[:, :, of_k], bad_v[:, :, of_k] = k[:, :, of_k], v[:, :, of_k]
        o, lse = launch(
            kernel, CAUSAL, config, q, bad_k, bad_v, scale=0.125, diagonal=None,
            features=Features(sequences=packed),
        )  # fmt: skip
        found = o[:, :, of_q], lse[:, :, of_q], q[:, :, of_q], k[:, :, of_k], v[:, :, of_k]
        worst.append(_badness(*found))
        between = [i for x, y in zip(ends[0], begins[0][1:], strict=True) for i in range(x, y)]
        rest += [o[:, :, between], lse[:, :, between]]
    return torch.tensor(worst), rest


def _badness(o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    if not q.shape[2]:
        return 0.0
    if not k.shape[2]:
        return 0.0 if not o.any() and bool((lse == -math.inf).all()) else math.inf
    return judge(o, lse, q, k, v, scale=0.125, diagonal=k.shape[2] - q.shape[2]).badness


def nothing_between(rest: list[Tensor]) -> bool:
    """Whether O is 0 and LSE -inf where no sequence is."""
    return all(
        not o.any() and bool((lse == -math.inf).all())
        for o, lse in zip(rest[::2], rest[1::2], strict=True)
    )


LENGTHS = ([100, 0, 1, 129, 7], [100, 5, 31, 200, 0])
FEW = ([129, 0, 7], [100, 5, 0])


@pytest.mark.parametrize(("lengths_q", "lengths_k"), each([FEW, LENGTHS], 2))
def test_no_neighbour_is_read_or_written(lengths_q: list[int], lengths_k: list[int]) -> None:
    """Ragged tiles of 4 to 31 keys, of one row and of all but one; without a query, and without a key."""
    worst, rest = ran(lengths_q, lengths_k, gap=3)
    assert bool((worst <= 1.0).all()), worst
    assert nothing_between(rest)


def test_a_block_of_a_descriptor_ends_where_its_sequence_does() -> None:
    """The place of an element by the strides of a packed descriptor, in bytes modulo 2^64."""
    x = (
        torch.zeros(1, 4, 1000, 128, dtype=torch.bfloat16)
        .transpose(1, 2)
        .contiguous()
        .transpose(1, 2)
    )
    made = descriptor_of(x, 64, 128, gluon=True, packed=True)
    end, size, head, row = 700, 90, 3, 17
    at = (1 << 30, end, head, (1 << 30) - size + row, 0)
    place = sum(i * step for i, step in zip(at, made.strides, strict=True)) * 2 % 2**64
    assert place == ((end - size + row) * x.stride(2) + head * x.stride(1)) * 2
    assert all(i < n for i, n in zip(at, made.shape, strict=True))
    assert (1 << 30) - size + size == made.shape[3], "the row behind the last lies outside"
    assert all(step * 2 % 16 == 0 and step * 2 < 1 << 40 for step in made.strides[:-1])


MUTANTS: dict[str, tuple[str, str]] = {
    "rows end with the tensor": ("(1 << 30) - size + row", "(1 << 30) - size + row - 64"),
    "keys end a row late": ("of_k = ((k_begin + seq_k)", "of_k = ((k_begin + seq_k + 1)"),
    "keys have the queries' lengths": ("(k_begin + seq_k).to(gl.int32), seq_k)", "(k_begin + seq_k).to(gl.int32), seq_q)"),
    "queries begin at the keys": ("of_q = ((q_begin + seq_q)", "of_q = ((k_begin + seq_q)"),
    "the diagonal is the tensors'": ("diagonal = bottom_right * (seq_k - seq_q)", "diagonal = bottom_right * (total_k - total_q)"),
    "LSE of another sequence": ("lse_ptr += head.to(gl.int64) * total_q + q_begin", "lse_ptr += head.to(gl.int64) * total_q"),
    "LSE of another head": ("lse_ptr += head.to(gl.int64) * total_q", "lse_ptr += head.to(gl.int64) * seq_q"),
    "programs beyond a sequence store": ("    if row_start >= seq_q:", "    if row_start > 100000:"),
    "a sequence without keys has no tile": ("gl.maximum(gl.cdiv(key_end, BC), 1)", "gl.cdiv(key_end, BC)"),
    "places of no sequence stay": ("unused_end, tiles * BR)", "unused_end * 0, tiles * BR)"),
    "the last sequence's room": ("gl.where(batch == sequences - 1, total, end)", "gl.minimum(end, 0)"),
}  # fmt: skip
HARMLESS = {"programs beyond a sequence store"}
"""They store nothing, because rows end: only time is lost."""


@pytest.mark.parametrize("mutant", each(MUTANTS, 11))
def test_a_broken_text_is_found(mutant: str) -> None:
    try:
        worst, rest = ran(*LENGTHS, broken=MUTANTS[mutant], gap=3)
    except FaultsFound:
        assert mutant not in HARMLESS
        return
    right = bool((worst <= 1.0).all()) and nothing_between(rest)
    assert right == (mutant in HARMLESS)
