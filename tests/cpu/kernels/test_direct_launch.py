"""kernels/direct_launch.py hands the driver's launcher what Triton would, and leaves to Triton what it does not know."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.compiler import CompiledKernel

from flashgen.inputs.cache import Cache
from flashgen.inputs.features import PLAIN, Features
from flashgen.kernels import (
    descriptors,
    direct_launch,
    launch,
    launch_backward,
    launch_cache,
    loader,
)
from flashgen.kernels.launch_forward import Forward
from flashgen.kernels.render import render
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.defaults import default_config, default_spec
from flashgen.spec.attention import AttentionSpec
from tests.cpu.kernels.test_specialization import CompileOnlyDriver
from tests.makers import each, make_config, make_spec

SPEC = make_spec(head_dim=64, mask="causal")
DEFAULT = default_spec(make_spec(head_dim=24, mask="causal"))
BIASED = make_spec(head_dim=64, bias="additive")
KERNELS: dict[str, tuple[AttentionSpec, KernelConfig]] = {
    "descriptor": (SPEC, make_config(64, 32, loads="descriptor")),
    "pointer": (SPEC, make_config(64, 32)),
    "default": (DEFAULT, default_config(DEFAULT)),
    "bias": (BIASED, make_config(64, 32)),
    "delta": (SPEC.for_direction("backward_delta"), make_config(64, 16, num_stages=1)),
    "dkv": (SPEC.for_direction("backward_dkv"), make_config(32, 32)),
    "dq": (SPEC.for_direction("backward_dq"), make_config(32, 32, loads="descriptor")),
    "decode": (make_spec(head_dim=64, direction="decode"), make_config(16, 32)),
}


class RecordingDriver(CompileOnlyDriver):
    """A driver whose launcher writes down what it is called with. Every binary has a number."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.loaded = 0
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            load_binary=self.load,
            unload_module=lambda module: None,
        )

    def load(self, *_: object) -> tuple[object, int, int, int, int]:
        self.loaded += 1
        return object(), self.loaded, 32, 0, 1024

    def launcher_cls(self, src: object, metadata: object) -> Callable[..., None]:
        return lambda *arguments: self.launches.append(arguments)

    def get_current_stream(self, device: int) -> int:
        return 77


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingDriver]:
    made = RecordingDriver()
    monkeypatch.setattr(triton.runtime.driver, "_active", made)
    monkeypatch.delenv("FLASHGEN_DIRECT", raising=False)
    loaded: list[Any] = []
    init_handles = CompiledKernel._init_handles
    monkeypatch.setattr(
        CompiledKernel, "_init_handles", lambda self: (loaded.append(self), init_handles(self))
    )
    with knobs.runtime.scope():
        yield made
    # Triton 3.8 and later unload what they loaded, by the driver of then, which is none: when a
    # collection begins inside ast.parse, what pytest makes of that error parses too, and
    # Python 3.11.7 takes the one parser's depth for the other's.
    for compiled in loaded:
        compiled.module = None


def told(argument: Any) -> Any:
    """An argument as it can be compared: tensors by where they are, descriptors by their fields."""
    if isinstance(argument, torch.Tensor):
        return ("tensor", argument.dtype, argument.shape, argument.stride())
    if hasattr(argument, "block_shape"):
        return (type(argument), {name: told(value) for name, value in vars(argument).items()})
    return argument


def call_of(name: str, folder: Path) -> Callable[[], object]:
    """A launch of the kernel `name`, to be repeated."""
    spec, config = KERNELS[name]
    rendered = render(spec, config)
    path = folder / f"{rendered.name}.py"
    path.write_text(rendered.source)
    kernel = loader.load_kernel(path, rendered.text_name, rendered.name)
    q, k, v = (
        torch.zeros((2, 4, 96, 16 if name == "default" else 64), dtype=torch.bfloat16)
        for _ in range(3)
    )
    rows = torch.zeros(2, 4, 96)
    if spec.direction == "decode":
        cache = Cache(k=k, v=v, lengths=torch.full((2,), 96, dtype=torch.int32))
        call = launch_cache.Decode(q=q[:, :, :1], cache=cache, scale=0.1, sms=132)
        bound = launch.bind(kernel, spec, config)
        return lambda: bound(call)
    if spec.direction == "forward":
        features = PLAIN
        if spec.bias != "none":
            features = Features(bias=torch.zeros(1, 1, 96, 96, dtype=torch.bfloat16))
        run = launch.bind(kernel, spec, config)
        diagonal = 0 if spec.causal else None
        made = Forward(q=q, k=k, v=v, scale=0.1, diagonal=diagonal, features=features)
        return lambda: run(made)
    if spec.direction == "backward_delta":
        delta = launch.bind(kernel, spec, config)
        return lambda: delta(launch_backward.Delta(o=q, do=k, dlse=rows))
    backward = launch.bind(kernel, spec, config)
    beside = launch_backward.Backward(
        q=q, k=k, v=v, do=q.clone(), lse=rows, delta=rows, scale=0.1, diagonal=0
    )
    return lambda: backward(beside)


@pytest.mark.parametrize("name", each(KERNELS, 3))
def test_the_driver_is_handed_what_triton_hands_it(
    name: str, driver: RecordingDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = call_of(name, tmp_path)
    call()
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", None)  # Triton takes no part
    call()
    monkeypatch.undo()
    by_triton, directly = driver.launches
    metadata, *hooks = by_triton[6:9]
    assert directly[6:9] == (None, None, None)
    assert not any(hook.calls for hook in hooks), metadata  # they had nothing to do
    of_triton, of_direct = (
        [told(x) for x in (*each[:6], *each[9:])] for each in (by_triton, directly)
    )
    assert of_direct == of_triton
    assert by_triton[3] == 77
    assert by_triton[4] == 1


@pytest.fixture
def pointer(driver: RecordingDriver, tmp_path: Path) -> Callable[..., None]:
    """Launches the pointer kernel on these tensors; the number of the binary goes to driver.launches."""
    spec, config = KERNELS["pointer"]
    rendered = render(spec, config)
    path = tmp_path / f"{rendered.name}.py"
    path.write_text(rendered.source)
    run = launch.bind(loader.load_kernel(path, rendered.text_name, rendered.name), spec, config)

    def launched(q: torch.Tensor, diagonal: int = 0) -> None:
        run(Forward(q=q, k=q, v=q, scale=0.1, diagonal=diagonal))

    return launched


def binaries(driver: RecordingDriver) -> list[int]:
    return [each[4] for each in driver.launches]


def zeros(seq: int = 96, offset: int = 0, row: int = 64) -> torch.Tensor:
    memory = torch.zeros(2 * 4 * seq * row + 64, dtype=torch.bfloat16)
    return memory.as_strided((2, 4, seq, 64), (4 * seq * row, seq * row, row, 1), offset)


def test_another_class_of_argument_finds_another_kernel(
    driver: RecordingDriver, pointer: Any
) -> None:
    """A base that is not aligned, then strides that are no multiples of 16: each its own binary, as
    Triton would have it, and each again when it comes again."""
    kinds = [zeros(), zeros(offset=1), zeros(row=72)]
    for q in (*kinds, *kinds, *reversed(kinds)):
        pointer(q)
    assert binaries(driver) == [1, 2, 3, 1, 2, 3, 3, 2, 1]


def test_lengths_are_of_one_class(driver: RecordingDriver, pointer: Any) -> None:
    for seq in (16, 32, 16, 48, 32):
        pointer(zeros(seq))
    assert binaries(driver) == [1] * 5
    assert [each[0] for each in driver.launches] == [8] * 5  # its own grid


def test_a_number_too_large_for_32_bits_is_another_class(
    driver: RecordingDriver, pointer: Any
) -> None:
    q = zeros()
    for diagonal in (0, 1 << 33, 0, 1 << 33, 5):
        pointer(q, diagonal)
    assert binaries(driver) == [1, 2, 1, 2, 1]


def by_triton(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled with one entry for each launch that Triton makes."""
    seen: list[int] = []
    run = triton.runtime.jit.JITFunction.run

    def counted(*arguments: Any, **options: Any) -> Any:
        seen.append(1)
        return run(*arguments, **options)

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", counted)
    return seen


@pytest.mark.parametrize("what", ["launch_enter_hook", "launch_exit_hook", "debug"])
def test_who_listens_is_heard(
    what: str, driver: RecordingDriver, pointer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Profilers' hooks, Triton's own debugging: launches are Triton's as long as they are there."""
    q = zeros()
    pointer(q)
    seen = by_triton(monkeypatch)
    pointer(q)
    assert seen == []
    with monkeypatch.context() as patch:
        if what == "debug":
            patch.setattr(knobs.runtime, "debug", True)
        else:
            patch.setattr(getattr(knobs.runtime, what), "calls", [lambda metadata: None])
        pointer(q)
        assert seen == [1]
    pointer(q)
    assert seen == [1]


def test_it_can_be_switched_off(
    driver: RecordingDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHGEN_DIRECT", "0")
    call = call_of("pointer", tmp_path)
    seen = by_triton(monkeypatch)
    call()
    call()
    assert seen == [1, 1]


def test_a_variant_is_kept_once_whatever_lengths_and_strides(
    driver: RecordingDriver, pointer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = by_triton(monkeypatch)
    for seq in range(1, 50):
        pointer(zeros(seq))
    assert seen == [1]


class Kernel:
    """What kernels/direct_launch.py asks of a kernel, with one thing changed."""

    def __init__(self, **changed: Any) -> None:
        self.pre_run_hooks: list[Any] = []
        self.used_global_vals: dict[Any, Any] = {}
        self.params = ("a", "b")
        self.device_caches: dict[Any, Any] = {}
        self.launched = 0
        vars(self).update(changed)

    def __getitem__(self, grid: Any) -> Any:
        def launched(*_: Any, **__: Any) -> Any:
            self.launched += 1
            return SimpleNamespace(run=lambda *_: None, function=1, packed_metadata=2)

        return launched


@pytest.mark.parametrize(
    ("changed", "arguments", "times"),
    [
        ({}, (1, 2.0), 1),
        ({}, (1, object()), 3),  # nobody knows its class
        ({}, (True, 2), 3),  # a bool is no int to Triton
        ({"used_global_vals": {("x", 1): (1, {})}}, (1, 2), 3),
        ({"used_global_vals": {("x", 1): (tl.constexpr(1), {})}}, (1, 2), 1),  # as in Gluon
        ({"params": ("a", "b", "c")}, (1, 2), 3),  # a default is filled in
        ({"pre_run_hooks": [print]}, (1, 2), 3),
    ],
)
def test_what_is_not_known_is_left_to_triton(
    changed: Any, arguments: Any, times: int, driver: RecordingDriver
) -> None:
    kernel = Kernel(**changed)
    start = direct_launch.Direct(kernel, (), {"num_warps": 4, "num_stages": 2})
    for _ in range(3):
        start(1, arguments)
    assert kernel.launched == times


@pytest.mark.parametrize(
    ("version", "times"),
    [("3.6.0", 1), ("3.9.1+git5", 1), ("3.5.1", 3), ("3.10.0", 3), ("4.0.0", 3), ("next", 3)],
)
def test_versions_that_were_not_tested_are_left_to_triton(
    version: str, times: int, driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    kernel = Kernel()
    start = direct_launch.Direct(kernel, (), {"num_warps": 4, "num_stages": 2})
    for _ in range(3):
        start(1, (1, 2.0))
    assert kernel.launched == times


def test_other_drivers_are_left_to_triton(
    driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMD's classes follow from the size of a tensor's memory too."""
    monkeypatch.setattr(
        RecordingDriver, "get_current_target", lambda self: SimpleNamespace(backend="hip")
    )
    kernel = Kernel()
    start = direct_launch.Direct(kernel, (), {"num_warps": 4, "num_stages": 2})
    for _ in range(3):
        start(1, (1, 2))
    assert kernel.launched == 3


def test_a_descriptor_is_as_new_and_keeps_no_tensor_alive() -> None:
    import weakref

    def made() -> torch.Tensor:
        return (
            torch.zeros((2, 4, 33, 64), dtype=torch.bfloat16)
            .transpose(1, 2)
            .contiguous()
            .transpose(1, 2)
        )

    first, second = made(), made()
    descriptors._DESCRIBED.clear()
    anew = descriptors.descriptor_of(first, 64, 64)
    again = descriptors.descriptor_of(second, 64, 64)
    assert vars(again) == vars(anew) | {"base": second}
    assert type(again) is type(anew)
    alive = weakref.ref(first)
    del first, anew
    assert alive() is None
    memory = torch.zeros(2 * 4 * 33 * 64 + 8, dtype=torch.bfloat16)
    unaligned = memory[1:-7].view(2, 4, 33, 64)
    aligned = memory[8:].view(2, 4, 33, 64)
    descriptors.descriptor_of(aligned, 64, 64)
    with pytest.raises(AssertionError, match="aligned"):
        descriptors.descriptor_of(unaligned, 64, 64)


@pytest.mark.parametrize("places", [(), (1,), (0, 2)])
def test_numbers_are_taken_as_a_tuple(places: tuple[int, ...]) -> None:
    assert direct_launch._taking(places)("abc") == tuple("abc"[place] for place in places)
