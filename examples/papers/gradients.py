"""The backward's equations on two queries and two keys, exactly, and by kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from examples.papers import runs
from examples.papers.finding import EXACT, Figure, Finding, check, tabled
from flashgen.kernels.launch import bind
from flashgen.kernels.launch_backward import Backward, Delta
from flashgen.kernels.plan import Plan
from flashgen.reference.attention import max_abs
from flashgen.spec.vocabulary import Direction

Matrix = npt.NDArray[np.object_]
"""Of fractions."""
SCALE = math.log(3)
"""Of the scores: e^(scale * s) is 3^s, so that a softmax of whole numbers is a fraction."""
ROUNDED = 1e-5
"""A difference of float32 below it is rounding."""
PADDED = 16
"""The head dim of the kernels' run: the case fills 2 of it, zeros the others."""


def matrix(rows: list[list[int]]) -> Matrix:
    """Whole numbers as fractions, with which numpy computes exactly."""
    return np.array([[Fraction(value) for value in row] for row in rows])


@dataclass(frozen=True, kw_only=True, eq=False)
class Steps:
    """Each value of the forward and the backward; s, dq and dk in units of ln 3."""

    s: Matrix
    p: Matrix
    o: Matrix
    dv: Matrix
    dp: Matrix
    d: Matrix
    d_of_p: Matrix
    ds: Matrix
    dq: Matrix
    dk: Matrix


Q, K = matrix([[1, 0], [1, 1]]), matrix([[1, 0], [0, 1]])
V, DO = matrix([[4, 0], [0, 8]]), matrix([[1, 0], [1, 1]])


def steps(q: Matrix, k: Matrix, v: Matrix, do: Matrix) -> Steps:
    """Attention and its gradients of matrices of whole numbers, with the scale ln 3.

    Source: the FlashAttention paper's Appendix B.2; D is its equation 4.
    """
    s = q @ k.T
    weights = matrix([[3]]) ** s
    p = weights / weights.sum(1, keepdims=True)
    o, dp = p @ v, do @ v.T
    d, d_of_p = (do * o).sum(1, keepdims=True), (p * dp).sum(1, keepdims=True)
    ds = p * (dp - d)
    return Steps(
        s=s, p=p, o=o, dv=p.T @ do, dp=dp, d=d, d_of_p=d_of_p, ds=ds, dq=ds @ k, dk=ds.T @ q
    )


def tensor(of: Matrix, unit: float = 1.0) -> Tensor:
    """Fractions in float64, times a unit."""
    return torch.from_numpy(of.astype(np.float64)) * unit


def backward() -> Finding:
    """The exact gradients beside torch's in float64 and those of three kernels."""
    exact = steps(Q, K, V, DO)
    wanted = tensor(exact.dq, SCALE), tensor(exact.dk, SCALE), tensor(exact.dv)
    q, k, v = (tensor(x).requires_grad_() for x in (Q, K, V))
    found = torch.autograd.grad((q @ k.T * SCALE).softmax(-1) @ v, (q, k, v), tensor(DO))
    autograd = max(max_abs(got - want) for got, want in zip(found, wanted, strict=True))
    kernels = max(
        max_abs(found - want) for found, want in zip(by_kernels(exact), wanted, strict=True)
    )
    return Finding(
        checks=(
            check(
                "computed",
                f"dQ, dK and dV equal those of torch's autograd, error {autograd:.1e}",
                autograd < EXACT,
            ),
            check(
                "computed",
                "three kernels of this project compute them from LSE and D, without P: "
                f"error {kernels:.1e} in float32",
                kernels < ROUNDED,
            ),
            check(
                "computed",
                "D is the same from dO and O as from P and dP, which are N x N: "
                f"{_numbers(exact.d)}",
                bool((exact.d == exact.d_of_p).all()),
            ),
            check(
                "computed",
                "each row of dS adds up to 0: adding a number to all scores changes nothing",
                bool((exact.ds.sum(1) == 0).all()),
            ),
        ),
        figures=(_table(exact),),
        notes=(
            "To check by hand: the scale is ln 3, so e^(ln 3 s) is 3^s. The first row of S is "
            "(1, 0); its powers of three are 3 and 1; divided by their sum they are 3/4 and 1/4.",
            "Row i of dS is P_i (dP_i - D_i), element by element. In the first row D is 3, so dS "
            "is 3/4 (4 - 3) = 3/4 and 1/4 (0 - 3) = -3/4.",
        ),
    )


def by_kernels(exact: Steps) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV by the kernels of D, of dQ, and of dK and dV, in float32."""

    def padded(of: Matrix) -> Tensor:
        made = torch.zeros(1, 1, len(of), PADDED)
        made[0, 0, :, : len(of[0])] = tensor(of)
        return made

    lse = torch.logsumexp(tensor(exact.s, SCALE), -1).float()[None, None]
    spec, config = runs.spec_of(PADDED, dtype="float32"), runs.config_of(16, 16)

    def plan(direction: Direction) -> Plan:
        own = spec.for_direction(direction)
        return bind(runs.kernel_of(own, config), own, config)

    o, do = padded(exact.o), padded(DO)
    delta = plan("backward_delta")(Delta(o=o, do=do, dlse=None))
    call = Backward(
        q=padded(Q), k=padded(K), v=padded(V), do=do, lse=lse, delta=delta, scale=SCALE,
        diagonal=None,
    )  # fmt: skip
    (dq,) = plan("backward_dq")(call)
    dk, dv = plan("backward_dkv")(call)
    return _of_case(dq), _of_case(dk), _of_case(dv)


def _of_case(padded: Tensor) -> Tensor:
    return padded[0, 0, :, :2].double()


def _table(exact: Steps) -> Figure:
    lines = (
        ("S", "scale Q K^T, in units of ln 3", exact.s),
        ("P", "softmax of each row of S", exact.p),
        ("O", "P V", exact.o),
        ("dV", "P^T dO", exact.dv),
        ("dP", "dO V^T", exact.dp),
        ("D", "sum of each row of dO * O", exact.d),
        ("dS", "P * (dP - D)", exact.ds),
        ("dQ", "scale dS K, in units of ln 3", exact.dq),
        ("dK", "scale dS^T Q, in units of ln 3", exact.dk),
    )
    given = (("Q", "given", Q), ("K", "given", K), ("V", "given", V), ("dO", "given", DO))
    return tabled(
        how=("computed",),
        title="Every step, as fractions",
        caption="Two queries, two keys, d 2. * is element by element. Each pair of brackets is a "
        "row of the matrix.",
        columns=("matrix", "from", "value"),
        rows=[(name, rule, _numbers(value)) for name, rule, value in (*given, *lines)],
    )


def _numbers(of: Matrix) -> str:
    rows = (",\u00a0".join(map(str, row)) for row in of)  # a row is not broken over lines
    return " ".join(f"[{row}]" for row in rows)
