"""What the registered operators must hold, with kernels (tests/interpreted) and with torch alone on
a CPU (tests/cpu). A subclass gives the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import flashgen.runtime.operators  # noqa: F401  # registers them
from flashgen.errors import InvalidArgument, NotDifferentiable
from flashgen.inputs.features import Features, all_parts_of
from flashgen.inputs.packed import from_bounds
from flashgen.runtime import Dispatcher
from flashgen.runtime.varlen import attention_varlen
from tests.makers import each
from tests.serving import leaves

LAYOUTS = ("bhsd", "bshd", "turned", "expanded", "every_other")
PACKAGE = "generated"


def draw(
    layout: str = "bhsd", sq: int = 20, sk: int = 30, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Q of 2 heads, K and V of 1, head dims 32, 32 and 16, all laid out alike."""
    torch.manual_seed(sq * sk)
    sizes = ((2, sq, 32), (1, sk, 32), (1, sk, 16))
    q, k, v = (torch.randn(2, h, s, d, device=device) for h, s, d in sizes)
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    if layout == "turned":
        q, k, v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v))
    if layout == "every_other":
        q, k, v = (
            x.transpose(1, 2).repeat_interleave(2, -1)[..., ::2].transpose(1, 2) for x in (q, k, v)
        )
    if layout == "expanded":
        q, k, v = (x[:1].expand(x.shape) for x in (q, k, v))
    return q, k, v


def arguments(
    *tensors: Tensor, bias: Tensor | None = None, causal: str = "none", features: bool = False
) -> tuple[Any, ...]:
    """Of the forward operator; `features` adds slopes, dropout, sinks, a window and a cap."""
    given = Features(bias=bias)
    if features:
        device = tensors[0].device
        given = Features(
            bias=bias,
            slopes=torch.tensor([0.5, 0.1], device=device),
            rng=torch.tensor([7, 9], device=device),
            sinks=torch.tensor([0.3, -1.0], device=device),
            dropout_p=0.3,
            window=(5, -1),
            softcap=2.0,
        )
    return (*tensors, *all_parts_of(given), None, causal, "ieee", True, PACKAGE)


def gradients(call: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
    x = leaves(*tensors)
    o = call(*x)
    return (o.detach(), *torch.autograd.grad(o.square().sum(), x))


def assert_same(found: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


class OperatorsContract:
    exact = True
    """Whether eager calls and operators compute by the same code, to the bit."""

    device = "cpu"
    layouts: tuple[str, ...] = LAYOUTS

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "layout" in metafunc.fixturenames:
            few = 4 if "opcheck" in metafunc.function.__name__ else 1
            metafunc.parametrize("layout", each(self.layouts, few, "seconds a layout"))

    @pytest.fixture
    def dispatcher(self) -> Dispatcher:
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def fresh_dynamo(self) -> None:
        torch._dynamo.reset()

    @pytest.mark.parametrize("features", each([True, False], 2, "seconds a call"))
    def test_opcheck_of_the_forward(
        self, dispatcher: Dispatcher, layout: str, features: bool
    ) -> None:
        """All of opcheck: the schema, autograd's registration, the fake and AOT's tracing."""
        bias = torch.randn(1, 2, 20, 30, device=self.device).requires_grad_() if features else None
        tensors = leaves(*draw(layout, device=self.device))
        given = arguments(*tensors, bias=bias, causal="bottom_right", features=features)
        if features:
            given[6].requires_grad_()  # the sinks
        torch.library.opcheck(torch.ops.flashgen.attention_forward.default, given)

    @pytest.mark.parametrize(
        "wanted", [(True,) * 5, *each([[False, True, False, False, False]], why="a second a call")]
    )
    def test_opcheck_of_the_backward(
        self, dispatcher: Dispatcher, layout: str, wanted: tuple[bool, ...]
    ) -> None:
        q, k, v = draw(layout, device=self.device)
        bias = torch.randn(2, 1, 30, 20, device=self.device).transpose(2, 3)
        given = arguments(q, k, v, bias=bias, features=wanted[4])
        o, lse = torch.ops.flashgen.attention_forward.default(*given)
        dlse = torch.randn(2, 2, 20, device=self.device) if wanted[0] else None
        torch.library.opcheck(
            torch.ops.flashgen.attention_backward.default,
            (torch.randn_like(o), dlse, o, lse, list(wanted), *given),
        )

    def test_both_roads_give_the_same(self, dispatcher: Dispatcher, layout: str) -> None:
        def by_operator(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            given = arguments(q, k, v, bias=bias, causal="bottom_right")
            o, lse = torch.ops.flashgen.attention_forward.default(*given)
            return o * lse[..., None]  # type: ignore[no-any-return]  # both flow back

        def eager(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            o, lse = dispatcher.attention(q, k, v, bias=bias, causal=True, return_lse=True)
            return o * lse[..., None]

        bias = torch.randn(1, 2, 30, 20, device=self.device).transpose(2, 3)
        tensors = (*draw(layout, device=self.device), bias)
        found, want = gradients(by_operator, *tensors), gradients(eager, *tensors)
        if self.exact:
            assert_same(found, want)
        else:
            for a, b in zip(found, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize("backend", each(["aot_eager", "eager"], 2, "torch compiles"))
    def test_compiled_without_a_graph_break_for_any_length(
        self, dispatcher: Dispatcher, backend: str
    ) -> None:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return dispatcher.attention(q * 2, k, v, causal=True, dropout_p=0.25)

        compiled = torch.compile(call, fullgraph=True, backend=backend, dynamic=True)
        for number, (sq, sk) in enumerate(((20, 30), (33, 17))):
            tensors = draw(sq=sq, sk=sk, device=self.device)
            torch.manual_seed(5)
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                found = gradients(compiled, *tensors)
            torch.manual_seed(5)
            want = gradients(call, *tensors)
            for a, b in zip(found, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)

    def test_opcheck_of_packed_sequences(self, dispatcher: Dispatcher) -> None:
        bounds = torch.tensor([0, 7, 20], dtype=torch.int32, device=self.device)
        given = Features(
            sinks=torch.tensor([0.3, -1.0], device=self.device).requires_grad_(),
            sequences=from_bounds(bounds, bounds, 13, 13),
        )
        tensors = leaves(*(x[:1] for x in draw(sk=20, device=self.device)))
        beside = (*all_parts_of(given), None, "bottom_right", "ieee", True, PACKAGE)
        torch.library.opcheck(torch.ops.flashgen.attention_forward.default, (*tensors, *beside))

    def test_packed_sequences_are_one_graph_of_any_lengths(self, dispatcher: Dispatcher) -> None:
        """Which torch compiles twice: for the first lengths, and for others."""

        def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *where: Any) -> Tensor:
            return attention_varlen(q.sin(), k, v, *where, causal=True, window=(5, 0), sinks=sinks)

        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for number, lengths in enumerate(([7, 1, 10], [4, 17], [9, 2, 3, 9], [3] * 6)):
            bounds = torch.tensor([0, *lengths], device=self.device).cumsum(0).int()
            where = bounds, bounds, max(lengths), max(lengths)
            sizes = ((2, 32), (1, 32), (1, 16))
            tensors = [torch.randn(sum(lengths), *each, device=self.device) for each in sizes]
            tensors.append(torch.randn(2, device=self.device))
            with torch._dynamo.config.patch(error_on_recompile=number > 1):
                found = gradients(lambda *x, on=where: compiled(*x, *on), *tensors)
            want = gradients(lambda *x, on=where: call(*x, *on), *tensors)
            for a, b in zip(found, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    def test_pages_have_no_gradient_within_a_graph(self, dispatcher: Dispatcher) -> None:
        q, pages = torch.randn(3, 2, 16, requires_grad=True), torch.randn(2, 4, 1, 16)
        bounds, used = torch.tensor([0, 3]).int(), torch.tensor([7]).int()
        options: dict[str, Any] = {"seqused_k": used, "block_table": torch.tensor([[1, 0]]).int()}

        def call(q: Tensor, k: Tensor) -> Tensor:
            return attention_varlen(q, k, k, bounds, None, 3, 7, causal=True, **options)

        found = torch.compile(call, fullgraph=True, backend="aot_eager")(q, pages)
        torch.testing.assert_close(found, call(q, pages))
        with pytest.raises(NotDifferentiable, match="over pages"):
            found.sum().backward()

    @pytest.mark.slow("Inductor takes 15 seconds; make test compiles with aot_eager")
    def test_compiled_by_inductor(self, dispatcher: Dispatcher) -> None:
        tensors = draw("bshd", device=self.device)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return dispatcher.attention(q.sin(), k, v, causal=True).cos()

        found = gradients(torch.compile(call, fullgraph=True), *tensors)
        for a, b in zip(found, gradients(call, *tensors), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    def test_autocast_within_a_graph(self, dispatcher: Dispatcher) -> None:
        q, k, v = draw(device=self.device)
        compiled = torch.compile(dispatcher.attention, fullgraph=True, backend="aot_eager")
        want = dispatcher.attention(*(x.bfloat16() for x in (q, k, v)))
        with torch.autocast(self.device, torch.bfloat16):
            found = compiled(q, k, v)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, want, rtol=0.0, atol=0.0 if self.exact else 1e-2)

    def test_checkpointed_within_a_graph(self, dispatcher: Dispatcher) -> None:
        """The recomputed forward drops what the first did."""

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return dispatcher.attention(q.sin(), k, v, causal=True, dropout_p=0.5)

        def again(*tensors: Tensor) -> Tensor:
            return checkpoint(call, *tensors, use_reentrant=False)  # type: ignore[no-any-return]

        found = []
        for run in (call, torch.compile(again, fullgraph=True, backend="aot_eager")):
            torch.manual_seed(3)
            found.append(gradients(run, *draw(device=self.device)))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize("strict", each([True, False], 2, "torch exports"))
    def test_exported_and_run_with_other_lengths(
        self, dispatcher: Dispatcher, strict: bool
    ) -> None:
        class Model(nn.Module):
            def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
                return dispatcher.attention(q, k, v, causal=True, return_lse=True)

        rows, keys = (torch.export.Dim(name, min=2, max=512) for name in ("rows", "keys"))
        shapes = ({2: rows}, {2: keys}, {2: keys})
        program = torch.export.export(
            Model(), draw(device=self.device), dynamic_shapes=shapes, strict=strict
        )
        assert "flashgen.attention_forward" in str(program.graph)
        tensors = draw(sq=9, sk=40, device=self.device)
        want = dispatcher.attention(*tensors, causal=True, return_lse=True)
        assert_same(program.module()(*tensors), want)

    def test_fake_tensors_run_nothing(self, dispatcher: Dispatcher) -> None:
        with FakeTensorMode() as mode:
            q, k, v = (mode.from_tensor(x) for x in draw("bshd", device=self.device))
            o, lse = dispatcher.attention(q, k, v, return_lse=True)
        want = dispatcher.attention(*draw("bshd", device=self.device), return_lse=True)
        assert [(x.shape, x.dtype) for x in (o, lse)] == [(x.shape, x.dtype) for x in want]

    def test_what_the_operators_refuse(self, dispatcher: Dispatcher) -> None:
        q, k, v = draw(device=self.device)
        operator = torch.ops.flashgen.attention_forward.default
        with pytest.raises(InvalidArgument, match="vmap"):
            torch.vmap(lambda x: operator(*arguments(x, k, v))[0])(q[None])
        with pytest.raises(InvalidArgument, match="heads"):
            operator(*arguments(q, k[:, :0], v[:, :0]))
        with pytest.raises(InvalidArgument, match="causal"):
            operator(*arguments(q, k, v, causal="diagonal"))
        x = q.clone().requires_grad_()
        loss = operator(*arguments(x, k, v))[0].square().sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(NotDifferentiable, match="MATH"):
            first.sum().backward()

    @pytest.mark.parametrize("of", [0, 1], ids=["o", "lse"])
    def test_what_may_not_flow_back(self, dispatcher: Dispatcher, of: int) -> None:
        """Tangents and mapped dimensions of dO and dLSE: the operator's backward refuses both."""
        x = leaves(*draw(device=self.device))
        output = torch.ops.flashgen.attention_forward.default(*arguments(*x))[of]
        ones = torch.ones_like(output)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(ones, ones)  # type: ignore[no-untyped-call]
            with pytest.raises(NotDifferentiable, match="forward-mode"):
                torch.autograd.grad(output, x, dual, retain_graph=True)
        with pytest.raises(InvalidArgument, match="is_grads_batched"):
            torch.autograd.grad(output, x, ones[None], is_grads_batched=True)
