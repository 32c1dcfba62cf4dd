"""Windows, caps and sinks: each kernel on the nasty shapes, what is read, and mutants. Of pairs see
kernels/test_pairs.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.evaluate.check import check_kernel
from flashgen.inputs.features import Features
from flashgen.inputs.from_call import from_tensors
from flashgen.kernels.launch import bind, launch
from flashgen.kernels.launch_backward import Backward
from flashgen.kernels.loader import load_kernel
from flashgen.kernels.render import render
from flashgen.reference import cases as reference_cases
from flashgen.reference import gradients
from flashgen.reference.cases import CheckCase
from flashgen.runtime import Dispatcher
from flashgen.runtime.eager import attention as eager
from flashgen.runtime.eager.visibility import random_words
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.defaults import default_config, default_spec
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem
from tests.makers import make_config, make_spec
from tests.mutants import broken
from tests.nasty_cases import nasty_cases
from tests.proving import prove, sampled
from tests.serving import leaves

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DIRECTIONS = ("forward", "backward_dkv", "backward_dq")
ALONE: list[tuple[str, str]] = [
    ("window", "forward"), ("window", "backward_dkv"), ("window", "backward_dq"),
    ("softcap", "forward"), ("softcap", "backward_dkv"), ("softcap", "backward_dq"),
    ("sink", "forward"),
]  # fmt: skip
EVERY_ONE: dict[str, Any] = {
    "window": True, "softcap": True, "bias": "additive", "alibi": True, "dropout": True,
}  # fmt: skip


@pytest.mark.slow("kernels/test_pairs.py has each on fewer shapes")
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize(("feature", "direction"), ALONE)
def test_each_alone(feature: str, direction: Any, mask: str, seed: int) -> None:
    spec = make_spec("float16", 32, mask, **{feature: True}).for_direction(direction)
    prove(spec, make_config(32, 16), seed, nasty_cases(32, 16))


@pytest.mark.parametrize(
    "precision",
    ["ieee", pytest.param("tf32", marks=pytest.mark.slow("make test proves a sample of it"))],
)
@pytest.mark.parametrize("direction", [*DIRECTIONS, "backward_fused", "backward_dbias"])
def test_every_one_at_once(direction: Any, precision: Any, seed: int) -> None:
    spec = make_spec("float32", 24, "causal", precision=precision, **EVERY_ONE)
    prove(spec.for_direction(direction), make_config(16, 32), seed, step=2)


@pytest.mark.slow("make test proves a sample of it")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "tf32"])
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("direction", [*DIRECTIONS, "backward_fused", "backward_dbias"])
def test_every_dtype_on_all_tiles(dtype: str, direction: Any, mask: str, seed: int) -> None:
    precision: dict[str, Any] = {"precision": "tf32"} if dtype == "tf32" else {}
    for features in ({"window": True}, {"softcap": True}, EVERY_ONE):
        if direction == "backward_dbias":
            features = features | {"bias": "additive"}
        name = "float32" if precision else dtype
        spec = make_spec(name, 40, mask, head_dim_v=64, **features, **precision)
        for br, bc in ((16, 64), (64, 16), (32, 32)):
            prove(spec.for_direction(direction), make_config(br, bc), seed, nasty_cases(br, bc))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_default_kernels_take_the_true_head_dims(direction: Any, seed: int) -> None:
    asked = make_spec("float16", 64, "causal", window=True, softcap=True).for_direction(direction)
    prove(default_spec(asked), default_config(asked), seed)


@pytest.mark.parametrize("cap", [1e-3, 1.0, 50.0, 1e4])
def test_the_cap_is_right_near_0_and_far_from_it(cap: float, tmp_path: Path) -> None:
    """Each row sees one key, so its LSE is the capped score: |s / cap| from 1e-9 to 3e4. Near 0 the
    error is relative, so that no difference of numbers near 1 can make it.
    """
    spec, config = make_spec("float32", 16, softcap=True), make_config(16, 16)
    rows = 96
    q, k = torch.zeros(1, 1, rows, 16), torch.zeros(1, 1, 1, 16)
    q[0, 0, :, 0] = torch.logspace(-5, 1.5, rows) * torch.tensor([1.0, -1.0]).repeat(rows // 2)
    k[..., 0] = 1.0
    kernel = kernel_of(spec, config, tmp_path)
    _, lse = launch(
        kernel, spec, config, q, k, k, scale=1.0, diagonal=None, features=Features(softcap=cap)
    )
    s = q[..., 0].double()
    exact = cap * torch.tanh(s / cap)
    assert ((lse - exact).abs() <= 2.0**-20 * exact.abs()).all()


def test_a_word_equal_to_the_threshold_keeps_its_element(tmp_path: Path) -> None:
    """An element is dropped with probability round(p * 2^32) / 2^32: by fewer words than the threshold."""
    spec, config = make_spec("float32", 16, dropout=True), make_config(16, 16)
    rng = torch.tensor([1, 2])
    word = int(random_words(rng, 1, 1, 1, 1))
    features = Features(dropout_p=(word + 2**31) / 2**32, rng=rng)
    assert features.dropout_threshold == word
    one = torch.ones(1, 1, 1, 16)
    o, _ = launch(
        kernel_of(spec, config, tmp_path), spec, config, one, one, one, scale=1.0, diagonal=None,
        features=features,
    )  # fmt: skip
    torch.testing.assert_close(o, features.keep_scale * one)


def kernel_of(spec: AttentionSpec, config: KernelConfig, folder: Path) -> Any:
    rendered = render(spec, config)
    path = folder / f"{rendered.name}.py"
    path.write_text(rendered.source)
    return load_kernel(path, rendered.text_name, rendered.name)


@pytest.mark.parametrize(
    ("bias", "causal"),
    [
        *(("none", False), ("additive", True)),
        *(
            pytest.param(*each, marks=pytest.mark.slow("make test proves a sample of it"))
            for each in (("none", True), ("additive", False))
        ),
    ],
)
def test_what_lies_outside_the_window_is_not_read(causal: bool, bias: Any, tmp_path: Path) -> None:
    """NaN wherever no tile within the window reaches: 0 times it would be NaN."""
    torch.manual_seed(0)
    length, left, right, tile = 96, 20, 10, 16
    q, k, v, do = (torch.randn(1, 2, length, 16) for _ in range(4))
    added = torch.randn(1, 1, length, length) if bias == "additive" else None
    features = Features(window=(left, -1 if causal else right), bias=added)
    call: dict[str, Any] = {"scale": 0.3, "diagonal": 0 if causal else None, "features": features}
    spec, _ = from_tensors(q, k, v, causal=causal, features=features)
    inputs = gradients.GradientInputs(
        q=q, k=k, v=v, do=do, dlse=torch.zeros(1, 2, length), precision="ieee", **call
    )
    want, lse, delta = gradients.forward(inputs)
    exact = gradients.exact_gradients(inputs)
    config = make_config(tile, tile)
    ahead = 0 if causal else right
    for start in range(0, length, 2 * tile):
        rows = slice(start, start + tile)
        near = slice(max(0, start - left - tile), start + tile + ahead + tile)
        k_near, v_near = outside(k, near), outside(v, near)
        if added is not None:
            call["features"] = dataclasses.replace(features, bias=outside_both(added, rows, near))
        o, _ = launch(kernel_of(spec, config, tmp_path), spec, config, q, k_near, v_near, **call)
        assert_near(o, want, rows)
        of_keys = Backward(q=q, k=k_near, v=v_near, do=do, lse=lse, delta=delta, **call)
        (dq,) = gradient("backward_dq", spec, config, tmp_path, of_keys)
        assert_near(dq, exact["dq"], rows)
        # The rows that see keys `rows` lie from the right side before them to the left side behind.
        near = slice(max(0, start - ahead - tile), start + tile + left + tile)
        if added is not None:
            call["features"] = dataclasses.replace(features, bias=outside_both(added, near, rows))
        of_rows = Backward(
            q=outside(q, near), k=k, v=v, do=outside(do, near), lse=lse, delta=delta, **call
        )
        dk, dv = gradient("backward_dkv", spec, config, tmp_path, of_rows)
        assert_near(dk, exact["dk"], rows)
        assert_near(dv, exact["dv"], rows)


def assert_near(found: Tensor, want: Tensor, rows: slice) -> None:
    """NaN is not near: what else differs is rounding."""
    torch.testing.assert_close(
        found[:, :, rows].double(), want[:, :, rows].double(), rtol=1e-4, atol=1e-5
    )


def outside(x: Tensor, near: slice) -> Tensor:
    """X, NaN in all rows but those near."""
    poisoned = torch.full_like(x, float("nan"))
    poisoned[:, :, near] = x[:, :, near]
    return poisoned


def outside_both(x: Tensor, rows: slice, keys: slice) -> Tensor:
    poisoned = torch.full_like(x, float("nan"))
    poisoned[:, :, rows, keys] = x[:, :, rows, keys]
    return poisoned


def gradient(
    direction: Any, spec: AttentionSpec, config: KernelConfig, folder: Path, call: Backward
) -> tuple[Tensor, ...]:
    of_direction = spec.for_direction(direction)
    return bind(kernel_of(of_direction, config, folder), of_direction, config)(call)


def of(direction: Any, mask: str, **features: Any) -> AttentionSpec:
    return make_spec("bfloat16", 32, mask, **features).for_direction(direction)


TANH, RAW = (
    "return tl.where(tl.abs(x) < 0.55, small, large)",
    "s = tl.dot(q[0], tl.trans(k[0]), input_precision=PRECISION)",
)
CAPPED = "tanh(tl.dot(q, tl.trans(k)) * (scale_log2e * inverse_cap))"
FIRST, OF_ROWS = "first_key = rows + diagonal - window_left", "first_key -= window_left"
LAST = "last_key = tl.minimum(rows + diagonal + right, seq_k - 1)"
FORWARD, DKV, DQ = DIRECTIONS
MUTANTS: dict[str, tuple[AttentionSpec, str, str]] = {
    "left side by one": (of(FORWARD, "causal", window=True), OF_ROWS, OF_ROWS + " - 1"),
    "left side by one in dQ": (of(DQ, "none", window=True), OF_ROWS, OF_ROWS + " + 1"),
    "left side by one in dK, dV": (of(DKV, "causal", window=True), FIRST, FIRST + " + 1"),
    "right side by one": (of(FORWARD, "none", window=True), LAST, LAST.replace("right,", "right + 1,")),
    "right side by one in dK, dV": (of(DKV, "none", window=True), "last_key = rows + diagonal + window_right", "last_key = rows + diagonal + window_right - 1"),
    "window of the top left": (of(FORWARD, "none", window=True), "first_key = rows + diagonal", "first_key = rows"),
    "begins a tile late": (of(FORWARD, "none", window=True), "key_begin = tl.maximum(first_begin, 0)", "key_begin = tl.maximum(first_begin + BC, 0)"),
    "full a tile early": (of(FORWARD, "none", window=True), "row_start + BR - 1 + diagonal\n", "row_start + diagonal\n"),
    "full a tile long": (of(DQ, "none", window=True), "row_start + diagonal + right + 1", "row_start + BR + diagonal + right + 1"),
    "ends early": (of(DQ, "none", window=True), "row_start + BR + diagonal + right", "row_start + diagonal + right"),
    "K not moved to the window": (of(FORWARD, "none", window=True), "k_base += key_begin.to(tl.int64) * stride_ks", "k_base += 0 * stride_ks"),
    "rows end early": (of(DKV, "none", window=True), "key_end - diagonal + window_left", "key_start - diagonal + window_left"),
    "rows begin late": (of(DKV, "none", window=True), "first_row -= window_right", "first_row -= window_right - BR"),
    "no window in dBias": (of("backward_dbias", "causal", window=True, bias="additive"), "keys[None, :] >= first_key", "keys[None, :] >= 0 * first_key"),
    "no cap": (of(FORWARD, "none", softcap=True), TANH, "return x"),
    "cap of the wrong base": (of(FORWARD, "none", softcap=True), "s = cap_log2e * tanh(", "s = 0.6931 * cap_log2e * tanh("),
    "cap after the mask": (of(FORWARD, "causal", softcap=True), 'tl.where(seen, s, float("-inf"))', "tl.where(seen, s, -cap_log2e)"),
    "cap after the bias": (of(FORWARD, "none", softcap=True, bias="additive"), RAW, RAW + " + bias_of_all"),
    "no slope of the cap in dQ": (of(DQ, "none", softcap=True), "ds *= 1.0 - capped * capped", "ds *= 1.0"),
    "no slope of the cap in dK": (of(DKV, "none", softcap=True), "ds_t *= 1.0 - capped * capped", "ds_t *= 1.0"),
    "slope of the cap in dBias": (of("backward_dbias", "none", softcap=True, bias="additive"), "dbias += ds", f"dbias += ds * (1.0 - {CAPPED} * {CAPPED})"),
    "the form that cancels alone": (of(FORWARD, "none", softcap=True), "< 0.55", "< 0.0"),
    "the polynomial alone": (of(FORWARD, "none", softcap=True), "< 0.55", "< 1e30"),
    "sink left out of the sum": (of(FORWARD, "none", sink=True), "row_sum * rescale + tl.exp2(sink - (new_max - P_EXPONENT))", "row_sum * rescale"),
    "O not rescaled for the sink": (of(FORWARD, "none", sink=True), "acc = [acc[n] * rescale[:, None] for n in (0, 1, 2, 3)[:O_PARTS]]\n        row_max = new_max\n    #", "row_max = new_max\n    #"),
    "sink of the first head": (of(FORWARD, "none", sink=True), "sinks_ptr + head", "sinks_ptr + 0 * head"),
    "sink of the wrong base": (of(FORWARD, "none", sink=True), "sinks_ptr + head).to(tl.float32) * LOG2_E", "sinks_ptr + head).to(tl.float32)"),
}  # fmt: skip
SURVIVES = {"the form that cancels alone"}
"""Absolutely it is right to 2^-22 of the cap, which is less than the oracle grants P: its own test
above kills it.
"""
MASKED_LATE = {"cap after the bias": "(bias.to(tl.float32) / scale_log2e * LOG2_E)"}


@pytest.mark.parametrize("name", sampled(name for name in MUTANTS if name not in SURVIVES))
def test_mutant_is_caught(name: str) -> None:
    spec, line, new = MUTANTS[name]
    config = make_config(16, 32)
    rendered = render(spec, config)
    source = broken(rendered.source, line, new)
    if name in MASKED_LATE:
        # The bias joins the scores where they are raw, and not again behind the cap.
        source = broken(source, "s = s + bias.to(tl.float32) * LOG2_E", "s = s")
        source = broken(source, RAW + " + bias_of_all", RAW)
        loaded = "bias_base += BC * stride_bias_k"
        source = broken(source, loaded, f"{loaded}\n                s += {MASKED_LATE[name]}")
    mutant = dataclasses.replace(rendered, source=source)
    assert not check_kernel(mutant, spec, config, seed=1).passed


def test_the_form_that_cancels_alone_is_caught_near_0(tmp_path: Path) -> None:
    _, line, new = MUTANTS["the form that cancels alone"]
    spec, config = make_spec("float32", 16, softcap=True), make_config(16, 16)
    rendered = render(spec, config)
    path = tmp_path / f"{rendered.name}.py"
    path.write_text(broken(rendered.source, line, new))
    kernel = load_kernel(path, rendered.text_name, rendered.name)
    q = torch.zeros(1, 1, 1, 16)
    q[..., 0] = 1e-3
    ones = torch.ones(1, 1, 1, 16)
    _, lse = launch(
        kernel, spec, config, q, ones, ones, scale=1.0, diagonal=None,
        features=Features(softcap=50.0),
    )  # fmt: skip
    assert abs(float(lse) / 1e-3 - 1) > 2.0**-20


@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_the_public_call_is_the_reference(dispatcher: Dispatcher, causal: Any) -> None:
    """Forward and all gradients, those of sinks too; Sq > Sk, so that rows see the sink alone."""
    torch.manual_seed(3)
    q, k, v, sinks = leaves(
        torch.randn(2, 4, 45, 16), torch.randn(2, 2, 30, 16), torch.randn(2, 2, 30, 24),
        torch.randn(4),
    )  # fmt: skip
    window = (9, 4)
    o, lse = dispatcher.attention(
        q, k, v, causal=causal, window=window, softcap=2.0, sinks=sinks, return_lse=True
    )
    x = [t.detach().double().requires_grad_() for t in (q, k, v, sinks)]
    diagonal = None if causal is False else 0 if causal == "top_left" else 30 - 45
    features = Features(window=window, softcap=2.0, sinks=x[3])
    exact, exact_lse = eager.attention(*x[:3], scale=0.25, diagonal=diagonal, features=features)
    torch.testing.assert_close(o, exact.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, exact_lse.float(), rtol=1e-5, atol=1e-5)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    found = torch.autograd.grad((o, lse), (q, k, v, sinks), (do, dlse))
    wanted = torch.autograd.grad((exact, exact_lse), x, (do.double(), dlse.double()))
    for grad, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(grad, want.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sinks_have_their_own_dtype(dispatcher: Dispatcher, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    q, k = torch.randn(1, 2, 20, 16, dtype=torch.bfloat16), torch.randn(1, 1, 20, 16).bfloat16()
    (sinks,) = leaves(torch.randn(2).to(dtype))
    if dtype is torch.float16:
        with pytest.raises(ValueError, match="sinks must be"):
            dispatcher.attention(q, k, k, sinks=sinks)
        return
    o, lse = dispatcher.attention(q, k, k, causal=True, sinks=sinks, return_lse=True)
    torch.autograd.backward(o.float().square().sum() + lse.sum())
    assert sinks.grad is not None
    assert sinks.grad.dtype == dtype
    plain = dispatcher.attention(q, k, k, causal=True, return_lse=True)[1]
    joined = torch.logaddexp(plain, sinks.detach().float()[:, None])
    torch.testing.assert_close(lse, joined, rtol=1e-5, atol=1e-5)


def test_a_sink_of_minus_infinity_is_none(dispatcher: Dispatcher) -> None:
    q, k, v = torch.randn(3, 1, 2, 20, 16).unbind()
    sinks = torch.tensor([float("-inf"), 0.5])
    o, lse = dispatcher.attention(
        q, k[:, :, :9], v[:, :, :9], causal=True, sinks=sinks, return_lse=True
    )
    want, want_lse = dispatcher.attention(q, k[:, :, :9], v[:, :, :9], causal=True, return_lse=True)
    assert torch.equal(o[:, 0], want[:, 0])
    assert torch.equal(lse[:, 0], want_lse[:, 0])
    assert (lse[:, 1, :11] == 0.5).all()


def test_no_keys_leave_the_sink(dispatcher: Dispatcher) -> None:
    q, k = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 0, 16)
    (sinks,) = leaves(torch.tensor([0.25, -3.0]))
    o, lse = dispatcher.attention(q, k, k, sinks=sinks, return_lse=True)
    assert (o == 0).all()
    assert torch.equal(lse, sinks.detach()[None, :, None].expand(1, 2, 5))
    (gradient,) = torch.autograd.grad(lse.sum(), sinks)
    assert torch.equal(gradient, torch.full((2,), 5.0))


def test_features_compile_into_one_graph(dispatcher: Dispatcher) -> None:
    torch._dynamo.reset()
    x = leaves(*torch.randn(3, 1, 2, 20, 16).unbind(), torch.randn(2))

    def call(*t: Tensor) -> Tensor:
        found: Tensor = dispatcher.attention(
            *t[:3], causal=True, window=(5, 0), softcap=3.0, sinks=t[3]
        )
        return found

    compiled: Any = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = [
        (o := run(*x), *torch.autograd.grad(o.square().sum(), x)) for run in (call, compiled)
    ]
    for found, want in zip(*results, strict=True):
        torch.testing.assert_close(found, want)


def test_a_case_of_windows_has_them_all() -> None:
    problem = Problem(batch=1, heads=1, kv_heads=1, seq_q=40, seq_k=60)
    spec = make_spec("float16", 16, window=True)
    drawn = {
        reference_cases.make_features(spec, CheckCase(problem=problem), n, "cpu").window
        for n in range(7)
    }
    assert drawn == set(reference_cases.windows(problem))
    assert (0, 0) in drawn
    assert any(left < 0 for left, _ in drawn)  # type: ignore[misc]
    assert any(right < 0 for _, right in drawn)  # type: ignore[misc]
    assert any(left > 60 + 40 and right > 60 + 40 for left, right in drawn)  # type: ignore[misc]
