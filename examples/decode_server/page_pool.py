"""The cache of all sequences: pools of pages, one pair per layer, and which sequence holds which
page.

A page holds the keys and values of page_size tokens; its number is the same in every layer. The
free list is on the host, because it is read before a step; block tables go to the device.
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
        """Pages that no sequence holds."""
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """The number of pages for this number of tokens."""
        return -(-tokens // self.page_size)

    def grow(self, held: list[int], tokens: int) -> bool:
        """Add pages to `held` until they hold this number of tokens; False, with nothing added,
        if too few are free.
        """
        missing = self.pages_for(tokens) - len(held)
        if missing > self.free:
            return False
        held.extend(self._free.pop() for _ in range(missing))
        return True

    def release(self, held: list[int]) -> None:
        """Free all pages of a sequence."""
        self._free.extend(held)
        held.clear()


def block_table(held: list[list[int]], width: int, device: torch.device) -> Tensor:
    """int32 (sequences, width): the pages that each holds; 0 beyond them, which is never read.
    One width for all steps, because the grid of decode() depends on it.
    """
    rows = [pages + [0] * (width - len(pages)) for pages in held]
    return torch.tensor(rows, dtype=torch.int32).reshape(len(held), width).to(device)
