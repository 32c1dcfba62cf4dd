"""Launchers: one resolved ladder each, with its kernels imported and bound.

A launcher runs the first rung; the pointer twin if a call's tensors cannot have descriptors; the
next rung if Triton finds at the first launch that a kernel does not fit.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from flashgen.errors import LaunchError
from flashgen.kernels import interpreter, launch
from flashgen.kernels.loader import toolchain_error
from flashgen.kernels.plan import KernelCall, Plan, Result
from flashgen.runtime import kernel_files
from flashgen.runtime.choice import Choice
from flashgen.runtime.selection import Selection
from flashgen.schedules.config import KernelConfig, kernel_name

logger = logging.getLogger("flashgen.runtime")

LaunchPlan = Callable[[Plan, KernelCall[Result]], Result]
"""Launches a plan for a call; the result is the call's."""


class Launcher:
    """Runs the kernels of a ladder for one spec, bucket and device.

    Tensors that cannot have descriptors use a ladder of their own, of pointer twins: a failure
    there does not affect the kernels of aligned tensors.
    """

    def __init__(self, package: str, rungs: tuple[Selection, ...]) -> None:
        self._aligned = _Steps(package, [(rung, runnable(rung.choice)) for rung in rungs])
        self._unaligned = self._aligned
        if any(rung.choice.config.needs_aligned for rung in rungs):
            twins = [(rung, _twin(rung.choice)) for rung in rungs if rung.has_twin]
            self._unaligned = _Steps(package, twins)

    def __call__(self, call: KernelCall[Result]) -> Result:
        """Launch the kernel that serves the tensors of a call; the result is the call's.

        Raises ToolchainError, GeneratedError and LaunchError, and whatever Triton raises.
        """
        return self.run(call, Plan.__call__)

    def run(self, call: KernelCall[Result], launch: LaunchPlan[Result]) -> Result:
        """The same, its plan launched by another function."""
        steps = self._aligned
        if self._unaligned is not steps and not call.takes_descriptors():
            steps = self._unaligned
        return steps.run(call, launch)

    @property
    def selection(self) -> Selection:
        """The rung that serves aligned tensors now."""
        return self._aligned.selection

    def serves(self, call: KernelCall[Any]) -> tuple[Selection, KernelConfig]:
        """The rung that serves a call now, and the config that it launches for it."""
        steps = self._aligned if call.takes_descriptors() else self._unaligned
        return steps.selection, steps.config


class _Steps:
    """Kernels to try in order: the first that fits the GPU is kept, for all threads."""

    def __init__(self, package: str, steps: list[tuple[Selection, KernelConfig]]) -> None:
        self._package = package
        self._steps = steps
        self.plan: Plan | None = None
        """The kernel that was launched last."""
        self._lock = threading.Lock()

    @property
    def selection(self) -> Selection:
        return self._steps[0][0]

    @property
    def config(self) -> KernelConfig:
        return self._steps[0][1]

    def run(self, call: KernelCall[Result], launch: LaunchPlan[Result]) -> Result:
        plan = self.plan
        while True:
            if plan is None:
                plan = self._first()
            try:
                return launch(plan, call)
            except Exception as error:
                if (missing := toolchain_error(error)) is not None:
                    raise missing from error
                if not is_out_of_resources(error):
                    raise
                plan = self._next(plan, error)

    def _next(self, failed: Plan, error: Exception) -> Plan:
        """Step down from a kernel that does not fit, unless another thread has done so already."""
        with self._lock:
            if self.plan is not failed and self.plan is not None:
                return self.plan
            selection, config = self._steps[0]
            name = kernel_name(selection.choice.spec, config)
            if len(self._steps) == 1:
                raise LaunchError(f"no kernel fits this GPU: {name}: {error}") from error
            del self._steps[0]
            failed.direct.retire()
            failed.early.retire()
            following = kernel_name(self.selection.choice.spec, self.config)
            logger.warning("%s does not fit this GPU (%s); taking %s", name, error, following)
            self.plan = self._bind()
            return self.plan

    def _first(self) -> Plan:
        with self._lock:
            if self.plan is None:
                self.plan = self._bind()
            return self.plan

    def _bind(self) -> Plan:
        """Import the kernel of the first step, and bind it."""
        choice, config = self.selection.choice, self.config
        kernel = kernel_files.kernel(self._package, choice, config)
        return launch.bind(kernel, choice.spec, config)


def runnable(choice: Choice) -> KernelConfig:
    """The config, or where kernels are interpreted and its own cannot be, its pointer twin."""
    if interpreter.active() and not choice.config.interpretable:
        return _twin(choice)
    return choice.config


def _twin(choice: Choice) -> KernelConfig:
    return choice.config.pointer_twin(choice.spec)


def is_out_of_resources(error: BaseException) -> bool:
    """Whether Triton says that a compiled kernel needs more than the GPU has."""
    return type(error).__name__ == "OutOfResources"
