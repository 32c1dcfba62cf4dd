"""Binds a kernel to the launcher of its direction.

The check, the measurement and the runtime all use these launchers, so what was checked and timed is
what is served. Tensors are (batch, heads, seq, head_dim) in any strides with a contiguous last
dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashgen.errors import NoGpuError
from flashgen.inputs.features import PLAIN, Features
from flashgen.kernels import launch_forward
from flashgen.kernels.launch_forward import Forward
from flashgen.kernels.loader import toolchain_error
from flashgen.kernels.plan import Kernel as Kernel
from flashgen.kernels.plan import Plan
from flashgen.schedules.config import KernelConfig
from flashgen.spec import gpu as gpu_facts
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import OFFLINE_TARGET, Gpu
from flashgen.spec.vocabulary import DECODING, OF_DS, Direction


def launches(direction: Direction) -> Callable[[Plan, Any], Any]:
    """The function that launches a plan of a direction for a call of it.

    Its module is loaded here: attention() without gradients needs only that of the forward.
    """
    if direction == "forward":
        return launch_forward.run_forward
    if direction in DECODING:
        from flashgen.kernels import launch_cache as module
    elif direction in OF_DS:
        from flashgen.kernels import launch_ds as module  # type: ignore[no-redef]
    else:
        from flashgen.kernels import launch_backward as module  # type: ignore[no-redef]
    name = f"run_{direction.removeprefix('backward_')}"
    found: Callable[[Plan, Any], Any] = getattr(module, name)
    return found


def bind(kernel: Kernel, spec: AttentionSpec, config: KernelConfig) -> Plan:
    """The plan of a kernel, which launches it when called with a KernelCall: a Forward, Delta,
    Backward, Decode, Combine or Append.
    """
    return Plan(kernel, spec, config, launches(spec.direction))


def device_gpu(index: int = 0, *, instead: str = f"flashgen tune --target {OFFLINE_TARGET}") -> Gpu:
    """The Gpu of a CUDA or ROCm device. Raises NoGpuError where there is none, which names the
    command that does without, `instead`, and ToolchainError without a C compiler.
    """
    if not torch.cuda.is_available():
        raise NoGpuError(f"torch sees no GPU here; without one, type: {instead}")
    from triton.runtime import driver

    # With PYTORCH_NVML_BASED_CUDA_CHECK=1, is_available() leaves CUDA uninitialized, and Triton
    # asks the driver without initializing it.
    torch.cuda.init()  # type: ignore[no-untyped-call]
    try:
        # The first use of the driver builds it, with a C compiler.
        limits = driver.active.utils.get_device_properties(index)
    except Exception as error:
        raise toolchain_error(error) or error from error
    return gpu_facts.from_properties(torch.cuda.get_device_properties(index), limits)


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
    """Run a forward kernel once: O and LSE, as Forward describes arguments and results.

    Raises whatever Triton raises, OutOfResources among it.
    """
    call = Forward(q=q, k=k, v=v, scale=scale, diagonal=diagonal, features=features)
    return bind(kernel, spec, config)(call)
