"""What an attention layer of transformers calls, with its masks and its packed batches."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from flashgen import settings
from flashgen.errors import InvalidArgument
from flashgen.inputs.tensors import broadcasts
from flashgen.runtime import api, folders, torch_modes
from flashgen.runtime.adapters import transformers_models as models
from flashgen.runtime.adapters.sdpa import attend, why_torch_serves
from flashgen.runtime.adapters.transformers_masks import (
    check_is_mask,
    chunks_of,
    is_chunk_start,
    padded_left,
    refused,
)
from flashgen.runtime.adapters.transformers_models import NEEDS_MASK
from flashgen.runtime.adapters.transformers_packing import SequenceMask, traced_attention
from flashgen.runtime.call import Causal
from flashgen.runtime.varlen import attention_varlen

BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Where the sequences of a packed batch are."""

OF_PAGES = ("read_index", "write_index", "block_table", "logits_indices", "logits_processor_args")
"""What continuous batching hands over besides, for its cache and for the model."""

IGNORED = (
    "position_ids", "sliding_window", "seq_idx", "num_items_in_batch", "logits_to_keep",
    "use_cache", "output_hidden_states", "output_router_logits", "grid_thw", "return_dict",
)  # fmt: skip
"""Arguments that change no score: masks have the positions and the window, models do the rest."""


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    deterministic: bool | None = None,
    invariant: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """What a model's attention layer calls. query (batch, heads, seq_q, head_dim), key and value
    (batch, kv_heads, seq_k, head_dim); attention_mask (batch or 1, heads or 1, seq_q, seq_k) as the
    mask function made it, or None: of chunks, where chunk 0 begins, their size being
    module.config.attention_chunk_size. softcap caps the scores (Gemma 2); s_aux (heads,) are
    attention sinks (gpt-oss); position_bias, broadcastable to (batch, heads, seq_q, seq_k), is
    added to them, and differentiable (T5). Of a packed batch cu_seq_lens_q, cu_seq_lens_k,
    max_length_q and max_length_k say where its sequences are, as
    DataCollatorWithFlattening(return_flash_attn_kwargs=True) makes them: then the causal mask,
    sliding_window and chunks are those of each sequence, and an attention_mask that hides or shows
    anything else is refused. Without them position_ids that begin anew say it, as the mask function
    finds them. deterministic: as in
    the flash attention of transformers, the gradients' bits repeat if it is True, or if it is None
    and the environment variable FLASH_ATTENTION_DETERMINISTIC is 1. invariant, or
    FLASHGEN_INVARIANT=1: the bits of a row are those of its sequence alone, which may be padded to
    the left.

    Returns O (batch, seq_q, heads, head_dim) and no weights. Raises InvalidArgument, naming the
    argument, for every other one that is not None, unless it is one of IGNORED.
    """
    if type(others.get("cache")).__name__ == "PagedAttentionCache":  # until transformers 5.23
        key, value = others.pop("cache").update(
            key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=others
        )
    if others.get("write_index") is not None:  # key and value are of all sequences, with bounds
        for name in OF_PAGES:
            others.pop(name, None)
        if attention_mask is not None and not isinstance(attention_mask, SequenceMask):
            raise refused("attention_mask", "in generate_batch")
        attention_mask = None  # it is of the new tokens alone
    packed = others.get("cu_seq_lens_q") is not None
    _check_others(others, packed)
    if deterministic is None:
        deterministic = os.getenv("FLASH_ATTENTION_DETERMINISTIC", "0") == "1"
    sinks = None if s_aux is None else s_aux.float()
    if packed:
        _check_packed(module, query, key, position_bias, is_causal)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    options: dict[str, Any] = {"scale": scaling, "dropout_p": dropout, "softcap": softcap}
    options |= {"sinks": sinks, "deterministic": deterministic}
    config: Any = getattr(module, "config", None)
    chunk = getattr(config, "attention_chunk_size", None)
    if isinstance(attention_mask, SequenceMask) and torch.compiler.is_compiling():
        if not packed or chunk is not None:
            bounds = others.get("cu_seq_lens_q")
            return _in_graph(
                query, key, value, attention_mask, bounds, position_bias, invariant,
                *options.values(),
            ), None  # fmt: skip
        attention_mask = None  # nothing can read it, and the bounds say where sequences are
    if packed:
        if attention_mask is not None:
            options |= chunks_of(attention_mask, others, chunk, causal=bool(is_causal))
        causal = bool(is_causal)
        return _packed(
            query, key, value, others, causal=causal, invariant=invariant, **options
        ), None
    if isinstance(attention_mask, SequenceMask):
        return _by_sequences(
            query, key, value, attention_mask, position_bias, invariant=invariant, **options
        ), None
    causal = bool(is_causal) and not (
        attention_mask is None and models.follows_mask_alone(type(module))
    )
    return _by_mask(
        query, key, value, attention_mask, position_bias, causal=causal, chunk=chunk,
        invariant=invariant, **options,
    ), None  # fmt: skip


def _by_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    position_bias: Tensor | None,
    *,
    causal: bool,
    chunk: int | None,
    invariant: bool,
    **options: Any,
) -> Tensor:
    """O (batch, seq_q, heads, head_dim) of a mask that is there, or of none."""
    if invariant or settings.invariant():
        return _invariant(query, key, value, mask, causal=causal, bias=position_bias, **options)
    if mask is not None:
        check_is_mask(mask)
    if mask is not None and is_chunk_start(mask):
        options |= {"chunk": chunk, "chunk_start": mask.flatten()}
        o: Tensor = folders.current().attention(
            query, key, value, causal=True, bias=position_bias, **options
        )
        return o.transpose(1, 2).contiguous()
    # A mask says all; a single query, of decoding, sees every key.
    causal = causal and mask is None and query.shape[2] > 1
    scores = *query.shape[:3], key.shape[2]
    for name, x in (("attention_mask", mask), ("position_bias", position_bias)):
        if x is not None and not broadcasts(x.shape, scores):
            raise InvalidArgument(f"{name} must be broadcastable to {scores}: got {tuple(x.shape)}")
    bias = _biased(position_bias, mask)
    if options["softcap"] or options["sinks"] is not None or (causal and bias is not None):
        # torch has no function of these, so that they go to kernels, or to the reference.
        diagonal: Causal = "top_left" if causal else False
        bias = None if bias is None else torch_modes.autocast(bias)
        o = folders.current().attention(query, key, value, causal=diagonal, bias=bias, **options)
    else:
        o = attend(
            query, key, value, attn_mask=bias, dropout_p=options["dropout_p"], is_causal=causal,
            scale=options["scale"], enable_gqa=True, deterministic=options["deterministic"],
        )  # fmt: skip
    return o.transpose(1, 2).contiguous()


def _biased(position_bias: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """What is added to the scores, or the mask alone. Gradients flow to the position bias."""
    if position_bias is None or mask is None:
        return mask if position_bias is None else position_bias
    if mask.dtype is not torch.bool:
        return position_bias + mask
    return torch.where(mask, position_bias, -torch.inf)


def _by_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: SequenceMask,
    position_bias: Tensor | None,
    *,
    invariant: bool,
    **options: Any,
) -> Tensor:
    """O (batch, seq_q, heads, head_dim) of what a mask says, or of the mask where kernels do not
    take that.
    """
    if _served(mask, query, key, value, position_bias):
        return _in_sequences(mask, query, key, value, invariant=invariant, **options)
    return _by_mask(
        query, key, value, mask.whole(), position_bias, causal=False, chunk=None,
        invariant=invariant, **options,
    )  # fmt: skip


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _in_graph(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: SequenceMask,
    bounds: Tensor | None,
    position_bias: Tensor | None,
    invariant: bool,
    *options: Any,
) -> Tensor:
    """_by_sequences() where torch compiles, as one function of the graph: it looks at fields of the
    mask, and at whether something before it read the mask. bounds: where sequences end, too.
    """
    if bounds is not None:
        if mask.made is not None:
            raise refused("attention_mask", "with cu_seq_lens_q")
        mask = mask.within(bounds)
    names = "scale", "dropout_p", "softcap", "sinks", "deterministic"
    given = dict(zip(names, options, strict=True))
    return _by_sequences(query, key, value, mask, position_bias, invariant=invariant, **given)


def _invariant(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool, **options: Any
) -> Tensor:
    """O (batch, seq_q, heads, head_dim) of an invariant layer: keys count from the first that is no
    padding. Raises InvalidArgument for a mask that is not causal, but for padding to the left.
    """
    rows, o = query.shape[2], None
    if mask is None:
        options["causal"] = "top_left" if causal and rows > 1 else False
        o = api.attention(query, key, value, invariant=True, **options)
    else:
        pads, lengths = padded_left(mask, rows)
        if not bool(pads.any()) and bool((lengths == key.shape[2]).all()):
            o = api.attention(query, key, value, causal=True, invariant=True, **options)
    if o is None:
        if options.pop("dropout_p"):
            raise InvalidArgument("dropout must be 0 in an invariant layer: got more")
        options.pop("deterministic")
        o = api.decode(
            query, key, value, lengths=lengths, cache_leftpad=pads, invariant=True, **options
        )
    found: Tensor = o.transpose(1, 2).contiguous()
    return found


def _served(
    mask: SequenceMask, query: Tensor, key: Tensor, value: Tensor, position_bias: Tensor | None
) -> bool:
    """Whether kernels take these tensors with what a mask says. Nothing may have read it, for who
    reads it may change it; a model may have dropped queries; packed sequences have no bias.
    """
    if mask.made is not None or position_bias is not None or torch_modes.transformed():
        return False
    rows = mask.shape[0], mask.shape[2]
    if any((x.shape[0], x.shape[2]) != rows for x in (query, key, value)):
        return False
    return why_torch_serves(query, key, value) is None


def _in_sequences(
    mask: SequenceMask,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    invariant: bool,
    **options: Any,
) -> Tensor:
    """O (batch, seq, heads, head_dim) of what a mask says."""
    if mask.numbers is None:
        assert mask.window is not None
        o = folders.current().attention(
            query, key, value, causal=True, window=(mask.window - 1, 0), invariant=invariant,
            **options,
        )  # fmt: skip
        found: Tensor = o.transpose(1, 2).contiguous()
        return found
    if torch_modes.traced(query):
        return traced_attention(mask, query, key, value, invariant=invariant, **options)
    bounds, longest = mask.packed
    given = dict(zip(BOUNDS, (bounds, bounds, longest, longest), strict=True))
    given["sliding_window"] = mask.window
    return _packed(query, key, value, given, causal=True, invariant=invariant, **options)


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    others: dict[str, Any],
    *,
    causal: bool,
    **options: Any,
) -> Tensor:
    """attention_varlen of a packed batch: O (batch, seq_q, heads, head_dim)."""
    for name in BOUNDS:
        if others.get(name) is None:
            raise InvalidArgument(f"{name} must be given with cu_seq_lens_q: got None")
    for named, x in (("key", key), ("value", value)):
        if x.shape[0] != query.shape[0]:
            raise InvalidArgument(
                f"{named} must have the batch size of query, {query.shape[0]}: got {x.shape[0]}"
            )
    window = others.get("sliding_window")
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    cu_q, cu_k, max_q, max_k = (others[name] for name in BOUNDS)
    o: Tensor = attention_varlen(
        q,
        k,
        v,
        cu_q,
        cu_k,
        max_q,
        max_k,
        causal=causal,
        window=None if window is None else (window - 1, window - 1),
        **options,
    )
    return o.reshape(query.shape[0], query.shape[2], *o.shape[1:]).contiguous()


def _check_others(others: dict[str, Any], packed: bool) -> None:
    """Raise InvalidArgument for an argument that is not understood and not None."""
    for name, given in others.items():
        if given is None or name in IGNORED or (packed and name in BOUNDS):
            continue
        if name == "output_attentions":
            if given is False:
                continue
            raise InvalidArgument(models.WEIGHTS)
        raise refused(name)


def _check_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    position_bias: Tensor | None,
    is_causal: bool | None,
) -> None:
    """Raise InvalidArgument if the bounds of a packed batch do not say all: is_causal must be true
    of the layer, for there may be no mask, and all queries must be there.
    """
    if position_bias is not None:
        raise refused("position_bias", "with cu_seq_lens_q")
    config = getattr(module, "config", None)
    needs_mask = type(config).__name__ in NEEDS_MASK or models.follows_mask_alone(type(module))
    if is_causal is None and (needs_mask or getattr(config, "use_bidirectional_attention", False)):
        raise refused("cu_seq_lens_q")
    if getattr(config, "num_kv_shared_layers", 0) and query.shape[2] != key.shape[2]:
        raise InvalidArgument(
            "logits_to_keep must be 0 with cu_seq_lens_q: this model drops queries, and the bounds "
            "count all of them"
        )
