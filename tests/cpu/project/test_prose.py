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
    """The sentences and list items of a text: only . ? and ! end a sentence, in bold too."""
    blocks = re.split(r"\n\s*\n|^\s*(?:-|\d+\.) ", text, flags=re.MULTILINE)
    return [
        part for block in blocks for part in re.split(r"(?<=[.?!])\**\s", " ".join(block.split()))
    ]


def words_at_once(sentence: str) -> int:
    """The words that a reader must keep in mind: a list of three or more items counts item by item.

    A list follows a colon, its items separated by commas or semicolons; or it is the whole
    sentence, separated by semicolons.
    """
    before, _, after = sentence.partition(": ")
    parts = [sentence]
    if len(items := re.split(r"[,;] ", after)) > 2:
        parts = [before, *items]
    elif len(items := sentence.split("; ")) > 2:
        parts = items
    return max(len(part.split()) for part in parts)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_phrase_of_our_own(page: Path) -> None:
    text = " ".join(prose(page).lower().split())
    found = [(p, text[max(0, m.start() - 40) : m.end() + 20])
             for p in INSTEAD for m in re.finditer(p, text)]  # fmt: skip
    assert not found, "\n".join(f"{where!r}: write {INSTEAD[p]}" for p, where in found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_sentence_is_longer_than_the_most(page: Path) -> None:
    long = [each for each in sentences(prose(page)) if words_at_once(each) > MOST_WORDS]
    assert long == []


def test_sentences_are_counted() -> None:
    long = "word " * 13
    assert [each for each in sentences("One. **Two.** Three?\n- four: five; six") if each] == [
        "One.", "**Two.", "Three?", "four: five; six",
    ]  # fmt: skip
    for end in "?!":
        assert len(sentences(f"One{end} Two")) == 2
    assert words_at_once(f"{long}end.") == 14
    for mark in ",:;":
        assert words_at_once(f"{long}end{mark} {long}end") > MOST_WORDS
    assert words_at_once(f"Not a list: {long}, {long}") > MOST_WORDS
    assert words_at_once(f"A list: {long}, {long}; {long}") <= MOST_WORDS
    assert words_at_once(f"{long}; {long}; {long}") <= MOST_WORDS
    assert words_at_once(f"{long}, {long}, {long}") > MOST_WORDS
