"""A decoder-only transformer like Llama (arXiv 2302.13971) whose caller provides attention:
RMSNorm, rotary embedding, grouped query heads, SwiGLU.

It runs on packed tokens, (tokens, width), of any number of sequences. Only the caller's attention
knows their sequences and where their keys are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q (tokens, heads, dim), k and v (tokens, kv_heads, dim)) -> O (tokens, heads, dim). q and
k come without rotary embedding."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a model. positions limits the length of a sequence."""

    vocabulary: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    positions: int = 256

    @property
    def width(self) -> int:
        """Elements of a token's hidden state."""
        return self.heads * self.head_dim


class Layer(nn.Module):
    """Attention and a feed-forward network, each behind a norm and added to what came in."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, hidden = sizes.width, 3 * sizes.width
        self.sizes = sizes
        rows = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
        self.before_attention = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, rows, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.before_mlp = nn.RMSNorm(width)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, layer: int, attend: Attend) -> Tensor:
        """Hidden states (tokens, width) of x, behind this layer, number `layer`."""
        sizes = self.sizes
        heads = [sizes.heads, sizes.kv_heads, sizes.kv_heads]
        q, k, v = (
            self.qkv(self.before_attention(x)).unflatten(1, (-1, sizes.head_dim)).split(heads, 1)
        )
        x = x + self.out(attend(layer, q, k, v).flatten(1))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, dim=1)
        down: Tensor = self.down(functional.silu(gate) * up)
        return x + down


class TinyModel(nn.Module):
    """Random weights, the same for the same seed. Buffers cos and sin: (positions, dim / 2)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: Sizes, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        frequencies = 10000.0 ** -(torch.arange(0, sizes.head_dim, 2) / sizes.head_dim)
        angles = torch.arange(sizes.positions)[:, None] * frequencies
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        """Logits (tokens, vocabulary) of tokens (tokens,)."""
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x, number, attend)
        logits: Tensor = self.head(self.norm(x))
        return logits
