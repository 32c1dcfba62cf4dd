"""Merging parts of the keys is associative: exactly, in every order, and as a prefix scan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from examples.papers import runs
from examples.papers.finding import EXACT, Figure, Finding, charted, check, line, tabled
from flashgen.reference.attention import max_abs
from flashgen.report.charts import Scale
from flashgen.runtime.eager.attention import attention
from flashgen.runtime.merge import merge


@dataclass(frozen=True, kw_only=True)
class State:
    """Softmax over some keys, exactly: the maximum score, the sum of 2^(score - maximum), and O
    not yet divided by the sum.
    """

    highest: int
    total: Fraction
    o: Fraction

    @property
    def result(self) -> Fraction:
        """The attention over these keys."""
        return self.o / self.total


def state_of(score: int, value: int) -> State:
    """That of one key: a whole score in units of ln 2, and its value."""
    return State(highest=score, total=Fraction(1), o=Fraction(value))


def merged(a: State, b: State) -> State:
    """Both, as FlashAttention rescales: to the larger maximum."""
    highest = max(a.highest, b.highest)
    left, right = Fraction(2) ** (a.highest - highest), Fraction(2) ** (b.highest - highest)
    return State(
        highest=highest, total=left * a.total + right * b.total, o=left * a.o + right * b.o
    )


def averaged(a: State, b: State) -> State:
    """Both, without rescaling: what must not be done."""
    return State(highest=max(a.highest, b.highest), total=a.total + b.total, o=a.result + b.result)


Merge = Callable[[State, State], State]


def bracketings(states: Sequence[State], how: Merge) -> Iterator[State]:
    """The results of all ways to put brackets around states in this order."""
    if len(states) == 1:
        yield states[0]
    for cut in range(1, len(states)):
        for left in bracketings(states[:cut], how):
            for right in bracketings(states[cut:], how):
                yield how(left, right)


def prefixes(states: Sequence[State]) -> tuple[list[State], int]:
    """The merge of the first 1, 2, ... states, and the number of rounds: a scan in which all merges
    of a round are independent (Hillis and Steele, Data Parallel Algorithms, 1986).
    """
    found, step, rounds = list(states), 1, 0
    while step < len(found):
        found = [
            merged(found[at - step], each) if at >= step else each for at, each in enumerate(found)
        ]
        step, rounds = 2 * step, rounds + 1
    return found, rounds


SCORES, VALUES = (0, 2, 1, 3), (3, 1, 4, 2)


def scan() -> Finding:
    """Four keys in all orders and bracketings, eight as a scan, and parts of a head in float64."""
    states = [state_of(score, value) for score, value in zip(SCORES, VALUES, strict=True)]
    every = [
        state for order in itertools.permutations(states) for state in bracketings(order, merged)
    ]
    wrong = {
        state.result
        for order in itertools.permutations(states)
        for state in bracketings(order, averaged)
    }
    weights = [Fraction(2) ** score for score in SCORES]
    direct = sum(w * v for w, v in zip(weights, VALUES, strict=True)) / sum(weights)
    long = [state_of((3 * n) % 7, n) for n in range(8)]
    in_rounds, rounds = prefixes(long)
    one_by_one = list(itertools.accumulate(long, merged))
    off = merging_error(5, orders=120)
    return Finding(
        checks=(
            check(
                "computed",
                f"{len(every)} orders and brackets of four keys give one result, {direct} exactly",
                {state.result for state in every} == {direct} and len(set(every)) == 1,
            ),
            check(
                "computed",
                f"without rescaling they give {len(wrong)} different results",
                len(wrong) > 1,
            ),
            check(
                "computed",
                f"{len(long)} prefixes in {rounds} rounds of independent merges, equal to "
                f"{len(long) - 1} merges one by one",
                in_rounds == one_by_one and 1 << rounds == len(long),
            ),
            check(
                "computed",
                f"flashgen.merge over 5 parts in 120 orders, in float64: error {off:.1e}",
                off < EXACT,
            ),
        ),
        figures=(
            _orders(states),
            charted(
                how=("computed",),
                title="Attention over the first keys, as a scan",
                caption="Eight keys. After round r each mark holds the merge of the last 2^r "
                "keys up to it. Three rounds give what seven merges in a row give.",
                x=Scale(name="keys", log=False, low=0.0, at=tuple(map(float, range(1, 9)))),
                y=Scale(name="O", log=False, low=0.0),
                lines=(
                    line("one by one", _results(one_by_one), closed=True),
                    line("scan, 3 rounds", _results(in_rounds), scattered=True),
                ),
            ),
        ),
        notes=(
            "A merge takes (m, l, O): the maximum, the sum and the output so far. It is "
            "associative and commutative, as addition is. So tiles may come in any order, and "
            "parts of the keys may be computed by different programs or GPUs.",
            "In floating point each order rounds differently. Only the last digits differ.",
        ),
    )


def _results(states: Sequence[State]) -> dict[int, float]:
    return {n: float(state.result) for n, state in enumerate(states, start=1)}


def _orders(states: Sequence[State]) -> Figure:
    a, b, c, d = states
    orders = {
        "((a b) c) d": merged(merged(merged(a, b), c), d),
        "a (b (c d))": merged(a, merged(b, merged(c, d))),
        "(a b) (c d)": merged(merged(a, b), merged(c, d)),
        "(d b) (c a)": merged(merged(d, b), merged(c, a)),
    }
    of_pairs = {"a b": merged(a, b), "c d": merged(c, d)}
    return tabled(
        how=("computed",),
        title="One result in every order",
        caption=f"Four keys a, b, c, d: scores {', '.join(map(str, SCORES))} in units of ln 2, "
        f"values {', '.join(map(str, VALUES))}. The weight of a key is 2^(score - m).",
        columns=("merged", "m", "l", "O, undivided", "O / l"),
        rows=[
            (name, *map(str, (s.highest, s.total, s.o, s.result)))
            for name, s in (of_pairs | orders).items()
        ],
    )


def merging_error(parts: int, orders: int = 1) -> float:
    """The error of O and LSE over the keys of a head in so many parts, merged in the first of all
    their orders; in float64.
    """
    of = runs.head(60, 16)
    q, k, v = of.q.double(), of.k.double(), of.v.double()
    pieces = [
        attention(q, some_k, some_v, scale=of.scale, diagonal=None)
        for some_k, some_v in zip(k.tensor_split(parts, 2), v.tensor_split(parts, 2), strict=True)
    ]
    exact = attention(q, k, v, scale=of.scale, diagonal=None)
    chosen = itertools.islice(itertools.permutations(pieces), orders)
    merges = [merge(order) for order in chosen]
    return max(
        max_abs(torch.as_tensor(found) - want)
        for pair in merges
        for found, want in zip(pair, exact, strict=True)
    )
