"""The cache of all sequences: pools of pages, one pair a layer, and who holds which page.

A page holds the keys and values of page_size tokens; its number is the same in every layer. The
free list lives on the host, for it is asked before a step; block tables go to the device.
"""

from __future__ import annotations

import torch
from tiny_model import Sizes
from torch import Tensor


class PagePool:
    """Pools (layers, pages, page_size, kv_heads, head_dim) of keys and of values."""

    def __init__(
        self, sizes: Sizes, *, pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (sizes.layers, pages, page_size, sizes.kv_heads, sizes.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.page_size = page_size
        self.pages = pages
        self._free = list(range(pages))

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-tokens // self.page_size)

    def grow(self, held: list[int], tokens: int) -> bool:
        """Add to the pages that are held until they have room for so many tokens; False, with
        nothing added, where too few are free.
        """
        missing = self.pages_for(tokens) - len(held)
        if missing > self.free:
            return False
        held.extend(self._free.pop() for _ in range(missing))
        return True

    def release(self, held: list[int]) -> None:
        """Give back all pages of a sequence."""
        self._free.extend(held)
        held.clear()


def block_table(held: list[list[int]], width: int, device: torch.device) -> Tensor:
    """int32 (sequences, width) of the pages that each holds; 0 where it holds none, which nobody
    reads. One width for all steps: the grid of decode() follows from it.
    """
    rows = [pages + [0] * (width - len(pages)) for pages in held]
    return torch.tensor(rows, dtype=torch.int32).reshape(len(held), width).to(device)
