"""Public names of a package that are loaded when they are first used, as lazy_loader's are."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
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


class Aliases(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of a package under names in another one. An element of sys.meta_path.

    Args:
        package: where their public names are.
        home: the package that has them.
        modules: their names in both.
    """

    def __init__(self, package: str, home: str, modules: Collection[str]) -> None:
        self._homes = {f"{package}.{name}": f"{home}.{name}" for name in modules}

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for an alias; None for all other names."""
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in self._homes else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The one module that both names stand for."""
        module = importlib.import_module(self._homes[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module, which is loaded already, its own spec back."""
        assert module.__spec__ is not None  # that of the alias
        module.__spec__ = module.__spec__.loader_state
