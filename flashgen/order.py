"""In which order the tiles of a forward are taken, as far as it depends on sizes and the GPU.

Order grouped has the heads of a run walk their tiles together, the longest first: while they do,
their keys and values should stay in L2. A persistent grid has as many programs as the GPU has SMs.
"""

from __future__ import annotations

L2_SHARE = 0.5
"""Of the L2, for the K and V of a run; the rest holds Q and O, which pass through, and what a hash
of addresses wastes."""


def heads_together(bytes_of_a_key: int, seq_k: int, group: int, l2_bytes: int) -> int:
    """Query heads to a run: as many as have their K and V in the L2 together, and whole groups,
    which share them. One group at least.

    bytes_of_a_key: of one row of K and one of V. As FlashAttention-3's scheduler for causal masks
    has it (hopper/tile_scheduler.hpp, SingleTileLPTScheduler), but with a share of the L2 left.
    """
    of_a_head = max(1, seq_k) * bytes_of_a_key
    return max(1, int(L2_SHARE * l2_bytes) // of_a_head) * group


def launched_blocks(blocks: int, sms: int, *, persistent: bool) -> int:
    """Programs of a launch that has so many tiles."""
    return min(blocks, sms) if persistent else blocks
