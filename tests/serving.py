"""The shipped package as tests serve from it: a dispatcher of its own, and what it launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashgen.kernels import launch, launch_backward, launch_cache
from flashgen.kernels import launch_cache as launch_decode
from flashgen.runtime import Dispatcher, registry
from flashgen.runtime import launcher as launcher_module
from flashgen.runtime.choice import Choice
from generated.table import ARCHS, CHOICES

SLUG = "nvidia_h200"


def serve(monkeypatch: pytest.MonkeyPatch, *more: Choice) -> Dispatcher:
    """The current dispatcher from here on: the shipped tables as on an H200, with some more choices
    there.
    """
    monkeypatch.setenv("FLASHGEN_GPU", SLUG)
    choices = dict(CHOICES) | {SLUG: (*CHOICES[SLUG], *more)}
    dispatcher = Dispatcher(package="generated", archs=ARCHS, choices=choices)
    monkeypatch.setattr(registry, "_current", dispatcher)
    return dispatcher


def timed(choice: Choice, median_us: float) -> Choice:
    return replace(choice, median_us=median_us)


def record_directions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directions of all kernels launched from here on by new launchers."""
    directions: list[str] = []

    def recording(bind: object) -> object:
        def bound(kernel: object, spec: object, config: object) -> object:
            run = bind(kernel, spec, config)  # type: ignore[operator]

            def launched(*args: object) -> object:
                directions.append(spec.direction)  # type: ignore[attr-defined]
                return run(*args)

            return launched

        return bound

    monkeypatch.setattr(launcher_module.launch, "bind", recording(launch.bind))
    for module, names in (
        (launch_backward, ("bind_delta", "bind_backward")),
        (launch_decode, ("bind_decode", "bind_combine")),
        (launch_cache, ("bind_append",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, recording(getattr(module, name)))
    return directions


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
