"""The semantics of instructions, a module a chapter of the PTX ISA."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules


def load_all() -> None:
    """Import every module, so that decode.TABLE is complete."""
    for module in iter_modules(__path__, f"{__name__}."):
        import_module(module.name)
