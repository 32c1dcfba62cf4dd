"""FakeEvaluator: outcomes from a landscape that a test makes up. For tests of the search and the tuner."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from flashgen.evaluate.evaluator import protocol_of
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import CheckResult, Outcome, Source, Stage, Status, Timing
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import Problem


class Killed(BaseException):
    """Stands for a kill: nothing in the search may catch it."""


Failing = Callable[[Stage, KernelConfig], Status | None]


@dataclass
class FakeEvaluator:
    """Serves `us`, or the status that `failing` gives; keeps what it was asked. spread: half the band,
    and how far the passes of a final round lie from `us` at most.

    guess: what the estimator says, with a band of `band` times it, or nothing.
    """

    us: Callable[[KernelConfig], float]
    gpu: Gpu
    failing: Failing = lambda stage, config: None
    source: Source = "measured"
    spread: float = 0.5
    guess: Callable[[KernelConfig], float | None] = lambda config: None
    band: tuple[float, float] = (0.8, 1.25)
    registers: Callable[[KernelConfig], int] = lambda config: 128
    spill_bytes: Callable[[KernelConfig], int] = lambda config: 0
    residents: Callable[[KernelConfig], int | None] = lambda config: None
    kill_after: int | None = None
    asked: list[tuple[Stage, KernelConfig]] = field(default_factory=list)
    batches: list[tuple[Stage, int]] = field(default_factory=list)

    def evaluate(
        self, stage: Stage, spec: AttentionSpec, problem: Problem, configs: Sequence[KernelConfig]
    ) -> Iterator[Outcome]:
        self.batches.append((stage, len(configs)))
        for config in configs:
            if self.kill_after is not None and len(self.asked) >= self.kill_after:
                raise Killed
            self.asked.append((stage, config))
            yield self.outcome(stage, spec, problem, config)

    def outcome(
        self, stage: Stage, spec: AttentionSpec, problem: Problem, config: KernelConfig
    ) -> Outcome:
        status = self.failing(stage, config) or Status.OK
        timing = check = None
        if stage == "check":
            passed = status is Status.OK
            check = CheckResult(
                passed=passed, floors=1.0, lse_error=0.1, cases=3, seed=0, where="gpu"
            )
        elif stage != "compile" and status is Status.OK:
            us = self.us(config)
            timing = Timing(
                median_us=us, low_us=max(us - self.spread, us * 1e-3), high_us=us + self.spread
            )
        passes_us: tuple[float, ...] = ()
        if stage == "final" and timing:
            draw = random.Random(config.label)
            bias = [draw.uniform(-1, 1) * self.spread for _ in range(10)]
            passes_us = tuple(max(timing.median_us + each, timing.low_us) for each in bias)
        compiled = stage == "compile" and status is Status.OK
        guess = self.guess(config) if stage == "check" or status is Status.OK else None
        low, high = self.band
        return Outcome(
            spec=spec,
            problem=problem,
            config=config,
            stage=stage,
            status=status,
            source="untimed" if status is Status.NO_ESTIMATE else self.source,
            gpu=self.gpu.slug,
            triton="3.7.1",
            digest=digest_of(spec, config),
            protocol=protocol_of(stage, self.source),
            timing=timing,
            estimate=guess and Timing(median_us=guess, low_us=low * guess, high_us=high * guess),
            check=check,
            passes_us=passes_us,
            registers=self.registers(config) if compiled else None,
            spill_bytes=self.spill_bytes(config) if compiled else None,
            shared_bytes=65536 if compiled else None,
            residents=self.residents(config) if compiled else None,
            detail="" if status is Status.OK else "made to fail",
        )

    def configs(self, stage: Stage) -> list[KernelConfig]:
        return [config for asked, config in self.asked if asked == stage]

    def close(self) -> None: ...

    def __enter__(self) -> FakeEvaluator:
        return self

    def __exit__(self, *_: object) -> None: ...


def digest_of(spec: AttentionSpec, config: KernelConfig) -> str:
    """A digest that names (spec, config), as a real one does; of no text."""
    return "sha256:" + hashlib.sha256(f"{spec.name}_{config.label}".encode()).hexdigest()
