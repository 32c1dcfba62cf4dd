"""The check of forward and backward kernels at lengths that are timed, on a GPU: float64 of a few
heads, because that of all would take longer than the timing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashgen.inputs.features import Features
from flashgen.kernels.launch_backward import Backward
from flashgen.kernels.launch_forward import Forward
from flashgen.reference import attention as reference
from flashgen.reference import gradients
from flashgen.reference.attention import Comparison
from flashgen.reference.cases import CheckCase, Trial
from flashgen.reference.gradients import OUTPUTS
from flashgen.runtime.eager.gradients import GradientInputs
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.features import PER_HEAD
from flashgen.spec.problem import workload
from flashgen.spec.vocabulary import OF_DS

TIMED_SEQ = 2048
"""Queries and keys: float64 scores of a head take 32 MiB."""


@dataclass(frozen=True, kw_only=True)
class SampledCase(CheckCase):
    """A CheckCase of which the first, the last and a middle head of K and V are compared."""

    def heads(self) -> list[tuple[int, int]]:
        """Batch and head of K and V of each."""
        count = self.problem.batch * self.problem.kv_heads
        places = sorted({0, count // 2, count - 1}) if count else []
        return [divmod(place, self.problem.kv_heads) for place in places]


def sampled_cases(spec: AttentionSpec, device: str) -> tuple[SampledCase, ...]:
    """On a GPU, one batch at TIMED_SEQ whose heads share K and V as those of most models do, and
    one at half of that whose heads share none. There is none of what no head has by
    itself: draws of dropout, block masks, packed sequences, gradients of a bias, and dS.
    """
    shared = spec.dropout or spec.block_mask or spec.varlen
    whole = spec.direction in ("backward_delta", "backward_dbias", *OF_DS)
    if shared or whole or torch.device(device).type != "cuda":
        return ()
    timed, short = (replace(workload(spec, seq), batch=1) for seq in (TIMED_SEQ, TIMED_SEQ // 2))
    return (
        SampledCase(problem=replace(timed, heads=32, kv_heads=8)),
        SampledCase(problem=replace(short, heads=16, kv_heads=16)),
    )


def sampled_trial(
    spec: AttentionSpec, case: SampledCase, seed: int, device: torch.device | str
) -> Trial:
    """As check_attention.attention_trial makes it."""
    x = gradients.make_inputs(spec, case, seed, device)
    given = operands(x)
    if spec.direction == "forward":
        return Trial(
            call=Forward(**given),
            compare=lambda found: reference.worst(
                _judge_forward(found, x, *head) for head in case.heads()
            ),
        )
    lse, delta = torch.empty_like(x.dlse), torch.empty_like(x.dlse)
    for batch in range(case.problem.batch):
        for head in range(case.problem.kv_heads):
            own = _query_heads(x, head)
            _, lse[batch, own], delta[batch, own] = gradients.forward(of_head(x, batch, head))
    return Trial(
        call=Backward(**given, do=x.do, lse=lse, delta=delta),
        compare=lambda found: reference.worst(
            _judge_backward(spec, found, x, *head) for head in case.heads()
        ),
    )


def operands(x: GradientInputs) -> dict[str, Any]:
    """What every launch of a forward and a backward kernel is given, by its name there."""
    return {name: getattr(x, name) for name in ("q", "k", "v", "scale", "diagonal", "features")}


def of_head(x: GradientInputs, batch: int, head: int) -> GradientInputs:
    """The inputs of one head of K and V, with the heads of Q that share it."""
    own, one, kv = _query_heads(x, head), slice(batch, batch + 1), slice(head, head + 1)
    return replace(
        x,
        q=x.q[one, own],
        k=x.k[one, kv],
        v=x.v[one, kv],
        do=x.do[one, own],
        dlse=x.dlse[one, own],
        features=_features_of(x.features, one, own, kv),
    )


def _query_heads(x: GradientInputs, head: int) -> slice:
    group = x.q.shape[1] // x.k.shape[1]
    return slice(head * group, (head + 1) * group)


def _features_of(features: Features, batch: slice, heads: slice, kv_heads: slice) -> Features:
    """Those of some heads of a batch."""
    found = features.of_sequence(batch.start)
    bias, fp8 = features.bias, features.fp8
    if bias is not None:
        bias = bias if bias.shape[0] == 1 else bias[batch]
        bias = bias if bias.shape[1] == 1 else bias[:, heads]
    if fp8 is not None:
        q, k, v = (factor[batch, kv_heads] for factor in fp8.factors)
        fp8 = replace(fp8, q_descale=q, k_descale=k, v_descale=v)
    given = {name: x for name in PER_HEAD if (x := getattr(found, name)) is not None}
    return replace(found, bias=bias, fp8=fp8, **{name: x[heads] for name, x in given.items()})


def _judge_forward(
    found: tuple[Tensor, Tensor], x: GradientInputs, batch: int, head: int
) -> Comparison:
    own, one = of_head(x, batch, head), slice(batch, batch + 1)
    o, lse = (each[one, _query_heads(x, head)] for each in found)
    return reference.judge(
        o, lse, own.q, own.k, own.v,
        scale=x.scale, diagonal=x.diagonal, precision=x.precision, features=own.features,
    )  # fmt: skip


def _judge_backward(
    spec: AttentionSpec, found: tuple[Tensor, ...], x: GradientInputs, batch: int, head: int
) -> Comparison:
    one, of_q, of_kv = slice(batch, batch + 1), _query_heads(x, head), slice(head, head + 1)
    own = tuple(
        each[one, of_q if name == "dq" else of_kv]
        for name, each in zip(OUTPUTS[spec.direction], found, strict=True)
    )
    return gradients.judge(spec.direction, own, of_head(x, batch, head))
