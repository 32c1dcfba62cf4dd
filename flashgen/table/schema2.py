"""Entries as tables of schema 1 and 2 have them: a mapping of thirty lines, the evidence within."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig
from flashgen.spec.outcome import Source
from flashgen.spec.problem import Bucket, Problem
from flashgen.table.entry import Entry, EntryEvidence, Result, RunnerUp, short_digest


@dataclass(frozen=True, kw_only=True)
class OldResult:
    """The key `result` of an entry. Schema 1 had neither p_value nor regret."""

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


@dataclass(frozen=True, kw_only=True)
class OldRunnerUp:
    """One of the list `runners_up`."""

    config: KernelConfig
    source: Source
    median_us: float | None
    digest: str


@dataclass(frozen=True, kw_only=True)
class OldEntry:
    """One of the list `entries`. Digests have 64 hex digits."""

    spec: AttentionSpec
    bucket: Bucket
    config: KernelConfig
    digest: str
    shared_bytes: int
    registers: int
    run: str
    result: OldResult
    runners_up: tuple[OldRunnerUp, ...]

    def entry(self) -> Entry:
        """The entry as it is today. Raises InvalidArgument."""
        result = self.result
        runners_up = tuple(
            RunnerUp(
                config=other.config,
                source=other.source,
                median_us=other.median_us,
                digest=short_digest(other.digest),
            )
            for other in self.runners_up
        )
        return Entry(
            spec=self.spec,
            bucket=self.bucket,
            config=self.config,
            digest=short_digest(self.digest),
            shared_bytes=self.shared_bytes,
            registers=self.registers,
            run=self.run,
            result=Result(
                source=result.source,
                problem=result.problem,
                median_us=result.median_us,
                default_us=result.default_us,
                max_abs_err_floors=result.max_abs_err_floors,
                candidates=result.candidates,
                legal=result.legal,
            ),
            evidence=EntryEvidence(
                low_us=result.p20_us,
                high_us=result.p80_us,
                sdpa_us=result.sdpa_us,
                p_value=result.p_value,
                regret=result.regret,
                runners_up=runners_up,
            ),
        )
