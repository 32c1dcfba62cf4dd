"""The events that tests/driver/recording writes, as values."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of a log. `event` is its type there."""

    event: ClassVar[str]


@dataclass(frozen=True, kw_only=True)
class Load(Event):
    """A kernel of a cubin that was loaded. parameter_sizes: in bytes, as the cubin declares them."""

    event: ClassVar[str] = "load"
    kernel: str
    device: int
    registers: int
    local_bytes: int
    static_shared: int
    threads_that_fit: int
    parameter_sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TensorMap(Event):
    """A call of cuTensorMapEncodeTiled. sizes and box in elements, innermost first; strides in bytes, of all dimensions
    but the innermost; broken: the rules of CUDA that it breaks.
    """

    event: ClassVar[str] = "tensor_map"
    type: int
    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    fill: int
    broken: str


@dataclass(frozen=True, kw_only=True)
class Launch(Event):
    """A launch of a kernel from a cubin. parameters: the bytes of each, in hexadecimal digits."""

    event: ClassVar[str] = "launch"
    kernel: str
    device: int
    stream: int
    grid: tuple[int, int, int]
    threads: int
    cluster: int
    pdl: bool
    dynamic_shared: int
    registers: int
    parameters: tuple[str, ...]
    captured: bool
    broken: str


@dataclass(frozen=True, kw_only=True)
class TorchKernel(Event):
    """A launch of one of torch's own kernels."""

    event: ClassVar[str] = "torch_kernel"
    name: str
    captured: bool


@dataclass(frozen=True, kw_only=True)
class Call(Event):
    """A call that waits, allocates, frees or copies."""

    event: ClassVar[str] = "call"
    function: str


@dataclass(frozen=True, kw_only=True)
class Capture(Event):
    """The end of a capture."""

    event: ClassVar[str] = "capture"
    nodes: int
    broken: bool


@dataclass(frozen=True, kw_only=True)
class Replay(Event):
    """A launch of a graph."""

    event: ClassVar[str] = "replay"
    nodes: int


@dataclass(frozen=True, kw_only=True)
class Fault(Event):
    """A rule of CUDA that the program broke."""

    event: ClassVar[str] = "fault"
    broken: str


@dataclass(frozen=True, kw_only=True)
class Unmodelled(Event):
    """A call of a function that only returns 0."""

    event: ClassVar[str] = "unmodelled"
    function: str


@dataclass(frozen=True, kw_only=True)
class Ordered(Event):
    """A failure that a test ordered, when it happened."""

    event: ClassVar[str] = "ordered"
    kind: str
    kernel: str


TYPES: dict[str, type[Event]] = {
    kind.event: kind
    for kind in (
        Load,
        TensorMap,
        Launch,
        TorchKernel,
        Call,
        Capture,
        Replay,
        Fault,
        Unmodelled,
        Ordered,
    )
}

Kind = TypeVar("Kind", bound=Event)


def parse(line: str) -> Event:
    """The event of one line."""
    found: dict[str, Any] = json.loads(line)
    kind = TYPES[found.pop("event")]
    for field in fields(kind):
        value = found[field.name]
        if isinstance(value, list):
            found[field.name] = tuple(value)
        elif field.type == "bool":
            found[field.name] = bool(value)
    return kind(**found)


def of(kind: type[Kind], events: Iterable[Event]) -> list[Kind]:
    """Those of one type."""
    return [event for event in events if isinstance(event, kind)]


def log_of_process(number: int) -> Path:
    """The log of a process, by its id."""
    return Path(f"{os.environ['RECORDING_CUDA_LOG']}.{number}")


def read(path: Path) -> Iterator[Event]:
    """All events of a log; none if there is no such file."""
    if path.is_file():
        yield from map(parse, path.read_text().splitlines())


class Recording:
    """The events of this process from now on."""

    def __init__(self) -> None:
        self._path = log_of_process(os.getpid())
        self._begin = self._path.stat().st_size if self._path.is_file() else 0

    def __iter__(self) -> Iterator[Event]:
        if self._path.is_file():
            with self._path.open() as file:
                file.seek(self._begin)
                yield from map(parse, file.read().splitlines())

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Those of one type."""
        return of(kind, self)
