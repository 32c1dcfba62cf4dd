"""vLLM's attention backend: what vLLM asks of one, on the operators of runtime/vllm.py.

Imports vLLM, whose base classes these are: only vLLM loads this module. The methods, arguments and
fields are those of vLLM 0.33; tests/cpu/runtime/test_vllm.py compares them with its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

from flashgen.errors import InvalidArgument
from flashgen.runtime.vllm import paged_decode, paged_prefill
from flashgen.spec.vocabulary import HEAD_DIM_STEP, MAX_HEAD_DIM, MIN_HEAD_DIM


class FlashgenBackend(AttentionBackend):  # type: ignore[misc]  # vLLM is not installed here
    """What vLLM asks before it chooses: decoder layers of 16-bit models and caches."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's AttentionBackendEnum."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FlashgenImpl]:
        """The class of a layer's attention."""
        return FlashgenImpl

    @staticmethod
    def get_builder_cls() -> type[FlashgenMetadataBuilder]:
        """The class that makes the metadata of a batch."""
        return FlashgenMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """Powers of two: vLLM divides its own blocks into such pages."""
        return [16, 32, 64, 128, 256]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Multiples of 8 from 16 to 512."""
        return head_size % HEAD_DIM_STEP == 0 and MIN_HEAD_DIM <= head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Ampere and later."""
        return bool(capability.major >= 8)

    @classmethod
    def supports_sink(cls) -> bool:
        """Whether a layer may have attention sinks."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Whether a layer may have a window."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Whether a batch may have no causal mask."""
        return True


@dataclass(kw_only=True)
class FlashgenMetadata(AttentionMetadata):  # type: ignore[misc]
    """One batch: the first `decodes` sequences have one query each, the others are prefills.

    query_starts: int32 (prefills + 1,), where the queries of each prefill begin, counted from the
    first of them.
    """

    tokens: int
    decodes: int
    prefills: int
    max_query_len: int
    max_seq_len: int
    query_starts: Tensor
    seq_lens: Tensor
    block_table: Tensor
    causal: bool


class FlashgenMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Makes FlashgenMetadata, once a step for all layers. vLLM puts decodes first."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = 1

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> FlashgenMetadata:
        """Raises InvalidArgument where some sequences of a batch are causal and others are not."""
        common = common_attn_metadata
        if isinstance(common.causal, Tensor):
            raise InvalidArgument("causal must be one bool for the whole batch: got a tensor")
        decodes, prefills, _, _ = split_decodes_and_prefills(common, decode_threshold=1)
        starts = common.query_start_loc[decodes:]
        return FlashgenMetadata(
            tokens=common.num_actual_tokens,
            decodes=decodes,
            prefills=prefills,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_starts=starts - decodes if decodes and prefills else starts,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            causal=common.causal,
        )


class FlashgenImpl(AttentionImpl):  # type: ignore[misc]
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise InvalidArgument(f"attn_type must be {AttentionType.DECODER}: got {attn_type}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.alibi_slopes = None
        if alibi_slopes is not None:
            self.alibi_slopes = torch.tensor(alibi_slopes, dtype=torch.float32)
        self.window = sliding_window or 0
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap = logits_soft_cap or 0.0
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashgenMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention of query (tokens, heads, head_size) into output, of that shape.

        The keys and values are in kv_cache (blocks, kv_heads, block_size, 2 * head_size) already,
        by do_kv_cache_update(). Rows of padding stay as they are. Raises InvalidArgument for an
        output that is to be quantized.
        """
        if output_scale is not None or output_block_scale is not None:
            raise InvalidArgument("output_scale must be None: flashgen's O is not quantized")
        if attn_metadata is None:  # vLLM measures how much memory the model takes
            return output.fill_(0)
        batch, slopes = attn_metadata, self.alibi_slopes
        if slopes is not None and slopes.device != query.device:
            slopes = self.alibi_slopes = slopes.to(query.device)
        caches = self._caches(kv_cache)
        options = batch.causal, self.scale, self.window, self.softcap, slopes, self.sinks
        first, rest = slice(batch.decodes), slice(batch.decodes, batch.tokens)
        if batch.decodes:
            paged_decode(
                output[first], query[first], *caches, batch.seq_lens[first],
                batch.block_table[first], *options,
            )  # fmt: skip
        if batch.prefills:
            paged_prefill(
                output[rest], query[rest], *caches, batch.query_starts,
                batch.seq_lens[batch.decodes :], batch.block_table[batch.decodes :],
                batch.max_query_len, batch.max_seq_len, *options,
            )  # fmt: skip
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write key and value into the cache, by vLLM's own kernel."""
        triton_reshape_and_cache_flash(
            key, value, *self._caches(kv_cache), slot_mapping, self.kv_cache_dtype,
            layer._k_scale, layer._v_scale,
        )  # fmt: skip

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """K and V as pools (pages, page_size, kv_heads, head_size), without a copy."""
        pools, dim = kv_cache.transpose(1, 2), self.head_size
        return pools[..., :dim], pools[..., dim:]
