"""The gradients of attention in torch operations.

With P the softmax, P' = P after dropout, D = rowsum(dO * O) - dLSE (arXiv 2307.08691, section
3.1.2; LSE's own gradient adds P * dLSE to dS):

    dV = P'^T dO      dP = dropout(dO V^T)      dS = P * (dP - D)
    dQ = scale dS K   dK = scale dS^T Q

and dS, summed where the bias is broadcast, is the gradient of the bias. Under a cap of the scores
dQ and dK take dS * (1 - tanh^2), tanh being that of the capped score. A sink has no value, so its
dP is 0, and its gradient -P_sink * D, P_sink = exp(sink - LSE), summed over batches and rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashgen.inputs.features import Features
from flashgen.runtime.eager import attention as eager


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientInputs:
    """The inputs of a backward pass: the arguments of the forward, dO (B, H, Sq, d_v), and dLSE
    (B, H, Sq).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor
    scale: float
    diagonal: int | None
    features: Features
    precision: str = "ieee"

    def double(self) -> GradientInputs:
        """The same values in float64."""
        q, k, v, do, dlse = (x.double() for x in (self.q, self.k, self.v, self.do, self.dlse))
        return replace(self, q=q, k=k, v=v, do=do, dlse=dlse)


def delta_of(o: Tensor, do: Tensor, dlse: Tensor) -> Tensor:
    """D = rowsum(dO * O) - dLSE, (B, H, Sq)."""
    return (o * do).sum(-1) - dlse


def rounded_gradients(inputs: GradientInputs, lse: Tensor, delta: Tensor) -> dict[str, Tensor]:
    """The results of ideally rounded kernels, from those of `forward`: float32 throughout, but P
    and dS rounded to the operand type before their products, and the results to their own.

    Their distance from exact_gradients is the floor.
    """
    dtype, x = inputs.q.dtype, inputs
    operands = (eager.operand(t, x.precision) for t in (x.q, x.k, x.v, x.do))
    q, k, v, do = operands
    with eager.float32_products():
        found = gradients(replace(x, q=q, k=k, v=v, do=do), lse, delta, dtype)
    of_feature = {"dbias": inputs.features.bias, "dsinks": inputs.features.sinks}
    return {
        name: t.to(dtype if (own := of_feature.get(name)) is None else own.dtype)
        for name, t in found.items()
    }


def score_gradients(x: GradientInputs, lse: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """P and dS (B, H, Sq, Sk); lse is inf, or -inf, where a row sees nothing."""
    s = eager.scores(x.q, x.k, x.scale, x.diagonal, x.features)
    p = torch.exp(s - torch.where(torch.isinf(lse), float("inf"), lse)[..., None])
    dp = x.do @ eager.per_query_head(x.v, x.q.shape[1]).transpose(-1, -2)
    return p, p * (eager.dropped(dp, x.features) - delta[..., None])


def gradients(
    x: GradientInputs, lse: Tensor, delta: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The formulas above, P and dS rounded to `dtype` and the precision's operands."""

    def rounded(t: Tensor) -> Tensor:
        return t if dtype == torch.float64 else eager.operand(t.to(dtype), x.precision)

    heads, kv_heads = x.q.shape[1], x.k.shape[1]
    p, ds = score_gradients(x, lse, delta)
    of_scores = rounded(ds * eager.slope(x.q, x.k, x.scale, x.features))
    dq = x.scale * (of_scores @ eager.per_query_head(x.k, heads))
    dk = x.scale * (of_scores.transpose(-1, -2) @ x.q)
    dv = eager.dropped(rounded(p), x.features).transpose(-1, -2) @ x.do
    found = {"dq": dq, "dk": over_group(dk, kv_heads), "dv": over_group(dv, kv_heads)}
    if x.features.bias is not None and x.features.bias.dtype is not torch.bool:
        found["dbias"] = ds.sum_to_size(x.features.bias.shape)
    if x.features.sinks is not None:
        found["dsinks"] = sink_gradient(x.features.sinks, lse, delta)
    return found


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The gradient of the sinks (H,), in the dtype of delta, of LSE and D (B, H, Sq)."""
    # An LSE of -inf or inf is that of a row whose sink is -inf, which has no weight.
    p = torch.exp(sinks.to(delta.dtype)[:, None] - lse)
    return -(torch.where(torch.isinf(lse), 0.0, p) * delta).sum((0, 2))


def over_group(x: Tensor, kv_heads: int) -> Tensor:
    """The sum over the query heads that share a head of K and V."""
    batch, heads, seq, dim = x.shape
    group = heads // kv_heads if kv_heads else 1
    return x.view(batch, kv_heads, group, seq, dim).sum(2) if group > 1 else x
