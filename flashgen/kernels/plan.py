"""Plan: a kernel with everything that its launches share."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from flashgen.errors import ToolchainError
from flashgen.kernels import interpreter
from flashgen.kernels.arguments import Arguments, in_eights, strided
from flashgen.kernels.constants import Constant, constants_of
from flashgen.kernels.descriptors import descriptor_of
from flashgen.kernels.direct_launch import Direct, Relaunch
from flashgen.kernels.signature import descriptor_block
from flashgen.schedules.base import BY_KEYS
from flashgen.schedules.config import KernelConfig, rows_of_eight
from flashgen.spec.attention import AttentionSpec

Kernel = Any  # a triton.runtime.JITFunction, or its interpreted form
Result = TypeVar("Result", covariant=True)
NOTHING = "None"
"""The name of the argument None."""


class KernelCall(Generic[Result]):
    """The tensors and numbers of one launch, and what it returns.

    Nobody changes the dataclasses below it. They are not frozen, because one is made at every
    launch, and a frozen one takes three times as long.
    """

    __slots__ = ()

    def takes_descriptors(self) -> bool:
        """Whether the TMA unit can address what it loads, where a kernel loads by descriptor."""
        return True


class NotedLaunch(NamedTuple):
    """A launch that was made. relaunch: None if Triton made it."""

    direct: Direct
    relaunch: Relaunch | None
    names: tuple[str, ...]
    arguments: tuple[Any, ...]


class Plan:
    """A kernel with everything that its launches share, read from spec and config once.

    Calling a plan launches the kernel. Raises ToolchainError where the interpreter cannot run it.
    """

    def __init__(
        self,
        kernel: Kernel,
        spec: AttentionSpec,
        config: KernelConfig,
        launch: Callable[[Plan, Any], Any],
    ) -> None:
        if interpreter.active() and not config.interpretable:
            raise ToolchainError(
                f"schedule {config.schedule} is Gluon, for which Triton has no interpreter: "
                "run it on a GPU, with TRITON_INTERPRET unset"
            )
        if interpreter.active():  # which runs one kernel after another
            config = replace(config, pdl=False)
        self.spec = spec
        self.config = config
        constants = constants_of(spec, config, kernel.arg_names)
        numbers = _numbers(constants)
        arguments = kernel.arg_names[: len(kernel.arg_names) - len(numbers)]
        self.names = tuple(NOTHING if name in constants else name for name in arguments)
        self.direct = self.early = Direct(kernel, numbers, config.launch_options(spec))
        if spec.direction == "combine":  # which may start before the decode in front of it ends
            early = replace(config, pdl=True)
            numbers = _numbers(constants_of(spec, early, kernel.arg_names))
            self.early = Direct(kernel, numbers, early.launch_options(spec))
        self.by_keys = spec.direction in BY_KEYS
        self.featured = spec.featured
        self.packed = spec.varlen
        self.paged = spec.paged
        self.rows_of_eight = rows_of_eight(spec, config)
        self.by_descriptor = config.loads == "descriptor"
        described = [x.removesuffix("_desc") for x in self.names if x.endswith("_desc")]
        self._blocks = {x: (f"{x}_desc", *descriptor_block(spec, config, x)) for x in described}
        self.launch = launch
        self.notes: list[NotedLaunch] | None = None
        """Where launches are added, if anywhere: of a copy that a Binder made."""
        # What the kernel takes before its numbers, in its order. KeyError names what is missing.
        self.in_order: Callable[[Arguments], tuple[Any, ...]] = operator.itemgetter(*self.names)

    def __call__(self, call: KernelCall[Result]) -> Result:
        """Launch the kernel for a call of its direction."""
        result: Result = self.launch(self, call)
        return result

    def start(self, near: Tensor, blocks: int, arguments: Arguments, *, pdl: bool = False) -> None:
        """Launch `blocks` programs on the device of the tensor `near`; with pdl before the kernel
        in front has ended, for which they wait. Changes arguments.
        """
        arguments[NOTHING] = None
        ordered = self.in_order(arguments)
        direct = self.early if pdl else self.direct
        with on_device(near):
            relaunch = direct(blocks, ordered)
        if self.notes is not None:
            self.notes.append(NotedLaunch(direct, relaunch, self.names, ordered))

    def tensors(self, **named: Tensor) -> Arguments:
        """Arguments of tensors (batch, heads, seq, dim): pointers and strides, or descriptors."""
        arguments: Arguments = {}
        if self.by_descriptor:
            for name, x in named.items():
                argument, rows, dim = self._blocks[name]
                if self.paged and name in ("k", "v"):
                    page_size = x.shape[2]
                    rows, dim = descriptor_block(self.spec, self.config, name, page_size)
                gluon = self.config.specialized
                packed = self.packed and name != "ds"
                arguments[argument] = descriptor_of(x, rows, dim, gluon=gluon, packed=packed)
            if self.packed:  # results have pointers, too
                for name in named.keys() & {"o", "dq", "dk", "dv"}:
                    arguments.update(strided(name, named[name]))
            return arguments
        for name, x in named.items():
            arguments.update(strided(name, x))
        return arguments

    def in_eights(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors, copied where the kernel needs strides that are multiples of 8 elements."""
        return tuple(map(in_eights, tensors)) if self.rows_of_eight else tensors


def _numbers(constants: Mapping[str, Constant]) -> tuple[Constant, ...]:
    return tuple(value for name, value in constants.items() if name.isupper())


def on_device(tensor: Tensor) -> Any:
    """Launch on the tensor's GPU, whichever is current; nothing to do for the interpreter."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(tensor.device)


_HERE = contextlib.nullcontext()
