"""Dispatcher: attention() for tensors, on the kernels of one generated package.

A call is found by its key (runtime/call_cache.py), or resolved: its launcher is found by device,
spec and bucket (runtime/resolver.py). Nothing is timed here, so two ranks with one table choose
alike.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from flashgen import settings
from flashgen.inputs.block_mask import BlockMask
from flashgen.inputs.features import NO_LIMITS, PLAIN, Window, heads_given, limits_of
from flashgen.runtime import torch_modes
from flashgen.runtime.autograd import Passes
from flashgen.runtime.call import Call, Causal
from flashgen.runtime.call_cache import CallCache, options_of
from flashgen.runtime.choice import Choices
from flashgen.runtime.derived import explains
from flashgen.runtime.general_path import GeneralPath, asked_features
from flashgen.runtime.resolver import Resolver
from flashgen.runtime.selection import Served
from flashgen.spec.vocabulary import Direction

if TYPE_CHECKING:
    from flashgen.runtime.decode import Decoder
    from flashgen.runtime.explanation import Explanation


class Dispatcher:
    """Serves attention by the kernels of a generated package and the choices of each GPU.

    Args:
        package: the name of the package whose `kernels` are loaded.
        archs: the architecture of each GPU that has a table, by slug.
        choices: what its table chose, by slug.
        folder: where that package is, for explain() and digest().

    Examples:
        >>> from flashgen.runtime import Dispatcher
        >>> import torch
        >>> made = Dispatcher(package="generated", archs={}, choices={})
        >>> q = torch.randn(1, 2, 8, 64)
        >>> made.attention(q, q, q).shape
        torch.Size([1, 2, 8, 64])
    """

    def __init__(
        self,
        *,
        package: str,
        archs: Mapping[str, str],
        choices: Mapping[str, Choices],
        folder: Path | None = None,
    ) -> None:
        self.served = Served(archs=archs, choices=choices)
        self.resolver = Resolver(package, self.served, folder)
        self.calls = CallCache()
        self.passes = Passes(self.resolver, self.calls)
        self.general = GeneralPath(package, self.resolver, self.passes, self.calls)

    # Decoding, explanations and the digest are loaded when first used: attention() needs none.

    @functools.cached_property
    def decoder(self) -> Decoder:
        """Serves decode()."""
        from flashgen.runtime.decode import Decoder

        return Decoder(self.resolver, self.calls)

    def again(
        self, q: Tensor, k: Tensor, v: Tensor, causal: Causal, scale: float | None,
        deterministic: bool = True,
    ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """O and LSE of attention() with these options alone, by an earlier call; None without one.
        The most frequent call is spared what attention() takes for its other arguments.
        """
        if torch_modes.special(q):
            return None
        options = options_of("attention", 0, causal, scale, "ieee", NO_LIMITS)
        kept, _ = self.calls.find(options, q, k, v)
        return None if kept is None else kept.call(deterministic, q, k, v)

    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: Causal = ..., scale: float | None = ...,
        bias: Tensor | None = ..., alibi_slopes: Tensor | None = ..., dropout_p: float = ...,
        window: Window | None = ..., softcap: float | None = ..., sinks: Tensor | None = ...,
        chunk: int | None = ..., chunk_start: Tensor | None = ...,
        block_mask: BlockMask | None = ..., deterministic: bool = ..., precision: str = ...,
        invariant: bool = ...,
        return_lse: Literal[False] = ...,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: Causal = ..., scale: float | None = ...,
        bias: Tensor | None = ..., alibi_slopes: Tensor | None = ..., dropout_p: float = ...,
        window: Window | None = ..., softcap: float | None = ..., sinks: Tensor | None = ...,
        chunk: int | None = ..., chunk_start: Tensor | None = ...,
        block_mask: BlockMask | None = ..., deterministic: bool = ..., precision: str = ...,
        invariant: bool = ...,
        return_lse: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: Causal = False,
        scale: float | None = None,
        bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        dropout_p: float = 0.0,
        window: Window | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        chunk: int | None = None,
        chunk_start: Tensor | None = None,
        block_mask: BlockMask | None = None,
        deterministic: bool = True,
        precision: str = "ieee",
        invariant: bool = False,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Exact attention, softmax(scale * Q K^T + bias) V.

        Differentiable, once, with respect to q, k, v, a float bias and sinks. Without
        a causal mask a window counts from the bottom-right diagonal. Keys of other chunks are not
        read.

        Args:
            q: (batch, heads, seq_q, head_dim), float16, bfloat16 or float32, in any strides.
            k: (batch, kv_heads, seq_k, head_dim); kv_heads divides heads.
            v: (batch, kv_heads, seq_k, head_dim_v).
            causal: True or "bottom_right" (the last query sees the last key), "top_left", or False.
            scale: what scores are multiplied by; 1/sqrt(head_dim) unless given.
            bias: to (batch, heads, seq_q, seq_k): float, added to scores, or bool, True may attend.
            alibi_slopes: float32 (heads,) or (batch, heads), ALiBi.
            dropout_p: probability with which an element of P is dropped, with or without gradients.
            window: (left, right) keys a query sees beside its diagonal; None or -1 is no end.
            softcap: scores become softcap * tanh(score / softcap) before bias and masks; 0 is none.
            sinks: (heads,), float32 or of the dtype of q: one more score in each softmax.
            chunk: keys of a chunk; under a causal mask a query sees only its own (Llama 4).
            chunk_start: int32 (batch,), where chunk 0 begins: 0, or the number of pads on the left.
            block_mask: of flashgen.block_mask; then causal is False, without window and bias.
            deterministic: False admits a backward that adds dQ up in any order.
            precision: how float32 is multiplied, "ieee" or "tf32".
            invariant: bits of a row depend on its query and keys alone (docs/invariance.md).
            return_lse: whether LSE is returned too.

        Returns:
            O (batch, heads, seq_q, head_dim_v); with return_lse also LSE (batch, heads, seq_q),
            float32, natural logarithm. A query with no key to attend has O = 0 and LSE = -inf, or
            its sink.

        Raises:
            InvalidArgument: naming the argument; it is a ValueError.

        Examples:
            >>> import torch, flashgen
            >>> q = torch.randn(2, 8, 16, 64)
            >>> k = v = torch.randn(2, 2, 16, 64)
            >>> o, lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
            >>> o.shape, lse.shape
            (torch.Size([2, 8, 16, 64]), torch.Size([2, 8, 16]))
        """
        limits, key = NO_LIMITS, None
        if window is not None or softcap is not None or invariant is not False:
            limits = limits_of(window, softcap, invariant, causal=causal is not False)
        heads = heads_given(sinks=sinks, alibi_slopes=alibi_slopes)
        more = (
            bias is not None or dropout_p != 0.0 or chunk is not None or chunk_start is not None
            or block_mask is not None
        )  # fmt: skip
        if not more and not torch_modes.special(q):
            options = options_of("attention", len(heads), causal, scale, precision, limits)
            kept, key = self.calls.find(options, q, k, v, *heads)
            if kept is not None:
                found = kept.call(deterministic, q, k, v, *heads)
                if found is not None:
                    return found if return_lse else found[0]  # type: ignore[no-any-return]
        features = PLAIN
        if more or heads or limits != NO_LIMITS or settings.invariant():
            features = asked_features(
                q, causal=causal is not False, bias=bias, alibi_slopes=alibi_slopes,
                dropout_p=dropout_p, window=window, softcap=softcap, sinks=sinks, chunk=chunk,
                chunk_start=chunk_start, block_mask=block_mask, invariant=invariant,
            )  # fmt: skip
        call = Call(
            causal=causal, scale=scale, precision=precision, deterministic=deterministic,
            features=features,
        )  # fmt: skip
        o, lse = self.general.serve(call, q, k, v, key=key, return_lse=return_lse)
        return o if lse is None or not return_lse else (o, lse)

    @overload
    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, *, lengths: Tensor | None = ...,
        block_table: Tensor | None = ..., cache_batch_idx: Tensor | None = ...,
        cache_leftpad: Tensor | None = ..., k_scale: Tensor | None = ...,
        v_scale: Tensor | None = ..., causal: Causal = ..., scale: float | None = ...,
        bias: Tensor | None = ..., alibi_slopes: Tensor | None = ..., window: Window | None = ...,
        softcap: float | None = ..., sinks: Tensor | None = ..., chunk: int | None = ...,
        chunk_start: Tensor | None = ..., precision: str = ..., invariant: bool = ...,
        return_lse: Literal[False] = ...,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, *, lengths: Tensor | None = ...,
        block_table: Tensor | None = ..., cache_batch_idx: Tensor | None = ...,
        cache_leftpad: Tensor | None = ..., k_scale: Tensor | None = ...,
        v_scale: Tensor | None = ..., causal: Causal = ..., scale: float | None = ...,
        bias: Tensor | None = ..., alibi_slopes: Tensor | None = ..., window: Window | None = ...,
        softcap: float | None = ..., sinks: Tensor | None = ..., chunk: int | None = ...,
        chunk_start: Tensor | None = ..., precision: str = ..., invariant: bool = ...,
        return_lse: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        lengths: Tensor | None = None,
        block_table: Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        causal: Causal = True,
        scale: float | None = None,
        bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        window: Window | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        chunk: int | None = None,
        chunk_start: Tensor | None = None,
        precision: str = "ieee",
        invariant: bool = False,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Exact attention of few queries over a cache of keys and values (Flash-Decoding).

        All in any strides; kv_heads divides heads. With block_table, page_size is a power of two,
        and key j of sequence b is in slot j % page_size of page block_table[b, j // page_size]. A
        length above the capacity is as the capacity, one below 0 as 0; what lies beyond is not
        read. With cache_batch_idx, k and v may have any batch size. With cache_leftpad, the keys of
        a sequence are those from there up to its length. Over 8 bits q is float16 or bfloat16, and
        scales are positive.

        The features are those of attention(), the diagonal being length - seq_q. Keys outside a
        window or a chunk are not read. lengths, block_table, cache_batch_idx and cache_leftpad are
        read by the device, when the kernels run: a CUDA graph of a call may be replayed with other
        values in them. Pages and rows that they name must exist: nothing checks. There is no
        gradient.

        Args:
            q: (batch, heads, seq_q, head_dim), float16, bfloat16 or float32; seq_q is 1 or a few.
            k: (batch, kv_heads, capacity, head_dim), or (pages, page_size, kv_heads, head_dim).
            v: as k, with head_dim_v; of one dtype with k, which may be float8_e4m3fn or int8.
            lengths: int32 (batch,), keys of each sequence with the new ones; else all of the cache.
            block_table: int32 (batch, pages of a sequence): where the pages of each sequence are.
            cache_batch_idx: int32 (batch,), the row of k and v that is each sequence's.
            cache_leftpad: int32 (batch,), the place of each sequence's first key.
            k_scale: multiplies k of 8 bits: float32 (kv_heads,), or of pages (pages, kv_heads).
            v_scale: the same of v.
            causal: whether query i sees key j only where j <= i + length - seq_q.
            scale: what scores are multiplied by; 1/sqrt(head_dim) unless given.
            bias: to (batch, heads, seq_q, capacity): float or bool, as of attention().
            alibi_slopes: float32 (heads,) or (batch, heads), ALiBi.
            window: (left, right) keys a query sees beside its diagonal; None or -1 is no end.
            softcap: scores become softcap * tanh(score / softcap) before bias and masks; 0 is none.
            sinks: (heads,), float32 or of the dtype of q: one more score in each softmax.
            chunk: keys of a chunk; under a causal mask a query sees only its own (Llama 4).
            chunk_start: int32 (batch,), where chunk 0 begins: 0, or the number of pads on the left.
            precision: how float32 is multiplied, "ieee" or "tf32".
            invariant: bits of a row depend on its query and keys alone (docs/invariance.md).
            return_lse: whether LSE is returned too.

        Returns:
            O (batch, heads, seq_q, head_dim_v); with return_lse also LSE (batch, heads, seq_q),
            float32, natural logarithm. A query with no key to attend has O = 0 and LSE = -inf, or
            its sink.

        Raises:
            InvalidArgument: naming the argument; it is a ValueError.

        Examples:
            >>> import torch, flashgen
            >>> q, cache = torch.randn(2, 8, 1, 64), torch.randn(2, 2, 128, 64)
            >>> lengths = torch.tensor([5, 128], dtype=torch.int32)
            >>> flashgen.decode(q, cache, cache, lengths=lengths).shape
            torch.Size([2, 8, 1, 64])
        """
        limits, key = NO_LIMITS, None
        if window is not None or softcap is not None or invariant is not False:
            limits = limits_of(window, softcap, invariant, causal=causal is not False)
        if lengths is not None and not (
            cache_batch_idx is not None or cache_leftpad is not None or k_scale is not None
            or v_scale is not None or bias is not None or chunk is not None
            or chunk_start is not None
        ):  # fmt: skip
            heads = heads_given(sinks=sinks, alibi_slopes=alibi_slopes)
            given = q, k, v, lengths, block_table, *heads
            key, found = self.decoder.again(given, (causal, scale, precision), limits)
            if found is not None:
                return found if return_lse else found[0]
        from flashgen.runtime.decode import CacheArguments

        call = Call(
            causal=causal, scale=scale, precision=precision,
            features=asked_features(
                q, causal=causal is not False, bias=bias, alibi_slopes=alibi_slopes,
                window=window, softcap=softcap, sinks=sinks, chunk=chunk, chunk_start=chunk_start,
                invariant=invariant,
            ),
        )  # fmt: skip
        arguments = CacheArguments(
            lengths=lengths, block_table=block_table, cache_batch_idx=cache_batch_idx,
            cache_leftpad=cache_leftpad, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        o, lse = self.decoder.decode(call, q, k, v, arguments, key=key)
        return (o, lse) if return_lse else o

    @explains(
        attention,
        direction="which kernel: the forward, or one of the backward's, such as backward_dkv.",
    )
    def explain(
        self, q: Tensor, k: Tensor, v: Tensor, *, direction: Direction = "forward", **options: Any
    ) -> Explanation:
        """Which kernel attention() would run for a call, from where, and why; launches nothing.

        Returns:
            An Explanation; str() gives it as text.

        Raises:
            InvalidArgument: naming the argument; it is a ValueError.

        Examples:
            >>> import torch, flashgen
            >>> q = torch.randn(1, 2, 8, 64)
            >>> print(flashgen.explain(q, q, q))
            fwd_fp32_d64: CPU tensors are served by torch, with no kernel of flashgen
        """
        from flashgen.runtime.explanation import explain_call

        deterministic = options.pop("deterministic")
        call = replace(_asked(q, options, draws=False), deterministic=deterministic)
        return explain_call(self.resolver, call, q, k, v, direction)

    @explains(decode)
    def explain_decode(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Explanation:
        """Which split kernel decode() would run for a call, from where, and why; launches nothing.

        Returns:
            An Explanation; str() gives it as text.

        Raises:
            InvalidArgument: naming the argument; it is a ValueError.

        Examples:
            >>> import torch, flashgen
            >>> q, cache = torch.randn(1, 2, 1, 64), torch.randn(1, 2, 32, 64)
            >>> print(flashgen.explain_decode(q, cache, cache))
            decode_fp32_d64: CPU tensors are served by torch, with no kernel of flashgen
        """
        from flashgen.runtime.decode import CacheArguments
        from flashgen.runtime.explanation import explain_cached

        cache = CacheArguments(
            **{each.name: options.pop(each.name) for each in fields(CacheArguments)}
        )
        return explain_cached(self.resolver, self.decoder, _asked(q, options), q, k, v, cache)

    def digest(self) -> str:
        """sha256 of all that decides which kernel runs and what its text is.

        Two ranks with equal digests run the same text on equal GPUs.

        Returns:
            "sha256:" and 64 hexadecimal digits.

        Raises:
            GeneratedError: if a folder of kernels cannot be read.

        Examples:
            >>> import flashgen
            >>> flashgen.digest()[:7]
            'sha256:'
        """
        from flashgen.runtime.explanation import digest_of_choices

        return digest_of_choices(self.resolver.folder, self.served)


def _asked(q: Tensor, options: dict[str, Any], *, draws: bool = True) -> Call:
    """The call of a function's options, whatever they return."""
    del options["return_lse"]
    causal, scale, precision = (options.pop(name) for name in ("causal", "scale", "precision"))
    features = asked_features(q, causal=causal is not False, draws=draws, **options)
    return Call(causal=causal, scale=scale, precision=precision, features=features)
