"""The gradients of attention in float64, their floors, and the comparison of backward kernels.

With P the softmax, P' = P after dropout, D = rowsum(dO * O) - dLSE (arXiv 2307.08691, section
3.1.2; LSE's own gradient adds P * dLSE to dS):

    dV = P'^T dO      dP = dropout(dO V^T)      dS = P * (dP - D)
    dQ = scale dS K   dK = scale dS^T Q

and dS, summed where the bias is broadcast, is the gradient of the bias. Under a cap of the scores
dQ and dK take dS * (1 - tanh^2), tanh being that of the capped score. A sink has no value, so its
dP is 0, and its gradient -P_sink * D, P_sink = exp(sink - LSE), summed over batches and rows. Torch
alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.reference import attention as reference
from flashgen.reference import cases as reference_cases
from flashgen.reference.attention import Comparison
from flashgen.reference.cases import CheckCase
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.features import Features
from flashgen.spec.from_call import check_scale
from flashgen.spec.vocabulary import Direction

OUTPUTS: dict[str, tuple[str, ...]] = {
    "backward_dkv": ("dk", "dv"),
    "backward_dq": ("dq",),
    "backward_fused": ("dq", "dk", "dv"),
    "backward_dbias": ("dbias",),
}
"""What each direction's kernel computes, in the order in which its launcher returns it."""


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
        return self._with(q, k, v, do, dlse)

    def _with(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, dlse: Tensor) -> GradientInputs:
        return GradientInputs(
            q=q,
            k=k,
            v=v,
            do=do,
            dlse=dlse,
            scale=self.scale,
            diagonal=self.diagonal,
            features=self.features,
            precision=self.precision,
        )


def make_inputs(
    spec: AttentionSpec, case: CheckCase, seed: int, device: torch.device | str
) -> GradientInputs:
    """Random inputs for a case, dO in another layout than Q; the same for the same seed."""
    q, k, v = reference_cases.make_inputs(spec, case, seed, device)
    generator = torch.Generator().manual_seed(seed + 2)
    problem = case.problem
    rows = (problem.batch, problem.heads, problem.seq_q)
    layout = "sliced" if case.layout == "bhsd" else "bhsd"
    do = reference_cases.draw((*rows, spec.head_dim_v), layout, generator)
    dlse = torch.randn(rows, generator=generator)
    return GradientInputs(
        q=q,
        k=k,
        v=v,
        do=reference_cases.moved(do, q.dtype, device),
        dlse=dlse.to(device),
        scale=check_scale(None, spec.head_dim),
        diagonal=case.diagonal(spec),
        features=reference_cases.make_features(spec, case, seed, device),
        precision=spec.precision,
    )


def forward(inputs: GradientInputs) -> tuple[Tensor, Tensor, Tensor]:
    """The results of an ideally rounded forward for the backward: O of q's dtype, LSE and delta,
    both float32.
    """
    with reference.float32_products():
        o, lse = reference.rounded_attention(
            inputs.q,
            inputs.k,
            inputs.v,
            scale=inputs.scale,
            diagonal=inputs.diagonal,
            precision=inputs.precision,
            features=inputs.features,
        )
    return o, lse.float(), delta_of(o.float(), inputs.do.float(), inputs.dlse)


def delta_of(o: Tensor, do: Tensor, dlse: Tensor) -> Tensor:
    """D = rowsum(dO * O) - dLSE, (B, H, Sq)."""
    return (o * do).sum(-1) - dlse


def exact_gradients(inputs: GradientInputs) -> dict[str, Tensor]:
    """dq, dk, dv and, if present, dbias of an additive bias and dsinks; float64."""
    x = inputs.double()
    o, lse = reference.attention(
        x.q, x.k, x.v, scale=x.scale, diagonal=x.diagonal, features=x.features
    )
    return _gradients(x, lse, delta_of(o, x.do, x.dlse), torch.float64)


def rounded_gradients(inputs: GradientInputs, lse: Tensor, delta: Tensor) -> dict[str, Tensor]:
    """The results of ideally rounded kernels, from those of `forward`: float32 throughout, but P
    and dS rounded to the operand type before their products, and the results to their own.

    Their distance from exact_gradients is the floor.
    """
    dtype, x = inputs.q.dtype, inputs
    operands = (reference.operand(t, x.precision) for t in (x.q, x.k, x.v, x.do))
    q, k, v, do = operands
    with reference.float32_products():
        found = _gradients(x._with(q, k, v, do, x.dlse), lse, delta, dtype)
    of_feature = {"dbias": inputs.features.bias, "dsinks": inputs.features.sinks}
    return {
        name: t.to(dtype if (own := of_feature.get(name)) is None else own.dtype)
        for name, t in found.items()
    }


def _gradients(
    x: GradientInputs, lse: Tensor, delta: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The formulas above, P and dS rounded to `dtype` and the precision's operands."""

    def rounded(t: Tensor) -> Tensor:
        return t if dtype == torch.float64 else reference.operand(t.to(dtype), x.precision)

    heads, kv_heads = x.q.shape[1], x.k.shape[1]
    s = reference.scores(x.q, x.k, x.scale, x.diagonal, x.features)
    lse = torch.where(torch.isinf(lse), float("inf"), lse)  # rows that see nothing
    p = torch.exp(s - lse[..., None])
    dp = x.do @ reference.per_query_head(x.v, heads).transpose(-1, -2)
    ds = p * (reference.dropped(dp, x.features) - delta[..., None])
    of_scores = rounded(ds * _slope_of_cap(x))
    dq = x.scale * (of_scores @ reference.per_query_head(x.k, heads))
    dk = x.scale * (of_scores.transpose(-1, -2) @ x.q)
    dv = reference.dropped(rounded(p), x.features).transpose(-1, -2) @ x.do
    found = {"dq": dq, "dk": _over_group(dk, kv_heads), "dv": _over_group(dv, kv_heads)}
    if x.features.bias is not None and x.features.bias.dtype is not torch.bool:
        found["dbias"] = ds.sum_to_size(x.features.bias.shape)
    if x.features.sinks is not None:
        found["dsinks"] = sink_gradient(x.features.sinks, lse, delta)
    return found


def _slope_of_cap(x: GradientInputs) -> Tensor | float:
    """The derivative of the capped scores by the scores, (B, H, Sq, Sk); 1 without a cap."""
    if x.features.softcap == 0.0:
        return 1.0
    k = reference.per_query_head(x.k, x.q.shape[1])
    s = x.scale * (x.q @ k.transpose(-1, -2))
    tanh: Tensor = torch.tanh(s / x.features.softcap)
    return 1.0 - tanh.square()


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The gradient of the sinks (H,), in the dtype of delta, of LSE and D (B, H, Sq)."""
    # An LSE of -inf or inf is that of a row whose sink is -inf, which has no weight.
    p = torch.exp(sinks.to(delta.dtype)[:, None] - lse)
    return -(torch.where(torch.isinf(lse), 0.0, p) * delta).sum((0, 2))


def _over_group(x: Tensor, kv_heads: int) -> Tensor:
    """The sum over the query heads that share a head of K and V."""
    batch, heads, seq, dim = x.shape
    group = heads // kv_heads if kv_heads else 1
    return x.view(batch, kv_heads, group, seq, dim).sum(2) if group > 1 else x


def judge(direction: Direction, found: tuple[Tensor, ...], inputs: GradientInputs) -> Comparison:
    """Compare gradients with float64; `found` as the direction's launcher returns them.

    The unit of each is the largest of: its floor; half a unit in the last place of its type at its
    largest element; 4 * 2^-24 times the largest sum of absolute values that it adds up, what
    float32 accumulation may lose. Sums of sums count with their terms: for dS, P times |dO| |V|^T +
    rowsum|dO * O| + |dLSE|, because the errors of dP and D do not cancel when they do. P, which no
    row sum divides here, counts 1 + (|scale| |Q| |K|^T + |LSE|) / 4 times, because it is off by
    2^-24 of each unit of its exponent. The slope of a cap, at most 1, counts 1: it is a difference
    of numbers near 1.
    """
    _, lse, delta = forward(inputs)
    exact, summed = exact_gradients(inputs), _summed(inputs)
    ideal = rounded_gradients(inputs, lse, delta)
    floors = [
        reference.error_in_floors(t, exact[name], ideal[name], summed[name])
        for name, t in zip(OUTPUTS[direction], found, strict=True)
        if t.numel()
    ]
    nan = any(floor != floor for floor in floors)
    return Comparison(floors=float("nan") if nan else max(floors, default=0.0), lse=0.0)


def _summed(inputs: GradientInputs) -> dict[str, float]:
    """The largest sum of absolute values in each gradient."""
    x = inputs.double()
    heads = x.q.shape[1]
    q, k, v, do = x.q.abs(), reference.per_query_head(x.k, heads).abs(), x.v.abs(), x.do.abs()
    o, lse = reference.attention(
        x.q, x.k, x.v, scale=x.scale, diagonal=x.diagonal, features=x.features
    )
    s = reference.scores(x.q, x.k, x.scale, x.diagonal, x.features)
    p = torch.exp(s - torch.where(torch.isinf(lse), float("inf"), lse)[..., None])
    exponent = abs(x.scale) * q @ k.transpose(-1, -2) + lse.abs().nan_to_num(posinf=0.0)[..., None]
    p = p * (1 + exponent / 4)
    kept = max(1.0, x.features.keep_scale)
    dp = kept * do @ reference.per_query_head(v, heads).transpose(-1, -2)
    ds = p * (dp + ((o * x.do).abs().sum(-1) + x.dlse.abs())[..., None])
    scale, kv_heads = abs(x.scale), x.k.shape[1]
    sums = {
        "dq": scale * ds @ k,
        "dk": _over_group(scale * ds.transpose(-1, -2) @ q, kv_heads),
        "dv": _over_group(kept * p.transpose(-1, -2) @ do, kv_heads),
    }
    if x.features.bias is not None:
        sums["dbias"] = ds.sum_to_size(x.features.bias.shape)
    return {name: reference.max_abs(t) for name, t in sums.items()}


def judge_delta(found: Tensor, o: Tensor, do: Tensor, dlse: Tensor) -> Comparison:
    """Compare delta with float64: the same unit, with the sum of |dO * O| + |dLSE|."""
    if found.numel() == 0:
        return Comparison(floors=0.0, lse=0.0)
    o64, do64, dlse64 = o.double(), do.double(), dlse.double()
    summed = reference.max_abs((o64 * do64).abs().sum(-1) + dlse64.abs())
    ideal = delta_of(o.float(), do.float(), dlse)
    exact = delta_of(o64, do64, dlse64)
    return Comparison(floors=reference.error_in_floors(found, exact, ideal, summed), lse=0.0)
