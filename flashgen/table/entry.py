"""Entry: the config chosen for one spec and bucket; its Result, its RunnerUps, the Run it is from.

The rows of a table as values, checked when they are made; table/table.py reads and writes them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from flashgen.errors import InvalidArgument
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig
from flashgen.spec.outcome import Source
from flashgen.spec.problem import BUCKETS, Bucket, Problem


@dataclass(frozen=True, kw_only=True)
class Run:
    """One tuning run that entries come from; what an offline run lacks (driver, clocks) is None."""

    id: str
    date: str  # ISO 8601, UTC
    source: Source
    flashgen: str
    triton: str
    torch: str
    cuda: str | None
    driver: str | None
    clocks: str | None
    power: str | None
    protocol: int


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the final round found out. All times are microseconds; None is "was not timed".

    default_us is the default's tile with the spec's own head dims fixed, sdpa_us torch's SDPA, both
    in the same round. candidates is how many configs were evaluated, of so many legal ones.

    p_value is that of the rank test against the strongest rival (search/decide.py); None where
    there was none. regret is the share of its time by which the config is slower than the best one
    of this bucket, which was given up to have fewer kernels (tune/share_kernels.py); 0.0 where it
    is the best. Raises InvalidArgument.
    """

    source: Source
    problem: Problem
    median_us: float | None
    p20_us: float | None
    p80_us: float | None
    tflops: float | None
    default_us: float | None
    sdpa_us: float | None
    max_abs_err_floors: float
    candidates: int
    legal: int
    p_value: float | None = None
    regret: float = 0.0

    def __post_init__(self) -> None:
        _check_timed(self.source, self.median_us)
        if self.p_value is not None and not 0 < self.p_value <= 1:
            raise InvalidArgument(f"p_value must be > 0 and <= 1, or null: got {self.p_value}")
        if not 0 <= self.regret < math.inf:
            raise InvalidArgument(f"regret must be finite and >= 0: got {self.regret}")
        for field in ("median_us", "p20_us", "p80_us", "tflops", "default_us", "sdpa_us"):
            _check_positive(field, getattr(self, field))
        if not 0 <= self.max_abs_err_floors < math.inf:
            raise InvalidArgument(
                f"max_abs_err_floors must be finite and >= 0: got {self.max_abs_err_floors}"
            )

    @property
    def speedup(self) -> float | None:
        """How many times faster than the default kernel; None where either was not timed."""
        return self.default_us / self.median_us if self.default_us and self.median_us else None


@dataclass(frozen=True, kw_only=True)
class RunnerUp:
    """A config that came next: the first to try should the winner fail. Raises InvalidArgument."""

    config: KernelConfig
    source: Source
    median_us: float | None
    digest: str

    def __post_init__(self) -> None:
        _check_timed(self.source, self.median_us)
        _check_positive("median_us", self.median_us)
        _check_digest(self.digest)
        _check_ran(self.config, self.source)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The config chosen for one spec and bucket, and the evidence. Raises InvalidArgument.

    shared_bytes and registers (a thread) are the compiler's figures under the run's Triton. digest
    is that of the text which was timed; where today's text differs, the entry is stale, and served.
    """

    spec: AttentionSpec
    bucket: Bucket
    config: KernelConfig
    digest: str
    shared_bytes: int
    registers: int
    run: str
    result: Result
    runners_up: tuple[RunnerUp, ...]

    def __post_init__(self) -> None:
        _check_digest(self.digest)
        _check_ran(self.config, self.result.source)
        if self.bucket not in BUCKETS:
            known = ", ".join(map(str, BUCKETS))
            raise InvalidArgument(f"bucket must be one of {known}: got {self.bucket}")
        if len(self.runners_up) > 2:
            raise InvalidArgument(f"runners_up must be two at most: got {len(self.runners_up)}")

    @property
    def key(self) -> tuple[AttentionSpec, Bucket]:
        """What the entry is chosen for; a table holds one entry a key."""
        return self.spec, self.bucket


def _check_timed(source: Source, median_us: float | None) -> None:
    if (source == "untimed") != (median_us is None):
        raise InvalidArgument("median_us must be null where source is untimed, and only there")


def _check_positive(field: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise InvalidArgument(f"{field} must be finite and > 0, or null: got {value}")


def _check_ran(config: KernelConfig, source: Source) -> None:
    """What only a GPU proves is known to be right only where it was measured."""
    if config.needs_gpu and source != "measured":
        raise InvalidArgument(
            f"schedule {config.schedule} needs source measured, which only a GPU gives: "
            f"got {source}"
        )


def _check_digest(digest: str) -> None:
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise InvalidArgument(f"digest must be sha256: and 64 hex digits: got {digest!r}")
