"""The serving half of flashgen: picks a kernel for a call and launches it, with no tuner.

Each name is loaded when first used. None needs optuna, yaml, a GPU or a folder to write to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen import lazily

if TYPE_CHECKING:
    from flashgen.runtime import block_mask, flash_attn, fp8, sdpa, torch, transformers, varlen
    from flashgen.runtime.dispatcher import Dispatcher
    from flashgen.runtime.explanation import Explanation

__all__ = [
    "Dispatcher",
    "Explanation",
    "block_mask",
    "flash_attn",
    "fp8",
    "sdpa",
    "torch",
    "transformers",
    "varlen",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "Dispatcher": "dispatcher:Dispatcher",
        "Explanation": "explanation:Explanation",
        "block_mask": "block_mask",
        "flash_attn": "flash_attn",
        "fp8": "fp8",
        "sdpa": "sdpa",
        "torch": "torch",
        "transformers": "transformers",
        "varlen": "varlen",
    },
)
