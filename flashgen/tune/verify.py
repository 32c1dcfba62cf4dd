"""Verifies the entries of a table again: legal, compiled as recorded, correct against float64.

The evaluator does the work, as in a tuning run; here its results are compared with the table.
execute() executes every kernel as it is compiled.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from flashgen import settings
from flashgen.compile.ptx import build_ptx
from flashgen.evaluate.build import cpu_count
from flashgen.evaluate.evaluator import SLOW, Evaluator, triton_version
from flashgen.evaluate.payloads import ForArch, task
from flashgen.evaluate.pools import Children
from flashgen.evaluate.sanitize import Sanitized
from flashgen.evaluate.workers.answers import Done, TimedOut, killed
from flashgen.files import content_of
from flashgen.kernels.render import render
from flashgen.schedules.config import KernelConfig, kernel_name
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.outcome import Outcome
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.records import parsed, record_of, value_of
from flashgen.table.emit import is_stale, kernels_of
from flashgen.table.entry import Entry
from flashgen.table.evidence import missing
from flashgen.table.table import Table


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The result for one entry. It holds if there are no failures; notes are informative. Not
    decided: a kernel ran out of time, twice, which a busy machine may cause.
    """

    entry: Entry
    failures: tuple[str, ...]
    notes: tuple[str, ...]
    floors: float | None  # None: it could not be run
    decided: bool = True

    @property
    def holds(self) -> bool:
        """Whether nothing contradicts the entry."""
        return not self.failures

    def __str__(self) -> str:
        """One line: verdict, kernel, bucket, remarks."""
        name = kernel_name(self.entry.spec, self.entry.config)
        facts = "" if self.floors is None else f": {self.floors:.2f} floors"
        remarks = "".join(f"; {remark}" for remark in (*self.failures, *self.notes))
        verdict = "ok" if self.holds else "FAILED" if self.decided else "NO VERDICT"
        return f"{verdict}  {name} {self.entry.bucket}{facts}{remarks}"


def verify(table: Table, evaluator: Evaluator) -> Iterator[Proof]:
    """A Proof of every entry that may serve under this Triton, in the order of the table, as each
    becomes known.

    The evaluator must be new and for the table's GPU: a remembered check verifies nothing.
    """
    here = settings.compiling_triton()
    serving = (e for e in table.everything if not e.tritons or e.serves_under(here))
    for _, group in groupby(serving, key=lambda entry: entry.spec):
        entries = tuple(group)
        kernels = tuple(dict.fromkeys(config for e in entries for config in kernels_of(e)))
        checked = _ask(evaluator, "check", entries[0], kernels)
        for entry in entries:
            compiled = _ask(evaluator, "compile", entry, kernels_of(entry))
            yield _proof(table, entry, compiled, checked)


def _ask(
    evaluator: Evaluator, stage: str, entry: Entry, configs: tuple[KernelConfig, ...]
) -> dict[KernelConfig, Outcome]:
    """One stage's outcomes by config; checking does not depend on lengths."""
    outcomes = evaluator.evaluate(
        stage,  # type: ignore[arg-type]
        entry.spec,
        entry.problem,
        configs,
    )
    return dict(zip(configs, outcomes, strict=True))


def _proof(
    table: Table,
    entry: Entry,
    compiled: dict[KernelConfig, Outcome],
    checked: dict[KernelConfig, Outcome],
) -> Proof:
    failures, notes, decided = [], [], True
    for config in kernels_of(entry):
        whose = "" if config == entry.config else f"pointer twin {config.label}: "
        if reason := why_illegal(entry.spec, config, table.gpu):
            failures.append(f"{whose}illegal: {reason}")
            continue
        built, run = compiled[config], checked[config]
        slow_twin = config != entry.config and built.status in SLOW
        bad = next((o for o in (built, run) if not o.ok and not (slow_twin and o is built)), None)
        if bad:
            failures.append(f"{whose}{bad.status}: {bad.detail}")
            decided = decided and not bad.undecided
        elif slow_twin:
            notes.append(f"{whose}{built.detail}")
    origin = table.run_of(entry)
    if origin is None:
        notes += missing([entry])
    elif is_stale(entry):
        notes.append("stale: the kernel's text has changed since this entry was made; tune again")
    elif compiled[entry.config].ok and (found := _other_facts(entry, compiled[entry.config])):
        if origin.triton == triton_version():
            failures.append(found)
        else:
            notes.append(f"{found} (Triton {triton_version()} here, {origin.triton} there)")
    check = checked[entry.config].check
    return Proof(
        entry=entry,
        failures=tuple(failures),
        notes=tuple(notes),
        floors=check.floors if check else None,
        decided=decided,
    )


def _other_facts(entry: Entry, outcome: Outcome) -> str:
    """A sentence if the compiler's figures are not those of the entry, else ""."""
    found = outcome.shared_bytes, outcome.registers
    recorded = entry.evidence.shared_bytes, entry.evidence.registers
    if found == recorded:
        return ""
    return (
        f"compiles to {found[0]} bytes of shared memory and {found[1]} registers: "
        f"the entry says {recorded[0]} and {recorded[1]}"
    )


EXECUTE_LIMIT_S = 300.0
"""A kernel takes 2 to 30 s on one core, its compilation included."""


SAME_PTX = ("sm_80", "sm_86", "sm_89")
"""Architectures for which Triton writes the same instructions. instructions() is compared for each
kernel, as its signature has it; not for the other types of tensors that a case may have."""


def execute(
    table: Table, log: Path, jobs: int | None = None, *, record: Path | None = None
) -> Iterator[tuple[str, Sanitized]]:
    """Execute every kernel of a table as this Triton compiles it, on sanitize.executed_cases(), and
    yield the name of its spec with what was found, in the order of the table. `jobs` children work.

    The lines of `log` are the results so far: a run that was cut off goes on, and one that comes to
    the end deletes them. `record` holds verdicts of several tables, by architecture and digest: a
    kernel that it has without a fault is not executed, and all others are added. Across SAME_PTX a
    kernel whose PTX is the same but for the target counts as executed.
    """
    kernels = dict.fromkeys((e.spec, config) for e in table.everything for config in kernels_of(e))
    held = {} if record is None else _recorded(record, table, kernels)
    known = _known(log) | held
    with contextlib.closing(Children(jobs or cpu_count())) as children:
        pending = {
            (spec, config): children.submit(
                task(
                    "flashgen.evaluate.tasks:execute_one",
                    ForArch(spec=spec, config=config, arch=table.gpu.arch),
                    EXECUTE_LIMIT_S,
                )
            )
            for spec, config in kernels
            if render(spec, config).digest not in known
        }
        for spec, config in kernels:
            rendered = render(spec, config)
            found = known.get(rendered.digest)
            if found is None:
                answer = pending[spec, config].result()
                found = Sanitized(name=rendered.name, digest=rendered.digest, error=str(answer))
                if isinstance(answer, Done):
                    found = record_of(Sanitized, answer.value, "the answer")
                if not (isinstance(answer, TimedOut) or killed(answer)):
                    log.parent.mkdir(parents=True, exist_ok=True)
                    with log.open("a") as file:
                        file.write(json.dumps({"triton": triton_version()} | asdict(found)) + "\n")
            if record is not None and rendered.digest not in held:
                _record(record, table.gpu.arch, found)
            yield spec.name, found
    log.unlink(missing_ok=True)


def _recorded(
    record: Path, table: Table, kernels: Iterable[tuple[AttentionSpec, KernelConfig]]
) -> dict[str, Sanitized]:
    """What a record has of a table's kernels without a fault; what is lent is added to it."""
    version, arch = triton_version(), table.gpu.arch
    text = record.read_text() if record.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    right = [line for line in lines if line["triton"] == version and not line["faults"]]
    here = {line["digest"]: line["name"] for line in right if line["arch"] == arch}
    others = {
        line["digest"]: line["arch"]
        for line in right
        if arch in SAME_PTX and line["arch"] in SAME_PTX and "executed_for" not in line
    }
    for spec, config in kernels:
        rendered = render(spec, config)
        other = None if rendered.digest in here else others.get(rendered.digest)
        if other and instructions(spec, config, arch) == instructions(spec, config, other):
            here[rendered.digest] = rendered.name
            lent = Sanitized(name=rendered.name, digest=rendered.digest, passed=True)
            _record(record, arch, lent, executed_for=other)
    return {d: Sanitized(name=name, digest=d, passed=True) for d, name in here.items()}


def _record(record: Path, arch: str, found: Sanitized, **more: str) -> None:
    """Add the verdict of a kernel to a record."""
    line = {"triton": triton_version(), "arch": arch, "name": found.name, "digest": found.digest}
    faults = len(found.findings) + (not found.passed)
    with record.open("a") as file:
        file.write(json.dumps(line | {"faults": faults} | more) + "\n")


def instructions(spec: AttentionSpec, config: KernelConfig, arch: str) -> str:
    """The PTX of a kernel without its target, lines of the source and debug sections."""
    ptx = build_ptx(render(spec, config), spec, config, arch).ptx.partition("\t.section\t")[0]
    return re.sub(r"^\s*\.(target|file|loc)\b.*\n", "", ptx, flags=re.MULTILINE)


def _known(log: Path) -> dict[str, Sanitized]:
    """The results of a log under this Triton, by digest. Its last line may be cut off."""
    found: dict[str, Sanitized] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in content_of(log).decode().splitlines():
            record = value_of(dict[str, Any], parsed(line), "a line")
            if record.pop("triton", None) == triton_version():
                result = record_of(Sanitized, record, "a line")
                found[result.digest] = result
    return found
