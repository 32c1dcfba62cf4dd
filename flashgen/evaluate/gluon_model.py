"""Runs the text of a kernel of schedule ampere on a CPU: a model of the few things of Gluon that it
uses, for which Triton has no interpreter.

The emitted file is executed as Python on torch tensors, block after block. A copy to shared memory
spoils its place when it is issued and fills it when its group is awaited: what is read too early is
NaN, and a copy to a place that another one still fills is refused. Operands are rounded as the text
says, products and sums are float32. Layouts mean nothing here: Triton checks them when it compiles,
and places the barriers between warps. So the model shows the logic and the numbers of a text, not
what a compiler or a GPU makes of it.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


class Misuse(AssertionError):
    """What the hardware leaves undefined."""


class Pointer:
    """Addresses in memory: elements of a storage."""

    def __init__(self, storage: Tensor, offset: Any) -> None:
        self.storage, self.offset = storage, offset
        self.dtype = types.SimpleNamespace(element_ty=storage.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.storage, self.offset + more)


class Shared:
    """A place in shared memory."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.awaited = values, True

    def permute(self, order: Sequence[int]) -> Shared:
        """The place with its dimensions in another order."""
        turned = Shared(self.values.permute(*order))
        turned.awaited = self.awaited
        return turned

    def load(self, layout: object) -> Tensor:
        """What it holds. Raises Misuse while a copy fills it."""
        if not self.awaited:
            raise Misuse("shared memory is read that a copy still fills")
        return self.values.clone()


class _Block:
    """One block: its number, and its copies under way."""

    def __init__(self, pid: int) -> None:
        self.pid = torch.tensor(pid)
        self.issued: list[Callable[[], None]] = []
        self.groups: list[list[Callable[[], None]]] = []

    def copy(self, place: Shared, source: Pointer, mask: Tensor | None = None) -> None:
        if not place.awaited:
            raise Misuse("a copy goes where another one is under way")
        shape = place.values.shape
        mask = torch.ones(shape, dtype=torch.bool) if mask is None else mask.expand(shape)
        values = torch.zeros(shape, dtype=place.values.dtype)
        values[mask] = source.storage[source.offset.expand(shape)[mask]]
        place.awaited = False
        place.values.fill_(float("nan"))

        def land() -> None:
            place.values.copy_(values)
            place.awaited = True

        self.issued.append(land)

    def commit(self) -> None:
        self.groups.append(self.issued)
        self.issued = []

    def wait(self, outstanding: int) -> None:
        while len(self.groups) > outstanding:
            for land in self.groups.pop(0):
                land()

    def at_rest(self) -> None:
        if self.issued or self.groups:
            raise Misuse("the block ends while copies are under way")


def _multiply(a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
    return acc + a.float() @ b.float()


def _store(pointer: Pointer, value: Tensor, *, mask: Tensor) -> None:
    mask = mask.expand(value.shape)
    pointer.storage[pointer.offset.expand(value.shape)[mask]] = value[mask]


def _either(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))


class GluonModel:
    """A kernel that flashgen.kernels.launch launches like one of Triton's: kernel[(blocks,)](...).

    block: the one that runs.
    """

    runs_on_cpu = True

    def __init__(self, source: str, name: str) -> None:
        scope: dict[str, Any] = {}
        with patch.dict(sys.modules, self._modules()):
            exec(compile(source, f"{name}.py", "exec"), scope)
        self._function = scope[name]
        self._parameters = inspect.signature(self._function).parameters
        self.arg_names = tuple(self._parameters)
        self.block = _Block(0)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda *arguments, **_: self._launch(grid[0], arguments)

    def _launch(self, blocks: int, arguments: Sequence[Any]) -> None:
        pairs = zip(self._parameters.values(), arguments, strict=True)
        seen = [x if is_constant(parameter) else _seen(x) for parameter, x in pairs]
        for pid in range(blocks):
            self.block = _Block(pid)
            self._function(*seen)
            self.block.at_rest()

    def _modules(self) -> dict[str, types.ModuleType]:
        """What a rendered kernel imports."""
        name = "triton.experimental"
        root, gluon = types.ModuleType(name), types.ModuleType(f"{name}.gluon")
        ampere = types.ModuleType(f"{name}.gluon.language.nvidia.ampere")
        nvidia = types.ModuleType(f"{name}.gluon.language.nvidia")
        gl = types.ModuleType(f"{name}.gluon.language")
        vars(gl).update(self._language())
        vars(gluon).update(jit=_jit, constexpr_function=_jit, language=gl)
        vars(root).update(gluon=gluon)
        vars(ampere).update(
            mma_v2=_multiply,
            async_copy=types.SimpleNamespace(
                async_copy_global_to_shared=lambda *a, **o: self.block.copy(*a, **o),
                commit_group=lambda: self.block.commit(),
                wait_group=lambda outstanding: self.block.wait(outstanding),
            ),
        )
        return {module.__name__: module for module in (root, gluon, gl, nvidia, ampere)}

    def _language(self) -> dict[str, Any]:
        layouts = (
            "NVMMADistributedLayout", "DistributedLinearLayout", "DotOperandLayout",
            "SliceLayout", "BlockedLayout", "SwizzledSharedLayout",
        )  # fmt: skip
        return dict.fromkeys(layouts, lambda *_, **__: None) | {
            "constexpr": lambda value: value,
            "static_range": range,
            **{each: getattr(torch, each) for each in ("int64", "float32", "float16", "bfloat16")},
            "program_id": lambda axis: self.block.pid,
            "cdiv": lambda a, b: -(-a // b),
            "minimum": _either(torch.minimum),
            "maximum": _either(torch.maximum),
            "arange": lambda low, high, layout: torch.arange(low, high),
            "zeros": lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            "full": lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
            "where": torch.where,
            "max": lambda x, axis: x.amax(axis),
            "sum": lambda x, axis: x.sum(axis),
            "exp2": torch.exp2,
            "log2": torch.log2,
            "convert_layout": lambda x, layout: x,
            "store": _store,
            "allocate_shared_memory": lambda dtype, shape, layout: Shared(
                torch.full(list(shape), float("nan"), dtype=dtype)
            ),
        }


def _jit(function: Any = None, **_: Any) -> Any:
    return function or (lambda f: f)


def is_constant(parameter: inspect.Parameter) -> bool:
    """Whether a parameter of a kernel is a constant: no other one has an annotation."""
    return parameter.annotation is not inspect.Parameter.empty


def _seen(argument: Any) -> Any:
    """An argument of a launch as the kernel sees it."""
    if isinstance(argument, Tensor):
        elements = argument.untyped_storage().nbytes() // argument.element_size()
        return Pointer(argument.as_strided((elements,), (1,), 0), argument.storage_offset())
    return torch.tensor(argument) if isinstance(argument, int) else argument
