"""The result of evaluating a config: Status, Timing, CheckResult, Outcome. Pure data, and its
JSON form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import geometric_mean
from typing import Literal

from flashgen.errors import InvalidArgument
from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem
from flashgen.spec.records import Record
from flashgen.spec.vocabulary import Source as Source


class Status(StrEnum):
    """How an evaluation ended. Everything but OK says why the config cannot be chosen."""

    OK = "ok"
    ILLEGAL = "illegal"  # why_illegal said so
    COMPILE_ERROR = "compile_error"  # the compiler refused, with a message
    COMPILE_CRASH = "compile_crash"  # the compiler aborted, and its process with it
    TIMEOUT = "timeout"  # a stage ran past its limit and its process was killed
    OUT_OF_RESOURCES = "out_of_resources"  # compiled, but does not fit the GPU
    SPILLS = "spills"  # registers spill in a main loop, and no GPU measures what it costs
    SERIALIZED = "serialized"  # ptxas made the matrix instructions wait for one another
    NO_OVERLAP = "no_overlap"  # of older logs: exp2 that do not overlap the matrix instructions
    WRONG = "wrong"  # further from float64 than allowed
    RUN_ERROR = "run_error"  # the launch failed, and the process lived on
    CRASHED = "crashed"  # the process died running it, or its device became unusable
    KILLED = "killed"  # its process was killed from outside, twice: nothing is known of the kernel
    QUARANTINED = "quarantined"  # it killed a process before, and is not tried again
    UNSTEADY = "unsteady"  # the clock dropped while it was timed; timed again
    DROPPED = "dropped"  # clearly slower than the best after a few samples
    UNCHECKABLE = "uncheckable"  # flashgen.ptx does not know an instruction, and no GPU is here
    NO_ESTIMATE = "no_estimate"  # legal and correct, but the estimator has no reliable figure


KILLERS = (Status.COMPILE_CRASH, Status.TIMEOUT, Status.CRASHED)
"""Outcomes that cost a child process. They are kept in the quarantine."""

PASSING = (*KILLERS, Status.KILLED, Status.QUARANTINED, Status.UNSTEADY)
"""Outcomes that the log does not recall: whoever asks again is answered by the quarantine, or the
config is evaluated again."""

FAILURES = (
    *KILLERS,
    Status.COMPILE_ERROR,
    Status.WRONG,
    Status.RUN_ERROR,
    Status.KILLED,
    Status.QUARANTINED,
)
"""Outcomes that a tuning run prints at its end: something is broken, the kernel or the machine."""

Stage = Literal["compile", "check", "rough", "timed", "final"]

STRENGTH: dict[str, int] = {"untimed": 0, "estimated": 1, "replayed": 1, "measured": 2}
"""A weaker source never replaces a stronger one in a table."""


LONGEST_US = 1e15
"""Microseconds: no kernel takes 31 years. Tables read times below it."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Microseconds of one launch. Measured: median and 20th and 80th percentile of the samples.

    Estimated: low and high are the band of the estimate, and samples is 0. clock_mhz is the clock
    of the SMs right after the samples; None if unknown. batches_us: of a decode the median of each
    problem.timed_problems, of which all else is the geometric mean. Raises InvalidArgument.
    """

    median_us: float
    low_us: float
    high_us: float
    samples: int = 0
    clock_mhz: float | None = None
    batches_us: tuple[float, ...] = ()

    @classmethod
    def of_batches(cls, timings: Sequence[Timing]) -> Timing:
        """The time of several problems together, in their order; of one its own."""
        if len(timings) == 1:
            return timings[0]
        return cls(
            median_us=geometric_mean(each.median_us for each in timings),
            low_us=geometric_mean(each.low_us for each in timings),
            high_us=geometric_mean(each.high_us for each in timings),
            samples=sum(each.samples for each in timings),
            clock_mhz=timings[-1].clock_mhz,
            batches_us=tuple(each.median_us for each in timings),
        )

    def __post_init__(self) -> None:
        for field in ("median_us", "low_us", "high_us", "clock_mhz"):
            value = getattr(self, field)
            if value is not None and not 0 < value < LONGEST_US:
                raise InvalidArgument(f"{field} must be > 0 and < {LONGEST_US:g}: got {value}")
        if any(not 0 < value < LONGEST_US for value in self.batches_us):
            raise InvalidArgument(
                f"batches_us must be > 0 and < {LONGEST_US:g}: got {self.batches_us}"
            )

    def tflops(self, operations: float) -> float:
        """TFLOP/s of a launch that does so many floating-point operations."""
        return operations / self.median_us * 1e-6


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """A comparison with float64 over all cases of one kernel; the figures are of the worst case,
    which detail names, seed included.

    floors is the largest error in units of the floor (accepted up to 2), rms that of all errors in
    units of an ideally rounded kernel's (up to 1.15), lse_error the largest of LSE in units of its
    tolerance (up to 1).
    """

    passed: bool
    floors: float
    lse_error: float
    cases: int
    seed: int
    where: Literal["gpu", "interpreter", "executed"]
    detail: str = ""
    rms: float = 0.0

    def __post_init__(self) -> None:
        if min(self.floors, self.lse_error, self.rms, self.cases) < 0:
            raise InvalidArgument("the errors of a check, and its cases, must be >= 0")


@dataclass(frozen=True, kw_only=True)
class Outcome(Record):
    """One record of the log: the result of one stage for one config.

    Args:
        spec: what was computed.
        problem: its sizes.
        config: how.
        stage: compile, check, rough, timed or final.
        status: what became of it.
        source: measured, estimated or untimed.
        gpu: the slug.
        triton: its version.
        digest: of the kernel's text; "" if none was rendered.
        protocol: the version of what the stage does.
        timing: the result of the stage, if it timed.
        estimate: of the same config at the same problem, if there is one.
        check: the errors, if the stage checked.
        registers: of a thread.
        spill_bytes: of a thread.
        shared_bytes: of a block.
        tensor_columns: of tensor memory (sm_100).
        residents: blocks on an SM.
        cycles: of an SM for a score at least, by the pipe that bounds it, and by issue slots.
        shortcomings: how many the compiler left in the main loop.
        sdpa_us: torch's SDPA in the same round, in microseconds.
        passes_us: each pass of a final round.
        detail: a sentence on a failure.
        created: ISO 8601, UTC.

    Raises:
        InvalidArgument: naming the field.

    Examples:
        >>> from flashgen.search.log import outcomes_of
        >>> [o.status for o in outcomes_of(log)]  # doctest: +SKIP
    """

    spec: AttentionSpec
    problem: Problem
    config: KernelConfig
    stage: Stage
    status: Status
    source: Source
    gpu: str  # slug
    triton: str
    digest: str
    protocol: int
    timing: Timing | None = None
    estimate: Timing | None = None
    check: CheckResult | None = None
    registers: int | None = None  # of a thread
    spill_bytes: int | None = None  # of a thread, wherever the kernel stores them
    shared_bytes: int | None = None
    tensor_columns: int | None = None  # of tensor memory, a block
    residents: int | None = None  # blocks on an SM at a time
    cycles: tuple[float, ...] = ()  # bounds.cycles_a_score
    shortcomings: int | None = None  # verdict.shortcomings
    sdpa_us: float | None = None  # torch's SDPA in the same final round, median microseconds
    passes_us: tuple[float, ...] = ()  # of a final round: the median of each pass, in their order
    detail: str = ""
    created: str = ""  # ISO 8601, UTC

    @property
    def ok(self) -> bool:
        """Whether the config may be chosen as far as this stage can tell."""
        return self.status is Status.OK

    @property
    def undecided(self) -> bool:
        """Whether it says nothing of the kernel: that ran out of time, now or when it was
        quarantined, or was killed from outside, or the clock changed.
        """
        held = self.status is Status.QUARANTINED and self.detail.startswith(Status.TIMEOUT)
        return held or self.status in (Status.TIMEOUT, Status.KILLED, Status.UNSTEADY)
