"""flashgen: Triton FlashAttention kernels, tuned per GPU and served without a tuner.

The public names are loaded when first used: `import flashgen` alone loads no torch. docs/api.md
lists them. The pipeline, one package a step:
spec -> schedules -> kernels -> compile -> evaluate (check, measure or estimate) -> search -> table
-> runtime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = _loaded(name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _loaded(name: str) -> Any:
    """A public name, whose module is loaded."""
    if name == "append":
        from flashgen.runtime.kv_cache import append

        return append
    if name == "attention_varlen":
        from flashgen.runtime.varlen import attention_varlen

        return attention_varlen
    if name == "block_mask":
        import flashgen.runtime.block_mask as block_mask

        return block_mask
    if name == "merge":
        from flashgen.runtime.merge import merge

        return merge
    if name == "use":
        from flashgen.runtime.folders import use

        return use
    from flashgen.runtime import api

    return getattr(api, name)
