"""Triton's C launcher, without the Python around it.

Triton's CudaLauncher allocates scratch, encodes a tensor map for each descriptor and flattens the
arguments at every launch. What of that depends on the compiled kernel alone is worked out once, and
the C function below CudaLauncher is called. A launch that is repeated with fixed sizes needs only
new pointers and new tensor maps, which depend on nothing but their address and layout.

The attributes read here are those of Triton 3.6 to 3.9. With any other version, and where a kernel
needs scratch, launches are left to CudaLauncher.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

KNOWN = (3, 6), (3, 7), (3, 8), (3, 9)
"""The versions of Triton whose launcher is known."""

Encode = Callable[[Any], list[Any]]
"""From a descriptor to its tensor map, sizes and strides."""


class Inner(NamedTuple):
    """What launches one compiled kernel: `call`, with a grid, a stream, `after`, and a flat list of
    arguments: as one argument if `as_list`, else each by itself.

    encoders: for each descriptor, by its place among the kernel's arguments. constants: what
    follows the arguments. kept: which of the flat list the C function takes; None is all.
    places: where each argument of the kernel stands in the list.
    """

    call: Callable[..., object]
    after: tuple[Any, ...]
    as_list: bool
    encoders: Mapping[int, Encode]
    constants: tuple[Any, ...]
    kept: Sequence[int] | None
    places: Sequence[int]

    def flat(self, arguments: Sequence[Any]) -> list[Any]:
        """The list of a launch."""
        found: list[Any] = []
        begin = 0
        for place, encode in self.encoders.items():
            found += arguments[begin:place]
            found += encode(arguments[place])
            begin = place + 1
        found += arguments[begin:]
        found += self.constants
        return found if self.kept is None else [found[n] for n in self.kept]

    def launch(self, blocks: int, stream: int, flat: list[Any]) -> None:
        """Launch so many programs."""
        given = (flat,) if self.as_list else flat
        self.call(blocks, 1, 1, stream, *self.after, *given)


def inner_launch(
    run: Any, function: object, metadata: object, arguments: Sequence[Any], constants: Sequence[Any]
) -> Inner:
    """What launches `run`, a compiled kernel's launcher, with arguments like these, all of the
    kernel's in their order, the same ones None: the C function of a CudaLauncher that is known,
    else `run`.
    """
    by_run = Inner(
        run, (function, metadata, None, None, None), False, {}, tuple(constants), None,
        range(len(arguments)),
    )  # fmt: skip
    if type(run) is not _known_launcher():
        return by_run
    launch, encoders = _unwrapped(run.launch)
    scratch = run.global_scratch_size or run.profile_scratch_size
    if launch is None or scratch or getattr(run, "gsan_enabled", False):
        return by_run
    # Constants have places, of which nothing is read. No hooks and no scratch: those are None, too.
    nothing = (None,) * len(constants)
    options = function, run.launch_cooperative_grid, run.launch_pdl
    if not _flattens(run):
        ends: tuple[Any, ...] = (None, None, metadata, None, None, None)
        made = Inner(launch, (*options, *ends), False, encoders, nothing, None, ())
        return made._replace(places=_places(made, arguments))
    # From 3.7 on nothing need stand for what is None: its annotation says that, and goes with it.
    made = Inner(launch, (), True, encoders, nothing, None, ())
    flat, places = made.flat(arguments), _places(made, arguments)
    kept = [n for n, argument in enumerate(flat) if argument is not None]
    now = {n: place for place, n in enumerate(kept)}
    annotations = [run.arg_annotations[n] for n in kept]
    ends = (metadata, None, None, None, None, None, annotations, run.kernel_signature)
    places = [now.get(n, -1) for n in places]
    return Inner(launch, (*options, *ends), True, encoders, (), kept, places)


def _places(inner: Inner, arguments: Sequence[Any]) -> list[int]:
    """Where each argument stands in the flat list."""
    places, last = [], 0
    for place, argument in enumerate(arguments):
        places.append(last)
        encode = inner.encoders.get(place)
        last += 1 if encode is None else len(encode(argument))
    return places


@functools.cache
def _known_launcher() -> Any:
    """CudaLauncher of a known version of Triton; None of another."""
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) not in KNOWN:
        return None
    from triton.backends.nvidia.driver import CudaLauncher

    return CudaLauncher


def _unwrapped(launch: Any) -> tuple[Any, dict[int, Encode]]:
    """The C function, None for an unknown one, and what encodes each descriptor, by its place."""
    if not isinstance(launch, FunctionType):
        return launch, {}
    from triton.backends.nvidia.driver import make_tensordesc_arg

    held = inspect.getclosurevars(launch).nonlocals
    # From 3.8 on a descriptor may be in a tuple, and is encoded with the grid as a third argument.
    nested: Mapping[int, Any] | None = held.get("relevant_paths")
    others: dict[str, Any] = {} if nested is None else {"_": ()}
    try:
        places = sorted(held["tensordesc_indices"] if nested is None else nested)
        described = dict(zip(places, held["tensordesc_meta"], strict=True))
        launch = held["launcher"]
    except (KeyError, TypeError, ValueError):
        return None, {}
    if None in described.values() or any((nested or {}).values()):
        return None, {}
    return launch, {
        place: functools.partial(make_tensordesc_arg, metadata=each, **others)
        for place, each in described.items()
    }


def _flattens(run: Any) -> bool:
    """Whether the C function reads a list of arguments by their annotations, as from 3.7 on; 3.6
    compiles one for each signature.
    """
    return hasattr(run, "kernel_signature")
