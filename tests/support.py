"""Writes the end of docs/features.md: which features combine.

    python -m tests.support          write it
    python -m tests.support --check  fail if it is out of date

"yes": kernels of tests/pairs.py have that combination, each compared with float64. A number is the
sentence below the table with which flashgen refuses it. It is an error if a combination renders and
no test kernel has it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from flashgen.errors import FlashgenError, InvalidArgument
from flashgen.kernels.render import render
from flashgen.schedules.legality import why_illegal
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.features import FEATURE_WORDS, KV_WORDS
from tests.pairs import H200, Proven, alone, config_of, in_pairs, spec_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "features.md"
COMMAND = "python -m tests.support"
MARKER = f"<!-- {COMMAND} writes the rest of this page. -->"
Fields = dict[str, Any]
FEATURES: dict[str, Fields] = {
    word: {row.field: row.value} | ({"mask": row.mask} if row.mask else {})
    for word, row in FEATURE_WORDS.items()
}
IN_A_CACHE: dict[str, Fields] = {
    "paged": {"paged": True},
    "indexed": {"indexed": True},
    "leftpad": {"leftpad": True},
    **{
        f"kv {word}": {"kv_dtype": dtype, "kv_scales": scales, "paged": scales == "page"}
        for word, (dtype, scales) in KV_WORDS.items()
    },
}


class Notes:
    """The sentences below a table, each once, by number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, sentence: str) -> str:
        """The cell of a refused combination: the number of its sentence."""
        sentence = sentence.split(": got")[0]
        number = self._numbers.setdefault(sentence, len(self._numbers) + 1)
        return f"no [{number}]"

    def lines(self) -> list[str]:
        """The sentences."""
        return [f"{number}. {text}" for text, number in self._numbers.items()]


def page() -> str:
    """The whole text: what stands before the marker, and the tables."""
    kernels = {
        "forward": "forward",
        "gradient of Q, K, V": "backward_dkv",
        "gradient of a bias": "backward_dbias",
        "decode": "decode",
    }
    rows = {"causal": {"mask": "causal"}, **FEATURES}
    parts = [
        PAGE.read_text().partition(MARKER)[0] + MARKER,
        "## What combines",
        "Tests compare every combination that says yes with float64. A number after a no is the sentence below the table with\n"
        "which flashgen refuses it. Three or more features combine if each two of them do.",
        *_by_kernel(rows, kernels),
        "`decode` and `append` take these caches: " + ", ".join(f"`{w}`" for w in _caches()) + ". With two features, the forward:",
        *_pairs(),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _by_kernel(rows: dict[str, Fields], directions: dict[str, str]) -> list[str]:
    def cell(row: str, column: str, notes: Notes) -> str:
        fields = {"direction": directions[column], **rows[row]}
        if fields["direction"].startswith("backward"):
            fields.pop("sink", None)  # a backward kernel knows a sink by its LSE
        if fields["direction"] == "backward_dbias":
            fields.setdefault("bias", "additive")
        return _verdict(fields, notes)

    return _table("", list(rows), list(directions), cell)


def _caches() -> list[str]:
    """The kinds of caches, each proven in both directions."""
    for fields in IN_A_CACHE.values():
        for direction in ("decode", "append"):
            if direction == "decode" or "leftpad" not in fields:
                assert _verdict({"direction": direction, **fields}, Notes()) == "yes"
    return list(IN_A_CACHE)


def _pairs() -> list[str]:
    names = list(FEATURES)

    def cell(row: str, column: str, notes: Notes) -> str:
        if names.index(column) >= names.index(row):
            return ""
        both, clash = {**FEATURES[row], **FEATURES[column]}, FEATURES[row].keys() & FEATURES[column]
        if clash:
            return notes.mark(f"{row} and {column} are values of one field, {clash.pop()}")
        return _verdict({"direction": "forward", **both}, notes)

    return _table("", names[1:], names[:-1], cell)


def _verdict(fields: Fields, notes: Notes) -> str:
    """ "yes" if test kernels have these fields of a spec, or the mark of a refusal."""
    try:
        spec = _spec(fields)
    except InvalidArgument as error:
        return notes.mark(str(error))
    config = next((c for s, c in _all() if s.direction == spec.direction), None)
    if spec.invariant:  # whose tile is that of its class
        config = config_of(_row_of(fields))
    reason = f"no test kernel has direction {spec.direction}" if config is None else (
        why_illegal(spec, config, H200)
    )  # fmt: skip
    if reason is not None or config is None:
        return notes.mark(str(reason))
    render(spec, config)
    if not any(all(getattr(s, name) == value for name, value in fields.items()) for s, _ in _all()):
        raise FlashgenError(f"tests/pairs.py has no kernel with {fields}, which renders")
    return "yes"


def _spec(fields: Fields) -> AttentionSpec:
    return spec_of(_row_of(fields))


def _row_of(fields: Fields) -> Fields:
    return {"dtype": "bfloat16", "dims": (32, 32), "mask": "none", **fields}


def _all() -> tuple[Proven, ...]:
    return (*alone(), *in_pairs())


def _table(
    corner: str, rows: list[str], columns: list[str], cell: Callable[[str, str, Notes], str]
) -> list[str]:
    notes = Notes()
    lines = [_row([corner, *columns]), _row(["---"] * (len(columns) + 1))]
    for row in rows:
        lines.append(_row([f"`{row}`", *(cell(row, column, notes) for column in columns)]))
    below = "\n".join(notes.lines())
    return ["\n".join(lines), *([below] if below else [])]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str]) -> int:
    """Write or check; the exit code."""
    text = page()
    if "--check" not in arguments:
        PAGE.write_text(text)
        return 0
    if PAGE.is_file() and PAGE.read_text() == text:
        return 0
    print(f"{PAGE.name} is out of date: run {COMMAND}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
