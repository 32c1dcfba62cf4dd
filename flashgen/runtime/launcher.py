"""Launchers: one resolved ladder each, its kernels imported and bound, ready for calls.

A launcher runs the first rung; the pointer twin where a call's tensors cannot have descriptors; the
next rung where Triton finds at the first launch that a kernel does not fit after all.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from flashgen.errors import LaunchError
from flashgen.kernels import interpreter, launch, launch_backward, launch_cache, repeated_launch
from flashgen.kernels import launch_cache as launch_decode
from flashgen.kernels.launch_backward import Backward
from flashgen.runtime import kernel_files
from flashgen.runtime.selection import Selection
from flashgen.spec.config import KernelConfig, kernel_name
from flashgen.spec.features import PLAIN, Features

logger = logging.getLogger("flashgen.runtime")


class KernelLauncher:
    """Runs the kernels of a ladder for one spec, bucket and device.

    Tensors that cannot have descriptors go down a ladder of their own, of pointer twins: what one
    of them lacks says nothing of the kernels that aligned tensors run.
    """

    def __init__(self, package: str, rungs: tuple[Selection, ...]) -> None:
        self._aligned = _Steps(package, [(rung, runnable(rung.choice.config)) for rung in rungs])
        self._unaligned = self._aligned
        if any(rung.choice.config.loads == "descriptor" for rung in rungs):
            twins = [(rung, rung.choice.config.pointer_twin()) for rung in rungs]
            self._unaligned = _Steps(package, twins)

    def plan(self, *tensors: Tensor) -> launch.Plan | None:
        """What launched these tensors last, if it can launch again."""
        bound = self._steps(*tensors).bound
        return getattr(bound, "plan", None)

    @property
    def selection(self) -> Selection:
        """The rung that serves aligned tensors now."""
        return self._aligned.selection

    def serves(self, *tensors: Tensor) -> tuple[Selection, KernelConfig]:
        """The rung that serves these tensors now, and the config that it launches for them."""
        steps = self._steps(*tensors)
        return steps.selection, steps.config

    def _steps(self, *tensors: Tensor) -> _Steps:
        if self._unaligned is self._aligned or launch.take_descriptors(*tensors):
            return self._aligned
        return self._unaligned


class Launcher(KernelLauncher):
    """Of forward kernels. Arguments and results are those of flashgen.kernels.launch.launch."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        diagonal: int | None,
        features: Features = PLAIN,
    ) -> tuple[Tensor, Tensor]:
        """O (B, H, Sq, d_v) and LSE (B, H, Sq)."""
        o, lse = self._steps(q, k, v).run(q, k, v, scale, diagonal, features)
        return o, lse

    def again(
        self, tensors: tuple[Tensor, ...], scale: float, diagonal: int | None
    ) -> repeated_launch.Forward | None:
        """Launches again, for calls like this one without features: of q, k, v, its O and LSE."""
        plan = self.plan(*tensors[:3])
        return None if plan is None else repeated_launch.forward(plan, tensors, scale, diagonal)


class DeltaLauncher(KernelLauncher):
    """Of backward_delta kernels, as flashgen.kernels.launch_backward.bind_delta describes them."""

    def __call__(self, o: Tensor, do: Tensor, dlse: Tensor | None) -> Tensor:
        """D = rowsum(dO * O) - dLSE, (B, H, Sq) float32."""
        delta: Tensor = self._steps(o, do).run(o, do, dlse)
        return delta


class BackwardLauncher(KernelLauncher):
    """All other backward kernels; see kernels/launch_backward.py."""

    def __call__(self, call: Backward) -> tuple[Tensor, ...]:
        """The gradients that the direction computes."""
        gradients: tuple[Tensor, ...] = self._steps(call.q, call.k, call.v, call.do).run(call)
        return gradients


class _Steps:
    """Kernels to try in order: the first that fits the GPU is kept, for all threads."""

    def __init__(self, package: str, steps: list[tuple[Selection, KernelConfig]]) -> None:
        self._package = package
        self._steps = steps
        self._bound: Callable[..., Any] | None = None
        self._lock = threading.Lock()

    @property
    def selection(self) -> Selection:
        return self._steps[0][0]

    @property
    def config(self) -> KernelConfig:
        return self._steps[0][1]

    @property
    def bound(self) -> Callable[..., Any] | None:
        """The kernel that was launched last, if one was."""
        return self._bound

    def run(self, *arguments: Any) -> Any:
        bound = self._bound
        while True:
            if bound is None:
                bound = self._bind_first()
            try:
                return bound(*arguments)
            except Exception as error:
                if (missing := launch.toolchain_error(error)) is not None:
                    raise missing from error
                if not is_out_of_resources(error):
                    raise
                bound = self._next(bound, error)

    def _next(self, failed: Callable[..., Any], error: Exception) -> Callable[..., Any]:
        """Step down from a kernel that does not fit, unless another thread has done so already."""
        with self._lock:
            if self._bound is not failed and self._bound is not None:
                return self._bound
            selection, config = self._steps[0]
            name = kernel_name(selection.choice.spec, config)
            if len(self._steps) == 1:
                raise LaunchError(f"no kernel fits this GPU: {name}: {error}") from error
            del self._steps[0]
            if (plan := getattr(failed, "plan", None)) is not None:
                plan.start.retire()
            following = kernel_name(self.selection.choice.spec, self.config)
            logger.warning("%s does not fit this GPU (%s); taking %s", name, error, following)
            self._bound = self._bind()
            return self._bound

    def _bind_first(self) -> Callable[..., Any]:
        with self._lock:
            if self._bound is None:
                self._bound = self._bind()
            return self._bound

    def _bind(self) -> Callable[..., Any]:
        """Import the kernel of the first step, and bind it."""
        spec, kernel = self.selection.choice.spec, self._kernel()
        if spec.direction == "forward":
            return launch.bind(kernel, spec, self.config)
        if spec.direction == "backward_delta":
            return launch_backward.bind_delta(kernel, spec, self.config)
        if spec.direction == "decode":
            return launch_decode.bind_decode(kernel, spec, self.config)
        if spec.direction == "combine":
            return launch_decode.bind_combine(kernel, spec, self.config)
        if spec.direction == "append":
            return launch_cache.bind_append(kernel, spec, self.config)
        return launch_backward.bind_backward(kernel, spec, self.config)

    def _kernel(self) -> launch.Kernel:
        return kernel_files.kernel(self._package, self.selection.choice, self.config)


def runnable(config: KernelConfig) -> KernelConfig:
    """The config, or where kernels are interpreted and its own cannot be, its pointer twin."""
    if interpreter.active() and not config.interpretable:
        return config.pointer_twin()
    return config


def is_out_of_resources(error: BaseException) -> bool:
    """Whether Triton says that a compiled kernel needs more than the GPU has."""
    return type(error).__name__ == "OutOfResources"
