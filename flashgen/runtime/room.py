"""Room: which decode kernels have tiles for all rows of a head, the queries that share its keys."""

from __future__ import annotations

from dataclasses import replace

from flashgen.config import KernelConfig, kernel_name
from flashgen.default_tiles import WIDEST_DECODE
from flashgen.gpu import Gpu
from flashgen.legality import why_illegal
from flashgen.runtime.select import Selection


def rows_together(rows: int) -> int:
    """The br of a rendered default for so many rows: a power of two, from 16 to WIDEST_DECODE."""
    return min(WIDEST_DECODE, max(16, 1 << (max(rows, 1) - 1).bit_length()))


def widened(selection: Selection, rows: int, gpu: Gpu) -> Selection:
    """A rendered default with room for all rows of a head, as far as it may have it, and with the
    GPU's own widening of float8 elements; any other selection as it is.
    """
    choice = selection.choice
    if selection.rung != "rendered":
        return selection
    if choice.spec.kv_dtype == "float8_e4m3":
        native = replace(choice.config, widening="native")
        if why_illegal(choice.spec, native, gpu) is None:
            choice = replace(choice, config=native, kernel=kernel_name(choice.spec, native))
            selection = replace(selection, choice=choice)
    for br in (64, 32):
        config: KernelConfig = replace(choice.config, br=br)
        if br <= rows_together(rows) and why_illegal(choice.spec, config, gpu) is None:
            name = kernel_name(choice.spec, config)
            return replace(selection, choice=replace(choice, config=config, kernel=name))
    return selection


def by_room(selection: Selection, rows: int) -> tuple[int, ...]:
    """Orders the defaults of one precision, and nothing else: first the narrowest that has room for
    all rows of a head, of those that have none the widest; of two as wide that with an instruction
    of the GPU's own.
    """
    if selection.rung != "default":
        return (selection.rung == "rendered",)
    config, wanted = selection.choice.config, rows_together(rows)
    place = (config.br < wanted, abs(config.br - wanted), config.widening != "native")
    return 0, selection.choice.spec.precision == "ieee", *place
