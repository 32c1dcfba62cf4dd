"""Order between blocks: what a release publishes at an address, and what an acquire takes over from
there (PTX ISA 8.8, "Release and acquire patterns"). Barriers order the warps of a block: clocks.py.

A block keeps what its warps have acquired, each with the warp's count at that time. So a barrier
hands it on as it does the warp's own accesses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from flashgen.ptx.clocks import GENERIC, Views
from flashgen.ptx.types import Array
from flashgen.ptx.warp import Warp


@dataclass(frozen=True, kw_only=True)
class MemoryOrder:
    """The .sem and .scope of an access that is not weak. in_block: the scope is .cta."""

    acquires: bool = False
    releases: bool = False
    in_block: bool = False


def known(warp: Warp) -> Views:
    """What of other blocks is ordered before what the warp does now."""
    state, acquired = warp.releases, warp.block.acquired
    counts = warp.view[GENERIC, : warp.block.agents.warps]
    key = (len(acquired), counts.tobytes())
    if state.known_at != key:
        found: Views = {}
        for number, count, views in acquired:
            if count <= counts[number]:
                found = _joined(found, views)
        state.known, state.known_at = found, key
    return state.known


def fence(warp: Warp) -> None:
    """Order relaxed reads before what follows, and what is before ahead of relaxed writes."""
    if warp.releases.unfenced is not None:
        _acquire(warp, warp.releases.unfenced)
        warp.releases.unfenced = None
    warp.releases.fenced = _release(warp)


def _acquire(warp: Warp, views: Views) -> None:
    """Order what was published before what follows."""
    if (own := views.get(warp.block.number)) is not None:
        warp.join(own)
    if views is not warp.releases.last:  # which a warp that polls finds again
        warp.releases.last = views
        warp.block.acquired.append((warp.number, warp.clock, views))


def _release(warp: Warp) -> Views:
    """What is ordered before now, to be published."""
    return {**known(warp), warp.block.number: warp.publish()}


def synchronize(
    warp: Warp,
    addresses: Array,
    order: MemoryOrder,
    *,
    written: Array | None = None,
    replaces: bool = False,
) -> None:
    """What an access by the active lanes orders. written: the addresses that it writes. replaces: a
    store ends the sequence of releases that an atomic operation goes on with (8.8.2).
    """
    published, own = warp.block.machine.published, warp.releases
    if not published and not order.releases and own.fenced is None:
        return
    places = ((int(a), block) for a in addresses for block in (None, warp.block.number))
    for views in _distinct(published.get(place) for place in places):
        if order.acquires:
            _acquire(warp, views)
        else:
            own.unfenced = _joined(own.unfenced, views)
    released = _release(warp) if order.releases else own.fenced
    if written is None or released is None:
        return
    block = warp.block.number if order.in_block else None
    kept = {(int(a), block): None if replaces else published.get((int(a), block)) for a in written}
    after = {id(views): _joined(views, released) for views in _distinct(kept.values())}
    for place, earlier in kept.items():
        published[place] = after.get(id(earlier), released)


def _distinct(found: Iterable[Views | None]) -> list[Views]:
    return list({id(views): views for views in found if views is not None}.values())


def _joined(first: Views | None, second: Views) -> Views:
    """What is ordered by either."""
    if not first or first is second:
        return second
    found = dict(first)
    for block, view in second.items():
        held = found.get(block)
        found[block] = view if held is None or held is view else np.maximum(held, view)
    return found
