"""BenchCase: what is run, one spec at one size in one direction, and the tensors of it.

The setting is that of the FlashAttention papers (16384 tokens, a model width of 2048); of decode,
full caches of 32 query heads to 8 of K and V, by batch and length. BenchInputs are random normal
numbers, the same for the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from flashgen.errors import InvalidArgument
from flashgen.evaluate import inputs
from flashgen.evaluate.inputs import in_pages, make_decode
from flashgen.inputs.cache import Cache
from flashgen.inputs.from_call import check_scale, diagonal_of
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem, bytes_moved, flops, workload
from flashgen.spec.vocabulary import DType

SEED = 20261121

TimedPass = Literal["forward", "backward", "both", "decode"]

FORWARDS: dict[TimedPass, float] = {"forward": 1.0, "backward": 2.5, "both": 3.5, "decode": 1.0}
"""Operations of a direction in those of its forward, as the FlashAttention papers count them,
whatever a contender recomputes."""

HEADS, KV_HEADS = 32, 8
PAGE_SIZES = (16, 256)


@dataclass(frozen=True, kw_only=True)
class BenchCase:
    """One spec at one size. The spec's direction is forward, or decode."""

    direction: TimedPass
    spec: AttentionSpec
    problem: Problem

    @property
    def key(self) -> str:
        """The case in one word: backward_bf16_d128_causal_b4_h16_s4096."""
        p = self.problem
        heads = f"{p.heads}" if p.heads == p.kv_heads else f"{p.heads}of{p.kv_heads}"
        spec = self.spec.name.split("_", 1)[1]
        return f"{self.direction}_{spec}_b{p.batch}_h{heads}_s{p.seq_k}"

    @property
    def operations(self) -> float:
        """Floating-point operations, by the papers' convention."""
        return FORWARDS[self.direction] * flops(self.spec, self.problem)

    @property
    def bytes(self) -> float:
        """Lower bound of the memory traffic; it limits a decode."""
        return bytes_moved(self.spec, self.problem)

    @property
    def scale(self) -> float:
        """The softmax scale."""
        return check_scale(None, self.spec.head_dim)

    @property
    def diagonal(self) -> int | None:
        """The offset of the causal diagonal, as flashgen.inputs.from_call.diagonal_of gives it."""
        return diagonal_of(self.spec.causal, self.problem.seq_q, self.problem.seq_k)


@dataclass(frozen=True, kw_only=True, eq=False)
class BenchInputs:
    """The tensors of a case: q (B, H, Sq, d), k (B, Hkv, Sk, d), v (B, Hkv, Sk, d_v), and dO of
    O's shape. For decode k and v are the cache, which `cache` and, by page size, `paged` also
    hold.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    cache: Cache | None = None
    paged: dict[int, Cache]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that the options select. batches and gigabytes (an upper bound of K and V) are
    only for decode.
    """

    directions: Sequence[TimedPass]
    dtype: DType
    head_dims: Sequence[int]
    seqs: Sequence[int]
    masks: Sequence[Literal["none", "causal"]]
    batches: Sequence[int]
    gigabytes: float = 24.0
    smoke: bool = False


def cases(sizes: Sizes) -> Iterator[BenchCase]:
    """All cases, direction by direction, then head dim, mask and length."""
    for direction in sizes.directions:
        for head_dim in sizes.head_dims:
            if direction == "decode":
                yield from _decoding(sizes, head_dim)
                continue
            for mask in sizes.masks:
                spec = AttentionSpec(
                    dtype=sizes.dtype, head_dim=head_dim, head_dim_v=head_dim, mask=mask
                )
                for seq in sizes.seqs:
                    problem = workload(spec, seq)
                    if sizes.smoke:
                        problem = replace(problem, batch=1, heads=2, kv_heads=2)
                    yield BenchCase(direction=direction, spec=spec, problem=problem)


def _decoding(sizes: Sizes, head_dim: int) -> Iterator[BenchCase]:
    """One query per sequence, so a causal mask has no effect."""
    spec = AttentionSpec(
        direction="decode",
        dtype=sizes.dtype,
        head_dim=head_dim,
        head_dim_v=head_dim,
        mask="none",
    )
    heads, kv_heads = (4, 2) if sizes.smoke else (HEADS, KV_HEADS)
    for batch in sizes.batches:
        for seq in sizes.seqs:
            problem = Problem(batch=batch, heads=heads, kv_heads=kv_heads, seq_q=1, seq_k=seq)
            case = BenchCase(direction="decode", spec=spec, problem=problem)
            if case.bytes <= sizes.gigabytes * 1e9:
                yield case


def left_out(sizes: Sizes) -> list[str]:
    """A sentence for each case of decode whose K and V exceed the allowed memory."""
    everything = {case.key for case in cases(replace(sizes, gigabytes=float("inf")))}
    small = {case.key for case in cases(sizes)}
    return [
        f"{key}: left out, K and V take more than --gigabytes {sizes.gigabytes:g}"
        for key in sorted(everything - small)
    ]


def make_inputs(case: BenchCase, device: str) -> BenchInputs:
    """The tensors of a case on a device. Raises InvalidArgument if its memory is too small."""
    try:
        if case.direction == "decode":
            return _decode_inputs(case, device)
        q, k, v = inputs.make_inputs(case.spec, case.problem, SEED, device)
        generator = torch.Generator(device=device).manual_seed(SEED + 2)
        shape = (*q.shape[:3], case.spec.head_dim_v)
        do = torch.randn(shape, generator=generator, device=device).to(q.dtype)
        return BenchInputs(q=q, k=k, v=v, do=do, paged={})
    except torch.OutOfMemoryError as error:
        raise InvalidArgument(
            f"{case.key} must fit the GPU's memory ({str(error).splitlines()[0]}): "
            "use a shorter --seq"
        ) from error


def _decode_inputs(case: BenchCase, device: str) -> BenchInputs:
    call = make_decode(case.spec, case.problem, SEED, device, sms=1)  # sms: of no use here
    paged = {size: in_pages(call.cache, size, SEED) for size in PAGE_SIZES}
    k, v = call.cache.k, call.cache.v
    return BenchInputs(q=call.q, k=k, v=v, do=torch.empty(0), cache=call.cache, paged=paged)
