"""Schedule blackwell's dK/dV and dQ with features of the scores, as Triton compiles them: results, loads, mutants."""

from __future__ import annotations

import pytest

from flashgen.schedules.config import KernelConfig
from flashgen.schedules.legality import why_illegal
from flashgen.spec.gpu import TARGETS
from flashgen.spec.vocabulary import Direction
from tests.cpu.kernels.test_blackwell_backward import blackwell, wide, wide_keys
from tests.cpu.kernels.test_hopper_pair_features import (
    BOTH,
    ENDS,
    MODELS,
    PLAIN,
    SHARED,
    WINDOW,
    WINDOWS,
    Mutant,
    spec_of,
    walks_of,
)
from tests.executed import (
    Load,
    assert_found,
    assert_right,
    case,
    loads,  # noqa: F401  # a fixture
)
from tests.makers import each, make_spec

B200 = TARGETS["nvidia_b200"]
Way = tuple[Direction, KernelConfig]
DKV: Way = ("backward_dkv", blackwell())
DQ: Way = ("backward_dq", blackwell())
WIDE_DKV: Way = ("backward_dkv", wide_keys())
VARIANTS = [(name, direction) for name in MODELS for direction in (DKV[0], DQ[0])]
CHUNK, CAP, ALIBI = {"chunk": True}, {"softcap": True}, {"alibi": True}


@pytest.mark.parametrize(("name", "direction"), each(VARIANTS))
def test_every_variant_is_right(name: str, direction: Direction) -> None:
    dim, mask, features = MODELS[name]
    wider, config = (wide_keys(), DKV[1]) if direction == "backward_dkv" else (wide(), DQ[1])
    spec = spec_of(direction, dim, mask, **features)
    config = wider if dim > 128 else config
    assert why_illegal(spec, config, B200) is None
    assert_right(spec, config)


@pytest.mark.slow("a kernel")
def test_a_window_of_shared_keys() -> None:
    """Tiles that hide last keys, none and first ones, of two heads."""
    spec = spec_of("backward_dkv", 64, "causal", window=True)
    assert_right(spec, DKV[1], [case(300, 300, heads=2)])


@pytest.mark.slow("two kernels")
@pytest.mark.parametrize("direction", [DKV[0], DQ[0]])
def test_latent_heads_and_half_precision(direction: Direction) -> None:
    spec = make_spec(
        "float16", 192, "causal", head_dim_v=128, direction=direction, window=True, softcap=True
    )
    config = wide_keys(by_fma=4) if direction == "backward_dkv" else wide(3)
    assert_right(spec, config, [case(130, 200, heads=4, kv=2), case(70, 333, heads=3)])


@pytest.mark.parametrize(
    ("name", "way"), each([(name, way) for name in ENDS for way in (DKV, DQ, WIDE_DKV)])
)
def test_windows_at_the_ends(name: str, way: Way) -> None:
    """Rows that see no key, before the first key and behind the last, and keys that no row sees."""
    direction, config = way
    spec = spec_of(direction, 256 if way is WIDE_DKV else 64, "none", window=True)
    assert_right(spec, config, [case(*ENDS[name])] * 7)  # a window each


@pytest.mark.slow("a kernel")
def test_rows_that_see_no_key_are_not_loaded(loads: dict[int, list[Load]]) -> None:  # noqa: F811
    walks = walks_of(loads, DKV, held=2)
    assert walks == [(0, [0, 128]), (128, [128, 256]), (256, [256])]


@pytest.mark.slow("a kernel")
def test_keys_that_no_row_sees_are_not_loaded(loads: dict[int, list[Load]]) -> None:  # noqa: F811
    walks = walks_of(loads, DQ, held=2)
    assert walks == [(0, [0]), (128, [0, 128]), (256, [128, 256])]


def test_what_it_lacks_is_named() -> None:
    for features, words in (({"bias": "additive"}, "(bias)"), ({"dropout": True}, "(dropout)")):
        for direction, config in (DKV, DQ):
            reason = why_illegal(spec_of(direction, 64, "causal", **features), config, B200)
            assert reason == f"features {words} need schedule fa2: got blackwell"
    fused = spec_of("backward_fused", 64, "causal", window=True)
    reason = why_illegal(fused, DKV[1], B200)
    assert reason == "features (window) need schedule fa2: got blackwell"


OF_DKV: dict[str, Mutant] = {
    "first keys are not hidden": ("causal", WINDOW, WINDOWS, "if phase % 2 == 1:", "if False:"),
    "one last row too few": (
        "causal", WINDOW, WINDOWS, "rows <= gl.expand_dims(last_rows", "rows < gl.expand_dims(last_rows"),
    "rows end a tile early": (
        "causal", WINDOW, WINDOWS, "gl.minimum(row_end, seq_q), 1)", "gl.minimum(row_end - BR, seq_q), 1)"),
    "rows end with the first key's": (
        "causal", WINDOW, WINDOWS, "last_row_of(key_start + BC - 1, batch", "last_row_of(key_start, batch"),
    "tiles that hide first keys have no mask": (
        "causal", WINDOW, WINDOWS, "(first_row, earlier, full_row, later, row_end)",
        "(first_row, full_row, full_row, row_end, row_end)"),
    "tiles that hide first and last keys hide the last": (
        "causal", WINDOW, WINDOWS, "(first_row, earlier, full_row, later, row_end)",
        "(first_row, full_row, full_row, later, row_end)"),
    "a hiding tile too few": (
        "causal", WINDOW, WINDOWS, "hiding_row = gl.maximum(hiding_row, 0) // BR * BR",
        "hiding_row = gl.maximum(hiding_row, 0) // BR * BR + BR"),
    "the first key hides as the last does": (
        "causal", WINDOW, WINDOWS, "last_row_of(key_start, batch", "last_row_of(key_start + BC - 1, batch"),
    "the diagonal is not counted": (
        "causal", WINDOW, WINDOWS, "last_row_of(keys, batch, begins) - diagonal", "last_row_of(keys, batch, begins)"),
    "last rows of the other half": (
        "causal", WINDOW, WINDOWS, "begins) - diagonal - HALF * w", "begins) - diagonal - HALF * (1 - w)"),
    "no tile where no row sees a key": (
        "causal", WINDOW, [case(30, 300)] * 7, "gl.minimum(row_end, seq_q), 1)", "gl.minimum(row_end, seq_q), 0)"),
    "the right side is forgotten": (
        "none", BOTH, WINDOWS, "diagonal + window_right if window_right", "diagonal if window_right"),
    "the left side by one": ("none", BOTH, WINDOWS, "keys + window_left", "keys + window_left - 1"),
    "chunks begin at 0": (
        "causal", CHUNK, WINDOWS, "first_chunk = gl.load(chunk_start_ptr + batch) % chunk",
        "first_chunk = gl.load(chunk_start_ptr + batch) * 0"),
    "a chunk ends a row late": (
        "causal", CHUNK, WINDOWS, "batch, begins) + (chunk - 1)", "batch, begins) + chunk"),
    "the cap's slope is 1": (
        "causal", CAP, PLAIN, "p_t if slope is None else mul2(p_t, slope)", "p_t"),
    "the cap's slope is not of its square": ("causal", CAP, PLAIN, "mul2(s_t, s_t)", "s_t"),
    "a capped score is scaled as QK^T is": (
        "causal", CAP, PLAIN, "scale_log2e if cap_log2e is None else cap_log2e", "scale_log2e"),
    "the cap's inverse": ("causal", CAP, PLAIN, "scale_log2e * inverse_cap", "inverse_cap"),
    "both parts of dS in one place": (
        "causal", CAP, PLAIN, "ds_tmem.slice(BR * w + PART * part", "ds_tmem.slice(BR * w"),
    "the slope of the first head": (
        "causal", ALIBI, SHARED, "slopes_ptr + member * stride_slopes_h", "slopes_ptr"),
    "the slope of the first head of keys": (
        "causal", ALIBI, SHARED, "kv_head * group * stride_slopes_h", "group * stride_slopes_h"),
    "distances count from the row": (
        "none", ALIBI, PLAIN, "places = keys - diagonal", "places = keys - 0 * diagonal"),
    "distances of the other half": (
        "none", ALIBI, PLAIN, "places = keys - diagonal - HALF * w", "places = keys - diagonal - HALF * (1 - w)"),
    "distances count from the tile": ("none", ALIBI, PLAIN, "(places - row_start)", "(places + 0 * row_start)"),
    "a key behind its row is near": (
        "none", ALIBI, PLAIN, "gl.abs(distances - rows.to(gl.float32))", "distances - rows.to(gl.float32)"),
}  # fmt: skip
OF_DQ: dict[str, Mutant] = {
    "first keys are not hidden": ("causal", WINDOW, WINDOWS, "if phase < 2:", "if False:"),
    "one first key too many": ("causal", WINDOW, WINDOWS, ">= starts", "> starts"),
    "one last key too few": ("causal", WINDOW, WINDOWS, "<= ends", "< ends"),
    "a tile of the window too few": (
        "causal", WINDOW, WINDOWS, "first_key_of(row_start + diagonal, batch, begins), 0) // BC",
        "first_key_of(row_start + diagonal, batch, begins) + BC - 1, 0) // BC"),
    "keys do not count from the first tile": (
        "causal", WINDOW, WINDOWS, "        last_keys -= first_tile * BC\n", ""),
    "first keys do not count from it": (
        "causal", WINDOW, WINDOWS, "begins) - (first_tile * BC + HALF * w)", "begins) - HALF * w"),
    "first keys of the other half": (
        "causal", WINDOW, WINDOWS, "(first_tile * BC + HALF * w)", "(first_tile * BC + HALF * (1 - w))"),
    "the walk begins at the first key": (
        "causal", WINDOW, WINDOWS, "(first_tile + i) * BC", "i * BC"),
    "tiles that hide first keys have no mask": (
        "causal", WINDOW, WINDOWS, "(0, earlier, hiding, later, key_tiles)", "(0, 0, 0, full_tiles, key_tiles)"),
    "tiles that hide first and last keys hide the first": (
        "causal", WINDOW, WINDOWS, "(0, earlier, hiding, later, key_tiles)", "(0, hiding, hiding, later, key_tiles)"),
    "a hiding tile too few": (
        "causal", WINDOW, WINDOWS, "gl.cdiv(gl.maximum(unseen - first_tile * BC, 0), BC)",
        "gl.maximum(unseen - first_tile * BC, 0) // BC"),
    "the last row's first key is the first row's": (
        "causal", WINDOW, WINDOWS, "first_key_of(row_start + diagonal + 127, batch, begins)",
        "first_key_of(row_start + diagonal, batch, begins)"),
    "whole tiles count from key 0": (
        "causal", WINDOW, WINDOWS, "gl.maximum(full_tiles - first_tile, 0)", "full_tiles"),
    "no tile where no key is seen": (
        "causal", WINDOW, [case(300, 30, "top_left")] * 4, "gl.maximum(key_tiles - first_tile, 1)",
        "gl.maximum(key_tiles - first_tile, 0)"),
    "the right side is forgotten": (
        "none", BOTH, WINDOWS, "diagonal + window_right if window_right", "diagonal if window_right"),
    "chunks of another batch": (
        "causal", CHUNK, [case(70, 130, batch=2)] * 4, "chunk_start_ptr + batch", "chunk_start_ptr"),
    "a chunk begins a key late": (
        "causal", CHUNK, WINDOWS, "(positions - first_chunk + chunk) % chunk",
        "(positions - first_chunk + chunk) % chunk - 1"),
    "the cap's slope is 1": ("causal", CAP, PLAIN, "p = mul2(p, slope)", "pass"),
    "the cap's slope is not of its square": ("causal", CAP, PLAIN, "mul2(s, s)", "s"),
    "a capped score is scaled as QK^T is": (
        "causal", CAP, PLAIN, "scale_log2e if cap_log2e is None else cap_log2e", "scale_log2e"),
    "the slope of another head": (
        "causal", ALIBI, SHARED, "+ head * stride_slopes_h", "+ (head ^ 1) * stride_slopes_h"),
    "slopes count from the row": (
        "none", ALIBI, PLAIN, "rows + (diagonal - first_tile", "rows + (0 * diagonal - first_tile"),
    "slopes of the other half": (
        "none", ALIBI, PLAIN, "first_tile * BC - HALF * w)", "first_tile * BC - HALF * (1 - w))"),
    "tiles lie at the first one": ("none", ALIBI, PLAIN, "(positions - i * BC)", "(positions - i * 0)"),
}  # fmt: skip
OF_WIDE_DKV: dict[str, Mutant] = {
    "first keys are not hidden": ("causal", WINDOW, WINDOWS, "if phase % 2 == 1:", "if False:"),
    "rows are loaded to the end": (
        "causal", WINDOW, [case(200, 330, heads=2)] * 4, "range(first_row, row_end, BR)", "range(first_row, seq_q, BR)"),
    "the cap's slope is 1": (
        "causal", CAP, PLAIN, "                                p_t = mul2(p_t, slope)", "                                pass"),
    "heads have one slope": (
        "none", ALIBI, SHARED, "ONE_SUM and not MASKS and slopes_ptr is None", "ONE_SUM and not MASKS"),
}  # fmt: skip
BROKEN: dict[str, tuple[Way, int, dict[str, Mutant]]] = {
    "dK and dV": (DKV, 64, OF_DKV), "dQ": (DQ, 64, OF_DQ), "wide": (WIDE_DKV, 256, OF_WIDE_DKV),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "mutant"),
    each([(name, mutant) for name, row in BROKEN.items() for mutant in row[2]]),
)
def test_a_broken_text_is_found(kernel: str, mutant: str) -> None:
    (direction, config), dim, mutants = BROKEN[kernel]
    mask, features, cases, old, new = mutants[mutant]
    assert_found(spec_of(direction, dim, mask, **features), config, (old, new), cases)
