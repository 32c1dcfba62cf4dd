"""The outcomes of a log, for whoever looks back at a search: read, never written, never locked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from flashgen.errors import FlashgenError, InvalidArgument
from flashgen.outcome import Outcome


def outcomes_of(path: Path, notice: Callable[[str], None]) -> list[Outcome]:
    """All outcomes of a log in their order, of whatever GPU, Triton and protocol.

    A last record that a kill has torn, or that a tuner is just writing, is left out with one
    notice. Raises InvalidArgument where there is no such file, FlashgenError where it cannot be
    read or a line is no outcome.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise InvalidArgument(
            f"{path}: there is no such log; flashgen tune writes .flashgen/<slug>.jsonl"
        ) from None
    except OSError as error:
        raise FlashgenError(f"{path} cannot be read: {error.strerror}") from None
    whole = content.rfind(b"\n") + 1
    found = [_parsed(line, path, n) for n, line in enumerate(content[:whole].splitlines(), 1)]
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
