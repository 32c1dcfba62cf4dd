"""Public names of a package that are loaded when they are first used, as lazy_loader's are."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any


def attach(
    package: str, names: Mapping[str, str], modules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package.

    Args:
        package: its name.
        names: by name, the module that has it.
        modules: its own modules that are public.
    """
    space = vars(sys.modules[package])

    def load(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = space[name] = getattr(importlib.import_module(names[name]), name)
        return found

    return load, lambda: sorted({*space, *space["__all__"]})
