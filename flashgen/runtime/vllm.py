"""flashgen in vLLM: the plugin that registers runtime/vllm_backend.py, and its two operators.

vLLM calls register() in each of its processes, by the entry point in pyproject.toml. This module
loads nothing of vLLM before that.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from flashgen.runtime.api import decode
from flashgen.runtime.varlen import attention_varlen
from flashgen.spec.features import Window

logger = logging.getLogger("flashgen.runtime")

BACKEND = "flashgen.runtime.vllm_backend.FlashgenBackend"


def register() -> None:
    """Make --attention-backend CUSTOM of vLLM flashgen, unless another plugin has taken that name.

    vLLM calls this unguarded in every process: of a vLLM without a place for backends of others it
    says so and does nothing.

    Returns:
        None.

    Raises:
        Nothing: what is missing is logged as a warning.

    Examples:
        >>> import flashgen.runtime.vllm
        >>> flashgen.runtime.vllm.register()  # doctest: +SKIP
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        custom = AttentionBackendEnum.CUSTOM
        taken = custom.is_overridden() and custom.get_path() != BACKEND
    except (ImportError, AttributeError) as error:
        logger.warning(
            "flashgen needs vLLM 0.33, and is no attention backend of this one: %s", error
        )
        return
    if taken:
        logger.warning("vLLM's attention backend CUSTOM stays %s", custom.get_path())
        return
    register_backend(custom, BACKEND)


@torch.library.custom_op("flashgen::paged_prefill", mutates_args=("out",))
def paged_prefill(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    scale: float,
    window: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Write into out the attention of packed queries over pages, their own keys being there.

    out and q (tokens, heads, head_dim), k_cache and v_cache (pages, page_size, kv_heads, head_dim),
    cu_seqlens_q int32 (sequences + 1,), seq_lens int32 (sequences,), block_table int32 (sequences,
    pages of a sequence). window: the keys that a query sees, its own included; 0 for all. softcap:
    0 for none. Raises InvalidArgument.
    """
    o = attention_varlen(
        q, k_cache, v_cache, cu_seqlens_q, None, max_seqlen_q, max_seqlen_k, seqused_k=seq_lens,
        block_table=block_table, causal=causal, scale=scale, window=_sides(window, causal),
        softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
    )  # fmt: skip
    out.copy_(o)


@torch.library.custom_op("flashgen::paged_decode", mutates_args=("out",))
def paged_decode(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    causal: bool,
    scale: float,
    window: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """The same of one query a sequence, out and q (sequences, heads, head_dim), by split kernels
    whose launch depends on shapes alone, as CUDA graphs need it.
    """
    o = decode(
        q[:, :, None], k_cache, v_cache, lengths=seq_lens, block_table=block_table, causal=causal,
        scale=scale, window=_sides(window, causal), softcap=softcap, alibi_slopes=alibi_slopes,
        sinks=sinks,
    )  # fmt: skip
    out.copy_(o[:, :, 0])


def _sides(window: int, causal: bool) -> Window | None:
    return (window - 1, 0 if causal else window - 1) if window else None
