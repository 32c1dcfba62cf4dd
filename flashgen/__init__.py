"""flashgen: Triton FlashAttention kernels, tuned per GPU and served without a tuner.

The public names are loaded when first used: `import flashgen` alone loads no torch. The pipeline,
one package a step:
spec -> kernels -> compile -> evaluate (check, measure or estimate) -> search -> table -> runtime.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashgen.runtime import block_mask
    from flashgen.runtime.api import attention, decode, digest, explain, explain_decode
    from flashgen.runtime.kv_cache import append
    from flashgen.runtime.merge import merge
    from flashgen.runtime.registry import use
    from flashgen.runtime.varlen import attention_varlen

__version__ = "0.1.0"

__all__ = [
    "append",
    "attention",
    "attention_varlen",
    "block_mask",
    "decode",
    "digest",
    "explain",
    "explain_decode",
    "merge",
    "use",
]

_MODULES = {
    "append": "kv_cache",
    "attention_varlen": "varlen",
    "merge": "merge",
    "use": "registry",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "block_mask":
        value: Any = importlib.import_module("flashgen.runtime.block_mask")
    else:
        module = _MODULES.get(name, "api")
        value = getattr(importlib.import_module(f"flashgen.runtime.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
