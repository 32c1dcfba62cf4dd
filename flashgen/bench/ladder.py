"""The ladder: the forward kernel with one more idea at each step, so that a run shows what each
brought.

A step fixes schedule, loads and order; its tile is the best known so restricted: the table's where
the table chose such a config, else the best by estimate, else the first that compiles well. Each is
checked against float64 by the evaluator, in a child process that may hang, before it is called
here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from flashgen import launch
from flashgen.bench.case import Case, Inputs
from flashgen.bench.contenders import Contender, LeftOut, Made
from flashgen.config import KernelConfig, Loads, Order, Schedule, kernel_name
from flashgen.errors import FlashgenError
from flashgen.evaluate import Evaluator
from flashgen.gpu import Gpu
from flashgen.legality import why_illegal
from flashgen.outcome import Outcome
from flashgen.problem import bucket_of
from flashgen.render import render
from flashgen.runtime.select import Served, relatives
from flashgen.space import AUTO_TILES, HOPPER_TILES, KNOWN_GOOD
from flashgen.table import write_text


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step, by the fields of a config that it fixes. order None: longest first where causal."""

    name: str
    schedule: Schedule
    loads: Loads
    order: Order | None = "plain"
    persistent: bool = False

    def order_of(self, case: Case) -> Order:
        """The order of a case's step."""
        if self.order is None:
            return "longest_first" if case.spec.causal else "plain"
        return self.order

    def holds(self, config: KernelConfig, case: Case) -> bool:
        """Whether a config is one of this step."""
        mine = self.schedule, self.loads, self.order_of(case), self.persistent
        return (config.schedule, config.loads, config.order, config.persistent) == mine

    def candidates(self, case: Case) -> Iterator[KernelConfig]:
        """The tiles that others found good, restricted to this step."""
        tiles: Sequence[tuple[int, int, int, int]] = KNOWN_GOOD
        if self.schedule in ("hopper", "auto"):
            rolled = HOPPER_TILES if self.schedule == "hopper" else AUTO_TILES
            tiles = [(br, bc, 4, stages) for br, bc, stages in rolled]
        for br, bc, warps, stages in tiles:
            yield KernelConfig(
                br=br,
                bc=bc,
                num_warps=warps,
                num_stages=stages,
                schedule=self.schedule,
                loads=self.loads,
                order=self.order_of(case),
                persistent=self.persistent,
            )


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


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Where steps are picked: for a GPU, by what a generated package serves it and an evaluator.

    evaluator None: a smoke run, which takes the first legal candidate and proves it by the judging
    of the case alone. Kernels are written to `folder`.
    """

    gpu: Gpu
    served: Served
    evaluator: Evaluator | None
    folder: Path

    def contenders(self, case: Case) -> Iterator[Contender]:
        """A contender a step of a forward case; those that the case has no variant of are not."""
        if case.direction != "forward":
            return
        for step in STEPS:
            if any(why_illegal(case.spec, c, self.gpu) is None for c in step.candidates(case)):
                yield self._contender(step, case)

    def _contender(self, step: Step, case: Case) -> Contender:
        def make(_: Inputs) -> Made:
            config, why = self.pick(step, case)
            name = kernel_name(case.spec, config)
            rendered = render(case.spec, config)
            path = self.folder / f"{name}.py"
            write_text(path, rendered.source)
            bound = launch.bind(launch.load_kernel(path, name), case.spec, config)

            def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return bound(q, k, v, case.scale, case.diagonal)[0]

            return Made(attention=attention, detail=f"{name}, {why}")

        return Contender(name=f"ladder: {step.name}", group="ladder", make=make, own=True)

    def pick(self, step: Step, case: Case) -> tuple[KernelConfig, str]:
        """The config of a step, checked, and how it was come by.

        Raises LeftOut where no interpreter can run it, FlashgenError where no candidate is right.
        """
        legal = [c for c in step.candidates(case) if why_illegal(case.spec, c, self.gpu) is None]
        if self.evaluator is None:
            if not legal[0].interpretable:
                raise LeftOut(f"schedule {step.schedule} has no interpreter: it needs an sm_90 GPU")
            return legal[0], "the first candidate"
        known = [config for config in self._known(case) if step.holds(config, case)]
        compiled = [o for o in self._ask("compile", case, [*known, *legal]) if o.ok]
        ranked = sorted(compiled, key=lambda outcome: _rank(outcome, known))
        for outcome in ranked:
            (checked,) = self._ask("check", case, [outcome.config])
            if checked.ok:
                return outcome.config, _why(outcome, known)
        raise FlashgenError(f"no config of step {step.name} compiles well and is right here")

    def _known(self, case: Case) -> Iterator[KernelConfig]:
        """What the tables of this GPU, or of one like it, have chosen for the case."""
        served = self.served
        for slug in (self.gpu.slug, *relatives(served.archs, self.gpu.slug, self.gpu)):
            for choice in served.choices.get(slug, ()):
                if choice.spec == case.spec and choice.bucket == bucket_of(case.problem.seq_k):
                    yield choice.config

    def _ask(self, stage: str, case: Case, configs: Sequence[KernelConfig]) -> list[Outcome]:
        assert self.evaluator is not None  # pick() has seen
        asked = tuple(dict.fromkeys(configs))
        return list(
            self.evaluator.evaluate(stage, case.spec, case.problem, asked)  # type: ignore[arg-type]
        )


def _rank(outcome: Outcome, known: Sequence[KernelConfig]) -> tuple[bool, bool, float]:
    """The table's first, then by estimate, then those that have none, in their order."""
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
