"""Schedule hopper's dK/dV and dQ of packed sequences, as Triton compiles them: results, neighbours, mutants."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashgen.inputs.features import PLAIN, Features
from flashgen.inputs.packed import Sequences
from flashgen.kernels.launch import bind
from flashgen.kernels.launch_backward import Backward
from flashgen.ptx import FaultsFound
from flashgen.reference.gradients import forward, judge
from flashgen.runtime.eager.gradients import GradientInputs
from flashgen.schedules.config import KernelConfig
from flashgen.spec.vocabulary import Direction
from tests.cpu.kernels.test_hopper_pair_features import hopper
from tests.executed import assert_right, compiled
from tests.makers import each, make_spec

Way = tuple[Direction, KernelConfig]
DKV: Way = ("backward_dkv", hopper(64, 128))
WIDE_DKV: Way = ("backward_dkv", hopper(64, 64))
DQ: Way = ("backward_dq", hopper(128, 64))
LONGEST: Way = ("backward_dq", hopper(192, 64, 12, 2, "longest_first"))
VARIANTS: dict[str, tuple[Way, int, str, dict[str, bool]]] = {
    "dK and dV": (DKV, 64, "causal", {}),
    "dQ": (LONGEST, 64, "causal", {}),
    "dK and dV without a mask": (("backward_dkv", hopper(128, 128)), 64, "none", {}),
    "dQ without a mask": (DQ, 128, "none", {}),
    "dK and dV of Mistral": (DKV, 128, "causal", {"window": True}),
    "dQ of Mistral": (DQ, 128, "causal", {"window": True}),
    "dK and dV of Gemma 2": (WIDE_DKV, 256, "causal", {"window": True, "softcap": True}),
    "dQ of Gemma 2": (DQ, 256, "causal", {"window": True, "softcap": True}),
    "dK and dV of Llama 4": (DKV, 128, "causal", {"chunk": True}),
    "dQ of Llama 4": (DQ, 128, "causal", {"chunk": True}),
    "dK and dV by slopes": (DKV, 64, "causal", {"alibi": True}),
    "wide dK and dV by slopes": (WIDE_DKV, 256, "none", {"alibi": True}),
    "dQ by slopes": (DQ, 64, "none", {"alibi": True}),
    "dK and dV of a padded head dim": (DKV, 96, "causal", {}),
    "dQ of a padded head dim": (LONGEST, 96, "causal", {}),
}


@pytest.mark.parametrize("name", each(VARIANTS))
def test_every_variant_is_right(name: str) -> None:
    (direction, config), dim, mask, features = VARIANTS[name]
    spec = make_spec("bfloat16", dim, mask, direction=direction, varlen=True, **features)
    assert_right(spec, config)


@pytest.mark.slow("kernels of wide heads")
@pytest.mark.parametrize("way", [WIDE_DKV, DQ], ids=["dkv", "dq"])
def test_latent_heads_and_half_precision(way: Way) -> None:
    direction, config = way
    spec = make_spec("float16", 192, "none", head_dim_v=128, direction=direction, varlen=True)
    assert_right(spec, config)


LENGTHS = ([100, 0, 1, 129, 7, 191], [129, 5, 31, 127, 0, 65])
"""Ragged tiles of one row and key, and of all but one; no query, no key; queries longer than keys."""
FEW = ([0, 129, 7], [5, 65, 0])
GPT_OSS = Features(window=(40, 0), sinks=torch.tensor([1.5, -0.5]))
Lengths = tuple[Sequence[int], Sequence[int]]


def ran(
    way: Way,
    broken: tuple[str, str] = ("", ""),
    features: Features = PLAIN,
    lengths: Lengths = LENGTHS,
) -> tuple[list[float], list[Tensor]]:
    """Run causal sequences of two heads over one of keys, with 3 places of none behind each: the
    largest error of each sequence in units of its limit, and the gradients where no sequence is.
    Every other one is infinite, then the others are NaN.
    """
    (direction, config), gap = way, 3
    begins = [[0, *itertools.accumulate(n + gap for n in x)] for x in lengths]
    ends = [
        [b + n for b, n in zip(b, x, strict=False)] for b, x in zip(begins, lengths, strict=True)
    ]
    places = {
        f"{x}_{name}": torch.tensor(found, dtype=torch.int32)
        for x, pair in zip("qk", zip(begins, ends, strict=True), strict=True)
        for name, found in zip(("begins", "ends"), pair, strict=True)
    }
    packed = Sequences(**places, max_q=max(lengths[0]), max_k=max(lengths[1]))
    spec = make_spec(
        "bfloat16", 64, "causal", direction=direction, varlen=True,
        window=features.window is not None,
    )  # fmt: skip
    run = bind(compiled(spec, config, 0, *broken), spec, config)
    drawn = [_drawn(*n, features, seed) for seed, n in enumerate(zip(*lengths, strict=True))]
    given = [(x.q, x.k, x.v, x.do, *forward(x)[1:]) for x in drawn]
    of_rows, worst, rest = direction == "backward_dq", [], []
    own_ends, own_begins = (ends[0], begins[0]) if of_rows else (ends[1], begins[1])
    between = [i for x, y in zip(own_ends, own_begins[1:], strict=True) for i in range(x, y)]
    for turn, bad in enumerate((math.inf, math.nan)):
        q, k, v, do, lse, delta = (
            _packed([x[n] for x in given][turn::2], begins[side][turn::2], begins[side][-1], bad)
            for n, side in enumerate((0, 1, 1, 0, 0, 0))
        )
        call = Backward(
            q=q, k=k, v=v, do=do, lse=lse, delta=delta, scale=0.125, diagonal=None,
            features=replace(features, sinks=None, sequences=packed),
        )  # fmt: skip
        found = run(call)
        rest += [gradient[:, :, between] for gradient in found]
        for b in range(turn, len(drawn), 2):
            own = tuple(x[:, :, own_begins[b] : own_ends[b]] for x in found)
            if 0 in (lengths[0][b], lengths[1][b]):
                worst.append(math.inf if any(bool(x.any()) for x in own) else 0.0)
            else:
                worst.append(judge(direction, own, drawn[b]).badness)
    return worst, rest


def _drawn(seq_q: int, seq_k: int, features: Features, seed: int) -> GradientInputs:
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (
        torch.randn(1, heads, n, 64, generator=generator).bfloat16()
        for heads, n in ((2, seq_q), (1, seq_k), (1, seq_k), (2, seq_q))
    )
    dlse = torch.randn(1, 2, seq_q, generator=generator)
    return GradientInputs(
        q=q, k=k, v=v, do=do, dlse=dlse, scale=0.125, diagonal=seq_k - seq_q, features=features
    )


def _packed(parts: Sequence[Tensor], begins: Sequence[int], total: int, bad: float) -> Tensor:
    """A packed tensor of those that begin there, and `bad` elsewhere."""
    found = torch.full((*parts[0].shape[:2], total, *parts[0].shape[3:]), bad, dtype=parts[0].dtype)
    for x, begin in zip(parts, begins, strict=False):
        found[:, :, begin : begin + x.shape[2]] = x
    return found


def right(found: tuple[list[float], list[Tensor]]) -> bool:
    """Whether all gradients are near enough, and 0 where no sequence is."""
    worst, rest = found
    return all(each <= 1.0 for each in worst) and not any(bool(x.any()) for x in rest)


@pytest.mark.parametrize(
    ("way", "features", "lengths"),
    [
        (DKV, GPT_OSS, FEW),
        (DQ, PLAIN, FEW),
        *each((way, features, LENGTHS) for way in (DKV, DQ) for features in (PLAIN, GPT_OSS)),
    ],
)
def test_no_neighbour_is_read_or_written(way: Way, features: Features, lengths: Lengths) -> None:
    """Plain, and gpt-oss: LSE has a sink, which rows without a key see alone."""
    found = ran(way, features=features, lengths=lengths)
    assert right(found), found[0]


OF_BOTH: dict[str, tuple[str, str]] = {
    "rows end with the tensor": ("(1 << 30) - size + row", "(1 << 30) - size + row - 64"),
    "keys end a row late": ("of_k = ((k_begin + seq_k)", "of_k = ((k_begin + seq_k + 1)"),
    "keys have the queries' lengths": (
        "(k_begin + seq_k).to(gl.int32), seq_k)", "(k_begin + seq_k).to(gl.int32), seq_q)"),
    "queries begin at the keys": ("of_q = ((q_begin + seq_q)", "of_q = ((k_begin + seq_q)"),
    "the diagonal is the tensors'": (
        "diagonal = bottom_right * (seq_k - seq_q)", "diagonal = bottom_right * (total_k - total_q)"),
    "places of no sequence stay": ("for start in range(begin, end, step)", "for start in range(end, end, step)"),
    "places of no sequence but the first": ("unused_end, tiles *", "begin + 1, tiles *"),
    "places of a sequence are cleared": ("first + gl.arange(0, 64", "first - 1 + gl.arange(0, 64"),
}  # fmt: skip
OF_DKV = {
    "LSE of another sequence": ("    lse_ptr += q_begin\n", ""),
    "delta of another sequence": ("    delta_ptr += q_begin\n", ""),
    "LSE of another head": ("head.to(gl.int64) * total_q", "head.to(gl.int64) * seq_q"),
    "dV has dK's room alone": ("clear(to_dv,", "clear(to_dk,"),
    "dK of another head": ("key = at(of_k, kv_head, first_key)", "key = at(of_k, kv_head + 1, first_key)"),
    "keys of a block alone": ("tiles = gl.cdiv(seq_k, BC)", "tiles = gl.cdiv(BC, BC)"),
}  # fmt: skip
OF_DQ = {
    "LSE of another sequence": (
        "lse_ptr + head_rows, delta", "lse_ptr + head_rows - q_begin, delta"),
    "delta of another head": (
        "delta_ptr + head_rows", "delta_ptr + head_rows + (seq_q - total_q) * head"),
    "rows of a block alone": ("tiles = gl.cdiv(seq_q, BR)", "tiles = gl.cdiv(BR, BR)"),
}  # fmt: skip
BROKEN = [
    (name, mutant)
    for name, own in (("dkv", OF_DKV), ("dq", OF_DQ))
    for mutant in {**OF_BOTH, **own}.items()
]


@pytest.mark.parametrize(("kernel", "mutant"), each(BROKEN, 99))
def test_a_broken_text_is_found(kernel: str, mutant: tuple[str, tuple[str, str]]) -> None:
    try:
        found = ran({"dkv": DKV, "dq": DQ}[kernel], mutant[1])
    except FaultsFound:
        return
    assert not right(found)
