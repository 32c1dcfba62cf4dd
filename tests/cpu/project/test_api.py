"""docs/api.md lists the public names; `import flashgen` and the faces of its packages load nothing of others."""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

import flashgen
from flashgen import errors

ROOT = Path(__file__).resolve().parents[3]
LISTED = re.findall(r"^\| `([\w.]+)` \| \S", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
FACES = (
    "flashgen",
    *(f"flashgen.{name}" for name in "estimate ptx report runtime search spec table".split()),
)
LIGHT = f"""
import importlib, sys
for name in {FACES!r}:
    assert set(importlib.import_module(name).__all__) <= set(dir(sys.modules[name])), name
print(*(name for name in sys.modules if name.split(".")[0] in ("torch", "triton", "numpy", "yaml", "generated")))
"""


def function_of(name: str) -> FunctionType | None:
    """The function that a listed name is; None for a class, a module or a value."""
    package, _, last = name.rpartition(".")
    found = getattr(pkgutil.resolve_name(package), last)
    found = inspect.unwrap(found, stop=lambda each: hasattr(each, "__signature__"))  # derived
    return found if isinstance(found, FunctionType) else None


def test_every_listed_name_imports() -> None:
    for name in LISTED:
        assert pkgutil.resolve_name(name) is not None


def test_every_name_of_a_face_is_listed() -> None:
    assert len(set(LISTED)) == len(LISTED)
    for face in FACES:
        module = importlib.import_module(face)
        for name in module.__all__:
            listed = [word for word in LISTED if f"{word}.".startswith(f"{face}.{name}.")]
            assert listed, f"docs/api.md lacks {face}.{name}"
            assert inspect.ismodule(getattr(module, name)) == (
                f"{face}.{name}" not in LISTED or name == "block_mask"
            )


def test_adapters_are_imported_by_their_public_names() -> None:
    """In a new process, by either name first: each module is loaded once."""
    text = """
import flashgen.runtime.sdpa as public
from flashgen.runtime.adapters import flash_attn, sdpa
from flashgen.runtime.flash_attn import flash_attn_func
import flashgen.runtime.vllm, importlib
assert public is sdpa and flash_attn_func is flash_attn.flash_attn_func
assert importlib.import_module("flashgen.runtime.vllm") is flashgen.runtime.vllm
try:
    import flashgen.runtime.paged
except ModuleNotFoundError as error:
    print(error.name)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "flashgen.runtime.paged\n"


def test_every_error_is_listed() -> None:
    own = {
        n
        for n, x in vars(errors).items()
        if inspect.isclass(x) and x.__module__ == "flashgen.errors"
    }
    assert {f"flashgen.errors.{name}" for name in own} <= set(LISTED)


def test_faces_load_nothing_of_others() -> None:
    """-S: without what is installed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", LIGHT],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_public_functions_have_signatures_docstrings_and_pickles() -> None:
    for name in flashgen.__all__:
        function = getattr(flashgen, name)
        if not inspect.ismodule(function):
            assert function.__doc__
            assert "self" not in inspect.signature(function).parameters
            assert pickle.loads(pickle.dumps(function)) is function


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    for face in FACES:
        with pytest.raises(AttributeError, match=rf"module '{face}' has no attribute 'attentoin'"):
            _ = importlib.import_module(face).attentoin
