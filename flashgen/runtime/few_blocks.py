"""Forwards of few blocks. Where the tiles of O leave SMs idle, the keys are split and merged as
those of a decode are, by its kernels, if that takes less time by estimate: schedules/grid_rules.py
has the rule. It depends on shapes and the table alone, so a call has the same bits at any time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from flashgen.kernels.launch_forward import Forward
from flashgen.kernels.plan import KernelCall, Plan, Result
from flashgen.runtime.choice import Choice
from flashgen.runtime.launcher import Launcher, LaunchPlan
from flashgen.runtime.selection import Selection
from flashgen.schedules.defaults import WIDEST_DECODE
from flashgen.schedules.grid_rules import (
    LAUNCH_US,
    SPLIT_FLOPS,
    WORTH_MERGING,
    forward_blocks,
    least_forward_us,
    split_forward_us,
    splits_of,
    streamed,
)
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.features import features_on
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import BUCKET_SEQ, Problem, flops, workload

LEAST_SHARE = 0.5
"""Of the matrix peak, what forwards have at least, whatever a table says: it may be of sizes that
do not fill the GPU."""
WIDTHS = (16, 32, WIDEST_DECODE)
"""Numbers of rows of a head of K that have kernels of their own."""
LONG = 4096
"""Keys from which on times of a table tell how fast tiles of keys are."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """How a forward of `blocks` blocks is split, with so many rows of a head of K: kernels, splits,
    and the expected times of both ways in us, that of the forward the least possible.
    """

    decode: Choice
    combine: Choice
    blocks: int
    rows: int
    splits: int
    us: float
    forward_us: float

    def __str__(self) -> str:
        return (
            f"{self.blocks} blocks leave SMs idle, so keys are split: {self.decode.kernel} in "
            f"{self.splits} splits, {self.us:.1f} us with {self.combine.kernel}, by estimate; not "
            f"split {self.forward_us:.1f} us at least"
        )


def may_split(spec: AttentionSpec) -> bool:
    """Whether decode kernels compute what the forward of a spec does, but for the order of sums,
    which is fixed where the spec is invariant; and whether their speed is known: of 16 bits.
    """
    decoded = all("decode" in (row.directions or ("decode",)) for row in features_on(spec))
    # Else the strides of parts of odd numbers of places would make Triton compile one more kernel.
    even = not spec.varlen or spec.head_dim_v % 16 == 0
    return decoded and even and spec.element_bytes == 2 and not spec.invariant


_every_kernel: ContextVar[bool] = ContextVar("every_kernel", default=False)


@contextlib.contextmanager
def every_kernel() -> Iterator[None]:
    """Forwards launch all kernels that calls of other lengths may run before their own, so that
    Triton compiles them.
    """
    token = _every_kernel.set(True)
    try:
        yield
    finally:
        _every_kernel.reset(token)


class ForwardLauncher(Launcher):
    """Launches the forwards of a spec, those of few blocks by two kernels.

    kernels: gives the launchers of decode and combine for so many rows of a head of K and V.
    """

    def __init__(
        self,
        package: str,
        rungs: tuple[Selection, ...],
        gpu: Gpu,
        kernels: Callable[[int], tuple[Launcher, Launcher]],
    ) -> None:
        super().__init__(package, rungs)
        self._gpu = gpu
        self._kernels = kernels
        self._of_sizes = functools.lru_cache(maxsize=256)(self._split)

    def run(self, call: KernelCall[Result], launch: LaunchPlan[Result]) -> Result:
        """As Launcher.run()."""
        forward: Any = call  # this launcher has no others
        if _every_kernel.get() and self._gpu.arch in SPLIT_FLOPS:
            super().run(forward, Plan.__call__)
            for rows in WIDTHS:
                self._in_parts(forward, rows, 2, Plan.__call__)
        if (split := self.split(forward)) is None:
            return super().run(call, launch)
        found: Result = self._in_parts(forward, split.rows, split.splits, launch)
        return found

    def _in_parts(self, call: Forward, rows: int, splits: int, launch: LaunchPlan[Any]) -> Any:
        """O and LSE by the kernels for so many rows of a head of K."""
        from flashgen.kernels.launch_cache import Combine, decode_of  # most forwards need none

        decode, combine = self._kernels(rows)
        parts = decode.run(decode_of(call, self._gpu.sms, splits), launch)
        if parts.whole:  # there is nothing to compute
            return parts.o, parts.lse
        return combine.run(Combine(parts=parts, q=call.q), launch)

    def split(self, call: Forward) -> Split | None:
        """How a call is split; None if it is not."""
        (batch, heads, seq_q, _), (_, kv_heads, seq_k, _) = call.q.shape, call.k.shape
        if (packed := call.features.sequences) is not None:
            places, batch, seq_q, seq_k = seq_q, packed.count, packed.max_q, packed.max_k
            bottom_right = call.diagonal is None or packed.bottom_right
            if places > 2 * batch * seq_q:  # parts have those of no sequence, too
                return None
        else:
            bottom_right = call.diagonal in (None, seq_k - seq_q)
        left, _ = call.features.bounds(seq_q, seq_k)
        return self._of_sizes(batch, heads, kv_heads, seq_q, seq_k, left) if bottom_right else None

    def _split(
        self, batch: int, heads: int, kv_heads: int, seq_q: int, seq_k: int, left: int
    ) -> Split | None:
        """How calls of these sizes are split, a query of which sees so many keys to the left."""
        forward, gpu = self.selection.choice, self._gpu
        problem = Problem(batch=batch, heads=heads, kv_heads=kv_heads, seq_q=seq_q, seq_k=seq_k)
        blocks = forward_blocks(forward.config, problem)
        if not 0 < blocks < gpu.sms:
            return None
        of_a_block, share = replace(problem, seq_k=min(seq_k, left)), _share(forward, gpu)
        least = least_forward_us(forward.spec, forward.config, of_a_block, gpu, share)
        if least is None or WORTH_MERGING * least <= 2 * LAUNCH_US:
            return None
        seen, rows = streamed(problem, left), problem.group * seq_q
        decode, combine = (each.selection.choice for each in self._kernels(rows))
        us = split_forward_us(decode.spec, decode.config, seen, gpu)
        if us is None or us >= WORTH_MERGING * least:
            return None
        return Split(
            decode=decode, combine=combine, blocks=blocks, rows=rows,
            splits=splits_of(decode.config, seen, gpu.sms), us=us, forward_us=least,
        )  # fmt: skip


def _share(forward: Choice, gpu: Gpu) -> float:
    """The most of an SM's matrix peak that a block has there alone: that of the table, where blocks
    share an SM and memory; but all of it for roles of warps, where the table has no time, and of
    short sequences, whose time is spent on diagonals and on the begin and end of blocks, too.
    """
    us, bucket, peak = forward.median_us, forward.bucket, gpu.peak_tflops
    if us is None or bucket is None or peak is None or forward.config.specialized:
        return 1.0
    if bucket.low < LONG:
        return 1.0
    work = flops(forward.spec, workload(forward.spec, BUCKET_SEQ[bucket]))
    return min(1.0, max(LEAST_SHARE, work / us * 1e-6 / peak))
