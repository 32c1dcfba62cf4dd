"""Every direction, schedule and load: the launch hands over the arguments of the call, as many as the cubin declares,
within the limits of CUDA and of the device.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen.kernels import launch
from flashgen.kernels.launch_cache import Combine
from flashgen.kernels.plan import Plan
from flashgen.runtime import kernel_files
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.defaults import default_config
from tests.driver.cases import GPU, Kernel, call_of, kernels
from tests.driver.events import Launch, Load, Recording, TensorMap

KERNELS = kernels()
MAP_BYTES, POINTER_BYTES = 128, 8


def handed(plan: Plan, arguments: tuple[Any, ...]) -> list[object]:
    """What a launch must hand over, in order: addresses and numbers, and of a descriptor the address, sizes and strides.
    Arguments that Triton compiles in (None, constants, and 1 where it may be) are left out.
    """
    found: list[object] = []
    every = (*arguments, *plan.direct.constants)
    for param, value in zip(plan.direct.kernel.params, every, strict=True):
        if param.is_constexpr or value is None:
            continue
        if type(value) is int and value == 1 and not param.do_not_specialize:
            continue
        if isinstance(value, torch.Tensor):
            found.append(value.data_ptr())
        elif hasattr(value, "block_shape"):
            found += [("map", value.base.data_ptr()), *value.shape, *value.strides]
        else:
            found.append(value)
    return [*found, 0, 0]  # no scratch, neither of the kernel nor of a profiler


def received(launched: Launch, wanted: list[object]) -> list[object]:
    """The parameters of a launch, each read as the wanted one is."""
    found: list[object] = []
    for text, value in zip(launched.parameters, wanted, strict=True):
        data = bytes.fromhex(text)
        if isinstance(value, tuple):
            assert len(data) == MAP_BYTES
            found.append(("map", int.from_bytes(data[:POINTER_BYTES], "little")))
        elif isinstance(value, float):
            assert len(data) == 4
            (single,) = struct.unpack("<f", data)
            found.append(
                value if single == struct.unpack("<f", struct.pack("<f", value))[0] else single
            )
        else:
            found.append(int.from_bytes(data, "little", signed=data[-1] >= 128 and len(data) < 8))
    return found


def boxes(config: KernelConfig) -> set[int]:
    """The rows that a descriptor's block may have."""
    return {config.br, config.bc, 64}


SLOW = pytest.mark.slow(
    "make -f tests/sessions.mk test-driver-short has each schedule, load and order of a direction once"
)


def quick() -> set[str]:
    """The first kernels, by name, with each schedule, load, order and grid of each direction."""
    found, seen = set(), set()
    for name, (spec, config) in KERNELS.items():
        of_it = (config.schedule, config.loads, config.order, f"persistent {config.persistent}")
        if new := {(spec.direction, each) for each in of_it} - seen:
            seen |= new
            found.add(name)
    return found


QUICK = quick()


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(kernel, id=name, marks=() if name in QUICK else SLOW)
        for name, kernel in KERNELS.items()
    ],
)
def test_it_hands_over_what_the_cubin_declares(
    recording: Recording, monkeypatch: pytest.MonkeyPatch, kernel: Kernel
) -> None:
    spec, config = kernel
    plan = launch.bind(kernel_files.rendered(spec, config), spec, config)
    started: list[tuple[int, tuple[Any, ...]]] = []
    direct = type(plan.direct).__call__

    def noted(self: Any, blocks: int, arguments: Any) -> None:
        started.append((blocks, tuple(arguments)))
        direct(self, blocks, arguments)

    monkeypatch.setattr(type(plan.direct), "__call__", noted)
    call = call_of(spec)
    for _ in range(3):  # by Triton, then directly
        plan(call)
    monkeypatch.setenv("FLASHGEN_DIRECT", "0")
    launch.bind(kernel_files.rendered(spec, config), spec, config)(call)

    (loaded,) = {each.kernel: each for each in recording.of(Load)}.values()
    launches = recording.of(Launch)
    assert len(launches) == len(started) == 4
    for launched, (blocks, arguments) in zip(launches, started, strict=True):
        wanted = handed(plan, arguments)
        assert tuple(len(each) // 2 for each in launched.parameters) == loaded.parameter_sizes
        assert len(loaded.parameter_sizes) == len(wanted)
        assert received(launched, wanted) == wanted
        assert launched.broken == ""
        assert launched.grid == (blocks, 1, 1)
        assert launched.threads == 32 * config.block_warps(spec) <= loaded.threads_that_fit
        assert launched.dynamic_shared <= GPU.shared_per_block
        assert launched.cluster == 0
        assert launched.pdl == (config.pdl and spec.direction == "combine")
    if config.persistent:
        assert launches[0].grid[0] <= GPU.sms
    maps = recording.of(TensorMap)
    assert bool(maps) == (config.loads == "descriptor")
    for each in maps:
        assert each.broken == ""
        assert each.box[1] in boxes(config)
        assert each.box[0] * 2 <= 128  # bytes of a row of bfloat16: what the swizzle covers


@pytest.mark.parametrize("pdl", [False, True])
def test_the_combine_kernel_starts_early_behind_a_decode_that_lets_it(
    recording: Recording, pdl: bool
) -> None:
    spec, config = next(kernel for kernel in KERNELS.values() if kernel[0].direction == "decode")
    merging = spec.for_direction("combine")
    decode = launch.bind(kernel_files.rendered(spec, each := replace(config, pdl=pdl)), spec, each)
    combine = launch.bind(
        kernel_files.rendered(merging, each := default_config(merging)), merging, each
    )
    for _ in range(3):  # by Triton, then directly
        call = call_of(spec)
        combine(Combine(parts=decode(call), q=call.q))
    launches = recording.of(Launch)
    assert [each.pdl for each in launches] == [False, pdl] * 3
    assert not any(each.broken for each in launches)
