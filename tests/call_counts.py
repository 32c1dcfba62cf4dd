"""How many functions of flashgen a call runs, and how often it returns to a module that it left:

    python -m tests.call_counts [--list]

Functions are counted by sys.setprofile as they begin, comprehensions and classes' bodies apart. A stay is a run of
functions of one module; a return is a stay in a module that had one before. The driver launches nothing, and CPU
tensors take the way of a GPU's. "first" is the first call with these shapes, of a spec that was resolved before.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
import triton

import flashgen
from benchmarks.dispatch_overhead import SERVED_AS, no_launch
from flashgen import paths
from flashgen.runtime.resolver import Resolver

CALLS = ("first", "second", "kept")
OWN = str(paths.PACKAGE)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The functions that one call ran, in order, each as (module, function)."""

    functions: tuple[tuple[str, str], ...]

    @property
    def stays(self) -> list[str]:
        """The modules in the order in which they were entered."""
        return [module for module, _ in itertools.groupby(module for module, _ in self.functions)]

    @property
    def rooms(self) -> int:
        """How many modules there were."""
        return len(set(self.stays))

    @property
    def returns(self) -> int:
        """How many stays were in a module that had been left."""
        return len(self.stays) - self.rooms

    def __str__(self) -> str:
        return (
            f"{len(self.functions):5} functions, {len(self.stays):3} stays in {self.rooms:2} modules,"
            f" {self.returns:3} returns"
        )


def counted(call: Callable[[], object]) -> Counts:
    """The functions of flashgen that a call runs."""
    codes: list[CodeType] = []

    def observe(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            codes.append(frame.f_code)

    sys.setprofile(observe)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Counts(
        functions=tuple(
            (Path(code.co_filename).stem, code.co_qualname)
            for code in codes
            if code.co_filename.startswith(OWN) and not code.co_name.startswith("<")
        )
    )


@contextmanager
def launching_nothing() -> Iterator[None]:
    """Tensors of the CPU go the way of a GPU's, to a driver that launches nothing."""
    active = triton.runtime.driver._active
    with (
        mock.patch.dict(os.environ, {"FLASHGEN_GPU": SERVED_AS}),
        mock.patch.object(Resolver, "left_to_torch", return_value=False),
        torch.no_grad(),
    ):
        triton.runtime.driver._active = no_launch()
        try:
            yield
        finally:
            triton.runtime.driver._active = active


def public_calls() -> dict[str, Callable[[int], object]]:
    """Public calls by name; each takes a length, so that calls of several lengths are of one spec."""

    def tensors(length: int, *shape: int) -> list[torch.Tensor]:
        return [torch.zeros(*shape[:2], length, shape[2], dtype=torch.bfloat16) for _ in range(3)]

    def attention(length: int) -> object:
        return flashgen.attention(*tensors(length, 2, 4, 64), causal=True)

    def with_window(length: int) -> object:
        return flashgen.attention(*tensors(length, 2, 4, 64), causal=True, window=(8, 0))

    def decode(length: int) -> object:
        q, k, v = tensors(length, 2, 4, 64)
        lengths = torch.full((2,), length, dtype=torch.int32)
        return flashgen.decode(q[:, :, :1].contiguous(), k, v, lengths=lengths)

    def decode_pages(pages: int) -> object:
        pool = torch.zeros(2 * pages, 8, 4, 64, dtype=torch.bfloat16)
        table = torch.arange(2 * pages, dtype=torch.int32).view(2, pages)
        q, lengths = pool[:2, :1].transpose(1, 2).contiguous(), torch.ones(2, dtype=torch.int32)
        return flashgen.decode(q, pool, pool, lengths=lengths, block_table=table)

    def varlen(length: int) -> object:
        q, k, v = (torch.zeros(2 * length, 4, 64, dtype=torch.bfloat16) for _ in range(3))
        bounds = torch.tensor([0, length, 2 * length], dtype=torch.int32)
        return flashgen.attention_varlen(q, k, v, bounds, bounds, length, length, causal=True)

    found: list[Any] = [attention, with_window, decode, decode_pages, varlen]
    return {each.__name__: each for each in found}


def counts_of(call: Callable[[int], object]) -> dict[str, Counts]:
    """The counts of the first, the second and the kept call with the same shapes."""
    with launching_nothing():
        for _ in range(3):
            call(48)
        return {name: counted(lambda: call(64)) for name in CALLS}


def main(arguments: list[str]) -> None:
    for name, call in public_calls().items():
        for which, counts in counts_of(call).items():
            print(f"{name:14}{which:8}{counts}")
            if "--list" in arguments:
                print(
                    *(f"    {module}: {function}" for module, function in counts.functions),
                    sep="\n",
                )


if __name__ == "__main__":
    main(sys.argv[1:])
