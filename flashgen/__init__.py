"""flashgen: Triton FlashAttention kernels, tuned per GPU and served without a tuner.

The public names are loaded when first used: `import flashgen` alone loads no torch. docs/api.md
lists them. The pipeline, one package a step:
spec -> kernels -> compile -> evaluate (check, measure or estimate) -> search -> table -> runtime.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashgen.runtime import block_mask
    from flashgen.runtime.api import attention, decode, digest, explain, explain_decode
    from flashgen.runtime.folders import use
    from flashgen.runtime.kv_cache import append
    from flashgen.runtime.merge import merge
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


def lazily(
    package: str, places: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The __getattr__ and __dir__ of a package that loads its public names when first used.

    places: where each name is, "module:name", or "module" for a module, relative to the package.
    """

    def load(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, attribute = places[name].partition(":")
        value: Any = importlib.import_module(f"{package}.{module}")
        if attribute:
            value = getattr(value, attribute)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places})

    return load, names


__getattr__, __dir__ = lazily(
    __name__,
    {
        "append": "runtime.kv_cache:append",
        "attention": "runtime.api:attention",
        "attention_varlen": "runtime.varlen:attention_varlen",
        "block_mask": "runtime.block_mask",
        "decode": "runtime.api:decode",
        "digest": "runtime.api:digest",
        "explain": "runtime.api:explain",
        "explain_decode": "runtime.api:explain_decode",
        "merge": "runtime.merge:merge",
        "use": "runtime.folders:use",
    },
)
