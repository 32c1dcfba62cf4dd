"""Kernels that are executed from their text, with no file.

Triton reads a kernel's source through inspect and linecache, when it decorates the function and
again when it interprets it. So linecache holds the text, under a file name made of its digest. The
module's loader has the text too, for a process that clears linecache.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import linecache
import sys

from flashgen.kernels import interpreter
from flashgen.kernels.launch import Kernel, kernel_of


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
