"""Gradients of eager calls, by the very kernels a GPU would run, judged against float64."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from flashgen.errors import InvalidArgument, NotDifferentiable
from flashgen.inputs.features import PLAIN, Features
from flashgen.kernels.render import render
from flashgen.kernels.text import text_name
from flashgen.reference import gradients
from flashgen.reference.cases import CheckCase
from flashgen.runtime import Dispatcher, autograd
from flashgen.runtime.call import Call
from flashgen.runtime.choice import Choice, by_spec
from flashgen.runtime.eager import attention as eager
from flashgen.schedules.defaults import default_config
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import BUCKETS, Problem
from flashgen.spec.vocabulary import Direction
from tests.makers import make_spec
from tests.package import make_dispatcher
from tests.serving import autocast_of_a_gpu, leaves, record_directions

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HALF = make_spec("bfloat16", 64, "causal")
PAIR = ["backward_delta", "backward_dkv", "backward_dq"]


def case(sq: int, sk: int, heads: int = 4, kv: int = 2, **options: str) -> CheckCase:
    return CheckCase(
        problem=Problem(batch=2, heads=heads, kv_heads=kv, seq_q=sq, seq_k=sk), **options
    )


def differentiated(
    dispatcher: Dispatcher, spec: AttentionSpec, given: CheckCase, seed: int = 0
) -> tuple[gradients.GradientInputs, tuple[Tensor, ...], Tensor | None]:
    """What a backward pass of the public call gives for a case: its inputs, dq, dk and dv, dbias."""
    inputs = gradients.make_inputs(spec, given, seed, "cpu")
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    bias = inputs.features.bias
    if spec.bias == "additive" and bias is not None:
        bias = bias.detach().requires_grad_()
    causal = given.alignment if spec.causal else False
    o, lse = dispatcher.attention(
        q, k, v, causal=causal, scale=inputs.scale, bias=bias,
        alibi_slopes=inputs.features.slopes, precision=spec.precision, return_lse=True,
    )  # type: ignore[call-overload]  # fmt: skip
    torch.autograd.backward((o, lse), (inputs.do, inputs.dlse))
    dbias = bias.grad if bias is not None and bias.requires_grad else None
    return inputs, tuple(x.grad for x in (q, k, v) if x.grad is not None), dbias


@pytest.mark.parametrize(
    ("spec", "given"),
    [
        (HALF, case(37, 53, layout="bshd")),
        (HALF, case(53, 37)),
        (make_spec("float16", 40, "causal", head_dim_v=24), case(33, 70, alignment="top_left")),
        (make_spec("float32", 32), case(70, 40, heads=3, kv=1, layout="sliced")),
        (make_spec("float32", 16, "causal", precision="tf32"), case(20, 20)),
        (make_spec("bfloat16", 128), case(1, 65)),
        (make_spec("bfloat16", 64, "causal", bias="additive"), case(20, 40)),
        (make_spec("float32", 16, bias="boolean"), case(20, 40)),
        (make_spec("float32", 16, "causal", alibi=True), case(40, 20)),
    ],
    ids=lambda value: value.name if isinstance(value, AttentionSpec) else None,
)
def test_gradients_are_right_to_the_floor(
    dispatcher: Dispatcher, spec: AttentionSpec, given: CheckCase
) -> None:
    inputs, found, dbias = differentiated(dispatcher, spec, given)
    verdict = gradients.judge("backward_fused", found, inputs)
    assert verdict.passed, verdict
    for x, grad in zip((inputs.q, inputs.k, inputs.v), found, strict=True):
        assert grad.dtype == x.dtype
    if spec.bias == "additive":
        assert dbias is not None
        assert gradients.judge("backward_dbias", (dbias,), inputs).passed


def draw(sq: int = 20, sk: int = 30, dim: int = 32) -> tuple[Tensor, ...]:
    torch.manual_seed(sq + sk)
    return tuple(torch.randn(1, h, s, dim) for h, s in ((4, sq), (2, sk), (2, sk)))


@pytest.mark.parametrize(
    ("asked", "directions"),
    [
        ("q", ["backward_delta", "backward_dq"]),
        ("k", ["backward_delta", "backward_dkv"]),
        ("v", ["backward_delta", "backward_dkv"]),
        ("qkv", PAIR),
        ("b", ["backward_delta", "backward_dbias"]),
    ],
)
def test_only_what_is_asked_for_is_computed(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch, asked: str, directions: list[str]
) -> None:
    launched = record_directions(monkeypatch)
    tensors = dict(zip("qkvb", (*draw(), torch.randn(4, 20, 30)), strict=True))
    for name in asked:
        tensors[name].requires_grad_()
    bias = tensors["b"] if "b" in asked else None
    dispatcher.attention(tensors["q"], tensors["k"], tensors["v"], bias=bias).sum().backward()
    assert launched == ["forward", *directions]
    assert {name for name in "qkvb" if tensors[name].grad is not None} == set(asked)


def test_without_gradients_nothing_but_the_forward_runs(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = record_directions(monkeypatch)
    q, k, v = leaves(*draw())
    with torch.no_grad():
        o, lse = dispatcher.attention(q, k, v, return_lse=True)
    assert launched == ["forward"]
    assert not o.requires_grad
    assert not lse.requires_grad


def test_the_same_bits_with_and_without_gradients(dispatcher: Dispatcher) -> None:
    q, k, v = draw()
    plain = dispatcher.attention(q, k, v, causal=True, return_lse=True)
    recorded = dispatcher.attention(*leaves(q, k, v), causal=True, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))


@pytest.mark.parametrize("of", ["o", "lse", "both"])
def test_each_output_alone_can_be_differentiated(dispatcher: Dispatcher, of: str) -> None:
    def loss(o: Tensor, lse: Tensor) -> Tensor:
        return o.square().sum() * (of != "lse") + lse.sum() * (of != "o")

    q, k, v = leaves(*draw())
    o, lse = dispatcher.attention(q, k, v, causal=True, return_lse=True)
    total = {"o": o.square().sum(), "lse": lse.sum(), "both": loss(o, lse)}[of]
    found = torch.autograd.grad(total, (q, k, v), allow_unused=True)
    exact = leaves(*(x.double() for x in (q, k, v)))
    o, lse = eager.attention(*exact, scale=32**-0.5, diagonal=10)
    for got, want in zip(found, torch.autograd.grad(loss(o, lse), exact), strict=True):
        assert got is not None
        torch.testing.assert_close(got, want.float(), rtol=2e-5, atol=2e-5)


def test_halves_of_the_keys_merged_by_their_lse_train_as_the_whole(dispatcher: Dispatcher) -> None:
    """As ring attention merges what each rank saw; without dLSE all gradients would be wrong."""

    def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [
            dispatcher.attention(q, *half, return_lse=True)
            for half in zip(k.split(15, 2), v.split(15, 2), strict=True)
        ]
        lse = torch.logsumexp(torch.stack([part for _, part in parts]), 0)
        return sum(o * (part - lse).exp()[..., None] for o, part in parts)  # type: ignore[return-value]

    outcomes = []
    for attention in (ring, dispatcher.attention):
        x = leaves(*draw())
        o = attention(*x)
        outcomes.append((o, *torch.autograd.grad(o.square().sum(), x)))
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("sq", "sk"), [(0, 5), (5, 0), (0, 0)])
def test_sizes_of_zero(
    dispatcher: Dispatcher, caplog: pytest.LogCaptureFixture, sq: int, sk: int
) -> None:
    caplog.set_level(logging.INFO, "flashgen.runtime")
    q, k, v = leaves(*draw(sq, sk))
    bias = torch.zeros(1, 1, 1, 1, requires_grad=True)
    o, lse = dispatcher.attention(q, k, v, bias=bias, return_lse=True)
    (o.sum() + lse.nan_to_num(neginf=0.0).sum()).backward()
    for x in (q, k, v, bias):
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert (x.grad == 0).all()
    assert "copied" not in caplog.text


def test_gradients_in_odd_strides(dispatcher: Dispatcher) -> None:
    q, k, v = draw()
    want = torch.autograd.grad(
        dispatcher.attention(*(x := leaves(q, k, v))), x, torch.ones(1, 4, 20, 32)
    )
    for strided in (
        torch.ones(()).expand(1, 4, 20, 32),
        torch.ones(1, 4, 32, 20).transpose(2, 3),
        torch.ones(1, 4, 20, 64)[..., ::2],
    ):
        found = torch.autograd.grad(dispatcher.attention(*(x := leaves(q, k, v))), x, strided)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_what_is_kept_for_the_backward_is_linear_in_the_length(dispatcher: Dispatcher) -> None:
    def kept(seq: int) -> int:
        found: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            found[x.data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            dispatcher.attention(*leaves(*draw(seq, seq)), causal=True)
        return sum(found.values())

    assert kept(64) == 2 * kept(32) == 4 * kept(16)


def allocations(call: Callable[[], object]) -> list[int]:
    """The bytes that torch allocates during a call, and below 0 what it frees, in their order."""
    gc.collect()  # of what an earlier call has left: it must not be freed in the middle of this one
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    assert profiled.profiler is not None
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    found = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return [nbytes for _, nbytes in found]


def test_the_peak_of_forward_and_backward_is_linear_in_the_length(dispatcher: Dispatcher) -> None:
    """O, LSE and delta, and the gradients; and nothing of the size of S, not for a moment."""

    def changes(attention: Callable[..., Tensor], seq: int) -> list[int]:
        x = [torch.randn(1, 1, seq, 32).requires_grad_() for _ in range(3)]
        do = torch.randn(1, 1, seq, 32)
        attention(*x).backward(do)  # imports and loads kernels
        for leaf in x:
            leaf.grad = None
        return allocations(lambda: attention(*x).backward(do))

    def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ v

    for seq in (32, 96):
        found = changes(dispatcher.attention, seq)
        assert max(accumulate(found)) == seq * (4 * 32 + 2) * 4
        assert max(found) == seq * 32 * 4
    assert max(changes(standard, 96)) == 96 * 96 * 4  # the count sees S where there is one


def test_tensors_that_are_copied_have_gradients(dispatcher: Dispatcher) -> None:
    q, k, v = draw()
    want = torch.autograd.grad(dispatcher.attention(*(x := leaves(q, k, v))).sum(), x)
    turned = (q, k.transpose(2, 3).contiguous().transpose(2, 3), v)
    found = torch.autograd.grad(dispatcher.attention(*(x := leaves(*turned))).sum(), x)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def timed_choice(direction: str, median_us: float) -> Choice:
    spec = make_spec("bfloat16", 64).for_direction(direction)  # type: ignore[arg-type]
    config = default_config(spec)
    return Choice(
        spec=spec, bucket=BUCKETS[0], config=config, source="estimated", median_us=median_us
    )


@pytest.mark.parametrize(
    ("fused_us", "deterministic", "torchs"),
    [(25.0, False, False), (25.0, True, False), (25.0, False, True), (35.0, False, False)],
)
def test_the_fused_backward_needs_leave_and_a_better_time(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    fused_us: float,
    deterministic: bool,
    torchs: bool,
) -> None:
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    choices = [
        timed_choice("backward_dkv", 20.0),
        timed_choice("backward_dq", 10.0),
        timed_choice("backward_fused", fused_us),
        timed_choice("backward_delta", 1.0),
        timed_choice("forward", 1.0),
    ]
    for choice in choices:
        file = kernels / f"{text_name(choice.spec, choice.config)}.py"
        file.write_text(render(choice.spec, choice.config).source)
    monkeypatch.setenv("FLASHGEN_GPU", "nvidia_h200")
    monkeypatch.syspath_prepend(str(tmp_path.parent))
    dispatcher = Dispatcher(
        package=tmp_path.name,
        archs={"nvidia_h200": "sm_90"},
        choices={"nvidia_h200": by_spec(choices)},
    )
    autograd.served[tmp_path.name] = dispatcher.passes
    launched = record_directions(monkeypatch)
    spec = make_spec("bfloat16", 64)
    inputs = gradients.make_inputs(spec, case(20, 70), 3, "cpu")
    x = leaves(inputs.q, inputs.k, inputs.v)
    o, lse = dispatcher.attention(*x, deterministic=deterministic, return_lse=True)
    by_operators = torch.compile(dispatcher.attention, backend="eager")
    torch.use_deterministic_algorithms(torchs)
    torch.autograd.backward((o, lse), (inputs.do, inputs.dlse))
    torch.autograd.grad(by_operators(*x, deterministic=deterministic).sum(), x)
    torch.use_deterministic_algorithms(False)
    fused = not deterministic and not torchs and fused_us == 25.0
    expected = ["forward", "backward_delta", *(["backward_fused"] if fused else PAIR[1:])]
    assert launched == 2 * expected
    grads = tuple(t.grad for t in x if t.grad is not None)
    assert gradients.judge("backward_fused", grads, inputs).passed


def test_double_backward_is_refused_with_the_alternative(dispatcher: Dispatcher) -> None:
    q, k, v = leaves(*draw())
    (first,) = torch.autograd.grad(
        dispatcher.attention(q, k, v).square().sum(), q, create_graph=True
    )
    with pytest.raises(NotDifferentiable, match=r"sdpa_kernel\(SDPBackend.MATH\)"):
        first.sum().backward()


def test_the_alternative_has_what_is_refused() -> None:
    """Both errors name torch's math backend: it has second derivatives and forward mode."""
    q, k, v = draw(3, 4, 16)

    def loss(x: Tensor) -> Tensor:
        return scaled_dot_product_attention(x, k, v, enable_gqa=True).square().sum()

    def by_reference(x: Tensor) -> Tensor:
        o, _ = eager.attention(x, k, v, scale=0.25, diagonal=None)
        return o.square().sum()

    tangent, x = torch.randn(q.shape), q.clone().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        pushed = torch.func.jvp(torch.func.grad(loss), (q,), (tangent,))[1]
    (first,) = torch.autograd.grad(by_reference(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first, x, tangent)  # the Hessian is symmetric
    assert second.abs().max() > 0.01
    torch.testing.assert_close(pushed, second, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("of", ["o", "lse"])
def test_a_tangent_of_what_flows_back_is_refused(dispatcher: Dispatcher, of: str) -> None:
    """The gradients of dual dO are dual too: kernels would drop their tangents."""
    x = leaves(*draw(3, 4, 16))
    outputs = dict(zip(("o", "lse"), dispatcher.attention(*x, return_lse=True), strict=True))
    ones = torch.ones_like(outputs[of])
    with (
        forward_ad.dual_level(),
        pytest.raises(NotDifferentiable, match=r"forward-mode.*sdpa_kernel\(SDPBackend.MATH\)"),
    ):
        torch.autograd.grad(outputs[of], x, forward_ad.make_dual(ones, ones))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("of", ["o", "lse"])
def test_batches_of_what_flows_back_are_refused(dispatcher: Dispatcher, of: str) -> None:
    x = leaves(*draw(3, 4, 16))
    outputs = dict(zip(("o", "lse"), dispatcher.attention(*x, return_lse=True), strict=True))
    many = torch.ones(2, *outputs[of].shape)
    with pytest.raises(InvalidArgument, match="is_grads_batched"):
        torch.autograd.grad(outputs[of], x, many, is_grads_batched=True)


def test_forward_mode_is_refused(dispatcher: Dispatcher) -> None:
    q, k, v = draw()
    with pytest.raises(NotDifferentiable, match="forward-mode"):
        torch.func.jvp(lambda x: dispatcher.attention(x, k, v), (q,), (q,))


@pytest.mark.parametrize("transform", ["hessian", "jacfwd of grad", "jvp of grad", "jvp of vjp"])
def test_forward_mode_beneath_other_transforms_is_refused(
    dispatcher: Dispatcher, transform: str
) -> None:
    q, k, v = draw(3, 4, 16)

    def loss(x: Tensor) -> Tensor:
        return dispatcher.attention(x, k, v).square().sum()

    def pulled(x: Tensor) -> Tensor:
        return torch.func.vjp(loss, x)[1](torch.ones(()))[0]  # type: ignore[no-any-return]

    calls: dict[str, Callable[[], object]] = {
        "hessian": lambda: torch.func.hessian(loss)(q),
        "jacfwd of grad": lambda: torch.func.jacfwd(torch.func.grad(loss))(q),
        "jvp of grad": lambda: torch.func.jvp(torch.func.grad(loss), (q,), (q,)),
        "jvp of vjp": lambda: torch.func.jvp(pulled, (q,), (q,)),
    }
    with pytest.raises(NotDifferentiable, match="forward-mode"):
        calls[transform]()


def test_func_grad_and_vjp(dispatcher: Dispatcher) -> None:
    q, k, v = draw()
    x = leaves(q, k, v)
    want = torch.autograd.grad(dispatcher.attention(*x, causal=True).square().sum(), x)
    found = torch.func.grad(
        lambda *x: dispatcher.attention(*x, causal=True).square().sum(), argnums=(0, 1, 2)
    )(q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    o, pull = torch.func.vjp(lambda x: dispatcher.attention(x, k, v, causal=True), q)
    assert torch.equal(pull(2 * o)[0], want[0])
    once = torch.func.grad(lambda x: dispatcher.attention(x, k, v).square().sum())
    with pytest.raises(NotDifferentiable):
        torch.func.grad(lambda x: once(x).sum())(q)


def test_vmap_is_refused(dispatcher: Dispatcher) -> None:
    q, k, v = draw()
    with pytest.raises(InvalidArgument, match=r"torch\.vmap: fold the mapped dimension"):
        torch.vmap(lambda x: dispatcher.attention(x, k, v))(q[None])


DROPOUT = {"causal": True, "dropout_p": 0.4}


def run(
    dispatcher: Dispatcher, tensors: tuple[Tensor, ...], wrap: Callable[..., Tensor], seed: int = 7
) -> tuple[Tensor, ...]:
    """The output and gradients of a call with dropout."""
    torch.manual_seed(seed)
    x = leaves(*tensors)
    o = wrap(lambda *x: dispatcher.attention(*x, **DROPOUT), *x)  # type: ignore[call-overload]
    o.square().sum().backward()
    return (o, *(t.grad for t in x if t.grad is not None))


def test_dropout_follows_torchs_generator(dispatcher: Dispatcher) -> None:
    def twice(call: Callable[..., Tensor], *x: Tensor) -> Tensor:
        return call(*x) + call(*x)

    tensors = draw()
    first, again = (run(dispatcher, tensors, lambda call, *x: call(*x)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    other = run(dispatcher, tensors, lambda call, *x: call(*x), seed=8)
    assert not torch.equal(first[0], other[0])
    # The generator has moved on by the second call, whose mask is another.
    assert not torch.equal(run(dispatcher, tensors, twice)[0], 2 * first[0])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_recomputes_the_same_mask(
    dispatcher: Dispatcher, use_reentrant: bool
) -> None:
    def recomputed(call: Callable[..., Tensor], *x: Tensor) -> Tensor:
        return checkpoint(call, *x, use_reentrant=use_reentrant)  # type: ignore[no-any-return]

    tensors = draw()
    want = run(dispatcher, tensors, lambda call, *x: call(*x))
    found = run(dispatcher, tensors, recomputed)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_dropout_drops_its_share_and_its_gradient_is_that_of_what_is_left(
    dispatcher: Dispatcher,
) -> None:
    q, k = torch.zeros(1, 2, 64, 16), torch.zeros(1, 2, 64, 16)
    v = torch.eye(64)[None, None, :, :].expand(1, 2, 64, 64).contiguous().requires_grad_()
    o = dispatcher.attention(q, k, v, dropout_p=0.25)  # O is P after dropout, 1/64 where kept
    assert abs(float((o == 0).float().mean()) - 0.25) < 0.02  # 5 standard deviations
    assert torch.allclose(o[o != 0], torch.tensor(1 / 64 / 0.75))
    o.sum().backward()
    kept = o.detach().sum(2)  # dV of each key is what the rows kept of it
    assert v.grad is not None
    torch.testing.assert_close(v.grad, kept[..., None].expand_as(v), rtol=1e-5, atol=1e-6)


def test_autocast_casts_as_it_does_for_sdpa(dispatcher: Dispatcher) -> None:
    q, k, v = draw()
    want = dispatcher.attention(*(x.bfloat16() for x in (q, k, v)))
    x = leaves(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        o = dispatcher.attention(*x)
        assert dispatcher.attention(q.half(), k, v).dtype == torch.bfloat16
        with pytest.raises(InvalidArgument, match=r"q must be float16.* got float64"):
            dispatcher.attention(q.double(), k.double(), v.double())
        with pytest.raises(
            InvalidArgument, match=r"k must have the dtype of q.* got torch\.float64"
        ):
            dispatcher.attention(q, k.double(), v.double())
    with autocast_of_a_gpu():
        assert dispatcher.attention(q, k, v).dtype == torch.float32
    assert torch.equal(o, want)
    o.sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in x)


def test_autocast_leaves_a_bias_as_it_is(dispatcher: Dispatcher) -> None:
    q, k, v = draw()
    bias = 256 * torch.randn(1, 4, 20, 30)
    want = dispatcher.attention(*(x.bfloat16() for x in (q, k, v)), bias=bias)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(dispatcher.attention(q, k, v, bias=bias), want)
    rounded = dispatcher.attention(*(x.bfloat16() for x in (q, k, v)), bias=bias.bfloat16())
    assert not torch.equal(rounded, want)


ASKED: dict[str, dict[str, Any]] = {
    "bias": {"bias": torch.zeros(1, 1, 20, 30)},
    "mask": {"bias": torch.ones(20, 30, dtype=torch.bool)},
    "alibi": {"alibi_slopes": torch.ones(4)},
    "dropout": {"dropout_p": 0.5},
    "window": {"window": (3, 4)},
    "softcap": {"softcap": 2.0},
    "sink": {"sinks": torch.zeros(4)},
}
"""The same as arguments of a call."""
FEATURES = {
    "bias": Features(bias=torch.zeros(1, 1, 20, 30)),
    "mask": Features(bias=torch.ones(1, 1, 20, 30, dtype=torch.bool)),
    "alibi": Features(slopes=torch.ones(4)),
    "dropout": Features(dropout_p=0.5, rng=torch.zeros(2, dtype=torch.int64)),
    "window": Features(window=(3, 4)),
    "softcap": Features(softcap=2.0),
    "sink": Features(sinks=torch.zeros(4)),
}
WORDS = {"mask": "boolean-mask"}
"""What --feature calls those that it calls otherwise."""


@pytest.mark.parametrize("direction", ["forward", "backward_dkv"])
def test_tuning_is_advised_of_what_the_command_tunes(
    dispatcher: Dispatcher, direction: Direction
) -> None:
    q, k, v = draw(dim=40)
    plain = dispatcher.explain(q, k, v, direction=direction)
    assert plain.hint is not None
    assert "flashgen tune" in str(plain)
    for name, asked in ASKED.items():
        other = dispatcher.explain(q, k, v, **asked, direction=direction)
        if (name, direction) == ("sink", "backward_dkv"):
            assert other.hint == plain.hint  # the plain kernel
        else:
            assert other.hint == f"{plain.hint} --feature {WORDS.get(name, name)}"


@pytest.mark.parametrize("feature", ["none", *FEATURES])
def test_the_log_advises_tuning_likewise(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    feature: str,
) -> None:
    caplog.set_level(logging.INFO, "flashgen.runtime")
    monkeypatch.setenv("FLASHGEN_GPU", "nvidia_l4")
    q, k, v = draw(dim=40)
    features = FEATURES.get(feature, PLAIN)
    shipped = make_dispatcher(tmp_path, "nvidia_h200", "sm_90")
    call, tensors = Call(causal=False, scale=1.0, features=features).parts
    shipped.passes.forward(call, q, k, v, tensors)
    assert "the default kernel serves" in caplog.text
    assert "flashgen tune" in caplog.text
    word = WORDS.get(feature, feature)
    assert (f"--feature {word}" in caplog.text) == (feature != "none")
