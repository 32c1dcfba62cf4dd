"""Searches that are done, kept in a file: a benchmark that was cut off goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.recorded import Landscape, dump

SEARCH = Path(__file__).resolve().parents[1] / "flashgen" / "search"


def digest_of_search() -> str:
    """Changes with the code of flashgen's own search."""
    names = ("acquisition", "minimize", "points", "sampler", "study", "surrogate")
    paths = [SEARCH / f"{name}.py" for name in names]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]


def digest_of(landscape: Landscape) -> str:
    """Changes with the content of a landscape."""
    return hashlib.sha256(dump(landscape).encode()).hexdigest()[:12]


class Runs:
    """Regrets of searches by key, one line of JSON each. Without a path nothing is kept.

    A line that was cut off is left out, and its search is repeated.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[tuple[str, ...], tuple[float, ...]] = {}
        if path is not None and path.exists():
            text = path.read_text()
            for line in text[: text.rfind("\n") + 1].splitlines():
                record = json.loads(line)
                self._known[tuple(record["key"])] = _all(record["steps"], record["evaluations"])
            if not text.endswith("\n"):
                path.write_text(text[: text.rfind("\n") + 1])

    def get(self, key: tuple[str, ...]) -> tuple[float, ...] | None:
        """The regrets after 1, 2, ... evaluations of a search that is done."""
        return self._known.get(key)

    def add(self, key: tuple[str, ...], regrets: Sequence[float]) -> None:
        """Keep the regrets of a search."""
        self._known[key] = tuple(regrets)
        if self._path is None:
            return
        steps = [
            (number, regret)
            for number, regret in enumerate(regrets)
            if number == 0 or regret != regrets[number - 1]
        ]
        line = json.dumps({"key": key, "evaluations": len(regrets), "steps": steps})
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(line + "\n")


def _all(steps: Sequence[tuple[int, float]], evaluations: int) -> tuple[float, ...]:
    """The regret after each evaluation, from the places where it changes."""
    ends = [*(place for place, _ in steps[1:]), evaluations]
    return tuple(
        regret for (place, regret), end in zip(steps, ends, strict=True) for _ in range(end - place)
    )
