"""SGLang's attention backend: what SGLang asks of one, on adapters/paged.py.

Imports SGLang, whose base class this is: only SGLang loads this module. The methods and fields are
those of SGLang 0.5.23; tests/engines/test_sglang.py runs them with its classes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor

from flashgen.errors import InvalidArgument
from flashgen.runtime.adapters.paged import PagedBatch, PagedLayer, prompts_of


@dataclass(frozen=True, kw_only=True, eq=False)
class SglangMetadata:
    """One batch: for layers with all keys; and where a model keeps the keys of sliding windows in a
    pool of their own, for those, and the slots of the new keys there.
    """

    full: PagedBatch
    windowed: PagedBatch | None
    windowed_slots: Tensor | None


class FlashgenAttnBackend(AttentionBackend):  # type: ignore[misc]  # SGLang is not installed here
    """Attention over the pools of a model runner. Raises InvalidArgument for what it lacks."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        _check_runner(model_runner)
        page = self.page_size = model_runner.page_size
        self.device = model_runner.device
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.windowed_pool = isinstance(self.token_to_kv_pool, SWAKVPool)
        self.pages = -(-self.req_to_token.shape[1] // page)
        self.narrow = self.token_to_kv_pool.dtype == torch.float8_e4m3fn
        self._one = torch.ones(1, device=self.device)
        self._graph: PagedBatch | None = None
        self._graph_windowed: PagedBatch | None = None
        self._graph_slots: Tensor | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """The metadata of a batch that runs by itself. Raises InvalidArgument for speculation."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        if mode.is_decode():
            batch = self._decodes(forward_batch)
        elif mode.is_extend_or_draft_extend_or_mixed():
            batch = self._prefills(forward_batch)
        else:
            raise InvalidArgument(
                f"forward_mode must be DECODE, EXTEND or MIXED: got {mode.name}; "
                "flashgen has no speculation in SGLang"
            )
        windowed = slots = None
        if self.windowed_pool:
            table = self._windowed(batch.table)
            prompts = tuple(replace(x, table=self._windowed(x.table)) for x in batch.prompts)
            windowed = replace(batch, table=table, prompts=prompts)
            slots = self._slots(forward_batch)
        self.forward_metadata = SglangMetadata(full=batch, windowed=windowed, windowed_slots=slots)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Tensors that captured decodes read, for as many sequences as a graph may have."""
        empty = torch.zeros(max_bs, self.pages, dtype=torch.int32, device=self.device)
        self._graph = PagedBatch(
            tokens=max_bs, decodes=max_bs, queries=1, prefills=0, max_q=1,
            max_k=self.pages * self.page_size, starts=empty[:0, 0],
            lengths=empty[:, 0].clone(), table=empty,
        )  # fmt: skip
        if self.windowed_pool:
            self._graph_windowed = replace(self._graph, table=empty.clone())
            self._graph_slots = torch.zeros(max_num_tokens, dtype=torch.int64, device=self.device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of sequences that only pad a graph."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill what a captured graph of decodes reads. Raises InvalidArgument for other graphs."""
        if not forward_batch.forward_mode.is_decode_or_idle():
            mode = forward_batch.forward_mode.name
            raise InvalidArgument(
                f"forward_mode of a CUDA graph must be DECODE: got {mode}; use "
                "--cuda-graph-backend-prefill breakable, whose graphs leave attention out"
            )
        count, held = forward_batch.batch_size, self._graph
        assert held is not None  # init_cuda_graph_state comes first
        found = self._decodes(forward_batch)
        held.lengths[:count].copy_(found.lengths)
        held.table[:count].copy_(found.table)
        full = replace(
            held, tokens=count, decodes=count, lengths=held.lengths[:count],
            table=held.table[:count],
        )  # fmt: skip
        windowed = slots = None
        if self._graph_windowed is not None and self._graph_slots is not None:
            table = self._graph_windowed.table[:count]
            table.copy_(self._windowed(found.table))
            windowed = replace(full, table=table)
            new = self._slots(forward_batch)
            slots = self._graph_slots[: len(new)]
            slots.copy_(new)
        self.forward_metadata = SglangMetadata(full=full, windowed=windowed, windowed_slots=slots)

    def _decodes(self, forward_batch: Any) -> PagedBatch:
        lengths, count = forward_batch.seq_lens.int(), forward_batch.batch_size
        return PagedBatch(
            tokens=count, decodes=count, queries=1, prefills=0, max_q=1,
            max_k=self.pages * self.page_size, starts=lengths[:0], lengths=lengths,
            table=self._table(forward_batch),
        )  # fmt: skip

    def _prefills(self, forward_batch: Any) -> PagedBatch:
        new = [int(n) for n in forward_batch.extend_seq_lens_cpu]
        starts = [0, *itertools.accumulate(new)]
        lengths, table = forward_batch.seq_lens.int(), self._table(forward_batch)
        return PagedBatch(
            tokens=starts[-1], decodes=0, queries=1, prefills=len(new), max_q=max(new),
            max_k=int(forward_batch.seq_lens_cpu.max()), lengths=lengths, table=table,
            starts=torch.tensor(starts, dtype=torch.int32).to(self.device, non_blocking=True),
            prompts=prompts_of(starts, 0, lengths, table) if self.narrow else (),
        )  # fmt: skip

    def _table(self, forward_batch: Any) -> Tensor:
        """The pages of each sequence: slots of a page follow one another."""
        slots = self.req_to_token[forward_batch.req_pool_indices.long(), :: self.page_size]
        table: Tensor = (slots // self.page_size).int()
        return table

    def _windowed(self, table: Tensor) -> Tensor:
        """The same pages in the pool of sliding windows."""
        slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(table.long() * self.page_size)
        pages: Tensor = (slots.clamp(min=0) // self.page_size).int()
        return pages

    def _slots(self, forward_batch: Any) -> Tensor:
        slots: Tensor = self.token_to_kv_pool.translate_loc_from_full_to_swa(
            forward_batch.out_cache_loc
        )
        return slots

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """O (tokens, heads * v_head_dim) of q (tokens, heads * head_dim). The new k and v are
        written into the pool first. Raises InvalidArgument for a layer that flashgen lacks.
        """
        _check_layer(layer)
        metadata, pool = self.forward_metadata, self.token_to_kv_pool
        assert isinstance(metadata, SglangMetadata)
        scales = self._scales(layer)
        if save_kv_cache and k is not None and v is not None:
            where = KVWriteLoc.for_batch(forward_batch, swa_loc=metadata.windowed_slots)
            if scales is None:
                pool.set_kv_buffer(layer, where, k, v)
            else:  # the pool divides in place
                pool.set_kv_buffer(layer, where, k.clone(), v.clone(), *scales)
        batch = metadata.full
        if metadata.windowed is not None and pool.layers_mapping[layer.layer_id][1]:
            batch = metadata.windowed
        if layer.attn_type == AttentionType.ENCODER_ONLY:
            batch = replace(batch, causal=False)
        rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        heads = layer.tp_q_head_num
        o = rows.new_zeros(len(rows), heads, layer.v_head_dim)
        PagedLayer(
            scale=layer.scaling, window=layer.sliding_window_size + 1, softcap=layer.logit_cap,
            sinks=sinks,
        ).attend(
            o, rows, self._paged(pool.get_key_buffer(layer.layer_id)),
            self._paged(pool.get_value_buffer(layer.layer_id)), batch, scales,
        )  # fmt: skip
        return o.view(len(rows), heads * layer.v_head_dim)

    forward_extend = forward_decode

    def _scales(self, layer: Any) -> tuple[Tensor, Tensor] | None:
        """The scales of K and V in a pool of e4m3; a layer without has 1."""
        if not self.narrow:
            return None
        k, v = (self._one if x is None else x for x in (layer.k_scale, layer.v_scale))
        return k.reshape(1), v.reshape(1)

    def _paged(self, slots: Tensor) -> Tensor:
        """A pool (slots, heads, dim) as pages (pages, page_size, heads, dim)."""
        if slots.ndim != 3:
            raise InvalidArgument(
                f"the KV cache must have shape (slots, heads, dim): got {tuple(slots.shape)}; "
                "unset SGLANG_USE_HND_KVCACHE"
            )
        whole = slots.shape[0] // self.page_size * self.page_size
        return slots[:whole].view(-1, self.page_size, *slots.shape[1:])


def _check_runner(runner: Any) -> None:
    """Raise InvalidArgument unless flashgen has what an engine will ask: here, where it starts, and
    not in a request.
    """
    page = runner.page_size
    if runner.use_mla_backend:
        raise InvalidArgument("use_mla_backend must be False: flashgen has no MLA")
    if page < 1 or page & (page - 1):
        raise InvalidArgument(f"page_size must be a power of two: got {page}")
    translator = getattr(runner, "kv_index_translator", None)
    if translator is not None and translator.is_translating:
        raise InvalidArgument("the unified memory pool must be off: its slots are not the pool's")
    if runner.spec_algorithm.is_speculative():
        raise InvalidArgument(
            f"speculative_algorithm must be None: got {runner.spec_algorithm.name}; flashgen has "
            "no tree masks over pages"
        )
    if (algorithm := getattr(runner.server_args, "dllm_algorithm", None)) is not None:
        raise InvalidArgument(
            f"dllm_algorithm must be None: got {algorithm}; a diffusion language model's blocks "
            "are not causal"
        )
    for layer in runner.model.modules():
        if isinstance(layer, RadixAttention):
            _check_layer(layer)


def _check_layer(layer: Any) -> None:
    """Raise InvalidArgument unless flashgen has the attention of a layer."""
    if layer.is_cross_attention:
        raise InvalidArgument("is_cross_attention must be False: got True")
    if layer.attn_type == AttentionType.DECODER_BIDIRECTIONAL:
        raise InvalidArgument(f"attn_type must be causal or an encoder's: got {layer.attn_type}")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        method = layer.logit_capping_method
        raise InvalidArgument(f"logit_capping_method must be tanh: got {method!r}")
    if layer.xai_temperature_len > 0:
        raise InvalidArgument("xai_temperature_len must be -1: flashgen has no such scaling")
