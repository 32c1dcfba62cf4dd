"""flashgen: Triton FlashAttention kernels, tuned per GPU and served without a tuner.

The public names are loaded when first used: `import flashgen` alone loads no torch. docs/api.md
lists them. The pipeline, one package a step:
spec -> schedules -> kernels -> compile -> evaluate (check, measure or estimate) -> search -> table
-> runtime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.lazy import attach
from flashgen.version import VERSION

if TYPE_CHECKING:
    from flashgen.runtime import block_mask
    from flashgen.runtime.api import attention, decode, digest, explain, explain_decode
    from flashgen.runtime.folders import use
    from flashgen.runtime.kv_cache import append
    from flashgen.runtime.merge import merge
    from flashgen.runtime.varlen import attention_varlen

__version__ = VERSION

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

__getattr__, __dir__ = attach(
    __name__,
    {
        **dict.fromkeys(__all__, "flashgen.runtime.api"),
        "append": "flashgen.runtime.kv_cache",
        "attention_varlen": "flashgen.runtime.varlen",
        "block_mask": "flashgen.runtime",
        "merge": "flashgen.runtime.merge",
        "use": "flashgen.runtime.folders",
    },
)
