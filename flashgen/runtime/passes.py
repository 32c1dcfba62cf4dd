"""The two passes of a call whose tensors are checked: forward, and backward from what it saved.

Nothing here knows of autograd: the eager function, the registered operators and double backward's
refusal are all built upon these two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashgen.features import PLAIN, Features
from flashgen.gradients import sink_gradient
from flashgen.launch_backward import Backward, contiguous_rows
from flashgen.runtime import cpu
from flashgen.runtime.call import Call, Gradients, Saved, Wanted
from flashgen.runtime.launcher import BackwardLauncher, DeltaLauncher, Launcher
from flashgen.runtime.resolver import AnyLauncher, Resolver
from flashgen.spec import Direction


class Passes:
    """Forward and backward by the kernels that a resolver finds."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, features: Features = PLAIN
    ) -> tuple[Tensor, Tensor]:
        """O (B, H, Sq, d_v), laid out in memory as q is, and LSE (B, H, Sq)."""
        if self._resolver.left_to_torch(q.device):
            return cpu.forward(q, k, v, call, features)
        launcher = self._resolver.launcher(Launcher, "forward", q, k, v, call, features)
        q, k, v = self._resolver.all_addressed(q, k, v)
        return launcher(q, k, v, call.scale, call.diagonal(q, k), features)

    def backward(self, saved: Saved, do: Tensor, dlse: Tensor | None, wanted: Wanted) -> Gradients:
        """The gradients that are wanted, dq, dk and dv laid out in memory as q, k and v are.

        do (B, H, Sq, d_v) and dlse (B, H, Sq) in any strides; dlse None is a gradient of 0.
        """
        q, k, v = saved.q, saved.k, saved.v
        if self._resolver.left_to_torch(q.device):
            return cpu.backward(saved, do, dlse, wanted)
        addressed = self._resolver.addressed
        do = addressed(contiguous_rows(do), "the gradient of O")
        dlse = None if dlse is None else dlse.resolve_neg()
        backward = Backward(
            q=addressed(q, "q"),
            k=addressed(k, "k"),
            v=addressed(v, "v"),
            do=do,
            lse=saved.lse,
            delta=self._kernel(DeltaLauncher, "backward_delta", saved)(saved.o, do, dlse),
            scale=saved.call.scale,
            diagonal=saved.call.diagonal(q, k),
            features=saved.features,
        )
        dq = dk = dv = dbias = None
        if wanted.q and (wanted.k or wanted.v) and self._fuses(saved):
            dq, dk, dv = self._kernel(BackwardLauncher, "backward_fused", saved)(backward)
        else:
            if wanted.k or wanted.v:
                dk, dv = self._kernel(BackwardLauncher, "backward_dkv", saved)(backward)
            if wanted.q:
                (dq,) = self._kernel(BackwardLauncher, "backward_dq", saved)(backward)
        if wanted.bias:
            (dbias,) = self._kernel(BackwardLauncher, "backward_dbias", saved)(backward)
            dbias = dbias.contiguous()
        sinks = saved.features.sinks if wanted.sinks else None
        dsinks = None
        if sinks is not None:
            dsinks = sink_gradient(sinks, saved.lse, backward.delta).to(sinks.dtype)
        return dq, dk if wanted.k else None, dv if wanted.v else None, dbias, dsinks

    def _kernel(self, kind: type[AnyLauncher], direction: Direction, saved: Saved) -> AnyLauncher:
        return self._resolver.launcher(
            kind, direction, saved.q, saved.k, saved.v, saved.call, saved.features
        )

    def _fuses(self, saved: Saved) -> bool:
        """Whether the fused kernel, which adds dQ up in any order, is allowed and faster."""
        if saved.call.deterministic or torch.are_deterministic_algorithms_enabled():
            return False
        return self._resolver.prefers_fused(saved.q, saved.k, saved.v, saved.call, saved.features)
