"""Counts the bytes that kernels load and store and the operations that they do, in Triton's
interpreter.

Every load, store and atomic of Triton 3.7's interpreter, those of block pointers and descriptors
too, ends in one of four methods of its builder; arithmetic ends in three others and in reductions.
They are wrapped while a Counter is open. Bytes are counted as a kernel requests them: a GPU's L2
serves part of them, so HBM may see fewer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from flashgen.errors import ToolchainError
from flashgen.kernels import interpreter
from flashgen.reference.attention import Comparison

Traffic = dict[str, tuple[int, int]]
"""Bytes loaded from and stored to each tensor of a kernel; an atomic update is both."""

_METHODS = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")


@dataclass(kw_only=True)
class Tally:
    """Bytes of one tensor: loaded and stored. size: of the tensor itself."""

    size: int
    loaded: int = 0
    stored: int = 0


@dataclass(kw_only=True)
class Counter:
    """Counts while it is entered; tallies are by kernel, then by tensor.

    A tensor has the name of the kernel's argument, without _ptr or _desc. kernel: the name under
    which launches are counted; None takes the function's own. Raises AssertionError where an access
    leaves the kernel's tensors, ToolchainError where this Triton's interpreter has no such methods.
    """

    kernel: str | None = None
    tallies: dict[str, dict[str, Tally]] = field(default_factory=lambda: defaultdict(dict))
    programs: int = 0
    matrix_flops: int = 0
    """Of tl.dot: two for each product of elements, one of them an addition."""
    other_flops: int = 0
    """All other floating-point operations but selections and comparisons: one for each element of
    a result, and of what a maximum or a sum reduces."""
    verdict: Comparison | None = None
    """How far the result is from float64, where somebody compared it."""
    tensors: dict[int, int] = field(default_factory=dict)
    """Bytes of every tensor that a launch was given, by address; they must stay alive."""
    _ranges: dict[tuple[int, int], Tally] = field(default_factory=dict)
    _saved: dict[tuple[Any, str], Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """All bytes, loaded and stored."""
        return sum(t.loaded + t.stored for of in self.tallies.values() for t in of.values())

    @property
    def traffic(self) -> Traffic:
        """What was loaded and stored, without tensors that no kernel touched."""
        return {
            name: (tally.loaded, tally.stored)
            for of in self.tallies.values()
            for name, tally in of.items()
            if tally.loaded or tally.stored
        }

    @property
    def extra(self) -> int:
        """Bytes of tensors other than Q, K, V and O."""
        every = (item for of in self.tallies.values() for item in of.items())
        return sum(tally.size for name, tally in every if name not in ("q", "k", "v", "o"))

    def __enter__(self) -> Counter:
        from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, ReduceOps

        interpreter.prepare()  # before its methods are wrapped: what it repairs must stay so
        hooks = {(InterpreterBuilder, name): self._access(name) for name in _METHODS}
        hooks[InterpreterBuilder, "set_grid_idx"] = self._program
        hooks[InterpreterBuilder, "create_dot"] = self._dot
        hooks[InterpreterBuilder, "binary_op"] = self._elementwise
        hooks[InterpreterBuilder, "unary_op"] = self._elementwise
        hooks[ReduceOps, "apply_impl"] = self._reduced
        hooks[GridExecutor, "_init_args_hst"] = self._launch
        for (owner, name), hook in hooks.items():
            method = getattr(owner, name, None)
            if method is None:
                self.__exit__()
                raise ToolchainError(
                    f"this Triton's interpreter has no {owner.__name__}.{name}: counting needs 3.7"
                )
            self._saved[owner, name] = method
            setattr(owner, name, _wrapped(method, hook))
        return self

    def __exit__(self, *_: object) -> None:
        for (owner, name), method in self._saved.items():
            setattr(owner, name, method)
        self._saved.clear()

    def _launch(self, method: Any, grid: Any, args: Any, kwargs: Any) -> Any:
        """The arguments of a launch as the interpreter runs it: CPU tensors, not copied."""
        found = method(grid, args, kwargs)
        own = self.tallies[self.kernel or grid.fn.__name__]
        self._ranges.clear()
        named: Mapping[str, Any] = dict(zip(grid.arg_names, found[0], strict=False)) | found[1]
        for argument, value in named.items():
            tensor = getattr(value, "base", value)  # of a descriptor
            if not isinstance(tensor, torch.Tensor) or not tensor.numel():
                continue
            name = argument.removesuffix("_ptr").removesuffix("_desc")
            size = tensor.numel() * tensor.element_size()
            last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            self.tensors[start] = size
            tally = own.setdefault(name, Tally(size=size))
            # One tensor may be given twice, first in place of one that is not there.
            self._ranges[start, start + (last + 1) * tensor.element_size()] = tally
        return found

    def _program(self, method: Any, builder: Any, *index: Any) -> Any:
        self.programs += 1
        return method(builder, *index)

    def _dot(self, method: Any, builder: Any, a: Any, b: Any, *args: Any) -> Any:
        self.matrix_flops += 2 * int(a.data.size) * int(b.data.shape[-1])
        return method(builder, a, b, *args)

    def _elementwise(self, method: Any, builder: Any, *args: Any) -> Any:
        found = method(builder, *args)
        # A text has "- 0.0" for what another of its kernels subtracts: compilers drop it.
        if args[-1] is np.subtract and not args[1].data.any():
            return found
        # Pointers, indices and masks are whole numbers.
        self.other_flops += int(found.data.size) * (found.data.dtype.kind == "f")
        return found

    def _reduced(self, method: Any, reduction: Any, operands: Any) -> Any:
        data = operands[0].handle.data
        self.other_flops += int(data.size) * (data.dtype.kind == "f")
        return method(reduction, operands)

    def _access(self, name: str) -> Any:
        masked_at = {"create_masked_load": 1, "create_masked_store": 2, "create_atomic_rmw": 3}
        at = masked_at.get(name)

        def access(method: Any, builder: Any, *args: Any, **kwargs: Any) -> Any:
            pointers = args[1] if name == "create_atomic_rmw" else args[0]
            lanes, tally = self._lanes(pointers, None if at is None else args[at])
            if tally is not None:
                # A bool is a bit wide, and takes a byte.
                width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
                tally.loaded += lanes * width * (name != "create_masked_store")
                tally.stored += lanes * width * (name != "create_masked_load")
            return method(builder, *args, **kwargs)

        return access

    def _lanes(self, pointers: Any, mask: Any) -> tuple[int, Tally | None]:
        """How many elements an access has, and of which tensor."""
        addresses = pointers.data
        if mask is not None:  # a TensorHandle, or a numpy array of block pointers and descriptors
            flags = mask if isinstance(mask, np.ndarray) else mask.data
            flags = np.broadcast_to(flags, addresses.shape)
            if not flags.all():
                addresses = addresses[flags]
        if not addresses.size:
            return 0, None
        first, last = int(addresses.min()), int(addresses.max())
        for (start, end), tally in self._ranges.items():
            if start <= first and last < end:
                return int(addresses.size), tally
        raise AssertionError(f"an access from {first:#x} to {last:#x} leaves the kernel's tensors")


def _wrapped(method: Any, hook: Any) -> Any:
    return lambda *args, **kwargs: hook(method, *args, **kwargs)
