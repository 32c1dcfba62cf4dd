"""The work of the blocks of a launch: trip counts of the main loops of each, and bytes moved by
all.

It repeats the loop bounds of the templates. The causal diagonal is the bottom-right one; windows
have the sizes that tuning uses, problem.tuned_limits, and a document of a block mask
TUNED_DOCUMENT.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import pairwise, zip_longest

from flashgen.errors import NoEstimate
from flashgen.schedules.base import BY_KEYS
from flashgen.schedules.config import SCHEDULES, KernelConfig
from flashgen.schedules.grid_rules import (
    gradient_heads_together,
    heads_together,
    splits_of,
    streamed,
)
from flashgen.schedules.legality import DS_TILE
from flashgen.schedules.numeric_class import SEGMENT, segments
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import (
    TUNED_DOCUMENT,
    TUNED_WINDOW,
    Problem,
    end_of_rows,
    first_key,
    sequences_of,
    tuned_reach,
)
from flashgen.spec.vocabulary import BLOCK, DECODING


def grid(
    spec: AttentionSpec, config: KernelConfig, problem: Problem, gpu: Gpu, *, loops: int
) -> list[tuple[int, ...]]:
    """Trip counts of the main loops, in order of address, for each tile in launch order: one a
    block, unless the grid is persistent (dealt_out, handed_out). The GPU's SMs decide how a decode
    is split, and how order grouped runs: of a forward, its L2.

    Raises NoEstimate for a number of loops that the template does not have, and for directions
    whose trip counts depend on the tensors.
    """
    if spec.direction in DECODING and spec.direction != "decode":
        raise NoEstimate(f"direction {spec.direction} has no main loop")
    if spec.fp8:
        raise NoEstimate("fp8 products have no rate in the model")
    known: tuple[int, ...] = (1, 2)
    if spec.hides_first_keys and not _branches(spec, config):
        known = _of_windows(spec, config)
    if loops not in known:
        has = " or ".join(map(str, known))
        raise NoEstimate(f"{loops} main loops were found in the SASS, the template has {has}")
    if spec.direction == "backward_dbias":
        raise NoEstimate("how often its loop turns depends on how the bias is broadcast")
    sequences = sequences_of(spec, problem)
    if config.order == "grouped" and spec.direction != "forward" and not spec.block_mask:
        return _grouped(spec, config, sequences, gpu, loops)
    blocks = [
        trips for sequence in sequences for trips in _blocks(spec, config, sequence, gpu, loops)
    ]
    return [trips for trips in blocks for _ in range(config.v_parts)]


def _of_windows(spec: AttentionSpec, config: KernelConfig) -> tuple[int, ...]:
    """The main loops of a kernel that hides first keys. The textbook's dK and dV mask all tiles."""
    if spec.direction == "backward_dq_of_ds":
        return (1,)
    if spec.direction not in BY_KEYS:
        return (1, 3)
    own = spec.direction in SCHEDULES[config.schedule].own_text
    return (1, 2, 3) if own else (1,)


Tiles = list[tuple[int, ...]]
"""Trip counts of tiles."""


def dealt_out(tiles: Sequence[tuple[int, ...]], programs: int) -> list[Tiles]:
    """The tiles of the programs of a persistent grid, of which each takes every n-th."""
    return [list(tiles[first::programs]) for first in range(min(programs, len(tiles)))]


def handed_out(tiles: Sequence[tuple[int, ...]], programs: int) -> list[Tiles]:
    """The same where the program that is the first to end its tile takes the next. A tile takes as
    long as its trips and one more.
    """
    free = [(0, program) for program in range(min(programs, len(tiles)))]
    found: list[Tiles] = [[] for _ in free]
    for trips in tiles:
        until, program = free[0]
        found[program].append(trips)
        heapq.heapreplace(free, (until + sum(trips) + 1, program))
    return found


def empty_programs(spec: AttentionSpec, config: KernelConfig, problem: Problem) -> int:
    """How many programs of a packed launch end at once: each sequence has as many as the longest,
    and grid() lists those that have a tile.
    """
    if not spec.varlen or config.persistent:
        return 0
    by_keys = spec.direction in BY_KEYS
    side, heads = (config.bc, problem.kv_heads) if by_keys else (config.br, problem.heads)

    def tiles(of: Problem) -> int:
        return math.ceil((of.seq_k if by_keys else of.seq_q) / side)

    have = sum(tiles(sequence) for sequence in sequences_of(spec, problem))
    return (problem.batch * tiles(problem) - have) * heads * config.v_parts


def _blocks(
    spec: AttentionSpec, config: KernelConfig, problem: Problem, gpu: Gpu, loops: int
) -> list[tuple[int, ...]]:
    """The trip counts of all blocks in launch order, of the parts of V the first alone."""
    by_keys = spec.direction in BY_KEYS
    if spec.direction == "decode":
        of_a_head = _by_splits(spec, config, problem, loops, gpu.sms)
        return of_a_head * (problem.batch * problem.kv_heads)
    if spec.block_mask:
        heads = problem.kv_heads if by_keys else problem.heads
        return _by_blocks(spec, config, problem, loops) * (problem.batch * heads)
    if by_keys:
        of_keys, heads = _by_keys(spec, config, problem, loops), problem.batch * problem.kv_heads
        if spec.direction == "backward_ds":
            return _in_turn([of_keys] * heads, heads)
        return of_keys * heads
    of_a_head = _by_rows(spec, config, problem, loops)
    return _in_order(spec, config, problem, of_a_head, gpu.l2_bytes)


def _in_turn(heads: Sequence[Tiles], together: int) -> Tiles:
    """The first tiles of all heads of a run, then those after them; then those of the next run."""
    return [
        trips
        for first in range(0, len(heads), together)
        for nth in zip_longest(*heads[first : first + together])
        for trips in nth
        if trips is not None
    ]


def _grouped(
    spec: AttentionSpec,
    config: KernelConfig,
    sequences: Sequence[Problem],
    gpu: Gpu,
    loops: int,
) -> Tiles:
    """The blocks of a gradient in order grouped. Heads of several packed sequences share a run; in
    a persistent grid they do not, which changes its time by less than 1 %.
    """
    by_keys, (first, *_) = spec.direction in BY_KEYS, sequences
    together = gradient_heads_together(first.group, gpu.sms, by_keys=by_keys)
    tiles_of = _by_keys if by_keys else _by_rows
    heads = [
        tiles_of(spec, config, each, loops)
        for each in sequences
        for _ in range(each.batch * (each.kv_heads if by_keys else each.heads))
    ]
    if by_keys:
        return _in_turn(heads, together)
    # The last tiles of the longest first: others have empty programs in their places.
    longest = max(map(len, heads), default=0)
    return [
        heads[head][row]
        for begin in range(0, len(heads), together)
        for row in reversed(range(longest))
        for head in range(begin, min(begin + together, len(heads)))
        if row < len(heads[head])
    ]


def _in_order(
    spec: AttentionSpec,
    config: KernelConfig,
    problem: Problem,
    of_a_head: list[tuple[int, ...]],
    l2_bytes: int,
) -> list[tuple[int, ...]]:
    """The blocks of all heads, as the template's order has them; of_a_head in plain order."""
    heads = problem.batch * problem.heads
    backwards = of_a_head[::-1]
    if config.order == "longest_first":
        return backwards * heads
    if config.order == "head_reversal":
        return (backwards + of_a_head) * (heads // 2) + backwards * (heads % 2)
    if config.order == "grouped":
        of_a_key = spec.element_bytes * (spec.head_dim + spec.head_dim_v)
        together = heads_together(of_a_key, problem.seq_k, problem.group, l2_bytes)
        return _in_turn([backwards] * heads, together)
    return of_a_head * heads


def _by_rows(
    spec: AttentionSpec, config: KernelConfig, problem: Problem, loops: int
) -> list[tuple[int, ...]]:
    """Forward and dQ: one block a tile of rows; the unmasked tiles of keys, then the masked ones. A
    window has masked ones before them, too, as key_range of templates/_scores.py.jinja has it; a
    loop that branches over its mask has all masked ones together. Those that a text has behind its
    loop, as it always runs them, are no trips.

    To close a segment of an invariant forward, and to fill the pipeline again, counts as a trip;
    where S runs ahead, as the one that it lacks.
    """
    br, bc, shift = config.br, config.bc, problem.seq_k - problem.seq_q
    its = SCHEDULES[config.schedule]
    right = TUNED_WINDOW if spec.hides_first_keys else problem.seq_q + problem.seq_k
    right = 0 if spec.causal else right
    found: list[tuple[int, ...]] = []
    for start in range(0, problem.seq_q, br):
        begin = full = 0
        end = math.ceil(min(max(start + br + shift + right, 0), problem.seq_k) / bc)
        if spec.hides_first_keys:
            begin = max(first_key(spec, start + shift), 0) // bc
            full = min(math.ceil(max(first_key(spec, start + br - 1 + shift), 0) / bc), end)
        last_whole = min(max(start + shift + right + 1, 0), problem.seq_k) // bc
        full_end = max(last_whole, full)
        closed = 0
        if not its.ahead:
            closed = _closed(spec, begin * bc, end * bc)
        if spec.direction == "forward" and its.last_apart and not spec.invariant:
            end = max(end - 1, 0)
            full_end = min(full_end, end)
        if its.masked_apart:
            limited = spec.causal or spec.hides_first_keys
            end = full_end = last_whole if limited else (problem.seq_k - 1) // bc
            full = min(full, end)
        trips: tuple[int, ...] = (full_end - full, end - full_end)
        if spec.hides_first_keys:
            first = max(full - begin, 0)
            branches = _branches(spec, config)
            trips = (trips[0], trips[1] + first) if branches else (first, *trips)
        found.append((sum(trips) + closed,) if loops == 1 else (trips[0] + closed, *trips[1:]))
    return found


def _branches(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Whether one loop walks all tiles and branches over its mask."""
    return spec.direction in SCHEDULES[config.schedule].mask_first


def _by_blocks(
    spec: AttentionSpec, config: KernelConfig, problem: Problem, loops: int
) -> list[tuple[int, ...]]:
    """Of documents under a causal mask: the tiles of whole blocks, then those of the one partial
    block, on the diagonal.
    """
    if problem.seq_q != problem.seq_k:
        raise NoEstimate("documents are tuned with as many queries as keys")
    by_keys = spec.direction in BY_KEYS
    own, walked = (config.bc, config.br) if by_keys else (config.br, config.bc)
    times = BLOCK // walked * (problem.group if by_keys else 1)
    found: list[tuple[int, ...]] = []
    for start in range(0, problem.seq_q, own):
        begin = start // TUNED_DOCUMENT * TUNED_DOCUMENT
        end = min(begin + TUNED_DOCUMENT, problem.seq_q)
        whole = (end - 1) // BLOCK - start // BLOCK if by_keys else (start - begin) // BLOCK
        trips = (whole * times, times)
        found.append((sum(trips),) if loops == 1 else trips)
    return found


def _closed(spec: AttentionSpec, begin: int, end: int) -> int:
    """The segments that an invariant forward closes for keys [begin, end)."""
    if not spec.invariant or spec.direction != "forward":
        return 0
    return max(math.ceil(end / SEGMENT) - begin // SEGMENT, 0)


def _by_keys(
    spec: AttentionSpec, config: KernelConfig, problem: Problem, loops: int
) -> list[tuple[int, ...]]:
    """For dK and dV: one block a tile of keys; the masked tiles of rows, then the unmasked ones, of
    every query head that shares the keys. With dS they begin and end with tiles of dS. Under a
    window the textbook masks all tiles; others have
    those that hide first keys in a loop of their own, the last, or with the masked ones.
    """
    group = problem.heads // max(1, problem.kv_heads)
    tiles = math.ceil(problem.seq_q / config.br)
    found: list[tuple[int, ...]] = []
    stored, side = spec.direction == "backward_ds", config.br
    for start in range(0, problem.seq_k, config.bc):
        first = full = 0
        shift = problem.seq_k - problem.seq_q
        least, last = start, start + config.bc - 1
        if stored:
            least, side = start // DS_TILE * DS_TILE, DS_TILE
            last = least + DS_TILE - 1
        if spec.causal:
            first = min(max(least - shift, 0) // side * side // config.br, tiles)
            full = math.ceil(max(start + config.bc - 1 - shift, 0) / config.br)
            full = max(min(full, tiles), first)
        if spec.hides_first_keys:
            right = 0 if spec.causal else TUNED_WINDOW
            first = max(least - shift - right, 0) // side * side // config.br
            end = math.ceil((end_of_rows(spec, last) - shift) / side) * side
            end = max(math.ceil(min(max(end, 0), problem.seq_q) / config.br), first)
            full = math.ceil(max(start + config.bc - 1 - shift - right, 0) / config.br)
            full = min(max(full, first), end)
            hiding = max(end_of_rows(spec, start) - shift, 0) // config.br
            hiding = min(max(hiding, full), end)
            trips = [group * n for n in (full - first, hiding - full, end - hiding)]
            if loops < 3:
                trips = [trips[0] + trips[2], trips[1]] if loops == 2 else [sum(trips)]
            found.append(tuple(trips))
            continue
        masked, unmasked = group * (full - first), group * (tiles - full)
        found.append((masked + unmasked,) if loops == 1 else (masked, unmasked))
    return found


def tuned_splits(spec: AttentionSpec, config: KernelConfig, problem: Problem, sms: int) -> int:
    """The splits of a decode as it is timed."""
    # Counted of all keys, or of what a window shows.
    stream = streamed(problem, tuned_reach(spec)) if spec.hides_first_keys else problem
    if spec.invariant:
        return segments(problem.seq_k, stream.seq_k)
    return splits_of(config, stream, sms)


def _by_splits(
    spec: AttentionSpec, config: KernelConfig, problem: Problem, loops: int, sms: int
) -> list[tuple[int, ...]]:
    """Decode: one block a split and tile of rows of a head of K and V; the unmasked tiles of its
    keys, then the masked ones. A window has masked ones before them, too. Every sequence has all
    the keys there is room for, as when it is timed.
    """
    splits = tuned_splits(spec, config, problem, sms)
    rows = math.ceil(problem.group * problem.seq_q / config.br)
    found: list[tuple[int, ...]] = []
    for split in range(splits):
        for row in range(rows):
            trips = _of_split(spec, config, problem, split, splits, row * config.br)
            found.append((sum(trips),) if loops == 1 else trips)
    return found


def _of_split(
    spec: AttentionSpec, config: KernelConfig, problem: Problem, split: int, splits: int, start: int
) -> tuple[int, ...]:
    """The trips of one split for the tile of rows from `start` on, of as many loops as the template
    has; places of keys are called as there.
    """
    bc, length, diagonal = config.bc, problem.seq_k, problem.seq_k - problem.seq_q
    first_query = start // problem.group
    last_query = min((start + config.br - 1) // problem.group, problem.seq_q - 1)
    key_begin, key_end, seen_by_all = 0, length, length
    if spec.causal or spec.hides_first_keys:
        right = diagonal + (0 if spec.causal else TUNED_WINDOW)
        seen_by_all = max(first_query + right + 1, 0)
    if spec.hides_first_keys:
        key_begin = max(first_key(spec, first_query + diagonal), 0) // bc * bc
        key_end = min(max(last_query + right + 1, 0), length)
    tiles = math.ceil(math.ceil((key_end - key_begin) / bc) / splits)
    tiles = max(tiles, config.split_keys // bc)
    split_start = key_begin + split * tiles * bc
    split_end = min(split_start + tiles * bc, key_end)
    if spec.invariant:
        segment = (key_begin // SEGMENT + split) * SEGMENT
        split_start, split_end = max(key_begin, segment), min(segment + SEGMENT, key_end)
    full_begin = split_start
    if spec.hides_first_keys:
        full_begin = math.ceil(max(first_key(spec, last_query + diagonal), 0) / bc) * bc
        full_begin = min(max(full_begin, split_start), split_end)
    full_end = max(min(split_end, seen_by_all) // bc * bc, full_begin)
    bounds = (split_start, full_begin, full_end, split_end)
    each = [max(math.ceil((end - begin) / bc), 0) for begin, end in pairwise(bounds)]
    return tuple(each if spec.hides_first_keys else each[1:])
