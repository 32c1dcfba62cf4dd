"""The ladder: flashgen's kernels with one more optimization at each step, which shows the gain of
each.

A step fixes schedule, loads and order of the forward kernel, or of those of the backward, and runs
at a tile of its own. On a GPU, TILES of its tiles are timed and the fastest is taken: the table's
choice, if it is one of this step, and the best by estimate. So two steps compare what each can do,
and the listing says with which tile. The evaluator checks each against float64 in a child process,
which may hang, before it is called here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashgen import settings
from flashgen.bench.case import BenchCase, BenchInputs
from flashgen.bench.contenders import AttentionFunction, Contender, LeftOut, Made
from flashgen.errors import FlashgenError
from flashgen.evaluate.evaluator import Evaluator
from flashgen.evaluate.inputs import kernel_in
from flashgen.kernels import launch
from flashgen.kernels.ds_runs import planned
from flashgen.kernels.launch_backward import Backward
from flashgen.kernels.launch_ds import ds_sizes
from flashgen.kernels.plan import KernelCall, Plan, Result
from flashgen.runtime.autograd import Passes, differentiable
from flashgen.runtime.call import Call, Tensors
from flashgen.runtime.launcher import Launcher, LaunchPlan
from flashgen.runtime.resolver import Resolver
from flashgen.runtime.selection import Served, relatives
from flashgen.runtime.ways import PAIR, WAYS, ChosenWay, Way, slots_of
from flashgen.schedules.base import Loads, Order
from flashgen.schedules.config import SCHEDULES, KernelConfig, kernel_name
from flashgen.schedules.defaults import default_config
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.outcome import Outcome
from flashgen.schedules.space import likely_order
from flashgen.search.decide import median_us
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import Problem, bucket_of
from flashgen.spec.vocabulary import Direction


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step: the fields of its configs that it fixes. order None: the likeliest. directions: of
    the kernels that it fixes.
    """

    name: str
    schedule: str
    loads: Loads
    order: Order | None = "plain"
    persistent: bool = False
    directions: tuple[Direction, ...] = ("forward",)

    def specs(self, spec: AttentionSpec) -> tuple[AttentionSpec, ...]:
        """The specs of the kernels of a step, for a forward spec: itself, or its gradients."""
        return tuple(spec.for_direction(direction) for direction in self.directions)

    def order_of(self, spec: AttentionSpec) -> Order:
        """The order of the step's config for a spec."""
        return likely_order(spec) if self.order is None else self.order

    def schedule_of(self, spec: AttentionSpec) -> str:
        """The schedule of the step's config for a spec: dQ of dS has fa2 alone."""
        return "fa2" if spec.direction == "backward_dq_of_ds" else self.schedule

    def holds(self, config: KernelConfig, spec: AttentionSpec) -> bool:
        """Whether a config is one of this step."""
        mine = self.schedule_of(spec), self.loads, self.order_of(spec), self.persistent
        return (config.schedule, config.loads, config.order, config.persistent) == mine

    def candidates(self, spec: AttentionSpec) -> Iterator[KernelConfig]:
        """Known good tiles, restricted to this step."""
        schedule = self.schedule_of(spec)
        for br, bc, warps, stages in SCHEDULES[schedule].tiles[spec.direction]:
            yield KernelConfig(
                br=br,
                bc=bc,
                num_warps=warps,
                num_stages=stages,
                schedule=schedule,
                loads=self.loads,
                order=self.order_of(spec),
                persistent=self.persistent,
            )


TILES = 3
"""Of a step that are checked and timed on a GPU; without a GPU the first that is right serves."""

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


def _backward(way: Way, name: str, schedule: str, loads: Loads = "descriptor") -> Step:
    return Step(
        name=f"{way}: {name}", schedule=schedule, loads=loads, order=None, directions=WAYS[way]
    )


BACKWARD_STEPS = (
    *(_backward(way, "fa2", "fa2", "pointer") for way in WAYS),
    *(_backward(way, "descriptors", "fa2") for way in WAYS),
    *(_backward(way, "s_ahead", "s_ahead") for way in WAYS),
    *(_backward(way, "hopper", "hopper") for way in WAYS),
)
"""Of the backward: each way to compute dQ, dK and dV."""


class PinnedLauncher(Launcher):
    """Launches one plan, whatever the tensors."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def run(self, call: KernelCall[Result], launch: LaunchPlan[Result]) -> Result:
        """As Launcher.run."""
        return launch(self._plan, call)


class PinnedResolver(Resolver):
    """Finds fixed kernels, one per direction, for the passes of flashgen."""

    def __init__(self, bound: Mapping[Direction, Plan], gpu: Gpu) -> None:
        super().__init__("", Served(archs={}, choices={}))
        self._gpu = gpu
        self._stores_ds = bound.get("backward_ds")
        self._bound = {direction: PinnedLauncher(plan) for direction, plan in bound.items()}

    def launcher(self, direction: Direction, *_: Any) -> Launcher:
        """As Resolver.launcher."""
        return self._bound[direction]

    def way(
        self, call: Call, backward: Backward, tensors: Tensors, *, deterministic: bool
    ) -> ChosenWay:
        """As Resolver.way: that of its kernels. Raises LeftOut where dS has no room."""
        if (stores := self._stores_ds) is None:
            return ChosenWay("fused") if "backward_fused" in self._bound else PAIR
        slots = slots_of(stores.spec, stores.config, self._gpu)
        most = settings.workspace_bytes()
        plan = planned(ds_sizes(backward), most, stores.config.bc, slots)
        if plan is None:
            raise LeftOut(f"a tile of keys has no room for its dS in {most >> 20} MB")
        return ChosenWay("ds", plan)

    def left_to_torch(self, device: torch.device) -> bool:
        """As Resolver.left_to_torch: never."""
        return False


@dataclass(frozen=True, kw_only=True)
class LadderSteps:
    """Selects configs of steps for a GPU, from what a generated package serves on it and an
    evaluator.

    evaluator None: the table's config, or the first legal candidate; the check of the case is
    relied on. Kernels are written to `folder`.
    """

    gpu: Gpu
    served: Served
    evaluator: Evaluator | None
    folder: Path

    def contenders(self, case: BenchCase) -> Iterator[Contender]:
        """One contender per step of a forward or backward case, without steps that the case has
        no variant of.
        """
        steps = {"forward": STEPS, "backward": BACKWARD_STEPS}.get(case.direction, ())
        for step in steps:
            if all(self._legal(step, spec) for spec in step.specs(case.spec)):
                yield self._contender(step, case)

    def _contender(self, step: Step, case: BenchCase) -> Contender:
        def make(_: BenchInputs) -> Made:
            picked = {spec: self.pick(step, spec, case.problem) for spec in step.specs(case.spec)}
            bound = {spec: self._bind(spec, config) for spec, (config, _) in picked.items()}
            detail = "; ".join(
                f"{kernel_name(spec, config)}, {why}" for spec, (config, why) in picked.items()
            )
            return Made(attention=self._attention(case, bound), detail=detail)

        return Contender(name=f"ladder: {step.name}", group="ladder", make=make, own=True)

    def _attention(self, case: BenchCase, bound: dict[AttentionSpec, Plan]) -> AttentionFunction:
        """Attention by these kernels; in a backward, with the default's forward."""
        pinned = {spec.direction: kernel for spec, kernel in bound.items()}
        call = Call(causal=case.spec.causal, scale=case.scale, deterministic=False)
        if case.direction == "forward":
            passes = Passes(PinnedResolver(pinned, self.gpu))
            return lambda q, k, v: passes.forward(call, q, k, v)[0]
        for spec in (case.spec, case.spec.for_direction("backward_delta")):
            pinned[spec.direction] = self._bind(spec, default_config(spec))
        passes = Passes(PinnedResolver(pinned, self.gpu))
        both = passes.forward, passes.backward
        return lambda q, k, v: differentiable(both, call, q, k, v)[0]

    def _bind(self, spec: AttentionSpec, config: KernelConfig) -> Plan:
        return launch.bind(kernel_in(self.folder, spec, config), spec, config)

    def pick(self, step: Step, spec: AttentionSpec, problem: Problem) -> tuple[KernelConfig, str]:
        """The config of a step for one of its specs, checked, and how it was selected.

        Raises LeftOut if no interpreter can run it, FlashgenError if no candidate is correct.
        """
        legal = self._legal(step, spec)
        known = [config for config in self._known(spec, problem) if step.holds(config, spec)]
        if self.evaluator is None:
            config = (*known, *legal)[0]
            if not (config.interpretable or torch.cuda.is_available()):
                raise LeftOut(f"schedule {step.schedule} has no interpreter: it needs an sm_90 GPU")
            return config, "the table's choice" if known else "the first candidate"
        compiled = [o for o in self._ask("compile", spec, problem, [*known, *legal]) if o.ok]
        ranked = sorted(compiled, key=lambda outcome: _rank(outcome, known))
        most = TILES if self.evaluator.source == "measured" else 1
        right = list(itertools.islice(self._right(spec, problem, ranked), most))
        if not right:
            raise FlashgenError(
                f"no config of step {step.name} compiles well and is correct here, for {spec.name}"
            )
        configs = [outcome.config for outcome in right]
        timed = self._ask("rough", spec, problem, configs) if len(right) > 1 else []
        fastest = min(
            (o for o in timed if o.timing), key=lambda o: median_us(o.timing), default=None
        )
        if fastest is not None:
            return fastest.config, f"the fastest of {len(right)} tiles"
        return right[0].config, _why(right[0], known)

    def _right(
        self, spec: AttentionSpec, problem: Problem, ranked: Iterable[Outcome]
    ) -> Iterator[Outcome]:
        """Those that are correct, each checked when it is asked for."""
        for outcome in ranked:
            (checked,) = self._ask("check", spec, problem, [outcome.config])
            if checked.ok:
                yield outcome

    def _legal(self, step: Step, spec: AttentionSpec) -> list[KernelConfig]:
        return [c for c in step.candidates(spec) if why_illegal(spec, c, self.gpu) is None]

    def _known(self, spec: AttentionSpec, problem: Problem) -> Iterator[KernelConfig]:
        """The configs that the tables of this GPU, or of a relative, have for the spec."""
        served = self.served
        for slug in (self.gpu.slug, *relatives(served.archs, self.gpu.slug, self.gpu)):
            for choice in served.choices.get(slug, {}).get(spec, ()):
                if choice.bucket == bucket_of(problem.seq_k):
                    yield choice.config

    def _ask(
        self, stage: str, spec: AttentionSpec, problem: Problem, configs: Sequence[KernelConfig]
    ) -> list[Outcome]:
        assert self.evaluator is not None  # pick() has seen
        distinct = tuple(dict.fromkeys(configs))
        return list(self.evaluator.evaluate(stage, spec, problem, distinct))  # type: ignore[arg-type]


def _rank(outcome: Outcome, known: Sequence[KernelConfig]) -> tuple[bool, bool, float]:
    """The table's first, then by estimate, then those without an estimate, in order."""
    estimate = outcome.estimate
    return (
        outcome.config not in known,
        estimate is None,
        estimate.median_us if estimate else 0.0,
    )


def _why(outcome: Outcome, known: Sequence[KernelConfig]) -> str:
    if outcome.config in known:
        return "the table's choice"
    return "the best by estimate" if outcome.estimate else "the first that compiles well"
