"""Names of arguments in torch, flash_attn and transformers, and flashgen's names for them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

OURS = {
    "is_causal": 'causal=True, or causal="top_left" for torch\'s diagonal',
    "attn_mask": "bias=",
    "attention_mask": "bias=",
    "attn_bias": "bias=",
    "dropout": "dropout_p=",
    "softmax_scale": "scale=",
    "sm_scale": "scale=",
    "scaling": "scale=",
    "window_size": "window=",
    "sliding_window": "window=(size - 1, 0)",
    "s_aux": "sinks=",
    "enable_gqa": "none: k and v may have fewer heads than q",
    "return_attn_probs": "return_lse=",
    "return_softmax_lse": "return_lse=",
    "cache_seqlens": "lengths=",
    "k_cache": "k",
    "v_cache": "v",
}
"""What to use in place of an argument of torch, flash_attn or transformers."""

_UNKNOWN = re.compile(r"(\w+)\(\) got an unexpected keyword argument '(\w+)'")


def hint(error: TypeError) -> TypeError | None:
    """For an unknown argument of OURS an error that names flashgen's own; else None."""
    found = _UNKNOWN.search(str(error))
    if found is None or found[2] not in OURS:
        return None
    return TypeError(f"{found[1]}() has no argument {found[2]}: use {OURS[found[2]]}")


def hinting(function: Function) -> Function:
    """The function, whose TypeError is hint()'s."""

    @functools.wraps(function)
    def hinted(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except TypeError as error:
            if (better := hint(error)) is None:
                raise
            raise better from None

    return cast(Function, hinted)
