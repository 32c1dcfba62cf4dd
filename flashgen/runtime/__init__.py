"""The serving half of flashgen: picks a kernel for a call and launches it, with no tuner.

Each name is loaded when first used. None needs optuna, yaml, a GPU or a folder to write to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashgen.runtime import (
        block_mask,
        diffusers,
        flash_attn,
        flash_attn_3,
        flash_attn_4,
        fp8,
        sdpa,
        torch,
        transformers,
        varlen,
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
    "torch",
    "transformers",
    "varlen",
    "xformers",
]


def __getattr__(name: str) -> Any:
    if name == "Dispatcher":
        from flashgen.runtime.dispatcher import Dispatcher

        return Dispatcher
    if name == "Explanation":
        from flashgen.runtime.explanation import Explanation

        return Explanation
    if name == "block_mask":
        import flashgen.runtime.block_mask as block_mask

        return block_mask
    if name == "diffusers":
        import flashgen.runtime.diffusers as diffusers

        return diffusers
    if name == "flash_attn":
        import flashgen.runtime.flash_attn as flash_attn

        return flash_attn
    if name == "flash_attn_3":
        import flashgen.runtime.flash_attn_3 as flash_attn_3

        return flash_attn_3
    if name == "flash_attn_4":
        import flashgen.runtime.flash_attn_4 as flash_attn_4

        return flash_attn_4
    if name == "fp8":
        import flashgen.runtime.fp8 as fp8

        return fp8
    if name == "sdpa":
        import flashgen.runtime.sdpa as sdpa

        return sdpa
    if name == "torch":
        import flashgen.runtime.torch as torch

        return torch
    if name == "transformers":
        import flashgen.runtime.transformers as transformers

        return transformers
    if name == "varlen":
        import flashgen.runtime.varlen as varlen

        return varlen
    if name == "xformers":
        import flashgen.runtime.xformers as xformers

        return xformers
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
