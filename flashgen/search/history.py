"""The outcomes of a log or a landscape, read after a search: never written, never locked."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashgen.errors import FlashgenError, InvalidArgument
from flashgen.files import unpacked_content_of, whole_lines
from flashgen.schedules.outcome import Outcome
from flashgen.spec.records import UnknownKey, parsed, value_of


def outcomes_of(path: Path, notice: Callable[[str], None]) -> list[Outcome]:
    """All outcomes of a log in their order, of any GPU, Triton and protocol.

    An incomplete last record, torn by a kill or still being written, is left out.

    Args:
        path: the log, or a JSON file of outcomes; either may be gzipped.
        notice: is called with a sentence on what is left out.

    Returns:
        The outcomes.

    Raises:
        InvalidArgument: if there is no such file.
        FlashgenError: if it cannot be read, or a line is no outcome.

    Examples:
        >>> from pathlib import Path
        >>> from flashgen.search.history import outcomes_of
        >>> outcomes = outcomes_of(Path("tuning.jsonl"), print)  # doctest: +SKIP
    """
    try:
        content = unpacked_content_of(path)
    except FileNotFoundError:
        raise InvalidArgument(
            f"{path}: there is no such log; flashgen tune writes .flashgen/<slug>.jsonl"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FlashgenError(f"{path} is no gzip file ({error}): copy it again") from None
    except OSError as error:
        raise FlashgenError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise FlashgenError(f"{path}: {error}; name another") from None
    if path.name.removesuffix(".gz").endswith(".json"):
        return _of_landscape(content, path)
    lines, whole = whole_lines(content)
    outcomes = [outcome_of(line, path, number) for number, line in enumerate(lines, 1)]
    if whole < len(content):
        notice(f"{path}: the last record is torn; it is left out")
    return outcomes


def outcome_of(line: bytes, path: Path, number: int) -> Outcome:
    """The outcome of a line of a log. Raises FlashgenError."""
    where = f"{path}, line {number}"
    try:
        return Outcome.from_json(parsed(line))
    except UnknownKey as error:
        raise FlashgenError(
            f"{where}: {error}: a newer version wrote this log; update flashgen, "
            "or name another log or folder"
        ) from None
    except ValueError as error:
        raise FlashgenError(
            f"{where}: this is no record of an outcome ({error}); delete the line, "
            "or name another log"
        ) from None


def _of_landscape(content: bytes, path: Path) -> list[Outcome]:
    try:
        found = value_of(dict[str, Any], parsed(content), "the file")
        if "outcomes" in found:
            return list(value_of(tuple[Outcome, ...], found["outcomes"], "outcomes"))
    except ValueError as error:
        raise FlashgenError(
            f"{path} is no file of outcomes ({error}): name one that "
            "has them, or a log of flashgen tune"
        ) from None
    raise FlashgenError(
        f"{path} has no outcomes of flashgen: name a log of flashgen tune --gpu, or a JSON "
        "file of outcomes"
    )
