"""A launcher: one resolved ladder, its kernels imported and bound, ready for calls.

It launches the first rung; the pointer twin where a call's tensors cannot have descriptors; the
next rung where Triton finds at the first launch that a kernel does not fit after all.
"""

from __future__ import annotations

import importlib
import logging

from torch import Tensor

from flashgen import interpreter, launch
from flashgen.config import KernelConfig, kernel_name
from flashgen.errors import GeneratedError, LaunchError, ToolchainError
from flashgen.runtime.select import Selection
from flashgen.spec import AttentionSpec

logger = logging.getLogger("flashgen.runtime")


class Launcher:
    """Runs the kernels of a ladder for one spec, bucket and device."""

    def __init__(self, package: str, rungs: tuple[Selection, ...]) -> None:
        self._package = package
        self._rungs = list(rungs)
        self._take_first_rung()

    @property
    def selection(self) -> Selection:
        """The rung that serves now."""
        return self._rungs[0]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, diagonal: int | None
    ) -> tuple[Tensor, Tensor]:
        """Launch. Arguments and results are those of flashgen.launch.launch."""
        bound = self._bound
        if self._by_descriptor and not (
            launch.takes_descriptor(q) and launch.takes_descriptor(k) and launch.takes_descriptor(v)
        ):
            bound = self._twin or self._bind_twin()
        try:
            return bound(q, k, v, scale, diagonal)
        except Exception as error:
            return self._recover(error, q, k, v, scale, diagonal)

    def _recover(
        self, error: Exception, q: Tensor, k: Tensor, v: Tensor, scale: float, diagonal: int | None
    ) -> tuple[Tensor, Tensor]:
        """Take the next rung where the kernel does not fit; name what is missing where Triton
        cannot build.
        """
        if "C compiler" in str(error):
            raise ToolchainError(
                "Triton needs a C compiler at a kernel's first launch and found none: "
                "install gcc or clang, or set CC"
            ) from error
        if not is_out_of_resources(error):
            raise error
        failed = self._rungs.pop(0)
        if not self._rungs:
            raise LaunchError(
                f"no kernel fits this GPU: {failed.choice.kernel}: {error}"
            ) from error
        logger.warning(
            "%s does not fit this GPU (%s); taking %s",
            failed.choice.kernel,
            error,
            self._rungs[0].choice.kernel,
        )
        self._take_first_rung()
        return self(q, k, v, scale, diagonal)

    def _take_first_rung(self) -> None:
        choice = self._rungs[0].choice
        self._by_descriptor = choice.config.loads == "descriptor"
        self._bound = self._bind(choice.spec, choice.config)
        self._twin: launch.Bound | None = None

    def _bind_twin(self) -> launch.Bound:
        choice = self._rungs[0].choice
        logger.info("%s: unaligned tensors, launching its pointer twin", choice.kernel)
        self._twin = self._bind(choice.spec, choice.config.pointer_twin())
        return self._twin

    def _bind(self, spec: AttentionSpec, config: KernelConfig) -> launch.Bound:
        interpreter.prepare()
        name = kernel_name(spec, config)
        try:
            module = importlib.import_module(f"{self._package}.kernels.{name}")
        except ModuleNotFoundError as error:
            raise GeneratedError(
                f"{self._package}/kernels/{name}.py is missing; run: flashgen generate"
            ) from error
        return launch.bind(launch.kernel_of(module, name), spec, config)


def is_out_of_resources(error: BaseException) -> bool:
    """Whether Triton says that a compiled kernel needs more than the GPU has."""
    return type(error).__name__ == "OutOfResources"
