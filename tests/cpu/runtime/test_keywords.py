"""An argument of torch, flash_attn or transformers in a call of flashgen: the error names flashgen's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashgen.runtime import fp8
from flashgen.runtime.api import attention, decode, explain, explain_decode
from flashgen.runtime.keywords import OURS
from flashgen.runtime.varlen import attention_varlen

Q = torch.zeros(1, 1, 4, 16)
BOUNDS = torch.tensor([0, 4], dtype=torch.int32)
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "attention": (attention, (Q, Q, Q)),
    "decode": (decode, (Q, Q, Q)),
    "explain": (explain, (Q, Q, Q)),
    "explain_decode": (explain_decode, (Q, Q, Q)),
    "attention_varlen": (attention_varlen, (Q[0].mT, Q[0].mT, Q[0].mT, BOUNDS, BOUNDS, 4, 4)),
    "fp8.attention": (fp8.attention, (Q, Q, Q)),
}


@pytest.mark.parametrize("theirs", OURS)
@pytest.mark.parametrize("name", CALLS)
def test_the_error_names_flashgens_argument(name: str, theirs: str) -> None:
    function, tensors = CALLS[name]
    with pytest.raises(TypeError) as found:
        function(*tensors, **{theirs: True})
    wanted = f"{name.split('.')[-1]}() has no argument {theirs}: use {OURS[theirs]}"
    assert str(found.value) == wanted


@pytest.mark.parametrize("name", CALLS)
def test_other_unknown_arguments_are_pythons_to_name(name: str) -> None:
    function, tensors = CALLS[name]
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'casual'"):
        function(*tensors, casual=True)


def test_what_the_table_names_exists() -> None:
    """The arguments to use are those of attention or of decode."""
    import inspect

    own = {*inspect.signature(attention).parameters, *inspect.signature(decode).parameters}
    for theirs, ours in OURS.items():
        assert theirs not in own
        assert ours.partition("=")[0] in own or ours.startswith("none: ")
