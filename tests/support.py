"""Writes docs/support.md: which features combine, and how many kernels of the tests prove it.

    python -m tests.support          write it
    python -m tests.support --check  fail if it is out of date

A cell counts the kernels of tests/pairs.py with that combination, each compared with float64; or it
refers to the sentence below the table with which flashgen refuses the combination. It is an error if
a combination renders and no test kernel has it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashgen.errors import FlashgenError, InvalidArgument
from flashgen.kernels.render import render
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig
from flashgen.spec.defaults import default_config, default_spec
from flashgen.spec.features import FEATURE_WORDS, KV_WORDS, masks_of
from flashgen.spec.gpu import TARGETS
from flashgen.spec.legality import why_illegal
from tests.pairs import ATTENTION, CACHE, H200, Proven, alone, in_pairs, spec_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "support.md"
COMMAND = "python -m tests.support"
Fields = dict[str, Any]
FEATURES: dict[str, Fields] = {
    word: {row.field: row.value} | ({"mask": row.mask} if row.mask else {})
    for word, row in FEATURE_WORDS.items()
}
IN_A_CACHE: dict[str, Fields] = {
    "paged": {"paged": True},
    "rotary halves": {"rotary": "halves"},
    "rotary interleaved": {"rotary": "interleaved"},
    "indexed": {"indexed": True},
    "leftpad": {"leftpad": True},
    **{
        f"kv {word}": {"kv_dtype": dtype, "kv_scales": scales, "paged": scales == "page"}
        for word, (dtype, scales) in KV_WORDS.items()
    },
}
WAYS: dict[str, Fields] = {
    "fa2": {},
    "fa2, descriptor": {"loads": "descriptor"},
    "fa2, longest_first": {"order": "longest_first"},
    "fa2, head_reversal": {"order": "head_reversal"},
    "fa2, grouped": {"order": "grouped"},
    "fa2, persistent": {"persistent": True},
    "s_ahead": {"schedule": "s_ahead"},
    "s_ahead, descriptor": {"schedule": "s_ahead", "loads": "descriptor"},
    "auto": {"schedule": "auto", "loads": "descriptor"},
    "hopper": {"schedule": "hopper", "loads": "descriptor"},
    "hopper, head_reversal": {
        "schedule": "hopper",
        "loads": "descriptor",
        "order": "head_reversal",
    },
    "hopper, grouped": {"schedule": "hopper", "loads": "descriptor", "order": "grouped"},
    "hopper, persistent": {"schedule": "hopper", "loads": "descriptor", "persistent": True},
    "fa1": {"schedule": "fa1"},
}
DTYPES = ("float16", "bfloat16", "float32", "tf32")


class Notes:
    """The sentences below a table, each once, by number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, sentence: str) -> str:
        """The cell of a refused combination: the number of its sentence."""
        sentence = sentence.split(": got")[0]
        number = self._numbers.setdefault(sentence, len(self._numbers) + 1)
        return f"[{number}]"

    def lines(self) -> list[str]:
        """The sentences."""
        return [f"{number}. {text}" for text, number in self._numbers.items()]


def page() -> str:
    """The whole text."""
    parts = [
        "# Feature combinations",
        f"<!-- {COMMAND} writes this page. -->",
        "A number is how many test kernels have that combination. `make test-all` compares each with float64 in Triton's\n"
        "interpreter (tests/pairs.py). A number in brackets is the sentence with which flashgen refuses the combination.\n"
        "Combinations of more features render as long as no two of them are refused.",
        "## Features by kernel",
        *_by_kernel({"no feature": {}, "causal": {"mask": "causal"}, **FEATURES}, ATTENTION["direction"]),
        "## Over a cache",
        *_by_kernel({"no feature": {}, "causal": {"mask": "causal"}, **FEATURES, **IN_A_CACHE}, CACHE["direction"]),
        "## Features in pairs",
        *_pairs(),
        "## Features by schedule and loads",
        "Forward, bfloat16, head dim 64, for an H200. \"yes\": the combination renders. Its tests are\n"
        "`tests/interpreted/kernels/test_kernels.py` and `test_orders.py`, and for `hopper`, which no interpreter runs,\n"
        "`tests/cpu/kernels/test_hopper_forward.py`. `auto` is tested only on a GPU.",
        *_ways(),
        "## Dtypes by GPU",
        "The default kernel of head dim 128.",
        *_dtypes(),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _by_kernel(rows: dict[str, Fields], directions: Sequence[str]) -> list[str]:
    def cell(row: str, column: str, notes: Notes) -> str:
        fields = {"direction": column, **rows[row]}
        if column == "backward_dbias":
            fields.setdefault("bias", "additive")
        return _count(fields, notes)

    return _table("", list(rows), list(directions), cell)


def _pairs() -> list[str]:
    names = list(FEATURES)

    def cell(row: str, column: str, notes: Notes) -> str:
        if names.index(column) >= names.index(row):
            return ""
        both, clash = {**FEATURES[row], **FEATURES[column]}, FEATURES[row].keys() & FEATURES[column]
        if clash:
            return notes.mark(f"{row} and {column} are values of one field, {clash.pop()}")
        return _count({"direction": "forward", **both}, notes)

    return _table("", names[1:], names[:-1], cell)


def _ways() -> list[str]:
    def cell(row: str, column: str, notes: Notes) -> str:
        mask = masks_of([column] if column in FEATURES else [])[-1]
        fields = {"direction": "forward", "mask": mask, **FEATURES.get(column, {})}
        spec = _spec(fields | {"dims": (64, 64)})
        config = KernelConfig(br=128, bc=64, num_warps=8, num_stages=2, **WAYS[row])
        if config.schedule == "auto":
            config = replace(config, br=64, num_warps=4)
        reason = why_illegal(spec, config, H200)
        if reason is not None:
            return notes.mark(reason.replace(f" ({column})", ""))
        render(spec, config)
        return "yes"

    return _table("", list(WAYS), ["no feature", *FEATURES], cell)


def _dtypes() -> list[str]:
    def cell(row: str, column: str, notes: Notes) -> str:
        spec = default_spec(_spec({"direction": "forward", "dtype": column, "dims": (128, 128)}))
        reason = why_illegal(spec, default_config(spec), TARGETS[row])
        return "yes" if reason is None else notes.mark(reason)

    return _table("", list(TARGETS), list(DTYPES), cell)


def _count(fields: Fields, notes: Notes) -> str:
    """How many test kernels have these fields of a spec, or the mark of a refusal."""
    try:
        spec = _spec(fields)
    except InvalidArgument as error:
        return notes.mark(str(error))
    config = next((c for s, c in _all() if s.direction == spec.direction), None)
    reason = f"no test kernel has direction {spec.direction}" if config is None else (
        why_illegal(spec, config, H200)
    )  # fmt: skip
    if reason is not None or config is None:
        return notes.mark(str(reason))
    render(spec, config)
    plain = not spec.feature_words and not spec.paged and spec.rotary == "none"
    found = sum(
        all(getattr(s, name) == value for name, value in fields.items())
        and not (plain and (s.feature_words or s.paged or s.rotary != "none"))
        for s, _ in _all()
    )
    if not found:
        raise FlashgenError(f"tests/pairs.py has no kernel with {fields}, which renders")
    return str(found)


def _spec(fields: Fields) -> AttentionSpec:
    return spec_of({"dtype": "bfloat16", "dims": (32, 32), "mask": "none", **fields})


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
