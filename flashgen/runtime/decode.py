"""decode(): attention of few queries over a cache of keys and values, by split and combine kernels.

A call is validated in one place. Its spec is then resolved once per device and bucket into
launchers, as for attention(). The bucket is that of the cache's capacity, since the lengths are
known on the device only.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashgen.errors import InvalidArgument, shown
from flashgen.inputs.cache import Cache
from flashgen.inputs.features import (
    PLAIN,
    Features,
    ScoreLimits,
    check_for_keys,
    fields_of,
    named_tensors,
    tensors_of,
)
from flashgen.inputs.from_call import check_heads, check_lengths, check_precision, check_scale
from flashgen.inputs.tensors import broadcasts, check_device, check_form
from flashgen.kernels.launch_cache import Combine, Decode
from flashgen.runtime import kept_calls, torch_modes
from flashgen.runtime.call import Call, Causal, check_plain, check_tensors, holds
from flashgen.runtime.call_cache import CallCache, CallKey, options_of, requires_grad
from flashgen.runtime.eager import cache as eager_cache
from flashgen.runtime.launcher import Launcher
from flashgen.runtime.resolver import Resolver
from flashgen.runtime.selection import Ladder, by_rows, rows_together
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import bucket_of
from flashgen.spec.vocabulary import DTYPE_BYTES, Mask, check_head_dim

Names = tuple[str, str, str, str]
NAMES: Names = ("q", "k", "v", "lengths")
"""What errors call the arguments of decode()."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CacheArguments:
    """The tensors of a cache besides k and v, as Dispatcher.decode describes them."""

    lengths: Tensor | None = None
    block_table: Tensor | None = None
    cache_batch_idx: Tensor | None = None
    cache_leftpad: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether there are only lengths and possibly a block table."""
        others = (self.cache_batch_idx, self.cache_leftpad, self.k_scale, self.v_scale)
        return self.lengths is not None and all(x is None for x in others)


def check_beside(features: Features, q: Tensor, cache: Cache) -> None:
    """Raise InvalidArgument, naming the argument, unless features fit a cache."""
    if features is PLAIN:
        return
    given = named_tensors(tensors_of(features))
    check_plain(**given)
    if torch.is_grad_enabled() and requires_grad(*given.values()):
        raise InvalidArgument(
            f"{', '.join(given)} must not require gradients, of which decode has none: "
            "detach them, or call attention()"
        )
    check_for_keys(features, q, cache.capacity)


class Decoder:
    """Serves decode() from the kernels that a resolver finds."""

    def __init__(self, resolver: Resolver, calls: CallCache) -> None:
        self._resolver = resolver
        self._calls = calls

    def again(
        self, given: tuple[Any, ...], options: tuple[Causal, float | None, str], limits: ScoreLimits
    ) -> tuple[CallKey | None, tuple[Tensor, Tensor] | None]:
        """Where to keep a call of q, k, v, lengths, block table and numbers of heads, with causal,
        scale and precision: None where no key can hold it, or a torch mode is on. And O and LSE by
        an earlier one, None, with nothing launched, where none can be used.
        """
        if torch_modes.special(given[0]):
            return None, None
        kept, key = self._calls.find(options_of("decode", len(given), *options, limits), *given)
        return key, None if kept is None else kept.call(True, *given)

    def decode(
        self,
        call: Call,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        arguments: CacheArguments,
        *,
        key: CallKey | None = None,
        splits: int | None = None,
        names: Names = NAMES,
    ) -> tuple[Tensor, Tensor]:
        """O and LSE, as Dispatcher.decode describes them. The features of the call have their
        tensors. key: where to keep the call; splits: None lets flashgen choose; names: the argument
        names of a drop-in.
        """
        cache, features = check_call(q, k, v, arguments, names), call.features
        check_beside(features, q, cache)
        spec = decode_spec(call, q, cache)
        scale = check_scale(call.scale, q.shape[3])
        if self._resolver.left_to_torch(q.device):
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                return eager_cache.cached_attention(
                    q, cache, scale=scale, causal=spec.causal, features=features
                )
        decode, combine, sms = self._launchers(spec, q, cache)
        addressed = self._resolver.addressed
        keys, values = addressed(cache.k, "k"), addressed(cache.v, "v")
        if keys is not cache.k or values is not cache.v:
            cache = replace(cache, k=keys, v=values)
        launch = Decode(
            q=addressed(q, "q"), cache=cache, scale=scale, sms=sms, splits=splits,
            features=features,
        )  # fmt: skip
        parts = decode(launch)
        o, lse = (parts.o, parts.lse) if parts.whole else combine(Combine(parts=parts, q=q))
        keeps = splits is None and holds(call.causal, call.scale)
        if key is not None and keeps and not _copies(launch, q, k, v, arguments):
            bare, _ = features.parts
            kept = kept_calls.decode(
                decode,
                combine,
                bare,
                cache.paged,
                scale=scale,
                sms=sms,
                splits=parts.splits,
            )
            self._calls.keep(key, kept)
        return o, lse

    def ladder(self, spec: AttentionSpec, q: Tensor, cache: Cache) -> Ladder:
        """The kernels that may serve a call, best first."""
        rows = q.shape[1] // max(1, cache.k.shape[1]) * q.shape[2]
        found = self._resolver.ladder(spec, cache.capacity, q.device)
        rungs = sorted(found.rungs, key=lambda rung: by_rows(rung, rows))
        return replace(found, rungs=tuple(rungs))

    def _launchers(
        self, spec: AttentionSpec, q: Tensor, cache: Cache
    ) -> tuple[Launcher, Launcher, int]:
        """The launchers of decode and combine, and the SMs of the device."""
        resolver, device, capacity = self._resolver, q.device, cache.capacity
        rows = rows_together(q.shape[1] // max(1, cache.k.shape[1]) * q.shape[2])

        def make() -> Launcher:
            launcher = Launcher(resolver.package, self.ladder(spec, q, cache).rungs)
            resolver.say(spec, launcher.selection, capacity, device)
            return launcher

        decode = resolver.kept(spec, device, (bucket_of(capacity), rows), make)
        return decode, resolver.merging(spec, device), resolver.served_as(device)[1].sms


def _copies(launch: Decode, q: Tensor, k: Tensor, v: Tensor, arguments: CacheArguments) -> bool:
    """Whether a launch reads a copy of a tensor that was given."""
    cache, given = launch.cache, (q, k, v, arguments.lengths, arguments.block_table)
    read = launch.q, cache.k, cache.v, cache.lengths, cache.block_table
    return any(map(_is_copied, given, read))


def _is_copied(given: Tensor | None, held: Tensor | None) -> bool:
    """Whether a kernel reads another tensor than the one that was given: a copy."""
    if given is None or held is None:
        return given is not held
    return given.data_ptr() != held.data_ptr()


def decode_spec(call: Call, q: Tensor, cache: Cache) -> AttentionSpec:
    """The spec of a checked call; for one query a causal mask has no effect. Raises
    InvalidArgument.
    """
    causal, precision, features = call.causal, call.precision, call.features
    said = isinstance(causal, str) and causal == "bottom_right"
    if causal is not True and causal is not False and not said:  # 0 and 1.0 are equal to them
        raise InvalidArgument(
            "causal must be True, False or 'bottom_right' where keys are cached: got "
            f"{shown(causal)}"
        )
    check_precision(precision)
    dtype = str(q.dtype).removeprefix("torch.")
    return _spec(
        features.key,
        dtype=dtype,
        head_dim=q.shape[3],
        head_dim_v=cache.v.shape[3],
        mask=_mask(causal, q, features),
        precision=precision if dtype == "float32" else "ieee",
        paged=cache.paged,
        indexed=cache.rows is not None,
        leftpad=cache.leftpad is not None,
        **kv_fields(cache),
    )


@functools.lru_cache(maxsize=1024)
def _spec(features: tuple[object, ...], **others: Any) -> AttentionSpec:
    """The spec of decode with features of this key; cached, as _combine_of()."""
    return AttentionSpec(direction="decode", **fields_of(features), **others)


def _mask(causal: bool | str, q: Tensor, features: Features) -> Mask:
    """The mask of a call: one query needs none, unless a feature needs the causal one."""
    needed = features.needs_mask or ("none" if q.shape[2] == 1 else "causal")
    return "none" if causal is False else needed


def kv_fields(cache: Cache) -> dict[str, Any]:
    """The fields of a spec that describe the elements of a cache."""
    if cache.k_scale is None:
        return {}
    kv_dtype = "int8" if cache.k.dtype == torch.int8 else "float8_e4m3"
    return {"kv_dtype": kv_dtype, "kv_scales": "page" if cache.k_scale.ndim == 2 else "head"}


def check_call(
    q: Tensor, k: Tensor, v: Tensor, called: CacheArguments, names: Names = NAMES
) -> Cache:
    """The cache of a call. Raises InvalidArgument, naming the argument by `names`, unless all fit
    together.

    lengths None: every sequence fills its cache.
    """
    lengths, block_table, rows = called.lengths, called.block_table, called.cache_batch_idx
    named: dict[str, Tensor] = dict(zip(names, (q, k, v), strict=False))
    check_tensors(**named)
    check_plain(**named)
    if torch.compiler.is_compiling() or torch_modes.transformed():
        raise InvalidArgument(
            "decode must not be traced or transformed: "
            "call it under torch.compiler.disable, and outside torch.func"
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in named.values()):
        raise InvalidArgument(
            f"{', '.join(named)} must not require gradients, of which decode has none: "
            "detach them, or call attention()"
        )
    _check_shapes(named, paged=block_table is not None, indexed=rows is not None)
    _check_dtypes(named)
    scales = _checked_scales(named, called)
    batch = q.shape[0]
    if block_table is not None:
        _check_indices("block_table", block_table, q, (batch, "pages"))
        if rows is not None:
            raise InvalidArgument(
                "cache_batch_idx must be None with block_table, which says where keys are: "
                "reorder the rows of block_table"
            )
        if lengths is None:
            raise InvalidArgument(f"{names[3]} must be given with block_table: got None")
        size = k.shape[1]
        if size < 1 or size & (size - 1):
            raise InvalidArgument(
                f"the page size of {names[1]} and {names[2]}, shape[1], must be a power of two: "
                f"got {size}"
            )
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        block_table = block_table.resolve_neg()
        block_table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    if lengths is None:
        lengths = torch.full((batch,), k.shape[2], dtype=torch.int32, device=q.device)
    _check_indices(names[3], lengths, q, (batch,))
    for name, x in (("cache_batch_idx", rows), ("cache_leftpad", called.cache_leftpad)):
        if x is not None:
            _check_indices(name, x, q, (batch,))
    leftpad = None if called.cache_leftpad is None else _contiguous(called.cache_leftpad)
    rows = None if rows is None else _contiguous(rows)
    lengths = _contiguous(lengths)
    cache = Cache(k=k, v=v, lengths=lengths, block_table=block_table, rows=rows, leftpad=leftpad)
    check_lengths(**{names[0]: q.shape[2], names[1]: cache.capacity})
    return replace(cache, k_scale=scales[0], v_scale=scales[1]) if scales else cache


def _contiguous(x: Tensor) -> Tensor:
    """The tensor made contiguous, with a lazy negation resolved."""
    return x.resolve_neg().contiguous()


def _check_shapes(named: dict[str, Tensor], *, paged: bool, indexed: bool) -> None:
    (of_q, q), (of_k, k), (of_v, v) = named.items()
    what = "(pages, page_size, kv_heads" if paged else "(batch, kv_heads, capacity"
    for name, x, shape in (
        (of_q, q, "(batch, heads, seq_q, head_dim)"),
        (of_k, k, f"{what}, head_dim)"),
        (of_v, v, f"{what}, head_dim_v)"),
    ):
        if x.ndim != 4:
            raise InvalidArgument(f"{name} must have shape {shape}: got {tuple(x.shape)}")
    if k.shape[:3] != v.shape[:3]:
        raise InvalidArgument(
            f"{of_v} must have the shape of {of_k} but for the last dimension, {tuple(k.shape)}: "
            f"got {tuple(v.shape)}"
        )
    if not (paged or indexed) and k.shape[0] != q.shape[0]:
        raise InvalidArgument(
            f"{of_k} must have the batch size of {of_q}, {q.shape[0]}: got {k.shape[0]}"
        )
    if k.shape[3] != q.shape[3]:
        raise InvalidArgument(
            f"{of_k} must have the head_dim of {of_q}, {q.shape[3]}: got {k.shape[3]}"
        )
    heads, kv_heads = q.shape[1], k.shape[2 if paged else 1]
    check_heads(heads, kv_heads, of_q, f"{of_k} and {of_v}")
    check_head_dim(q.shape[3], f"the head_dim of {of_q}")
    check_head_dim(v.shape[3], f"the head_dim of {of_v}")


def _check_dtypes(named: dict[str, Tensor]) -> None:
    (of_q, q), *others = named.items()
    dtype = str(q.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise InvalidArgument(f"{of_q} must be float16, bfloat16 or float32: got {dtype}")
    for name, x in others:
        narrow = x.dtype in eager_cache.LARGEST and x.dtype == others[0][1].dtype
        if narrow and q.dtype == torch.float32:
            raise InvalidArgument(
                f"{of_q} must be float16 or bfloat16 over a cache of 8 bits: got {q.dtype}"
            )
        if x.dtype != q.dtype and not narrow:
            raise InvalidArgument(
                f"{name} must have the dtype of {of_q}, {q.dtype}, or with {others[0][0]} be "
                f"float8_e4m3fn or int8: got {x.dtype}"
            )
        check_device(name, x, q, of_q)


def _checked_scales(
    named: dict[str, Tensor], called: CacheArguments
) -> tuple[Tensor, Tensor] | None:
    """The scales of K and V of a cache; None if it has none."""
    (of_q, q), (of_k, k), (of_v, _) = named.items()
    if k.dtype not in eager_cache.LARGEST:
        if called.k_scale is not None or called.v_scale is not None:
            raise InvalidArgument(
                f"k_scale and v_scale need {of_k} and {of_v} of float8_e4m3fn or int8: "
                f"got {k.dtype}"
            )
        return None
    paged = called.block_table is not None
    heads = k.shape[2 if paged else 1]
    given = (called.k_scale, called.v_scale)
    per_page = paged and any(isinstance(x, Tensor) and x.ndim == 2 for x in given)
    shape = (k.shape[0], heads) if per_page else (heads,)
    found = []
    for name, x in zip(("k_scale", "v_scale"), given, strict=True):
        check_tensors(**{name: x})
        assert isinstance(x, Tensor)  # check_tensors has seen
        fits = x.ndim == len(shape) and broadcasts(x.shape, shape)
        if x.dtype != torch.float32 or not fits or x.device != q.device:
            pages = f" or, as the other one, ({k.shape[0]}, {heads})" if paged else ""
            raise InvalidArgument(
                f"{name} must be float32 of shape ({heads},){pages}, each 1 or as much, on the "
                f"device of {of_q}: got {x.dtype} {tuple(x.shape)} on {x.device}"
            )
        found.append(x.resolve_neg().expand(shape))
    return found[0], found[1]


def _check_indices(name: str, x: Tensor, q: Tensor, shape: tuple[int | str, ...]) -> None:
    """Raise InvalidArgument unless x is int32 of this shape on the device of q."""
    check_tensors(**{name: x})
    check_form(name, x, ("int32",), shape)
    check_device(name, x, q)
