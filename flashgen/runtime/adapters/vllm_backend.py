"""vLLM's attention backend: what vLLM asks of one, on adapters/paged.py.

Imports vLLM, whose base classes these are: only vLLM loads this module. The methods, arguments and
fields are those of vLLM 0.33; tests/engines/test_vllm.py runs them with its classes, and
tests/cpu/runtime/test_vllm.py with fakes of those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.warmup.jit_warmup import VllmJitKernel
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

from flashgen import settings
from flashgen.errors import InvalidArgument
from flashgen.runtime.adapters import vllm as plugin
from flashgen.runtime.adapters.paged import (
    PagedBatch,
    PagedLayer,
    Prompt,
    Warmup,
    longest_of_each_bucket,
    prompts_of,
    warm_up,
    warmups,
)
from flashgen.runtime.few_blocks import every_kernel
from flashgen.spec.vocabulary import HEAD_DIM_STEP, MAX_HEAD_DIM, MIN_HEAD_DIM

_E4M3 = ("fp8", "fp8_e4m3")
_SM_OF_E4M3 = 89
_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
"""Layers whose queries see all keys of their own sequence in this step; no cache holds these."""
_SERVED = (AttentionType.DECODER, *_ENCODERS, AttentionType.ENCODER_DECODER)


class FlashgenBackend(AttentionBackend):  # type: ignore[misc]  # vLLM is not installed here
    """What vLLM asks before it chooses, for layers of 16-bit models."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *_E4M3]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's AttentionBackendEnum."""
        return plugin.NAME

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
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders, encoders and the cross attention between them."""
        return attn_type in _SERVED

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Ampere and later."""
        return bool(capability.major >= 8)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """E4m3 caches are written by vLLM's kernel, which needs compute capability 8.9. Decode
        kernels alone read them, whose bits no prefill has.
        """
        if kv_cache_dtype in _E4M3 and device_capability.to_int() < _SM_OF_E4M3:
            return f"kv_cache_dtype {kv_cache_dtype} needs compute capability 8.9"
        if kv_cache_dtype in _E4M3 and settings.invariant_vllm():
            return f"kv_cache_dtype {kv_cache_dtype} has no batch invariance"
        return None

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

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Yes: with VLLM_BATCH_INVARIANT=1 layers are invariant, prefill and decode alike."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: the host's lengths say which sequences are decodes of one length."""
        return False


@dataclass(kw_only=True)
class VllmMetadata(PagedBatch, AttentionMetadata):  # type: ignore[misc]
    """One batch. bounds: int32 (sequences + 1,), where the queries of all sequences begin and the
    last one's end; longest: no sequence has more queries.
    """

    bounds: Tensor
    longest: int


class FlashgenMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Makes VllmMetadata, once a step for all layers. vLLM puts decodes first: sequences with
    one new token, or with as many as are verified of a speculation.
    """

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    requires_block_table_width: ClassVar[bool] = True
    reorder_batch_threshold: int

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        block_table_width: int,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if vllm_config.model_config.is_diffusion:
            raise InvalidArgument(
                "attention_backend must be another than FLASHGEN for a diffusion language model, "
                "whose batches have causal sequences beside others"
            )
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.pages = block_table_width
        self._narrow = kv_cache_spec.dtype.itemsize == 1
        if vllm_config.kernel_config.enable_jit_warmup:
            FlashgenWarmup(self).register_warmup()

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> VllmMetadata:
        """Raises InvalidArgument for a common prefix, and where some sequences of a batch are
        causal and others are not.
        """
        common = common_attn_metadata
        if common_prefix_len:
            raise InvalidArgument(
                "common_prefix_len must be 0, for flashgen has no cascade attention: "
                f"got {common_prefix_len}"
            )
        if isinstance(common.causal, Tensor):
            raise InvalidArgument("causal must be one bool for the whole batch: got a tensor")
        decodes, prefills, tokens, _ = split_decodes_and_prefills(
            common, decode_threshold=self.reorder_batch_threshold, require_uniform=True
        )
        queries = max(1, int(common.query_start_loc_cpu[1]))  # the first sequence's
        begun = int(
            common.query_start_loc_cpu[decodes]
        )  # fewer than tokens, where these are padded
        if decodes * queries not in (tokens, begun):  # an empty sequence among the decodes
            decodes, prefills, tokens = 0, decodes + prefills, 0
        starts = common.query_start_loc[decodes:]
        prompts: tuple[Prompt, ...] = ()
        if self._narrow and prefills:
            on_host = common.query_start_loc_cpu[decodes:].tolist()
            prompts = prompts_of(on_host, decodes, common.seq_lens, common.block_table_tensor)
        return VllmMetadata(
            tokens=common.num_actual_tokens,
            decodes=decodes,
            queries=queries,
            prefills=prefills,
            max_q=common.max_query_len,
            max_k=common.max_seq_len,
            starts=starts - tokens if decodes and prefills else starts,
            lengths=common.seq_lens,
            table=common.block_table_tensor,
            causal=common.causal,
            prompts=prompts,
            bounds=common.query_start_loc,
            longest=common.max_query_len,
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
        if attn_type not in _SERVED:
            raise InvalidArgument(f"attn_type must be one of {', '.join(_SERVED)}: got {attn_type}")
        if attn_type == AttentionType.ENCODER_DECODER and sliding_window:
            raise InvalidArgument(
                f"sliding_window must be None in cross attention: got {sliding_window}"
            )
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
        attn_metadata: VllmMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention of query (tokens, heads, head_size) into output, of that shape.

        The keys and values are in kv_cache (blocks, kv_heads, block_size, 2 * head_size) already,
        by do_kv_cache_update(); an encoder's are key and value (tokens, kv_heads, head_size). Rows
        of padding stay as they are. Raises InvalidArgument for an output that is to be quantized.
        """
        if output_scale is not None or output_block_scale is not None:
            raise InvalidArgument("output_scale must be None: flashgen's O is not quantized")
        if attn_metadata is None:  # vLLM measures how much memory the model takes
            return output.fill_(0)
        if self.attn_type in _ENCODERS:
            rows = slice(attn_metadata.tokens)
            self.paged_layer(query.device).encode(
                output[rows], query[rows], key[rows], value[rows], attn_metadata.bounds,
                attn_metadata.longest,
            )  # fmt: skip
            return output
        self.paged_layer(query.device).attend(
            output, query, *self.pools(kv_cache), attn_metadata, self.scales(layer)
        )
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write key and value into the cache, by vLLM's own kernel; those of encoders have none."""
        if self.attn_type in _ENCODERS:
            return
        triton_reshape_and_cache_flash(
            key, value, *self.pools(kv_cache), slot_mapping, self.kv_cache_dtype,
            layer._k_scale, layer._v_scale,
        )  # fmt: skip

    def paged_layer(self, device: torch.device) -> PagedLayer:
        """What this layer asks for, its tensors on the device."""
        slopes = self.alibi_slopes
        if slopes is not None and slopes.device != device:
            slopes = self.alibi_slopes = slopes.to(device)
        return PagedLayer(
            scale=self.scale, window=self.window, softcap=self.softcap, alibi_slopes=slopes,
            sinks=self.sinks, invariant=settings.invariant_vllm(),
        )  # fmt: skip

    def scales(self, layer: Any) -> tuple[Tensor, Tensor] | None:
        """The scales of K and V in a cache of e4m3."""
        return (layer._k_scale, layer._v_scale) if self.kv_cache_dtype in _E4M3 else None

    def pools(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """K and V as pools (pages, page_size, kv_heads, head_size), without a copy."""
        pools, dim = kv_cache.transpose(1, 2), self.head_size
        if self.kv_cache_dtype in _E4M3:
            pools = pools.view(torch.float8_e4m3fn)
        return pools[..., :dim], pools[..., dim:]


@dataclass(frozen=True, kw_only=True)
class WarmupKey:
    """A launch of a layer's attention; layer: its name, that of the first of equal ones."""

    layer: str
    case: Warmup


class FlashgenWarmup(VllmJitKernel):  # type: ignore[misc]
    """Compiles what the layers of a builder may need, when vLLM warms up: caches are bound then."""

    CompileKey = WarmupKey

    def __init__(self, builder: FlashgenMetadataBuilder) -> None:
        super().__init__()
        self._builder = builder
        self._layers = builder.vllm_config.compilation_config.static_forward_context

    def get_warmup_keys(self) -> list[WarmupKey]:
        """The launches of each layer that differs from all before it."""
        return list(self._keys())

    def _keys(self) -> Iterator[WarmupKey]:
        seen = set()
        for name in self._builder.layer_names:
            impl, cache = self._layers[name].impl, self._layers[name].kv_cache
            kind: tuple[Any, ...] = (
                impl.attn_type, impl.num_heads, impl.num_kv_heads, impl.head_size, impl.window,
                impl.softcap, impl.alibi_slopes is None, impl.sinks is None,
            )  # fmt: skip
            if impl.attn_type not in _ENCODERS:
                k, _ = impl.pools(cache)
                kind += k.dtype, k.stride(), k.shape[1]
            if kind in seen:
                continue
            seen.add(kind)
            yield from (WarmupKey(layer=name, case=case) for case in self._cases(impl, cache))

    def _cases(self, impl: FlashgenImpl, cache: Tensor) -> Iterator[Warmup]:
        builder = self._builder
        if impl.attn_type in _ENCODERS:
            longest = builder.vllm_config.model_config.max_model_len
            return (Warmup(sequences=0, max_k=most) for most in longest_of_each_bucket(longest))
        k, _ = impl.pools(cache)
        return warmups(
            group=impl.num_heads // impl.num_kv_heads, head_dim=impl.head_size,
            capacity=builder.pages * k.shape[1], queries=builder.reorder_batch_threshold,
            narrow=k.element_size() == 1,
        )  # fmt: skip

    @every_kernel()
    def compile(self, compile_key: WarmupKey) -> None:
        """Launch it over sequences without keys, or, of an encoder, over one token."""
        layer, case = self._layers[compile_key.layer], compile_key.case
        impl, cache = layer.impl, layer.kv_cache
        dtype = self._builder.vllm_config.model_config.dtype
        asked = impl.paged_layer(cache.device)
        if impl.attn_type in _ENCODERS:
            heads = (impl.num_heads, impl.num_kv_heads, impl.num_kv_heads)
            q, k, v = (
                torch.zeros(1, each, impl.head_size, dtype=dtype, device=cache.device)
                for each in heads
            )
            bounds = torch.tensor([0, 1], dtype=torch.int32, device=cache.device)
            asked.encode(torch.empty_like(q), q, k, v, bounds, case.max_k)
            return
        warm_up(
            case, asked, (impl.num_heads, impl.num_kv_heads), dtype, impl.pools(cache),
            self._builder.pages, impl.scales(layer),
            causal=impl.attn_type == AttentionType.DECODER,
        )  # fmt: skip
