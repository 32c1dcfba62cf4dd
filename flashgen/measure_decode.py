"""What is timed of the kernels that serve a cache; measure.py has the protocol.

A launch of decode is all that a call waits for: the split kernel, and the combine kernel where
there are several splits. The cache is full, so that every program has work; pages of PAGE_SIZE lie
in memory in a random order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.asked import check_scale
from flashgen.config import KernelConfig
from flashgen.errors import InvalidArgument
from flashgen.inputs import PAGE_SIZE as PAGE_SIZE
from flashgen.inputs import make_features, make_inputs
from flashgen.problem import Problem
from flashgen.render import render
from flashgen.space import tuned_default
from flashgen.spec import AttentionSpec

if TYPE_CHECKING:
    from torch import Tensor

    from flashgen.decoding import Cache
    from flashgen.launch_decode import Decode


def make_decode(spec: AttentionSpec, problem: Problem, seed: int, device: str, sms: int) -> Decode:
    """A call of decode on random normal inputs; every sequence has problem.seq_k keys."""
    import torch

    from flashgen.decoding import Cache
    from flashgen.launch_decode import Decode

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


def in_8_bits(cache: Cache, spec: AttentionSpec) -> Cache:
    """A cache with the elements and scales that a spec asks for: the largest become the largest."""
    import torch

    from flashgen import decoding

    dtype = torch.int8 if spec.kv_dtype == "int8" else torch.float8_e4m3fn

    def narrow(x: Tensor) -> tuple[Tensor, Tensor]:
        of_pages = x.abs().amax((2, 3)).float() / decoding.LARGEST[dtype]  # (pages, Hkv)
        scale = of_pages if spec.kv_scales == "page" else of_pages.amax(0)
        scale = torch.where(scale == 0.0, 1.0, scale)
        return decoding.quantized(x.float() / scale[..., None, None], dtype), scale

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


def decode_run(
    kernel: Any, spec: AttentionSpec, config: KernelConfig, call: Decode, folder: Path
) -> Callable[[], object]:
    """A launch of decode and of what merges its parts, ready to repeat.

    The combine kernel is the default one, written to `folder`. Raises InvalidArgument for other
    directions, which are not timed by themselves.
    """
    from flashgen import launch
    from flashgen.launch_decode import bind_combine, bind_decode

    if spec.direction != "decode":
        raise InvalidArgument(f"direction must be decode to be timed: got {spec.direction}")
    merging = spec.for_direction("combine")
    of_merging = tuned_default(merging)
    rendered = render(merging, of_merging)
    path = folder / f"{rendered.name}.py"
    path.write_text(rendered.source)
    split = bind_decode(kernel, spec, config)
    combine = bind_combine(launch.load_kernel(path, rendered.name), merging, of_merging)

    def run() -> object:
        parts = split(call)
        return parts if parts.whole else combine(parts, call.q)

    return run
