"""likeness() tells apart all that a key of tensors does, and a cache serves as well without it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.runtime import likeness as module
from flashgen.runtime.call_cache import FEW, CallCache, options_of
from flashgen.runtime.likeness import likeness

OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda x: x[:1],
    "rank": lambda x: x[None],
    "strides": lambda x: x.transpose(0, 1),
    "rows apart": lambda x: torch.zeros(3, 3, 9)[..., :4],
    "dtype": lambda x: x.half(),
    "device": lambda x: x.to("meta"),
    "requires_grad": lambda x: x.clone().requires_grad_(),
    "class": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "negative": torch._neg_view,
    "none": lambda x: None,
    "no tensor": lambda x: x.tolist(),
}


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    x, y, z = torch.zeros(3, 3, 3, 4).unbind()
    return x, y, z


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("name", OTHERS)
def test_what_differs_is_not_like(name: str, place: int) -> None:
    is_like = likeness(tensors())
    assert is_like is not None
    assert is_like(*tensors())
    given = list(tensors())
    given[place] = OTHERS[name](given[place])
    assert not is_like(*given)


def test_where_one_tensor_is_given_twice_or_none_at_all() -> None:
    x, y, z = tensors()
    is_like = likeness((x, y, y, None))
    assert is_like is not None
    assert is_like(z, x, x, None)
    assert not is_like(x, y, z, None)
    assert not is_like(x, y, y, z)
    assert not is_like(x, x, x, None)


@pytest.mark.parametrize("change", [{"TensorGuards": None}, {"TensorGuards": lambda *_, **__: {}}])
def test_a_torch_that_has_no_such_class_or_another_is_not_asked(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module._is_known.cache_clear()
    monkeypatch.setattr(torch._C._dynamo, "guards", SimpleNamespace(**change))
    assert likeness(tensors()) is None
    module._is_known.cache_clear()


def test_a_class_that_overlooks_something_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    module._is_known.cache_clear()
    monkeypatch.setattr(module, "_guard", lambda *made: lambda *given: None not in given)
    assert likeness(tensors()) is None
    module._is_known.cache_clear()


@pytest.mark.parametrize("known", [True, False])
def test_a_call_is_found_among_more_than_are_compared(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_is_known", lambda: known)
    calls, options = CallCache(), options_of("attention", 0, True, None, "ieee")
    given = [torch.zeros(3, length).unbind() for length in range(1, FEW + 4)]
    for each in given:
        kept, key = calls.find(options, *each)
        assert kept is None
        assert key is not None
        calls.keep(key, SimpleNamespace(number=len(each[0]), is_like=None))
    for each in (*given, *reversed(given), *given[-2:], *given[-2:]):
        kept, key = calls.find(options, *each)
        assert (kept.number, key) == (len(each[0]), None)
    assert [len(last) for last in calls._last.values()] == ([FEW] if known else [])
    calls.clear()
    assert calls.find(options, *given[0])[0] is None
