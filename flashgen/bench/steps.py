"""The steps of the ladders, forward and backward, and passes by kernels that are given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flashgen.config import AUTO_WARPS, BY_KEYS, KernelConfig, Loads, Order, Schedule
from flashgen.features import PLAIN, Features
from flashgen.launch_backward import Backward, contiguous_rows
from flashgen.runtime.call import Call, Gradients, Saved, Wanted
from flashgen.space import AUTO_TILES, HOPPER_TILES, KNOWN_GOOD
from flashgen.spec import AttentionSpec, Direction


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step, by the fields of its configs that it fixes. order None: longest first where the
    mask is causal, where the direction has it. directions: of the kernels that it fixes.
    """

    name: str
    schedule: Schedule
    loads: Loads
    order: Order | None = "plain"
    persistent: bool = False
    directions: tuple[Direction, ...] = ("forward",)

    def specs(self, spec: AttentionSpec) -> tuple[AttentionSpec, ...]:
        """What the step's kernels compute, of a forward spec: itself, or its gradients."""
        return tuple(spec.for_direction(direction) for direction in self.directions)

    def order_of(self, spec: AttentionSpec) -> Order:
        """The order of the step's config for a spec."""
        if spec.direction in BY_KEYS:
            return "plain"
        if self.order is None:
            return "longest_first" if spec.causal else "plain"
        return self.order

    def holds(self, config: KernelConfig, spec: AttentionSpec) -> bool:
        """Whether a config is one of this step."""
        mine = self.schedule, self.loads, self.order_of(spec), self.persistent
        return (config.schedule, config.loads, config.order, config.persistent) == mine

    def candidates(self, spec: AttentionSpec) -> Iterator[KernelConfig]:
        """The tiles that others found good, restricted to this step."""
        for br, bc, warps, stages in self._tiles(spec.direction):
            yield KernelConfig(
                br=br,
                bc=bc,
                num_warps=warps,
                num_stages=stages,
                schedule=self.schedule,
                loads=self.loads,
                order=self.order_of(spec),
                persistent=self.persistent,
            )

    def _tiles(self, direction: str) -> list[tuple[int, int, int, int]]:
        if self.schedule == "hopper":
            return list(HOPPER_TILES[direction])
        if self.schedule == "auto":
            return [(br, bc, AUTO_WARPS, stages) for br, bc, stages in AUTO_TILES]
        if direction in BY_KEYS:
            return [(walked, owned, *rest) for owned, walked, *rest in KNOWN_GOOD]  # type: ignore[misc]
        return list(KNOWN_GOOD)


STEPS = (
    Step(name="fa1", schedule="fa1", loads="pointer"),
    Step(name="fa2", schedule="fa2", loads="pointer"),
    Step(name="fa2, descriptors", schedule="fa2", loads="descriptor"),
    Step(name="s_ahead", schedule="s_ahead", loads="pointer"),
    Step(name="s_ahead, descriptors", schedule="s_ahead", loads="descriptor"),
    Step(name="longest first", schedule="s_ahead", loads="descriptor", order="longest_first"),
    Step(name="head reversal", schedule="s_ahead", loads="descriptor", order="head_reversal"),
    Step(name="grouped", schedule="s_ahead", loads="descriptor", order="grouped"),
    Step(name="persistent", schedule="s_ahead", loads="descriptor", order=None, persistent=True),
    Step(name="auto", schedule="auto", loads="descriptor", order=None),
    Step(name="hopper", schedule="hopper", loads="descriptor", order=None),
    Step(name="hopper, grouped", schedule="hopper", loads="descriptor", order="grouped"),
    Step(
        name="hopper, persistent",
        schedule="hopper",
        loads="descriptor",
        order=None,
        persistent=True,
    ),
)
"""Of the forward."""

TWO: tuple[Direction, ...] = ("backward_dkv", "backward_dq")
FUSED: tuple[Direction, ...] = ("backward_fused",)
BACKWARD_STEPS = (
    Step(name="two: fa2", schedule="fa2", loads="pointer", order=None, directions=TWO),
    Step(name="two: descriptors", schedule="fa2", loads="descriptor", order=None, directions=TWO),
    Step(name="two: s_ahead", schedule="s_ahead", loads="descriptor", order=None, directions=TWO),
    Step(name="fused: fa2", schedule="fa2", loads="pointer", directions=FUSED),
    Step(name="fused: descriptors", schedule="fa2", loads="descriptor", directions=FUSED),
    Step(name="fused: s_ahead", schedule="s_ahead", loads="descriptor", directions=FUSED),
    Step(name="two: hopper", schedule="hopper", loads="descriptor", order=None, directions=TWO),
    Step(name="fused: hopper", schedule="hopper", loads="descriptor", directions=FUSED),
)
"""Of the backward: dK/dV and dQ by two kernels, or by one."""


class PinnedPasses:
    """The two passes of autograd.TwoPasses, by bound kernels: one a direction."""

    def __init__(self, bound: Mapping[Direction, Any]) -> None:
        self._bound = bound

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, features: Features = PLAIN
    ) -> tuple[Tensor, Tensor]:
        """O and LSE."""
        o, lse = self._bound["forward"](q, k, v, call.scale, call.diagonal(q, k), features)
        return o, lse

    def backward(self, saved: Saved, do: Tensor, dlse: Tensor | None, wanted: Wanted) -> Gradients:
        """The gradients of q, k and v, wanted or not."""
        do = contiguous_rows(do)
        call = Backward(
            q=saved.q,
            k=saved.k,
            v=saved.v,
            do=do,
            lse=saved.lse,
            delta=self._bound["backward_delta"](saved.o, do, dlse),
            scale=saved.call.scale,
            diagonal=saved.call.diagonal(saved.q, saved.k),
        )
        if "backward_fused" in self._bound:
            dq, dk, dv = self._bound["backward_fused"](call)
        else:
            (dq,), (dk, dv) = self._bound["backward_dq"](call), self._bound["backward_dkv"](call)
        return dq, dk, dv, None, None
