"""flashgen as an attention backend of Hugging Face diffusers.

    import flashgen.runtime
    from diffusers import attention_backend

    with attention_backend(flashgen.runtime.diffusers.register()):
        images = pipeline(prompt)

The names of backends are an enum of diffusers, so that set_attention_backend("flashgen") is refused
there. attention_backend() takes what register() returns: a value of that enum's class which is no
member of it. Nothing of diffusers is changed but its registry, through its own register().
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashgen.errors import InvalidArgument, ToolchainError
from flashgen.runtime.adapters import sdpa

NAME = "flashgen"
"""What diffusers calls the backend in its messages."""


def register() -> Any:
    """Make flashgen an attention backend of diffusers.

    Layers run on it inside `with diffusers.attention_backend(register()):`, unless
    set_attention_backend() gave their model another. A further call returns the same backend.

    Returns:
        The backend, for diffusers.attention_backend().

    Raises:
        ToolchainError: if diffusers with attention backends is not installed, or fails to import.

    Examples:
        >>> import flashgen.runtime
        >>> backend = flashgen.runtime.diffusers.register()  # doctest: +SKIP
    """
    try:
        from diffusers.models.attention_dispatch import (
            AttentionBackendName,
            _AttentionBackendRegistry,
        )
    except (ImportError, OSError, RuntimeError) as error:  # also what diffusers imports itself
        raise ToolchainError(
            f"diffusers with attention backends is needed: pip install 'diffusers>=0.40' ({error})"
        ) from error
    for known in _AttentionBackendRegistry.list_backends():
        if known == NAME:
            return known
    backend: Any = str.__new__(AttentionBackendName, NAME)
    backend._name_, backend._value_ = NAME.upper(), NAME
    # An enum is pickled by its value, which diffusers does not know where it is read.
    backend.__reduce_ex__ = lambda _: (register, ())
    _AttentionBackendRegistry.register(backend)(_attention)
    return backend


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """O (batch, seq_q, heads, head_dim_v) of query (batch, seq_q, heads, head_dim), key and value
    (batch, seq_k, kv_heads, ...). diffusers hands over no argument that is not named here.

    attn_mask, boolean or added: (batch, seq_k), else to (batch, heads, seq_q, seq_k), as of
    diffusers' backend "native". Raises InvalidArgument.
    """
    if return_lse:
        raise InvalidArgument("return_lse must be False: this backend returns O alone")
    if _parallel_config is not None:
        raise InvalidArgument(
            "enable_parallelism must not split a sequence on this backend: flashgen has no context "
            'parallelism in diffusers; use set_attention_backend("native")'
        )
    if attn_mask is not None:
        attn_mask = _mask_of_four(attn_mask, query, key)
    o = sdpa.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask, dropout_p,
        is_causal, scale=scale, enable_gqa=enable_gqa,
    )  # fmt: skip
    return o.transpose(1, 2)


def _mask_of_four(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask that says what each of its dimensions is. Raises InvalidArgument for one of three,
    which models mean to be of batches, and torch takes to be of heads.
    """
    if mask.ndim == 2 and mask.shape == (query.shape[0], key.shape[1]):
        return mask[:, None, None]
    if mask.ndim == 3 and mask.shape[0] != 1:
        raise InvalidArgument(
            "attn_mask must have 2 or 4 dimensions, or 3 of which the first is 1: got "
            f"{tuple(mask.shape)}"
        )
    return mask
