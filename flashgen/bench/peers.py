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
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from flashgen.bench.case import BenchCase, BenchInputs
from flashgen.bench.contenders import Contender, Made

WORKSPACE_BYTES = 256 << 20
"""FlashInfer's own advice for its wrappers' scratch is 128 MiB."""

MODULES = {
    "flash-attn-2": ("flash_attn", "flash_attn"),
    "flash-attn-3": ("flash_attn_interface", "flash_attn_3"),
    "flash-attn-4": ("flash_attn.cute", "flash-attn-4"),
    "flashinfer": ("flashinfer", "flashinfer-python"),
}
"""The module and the distribution of each group."""


def peers(case: BenchCase) -> Iterator[Contender]:
    """Those whose package is installed and that support the direction."""
    for group, (module, _) in MODULES.items():
        makers = _maker(group, case.direction)
        if makers is not None and _installed(module):
            yield Contender(name=_NAMES[group], group=group, make=makers(case))


def why_absent(group: str, directions: Sequence[str]) -> str | None:
    """Why a group that is asked for would time nothing in any of these directions, if it would."""
    if group not in MODULES:
        return None
    module, distribution = MODULES[group]
    if not _installed(module):
        return f"{distribution} is not installed, there is no module {module}"
    if any(_maker(group, direction) for direction in directions):
        return None
    return f"it has no direction {' or '.join(directions)}"


def _maker(
    group: str, direction: str
) -> Callable[[BenchCase], Callable[[BenchInputs], Made]] | None:
    if group == "flashinfer" and direction in ("backward", "both"):
        return None
    return _MAKERS.get((group, "decode" if direction == "decode" else "attention"))


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # the parent is missing, or was put there without a spec
        return False


def _detail(group: str) -> str:
    module, distribution = MODULES[group]
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{module}, of unknown version"


def _flash_attn(group: str, case: BenchCase) -> Callable[[BenchInputs], Made]:
    def make(_: BenchInputs) -> Made:
        function: Any = importlib.import_module(MODULES[group][0]).flash_attn_func

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            turned = (x.transpose(1, 2) for x in (q, k, v))  # (B, S, H, d), no copy
            found = function(*turned, causal=case.spec.causal)
            o: Tensor = found[0] if isinstance(found, tuple) else found  # some return LSE too
            return o.transpose(1, 2)

        return Made(attention=attention, detail=_detail(group))

    return make


def _flash_attn_decode(group: str, _: BenchCase) -> Callable[[BenchInputs], Made]:
    def make(x: BenchInputs) -> Made:
        function: Any = importlib.import_module(MODULES[group][0]).flash_attn_with_kvcache
        assert x.cache is not None  # of decode
        turned = [y.transpose(1, 2).contiguous() for y in (x.q, x.k, x.v)]
        lengths = x.cache.lengths

        def attention() -> Tensor:
            o: Tensor = function(*turned, cache_seqlens=lengths)
            return o.transpose(1, 2)

        return Made(attention=attention, detail=_detail(group))

    return make


def _flashinfer(case: BenchCase) -> Callable[[BenchInputs], Made]:
    def make(x: BenchInputs) -> Made:
        package: Any = importlib.import_module("flashinfer")
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
        tokens = [_tokens(y) for y in (x.q, x.k, x.v)]

        def attention(*_: Tensor) -> Tensor:
            o: Tensor = wrapper.run(*tokens)
            return o.reshape(p.batch, p.seq_q, *o.shape[1:]).transpose(1, 2)

        return Made(attention=attention, detail=_detail("flashinfer"))

    return make


def _flashinfer_decode(case: BenchCase) -> Callable[[BenchInputs], Made]:
    def make(x: BenchInputs) -> Made:
        package: Any = importlib.import_module("flashinfer")
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

        return Made(attention=attention, detail=f"{_detail('flashinfer')}, pages of {size}")

    return make


def _starts(batch: int, each: int, device: torch.device) -> Tensor:
    """Where each sequence starts, int32 (batch + 1,)."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * each


def _tokens(x: Tensor) -> Tensor:
    """(B, H, S, d) as (B * S, H, d)."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()


_NAMES = {
    "flash-attn-2": "flash_attn 2",
    "flash-attn-3": "FlashAttention-3",
    "flash-attn-4": "flash-attn-4",
    "flashinfer": "FlashInfer",
}
_MAKERS: dict[tuple[str, str], Callable[[BenchCase], Callable[[BenchInputs], Made]]] = {
    ("flashinfer", "attention"): _flashinfer,
    ("flashinfer", "decode"): _flashinfer_decode,
    **{(group, "attention"): partial(_flash_attn, group) for group in list(MODULES)[:3]},
    **{(group, "decode"): partial(_flash_attn_decode, group) for group in list(MODULES)[:2]},
}
"""Of FlashAttention all three have attention, and the first two decode."""
