"""What the checks of flashgen.ptx find in a kernel of flashgen: its PTX is executed on the cases
that every kernel must pass, and the results are compared with float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flashgen.errors import FlashgenError
from flashgen.evaluate.check import AnyCase, cases_of, check_loaded
from flashgen.evaluate.check_attention import PackedCase
from flashgen.evaluate.check_cache import DecodeCase
from flashgen.evaluate.executed import ExecutedKernel
from flashgen.kernels.render import render
from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class Sanitized:
    """One kernel, executed. findings: one line each; remarks: breaches of the PTX ISA that ptxas
    repairs. error: why it could not be executed to its end, "" if it was. floors: the largest error
    in units of the floor, None if a result is NaN. instructions: of warps.
    """

    name: str
    digest: str
    findings: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    error: str = ""
    passed: bool = False
    floors: float | None = 0.0
    launches: int = 0
    instructions: int = 0

    @property
    def holds(self) -> bool:
        """Whether every result was right and no check found anything."""
        return self.passed and not self.findings and not self.error

    def lines(self) -> list[str]:
        """A verdict, then a line for each finding and remark."""
        if self.error:
            verdict = f"FAILED  {self.name}: {self.error}"
        else:
            word = "ok" if self.holds else "FAILED"
            floors = "NaN" if self.floors is None else f"{self.floors:.2f}"
            verdict = (
                f"{word}  {self.name}: {floors} floors, {self.instructions} instructions in "
                f"{self.launches} launches, {len(self.findings)} findings"
            )
        remarks = [f"  remark, {remark}" for remark in self.remarks]
        return [verdict, *(f"  {finding}" for finding in self.findings), *remarks]


def executed_cases(spec: AttentionSpec, config: KernelConfig) -> tuple[AnyCase, ...]:
    """The cases of the check, on fewer blocks where they have many.

    Those are made for GPUs. The first one of attention takes most of the time of all: two groups of
    two heads show what two groups of four do; the others have one head of K and V. The first two of
    a decode take over half: see _decode_on_fewer_blocks().
    """
    return tuple(_on_fewer_blocks(spec, case) for case in cases_of(spec, config))


def _on_fewer_blocks(spec: AttentionSpec, case: AnyCase) -> AnyCase:
    if isinstance(case, DecodeCase):
        return _decode_on_fewer_blocks(case) if spec.direction == "decode" else case
    p = case.problem
    group = min(2, p.heads // p.kv_heads)
    if case.varied or isinstance(case, PackedCase):
        return replace(case, problem=replace(p, heads=group * p.kv_heads))
    if spec.block_mask:
        return case
    return replace(case, problem=replace(p, batch=1, heads=group, kv_heads=1))


def _decode_on_fewer_blocks(case: DecodeCase) -> DecodeCase:
    """The case of shared pages alone keeps two heads of K and V. It loses the sequence whose keys
    fill their tiles, and a split: the last one is without a key either way.
    """
    if case.shared:
        return replace(case, lengths=case.lengths[1:], splits=case.splits - 1)
    return replace(case, kv_heads=1)


def sanitize(
    spec: AttentionSpec,
    config: KernelConfig,
    arch: str,
    *,
    seeds: int = 1,
    cases: Sequence[AnyCase] | None = None,
) -> Sanitized:
    """Execute a kernel for `arch` once a seed, on executed_cases() unless others are given. Errors
    of compilation and of instructions that are not known become Sanitized.error.
    """
    rendered = render(spec, config)
    chosen = executed_cases(spec, config) if cases is None else tuple(cases)
    try:
        kernel = ExecutedKernel(rendered, spec, config, arch, raises=False)
        results = [
            check_loaded(kernel, spec, config, cases=chosen, seed=seed) for seed in range(seeds)
        ]
    except FlashgenError as error:
        return Sanitized(name=rendered.name, digest=rendered.digest, error=str(error))
    floors = [result.floors for result in results]
    return Sanitized(
        name=rendered.name,
        digest=rendered.digest,
        findings=tuple(kernel.report.lines()),
        remarks=tuple(map(str, kernel.report.remarks)),
        passed=all(result.passed for result in results),
        floors=max(floors, default=0.0) if all(map(math.isfinite, floors)) else None,
        launches=kernel.launches,
        instructions=kernel.report.steps,
    )
