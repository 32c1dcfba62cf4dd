"""Try a kernel as the templates make it now: what changed in its text, whether it is right, and how
fast it is.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from flashgen.evaluate.evaluator import Evaluator
from flashgen.kernels.render import render
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Outcome, Stage, Status
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem

SHOWN = 60
"""Lines of a difference that are shown, at most."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """The outcomes of checking and of timing, or of the first that failed."""

    checked: Outcome
    timed: Outcome | None

    @property
    def holds(self) -> bool:
        """Whether the kernel is right and was timed, or is for a GPU without estimates."""
        return self.timed is not None and (self.timed.ok or self.timed.status is Status.NO_ESTIMATE)

    def lines(self) -> Iterator[str]:
        """A line for each."""
        yield _line("check", self.checked)
        if self.timed is not None:
            yield _line("time", self.timed)


def _line(what: str, outcome: Outcome) -> str:
    words = [str(outcome.status)]
    if (check := outcome.check) is not None:
        words.append(f"{check.floors:.2f} floors, {check.cases} cases, {check.where}")
    if (timing := outcome.timing) is not None:
        words.append(f"{timing.median_us:.1f} us, {outcome.source}, {outcome.problem.seq_k} keys")
    if outcome.registers is not None:
        shared = (outcome.shared_bytes or 0) / 1024
        words.append(f"{outcome.registers} registers, {shared:.0f} KiB of shared memory")
    if not outcome.ok and outcome.detail:
        words.append(outcome.detail)
    return f"{what + ':':8}{'; '.join(words)}"


def difference(spec: AttentionSpec, config: KernelConfig, generated: Path) -> list[str]:
    """The unified difference between the kernel's text in generated/ and what the templates make
    now; empty if there is none.
    """
    rendered = render(spec, config)
    path = generated / "kernels" / f"{rendered.text_name}.py"
    before = path.read_text().splitlines() if path.exists() else []
    after = rendered.source.splitlines()
    names = str(path), rendered.template
    found = list(difflib.unified_diff(before, after, *names, n=1, lineterm=""))
    more = len(found) - SHOWN
    return [*found[:SHOWN], f"and {more} more lines"] if more > 0 else found


def tried(
    spec: AttentionSpec, config: KernelConfig, problem: Problem, evaluator: Evaluator
) -> Tried:
    """Check the kernel, and time it if it is right. Without a GPU the time is an estimate, and both
    go on at once.
    """

    def asked(stage: Stage) -> Outcome:
        (found,) = evaluator.evaluate(stage, spec, problem, [config])
        return found

    if evaluator.source == "measured":
        checked = asked("check")
        return Tried(checked=checked, timed=asked("timed") if checked.ok else None)
    with ThreadPoolExecutor(1) as beside:
        timing = beside.submit(asked, "timed")
        checked = asked("check")
        return Tried(checked=checked, timed=timing.result() if checked.ok else None)
