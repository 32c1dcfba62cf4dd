"""Contenders of other packages, each listed where its package is installed.

Their interfaces, as of the versions named: flash_attn 2.8 and FlashAttention-3's
flash_attn_interface (flash_attn_func and flash_attn_with_kvcache on (B, S, H, d)); flash-attn-4's
flash_attn.cute, which has no function for a cache; flashinfer 0.2 and later (wrappers on ragged
(tokens, H, d), and on pages). None of them is a dependency: one that has changed raises, which
shows as unavailable, with its sentence.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from flashgen.bench.case import BenchCase, BenchInputs
from flashgen.bench.contenders import Contender, Made, sdpa_deterministic

WORKSPACE_BYTES = 256 << 20
"""FlashInfer's own advice for its wrappers' scratch is 128 MiB."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A package: its name in listings, its module and its distribution. attention and decode, where
    it has them, are called with the module, the case and its inputs, the attention of one that is
    differentiable also with deterministic; the detail of what they make follows the version.
    """

    name: str
    module: str
    distribution: str
    attention: Callable[..., Made]
    decode: Callable[[Any, BenchCase, BenchInputs], Made] | None = None
    differentiable: bool = True

    def why_not(self, direction: str) -> str | None:
        """Why it is no contender in a direction, if it is not."""
        if not _installed(self.module):
            return f"{self.distribution} is not installed, there is no module {self.module}"
        lacks = self.decode is None if direction == "decode" else not self.differentiable
        return "it has none" if lacks and direction != "forward" else None

    def made(self, case: BenchCase, x: BenchInputs, **options: bool) -> Made:
        """Its attention of a case, or its decode."""
        make = (self.decode if case.direction == "decode" else None) or self.attention
        made = make(importlib.import_module(self.module), case, x, **options)
        try:
            version = f"{self.distribution} {importlib.metadata.version(self.distribution)}"
        except importlib.metadata.PackageNotFoundError:
            version = f"{self.module}, of unknown version"
        return replace(made, detail=version + made.detail)


def peers(case: BenchCase) -> Iterator[Contender]:
    """Those whose package is installed and that support the direction."""
    for group, peer in PEERS.items():
        if peer.why_not(case.direction) is None:
            yield Contender(name=peer.name, group=group, make=partial(peer.made, case))


def deterministic_peers(case: BenchCase) -> Iterator[Contender]:
    """Those of a backward, with gradients of the same bits each time; SDPA first."""
    yield from sdpa_deterministic(case)
    for group, peer in PEERS.items():
        if case.direction in ("backward", "both") and peer.why_not(case.direction) is None:
            make = partial(peer.made, case, deterministic=True)
            yield Contender(name=f"{peer.name}, deterministic", group=group, make=make)


def why_absent(group: str, directions: Sequence[str]) -> str | None:
    """Why a group that is asked for would time nothing in any of these directions, if it would."""
    if group not in PEERS:
        return None
    whys = [PEERS[group].why_not(direction) for direction in directions]
    if None in whys:
        return None
    if not _installed(PEERS[group].module):
        return whys[0]
    return f"it has no direction {' or '.join(directions)}"


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # the parent is missing, or was put there without a spec
        return False


def _flash_attn(package: Any, case: BenchCase, _: BenchInputs, **options: bool) -> Made:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        turned = (x.transpose(1, 2) for x in (q, k, v))  # (B, S, H, d), no copy
        found = package.flash_attn_func(*turned, causal=case.spec.causal, **options)
        o: Tensor = found[0] if isinstance(found, tuple) else found  # some return LSE too
        return o.transpose(1, 2)

    return Made(attention=attention, detail="")


def _flash_attn_decode(package: Any, _: BenchCase, x: BenchInputs) -> Made:
    assert x.cache is not None  # of decode
    turned = [y.transpose(1, 2).contiguous() for y in (x.q, x.k, x.v)]
    lengths = x.cache.lengths

    def attention() -> Tensor:
        o: Tensor = package.flash_attn_with_kvcache(*turned, cache_seqlens=lengths)
        return o.transpose(1, 2)

    return Made(attention=attention, detail="")


def _flashinfer(package: Any, case: BenchCase, x: BenchInputs) -> Made:
    p, spec, device = case.problem, case.spec, x.q.device
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = package.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        _starts(p.batch, p.seq_q, device),
        _starts(p.batch, p.seq_k, device),
        p.heads,
        p.kv_heads,
        spec.head_dim,
        causal=spec.causal,
        q_data_type=x.q.dtype,
    )
    # (B * S, H, d)
    tokens = [y.transpose(1, 2).flatten(0, 1).contiguous() for y in (x.q, x.k, x.v)]

    def attention(*_: Tensor) -> Tensor:
        o: Tensor = wrapper.run(*tokens)
        return o.reshape(p.batch, p.seq_q, *o.shape[1:]).transpose(1, 2)

    return Made(attention=attention, detail="")


def _flashinfer_decode(package: Any, case: BenchCase, x: BenchInputs) -> Made:
    p, device, size = case.problem, x.q.device, min(x.paged)
    cache = x.paged[size]
    assert cache.block_table is not None  # in pages
    each = cache.block_table.shape[1]
    last = torch.full((p.batch,), p.seq_k - (each - 1) * size, dtype=torch.int32, device=device)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = package.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        _starts(p.batch, each, device),
        cache.block_table.flatten(),
        last,
        p.heads,
        p.kv_heads,
        case.spec.head_dim,
        size,
        q_data_type=x.q.dtype,
        kv_data_type=x.k.dtype,
    )
    pools = tuple(y.transpose(1, 2) for y in (cache.k, cache.v))  # (pages, size, Hkv, d)
    q = x.q[:, :, 0].contiguous()

    def attention() -> Tensor:
        o: Tensor = wrapper.run(q, pools)
        return o[:, :, None]

    return Made(attention=attention, detail=f", pages of {size}")


def _starts(batch: int, each: int, device: torch.device) -> Tensor:
    """Where each sequence starts, int32 (batch + 1,)."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * each


PEERS = {
    "flash-attn-2": Peer(
        name="flash_attn 2", module="flash_attn", distribution="flash_attn",
        attention=_flash_attn, decode=_flash_attn_decode,
    ),
    "flash-attn-3": Peer(
        name="FlashAttention-3", module="flash_attn_interface", distribution="flash_attn_3",
        attention=_flash_attn, decode=_flash_attn_decode,
    ),
    "flash-attn-4": Peer(
        name="flash-attn-4", module="flash_attn.cute", distribution="flash-attn-4",
        attention=_flash_attn,
    ),
    "flashinfer": Peer(
        name="FlashInfer", module="flashinfer", distribution="flashinfer-python",
        attention=_flashinfer, decode=_flashinfer_decode, differentiable=False,
    ),
}  # fmt: skip
"""By their word of --contender."""
