"""What the blocks of a launch do: how often each one's main loops turn, and the bytes of them all.

It says of the templates what their loops' bounds say; the causal diagonal is the bottom-right one,
and a window has the length that tuning runs, problem.TUNED_WINDOW, as a document of a block mask
has TUNED_DOCUMENT.
"""

from __future__ import annotations

import math

from flashgen.block_mask import BLOCK
from flashgen.config import BY_KEYS, KernelConfig
from flashgen.errors import NoEstimate
from flashgen.problem import TUNED_DOCUMENT, TUNED_WINDOW, Problem
from flashgen.spec import DECODING, AttentionSpec


def grid(
    spec: AttentionSpec, config: KernelConfig, problem: Problem, *, loops: int
) -> list[tuple[int, ...]]:
    """Trip counts of the main loops, in order of address, for each block in launch order.

    Raises NoEstimate for a number of loops that the template does not have, and for directions
    whose loops turn as often as the tensors say.
    """
    if spec.direction in DECODING:
        raise NoEstimate(
            f"{spec.direction} is bound by the bytes in flight to memory, which have no model"
        )
    by_keys = spec.direction in BY_KEYS
    known = (1, 3) if spec.window and not by_keys else (1,) if spec.window else (1, 2)
    if loops not in known:
        has = " or ".join(map(str, known))
        raise NoEstimate(f"{loops} main loops were found in the SASS, the template has {has}")
    if spec.direction == "backward_dbias":
        raise NoEstimate("how often its loop turns depends on how the bias is broadcast")
    if spec.block_mask:
        heads = problem.kv_heads if by_keys else problem.heads
        return _by_blocks(spec, config, problem, loops) * (problem.batch * heads)
    if by_keys:
        return _by_keys(spec, config, problem, loops) * (problem.batch * problem.kv_heads)
    return _by_rows(spec, config, problem, loops) * (problem.batch * problem.heads)


def _by_rows(
    spec: AttentionSpec, config: KernelConfig, problem: Problem, loops: int
) -> list[tuple[int, ...]]:
    """Forward and dQ: one block a tile of rows; the unmasked tiles of keys, then the masked ones. A
    window has masked ones before them, too.

    s_ahead runs its last tile after the loops.
    """
    if spec.window:
        return _by_rows_of_window(spec, config, problem, loops)
    found: list[tuple[int, ...]] = []
    for start in range(0, problem.seq_q, config.br):
        whole, end = problem.seq_k, problem.seq_k
        if spec.causal:
            shift = problem.seq_k - problem.seq_q
            end = min(max(start + config.br + shift, 0), end)
            whole = min(max(start + shift + 1, 0), whole)
        tiles, unmasked = math.ceil(end / config.bc), whole // config.bc
        if config.schedule == "s_ahead":
            tiles = max(tiles - 1, 0)
            unmasked = min(unmasked, tiles)
        found.append((tiles,) if loops == 1 else (unmasked, tiles - unmasked))
    return found[::-1] if config.order == "longest_first" else found


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


def _by_rows_of_window(
    spec: AttentionSpec, config: KernelConfig, problem: Problem, loops: int
) -> list[tuple[int, ...]]:
    """As key_window of templates/_masks.py.jinja has it."""
    br, bc, shift = config.br, config.bc, problem.seq_k - problem.seq_q
    right = 0 if spec.causal else TUNED_WINDOW
    found: list[tuple[int, ...]] = []
    for start in range(0, problem.seq_q, br):
        begin = max(start + shift - TUNED_WINDOW, 0) // bc
        end = math.ceil(min(max(start + br + shift + right, 0), problem.seq_k) / bc)
        full = min(math.ceil(max(start + br - 1 + shift - TUNED_WINDOW, 0) / bc), end)
        full_end = max(min(max(start + shift + right + 1, 0), problem.seq_k) // bc, full)
        trips = (max(full - begin, 0), full_end - full, end - full_end)
        found.append((sum(trips),) if loops == 1 else trips)
    return found[::-1] if config.order == "longest_first" else found


def _by_keys(
    spec: AttentionSpec, config: KernelConfig, problem: Problem, loops: int
) -> list[tuple[int, ...]]:
    """For dK and dV: one block a tile of keys; the masked tiles of rows, then the unmasked ones, of
    every query head that shares the keys. Under a window all tiles are masked.
    """
    group = problem.heads // max(1, problem.kv_heads)
    tiles = math.ceil(problem.seq_q / config.br)
    found: list[tuple[int, ...]] = []
    for start in range(0, problem.seq_k, config.bc):
        first = full = 0
        shift = problem.seq_k - problem.seq_q
        if spec.causal:
            first = min(max(start - shift, 0) // config.br, tiles)
            full = math.ceil(max(start + config.bc - 1 - shift, 0) / config.br)
            full = max(min(full, tiles), first)
        if spec.window:
            right = 0 if spec.causal else TUNED_WINDOW
            first = max(start - shift - right, 0) // config.br
            end = min(max(start + config.bc - shift + TUNED_WINDOW, 0), problem.seq_q)
            found.append((group * max(math.ceil(end / config.br) - first, 0),))
            continue
        masked, unmasked = group * (full - first), group * (tiles - full)
        found.append((masked + unmasked,) if loops == 1 else (masked, unmasked))
    return found


def bytes_moved(spec: AttentionSpec, problem: Problem) -> float:
    """Bytes that pass between memory and L2 at least: each tensor once.

    A bias is taken to be the same for all batches and heads.
    """
    rows = problem.batch * problem.heads * problem.seq_q
    keys = problem.batch * problem.kv_heads * problem.seq_k
    dims = spec.head_dim + spec.head_dim_v
    elements = {
        "forward": (rows + keys) * dims,  # Q, O; K, V
        "backward_delta": 2 * rows * spec.head_dim_v,  # O, dO
        "backward_dkv": (rows + 2 * keys) * dims,  # Q, dO; K, V, dK, dV
        "backward_dq": (rows + keys) * dims + rows * spec.head_dim,  # Q, dO, dQ; K, V
        "backward_fused": (rows + 2 * keys) * dims + 2 * rows * spec.head_dim,  # dQ in float32
        "backward_dbias": (rows + keys) * dims,
        "decode": (rows + keys) * dims,
        "combine": rows * spec.head_dim_v,
        "append": 2 * problem.batch * problem.kv_heads * dims,
    }[spec.direction]
    once = spec.direction in ("forward", "backward_delta", *DECODING)
    of_a_row = 4.0 if once else 8.0  # LSE, delta
    if spec.direction == "combine":  # seq_k parts, in float32
        of_a_row += 4.0 * problem.seq_k * (spec.head_dim_v + 1)
    bias = 0.0
    if spec.bias != "none":
        bias = problem.seq_q * problem.seq_k * (1 if spec.bias == "boolean" else spec.element_bytes)
    return elements * spec.element_bytes + rows * of_a_row + bias
