"""The shipped package as tests serve from it: a dispatcher of its own, and what it launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen import paths
from flashgen.kernels.plan import Plan
from flashgen.runtime import Dispatcher, autograd, folders
from flashgen.runtime.choice import Choice, by_spec
from flashgen.runtime.generated_tables import served_from

SLUG = "nvidia_h200"
SHIPPED = served_from(paths.shipped_generated_dir())
"""The tables that ship."""


def serve(monkeypatch: pytest.MonkeyPatch, *more: Choice) -> Dispatcher:
    """The current dispatcher from here on: the shipped tables as on an H200, with some more choices
    there.
    """
    monkeypatch.setenv("FLASHGEN_GPU", SLUG)
    own = dict(SHIPPED.choices[SLUG])
    own |= {spec: (*own.get(spec, ()), *others) for spec, others in by_spec(more).items()}
    choices = dict(SHIPPED.choices) | {SLUG: own}
    dispatcher = Dispatcher(package="generated", archs=SHIPPED.archs, choices=choices)
    make_current(monkeypatch, dispatcher)
    return dispatcher


def make_current(monkeypatch: pytest.MonkeyPatch, dispatcher: Dispatcher) -> None:
    """As folders.serve_by(), for a test."""
    monkeypatch.setattr(folders, "_current", dispatcher)
    monkeypatch.setitem(autograd.served, paths.SHIPPED_PACKAGE, dispatcher.passes)


def timed(choice: Choice, median_us: float) -> Choice:
    return replace(choice, median_us=median_us)


def record_directions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directions of all kernels launched from here on."""
    directions: list[str] = []
    watch_plans(monkeypatch, lambda plan: directions.append(plan.spec.direction))
    return directions


def watch_plans(monkeypatch: pytest.MonkeyPatch, watch: Callable[[Plan], None]) -> None:
    """Call `watch` with each plan before it launches."""

    start = Plan.start

    def watched(self: Plan, *arguments: Any, **options: Any) -> None:
        watch(self)
        start(self, *arguments, **options)

    monkeypatch.setattr(Plan, "start", watched)


def leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Copies that require gradients, strides kept."""
    return tuple(
        x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in tensors
    )


@contextmanager
def autocast_of_a_gpu() -> Iterator[None]:
    """Autocast to bfloat16 on CUDA tensors alone; torch.autocast enables none without a GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
