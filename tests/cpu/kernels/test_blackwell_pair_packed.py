"""Schedule blackwell's dK/dV and dQ of packed sequences, as Triton compiles them: results, neighbours, mutants."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashgen.evaluate.check import check_loaded
from flashgen.evaluate.executed import ExecutedKernel
from flashgen.evaluate.sanitize import executed_cases
from flashgen.inputs.features import PLAIN, Features
from flashgen.kernels.render import render
from flashgen.ptx import FaultsFound
from tests.cpu.kernels.test_blackwell_backward import blackwell, wide, wide_keys
from tests.cpu.kernels.test_hopper_pair_packed import GPT_OSS, OF_BOTH, Lengths, Way, ran, right
from tests.cpu.kernels.test_hopper_pair_packed import OF_DQ as OF_DQ_OF_HOPPER
from tests.executed import assert_found, assert_right
from tests.makers import each, make_spec
from tests.mutants import broken

DKV: Way = ("backward_dkv", blackwell())
WIDE_DKV: Way = ("backward_dkv", wide_keys())
DQ: Way = ("backward_dq", blackwell())
LONGEST: Way = ("backward_dq", blackwell(3, order="longest_first"))
WIDE_DQ: Way = ("backward_dq", wide())
VARIANTS: dict[str, tuple[Way, int, str, dict[str, bool]]] = {
    "dK and dV": (DKV, 64, "causal", {}),
    "dQ": (LONGEST, 64, "causal", {}),
    "dK and dV without a mask": (DKV, 128, "none", {}),
    "dQ without a mask": (DQ, 128, "none", {}),
    "dK and dV of Mistral": (DKV, 128, "causal", {"window": True}),
    "dQ of Mistral": (DQ, 128, "causal", {"window": True}),
    "dK and dV of Gemma 2": (WIDE_DKV, 256, "causal", {"window": True, "softcap": True}),
    "dQ of Gemma 2": (WIDE_DQ, 256, "causal", {"window": True, "softcap": True}),
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
@pytest.mark.parametrize("way", [WIDE_DKV, WIDE_DQ], ids=["dkv", "dq"])
def test_latent_heads_and_half_precision(way: Way) -> None:
    direction, config = way
    spec = make_spec("float16", 192, "none", head_dim_v=128, direction=direction, varlen=True)
    assert_right(spec, config)


LENGTHS = ([100, 0, 1, 129, 7, 255], [129, 5, 31, 127, 0, 65])
"""Ragged tiles of one row and key, and of all but one; no query, no key; queries longer than keys."""
FEW = ([0, 129, 7], [5, 65, 0])


@pytest.mark.parametrize(
    ("way", "features", "lengths"),
    [
        (DKV, PLAIN, FEW),
        (DQ, GPT_OSS, FEW),
        *each((way, features, LENGTHS) for way in (DKV, DQ) for features in (PLAIN, GPT_OSS)),
    ],
)
def test_no_neighbour_is_read_or_written(way: Way, features: Features, lengths: Lengths) -> None:
    """Plain, and gpt-oss: LSE has a sink, which rows without a key see alone."""
    found = ran(way, features=features, lengths=lengths)
    assert right(found), found[0]


OF_DKV = {
    "LSE of another sequence": ("    lse_ptr += q_begin\n", ""),
    "delta of another sequence": ("    delta_ptr += q_begin\n", ""),
    "LSE of another head": ("head.to(gl.int64) * total_q", "head.to(gl.int64) * seq_q"),
    "dV has dK's room alone": ("clear(to_dv,", "clear(to_dk,"),
    "keys of another head": ("key = at(of_k, kv_head, key_start)", "key = at(of_k, kv_head + 1, key_start)"),
    "keys of a block alone": ("tiles = gl.cdiv(seq_k, BC)", "tiles = gl.cdiv(BC, BC)"),
    "no tile where there is no row": ("gl.maximum(seq_q, 1)", "gl.maximum(seq_q, 0)"),
}  # fmt: skip
OF_DQ = {
    **OF_DQ_OF_HOPPER,
    "no tile where there is no key": (
        "gl.maximum(gl.cdiv(key_end, BC), 1)",
        "gl.cdiv(key_end, BC)",
    ),
}
BROKEN = [
    (name, mutant)
    for name, own in (("dkv", OF_DKV), ("dq", OF_DQ))
    for mutant in {**OF_BOTH, **own}.items()
]


@pytest.mark.parametrize(("kernel", "mutant"), each(BROKEN))
def test_a_broken_text_is_found(kernel: str, mutant: tuple[str, tuple[str, str]]) -> None:
    try:
        found = ran({"dkv": DKV, "dq": DQ}[kernel], mutant[1], lengths=LENGTHS)
    except FaultsFound:
        return
    assert not right(found)


@pytest.mark.slow("a kernel of wide heads")
def test_blocks_of_dk_that_clear_dv_are_found() -> None:
    spec = make_spec("bfloat16", 256, "causal", direction="backward_dkv", varlen=True)
    assert_found(spec, WIDE_DKV[1], ("not of_dk if ONE_SUM", "of_dk if ONE_SUM"))


ONE_BARRIER = {
    "mbarrier.wait(p_full.index(place), (i >> 1) & 1 if TWO_S else i & 1)":
        "mbarrier.wait(p_full.index(0), i & 1)",
    "mbarrier.arrive(p_full.index(place), count=1)": "mbarrier.arrive(p_full.index(0), count=1)",
    "p_full = new_barriers(S_PLACES, 2)": "p_full = new_barriers(1, 2)",
}  # fmt: skip
"""Of P^T of both places of S^T: it takes two arrivals of one warpgroup for one of each."""


@pytest.mark.parametrize("seed", [32, pytest.param(35, marks=pytest.mark.slow("a second order"))])
def test_a_warpgroup_may_be_a_tile_ahead_of_the_other(seed: int) -> None:
    """In few orders of warps it is: in 2 of the first 40."""
    spec = make_spec("bfloat16", 64, "none", direction="backward_dkv", varlen=True)
    config = blackwell(4)
    rendered, cases = render(spec, config), executed_cases(spec, config)[:1]
    source = rendered.source
    for old, new in ONE_BARRIER.items():
        source = broken(source, old, new)
    before = ExecutedKernel(replace(rendered, source=source), spec, config, "sm_100", seed=seed)
    with pytest.raises(FaultsFound, match=r"tcgen05\.st"):
        check_loaded(before, spec, config, cases=cases, seed=seed)
    now = ExecutedKernel(rendered, spec, config, "sm_100", seed=seed)
    assert check_loaded(now, spec, config, cases=cases, seed=seed).passed
