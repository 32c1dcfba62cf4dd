"""Tables for tests: small, legal, and plainly not tuning results (their digests are of no kernel)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Source
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import BUCKET_SEQ, BUCKETS, Bucket, workload
from flashgen.table.entry import (
    NO_EVIDENCE,
    Entry,
    EntryEvidence,
    Result,
    Run,
    RunnerUp,
    short_digest,
)
from flashgen.table.table import Table

SHIPPED = (
    "amd_instinct_mi300x",
    "amd_instinct_mi355x",
    "amd_radeon_rx_7900_xtx",
    "amd_radeon_rx_9070_xt",
    "nvidia_a10",
    "nvidia_a100_80gb_pcie",
    "nvidia_a100_sxm4_40gb",
    "nvidia_a100_sxm4_80gb",
    "nvidia_a10g",
    "nvidia_a30",
    "nvidia_a40",
    "nvidia_b200",
    "nvidia_geforce_rtx_3080",
    "nvidia_geforce_rtx_3090",
    "nvidia_geforce_rtx_4070",
    "nvidia_geforce_rtx_4080",
    "nvidia_geforce_rtx_4090",
    "nvidia_geforce_rtx_5090",
    "nvidia_h100_80gb_hbm3",
    "nvidia_h200",
    "nvidia_l4",
    "nvidia_l40",
    "nvidia_l40s",
    "nvidia_rtx_6000_ada_generation",
    "nvidia_rtx_a6000",
)
"""The tables that ship. A clone may have more, of whoever tunes there: no test is about those."""

H200 = TARGETS["nvidia_h200"]
SPEC = AttentionSpec(dtype="bfloat16", head_dim=128, head_dim_v=128, mask="causal")
FA2 = KernelConfig(br=128, bc=64, num_warps=8, num_stages=2)
AHEAD = replace(FA2, schedule="s_ahead", loads="descriptor", num_stages=3, order="longest_first")
DIGEST = "sha256:" + "ab" * 6


def named(name: str, date: str = "20260102T030405Z") -> str:
    """What a run of tests is called: its name follows its date."""
    return name if name[:1].isdigit() else f"{date}-{name}"


def made_run(name: str = "a", source: Source = "estimated") -> Run:
    return Run(
        id=named(name),
        source=source,
        flashgen="0.1.0",
        triton="3.10",
        torch="2.13.0",
        cuda=None,
        driver=None,
        clocks=None,
        power=None,
        protocol=1,
    )


def made_entry(
    spec: AttentionSpec = SPEC,
    bucket: Bucket = BUCKETS[1],
    config: KernelConfig = AHEAD,
    *,
    run: str = "a",
    source: Source = "estimated",
    median_us: float | None = 812.3,
    digest: str = DIGEST,
) -> Entry:
    timed = None if source == "untimed" else median_us
    result = Result(source=source, median_us=timed, speedup=timed and 2.0, max_abs_err_floors=1.25)
    runner_up = RunnerUp(
        config=replace(FA2, num_warps=4), source="untimed", median_us=None, digest=DIGEST
    )
    return Entry(
        spec=spec,
        bucket=bucket,
        config=config,
        result=result,
        evidence=EntryEvidence(
            run=named(run),
            digest=short_digest(digest),
            problem=workload(spec, BUCKET_SEQ[bucket]),
            registers=174,
            shared_bytes=98304,
            candidates=60,
            legal=98,
            default_us=timed and timed * 2,
            low_us=timed and timed * 0.5,
            high_us=timed and timed * 2,
            runners_up=(runner_up,),
        ),
    )


def with_evidence(entry: Entry, **changes: Any) -> Entry:
    """The entry with some of its evidence changed."""
    return replace(entry, evidence=replace(entry.evidence, **changes))


def bare(table: Table) -> Table:
    """The table as its YAML alone has it."""
    entries = (replace(entry, evidence=NO_EVIDENCE) for entry in table.entries)
    return replace(table, entries=tuple(entries))


def made_table(*entries: Entry) -> Table:
    table = Table(gpu=H200)
    for entry in entries or (made_entry(),):
        name = entry.evidence.run
        table = table.with_entry(entry, name and made_run(name, entry.result.source))
    return table
