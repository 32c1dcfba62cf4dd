"""Sizes of a run (Problem), the interval of lengths it belongs to (Bucket), and its flops and
bytes.

They decide how long a kernel runs, never which kernels are possible.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import geometric_mean
from typing import Any

from flashgen.errors import InvalidArgument
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.vocabulary import DECODING, PRODUCTS


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The sizes one run has. Any may be 0.

    Args:
        batch: sequences.
        heads: of Q.
        kv_heads: of K and V; they divide heads.
        seq_q: queries of a sequence; of packed sequences, of the longest (sequences_of).
        seq_k: keys likewise.

    Raises:
        InvalidArgument: naming the field.

    Examples:
        >>> from flashgen.spec import Problem
        >>> Problem(batch=2, heads=8, kv_heads=2, seq_q=1, seq_k=4096).seq_k
        4096
    """

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int

    def __post_init__(self) -> None:
        for field in ("batch", "heads", "kv_heads", "seq_q", "seq_k"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InvalidArgument(f"{field} must be a whole number >= 0: got {value!r}")
        if self.kv_heads == 0 and self.heads == 0:
            return
        if self.kv_heads == 0 or self.heads % self.kv_heads:
            raise InvalidArgument(
                f"heads must be a multiple of kv_heads: got {self.heads} and {self.kv_heads}"
            )

    @property
    def group(self) -> int:
        """Query heads per head of K and V."""
        return self.heads // self.kv_heads if self.kv_heads else 1

    @property
    def empty(self) -> bool:
        """Whether there are no queries, so nothing is computed."""
        return 0 in (self.batch, self.heads, self.seq_q)

    @property
    def label(self) -> str:
        """The sizes in one word, as in tables: b8_h32_s2048, or b64_h32_kv8_q1_k2048."""
        kv_heads = "" if self.kv_heads == self.heads else f"_kv{self.kv_heads}"
        seq = f"s{self.seq_k}" if self.seq_q == self.seq_k else f"q{self.seq_q}_k{self.seq_k}"
        return f"b{self.batch}_h{self.heads}{kv_heads}_{seq}"


_N = r"(\d{1,18})"
_LABEL = rf"b{_N}_h{_N}(?:_kv{_N})?_(?:s{_N}|q{_N}_k{_N})"


@functools.lru_cache(1024)
def problem_of(label: str) -> Problem:
    """The sizes that a label names. Raises InvalidArgument."""
    found = re.fullmatch(_LABEL, label, re.ASCII)
    if found is None:
        raise InvalidArgument(
            f"problem must be like b8_h32_s2048 or b64_h32_kv8_q1_k2048: got {label!r}"
        )
    batch, heads, kv_heads, seq, seq_q, seq_k = found.groups()
    return Problem(
        batch=int(batch),
        heads=int(heads),
        kv_heads=int(kv_heads or heads),
        seq_q=int(seq or seq_q),
        seq_k=int(seq or seq_k),
    )


@dataclass(frozen=True, kw_only=True, order=True)
class Bucket:
    """A half-open interval of seq_k, [low, high); high None has no end."""

    low: int
    high: int | None

    def __str__(self) -> str:
        return f"[{self.low}, {'inf' if self.high is None else self.high})"

    def __contains__(self, seq_k: int) -> bool:
        return self.low <= seq_k and (self.high is None or seq_k < self.high)


BUCKETS = (
    Bucket(low=1, high=1024),
    Bucket(low=1024, high=4096),
    Bucket(low=4096, high=16384),
    Bucket(low=16384, high=None),
)
"""The only buckets there are. Coarse on purpose: a reviewer can read a table of four rows a
spec.
"""

BUCKET_SEQ = dict(zip(BUCKETS, (512, 2048, 8192, 16384), strict=True))
"""The default length of each bucket."""


def bucket_of(seq_k: int) -> Bucket:
    """The bucket that holds seq_k; 0 keys belong to the first."""
    for bucket in BUCKETS:
        if bucket.high is None or seq_k < bucket.high:
            return bucket
    raise AssertionError("the last bucket has no end")


LONGEST_SEQ = 1 << 24
"""Of what is tuned. An estimate counts every tile of a head, and one of so many takes seconds."""


TUNED_TOKENS = 16384
"""Of all sequences together."""

PREFILL_CHUNK = 2048
"""Queries of a sequence, at most, that a paged forward is measured and estimated with: servers
prefill a long prompt in chunks, each over all keys before it. 2,048 is a default of vLLM."""

LEAST_PACKED = 4
"""Packed sequences, at least, of a packed spec as it is measured and estimated."""

PAGE_SIZE = 16
"""Keys to a page: the smallest that serving engines use by default."""

SHORTEST_SHARE = 1 / 16
GOLDEN_SHARE = (math.sqrt(5) - 1) / 2


def workload(spec: AttentionSpec, seq: int) -> Problem:
    """The problem that tuning runs at length `seq`: 16384 tokens and a model width of 2048.

    That is the setting of the FlashAttention-2 paper (arXiv 2307.08691, section 4.1). It fills a
    GPU at every length up to 16384; longer sequences run with a batch of one. Packed sequences
    (varlen) have mixed lengths, of which `seq` is the longest (sequences_of): twice as many, so
    about as many tokens. Over a paged cache the queries are the last PREFILL_CHUNK.
    """
    if not 1 <= seq <= LONGEST_SEQ:
        raise InvalidArgument(f"seq must be from 1 to {LONGEST_SEQ}: got {seq}")
    if spec.direction in DECODING:
        return _decoding_workload(spec, seq)
    heads = max(1, 2048 // spec.head_dim)
    batch = max(1, TUNED_TOKENS // seq)
    if spec.varlen:
        batch = max(LEAST_PACKED, 2 * TUNED_TOKENS // seq)
    seq_q = min(seq, PREFILL_CHUNK) if spec.paged else seq
    return Problem(batch=batch, heads=heads, kv_heads=heads, seq_q=seq_q, seq_k=seq)


@functools.lru_cache(256)
def sequences_of(spec: AttentionSpec, problem: Problem) -> tuple[Problem, ...]:
    """What a run consists of: the problem itself or, of packed sequences, a problem of batch 1 for
    each of them, in the order in which they are packed.

    Packed lengths are mixed, as in traffic: the first sequence is the longest, and the share of
    its length that sequence i has falls from 1 to SHORTEST_SHARE with the fractional part of
    i * GOLDEN_SHARE. So any number of neighbours covers all lengths evenly, the mean is about half
    of the longest, and tile sizes divide no more of the lengths than chance would have it.
    """
    if not spec.varlen:
        return (problem,)
    shares = [1 - (1 - SHORTEST_SHARE) * (i * GOLDEN_SHARE % 1) for i in range(problem.batch)]
    return tuple(
        replace(
            problem,
            batch=1,
            seq_q=math.ceil(share * problem.seq_q),
            seq_k=math.ceil(share * problem.seq_k),
        )
        for share in shares
    )


def _decoding_workload(spec: AttentionSpec, seq: int) -> Problem:
    """64 sequences of `seq` keys, 32 query heads to 8 of K and V: Llama 3 8B at a usual batch.

    One query each; under a causal mask four, as speculative decoding has: one is as without a mask.
    combine merges `seq` parts; append adds one key.
    """
    heads = 32 if spec.direction == "combine" else 8
    queries = 4 if spec.causal else 1
    return Problem(batch=64, heads=32, kv_heads=heads, seq_q=queries, seq_k=seq)


DECODE_BATCHES = (1, 4, 16, 64)
"""A server decodes as many sequences as there are requests."""


def timed_problems(spec: AttentionSpec, problem: Problem) -> tuple[Problem, ...]:
    """What is timed for a problem: of a decode also fewer sequences, those of DECODE_BATCHES, the
    fewest first; else itself alone.
    """
    if spec.direction != "decode":
        return (problem,)
    fewer = [batch for batch in DECODE_BATCHES if batch < problem.batch]
    return (*(replace(problem, batch=batch) for batch in fewer), problem)


def mean_work(
    work: Callable[[AttentionSpec, Problem], float], spec: AttentionSpec, problem: Problem
) -> float:
    """What work gives for the timed_problems: their geometric mean, as their time is."""
    each = [work(spec, one) for one in timed_problems(spec, problem)]
    return geometric_mean(each) if each[1:] else each[0]


TUNED_WINDOW = 4096
"""Keys on each side of the window that a windowed spec is measured and estimated with, to the left
alone under a causal mask; that of Mistral 7B and Gemma 2. A Problem names none, so shorter lengths
are tuned as if unmasked on that side.
"""


TUNED_CHUNK = 8192
"""Keys of a chunk that a spec with chunks is measured and estimated with: that of Llama 4."""

TUNED_DOCUMENT = 1024
"""Tokens of each document of the mask that a spec with a block mask is measured and estimated with,
a causal one beside it: packed training texts. A Problem names none.
"""


def tuned_limits(spec: AttentionSpec) -> dict[str, Any]:
    """The fields of Features that limit which keys a query sees, as a spec is measured."""
    right = -1 if spec.causal else TUNED_WINDOW
    return {
        "window": (TUNED_WINDOW, right) if spec.window else None,
        "chunk": TUNED_CHUNK if spec.chunk else 0,
    }


def tuned_reach(spec: AttentionSpec) -> int:
    """The most keys before its own that a query sees, of a measured spec that hides first keys."""
    return TUNED_CHUNK - 1 if spec.chunk else TUNED_WINDOW


def first_key(spec: AttentionSpec, place: int) -> int:
    """The first key that a query at key `place` sees, of a measured spec that hides the first keys;
    below 0 where that is before all keys.
    """
    return place - (place % TUNED_CHUNK if spec.chunk else TUNED_WINDOW)


def end_of_rows(spec: AttentionSpec, key: int) -> int:
    """One behind the key at which the last query stands that sees `key`, of such a spec."""
    return key + (TUNED_CHUNK - key % TUNED_CHUNK if spec.chunk else TUNED_WINDOW + 1)


def flops(spec: AttentionSpec, problem: Problem) -> float:
    """Floating-point operations of the kernel's matrix products; under a causal mask those up to
    the diagonal, half for as many keys as queries; of a windowed spec those inside a window of
    TUNED_WINDOW, of chunks those of TUNED_CHUNK, of a block mask those inside documents of
    TUNED_DOCUMENT.

    Forward: 4 * batch * heads * seq_q * seq_k * head_dim (FlashAttention-2, section 4.1). The
    backward kernels count every product they make, recomputed ones too: S and dP in each, so the
    sum over a pass of two kernels is 3.5 forwards where the papers count 2.5.
    """
    return sum(_flops(spec, each) for each in sequences_of(spec, problem))


def _flops(spec: AttentionSpec, problem: Problem) -> float:
    """flops() of sequences of one length."""
    rows = 2.0 * problem.batch * problem.heads * problem.seq_q
    if spec.direction == "backward_delta":
        return rows * spec.head_dim_v
    if spec.direction in ("combine", "append"):  # O times a weight, for each of seq_k parts
        return rows * problem.seq_k * spec.head_dim_v if spec.direction == "combine" else 0.0
    dims, dims_v = PRODUCTS[spec.direction]
    return 2.0 * _pairs(spec, problem) * (dims * spec.head_dim + dims_v * spec.head_dim_v)


def _pairs(spec: AttentionSpec, problem: Problem) -> float:
    """The pairs of a query and a key that see each other, of all heads."""
    full = 1.0 * problem.batch * problem.heads * problem.seq_q * problem.seq_k
    if spec.block_mask:  # documents, and half of each
        return full * min(1.0, TUNED_DOCUMENT / max(1, problem.seq_k)) / 2
    if spec.chunk:
        return full * _share_in_chunks(problem)
    if spec.window:
        return full * (1 - _share_outside(spec, problem))
    return full * (1 - _share_behind(problem)) if spec.causal else full


def _share_behind(problem: Problem) -> float:
    """The share of all pairs of a query and a key that lie behind a bottom-right causal diagonal,
    half of it counted in: 0.5 where there are as many keys as queries.
    """
    seq_q, seq_k = problem.seq_q, problem.seq_k
    if seq_q <= seq_k:
        return seq_q / (2 * seq_k) if seq_k else 0.0
    return 1 - seq_k / (2 * seq_q)


def _share_in_chunks(problem: Problem) -> float:
    """The share of all pairs of a query and a key that lie in one chunk, under a causal mask."""
    seq_q, seq_k = problem.seq_q, problem.seq_k
    if 0 in (seq_q, seq_k):
        return 0.0

    def pairs(places: int) -> int:
        whole, rest = divmod(places, TUNED_CHUNK)
        return whole * TUNED_CHUNK * (TUNED_CHUNK + 1) // 2 + rest * (rest + 1) // 2

    return (pairs(seq_k) - pairs(max(seq_k - seq_q, 0))) / (seq_q * seq_k)


def _share_outside(spec: AttentionSpec, problem: Problem) -> float:
    """The share of all pairs of a query and a key that lie outside the tuned window: triangles."""
    seq_q, seq_k = problem.seq_q, problem.seq_k
    if 0 in (seq_q, seq_k):
        return 0.0

    def triangle(edge: int) -> float:
        return max(edge, 0) ** 2 / 2

    before = triangle(seq_k - TUNED_WINDOW) - triangle(seq_k - seq_q - TUNED_WINDOW)
    behind = triangle(seq_q - TUNED_WINDOW) - triangle(seq_q - seq_k - TUNED_WINDOW)
    before, behind = before / (seq_q * seq_k), behind / (seq_q * seq_k)
    if spec.causal:
        behind = _share_behind(problem)
    return before + behind


def bytes_moved(spec: AttentionSpec, problem: Problem) -> float:
    """The least bytes that pass between memory and L2: each tensor once.

    A bias is taken to be the same for all batches and heads.
    """
    return sum(_bytes_moved(spec, each) for each in sequences_of(spec, problem))


def _bytes_moved(spec: AttentionSpec, problem: Problem) -> float:
    """bytes_moved() of sequences of one length."""
    rows = problem.batch * problem.heads * problem.seq_q
    keys = problem.batch * problem.kv_heads * problem.seq_k
    if spec.direction == "decode" and spec.hides_first_keys:
        # The cache is read as far as the queries see together (grid_rules.streamed).
        keys = keys // max(1, problem.seq_k) * min(problem.seq_k, tuned_reach(spec) + problem.seq_q)
    dims = spec.head_dim + spec.head_dim_v
    ds = _pairs(spec, problem)  # its elements that are written, and read
    elements = {
        "forward": (rows + keys) * dims,  # Q, O; K, V
        "backward_delta": 2 * rows * spec.head_dim_v,  # O, dO
        "backward_dkv": (rows + 2 * keys) * dims,  # Q, dO; K, V, dK, dV
        "backward_dq": (rows + keys) * dims + rows * spec.head_dim,  # Q, dO, dQ; K, V
        "backward_fused": (rows + 2 * keys) * dims + 2 * rows * spec.head_dim,  # dQ in float32
        "backward_dbias": (rows + keys) * dims,
        "backward_ds": (rows + 2 * keys) * dims + ds,  # as backward_dkv
        "backward_dq_of_ds": (rows + keys) * spec.head_dim + ds,  # dQ; K
        "decode": (rows + keys) * dims,
        "combine": rows * spec.head_dim_v,
        "append": 2 * problem.batch * problem.kv_heads * dims,
    }[spec.direction]
    once = spec.direction in ("forward", "backward_delta", *DECODING)
    of_a_row = 4.0 if once else 8.0  # LSE, delta
    if spec.direction == "backward_dq_of_ds":
        of_a_row = 0.0
    if spec.direction == "combine":  # seq_k parts, in float32
        of_a_row += 4.0 * problem.seq_k * (spec.head_dim_v + 1)
    bias = 0.0
    if spec.bias != "none":
        bias = problem.seq_q * problem.seq_k * (1 if spec.bias == "boolean" else spec.element_bytes)
    narrow = 0.0
    if spec.kv_dtype != "same" and spec.direction == "decode":
        narrow = keys * dims * (spec.element_bytes - spec.kv_bytes)
    if spec.fp8:
        narrow = elements - rows * spec.head_dim_v  # all but O
    return elements * spec.element_bytes - narrow + rows * of_a_row + bias
