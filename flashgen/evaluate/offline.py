"""OfflineEvaluator: compiles for a GPU that is not present, interprets on the CPU, and
estimates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from flashgen.errors import NoEstimate
from flashgen.evaluate import check
from flashgen.evaluate.arrivals import check_of
from flashgen.evaluate.build import (
    Builder,
    BuildResult,
    cpu_count,
    draft,
    estimated,
    kept,
    outcome_of,
)
from flashgen.evaluate.evaluator import BaseEvaluator, Ranks, Request, triton_version
from flashgen.evaluate.payloads import CHECK_LIMIT_S, Check, Tasks, task
from flashgen.evaluate.pools import Children, FutureCache, Pools
from flashgen.evaluate.workers.answers import (
    Answer,
    Died,
    Done,
    Failure,
    Raised,
    TimedOut,
    killed,
)
from flashgen.evaluate.workers.child import OUT_OF_MEMORY
from flashgen.files import content_of, write_whole
from flashgen.kernels.render import Rendered
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import CheckResult, Outcome, Source, Status
from flashgen.spec.gpu import Gpu
from flashgen.spec.records import parsed, value_of

CHECK_SEED = 0
"""One seed for all: results are shared between runs, buckets and GPUs by the kernel's digest."""


class OfflineEvaluator(BaseEvaluator):
    """Evaluates for `gpu` without a GPU. It stores everything under `cache`; `jobs` children per
    pool. Several threads may use it.

    pools: those of others, which stay open. tasks: for tests.
    """

    source: Source = "estimated"

    def __init__(
        self,
        gpu: Gpu,
        cache: Path,
        jobs: int | None = None,
        *,
        tasks: Tasks | None = None,
        pools: Pools | None = None,
    ) -> None:
        self.gpu = gpu
        self._cache = cache
        self._tasks = tasks or Tasks()
        self._closes = pools is None
        self._cpu = pools.cpu if pools else Children(jobs or cpu_count())
        self._builder = Builder(gpu, cache, self._cpu, self._tasks)
        self._interpreted = FutureCache()
        self._ranks = Ranks()

    def answers(
        self, request: Request, configs: Sequence[KernelConfig]
    ) -> Generator[Outcome, None, None]:
        """As BaseEvaluator.answers; rough, timed and final all are the estimate."""
        if request.stage == "check":
            yield from self._check(request, configs)
            return
        rank = self._ranks.of(request)
        builds = [self._builder.start(*request.search, config, rank) for config in configs]
        try:
            for config, build in zip(configs, builds, strict=True):
                yield self._estimated(request, config, self._builder.verdict(build))
        finally:
            self._builder.drop(builds)

    def _estimated(self, request: Request, config: KernelConfig, built: BuildResult) -> Outcome:
        """The outcome of the compile stage, or for other stages of the estimate."""
        status, detail, timing = built.status, built.detail, None
        if request.stage != "compile" and status is Status.OK:
            try:
                timing = estimated(built, request, config, self.gpu)
            except NoEstimate as error:
                status, detail = Status.NO_ESTIMATE, str(error)
        return outcome_of(
            built, request, config, self.gpu, status, detail, timing=timing, estimate=timing
        )

    def _check(self, request: Request, configs: Sequence[KernelConfig]) -> Iterator[Outcome]:
        """Interpret or execute all configs that are legal and have no result yet, in parallel."""
        drafts = [draft(request.spec, config, self.gpu) for config in configs]
        pending: dict[str, Callable[[], Future[Answer]]] = {}
        for config, drafted in zip(configs, drafts, strict=True):
            digest = drafted.digest
            if digest and digest not in pending and self._recall(config, digest) is None:
                pending[digest] = partial(self._submit, request, config)
                self._interpreted.start(digest, pending[digest])
        try:
            for config, drafted in zip(configs, drafts, strict=True):
                yield self._checked(request, config, drafted, pending)
        finally:
            for digest in pending:
                self._interpreted.drop(digest)

    def _submit(self, request: Request, config: KernelConfig) -> Future[Answer]:
        asked = Check(
            spec=request.spec, config=config, device="cpu", arch=self.gpu.arch, seed=CHECK_SEED
        )
        rank = self._ranks.of(request)
        return self._cpu.submit(task(self._tasks.check, asked, CHECK_LIMIT_S, rank))

    def _checked(
        self,
        request: Request,
        config: KernelConfig,
        drafted: BuildResult,
        pending: Mapping[str, Callable[[], Future[Answer]]],
    ) -> Outcome:
        rendered = drafted.rendered
        if rendered is None:
            return request.outcome(config, drafted.status, drafted.detail, digest="")
        result = self._recall(config, rendered.digest)
        if result is None:
            answer = self._interpreted.result(rendered.digest, pending[rendered.digest])
            if not isinstance(answer, Done):
                status, detail = check_failed(answer, rendered, self._cache)
                return request.outcome(config, status, detail, digest=rendered.digest)
            result = check_of(answer.value, CHECK_SEED)
            self._remember(config, rendered.digest, result)
        status, detail = check_verdict(result, rendered, self._cache)
        return request.outcome(
            config, status, detail, digest=rendered.digest, check=result if sound(result) else None
        )

    def _check_file(self, config: KernelConfig, digest: str) -> Path:
        """The architecture matters where the compiled program is executed."""
        arch = f"-{self.gpu.arch}" if config.executed else ""
        name = f"{digest.removeprefix('sha256:')}{arch}-check{check.PROTOCOL}.json"
        return self._cache / "checks" / name

    def _recall(self, config: KernelConfig, digest: str) -> CheckResult | None:
        """A result of this digest, seed and Triton, if there is one."""
        try:
            record = parsed(content_of(self._check_file(config, digest)))
            record = value_of(dict[str, Any], record, "the record")
            result = check_of(record.get("check"), CHECK_SEED)
        except (OSError, ValueError):
            return None
        return result if record.get("triton") == triton_version() else None

    def _remember(self, config: KernelConfig, digest: str, result: CheckResult) -> None:
        """Store a result. Only verdicts: a crash, a timeout or a NaN may be the machine's fault."""
        if not sound(result):
            return
        record = {"triton": triton_version(), "check": asdict(result)}
        write_whole(self._check_file(config, digest), json.dumps(record))

    def close(self) -> None:
        """As Evaluator.close."""
        if self._closes:
            self._cpu.close()


def check_verdict(result: CheckResult, rendered: Rendered, cache: Path) -> tuple[Status, str]:
    """OK, or WRONG with the worst case; a wrong kernel is written to a file."""
    if result.passed and sound(result):
        return Status.OK, ""
    detail = (
        f"{result.floors:.3g} floors, rms {result.rms:.3g}, LSE {result.lse_error:.3g}: "
        f"{result.detail}"
    )
    return Status.WRONG, kept(detail, rendered, cache)


def sound(result: CheckResult) -> bool:
    """Whether its figures are finite. A kernel that writes NaN is wrong without a figure, and an
    Outcome has none.
    """
    return all(map(math.isfinite, (result.floors, result.rms, result.lse_error)))


def check_failed(answer: Failure, rendered: Rendered, cache: Path) -> tuple[Status, str]:
    """Status and detail of a kernel that did not run to the end; the kernel is written to a file.

    CRASHED if its process ended, RUN_ERROR if only the launch failed, OUT_OF_RESOURCES if the GPU
    lacks shared memory, registers or memory. UNSTEADY and KILLED are not
    the fault of the kernel, which is not written.
    """
    if unsteady(answer):
        return Status.UNSTEADY, str(answer)
    if killed(answer):
        return Status.KILLED, str(answer)
    if isinstance(answer, Raised) and answer.kind == "InvalidPtx":
        return Status.UNCHECKABLE, f"not checkable without a GPU: {answer.message}"
    if isinstance(answer, Raised) and answer.kind == "OutOfResources":
        return Status.OUT_OF_RESOURCES, answer.message
    if isinstance(answer, Raised) and answer.kind == OUT_OF_MEMORY and "CUDA" in answer.message:
        # The GPU's: the sizes are to blame, or other programs, but not the kernel.
        return Status.OUT_OF_RESOURCES, answer.message.splitlines()[0]
    if isinstance(answer, TimedOut):
        status = Status.TIMEOUT
    elif isinstance(answer, Died) or answer.ended:
        status = Status.CRASHED
    else:
        status = Status.RUN_ERROR
    return status, kept(str(answer), rendered, cache)


def unsteady(answer: Answer) -> bool:
    """Whether a measurement was given up because the clock changed."""
    return isinstance(answer, Raised) and answer.kind == "Unsteady"
