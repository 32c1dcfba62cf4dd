"""Locates templates, tables, generated files and flashgen itself; no other module knows where they
are.

A wheel holds them as flashgen/_templates, flashgen/_configs and flashgen/_generated. A checkout,
installed or not, has them next to flashgen/. The import system is not consulted: the working
directory and sys.path change nothing.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from flashgen import __version__, settings
from flashgen.errors import InvalidArgument

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parent

ON_INDEX = False
"""Whether pip finds flashgen by its name. Until a release it installs a clone or a built wheel."""


def install_command(extra: str) -> str:
    """The command that installs an extra of flashgen: of this clone, or of the wheel that was
    installed, which `make release` builds.
    """
    if ON_INDEX:
        return f"pip install 'flashgen[{extra}]'"
    if (ROOT / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{ROOT}[{extra}]')}"
    return f"pip install 'flashgen-{__version__}-py3-none-any.whl[{extra}]'"


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
