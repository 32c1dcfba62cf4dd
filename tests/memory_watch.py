"""Watches the memory accesses of interpreted kernels: one outside of the tensors of its launch raises OutOfBounds
instead of reading or writing what is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from torch import Tensor


class OutOfBounds(AssertionError):
    """A kernel accessed memory that no argument of its launch has."""


class _Watched:
    """Triton's native loads and stores, after a look at their addresses."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self.begins = self.ends = np.zeros(0, np.int64)

    def allow(self, tensors: list[Tensor]) -> None:
        """From here on, the memory from the first to the last element of each tensor, and no other."""
        spans = sorted(map(_span, tensors))
        self.begins = np.array([begin for begin, _ in spans])
        self.ends = np.maximum.accumulate(np.array([end for _, end in spans]))

    def check(self, verb: str, pointers: Any, mask: Any, size: int) -> None:
        begins = pointers[mask.astype(bool)].astype(np.int64)  # masks are also integers
        place = np.searchsorted(self.begins, begins, side="right") - 1
        inside = (place >= 0) & (begins + size <= self.ends[place])
        if not inside.all():
            raise OutOfBounds(f"{verb} of {(~inside).sum()} elements outside of all tensors")

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self.check("load", pointers, mask, np.dtype(dtype).itemsize)
        return self._native.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self.check("store", pointers, mask, value.dtype.itemsize)
        return self._native.store(pointers, value, mask)

    def atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
        self.check("atomic", pointers, mask, value.dtype.itemsize)
        return self._native.atomic_rmw(operation, pointers, value, mask, order)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)


def _span(x: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    begin = x.data_ptr()
    return begin, begin + (last + 1) * x.element_size() * (x.numel() > 0)


@contextmanager
def watched() -> Iterator[None]:
    """Every interpreted launch within is watched."""
    from triton.runtime import interpreter

    with pytest.MonkeyPatch.context() as patch:
        watch = _Watched(interpreter._interpreter)
        patch.setattr(interpreter, "_interpreter", watch)
        prepare = interpreter.GridExecutor._init_args_hst

        def prepared(self: Any, arguments: Any, options: Any) -> Any:
            found = prepare(self, arguments, options)
            given = [getattr(x, "base", x) for x in (*found[0], *found[1].values())]
            watch.allow([x for x in given if isinstance(x, Tensor)])
            return found

        patch.setattr(interpreter.GridExecutor, "_init_args_hst", prepared)
        yield
