"""explain and explain_decode take the arguments of attention and decode, and document them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import pytest
import torch

import flashgen


@pytest.mark.parametrize(
    ("explaining", "explained", "own"),
    [
        (flashgen.explain, flashgen.attention, ["direction"]),
        (flashgen.explain_decode, flashgen.decode, []),
    ],
)
def test_arguments_and_their_documentation_are_those_of_what_is_explained(
    explaining: Callable[..., object], explained: Callable[..., object], own: list[str]
) -> None:
    taken, wanted = inspect.signature(explaining), inspect.signature(explained)
    assert list(taken.parameters) == [*wanted.parameters, *own]
    assert "self" not in taken.parameters
    for name, parameter in wanted.parameters.items():
        assert taken.parameters[name] == parameter
    documented = [
        re.findall(
            r"^ {4}(\w+): ",
            inspect.cleandoc(str(each.__doc__)).partition("Examples:")[0],
            re.MULTILINE,
        )
        for each in (explaining, explained)
    ]
    assert documented[0] == [*documented[1][:-1], *own, documented[1][-1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"foo": 1}, r"^explain\(\) got an unexpected keyword argument 'foo'$"),
        ({"is_causal": True}, r"^explain\(\) has no argument is_causal: use causal=True"),
        ({"k": 1}, r"^explain\(\) multiple values for argument 'k'$"),
    ],
)
def test_an_argument_that_attention_lacks_is_refused_by_name(
    options: dict[str, object], message: str
) -> None:
    q = torch.zeros(1, 2, 8, 64)
    with pytest.raises(TypeError, match=message):
        flashgen.explain(q, q, q, **options)  # type: ignore[arg-type]


def test_defaults_and_features_are_those_of_the_call() -> None:
    q = torch.zeros(1, 2, 8, 64)
    explained = flashgen.explain(q, q, q, causal=True, window=(3, 0), direction="backward_dq")
    assert str(explained).startswith("bwd_dq_fp32_d64_causal_window: ")
    assert str(flashgen.explain_decode(q[:, :, :1], q, q)).startswith("decode_fp32_d64: ")
