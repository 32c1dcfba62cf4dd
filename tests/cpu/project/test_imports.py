"""No module is imported past the contracts of .importlinter: by a text, through sys.modules, by a loader of its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
KNOWN: dict[str, tuple[str, tuple[str, ...]]] = {
    "bench/peers.py": (
        "packages of others, by the names in its table",
        ("importlib.import_module(self.module)", "find_spec(module)"),
    ),
    "cli/__init__.py": (
        "the standard streams, by their names",
        ("getattr(sys, stream)", "setattr(sys, stream, open(os.devnull, mode))"),
    ),
    "cli/bench.py": (
        "whether Triton is loaded",
        ("'triton' in sys.modules",),
    ),
    "evaluate/workers/child.py": (
        "a program: the task that its parent names",
        ("importlib.import_module(module)",),
    ),
    "evaluate/workers/answers.py": (
        "what judges an answer, as the task names it",
        ("importlib.import_module(module)",),
    ),
    "kernels/bound_call.py": (
        "the straight-line function of a kept call, which it wrote",
        ("exec(text, namespace)",),
    ),
    "kernels/loader.py": (
        "kernels, from their files or texts",
        (
            "importlib.abc.ExecutionLoader",
            "module_name not in sys.modules",
            "sys.modules[module_name]",
            "importlib.util.spec_from_loader(module_name, loader)",
            "importlib.util.module_from_spec(spec)",
            "sys.modules[module_name]",
            "loader.exec_module(module)",
            "sys.modules[module_name]",
        ),
    ),
    "lazy.py": (
        "public names of a package, by the table that it gives: of its own modules; for flashgen, of "
        "flashgen.runtime; for spec, of schedules, which became a package above it",
        (
            "sys.modules[package]",
            "importlib.import_module(f'{package}.{name}')",
            "importlib.import_module(names[name])",
        ),
    ),
    "search/study.py": (
        "a sampler that the user names",
        ("importlib.import_module(module)",),
    ),
    "runtime/folders.py": (
        "a generated package, from its folder",
        (
            "importlib.util.spec_from_file_location(package, folder / '__init__.py')",
            "importlib.util.module_from_spec(spec)",
            "sys.modules[package]",
            "spec.loader.exec_module(module)",
            "sys.modules",
            "sys.modules[name]",
        ),
    ),
    "runtime/generated_tables.py": (
        "the table of a GPU in a generated package",
        (
            "importlib.util.spec_from_file_location('_flashgen_table', path)",
            "importlib.util.module_from_spec(spec)",
            "spec.loader.exec_module(module)",
        ),
    ),
    "runtime/kernel_files.py": (
        "a kernel of a generated package",
        ("importlib.import_module(wanted)",),
    ),
    "runtime/adapters/transformers_models.py": (
        "the modules of others in which models are defined",
        (
            "sys.modules[model.__module__]",
            "sys.modules.get(attention.__module__)",
            "sys.modules[model.__module__]",
            "sys.modules.items()",
        ),
    ),
} | {
    f"runtime/{path.name}": ("itself, for its public name", ("sys.modules[__name__]",))
    for path in ROOT.glob("flashgen/runtime/adapters/*.py")
    if (ROOT / "flashgen/runtime" / path.name).exists() and path.stem != "__init__"
}
"""What a file looks up while it runs, and all expressions of it that do so, from top to bottom."""
OWN = ("flashgen", "generated")
MACHINERY = ("builtins", "imp", "importlib", "pkgutil", "pydoc", "runpy", "sys", "zipimport")
LOOKUP = re.compile(
    r"(builtins|imp|importlib(?!\.(metadata|resources)\.)|pkgutil|pydoc|runpy|zipimport)(\..*)?"
    r"|sys(\.(modules|meta_path|path_hooks|path_importer_cache|__dict__)(\..*)?)?"
    r"|(__builtins__|__import__|eval|exec)(\..*)?"
    r"|(.*\.)?(import_module|exec_module|load_module|entry_points|EntryPoints?)(\..*)?"
)
"""Full names that may give a module: a bare `sys` or `importlib` too, whose attributes may be named by a text."""


def imported(tree: ast.Module) -> dict[str, str]:
    """The full names of what a module imports, by the names that it gives them."""
    full = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            full |= {each.asname: each.name for each in node.names if each.asname}
        elif isinstance(node, ast.ImportFrom):
            full |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return full


def of_others(node: ast.AST, name: str) -> bool:
    """Whether what is done with `name` is to look up a package of others by a constant."""
    if name in ("importlib.import_module", "importlib.util.find_spec"):
        match node:
            case ast.Call(args=[ast.Constant(value=str(module))], keywords=[]):
                return module.split(".")[0] not in ("", *OWN, *MACHINERY)
    return False


def lookups(text: str) -> list[str]:
    """The expressions of a module that may find another one while it runs, but for constant names of other packages."""
    tree = ast.parse(text)
    names = imported(tree)

    def full_name(node: ast.AST) -> str:
        if isinstance(node, ast.Attribute):
            return f"{full_name(node.value)}.{node.attr}"
        return names.get(node.id, node.id) if isinstance(node, ast.Name) else ""

    def found(node: ast.AST, within: ast.AST) -> Iterator[str]:
        name = full_name(node)
        if LOOKUP.fullmatch(name):
            whole = within if isinstance(within, ast.expr) else node
            if not of_others(whole, name):
                yield ast.unparse(whole)
        elif not isinstance(node, ast.Attribute) or name.startswith("."):
            for child in ast.iter_child_nodes(node):
                yield from found(child, node)

    return list(found(tree, tree))


def test_modules_are_imported_where_the_contracts_see_it() -> None:
    found = {
        str(path.relative_to(ROOT / "flashgen")): tuple(lookups(path.read_text()))
        for path in sorted((ROOT / "flashgen").rglob("*.py"))
    }
    assert {name: each for name, each in found.items() if each} == {
        name: each for name, (_, each) in KNOWN.items()
    }


@pytest.mark.parametrize(
    "text",
    [
        "import importlib\nimportlib.import_module('flashgen.runtime.dispatcher')",
        "__import__('flashgen.table')",
        "import importlib.util\nimportlib.util.find_spec('flashgen.cli')",
        "from importlib import import_module as load\nload('flashgen.tune')",
        "from importlib import import_module\nimport_module('.tune')",
        "import importlib\nget = importlib.import_module\nget('flashgen.tune')",
        "import importlib\ngetattr(importlib, 'import_module')('flashgen.tune')",
        "import importlib\nimportlib.import_module('importlib').import_module('flashgen.tune')",
        "from sys import modules\nmodules['flashgen.tune']",
        "import sys\nsys.modules.get('flashgen.tune')",
        "import sys\nsys.__dict__['modules']",
        "from importlib.util import spec_from_file_location\nspec_from_file_location('tune', path)",
        "from importlib import util\nutil.find_spec('flashgen.tune')",
        "import pkgutil\npkgutil.resolve_name('flashgen.tune:tune')",
        "import runpy\nrunpy.run_module('flashgen.tune')",
        "exec('import flashgen.tune')",
        "run = exec\nrun('import flashgen.tune')",
        "load = __import__\nload('flashgen.tune')",
        "getattr(__builtins__, 'eval')('flashgen.tune')",
        "import importlib.machinery\nimportlib.machinery.SourceFileLoader('tune', path)",
        "import importlib\nimportlib.reload(module)",
        "import importlib.metadata\nimportlib.metadata.distribution('flashgen').entry_points",
    ],
)
def test_evasions_are_found(text: str) -> None:
    assert len(lookups(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "import importlib\nimportlib.import_module('pynvml')",
        "from importlib.util import find_spec as find\nfind('scipy.stats')",
        "import importlib.metadata\nimportlib.metadata.version('torch')",
        "import sys\nsys.exit(sys.argv[1:])",
        "import re\nre.compile('x')\nmodel.eval()",
    ],
)
def test_what_finds_no_module_of_flashgen_is_allowed(text: str) -> None:
    assert lookups(text) == []
