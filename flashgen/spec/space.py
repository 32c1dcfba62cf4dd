"""The search space of a spec: all legal configs in a fixed order, and the seeds to try first.

A decode streams K and V, so the bytes in flight decide its speed: stages and warps vary most. Its
rows are few, and 16 of them fill a matrix instruction. For how many blocks on an SM its keys are
split is not searched: search/evidence.py sets how many of the compiled kernel an SM holds.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import (
    AUTO_WARPS,
    BY_KEYS,
    MAXNREG,
    KernelConfig,
    Order,
)
from flashgen.spec.defaults import default_configs, default_spec
from flashgen.spec.gpu import Gpu
from flashgen.spec.legality import why_illegal
from flashgen.spec.vocabulary import DECODING, padded
from flashgen.spec.whole_rows import MMA_SYNC, why_no_rows
from flashgen.spec.whole_rows import on_gpu as in_whole_rows

DECODE_BR = (16, 32, 64)
DECODE_BC = (64, 128, 32, 16, 256)
DECODE_NUM_WARPS = (4, 8, 2, 1)
DECODE_NUM_STAGES = (3, 2, 4, 5, 1)

SEEDS = (
    # br, bc, num_warps, num_stages: tiles of 16 to 64 KiB on their way at a time, at head dim 128.
    # Chosen by that alone; none was timed.
    (16, 64, 4, 3),
    (16, 128, 4, 3),
    (16, 64, 4, 4),
    (16, 128, 8, 3),
    (16, 64, 2, 3),
    (16, 32, 4, 4),
    (16, 64, 4, 2),
    (16, 32, 4, 2),
)


Tile = tuple[int, int, int, int]
Choice = Mapping[str, Any]
"""Fields of a config that are chosen together."""


def _configs(tiles: Iterable[Tile], *choices: Iterable[Choice]) -> tuple[KernelConfig, ...]:
    """Each tile (br, bc, num_warps, num_stages) with each choice; the last varies fastest."""
    found = []
    for (br, bc, warps, stages), chosen in itertools.product(tiles, itertools.product(*choices)):
        fields = {name: value for choice in chosen for name, value in choice.items()}
        found.append(KernelConfig(br=br, bc=bc, num_warps=warps, num_stages=stages, **fields))
    return tuple(found)


@functools.cache
def decoding_grid(spec: AttentionSpec) -> tuple[KernelConfig, ...]:
    """All configs of a direction, legal or not, the likely ones first."""
    if spec.direction == "combine":
        return _configs(itertools.product((16,), (32, 16, 64, 128), (4, 2, 1, 8), (1,)))
    if spec.direction == "append":
        return _configs(itertools.product((16, 32), (16,), (4, 2, 1), (1,)))
    # Of an invariant spec rows are padded to wgmma's, and 128 of head dim 256 do not spill.
    br = (*DECODE_BR, 128) if spec.invariant else DECODE_BR
    configs = _configs(itertools.product(br, DECODE_BC, DECODE_NUM_WARPS, DECODE_NUM_STAGES))
    return configs if spec.kv_dtype != "float8_e4m3" else _both_ways(configs)


def decoding_seeds(spec: AttentionSpec) -> tuple[KernelConfig, ...]:
    """What a search tries first, legal or not; the split count by its rule."""
    if spec.direction != "decode":
        return ()
    # The loads of a block table run a stage ahead of the pages that they name.
    more = 1 if spec.paged else 0
    seeds = _configs((br, bc, warps, stages + more) for br, bc, warps, stages in SEEDS)
    return seeds if spec.kv_dtype != "float8_e4m3" else _both_ways(seeds)


def _both_ways(configs: tuple[KernelConfig, ...]) -> tuple[KernelConfig, ...]:
    """Each by the GPU's own instruction, where it has one, then each by bits."""
    return (*(replace(config, widening="native") for config in configs), *configs)


BR = (128, 64, 256, 32, 16)
BC = (64, 128, 32, 16, 256)
NUM_WARPS = (4, 8, 2)
NUM_STAGES = (2, 3, 1, 4)
ORDERS: tuple[Order, ...] = ("plain", "longest_first")
GPU_ORDERS: tuple[tuple[Order, bool], ...] = (
    ("grouped", False),
    ("grouped", True),
    ("longest_first", True),
    ("head_reversal", False),
    ("head_reversal", True),
    ("plain", True),
)
"""Order, and whether the grid is persistent: tried where a GPU measures."""
_WAYS: list[Choice] = [
    {"schedule": "fa2", "loads": "pointer"},
    {"schedule": "fa2", "loads": "descriptor"},
    {"schedule": "s_ahead", "loads": "descriptor"},
    {"schedule": "s_ahead", "loads": "pointer"},
]
"""fa1 is left out: it is there to be compared with, and has no parallelism over the rows."""

HOPPER_TILES: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    # br, bc, num_warps, num_stages. Compiled with Triton 3.7.1 for sm_90a, each is without spills
    # in a main loop for some head dim of 64 to 256; none was measured.
    "forward": (
        (128, 128, 8, 2),
        (192, 128, 12, 2),
        (128, 64, 8, 2),
        (192, 64, 12, 2),
        (128, 128, 8, 3),
        (192, 128, 12, 3),
        (128, 64, 8, 3),
        (192, 64, 12, 3),
        (128, 64, 8, 4),
        (192, 64, 12, 4),
    ),
    "backward_dq": (
        (128, 128, 8, 2),
        (128, 64, 8, 2),
        (192, 64, 12, 2),
        (128, 128, 8, 3),
        (128, 64, 8, 3),
        (192, 64, 12, 3),
        (192, 32, 12, 2),
        (128, 32, 8, 2),
    ),
    **dict.fromkeys(
        BY_KEYS,
        ((64, 128, 8, 2), (128, 128, 8, 2), (64, 64, 8, 2), (64, 128, 8, 3), (64, 128, 8, 4)),
    ),
}
"""Of schedule hopper, by direction: no interpreter runs it, so it is tried only where a GPU checks
and measures."""
HOPPER_SEEDS = 4
"""Of these, the first that are legal are tried first."""

BLACKWELL_TILES: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "forward": (
        (256, 128, 8, 4),
        (256, 128, 8, 3),
        (256, 128, 8, 2),
        (128, 128, 4, 2),
        (128, 64, 4, 4),
        (256, 64, 8, 4),
        (128, 64, 4, 3),
    ),
    "backward_dkv": (
        (128, 128, 8, 4),
        (128, 128, 8, 3),
        (128, 128, 8, 2),
        (64, 128, 8, 3),
        (64, 128, 8, 2),
    ),
    "backward_fused": ((128, 128, 8, 4), (128, 128, 8, 3), (128, 128, 8, 2)),
    "backward_dq": (
        (128, 128, 8, 4),
        (128, 128, 8, 3),
        (128, 128, 8, 2),
        (128, 64, 8, 3),
        (128, 64, 8, 2),
    ),
}
"""br, bc, num_warps, num_stages of schedule blackwell by direction, as HOPPER_TILES."""
BLACKWELL_WAYS = {
    "forward": ((4, 8), (8, 8), (0, 8), (6, 8), (4, 0)),
    **dict.fromkeys(("backward_dq", *BY_KEYS), ((0, 0), (4, 0), (8, 0))),
}
"""exp2_by_fma and rescale_log2 that are tried."""

AUTO_TILES = ((128, 128, 2), (128, 64, 3), (128, 64, 2), (64, 128, 2), (64, 64, 3), (64, 64, 2))
"""br, bc, num_stages of schedule auto. Compiled with Triton 3.6 to 3.9; none was measured."""

KNOWN_GOOD = (
    # br, bc, num_warps, num_stages: after what others publish for some GPU or head dim (PyTorch
    # FlexAttention's heuristics in torch 2.13, FlashAttention-2's launch templates), and the same
    # with fewer stages or rows, for GPUs with less shared memory.
    (128, 64, 8, 3),
    (128, 128, 8, 2),
    (128, 128, 8, 3),
    (128, 64, 4, 3),
    (64, 64, 4, 3),
    (128, 32, 4, 3),
    (128, 32, 8, 2),
    (64, 32, 4, 3),
    (128, 64, 8, 2),
    (64, 64, 4, 2),
    (64, 32, 4, 2),
    (32, 64, 4, 3),
)
"""Where programs own keys and walk the rows (BY_KEYS), br and bc change places here and above."""

MEASURED_TILES: Mapping[str, Mapping[int, Tile]] = {
    "sm_90": {64: (128, 64, 4, 3), 128: (64, 64, 4, 3)},
}
"""By architecture and padded head dim, the fastest tile of schedule fa2 in the forward that a GPU
measured, by descriptor: on an H200 on 26 November 2026, at 4,096 keys
(benchmarks/results/nvidia_h200). Features have fa2 alone, so there it is tried first."""

RDNA_TILES = ((64, 16, 4, 1), (32, 16, 4, 1), (32, 16, 8, 1))
"""br, bc, num_warps, num_stages of what is tried first where a thread of AMD has 256 registers:
larger tiles spill there. Compiled with Triton 3.7.1 for gfx1100 and gfx1201; most entries of the
forward and the backward of RX 7900 XTX and RX 9070 XT have one of them. None was measured."""

RDNA_DECODE_TILES = ((16, 32, 4, 3), (16, 16, 4, 1), (16, 16, 8, 1), (16, 64, 4, 3))
"""The same of decode."""

AMPERE_TILES = ((128, 64, 8), (64, 64, 4), (128, 128, 8), (128, 32, 8), (64, 32, 4))
"""br, bc, num_warps of schedule ampere. Compiled with Triton 3.7.1 for sm_80 and sm_89, each spills
little or nothing at some head dim; none was measured."""

IN_WHOLE_ROWS = ((128, 32, 8, 3), (128, 16, 8, 3), (128, 64, 8, 2), (64, 16, 4, 3))
"""br, bc, num_warps, num_stages of kernels with whole_rows. Compiled with Triton 3.7.1 for sm_80
and sm_89, they spill at most 1 % of a main loop's instructions; none was measured."""


def legal_configs(
    spec: AttentionSpec, gpu: Gpu, *, on_gpu: bool = False
) -> tuple[KernelConfig, ...]:
    """Every config of the space that why_illegal passes, the likely ones first.

    on_gpu: they will be checked and measured on that GPU. Only then the space has schedules hopper,
    blackwell and auto, before all others, and the orders of tiles that pay by the L2 and by
    persistence: no estimate ranks these.

    s_ahead by pointer is tried only where there are no descriptors, of packed sequences among them
    (their pointers keep the overlap at head dim 128): pointers take the registers
    that carry the next scores, and ptxas often gives up the overlap (kernels compiled for sm_90,
    Triton 3.7.1). That of the backward is tried where it was seen to bring something: on sm_90, by
    descriptor.
    """
    if spec.direction in DECODING:
        grid = (in_whole_rows(spec, each, gpu) for each in in_parts(spec, decoding_grid(spec)))
        return tuple(config for config in grid if why_illegal(spec, config, gpu) is None)
    found = (
        in_whole_rows(spec, config, gpu)
        for config in (
            *(_hopper_grid(spec.direction) if on_gpu else ()),
            *(_blackwell_grid(spec.direction) if on_gpu else ()),
            *(_auto_grid() if on_gpu else ()),
            *_ampere_grid(),
            *in_parts(spec, _grid(spec.direction in BY_KEYS, _rows_of_a_warp(spec))),
            *(
                _few_registers(_grid(False, _rows_of_a_warp(spec)))
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
    """Whether s_ahead may bring something there; True of all other schedules."""
    if config.schedule != "s_ahead":
        return True
    if spec.direction != "forward":
        return gpu.arch == "sm_90" and config.loads == "descriptor"
    tma = gpu.is_nvidia and gpu.capability >= 90 and not spec.varlen
    return not tma or config.loads == "descriptor"


def _rows_of_a_warp(spec: AttentionSpec) -> int:
    """The fewest rows or keys of a program that a warp must have: half of a matrix instruction's.
    Gradients of head dims above 256 leave room for 16 alone, whose columns the warps share.
    """
    wide = spec.direction != "forward" and max(spec.head_dim, spec.head_dim_v) > 256
    return 2 if wide else 8


def _ordered(orders: Iterable[Order]) -> list[Choice]:
    return [{"order": order} for order in orders]


_GPU_ORDERS: list[Choice] = [
    {"order": order, "persistent": persistent} for order, persistent in GPU_ORDERS
]


@functools.cache
def _grid(by_keys: bool, rows_of_a_warp: int) -> tuple[KernelConfig, ...]:
    """All combinations but those that leave warps without a row of what a program owns."""
    found: list[KernelConfig] = []
    for owned, walked, way in itertools.product(BR, BC, _WAYS):
        br, bc = (walked, owned) if by_keys else (owned, walked)
        warps = [each for each in NUM_WARPS if each <= owned // rows_of_a_warp]
        tiles = itertools.product((br,), (bc,), warps, NUM_STAGES)
        found += _configs(tiles, [way], _ordered(ORDERS))
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
def _auto_grid() -> tuple[KernelConfig, ...]:
    """Schedule auto in the tiles that Triton deals out to warps on some architecture."""
    tiles = [(br, bc, AUTO_WARPS, stages) for br, bc, stages in AUTO_TILES]
    auto: Choice = {"schedule": "auto", "loads": "descriptor"}
    return _configs(tiles, [auto], _ordered(reversed(ORDERS)))


@functools.cache
def _order_grid() -> tuple[KernelConfig, ...]:
    """The known-good tiles in the orders, and the persistent grids, that only a GPU can judge."""
    return _configs(KNOWN_GOOD, _WAYS, _GPU_ORDERS)


@functools.cache
def _ampere_grid() -> tuple[KernelConfig, ...]:
    """Schedule ampere in all its tiles and orders, the longest tiles of Q first where causal."""
    tiles = [(*tile, 1) for tile in AMPERE_TILES]
    return _configs(tiles, [{"schedule": "ampere"}], _ordered(reversed(ORDERS)))


@functools.cache
def _hopper_grid(direction: str) -> tuple[KernelConfig, ...]:
    """Schedule hopper in all its tiles and orders, the longest tiles of Q first where causal: first
    a tile a program, then the others.
    """
    tiles = HOPPER_TILES.get(direction, ())
    hopper: Choice = {"schedule": "hopper", "loads": "descriptor"}
    ahead: list[Choice] = [{"next_s": False}]
    if direction == "backward_fused":
        ahead.append({"next_s": True})
    return (
        *_configs(tiles, [hopper], _ordered(reversed(ORDERS)), ahead),
        *_configs(tiles, [hopper], _GPU_ORDERS, ahead),
    )


@functools.cache
def _blackwell_grid(direction: str) -> tuple[KernelConfig, ...]:
    """Schedule blackwell in all its tiles, ways and orders, the longest tiles of Q first where
    causal: first a tile a program, then the others.
    """
    tiles = BLACKWELL_TILES.get(direction, ())
    blackwell: Choice = {"schedule": "blackwell", "loads": "descriptor"}
    ways: list[Choice] = [
        {"exp2_by_fma": by_fma, "rescale_log2": lazy}
        for by_fma, lazy in BLACKWELL_WAYS.get(direction, ())
    ]
    return (
        *_configs(tiles, [blackwell], ways, _ordered(reversed(ORDERS))),
        *_configs(tiles, [blackwell], ways[:1], _GPU_ORDERS),
    )


def measured_seeds(spec: AttentionSpec, gpu: Gpu) -> tuple[KernelConfig, ...]:
    """The tile of MEASURED_TILES, by descriptor and by pointer, where it is legal."""
    tile = MEASURED_TILES.get(gpu.arch, {}).get(padded(spec.head_dim))
    if tile is None or spec.direction != "forward":
        return ()
    order: Order = "longest_first" if spec.causal else "plain"
    found = _configs([tile], reversed(_WAYS[:2]), _ordered([order]))
    return tuple(config for config in found if why_illegal(spec, config, gpu) is None)


def seed_configs(
    spec: AttentionSpec, gpu: Gpu, *, on_gpu: bool = False
) -> tuple[KernelConfig, ...]:
    """What every search tries first: what others chose, the FlashAttention paper's block rule, the
    default.

    All legal, none twice, the most promising first: where nothing can be timed, the first that is
    right is taken. The default comes with exact head dims: it stands for the kernel that would
    serve without a table. On a GPU with TMA the known-good tiles come in every schedule. on_gpu as
    in legal_configs: the first tiles of schedule hopper or blackwell that are legal lead.
    """
    rdna = gpu.arch.startswith("gfx1")
    if spec.direction in DECODING:
        known = (*in_parts(spec, decoding_seeds(spec)), tuned_default(spec, gpu))
        if rdna and spec.direction == "decode":
            known = (*in_parts(spec, _configs(RDNA_DECODE_TILES)), *known)
        return tuple(dict.fromkeys(c for c in known if why_illegal(spec, c, gpu) is None))
    ordered = spec.causal and spec.direction in ("forward", "backward_dq")
    order: Order = "longest_first" if ordered else "plain"
    specialized = (*_hopper_grid(spec.direction), *_blackwell_grid(spec.direction))
    hopper = (
        config
        for config in specialized
        if on_gpu and config.order == order and why_illegal(spec, config, gpu) is None
    )
    seeds = [*itertools.islice(hopper, HOPPER_SEEDS), *measured_seeds(spec, gpu)]
    known_good: Iterable[Tile] = (*RDNA_TILES, *KNOWN_GOOD) if rdna else KNOWN_GOOD
    if spec.direction in BY_KEYS:
        known_good = ((walked, owned, warps, stages) for owned, walked, warps, stages in known_good)
    seeds += _configs(known_good, _WAYS[:3], _ordered([order]))
    if spec.direction == "forward":
        seeds = [each for seed in seeds for each in (seed, *_few_registers((seed,)))]
        seeds.append(block_rule(spec, gpu))
    ampere = [config for config in _ampere_grid() if config.order == order]
    seeds = [*ampere, *_row_seeds(spec, gpu, order), *seeds]
    seeds = [in_whole_rows(spec, seed, gpu) for seed in seeds]
    seeds.append(tuned_default(spec, gpu))
    seeds = list(in_parts(spec, tuple(seeds)))
    seeds = [
        seed for seed in seeds if spec.direction == "forward" or _worth_trying(spec, seed, gpu)
    ]
    legal = [seed for seed in seeds if why_illegal(spec, seed, gpu) is None]
    return tuple(dict.fromkeys(legal))


def _row_seeds(spec: AttentionSpec, gpu: Gpu, order: Order) -> list[KernelConfig]:
    """The tiles of IN_WHOLE_ROWS where a product is split into parts."""
    tiles = list(_configs(IN_WHOLE_ROWS, _ordered([order])))
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
