"""Attention over caches, rotation and appending keys, in torch operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from flashgen.errors import InvalidArgument
from flashgen.inputs.cache import Cache
from flashgen.inputs.features import PLAIN, Features
from flashgen.runtime.eager import attention as eager

LARGEST: dict[torch.dtype, float] = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The largest element of an 8-bit cache, by its type."""


def quantized(x: Tensor, dtype: torch.dtype) -> Tensor:
    """X as elements of an 8-bit cache: rounded to nearest even, saturating."""
    if dtype == torch.int8:
        return x.nan_to_num().round().clamp(-128, 127).to(dtype)
    return x.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def scale_of(scale: Tensor, pages: Tensor | None) -> Tensor:
    """A cache's scale, broadcast to K or V (Hkv, S, dim) of a sequence; pages (S): those of its
    keys.
    """
    if scale.ndim == 1 or pages is None:
        return scale[:, None, None]
    return scale[pages].transpose(0, 1)[..., None]


def row_of(cache: Cache, number: int) -> int:
    """The row of k and v of a sequence. Reads rows, so it synchronizes with a GPU. Raises
    InvalidArgument for a row that does not exist.
    """
    if cache.rows is None:
        return number
    row, rows = int(cache.rows[number]), cache.k.shape[0]
    if not 0 <= row < rows:
        raise InvalidArgument(
            f"cache_batch_idx must name rows of the cache, 0 to {rows - 1}: got {row}"
        )
    return row


def pages_of(cache: Cache, number: int, first: int, end: int) -> Tensor:
    """The page of each position [first, end) of a sequence, (end - first,). Reads the block
    table, so it synchronizes with a GPU.
    """
    assert cache.block_table is not None
    places = torch.arange(first, end, device=cache.k.device)
    pages, held_ = cache.block_table[number].long()[places >> cache.page_bits], cache.k.shape[0]
    if end > first and not 0 <= int(pages.min()) <= int(pages.max()) < held_:
        raise InvalidArgument(
            f"block_table must name pages of the pool, 0 to {held_ - 1}, for all keys of a "
            f"sequence: got {int(pages.min())} to {int(pages.max())}"
        )
    return pages


def held(cache: Cache) -> list[tuple[int, int]]:
    """The positions [first, end) at which each sequence has keys. Reads the lengths, so it
    synchronizes with a GPU.
    """
    ends = [min(max(length, 0), cache.capacity) for length in cache.lengths.tolist()]
    firsts = [0] * len(ends) if cache.leftpad is None else cache.leftpad.tolist()
    return [(min(max(first, 0), end), end) for first, end in zip(firsts, ends, strict=True)]


def sequence(cache: Cache, number: int, length: int) -> tuple[Tensor, Tensor]:
    """K (1, Hkv, length, d) and V (1, Hkv, length, d_v) of the first positions of one sequence."""
    if cache.block_table is None:
        row = row_of(cache, number)
        return cache.k[row : row + 1, :, :length], cache.v[row : row + 1, :, :length]
    pages = pages_of(cache, number, 0, length)[:: cache.k.shape[2]]

    def gathered(pool: Tensor) -> Tensor:
        taken = pool[pages].transpose(0, 1)  # (Hkv, pages, page_size, dim)
        return taken.reshape(1, pool.shape[1], -1, pool.shape[3])[:, :, :length]

    return gathered(cache.k), gathered(cache.v)


def widened(cache: Cache, number: int, length: int) -> tuple[Tensor, Tensor]:
    """sequence(), for an 8-bit cache in float32: elements times their scales."""
    k, v = sequence(cache, number, length)
    if cache.k_scale is None or cache.v_scale is None:
        return k, v
    pages = None if cache.block_table is None else pages_of(cache, number, 0, length)
    return k.float() * scale_of(cache.k_scale, pages), v.float() * scale_of(cache.v_scale, pages)


def sequences(
    q: Tensor, cache: Cache, features: Features = PLAIN
) -> Iterator[tuple[int, Tensor, Tensor, Tensor, Features]]:
    """The number of each sequence, its Q (1, H, Sq, d), K, V and features, for all keys that it
    has. Reads the lengths, so it synchronizes with a GPU.
    """
    for number, (first, end) in enumerate(held(cache)):
        k, v = (x[:, :, first:] for x in widened(cache, number, end))
        own = sequence_features(features, number, first, end)
        yield number, q[number : number + 1], k, v, own


def sequence_features(features: Features, number: int, first: int, end: int) -> Features:
    """The features of one sequence of a batch, whose keys are at positions [first, end)."""
    if features is PLAIN:
        return features
    bias = features.bias
    if bias is not None:
        bias = bias if bias.shape[0] == 1 else bias[number : number + 1]
        bias = bias if bias.shape[3] == 1 else bias[..., first:end]
    return replace(features.of_sequence(number), bias=bias)


def cached_attention(
    q: Tensor, cache: Cache, *, scale: float, causal: bool, features: Features = PLAIN
) -> tuple[Tensor, Tensor]:
    """Attention of q (B, H, Sq, d) over a cache: O (B, H, Sq, d_v) of q's dtype, LSE (B, H, Sq)
    float32.

    causal: query i of a sequence sees key j if j <= i + its length - Sq. features: as for attention
    over a sequence's own keys, except for the bias, whose last dimension is the capacity.
    """
    shape = (*q.shape[:3], cache.v.shape[3])
    o, lse = q.new_empty(shape), q.new_empty(shape[:3], dtype=torch.float32)
    for number, queries, k, v, own in sequences(q, cache, features):
        diagonal = k.shape[2] - q.shape[2] if causal else None
        one, of_one = eager.attention(queries, k, v, scale=scale, diagonal=diagonal, features=own)
        o[number], lse[number] = one[0].to(q.dtype), of_one[0].float()
    return o, lse


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, interleaved: bool) -> Tensor:
    """X (B, H, S, d) with its first 2 * cos.shape[1] elements rotated (RoFormer, arXiv 2104.09864).

    cos and sin (positions, dim / 2) of any dtype; positions (B, S). Computed in float32, or in
    float64 for such an x.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    half = cos.shape[1]
    c, s = (table[positions].to(wide.dtype)[:, None] for table in (cos, sin))  # (B, 1, S, half)
    if interleaved:
        one, two = wide[..., 0 : 2 * half : 2], wide[..., 1 : 2 * half : 2]
    else:
        one, two = wide[..., :half], wide[..., half : 2 * half]
    first, second = one * c - two * s, one * s + two * c
    if interleaved:
        turned = torch.stack((first, second), -1).flatten(-2)
    else:
        turned = torch.cat((first, second), -1)
    return torch.cat((turned, wide[..., 2 * half :]), -1).to(x.dtype)


def write(cache: Cache, k: Tensor, v: Tensor) -> None:
    """Write k (B, Hkv, S, d) and v (B, Hkv, S, d_v) after the keys of each sequence, in place.

    Key i of sequence b goes to position lengths[b] + i; keys beyond the capacity are dropped. An
    8-bit cache gets elements divided by their scales, quantized(). Raises InvalidArgument, with
    nothing written, for rows and pages that do not exist.
    """
    written: list[tuple[int, Tensor, Tensor | None]] = []
    for number, length in enumerate(cache.lengths.tolist()):
        first = max(length, 0)
        end = max(first, min(first + k.shape[2], cache.capacity))
        pages = None if cache.block_table is None else pages_of(cache, number, first, end)
        row_of(cache, number)
        written.append((number, torch.arange(first, end, device=k.device), pages))
    for number, places, pages in written:
        kept = len(places)
        for held_, x, scale in (
            (cache.k, k[number, :, :kept], cache.k_scale),
            (cache.v, v[number, :, :kept], cache.v_scale),
        ):
            if scale is not None:
                x = x if x.dtype == torch.float64 else x.float()
                x = x / scale_of(scale, pages).to(x.dtype)
            if held_.element_size() == 1:
                # torch cannot index float8 in place: move their bytes.
                x = quantized(x, held_.dtype).view(torch.int8)
                held_ = held_.view(torch.int8)
            if pages is None:
                held_[row_of(cache, number)][:, places] = x
            else:
                held_[pages, :, places & (cache.k.shape[2] - 1)] = x.transpose(0, 1)
