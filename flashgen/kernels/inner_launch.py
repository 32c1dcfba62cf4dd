"""Triton's C launcher, without the Python around it.

Triton's CudaLauncher allocates scratch, encodes a tensor map for each descriptor and flattens the
arguments at every launch. A launch that is repeated with fixed sizes needs only new pointers and
new tensor maps, and a tensor map depends on nothing but its address and its layout. So the flat
list of arguments is made once, the maps are cached by address, and the C function below
CudaLauncher is called.

The attributes read here are those of Triton 3.6 and 3.7. With any other version, and where a
kernel needs scratch, launches are left to CudaLauncher.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

KNOWN = (3, 6), (3, 7)
"""The versions of Triton whose launcher is known."""

MOST_MAPS = 512
"""Tensor maps of an argument that are kept: each is 128 bytes, and serves one address."""


class Inner(NamedTuple):
    """The C launcher of one compiled kernel, for one grid.

    call: launches, with `before`, a stream, `after`, and a flat list of arguments: as one argument
    if `as_list`, else each by itself. flat: such a list; places: where an argument of the kernel
    stands in it; encoders: for each descriptor, by its place among the kernel's arguments, the
    function from another descriptor of its layout to a tensor map.
    """

    call: Callable[..., object]
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    as_list: bool
    flat: list[Any]
    places: list[int]
    encoders: dict[int, Callable[[Any], Any]]


def inner_launch(
    run: Any,
    function: object,
    metadata: object,
    blocks: int,
    arguments: Sequence[Any],
    constants: int,
) -> Inner | None:
    """The C launcher below `run`, a compiled kernel's CudaLauncher, for `blocks` programs and these
    arguments, all of the kernel's in their order, behind which it has so many constants. None where
    it is not known.
    """
    import triton

    if type(run) is not _known_launcher(triton.__version__):
        return None
    from triton.backends.nvidia import driver as nvidia

    if run.global_scratch_size or run.profile_scratch_size:
        return None
    launch, described = _unwrapped(run.launch)
    if launch is None or None in described.values():
        return None
    flat: list[Any] = []
    places: list[int] = []
    encoders: dict[int, Callable[[Any], Any]] = {}
    for place, argument in enumerate(arguments):
        places.append(len(flat))
        if place in described:
            flat += nvidia.make_tensordesc_arg(argument, described[place])
            encoders[place] = _encoder(nvidia.make_tensordesc_arg, described[place])
        else:
            flat.append(argument)
    grid, options = (blocks, 1, 1), (run.launch_cooperative_grid, run.launch_pdl)
    # No hooks and no scratch: those are the arguments that are None.
    if not _flattens(run):
        flat += [None] * constants  # 3.6 counts their places, and reads nothing there
        ends: tuple[Any, ...] = (None, None, metadata, None, None, None)
        return Inner(launch, grid, (function, *options, *ends), False, flat, places, encoders)
    # From 3.7 on nothing need stand for what is None: its annotation says that, and goes with it.
    kept = [n for n, argument in enumerate(flat) if argument is not None]
    annotations = [run.arg_annotations[n] for n in kept]
    now = {n: place for place, n in enumerate(kept)}
    flat, places = [flat[n] for n in kept], [now.get(n, -1) for n in places]
    nothing = (None, None, None, None, None)
    ends = (metadata, *nothing, annotations, run.kernel_signature)
    return Inner(launch, grid, (function, *options, *ends), True, flat, places, encoders)


@functools.cache
def _known_launcher(version: str) -> Any:
    """CudaLauncher of a known version of Triton; None of another."""
    from triton.backends.nvidia.driver import CudaLauncher

    known = tuple(map(int, version.split(".")[:2])) in KNOWN
    return CudaLauncher if known else None


def _unwrapped(launch: Any) -> tuple[Any, dict[int, Any]]:
    """The C function, and the metadata of each descriptor by its place; None for an unknown one."""
    if not isinstance(launch, FunctionType):
        return launch, {}
    wrapped = inspect.getclosurevars(launch).nonlocals
    try:
        places, metadata = sorted(wrapped["tensordesc_indices"]), wrapped["tensordesc_meta"]
        return wrapped["launcher"], dict(zip(places, metadata, strict=True))
    except (KeyError, TypeError, ValueError):
        return None, {}


def _encoder(encode: Callable[[Any, Any], list[Any]], metadata: Any) -> Callable[[Any], Any]:
    """From a descriptor to its tensor map, which Triton puts before sizes and strides."""
    return lambda descriptor: encode(descriptor, metadata)[0]


def _flattens(run: Any) -> bool:
    """Whether the C function reads a list of arguments by their annotations, as from 3.7 on; 3.6
    compiles one for each signature.
    """
    return hasattr(run, "kernel_signature")
