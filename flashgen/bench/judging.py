"""The error of a contender's results in floors, held against float64 at the size that is timed.

Whole problems are too large for float64, so it is that of as many heads of the first sequence as
fit in memory; of a decode, of the first and last sequences. Floors are reference.py's: 2 are
accepted of flashgen's own kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashgen import decoding, gradients, reference
from flashgen.bench.case import Case, Inputs
from flashgen.features import PLAIN

FORWARD_ELEMENTS = 1 << 27
"""Elements of S compared with float64 at once, at most: 1 GiB, and the reference holds a few."""

BACKWARD_ELEMENTS = 1 << 25
"""The same of the backward, but for one head: the reference holds a dozen of this size."""


def floors(found: tuple[Tensor, ...], case: Case, x: Inputs) -> float:
    """The worst error of what a pass returned: (O,), (dQ, dK, dV), or (O, dQ, dK, dV)."""
    if case.direction == "decode":
        return _of_decode(found[0], case, x)
    if case.direction == "forward":
        return _of_forward(found[0], case, x)
    if case.direction == "backward":
        return _of_backward(found, case, x)
    return max(_of_forward(found[0], case, x), _of_backward(found[1:], case, x))


def _heads(case: Case, elements: int) -> int:
    p = case.problem
    return max(1, min(p.heads, elements // (p.seq_q * p.seq_k)))


def _of_forward(o: Tensor, case: Case, x: Inputs) -> float:
    heads = _heads(case, FORWARD_ELEMENTS)
    q, k, v, o = (y[:1, :heads] for y in (x.q, x.k, x.v, o))
    lse = torch.zeros(o.shape[:3], device=o.device)  # most peers return none; O alone is compared
    return reference.judge(o, lse, q, k, v, scale=case.scale, diagonal=case.diagonal).floors


def _of_backward(found: tuple[Tensor, ...], case: Case, x: Inputs) -> float:
    """The worst gradient. The heads are not grouped, so each has its own gradients."""
    heads = _heads(case, BACKWARD_ELEMENTS)
    q, k, v, do, *gradient = (y[:1, :heads] for y in (x.q, x.k, x.v, x.do, *found))
    inputs = gradients.Inputs(
        q=q,
        k=k,
        v=v,
        do=do,
        dlse=torch.zeros(q.shape[:3], device=q.device),
        scale=case.scale,
        diagonal=case.diagonal,
        features=PLAIN,
    )
    return gradients.judge("backward_fused", tuple(gradient), inputs).floors


def _of_decode(o: Tensor, case: Case, x: Inputs) -> float:
    assert x.cache is not None  # of decode
    worst = 0.0
    for number in {0, case.problem.batch - 1}:
        one = slice(number, number + 1)
        k, v = decoding.sequence(x.cache, number, case.problem.seq_k)
        lse = torch.zeros(o[one].shape[:3], device=o.device)
        verdict = reference.judge(o[one], lse, x.q[one], k, v, scale=case.scale, diagonal=None)
        worst = max(worst, verdict.floors)
    return worst
