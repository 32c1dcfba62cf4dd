"""Loads a kernel module and binds its kernel to the launcher of its direction.

The check, the measurement and the runtime all use these launchers, so what was checked and timed is
what is served. Tensors are (batch, heads, seq, head_dim) in any strides with a contiguous last
dimension.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashgen.errors import FlashgenError, NoGpuError, ToolchainError
from flashgen.kernels import interpreter, launch_forward
from flashgen.kernels.launch_forward import Forward
from flashgen.kernels.plan import Kernel as Kernel
from flashgen.kernels.plan import Plan
from flashgen.spec import gpu as gpu_facts
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig
from flashgen.spec.features import PLAIN, Features
from flashgen.spec.gpu import Gpu
from flashgen.spec.vocabulary import DECODING, Direction


def launches(direction: Direction) -> Callable[[Plan, Any], Any]:
    """The function that launches a plan of a direction for a call of it.

    Its module is loaded here: attention() without gradients needs only that of the forward.
    """
    if direction == "forward":
        return launch_forward.forward
    if direction in DECODING:
        from flashgen.kernels import launch_cache as module
    else:
        from flashgen.kernels import launch_backward as module  # type: ignore[no-redef]
    found: Callable[[Plan, Any], Any] = getattr(module, direction.removeprefix("backward_"))
    return found


def bind(kernel: Kernel, spec: AttentionSpec, config: KernelConfig) -> Plan:
    """The plan of a kernel, which launches it when called with a KernelCall: a Forward, Delta,
    Backward, Decode, Combine or Append.
    """
    return Plan(kernel, spec, config, launches(spec.direction))


class _Source(importlib.machinery.SourceFileLoader):
    """Executes the text of a file, never compiled Python that lies beside it: the folder of a
    kernel may hold what others put there.
    """

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        code: types.CodeType = self.source_to_code(self.get_data(path), path)
        return code


def load_kernel(path: Path, name: str) -> Kernel:
    """The kernel `name` of the file at `path`, imported under a name of its own.

    Triton reads a kernel's source from its file, so it must be a real one. Raises FlashgenError
    where the file defines no such kernel.
    """
    interpreter.prepare()
    module_name = f"_flashgen_kernel_{name}"
    loader = _Source(module_name, str(path))
    spec = importlib.util.spec_from_file_location(module_name, path, loader=loader)
    assert spec is not None  # the loader is given
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        loader.exec_module(module)
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
    """The sentence for a machine on which Triton finds no C compiler, or cannot write its cache;
    None for any other error.
    """
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return ToolchainError(
            f"Triton cannot use {error.filename} ({error.strerror}): set TRITON_CACHE_DIR, or "
            "HOME, to a folder that can be written"
        )
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

    # With PYTORCH_NVML_BASED_CUDA_CHECK=1, is_available() leaves CUDA uninitialized, and Triton
    # asks the driver without initializing it.
    torch.cuda.init()  # type: ignore[no-untyped-call]
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
    """Run a forward kernel once: O and LSE, as Forward describes arguments and results.

    Raises whatever Triton raises, OutOfResources among it.
    """
    call = Forward(q=q, k=k, v=v, scale=scale, diagonal=diagonal, features=features)
    return bind(kernel, spec, config)(call)
