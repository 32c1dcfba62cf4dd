"""README and docs/ are plain English: no words of our own, and no long sentences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST_WORDS = 25
INSTEAD = {
    r"is told by|are told by": "depends on, is keyed by",
    r"held against": "validated on, compared with",
    r"warps with roles": "warp specialization",
    r"settled once": "cached, launch-bound",
    r"beside (it|them|the|that|a)\b": "compared with, next to, in addition to",
    r"is asked for|was asked for|are asked for|what is asked": "requested, what to compute",
    r"\bmend\b": "remedy, repair",
    r"has room|room for|make room": "fits, holds",
    r"is had|are had": "exists, is available",
    r"for want of": "because ... is missing",
    r"no knowledge": "mean nothing",
    r"heeded": "used",
    r"wears off": "fades",
    r"a kind that is kept|kinds are kept": "cached, entries are stored",
    r"how right is right|what goes with what": "numerics, combinations",
}
"""A phrase that must not come back, and what to write."""


def prose(page: Path) -> str:
    """The sentences of a page: no code, tables, headings, comments, or targets of links."""
    text = re.sub(r"^```.*?^```", "\n\n", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^(\||#).*$", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "code", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def sentences(text: str) -> list[str]:
    """The sentences and list items of a text."""
    blocks = re.split(r"\n\s*\n|^\s*(?:-|\d+\.) ", text, flags=re.MULTILINE)
    return [
        part for block in blocks for part in re.split(r"(?<=[.?!:;])\s", " ".join(block.split()))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_phrase_of_our_own(page: Path) -> None:
    text = " ".join(prose(page).lower().split())
    found = [(p, text[max(0, m.start() - 40) : m.end() + 20])
             for p in INSTEAD for m in re.finditer(p, text)]  # fmt: skip
    assert not found, "\n".join(f"{where!r}: write {INSTEAD[p]}" for p, where in found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_sentence_is_longer_than_the_most(page: Path) -> None:
    long = [each for each in sentences(prose(page)) if len(each.split()) > MOST_WORDS]
    assert long == []


def test_a_long_sentence_is_seen() -> None:
    assert (
        max(len(each.split()) for each in sentences("word " * 41 + "end. Short one.")) > MOST_WORDS
    )
    assert [each for each in sentences("- one\n- two\n\nthree; four") if each] == [
        "one", "two", "three;", "four",
    ]  # fmt: skip
