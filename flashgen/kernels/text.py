"""What makes a text of its own: that which Triton cannot decide while it compiles.

All else that a spec or a config switches is an argument that may be None, or a constant
(kernels/parameters.py). Templates see nothing but a Text, so two kernels share a text where their
Text is one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from flashgen.kernels.conditions import may_pack, may_page
from flashgen.schedules.base import LOADS_LABEL, Loads
from flashgen.schedules.config import SCHEDULES, KernelConfig
from flashgen.schedules.textbook import FA2
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.vocabulary import PREFIX, Direction

_OF_TILES = ("forward", "backward_dkv", "backward_dq", "backward_fused", "backward_dq_of_ds")
"""Directions that have several schedules, or loads by descriptor."""
_OF_DKV = ("backward_ds", "backward_fused")
"""Directions whose plain text is that of dK and dV, with arguments that are None there."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text: an algorithm in one way of addressing memory.

    packs, pages: whether its kernels may be of packed sequences, and of keys in pages: what finds
    them stands in the text, and arguments that are None rule it out. paged: they are all of pages.
    block_mask: a program walks lists of blocks. persistent: a loop around the others, over tiles.
    shared_keys: two warpgroups own the same keys, and each half of the columns of what is summed.
    """

    direction: Direction
    schedule: str
    loads: Loads
    packs: bool
    pages: bool
    paged: bool
    block_mask: bool
    persistent: bool
    shared_keys: bool = False

    @property
    def name(self) -> str:
        """The name of its function and of its file."""
        tiled = self.direction in _OF_TILES
        words = {
            PREFIX[self.direction]: True,
            "paged": self.paged,
            "blockmask": self.block_mask,
            self.schedule: tiled,
            LOADS_LABEL[self.loads]: tiled,
            "pers": self.persistent,
            "shared_keys": self.shared_keys,
        }
        return "_".join(word for word, holds in words.items() if holds)

    @property
    def serves(self) -> str:
        """What it computes, as its first lines say."""
        loads = "descriptors" if self.loads == "descriptor" else "pointers"
        words = {
            "pages": self.paged,
            "block mask": self.block_mask,
            "persistent": self.persistent,
        }
        ways = ", ".join(word for word, holds in words.items() if holds)
        tiled = f", schedule {self.schedule}, {loads}" * (self.direction in _OF_TILES)
        return f"{self.direction}{tiled}" + f", {ways}" * bool(ways)


@functools.lru_cache(4096)
def text_of(spec: AttentionSpec, config: KernelConfig) -> Text:
    """The text of a kernel."""
    its, direction, schedule = SCHEDULES[config.schedule], spec.direction, config.schedule
    if direction == "backward_ds" or (direction in _OF_DKV and config.interpretable):
        direction = "backward_dkv"
    if config.interpretable and direction != "forward":
        schedule = FA2.name  # of a plain gradient, s_ahead is a constant
    return Text(
        direction=direction,
        schedule=schedule,
        loads=config.loads,
        packs=may_pack(spec, config),
        pages=may_page(spec, config),
        paged=spec.paged and config.specialized,
        block_mask=spec.block_mask,
        persistent=config.persistent,
        shared_keys=its.shared_keys(spec),
    )


def text_name(spec: AttentionSpec, config: KernelConfig) -> str:
    """The name of a kernel's text, which is its function's and its file's. Two kernels have one
    name where they have one text, and only there.
    """
    return text_of(spec, config).name
