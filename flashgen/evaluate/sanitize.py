"""What the checks of flashgen.ptx find in a kernel of flashgen: its PTX is executed on the cases
that every kernel must pass, and the results are compared with float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashgen.errors import FlashgenError
from flashgen.evaluate.check import AnyCase, check_loaded
from flashgen.evaluate.executed import ExecutedKernel
from flashgen.kernels.render import render
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig


@dataclass(frozen=True, kw_only=True)
class Sanitized:
    """One kernel, executed. findings: one line each; remarks: breaches of the PTX ISA that ptxas
    repairs. error: why it could not be executed to its end, "" if it was. instructions: of warps.
    """

    name: str
    digest: str
    findings: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    error: str = ""
    passed: bool = False
    floors: float = 0.0
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
            verdict = (
                f"{word}  {self.name}: {self.floors:.2f} floors, {self.instructions} instructions "
                f"in {self.launches} launches, {len(self.findings)} findings"
            )
        remarks = [f"  remark, {remark}" for remark in self.remarks]
        return [verdict, *(f"  {finding}" for finding in self.findings), *remarks]


def sanitize(
    spec: AttentionSpec,
    config: KernelConfig,
    arch: str,
    *,
    seeds: int = 1,
    cases: Sequence[AnyCase] | None = None,
) -> Sanitized:
    """Execute a kernel for `arch` on the cases of the check, once a seed. Errors of compilation and
    of instructions that are not known become Sanitized.error.
    """
    rendered = render(spec, config)
    try:
        kernel = ExecutedKernel(rendered, spec, config, arch, raises=False)
        results = [
            check_loaded(kernel, spec, config, cases=cases, seed=seed) for seed in range(seeds)
        ]
    except FlashgenError as error:
        return Sanitized(name=rendered.name, digest=rendered.digest, error=str(error))
    return Sanitized(
        name=rendered.name,
        digest=rendered.digest,
        findings=tuple(kernel.report.lines()),
        remarks=tuple(map(str, kernel.report.remarks)),
        passed=all(result.passed for result in results),
        floors=max((result.floors for result in results), default=0.0),
        launches=kernel.launches,
        instructions=kernel.report.steps,
    )
