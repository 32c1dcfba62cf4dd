"""Sizes that find errors, more than tuning checks: every template passes them."""

from __future__ import annotations

from collections.abc import Iterator

from flashgen.evaluate.check_cache import DecodeCase
from flashgen.reference.cases import CheckCase
from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem


def nasty_cases(br: int, bc: int) -> tuple[CheckCase, ...]:
    """The shapes that find errors for tiles of br by bc: 1, a tile less one, a tile, one more,
    primes; Sq below and above Sk, both alignments, grouped heads, permuted and sliced memory.
    """

    def case(sq: int, sk: int, heads: int = 1, kv: int = 1, **options: str) -> CheckCase:
        problem = Problem(batch=1, heads=heads, kv_heads=kv, seq_q=sq, seq_k=sk)
        return CheckCase(problem=problem, **options)

    return (
        case(1, 1),
        case(br - 1, bc - 1),
        case(br, bc),
        case(br + 1, bc + 1, alignment="top_left"),
        case(1, 2 * bc + 1),
        case(br + 1, 1, alignment="top_left"),
        case(2 * br + 1, bc, layout="bshd"),  # bottom-right, Sq > Sk: rows that see nothing
        case(37, 3 * bc + 5, heads=4, kv=2, layout="bshd"),
        case(2 * br + 3, 2 * bc + 7, heads=3, kv=1, layout="sliced", alignment="top_left"),
        case(127, 131),
    )


def nasty_decode_cases(spec: AttentionSpec, config: KernelConfig) -> Iterator[DecodeCase]:
    """More than tuning checks: 1 to 8 query heads per head of K and V, 1 to 16 queries, pages of
    1, 16 and 256 keys, and among them the lengths that find errors.
    """
    bc = config.bc
    lengths = (0, 1, bc - 1, bc, bc + 1, 37, 2 * bc + 3)
    layouts = ("bhsd", "bshd", "sliced")
    for number, (group, seq_q) in enumerate(((1, 1), (2, 2), (3, 16), (5, 5), (8, 1), (8, 5))):
        for turn, page_size in enumerate((1, 16, 256)):
            if turn and not spec.paged and number > 2:
                continue  # the lengths were all had
            yield DecodeCase(
                lengths=lengths[turn::3],
                capacity=3 * bc + 1,
                seq_q=seq_q,
                kv_heads=1 + number % 2,
                group=group,
                splits=1 + number % 4,
                page_size=page_size,
                layout=layouts[number % 3],
                shared=number % 2 == 1,
            )
