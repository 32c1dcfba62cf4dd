"""Kernels that serve a cache against float64 on nasty lengths, pages and groups; mutants of each."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashgen.runtime.flash_attn as flash_attn
from flashgen.errors import InvalidArgument
from flashgen.evaluate.check import cases_of
from flashgen.evaluate.check_cache import DecodeCase, judge, make_call
from flashgen.evaluate.inputs import make_decode, run_of
from flashgen.evaluate.sanitize import executed_cases
from flashgen.kernels.launch import bind
from flashgen.kernels.launch_cache import Combine, Decode, Parts
from flashgen.kernels.loader import load_kernel, load_text
from flashgen.kernels.render import render
from flashgen.reference import attention as reference
from flashgen.runtime.eager import cache as eager_cache
from flashgen.runtime.selection import rows_together
from flashgen.schedules.defaults import WIDEST_DECODE
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem
from tests.makers import make_config, make_spec
from tests.nasty_cases import nasty_decode_cases
from tests.proving import alternating, mutant_passes, prove, sampled
from tests.serving import record_directions, serve

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def decode_spec(
    dtype: str = "bfloat16", dim: int = 32, mask: str = "causal", **fields: Any
) -> AttentionSpec:
    return make_spec(dtype, dim, mask, direction="decode", **fields)


@pytest.mark.parametrize(("mask", "paged"), alternating(["none", "causal"], [False, True]))
def test_what_tuning_checks(mask: str, paged: bool, seed: int) -> None:
    prove(decode_spec(mask=mask, paged=paged), make_config(16, 16), seed)


@pytest.mark.parametrize(
    ("dtype", "precision"), [("float16", "ieee"), ("float32", "ieee"), ("float32", "tf32")]
)
def test_dtypes(dtype: str, precision: Any, seed: int) -> None:
    prove(decode_spec(dtype, 16, precision=precision, paged=True), make_config(16, 16), seed)


@pytest.mark.slow("make test proves a sample of it")
@pytest.mark.parametrize("paged", [False, True])
def test_nasty_lengths_groups_and_pages(paged: bool, seed: int) -> None:
    spec, config = decode_spec(dim=16, paged=paged), make_config(16, 16)
    prove(spec, config, seed, list(nasty_decode_cases(spec, config)))


@pytest.mark.parametrize(
    ("dims", "paged"), [((40, 40), False), ((40, 24), True), ((16, 72), False)], ids=str
)
def test_head_dims(dims: tuple[int, int], paged: bool, seed: int) -> None:
    prove(decode_spec(dim=dims[0], head_dim_v=dims[1], paged=paged), make_config(16, 16), seed)


def test_one_whose_combine_kernel_starts_early(seed: int) -> None:
    """Triton's interpreter runs one kernel after another."""
    prove(decode_spec(dim=16), make_config(16, 16, pdl=True), seed)


@pytest.mark.parametrize("split_keys", [256, 512])
def test_a_split_takes_as_many_keys_as_its_config_says(split_keys: int, seed: int) -> None:
    """Of 300 keys in 3 splits: 256 and 44, or 300, and the others see none."""
    case = DecodeCase(lengths=(300, 256, 31), capacity=600, splits=3)
    prove(decode_spec(dim=16), make_config(16, 64, split_keys=split_keys), seed, [case])


@pytest.mark.parametrize(("dtype", "dim"), [("float16", 64), ("bfloat16", 40), ("float32", 16)])
def test_combine_merges_any_number_of_parts(dtype: str, dim: int, seed: int) -> None:
    spec = make_spec(dtype, dim, direction="combine")
    prove(spec, make_config(16, 16, num_stages=1), seed)


lengths = st.lists(st.integers(0, 70), min_size=1, max_size=3)


@settings(max_examples=10)
@given(
    lengths=lengths, seq_q=st.integers(1, 6), kv_heads=st.integers(1, 2), group=st.integers(1, 8),
    splits=st.integers(1, 5), page_bits=st.integers(0, 6), layout=st.sampled_from(["bhsd", "bshd", "sliced"]),
    shared=st.booleans(), mask=st.sampled_from(["none", "causal"]), paged=st.booleans(), drawn=st.integers(0, 1 << 30),
)  # fmt: skip
def test_drawn_calls(
    lengths: list[int], seq_q: int, kv_heads: int, group: int, splits: int, page_bits: int,
    layout: str, shared: bool, mask: str, paged: bool, drawn: int,
) -> None:  # fmt: skip
    case = DecodeCase(
        lengths=tuple(lengths), capacity=70, seq_q=seq_q, kv_heads=kv_heads, group=group,
        splits=splits, page_size=1 << page_bits, layout=layout, shared=shared,
    )  # fmt: skip
    prove(decode_spec("float16", 16, mask, paged=paged), make_config(16, 16), drawn, [case])


@pytest.mark.parametrize(
    ("rotary", "paged"), alternating(["none", "halves", "interleaved"], [False, True])
)
def test_append_writes_and_rotates(rotary: Any, paged: bool, seed: int) -> None:
    dtype = "float32" if paged else "bfloat16"
    fields = {"head_dim_v": 24, "direction": "append", "paged": paged, "rotary": rotary}
    prove(make_spec(dtype, 40, **fields), make_config(16, 16, num_stages=1), seed)


PAGED, CONTIGUOUS, FULL = decode_spec(paged=True), decode_spec(), decode_spec(mask="none")
COMBINE = make_spec("bfloat16", 32, direction="combine")
APPEND = make_spec("bfloat16", 32, direction="append", paged=True, rotary="halves")
PAIRS = make_spec("bfloat16", 32, direction="append", rotary="interleaved")
MUTANTS = {
    "page index not applied": (PAGED, "(pages * stride_kb +", "((start + keys) // 16 * stride_kb +"),
    "page of V not applied": (PAGED, "(pages * stride_vb +", "(pages * 0 +"),
    "slot not applied": (PAGED, "& page_mask", "& 0"),
    "table of the first sequence": (PAGED, "table_ptr + batch.to(tl.int64) * stride_table", "table_ptr"),
    "last partial split dropped": (CONTIGUOUS, "split_start + tiles * BC, length)", "split_start + tiles * BC, length // BC * BC)"),
    "splits rounded down": (FULL, "tl.cdiv(tl.cdiv(length, BC), splits)", "tl.cdiv(length, BC) // splits"),
    "causal offset of the first query": (CONTIGUOUS, "queries + length - seq_q, length - 1)", "queries, length - 1)"),
    "causal offset by one": (CONTIGUOUS, "queries + length - seq_q, length - 1)", "queries + length - seq_q + 1, length - 1)"),
    "causal mask of heads": (CONTIGUOUS, "queries + length - seq_q, length - 1)", "rows + length - seq_q, length - 1)"),
    "unmasked beyond the diagonal": (CONTIGUOUS, "length - seq_q + 1, 0)", "length - seq_q + BC, 0)"),
    "length of the first sequence": (FULL, "tl.load(lengths_ptr + batch)", "tl.load(lengths_ptr)"),
    "beyond the length": (FULL, "tl.minimum(tl.maximum(tl.load(lengths_ptr + batch), 0), seq_k)", "seq_k"),
    "GQA head": (FULL, "heads_of = kv_head * group + rows % group", "heads_of = kv_head + rows % group"),
    "rows of another query": (CONTIGUOUS, "queries = rows // group", "queries = rows % seq_q"),
    "part of another split": (FULL, "split.to(tl.int64) * stride_part", "0 * stride_part"),
    "LSE of another split": (FULL, "split.to(tl.int64) * stride_lse", "0 * stride_lse"),
    "merged without LSE": (COMBINE, "weight = tl.exp2((part_lse - new_max) * LOG2_E)", "weight = tl.where(part_lse > float('-inf'), 1.0, 0.0)"),
    "last parts dropped": (COMBINE, "tl.range(0, count, BC)", "tl.range(0, count - 1, BC)"),
    "empty parts read": (COMBINE, "seen = (part_lse > float(\"-inf\"))[:, None]", "seen = (parts < count)[:, None]"),
    "O not rescaled": (COMBINE, "acc = acc * rescale + ", "acc = acc + "),
    "appended to the first page": (APPEND, "places >> page_bits", "0 * places"),
    "appended in front": (APPEND, "places = length + rows", "places = rows"),
    "beyond the capacity": (PAIRS, "(places < seq_k)", "(places < seq_k - 1)"),
    "turned backwards": (APPEND, "tl.where(dims < half, -1.0, 1.0)", "tl.where(dims < half, 1.0, -1.0)"),
    "pairs of halves": (PAIRS, "partners = dims ^ 1", "partners = (dims + rotary_dim // 2) % rotary_dim"),
    "queries turned by one place": (APPEND, "length + rows * q_step", "length + rows * 0"),
    "queries not turned": (PAIRS, "q = load_rotated(q_rows, q_mask, at, dims, turned, pairs, table)", "q = tl.load(q_rows + dims[None, :], mask=q_mask, other=0.0).to(tl.float32)"),
    "V of another head": (APPEND, "slot * stride_vh", "0 * stride_vh"),
    "LSE without the maximum": (COMBINE, "row_max + tl.log2(row_sum)", "tl.log2(row_sum)"),
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(MUTANTS))
def test_mutant_is_caught(name: str) -> None:
    spec, line, broken = MUTANTS[name]
    config = make_config(16, 16, num_stages=2 if spec.direction == "decode" else 1)
    for cases in (cases_of, executed_cases):
        assert not mutant_passes(spec, config, line, broken, cases(spec, config))


# The dispatcher: both kernels together, chosen and launched as on a GPU


def call_of(case: DecodeCase, *, paged: bool, dtype: str = "float16") -> tuple[Any, ...]:
    """The arguments of decode() for a case, in its public layouts; and the spec."""
    spec = make_spec(dtype, 16, "causal", direction="decode", paged=paged)
    q, cache = make_call(spec, case, 3, "cpu")
    k, v = (x.transpose(1, 2) if paged else x for x in (cache.k, cache.v))
    return spec, cache, q, k, v, {"lengths": cache.lengths, "block_table": cache.block_table}


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(("capacity", "seq_q"), alternating([16, 512], [1, 5]))
def test_decode_of_the_dispatcher(
    monkeypatch: pytest.MonkeyPatch, paged: bool, seq_q: int, capacity: int
) -> None:
    """Of a tile of keys there is one split, and nothing to combine; of eight, an H200 gets eight."""
    sizes = (0, 1, capacity - 1, capacity)
    case = DecodeCase(lengths=sizes, capacity=capacity, seq_q=seq_q, kv_heads=2, group=4)
    spec, cache, q, k, v, beside = call_of(case, paged=paged)
    launched = record_directions(monkeypatch)
    dispatcher = serve(monkeypatch)
    o, lse = dispatcher.decode(q, k, v, **beside, return_lse=True)
    verdict = judge(o, lse, Decode(q=q, cache=cache, scale=0.25, sms=132), spec)
    assert verdict.passed, verdict
    assert launched == (["decode"] if capacity == 16 else ["decode", "combine"])


def test_rows_of_a_default_fit_one_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """K and V are read once for all heads and queries that share them: there are two defaults, of
    16 rows and of 64.
    """
    dispatcher = serve(monkeypatch)
    for group, seq_q, fits in ((1, 1, 16), (8, 2, 16), (8, 3, 32), (8, 5, 64), (8, 16, 64)):
        br = 64 if fits == 32 else fits
        case = DecodeCase(lengths=(40,), capacity=40, seq_q=seq_q, group=group)
        _, _, q, k, v, beside = call_of(case, paged=False)
        said = dispatcher.explain_decode(q, k, v, **beside)
        assert said.selection is not None
        assert fits == rows_together(group * seq_q)
        assert said.selection.choice.config.br == br
        assert f"br{br}_" in said.selection.choice.kernel
        assert dispatcher.decode(q, k, v, **beside).isfinite().all()
    assert br == WIDEST_DECODE


def test_lengths_change_between_two_calls_of_one_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a replayed CUDA graph does: the same launch, other values in lengths and block_table."""
    dispatcher = serve(monkeypatch)
    case = DecodeCase(lengths=(300, 300), capacity=300, kv_heads=1)
    _, cache, q, k, v, beside = call_of(case, paged=True)
    for values in ((300, 1), (0, 299), (17, 64)):
        beside["lengths"].copy_(torch.tensor(values, dtype=torch.int32))
        beside["block_table"].copy_(beside["block_table"].flip(0))
        o = dispatcher.decode(q, k, v, **beside)
        expected, _ = eager_cache.cached_attention(q, cache, scale=0.25, causal=True)
        torch.testing.assert_close(o, expected, rtol=2e-3, atol=2e-3)


def test_sizes_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = serve(monkeypatch)
    k = torch.randn(2, 1, 0, 16)
    o, lse = dispatcher.decode(torch.randn(2, 2, 1, 16), k, k, return_lse=True)
    assert o.eq(0).all()
    assert lse.eq(float("-inf")).all()
    k = torch.randn(0, 1, 8, 16)
    assert dispatcher.decode(torch.randn(0, 2, 1, 16), k, k).shape == (0, 2, 1, 16)


@pytest.mark.parametrize("paged", [False, True])
def test_flash_attn_with_kvcache_by_kernels(monkeypatch: pytest.MonkeyPatch, paged: bool) -> None:
    """Append, rotation, split and combine in one call, as torch does it without the kernels."""
    case = DecodeCase(lengths=(0, 5, 97, 300), capacity=320, seq_q=3, kv_heads=2, group=2)
    _, cache, q, _, _, _ = call_of(case, paged=paged)
    cache = dataclasses.replace(cache, k=cache.k.nan_to_num(), v=cache.v.nan_to_num())
    angles = torch.arange(320)[:, None] / torch.tensor([1.0, 7.0, 50.0, 300.0])
    new = torch.randn(2, 4, 3, 2, 16, generator=torch.Generator().manual_seed(1)).half()
    calls = []
    for interpreted in (True, False):
        if interpreted:
            launched = record_directions(monkeypatch)
            serve(monkeypatch)
        else:
            monkeypatch.delenv("FLASHGEN_GPU")
        k, v = (x.clone().transpose(1, 2) for x in (cache.k, cache.v))
        o = flash_attn.flash_attn_with_kvcache(
            q.transpose(1, 2), k, v, *new, angles.cos(), angles.sin(),
            cache_seqlens=cache.lengths, block_table=cache.block_table, causal=True, num_splits=3,
        )  # fmt: skip
        calls.append((o, k, v))
    for by_kernels, by_torch in zip(*calls, strict=True):
        torch.testing.assert_close(by_kernels, by_torch, rtol=2e-3, atol=2e-3)
    assert launched == ["append", "decode", "combine"]


@pytest.mark.parametrize("paged", [False, True])
def test_what_is_timed_is_a_whole_decode(tmp_path: Path, paged: bool) -> None:
    """Split and combine kernel of the tuner's own inputs; and no direction is timed by halves."""
    problem = Problem(batch=2, heads=4, kv_heads=2, seq_q=1, seq_k=70)
    spec, config = decode_spec("float16", 16, "none", paged=paged), make_config(16, 16)
    call = make_decode(spec, problem, 0, "cpu", sms=20)
    expected, _ = eager_cache.cached_attention(call.q, call.cache, scale=call.scale, causal=False)
    rendered = render(spec, config)
    path = tmp_path / f"{rendered.name}.py"
    path.write_text(rendered.source)
    kernel = load_kernel(path, rendered.text_name, rendered.name)
    o, _ = run_of(kernel, spec, config, call, tmp_path)()  # type: ignore[misc]
    torch.testing.assert_close(o, expected, rtol=2e-3, atol=2e-3)
    assert len(list(tmp_path.glob("combine_*.py"))) == 1
    with pytest.raises(InvalidArgument, match="direction must be decode to be timed"):
        run_of(kernel, spec.for_direction("combine"), config, call, tmp_path)


def test_a_launch_has_splits_for_as_many_blocks_as_its_config_says() -> None:
    """One text serves them all. 70 keys are 5 tiles of 16; two sequences have 4 heads of K and V."""
    spec, config = decode_spec("float16", 16, "none"), make_config(16, 16)
    problem = Problem(batch=2, heads=4, kv_heads=2, seq_q=1, seq_k=70)
    call = make_decode(spec, problem, 0, "cpu", sms=4)
    kernel = load_text(render(spec, config))
    for blocks, splits in ((1, 1), (2, 2), (5, 5)):
        filled = dataclasses.replace(config, blocks_per_sm=blocks)
        parts = bind(kernel, spec, filled)(call)
        assert parts.splits == splits


@pytest.mark.parametrize("stride", [16, 1 << 30])
def test_parts_may_lie_beyond_32_bits(stride: int, tmp_path: Path) -> None:
    """Of four parts of one row, which take 12 GB of a file that is all hole, the last is beyond 2^31 elements."""
    spec, config = make_spec("float16", 16, direction="combine"), make_config(16, 16, num_stages=1)
    path = tmp_path / "parts"
    held = torch.from_file(str(path), shared=True, size=3 * stride + 16, dtype=torch.float32)
    o = held.as_strided((4, 1, 1, 1, 16), (stride, 16, 16, 16, 1))
    o.copy_(torch.randn(o.shape, generator=torch.Generator().manual_seed(1)))
    lse = torch.tensor([0.5, -1.0, 0.0, 1.0]).view(4, 1, 1, 1)
    rendered = render(spec, config)
    run = bind(load_text(rendered), spec, config)
    found, of_all = run(Combine(parts=Parts(o=o, lse=lse), q=torch.zeros(1, 1, 1, 16).half()))
    expected, total = reference.merge(o.double(), lse.double())
    torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(of_all.double(), total)
