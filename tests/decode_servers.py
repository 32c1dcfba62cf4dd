"""examples/decode_server as tests run it, and the oracle: each answer by a model that keeps no
cache, sees the whole sequence anew for each token, and attends by torch.
"""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "decode_server"


def load(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """A module of the example, which imports its siblings by their bare names."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(name)


def requests_of(engine: Any, prompts: list[int], new_tokens: int) -> list[Any]:
    """Requests of random tokens, with prompts of these lengths."""
    draw = random.Random(7)
    return [
        engine.Request(
            name=f"r{number}",
            prompt=tuple(draw.randrange(256) for _ in range(length)),
            new_tokens=new_tokens,
        )
        for number, length in enumerate(prompts)
    ]


def expected(model: Any, request: Any) -> list[int]:
    """The tokens that follow a request's prompt, greedily."""
    tokens = list(request.prompt)
    with torch.no_grad():
        for _ in range(request.new_tokens):
            logits = model(torch.tensor(tokens), lambda _, q, k, v: _attention(model, q, k, v))
            tokens.append(int(logits[-1].argmax()))
    return tokens[len(request.prompt) :]


def _attention(model: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = (_rotated(x, model.cos, model.sin) for x in (q, k))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[2] ** 0.5
    seen = torch.ones(len(q), len(q), dtype=torch.bool).tril()
    return torch.einsum("hij,jhd->ihd", scores.where(seen, -torch.inf).softmax(dim=2), v)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (tokens, heads, dim) turned by its places, as complex numbers: halves rotate together."""
    turns = torch.complex(cos, sin)[: len(x), None]
    turned = torch.complex(*x.tensor_split(2, dim=2)) * turns
    return torch.cat((turned.real, turned.imag), dim=2)
