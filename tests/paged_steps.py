"""What a step of a model that is served over pages must give, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def expected(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, options: dict[str, Any]
) -> Tensor:
    """Attention of one sequence: q (queries, heads, dim), k and v (keys, kv heads, dim); options: sliding_window,
    logits_soft_cap, alibi_slopes and sinks, as vLLM gives them to a layer.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    s = q.double().transpose(0, 1) @ k.mT * scale
    if cap := options.get("logits_soft_cap"):
        s = cap * torch.tanh(s / cap)
    behind = torch.arange(q.shape[0])[:, None] + k.shape[1] - q.shape[0] - torch.arange(k.shape[1])
    if slopes := options.get("alibi_slopes"):
        s = s - torch.tensor(slopes).double()[:, None, None] * behind.abs()
    if causal:
        s = s.masked_fill(behind < 0, -torch.inf)
    if window := options.get("sliding_window"):
        s = s.masked_fill((behind >= window) | (behind <= -window), -torch.inf)
    sinks = options.get("sinks")
    extra = s[..., :0] if sinks is None else sinks.double()[:, None, None].expand(*s.shape[:2], 1)
    p = torch.cat([s, extra], -1).softmax(-1)[..., : s.shape[-1]]
    return (p @ v).transpose(0, 1)
