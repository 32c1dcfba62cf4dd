"""Packed sequences of several lengths: each kernel on ragged batches, the public call beside slices,
what is read and written, FlashAttention's edge rules, and mutants."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashgen.errors import InvalidArgument
from flashgen.evaluate.check import check_kernel
from flashgen.evaluate.check_attention import packed_case
from flashgen.inputs.features import Features
from flashgen.inputs.packed import from_bounds
from flashgen.kernels.launch import bind
from flashgen.kernels.launch_forward import Forward
from flashgen.kernels.loader import load_kernel
from flashgen.kernels.render import render
from flashgen.reference import cases as reference_cases
from flashgen.runtime import Dispatcher
from flashgen.runtime.eager import attention as eager
from flashgen.runtime.varlen import attention_varlen
from flashgen.schedules.defaults import default_config, default_spec
from flashgen.spec.attention import AttentionSpec
from tests.makers import make_config, make_spec
from tests.proving import alternating, mutant_passes, prove, sampled
from tests.serving import leaves, record_directions

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DIRECTIONS = ("forward", "backward_dkv", "backward_dq")
FORWARD, DKV, DQ = DIRECTIONS
BESIDE: dict[str, dict[str, Any]] = {
    "window": {"window": True},
    "cap and sink": {"softcap": True, "sink": True},
    "slopes": {"alibi": True},
    "dropout": {"dropout": True},
    "window, cap, slopes, dropout": {
        "window": True, "softcap": True, "alibi": True, "dropout": True,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("direction", "mask"), alternating([*DIRECTIONS, "backward_fused"], ["none", "causal"])
)
def test_alone(direction: Any, mask: str, seed: int) -> None:
    spec = make_spec("bfloat16", 40, mask, head_dim_v=24, varlen=True).for_direction(direction)
    prove(spec, make_config(32, 16), seed)


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_the_next_scores_first(mask: str, seed: int) -> None:
    """Empty sequences too, of which this schedule has a last tile all the same."""
    spec = make_spec("float16", 32, mask, varlen=True)
    prove(spec, make_config(32, 16, schedule="s_ahead"), seed)


@pytest.mark.parametrize(("direction", "dtype"), alternating(DIRECTIONS, ["float32", "tf32"]))
def test_longest_first_and_any_dim(direction: Any, dtype: str, seed: int) -> None:
    precision: dict[str, Any] = {"precision": "tf32"} if dtype == "tf32" else {}
    asked = make_spec("float32", 16, "causal", varlen=True, **precision).for_direction(direction)
    order = "plain" if direction == DKV else "longest_first"
    config = dataclasses.replace(default_config(asked), br=32, bc=32, order=order)
    prove(default_spec(asked), config, seed)


@pytest.mark.parametrize(
    ("beside", "direction"),
    [
        # One direction of each in turn, the others where there is time.
        pytest.param(
            beside,
            d,
            marks=() if (n + m) % 3 == 0 else pytest.mark.slow("make test proves a sample of it"),
        )
        for n, beside in enumerate(BESIDE)
        for m, d in enumerate(DIRECTIONS)
    ],
)
@pytest.mark.parametrize(
    "mask",
    [pytest.param("none", marks=pytest.mark.slow("make test proves a sample of it")), "causal"],
)
def test_beside_other_features(beside: str, direction: Any, mask: str, seed: int) -> None:
    spec = make_spec("float16", 16, mask, varlen=True, **BESIDE[beside])
    prove(spec.for_direction(direction), make_config(16, 32), seed)


@pytest.mark.parametrize(("mask", "page_size"), alternating(["none", "causal"], [1, 16, 64]))
def test_keys_in_pages(mask: str, page_size: int, seed: int) -> None:
    """Pages in any order, NaN wherever there is no key."""
    features: dict[str, Any] = {"window": True, "alibi": True} if page_size == 16 else {}
    spec = make_spec("bfloat16", 40, mask, head_dim_v=24, varlen=True, paged=True, **features)
    config = make_config(16, 32)
    case = packed_case(
        [(21, 71), (0, 3), (3, 0), (1, 16), (40, 33)], heads=4, kv_heads=2, page_size=page_size
    )
    prove(spec, config, seed, [case])


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_windows_over_pages_are_as_wide_as_asked(mask: str, seed: int) -> None:
    """Every window of the reference on few queries and many keys: neither the queries nor a page
    bound them.
    """
    spec = make_spec("float16", 16, mask, varlen=True, paged=True, window=True)
    config = make_config(16, 32)
    case = packed_case([(3, 200), (1, 90)], heads=2, page_size=16)
    rendered = render(spec, config)
    for number in range(len(reference_cases.windows(case.longest))):
        result = check_kernel(rendered, spec, config, seed=seed + number, cases=[case])
        assert result.passed, str(result)


LENGTHS = st.lists(
    st.tuples(*[st.sampled_from([0, 1, 2, 15, 16, 17, 31, 32, 33, 47])] * 2), min_size=1, max_size=5
)


@settings(max_examples=12)
@given(
    lengths=LENGTHS,
    spare=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    tail=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    index=st.sampled_from(["int32", "int64"]),
    group=st.sampled_from([1, 2]),
    mask=st.sampled_from(["none", "causal"]),
    alignment=st.sampled_from(["bottom_right", "top_left"]),
    direction=st.sampled_from(DIRECTIONS),
    number=st.integers(0, 1 << 20),
)
def test_any_lengths(
    lengths: list[tuple[int, int]], spare: Any, tail: Any, index: str, group: int, mask: str,
    alignment: str, direction: Any, number: int,
) -> None:  # fmt: skip
    case = packed_case(
        lengths, heads=2, kv_heads=2 // group, spare=spare, tail=tail, index=index,
        alignment=alignment,
    )  # fmt: skip
    spec = make_spec("float32", 16, mask, varlen=True).for_direction(direction)
    prove(spec, make_config(16, 16), number, [case])


def of(direction: Any, mask: str, **features: Any) -> AttentionSpec:
    return make_spec("float16", 16, mask, varlen=True, **features).for_direction(direction)


MUTANTS: dict[str, tuple[AttentionSpec, str, str]] = {
    "offset of Q not applied": (of(FORWARD, "none"), "base_of(q_ptr, batch, q_begin,", "base_of(q_ptr, batch, 0 * q_begin,"),
    "offset of K not applied": (of(FORWARD, "none"), "base_of(k_ptr, batch, k_begin,", "base_of(k_ptr, batch, q_begin,"),
    "offset of O not applied": (of(FORWARD, "none"), "base_of(o_ptr, batch, q_begin,", "base_of(o_ptr, batch, 0 * q_begin,"),
    "rows of LSE of another sequence": (of(FORWARD, "none"), "lse_ptr + head_rows + rows", "lse_ptr + head_rows - q_begin + rows"),
    "lengths of the next": (of(FORWARD, "none"), "sequence_of(batch, k_begins_ptr, k_ends_ptr,", "sequence_of(batch, k_begins_ptr, k_ends_ptr - batch,"),
    "room taken for use": (of(FORWARD, "none"), "k_begins_ptr, k_ends_ptr, total_k", "k_begins_ptr, k_begins_ptr + 1, total_k"),
    "rows of the room": (of(FORWARD, "none"), "q_begins_ptr, q_ends_ptr, total_q", "q_begins_ptr, q_begins_ptr + 1, total_q"),
    "early return a tile early": (of(FORWARD, "none"), "if row_start >= seq_q:", "if row_start + BR >= seq_q:"),
    "grid of the totals": (of(FORWARD, "none"), "tiles = tl.cdiv(seq_q, BR)", "tiles = tl.cdiv(total_q, BR)"),
    "diagonal of the longest": (of(FORWARD, "causal"), "bottom_right * (seq_k - seq_q)", "bottom_right * (seq_k - tiles * BR)"),
    "diagonal at the wrong end": (of(DQ, "causal"), "bottom_right * (seq_k", "(1 - bottom_right) * (seq_k"),
    "unused places left": (of(FORWARD, "none"), "seq_q + row_start, unused_end, tiles", "seq_q + row_start, 0 * unused_end, tiles"),
    "unused places but the tail": (of(FORWARD, "none"), "batch == sequences - 1, total,", "batch == sequences, total,"),
    "unused places of one tile": (of(DKV, "none"), "unused_end, tiles * BC)", "unused_end, total_k)"),
    "unused places have a gradient": (of(DQ, "none"), "seq_q + row_start, unused_end, tiles", "seq_q + row_start, 0 * unused_end, tiles"),
    "unused keys have a gradient": (of(DKV, "none"), "batch == sequences - 1, total,", "batch == sequences, total,"),
    "keys of another sequence": (of(DKV, "none"), "base_of(dk_ptr, batch, k_begin,", "base_of(dk_ptr, batch, q_begin,"),
    "delta of another sequence": (of(DKV, "none"), "delta_base = lse_ptr + head_rows, delta_ptr + head_rows", "delta_base = lse_ptr + head_rows, delta_ptr + head_rows - q_begin"),
    "dQ of another sequence": (of("backward_fused", "none"), "dq_ptr + head_rows *", "dq_ptr + (head_rows - q_begin) *"),
    "slopes of the first": (of(FORWARD, "none", alibi=True), "slopes_ptr + batch *", "slopes_ptr + 0 *"),
    "draws of the first": (of(FORWARD, "none", dropout=True), "* total_k + k_begin", "* total_k"),
    "draws of every sequence": (of(DKV, "none", dropout=True), "element_rows = head_rows + row_start", "element_rows = head_rows - q_begin + row_start"),
    "page of another sequence": (of(FORWARD, "none", paged=True), "batch.to(tl.int64) * stride_table", "0 * stride_table"),
    "page index not applied": (of(FORWARD, "none", paged=True), "(pages * stride_kb +", "(0 * pages * stride_kb +"),
    "page of V not applied": (of(FORWARD, "none", paged=True), "(pages * stride_vb +", "(0 * pages * stride_vb +"),
    "slots not applied": (of(FORWARD, "none", paged=True), "slots = ((start + keys) & page_mask)", "slots = (0 * keys)"),
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(MUTANTS))
def test_mutant_is_caught(name: str) -> None:
    spec, line, broken = MUTANTS[name]
    # An odd seed: slopes of their own for each sequence.
    assert not mutant_passes(spec, make_config(16, 16), line, broken, seed=1)


def cumulative(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def by_slices(
    q: Tensor, k: Tensor, v: Tensor, of_q: list[int], of_k: list[int], **options: Any
) -> tuple[Tensor, Tensor]:
    """O and LSE in float64, sequence by sequence; `options` are the reference's, slopes by
    sequence."""
    features: Features = options.pop("features", Features())
    causal = options.pop("causal", False)
    o, lse, row, key = [], [], 0, 0
    for number, (rows, keys) in enumerate(zip(of_q, of_k, strict=True)):
        slopes = features.slopes
        own = dataclasses.replace(features, slopes=None if slopes is None else slopes[number])
        heads_first = (
            x.double().transpose(0, 1)[None]
            for x in (q[row : row + rows], k[key : key + keys], v[key : key + keys])
        )
        found = eager.attention(
            *heads_first, diagonal=keys - rows if causal else None, features=own, **options
        )
        o.append(found[0][0].transpose(0, 1))
        lse.append(found[1][0])
        row, key = row + rows, key + keys
    return torch.cat(o), torch.cat(lse, 1)


@pytest.mark.parametrize(("causal", "index"), [(False, torch.int64), (True, torch.int32)])
def test_the_public_call_is_each_sequence_alone(
    dispatcher: Dispatcher, causal: bool, index: torch.dtype
) -> None:
    """Forward and gradients, of sinks too, beside torch's own autograd over slices."""
    torch.manual_seed(3)
    of_q, of_k = [20, 0, 7, 3, 0, 33], [9, 5, 0, 20, 0, 33]
    q, k, v, sinks = leaves(
        torch.randn(63, 4, 16), torch.randn(67, 2, 16), torch.randn(67, 2, 24), torch.randn(4)
    )
    slopes = torch.rand(6, 4)
    o, lse = attention_varlen(
        q, k, v, cumulative(of_q, index), cumulative(of_k, index), 33, 33, causal=causal,
        scale=0.25, window=(9, 4), softcap=2.0, alibi_slopes=slopes, sinks=sinks, return_lse=True,
    )  # fmt: skip
    x = [t.detach().double().requires_grad_() for t in (q, k, v, sinks)]
    features = Features(window=(9, 4), softcap=2.0, sinks=x[3], slopes=slopes)
    exact, exact_lse = by_slices(
        *x[:3], of_q, of_k, causal=causal, scale=0.25, features=features
    )  # fmt: skip
    torch.testing.assert_close(o, exact.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, exact_lse.float(), rtol=1e-5, atol=1e-5)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    found = torch.autograd.grad((o, lse), (q, k, v, sinks), (do, dlse))
    wanted = torch.autograd.grad((exact, exact_lse), x, (do.double(), dlse.double()))
    for grad, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(grad, want.float(), rtol=1e-4, atol=1e-5)


def test_kernels_of_packed_sequences_run(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    directions = record_directions(monkeypatch)
    q, k, v = leaves(*torch.randn(3, 20, 2, 16).unbind())
    bounds = cumulative([12, 8])
    o = attention_varlen(q, k, v, bounds, bounds, 12, 12, causal=True)
    o.sum().backward()  # type: ignore[no-untyped-call]
    assert directions == ["forward", "backward_delta", "backward_dkv", "backward_dq"]


def test_what_no_sequence_uses_is_neither_read_nor_left(dispatcher: Dispatcher) -> None:
    """NaN in all places of no sequence: O, LSE and gradients there are 0, elsewhere as without."""
    torch.manual_seed(5)
    places, dims = 50, 16
    cu = torch.tensor([0, 20, 40], dtype=torch.int32)
    used = torch.tensor([11, 20], dtype=torch.int32)
    spare = torch.ones(places, dtype=torch.bool)
    spare[:11] = spare[20:40] = False
    whole = torch.randn(3, places, 2, dims)
    holed = whole.masked_fill(spare[:, None, None], float("nan"))
    q, k, v = leaves(*holed.unbind())
    o, lse = attention_varlen(
        q, k, v, cu, cu, 20, 20, seqused_q=used, seqused_k=used, causal=True, return_lse=True
    )
    assert (o[spare] == 0).all()
    assert (lse[:, spare] == float("-inf")).all()
    do = torch.randn_like(o).masked_fill(spare[:, None, None], float("nan"))
    gradients = torch.autograd.grad(o, (q, k, v), do)
    dense = [x[~spare] for x in whole.unbind()]
    want = leaves(*dense)
    bounds = torch.tensor([0, 11, 31], dtype=torch.int32)
    again = attention_varlen(*want, bounds, bounds, 20, 20, causal=True)
    assert torch.equal(o[~spare], again)
    for found, expected in zip(
        gradients, torch.autograd.grad(again, want, do[~spare]), strict=True
    ):
        assert (found[spare] == 0).all()
        assert torch.equal(found[~spare], expected)


def test_seqused_is_clamped_to_its_room(dispatcher: Dispatcher) -> None:
    q, k, v = torch.randn(3, 20, 2, 16).unbind()
    cu = cumulative([12, 8])
    used = torch.tensor([100, -5])
    o = attention_varlen(q, k, v, cu, cu, 12, 12, seqused_q=used, seqused_k=used)
    want = attention_varlen(q, k, v, cumulative([12, 0]), cumulative([12, 0]), 12, 12)
    assert torch.equal(o, want)


def test_bounds_behind_the_tensors_end_with_them(dispatcher: Dispatcher) -> None:
    """Nobody reads bounds before a kernel does: of 21 queries that they name there are 20."""
    q, k, v = torch.randn(3, 20, 1, 16).unbind()
    cu = cumulative([20])
    o = attention_varlen(q, k, v, cumulative([21]), cu, 21, 20, causal=True)
    assert torch.equal(o, attention_varlen(q, k, v, cu, cu, 20, 20, causal=True))


def test_the_same_seed_drops_the_same_whatever_the_longest_length(dispatcher: Dispatcher) -> None:
    q, k, v = torch.randn(3, 40, 2, 16).unbind()
    cu = cumulative([9, 31])
    results = []
    for longest in (31, 64):
        torch.manual_seed(9)
        results.append(attention_varlen(q, k, v, cu, cu, longest, longest, dropout_p=0.5))
    assert torch.equal(*results)
    torch.manual_seed(10)
    assert not torch.equal(results[0], attention_varlen(q, k, v, cu, cu, 31, 31, dropout_p=0.5))


def test_sequences_do_not_share_their_draws(dispatcher: Dispatcher) -> None:
    """Two equal sequences under dropout differ, as two of a batch do."""
    x = torch.randn(1, 24, 2, 16).expand(2, 24, 2, 16).reshape(48, 2, 16)
    cu = cumulative([24, 24])
    torch.manual_seed(1)
    o = attention_varlen(x, x, x, cu, cu, 24, 24, dropout_p=0.5)
    assert not torch.equal(o[:24], o[24:])


@pytest.mark.parametrize("count", [0, 1])
def test_no_sequence_and_no_key(dispatcher: Dispatcher, count: int) -> None:
    """All places are of none, or those of a sequence without keys; LSE is that of no key."""
    q, k = leaves(torch.randn(6, 2, 16), torch.randn(0, 2, 16))
    cu_q = torch.tensor([0, 6][: count + 1], dtype=torch.int32)
    cu_k = torch.tensor([0, 0][: count + 1], dtype=torch.int32)
    sinks = torch.tensor([0.5, 1.5]) if count else None
    o, lse = attention_varlen(q, k, k, cu_q, cu_k, 6, 0, sinks=sinks, return_lse=True)
    assert (o == 0).all()
    if sinks is None:
        assert (lse == float("-inf")).all()
    else:
        assert torch.equal(lse, sinks[:, None].expand(2, 6))
    dq, dk = torch.autograd.grad(o.sum(), (q, k))
    assert (dq == 0).all()
    assert dk.shape == (0, 2, 16)


def test_bounds_are_read_when_the_kernel_runs(dispatcher: Dispatcher, tmp_path: Path) -> None:
    """What a replayed CUDA graph relies on: the same launch, other values in the same tensors."""
    q, k, v = (x.transpose(0, 1)[None] for x in torch.randn(3, 30, 2, 16).unbind())
    spec, config = make_spec("float32", 16, varlen=True), make_config(16, 16)
    rendered = render(spec, config)
    path = tmp_path / f"{rendered.name}.py"
    path.write_text(rendered.source)
    run = bind(load_kernel(path, rendered.text_name, rendered.name), spec, config)
    cu = cumulative([10, 20])
    features = Features(sequences=from_bounds(cu, cu, 30, 30))
    call = Forward(q=q, k=k, v=v, scale=0.25, diagonal=None, features=features)
    run(call)
    cu.copy_(cumulative([25, 5]))
    o, _ = run(call)
    x = (t[0].transpose(0, 1) for t in (q, k, v))
    want, _ = by_slices(*x, [25, 5], [25, 5], scale=0.25)
    torch.testing.assert_close(o[0].transpose(0, 1).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("paged", [False, True])
def test_steps_of_other_lengths_are_one_kept_call(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch, paged: bool
) -> None:
    """As a serving program packs them: other places, sequences and longest lengths at each step."""
    monkeypatch.setattr("flashgen.runtime.folders.current", lambda: dispatcher)
    resolved, serve = [], dispatcher.general.serve_eager
    monkeypatch.setattr(
        dispatcher.general, "serve_eager", lambda *a, **o: (resolved.append(a), serve(*a, **o))[1]
    )
    slopes = torch.tensor([0.5, 0.25])
    for lengths in ([5, 9], [12], [1, 1, 30], [0, 7, 3, 3], [40, 2]):
        q, k, v = torch.randn(3, sum(lengths), 2, 16).unbind()
        cu, longest = cumulative(lengths), max(lengths)
        pages: dict[str, Any] = {}
        keys = k, v
        if paged:
            table = torch.randperm(3 * len(lengths)).int().view(-1, 3)
            keys = torch.zeros(2, 15, 16, 2, 16).unbind()
            for number, (at, length) in enumerate(zip(cu.tolist(), lengths, strict=False)):
                for pool, x in zip(keys, (k, v), strict=True):
                    rows = torch.zeros(48, 2, 16)
                    rows[:length] = x[at : at + length]
                    pool[table[number].long()] = rows.view(3, 16, 2, 16)
            pages = {"block_table": table, "seqused_k": torch.tensor(lengths, dtype=torch.int32)}
        own = slopes.repeat(len(lengths), 1)
        o = attention_varlen(
            q, *keys, cu, None if paged else cu, longest, longest, causal=True, scale=0.25,
            alibi_slopes=own, **pages,
        )  # fmt: skip
        features = Features(slopes=own)
        want, _ = by_slices(q, k, v, lengths, lengths, causal=True, scale=0.25, features=features)
        torch.testing.assert_close(o.double(), want, rtol=1e-5, atol=1e-5)
    assert len(resolved) == 1
    bad = pages | {"seqused_k": torch.tensor([1], dtype=torch.int32)}
    with pytest.raises(InvalidArgument, match="seqused_k must be"):
        attention_varlen(q, *keys, cu, cu, 40, 40, causal=True, scale=0.25, alibi_slopes=own, **bad)
    with pytest.raises(InvalidArgument, match="alibi_slopes must be"):
        attention_varlen(
            q, *keys, cu, cu, 40, 40, causal=True, scale=0.25, alibi_slopes=own[:1], **pages
        )


def test_bounds_changed_before_the_backward_are_noticed(dispatcher: Dispatcher) -> None:
    q, k, v = leaves(*torch.randn(3, 20, 2, 16).unbind())
    cu = cumulative([12, 8])
    o = attention_varlen(q, k, v, cu, cu, 12, 12)
    cu.add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()  # type: ignore[no-untyped-call]


def test_ends_changed_before_the_backward_are_those_of_the_forward(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first call, which is resolved, and of those that equal it."""
    monkeypatch.setattr("flashgen.runtime.folders.current", lambda: dispatcher)
    tensors, cu = torch.randn(3, 20, 2, 16), cumulative([12, 8])
    found = []
    for change in (False, True, False, True):
        q, k, v = leaves(*tensors.unbind())
        used = torch.tensor([5, 7], dtype=torch.int32)
        o = attention_varlen(q, k, v, cu, cu, 12, 12, seqused_q=used, seqused_k=used, causal=True)
        if change:
            used.zero_()
        found.append(torch.autograd.grad(o.square().sum(), (q, k, v)))
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=0, atol=0)
