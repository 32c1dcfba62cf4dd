"""flashgen as an attention implementation of Hugging Face transformers.

    from flashgen.runtime.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flashgen")

The mask function is registered with it: without one the library hands the attention no mask, and
padding is attended to in silence. Sliding windows come in these masks, too. Chunks (Llama 4)
come as the position of the first one: no mask is made, and other chunks are not read.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn

from flashgen.errors import InvalidArgument, ToolchainError
from flashgen.runtime import registry, torch_modes
from flashgen.runtime.sdpa import scaled_dot_product_attention
from flashgen.runtime.varlen import attention_varlen

NAMES = ("flashgen", "FlashGen")
"""Both are registered. transformers 5 takes every name with "flash" in it for a build of the
package flash-attn, which it imports before the first call, for which some models pack their
batches, and for which others (gpt-oss) take a build of their own. The import is spared it; models
that pack or take their own need the second name.
"""

UNSUPPORTED = {
    "position_bias": "adds a position bias",
    "head_mask": "masks its heads",
    "output_attentions": "returns its attention weights",
    "cache": "reads a paged cache",
}
"""Arguments that models may pass on and that change the result, and what a model does that passes
them."""


def register() -> None:
    """Make attn_implementation="flashgen" known to transformers, its masks included. Raises
    ToolchainError where transformers is not installed.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ToolchainError(
            "transformers with AttentionMaskInterface is needed: pip install 'transformers>=4.57'"
        ) from error

    def mask(*arguments: Any, config: Any = None, **options: Any) -> Tensor | None:
        """Boolean masks, True where a query may attend; none where is_causal says it all; or, of
        chunked attention, where chunk 0 of each sequence begins, int32 (batch, 1, 1, 1).
        """
        own = _attends_by_itself(type(config))
        if own is not None:
            raise InvalidArgument(
                f'attn_implementation must be "eager" for {own}, which asks no attention of '
                "transformers but computes its own: it would add up flashgen's boolean mask"
            )
        if not arguments and (start := _chunk_start(**options)) is not None:
            return start
        made: Tensor | None = sdpa_mask(*arguments, config=config, **options)
        return made

    for name in NAMES:
        AttentionInterface.register(name, attention_forward)
        AttentionMaskInterface.register(name, mask)
    _spare_the_import()
    _admit_chunks()


def _chunk_start(
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    allow_is_causal_skip: bool = True,
    **_: Any,
) -> Tensor | None:
    """Where chunk 0 of each sequence begins among the keys, int32 (batch, 1, 1, 1), if a mask is
    that of chunks under a causal mask and nothing else; else None.

    The masks of transformers are closures: that of chunks holds the number of pads, where chunk 0
    begins. Queries see no pad before them, for it is of another chunk, and none behind them.
    """
    if torch.compiler.is_compiling() or not allow_is_causal_skip or not isinstance(q_offset, int):
        return None
    if kv_offset + kv_length != q_offset + q_length:  # the last query is not at the last key
        return None
    from transformers.masking_utils import causal_mask_function

    parts = _captured(mask_function).get("mask_functions")
    if not isinstance(parts, tuple) or len(parts) != 2 or parts[1] is not causal_mask_function:
        return None
    if not parts[0].__qualname__.startswith("chunked_overlay."):
        return None
    pads = _captured(parts[0]).get("left_padding")
    if not isinstance(pads, Tensor):
        return None
    if attention_mask is not None:
        begins = attention_mask.bool()[:, 1:] & ~attention_mask.bool()[:, :-1]
        inner = begins.sum(1) + attention_mask.bool()[:, 0]
        if bool((inner > 1).any()):  # pads between tokens
            return None
    return (pads - kv_offset).int()[:, None, None, None]


def _captured(function: Any) -> dict[str, Any]:
    """The variables that a closure holds, by name."""
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _admit_chunks() -> None:
    """Have transformers 5 make chunked masks for "flashgen", which it refuses names with "flash" in
    them where there are more keys than a chunk has.
    """
    from transformers import masking_utils

    modules: Any = masking_utils
    asks = getattr(modules, "is_flash_attention_requested", None)
    if asks is None or getattr(asks, "knows_flashgen", False):
        return

    @functools.wraps(asks)
    def requested(config: Any = None, *arguments: Any, **options: Any) -> bool:
        if getattr(config, "_attn_implementation", None) in NAMES:
            return False
        return bool(asks(config, *arguments, **options))

    requested.knows_flashgen = True  # type: ignore[attr-defined]
    modules.is_flash_attention_requested = requested


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _attends_by_itself(config: type) -> str | None:
    """The name of the model that a class of configurations belongs to, if it calls no attention
    that is registered. transformers refuses such a model "sdpa", but no name that it does not know.
    """
    from transformers import MODEL_MAPPING

    model = MODEL_MAPPING.get(config, None)
    if not isinstance(model, type):
        return None
    kinds = ("sdpa", "flash_attn", "flex_attn", "attention_backend")
    supports = any(getattr(model, f"_supports_{kind}", False) for kind in kinds)
    calls = hasattr(sys.modules[model.__module__], "ALL_ATTENTION_FUNCTIONS")
    return None if supports or calls else model.__name__


def _spare_the_import() -> None:
    """Have transformers 5 take the functions of "flashgen" for imported: there is no build of
    flash-attn behind the name, and none is called.
    """
    from transformers import modeling_flash_attention_utils as flash

    lazy_import = getattr(flash, "lazy_import_flash_attention", None)
    if lazy_import is None or getattr(lazy_import, "knows_flashgen", False):
        return  # transformers 4 imports nothing by that rule

    @functools.wraps(lazy_import)
    def imported(implementation: str | None, *arguments: Any, **options: Any) -> Any:
        if implementation in NAMES:
            return None
        return lazy_import(implementation, *arguments, **options)

    imported.knows_flashgen = True  # type: ignore[attr-defined]
    for module in (flash, sys.modules.get("transformers.modeling_utils")):
        if getattr(module, "lazy_import_flash_attention", None) is lazy_import:
            module.lazy_import_flash_attention = imported  # type: ignore[union-attr]


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
    **others: Any,
) -> tuple[Tensor, None]:
    """What a model's attention layer calls. query (batch, heads, seq_q, head_dim), key and value
    (batch, kv_heads, seq_k, head_dim); attention_mask as the mask function made it, or None: of
    chunks, where chunk 0 begins, their size being module.config.attention_chunk_size.
    softcap caps the scores (Gemma 2); s_aux (heads,) are attention sinks (gpt-oss). Of a packed
    batch cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k say where its sequences are,
    as DataCollatorWithFlattening(return_flash_attn_kwargs=True) makes them: then the causal mask
    and sliding_window are those of each sequence, and attention_mask is not read.

    Returns O (batch, seq_q, heads, head_dim) and no weights. Raises InvalidArgument for a model
    that needs what no kernel computes, naming the argument.
    """
    for name, does in UNSUPPORTED.items():
        if others.get(name) is not None and others[name] is not False:
            raise InvalidArgument(
                f"{name} must not be given: this model {does}, which flashgen does not compute; "
                'use attn_implementation="eager"'
            )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if others.get("cu_seq_lens_q") is not None:
        o = _packed(
            query, key, value, others, causal=bool(is_causal), scale=scaling, dropout_p=dropout,
            softcap=softcap, sinks=None if s_aux is None else s_aux.float(),
        )  # fmt: skip
        return o, None
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        config: Any = module.config
        o = registry.dispatcher_of().attention(
            query, key, value, causal=True, scale=scaling, dropout_p=dropout,
            chunk=config.attention_chunk_size, chunk_start=attention_mask.flatten(),
            softcap=softcap, sinks=None if s_aux is None else s_aux.float(),
        )  # fmt: skip
        return o.transpose(1, 2).contiguous(), None
    # A mask says all; a single query, of decoding, sees every key.
    causal = bool(is_causal) and attention_mask is None and query.shape[2] > 1
    if softcap or s_aux is not None:
        # torch has no function of either, so that these go to kernels, or to the reference.
        o = registry.current().attention(
            query,
            key,
            value,
            causal="top_left" if causal else False,
            scale=scaling,
            bias=None if attention_mask is None else torch_modes.autocast(attention_mask),
            dropout_p=dropout,
            softcap=softcap,
            sinks=None if s_aux is None else s_aux.float(),
        )
        return o.transpose(1, 2).contiguous(), None
    o = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scaling,
        enable_gqa=True,
    )
    return o.transpose(1, 2).contiguous(), None


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
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    for name in names:
        if others.get(name) is None:
            raise InvalidArgument(f"{name} must be given with cu_seq_lens_q: got None")
    window = others.get("sliding_window")
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    cu_q, cu_k, max_q, max_k = (others[name] for name in names)
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
    return o.reshape(query.shape[0], query.shape[2], *o.shape[1:])
