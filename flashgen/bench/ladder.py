"""The ladder: flashgen's kernels with one more idea at each step, so that a run shows what each
brought.

A step fixes schedule, loads and order of the forward kernel, or of those of the backward; the tile
of each is the best known so restricted: the table's where the table chose such a config, else the
best by estimate, else the first that compiles well. Each is checked against float64 by the
evaluator, in a child process that may hang, before it is called here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from flashgen import launch
from flashgen.bench.case import Case, Inputs
from flashgen.bench.contenders import Contender, LeftOut, Made
from flashgen.bench.steps import BACKWARD_STEPS, STEPS, PinnedPasses, Step
from flashgen.config import KernelConfig, kernel_name
from flashgen.default_tiles import default_config
from flashgen.errors import FlashgenError
from flashgen.evaluate import Evaluator
from flashgen.features import PLAIN
from flashgen.gpu import Gpu
from flashgen.launch_backward import bind_backward, bind_delta
from flashgen.legality import why_illegal
from flashgen.outcome import Outcome
from flashgen.problem import Problem, bucket_of
from flashgen.render import render
from flashgen.runtime import autograd
from flashgen.runtime.call import Call
from flashgen.runtime.select import Served, relatives
from flashgen.spec import AttentionSpec
from flashgen.table import write_text


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
        """A contender a step of a forward or a backward case; those that the case has no variant of
        are not.
        """
        steps = {"forward": STEPS, "backward": BACKWARD_STEPS}.get(case.direction, ())
        for step in steps:
            if all(self._legal(step, spec) for spec in step.specs(case.spec)):
                yield self._contender(step, case)

    def _contender(self, step: Step, case: Case) -> Contender:
        def make(_: Inputs) -> Made:
            picked = {spec: self.pick(step, spec, case.problem) for spec in step.specs(case.spec)}
            bound = {spec: self._bind(spec, config) for spec, (config, _) in picked.items()}
            detail = "; ".join(
                f"{kernel_name(spec, config)}, {why}" for spec, (config, why) in picked.items()
            )
            make_attention = _forward if case.direction == "forward" else self._differentiable
            return Made(attention=make_attention(case, bound), detail=detail)

        return Contender(name=f"ladder: {step.name}", group="ladder", make=make, own=True)

    def _differentiable(self, case: Case, bound: dict[AttentionSpec, Any]) -> Attention:
        """Attention whose backward is by these kernels, and whose forward by the default's."""
        pinned = {spec.direction: kernel for spec, kernel in bound.items()}
        for spec in (case.spec, case.spec.for_direction("backward_delta")):
            pinned[spec.direction] = self._bind(spec, default_config(spec))
        passes, call = PinnedPasses(pinned), Call(causal=case.spec.causal, scale=case.scale)
        return lambda q, k, v: autograd.attention(passes, call, q, k, v, PLAIN)[0]

    def _bind(self, spec: AttentionSpec, config: KernelConfig) -> Any:
        rendered = render(spec, config)
        path = self.folder / f"{rendered.name}.py"
        write_text(path, rendered.source)
        binders = {"forward": launch.bind, "backward_delta": bind_delta}
        bind = binders.get(spec.direction, bind_backward)
        return bind(launch.load_kernel(path, rendered.name), spec, config)

    def pick(self, step: Step, spec: AttentionSpec, problem: Problem) -> tuple[KernelConfig, str]:
        """The config of a step for one of its specs, checked, and how it was come by.

        Raises LeftOut where no interpreter can run it, FlashgenError where no candidate is right.
        """
        legal = self._legal(step, spec)
        if self.evaluator is None:
            if not legal[0].interpretable:
                raise LeftOut(f"schedule {step.schedule} has no interpreter: it needs an sm_90 GPU")
            return legal[0], "the first candidate"
        known = [config for config in self._known(spec, problem) if step.holds(config, spec)]
        compiled = [o for o in self._ask("compile", spec, problem, [*known, *legal]) if o.ok]
        ranked = sorted(compiled, key=lambda outcome: _rank(outcome, known))
        for outcome in ranked:
            (checked,) = self._ask("check", spec, problem, [outcome.config])
            if checked.ok:
                return outcome.config, _why(outcome, known)
        raise FlashgenError(
            f"no config of step {step.name} compiles well and is right here, for {spec.name}"
        )

    def _legal(self, step: Step, spec: AttentionSpec) -> list[KernelConfig]:
        return [c for c in step.candidates(spec) if why_illegal(spec, c, self.gpu) is None]

    def _known(self, spec: AttentionSpec, problem: Problem) -> Iterator[KernelConfig]:
        """What the tables of this GPU, or of one like it, have chosen for the spec."""
        served = self.served
        for slug in (self.gpu.slug, *relatives(served.archs, self.gpu.slug, self.gpu)):
            for choice in served.choices.get(slug, ()):
                if choice.spec == spec and choice.bucket == bucket_of(problem.seq_k):
                    yield choice.config

    def _ask(
        self, stage: str, spec: AttentionSpec, problem: Problem, configs: Sequence[KernelConfig]
    ) -> list[Outcome]:
        assert self.evaluator is not None  # pick() has seen
        asked = tuple(dict.fromkeys(configs))
        return list(self.evaluator.evaluate(stage, spec, problem, asked))  # type: ignore[arg-type]


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def _forward(case: Case, bound: dict[AttentionSpec, Any]) -> Attention:
    """Attention by one forward kernel."""
    (kernel,) = bound.values()
    return lambda q, k, v: kernel(q, k, v, case.scale, case.diagonal)[0]


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
