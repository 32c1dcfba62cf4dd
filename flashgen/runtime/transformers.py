"""flashgen as an attention implementation of Hugging Face transformers.

    from flashgen.runtime.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="FlashGen")

The mask function is registered with it: without one the library hands the attention no mask, and
padding is attended to in silence.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flashgen.errors import InvalidArgument, ToolchainError
from flashgen.runtime.sdpa import scaled_dot_product_attention

NAME = "FlashGen"
"""Spelled so because transformers 5 takes every name with "flash" in it for a build of the package
flash-attn: it looks for one, finds none and stops, and some models would pack their batches for it.
"""

UNSUPPORTED = {
    "softcap": "caps its scores",
    "s_aux": "has attention sinks",
    "position_bias": "adds a position bias",
    "output_attentions": "returns its attention weights",
    "cache": "reads a paged cache",
}
"""Arguments that models may pass on and that change the result, and what a model does that passes
them."""


def register() -> None:
    """Make attn_implementation="FlashGen" known to transformers, its masks included. Raises
    ToolchainError where transformers is not installed.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ToolchainError(
            "transformers with AttentionMaskInterface is needed: pip install 'transformers>=4.57'"
        ) from error
    AttentionInterface.register(NAME, attention_forward)
    # Boolean masks, True where a query may attend, and none where is_causal says it all.
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What a model's attention layer calls. query (batch, heads, seq_q, head_dim), key and value
    (batch, kv_heads, seq_k, head_dim); attention_mask as the mask function made it, or None.

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
    # A mask says all; a single query, of decoding, sees every key.
    causal = bool(is_causal) and attention_mask is None and query.shape[2] > 1
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
