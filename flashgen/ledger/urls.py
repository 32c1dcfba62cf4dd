"""What --storage may name, and what of it may be shown.

postgresql+psycopg://USER@HOST/DATABASE    for machines; libpq finds the password in PGPASSWORD
journal:///PATH, or PATH.journal, PATH.log a file, for one host
sqlite:///PATH                             a file, for one host, slower than a journal
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.errors import InvalidArgument

if TYPE_CHECKING:
    from sqlalchemy.engine import URL


def journal_path(url: str) -> Path | None:
    """The file that a URL names as a journal; None if it names a database."""
    if url.startswith("journal:"):
        path = url.removeprefix("journal:")
        return Path(path.removeprefix("//") or ".")
    if "://" not in url and url.endswith((".journal", ".log")):
        return Path(url)
    return None


def parsed_url(url: str) -> URL:
    """The URL of a database that is known. Raises InvalidArgument, which shows nothing secret."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    known = "postgresql+psycopg://USER@HOST/DATABASE, journal:///PATH or sqlite:///PATH"
    scheme = url.partition("://")[0] if "://" in url else "another kind"
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        parsed = None
    # An unescaped @ ends the password too early: its rest would be shown as a part of the host.
    torn = parsed and parsed.drivername != "sqlite" and "@" in f"{parsed.host}{parsed.database}"
    if parsed is None or torn:
        raise InvalidArgument(
            f"--storage must be like {known}: got one of {scheme} that cannot be read; "
            f"a password's signs must be escaped as in URLs, or be in PGPASSWORD"
        )
    if parsed.drivername in ("postgres", "postgresql"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("postgresql+psycopg", "sqlite"):
        raise InvalidArgument(f"--storage must be like {known}: got one of {scheme}")
    return parsed


def shown_url(url: URL) -> str:
    """The URL without password and options, which may hold one."""
    return url.create(
        url.drivername, url.username, None, url.host, url.port, url.database
    ).render_as_string()


def secrets_of(url: URL) -> tuple[str, ...]:
    """All that no message may hold."""
    options = [value for name, value in url.query.items() if "pass" in name]
    texts = [url.password, *options]
    return tuple(text for text in texts if isinstance(text, str) and text)
