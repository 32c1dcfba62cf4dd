"""Asynchronous work of a warp in groups that complete in order: cp.async, wgmma, tensor stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Work = Callable[[], None]
"""Does what is under way, if it has not been done yet."""


@dataclass
class Queue:
    """Groups that were committed and not waited for, the oldest first, and the open one. committed
    counts all groups of the warp so far.
    """

    committed: int = 0
    groups: list[list[Work]] = field(default_factory=list)
    open: list[Work] = field(default_factory=list)

    @property
    def current(self) -> int:
        """The number of the open group, counted from 1."""
        return self.committed + 1

    @property
    def unfinished(self) -> int:
        """Pieces of work that nobody waited for."""
        return len(self.open) + sum(map(len, self.groups))

    def commit(self) -> None:
        """Close the open group."""
        self.groups.append(self.open)
        self.open = []
        self.committed += 1

    def wait(self, pending: int) -> int:
        """Complete all groups but the `pending` newest. Returns the number of the last group that
        is complete.
        """
        while len(self.groups) > pending:
            for work in self.groups.pop(0):
                work()
        return self.committed - len(self.groups)

    def finish(self) -> None:
        """Complete everything."""
        self.commit()
        self.wait(0)
