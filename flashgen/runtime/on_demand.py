"""Kernels rendered when they are first asked for: combinations of features, of which generated/
holds no default unless it is told to, for there are too many.

A rendered kernel is kept in the user's cache, in a folder named after its digest, so that a changed
template never meets an old file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from pathlib import Path

from flashgen import launch, paths
from flashgen.config import KernelConfig
from flashgen.errors import ToolchainError
from flashgen.spec import AttentionSpec

logger = logging.getLogger("flashgen.runtime")


def kernel(spec: AttentionSpec, config: KernelConfig) -> launch.Kernel:
    """The kernel of (spec, config), rendered unless the cache has it. Raises ToolchainError where
    jinja2 is missing or the cache cannot be written.
    """
    try:
        from flashgen.render import render
    except ModuleNotFoundError as error:
        if error.name != "jinja2":
            raise
        raise ToolchainError(
            f"generated/ holds no kernel for {spec.name}, and rendering one needs jinja2: "
            f"pip install 'jinja2>=3.1', or where there is jinja2: {generate_command(spec)}"
        ) from error
    rendered = render(spec, config)
    folder = paths.kernel_cache_dir() / rendered.digest.removeprefix("sha256:")
    file = folder / f"{rendered.name}.py"
    if not _holds(file, rendered.source):
        _write(file, rendered.source)
        logger.info("%s was rendered to %s", rendered.name, file)
    return launch.load_kernel(file, rendered.name)


def generate_command(spec: AttentionSpec) -> str:
    """The command that puts the default kernels of a spec's features into generated/."""
    return "flashgen generate" + "".join(f" --feature {word}" for word in spec.feature_words)


def _holds(file: Path, text: str) -> bool:
    try:
        return file.read_text() == text
    except (OSError, UnicodeDecodeError):
        return False


def _write(file: Path, text: str) -> None:
    """Write beside the file, then rename: another process sees all of it or nothing."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
        try:
            with open(handle, "w") as stream:
                stream.write(text)
            os.replace(name, file)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        raise ToolchainError(
            f"{file.parent} cannot be written ({error.strerror}): "
            "set XDG_CACHE_HOME to a folder that can"
        ) from error
