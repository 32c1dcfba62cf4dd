"""Cycles of a kernel's main loops on one SM, replayed from its SASS.

ptxas writes into every instruction how long its warp must wait and for what; the pipes shared by
warps do the rest. The loops run here on a model of one SM, with as many blocks as fit: machines.py
has the SM, instruction_row.py the instructions, sm_clock.py the clock. After Huerta et al.,
"Analyzing Modern NVIDIA GPU cores", arXiv 2503.20481, who model the same control bits. Needs numba,
but no GPU.

A kernel is validated before it is replayed; one that the model does not cover is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from flashgen.compile.loops import Body, Role, hidden_roles, main_bodies, roles
from flashgen.compile.occupancy import resident_blocks
from flashgen.compile.sass import Listing, self_check
from flashgen.compile.walk import Walker
from flashgen.errors import NoEstimate, ToolchainError
from flashgen.estimate import instruction_row, loop_program
from flashgen.estimate.block_program import link_block
from flashgen.estimate.loop_program import LoopProgram
from flashgen.estimate.machines import (
    SUB_PARTITIONS,
    ArchModel,
    from_memory,
    hmma_cycles,
    machine_of,
    matrix_cycles,
    matrix_work,
)
from flashgen.paths import install_command
from flashgen.spec.gpu import Gpu

TRIPS, FROM_TRIP = 10, 3
"""Trips of a loop that are replayed, and from which on they count as steady."""

MEMORY = instruction_row.HALF + 1
"""In addition to the pipes of estimate/instruction_row.py: the path from L2."""

BLOCK_TRIPS = 4
"""Trips of each loop of a block that is replayed from its start to its end: as many as stages."""

BLOCK_CYCLES = 2500.0
"""Beside the instructions outside of its loops, the start and end of a block of which no way
through the code is seen: loading Q, filling the pipeline, storing O (some four trips to memory)."""

STAGGER = 60.0
"""Cycles between the starts of the blocks of an SM."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The shares of an iteration in which each pipe is busy; latency is the rest of the busiest
    one.
    """

    matrix: float
    exp2: float
    issue: float
    shared: float
    memory: float

    @property
    def latency(self) -> float:
        """The share in which even the busiest pipe waits."""
        return max(0.0, 1.0 - max(self.matrix, self.exp2, self.issue, self.shared, self.memory))


class Scoreboard:
    """One kernel on one SM of a target. Raises NoEstimate if it cannot be replayed reliably.

    num_warps are those of a block, shared_bytes its dynamic shared memory. `main` are the main
    loops in order of address. phases says which of them, by number, run at the same time: one by
    one, except in warp-specialized kernels. far: loads come from memory, not from L2.
    """

    def __init__(
        self,
        listing: Listing,
        gpu: Gpu,
        *,
        num_warps: int,
        shared_bytes: int,
    ) -> None:
        self.gpu = gpu
        self.machine = machine_of(gpu)
        self.listing = listing
        self.hmma = hmma_cycles(self.machine, gpu)
        self.matrix = partial(matrix_cycles, self.machine, gpu)
        self.main = main_bodies(listing)
        self._roles = roles(listing, self.main)
        self._check_listing()
        # The default role and the workers together; workers come in whole warpgroups.
        of_roles = sum(role.warps or 0 for role in self._roles)
        self.num_warps = max(num_warps, -(-of_roles // SUB_PARTITIONS) * SUB_PARTITIONS)
        self.shared_bytes = shared_bytes
        self.residents = resident_blocks(listing.registers, shared_bytes, self.num_warps, gpu)
        if self.residents == 0:
            raise NoEstimate(f"the kernel does not fit an SM of {gpu.slug}")
        self._cycles: dict[tuple[int, bool], tuple[float, ...]] = {}
        self._programs: dict[tuple[tuple[int, ...], bool, bool], LoopProgram] = {}
        self._trips: dict[tuple[int, int], float] = {}
        self._whole: dict[tuple[int, bool, bool], LoopProgram] = {}
        self._walked: dict[int, list[tuple[Role, Body]]] = {}
        self._check_replay()

    @cached_property
    def phases(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of main loops that run at the same time, each by its own warps."""
        place = {body: number for number, body in enumerate(self.main)}
        multiplying = [
            [place[body] for body in role.loops if body in place] for role in self._roles
        ]
        longest = max(map(len, multiplying))
        together = [
            tuple(dict.fromkeys(loops[min(n, len(loops) - 1)] for loops in multiplying if loops))
            for n in range(longest)
        ]
        return tuple(together)

    @property
    def outside(self) -> int:
        """Instructions outside the main loops, per role that has such loops."""
        inside = len({i.address for body in self.main for i in body})
        return (len(self.listing.instructions) - inside) // len(self.phases[0])

    def block_cycles(self, residents: int, *, far: bool = False) -> float:
        """Cycles that a block takes beside the trips of its loops, while the SM holds this number
        of blocks, which all start together.
        """
        try:
            whole = self._whole_block(residents, far=far, tiles=1)
        except NoEstimate:
            return BLOCK_CYCLES + self.outside * residents
        return max(whole - BLOCK_TRIPS * sum(self.trip_cycles(residents, far=far)), 0.0)

    def tile_cycles(self, residents: int) -> float:
        """The same for each further tile of a persistent program."""
        try:
            more = self._whole_block(residents, far=False, tiles=2)
            more -= self._whole_block(residents, far=False, tiles=1)
        except NoEstimate:
            return float(self.outside * residents)
        return max(more - BLOCK_TRIPS * sum(self.trip_cycles(residents)), 0.0)

    def _whole_block(self, residents: int, *, far: bool, tiles: int) -> float:
        """Cycles from the start of the first of so many blocks to the end of the last."""
        key = (tiles, self._spills_to_l2(residents), far)
        if key not in self._whole:
            self._whole[key] = link_block(
                self.listing,
                self._walks(tiles),
                from_memory(self.machine) if far else self.machine,
                self.matrix,
                num_warps=self.num_warps,
                spills_to_l2=key[1],
            )
        finish = _finish(self._whole[key], residents, self.machine, 1)
        return float(finish[:, 1].max())

    def _walks(self, tiles: int) -> list[tuple[Role, Body]]:
        """What each role executes of a block of so many tiles."""
        if tiles not in self._walked:
            walker, phases = Walker(self.listing), len(self.phases)
            self._walked[tiles] = [
                (role, walker.walk(role, phases=phases, trips=BLOCK_TRIPS, tiles=tiles))
                for role in self._roles
            ]
        return self._walked[tiles]

    def trip_cycles(self, residents: int, *, far: bool = False) -> tuple[float, ...]:
        """Cycles of one trip of each phase while the SM holds this number of blocks, which all
        do one.
        """
        if (residents, far) not in self._cycles:
            self._cycles[residents, far] = tuple(
                self._replay(self._program(phase, residents, far=far), residents)
                for phase in self.phases
            )
        return self._cycles[residents, far]

    def lone_cycles(self) -> tuple[float, ...]:
        """Cycles of one trip of each phase by one block, while other SMs leave L2 to it."""
        grown = self.machine.l2_bytes / self.machine.l2_burst_bytes
        found = []
        for phase in self.phases:
            made = self._program(phase, 1)
            busy = self._busy(made)
            busy[MEMORY] *= grown
            found.append(max(self._steady(made, 1), *busy.values()))
        return tuple(found)

    def usage(self, phase: int, residents: int) -> Usage:
        """What limits a phase at this occupancy."""
        busy = self._busy(self._program(self.phases[phase], residents))
        scale = residents / self.trip_cycles(residents)[phase]
        return Usage(
            matrix=busy[instruction_row.MATRIX] * scale,
            exp2=busy[instruction_row.EXP2] * scale,
            issue=busy[instruction_row.CONTROL] * scale,
            shared=busy[instruction_row.SHARED] * scale,
            memory=busy[MEMORY] * scale,
        )

    def _busy(self, made: LoopProgram) -> dict[int, float]:
        """Cycles for which a trip of one block occupies each pipe of the SM.

        Pipes of the sub-partitions are assumed to be shared evenly. CONTROL stands for issuing
        instructions, MEMORY for the transfers from L2.
        """
        busy = dict.fromkeys((*range(instruction_row.HALF + 1), MEMORY), 0.0)
        for start, end, warps in zip(made.start, made.end, made.warps, strict=True):
            share = warps / SUB_PARTITIONS
            for each in made.rows[start:end]:
                busy[instruction_row.CONTROL] += share
                if each.kind == instruction_row.WGMMA:
                    busy[each.pipe] += share * max(each.occupies, SUB_PARTITIONS * each.shared)
                    busy[instruction_row.SHARED] += warps * each.shared
                elif each.pipe == instruction_row.SHARED:
                    busy[each.pipe] += warps * each.shared
                elif each.pipe != instruction_row.CONTROL:
                    busy[each.pipe] += share * each.occupies
                if each.kind in (instruction_row.TMA, instruction_row.COPY, instruction_row.LOAD):
                    loading = 1 if each.kind == instruction_row.TMA else warps
                    busy[MEMORY] += loading * each.amount / self.machine.l2_bytes
        return busy

    def matrix_flops(self, loop: int) -> int:
        """Floating-point operations of a block's matrix instructions in a trip of a main loop."""
        return self._warps_of(loop) * sum(i.matrix_flops for i in self.main[loop])

    def matrix_work(self, loop: int) -> float:
        """The 16-bit operations that would take as long as those."""
        multiplying = (i for i in self.main[loop] if i.is_matrix)
        return self._warps_of(loop) * sum(matrix_work(self.gpu, i) for i in multiplying)

    def _warps_of(self, loop: int) -> int:
        body = self.main[loop]
        return next(r for r in self._roles if body in r.loops).warps or self.num_warps

    def least_cycles(self, loop: int) -> float:
        """The cycles that a block's trip of a main loop occupies its busiest arithmetic pipe."""
        phase = next(phase for phase in self.phases if loop in phase)
        busy = self._busy(self._program(phase, self.residents))
        # Loops that run side by side are counted together: each gets its part.
        pipes = instruction_row.MATRIX, instruction_row.FMA
        return max(busy[pipe] for pipe in pipes) / len(phase)

    def loaded_bytes(self, phase: int) -> float:
        """What a block loads from L2 in a trip of a phase."""
        made = self._program(self.phases[phase], self.residents)
        return self._busy(made)[MEMORY] * self.machine.l2_bytes

    def _check_listing(self) -> None:
        """Refuse a listing that contradicts the model.

        HMMA further apart than the pipe takes do: the pipe is slower than assumed. Closer ones do
        not. The spacing by ptxas is per architecture, the pipe's time per product: it spaces them
        by 8 cycles for sm_80, sm_86 and sm_89 (Triton 3.7.1), while the pipes take 8 on an A100, 16
        on an A10 and an L4, and 32 on a GeForce. The hardware holds back the rest.
        """
        if not self.main:
            raise NoEstimate(
                "no main loop was found in the SASS: none of its loops has a matrix instruction"
            )
        if hidden_roles(self.listing):
            raise NoEstimate(
                "its warps have roles, since they hand over registers (USETMAXREG), and where each "
                "begins is not seen in the SASS: there is no jump table (BRX)"
            )
        reason = self_check(self.listing)
        if reason:
            raise NoEstimate(f"the SASS was not understood: {reason}")
        for body in self.main:
            unknown = instruction_row.unknown_share(body)
            if unknown >= instruction_row.MOST_UNKNOWN:
                names = sorted({i.base for i in body if i.base not in instruction_row.PIPE_OF})
                raise NoEstimate(
                    f"{unknown:.1%} of a main loop's instructions are unknown: {', '.join(names)}"
                )
            spacing = instruction_row.hmma_spacing(body)
            if spacing is not None and spacing > self.hmma:
                raise NoEstimate(
                    f"ptxas spaces HMMA {spacing} cycles apart, and the pipe takes {self.hmma:g}"
                )

    def _check_replay(self) -> None:
        """With one block, no trip is shorter than the stalls of a warp. (_replay checks the
        pipes.)
        """
        for phase, sm_clock in zip(self.phases, self.trip_cycles(1), strict=True):
            made = self._program(phase, 1)
            for start, end in zip(made.start, made.end, strict=True):
                stalls = sum(each.stall for each in made.rows[start:end])
                if sm_clock < stalls * (1 - 1e-6):
                    raise NoEstimate(
                        f"a replayed trip took {sm_clock:.0f} cycles, and its stalls alone {stalls}"
                    )

    def _program(self, phase: tuple[int, ...], residents: int, *, far: bool = False) -> LoopProgram:
        """The program of a phase, built once for each place of its loads and of its stacks."""
        key = (phase, self._spills_to_l2(residents), far)
        if key not in self._programs:
            self._programs[key] = loop_program.link(
                self.listing,
                self._roles,
                [self.main[number] for number in phase],
                from_memory(self.machine) if far else self.machine,
                self.matrix,
                num_warps=self.num_warps,
                spills_to_l2=key[1],
            )
        return self._programs[key]

    def _spills_to_l2(self, residents: int) -> bool:
        """Whether the blocks' stacks exceed the part of L1 that their shared memory leaves."""
        stacks = self.listing.stack_bytes * self.num_warps * 32 * residents
        left = self.machine.l1_bytes - residents * (self.shared_bytes + 1024)
        return stacks > 0.7 * max(left, 0)

    def _replay(self, made: LoopProgram, residents: int) -> float:
        """Cycles in which all resident blocks do one steady trip."""
        # If a pipe is full, some blocks run ahead of others, which then look as fast.
        # All SMs together get less from L2 than one does while the others compute.
        trip = self._steady(made, residents)
        return max(trip, residents * max(self._busy(made).values()))

    def _steady(self, made: LoopProgram, residents: int) -> float:
        """steady_cycles of one of the board's programs, replayed once."""
        known = (id(made), residents)
        if known not in self._trips:
            self._trips[known] = steady_cycles(made, residents, self.machine)
        return self._trips[known]


def steady_cycles(made: LoopProgram, residents: int, machine: ArchModel) -> float:
    """Cycles of one steady trip of a program by this number of blocks at once, on an SM alone.

    Raises NoEstimate if its warps deadlock, ToolchainError if numba is missing.
    """
    finish = _finish(made, residents, machine, TRIPS)
    steady = finish[:, TRIPS - 1] - finish[:, FROM_TRIP]
    return float(steady.mean()) / (TRIPS - 1 - FROM_TRIP)


def _finish(made: LoopProgram, residents: int, machine: ArchModel, trips: int) -> Any:
    """When each block ends each of its trips, as sm_clock.replay has it.

    Raises NoEstimate if its warps deadlock, ToolchainError if numba is missing.
    """
    finish = clock().replay(
        *loop_program.arrays(made, residents),
        residents,
        trips,
        1.0 / machine.l2_burst_bytes,
        machine.barrier_late,
        STAGGER,
    )
    if finish[0, 0] < 0:
        raise NoEstimate("its warps deadlock in the replay")
    return finish


def clock() -> Any:
    """The module sm_clock. Raises ToolchainError if numba is not installed, or does not load."""
    try:
        from flashgen.estimate import sm_clock
    except ImportError as error:
        remedy = f"{install_command('offline')} (or tune on the GPU itself with --gpu)"
        raise ToolchainError(f"estimates need numba ({error}): {remedy}") from None
    return sm_clock


ONCE_A_TRIP = ("BAR", "DEPBAR", "LDGDEPBAR", "LDGSTS", "LDG", "SYNCS", "UTMALDG")
"""Barriers and loads: a compiler that unrolls a loop must keep those of every trip."""


def equal_parts(body: Body) -> int:
    """The most trips of the source's loop that a loop of the machine code can hold: its barriers
    and loads, each kind of them, divide into so many equal parts. 0 if it has none.
    """
    counts = Counter(i.base for i in body)
    return math.gcd(*(counts[name] for name in ONCE_A_TRIP))
