"""A launch: a program, a grid, arguments and memory, and what its blocks share while it runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from flashgen.errors import InvalidArgument
from flashgen.ptx.clocks import Engine, Place, Views
from flashgen.ptx.findings import Report, Sanitizer
from flashgen.ptx.memory import Buffer, GlobalMemory, shared_layout
from flashgen.ptx.program import Program
from flashgen.ptx.shadow import MOST_READERS, GlobalShadow
from flashgen.ptx.tensor_map import TensorMap
from flashgen.ptx.types import DecodedStep, FusedSteps

Grid = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class LaunchInputs:
    """What a launch gives to a program. parameters: the bytes of each, shorter lists are padded
    with zeros; tensor_maps by number of the parameter. shared_bytes: of dynamic shared memory.
    """

    grid: Grid
    parameters: Sequence[bytes]
    buffers: Sequence[Buffer]
    tensor_maps: Mapping[int, TensorMap] = field(default_factory=dict)
    shared_bytes: int = 0


class Decoded:
    """A program whose instructions are decoded: an execute.Loaded. touched: the registers of each;
    fusions: the groups that run as one; releases: whether it orders its blocks.
    """

    program: Program
    constants: Sequence[Buffer]
    steps: list[DecodedStep]
    guards: tuple[tuple[int, bool] | None, ...]
    touched: tuple[frozenset[int], ...]
    fusions: Sequence[FusedSteps | None]
    engines: frozenset[Engine]
    releases: bool
    shared_cell: int
    global_cell: int


class Machine:
    """One launch while it runs: what the blocks share."""

    def __init__(
        self, loaded: Decoded, launch: LaunchInputs, checks: Collection[Sanitizer], most_steps: int
    ) -> None:
        program = loaded.program
        self.loaded, self.program = loaded, program
        self.steps, self.guards = loaded.steps, loaded.guards
        self.grid = launch.grid
        self.checks = frozenset(checks)
        self.most_steps = most_steps
        self.memory = GlobalMemory((*launch.buffers, *loaded.constants))
        self.tensor_maps = launch.tensor_maps
        self.parameters = _parameters(program, launch.parameters)
        _, self.shared_bytes = shared_layout(program, launch.shared_bytes)
        self.shared_cell, self.global_cell = loaded.shared_cell, loaded.global_cell
        self.report = Report()
        self._readings = 0
        self.published: dict[Place, Views] = {}
        self._shadows: dict[int, GlobalShadow] = {}

    def clock(self) -> int:
        """The time, in instructions: it moves with each reading."""
        self._readings += 1
        return self.report.steps + self._readings

    def shadow_of(self, buffer: Buffer) -> GlobalShadow | None:
        """The shadow of a tensor; None without racecheck."""
        if "racecheck" not in self.checks:
            return None
        if buffer.address not in self._shadows:
            size = buffer.limits[1] - buffer.address
            self._shadows[buffer.address] = GlobalShadow(
                size, self.global_cell, MOST_READERS if self.loaded.releases else 1
            )
        return self._shadows[buffer.address]


def _parameters(program: Program, given: Sequence[bytes]) -> tuple[bytes, ...]:
    if len(given) > len(program.parameters):
        raise InvalidArgument(
            f"{program.name} takes {len(program.parameters)} parameters: got {len(given)}"
        )
    for parameter, content in zip(program.parameters, given, strict=False):
        if len(content) != parameter.size:
            raise InvalidArgument(
                f"{parameter.name} takes {parameter.size} bytes: got {len(content)}"
            )
    rest = program.parameters[len(given) :]
    return (*given, *(bytes(parameter.size) for parameter in rest))
