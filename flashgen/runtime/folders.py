"""The dispatcher of each folder of generated kernels, and which one is current.

A folder is loaded from its path, under a module name of flashgen's own. So flashgen finds its own
folder without sys.path, and imports no other package that is called `generated`. The public
functions and drop-ins use the current dispatcher, which serves the shipped folder, or the one that
FLASHGEN_GENERATED or use() names.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from pathlib import Path

from flashgen import paths
from flashgen.errors import GeneratedError
from flashgen.kernels.loader import lock_of_loading
from flashgen.runtime import registry
from flashgen.runtime.dispatcher import Dispatcher
from flashgen.runtime.generated_tables import served_from
from flashgen.runtime.registry import SHIPPED

_lock = lock_of_loading()


def current() -> Dispatcher:
    """The dispatcher that serves flashgen.attention, the drop-ins and graphs.

    Its folder is loaded at the first call. Raises GeneratedError where that cannot be.
    """
    found: Dispatcher | None = registry._current
    return found or _start()


def use(folder: str | os.PathLike[str] | None) -> None:
    """Serve this process by the kernels and tables of a folder from now on.

    Functions imported from flashgen, drop-ins and registered operators follow.

    Args:
        folder: what `flashgen tune --out` named, or its `generated`; None is the default again.

    Returns:
        None.

    Raises:
        GeneratedError: if the folder holds nothing that this flashgen generated.

    Examples:
        >>> import flashgen
        >>> flashgen.use(None)  # FLASHGEN_GENERATED, or the shipped tables
    """
    named = registry.default_folder() if folder is None else registry.inner_folder(Path(folder))
    registry.serve_by(dispatcher_in(named))


def dispatcher_in(folder: Path) -> Dispatcher:
    """The one dispatcher of a folder, loaded at the first call. Raises GeneratedError."""
    with registry.nameable(folder):
        folder = folder.resolve()
    package = _package_name(folder)
    with _lock:
        found: Dispatcher | None = registry._dispatchers.get(package)
        if found is None:
            found = _load(package, folder)
            registry.add(package, found, folder)
        return found


def _start() -> Dispatcher:
    with _lock:
        if registry._current is None:
            registry.serve_by(dispatcher_in(registry.default_folder()))
        found: Dispatcher | None = registry._current
        assert found is not None
        return found


def _package_name(folder: Path) -> str:
    if folder == paths.shipped_generated_dir().resolve():
        return SHIPPED
    return f"{SHIPPED}_{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}"


def _load(package: str, folder: Path) -> Dispatcher:
    problem = registry.why_not_generated(folder)
    if problem is not None:
        raise GeneratedError(problem)
    spec = importlib.util.spec_from_file_location(package, folder / "__init__.py")
    assert spec is not None  # the file's name ends with .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[package] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        for name in [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]:
            del sys.modules[name]
        raise GeneratedError(
            f"{folder} cannot be loaded ({type(error).__name__}: {error}): run flashgen generate "
            f"--out {folder.parent}"
        ) from error
    served = served_from(folder)
    return Dispatcher(package=package, archs=served.archs, choices=served.choices)
