"""Schedule hopper's forward with features of the scores, as Triton compiles it: results, loads, mutants."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashgen.inputs.features import Features
from flashgen.kernels.launch import launch
from flashgen.reference.cases import CheckCase
from flashgen.schedules.legality import why_illegal
from flashgen.spec.gpu import TARGETS
from tests.executed import (
    Load,
    assert_bits_of,
    assert_found,
    assert_right,
    case,
    compiled,
    loads,  # noqa: F401  # a fixture
)
from tests.makers import each, hopper, make_config, make_spec

H200 = TARGETS["nvidia_h200"]


PERSISTENT = {"persistent": True, "order": "longest_first"}
VARIANTS: dict[str, tuple[Any, ...]] = {
    "all": (64, "none", hopper(), dict.fromkeys(("window", "sink", "softcap", "alibi"), True)),
    "window": (64, "causal", hopper(), {"window": True}),
    "window on both sides": (128, "none", hopper(128, 128), {"window": True}),
    "chunk": (64, "causal", hopper(192, 64, 3), {"chunk": True}),
    "softcap": (64, "causal", hopper(), {"softcap": True}),
    "sink": (64, "none", hopper(192, 32), {"sink": True}),
    "gpt-oss, persistent": (64, "causal", hopper(**PERSISTENT), {"window": True, "sink": True}),
    "alibi": (64, "causal", hopper(), {"alibi": True}),
    "alibi without a mask": (96, "none", hopper(), {"alibi": True, "softcap": True}),
    "Gemma 2": (256, "causal", hopper(128, 64), {"window": True, "softcap": True}),
    "Llama 4, persistent": (128, "causal", hopper(**PERSISTENT), {"chunk": True}),
}


@pytest.mark.parametrize("name", each(VARIANTS))
def test_every_variant_is_right(name: str) -> None:
    dim, mask, config, features = VARIANTS[name]
    assert_right(make_spec("bfloat16", dim, mask, **features), config)


def test_all_features_at_once() -> None:
    dim, mask, config, features = VARIANTS["all"]
    cases = [case(130, 200, heads=2), case(70, 65)]
    assert_right(make_spec("bfloat16", dim, mask, **features), config, cases)


@pytest.mark.slow("a kernel of wide heads")
def test_latent_heads_and_half_precision() -> None:
    spec = make_spec("float16", 192, "causal", head_dim_v=128, window=True)
    assert_right(spec, hopper(), [case(130, 200), case(70, 333)])


@pytest.mark.parametrize("name", each(["one row", "sq above sk", "nothing is seen"], 3))
def test_windows_at_the_ends(name: str) -> None:
    """Rows that see no key, before the first key and behind the last."""
    shapes = {"sq above sk": (200, 70), "one row": (1, 400), "nothing is seen": (200, 30)}
    spec = make_spec("bfloat16", 64, "none", window=True)
    assert_right(spec, hopper(), [case(*shapes[name])] * 7)  # a window each


def test_tiles_that_no_row_sees_are_not_loaded(loads: dict[int, list[Load]]) -> None:  # noqa: F811
    spec = make_spec("bfloat16", 64, "causal", window=True)
    q, k, v = torch.randn(3, 1, 1, 384, 64).bfloat16()
    features = Features(window=(60, 0))
    launch(
        compiled(spec, hopper()), spec, hopper(), q, k, v, scale=0.1, diagonal=0, features=features
    )
    walks = []
    for _, copied in sorted(loads.items()):
        (q, _, first), *rest = copied
        bases = list(dict.fromkeys(base for base, *_ in rest if base != q))
        walks.append((first[2], [at[2] for base, _, at in rest if base == bases[0]]))
    assert walks == [(0, [64, 0]), (128, [192, 128, 64]), (256, [320, 256, 192])]


def test_what_it_lacks_is_named() -> None:
    for features, words in (
        ({"bias": "additive", "window": True}, "(bias)"),
        ({"dropout": True}, "(dropout)"),
    ):
        spec = make_spec("bfloat16", 64, "causal", **features)
        reason = why_illegal(spec, hopper(), H200)
        assert reason == f"features {words} need schedule fa2: got hopper"
    invariant = make_spec("bfloat16", 64, "causal", alibi=True, window=True, invariant=True)
    assert "has no alibi where a spec is invariant" in str(why_illegal(invariant, hopper(), H200))


INVARIANT: dict[str, tuple[Any, ...]] = {
    "gpt-oss": (64, "causal", hopper(), {"window": True, "sink": True}),
    "Gemma 2": (128, "causal", hopper(192, 64), {"window": True, "softcap": True}),
    "Llama 4": (128, "causal", hopper(), {"chunk": True}),
    "both sides, persistent": (64, "none", hopper(**PERSISTENT), {"window": True}),
    "packed": (64, "causal", hopper(), {"window": True, "sink": True, "varlen": True}),
}
GIVEN = {
    "window": {"window": (700, 20)},
    "chunk": {"chunk": 900, "chunk_start": torch.tensor([300], dtype=torch.int32)},
    "softcap": {"softcap": 3.0},
    "sink": {"sinks": torch.tensor([1.5])},
}
"""Windows and chunks that begin within the second segment."""


@pytest.mark.parametrize(
    ("name", "bits_alone"), [*each((name, False) for name in INVARIANT), ("gpt-oss", True)]
)
def test_segments_give_the_bits_of_a_plain_kernel_of_the_class(name: str, bits_alone: bool) -> None:
    dim, mask, config, on = INVARIANT[name]
    spec = make_spec("bfloat16", dim, mask, invariant=True, **on)
    if not bits_alone:
        assert_right(spec, config)
    if "varlen" not in on:
        given = {key: value for word in on for key, value in GIVEN[word].items()}
        plain = make_config(64, 64, num_warps=4, num_stages=2)
        assert_bits_of(plain, spec, config, features=Features(**given))


WINDOW, CHUNK, CAP, SINK, ALIBI = (
    make_spec("bfloat16", 64, "causal", **{name: True})
    for name in ("window", "chunk", "softcap", "sink", "alibi")
)
BOTH = make_spec("bfloat16", 64, "none", window=True)
WINDOWS = [case(200, 330)] * 4 + [case(129, 129, "top_left")] * 3
"""Each place draws another window, or another chunk."""
PLAIN = [case(200, 330, heads=2)]
FEW = [case(64, 2, heads=8)]
"""Keys, so that sinks are larger than scores."""
Mutant = tuple[Any, list[CheckCase], str, str]
MUTANTS: dict[str, Mutant] = {
    "first keys are not hidden": (WINDOW, WINDOWS, "if first_key is not None:", "if False:"),
    "one first key too many": (WINDOW, WINDOWS, ">= limits", "> limits"),
    "a tile of the window too few": (
        WINDOW, WINDOWS, "first_key_of(row_start + zeroth, batch, begins), 0) // BC",
        "first_key_of(row_start + zeroth, batch, begins) + BC - 1, 0) // BC"),
    "keys do not count from the first tile": (
        WINDOW, WINDOWS, "            last_key -= first_tile * BC\n", ""),
    "first keys do not count from it": (
        WINDOW, WINDOWS, "first_key_of(rows + diagonal, batch, begins) - first_tile * BC",
        "first_key_of(rows + diagonal, batch, begins)"),
    "tiles that hide first keys have no mask": (WINDOW, WINDOWS, "i >= hiding", "i > end"),
    "a hiding tile too few": (WINDOW, WINDOWS, "i >= hiding", "i > hiding"),
    "the last row's first key is the first row's": (
        WINDOW, WINDOWS, "first_key_of(first_row + diagonal + 63, batch, begins)",
        "first_key_of(first_row + diagonal, batch, begins)"),
    "the last V is the first tile's": (
        WINDOW, WINDOWS, "start = start if INVARIANT else first_tile * BC", "start = start if INVARIANT else 0"),
    "the walk begins at the first key": (
        WINDOW, WINDOWS, "first_tile + key_tiles - 1) * BC", "key_tiles - 1) * BC"),
    "the right side is forgotten": (
        BOTH, WINDOWS, "diagonal + window_right if window_right", "diagonal if window_right"),
    "the left side by one": (BOTH, WINDOWS, "- window_left", "- window_left + 1"),
    "chunks begin at 0": (
        CHUNK, WINDOWS, "first_chunk = gl.load(chunk_start_ptr + batch) % chunk",
        "first_chunk = gl.load(chunk_start_ptr + batch) * 0"),
    "chunks of another batch": (
        CHUNK, [case(70, 130, batch=2)] * 4 + [case(70, 130, batch=2)], "chunk_start_ptr + batch", "chunk_start_ptr"),
    "a chunk begins a key late": (
        CHUNK, WINDOWS, "(positions - first_chunk + chunk) % chunk",
        "(positions - first_chunk + chunk) % chunk - 1"),
    "no cap before the loop": (
        CAP, PLAIN, "            if SCALED:\n                s = scored(s, positions",
        "            if False:\n                s = scored(s, positions"),
    "the cap's inverse": (CAP, PLAIN, "scale_log2e * inverse_cap", "inverse_cap"),
    "a capped score is scaled again": (CAP, PLAIN, "factor = 1.0 if SCALED", "factor = scale_log2e if SCALED"),
    "the slope of another head": (
        ALIBI, PLAIN, "+ head * stride_slopes_h", "+ (head ^ 1) * stride_slopes_h"),
    "slopes count from the row": (ALIBI, PLAIN, "positions += diagonal", "positions += 0 * diagonal"),
    "no sink in the sum": (SINK, PLAIN, " + gl.exp2(sink - new_max)", ""),
    "the sink of another head": (SINK, PLAIN, "sinks_ptr + head)", "sinks_ptr + (head ^ 1))"),
    "O is not rescaled by the sink": (
        SINK, FEW, "1.0 if sinks_ptr is None or INVARIANT else rescale", "1.0"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", each(MUTANTS, 24))
def test_a_broken_text_is_found(mutant: str) -> None:
    spec, cases, old, new = MUTANTS[mutant]
    assert_found(spec, hopper(128, 32), (old, new), cases)
