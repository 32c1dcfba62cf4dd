"""Kept calls of decode(): one that equals an earlier call takes one look-up."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashgen import settings
from flashgen.inputs.cache import Cache
from flashgen.inputs.features import Limits, tensors_of_heads
from flashgen.kernels import repeated_launch
from flashgen.kernels.launch_cache import Combine, Decode
from flashgen.runtime.call_cache import Key, Options, form_of
from flashgen.runtime.launcher import Launcher
from flashgen.spec.features import PER_HEAD

Decoded = tuple[Tensor, Tensor, Tensor, Tensor, *tuple[Tensor | None, ...]]
"""q, k, v, lengths, block table and numbers of heads of a call of decode(). A drop-in may leave out
the last of these, which it does not have.
"""
_OTHERS = (None,) * (1 + len(PER_HEAD))
"""Those behind lengths, all left out."""


def decode_key(tensors: Decoded, options: Options, limits: Limits) -> Key | None:
    """The key of a call; None for what is no tensor, or has no strides. Written out, because a loop
    takes longer.
    """
    try:
        q, k, v, lengths, *others = tensors
        causal, scale, precision = options
        key: Key = (
            q.shape, k.shape, v.shape, lengths.shape,
            q.stride(), k.stride(), v.stride(), lengths.stride(),
            q.dtype, k.dtype, v.dtype, lengths.dtype,
            q.device, k.device, v.device, lengths.device,
            type(q), type(k), type(v), type(lengths),
            causal, type(causal), scale, type(scale), precision, limits, settings.serving(),
        )  # fmt: skip
        return (*key, *map(form_of, others), *_OTHERS[len(others) :])
    except (AttributeError, RuntimeError, TypeError):
        return None


def is_copied(given: Tensor | None, held: Tensor | None) -> bool:
    """Whether a kernel reads another tensor than the one that was given: a copy."""
    if given is None or held is None:
        return given is not held
    return given.data_ptr() != held.data_ptr()


class KeptDecode:
    """decode() for calls that equal an earlier one, which resolved and launched this call.

    The next one is launched with nothing checked or resolved again, and binds the launches; all
    others repeat those.
    """

    __slots__ = ("_combine", "_decode", "_features", "_numbers", "run")

    def __init__(self, decode: Launcher, combine: Launcher, call: Decode, splits: int) -> None:
        self._decode = decode
        self._combine = combine
        self._features, _ = call.features.parts
        self._numbers: dict[str, Any] = {"scale": call.scale, "sms": call.sms, "splits": splits}
        self.run: repeated_launch.DecodeAgain = self._bind
        """O and LSE of tensors as Decoded has them; None, with nothing launched, where the
        alignment or the state of torch differs after all.
        """

    def _bind(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor | None, *heads: Any
    ) -> tuple[Tensor, Tensor] | None:
        """Launch, and keep how to do so again; None where a tensor is a negative view."""
        if any(x is not None and x.is_neg() for x in (q, k, v, lengths, table, *heads)):
            return None
        if table is not None:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        features = self._features
        if features.per_head:
            features = features.with_tensors(tensors_of_heads(heads))
        cache = Cache(k=k, v=v, lengths=lengths, block_table=table)
        call = Decode(q=q, cache=cache, features=features, **self._numbers)
        parts, split = self._decode.by(call, repeated_launch.bind_decode)
        result, merge, whole = (parts.o, parts.lse), None, self._numbers["splits"] == 1
        if not whole:
            merging = Combine(parts=parts, q=q)
            result, merge = self._combine.by(merging, repeated_launch.bind_combine)
        if split is not None and (whole or merge is not None):
            self.run = repeated_launch.decode_again(split, parts, merge, result)
        return result
