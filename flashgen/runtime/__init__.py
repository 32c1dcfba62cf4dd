"""The serving half of flashgen: picks a kernel for a call and launches it, with no tuner.

Each name is loaded when first used: none needs optuna, yaml, a GPU or a folder to write to.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashgen.runtime import block_mask, flash_attn, fp8, sdpa, transformers, varlen
    from flashgen.runtime.dispatcher import Dispatcher
    from flashgen.runtime.explanation import Explanation

__all__ = [
    "Dispatcher",
    "Explanation",
    "block_mask",
    "flash_attn",
    "fp8",
    "sdpa",
    "transformers",
    "varlen",
]

_CLASSES = {"Dispatcher": "dispatcher", "Explanation": "explanation"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_CLASSES.get(name, name)}")
    return getattr(module, name) if name in _CLASSES else module


def __dir__() -> list[str]:
    return __all__
