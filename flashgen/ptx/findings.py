"""What the checks find: Finding, and the Report of a launch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from flashgen.errors import FlashgenError
from flashgen.ptx.program import PtxInstruction

Sanitizer = Literal["memcheck", "racecheck", "initcheck", "synccheck"]
"""The checks, named as compute-sanitizer names its tools."""

CHECKS: frozenset[Sanitizer] = frozenset(("memcheck", "racecheck", "initcheck", "synccheck"))

MOST_FINDINGS = 50
"""Findings that a report holds; further ones are counted."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fault of a program.

    Args:
        check: the check that found it.
        message: what is wrong, with the values.
        instruction: where it is in the PTX, and in the kernel's source if that is known.
        block: the block in which it was seen first.
        warp: the warp of that block.
        lane: the lane of that warp; None if it is the whole warp's.

    Examples:
        >>> from flashgen.ptx import Finding
        >>> from flashgen.ptx.text import parse
        >>> text = ".version 8.8 .target sm_90 .entry k() .reqntid 32 { bar.sync 0; ret; }"
        >>> where = {"instruction": parse(text).instructions[0], "block": (1, 0, 0), "warp": 2}
        >>> print(Finding(check="synccheck", message="it waits for warp 3", **where))
        synccheck: it waits for warp 3 (block 1, warp 2; PTX line 1: bar.sync 0)
    """

    check: Sanitizer
    message: str
    instruction: PtxInstruction
    block: tuple[int, int, int]
    warp: int
    lane: int | None = None

    def __str__(self) -> str:
        where = f"block {self.block[0]}" if not any(self.block[1:]) else f"block {self.block}"
        lane = "" if self.lane is None else f", lane {self.lane}"
        source = f"{self.instruction.source}: " if self.instruction.source else ""
        return (
            f"{self.check}: {source}{self.message} ({where}, warp {self.warp}{lane}; "
            f"{_short(str(self.instruction))})"
        )


def _short(text: str, most: int = 120) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


class Fault(Exception):
    """A finding after which the program cannot go on: an access that a GPU refuses, a deadlock."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class FaultsFound(FlashgenError, RuntimeError):
    """A launch in which a check found something; report has all of it."""

    def __init__(self, report: Report) -> None:
        first, count = report.findings[0], report.count
        super().__init__(f"{first}" + (f"; {count - 1} more findings" if count > 1 else ""))
        self.report = report


@dataclass(kw_only=True)
class Report:
    """What one launch, or several, did.

    A remark is no fault: a breach of the PTX ISA that ptxas is known to repair, at a cost in time,
    or a load of tensor memory that nobody has written.

    Args:
        findings: the faults, each check and instruction once; the first 50.
        remarks: what is no fault, each instruction once.
        count: how many findings there are, with those that were not kept.
        blocks: how many blocks ran.
        steps: how many instructions warps ran.

    Examples:
        >>> from flashgen.ptx import Report
        >>> report = Report(blocks=1, steps=20)
        >>> report.merge(Report(blocks=2, steps=40))
        >>> report.blocks, report.steps, report.checks()
        (3, 60, frozenset())
    """

    findings: list[Finding] = field(default_factory=list)
    remarks: list[Finding] = field(default_factory=list)
    count: int = 0
    blocks: int = 0
    steps: int = 0
    _seen: set[tuple[str, PtxInstruction, str]] = field(default_factory=set, init=False)

    def add(self, finding: Finding, about: str = "") -> None:
        """Record a finding, unless the same check found the same at this instruction before."""
        key = (finding.check, finding.instruction, about)
        if key in self._seen:
            return
        self._seen.add(key)
        self.count += 1
        if len(self.findings) < MOST_FINDINGS:
            self.findings.append(finding)

    def remark(self, finding: Finding) -> None:
        """Record a remark, once an instruction."""
        key = ("remark", finding.instruction, "")
        if key not in self._seen:
            self._seen.add(key)
            self.remarks.append(finding)

    def merge(self, other: Report) -> None:
        """Add what another launch of the same program did."""
        for finding in other.findings:
            self.add(finding)
        for remark in other.remarks:
            self.remark(remark)
        self.blocks += other.blocks
        self.steps += other.steps

    def checks(self) -> frozenset[Sanitizer]:
        """The checks that found something."""
        return frozenset(finding.check for finding in self.findings)

    def raise_if_any(self) -> None:
        """Raises FaultsFound if there is a finding."""
        if self.findings:
            raise FaultsFound(self)

    def lines(self) -> Iterable[str]:
        """One line a finding."""
        return map(str, self.findings)
