"""A driver for an H200 on which nothing is compiled or launched: what kernels are handed is written
down. tests/cpu/kernels/test_direct_launch.py has one that compiles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from flashgen.runtime import Dispatcher
from flashgen.runtime.resolver import Resolver
from tests.serving import SHIPPED

_devices = itertools.count(1000)  # kernels keep what was compiled by device, as long as they live


class Written:
    """The driver. launches: (kernel's name and class of arguments, stream, programs, arguments)."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.device = next(_devices)
        self.stream = 77
        self.by_triton = 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        assert device == self.device
        return self.stream

    def compiled(self, kernel: Any, key: str, device: int) -> Any:
        """What Triton takes for a compiled kernel."""

        def run(x: int, y: int, z: int, stream: int, function: Any, *others: Any) -> None:
            _, _, *hooks = others[:4]
            for hook in hooks:
                if hook is not None:
                    hook(None)
            self.launches.append((function, stream, (x, y, z), [told(a) for a in others[4:]]))

        def launch_metadata(*_: Any) -> None:
            self.by_triton += 1  # a direct launch has none

        return SimpleNamespace(
            run=run,
            function=(kernel.__name__, key),
            packed_metadata=(),
            launch_metadata=launch_metadata,
        )


def told(argument: Any) -> Any:
    """An argument as the driver sees it: of a tensor its address."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if hasattr(argument, "block_shape"):
        return (type(argument), {name: told(value) for name, value in vars(argument).items()})
    return argument


@contextmanager
def served(monkeypatch: pytest.MonkeyPatch, driver: Written | None = None) -> Iterator[Written]:
    """CPU tensors are served as an H200's are, and launches written down, by this driver if given."""
    driver = driver or Written()

    def do_compile(self: Any, key: str, signature: Any, device: int, *_: Any) -> Any:
        made = driver.compiled(self, key, device)
        self.device_caches[device][0][key] = made
        return made

    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "_do_compile", do_compile)
    monkeypatch.setattr(Resolver, "left_to_torch", lambda self, device: False)
    monkeypatch.setenv("FLASHGEN_GPU", "nvidia_h200")
    monkeypatch.delenv("FLASHGEN_DIRECT", raising=False)
    with knobs.runtime.scope():
        yield driver


def dispatcher(monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    """One of its own, which is not the process's."""
    return Dispatcher(package="generated", archs=SHIPPED.archs, choices=SHIPPED.choices)
