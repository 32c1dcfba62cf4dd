"""Schedule blackwell's forward with features of the scores, as Triton compiles it: results, loads, mutants."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from flashgen.inputs.features import Features
from flashgen.kernels.launch import launch
from flashgen.kernels.render import render
from flashgen.reference.cases import CheckCase
from flashgen.schedules.legality import why_illegal
from flashgen.spec.gpu import TARGETS
from tests.cpu.kernels.test_blackwell_forward import blackwell
from tests.executed import (
    Load,
    assert_found,
    assert_right,
    case,
    compiled,
    loads,  # noqa: F401  # a fixture
)
from tests.makers import each, make_spec
from tests.ptx_snippets import lanes

B200 = TARGETS["nvidia_b200"]
PERSISTENT = {"persistent": True, "order": "longest_first"}
EXACT = {"exp2_by_fma": 0}
VARIANTS: dict[str, tuple[Any, ...]] = {
    "all": (64, "none", blackwell(bc=64, **EXACT), dict.fromkeys(("window", "sink", "softcap", "alibi"), True)),
    "window": (64, "causal", blackwell(bc=64, stages=3), {"window": True}),
    "window on both sides": (128, "none", blackwell(stages=3), {"window": True}),
    "chunk": (64, "causal", blackwell(stages=4), {"chunk": True}),
    "softcap": (64, "causal", blackwell(bc=64), {"softcap": True}),
    "sink": (64, "none", blackwell(bc=64, rescale_log2=0), {"sink": True}),
    "gpt-oss, persistent": (64, "causal", blackwell(bc=64, **PERSISTENT), {"window": True, "sink": True}),
    "alibi": (64, "causal", blackwell(bc=64, **EXACT), {"alibi": True}),
    "alibi without a mask": (96, "none", blackwell(bc=64, **EXACT), {"alibi": True, "softcap": True}),
    "Gemma 2": (256, "causal", blackwell(128), {"window": True, "softcap": True}),
    "Llama 4, persistent": (128, "causal", blackwell(**PERSISTENT), {"chunk": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", each(VARIANTS))
def test_every_variant_is_right(name: str) -> None:
    dim, mask, config, features = VARIANTS[name]
    assert_right(make_spec("bfloat16", dim, mask, **features), config)


@pytest.mark.slow("12 seconds; make test has each feature alone, and packed ones together")
def test_all_features_at_once() -> None:
    dim, mask, config, features = VARIANTS["all"]
    cases = [case(130, 200, heads=2), case(70, 65)]
    assert_right(make_spec("bfloat16", dim, mask, **features), config, cases)


@pytest.mark.slow("a kernel of wide heads")
def test_latent_heads_and_half_precision() -> None:
    spec = make_spec("float16", 192, "causal", head_dim_v=128, window=True)
    assert_right(spec, blackwell(), [case(130, 200), case(70, 333)])


@pytest.mark.parametrize("name", each(["one row", "sq above sk", "nothing is seen"], 3))
def test_windows_at_the_ends(name: str) -> None:
    """Rows that see no key, before the first key and behind the last."""
    shapes = {"sq above sk": (300, 70), "one row": (1, 400), "nothing is seen": (270, 30)}
    spec = make_spec("bfloat16", 64, "none", window=True)
    assert_right(spec, blackwell(bc=64), [case(*shapes[name])] * 7)  # a window each


@pytest.mark.slow("4 s; schedule hopper's walk is in make test")
def test_tiles_that_no_row_sees_are_not_loaded(loads: dict[int, list[Load]]) -> None:  # noqa: F811
    spec, config = make_spec("bfloat16", 64, "causal", window=True), blackwell(bc=64)
    q, k, v = torch.randn(3, 1, 1, 768, 64).bfloat16()
    features = Features(window=(60, 0))
    launch(compiled(spec, config), spec, config, q, k, v, scale=0.1, diagonal=0, features=features)
    walks = []
    for _, copied in sorted(loads.items()):
        base = copied[0][0]  # of K, the first
        walks.append([at[2] for of, _, at in copied if of == base])
    assert walks == [
        [192, 128, 64, 0],
        [448, 384, 320, 256, 192],
        [704, 640, 576, 512, 448],
    ]


@pytest.mark.slow("a kernel")
def test_sinks_far_above_and_below_the_scores() -> None:
    """A sink 300 above them in log2 takes all of the softmax, one far below none of it."""
    spec, config = make_spec("bfloat16", 64, "causal", sink=True), blackwell(bc=64)
    q, k, v = torch.randn(3, 1, 2, 70, 64).bfloat16()
    sinks = torch.tensor([200.0, -1e4])
    o, lse = launch(
        compiled(spec, config), spec, config, q, k, v, scale=0.125, diagonal=-3,
        features=Features(sinks=sinks),
    )  # fmt: skip
    assert not o[:, 0].any()
    assert not o[:, :, :3].any(), "rows that see no key"
    assert torch.equal(lse[:, :, :3], sinks[None, :, None].expand(1, 2, 3))
    torch.testing.assert_close(lse[0, 0], torch.full((70,), 200.0), atol=1e-4, rtol=0)
    scores = (q[:, 1].double() @ k[:, 1].double().mT * 0.125).tril(-3)
    scores = scores.masked_fill(~torch.ones(70, 70).tril(-3).bool(), -math.inf)[:, 3:]
    torch.testing.assert_close(lse[:, 1, 3:].double(), scores.logsumexp(-1), atol=1e-4, rtol=0)
    torch.testing.assert_close(
        o[:, 1, 3:].double(), scores.softmax(-1) @ v[:, 1].double(), atol=2e-2, rtol=1e-2
    )


def test_tanh_errs_by_less_than_seven_units() -> None:
    """Of 2^-24, relative: near 0, over all of its range, beyond; of infinity and NaN."""
    text = render(CAP, blackwell()).source.split("def tanh_text():")[1].split("\n\n\n")[0]
    found: dict[str, Any] = {}
    exec(f"def tanh_text():{text}", found)
    body = re.sub(r"\$(\d)", r"r\1", found["tanh_text"]()).replace("{", "{{").replace("}", "}}")
    body = (
        "{{ .reg .f32 r<6>; mov.b64 {{r2, r3}}, {0}; mov.f32 r4, 0f3F800000; mov.f32 r5, r4; "
        f"{body} mov.b64 {{d}}, {{{{r0, r1}}}}; }}}}"
    )
    far = [1e4, math.inf, -math.inf, math.nan]
    x = np.concatenate([-np.geomspace(1e-8, 20, 1022), np.linspace(0.01, 10, 1022), far])
    x = x.astype(np.float32)
    y = np.concatenate(
        [lanes(body, [part.view(np.uint64)], np.uint64) for part in x.reshape(-1, 64)]
    )
    exact, tanh = np.tanh(x.astype(np.float64)), y.view(np.float32)
    np.testing.assert_allclose(tanh, exact, rtol=7 * 2.0**-24, atol=0)
    assert np.abs(tanh[:-1]).max() <= 1


def test_what_it_lacks_is_named() -> None:
    for features, words in (
        ({"bias": "additive", "window": True}, "(bias)"),
        ({"dropout": True}, "(dropout)"),
    ):
        spec = make_spec("bfloat16", 64, "causal", **features)
        reason = why_illegal(spec, blackwell(), B200)
        assert reason == f"features {words} need schedule fa2: got blackwell"
    invariant = make_spec("bfloat16", 64, "causal", window=True, invariant=True)
    assert why_illegal(invariant, blackwell(), B200) is not None
    slopes = make_spec("bfloat16", 64, "causal", alibi=True)
    assert "exp2_by_fma is 0 with ALiBi" in str(why_illegal(slopes, blackwell(), B200))
    assert why_illegal(slopes, blackwell(**EXACT), B200) is None


WINDOW, CHUNK, CAP, SINK, ALIBI = (
    make_spec("bfloat16", 64, "causal", **{name: True})
    for name in ("window", "chunk", "softcap", "sink", "alibi")
)
BOTH = make_spec("bfloat16", 64, "none", window=True)
WINDOWS = [case(300, 330)] * 4 + [case(129, 129, "top_left")] * 3
"""Each place draws another window, or another chunk."""
PLAIN = [case(200, 330, heads=2)]
FEW = [case(64, 2, heads=8)]
"""Keys, so that sinks are larger than scores."""
Mutant = tuple[Any, list[CheckCase], str, str]
MUTANTS: dict[str, Mutant] = {
    "first keys are not hidden": (WINDOW, WINDOWS, "if phase % 2 == 1:", "if False:"),
    "one first key too many": (WINDOW, WINDOWS, ">= starts", "> starts"),
    "one last key too few": (WINDOW, WINDOWS, "<= ends", "< ends"),
    "a tile of the window too few": (
        WINDOW, WINDOWS, "first_key_of(row_start + zeroth, batch, begins), 0) // BC",
        "first_key_of(row_start + zeroth, batch, begins) + BC - 1, 0) // BC"),
    "keys do not count from the first tile": (
        WINDOW, WINDOWS, "            last_key -= first_tile * BC\n", ""),
    "first keys do not count from it": (
        WINDOW, WINDOWS, "first_key_of(row + diagonal, batch, begins) - first_tile * BC",
        "first_key_of(row + diagonal, batch, begins)"),
    "full tiles do not count from it": (
        WINDOW, WINDOWS, "gl.maximum(full_tiles - first_tile, 0)", "full_tiles"),
    "tiles that hide first keys have no mask": (
        WINDOW, WINDOWS, "hiding = end - gl.minimum(gl.cdiv(unseen, BC), key_tiles)", "hiding = end"),
    "a hiding tile too few": (
        WINDOW, WINDOWS, "hiding = end - gl.minimum(gl.cdiv(unseen, BC), key_tiles)",
        "hiding = end - gl.minimum(unseen // BC, key_tiles)"),
    "the last row's first key is the first row's": (
        WINDOW, WINDOWS, "first_key_of(first_row + diagonal + 127, batch, begins)",
        "first_key_of(first_row + diagonal, batch, begins)"),
    "tiles that hide first and last keys hide the last": (
        WINDOW, WINDOWS, "bounds = (begin, earlier, masked_end, later, end)",
        "bounds = (begin, masked_end, masked_end, later, end)"),
    "the walk begins at the first key": (
        WINDOW, WINDOWS, "(first_tile + end - 1 - i) * BC", "(end - 1 - i) * BC"),
    "the right side is forgotten": (
        BOTH, WINDOWS, "diagonal + window_right if window_right", "diagonal if window_right"),
    "the left side by one": (BOTH, WINDOWS, "- window_left", "- window_left + 1"),
    "chunks begin at 0": (
        CHUNK, WINDOWS, "first_chunk = gl.load(chunk_start_ptr + batch) % chunk",
        "first_chunk = gl.load(chunk_start_ptr + batch) * 0"),
    "chunks of another batch": (
        CHUNK, [case(70, 130, batch=2)] * 5, "chunk_start_ptr + batch", "chunk_start_ptr"),
    "a chunk begins a key late": (
        CHUNK, WINDOWS, "(positions - first_chunk + chunk) % chunk",
        "(positions - first_chunk + chunk) % chunk - 1"),
    "half of the columns are capped": (
        CAP, PLAIN, "range(s_place.shape[1] // PART)", "range(s_place.shape[1] // PART // 2)"),
    "S is not awaited before it is capped": (
        CAP, PLAIN, "                mbarrier.wait(s_full.index(place), parity)\n", ""),
    "the other rows are capped": (
        CAP, PLAIN, "cap_scores(s_tmem.index(place)", "cap_scores(s_tmem.index(1 - place)"),
    "the cap's inverse": (CAP, PLAIN, "scale_log2e * inverse_cap", "inverse_cap"),
    "a capped score is scaled as QK^T is": (
        CAP, PLAIN, "scale_log2e if cap_log2e is None else cap_log2e", "scale_log2e"),
    "tanh ends at 4": (CAP, [case(200, 330, heads=8)] * 5, "41026666", "3F026666"),
    "tanh by another coefficient": (CAP, PLAIN, "3EEF747B", "3EE0747B"),
    "the slope of another head": (
        ALIBI, PLAIN, "+ head * stride_slopes_h", "+ (head ^ 1) * stride_slopes_h"),
    "slopes count from the row": (ALIBI, PLAIN, "positions += diagonal", "positions += 0 * diagonal"),
    "slopes of keys of the first tile": (ALIBI, PLAIN, "positions - start, to_log2", "positions, to_log2"),
    "no sink in the sum": (SINK, PLAIN, " + gl.exp2(sink - new_max)", ""),
    "a sink twice": (SINK, PLAIN, " + gl.exp2(sink - new_max)", " + 2 * gl.exp2(sink - new_max)"),
    "the sink of another head": (SINK, PLAIN, "sinks_ptr + head)", "sinks_ptr + (head ^ 1))"),
    "O is not rescaled by the sink": (SINK, FEW, "row_sum = whole_sum * before", "row_sum = whole_sum"),
    "O has no sink": (SINK, PLAIN, "            row_sum = whole_sum * before", "            pass"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", each(MUTANTS))
def test_a_broken_text_is_found(mutant: str) -> None:
    spec, cases, old, new = MUTANTS[mutant]
    assert_found(spec, blackwell(bc=64, exp2_by_fma=0 if spec.alibi else 4), (old, new), cases)
