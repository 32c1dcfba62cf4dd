"""Forwards of few blocks as an H200 launches them: attention() on what Triton compiles, executed on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen.evaluate.check import check_loaded
from flashgen.evaluate.check_attention import packed_case
from flashgen.inputs.features import PLAIN, features_of
from flashgen.ptx import FaultsFound
from flashgen.reference.attention import judge
from flashgen.runtime import Dispatcher, few_blocks, kernel_files
from flashgen.runtime.choice import Choice
from flashgen.runtime.resolver import Resolver
from flashgen.schedules.config import KernelConfig
from tests.executed import assert_found, assert_right, compiled
from tests.makers import each, make_config, make_spec
from tests.serving import serve

Texts = dict[str, tuple[str, str]]
"""What is broken of the text of a direction: old and new."""


def executing(monkeypatch: pytest.MonkeyPatch, arch: str, broken: Texts) -> Dispatcher:
    """The dispatcher of an H200 whose launches are executed, where all that may be split is worth
    it. arch: what kernels are compiled for.
    """

    def kernel(package: str, choice: Choice, config: KernelConfig) -> Any:
        assert choice.spec.direction in ("decode", "combine")
        return compiled(
            choice.spec, config, 0, *broken.get(choice.spec.direction, ("", "")), arch=arch
        )

    monkeypatch.setattr(few_blocks, "WORTH_MERGING", float("inf"))
    monkeypatch.setattr(kernel_files, "kernel", kernel)
    monkeypatch.setattr(Resolver, "left_to_torch", lambda self, device: False)
    return serve(monkeypatch)


def is_right(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], options: dict[str, Any],
    broken: Texts | None = None, arch: str = "sm_90",
) -> bool:  # fmt: skip
    """Whether O and LSE of attention() pass the float64 check. sizes: heads, heads of K, queries,
    keys, head dim.
    """
    own = executing(monkeypatch, arch, broken or {})
    heads, kv_heads, seq_q, seq_k, dim = sizes
    generator = torch.Generator().manual_seed(seq_q)
    q, k, v = (
        torch.randn(1, h, s, dim, generator=generator).bfloat16()
        for h, s in ((heads, seq_q), (kv_heads, seq_k), (kv_heads, seq_k))
    )
    o, lse = own.attention(q, k, v, return_lse=True, **options)
    given = {name: value for name, value in options.items() if name != "causal"}
    causal = options.get("causal", False)
    features = features_of(causal=causal, **given) if given else PLAIN
    diagonal = seq_k - seq_q if causal else None
    found = judge(o, lse, q, k, v, scale=dim**-0.5, diagonal=diagonal, features=features)
    return bool(found.passed)


RAGGED = (4, 2, 37, 333, 64)
CALLS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "groups": (RAGGED, {"causal": True}),
    "no mask": ((1, 1, 70, 200, 64), {}),
    "many splits": ((1, 1, 16, 1100, 64), {"causal": True}),
    "window": (RAGGED, {"causal": True, "window": (150, 0)}),
    "softcap and sinks": (RAGGED, {"softcap": 5.0, "sinks": torch.tensor([0.5, -1.0, 3.0, 9.0])}),
    "head dim 128": ((2, 2, 37, 200, 128), {"causal": True}),
}


@pytest.mark.parametrize("arch", each(["sm_90", "sm_80"], 2))
@pytest.mark.parametrize("name", each(CALLS, 9))
def test_a_split_call_is_right(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_right(monkeypatch, *CALLS[name], arch=arch)


KEYS = "tl.minimum(queries + length - seq_q, length - 1)"
MUTANTS: dict[str, tuple[str, str, str]] = {
    "the first split is lost": ("decode", "pid // row_tiles % splits", "tl.maximum(pid // row_tiles % splits, 1)"),
    "one tile of rows": ("decode", "rows = pid % row_tiles * BR + tl.arange", "rows = tl.arange"),
    "the last keys are lost": ("decode", "tiles = tl.cdiv(tl.cdiv(length, BC), splits)", "tiles = length // BC // splits"),
    "keys are taken twice": ("decode", "split_end = tl.minimum(split_start + tiles * BC, length)", "split_end = tl.minimum(split_start + tiles * BC + BC, length)"),
    "the diagonal by one": ("decode", KEYS, KEYS.replace("seq_q,", "seq_q + 1,")),
    "the diagonal of rows": ("decode", KEYS, KEYS.replace("queries", "rows")),
    "whole tiles": ("decode", "BR // group + length - seq_q + 1, 0", "BR // group + length - seq_q + BC, 0"),
    "LSE of a part": ("decode", "lse = (row_max + tl.log2(row_sum)) * LN_2", "lse = row_max * LN_2"),
    "O of one part": ("decode", "o_ptr + split.to(tl.int64) * stride_part", "o_ptr"),
    "the head of K": ("decode", "k_ptr, cache_row, k_begin, kv_head,", "k_ptr, cache_row, k_begin, 1 - kv_head,"),
    "the weight of a part": ("combine", "tl.exp2((part_lse - new_max) * LOG2_E)", "tl.exp2(part_lse - new_max)"),
    "a part is not merged": ("combine", "mask=parts < count", "mask=parts < count - 1"),
    "LSE of all": ("combine", "row_max + tl.log2(row_sum) * LN_2", "row_max"),
    "the sum of weights": ("combine", "row_sum * rescale + tl.sum(weight, 0)", "row_sum * rescale + 1.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", each(MUTANTS, 10))
def test_mutant_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    direction, *broken = MUTANTS[name]
    own = False
    try:
        own = is_right(monkeypatch, RAGGED, {"causal": True}, {direction: tuple(broken)})  # type: ignore[dict-item]
    except FaultsFound:
        return
    assert not own


PACKED = make_spec("bfloat16", 64, "causal", direction="decode", varlen=True, paged=True)
WIDE = make_config(64, 64, num_stages=3)
BATCH = [packed_case([(37, 200), (0, 90), (30, 31), (3, 0)], spare=(2, 0), heads=4, kv_heads=2)]


@pytest.mark.parametrize("paged", each([True, False], 2))
def test_packed_sequences_are_right(paged: bool) -> None:
    assert_right(replace(PACKED, paged=paged), WIDE, BATCH)


@pytest.mark.slow("a minute")
@pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
@pytest.mark.parametrize("paged", [True, False], ids=["pages", "packed keys"])
def test_all_cases_of_packed_sequences_are_right(arch: str, paged: bool) -> None:
    spec = replace(PACKED, paged=paged, window=not paged, sink=paged)
    result = check_loaded(compiled(spec, WIDE, arch=arch), spec, WIDE)
    assert result.passed, result


MUTANTS_OF_PACKED = {
    "rows of another sequence": ("else q_begin * stride_qs", "else 0 * stride_qs"),
    "O of another sequence": ("else q_begin * stride_os", "else 0 * stride_os"),
    "LSE of another sequence": ("total_q + q_begin + queries", "total_q + queries"),
    "keys of another sequence": ("length = seq_k", "length = seq_k + 1"),
    "the longest's diagonal": ("queries + length - seq_q, length - 1", "queries + length - 37, length - 1"),
    "places of no sequence": ("mask=unused < unused_end)", "mask=unused < unused_begin)"),
    "heads of places of no sequence": ("lse_ptrs += total_q", "lse_ptrs += 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", each(MUTANTS_OF_PACKED, 9))
def test_mutant_of_packed_sequences_is_found(name: str) -> None:
    assert_found(PACKED, WIDE, MUTANTS_OF_PACKED[name], BATCH)
