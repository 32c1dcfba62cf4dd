"""Entry: the config chosen for one spec and bucket, its Result, its EntryEvidence, its Run.

A Result is what people review, in a row of configs/<slug>.yaml; the evidence stands beside it.
Values are checked on construction; table/table_file.py and table/evidence.py read and write them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields

from flashgen.errors import InvalidArgument
from flashgen.schedules.config import SCHEDULES, KernelConfig
from flashgen.schedules.outcome import LONGEST_US, Source
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import (
    BUCKET_SEQ,
    BUCKETS,
    Bucket,
    Problem,
    bytes_moved,
    flops,
    mean_work,
    workload,
)

DIGEST_DIGITS = 12
"""Hex digits of a sha256 that evidence keeps."""


def _check_timed(source: Source, median_us: float | None) -> None:
    if (source == "untimed") != (median_us is None):
        raise InvalidArgument("the time must be left out where source is untimed, and only there")


def _check_positive(field: str, value: float | None) -> None:
    if value is not None and not 0 < value < LONGEST_US:
        raise InvalidArgument(f"{field} must be > 0 and < {LONGEST_US:g}, or null: got {value}")


def version_number(triton: str) -> tuple[int, ...]:
    """A version of Triton, as its numbers, by which versions have an order."""
    return tuple(map(int, triton.split(".")))


def must_have_run(config: KernelConfig) -> bool:
    """Whether an entry needs to be measured, or executed: Triton versions make different programs
    of its schedule.
    """
    return SCHEDULES[config.schedule].roles


def _check_ran(config: KernelConfig, source: Source, tritons: tuple[str, ...] = ()) -> None:
    if must_have_run(config) and source != "measured" and not tritons:
        raise InvalidArgument(
            f"schedule {config.schedule} needs source measured, or a block `executed`: got {source}"
        )
    if tritons and source not in ("estimated", "untimed"):
        raise InvalidArgument(f"an executed entry must be estimated or untimed: got {source}")
    for version in tritons:
        if not re.fullmatch(r"[0-9]{1,3}\.[0-9]{1,3}", version):
            raise InvalidArgument(f"a version of Triton must be like 3.7: got {version!r}")


def _check_digest(digest: str) -> None:
    if not re.fullmatch(rf"sha256:[0-9a-f]{{{DIGEST_DIGITS}}}", digest):
        raise InvalidArgument(
            f"digest must be sha256: and {DIGEST_DIGITS} hex digits: got {digest!r}"
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """One tuning run of entries; fields that an offline run lacks (driver, clocks) are None.

    id: begins with its date in UTC, as in 20260102T030405Z-estimated. donor: the GPU whose table
    lent the configs (tune/donors.py); None where they were searched. Texts are printable and on one
    line. Raises InvalidArgument.
    """

    id: str
    source: Source
    flashgen: str
    triton: str
    torch: str
    cuda: str | None = None
    driver: str | None = None
    clocks: str | None = None
    power: str | None = None
    protocol: int
    donor: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str) and not (value and value.isprintable()):
                raise InvalidArgument(
                    f"{field.name} must be printable text on one line: got {value!r}"
                )
        if not re.fullmatch(r"[0-9]{8}T[0-9]{6}Z-[\w.-]+ \w+", f"{self.id} {self.donor}", re.ASCII):
            raise InvalidArgument(
                f"a run must be named after its date, like 20260102T030405Z-a, and its donor must "
                f"be the slug of a GPU: got {self.id!r}, {self.donor!r}"
            )

    @property
    def date(self) -> str:
        """The date at which it began, ISO 8601, UTC."""
        return re.sub(r"(....)(..)(..T..)(..)(..Z).*", r"\1-\2-\3:\4:\5", self.id)

    @property
    def shard(self) -> tuple[int, int]:
        """(i, n) of the i-th of n parts that were tuned apart; (1, 1) of a whole run."""
        found = re.search(r"-([0-9]+)of([0-9]+)(?:-|$)", self.id)
        return (int(found[1]), int(found[2])) if found else (1, 1)

    @property
    def derived(self) -> bool:
        """Whether nobody searched."""
        return self.donor is not None


def run_name(stamp: str, source: Source, donor: str | None) -> str:
    """What a run is called, if nobody says otherwise."""
    return "-".join(filter(None, (stamp, source, donor)))


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of the final round, as a table has it; None means not timed.

    Of a decode median_us is the geometric mean of problem.timed_problems. speedup says how many
    times as fast as the default the config is: the spec's default tile on this GPU with its head
    dims fixed, timed in the same round. Raises InvalidArgument.
    """

    source: Source
    median_us: float | None = None
    speedup: float | None = None
    max_abs_err_floors: float

    def __post_init__(self) -> None:
        _check_timed(self.source, self.median_us)
        for field in ("median_us", "speedup"):
            _check_positive(field, getattr(self, field))
        if not 0 <= self.max_abs_err_floors < math.inf:
            raise InvalidArgument(
                f"max_abs_err_floors must be finite and >= 0: got {self.max_abs_err_floors}"
            )


@dataclass(frozen=True, kw_only=True)
class RunnerUp:
    """A runner-up: the first config to try should the winner fail. batches_us as of an
    EntryEvidence. Raises InvalidArgument.
    """

    config: KernelConfig
    source: Source
    median_us: float | None = None
    batches_us: tuple[float, ...] = ()
    digest: str

    def __post_init__(self) -> None:
        _check_timed(self.source, self.median_us)
        for us in (self.median_us, *self.batches_us):
            _check_positive("median_us", us)
        _check_digest(self.digest)
        _check_ran(self.config, self.source)


@dataclass(frozen=True, kw_only=True)
class EntryEvidence:
    """What the search of an entry left behind: for reports, and for the next search.

    run names the Run that the entry comes from; digest is the short one of the text that was timed
    and checked; problem has the sizes that were timed. registers (a thread) and shared_bytes are
    the compiler's figures under the run's Triton. candidates is the number of evaluated configs,
    legal that of all legal ones. default_us and sdpa_us are the times of the default and of torch's
    SDPA in the same round. low_us and high_us are the 20th and 80th percentile of a measured
    entry's samples, or the interval of an estimate. batches_us are the times of a decode for each
    of problem.timed_problems; empty for one alone. p_value is that of the rank test against the
    strongest rival (search/decide.py); None where there was none. regret is the share of its time
    by which the config is slower than the best one of this bucket, which was given up to have
    fewer kernels (tune/share_kernels.py); 0.0 where it is the best. runners_up are two at most.
    Raises InvalidArgument.
    """

    run: str | None = None
    digest: str | None = None
    problem: Problem | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    candidates: int | None = None
    legal: int | None = None
    default_us: float | None = None
    sdpa_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    batches_us: tuple[float, ...] = ()
    p_value: float | None = None
    regret: float = 0.0
    runners_up: tuple[RunnerUp, ...] = ()

    def __post_init__(self) -> None:
        if self.digest is not None:
            _check_digest(self.digest)
        for field in ("default_us", "sdpa_us", "low_us", "high_us"):
            _check_positive(field, getattr(self, field))
        for us in self.batches_us:
            _check_positive("batches_us", us)
        if self.p_value is not None and not 0 < self.p_value <= 1:
            raise InvalidArgument(f"p_value must be > 0 and <= 1, or null: got {self.p_value}")
        if not 0 <= self.regret < math.inf:
            raise InvalidArgument(f"regret must be finite and >= 0: got {self.regret}")
        if len(self.runners_up) > 2:
            raise InvalidArgument(f"runners_up must be two at most: got {len(self.runners_up)}")

    @property
    def tried(self) -> str | None:
        """How many configs were evaluated, of how many legal ones, as in 16/540."""
        return None if self.candidates is None else f"{self.candidates}/{self.legal}"

    @property
    def fastest_first(self) -> tuple[RunnerUp, ...]:
        """The runners-up by time, those that were not timed last. runners_up keeps the order of
        choice, in which of configs that tie the more robust one comes first.
        """

        def us(other: RunnerUp) -> float:
            return math.inf if other.median_us is None else other.median_us

        return tuple(sorted(self.runners_up, key=us))


NO_EVIDENCE = EntryEvidence()
"""What an entry has whose evidence was not read, or is not there."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The config chosen for one spec and bucket, and its result. Raises InvalidArgument.

    tritons: of an executed entry, the versions of Triton whose program of it was executed on a CPU,
    was right and had no fault. It serves under those alone.
    """

    spec: AttentionSpec
    bucket: Bucket
    config: KernelConfig
    result: Result
    evidence: EntryEvidence = NO_EVIDENCE
    tritons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_ran(self.config, self.result.source, self.tritons)
        if self.bucket not in BUCKETS:
            known = ", ".join(map(str, BUCKETS))
            raise InvalidArgument(f"bucket must be one of {known}: got {self.bucket}")

    @property
    def key(self) -> tuple[AttentionSpec, Bucket]:
        """What the entry is chosen for; a table holds one entry a key."""
        return self.spec, self.bucket

    def serves_under(self, triton: str) -> bool:
        """Whether this executed entry serves under a version of Triton, like 3.7.1 or 3.7."""
        return ".".join(triton.split(".")[:2]) in self.tritons

    @property
    def problem(self) -> Problem:
        """The sizes that were timed; without evidence those that tuning times by default."""
        return self.evidence.problem or workload(self.spec, BUCKET_SEQ[self.bucket])

    @property
    def tflops(self) -> float | None:
        """Matrix TFLOP/s at the median time, as spec/problem.py counts them; None if not timed, or
        the problem is not known.
        """
        return self._rate(flops, 1e-6)

    @property
    def gbs(self) -> float | None:
        """GB/s (1e9 bytes a second) of the least that is moved, as tflops."""
        return self._rate(bytes_moved, 1e-3)

    def _rate(self, work: Callable[[AttentionSpec, Problem], float], scale: float) -> float | None:
        """Work a microsecond; of a decode that is timed for several problems their mean."""
        us, problem = self.result.median_us, self.evidence.problem
        if not us or not problem:
            return None
        if self.evidence.batches_us:
            return mean_work(work, self.spec, problem) / us * scale
        return work(self.spec, problem) / us * scale


def speedup(default_us: float | None, us: float | None) -> float | None:
    """How many times as fast as the default; None if either was not timed."""
    return default_us / us if default_us and us else None


def figure(value: float) -> str:
    """A number as tables write it: five significant digits or more, never an exponent."""
    digits = max(1, 4 - math.floor(math.log10(abs(value)))) if value else 1
    whole, _, part = f"{value:.{digits}f}".partition(".")
    return f"{whole}.{part.rstrip('0') or '0'}"


def short_digest(digest: str) -> str:
    """A digest as evidence keeps it: sha256: and its first 12 hex digits."""
    return digest[: len("sha256:") + DIGEST_DIGITS]
