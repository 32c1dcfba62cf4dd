"""flashgen as torch's flash attention: what it registers, and its operators on CPU tensors. That torch calls them on
a GPU is in tests/driver/test_torch_flash.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import attention as impls
from torch.nn.functional import scaled_dot_product_attention

import flashgen.runtime.torch as hook
from flashgen.errors import InvalidArgument
from flashgen.runtime import flash_attn, folders
from tests.serving import leaves

FORWARD = hook.OPERATORS["_scaled_dot_product_flash_attention"]
BACKWARD = hook.OPERATORS["_scaled_dot_product_flash_attention_backward"]
VARLEN = hook.OPERATORS["_flash_attention_forward"]
VARLEN_BACKWARD = hook.OPERATORS["_flash_attention_backward"]


@pytest.fixture
def registered() -> Iterator[None]:
    hook.register()
    yield
    impls.restore_flash_attention_impl()


def overridden() -> set[str]:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return {name for name in hook.OPERATORS if has(f"aten::{name}", "CUDA")}


def test_nothing_is_replaced_before_activation_nor_after_restoring(registered: None) -> None:
    assert "flashgen" in impls.list_flash_attention_impls()
    own = overridden()
    assert impls.current_flash_attention_impl() is None
    for _ in range(2):
        impls.activate_flash_attention_impl("flashgen")
        assert impls.current_flash_attention_impl() == "flashgen"
        assert overridden() == set(hook.OPERATORS)
        impls.restore_flash_attention_impl()
        assert impls.current_flash_attention_impl() is None
        assert overridden() == own


@pytest.mark.parametrize("invariant", [False, True])
def test_a_registration_says_whether_calls_are_invariant(
    monkeypatch: pytest.MonkeyPatch, invariant: bool
) -> None:
    served: dict[str, Any] = {}

    class Written:
        def __init__(self, *_: str) -> None:
            pass

        def impl(self, name: str, function: Any, key: str) -> None:
            served[name] = function

        def _destroy(self) -> None:
            pass

    asked: list[bool] = []
    features = hook.features_of

    def features_of(**fields: Any) -> Any:
        asked.append(fields["invariant"])
        return features(**fields)

    monkeypatch.setattr(hook, "Library", Written)
    monkeypatch.setattr(hook, "features_of", features_of)
    hook.register(invariant=invariant)
    impls.activate_flash_attention_impl("flashgen")
    impls.restore_flash_attention_impl()
    q, k, v = (x.float() for x in draw(1, 2, 5, 16))
    o, lse, *_, seed, unused, _ = served["_scaled_dot_product_flash_attention"](q, k, v)
    torch.testing.assert_close(o, scaled_dot_product_attention(q, k, v))
    heads_last = [x[0].transpose(0, 1) for x in (q, k, v)]
    bounds = torch.tensor([0, 5], dtype=torch.int32)
    packed = bounds, bounds, 5, 5, 0.0, False
    served["_flash_attention_forward"](*heads_last, *packed, False)
    assert asked == [invariant] * 2
    monkeypatch.setattr(hook, "backward_of", lambda *_: heads_last)
    monkeypatch.setattr(hook, "_as_given", lambda found, _: found)
    served["_flash_attention_backward"](
        o[0].transpose(0, 1), *heads_last, o[0].transpose(0, 1), lse[0], *packed, seed, unused
    )
    served["_scaled_dot_product_flash_attention_backward"](
        o, q, k, v, o, lse, None, None, 5, 5, 0.0, False, seed, unused
    )
    assert asked == [invariant] * 4
    hook.register()


def test_a_registration_takes_bools_alone() -> None:
    with pytest.raises(InvalidArgument, match="invariant must be True or False: got 1"):
        hook.register(invariant=1)  # type: ignore[arg-type]


def draw(*shape: int, heads: int | None = None, keys: int | None = None) -> list[Tensor]:
    """q, k and v of (batch, heads, seq, dim), laid out as (batch, seq, heads, dim)."""
    batch, q_heads, seq, dim = shape
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = [(seq, q_heads)] + [(keys or seq, heads or q_heads)] * 2
    return [
        torch.randn(batch, length, count, dim, generator=generator, dtype=torch.bfloat16).transpose(1, 2)
        for length, count in sizes
    ]  # fmt: skip


def both(tensors: list[Tensor], do: Tensor, *options: Any, **more: Any) -> list[Tensor]:
    """O, dQ, dK and dV by the operators, as torch's formula calls them."""
    o, lse, cum_q, cum_k, max_q, max_k, seed, unused, _ = FORWARD(*tensors, *options, **more)
    found = BACKWARD(
        do, *tensors, o, lse, cum_q, cum_k, max_q, max_k, *options, seed, unused, **more
    )
    return [o, *found]


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("dim", [8, 32])
@pytest.mark.parametrize("causal", [False, True])
def test_the_operators_compute_what_math_computes(heads: int, dim: int, causal: bool) -> None:
    tensors = draw(2, 4, 19, dim, heads=heads)
    torch.manual_seed(dim)
    do = torch.randn_like(tensors[0])
    found = both(tensors, do, 0.0, causal, scale=0.4)
    q, k, v = leaves(*(x.double() for x in tensors))
    want = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.4, enable_gqa=True)
    wanted = [want, *torch.autograd.grad(want, (q, k, v), do.double())]
    for name, own, right, given in zip(
        "o q k v".split(), found, wanted, [do, *tensors], strict=True
    ):
        torch.testing.assert_close(own.double(), right, rtol=0.03, atol=0.03, msg=name)
        assert own.stride() == torch.empty_like(given).stride()


def test_a_causal_mask_is_aligned_at_the_bottom_right() -> None:
    """As torch.nn.attention.bias.causal_lower_right calls it."""
    tensors = draw(1, 2, 3, 16, keys=9)
    o = FORWARD(*tensors, is_causal=True)[0]
    mask = torch.ones(3, 9, dtype=torch.bool).tril(6)
    torch.testing.assert_close(
        o, scaled_dot_product_attention(*tensors, mask), rtol=0.02, atol=0.02
    )


def test_the_backward_drops_what_the_forward_dropped() -> None:
    tensors = draw(1, 2, 33, 16)
    do = torch.randn_like(tensors[0])
    torch.manual_seed(5)
    found = both(tensors, do, 0.5, True)
    torch.manual_seed(5)
    q, k, v = leaves(*tensors)
    o = folders.current().attention(q, k, v, causal=True, dropout_p=0.5)
    for own, right in zip(found, [o, *torch.autograd.grad(o, (q, k, v), do)], strict=True):
        torch.testing.assert_close(own, right, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("sides", [(None, None), (-1, 0), (3, 0), (4, 2)])
def test_packed_sequences_and_windows(sides: tuple[int | None, int | None]) -> None:
    q, k, v = (x[0].transpose(0, 1) for x in draw(1, 2, 20, 16))
    do, bounds = torch.randn_like(q), torch.tensor([0, 7, 20], dtype=torch.int32)
    where = bounds, bounds, 13, 13
    window = dict(zip(("window_size_left", "window_size_right"), sides, strict=True))
    o, lse, seed, unused, _ = VARLEN(q, k, v, *where, 0.0, False, False, **window)
    found = VARLEN_BACKWARD(do, q, k, v, o, lse, *where, 0.0, False, seed, unused, **window)
    leaf = leaves(q, k, v)
    size = tuple(-1 if side is None else side for side in sides)
    want, want_lse, _ = flash_attn.flash_attn_varlen_func(
        *leaf, *where, window_size=size, return_attn_probs=True
    )
    torch.testing.assert_close(lse, want_lse)
    wanted = [want, *torch.autograd.grad(want, leaf, do)]
    for own, right in zip([o, *found], wanted, strict=True):
        torch.testing.assert_close(own, right, rtol=0.05, atol=0.05)
    into = torch.empty_like(q)
    hook.OPERATORS["_flash_attention_forward_no_dropout_inplace"](
        into, q, k, v, *where, 0.0, False, False, **window
    )
    assert torch.equal(into, o)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_backward_is_deterministic_where_torch_is(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    tensors, seen = draw(1, 1, 4, 16), []
    passes = folders.current().passes
    backward = passes.backward

    def record(call: Any, *rest: Any) -> Any:
        seen.append(call.deterministic)
        return backward(call, *rest)

    monkeypatch.setattr(passes, "backward", record)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    both(tensors, torch.ones_like(tensors[0]), 0.0, False)
    assert seen == [deterministic]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3)])
def test_results_have_the_strides_that_tracing_expects(order: tuple[int, ...]) -> None:
    """torch.compile generates code for these strides, and checks them when it runs."""
    shape = (2, 4, 6, 16)
    memory = torch.randn([shape[i] for i in order], dtype=torch.float16)
    tensors = [memory.permute([order.index(i) for i in range(4)]) for _ in range(3)]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in tensors]
        expected = torch.ops.aten._scaled_dot_product_flash_attention(*fakes)
    found = FORWARD(*tensors)
    for place in (0, 1):
        assert found[place].shape == expected[place].shape
        assert found[place].stride() == expected[place].stride()
    for place in (6, 7, 8):  # torch has one more debug_mask of no element
        assert (found[place].shape, found[place].dtype) == (
            expected[place].shape,
            expected[place].dtype,
        )


def test_what_is_refused() -> None:
    q, k, v = draw(1, 1, 4, 16)
    with pytest.raises(InvalidArgument, match="return_debug_mask must be False"):
        FORWARD(q, k, v, 0.0, False, True)
    with pytest.raises(InvalidArgument, match="need cum_seq_q"):
        VARLEN(q, k, v, None, None, 4, 4, 0.0, False, False, seqused_k=torch.ones(1))
