"""The arguments of kernels by name, as far as several directions share them.

Launchers give every argument that a kernel of their direction may take. A kernel takes those that
its arg_names list, in that order; the others are dropped (kernels/plan.py).
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from flashgen.inputs.block_mask import BlockMask
from flashgen.inputs.features import Features
from flashgen.inputs.packed import Sequences
from flashgen.spec.features import PER_HEAD

logger = logging.getLogger("flashgen.kernels.launch")

LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453

Arguments = dict[str, Any]
"""A kernel's arguments by name."""

FAR_STRIDE = (1 << 31) // 256
"""Within a tile of at most 256 rows or keys, kernels count elements in 32 bits: rows of this stride
are too far apart."""


def strided(name: str, x: Tensor, dims: str | tuple[str, ...] = "bhs") -> Arguments:
    """The pointer and the strides of a tensor: q_ptr, stride_qb, stride_qh, stride_qs.

    dims: a suffix for each dimension that has a stride; a last dimension of stride 1 has none.
    """
    return dict(zip(_names(name, dims), (x, *x.stride()), strict=False))


@functools.cache
def _names(name: str, dims: str | tuple[str, ...]) -> tuple[str, ...]:
    return f"{name}_ptr", *(f"stride_{name}{dim}" for dim in dims)


def sizes(
    q: Tensor, v: Tensor, scale: float, diagonal: int | None, packed: Sequences | None
) -> Arguments:
    """The scale, lengths, heads and diagonal of a call of q (B, H, Sq, d) and v (B, Hkv, Sk, d_v).

    Packed sequences have lengths of their own: a kernel takes the longest, and for the diagonal at
    which end of a sequence it lies.
    """
    _, heads, seq_q, head_dim = q.shape
    _, kv_heads, seq_k, head_dim_v = v.shape
    arguments: Arguments = {
        "scale_log2e": scale * LOG2_E,
        "heads": heads,
        "group": heads // kv_heads,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
    }
    if packed is None:
        arguments["seq_q"], arguments["seq_k"] = seq_q, seq_k
        arguments["diagonal"] = seq_k - seq_q if diagonal is None else diagonal
        return arguments
    arguments["total_q"], arguments["total_k"] = seq_q, packed.most_keys(seq_k)
    arguments["seq_q"], arguments["seq_k"] = max(1, packed.max_q), max(1, packed.max_k)
    arguments["bottom_right"] = int(diagonal is None or packed.bottom_right)
    return arguments


def feature_arguments(
    features: Features,
    shape: tuple[int, int, int, int],
    device: torch.device,
    *,
    by_keys: bool = False,
) -> Arguments:
    """The arguments of the features of a call of shape (batch, heads, seq_q, seq_k).

    by_keys: the programs of the kernel own keys, and take those lists of a block mask.
    """
    batch, heads, seq_q, seq_k = shape
    arguments: Arguments = {}
    if features.bias is not None:
        bias = features.bias.resolve_neg()
        bias = bias if bias.stride(3) < FAR_STRIDE else bias.contiguous()
        bias = bias.expand(shape)
        bias = bias.view(torch.uint8) if bias.dtype is torch.bool else bias
        arguments |= strided("bias", bias, ("_b", "_h", "_q", "_k"))
    for name, row in PER_HEAD.items():
        if (x := getattr(features, name)) is None:
            continue
        if row.arguments[1:]:  # its strides
            x = near(x.resolve_neg()).expand(batch, heads)
            arguments |= strided(name, x, ("_b", "_h"))
        else:
            arguments[f"{name}_ptr"] = x.resolve_neg().contiguous()
    if features.rng is not None:
        arguments["rng_ptr"] = features.rng
        arguments["keep_threshold"] = features.dropout_threshold
        arguments["keep_scale"] = features.keep_scale
    if features.window is not None:
        arguments["window_left"], arguments["window_right"] = features.bounds(seq_q, seq_k)
    if features.chunk:
        start = features.chunk_start
        if start is None:
            start = torch.zeros(batch, dtype=torch.int32, device=device)
        arguments |= {"chunk": features.chunk, "chunk_start_ptr": start.resolve_neg().contiguous()}
    if features.softcap > 0.0:
        cap_log2e = features.softcap * LOG2_E
        arguments |= {"cap_log2e": cap_log2e, "inverse_cap": 1.0 / cap_log2e}
    if features.fp8 is not None:
        for x, factor in zip("qkv", features.fp8.factors, strict=True):
            arguments |= strided(f"{x}_descale", near(factor.resolve_neg()), ("_b", "_h"))
    if features.sequences is not None:
        arguments |= _sequence_arguments(features.sequences)
    if features.block_mask is not None:
        arguments |= _block_mask_arguments(features.block_mask, by_keys=by_keys)
    return arguments


def near(x: Tensor) -> Tensor:
    """x, copied where a kernel's 32 bits would not hold the offset of its last element."""
    if x.is_contiguous() and x.numel() < 1 << 31:
        return x
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return x.contiguous() if last >= 1 << 31 else x


def _sequence_arguments(packed: Sequences) -> Arguments:
    arguments: Arguments = {
        "q_begins_ptr": packed.q_begins.resolve_neg(),
        "q_ends_ptr": packed.q_ends.resolve_neg(),
        "k_begins_ptr": packed.k_begins.resolve_neg(),
        "k_ends_ptr": packed.k_ends.resolve_neg(),
        "sequences": packed.count,
    }
    if packed.block_table is not None:
        table = packed.block_table.resolve_neg()
        arguments |= {"table_ptr": table, "stride_table": table.stride(0)}
        arguments["page_bits"] = packed.page_bits
    return arguments


def _block_mask_arguments(mask: BlockMask, *, by_keys: bool) -> Arguments:
    side = mask.by_keys if by_keys else mask.by_rows
    *_, rows, keys = mask.shape
    step_b, step_h = mask.steps
    return {
        "block_counts_ptr": side.counts,
        "blocks_ptr": side.blocks,
        "block_tiles_ptr": side.tiles,
        "tiles_ptr": mask.tiles,
        "mask_step_b": step_b,
        "mask_step_h": step_h,
        "own_blocks": keys if by_keys else rows,
        "listed": rows if by_keys else keys,
    }


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Q and a scale above 0, as the kernels take it.

    q carries the sign of a negative scale; a scale of 0 makes q 0. Both are exact.
    """
    if scale > 0:
        return q, scale
    if q.element_size() == 1:  # torch cannot negate float8, whose sign is the highest bit
        turned = (q.view(torch.uint8) ^ 128).view(q.dtype)
        return (turned, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
    return (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)


def in_eights(x: Tensor) -> Tensor:
    """x, copied if its strides are no multiples of 8 elements: kernels of such head dims rely on
    it.
    """
    if lies_in_eights(x):
        return x
    _say_copied()
    return x.contiguous()


def lies_in_eights(x: Tensor) -> bool:
    """Whether all its strides but the last are multiples of 8 elements."""
    return all(
        length <= 1 or stride % 8 == 0
        for length, stride in zip(x.shape[:3], x.stride()[:3], strict=True)
    )


@functools.cache
def _say_copied() -> None:
    """Once a process, whatever the lengths."""
    logger.warning("tensors are copied whose strides are no multiples of 8 elements")


def empty_like_layout(q: Tensor, head_dim_v: int, dtype: torch.dtype | None = None) -> Tensor:
    """An O of shape (B, H, Sq, d_v) whose batch, head and seq dimensions lie in memory in q's
    order; of q's dtype unless another is given.
    """
    batch, heads, seq, _ = q.shape
    if heads > 1 and q.stride(1) < q.stride(2):  # (batch, seq, heads, head_dim) in memory
        return q.new_empty((batch, seq, heads, head_dim_v), dtype=dtype).transpose(1, 2)
    return q.new_empty((batch, heads, seq, head_dim_v), dtype=dtype)
