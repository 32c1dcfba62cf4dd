"""Schedule hopper's dK/dV and dQ with features of the scores, as Triton compiles them: results, loads, mutants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen.inputs.features import Features
from flashgen.kernels.launch import bind
from flashgen.kernels.launch_backward import Backward
from flashgen.reference.cases import CheckCase
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.legality import why_illegal
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from flashgen.spec.vocabulary import Direction
from tests.executed import (
    Load,
    assert_found,
    assert_right,
    case,
    compiled,
    loads,  # noqa: F401  # a fixture
)
from tests.makers import each, make_config, make_spec

H200 = TARGETS["nvidia_h200"]


def hopper(br: int, bc: int, warps: int = 8, stages: int = 2, order: str = "plain") -> KernelConfig:
    way: dict[str, Any] = {"schedule": "hopper", "loads": "descriptor", "order": order}
    return make_config(br, bc, num_warps=warps, num_stages=stages, **way)


def spec_of(direction: Direction, dim: int, mask: str, **features: Any) -> AttentionSpec:
    return make_spec("bfloat16", dim, mask, direction=direction, **features)


DKV: tuple[Direction, KernelConfig] = ("backward_dkv", hopper(64, 128))
DKV_128: tuple[Direction, KernelConfig] = ("backward_dkv", hopper(128, 128))
WIDE_DKV: tuple[Direction, KernelConfig] = ("backward_dkv", hopper(64, 64))
DQ: tuple[Direction, KernelConfig] = ("backward_dq", hopper(128, 64))
DQ_THREE: tuple[Direction, KernelConfig] = (
    "backward_dq", hopper(192, 64, 12, 3, "longest_first")
)  # fmt: skip

MODELS: dict[str, tuple[int, str, dict[str, bool]]] = {
    "Mistral": (128, "causal", {"window": True}),
    "window on both sides": (64, "none", {"window": True}),
    "Llama 4": (128, "causal", {"chunk": True}),
    "softcap": (64, "causal", {"softcap": True}),
    "alibi": (96, "causal", {"alibi": True}),
    "alibi without a mask": (64, "none", {"alibi": True, "softcap": True}),
    "Gemma 2": (256, "causal", {"window": True, "softcap": True}),
    "wide, no mask": (192, "none", {"window": True, "alibi": True}),
    "wide, chunk": (256, "causal", {"chunk": True}),
}
VARIANTS = [(name, direction) for name in MODELS for direction in ("backward_dkv", "backward_dq")]


def config_of(direction: Direction, dim: int) -> KernelConfig:
    if direction == "backward_dq":
        return DQ[1] if dim > 96 else DQ_THREE[1]
    return WIDE_DKV[1] if dim > 128 else DKV[1] if dim > 64 else DKV_128[1]


@pytest.mark.parametrize(("name", "direction"), each(VARIANTS))
def test_every_variant_is_right(name: str, direction: Direction) -> None:
    dim, mask, features = MODELS[name]
    config = config_of(direction, dim)
    config = replace(config, order="plain") if mask == "none" else config
    assert_right(spec_of(direction, dim, mask, **features), config)


@pytest.mark.slow("two kernels")
@pytest.mark.parametrize("way", [DKV, DQ], ids=["dkv", "dq"])
def test_half_precision_and_heads_that_share_keys(way: tuple[Direction, KernelConfig]) -> None:
    direction, config = way
    spec = make_spec("float16", 64, "causal", direction=direction, window=True)
    assert_right(spec, config, [case(130, 200, heads=4, kv=2), case(70, 333, heads=3)])


ENDS = {
    "sq above sk": (300, 70),
    "one row": (1, 400),
    "one key": (200, 1),
    "nothing is seen": (200, 30),
}


@pytest.mark.parametrize(
    ("name", "way"), each([(name, way) for name in ENDS for way in (DKV, DQ, WIDE_DKV)])
)
def test_windows_at_the_ends(name: str, way: tuple[Direction, KernelConfig]) -> None:
    """Rows that see no key, before the first key and behind the last, and keys that no row sees."""
    direction, config = way
    spec = spec_of(direction, 256 if way is WIDE_DKV else 64, "none", window=True)
    assert_right(spec, config, [case(*ENDS[name])] * 7)  # a window each


def walks_of(
    found: dict[int, list[Load]], way: tuple[Direction, KernelConfig], held: int
) -> list[tuple[int, list[int]]]:
    """Run three tiles that see 61 keys a row: where each begins, and the blocks that it walks. held:
    how many blocks it loads before them.
    """
    direction, config = way
    spec = spec_of(direction, 64, "causal", window=True)
    q, k, v, do = torch.randn(4, 1, 1, 384, 64).bfloat16()
    lse, delta = torch.full((2, 1, 1, 384), 5.0)
    bind(compiled(spec, config), spec, config)(
        Backward(
            q=q, k=k, v=v, do=do, lse=lse, delta=delta, scale=0.1, diagonal=0,
            features=Features(window=(60, 0)),
        )
    )  # fmt: skip
    walks = []
    for _, copied in sorted(found.items()):
        walked = [(base, at[2]) for base, _, at in copied[held:]]
        walks.append((copied[0][2][2], [at for base, at in walked if base == walked[0][0]]))
    return walks


def test_rows_that_see_no_key_are_not_loaded(loads: dict[int, list[Load]]) -> None:  # noqa: F811
    walks = walks_of(loads, DKV, held=2)
    assert walks == [(0, [0, 64, 128]), (128, [128, 192, 256]), (256, [256, 320])]


def test_keys_that_no_row_sees_are_not_loaded(loads: dict[int, list[Load]]) -> None:  # noqa: F811
    walks = walks_of(loads, DQ, held=4)
    assert walks == [(0, [0, 64]), (128, [64, 128, 192]), (256, [192, 256, 320])]


def test_what_it_lacks_is_named() -> None:
    for features, words in (({"bias": "additive"}, "(bias)"), ({"dropout": True}, "(dropout)")):
        for direction, config in (DKV, DQ):
            reason = why_illegal(spec_of(direction, 64, "causal", **features), config, H200)
            assert reason == f"features {words} need schedule fa2: got hopper"
    fused = spec_of("backward_fused", 64, "causal", window=True)
    reason = why_illegal(fused, DKV[1], H200)
    assert reason == "features (window) need schedule fa2: got hopper"


WINDOW, BOTH = {"window": True}, {"window": True}
WINDOWS = [case(200, 330)] * 4 + [case(129, 129, "top_left")] * 3
"""Each place draws another window, or another chunk."""
PLAIN, SHARED = [case(200, 330, heads=2)], [case(130, 200, heads=4, kv=2)]
Mutant = tuple[str, dict[str, bool], list[CheckCase], str, str]
OF_DKV: dict[str, Mutant] = {
    "first keys are not hidden": (
        "causal", WINDOW, WINDOWS, "rows <= last_rows - at_row", "rows < 1 << 30"),
    "one last row too few": (
        "causal", WINDOW, WINDOWS, "rows <= last_rows - at_row", "rows < last_rows - at_row"),
    "a lane's rows are another's": ("causal", WINDOW, WINDOWS, "rows_in_tile & 6", "rows_in_tile & 2"),
    "rows end a tile early": (
        "causal", WINDOW, WINDOWS, "row_end = gl.minimum(gl.maximum(row_end, 0), seq_q)",
        "row_end = gl.minimum(gl.maximum(row_end - BR, 0), seq_q)"),
    "rows end with the first key's": (
        "causal", WINDOW, WINDOWS, "last_row_of(key_end - 1, batch", "last_row_of(key_start, batch"),
    "tiles that hide first keys have no mask": (
        "causal", WINDOW, WINDOWS, "hiding_row = gl.minimum(gl.maximum(hiding_row, full_row), row_end)",
        "hiding_row = row_end"),
    "a hiding tile too few": (
        "causal", WINDOW, WINDOWS, "hiding_row = gl.maximum(hiding_row, 0) // BR * BR",
        "hiding_row = gl.maximum(hiding_row, 0) // BR * BR + BR"),
    "the first key hides as the last does": (
        "causal", WINDOW, WINDOWS, "last_row_of(first_key, batch", "last_row_of(first_key + 63, batch"),
    "the diagonal is not counted": (
        "causal", WINDOW, WINDOWS, "last_rows = last_row_of(keys, batch, begins) - diagonal",
        "last_rows = last_row_of(keys, batch, begins)"),
    "the right side is forgotten": (
        "none", BOTH, WINDOWS, "diagonal + window_right if window_right", "diagonal if window_right"),
    "the left side by one": ("none", BOTH, WINDOWS, "keys + window_left", "keys + window_left - 1"),
    "chunks begin at 0": (
        "causal", {"chunk": True}, WINDOWS, "first_chunk = gl.load(chunk_start_ptr + batch) % chunk",
        "first_chunk = gl.load(chunk_start_ptr + batch) * 0"),
    "a chunk ends a row late": (
        "causal", {"chunk": True}, WINDOWS, "batch, begins) + (chunk - 1)", "batch, begins) + chunk"),
    "the cap's slope is 1": (
        "causal", {"softcap": True}, PLAIN, "p_t = p_t * (1.0 - capped * capped)", "p_t = p_t"),
    "a capped score is scaled again": (
        "causal", {"softcap": True}, PLAIN, "factor = 1.0 if SCALED", "factor = scale_log2e if SCALED"),
    "the cap's inverse": (
        "causal", {"softcap": True}, PLAIN, "scale_log2e * inverse_cap", "inverse_cap"),
    "the slope of another head": (
        "causal", {"alibi": True}, SHARED, "(kv_head * group + member) * stride_slopes_h",
        "(kv_head * group) * stride_slopes_h"),
    "distances count from the row": (
        "none", {"alibi": True}, PLAIN, "places -= diagonal", "places -= diagonal * 0"),
    "a key behind its row is near": (
        "none", {"alibi": True}, PLAIN, "gl.abs(places.to(gl.float32) - columns)",
        "(places.to(gl.float32) - columns)"),
}  # fmt: skip
OF_DQ: dict[str, Mutant] = {
    "first keys are not hidden": (
        "causal", WINDOW, WINDOWS, "if first_key is not None:", "if False:"),
    "one first key too many": ("causal", WINDOW, WINDOWS, ">= limits", "> limits"),
    "a tile of the window too few": (
        "causal", WINDOW, WINDOWS, "first_key_of(row_start + diagonal, batch, begins), 0) // BC",
        "first_key_of(row_start + diagonal, batch, begins) + BC - 1, 0) // BC"),
    "keys do not count from the first tile": (
        "causal", WINDOW, WINDOWS, "        last_key -= first_tile * BC\n", ""),
    "first keys do not count from it": (
        "causal", WINDOW, WINDOWS, "first_key_of(rows + diagonal, batch, begins) - first_tile * BC",
        "first_key_of(rows + diagonal, batch, begins)"),
    "the walk begins at the first key": (
        "causal", WINDOW, WINDOWS, "(first_tile + i) * BC", "i * BC"),
    "tiles that hide first keys have no mask": (
        "causal", WINDOW, WINDOWS, "hiding = gl.minimum(hiding, key_tiles)",
        "hiding = gl.minimum(hiding, key_tiles) // 1024"),
    "a hiding tile too few": (
        "causal", WINDOW, WINDOWS, "hiding = gl.cdiv(gl.maximum(unseen - first_tile * BC, 0), BC)",
        "hiding = gl.maximum(unseen - first_tile * BC, 0) // BC"),
    "the last row's first key is the first row's": (
        "causal", WINDOW, WINDOWS, "first_key_of(first_row + diagonal + 63, batch, begins)",
        "first_key_of(first_row + diagonal, batch, begins)"),
    "whole tiles count from key 0": (
        "causal", WINDOW, WINDOWS, "            full_tiles -= first_tile\n", "            pass\n"),
    "tiles that hide keys are walked twice": (
        "causal", WINDOW, WINDOWS, "        full_tiles = gl.maximum(full_tiles, hiding)\n", ""),
    "the right side is forgotten": (
        "none", BOTH, WINDOWS, "diagonal + window_right if window_right", "diagonal if window_right"),
    "chunks of another batch": (
        "causal", {"chunk": True}, [case(70, 130, batch=2)] * 4, "chunk_start_ptr + batch", "chunk_start_ptr"),
    "a chunk begins a key late": (
        "causal", {"chunk": True}, WINDOWS, "(positions - first_chunk + chunk) % chunk",
        "(positions - first_chunk + chunk) % chunk - 1"),
    "the cap's slope is 1": (
        "causal", {"softcap": True}, PLAIN, "p = p * (1.0 - capped * capped)", "p = p"),
    "a capped score is scaled again": (
        "causal", {"softcap": True}, PLAIN, "factor = 1.0 if SCALED", "factor = scale_log2e if SCALED"),
    "the slope of another head": (
        "causal", {"alibi": True}, SHARED, "+ head * stride_slopes_h", "+ (head ^ 1) * stride_slopes_h"),
    "slopes count from the row": (
        "none", {"alibi": True}, PLAIN, "positions += diagonal", "positions += 0 * diagonal"),
    "tiles lie at the first one": (
        "none", {"alibi": True}, PLAIN, "positions - i * BC", "positions"),
}  # fmt: skip
OF_WIDE_DKV: dict[str, Mutant] = {
    "first keys are not hidden": (
        "causal", WINDOW, WINDOWS, "<= last_rows - row_start", "<= last_rows + (1 << 20)"),
    "the first tile hides none": (
        "causal", WINDOW, WINDOWS, "<= last_rows - first_row", "<= last_rows + (1 << 20)"),
    "tiles that hide first keys have no mask": (
        "causal", WINDOW, WINDOWS, "| (row_start >= hiding_row)", "| (row_start > row_end)"),
    "a hiding tile too few": (
        "causal", WINDOW, WINDOWS, "| (row_start >= hiding_row)", "| (row_start > hiding_row)"),
    "rows end with the sequence": (
        "causal", WINDOW, [case(200, 330, heads=2)] * 4, "if row_start >= row_end:", "if row_start >= seq_q:"),
    "a tile too few": (
        "causal", WINDOW, WINDOWS, "gl.cdiv(gl.maximum(row_end - first_row, 0), BR)",
        "gl.maximum(row_end - first_row, 0) // BR"),
    "the cap's slope is 1": (
        "causal", {"softcap": True}, PLAIN, "            p = p * (1.0 - capped * capped)", "            p = p"),
    "the first tile's slope is 1": (
        "causal", {"softcap": True}, PLAIN, "\n        p = p * (1.0 - capped * capped)", "\n        p = p"),
    "the slope of the first head": (
        "causal", {"alibi": True}, SHARED, "slopes_ptr + member * stride_slopes_h", "slopes_ptr"),
    "both consumers have the first keys": (
        "none", {"alibi": True}, PLAIN, "(key_start + KEYS * WARPGROUP)", "key_start"),
    "distances count from the tile": (
        "none", {"alibi": True}, PLAIN, "places + row_start", "places + first_row"),
}  # fmt: skip
BROKEN = {
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
