"""Tensors to time a kernel on: the inputs of a spec and a problem, and launches ready to repeat.

A decode launch is everything a call waits for: the split kernel, and the combine kernel where there
are several splits. The cache is full, so every program has work. Pages of PAGE_SIZE lie in memory
in random order.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.errors import InvalidArgument
from flashgen.evaluate.measure import LaunchOnce
from flashgen.files import write_whole
from flashgen.inputs.block_mask import BlockMask
from flashgen.inputs.features import Features, Fp8
from flashgen.inputs.from_call import check_scale, diagonal_of
from flashgen.inputs.packed import Sequences, from_bounds
from flashgen.kernels.render import render
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.space import tuned_default
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.features import PER_HEAD
from flashgen.spec.problem import (
    PAGE_SIZE,
    TUNED_DOCUMENT,
    Problem,
    sequences_of,
    tuned_limits,
)
from flashgen.spec.vocabulary import DECODING

if TYPE_CHECKING:
    from torch import Tensor

    from flashgen.inputs.cache import Cache
    from flashgen.kernels.launch_backward import Backward
    from flashgen.kernels.launch_cache import Decode
    from flashgen.kernels.launch_ds import DqOfDs
    from flashgen.kernels.launch_forward import Forward


def kernel_in(folder: Path, spec: AttentionSpec, config: KernelConfig) -> Any:
    """A kernel, loaded from the file that is written for it in `folder`."""
    from flashgen.kernels.loader import load_kernel

    rendered = render(spec, config)
    path = folder / f"{rendered.name}.py"
    write_whole(path, rendered.source)
    return load_kernel(path, rendered.text_name, rendered.name)


def make_inputs(
    spec: AttentionSpec, problem: Problem, seed: int, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Standard normal q (B, H, Sq, d), k (B, Hkv, Sk, d), v (B, Hkv, Sk, d_v), the same for the
    same seed. For a spec with varlen packed, the sequences of sequences_of(): (1, H, places, d) and
    so on, heads inside the sequence as projections leave them; keys in pages, (pages, Hkv,
    PAGE_SIZE, d) and so on.
    """
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return drawn.to(getattr(torch, spec.operand_dtype))

    if not spec.varlen:
        of_keys = (problem.batch, problem.kv_heads, problem.seq_k)
        return (
            normal(problem.batch, problem.heads, problem.seq_q, spec.head_dim),
            normal(*of_keys, spec.head_dim),
            normal(*of_keys, spec.head_dim_v),
        )
    sequences = sequences_of(spec, problem)
    places: tuple[int, ...] = (1, sum(each.seq_k for each in sequences))
    if spec.paged:
        places = problem.batch * _pages_of_a_row(problem), PAGE_SIZE
    drawn = (
        normal(1, sum(each.seq_q for each in sequences), problem.heads, spec.head_dim),
        normal(*places, problem.kv_heads, spec.head_dim),
        normal(*places, problem.kv_heads, spec.head_dim_v),
    )
    q, k, v = (each.transpose(1, 2) for each in drawn)
    return q, k, v


def _pages_of_a_row(problem: Problem) -> int:
    """The pages of each sequence: the longest fits."""
    return -(-problem.seq_k // PAGE_SIZE)


def make_features(spec: AttentionSpec, problem: Problem, seed: int, device: str) -> Features:
    """The spec's features: a bias or mask shared by batches and heads, numbers of heads from 0 to
    1, a tenth dropped, the limits of tuned_limits, Gemma 2's cap of 50; the packed sequences of
    sequences_of(); documents of TUNED_DOCUMENT tokens under a causal mask.
    """
    import torch

    generator = torch.Generator(device=device).manual_seed(seed + 1)
    bias = None
    if spec.bias != "none":
        shape = (1, 1, problem.seq_q, problem.seq_k)
        bias = torch.randn(shape, generator=generator, device=device)
        bias = bias > -1.0 if spec.bias == "boolean" else bias.to(getattr(torch, spec.dtype))
    of_heads: dict[str, Any] = {
        name: torch.rand(problem.heads, generator=generator, device=device)
        for name, row in PER_HEAD.items()
        if getattr(spec, row.field)
    }
    return Features(
        bias=bias,
        dropout_p=0.1 if spec.dropout else 0.0,
        rng=torch.tensor([seed, 0], device=device) if spec.dropout else None,
        **tuned_limits(spec),
        softcap=50.0 if spec.softcap else 0.0,
        fp8=ones_of_fp8(spec, problem, device) if spec.fp8 else None,
        sequences=_packed(spec, problem, seed, device) if spec.varlen else None,
        block_mask=_documents(problem, device) if spec.block_mask else None,
        **of_heads,
    )


def _documents(problem: Problem, device: str) -> BlockMask:
    import torch

    from flashgen.runtime.block_mask import document

    of_q, of_k = (
        torch.arange(length, device=device) // TUNED_DOCUMENT
        for length in (problem.seq_q, problem.seq_k)
    )
    return document(of_q, of_k, causal=True)


def _packed(spec: AttentionSpec, problem: Problem, seed: int, device: str) -> Sequences:
    """The bounds of the sequences of sequences_of(); their pages in a random order."""
    import torch

    sequences = sequences_of(spec, problem)

    def bounds(lengths: list[int]) -> Tensor:
        ends = [0, *itertools.accumulate(lengths)]
        return torch.tensor(ends, dtype=torch.int32, device=device)

    table = None
    if spec.paged:
        each = _pages_of_a_row(problem)
        generator = torch.Generator().manual_seed(seed)
        table = torch.randperm(problem.batch * each, generator=generator).int().to(device)
        table = table.view(problem.batch, each)
    return from_bounds(
        bounds([each.seq_q for each in sequences]),
        bounds([each.seq_k for each in sequences]),
        problem.seq_q,
        problem.seq_k,
        block_table=table,
        page_size=PAGE_SIZE,
    )


def ones_of_fp8(spec: AttentionSpec, problem: Problem, device: str) -> Fp8:
    """Factors of 1 for all heads: their values change no time."""
    import torch

    one = torch.ones(1, 1, device=device).expand(problem.batch, problem.kv_heads)
    return Fp8(q_descale=one, k_descale=one, v_descale=one, dtype=spec.dtype)


def make_call(spec: AttentionSpec, problem: Problem, seed: int, device: str, folder: Path) -> Any:
    """What the kernels of a spec are called with to be timed, on a GPU. What they need of other
    kernels is computed by the default ones, which are written to `folder`.
    """
    if spec.direction in DECODING:
        from flashgen.kernels.launch import device_gpu

        sms = device_gpu(int(device.removeprefix("cuda:"))).sms
        return make_decode(spec, problem, seed, device, sms)
    if spec.direction == "forward":
        return make_forward(spec, problem, seed, device)
    from flashgen.kernels.launch_backward import Delta

    if spec.direction == "backward_dq_of_ds":
        return make_dq_of_ds(spec, problem, seed, device)
    o, call = make_backward(spec, problem, seed, device, folder)
    return Delta(o=o, do=call.do, dlse=None) if spec.direction == "backward_delta" else call


def make_forward(spec: AttentionSpec, problem: Problem, seed: int, device: str) -> Forward:
    """A call of a forward kernel on random normal inputs."""
    from flashgen.kernels.launch_forward import Forward

    q, k, v = make_inputs(spec, problem, seed, device)
    return Forward(
        q=q,
        k=k,
        v=v,
        scale=check_scale(None, spec.head_dim),
        diagonal=diagonal_of(spec.causal, problem.seq_q, problem.seq_k),
        features=make_features(spec, problem, seed, device),
    )


def make_backward(
    spec: AttentionSpec, problem: Problem, seed: int, device: str, folder: Path
) -> tuple[Tensor, Backward]:
    """O and the rest of what the backward kernels of a spec read, O and LSE by its default forward
    kernel, which is written to `folder`.

    Made-up ones would not do: LSE decides the size of P, and so what the matrix unit multiplies.
    """
    import torch

    from flashgen.kernels.launch import bind
    from flashgen.kernels.launch_backward import Backward

    forward = spec.for_direction("forward")
    config = tuned_default(forward)
    call = make_forward(forward, problem, seed, device)
    o, lse = bind(kernel_in(folder, forward, config), forward, config)(call)
    generator = torch.Generator(device=device).manual_seed(seed + 2)
    do = torch.randn(o.shape, generator=generator, device=device).to(o.dtype)
    delta = (o.float() * do.float()).sum(-1)
    given = {name: getattr(call, name) for name in ("q", "k", "v", "scale", "diagonal", "features")}
    return o, Backward(**given, do=do, lse=lse, delta=delta)


def make_dq_of_ds(spec: AttentionSpec, problem: Problem, seed: int, device: str) -> DqOfDs:
    """A call of dQ = dS K on random normal inputs."""
    from flashgen.kernels.ds_runs import DsSizes
    from flashgen.kernels.launch_ds import DqOfDs, ds_like

    call = make_forward(spec, problem, seed, device)
    ds = ds_like(call.q, DsSizes.of(call.q, call.k, call.diagonal, call.features)).normal_()
    given = {name: getattr(call, name) for name in ("q", "k", "scale", "diagonal", "features")}
    return DqOfDs(**given, ds=ds)


def make_decode(spec: AttentionSpec, problem: Problem, seed: int, device: str, sms: int) -> Decode:
    """A call of decode on random normal inputs; every sequence has problem.seq_k keys."""
    import torch

    from flashgen.inputs.cache import Cache
    from flashgen.kernels.launch_cache import Decode

    q, k, v = make_inputs(spec, problem, seed, device)
    lengths = torch.full((problem.batch,), problem.seq_k, dtype=torch.int32, device=device)
    cache = Cache(k=k, v=v, lengths=lengths)
    if spec.paged:
        cache = in_pages(cache, PAGE_SIZE, seed)
    if spec.kv_dtype != "same":
        cache = in_8_bits(cache, spec)
    return Decode(
        q=q,
        cache=cache,
        scale=check_scale(None, spec.head_dim),
        sms=sms,
        features=make_features(spec, problem, seed, device),
    )


def first_sequences(call: Any, batch: int) -> Any:
    """A call of decode with the first sequences of another one; any other call as it is. None is
    copied.
    """
    from flashgen.kernels.launch_cache import Decode

    if not isinstance(call, Decode):
        return call
    cache = call.cache
    fewer: dict[str, Any] = {"lengths": cache.lengths[:batch]}
    if cache.block_table is not None:
        fewer["block_table"] = cache.block_table[:batch]
    else:
        fewer |= {"k": cache.k[:batch], "v": cache.v[:batch]}
    return replace(call, q=call.q[:batch], cache=replace(cache, **fewer))


def in_8_bits(cache: Cache, spec: AttentionSpec) -> Cache:
    """A cache with the elements and scales that a spec asks for: the largest become the largest."""
    import torch

    from flashgen.runtime.eager import cache as eager_cache

    dtype = torch.int8 if spec.kv_dtype == "int8" else torch.float8_e4m3fn

    def narrow(x: Tensor) -> tuple[Tensor, Tensor]:
        of_pages = x.abs().amax((2, 3)).float() / eager_cache.LARGEST[dtype]  # (pages, Hkv)
        scale = of_pages if spec.kv_scales == "page" else of_pages.amax(0)
        scale = torch.where(scale == 0.0, 1.0, scale)
        return eager_cache.quantized(x.float() / scale[..., None, None], dtype), scale

    (k, k_scale), (v, v_scale) = narrow(cache.k), narrow(cache.v)
    return replace(cache, k=k, v=v, k_scale=k_scale, v_scale=v_scale)


def in_pages(cache: Cache, page_size: int, seed: int) -> Cache:
    """A contiguous cache (B, Hkv, S, d) as one of pages, which lie in memory in a random order."""
    import torch

    batch, _, seq, _ = cache.k.shape
    each = -(-seq // page_size)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(batch * each, generator=generator).to(cache.k.device)

    def pool(x: Tensor) -> Tensor:
        x = torch.nn.functional.pad(x, (0, 0, 0, each * page_size - seq))
        pages = (
            x.reshape(batch, -1, each, page_size, x.shape[3]).permute(0, 2, 3, 1, 4).flatten(0, 1)
        )
        scattered = torch.empty_like(pages, memory_format=torch.contiguous_format)
        scattered[order] = pages
        return scattered.transpose(1, 2)  # (pages, Hkv, page_size, d)

    table = order.int().view(batch, each)
    return replace(cache, k=pool(cache.k), v=pool(cache.v), block_table=table)


def run_of(
    kernel: Any, spec: AttentionSpec, config: KernelConfig, call: Any, folder: Path
) -> LaunchOnce:
    """A launch of a kernel with what make_call() made, ready to repeat; of a decode, with what
    merges its parts.

    The combine kernel is the default one, written to `folder`. Raises InvalidArgument for the
    other kernels of a cache, which are not timed by themselves.
    """
    from flashgen.kernels.launch import bind
    from flashgen.kernels.launch_cache import Combine

    plan = bind(kernel, spec, config)
    if spec.direction not in DECODING:
        return functools.partial(plan, call)
    if spec.direction != "decode":
        raise InvalidArgument(f"direction must be decode to be timed: got {spec.direction}")
    merging = spec.for_direction("combine")
    of_merging = tuned_default(merging)
    combine = bind(kernel_in(folder, merging, of_merging), merging, of_merging)

    def run() -> object:
        parts = plan(call)
        return parts if parts.whole else combine(Combine(parts=parts, q=call.q))

    return run
