"""The gradients of attention in float64, their floors, and the comparison of backward kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from flashgen.reference import attention as reference
from flashgen.reference import cases as reference_cases
from flashgen.reference.attention import Comparison
from flashgen.reference.cases import CheckCase
from flashgen.runtime.eager import attention as eager
from flashgen.runtime.eager.gradients import (
    GradientInputs,
    delta_of,
    gradients,
    over_group,
    rounded_gradients,
)
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.vocabulary import Direction

OUTPUTS: dict[str, tuple[str, ...]] = {
    "backward_dkv": ("dk", "dv"),
    "backward_dq": ("dq",),
    "backward_fused": ("dq", "dk", "dv"),
    "backward_dbias": ("dbias",),
}
"""What each direction's kernel computes, in the order in which its launcher returns it."""


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
        scale=case.scale(spec.head_dim),
        diagonal=case.diagonal(spec),
        features=reference_cases.make_features(spec, case, seed, device),
        precision=spec.precision,
    )


def forward(inputs: GradientInputs) -> tuple[Tensor, Tensor, Tensor]:
    """The results of an ideally rounded forward for the backward: O of q's dtype, LSE and delta,
    both float32.
    """
    with eager.float32_products():
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


def exact_gradients(inputs: GradientInputs) -> dict[str, Tensor]:
    """dq, dk, dv and, if present, dbias of an additive bias and dsinks; float64."""
    x = inputs.double()
    o, lse = eager.attention(x.q, x.k, x.v, scale=x.scale, diagonal=x.diagonal, features=x.features)
    return gradients(x, lse, delta_of(o, x.do, x.dlse), torch.float64)


def judge(direction: Direction, found: tuple[Tensor, ...], inputs: GradientInputs) -> Comparison:
    """Compare gradients with float64; `found` as the direction's launcher returns them.

    The unit of each is the largest of: its floor; half a unit in the last place of its type at its
    largest element; 4 * 2^-24 times the largest sum of absolute values that it adds up, what
    float32 accumulation may lose. Sums of sums count with their terms: for dS, P times |dO| |V|^T +
    rowsum|dO * O| + |dLSE|, because the errors of dP and D do not cancel when they do. P, which no
    row sum divides here, counts 1 + (|scale| |Q| |K|^T + |LSE|) / 4 times, because it is off by
    2^-24 of each unit of its exponent. What exceeds FEW_KEYS counts twice: there one key has most
    of a row, and errors of several do not average. The slope of a cap, at most 1, counts 1: it is a
    difference of numbers near 1.
    """
    _, lse, delta = forward(inputs)
    exact, summed = exact_gradients(inputs), _summed(inputs)
    ideal = rounded_gradients(inputs, lse, delta)
    return reference.worst(
        reference.compared(t, exact[name], ideal[name], summed[name])
        for name, t in zip(OUTPUTS[direction], found, strict=True)
        if t.numel()
    )


def _summed(inputs: GradientInputs) -> dict[str, float]:
    """The largest sum of absolute values in each gradient."""
    x = inputs.double()
    heads = x.q.shape[1]
    q, k, v, do = x.q.abs(), eager.per_query_head(x.k, heads).abs(), x.v.abs(), x.do.abs()
    o, lse = eager.attention(x.q, x.k, x.v, scale=x.scale, diagonal=x.diagonal, features=x.features)
    s = eager.scores(x.q, x.k, x.scale, x.diagonal, x.features)
    p = torch.exp(s - torch.where(torch.isinf(lse), float("inf"), lse)[..., None])
    exponent = eager.products(q, x.k.abs(), abs(x.scale), x.features)
    exponent = exponent + lse.abs().nan_to_num(posinf=0.0)[..., None]
    p = p * (1 + exponent / 4 + (exponent - reference.FEW_KEYS).clamp(min=0.0) / 4)
    kept = max(1.0, x.features.keep_scale)
    dp = kept * do @ eager.per_query_head(v, heads).transpose(-1, -2)
    ds = p * (dp + ((o * x.do).abs().sum(-1) + x.dlse.abs())[..., None])
    scale, kv_heads = abs(x.scale), x.k.shape[1]
    sums = {
        "dq": scale * ds @ k,
        "dk": over_group(scale * ds.transpose(-1, -2) @ q, kv_heads),
        "dv": over_group(kept * p.transpose(-1, -2) @ do, kv_heads),
    }
    if x.features.bias is not None:
        sums["dbias"] = ds.sum_to_size(x.features.bias.shape)
    return {name: reference.max_abs(t) for name, t in sums.items()}


def judge_delta(found: Tensor, o: Tensor, do: Tensor, dlse: Tensor) -> Comparison:
    """Compare delta with float64: the same unit, with the sum of |dO * O| + |dLSE|."""
    if found.numel() == 0:
        return Comparison()
    o64, do64, dlse64 = o.double(), do.double(), dlse.double()
    summed = reference.max_abs((o64 * do64).abs().sum(-1) + dlse64.abs())
    ideal = delta_of(o.float(), do.float(), dlse)
    exact = delta_of(o64, do64, dlse64)
    return reference.compared(found, exact, ideal, summed)
