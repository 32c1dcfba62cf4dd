"""Shadows of memory: who accessed each cell last, to find races and reads of what nobody wrote.

A cell has 16 bytes as long as every access has all of them, which nearly all do. The others divide
it into cells as large as the smallest access of the program. So no two accesses share a cell
without sharing a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from flashgen.ptx.clocks import GENERIC, Agents
from flashgen.ptx.types import Array


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """Two accesses to a cell, `at`, that nothing orders. position: of the earlier instruction."""

    at: int
    earlier: str
    wrote: bool
    position: int


_STEPS = np.arange(4096)
_UNIT = 16


class _Cells:
    """The cells of `size` bytes: first those of 16 bytes, then those that they are divided into."""

    def __init__(self, size: int, cell: int) -> None:
        self._cell, self._per, self._units = cell, _UNIT // cell, -(-size // _UNIT)
        self._divided = np.zeros(self._units, bool)
        self._whole = True
        self.count = self._units * (1 if cell == _UNIT else 1 + self._per)

    def of(self, offsets: Array, size: int, arrays: Callable[[], Iterable[Array]]) -> Array:
        """The cells of `size` bytes at each offset, once each. arrays: what is kept of each cell,
        as the last axis.
        """
        if size % _UNIT and self._cell < _UNIT:
            first = _each(offsets // self._cell, size // self._cell)
            new = first[~self._divided[first // self._per]]
            if len(new):
                self._divide(np.unique(new // self._per), arrays())
            return first + self._units
        first = _each(offsets // _UNIT, size // _UNIT)
        if self._whole or not np.count_nonzero(divided := self._divided[first]):
            return first
        return np.concatenate([first[~divided], self._parts(first[divided]).reshape(-1)])

    def _parts(self, units: Array) -> Array:
        return self._units + units[:, None] * self._per + _STEPS[: self._per]

    def _divide(self, units: Array, arrays: Iterable[Array]) -> None:
        self._whole = False
        self._divided[units] = True
        parts = self._parts(units)
        for array in arrays:
            array[..., parts] = array[..., units, None]

    def byte(self, cell: int) -> int:
        """The first byte of a cell."""
        return cell * _UNIT if cell < self._units else (cell - self._units) * self._cell


def _each(first: Array, count: int) -> Array:
    return (first[:, None] + _STEPS[:count]).reshape(-1) if count > 1 else first


class AgentShadow:
    """The last write and the last read by each agent, for each cell of a block's memory."""

    def __init__(self, agents: Agents, cells: int) -> None:
        self.agents = agents
        self.writer = np.full(cells, agents.nobody, np.int32)
        self.written = np.zeros(cells, np.int64)
        self.write_position = np.zeros(cells, np.int32)
        self.read = np.zeros((agents.readers, cells), np.int32)
        self.read_position = np.zeros(cells, np.int32)
        self.latest_read = np.zeros(agents.readers, np.int32)  # of each agent, of any cell

    def unwritten(self, cells: Array) -> int | None:
        """A cell that nobody wrote, or None."""
        missing = self.writer[cells] == self.agents.nobody
        return int(cells[np.argmax(missing)]) if np.count_nonzero(missing) else None

    def note_read(
        self, cells: Array, order: Array, agent: int, count: int, position: int | Array
    ) -> Conflict | None:
        """Record a read of cells by an agent; the conflict with a write, if there is one."""
        late = self.written[cells] > order[self.writer[cells]]
        self.read[agent, cells] = count
        self.latest_read[agent] = max(self.latest_read[agent], count)
        self.read_position[cells] = position
        return self._with_write(cells, late) if np.count_nonzero(late) else None

    def note_write(self, cells: Array, agent: int, count: int, position: int | Array) -> None:
        """Record a write."""
        self.writer[cells] = agent
        self.written[cells] = count
        self.write_position[cells] = position

    def check_write(self, cells: Array, order: Array, read: Array) -> Conflict | None:
        """The conflict of a write with an earlier access, if there is one. order: of earlier
        writes; read: of earlier reads, which need no fence between the proxies.
        """
        late = self.written[cells] > order[self.writer[cells]]
        if np.count_nonzero(late):
            return self._with_write(cells, late)
        for agent in (self.latest_read > read[: self.agents.readers]).nonzero()[0]:
            unread = self.read[agent, cells] > read[agent]
            if np.count_nonzero(unread):
                cell = int(cells[np.argmax(unread)])
                return Conflict(
                    at=cell,
                    earlier=self.agents.describe(int(agent)),
                    wrote=False,
                    position=int(self.read_position[cell]),
                )
        return None

    def forget(self, cells: Array) -> None:
        """Forget all accesses to cells: their memory is no one's."""
        self.writer[cells], self.written[cells] = self.agents.nobody, 0
        self.read[:, cells] = 0

    def _with_write(self, cells: Array, late: Array) -> Conflict:
        cell = int(cells[np.argmax(late)])
        return Conflict(
            at=cell,
            earlier=self.agents.describe(int(self.writer[cell])),
            wrote=True,
            position=int(self.write_position[cell]),
        )


class SharedShadow(AgentShadow):
    """That of `size` bytes of shared memory. cell: of the smallest access."""

    def __init__(self, agents: Agents, size: int, cell: int) -> None:
        self._cells = _Cells(size, cell)
        super().__init__(agents, self._cells.count)
        self.byte = self._cells.byte

    def cells(self, offsets: Array, size: int) -> Array:
        """The cells of `size` bytes at each offset, once each."""
        return self._cells.of(offsets, size, self._kept)

    def _kept(self) -> Iterable[Array]:
        yield from (self.writer, self.written, self.write_position, self.read_position)
        yield from (self.read[agent] for agent in np.flatnonzero(self.latest_read))


NOBODY, MANY = -1, -2
"""No block, and more blocks than a shadow keeps."""

MOST_READERS = 32
"""Blocks that read a cell and are kept, where the program orders its blocks."""

Acquired = Mapping[int, Array]
"""By block, the view of it that was acquired before the access that is checked: see releases.py."""


class _Accesses:
    """Per cell an access: its block, its agent in that block, and the agent's count."""

    def __init__(self, cells: int) -> None:
        self.block = np.full(cells, NOBODY, np.int32)
        self.agent = np.zeros(cells, np.int32)
        self.count = np.zeros(cells, np.int64)

    def note(self, cells: Array, block: int, agent: int, count: int) -> None:
        self.block[cells], self.agent[cells], self.count[cells] = block, agent, count

    def late(self, cells: Array, blocks: Array, block: int, order: Array, known: Acquired) -> Array:
        """Which accesses to cells, by `blocks`, are not ordered before one of `block`."""
        own = blocks == block
        found: Array = (self.count[cells] > order[self.agent[cells]]) & own
        others = (blocks != NOBODY) & ~own
        if np.count_nonzero(others):
            found |= others
            for other, view in known.items():
                at = np.flatnonzero(blocks == other)
                found[at] = self.count[cells[at]] > view[GENERIC, self.agent[cells[at]]]
        return found


class GlobalShadow:
    """Who accessed each cell of a tensor: the last write, and the last read by each of so many
    blocks. Of the reads inside a block the last one is kept.
    """

    def __init__(self, size: int, cell: int, readers: int) -> None:
        self._cells, self.most_readers = _Cells(size, cell), readers
        self.writes = _Accesses(self._cells.count)
        self.reads = [_Accesses(self._cells.count)]
        self._written = False
        self.byte = self._cells.byte

    def cells(self, offsets: Array, size: int) -> Array:
        """The cells of `size` bytes at each offset, once each."""
        return self._cells.of(offsets, size, self._kept)

    def _kept(self) -> Iterable[Array]:
        for each in (self.writes, *self.reads):
            yield from (each.block, each.agent, each.count)

    def check_read(
        self, cells: Array, block: int, order: Array, known: Acquired
    ) -> tuple[int, int, bool] | None:
        """The cell, the earlier block and whether it wrote, of the conflict that a read has."""
        return self._conflict((self.writes,), cells, block, order, known) if self._written else None

    def check_write(
        self, cells: Array, block: int, order: Array, known: Acquired
    ) -> tuple[int, int, bool] | None:
        """The same of a write."""
        return self._conflict((self.writes, *self.reads), cells, block, order, known)

    def _conflict(
        self, earlier: Iterable[_Accesses], cells: Array, block: int, order: Array, known: Acquired
    ) -> tuple[int, int, bool] | None:
        for accesses in earlier:
            blocks = accesses.block[cells]
            late = accesses.late(cells, blocks, block, order, known)
            if np.count_nonzero(late):
                which = int(np.argmax(late))
                return int(cells[which]), int(blocks[which]), accesses is self.writes
        return None

    def note_read(
        self, cells: Array, block: int, order: Array, known: Acquired, agent: int, count: int
    ) -> None:
        """Record a read in place of one that is ordered before it, or beside the others."""
        for reads in self.reads:
            readers = reads.block[cells]
            taken = (readers != NOBODY) & (readers != block)
            if known and np.count_nonzero(taken):
                taken &= reads.late(cells, readers, block, order, known)
            if not np.count_nonzero(taken):
                reads.note(cells, block, agent, count)
                return
            reads.note(cells[~taken], block, agent, count)
            cells = cells[taken]
        if len(self.reads) < self.most_readers:
            self.reads.append(_Accesses(self._cells.count))
            self.reads[-1].note(cells, block, agent, count)
        else:
            self.reads[-1].block[cells] = MANY

    def note_write(self, cells: Array, block: int, agent: int, count: int) -> None:
        """Record a write."""
        self._written = True
        for reads in self.reads:
            reads.block[cells] = NOBODY
        self.writes.note(cells, block, agent, count)
