"""Room: which decode kernels have tiles for all rows of a head, the queries that share its keys."""

from __future__ import annotations

from flashgen.default_tiles import WIDEST_DECODE
from flashgen.runtime.select import Selection


def rows_together(rows: int) -> int:
    """The br that has room for so many rows: a power of two, from 16 to WIDEST_DECODE."""
    return min(WIDEST_DECODE, max(16, 1 << (max(rows, 1) - 1).bit_length()))


def by_room(selection: Selection, rows: int) -> tuple[int, ...]:
    """Orders the defaults of one precision, there or rendered on demand, and nothing else: first
    the narrowest that has room for all rows of a head, of those that have none the widest; of two
    as wide that with an instruction of the GPU's own.
    """
    if selection.rung not in ("default", "rendered"):
        return (0,)
    config, wanted = selection.choice.config, rows_together(rows)
    place = (config.br < wanted, abs(config.br - wanted), config.widening != "native")
    return 1, selection.choice.spec.precision == "ieee", selection.rung == "rendered", *place
