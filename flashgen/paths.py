"""Locates templates, tables, generated files and flashgen itself; no other module knows where they
are.

A wheel holds them as flashgen/_templates, flashgen/_configs and flashgen/_generated. A checkout,
installed or not, has them next to flashgen/. The import system is not consulted: the working
directory and sys.path change nothing.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import shutil
import sys
from pathlib import Path

from flashgen import settings
from flashgen.errors import InvalidArgument

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parent


def install_command(extra: str = "") -> str:
    """The command that installs the packages of an extra, or those that flashgen always needs.

    It names the packages and this Python's pip, so it works as printed wherever flashgen came from:
    a clone, a wheel, an index.
    """
    return " ".join([_pip_install(), *map(_quoted, _requirements(extra))])


def install_command_for(module: str | None) -> str | None:
    """The command that installs a module that an import did not find; None if it is not of a
    package that flashgen names.
    """
    name = (module or "?").partition(".")[0]
    package = _PACKAGES.get(name, name)
    for extra in ("", "tune", "offline", "cluster", "dashboard"):
        needs = [re.match(r"[\w.-]+", need) for need in _requirements(extra)]
        if package in [found[0] for found in needs if found]:
            return install_command(extra)
    return None


_PACKAGES = {"yaml": "pyyaml", "pynvml": "nvidia-ml-py", "optuna_dashboard": "optuna-dashboard"}
"""Packages by their modules, where the names differ."""


def install_command_after(error: ModuleNotFoundError) -> str | None:
    """The command that installs what an import did not find: the module's package or, where another
    package lacks a part of its own, that package, whose dependencies pip then completes. None if
    flashgen itself lacks it.
    """
    import traceback

    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    importers = [str(frame.f_globals.get("__name__")) for frame in reversed(frames)]
    outside = itertools.takewhile(lambda name: name.partition(".")[0] != "flashgen", importers)
    found = map(install_command_for, (error.name, *outside))
    return next(filter(None, found), None)


def _requirements(extra: str) -> list[str]:
    """Of a clone from its pyproject.toml, else from the metadata beside flashgen. What reads them
    is imported here: the runtime imports this module.
    """
    import importlib.metadata
    import tomllib

    if (ROOT / "pyproject.toml").is_file():
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return list(project["optional-dependencies"][extra] if extra else project["dependencies"])
    beside = next(iter(importlib.metadata.distributions(name="flashgen", path=[str(ROOT)])))
    of_extra = f'; extra == "{extra}"' if extra else ""
    return [
        need.removesuffix(of_extra)
        for need in beside.requires or ()
        if (need.endswith(of_extra) if extra else "extra ==" not in need)
    ]


def _pip_install() -> str:
    """By pip's name only in an active environment: elsewhere it may be another Python's. In an
    environment that uv made, by uv.
    """
    python = Path(sys.executable)
    if importlib.util.find_spec("pip") is None:
        return f"uv pip install --python {_quoted(str(python))}"
    active = (
        sys.prefix != sys.base_prefix and Path(shutil.which("pip") or "").parent == python.parent
    )
    return "pip install" if active else f"{_quoted(str(python))} -m pip install"


def _quoted(word: str) -> str:
    """A word as the shells of POSIX and Windows take it: both know double quotes."""
    inner = word.replace('"', "'")
    return word if re.fullmatch(r"[\w./:\\-]+", word) else f'"{inner}"'


def templates_dir() -> Path:
    """The folder of *.py.jinja."""
    return _shipped("templates")


def shipped_configs_dir() -> Path:
    """The folder of the tables that came with flashgen, or the one that FLASHGEN_CONFIGS names.

    Raises InvalidArgument if that is no folder, because every table would seem to be missing.
    """
    named = settings.configs_override()
    if named is not None and not named.is_dir():
        raise InvalidArgument(f"FLASHGEN_CONFIGS must name a folder of tables: got {named}")
    return named or _shipped("configs")


def shipped_generated_dir() -> Path:
    """The folder of the kernels and the dispatch table that came with flashgen."""
    return _shipped("generated")


SHIPPED_PACKAGE = "flashgen._generated"
"""The name of that folder as a package. In a graph, it stands for whichever folder serves."""


def shipped_table(slug: str) -> Path:
    """The shipped table of a GPU; the file need not exist."""
    return shipped_configs_dir() / f"{slug}.yaml"


def table_file(out: Path, slug: str) -> Path:
    """DIR/configs/<slug>.yaml, where `flashgen tune --out DIR` writes."""
    return (settings.configs_override() or out / "configs") / f"{slug}.yaml"


def generated_dir(out: Path) -> Path:
    """DIR/generated, a package to import with DIR on sys.path."""
    return out / "generated"


def state_dir(out: Path) -> Path:
    """DIR/.flashgen: logs, quarantine and caches, never committed."""
    return out / ".flashgen"


def log_file(out: Path, slug: str) -> Path:
    """DIR/.flashgen/<slug>.jsonl, the append-only record of outcomes."""
    return state_dir(out) / f"{slug}.jsonl"


def quarantine_file(out: Path, slug: str) -> Path:
    """DIR/.flashgen/<slug>.quarantine.jsonl: kernels that are not tried again."""
    return state_dir(out) / f"{slug}.quarantine.jsonl"


def journal_file(out: Path, slug: str) -> Path:
    """DIR/.flashgen/<slug>.journal, which the Optuna dashboard shows."""
    return state_dir(out) / f"{slug}.journal"


def session_file(out: Path, slug: str) -> Path:
    """DIR/.flashgen/<slug>.session.json: the starting point of a run that has not ended."""
    return state_dir(out) / f"{slug}.session.json"


def _shipped(folder: str) -> Path:
    packaged = PACKAGE / f"_{folder}"
    return packaged if packaged.is_dir() else ROOT / folder
