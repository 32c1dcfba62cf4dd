"""Kinds: a bounded cache of kinds of call, for which a hit is one look-up.

A kind is told by a tuple; what is kept of it is kept when it is met for the second time: a program
whose calls are all of new kinds, as a server's may be, pays for their keys alone.
"""

from __future__ import annotations

from typing import Generic, TypeVar

MOST = 2048
"""Kinds in each of the two halves of what is kept."""

Key = tuple[object, ...]
Kept = TypeVar("Kept")


class Kinds(Generic[Kept]):
    """At most 2 * most kinds, those met least recently forgotten first.

    They are kept in two halves. What is met goes to the young half; when that is full it becomes
    the old one, whose kinds come back when they are met again. Unlike a list in order of use, this
    costs a call nothing that finds its kind among the young. None is what is kept of a kind that
    was met once.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._old: dict[Key, Kept | None] = {}
        self.young: dict[Key, Kept | None] = {}

    def __len__(self) -> int:
        return len(self.young) + len(self._old)

    def clear(self) -> None:
        """Forget all."""
        self.young, self._old = {}, {}

    def get(self, key: Key) -> Kept | None:
        """What is kept of a kind."""
        found = self.young.get(key)
        if found is None and (found := self._old.get(key)) is not None:
            self.keep(key, found)
        return found

    def meet(self, key: Key) -> bool:
        """Whether a kind was met before. It has been from now on."""
        if key in self.young or key in self._old:
            return True
        self.keep(key, None)
        return False

    def keep(self, key: Key, kept: Kept | None) -> None:
        """Keep this of a kind."""
        if len(self.young) >= self._most:
            self._old, self.young = self.young, {}
        self.young[key] = kept
