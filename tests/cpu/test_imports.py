"""Who may import whom, read off the source, functions included; and how little serving loads."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "flashgen"

STANDARD_LIBRARY_ONLY = (
    "flashgen", "errors", "settings", "paths", "sequences", "block_mask", "features", "spec_words", "spec_fields", "spec_rules", "spec", "problem", "asked", "gpu", "config", "bounds", "legality", "default_tiles", "order", "splits", "outcome", "choice", "defaults",
    "space_decode", "space",
)  # fmt: skip
KERNELS_AND_TRUTH = (
    "places", "masking", "philox", "reference", "nasty", "gradients", "decoding", "interpreter", "signature_decode", "signature", "direct", "descriptors", "arguments", "launch",
    "launch_backward", "launch_decode", "launch_append", "launch_again",
)  # fmt: skip
TOOL = (
    "render", "residency", "sass", "flow", "facts", "compile", "check_append", "check_decode", "check_varlen", "check", "stopwatch", "inputs", "conditions", "measure", "measure_decode",
    "machine", "registers", "grid", "rows", "program", "cycles", "waves", "scoreboard", "replays", "estimate", "evaluate", "quarantine", "ledger", "evaluators",
    "log", "records", "search", "landscape", "entry", "nodes", "table", "neighbours", "consolidate", "entries", "workloads", "hf_config", "changes",
    "generate", "show", "anatomy", "rivals", "explain", "verify", "precompile", "calibrate", "plot", "traces", "charts", "report", "session", "provenance", "screen", "workplace", "tune", "fleet",
    "bench", "cli", "__main__",
)  # fmt: skip
ORDER = (*STANDARD_LIBRARY_ONLY, *KERNELS_AND_TRUTH, *TOOL)
"""A module imports only from its left. runtime stands beside the tool, right of launch."""

MAY_IMPORT_RUNTIME = {"show", "explain", "verify", "precompile", "tune", "bench", "cli"}
RUNTIME_MAY_IMPORT = {*STANDARD_LIBRARY_ONLY, *KERNELS_AND_TRUTH}
ONLY_IMPORTERS = {
    "jinja2": ("render", "report"),
    "numba": ("cycles", "waves"),
    "optuna": ("search", "ledger"),
    "yaml": ("nodes", "table"),
    "typer": ("cli",),
}
NEVER_WHEN_SERVING = ("jinja2", "optuna", "yaml", "typer", "rich", "numba", "flashgen.render")


@dataclass(frozen=True, kw_only=True)
class Import:
    """One import. module and target are dotted names; typing_only: it stands under TYPE_CHECKING."""

    module: str
    line: int
    target: str
    in_function: bool
    typing_only: bool

    def __str__(self) -> str:
        return f"{self.module}, line {self.line}, imports {self.target}"


def imports_of(source: str, module: str, *, is_package: bool = False) -> list[Import]:
    """All imports of a module, wherever they stand, and importlib.import_module of a literal."""
    package = module if is_package else module.rpartition(".")[0]
    return list(_walk(ast.parse(source), module, package, in_function=False, typing_only=False))


def _walk(
    node: ast.AST, module: str, package: str, *, in_function: bool, typing_only: bool
) -> Iterator[Import]:
    for target in _targets(node, package):
        line = getattr(node, "lineno", 0)
        yield Import(
            module=module,
            line=line,
            target=target,
            in_function=in_function,
            typing_only=typing_only,
        )
    inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    guarded = (
        node.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) else []
    )
    for child in ast.iter_child_nodes(node):
        typing = typing_only or child in guarded
        yield from _walk(child, module, package, in_function=inside, typing_only=typing)


def _targets(node: ast.AST, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        parents = package.split(".")
        base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
        origin = ".".join(part for part in (base, node.module) if part)
        # `from flashgen import spec` names a module, `from flashgen.spec import padded` does not.
        if origin in ("flashgen", "flashgen.evaluators", "flashgen.runtime"):
            return [f"{origin}.{alias.name}" for alias in node.names]
        return [origin]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
        ("import_module", "__import__")
    ):
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            return [first.value]
    return []


def place(module: str) -> str:
    """The name under which a flashgen module stands in ORDER: its file, or its folder."""
    return module.split(".")[1] if "." in module else module


def offence(found: Import) -> str | None:
    """Why this import breaks the order; None where it does not."""
    importer, top = place(found.module), found.target.split(".")[0]
    if top == "flashgen":
        return _internal_offence(found, importer, place(found.target))
    if top == "generated":
        return f"{found}: flashgen does not depend on what it generates"
    if found.typing_only or top in sys.stdlib_module_names:
        return None
    if importer in STANDARD_LIBRARY_ONLY:
        return f"{found}: {importer} has the standard library only"
    if importer not in ONLY_IMPORTERS.get(top, (importer,)):
        return f"{found}: only {' and '.join(ONLY_IMPORTERS[top])} may import {top}"
    return None


def _internal_offence(found: Import, importer: str, imported: str) -> str | None:
    if imported == importer or imported == "__version__":
        return None
    if importer == "runtime":
        on_demand = imported == "render" and found.in_function
        if imported in RUNTIME_MAY_IMPORT or on_demand:
            return None
        return f"{found}: runtime serves without the tool"
    if imported == "runtime":
        if importer in MAY_IMPORT_RUNTIME:
            return None
        return f"{found}: only {', '.join(sorted(MAY_IMPORT_RUNTIME))} import runtime"
    for name in (importer, imported):
        if name not in ORDER:
            return f"{found}: {name} has no place in the order; give it one here and in docs/architecture.md"
    if ORDER.index(imported) >= ORDER.index(importer):
        return f"{found}: {importer} stands left of {imported}"
    return None


def module_name(path: Path) -> str:
    relative = path.relative_to(ROOT).with_suffix("")
    return ".".join(relative.parts).removesuffix(".__init__")


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=[module_name(path) for path in MODULES])
def test_modules_import_only_from_their_left(path: Path) -> None:
    module = module_name(path)
    assert place(module) in (*ORDER, "runtime"), f"{module} has no place in the order"
    found = imports_of(path.read_text(), module, is_package=path.name == "__init__.py")
    assert [reason for each in found if (reason := offence(each))] == []


@pytest.mark.parametrize(
    ("module", "source", "blamed"),
    [
        ("flashgen.spec", "from flashgen.table import Table", "spec stands left of table"),
        ("flashgen.spec", "def f():\n    from flashgen import tune", "spec stands left of tune"),
        ("flashgen.spec", "import torch", "spec has the standard library only"),
        (
            "flashgen.gpu",
            "import importlib\nimportlib.import_module('torch')",
            "gpu has the standard library",
        ),
        ("flashgen.tune", "import optuna", "only search and ledger may import optuna"),
        ("flashgen.runtime.select", "import flashgen.render", "runtime serves without the tool"),
        (
            "flashgen.runtime.select",
            "from flashgen import table",
            "runtime serves without the tool",
        ),
        ("flashgen.measure", "from flashgen.runtime import Dispatcher", "import runtime"),
        (
            "flashgen.cli",
            "from generated.table import CHOICES",
            "does not depend on what it generates",
        ),
        ("flashgen.tune", "import flashgen.novelty", "novelty has no place"),
        (
            "flashgen.evaluators.gpu",
            "from ..search.goal import Found",
            "evaluators stands left of search",
        ),
    ],
)
def test_an_offender_is_named(module: str, source: str, blamed: str) -> None:
    reasons = [offence(each) for each in imports_of(source, module)]
    assert any(reason and module in reason and blamed in reason for reason in reasons), reasons


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "flashgen.spec",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor",
        ),
        ("flashgen.runtime.dispatch", "def f():\n    from flashgen.render import render"),
        ("flashgen.cli", "from flashgen.runtime import Dispatcher"),
        ("flashgen.evaluators.gpu", "from flashgen.evaluators import worker"),
    ],
)
def test_what_the_order_allows_is_allowed(module: str, source: str) -> None:
    assert [offence(each) for each in imports_of(source, module)] == [None] * source.count(
        "import "
    )


def test_the_documented_order_is_the_tested_one() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    words = text.split("<!-- order -->")[1].replace("```text", "").replace("```", "").split()
    documented = [word for word in words if word != "<"]
    assert documented == [name for name in ORDER if name not in ("flashgen", "__main__")]


LIGHT = """
import os, sys
done = []

def watch(event, arguments):
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    if event in ("os.mkdir", "os.rename", "os.remove", "os.symlink", "os.link", "socket.connect"):
        done.append((event, arguments))
    elif event == "open" and isinstance(arguments[2], int) and arguments[2] & writes:
        done.append((event, arguments))

sys.addaudithook(watch)
import {module}
import torch
loaded = [name for name in {heavy!r} if name in sys.modules]
print(loaded, torch.cuda.is_initialized(), done)
"""


@pytest.mark.parametrize("module", ["flashgen.runtime", "generated.dispatcher"])
def test_serving_loads_little_and_does_nothing(module: str, tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", LIGHT.format(module=module, heavy=NEVER_WHEN_SERVING)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (done.stdout.strip(), done.stderr) == ("[] False []", "")
    assert list(tmp_path.rglob("*")) == []
