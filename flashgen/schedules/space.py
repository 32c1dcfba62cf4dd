"""The search space of a spec: all legal configs in a fixed order, and the seeds to try first."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from flashgen.schedules import decode, textbook
from flashgen.schedules.base import (
    BY_KEYS,
    MAXNREG,
    MMA_SYNC,
    FieldChoice,
    Order,
    Schedule,
    TileShape,
)
from flashgen.schedules.config import SCHEDULES, KernelConfig
from flashgen.schedules.defaults import default_configs, default_spec
from flashgen.schedules.legality import ORDERS_OF, why_illegal
from flashgen.schedules.textbook import WAYS
from flashgen.schedules.whole_rows import on_gpu as in_whole_rows
from flashgen.schedules.whole_rows import why_no_rows
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.vocabulary import DECODING, Direction, padded

GPU_ORDERS: tuple[tuple[Order, bool], ...] = (
    ("grouped", False),
    ("grouped", True),
    ("longest_first", True),
    ("head_reversal", False),
    ("head_reversal", True),
    ("plain", True),
)
"""Order, and whether the grid is persistent: of a forward, tried where a GPU measures. Of gradients
that have such a grid, those that it has."""
FIRST_EARLY = 4
"""Of the configs of a decode without a seed, the first whose combine kernel may start early."""
FIRST_OF_ROLES = 4
"""Of the tiles of a schedule in Gluon whose warps have roles, the first that are legal are tried
first."""


def _configs(
    tiles: Iterable[TileShape], *choices: Iterable[FieldChoice]
) -> tuple[KernelConfig, ...]:
    """Each tile (br, bc, num_warps, num_stages) with each choice; the last varies fastest."""
    found = []
    for (br, bc, warps, stages), chosen in itertools.product(tiles, itertools.product(*choices)):
        fields = {name: value for choice in chosen for name, value in choice.items()}
        found.append(KernelConfig(br=br, bc=bc, num_warps=warps, num_stages=stages, **fields))
    return tuple(found)


@functools.cache
def decoding_grid(spec: AttentionSpec) -> tuple[KernelConfig, ...]:
    """All configs of a direction of a cache, legal or not, the likely ones first."""
    return tuple(c for way in decode.ways(spec) for c in _configs(decode.tiles(spec), [way]))


def decoding_seeds(spec: AttentionSpec) -> tuple[KernelConfig, ...]:
    """What a search tries first, legal or not; the split count by its rule."""
    return tuple(c for way in decode.ways(spec) for c in _configs(decode.seeds(spec), [way]))


def legal_configs(
    spec: AttentionSpec, gpu: Gpu, *, on_gpu: bool = False
) -> tuple[KernelConfig, ...]:
    """Every config of the space that why_illegal passes, the likely ones first.

    on_gpu: they will be checked and measured on that GPU. Only then the space has schedules whose
    warps have roles, before all others, the orders of tiles that pay by the L2 and by persistence,
    and decodes whose combine kernel starts early: no estimate ranks these.
    """
    if spec.direction in DECODING:
        grid = (in_whole_rows(spec, each, gpu) for each in in_parts(spec, decoding_grid(spec)))
        legal = tuple(config for config in grid if why_illegal(spec, config, gpu) is None)
        likely = [each for each in decoding_seeds(spec) if each in legal] or legal[:FIRST_EARLY]
        early = (replace(config, pdl=True) for config in likely if on_gpu)
        return (*legal, *(each for each in early if why_illegal(spec, each, gpu) is None))
    found = (
        in_whole_rows(spec, config, gpu)
        for config in (
            *(
                config
                for schedule in OWN_TILES
                if on_gpu or not schedule.roles
                for config in _own_grid(schedule, spec.direction)
            ),
            *in_parts(spec, _grid(spec.direction, _rows_of_a_warp(spec))),
            *(
                _few_registers(_grid("forward", _rows_of_a_warp(spec)))
                if spec.direction == "forward"
                else ()
            ),
            *(_order_grid() if on_gpu and spec.direction == "forward" else ()),
        )
        if _worth_trying(spec, config, gpu)
    )
    legal = tuple(config for config in found if why_illegal(spec, config, gpu) is None)
    if spec.invariant and not legal:  # the class may have a single tile, which no grid has
        default = tuned_default(spec, gpu)
        return (default,) if why_illegal(spec, default, gpu) is None else ()
    return legal


def _worth_trying(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> bool:
    return SCHEDULES[config.schedule].worth_trying(spec, config, gpu)


def _rows_of_a_warp(spec: AttentionSpec) -> int:
    """The fewest rows or keys of a program that a warp must have: half of a matrix instruction's.
    Gradients of head dims above 256 leave room for 16 alone, whose columns the warps share.
    """
    wide = spec.direction != "forward" and max(spec.head_dim, spec.head_dim_v) > 256
    return 2 if wide else 8


def _orders(direction: Direction) -> tuple[Order, ...]:
    """Those that an estimate ranks: plain, then others, the likeliest under a causal mask last. Not
    those of a forward that pay by the L2.
    """
    has = ORDERS_OF.get(direction, ())
    return ("plain", *(has[:1] if direction == "forward" else has))


def likely_order(spec: AttentionSpec) -> Order:
    """The likeliest order."""
    return _orders(spec.direction)[-1] if spec.causal else "plain"


def _ordered(orders: Iterable[Order]) -> list[FieldChoice]:
    return [{"order": order} for order in orders]


_GPU_ORDERS: list[FieldChoice] = [
    {"order": order, "persistent": persistent} for order, persistent in GPU_ORDERS
]


@functools.cache
def _grid(direction: Direction, rows_of_a_warp: int) -> tuple[KernelConfig, ...]:
    """All combinations but those that leave warps without a row of what a program owns."""
    by_keys = direction in BY_KEYS
    orders = _ordered(dict.fromkeys(("plain", _orders(direction)[-1])))
    found: list[KernelConfig] = []
    for owned, walked, way in itertools.product(textbook.BR, textbook.BC, WAYS):
        br, bc = (walked, owned) if by_keys else (owned, walked)
        warps = [each for each in textbook.NUM_WARPS if each <= owned // rows_of_a_warp]
        tiles = itertools.product((br,), (bc,), warps, textbook.NUM_STAGES)
        found += _configs(tiles, [way], orders)
    return tuple(found)


@functools.cache
def _few_registers(configs: tuple[KernelConfig, ...]) -> tuple[KernelConfig, ...]:
    """Those of 8 warps that load by descriptor, with maxnreg: two blocks share an SM."""
    return tuple(
        replace(config, maxnreg=MAXNREG[-1])
        for config in configs
        if config.num_warps == 8 and config.loads == "descriptor"
    )


@functools.cache
def _order_grid() -> tuple[KernelConfig, ...]:
    """The known-good tiles in the orders, and the persistent grids, that only a GPU can judge."""
    return _configs(textbook.KNOWN_GOOD, WAYS, _GPU_ORDERS)


OWN_TILES = tuple(each for each in SCHEDULES.values() if each.gluon or each.roles)
"""Schedules that are tried in their own tiles alone."""


@functools.cache
def _own_grid(schedule: Schedule[Any], direction: Direction) -> tuple[KernelConfig, ...]:
    """A schedule in its own tiles, ways and orders, the longest tiles first where causal:
    first a tile a program, then the others.
    """
    tiles, ways = schedule.tiles.get(direction, ()), schedule.ways.get(direction, ({},))
    own: list[FieldChoice] = [{"schedule": schedule.name, "loads": schedule.loads}]
    several = ways, schedule.gpu_ways.get(direction, ())
    orders = _ordered(reversed(_orders(direction)))
    found = [c for each in several for c in _configs(tiles, own, each, orders)]
    if direction == "forward" and schedule.orders:
        found += _configs(tiles, own, ways[:1], _GPU_ORDERS)
    if direction in schedule.hands_out_gradients:
        found += _configs(tiles, own, ways[:1], [o for o in _GPU_ORDERS if o["persistent"]])
    return tuple(found)


def measured_seeds(spec: AttentionSpec, gpu: Gpu) -> tuple[KernelConfig, ...]:
    """The tile of textbook.MEASURED_TILES, by descriptor and by pointer, where it is legal."""
    tile = textbook.MEASURED_TILES.get(gpu.arch, {}).get(padded(spec.head_dim))
    if tile is None or spec.direction != "forward":
        return ()
    found = _configs([tile], reversed(WAYS[:2]), _ordered([likely_order(spec)]))
    return tuple(config for config in found if why_illegal(spec, config, gpu) is None)


def own_seeds(spec: AttentionSpec, gpu: Gpu, *, roles: bool = False) -> tuple[KernelConfig, ...]:
    """The legal tiles of schedules in Gluon, whose warps do the same work or have roles, in the
    order that is tried first. Those without roles are few: five of schedule ampere.
    """
    order = likely_order(spec)
    found = (
        config
        for schedule in OWN_TILES
        if schedule.gluon and bool(schedule.roles) == roles
        for config in _own_grid(schedule, spec.direction)
        if config.order == order
    )
    return tuple(config for config in found if why_illegal(spec, config, gpu) is None)


def seed_configs(
    spec: AttentionSpec, gpu: Gpu, *, on_gpu: bool = False
) -> tuple[KernelConfig, ...]:
    """What every search tries first: what others chose, the FlashAttention paper's block rule, the
    default.

    All legal, none twice, the most promising first: where nothing can be timed, the first that is
    right is taken. The default comes with exact head dims: it stands for the kernel that would
    serve without a table. On a GPU with TMA the known-good tiles come in every schedule. on_gpu as
    in legal_configs: the first legal tiles of a schedule whose warps have roles lead.
    """
    rdna = gpu.arch.startswith("gfx1")
    if spec.direction in DECODING:
        known = (*in_parts(spec, decoding_seeds(spec)), tuned_default(spec, gpu))
        if rdna and spec.direction == "decode":
            known = (*in_parts(spec, _configs(decode.RDNA_TILES)), *known)
        return tuple(dict.fromkeys(c for c in known if why_illegal(spec, c, gpu) is None))
    order = likely_order(spec)
    of_roles = own_seeds(spec, gpu, roles=True)[:FIRST_OF_ROLES] if on_gpu else ()
    seeds = [*of_roles, *measured_seeds(spec, gpu)]
    known_good = (*(textbook.RDNA_TILES if rdna else ()), *textbook.KNOWN_GOOD)
    seeds += _configs(textbook.turned(known_good, spec.direction), WAYS[:3], _ordered([order]))
    if spec.direction == "forward":
        seeds = [each for seed in seeds for each in (seed, *_few_registers((seed,)))]
        seeds.append(block_rule(spec, gpu))
    seeds = [*own_seeds(spec, gpu), *_row_seeds(spec, gpu, order), *seeds]
    seeds = [in_whole_rows(spec, seed, gpu) for seed in seeds]
    seeds.append(tuned_default(spec, gpu))
    seeds = list(in_parts(spec, tuple(seeds)))
    seeds = [
        seed for seed in seeds if spec.direction == "forward" or _worth_trying(spec, seed, gpu)
    ]
    legal = [seed for seed in seeds if why_illegal(spec, seed, gpu) is None]
    return tuple(dict.fromkeys(legal))


def _row_seeds(spec: AttentionSpec, gpu: Gpu, order: Order) -> list[KernelConfig]:
    """The tiles of textbook.IN_WHOLE_ROWS where a product is split into parts."""
    tiles = list(_configs(textbook.IN_WHOLE_ROWS, _ordered([order])))
    return tiles if in_whole_rows(spec, tiles[0], gpu).whole_rows else []


def in_parts(spec: AttentionSpec, configs: tuple[KernelConfig, ...]) -> tuple[KernelConfig, ...]:
    """The configs, and where V is wider than 256 first those that have it in parts. Those of an
    invariant decode follow from head dim 128 on: whole_rows may lack the registers for 256.
    """
    wide = padded(spec.head_dim_v) > 256
    if spec.invariant and spec.direction == "decode" and not wide and spec.head_dim_v > 64:
        return tuple(replace(config, v_parts=parts) for parts in (1, 2) for config in configs)
    if not wide or spec.direction not in ("forward", "decode"):
        return configs
    return tuple(replace(config, v_parts=parts) for parts in (2, 4, 1) for config in configs)


def tuned_default(spec: AttentionSpec, gpu: Gpu | None = None) -> KernelConfig:
    """The config of the default that runs untuned on a GPU, with the spec's head dims known when
    compiling: the baseline of a search. Without a GPU, the one that runs on all of them.
    """
    fitted = (replace(each, head_dims="exact") for each in default_configs(default_spec(spec)))
    rows = gpu is not None and gpu.arch in MMA_SYNC
    usable = [each for each in fitted if rows or not each.whole_rows]
    if gpu is not None and spec.invariant:  # whose class is another where mma.sync multiplies
        usable = [each for each in usable if why_illegal(spec, each, gpu) is None] or usable
    return next(each for each in usable if why_no_rows(spec, each) is None)


def block_rule(spec: AttentionSpec, gpu: Gpu) -> KernelConfig:
    """The tile of FlashAttention-1 (arXiv 2205.14135, Algorithm 1, line 1), as a legal config.

    B_c = ceil(M / 4d) and B_r = min(B_c, d), M the shared memory in elements; each rounded down to
    a power of two within 16..256, then bc halved until the config is legal.
    """
    elements = gpu.shared_per_block // spec.element_bytes
    columns = math.ceil(elements / (4 * spec.head_dim))
    br, bc = _power_below(min(columns, spec.head_dim)), _power_below(columns)
    config = KernelConfig(br=br, bc=bc, num_warps=4 if br >= 32 else 2, num_stages=2)
    while why_illegal(spec, config, gpu) is not None and config.bc > 16:
        config = replace(config, bc=config.bc // 2)
    return config


def _power_below(value: int) -> int:
    return min(256, max(16, 1 << (value.bit_length() - 1)))
