"""Dropout: the backward makes the forward's mask again, and stores none."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.papers import forms, runs
from examples.papers.charts import Cell, Matrix
from examples.papers.counter import Counter, Traffic
from examples.papers.finding import Finding, charted, check, drawn, line, powers
from flashgen.inputs.features import Features
from flashgen.kernels.launch import bind
from flashgen.kernels.launch_backward import Backward
from flashgen.kernels.launch_forward import Forward
from flashgen.report.charts import Scale

N = 64
"""Keys, and the head dim: V and dO are the identity."""
TILE = 16
DROPPED = 0.1
DRAWN = 24


def remade() -> Finding:
    """The masks of both directions, read off through identities, and what they cost."""
    rng = torch.tensor([1234, 0])
    features = Features(dropout_p=DROPPED, rng=rng)
    of, identity = runs.head(N, N), torch.eye(N).half()[None, None]
    spec, config = runs.spec_of(N).with_features(("dropout",)), runs.config_of(TILE, TILE)
    forward = bind(runs.kernel_of(spec, config), spec, config)
    call = Forward(q=of.q, k=of.k, v=identity, scale=of.scale, diagonal=None, features=features)
    with Counter(kernel="forward") as counter:
        o, lse = forward(call)
    back = spec.for_direction("backward_dkv")
    backward = bind(runs.kernel_of(back, config), back, config)
    delta = torch.zeros_like(lse)
    with Counter(kernel="backward") as backward_counter:
        _, dv = backward(
            Backward(
                q=of.q, k=of.k, v=identity, do=identity.clone(), lse=lse, delta=delta,
                scale=of.scale, diagonal=None, features=features,
            )
        )  # fmt: skip
    # O = P' V = P' and dV = P'^T dO = P'^T, with P' after dropout.
    first, second = o[0, 0] == 0, dv[0, 0].mT == 0
    differing = int((first != second).sum())
    tile = (N, N, TILE, TILE)
    pairs = (
        (_without_state(counter.traffic), forms.fa2(*tile)),
        (_without_state(backward_counter.traffic), forms.dkv(*tile)),
    )
    lengths = powers(128, 4096)
    # Both are equal to counts: claim figure-2.
    plain = {n: forms.standard(n, 64, backward=True) for n in lengths}
    dropping = {n: forms.standard(n, 64, backward=True, dropout=True) for n in lengths}
    stored = {n: (dropping[n] - plain[n]) / 1e6 for n in lengths}
    return Finding(
        checks=(
            check(
                "computed",
                f"{int(first.sum())} of {N * N:,} elements dropped, {differing} differ in the "
                "backward",
                differing == 0 and 0 < int(first.sum()) < N * N // 4,
            ),
            check(
                "counted",
                "loads and stores are those without dropout, but for the generator's state",
                all(found == form for found, form in pairs),
            ),
        ),
        figures=(
            drawn(
                title=f"Dropped elements of P, the first {DRAWN} queries and keys",
                caption="With the identity for V, the zeros of O are the dropped elements; "
                "with the identity for dO, those of dV. The two patterns are the same.",
                matrices=(_drawn("forward", first), _drawn("backward", second)),
                across=2,
            ),
            charted(
                how=("closed form",),
                title="Bytes that dropout adds, forward and backward",
                caption="One head, 16 bits. Standard attention writes P once more and a mask "
                "of a byte an element, and reads both; flashgen reads a seed.",
                x=Scale(name="N, keys", at=lengths),
                y=Scale(name="HBM accesses, MB", log=False, low=0.0),
                lines=(
                    line("standard", stored, closed=True),
                    line("flashgen", dict.fromkeys(lengths, 0.0), closed=True),
                ),
            ),
        ),
    )


def _without_state(traffic: Traffic) -> Traffic:
    return {name: moved for name, moved in traffic.items() if name != "rng"}


def _drawn(name: str, dropped: Tensor) -> Matrix:
    corner = dropped[:DRAWN, :DRAWN].tolist()
    return Matrix(
        name=name, cells=tuple(tuple(Cell(text="", shade=float(x)) for x in row) for row in corner)
    )
