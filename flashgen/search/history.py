"""Reads the outcomes of a log or a landscape, without writing or locking."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from flashgen.errors import FlashgenError, InvalidArgument
from flashgen.files import whole_lines
from flashgen.spec.outcome import Outcome


def outcomes_of(path: Path, notice: Callable[[str], None]) -> list[Outcome]:
    """All outcomes of a log in their order, of any GPU, Triton and protocol; also those of a file
    of benchmarks/landscape.py (.json).

    An incomplete last record, torn by a kill or still being written, is left out with one notice.
    Raises InvalidArgument if there is no such file, FlashgenError if it cannot be read or a line is
    no outcome.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise InvalidArgument(
            f"{path}: there is no such log; flashgen tune writes .flashgen/<slug>.jsonl"
        ) from None
    except OSError as error:
        raise FlashgenError(f"{path} cannot be read: {error.strerror}") from None
    if path.suffix == ".json":
        return _of_landscape(content, path)
    lines, whole = whole_lines(content)
    found = [_parsed(line, path, n) for n, line in enumerate(lines, 1)]
    if whole < len(content):
        notice(f"{path}: the last record is torn; it is left out")
    return found


def _parsed(line: bytes, path: Path, number: int) -> Outcome:
    try:
        return Outcome.from_json(json.loads(line))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FlashgenError(
            f"{path}, line {number}: this is no record of an outcome ({error}); "
            f"name a log that flashgen tune wrote, or delete the line"
        ) from None


def _of_landscape(content: bytes, path: Path) -> list[Outcome]:
    try:
        return [Outcome.from_json(record) for record in json.loads(content)["outcomes"]]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FlashgenError(
            f"{path} is no file of outcomes ({type(error).__name__}: {error}): name one that "
            "benchmarks/landscape.py wrote, or a log of flashgen tune"
        ) from None
