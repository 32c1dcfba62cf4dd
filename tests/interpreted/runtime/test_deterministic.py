"""Which backward each function allows unless told: attention() one whose bits repeat, a drop-in what its library does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.runtime import flash_attn, sdpa, transformers
from flashgen.runtime.dispatcher import Dispatcher
from tests.language_models import CONFIGS
from tests.serving import leaves, serve

BOUNDS = torch.tensor([0, 5, 16], dtype=torch.int32)
ENVIRONMENT = "FLASH_ATTENTION_DETERMINISTIC"


@pytest.fixture
def looked_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Dispatcher, list[Any]]]:
    """The dispatcher that serves, and a list with an entry for each backward that may be the fused one."""
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    dispatcher, found = serve(monkeypatch), []
    way = dispatcher.resolver.way

    def asked(*given: Any, deterministic: bool) -> Any:
        found.extend([given] * (not deterministic))
        return way(*given, deterministic=deterministic)

    monkeypatch.setattr(dispatcher.resolver, "way", asked)
    yield dispatcher, found
    torch.use_deterministic_algorithms(False)


def flash(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return flash_attn.flash_attn_func(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options
    )


def flash_varlen(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    packed = (x[0].transpose(0, 1) for x in (q, k, v))
    return flash_attn.flash_attn_varlen_func(*packed, BOUNDS, BOUNDS, 11, 11, **options)


def model(**layer: Any) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        module: Any = SimpleNamespace(config=CONFIGS["llama4"]())
        given = {"attention_mask": None, "is_causal": True} | layer
        return transformers.attention_forward(module, q, k, v, **given, **options)[0]

    return call


PACKED = {
    "cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS, "max_length_q": 11, "max_length_k": 11,
}  # fmt: skip
LAYERS = {
    "model": model(),
    "model, softcap": model(softcap=5.0),
    "model, llama4": model(attention_mask=torch.zeros(1, 1, 1, 1, dtype=torch.int32)),
    "model, packed": model(**PACKED),
}
LIBRARIES = {
    "sdpa": sdpa.scaled_dot_product_attention,
    "flash_attn": flash,
    "flash_attn, packed": flash_varlen,
    **LAYERS,
}


def allowed(function: Callable[..., Any], found: list[Any], **options: Any) -> bool:
    """Whether a backward of the function may be the fused one."""
    x = leaves(*(torch.randn(1, 2, 16, 16, dtype=torch.bfloat16) for _ in range(3)))
    found.clear()
    function(*x, **options).sum().backward()
    return bool(found)


def test_attention_repeats_its_bits_unless_told(looked_for: tuple[Dispatcher, list[Any]]) -> None:
    dispatcher, found = looked_for
    assert not allowed(dispatcher.attention, found)
    assert allowed(dispatcher.attention, found, deterministic=False)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_drop_in_has_the_default_of_its_library(
    looked_for: tuple[Dispatcher, list[Any]], name: str
) -> None:
    assert allowed(LIBRARIES[name], looked_for[1])
    if name.startswith("flash"):
        assert not allowed(LIBRARIES[name], looked_for[1], deterministic=True)
    torch.use_deterministic_algorithms(True)
    assert not allowed(LIBRARIES[name], looked_for[1])


@pytest.mark.parametrize("name", LAYERS)
def test_a_model_follows_its_argument_and_then_the_environment(
    looked_for: tuple[Dispatcher, list[Any]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As the flash attention of transformers does."""
    assert not allowed(LAYERS[name], looked_for[1], deterministic=True)
    monkeypatch.setenv(ENVIRONMENT, "1")
    assert not allowed(LAYERS[name], looked_for[1])
    assert allowed(LAYERS[name], looked_for[1], deterministic=False)
