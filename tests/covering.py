"""Covering arrays: few rows in which every pair of values of two factors occurs, where it may.

The greedy search of AETG (Cohen, Dalal, Fredman and Patton, IEEE TSE 23(7), 1997): each row starts
from a pair not covered yet and is the best of some random completions.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]
TRIES = 800
"""Completions of a pair that are tried. A pair that none of them makes valid is left out."""
TRIES_OF_A_VALUE = 2000
"""Completions of one value that are tried, before all its pairs are left out."""
COMPARED = 12
"""Valid completions of a pair, of which the one is taken that covers the most."""


def covering(
    factors: Mapping[str, Sequence[Any]], valid: Callable[[Row], bool], seed: int = 0
) -> list[Row]:
    """Rows that together hold every pair of values that some valid row can hold; the same for the
    same arguments.
    """
    draw = random.Random(seed)

    def completed(fixed: Row, tries: int) -> Iterator[Row]:
        """Valid rows with these values."""
        for _ in range(tries):
            row = {name: _drawn(draw, values) for name, values in factors.items()} | fixed
            if valid(row):
                yield row

    possible = {
        name: [v for v in values if any(completed({name: v}, TRIES_OF_A_VALUE))]
        for name, values in factors.items()
    }
    missing = dict.fromkeys(all_pairs(possible))
    rows: list[Row] = []
    while missing:
        pair = next(iter(missing))
        found = list(itertools.islice(completed(dict(pair), TRIES), COMPARED))
        del missing[pair]  # covered now, or held by no valid row
        if found:
            best = max(found, key=lambda row: sum(p in missing for p in pairs_of(row)))
            rows.append(best)
            for covered in pairs_of(best):
                missing.pop(covered, None)
    return rows


def _drawn(draw: random.Random, values: Sequence[Any]) -> Any:
    """The first value, which asks for nothing, every third time: so more rows are valid."""
    if draw.random() < 1 / 3:
        return values[0]
    count = len(values)  # from here on draw.choice, which is half of the search, in line
    bits = count.bit_length()
    while (at := draw.getrandbits(bits)) >= count:
        pass
    return values[at]


def all_pairs(factors: Mapping[str, Sequence[Any]]) -> list[Pair]:
    """Every pair of values of two factors."""
    return [
        ((a, x), (b, y))
        for a, b in itertools.combinations(factors, 2)
        for x, y in itertools.product(factors[a], factors[b])
    ]


def pairs_of(row: Row) -> list[Pair]:
    """The pairs that a row holds, as all_pairs has them."""
    return list(itertools.combinations(row.items(), 2))
