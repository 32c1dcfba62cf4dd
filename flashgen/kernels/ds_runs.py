"""The runs of gradients by dS in memory: whose dS is there at once, and how long they take.

dS of all heads may be larger than memory, so it is there for one run of blocks at a time. Times are
in rows that a block of dK and dV walks.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from flashgen.inputs.features import UNBOUNDED, Features
from flashgen.schedules.legality import DS_TILE
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem, sequences_of, tuned_limits
from flashgen.spec.vocabulary import padded

FIXED_ROWS = 320
"""What the two launches of a run take besides: each begins with 4 us that nothing hides, in which a
block walks 160 rows (forward and dK/dV of head dim 128 on an H200, 26 November 2026)."""

MOST_RUNS = 1024
"""Runs of keys at most. Each launches two kernels of few blocks, so that more of them are slower
than the pair; and packed sequences of other lengths at each step would need a plan each."""
TRIED = 64
"""Numbers of heads of a run that are compared, from the most on: with more than these a run has so
many blocks that none is better filled."""


@dataclass(frozen=True, kw_only=True)
class DsRun:
    """Blocks of dK and dV whose dS is in memory at once: of `heads` heads of Q from first_head on,
    of all sequences one behind the other, and of `keys` keys from first_key on.

    Either these are all keys, or the heads are those of one head of K. first_key is a multiple of
    DS_TILE. keys_follow: a later run has the next keys of these heads.
    """

    first_head: int
    heads: int
    keys: int
    first_key: int = 0
    keys_follow: bool = False


@dataclass(frozen=True, kw_only=True)
class DsSizes:
    """Of a call: sequences, heads of Q, heads of K, and queries, keys and head dim of the longest.
    element_bytes: those of an element of dS. diagonal, reach: row i sees keys i + diagonal - reach
    to i + diagonal; None where it sees all on that side. mean: how long sequences are in the mean,
    as a share of the longest; 1 unless packed ones differ.
    """

    sequences: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int
    head_dim: int
    element_bytes: int
    diagonal: int | None = None
    reach: int | None = None
    mean: float = 1.0

    @classmethod
    def of(cls, q: Tensor, k: Tensor, diagonal: int | None, features: Features) -> DsSizes:
        """Those of these tensors."""
        batch, heads, seq_q, head_dim = q.shape
        seq_k, packed, mean = k.shape[2], features.sequences, 1.0
        shift, causal = seq_k - seq_q if diagonal is None else diagonal, diagonal is not None
        if packed is not None:
            batch, seq_q, seq_k = packed.count, max(1, packed.max_q), max(1, packed.max_k)
            shift, mean = seq_k - seq_q, min(1.0, k.shape[2] / max(1, batch * seq_k))
        last, reach = _seen(shift, causal, features.window, features.chunk)
        return cls(
            sequences=batch, heads=heads, kv_heads=k.shape[1], seq_q=seq_q, seq_k=seq_k,
            head_dim=head_dim, element_bytes=q.element_size(), diagonal=last, reach=reach,
            mean=mean,
        )  # fmt: skip

    @classmethod
    def of_problem(cls, spec: AttentionSpec, problem: Problem) -> DsSizes:
        """Those of a problem as it is timed."""
        limits = tuned_limits(spec)
        shift = problem.seq_k - problem.seq_q
        last, reach = _seen(shift, spec.causal, limits["window"], limits["chunk"])
        keys = [each.seq_k for each in sequences_of(spec, problem)]
        return cls(
            sequences=problem.batch, heads=problem.heads, kv_heads=problem.kv_heads,
            seq_q=problem.seq_q, seq_k=problem.seq_k, head_dim=spec.head_dim,
            element_bytes=spec.element_bytes, diagonal=last, reach=reach,
            mean=sum(keys) / max(1, len(keys) * problem.seq_k),
        )  # fmt: skip

    @property
    def group(self) -> int:
        """Heads of Q that share a head of K."""
        return self.heads // self.kv_heads

    @property
    def whole(self) -> DsRun:
        """All blocks."""
        return DsRun(first_head=0, heads=self.sequences * self.heads, keys=self.seq_k)

    @property
    def rows_of_a_key(self) -> int:
        """Rows that a key has in memory: those of the tiles of dS in which rows see any of DS_TILE
        keys.
        """
        rows = _in_tiles(self.seq_q)
        if self.reach is None:
            return rows
        seen = DS_TILE + self.reach  # of which the first lies anywhere in its tile
        return min(rows, ((seen + DS_TILE - 2) // DS_TILE + 1) * DS_TILE)

    def ds_shape(self, run: DsRun) -> tuple[int, int, int, int]:
        """The shape of dS of a run, of whole tiles; keys are rows."""
        return 1, run.heads, _in_tiles(run.keys), _in_tiles(self.seq_q)

    def ds_strides(self, run: DsRun) -> tuple[int, int, int, int]:
        """Its strides. From a key to the next there are rows_of_a_key: where those are not all
        rows, two keys share memory, but not where both are seen. A later tile of keys is not seen
        by an earlier row, so the rows of a key end before those of the next begin. Descriptors of
        packed sequences overlap likewise.
        """
        rows, keys = self.rows_of_a_key, _in_tiles(run.keys)
        of_a_head = (keys - 1) * rows + _in_tiles(self.seq_q)
        return run.heads * of_a_head, of_a_head, rows, 1

    def ds_bytes(self, run: DsRun) -> int:
        """Bytes of dS of a run."""
        return self.ds_strides(run)[0] * self.element_bytes

    def sum_bytes(self, run: DsRun) -> int:
        """Bytes of the sum of a run, where it has not all keys of its heads."""
        ranges = run.keys < self.seq_k
        return run.heads * self.seq_q * padded(self.head_dim) * 4 * ranges

    def run_bytes(self, run: DsRun) -> int:
        """Bytes of both."""
        return self.ds_bytes(run) + self.sum_bytes(run)


def _seen(
    shift: int, causal: bool, window: tuple[int, int] | None, chunk: int
) -> tuple[int | None, int | None]:
    """Diagonal and reach of DsSizes, where row i lies at key i + shift."""
    left, right = window or (chunk - 1 if chunk else UNBOUNDED, UNBOUNDED)
    right = 0 if causal else right
    if right == UNBOUNDED:
        return None, None
    return shift + right, None if left == UNBOUNDED else left + right


def _in_tiles(length: int) -> int:
    """A number of rows or keys in whole tiles of dS."""
    return -(-length // DS_TILE) * DS_TILE


def runs_of(of: DsSizes, most: int, bc: int = DS_TILE, slots: int = 1) -> tuple[DsRun, ...]:
    """The runs of a call in the order in which dQ adds them up, of which none has more than `most`
    bytes of dS and sum: of several ways that which takes the least time, where a block of dK and
    dV has bc keys and the GPU has room for so many at once. () where a tile of keys of one head of
    K has more bytes, or there were more than MOST_RUNS.
    """
    one = DsRun(first_head=0, heads=of.group, keys=of.seq_k)
    blocks = of.whole.heads // of.group
    together = min(most // of.ds_bytes(one), blocks)
    if together == blocks:
        return (of.whole,)
    if together:
        count = TRIED if of.mean == 1.0 else 1  # of other lengths the fewest runs are best
        tried = range(together, max(0, together - count), -1)
        heads = min(tried, key=lambda n: _of_equal_runs(of, n, blocks, bc, slots)) * of.group
        return tuple(_of_heads(of, heads))
    tile, two = (DsRun(first_head=0, heads=of.group, keys=n * DS_TILE) for n in (1, 2))
    if most < of.run_bytes(tile):
        return ()
    more = (most - of.run_bytes(tile)) // (of.ds_bytes(two) - of.ds_bytes(tile))
    keys = (1 + more) * DS_TILE
    if blocks * -(-of.seq_k // keys) > MOST_RUNS:
        return ()
    return tuple(_of_keys(of, keys))


def _of_heads(of: DsSizes, heads: int) -> Iterator[DsRun]:
    """Runs of all keys of so many heads."""
    every = of.whole.heads
    for first in range(0, every, heads):
        yield DsRun(first_head=first, heads=min(heads, every - first), keys=of.seq_k)


def _of_keys(of: DsSizes, keys: int) -> Iterator[DsRun]:
    """Runs of so many keys of each head of K."""
    for first_head in range(0, of.whole.heads, of.group):
        for first_key in range(0, of.seq_k, keys):
            behind = first_key + keys
            yield DsRun(
                first_head=first_head, heads=of.group, keys=min(keys, of.seq_k - first_key),
                first_key=first_key, keys_follow=behind < of.seq_k,
            )  # fmt: skip


def duration(of: DsSizes, runs: Sequence[DsRun], bc: int, slots: int) -> float:
    """The time of dK and dV of these runs, one after another."""
    alike = Counter((run.heads // of.group, run.first_key, run.keys) for run in runs)
    return sum(count * _of_run(of, *run, bc, slots) for run, count in alike.items())


def _of_equal_runs(of: DsSizes, heads: int, all_heads: int, bc: int, slots: int) -> float:
    """The time of runs of so many heads of K and all keys, of which the last has the rest."""
    whole, rest = divmod(all_heads, heads)
    took = whole * _of_run(of, heads, 0, of.seq_k, bc, slots)
    return took + (_of_run(of, rest, 0, of.seq_k, bc, slots) if rest else 0.0)


@functools.lru_cache(maxsize=4096)
def _of_run(of: DsSizes, heads: int, first_key: int, keys: int, bc: int, slots: int) -> float:
    """The least time of the blocks of so many heads of K, which begin in the order of their
    lengths: that of all of them over all slots; and n + 1 times the length of a block before which
    n in each slot begin. Of packed sequences that differ, the most time that any lengths of this
    mean may take, but that they add up to as much work as those of the mean length.
    """
    walked = sorted(
        (of.group * _walked(of, key, bc) for key in range(first_key, first_key + keys, bc)),
        reverse=True,
    )
    of_all = heads * sum(walked) / slots
    if of.mean < 1.0:
        # A block of a window walks as many rows in a short sequence.
        share = of.mean if of.reach is not None else of.mean**2
        return FIXED_ROWS + of_all * share + max(walked, default=0)
    waves = range(-(-heads * len(walked) // slots))
    least = max(((n + 1) * walked[n * slots // heads] for n in waves), default=0)
    return FIXED_ROWS + max(of_all, least)


def _walked(of: DsSizes, key: int, bc: int) -> int:
    """How many rows see one of bc keys."""
    if of.diagonal is None:
        return of.seq_q
    behind = of.seq_q if of.reach is None else key + bc - of.diagonal + of.reach
    return max(0, min(of.seq_q, behind) - max(0, key - of.diagonal))


@dataclass(frozen=True, kw_only=True)
class DsPlan:
    """Runs of a call, and how many times as long their dK and dV take as of one run."""

    runs: tuple[DsRun, ...]
    stretch: float


@functools.lru_cache(maxsize=64)
def planned(of: DsSizes, most: int, bc: int, slots: int) -> DsPlan | None:
    """The runs of a call, as runs_of(); None without any."""
    runs = runs_of(of, most, bc, slots) if 0 not in (of.whole.heads, of.seq_q, of.seq_k) else ()
    if not runs:
        return None
    took, whole = duration(of, runs, bc, slots), duration(of, [of.whole], bc, slots)
    return DsPlan(runs=runs, stretch=took / whole)
