"""Loads a kernel from its file, or executes it from its text. Neither imports torch.

Kernels that differ in numbers alone share a text. Each is a JITFunction of its own, whose function
is that of the text under the kernel's full name: so Triton calls the symbol, the files of its
cache, errors and what its hooks see by that name, in 3.6 to 3.9.

Triton reads a kernel's source through inspect and linecache, when it decorates the function and
again when it interprets it. Without a file, linecache holds the text, under a file name made of its
digest. The module's loader has the text too, for a process that clears linecache.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import linecache
import os
import sys
import threading
import types
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.errors import FlashgenError, ToolchainError
from flashgen.kernels import interpreter

if TYPE_CHECKING:
    from flashgen.kernels.plan import Kernel
    from flashgen.kernels.render import Rendered


def load_kernel(path: Path, function: str, name: str = "") -> Kernel:
    """The kernel `function` of the file at `path`, imported under a name of its own; name: its full
    name, if it has another.

    Its text is executed, never compiled Python that lies beside it: the folder of a kernel may hold
    what others put there. Raises FlashgenError where the file defines no such kernel.
    """
    interpreter.prepare()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FlashgenError(f"the kernel file cannot be read: {error}") from error
    module = _executed(f"_flashgen_kernel_{name or function}", text, str(path))
    return kernel_of(module, function, name)


def kernel_of(module: types.ModuleType, function: str, name: str = "") -> Kernel:
    """The kernel `function` of an imported module; under a full name it is a new one at every call.
    Raises FlashgenError where it is not there.
    """
    kernel = getattr(module, function, None)
    if kernel is None:
        raise FlashgenError(f"{getattr(module, '__file__', module)} defines no kernel {function}")
    if name in ("", function) or interpreter.active():
        return kernel
    return _renamed(kernel, name)


def _renamed(kernel: Kernel, name: str) -> Kernel:
    """A kernel of Triton or Gluon like this one, whose function has this name."""
    held = kernel.fn
    function = types.FunctionType(
        held.__code__, held.__globals__, name, held.__defaults__, held.__closure__
    )
    function.__qualname__, function.__module__ = name, held.__module__
    function.__annotations__ = held.__annotations__
    return type(kernel)(function, do_not_specialize=kernel.do_not_specialize)


def toolchain_error(error: BaseException) -> ToolchainError | None:
    """The sentence for a machine on which Triton finds no C compiler, or cannot write its cache;
    None for any other error.
    """
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return ToolchainError(
            f"Triton cannot use {error.filename} ({error.strerror}): set TRITON_CACHE_DIR, or "
            "HOME, to a folder that can be written"
        )
    if "C compiler" not in str(error):
        return None
    return ToolchainError(
        "Triton needs a C compiler at a kernel's first launch and found none: "
        "install gcc or clang, or set CC"
    )


class TextLoader(importlib.abc.ExecutionLoader):
    """The loader of a module whose text is known."""

    def __init__(self, text: str, filename: str) -> None:
        self._text = text
        self._filename = filename

    def get_source(self, fullname: str) -> str:
        """The text of the module."""
        return self._text

    def get_filename(self, fullname: str) -> str:
        """The name under which linecache and tracebacks know the text, of a file or of none."""
        return self._filename


def lock_of_loading() -> threading.RLock:
    """A lock for what loads modules. A fork waits for it: in the child nobody would release it, and
    what was half loaded would stay so.
    """
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):
        free = lock.release
        os.register_at_fork(before=lock.acquire, after_in_parent=free, after_in_child=free)
    return lock


_executing = lock_of_loading()


def load_text(rendered: Rendered) -> Kernel:
    """A rendered kernel. Each text is executed once a process.

    Triton compiles it under the same cache key as a file of this text. Raises FlashgenError where
    the text defines no such kernel.
    """
    interpreter.prepare()
    number = rendered.text_digest.removeprefix("sha256:")
    module_name = f"_flashgen_{number}"
    with _executing:
        if module_name not in sys.modules:
            text, filename = rendered.source, f"<flashgen>/{number}/{rendered.text_name}.py"
            # No modification time: linecache.checkcache keeps the entry.
            linecache.cache[filename] = len(text), None, text.splitlines(keepends=True), filename
            _executed(module_name, text, filename)
        return kernel_of(sys.modules[module_name], rendered.text_name, rendered.name)


def _executed(module_name: str, text: str, filename: str) -> types.ModuleType:
    """The new module of a text."""
    loader = TextLoader(text, filename)
    spec = importlib.util.spec_from_loader(module_name, loader)
    assert spec is not None  # the loader is given
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # where Triton looks for the source
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def is_missing(module: str, error: ModuleNotFoundError) -> bool:
    """Whether the module that was not found is this one, or a package that holds it."""
    return error.name is not None and f"{module}.".startswith(f"{error.name}.")
