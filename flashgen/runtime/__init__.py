"""The serving half of flashgen: picks a kernel for a call and launches it, with no tuner.

Each name is loaded when first used. None needs optuna, yaml, a GPU or a folder to write to. The
modules of adapters/ are public under this package's name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.lazy import attach

if TYPE_CHECKING:
    from flashgen.runtime import (
        block_mask,
        diffusers,
        flash_attn,
        flash_attn_3,
        flash_attn_4,
        fp8,
        sdpa,
        sglang,
        torch,
        transformers,
        varlen,
        vllm,
        xformers,
    )
    from flashgen.runtime.dispatcher import Dispatcher
    from flashgen.runtime.explanation import Explanation

__all__ = [
    "Dispatcher",
    "Explanation",
    "block_mask",
    "diffusers",
    "flash_attn",
    "flash_attn_3",
    "flash_attn_4",
    "fp8",
    "sdpa",
    "sglang",
    "torch",
    "transformers",
    "varlen",
    "vllm",
    "xformers",
]

__getattr__, __dir__ = attach(
    __name__,
    {"Dispatcher": "flashgen.runtime.dispatcher", "Explanation": "flashgen.runtime.explanation"},
    [name for name in __all__ if name.islower()],
)
