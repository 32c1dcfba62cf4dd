"""The operators of FlashAttention 3, torch.ops.flash_attn_3, for programs that look them up.

    import flashgen.runtime.flash_attn_3_operators

registers fwd, bwd, fwd_combine and get_scheduler_metadata under their schemas, as importing
FlashAttention 3 does. A process can have one of the two. Like theirs, the operators record no
gradients. What only tunes their kernels changes nothing, and what theirs return for their own
scratch memory is None.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from flashgen.errors import InvalidArgument, ToolchainError
from flashgen.runtime import torch_modes
from flashgen.runtime.adapters import flash_attn_3, flash_attn_4

_WINDOW = "int window_size_left = -1, int window_size_right = -1"
_SPLITS = "int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0"
_OUT = "(Tensor(out!), Tensor"
SCHEMAS = {
    "fwd": "(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, "
    "Tensor(v_new!)? v_new = None, Tensor? q_v = None, Tensor(out!)? out = None, "
    "Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = None, "
    "Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, "
    "int? max_seqlen_k = None, Tensor? page_table = None, Tensor? kv_batch_idx = None, "
    "Tensor? leftpad_k = None, Tensor? rotary_cos = None, Tensor? rotary_sin = None, "
    "Tensor? seqlens_rotary = None, Tensor? q_descale = None, Tensor? k_descale = None, "
    "Tensor? v_descale = None, float? softmax_scale = None, bool is_causal = False, "
    f"{_WINDOW}, int attention_chunk = 0, float softcap = 0.0, bool is_rotary_interleaved = False, "
    f"Tensor? scheduler_metadata = None, {_SPLITS}) -> {_OUT}, Tensor, Tensor)",
    "bwd": "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(dq!)? dq = None, Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, "
    "Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? seqused_q = None, "
    "Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    f"float? softmax_scale = None, bool is_causal = False, {_WINDOW}, float softcap = 0.0, "
    "bool deterministic = False, int sm_margin = 0) -> (Tensor(dq!), Tensor(dk!), Tensor(dv!), "
    "Tensor, Tensor, Tensor, Tensor, Tensor)",
    "fwd_combine": "(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out = None, "
    f"ScalarType? out_dtype = None) -> {_OUT})",
    "get_scheduler_metadata": "(int batch_size, int max_seqlen_q, int max_seqlen_k, "
    "int num_heads, int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, "
    "Tensor seqused_k, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, Tensor? leftpad_k = None, "
    f"int? page_size = None, int max_seqlen_k_new = 0, bool is_causal = False, {_WINDOW}, "
    f"int attention_chunk = 0, bool has_softcap = False, {_SPLITS}) -> Tensor",
}
"""Of hopper/flash_api.cpp of FlashAttention, which keeps them compatible."""


@torch_modes.without_gradients
def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    q_v: Tensor | None = None,
    out: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    is_rotary_interleaved: bool = False,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, None, None]:
    """O, which is `out` where that is given, and LSE, both as of flash_attn_3. Packed sequences
    have cu_seqlens_q and cu_seqlens_k; keys are a cache where seqused_k alone counts them, or where
    they are in pages. Raises InvalidArgument.
    """
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale, "causal": is_causal, "qv": q_v,
        "window_size": (window_size_left, window_size_right), "softcap": softcap,
        "attention_chunk": attention_chunk, "q_descale": q_descale, "k_descale": k_descale,
        "v_descale": v_descale,
    }  # fmt: skip
    new = k_new, v_new, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary
    cached = page_table is not None or any(x is not None for x in new)
    if cu_seqlens_q is not None and not cached:
        options |= {
            "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
            "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "seqused_q": seqused_q,
            "seqused_k": seqused_k, "return_attn_probs": True,
        }  # fmt: skip
        found: Any = flash_attn_3.flash_attn_varlen_func(q, k, v, **options)
    elif seqused_q is not None or (cu_seqlens_k is not None and not cached):
        named = "seqused_q" if seqused_q is not None else "cu_seqlens_k"
        raise InvalidArgument(f"{named} needs cu_seqlens_q, and keys in no pages")
    elif cached or seqused_k is not None:
        found = flash_attn_3.flash_attn_with_kvcache(
            q, k, v, k_new, v_new, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
            cache_seqlens=seqused_k, cache_batch_idx=kv_batch_idx, cache_leftpad=leftpad_k,
            page_table=page_table, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new,
            max_seqlen_q=max_seqlen_q, rotary_seqlens=seqlens_rotary,
            rotary_interleaved=is_rotary_interleaved, num_splits=num_splits,
            return_softmax_lse=True, **options,
        )  # fmt: skip
    else:
        found = flash_attn_3.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    o, lse = found
    return (o if out is None else out.copy_(o)), lse, None, None


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> tuple[Tensor | None, ...]:
    """dQ, dK and dV, written into those that are given, of what fwd() returned for these tensors.
    Raises InvalidArgument.
    """
    found = flash_attn_4._flash_attn_bwd(
        q, k, v, out, dout, softmax_lse, softmax_scale, is_causal, softcap, window_size_left,
        window_size_right, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q, seqused_k=seqused_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, deterministic=deterministic, dq=dq, dk=dk, dv=dv,
    )  # fmt: skip
    return *found, *(None,) * 5


def get_scheduler_metadata(*given: Any, seqused_k: Tensor | None = None, **_: Any) -> Tensor:
    """A tensor of no element: flashgen's kernels take no such plan."""
    lengths: Tensor = given[8] if seqused_k is None else seqused_k
    return lengths.new_empty(0)


def _register() -> Library:
    """The operators, on CPU and CUDA tensors. Raises ToolchainError."""
    if hasattr(torch.ops.flash_attn_3, "fwd"):
        raise ToolchainError(
            "torch.ops.flash_attn_3 must be free: FlashAttention 3 itself is loaded, so use its own"
        )
    library = Library("flash_attn_3", "DEF")  # type: ignore[no-untyped-call]
    functions = {
        "fwd": fwd, "bwd": bwd, "fwd_combine": flash_attn_3.flash_attn_combine,
        "get_scheduler_metadata": get_scheduler_metadata,
    }  # fmt: skip
    for name, schema in SCHEMAS.items():
        library.define(f"{name}{schema}")  # type: ignore[no-untyped-call]
        for key in ("CPU", "CUDA"):
            library.impl(name, functions[name], key)  # type: ignore[no-untyped-call]
    return library


_registered = _register()
