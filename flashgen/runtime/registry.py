"""The dispatchers of this process, by the generated package each serves.

The registered operators and the drop-ins are the process's, not one package's: they find their
dispatcher here, by name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from flashgen.errors import GeneratedError

if TYPE_CHECKING:
    from flashgen.runtime.dispatcher import Dispatcher

DEFAULT_PACKAGE = "generated"

_dispatchers: dict[str, Dispatcher] = {}


def register(package: str, dispatcher: Dispatcher) -> None:
    """Make the dispatcher of a package known; a later one of the same package takes its place."""
    _dispatchers[package] = dispatcher


def is_missing(module: str, error: ModuleNotFoundError) -> bool:
    """Whether it is this module that was not found, or a package that it is of."""
    return error.name is not None and f"{module}.".startswith(f"{error.name}.")


def dispatcher_of(package: str = DEFAULT_PACKAGE) -> Dispatcher:
    """The dispatcher of a generated package, which is imported if it has not been.

    Raises GeneratedError where there is no such package.
    """
    if package not in _dispatchers:
        try:
            importlib.import_module(f"{package}.dispatcher")
        except ModuleNotFoundError as error:
            if not is_missing(f"{package}.dispatcher", error):
                raise  # it is there, and lacks a module of its own
            raise GeneratedError(
                f"package {package} cannot be imported: put the folder that holds it on PYTHONPATH"
            ) from error
    return _dispatchers[package]
