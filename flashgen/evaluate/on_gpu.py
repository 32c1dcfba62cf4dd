"""GpuEvaluator: compiles ahead on all cores; checks and times on one GPU, one kernel at a time.

One child owns the device. A kernel that hangs or faults costs that child and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from flashgen.evaluate.build import Builder, BuildResult, cpu_count, estimate_or_none, kept
from flashgen.evaluate.evaluator import SLOW, Request
from flashgen.evaluate.gpu_state import Clock, DeviceLost
from flashgen.evaluate.measure import Conditions
from flashgen.evaluate.offline import check_failed, check_verdict, sound, unsteady
from flashgen.evaluate.tasks import (
    ANSWER_LIMIT_S,
    CHECK_LIMIT_S,
    DEVICE_ENV,
    FINAL_LIMIT_PER_CONFIG_S,
    MEASURE_LIMIT_S,
    Answers,
    Asked,
    Check,
    Final,
    Launches,
    Measure,
    Tasks,
    task,
)
from flashgen.evaluate.workers.answers import (
    Answer,
    Died,
    Done,
    Failure,
    Raised,
    TimedOut,
    finite,
)
from flashgen.evaluate.workers.pool import Workers
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig
from flashgen.spec.gpu import Gpu
from flashgen.spec.outcome import CheckResult, Outcome, Source, Stage, Status, Timing
from flashgen.spec.problem import Problem

SEED = 0
"""Seed of the timed inputs: the same for all candidates."""


class GpuEvaluator:
    """Evaluates on CUDA device `index`, which is `gpu`. It stores everything under `cache`.

    conditions are clocks and power of the latest final round, None before the first. clock_mhz is
    the GPU's clock in the run so far, if known: measurements at another clock are UNSTEADY. Raises
    ClockChanged if the clock stays changed, and DeviceLost if the GPU no longer answers: then the
    kernel that ran last is to blame, if any, and not those after it.
    """

    source: Source = "measured"

    def __init__(
        self,
        gpu: Gpu,
        index: int,
        cache: Path,
        jobs: int | None = None,
        *,
        tasks: Tasks | None = None,
        clock_mhz: float | None = None,
    ) -> None:
        self.gpu = gpu
        self.conditions: Conditions | None = None
        self._clock = Clock(clock_mhz)
        self._ended = ""  # how the child ended, if the last task ended it
        self._device = f"cuda:{index}"
        self._cache = cache
        self._tasks = tasks or Tasks()
        # One core is for the child that launches: a late launch would show in short kernels'
        # times.
        jobs = jobs or max(1, cpu_count() - 1)
        self._builder = Builder(gpu, cache, jobs, self._tasks, measures=True)
        self._owner = Workers(1, env=DEVICE_ENV)

    def evaluate(
        self,
        stage: Stage,
        spec: AttentionSpec,
        problem: Problem,
        configs: Sequence[KernelConfig],
    ) -> Iterator[Outcome]:
        """As Evaluator.evaluate."""
        request = Request(
            stage=stage, spec=spec, problem=problem, gpu=self.gpu.slug, source=self.source
        )
        builds = [self._builder.start(spec, config, problem) for config in configs]
        try:
            if stage == "final":
                yield from self._final(request, configs, [build.verdict() for build in builds])
                return
            for config, build in zip(configs, builds, strict=True):
                built = build.verdict()
                if stage == "check" and built.status in (Status.OK, *SLOW):
                    yield self._checked(request, config, built)
                elif stage in ("compile", "check") or built.status is not Status.OK:
                    yield self._outcome(request, config, built, built.status, built.detail)
                else:
                    yield self._timed(request, config, built)
        finally:
            self._builder.drop(builds)

    def _ask(self, function: str, asked: Asked, limit_s: float) -> Answer:
        if self._ended:
            self._make_sure()
        answer = self._owner.submit(task(function, asked, limit_s)).result()
        if isinstance(answer, Died | TimedOut) or (isinstance(answer, Raised) and answer.ended):
            self._ended = str(answer).splitlines()[0]
        return answer if function == self._tasks.check else finite(answer)

    def _make_sure(self) -> None:
        """Raise DeviceLost unless the GPU answers a new child."""
        asked = task(self._tasks.answers, Answers(device=self._device), ANSWER_LIMIT_S)
        answer = self._owner.submit(asked).result()
        if not isinstance(answer, Done):
            raise DeviceLost(
                f"{self._device} no longer answers, since a kernel ended its process "
                f"({self._ended}): nothing is lost; see what `nvidia-smi` and the kernel log say, "
                f"reset the GPU, and run the same command again"
            )
        self._ended = ""

    def _checked(self, request: Request, config: KernelConfig, built: BuildResult) -> Outcome:
        asked = Check(spec=request.spec, config=config, device=self._device, seed=SEED)
        answer = self._ask(self._tasks.check, asked, CHECK_LIMIT_S)
        if not isinstance(answer, Done):
            return self._blamed(request, config, built, answer)
        assert built.rendered is not None  # it compiled
        result = CheckResult(**answer.value)
        status, detail = check_verdict(result, built.rendered, self._cache)
        check = result if sound(result) else None
        return self._outcome(request, config, built, status, detail, check=check)

    def _timed(self, request: Request, config: KernelConfig, built: BuildResult) -> Outcome:
        """Time one kernel by itself."""
        asked = Measure(
            launches=self._launches(request),
            config=config,
            effort="rough" if request.stage == "rough" else "timed",
        )
        answer = self._ask(self._tasks.measure, asked, MEASURE_LIMIT_S)
        if not isinstance(answer, Done):
            return self._blamed(request, config, built, answer)
        timing = Timing(**answer.value)
        if why := self._clock.why_unsteady(timing.clock_mhz):
            return self._outcome(request, config, built, Status.UNSTEADY, why)
        return self._outcome(request, config, built, timing=timing)

    def _final(
        self, request: Request, configs: Sequence[KernelConfig], built: Sequence[BuildResult]
    ) -> Iterator[Outcome]:
        """Time all in one round; if it fails, a second one without those that also fail by
        themselves.
        """
        outcomes = {
            i: self._outcome(request, configs[i], verdict, verdict.status, verdict.detail)
            for i, verdict in enumerate(built)
        }
        ready = [i for i, verdict in enumerate(built) if verdict.status is Status.OK]
        answer = self._round(request, [configs[i] for i in ready])
        if not isinstance(answer, Done) and not unsteady(answer):
            outcomes |= {i: self._timed(request, configs[i], built[i]) for i in ready}
            ready = [i for i in ready if outcomes[i].ok]
            answer = self._round(request, [configs[i] for i in ready])
        if isinstance(answer, Done):
            racing = [(configs[i], built[i]) for i in ready]
            outcomes |= zip(ready, self._raced(request, racing, answer.value), strict=True)
        else:
            for i in ready:
                outcomes[i] = self._failed(request, configs[i], built[i], answer)
        for i in range(len(configs)):
            yield outcomes[i]

    def _raced(
        self,
        request: Request,
        racing: Sequence[tuple[KernelConfig, BuildResult]],
        value: dict[str, Any],
    ) -> Iterator[Outcome]:
        """The outcomes of a round; a round at another clock than the run's is UNSTEADY as a
        whole.
        """
        timings = [Timing(**each) for each in value["timings"]]
        why = self._clock.why_unsteady(timings[0].clock_mhz) if timings else ""
        sdpa = value["sdpa"]
        for (config, built), timing, passes in zip(racing, timings, value["passes"], strict=True):
            if why:
                yield self._outcome(request, config, built, Status.UNSTEADY, why)
                continue
            yield replace(
                self._outcome(request, config, built, timing=timing),
                passes_us=tuple(passes),
                sdpa_us=sdpa and Timing(**sdpa).median_us,
            )

    def _round(self, request: Request, configs: Sequence[KernelConfig]) -> Answer:
        if not configs:
            return Done({"timings": [], "passes": [], "sdpa": None})
        asked = Final(launches=self._launches(request), configs=tuple(configs))
        with_sdpa = len(configs) + 1
        limit_s = MEASURE_LIMIT_S + FINAL_LIMIT_PER_CONFIG_S * with_sdpa
        answer = self._ask(self._tasks.final, asked, limit_s)
        if isinstance(answer, Done):
            self.conditions = Conditions(**answer.value["conditions"])
        return answer

    def _launches(self, request: Request) -> Launches:
        return Launches(
            spec=request.spec,
            problem=request.problem,
            device=self._device,
            seed=SEED,
            l2_bytes=self.gpu.l2_bytes,
            peak_tflops=self.gpu.peak_tflops,
            cache=str(self._cache),
        )

    def _blamed(
        self, request: Request, config: KernelConfig, built: BuildResult, answer: Failure
    ) -> Outcome:
        """The outcome of a kernel that failed while no other ran."""
        assert built.rendered is not None
        status, detail = check_failed(answer, built.rendered, self._cache)
        return self._outcome(request, config, built, status, detail)

    def _failed(
        self, request: Request, config: KernelConfig, built: BuildResult, answer: Answer
    ) -> Outcome:
        """The outcome of one of several that failed together, though each runs by itself.

        Whichever was at fault, the others must not be quarantined: all are RUN_ERROR. If the times
        of a round jumped, none is at fault.
        """
        if unsteady(answer):
            return self._outcome(request, config, built, Status.UNSTEADY, str(answer))
        assert built.rendered is not None
        detail = f"it runs by itself, but its round failed: {answer}"
        detail = kept(detail, built.rendered, self._cache)
        return self._outcome(request, config, built, Status.RUN_ERROR, detail)

    def _outcome(
        self,
        request: Request,
        config: KernelConfig,
        built: BuildResult,
        status: Status = Status.OK,
        detail: str = "",
        *,
        timing: Timing | None = None,
        check: CheckResult | None = None,
    ) -> Outcome:
        """An outcome with all known facts of the kernel, including its estimate."""
        return request.outcome(
            config,
            status,
            detail,
            digest=built.digest,
            compiled=built.compiled,
            residents=built.residents(self.gpu),
            timing=timing,
            check=check,
            estimate=estimate_or_none(built, request, config, self.gpu),
        )

    def close(self) -> None:
        """As Evaluator.close."""
        self._owner.close()
        self._builder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
