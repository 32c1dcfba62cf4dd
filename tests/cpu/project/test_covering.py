"""tests/covering.py: no pair that can be had is missed."""

from __future__ import annotations

import itertools

from tests.covering import Row, all_pairs, covering, pairs_of

FACTORS = {"a": (0, 1, 2), "b": (0, 1, 2), "c": (0, 1), "d": (False, True)}


def allowed(row: Row) -> bool:
    """No pair of a and b that sums to 4, and d with c alone."""
    return row["a"] + row["b"] != 4 and not (row["d"] and not row["c"])


def test_every_pair_that_a_valid_row_holds_is_covered() -> None:
    rows = covering(FACTORS, allowed)
    assert all(allowed(row) for row in rows)
    covered = {pair for row in rows for pair in pairs_of(row)}
    product = (
        dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())
    )
    possible = {pair for row in product if allowed(row) for pair in pairs_of(row)}
    assert covered == possible
    assert possible < set(all_pairs(FACTORS))
    assert len(rows) < 16  # of 25 valid ones


def test_it_is_the_same_every_time() -> None:
    assert covering(FACTORS, allowed) == covering(FACTORS, allowed)
