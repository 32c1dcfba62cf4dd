"""append(): new keys and values into a cache, contiguous or in pages, behind those it has; with
rotary embedding of the new keys and the queries in the same launch.

The cache is the caller's: tensors, lengths on the device, and for pages a block table. A step of a
model appends, adds the new keys to the lengths, and calls decode().
"""

from __future__ import annotations

from torch import Tensor

from flashgen.errors import InvalidArgument
from flashgen.inputs.cache import Cache
from flashgen.kernels.launch_cache import Append, Rotation
from flashgen.runtime import appender, folders, torch_modes
from flashgen.runtime.call import check_plain, check_tensors
from flashgen.runtime.decode import CacheArguments, check_call
from flashgen.runtime.resolver import addressable
from flashgen.spec.vocabulary import Rotary


@torch_modes.without_gradients
def append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    advance: bool = True,
) -> Tensor | None:
    """Write new keys and values into a cache, in place, behind those it has.

    Key i of sequence b goes to place lengths[b] + i; what lies beyond the capacity is dropped.
    Pages and rows that are written must be one sequence's alone. Into 8 bits x / scale is written,
    to the nearest, ties to even, saturating. As decode(), it reads lengths and block_table on the
    device, and follows from shapes alone.

    With cos and sin the first rotary_dim elements of each new key and of q are rotated by their
    places (RoFormer, arXiv 2104.09864).

    Args:
        k_cache: (batch, kv_heads, capacity, dim), or pages (pages, page_size, kv_heads, dim).
        v_cache: as k_cache, with head_dim_v.
        k: (batch, kv_heads, new, head_dim).
        v: (batch, kv_heads, new, head_dim_v).
        lengths: int32 (batch,), keys before; they stay: add the new ones before decode().
        block_table: int32 (batch, pages of a sequence): where the pages of each sequence are.
        cache_batch_idx: int32 (batch,), the row of the cache that is each sequence's.
        k_scale: of caches of 8 bits, as decode() takes it.
        v_scale: the same of v_cache.
        q: (batch, heads, seq_q, head_dim), the queries to rotate.
        cos: (positions, rotary_dim / 2), a row for each place of a sequence.
        sin: as cos.
        interleaved: elements 2i and 2i + 1 rotate together, else i and i + rotary_dim / 2.
        advance: query i has place lengths[b] + i; if False, lengths[b].

    Returns:
        q rotated, laid out in memory as q is; None without q.

    Raises:
        InvalidArgument: naming the argument; it is a ValueError.

    Examples:
        >>> import torch, flashgen
        >>> cache, new = torch.zeros(2, 2, 16, 64), torch.ones(2, 2, 1, 64)
        >>> lengths = torch.tensor([0, 5], dtype=torch.int32)
        >>> flashgen.append(cache, cache.clone(), new, new, lengths)
        >>> cache[1, 0, 4:7, 0]
        tensor([0., 1., 0.])
    """
    arguments = CacheArguments(
        lengths=lengths, block_table=block_table, cache_batch_idx=cache_batch_idx,
        k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    cache, rotation = _checked(k_cache, v_cache, k, v, arguments, q, cos, sin, advance=advance)
    rotary: Rotary = "none"
    if rotation is not None:
        rotary = "interleaved" if interleaved else "halves"
    call = Append(k=k, v=v, cache=cache, rotation=rotation)
    rotated = appender.append_checked(folders.current().resolver, call, rotary)
    return q if q is None or rotation is None else rotated


def _checked(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    arguments: CacheArguments,
    q: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    advance: bool,
) -> tuple[Cache, Rotation | None]:
    check_tensors(k_cache=k_cache, v_cache=v_cache, k=k, v=v, lengths=arguments.lengths)
    check_plain(k=k, v=v)
    # k stands for a q: it has as many heads as the cache, and its head_dim.
    names = ("k", "k_cache", "v_cache", "lengths")
    cache = check_call(k, k_cache, v_cache, arguments, names)
    for name, x, of in (("k", k, cache.k), ("v", v, cache.v)):
        wanted = (k.shape[0], of.shape[1], k.shape[2], of.shape[3])
        dtype = of.dtype if cache.k_scale is None else k.dtype
        if tuple(x.shape) != wanted or x.dtype != dtype or x.device != of.device:
            raise InvalidArgument(
                f"{name} must be {dtype} of shape {wanted} on {of.device}, as {name}_cache has "
                f"it: got {x.dtype} {tuple(x.shape)} on {x.device}"
            )
    _check_written(cache)
    if q is not None:
        _check_queries(q, k)
    if (cos is None) != (sin is None):
        raise InvalidArgument("cos and sin go together: give both or neither")
    if cos is None or sin is None:
        return cache, None
    _check_rotary(cos, sin, k, cache)
    if q is None:
        q = k[:, :, :0]
    return cache, Rotation(q=q, cos=cos.resolve_neg(), sin=sin.resolve_neg(), q_step=int(advance))


def _check_written(cache: Cache) -> None:
    """Raise InvalidArgument unless each element of K and V can be written, and is in a place of its
    own.
    """
    for name, x in (("k_cache", cache.k), ("v_cache", cache.v)):
        if x.is_neg():
            raise InvalidArgument(
                f"{name} must not be a view of negatives, for it is written in place: "
                "give what it is a view of"
            )
        if not addressable(x):
            raise InvalidArgument(
                f"{name} must have a contiguous last dimension, for it is written in place: "
                f"got strides {x.stride()}"
            )
        if any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True)):
            raise InvalidArgument(
                f"{name} must not be expanded, for it is written in place: got shape "
                f"{tuple(x.shape)} of strides {x.stride()}"
            )
    if cache.k.numel() and cache.v.numel() and cache.k.data_ptr() == cache.v.data_ptr():
        raise InvalidArgument(
            "v_cache must lie elsewhere than k_cache, for both are written in place: "
            "got the same memory"
        )


def _check_queries(q: Tensor, k: Tensor) -> None:
    check_tensors(q=q)
    check_plain(q=q)
    fits = q.ndim == 4 and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not fits or q.dtype != k.dtype or q.device != k.device:
        raise InvalidArgument(
            f"q must have the batch size, head_dim, dtype and device of k, {tuple(k.shape)} "
            f"{k.dtype} {k.device}: got {tuple(q.shape)} {q.dtype} {q.device}"
        )


def _check_rotary(cos: Tensor, sin: Tensor, k: Tensor, cache: Cache) -> None:
    check_tensors(cos=cos, sin=sin)
    positions = max(1, cache.capacity)
    if cos.ndim != 2 or cos.shape[0] < positions or 2 * cos.shape[1] > k.shape[3]:
        raise InvalidArgument(
            f"cos must have shape (positions, rotary_dim / 2), of at least {positions} "
            f"positions and a rotary_dim of {k.shape[3]} at most: got {tuple(cos.shape)}"
        )
    if sin.shape != cos.shape or sin.dtype != cos.dtype:
        raise InvalidArgument(
            f"sin must have the shape and dtype of cos, {tuple(cos.shape)} {cos.dtype}: "
            f"got {tuple(sin.shape)} {sin.dtype}"
        )
    for name, x in (("cos", cos), ("sin", sin)):
        if x.device != k.device or x.stride(1) != 1 or not x.is_floating_point():
            raise InvalidArgument(
                f"{name} must be floating, with a contiguous last dimension, on {k.device}: "
                f"got {x.dtype}, strides {x.stride()} on {x.device}"
            )
