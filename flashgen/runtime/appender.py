"""Writes checked keys and values into a cache, by a kernel or, on the CPU, by torch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flashgen.kernels.launch_cache import Append
from flashgen.runtime.decode import kv_fields
from flashgen.runtime.eager import cache as eager_cache
from flashgen.runtime.launcher import Launcher
from flashgen.runtime.resolver import Resolver
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.vocabulary import Rotary


def append_checked(resolver: Resolver, call: Append, rotary: Rotary) -> Tensor | None:
    """Write a checked call's keys and values by the kernels that a resolver finds, and return its q
    rotated.
    """
    device = call.k.device
    if resolver.left_to_torch(device):
        return by_torch(call, rotary)
    spec = AttentionSpec(
        direction="append",
        dtype=str(call.k.dtype).removeprefix("torch."),  # type: ignore[arg-type]  # was checked
        head_dim=call.k.shape[3],
        head_dim_v=call.v.shape[3],
        mask="none",
        paged=call.cache.paged,
        rotary=rotary,
        indexed=call.cache.rows is not None,
        **kv_fields(call.cache),
    )

    def make() -> Launcher:
        return Launcher(resolver.package, resolver.ladder(spec, 1, device).rungs)

    launcher, addressed = resolver.kept(spec, device, None, make), resolver.addressed
    rotation = call.rotation
    if rotation is not None:
        rotation = replace(rotation, q=addressed(rotation.q, "q"))
    return launcher(
        replace(call, k=addressed(call.k, "k"), v=addressed(call.v, "v"), rotation=rotation)
    )


def by_torch(call: Append, rotary: Rotary) -> Tensor | None:
    """What the kernel does, by torch."""
    k, rotation, cache = call.k, call.rotation, call.cache
    rotated = None
    if rotation is not None:
        interleaved = rotary == "interleaved"

        def turned(x: Tensor, step: int) -> Tensor:
            steps = torch.arange(x.shape[2], device=x.device) * step
            places = cache.lengths.long().clamp(min=0)[:, None] + steps
            places = places.clamp(max=max(0, cache.capacity - 1))
            return eager_cache.rotated(
                x, rotation.cos, rotation.sin, places, interleaved=interleaved
            )

        rotated, k = turned(rotation.q, rotation.q_step), turned(k, 1)
    eager_cache.write(cache, k, call.v)
    return rotated
