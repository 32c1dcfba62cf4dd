"""Loads a kernel from its file, or executes it from its text. Neither imports torch.

Triton reads a kernel's source through inspect and linecache, when it decorates the function and
again when it interprets it. Without a file, linecache holds the text, under a file name made of its
digest. The module's loader has the text too, for a process that clears linecache.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.errors import FlashgenError, ToolchainError
from flashgen.kernels import interpreter

if TYPE_CHECKING:
    from flashgen.kernels.plan import Kernel


class _Source(importlib.machinery.SourceFileLoader):
    """Executes the text of a file, never compiled Python that lies beside it: the folder of a
    kernel may hold what others put there.
    """

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        code: types.CodeType = self.source_to_code(self.get_data(path), path)
        return code


def load_kernel(path: Path, name: str) -> Kernel:
    """The kernel `name` of the file at `path`, imported under a name of its own.

    Triton reads a kernel's source from its file, so it must be a real one. Raises FlashgenError
    where the file defines no such kernel.
    """
    interpreter.prepare()
    module_name = f"_flashgen_kernel_{name}"
    loader = _Source(module_name, str(path))
    spec = importlib.util.spec_from_file_location(module_name, path, loader=loader)
    assert spec is not None  # the loader is given
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        loader.exec_module(module)
    except OSError as error:
        raise FlashgenError(f"the kernel file cannot be read: {error}") from error
    return kernel_of(module, name)


def kernel_of(module: object, name: str) -> Kernel:
    """The kernel `name` of an imported module. Raises FlashgenError where it is not there."""
    kernel = getattr(module, name, None)
    if kernel is None:
        raise FlashgenError(f"{getattr(module, '__file__', module)} defines no kernel {name}")
    return kernel


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
    """The loader of a module whose text is in memory."""

    def __init__(self, text: str, filename: str) -> None:
        self._text = text
        self._filename = filename

    def get_source(self, fullname: str) -> str:
        """The text of the module."""
        return self._text

    def get_filename(self, fullname: str) -> str:
        """The name under which linecache and tracebacks know the text; no such file exists."""
        return self._filename


def load_text(text: str, name: str, digest: str) -> Kernel:
    """The kernel `name` that `text` defines; digest is that of render.Rendered.

    Triton compiles it under the same cache key as a file of this text. Raises FlashgenError where
    the text defines no such kernel.
    """
    interpreter.prepare()
    number = digest.removeprefix("sha256:")
    filename = f"<flashgen>/{number}/{name}.py"
    lines = text.splitlines(keepends=True)
    # No modification time: linecache.checkcache keeps the entry.
    linecache.cache[filename] = (len(text), None, lines, filename)
    loader = TextLoader(text, filename)
    module_name = f"_flashgen_{number}"
    spec = importlib.util.spec_from_loader(module_name, loader)
    assert spec is not None  # the loader is given
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    loader.exec_module(module)
    return kernel_of(module, name)
