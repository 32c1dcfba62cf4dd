"""The call that binds a launch, and those that repeat it, run few functions of flashgen: tests/call_counts.py."""

from __future__ import annotations

import sys

import pytest

from tests.call_counts import Counts, counted, counts_of, public_calls
from tests.makers import each

SECOND = (70, 15)
"""The most functions, and returns to a module that was left, of a call that equals an earlier one."""
KEPT = {
    "attention": (9, 1), "with_window": (15, 1), "decode": (11, 1), "decode_pages": (11, 1),
    "varlen": (15, 1),
}  # fmt: skip
"""Of a call whose launch is bound."""


@pytest.mark.parametrize("name", each(public_calls(), 2, "a second a call, to compile its kernel"))
def test_a_call_like_an_earlier_one_runs_few_functions(name: str) -> None:
    counts = counts_of(public_calls()[name])
    assert len(counts["second"].functions) < len(counts["first"].functions)
    for which, (functions, returns) in {"second": SECOND, "kept": KEPT[name]}.items():
        found = counts[which]
        assert 0 < len(found.functions) <= functions, f"{which} call: {found}\n{found.functions}"
        assert found.returns <= returns, f"{which} call: {found}\n{found.functions}"


def test_stays_and_returns_are_counted_by_module() -> None:
    calls = (("a", "f"), ("a", "g"), ("b", "h"), ("a", "f"), ("c", "k"), ("b", "h"))
    found = Counts(functions=calls)
    assert found.stays == ["a", "b", "a", "c", "b"]
    assert (found.rooms, found.returns) == (3, 2)


def test_functions_of_others_are_not_counted() -> None:
    assert counted(lambda: sorted([3, 1])).functions == ()
    assert sys.getprofile() is None
