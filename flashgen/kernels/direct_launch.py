"""Launches a kernel without the work that Triton repeats at every call.

Triton classifies every argument (type, alignment, equal to 1), prints the classes and looks the
compiled variant up by that text. Here the classes themselves are the key: a kernel has one entry
for each variant that Triton compiled, whatever the lengths and strides of the calls. The variant is
passed to the driver's launcher as Triton would. Triton still launches what is not known to be safe:
the first call of a variant, profiler hooks, debugging, kernels that read globals, drivers other
than CUDA's (whose classes depend on more than values), and any Triton version that was not tested.

FLASHGEN_DIRECT=0 leaves every launch to Triton.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashgen import settings
from flashgen.kernels.inner_launch import Inner, inner_launch

_UNALIGNED = 15
"""Bits that are 0 in an aligned pointer or a multiple of 16: Triton's classes, in 3.6 to 3.9."""

_UNKNOWN = object()
"""The class of an argument for which Triton's rule is not known."""


class Relaunch(NamedTuple):
    """What repeats a launch: what launches, how many programs with which flat list, the device that
    was current, and the functions of the driver for the current device and for a device's current
    stream.
    """

    inner: Inner
    blocks: int
    flat: list[Any]
    device: int
    current_device: Callable[[], int]
    current_stream: Callable[[int], int]


_Places = tuple[Callable[[Sequence[Any]], Any], Callable[[Any], tuple[object, ...]], Sequence[int]]
"""Of a kernel's arguments: what takes the ints out, what gives their classes, and the places of the
others."""


class Direct:
    """Launches one kernel with fixed constants and options. Arguments are in the kernel's order,
    all of them, the same ones None in every call; its constants follow.
    """

    def __init__(self, kernel: Any, constants: tuple[Any, ...], options: Mapping[str, int]) -> None:
        self.kernel = kernel
        self.constants = constants
        self._options = dict(options)
        self._ready: dict[tuple[object, ...], tuple[Inner, object]] = {}
        """What launches each variant, and the compiled kernel itself, which from Triton 3.8 on
        unloads its function when nobody holds it."""
        self.on = settings.direct_launch() and _is_known(kernel)
        if self.on:
            from triton import knobs
            from triton.runtime import driver

            self.knobs, self.driver = knobs.runtime, driver
            self.specializes = [
                not getattr(param, "do_not_specialize", False) for param in kernel.params
            ]
            """Whether what Triton compiles depends on the argument at a place."""
            self._places: _Places | None = None

    def __call__(self, blocks: int, arguments: Sequence[Any]) -> Relaunch | None:
        """Launch `blocks` programs on the current device and stream; what repeats that, or None if
        Triton launched. Raises what Triton raises.
        """
        if not self.undisturbed():
            self.kernel[(blocks,)](*arguments, *self.constants, **self._options)
            return None
        driver = self.driver.active
        current_device, current_stream = driver.get_current_device, driver.get_current_stream
        device = current_device()
        variant = self._variant(device, arguments)
        ready = self._ready.get(variant)
        if ready is None:
            compiled = self.kernel[(blocks,)](*arguments, *self.constants, **self._options)
            self._keep(variant, arguments, compiled)
            return None
        inner, _ = ready
        flat = inner.flat(arguments)
        inner.launch(blocks, current_stream(device), flat)
        if current_device is torch.cuda.current_device:
            # It initializes CUDA first. A launch is repeated after that, so the function below it
            # is enough, which takes a third of the time.
            current_device = getattr(torch._C, "_cuda_getDevice", current_device)
        return Relaunch(inner, blocks, flat, device, current_device, current_stream)

    def retire(self) -> None:
        """Leave all further launches to Triton: another kernel replaces this one."""
        self.on = False

    def undisturbed(self) -> bool:
        """Whether no hook observes or changes what Triton does at a launch."""
        return self.on and not self.kernel.pre_run_hooks and not watched(self.knobs)

    def _variant(self, device: int, arguments: Sequence[Any]) -> tuple[object, ...]:
        """The key of the compiled variant for these arguments: the classes of all of them."""
        numbers, classes, others = self._places or self._learn(arguments)
        return (device, classes(numbers(arguments)), *_classes(arguments, others))

    def _learn(self, arguments: Sequence[Any]) -> _Places:
        """Which arguments are ints, and which None: the same ones in every call, because they go
        by name.
        """
        given = [place for place, argument in enumerate(arguments) if argument is not None]
        places = [place for place in given if type(arguments[place]) is int]
        others = [place for place in given if place not in places]
        bits = [_UNALIGNED * self.specializes[place] for place in places]

        def classes(numbers: Sequence[int]) -> tuple[object, ...]:
            return tuple(map(_class_of_int, numbers, bits))

        # Most calls have numbers that were seen before. Others take a microsecond more.
        self._places = _taking(places), functools.lru_cache(maxsize=1024)(classes), others
        return self._places

    def _keep(self, variant: tuple[object, ...], arguments: Sequence[Any], compiled: Any) -> None:
        """Keep the variant that a launch compiled or found."""
        if compiled is None or _UNKNOWN in variant or _may_change(self.kernel.used_global_vals):
            return
        given = len(arguments) + len(self.constants)
        if given != len(self.kernel.params):  # Triton would fill defaults in
            return
        if self.driver.active.get_current_target().backend != "cuda":
            self.on = False
            return
        inner = inner_launch(
            compiled.run, compiled.function, compiled.packed_metadata, arguments, self.constants
        )
        self._ready[variant] = inner, compiled


def watched(knobs: Any) -> bool:
    """Whether a hook or a knob of Triton's runtime observes or changes launches of any kernel."""
    enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
    return (
        knobs.debug
        or knobs.add_stages_inspection_hook is not None
        or (enter is not None and getattr(enter, "calls", True))
        or (leave is not None and getattr(leave, "calls", True))
    )


def _may_change(used: Mapping[Any, tuple[Any, Any]]) -> bool:
    """Whether a kernel reads a global that is no constexpr: Triton compares each with its value of
    before at every launch. A constexpr is a constant of the emitted text, as a layout in Gluon.
    """
    from triton.language import constexpr

    return any(not isinstance(value, constexpr) for value, _ in used.values())


TESTED = (3, 6), (3, 9)
"""The versions of Triton whose kernels are known, the first and the last."""


def _is_known(kernel: Any) -> bool:
    """Whether it is a compiled kernel of a tested Triton version."""
    import triton

    numbers = re.match(r"(\d+)\.(\d+)", triton.__version__)
    first, last = TESTED
    if numbers is None or not first <= (int(numbers[1]), int(numbers[2])) <= last:
        return False
    return all(
        hasattr(kernel, name)
        for name in ("pre_run_hooks", "used_global_vals", "params", "device_caches")
    )


def _taking(places: Sequence[int]) -> Callable[[Sequence[Any]], Any]:
    """Takes the arguments at these places, as a tuple."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda arguments: tuple(arguments[place] for place in places)


def _class_of_int(number: int, bits: int) -> object:
    """A class that differs wherever Triton's own does. bits: those that matter, too."""
    if number & bits:
        return number == 1, number >> 31
    return number >> 31  # 0 and -1 are the int32


def _classes(arguments: Sequence[Any], places: Sequence[int]) -> list[object]:
    """The same of arguments that are no ints. Floats are one class."""
    found: list[object] = []
    for place in places:
        argument = arguments[place]
        kind = type(argument)
        if kind is Tensor or isinstance(argument, Tensor):
            dtype = argument.dtype
            found.append((dtype, False) if argument.data_ptr() & _UNALIGNED else dtype)
        elif kind is float:
            found.append(float)
        else:  # a descriptor that descriptors.py made
            found.append(getattr(argument, "compiled_for", _UNKNOWN))
    return found
