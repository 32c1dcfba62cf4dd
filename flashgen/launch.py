"""The only launcher: loads a kernel module, binds the arguments, builds descriptors, launches.

Used by the check, the measuring and the runtime alike, so what was proven and timed is what is
served. Tensors are (batch, heads, seq, head_dim) in any strides with a contiguous last dimension.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashgen import gpu as gpu_facts
from flashgen import interpreter
from flashgen.config import KernelConfig, rows_of_eight
from flashgen.errors import FlashgenError, NoGpuError, ToolchainError
from flashgen.gpu import Gpu
from flashgen.spec import SHORT_DTYPE, AttentionSpec, padded

logger = logging.getLogger("flashgen.launch")

LOG2_E = 1.4426950408889634
DESCRIPTOR_ALIGNMENT = 16
"""Bytes to which a descriptor's base and strides must be aligned (CUDA driver API, tensor maps)."""

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


def device_gpu(index: int = 0) -> Gpu:
    """The Gpu of a CUDA or ROCm device. Raises NoGpuError where there is none, and
    ToolchainError without a C compiler.
    """
    if not torch.cuda.is_available():
        raise NoGpuError(
            "torch sees no GPU here; without one, type: flashgen tune --target nvidia_h200"
        )
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


@dataclass(frozen=True, kw_only=True)
class Signature:
    """A kernel's argument types and what Triton may assume of them, as triton.compiler.ASTSource
    takes it.
    """

    types: dict[str, str]
    constexprs: dict[str, object]
    attrs: dict[tuple[int, ...], list[list[object]]]


def compile_signature(spec: AttentionSpec, config: KernelConfig) -> Signature:
    """What a launch with aligned tensors would specialize on, with no tensor and no GPU.

    Strides that are multiples of 16 elements are the class of every contiguous tensor whose head
    dim is one; so are the head dims that a padded kernel takes as arguments. Lengths, head counts
    and the diagonal are never specialized on.
    """
    element = SHORT_DTYPE[spec.dtype]
    types: dict[str, str] = {}
    if config.loads == "descriptor":
        for x, rows, dim in (
            ("q", config.br, spec.head_dim),
            ("k", config.bc, spec.head_dim),
            ("v", config.bc, spec.head_dim_v),
            ("o", config.br, spec.head_dim_v),
        ):
            types[f"{x}_desc"] = f"tensordesc<{element}[1,1,{rows},{padded(dim)}]>"
        types["lse_ptr"] = "*fp32"
    else:
        types |= {f"{x}_ptr": f"*{element}" for x in "qkvo"} | {"lse_ptr": "*fp32"}
        types |= {f"stride_{x}{d}": "i32" for x in "qkvo" for d in "bhs"}
    types |= {"scale_log2e": "fp32", "heads": "i32", "group": "i32", "seq_q": "i32", "seq_k": "i32"}
    if spec.causal:
        types["diagonal"] = "i32"
    if config.head_dims == "padded":
        types |= {"head_dim": "i32", "head_dim_v": "i32"}
    if config.schedule == "fa1":
        types |= {"acc_ptr": "*fp32", "sum_ptr": "*fp32", "max_ptr": "*fp32"}
    aligned = [
        i
        for i, (name, kind) in enumerate(types.items())
        if kind.startswith("*")
        or name in ("head_dim", "head_dim_v")
        or (name.startswith("stride_") and _strides_aligned(spec, name))
    ]
    return Signature(
        types=types, constexprs={}, attrs={(i,): [["tt.divisibility", 16]] for i in aligned}
    )


def _strides_aligned(spec: AttentionSpec, name: str) -> bool:
    """Whether a contiguous tensor's stride is a multiple of 16 elements, Triton's alignment
    class.
    """
    dim = spec.head_dim if name[len("stride_")] in "qk" else spec.head_dim_v
    return dim % 16 == 0


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
) -> tuple[Tensor, Tensor]:
    """Run a kernel. q (B, H, Sq, d), k (B, Hkv, Sk, d), v (B, Hkv, Sk, d_v); diagonal as
    spec.diagonal_of gives.

    Returns O (B, H, Sq, d_v) of q's dtype, laid out in memory as q is, and LSE (B, H, Sq) float32,
    natural logarithm. Raises whatever Triton raises, OutOfResources among it.
    """
    return bind(kernel, spec, config)(q, k, v, scale, diagonal)


Bound = Callable[[Tensor, Tensor, Tensor, float, int | None], tuple[Tensor, Tensor]]


def bind(kernel: Kernel, spec: AttentionSpec, config: KernelConfig) -> Bound:
    """All that does not depend on the call, settled once: the result takes (q, k, v, scale,
    diagonal).
    """
    return functools.partial(_run, _Plan(kernel, spec, config))


class _Plan:
    """A kernel with what every launch of it needs, read off spec and config once."""

    def __init__(self, kernel: Kernel, spec: AttentionSpec, config: KernelConfig) -> None:
        self.kernel = kernel
        self.config = config
        self.br = config.br
        self.bc = config.bc
        self.causal = spec.causal
        self.by_descriptor = config.loads == "descriptor"
        self.any_dim = config.head_dims == "padded"
        self.fa1 = config.schedule == "fa1"
        self.rows_of_eight = rows_of_eight(spec, config)
        self.dim_pad = padded(spec.head_dim)
        self.dim_v_pad = padded(spec.head_dim_v)


def _run(
    plan: _Plan, q: Tensor, k: Tensor, v: Tensor, scale: float, diagonal: int | None
) -> tuple[Tensor, Tensor]:
    batch, heads, seq_q, head_dim = q.shape
    _, kv_heads, seq_k, head_dim_v = v.shape
    o = empty_like_layout(q, head_dim_v)
    lse = torch.empty((batch, heads, seq_q), dtype=torch.float32, device=q.device)
    if o.numel() == 0:
        return o, lse
    if seq_k == 0:
        return o.zero_(), lse.fill_(float("-inf"))
    q, scale = _positive_scale(q, scale)
    if plan.rows_of_eight:
        q, k, v = _in_eights(q), _in_eights(k), _in_eights(v)
    blocks = batch * heads
    if not plan.fa1:
        blocks *= -(-seq_q // plan.br)
    if plan.by_descriptor:
        tensors = [*_descriptors(plan, q, k, v, o), lse]
    else:
        tensors = [
            q,
            k,
            v,
            o,
            lse,
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            *o.stride()[:3],
        ]
    sizes: list[Any] = [scale * LOG2_E, heads, heads // kv_heads, seq_q, seq_k]
    if plan.causal:
        sizes.append(diagonal)
    if plan.any_dim:
        sizes += [head_dim, head_dim_v]
    if plan.fa1:
        sizes += _scratch(plan, q)
    with _on_device(q):
        plan.kernel[(blocks,)](
            *tensors, *sizes, num_warps=plan.config.num_warps, num_stages=plan.config.num_stages
        )
    return o, lse


def _on_device(tensor: Tensor) -> Any:
    """Launch on the tensor's GPU, whichever is current; nothing to do for the interpreter."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else _NOTHING


_NOTHING = contextlib.nullcontext()


def empty_like_layout(q: Tensor, head_dim_v: int) -> Tensor:
    """An O of shape (B, H, Sq, d_v) whose batch, head and seq dimensions lie in memory in q's
    order.
    """
    batch, heads, seq, _ = q.shape
    if q.stride(1) < q.stride(2) and heads > 1:  # (batch, seq, heads, head_dim) in memory
        return torch.empty(
            (batch, seq, heads, head_dim_v), dtype=q.dtype, device=q.device
        ).transpose(1, 2)
    return torch.empty((batch, heads, seq, head_dim_v), dtype=q.dtype, device=q.device)


def _positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The kernels take a scale above 0: a negative one is carried by q, and 0 makes q 0, both
    exactly.
    """
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)


def _in_eights(x: Tensor) -> Tensor:
    """x, copied if its strides are no multiples of 8 elements: kernels of such head dims rely on
    it.
    """
    if all(
        length <= 1 or stride % 8 == 0
        for length, stride in zip(x.shape[:3], x.stride()[:3], strict=True)
    ):
        return x
    _say_copied()
    return x.contiguous()


@functools.cache
def _say_copied() -> None:
    """Once a process, whatever the lengths."""
    logger.warning("tensors are copied whose strides are no multiples of 8 elements")


def _scratch(plan: _Plan, q: Tensor) -> list[Tensor]:
    """FlashAttention-1's state in memory: O, row sum and row maximum, float32."""
    batch, heads, seq_q, _ = q.shape

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    rows = (batch, heads, seq_q)
    return [empty(*rows, plan.dim_v_pad), empty(*rows), empty(*rows)]


def takes_descriptor(tensor: Tensor) -> bool:
    """Whether the TMA unit can address this 4-D tensor: aligned base, aligned strides, none of them
    0.
    """
    if tensor.data_ptr() % DESCRIPTOR_ALIGNMENT or tensor.stride(3) != 1:
        return False
    size = tensor.element_size()
    for length, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True):
        if length > 1 and (stride <= 0 or stride * size % DESCRIPTOR_ALIGNMENT):
            return False
    return True


def take_descriptors(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the TMA unit can address all three."""
    return takes_descriptor(q) and takes_descriptor(k) and takes_descriptor(v)


def _descriptors(plan: _Plan, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> list[Any]:
    from triton.tools.tensor_descriptor import TensorDescriptor

    def describe(tensor: Tensor, rows: int, dim: int) -> Any:
        shape = list(tensor.shape)
        # The stride of a dimension of one element means nothing, and may be unaligned: any other
        # will do.
        strides = [
            stride if length > 1 else dim
            for length, stride in zip(shape, tensor.stride(), strict=True)
        ]
        strides[3] = 1
        return TensorDescriptor(tensor, shape, strides, [1, 1, rows, dim])

    return [
        describe(q, plan.br, plan.dim_pad),
        describe(k, plan.bc, plan.dim_pad),
        describe(v, plan.bc, plan.dim_v_pad),
        describe(o, plan.br, plan.dim_v_pad),
    ]
