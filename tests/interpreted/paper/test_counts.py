"""Bytes that kernels load and store, counted in the interpreter: equal to the closed forms, to the byte."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

from examples.papers import dropout, forms, gradients, runs, scan, softmax, tiles
from examples.papers import standard as standard_attention
from examples.papers.counter import Counter
from flashgen.kernels import interpreter

SHAPES = (
    (128, 64, 64, 32),
    (100, 40, 32, 64),
)  # n, d, br, bc: tiles that divide n, and a ragged, padded one


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of infinities in masked rows
        yield


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_forward_kernels_request_the_bytes_of_the_closed_forms(
    shape: tuple[int, ...], causal: bool
) -> None:
    n, d, br, bc = shape
    fa1 = runs.forward("fa1", br, bc, n, d, causal=causal)
    assert fa1.traffic == forms.fa1(n, d, br, bc, causal)
    assert fa1.verdict is not None
    assert fa1.verdict.passed
    for schedule, loads in (("fa2", "pointer"), ("fa2", "descriptor"), ("s_ahead", "pointer")):
        run = runs.forward(schedule, br, bc, n, d, causal=causal, loads=loads)  # type: ignore[arg-type]
        assert run.traffic == forms.fa2(n, d, br, bc, causal)
        assert run.bytes == forms.total(run.traffic)
        assert run.verdict is not None
        assert run.verdict.passed


@pytest.mark.parametrize("causal", [False, True])
def test_the_backward_kernels_request_the_bytes_of_the_closed_forms(causal: bool) -> None:
    n, d, br, bc = shape = (100, 40, 32, 64)
    assert runs.backward("backward_dkv", *shape[2:], n, d, causal=causal).traffic == forms.dkv(
        *shape, causal
    )
    assert runs.backward("backward_dq", *shape[2:], n, d, causal=causal).traffic == forms.dq(
        *shape, causal
    )
    assert runs.backward("backward_fused", br, bc, n, d, causal=causal).traffic == forms.fused(
        *shape, causal
    )
    if not causal:
        assert runs.backward("backward_delta", br, bc, n, d).traffic == forms.delta(n, d)


def test_a_tile_that_no_config_has_is_counted_too() -> None:
    assert runs.forward("fa1", 64, 512, 512, 16).traffic == forms.fa1(512, 16, 64, 512)


@pytest.mark.parametrize("splits", [1, 4])
def test_decode_and_its_merge_request_the_bytes_of_the_closed_forms(splits: int) -> None:
    run, merging = runs.decode(splits, 256, 64)
    assert run.traffic == forms.decode(256, 64, splits, runs.GROUP)
    assert run.verdict is not None
    assert run.verdict.passed
    assert run.programs == splits
    assert (merging and merging.traffic) == (
        forms.combine(64, splits, runs.GROUP) if splits > 1 else None
    )


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("dropped", [0.0, 0.1])
def test_standard_attention_requests_the_bytes_of_the_closed_form_and_is_right(
    mask: bool, dropped: float
) -> None:
    n, d = 128, 32
    of, do = runs.head(n, d), runs.head(n, d + 1).q[0, 0, :, :d].contiguous()
    q, k, v = of.q[0, 0], of.k[0, 0], of.v[0, 0]
    run = standard_attention.run(q, k, v, do, mask=mask, dropped=dropped)
    assert run.counter.bytes == forms.standard(n, d, backward=True, mask=mask, dropout=dropped > 0)
    assert run.extra == n * n * (
        7 if dropped else 4
    )  # S and P; with dropout P once more, and a byte a mask
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    s = wide[0] @ wide[1].T * d**-0.5
    if mask:
        s = s.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
    p = s.softmax(-1)
    if run.kept is not None:
        p = p * run.kept.double() / (1 - dropped)
    o = p @ wide[2]
    assert (o - run.o.double()).abs().max() < 5e-3
    for got, want in zip(run.gradients, torch.autograd.grad(o, wide, do.double()), strict=True):
        assert (got.double() - want).abs().max() < 2e-2


@pytest.mark.parametrize("causal", [False, True])
def test_the_kernels_do_the_operations_of_the_closed_forms(causal: bool) -> None:
    n, d, br, bc = 128, 32, 32, 64
    fa1, fa2 = (runs.forward(each, br, bc, n, d, causal=causal) for each in ("fa1", "fa2"))
    assert fa2.matrix_flops == forms.matrix_flops(n, d, br, bc, causal)
    if not causal:
        assert fa1.matrix_flops == fa2.matrix_flops
        assert fa1.other_flops == forms.other_flops_fa1(n, d, bc)
        assert fa2.other_flops == forms.other_flops_fa2(n, d, bc)
    products = {"backward_fused": 5, "backward_dkv": 4, "backward_dq": 3}
    for direction, count in products.items():
        run = runs.backward(direction, 32, 32, n, d)  # type: ignore[arg-type]
        assert run.matrix_flops == forms.matrix_flops(n, d, 32, 32, products=count)


def test_programs_are_counted_over_the_sequence() -> None:
    assert runs.forward("fa1", 32, 32, 128, 16).programs == 1
    assert runs.forward("fa2", 32, 32, 128, 16).programs == 4
    assert runs.backward("backward_dkv", 32, 64, 128, 16).programs == 2


def test_three_kernels_give_the_exact_gradients() -> None:
    assert gradients.backward().holds


def test_a_wrong_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = gradients.steps(gradients.Q, gradients.K, gradients.V, gradients.DO)
    monkeypatch.setattr(gradients, "SCALE", 1.0)  # the kernels' scale no longer that of the case
    found = gradients.by_kernels(exact)
    assert max(float((got - gradients.tensor(want)).abs().max()) for got, want in zip(
        found, (exact.dq, exact.dk, exact.dv), strict=True
    )) > 1e-2  # fmt: skip


def test_merging_and_block_products_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scan.scan().holds
    monkeypatch.setattr(tiles, "LARGE", 32)
    assert tiles.block_matmul().holds


def test_a_repair_of_the_interpreter_outlives_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first load of a kernel repairs, a Counter that is open must not undo."""
    repaired, before = object(), InterpreterBuilder.create_dot
    monkeypatch.setattr(
        interpreter, "prepare", lambda: setattr(InterpreterBuilder, "create_dot", repaired)
    )
    try:
        with Counter():
            assert InterpreterBuilder.create_dot is not repaired  # wrapped
        assert InterpreterBuilder.create_dot is repaired
    finally:
        InterpreterBuilder.create_dot = before


def test_the_backward_makes_the_masks_of_the_forward_again() -> None:
    assert dropout.remade().holds


def test_online_softmax_is_softmax_and_merges() -> None:
    assert softmax.online().holds


def test_a_wrong_count_is_seen() -> None:
    form = forms.fa2(128, 64, 64, 32)
    form["k"] = (form["k"][0] - 2, 0)
    assert runs.forward("fa2", 64, 32, 128, 64).traffic != form


@triton.jit
def _copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


def test_masked_lanes_are_not_counted_and_what_leaves_a_tensor_is_found() -> None:
    x, y = torch.ones(8), torch.zeros(8)
    with Counter() as counter:
        _copy[(1,)](x, y, 5, BLOCK=16)
    assert counter.traffic == {"x": (20, 0), "y": (0, 20)}
    with Counter(), pytest.raises(Exception, match="leaves the kernel's tensors"):
        _copy[(1,)](x, y, 16, BLOCK=16)


def test_the_interpreter_is_as_before_afterwards() -> None:
    before = InterpreterBuilder.create_masked_load
    with Counter():
        assert InterpreterBuilder.create_masked_load is not before
    assert InterpreterBuilder.create_masked_load is before
