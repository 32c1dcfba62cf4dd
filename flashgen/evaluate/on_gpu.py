"""GpuEvaluator: compiles ahead on all cores; checks and times on GPUs, one kernel at a time."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashgen.errors import NoEstimate
from flashgen.evaluate.arrivals import Round, check_of
from flashgen.evaluate.build import (
    Build,
    Builder,
    BuildResult,
    cpu_count,
    estimated,
    kept,
    outcome_of,
)
from flashgen.evaluate.evaluator import SLOW, BaseEvaluator, Ranks, Request
from flashgen.evaluate.gpu_state import Clock
from flashgen.evaluate.measure import Conditions
from flashgen.evaluate.offline import check_failed, check_verdict, sound, unsteady
from flashgen.evaluate.payloads import (
    CHECK_LIMIT_S,
    FINAL_LIMIT_PER_CONFIG_S,
    MEASURE_LIMIT_S,
    Asked,
    Check,
    Final,
    Launches,
    Measure,
    Tasks,
    task,
)
from flashgen.evaluate.pools import Children, Device, Pools
from flashgen.evaluate.workers.answers import Answer, Done, Failure, Pool, killed
from flashgen.evaluate.workers.crew import Crew
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Outcome, Source, Status, Timing
from flashgen.spec.gpu import Gpu
from flashgen.spec.records import record_of

SEED = 0
"""Seed of the timed inputs: the same for all candidates."""


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A kernel that is built, and what is requested of it."""

    request: Request
    config: KernelConfig
    built: BuildResult


class GpuEvaluator(BaseEvaluator):
    """Evaluates on CUDA device `index`, which is `gpu`, or on all GPUs of pools.device, which are
    of its product. It stores everything under `cache`. Several threads may use it.

    conditions are clocks and power of the latest final round, None before the first. clock_mhz is
    the GPU's clock in the run so far, if known: measurements at another clock are UNSTEADY. Raises
    ClockChanged if the clock stays changed, and DeviceLost if no GPU answers any more: then the
    kernel that ran last is to blame, if any, and not those after it. pools: those of others, which
    stay open.
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
        pools: Pools | None = None,
    ) -> None:
        self.gpu = gpu
        self.conditions: Conditions | None = None
        self._device = f"cuda:{index}"
        self._cache = cache
        self._tasks = tasks or Tasks()
        self._own: tuple[Pool, ...] = ()
        if pools is None:
            # One core is for the child that launches: a late launch would show in short kernels'
            # times.
            cores = Children(jobs or max(1, cpu_count() - 1))
            gpus = Crew([Device(index, self._tasks.answers)])
            self._own, pools = (cores, gpus), Pools(cpu=cores, device=gpus)
        assert pools.device is not None
        self._gpus = pools.device
        self._builder = Builder(gpu, cache, pools.cpu, self._tasks, measures=True)
        self._clock = Clock(clock_mhz)
        self._ranks = Ranks()

    def answers(
        self, request: Request, configs: Sequence[KernelConfig]
    ) -> Generator[Outcome, None, None]:
        """As BaseEvaluator.answers."""
        rank = self._ranks.of(request)
        builds = [self._builder.start(*request.search, config, rank) for config in configs]
        try:
            if request.stage == "final":
                verdicts = [self._builder.verdict(build) for build in builds]
                yield from self._final(request, configs, verdicts)
            else:
                yield from self._each(request, configs, builds)
        finally:
            self._builder.drop(builds)

    def _each(
        self, request: Request, configs: Sequence[KernelConfig], builds: Sequence[Build]
    ) -> Iterator[Outcome]:
        """The outcomes of configs that are evaluated by themselves, each on one GPU: as many at
        once as there are GPUs.
        """
        sent: deque[tuple[_Candidate, Future[Answer] | None]] = deque()
        try:
            for config, build in zip(configs, builds, strict=True):
                if len(sent) >= self._gpus.size:
                    yield self._received(*sent.popleft())
                verdict = self._builder.verdict(build)
                one = _Candidate(request=request, config=config, built=verdict)
                sent.append((one, self._send(one)))
            while sent:
                yield self._received(*sent.popleft())
        finally:
            for _, answer in sent:
                if answer is not None:
                    answer.cancel()

    def _send(self, one: _Candidate) -> Future[Answer] | None:
        """Have a kernel checked or timed, if it is fit for that."""
        request, status = one.request, one.built.status
        if request.stage == "check" and status in (Status.OK, *SLOW):
            check = Check(spec=request.spec, config=one.config, device=self._device, seed=SEED)
            return self._submit(request, self._tasks.check, check, CHECK_LIMIT_S)
        if request.stage in ("rough", "timed") and status is Status.OK:
            return self._submit_alone(request, one.config)
        return None

    def _received(self, one: _Candidate, answer: Future[Answer] | None) -> Outcome:
        """The outcome of a kernel, once it is known; no answer: it was not sent."""
        if answer is None:
            return self._outcome(one, one.built.status, one.built.detail)
        if one.request.stage == "check":
            return self._checked(one, answer.result())
        return self._timed(one, answer.result())

    def _submit(
        self, request: Request, function: str, asked: Asked, limit_s: float
    ) -> Future[Answer]:
        return self._gpus.submit(task(function, asked, limit_s, self._ranks.of(request)))

    def _submit_alone(self, request: Request, config: KernelConfig) -> Future[Answer]:
        asked = Measure(
            launches=self._launches(request),
            config=config,
            effort="rough" if request.stage == "rough" else "timed",
        )
        return self._submit(request, self._tasks.measure, asked, MEASURE_LIMIT_S)

    def _checked(self, one: _Candidate, answer: Answer) -> Outcome:
        if not isinstance(answer, Done):
            return self._blamed(one, answer)
        assert one.built.rendered is not None  # it compiled
        result = check_of(answer.value, SEED)
        status, detail = check_verdict(result, one.built.rendered, self._cache)
        return self._outcome(one, status, detail, check=result if sound(result) else None)

    def _timed(self, one: _Candidate, answer: Answer) -> Outcome:
        """The outcome of a kernel that was timed by itself."""
        if not isinstance(answer, Done):
            return self._blamed(one, answer)
        timing = record_of(Timing, answer.value)
        if why := self._clock.why_unsteady(timing.clock_mhz, one.request.search):
            return self._outcome(one, Status.UNSTEADY, why)
        return self._outcome(one, timing=timing)

    def _final(
        self, request: Request, configs: Sequence[KernelConfig], built: Sequence[BuildResult]
    ) -> Iterator[Outcome]:
        """Time all in one round; if it fails, a second one without those that also fail by
        themselves.
        """
        every = [
            _Candidate(request=request, config=config, built=verdict)
            for config, verdict in zip(configs, built, strict=True)
        ]
        outcomes = {
            i: self._outcome(one, one.built.status, one.built.detail) for i, one in enumerate(every)
        }
        ready = [i for i, verdict in enumerate(built) if verdict.status is Status.OK]
        answer = self._round(request, [configs[i] for i in ready])
        if not isinstance(answer, Done) and not unsteady(answer):
            for i in ready:
                alone = self._submit_alone(request, configs[i]).result()
                outcomes[i] = self._timed(every[i], alone)
            ready = [i for i in ready if outcomes[i].ok]
            answer = self._round(request, [configs[i] for i in ready])
        if isinstance(answer, Done):
            raced = self._raced(request, [every[i] for i in ready], answer.value)
            outcomes |= zip(ready, raced, strict=True)
        else:
            for i in ready:
                outcomes[i] = self._failed(every[i], answer)
        for i in range(len(configs)):
            yield outcomes[i]

    def _raced(
        self, request: Request, racing: Sequence[_Candidate], value: dict[str, Any]
    ) -> Iterator[Outcome]:
        """The outcomes of a round; a round at another clock than the run's is UNSTEADY as a
        whole.
        """
        found = record_of(Round, value)
        if not racing:
            return
        self.conditions = found.conditions
        why = self._clock.why_unsteady(found.timings[0].clock_mhz, request.search)
        for one, timing, passes in zip(racing, found.timings, found.passes, strict=True):
            if why:
                yield self._outcome(one, Status.UNSTEADY, why)
                continue
            yield replace(
                self._outcome(one, timing=timing),
                passes_us=passes,
                sdpa_us=found.sdpa.median_us if found.sdpa else None,
            )

    def _round(self, request: Request, configs: Sequence[KernelConfig]) -> Answer:
        if not configs:
            return Done({"timings": [], "passes": [], "sdpa": None, "conditions": {}})
        asked = Final(launches=self._launches(request), configs=tuple(configs))
        with_sdpa = len(configs) + 1
        limit_s = MEASURE_LIMIT_S + FINAL_LIMIT_PER_CONFIG_S * with_sdpa
        return self._submit(request, self._tasks.final, asked, limit_s).result()

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

    def _blamed(self, one: _Candidate, answer: Failure) -> Outcome:
        """The outcome of a kernel that failed while no other ran."""
        assert one.built.rendered is not None
        return self._outcome(one, *check_failed(answer, one.built.rendered, self._cache))

    def _failed(self, one: _Candidate, answer: Answer) -> Outcome:
        """The outcome of one of several that failed together, though each runs by itself.

        Whichever was at fault, the others must not be quarantined: all are RUN_ERROR. If the times
        of a round jumped, or it was killed from outside, none is at fault.
        """
        if unsteady(answer):
            return self._outcome(one, Status.UNSTEADY, str(answer))
        if killed(answer):
            return self._outcome(one, Status.KILLED, str(answer))
        assert one.built.rendered is not None
        detail = f"it runs by itself, but its round failed: {answer}"
        detail = kept(detail, one.built.rendered, self._cache)
        return self._outcome(one, Status.RUN_ERROR, detail)

    def _outcome(
        self, one: _Candidate, status: Status = Status.OK, detail: str = "", **found: Any
    ) -> Outcome:
        """An outcome with all known facts of the kernel, including its estimate."""
        estimate = None
        with contextlib.suppress(NoEstimate):
            estimate = estimated(one.built, one.request, one.config, self.gpu)
        return outcome_of(
            one.built, one.request, one.config, self.gpu, status, detail, estimate=estimate, **found
        )

    def close(self) -> None:
        """As Evaluator.close."""
        for pool in self._own:
            pool.close()
