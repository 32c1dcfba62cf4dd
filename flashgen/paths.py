"""Locates templates, tables and generated files; no other module knows where they are.

In a checkout (editable or not) their folders are next to flashgen/. A wheel has templates and
tables in flashgen/_templates and flashgen/_configs.
"""

from __future__ import annotations

from pathlib import Path

from flashgen import settings
from flashgen.errors import InvalidArgument

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parent


def templates_dir() -> Path:
    """The folder of *.py.jinja."""
    return _beside("templates", "_templates")


def shipped_configs_dir() -> Path:
    """The folder of the tables that came with flashgen, or the one that FLASHGEN_CONFIGS names.

    Raises InvalidArgument if that is no folder, because every table would seem to be missing.
    """
    named = settings.configs_override()
    if named is not None and not named.is_dir():
        raise InvalidArgument(f"FLASHGEN_CONFIGS must name a folder of tables: got {named}")
    return named or _beside("configs", "_configs")


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


def session_file(out: Path, slug: str) -> Path:
    """DIR/.flashgen/<slug>.session.json: the starting point of a run that has not ended."""
    return state_dir(out) / f"{slug}.session.json"


def kernel_cache_dir() -> Path:
    """The folder of kernels that the runtime rendered for this user; it need not exist."""
    return settings.user_cache() / "flashgen" / "kernels"


def _beside(folder: str, packaged: str) -> Path:
    checkout = ROOT / folder
    if checkout.is_dir() and (ROOT / "pyproject.toml").is_file():
        return checkout
    return PACKAGE / packaged
