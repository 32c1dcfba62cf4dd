"""Shadows of memory: who accessed each cell last, to find races and reads of what nobody wrote.

A cell is as large as the smallest access of the program, so that no two accesses share a cell
without sharing a byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flashgen.ptx.clocks import Agents
from flashgen.ptx.types import Array


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """Two accesses to a cell that nothing orders. at: the cell's first byte. position: of the
    earlier instruction.
    """

    at: int
    earlier: str
    wrote: bool
    position: int


_STEPS = np.arange(4096)


class _Shadow:
    """Cells of so many bytes."""

    cell: int

    def cells(self, offsets: Array, size: int) -> Array:
        """The cells of `size` bytes at each offset, once each."""
        first = offsets // self.cell
        per = max(size // self.cell, 1)
        if per > 1:
            first = (first[:, None] + _STEPS[:per]).reshape(-1)
        return first


class SharedShadow(_Shadow):
    """The last write and the last read by each agent, for each cell of shared memory."""

    def __init__(self, agents: Agents, size: int, cell: int) -> None:
        cells = -(-size // cell)
        self.agents, self.cell = agents, cell
        self.writer = np.full(cells, agents.nobody, np.int32)
        self.written = np.zeros(cells, np.int64)
        self.write_position = np.zeros(cells, np.int32)
        self.read = np.zeros((agents.readers, cells), np.int32)
        self.read_position = np.zeros(cells, np.int32)
        self.latest_read = np.zeros(agents.readers, np.int32)  # of each agent, of any cell

    def unwritten(self, cells: Array) -> int | None:
        """The first byte of a cell that nobody wrote, or None."""
        missing = self.writer[cells] == self.agents.nobody
        return int(cells[np.argmax(missing)]) * self.cell if np.count_nonzero(missing) else None

    def note_read(
        self, cells: Array, order: Array, agent: int, count: int, position: int
    ) -> Conflict | None:
        """Record a read of cells by an agent; the conflict with a write, if there is one."""
        late = self.written[cells] > order[self.writer[cells]]
        self.read[agent, cells] = count
        self.latest_read[agent] = max(self.latest_read[agent], count)
        self.read_position[cells] = position
        return self._with_write(cells, late) if np.count_nonzero(late) else None

    def note_write(
        self, cells: Array, order: Array, read: Array, agent: int, count: int, position: int
    ) -> Conflict | None:
        """Record a write; the conflict with an earlier access, if there is one. order: of earlier
        writes; read: of earlier reads, which need no fence between the proxies.
        """
        conflict = self.check_write(cells, order, read)
        self.writer[cells] = agent
        self.written[cells] = count
        self.write_position[cells] = position
        return conflict

    def check_write(self, cells: Array, order: Array, read: Array) -> Conflict | None:
        """The conflict that a write has, if there is one."""
        late = self.written[cells] > order[self.writer[cells]]
        if np.count_nonzero(late):
            return self._with_write(cells, late)
        for agent in np.flatnonzero(self.latest_read > read[: self.agents.readers]):
            unread = self.read[agent, cells] > read[agent]
            if np.count_nonzero(unread):
                cell = int(cells[np.argmax(unread)])
                return Conflict(
                    at=cell * self.cell,
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
            at=cell * self.cell,
            earlier=self.agents.describe(int(self.writer[cell])),
            wrote=True,
            position=int(self.write_position[cell]),
        )


MANY = -2
"""Several blocks read a cell."""


class GlobalShadow(_Shadow):
    """Who accessed each cell of a tensor: blocks, whose accesses nothing orders but atomics, and
    inside the block that runs, agents. Of the reads inside a block the last one is kept.
    """

    def __init__(self, size: int, cell: int) -> None:
        cells = -(-size // cell) + 1
        self.cell = cell
        self.writing_block = np.full(cells, -1, np.int32)
        self.reading_block = np.full(cells, -1, np.int32)
        self.writer = np.zeros(cells, np.int32)
        self.written = np.zeros(cells, np.int64)
        self.reader = np.zeros(cells, np.int32)
        self.read = np.zeros(cells, np.int64)

    def note_read(
        self, cells: Array, block: int, order: Array, agent: int, count: int
    ) -> tuple[int, int, bool] | None:
        """Record a read. The cell, the earlier block and whether it wrote, of a conflict."""
        writers = self.writing_block[cells]
        bad = (writers >= 0) & (writers != block)
        own = writers == block
        bad |= own & (self.written[cells] > order[self.writer[cells]])
        readers = self.reading_block[cells]
        self.reading_block[cells] = np.where((readers == -1) | (readers == block), block, MANY)
        self.reader[cells], self.read[cells] = agent, count
        if not np.count_nonzero(bad):
            return None
        which = int(np.argmax(bad))
        return int(cells[which]), int(writers[which]), True

    def note_write(
        self, cells: Array, block: int, order: Array, agent: int, count: int
    ) -> tuple[int, int, bool] | None:
        """Record a write. The cell, the earlier block and whether it wrote, of a conflict."""
        writers, readers = self.writing_block[cells], self.reading_block[cells]
        by_write = (writers >= 0) & (writers != block)
        by_write |= (writers == block) & (self.written[cells] > order[self.writer[cells]])
        by_read = (readers == MANY) | ((readers >= 0) & (readers != block))
        by_read |= (readers == block) & (self.read[cells] > order[self.reader[cells]])
        self.writing_block[cells] = block
        self.writer[cells], self.written[cells] = agent, count
        if np.count_nonzero(by_write):
            which = int(np.argmax(by_write))
            return int(cells[which]), int(writers[which]), True
        if np.count_nonzero(by_read):
            which = int(np.argmax(by_read))
            return int(cells[which]), int(readers[which]), False
        return None
