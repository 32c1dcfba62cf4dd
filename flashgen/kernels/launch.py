"""Loads a kernel module, binds its arguments, builds descriptors and launches it.

The check, the measurement and the runtime all use this launcher, so what was checked and timed is
what is served. Tensors are (batch, heads, seq, head_dim) in any strides with a contiguous last
dimension.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from flashgen.errors import FlashgenError, NoGpuError, ToolchainError
from flashgen.kernels import interpreter
from flashgen.kernels.descriptors import (
    describe,
    describe_for_gluon,
    take_descriptors,
    takes_descriptor,
)
from flashgen.kernels.direct_launch import Direct
from flashgen.kernels.signature import Signature, compile_signature
from flashgen.spec import gpu as gpu_facts
from flashgen.spec import grid_rules
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import BY_KEYS, WARPGROUP_ROWS, KernelConfig, rows_of_eight
from flashgen.spec.features import PLAIN, Features
from flashgen.spec.gpu import Gpu
from flashgen.spec.packed import Sequences
from flashgen.spec.vocabulary import padded

logger = logging.getLogger("flashgen.kernels.launch")

LOG2_E = 1.4426950408889634


class Takes(Protocol):
    """What of a kernel decides which arguments features become: kernels/launch.py's Plan has it."""

    causal: bool
    takes_sink: bool
    by_keys: bool


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The kernels take a scale above 0: a negative one is carried by q, and 0 makes q 0, both
    exactly.
    """
    if scale > 0:
        return q, scale
    if q.element_size() == 1:  # torch has no minus of float8, but their bytes have a sign
        turned = (q.view(torch.uint8) ^ 128).view(q.dtype)
        return (turned, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
    return (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)


def in_eights(x: Tensor) -> Tensor:
    """x, copied if its strides are no multiples of 8 elements: kernels of such head dims rely on
    it.
    """
    if lies_in_eights(x):
        return x
    _say_copied()
    return x.contiguous()


def lies_in_eights(x: Tensor) -> bool:
    """Whether all its strides but the last are multiples of 8 elements."""
    return all(
        length <= 1 or stride % 8 == 0
        for length, stride in zip(x.shape[:3], x.stride()[:3], strict=True)
    )


@functools.cache
def _say_copied() -> None:
    """Once a process, whatever the lengths."""
    logger.warning("tensors are copied whose strides are no multiples of 8 elements")


def feature_arguments(
    plan: Takes, features: Features, batch: int, heads: int, seq_q: int, seq_k: int
) -> list[Any]:
    """What a kernel takes of the features that change scores, in the order of its arguments."""
    arguments: list[Any] = []
    if features.bias is not None:
        bias = features.bias.resolve_neg().expand(batch, heads, seq_q, seq_k)
        if bias.dtype is torch.bool:
            bias = bias.view(torch.uint8)
        arguments += [bias, *bias.stride()]
    if features.slopes is not None:
        slopes = features.slopes.resolve_neg().expand(batch, heads)
        arguments += [slopes, *slopes.stride()]
    if features.rng is not None:
        arguments += [features.rng, features.dropout_threshold, features.keep_scale]
    if features.window is not None:
        left, right = features.bounds(seq_q, seq_k)
        arguments += [left] if plan.causal else [left, right]
    if features.softcap > 0.0:
        cap_log2e = features.softcap * LOG2_E
        arguments += [cap_log2e, 1.0 / cap_log2e]
    if plan.takes_sink and features.sinks is not None:
        arguments.append(features.sinks.resolve_neg().contiguous())
    if features.fp8 is not None:
        factors = [x.resolve_neg() for x in features.fp8.factors]
        arguments += [*factors, *(stride for x in factors for stride in x.stride())]
    return arguments


def place_arguments(plan: Takes, features: Features) -> list[Any]:
    """What a kernel takes last: where packed sequences lie, or the lists of a block mask."""
    arguments: list[Any] = []
    if (packed := features.sequences) is not None:
        arguments += [*(x.resolve_neg() for x in packed.bounds), packed.count]
        if packed.block_table is not None:
            table = packed.block_table.resolve_neg()
            arguments += [table, table.stride(0), packed.page_bits]
    if (mask := features.block_mask) is not None:
        *_, rows, keys = mask.shape
        own, other = (keys, rows) if plan.by_keys else (rows, keys)
        arguments += [*mask.listed(by_keys=plan.by_keys), *mask.steps, own, other]
    return arguments


def diagonal_argument(
    diagonal: int | None, seq_q: int, seq_k: int, packed: Sequences | None
) -> int:
    """What a kernel that takes a diagonal is told: where it is, or of packed sequences, each of
    which has its own, at which end it is.
    """
    if packed is not None:
        return int(diagonal is None or packed.bottom_right)
    return seq_k - seq_q if diagonal is None else diagonal


__all__ = [
    "LOG2_E",
    "Bound",
    "Kernel",
    "Signature",
    "arguments_of",
    "bind",
    "compile_signature",
    "describe",
    "describe_for_gluon",
    "device_gpu",
    "diagonal_argument",
    "empty_like_layout",
    "feature_arguments",
    "in_eights",
    "kernel_of",
    "launch",
    "lies_in_eights",
    "load_kernel",
    "place_arguments",
    "positive_scale",
    "take_descriptors",
    "takes_descriptor",
    "toolchain_error",
]

logger = logging.getLogger("flashgen.kernels.launch")


Kernel = Any  # a triton.runtime.JITFunction, or its interpreted twin


def load_kernel(path: Path, name: str) -> Kernel:
    """The kernel `name` of the file at `path`, imported under a name of its own.

    Triton reads a kernel's source from its file, so it must be a real one. Raises FlashgenError
    where the file defines no such kernel.
    """
    interpreter.prepare()
    module_name = f"_flashgen_kernel_{name}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise FlashgenError(f"{path} cannot be imported as a kernel module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except OSError as error:
        raise FlashgenError(f"the kernel file cannot be read: {error}") from error
    return kernel_of(module, name)


def kernel_of(module: object, name: str) -> Kernel:
    """The kernel `name` of an imported module. Raises FlashgenError where it is not there."""
    kernel = getattr(module, name, None)
    if kernel is None:
        raise FlashgenError(f"{getattr(module, '__file__', module)} defines no kernel {name}")
    return kernel


def toolchain_error(error: BaseException) -> ToolchainError | None:
    """The sentence for a machine on which Triton finds no C compiler; None for any other error."""
    if "C compiler" not in str(error):
        return None
    return ToolchainError(
        "Triton needs a C compiler at a kernel's first launch and found none: "
        "install gcc or clang, or set CC"
    )


def device_gpu(index: int = 0, *, instead: str = "flashgen tune --target nvidia_h200") -> Gpu:
    """The Gpu of a CUDA or ROCm device. Raises NoGpuError where there is none, which names the
    command that does without, `instead`, and ToolchainError without a C compiler.
    """
    if not torch.cuda.is_available():
        raise NoGpuError(f"torch sees no GPU here; without one, type: {instead}")
    from triton.runtime import driver

    try:
        # The first use of the driver builds it, with a C compiler.
        limits = driver.active.utils.get_device_properties(index)
    except Exception as error:
        raise toolchain_error(error) or error from error
    return gpu_facts.from_properties(
        torch.cuda.get_device_properties(index),
        shared_per_block=limits["max_shared_mem"],
        registers_per_sm=limits["max_num_regs"],
    )


def launch(
    kernel: Kernel,
    spec: AttentionSpec,
    config: KernelConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    diagonal: int | None,
    features: Features = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Run a forward kernel. q (B, H, Sq, d), k (B, Hkv, Sk, d), v (B, Hkv, Sk, d_v); diagonal as
    spec.diagonal_of gives; features are those the spec asks for.

    Returns O (B, H, Sq, d_v) of q's dtype, laid out in memory as q is, and LSE (B, H, Sq) float32,
    natural logarithm. Raises whatever Triton raises, OutOfResources among it.
    """
    return bind(kernel, spec, config)(q, k, v, scale, diagonal, features)


class Bound:
    """A forward kernel with all settled that does not depend on the call."""

    __slots__ = ("plan",)

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        diagonal: int | None,
        features: Features = PLAIN,
    ) -> tuple[Tensor, Tensor]:
        """O and LSE, as launch() describes them."""
        return _run(self.plan, q, k, v, scale, diagonal, features)


def bind(kernel: Kernel, spec: AttentionSpec, config: KernelConfig) -> Bound:
    """All that does not depend on the call, settled once."""
    return Bound(Plan(kernel, spec, config))


class Plan:
    """A kernel with what every launch of it needs, read off spec and config once."""

    def __init__(self, kernel: Kernel, spec: AttentionSpec, config: KernelConfig) -> None:
        self.kernel = kernel
        if interpreter.active() and not config.interpretable:
            raise ToolchainError(
                f"schedule {config.schedule} is Gluon, for which Triton has no interpreter: "
                "run it on an sm_90 GPU, with TRITON_INTERPRET unset"
            )
        self.start = Direct(kernel, config.launch_options)
        self.config = config
        self.direction = spec.direction
        self.br = config.br
        self.bc = config.bc
        self.hopper = config.schedule == "hopper"
        # Each consumer of schedule hopper loads and stores rows of its own.
        self.block_rows = WARPGROUP_ROWS if self.hopper else config.br
        self.takes_diagonal = spec.takes_diagonal
        self.causal = spec.causal
        self.has_features = spec.featured
        self.takes_sink = spec.sink
        self.varlen = spec.varlen
        self.by_keys = spec.direction in BY_KEYS
        self.counts_keys = spec.counts_keys
        self.outer = 1 if spec.varlen else 0  # the first stride of what is packed
        self.outer_k = 1 if spec.varlen and not spec.paged else 0
        self.by_descriptor = config.loads == "descriptor"
        self.any_dim = config.head_dims == "padded"
        self.fa1 = config.schedule == "fa1"
        self.rows_of_eight = rows_of_eight(spec, config)
        self.v_parts = config.v_parts
        self.native = config.widening == "native"
        self.dim_pad = padded(spec.head_dim)
        self.dim_v_pad = padded(spec.head_dim_v)


def _run(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    diagonal: int | None,
    features: Features = PLAIN,
) -> tuple[Tensor, Tensor]:
    batch, heads, seq_q, _ = q.shape
    _, _, seq_k, head_dim_v = v.shape
    of_o = None if features.fp8 is None else getattr(torch, features.fp8.dtype)
    o = empty_like_layout(q, head_dim_v, of_o)
    lse = torch.empty((batch, heads, seq_q), dtype=torch.float32, device=q.device)
    if o.numel() == 0:
        return o, lse
    if seq_k == 0 and not plan.varlen:
        sinks = features.sinks
        lse.copy_(sinks[:, None].expand(lse.shape)) if sinks is not None else lse.fill_(-math.inf)
        return o.zero_(), lse
    q, scale = positive_scale(q, scale)
    if plan.rows_of_eight:
        q, k, v = in_eights(q), in_eights(k), in_eights(v)
    if features.sequences is not None and features.sequences.count == 0:
        return o.zero_(), lse.fill_(-math.inf)
    blocks, arguments = arguments_of(plan, q, k, v, o, lse, scale, diagonal, features)
    with on_device(q):
        plan.start(blocks, arguments)
    return o, lse


def arguments_of(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    diagonal: int | None,
    features: Features = PLAIN,
) -> tuple[int, list[Any]]:
    """How many programs a forward launch has, none of its tensors empty, and what they are handed:
    first q, k, v, o and lse, or descriptors of the first four.
    """
    batch, heads, seq_q, head_dim = q.shape
    _, kv_heads, seq_k, head_dim_v = v.shape
    batches, longest = batch, seq_q
    if (packed := features.sequences) is not None:
        batches, longest = packed.count, max(1, packed.max_q)
        seq_k = packed.most_keys(seq_k)
    blocks = batches * heads
    if not plan.fa1:
        blocks *= -(-longest // plan.br)
    blocks *= plan.v_parts
    if plan.by_descriptor:
        tensors: list[Any] = [*described(plan, q, k, v, o), lse]
    else:
        tensors = [
            q,
            k,
            v,
            o,
            lse,
            *q.stride()[plan.outer : 3],
            *k.stride()[plan.outer_k : 3],
            *v.stride()[plan.outer_k : 3],
            *o.stride()[plan.outer : 3],
        ]
    sizes: list[Any] = [scale * LOG2_E, heads, heads // kv_heads, seq_q]
    if packed is None or plan.counts_keys:
        sizes.append(seq_k)
    if packed is not None:
        sizes.append(longest)
    if plan.takes_diagonal:
        sizes.append(diagonal_argument(diagonal, seq_q, seq_k, packed))
    if plan.any_dim:
        sizes += [head_dim, head_dim_v]
    if plan.has_features:
        sizes += feature_arguments(plan, features, batches, heads, seq_q, seq_k)
    if plan.config.takes_heads:
        blocks = _in_order(plan, blocks, q, v, sizes)
    if plan.fa1:
        sizes += _scratch(plan, q)
    if plan.has_features:
        sizes += place_arguments(plan, features)
    return blocks, [*tensors, *sizes]


def described(plan: Plan, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> list[Any]:
    """The descriptors of a forward kernel."""
    descriptor = describe_for_gluon if plan.hopper else describe
    return [
        descriptor(q, plan.block_rows, plan.dim_pad),
        descriptor(k, plan.bc, plan.dim_pad),
        descriptor(v, plan.bc, plan.dim_v_pad),
        descriptor(o, plan.block_rows, plan.dim_v_pad),
    ]


def _in_order(plan: Plan, blocks: int, q: Tensor, v: Tensor, sizes: list[Any]) -> int:
    """Append what orders of tiles ask for; the programs to launch."""
    batch, heads, _, head_dim = q.shape
    _, kv_heads, seq_k, head_dim_v = v.shape
    limits = order_limits(q.device)
    sizes.append(batch * heads)
    if plan.config.order == "grouped":
        of_a_key = q.element_size() * (head_dim + head_dim_v)
        group = heads // kv_heads
        together = grid_rules.heads_together(of_a_key, seq_k, group, limits.l2_bytes)
        sizes.append(min(together, batch * heads))  # the kernel multiplies it by tiles, in 32 bits
    return grid_rules.launched_blocks(blocks, limits.sms, persistent=plan.config.persistent)


@dataclass(frozen=True, kw_only=True)
class OrderLimits:
    """What of a device orders of tiles depend on."""

    sms: int
    l2_bytes: int


INTERPRETED = OrderLimits(sms=5, l2_bytes=1 << 15)
"""Of the CPU, where kernels are interpreted: so small that runs and strides are many and ragged."""


@functools.cache
def order_limits(device: torch.device) -> OrderLimits:
    """Those of a device."""
    if device.type != "cuda":
        return INTERPRETED
    found = torch.cuda.get_device_properties(device)
    return OrderLimits(sms=found.multi_processor_count, l2_bytes=found.L2_cache_size)


def on_device(tensor: Tensor) -> Any:
    """Launch on the tensor's GPU, whichever is current; nothing to do for the interpreter."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(tensor.device)


_NOTHING = contextlib.nullcontext()


def empty_like_layout(q: Tensor, head_dim_v: int, dtype: torch.dtype | None = None) -> Tensor:
    """An O of shape (B, H, Sq, d_v) whose batch, head and seq dimensions lie in memory in q's
    order; of its dtype unless another is given.
    """
    batch, heads, seq, _ = q.shape
    dtype = dtype or q.dtype
    if q.stride(1) < q.stride(2) and heads > 1:  # (batch, seq, heads, head_dim) in memory
        return torch.empty((batch, seq, heads, head_dim_v), dtype=dtype, device=q.device).transpose(
            1, 2
        )
    return torch.empty((batch, heads, seq, head_dim_v), dtype=dtype, device=q.device)


def _scratch(plan: Plan, q: Tensor) -> list[Tensor]:
    """FlashAttention-1's state in memory: O, row sum and row maximum, float32."""
    batch, heads, seq_q, _ = q.shape

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    rows = (batch, heads, seq_q)
    return [empty(*rows, plan.dim_v_pad), empty(*rows), empty(*rows)]
