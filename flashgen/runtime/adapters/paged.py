"""Attention over the pages of an inference engine: what the backends of vLLM and SGLang share.

The engine has written the new keys and values. A batch has its decodes first, each with the same
number of new tokens, and then its prefills. Decodes depend on shapes alone, as CUDA graphs need it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from flashgen.inputs.features import NO_LIMITS, ScoreLimits, Window, heads_given, limits_of
from flashgen.runtime import folders
from flashgen.runtime.call import Call
from flashgen.runtime.decode import CacheArguments
from flashgen.runtime.general_path import asked_features
from flashgen.runtime.selection import rows_together
from flashgen.runtime.varlen import attention_varlen
from flashgen.schedules.defaults import WIDEST_DECODE
from flashgen.spec.problem import BUCKETS


@torch.library.custom_op("flashgen::paged_prefill", mutates_args=("out",))
def paged_prefill(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    scale: float,
    window: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    invariant: bool = False,
) -> None:
    """Write into out the attention of packed queries over pages, their own keys being there.

    out and q (tokens, heads, head_dim), k_cache and v_cache (pages, page_size, kv_heads, head_dim),
    cu_seqlens_q int32 (sequences + 1,), seq_lens int32 (sequences,), block_table int32 (sequences,
    pages of a sequence). window: the keys that a query sees, its own included; 0 for all. softcap:
    0 for none. Raises InvalidArgument.
    """
    o = attention_varlen(
        q, k_cache, v_cache, cu_seqlens_q, None, max_seqlen_q, max_seqlen_k, seqused_k=seq_lens,
        block_table=block_table, causal=causal, scale=scale, window=_sides(window, causal),
        softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, invariant=invariant,
    )  # fmt: skip
    out.copy_(o)


@torch.library.custom_op("flashgen::paged_decode", mutates_args=("out",))
def paged_decode(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    queries: int,
    causal: bool,
    scale: float,
    window: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    splits: int = 0,
    invariant: bool = False,
) -> None:
    """The same of `queries` new tokens a sequence, out and q (sequences * queries, heads,
    head_dim), by split kernels whose launch depends on shapes alone.

    Caches may be float8_e4m3fn, with float32 k_scale and v_scale of one element or (kv_heads,).
    splits: 0 lets flashgen choose. Raises InvalidArgument.
    """
    decoder = folders.current().decoder
    of_sequence = q.view(-1, queries, *q.shape[1:]).transpose(1, 2)
    cache = CacheArguments(
        lengths=seq_lens, block_table=block_table, k_scale=_per_head(k_scale),
        v_scale=_per_head(v_scale),
    )  # fmt: skip
    limits: ScoreLimits = NO_LIMITS
    sides, key, found = _sides(window, causal), None, None
    if sides is not None or softcap or invariant:
        limits = limits_of(sides, softcap, invariant, causal=causal)
    if cache.plain and not splits:
        heads = heads_given(alibi_slopes=alibi_slopes, sinks=sinks)
        given = of_sequence, k_cache, v_cache, seq_lens, block_table, *heads
        key, found = decoder.again(given, (causal, scale, "ieee"), limits)
    if found is None:
        features = asked_features(
            q, causal=causal, alibi_slopes=alibi_slopes, window=sides, softcap=softcap, sinks=sinks,
            invariant=invariant,
        )  # fmt: skip
        found = decoder.decode(
            Call(causal=causal, scale=scale, features=features), of_sequence, k_cache, v_cache,
            cache, key=key, splits=splits or None,
        )  # fmt: skip
    out.view(-1, queries, *out.shape[1:]).copy_(found[0].transpose(1, 2))


def _sides(window: int, causal: bool) -> Window | None:
    return (window - 1, 0 if causal else window - 1) if window else None


def _per_head(scale: Tensor | None) -> Tensor | None:
    """The scale of a whole cache as decode() takes it; one of heads as it is."""
    return scale.reshape(1) if scale is not None and scale.numel() == 1 else scale


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """A prefill by itself: its queries are [begin, end) of the prefills'; lengths int32 (1,), table
    int32 (1, pages). They are copies, so that their addresses have the alignment of all others.
    """

    begin: int
    end: int
    lengths: Tensor
    table: Tensor


@dataclass(kw_only=True)
class PagedBatch:
    """The sequences of one step.

    tokens     the rows of q that are theirs; the others are padding
    decodes    how many sequences come first, with `queries` new tokens each
    prefills   how many others follow
    max_q      no prefill has more queries; max_k: no sequence has more keys
    starts     int32 (prefills + 1,): where the queries of each prefill begin, counted from the
               first of them
    lengths    int32 (sequences,): the keys of each, new ones included
    table      int32 (sequences, pages of a sequence)
    prompts    the prefills one by one; only over a cache of 8 bits
    """

    tokens: int
    decodes: int
    queries: int
    prefills: int
    max_q: int
    max_k: int
    starts: Tensor
    lengths: Tensor
    table: Tensor
    causal: bool = True
    prompts: tuple[Prompt, ...] = ()

    @property
    def decoded(self) -> int:
        """How many queries the decodes have."""
        return self.decodes * self.queries


def prompts_of(
    starts: Sequence[int], decodes: int, lengths: Tensor, table: Tensor
) -> tuple[Prompt, ...]:
    """The prefills that follow `decodes` sequences, of which starts has where each one's queries
    begin, and the last one's end.
    """
    return tuple(
        Prompt(
            begin=begin - starts[0],
            end=end - starts[0],
            lengths=lengths[number : number + 1].clone(),
            table=table[number : number + 1].clone(),
        )
        for number, (begin, end) in enumerate(pairwise(starts), decodes)
        if end > begin
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class PagedLayer:
    """The attention of one layer. window: the keys that a query sees, its own included; 0 for all.
    softcap: 0 for none. invariant: a row's bits do not depend on the batch.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    invariant: bool = False

    def attend(
        self,
        out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: PagedBatch,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Write the attention of q (rows, heads, head_dim) over the pools k and v (pages,
        page_size, kv_heads, head_dim) into out, of q's shape; rows of padding stay as they are.
        scales: of K and V of 8 bits. Raises InvalidArgument.
        """
        out, q = out[: batch.tokens], q[: batch.tokens]
        options = (
            batch.causal, self.scale, self.window, self.softcap, self.alibi_slopes, self.sinks
        )  # fmt: skip
        decodes, first = slice(batch.decodes), batch.decoded
        if batch.decodes:
            paged_decode(
                out[:first], q[:first], k, v, batch.lengths[decodes], batch.table[decodes],
                batch.queries, *options, *(scales or ()), invariant=self.invariant,
            )  # fmt: skip
        if batch.prefills and scales is None:
            rest = slice(batch.decodes, batch.decodes + batch.prefills)
            paged_prefill(
                out[first:], q[first:], k, v, batch.starts, batch.lengths[rest],
                batch.table[rest], batch.max_q, batch.max_k, *options, invariant=self.invariant,
            )  # fmt: skip
        for prompt in batch.prompts if scales is not None else ():
            rows = slice(first + prompt.begin, first + prompt.end)
            paged_decode(
                out[rows], q[rows], k, v, prompt.lengths, prompt.table, prompt.end - prompt.begin,
                *options, *(scales or ()), invariant=self.invariant,
            )  # fmt: skip

    def encode(
        self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int
    ) -> None:
        """Write into out the attention of packed sequences over their own keys, which are in no
        cache, without a causal mask. out and q (rows, heads, head_dim), k and v (rows, kv_heads,
        head_dim); bounds: int32 (sequences + 1,), where sequences begin and the last one ends;
        longest: no sequence has more rows. Raises InvalidArgument.
        """
        o = attention_varlen(
            q, k, v, bounds, bounds, longest, longest, scale=self.scale,
            window=_sides(self.window, causal=False), softcap=self.softcap,
            alibi_slopes=self.alibi_slopes, sinks=self.sinks, invariant=self.invariant,
        )  # fmt: skip
        out.copy_(o)


@dataclass(frozen=True, kw_only=True)
class Warmup:
    """A launch that makes Triton compile what serving may need: of `sequences` decodes with
    `queries` new tokens in `splits`, or, where queries is 0, of a prefill of at most max_k keys
    behind so many decodes. fused: whether Q is a slice of a projection of Q, K and V.
    """

    sequences: int
    queries: int = 0
    splits: int = 0
    max_k: int = 0
    fused: bool = False


def warmups(
    *, group: int, head_dim: int, capacity: int, queries: int, narrow: bool
) -> Iterator[Warmup]:
    """What to launch for a layer with `group` query heads per head of K and V, sequences of up to
    `capacity` keys, and decodes of up to `queries` new tokens; narrow: over a cache of 8 bits.

    A kernel follows from the rows of a head and the bucket of the keys; one binary serves one split
    and another several. Where head_dim is no multiple of 16, the strides of an odd number of rows
    are none either, nor may those of a fused Q be.
    """
    uneven = head_dim % 16 != 0
    layouts = (False, True) if uneven else (False,)
    most = max(queries, math.ceil(WIDEST_DECODE / group) + 1) if narrow else queries
    sizes = {(rows_together(group * n), n > 1, uneven and n % 2): n for n in range(1, most + 1)}
    for n in sizes.values():
        for splits in (1, 2):
            for sequences in (1, 2) if uneven else (1,):
                for fused in layouts:
                    yield Warmup(sequences=sequences, queries=n, splits=splits, fused=fused)
    if narrow:
        return
    for max_k in longest_of_each_bucket(capacity):
        for behind in (0, 1):  # a block table behind one decode has an alignment of its own
            for fused in layouts:
                yield Warmup(sequences=behind, max_k=max_k, fused=fused)


def longest_of_each_bucket(capacity: int) -> Iterator[int]:
    """A number of keys of each kernel that sequences of up to `capacity` keys may run."""
    return (min(capacity, bucket.low) for bucket in BUCKETS if bucket.low <= capacity)


def warm_up(
    case: Warmup,
    layer: PagedLayer,
    heads: tuple[int, int],
    q_dtype: torch.dtype,
    pools: tuple[Tensor, Tensor],
    pages: int,
    scales: tuple[Tensor, Tensor] | None = None,
    *,
    causal: bool = True,
) -> None:
    """Launch a case over sequences without keys. heads: of Q, and of K and V; pages: of a sequence.
    It reads the pools where page 0 is, and writes nowhere.
    """
    k, v = pools
    prefill = case.queries == 0
    sequences = case.sequences + prefill
    tokens = sequences * max(case.queries, 1)
    wide = heads[0] + 2 * heads[1] if case.fused else heads[0]
    q = torch.zeros(tokens, wide, k.shape[3], dtype=q_dtype, device=k.device)[:, : heads[0]]
    out = torch.empty(tokens, heads[0], v.shape[3], dtype=q_dtype, device=k.device)
    lengths = torch.zeros(sequences, dtype=torch.int32, device=k.device)
    table = torch.zeros(sequences, pages, dtype=torch.int32, device=k.device)
    if prefill:
        starts = torch.tensor([0, 1], dtype=torch.int32, device=k.device)
        one = PagedBatch(
            tokens=tokens, decodes=case.sequences, queries=1, prefills=1, max_q=1, max_k=case.max_k,
            starts=starts, lengths=lengths, table=table, causal=causal,
        )  # fmt: skip
        layer.attend(out, q, k, v, one)
        return
    paged_decode(
        out, q, k, v, lengths, table, case.queries, causal, layer.scale, layer.window,
        layer.softcap, layer.alibi_slopes, layer.sinks, *(scales or (None, None)), case.splits,
        layer.invariant,
    )  # fmt: skip
