"""Builder: legal -> rendered -> compiled -> judged, for many configs at once, in killable children.

Both evaluators use it before they check or time. A kernel is built once, whichever stage needs it.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flashgen.compile.bounds import cycles_a_score
from flashgen.compile.compiler import recall
from flashgen.compile.verdict import judge, residents, shortcomings
from flashgen.errors import InvalidArgument, NoEstimate
from flashgen.estimate.estimate import estimate, estimate_streaming
from flashgen.estimate.replay import recall_replay
from flashgen.estimate.trip_counts import tuned_splits
from flashgen.evaluate.arrivals import Built
from flashgen.evaluate.evaluator import Request, triton_version
from flashgen.evaluate.payloads import COMPILE_LIMIT_S, Compile, Tasks, task
from flashgen.evaluate.pools import FutureCache
from flashgen.evaluate.workers.answers import (
    Answer,
    Done,
    Failure,
    Pool,
    Raised,
    TimedOut,
    killed,
)
from flashgen.files import write_whole
from flashgen.kernels.render import Rendered, in_place, render
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.outcome import Outcome, Status, Timing
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import Problem, timed_problems

KEPT_KERNELS = "quarantine"
"""The folder of a cache that has the kernels of failures, which their messages name."""


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """How far one config came: rendered is None if illegal, built None if it does not compile.

    whole: of a decode, the variant for one split, if that is another than built.
    """

    status: Status
    detail: str = ""
    rendered: Rendered | None = None
    built: Built | None = None
    whole: Built | None = None

    @property
    def digest(self) -> str:
        """The kernel's digest, or "" if there is no kernel."""
        return self.rendered.digest if self.rendered else ""


def estimated(result: BuildResult, request: Request, config: KernelConfig, gpu: Gpu) -> Timing:
    """The estimate of a kernel that was built, for all timed_problems. Raises NoEstimate."""
    spec = request.spec
    if spec.direction == "backward_delta":
        return estimate_streaming(spec, request.problem, gpu)
    timings = []
    for problem in timed_problems(spec, request.problem):
        built = result.built
        if result.whole and launches_whole(spec, config, problem, gpu):
            built = result.whole
        if built is None or built.replay is None:
            raise NoEstimate(built.no_estimate if built else "the kernel was not compiled")
        timings.append(estimate(built.replay, spec, config, problem, gpu))
    return Timing.of_batches(timings)


def launches_whole(spec: AttentionSpec, config: KernelConfig, problem: Problem, gpu: Gpu) -> bool:
    """Whether a problem is a decode of one split, whose O is the result and no part in float32: for
    that Triton compiles another variant.
    """
    return spec.direction == "decode" and tuned_splits(spec, config, problem, gpu.sms) == 1


def outcome_of(
    result: BuildResult,
    request: Request,
    config: KernelConfig,
    gpu: Gpu,
    status: Status,
    detail: str,
    **found: Any,
) -> Outcome:
    """Request.outcome of a kernel that was built, with what the compiler says of it."""
    if result.built is not None:
        compiled = result.built.compiled
        found |= {
            "registers": compiled.registers,
            "shared_bytes": compiled.shared_bytes,
            "spill_bytes": compiled.spill_bytes,
            "tensor_columns": compiled.tensor_columns,
            "shortcomings": shortcomings(compiled, request.spec, config),
            "residents": residents(compiled, gpu),
            "cycles": cycles_a_score(compiled, request.spec, config, gpu) or (),
        }
    return request.outcome(config, status, detail, digest=result.digest, **found)


def cpu_count() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def draft(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> BuildResult:
    """The result before compiling: ILLEGAL, or OK with the rendered kernel."""
    reason = why_illegal(spec, config, gpu)
    if reason is not None:
        return BuildResult(status=Status.ILLEGAL, detail=reason)
    try:
        return BuildResult(status=Status.OK, rendered=render(spec, config))
    except InvalidArgument as error:
        return BuildResult(status=Status.ILLEGAL, detail=str(error))


BuildKey = tuple[str, bool]
"""The digest of a kernel, and whether it is compiled as a decode of one split."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Build:
    """One config in progress. variants: whether it serves a decode of one split, or both, that of
    several first; rank as Task has it.
    """

    spec: AttentionSpec
    config: KernelConfig
    drafted: BuildResult
    variants: tuple[bool, ...]
    rank: int

    @property
    def keys(self) -> tuple[BuildKey, ...]:
        """What is compiled once."""
        return tuple((self.drafted.digest, whole) for whole in self.variants)


class Builder:
    """Builds for one GPU. start() queues, verdict() waits; everything under the folder `cache`.

    Several threads may use it; a kernel that is being built for one is not built for another.
    measures: as judge has it. compilers: stays open.
    """

    def __init__(
        self, gpu: Gpu, cache: Path, compilers: Pool, tasks: Tasks, *, measures: bool = False
    ) -> None:
        self._measures = measures
        self._gpu = gpu
        self._cache = cache
        self._tasks = tasks
        self._compilers = compilers
        self._built: dict[BuildKey, Built] = {}
        self._answers = FutureCache()

    def start(
        self, spec: AttentionSpec, problem: Problem, config: KernelConfig, rank: int = 0
    ) -> Build:
        """Draft a config and, if it is legal and not compiled yet for this problem, queue it for
        the compiler; rank as Task has it.
        """
        drafted = draft(spec, config, self._gpu)
        variants: set[bool] = set()
        if drafted.rendered is not None:
            problems = timed_problems(spec, problem)
            variants = {launches_whole(spec, config, each, self._gpu) for each in problems}
        build = Build(
            spec=spec, config=config, drafted=drafted, variants=tuple(sorted(variants)), rank=rank
        )
        for key in build.keys:
            if not self._recalled(key):
                self._answers.start(key, partial(self._submit, build, key))
        return build

    def _recalled(self, key: BuildKey) -> bool:
        """Whether a kernel is built, now or in an earlier run."""
        if key in self._built:
            return True
        folder, (digest, whole) = self._cache / "compiled", key
        compiled = recall(
            digest, self._gpu.arch, triton_version(), folder, whole=whole, facts_only=True
        )
        if compiled is None:
            return False
        replayed = recall_replay(compiled, self._gpu, folder)
        if replayed is None:
            return False
        self._built[key] = Built(compiled=compiled, replay=replayed)
        return True

    def _submit(self, build: Build, key: BuildKey) -> Future[Answer]:
        asked = Compile(
            spec=build.spec,
            config=build.config,
            gpu=self._gpu,
            cache=str(self._cache / "compiled"),
            whole=key[1],
            digest=key[0],
        )
        return self._compilers.submit(task(self._tasks.compile, asked, COMPILE_LIMIT_S, build.rank))

    def verdict(self, build: Build) -> BuildResult:
        """Wait for the compiler and judge its result. Raises ToolchainError."""
        rendered = build.drafted.rendered
        if rendered is None:
            return build.drafted
        for key in build.keys:
            if key not in self._built:
                answer = self._answers.result(key, partial(self._submit, build, key))
                if not isinstance(answer, Done):
                    return _failed(answer, rendered, self._cache)
                self._built[key] = Built.from_json(answer.value)
        found = [self._built[key] for key in build.keys]
        verdicts = [
            judge(each.compiled, build.spec, build.config, self._gpu, measures=self._measures)
            for each in found
        ]
        status, detail = next((v for v in verdicts if v[0] is not Status.OK), verdicts[0])
        whole = found[-1] if len(found) > 1 else None
        return BuildResult(
            status=status, detail=detail, rendered=rendered, built=found[0], whole=whole
        )

    def drop(self, builds: list[Build]) -> None:
        """Remove these from the queue, if they are still queued."""
        for build in builds:
            for key in build.keys:
                self._answers.drop(key)


def _failed(answer: Failure, rendered: Rendered, cache: Path) -> BuildResult:
    """The result for a kernel that failed to compile or crashed the compiler; its text is kept."""
    if killed(answer):
        return BuildResult(status=Status.KILLED, detail=str(answer), rendered=rendered)
    if isinstance(answer, Raised) and not answer.ended:
        status = Status.COMPILE_ERROR
        text = answer.message if answer.kind == "CompileFailed" else str(answer)
    else:
        status = Status.TIMEOUT if isinstance(answer, TimedOut) else Status.COMPILE_CRASH
        text = f"compiler: {answer}"
    return BuildResult(status=status, detail=kept(text, rendered, cache), rendered=rendered)


def kept(detail: str, rendered: Rendered, cache: Path) -> str:
    """Write the kernel of a failure, its numbers in place, to a file that can be run; returns
    `detail` with its path.
    """
    path = cache / KEPT_KERNELS / f"{rendered.name}.py"
    write_whole(path, in_place(rendered))
    return f"{detail}; kernel kept in {path}"
