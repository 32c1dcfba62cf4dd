"""Unchanged calls of torch, with flashgen as its flash attention."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn import attention as impls
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

import flashgen.runtime.torch
from flashgen.runtime import folders
from flashgen.runtime.resolver import Resolver
from flashgen.runtime.ways import ChosenWay
from tests.driver.cases import tensors
from tests.driver.events import Launch, Recording, TorchKernel


@pytest.fixture
def active() -> Iterator[None]:
    flashgen.runtime.torch.register()
    impls.activate_flash_attention_impl("flashgen")
    yield
    impls.restore_flash_attention_impl(_raise_warn=False)


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q, k, v, **options)  # type: ignore[arg-type]


def packed(*given: Tensor | int, **options: object) -> Tensor:
    """Torch 2.15 prefers cuDNN."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return varlen_attn(*given, **options)  # type: ignore[arg-type, return-value]


def step(*shape: int, **options: object) -> list[Tensor]:
    """O and the gradients of an SDPA call."""
    q, k, v = (x.requires_grad_() for x in tensors(*shape))
    o = sdpa(q, k, v, **options)
    return [o, *torch.autograd.grad(o, (q, k, v), torch.empty_like(o))]


def kernels(recording: Recording) -> list[str]:
    """The directions of the kernels that ran, and torch's own if they are of flash attention. What Inductor
    compiled is left out: from torch 2.15 on it copies an input of attention that it recognizes.
    """
    launched = [
        each.kernel for each in recording.of(Launch) if not each.kernel.startswith("triton_")
    ]
    own = [re.split("_(?:bf16|fp16)", name)[0] for name in launched]
    return own + ["torch" for each in recording.of(TorchKernel) if "flash" in each.name]


PAIR = ["fwd", "bwd_delta", "bwd_dkv", "bwd_dq"]
FUSED = ["fwd", "bwd_delta", "bwd_fused"]
BY_DS = ["fwd", "bwd_delta", "bwd_ds", "bwd_dq_of_ds"]
TRAINING = (PAIR, FUSED, BY_DS)
"""Either, as the table of the GPU prefers."""


def test_activate_and_restore(active: None) -> None:
    for use in (True, False, True):
        if use:
            impls.activate_flash_attention_impl("flashgen")
        else:
            impls.restore_flash_attention_impl()
        recording = Recording()
        step(2, 8, 256, 64, is_causal=True)
        ran = kernels(recording)
        assert ran in TRAINING if use else set(ran) == {"torch"}


def test_an_invariant_registration_runs_kernels_of_a_class(recording: Recording) -> None:
    flashgen.runtime.torch.register(invariant=True)
    impls.activate_flash_attention_impl("flashgen")
    try:
        step(1, 4, 128, 64, is_causal=True)
    finally:
        impls.restore_flash_attention_impl(_raise_warn=False)
    names = [each.kernel for each in recording.of(Launch)]
    assert kernels(recording) == PAIR
    assert all("_inv" in name for name in names if "delta" not in name), names


SLOW = pytest.mark.slow(
    "compiles for seconds; make -f tests/sessions.mk test-driver-short has a sample, and forwards alone"
)
FORWARD_IS_QUICK = [
    ((2, 2, 64, 256), {"is_causal": True}),
    ((2, 2, 64, 8), {}),
    ((2, 2, 64, 20), {}),
    ((1, 4, 128, 64), {"dropout_p": 0.1}),
]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 4, 128, 128), {}),
        ((1, 4, 128, 128), {"scale": 0.3}),
        *(pytest.param(*each, marks=SLOW) for each in FORWARD_IS_QUICK),
    ],
    ids=str,
)
def test_sdpa_runs_on_flashgen(
    active: None, recording: Recording, shape: tuple[int, ...], options: dict[str, object]
) -> None:
    for x in step(*shape, **options):
        assert x.shape == shape
    assert kernels(recording) in TRAINING


@pytest.mark.parametrize(("shape", "options"), FORWARD_IS_QUICK, ids=str)
def test_sdpa_without_gradients_runs_on_flashgen(
    active: None, recording: Recording, shape: tuple[int, ...], options: dict[str, object]
) -> None:
    q, k, v = tensors(*shape)
    assert sdpa(q, k, v, **options).shape == shape
    assert kernels(recording) == ["fwd"]


@pytest.mark.parametrize(
    ("faster", "deterministic", "ran"),
    [(True, False, FUSED), (True, True, PAIR), (False, False, PAIR)],
    ids=["fused", "deterministic", "pair"],
)
def test_the_fused_backward_runs_where_torch_may_be_nondeterministic(
    active: None,
    recording: Recording,
    monkeypatch: pytest.MonkeyPatch,
    faster: bool,
    deterministic: bool,
    ran: list[str],
) -> None:
    """Torch's flash attention adds dQ by atomics unless deterministic algorithms are asked for. So a table may prefer
    a kernel that does, in any bucket.
    """

    def way(*_: object, deterministic: bool) -> ChosenWay:
        return ChosenWay("fused" if faster and not deterministic else "pair")

    monkeypatch.setattr(Resolver, "way", way)
    monkeypatch.setattr(folders.current().resolver, "launchers", {})
    mode = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(deterministic)
    try:
        step(1, 4, 128, 128)
    finally:
        torch.set_deterministic_debug_mode(mode)
    assert kernels(recording) == ran


@pytest.mark.parametrize("window", [(-1, -1), (32, 0)])
def test_packed_sequences_without_gradients_run_on_flashgen(
    active: None, recording: Recording, window: tuple[int, int]
) -> None:
    q, k, v = tensors(300, 4, 64)
    bounds = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    packed(q, k, v, bounds, bounds, 200, 200, window_size=window)
    assert kernels(recording) == ["fwd"]


def test_grouped_heads_and_the_layout_of_a_projection(active: None, recording: Recording) -> None:
    q, *_ = tensors(2, 128, 8, 64)
    k, v, *_ = tensors(2, 128, 2, 64)
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in (q, k, v))
    o = sdpa(q, k, v, is_causal=True, enable_gqa=True)
    assert o.stride() == q.stride()
    torch.autograd.grad(o, (q, k, v), torch.empty_like(o))
    assert kernels(recording) in TRAINING


@pytest.mark.parametrize(
    "window", [pytest.param((-1, -1), marks=SLOW), (-1, 0), pytest.param((32, 0), marks=SLOW)]
)
def test_packed_sequences_run_on_flashgen(
    active: None, recording: Recording, window: tuple[int, int]
) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(300, 4, 64))
    bounds = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    o = packed(q, k, v, bounds, bounds, 200, 200, window_size=window)
    torch.autograd.grad(o, (q, k, v), torch.empty_like(o))
    assert kernels(recording) in TRAINING


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_calls_run_on_flashgen(active: None, recording: Recording, backend: str) -> None:
    """What Inductor makes checks the strides of the results. It launches no kernel of its own here, which the
    recording driver cannot load.
    """

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, is_causal=True)

    q, k, v = (x.transpose(1, 2).requires_grad_() for x in tensors(2, 128, 4, 64))
    compiled: Callable[..., Tensor] = torch.compile(causal, backend=backend, fullgraph=True)
    o = compiled(q, k, v)
    torch.autograd.grad(o, (q, k, v), torch.empty_like(o))
    assert kernels(recording) in TRAINING


def divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).div(8.0).softmax(-1) @ v


def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).mul(0.1).softmax(-1) @ v


def heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of (batch, seq, heads, dim), with the softmax in float32."""
    q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
    s = (q @ k.transpose(-2, -1) / 8.0).to(torch.float32)
    return torch.softmax(s, dim=-1).to(torch.float16) @ v


def divided_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
    s = (q / 8.0) @ k.transpose(-2, -1)
    return torch.softmax(s.to(torch.float32), dim=-1).to(torch.float16) @ v


@pytest.mark.parametrize(
    ("written", "trains"),
    [
        pytest.param(
            written,
            trains,
            id=f"{written.__name__}-{'training' if trains else 'inference'}",
            marks=SLOW if trains and written not in (divided, heads_last) else (),
        )
        for written in (divided, scaled, heads_last, divided_first)
        for trains in (False, True)
    ],
)
def test_attention_that_inductor_recognizes_runs_on_flashgen(
    active: None, recording: Recording, written: Callable[..., Tensor], trains: bool
) -> None:
    """A sample of the patterns that Inductor replaces by SDPA, written from their algorithms."""
    counters.clear()
    torch._dynamo.reset()
    x = tensors(2, 64, 64, 64, dtype=torch.float16)
    q, k, v = (each.requires_grad_(trains) for each in x)
    compiled: Callable[..., Tensor] = torch.compile(written, backend="inductor", fullgraph=True)
    uncached = torch._inductor.config.patch(
        force_disable_caches=True
    )  # a cached graph counts nothing
    with uncached, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        o = compiled(q, k, v)
        if trains:
            torch.autograd.grad(o, (q, k, v), torch.empty_like(o))
    assert counters["inductor"]["fuse_attention"] >= 1
    assert kernels(recording) in (TRAINING if trains else (["fwd"],))


def test_a_capture_is_whole(active: None, recording: Recording) -> None:
    q, k, v = tensors(2, 8, 256, 64)
    for _ in range(3):
        sdpa(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sdpa(q, k, v)
    assert [each.captured for each in recording.of(Launch)] == [False, False, False, True]


def test_nested_tensors_run_on_flashgen(active: None, recording: Recording) -> None:
    bounds = torch.tensor([0, 100, 300], device="cuda")
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(x, bounds, min_seqlen=100, max_seqlen=200).transpose(
            1, 2
        )
        for x in tensors(300, 4, 64)
    )
    assert sdpa(q, k, v, is_causal=True).is_nested
    assert kernels(recording) == ["fwd"]


def test_diffusers_runs_on_flashgen(active: None, recording: Recording) -> None:
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
    q, k, v = tensors(2, 128, 4, 64)  # (batch, seq, heads, head_dim)
    o = dispatch.dispatch_attention_fn(q, k, v, backend=dispatch.AttentionBackendName._NATIVE_FLASH)
    assert o.shape == q.shape
    assert kernels(recording) == ["fwd"]


@pytest.mark.parametrize(
    ("hook", "module"), [("fa3", "flash_attn_3_operators"), ("fa4", "flash_attn_4")]
)
def test_torchs_own_hooks_find_the_names(recording: Recording, hook: str, module: str) -> None:
    """By the name of a module that registers torch.ops.flash_attn_3, or has FlashAttention 4's functions."""
    hooks = importlib.import_module(f"torch.nn.attention._{hook}")
    handle = getattr(hooks, f"register_flash_attention_{hook}")(f"flashgen.runtime.{module}")
    try:
        step(2, 8, 256, 64, is_causal=True)
        assert kernels(recording) in TRAINING
    finally:
        handle.library._destroy()
        handle.remove()
