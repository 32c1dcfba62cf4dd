"""The instructions that a warp executes from a kernel's entry to its end, through its main loops.

The code alone does not say which way a branch goes. A branch ahead that skips code is not taken,
unless only its target leads on: it skips work that a block with keys does, such as its first tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flashgen.compile.loops import Body, Role, entries, flow, loops
from flashgen.compile.sass import Instruction, Listing
from flashgen.errors import NoEstimate


class Walker:
    """Walks ahead through a listing; a jump table leads to the code of every role."""

    def __init__(self, listing: Listing) -> None:
        self._blocks, self._starts, successors = flow(listing.instructions)
        predecessors: list[list[int]] = [[] for _ in self._blocks]
        for source, targets in enumerate(successors):
            for target in targets:
                predecessors[target].append(source)
        cases = sorted(entries(successors, predecessors) - {0})
        self._ahead = [
            cases if block[-1].base == "BRX" else sorted(t for t in targets if t > number)
            for number, (block, targets) in enumerate(zip(self._blocks, successors, strict=True))
        ]
        self._loops = loops(listing.instructions)

    def walk(
        self, role: Role, *, phases: int, trips: int, tiles: int = 1
    ) -> tuple[Instruction, ...]:
        """The instructions of a role: `trips` of each of its loops, of the last for all further
        phases of the kernel; all of that for each of the tiles of a persistent program.

        Raises NoEstimate if no way is seen, and for several tiles if no loop is around the role's.
        """
        bodies = [*role.loops, *role.loops[-1:] * (phases - len(role.loops))]
        first = self._starts[bodies[0][0].address]
        tile = self._through(bodies, trips)
        begin, end = first, self._last(bodies[-1])
        if tiles > 1:
            outer = self._around(role)
            begin, end = self._starts[outer[0].address], self._last(outer)
            tile = [*self._to(begin, first), *tile]
            tile += self._to(self._last(bodies[-1]) + 1, end) + self._run(end)
        return (*self._to(0, begin), *tile * tiles, *self._to_end(end + 1))

    def _through(self, bodies: Sequence[Body], trips: int) -> list[Instruction]:
        """Trips of loops one after the other, with what is in between. The two ways through a loop
        that branches over its mask begin alike.
        """
        code, at = list(bodies[0] * trips), bodies[0]
        for body in bodies[1:]:
            header = self._starts[body[0].address]
            if header != self._starts[at[0].address]:
                code += self._to(self._last(at) + 1, header)
            code += body * trips
            at = body
        return code

    def _last(self, body: Body) -> int:
        """The block that ends a loop."""
        last = body[-1].address
        return max(n for n, block in enumerate(self._blocks) if block[0].address <= last)

    def _around(self, role: Role) -> Body:
        """The outermost loop around all loops of a role, which walks tiles: in dK and dV of grouped
        heads, it is around one over query heads.
        """
        low = min(body[0].address for body in role.loops)
        high = max(body[-1].address for body in role.loops)
        around = [
            loop for loop in self._loops if loop[0].address <= low and high < loop[-1].address
        ]
        if not around:
            raise NoEstimate("no loop is seen around the main loops, which would begin a tile")
        return max(around, key=len)

    def _run(self, number: int) -> list[Instruction]:
        """A block whose branch is not taken: its barriers under the same condition are not met."""
        block = self._blocks[number]
        branch = block[-1]
        if branch.base != "BRA" or not branch.falls_through:
            return block
        return [i for i in block if i.base != "BAR" or i.predicate != branch.predicate]

    def _to(self, start: int, goal: int) -> list[Instruction]:
        """What is executed from a block up to another one."""
        leads = self._leading_to(goal)
        code: list[Instruction] = []
        while start != goal:
            code += self._run(start)
            start = self._next(n for n in self._ahead[start] if n in leads)
        return code

    def _to_end(self, start: int) -> list[Instruction]:
        code = self._run(start) if start < len(self._blocks) else []
        while start < len(self._blocks) and self._ahead[start]:
            start = self._ahead[start][0]
            code += self._run(start)
        return code

    def _next(self, found: Iterator[int]) -> int:
        number = next(found, None)
        if number is None:
            raise NoEstimate("no way through the SASS is seen that reaches all main loops")
        return number

    def _leading_to(self, goal: int) -> set[int]:
        """The blocks from which another one is ahead."""
        found, before = {goal}, 0
        while before < len(found):
            before = len(found)
            for number in range(len(self._blocks) - 1, -1, -1):
                if any(ahead in found for ahead in self._ahead[number]):
                    found.add(number)
        return found
