"""The list `executed` of a table: kernels of schedules hopper and blackwell that no GPU has timed.

They are estimated faster than the entries, or as fast within NEAR with fewer instructions, and
flashgen.ptx executes them right and without a fault. Where the table has no times, they take fewer
cycles a score. What another GPU of the same chip was measured with comes before the entries, but
not before an executed one that is estimated faster.

choose() makes the list anew, for the installed Triton. admit() adds that Triton to the versions of
each kernel that compiles there, and is executed right. One whose loops spill there must be
estimated to take no more than NEAR longer than its entry says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib.metadata import version
from itertools import chain, groupby

from flashgen import settings
from flashgen.evaluate.offline import OfflineEvaluator
from flashgen.schedules.base import BY_KEYS
from flashgen.schedules.config import SCHEDULES, KernelConfig
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.outcome import Outcome
from flashgen.schedules.space import legal_configs, likely_order
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Bucket
from flashgen.table.entry import (
    Entry,
    EntryEvidence,
    Result,
    Run,
    short_digest,
    version_number,
)
from flashgen.table.table import Table
from flashgen.tune.run_files import run_now
from flashgen.tune.transfer import measured_on_chip

DIRECTIONS = ("forward", "backward_dkv", "backward_dq", "backward_ds")
"""The fused backward is left out: its additions are in no fixed order."""

NEAR = 0.04
"""Kernels whose estimated times are this near are told apart by the instructions they issue. On
an H200 the estimates of schedule hopper were wrong by 4 % in the median. It took 0.98 of them, and
s_ahead 1.03 (docs/notes)."""


FIRST_HANDED_OUT = 2
"""Candidates that are tried with a persistent grid, even where a plain kernel beats them without
one. Packed sequences of head dim 64, of up to 512 and 1,024 keys, take 0.94 and 0.89 of the plain
kernel's time so (estimated, an H200)."""


def in_bfloat16(spec: AttentionSpec) -> AttentionSpec:
    """The spec in bfloat16, where it is in float16: the two take the same time."""
    return replace(spec, dtype="bfloat16") if spec.dtype == "float16" else spec


def candidates(
    spec: AttentionSpec, table: Table, chosen: Sequence[Entry]
) -> tuple[KernelConfig, ...]:
    """The likely configs of the GPU's specialized schedule, one tile a program, the longest tiles
    first where causal, of gradients within a head and over heads: no estimate tells the other
    orders. float16 takes what bfloat16 took.
    """
    if spec.dtype == "float16":
        sibling = in_bfloat16(spec)
        held = [entry.config for entry in (*chosen, *table.executed) if entry.spec == sibling]
        return tuple(dict.fromkeys(replace(config, persistent=False) for config in held))
    in_head = "longest_first" if spec.causal and spec.direction not in BY_KEYS else "plain"
    of_order: dict[str, list[KernelConfig]] = {likely_order(spec): [], in_head: []}
    for config in legal_configs(spec, table.gpu, on_gpu=True):
        simple = config.specialized and not (config.persistent or config.no_turns)
        found = of_order.get(config.order) if simple else None
        if found is not None and len(found) < SCHEDULES[config.schedule].admitted:
            found.append(config)
    return tuple(chain.from_iterable(of_order.values()))


def faster(
    entries: Sequence[Entry],
    found: Sequence[KernelConfig],
    evaluator: OfflineEvaluator,
    run: Run,
) -> Iterator[Entry]:
    """For each of the entries of a spec that one kernel beats, that kernel's entry: the candidate
    that takes the least time for all of them together, relative to theirs, of those that pass; of
    several NEAR it, the one that issues the fewest instructions a score. It beats an entry in less
    time, or with fewer instructions in a time NEAR its.
    """
    spec = entries[0].spec
    held = list(dict.fromkeys(entry.config for entry in entries)) if found else []
    built = evaluator.evaluate("compile", spec, entries[0].problem, held)
    issued = {outcome.config: issue(outcome) for outcome in built}
    times: dict[KernelConfig, list[Outcome]] = {config: [] for config in found}
    for entry in entries:
        for config, outcome in zip(
            found, evaluator.evaluate("timed", spec, entry.problem, found), strict=True
        ):
            times[config].append(outcome)

    def part(outcome: Outcome, entry: Entry) -> float:
        """Of the time in which it beats the entry; 1 if it does not."""
        us, fewer = entry.result.median_us, issue(outcome) < issued[entry.config]
        if outcome.timing is None or us is None:
            return 1.0
        return min(1.0, outcome.timing.median_us / (us * (1 + NEAR * fewer)))

    def share(config: KernelConfig) -> float:
        return sum(map(part, times[config], entries)) / len(entries)

    def rank(config: KernelConfig) -> tuple[float, ...]:
        near = share(config) <= (1 + NEAR) * least
        return (0, issue(times[config][0]), share(config)) if near else (1, share(config))

    least = min(map(share, found), default=1.0)
    likely = {c: share(c) for c in sorted(found, key=rank) if share(c) < 1}
    passed = first_right(entries[0], likely, evaluator)
    if passed is None:
        return
    for entry, outcome in zip(entries, times[passed.config], strict=True):
        if part(outcome, entry) < 1:
            yield in_place_of(entry, outcome, passed, len(found), run)


def handed_out(
    entries: Sequence[Entry], found: Sequence[KernelConfig], evaluator: OfflineEvaluator, run: Run
) -> Iterator[Entry]:
    """For each of the entries that a persistent kernel of their tiles, or of the first candidates,
    beats by more than NEAR, that kernel's entry: mostly of short calls, where blocks cost as much
    as tiles. Those whose main loops spill are left out. No direction but a forward, dK/dV and dQ
    has such kernels.
    """
    spec, gpu = entries[0].spec, evaluator.gpu
    configs = (*(entry.config for entry in entries), *found[:FIRST_HANDED_OUT])
    legal = [
        config
        for config in dict.fromkeys(replace(each, persistent=True) for each in configs)
        if SCHEDULES[config.schedule].hands_out and why_illegal(spec, config, gpu) is None
    ]
    built = evaluator.evaluate("compile", spec, entries[0].problem, legal)
    found = [outcome.config for outcome in built if outcome.ok and not outcome.shortcomings]
    for entry in entries if found else ():
        us = entry.result.median_us
        if us is not None:
            # Each by its own: which tile is best depends on how many there are for a program.
            beaten = replace(entry.result, median_us=us * (1 - NEAR))
            yield from faster([replace(entry, result=beaten)], found, evaluator, run)


def issue(outcome: Outcome) -> float:
    """Cycles in which its instructions of a score issue; infinite where they are not known."""
    return outcome.cycles[1] if outcome.cycles else math.inf


def as_measured(
    entries: Sequence[Entry],
    measured: Mapping[Bucket, KernelConfig],
    evaluator: OfflineEvaluator,
    run: Run,
) -> Iterator[Entry]:
    """For each of the entries of a spec whose bucket another GPU of the same chip measured with
    such a kernel, that kernel's entry, if it is executed right.
    """
    checks: dict[KernelConfig, Outcome | None] = {}
    for held in entries:
        config = measured.get(held.bucket)
        if config is None or not config.executed:
            continue
        if config not in checks:
            checks[config] = first_right(held, {config: 1.0}, evaluator)
        passed = checks[config]
        if passed is not None:
            timed = evaluator.evaluate("timed", held.spec, held.problem, [config])
            yield in_place_of(held, next(iter(timed)), passed, 1, run)


def leaner(
    entries: Sequence[Entry],
    found: Sequence[KernelConfig],
    evaluator: OfflineEvaluator,
    run: Run,
) -> Iterator[Entry]:
    """As faster, of entries without a time: the candidate that takes the fewest cycles a score, on
    the pipe that bounds it, then to issue. It serves where the entry takes more.
    """
    spec, problem = entries[0].spec, entries[0].problem
    configs = [*found, *dict.fromkeys(entry.config for entry in entries)] if found else []
    built = list(evaluator.evaluate("compile", spec, problem, configs))
    cycles = {each.config: each.cycles for each in built if each.ok and each.cycles}
    most = max((cycles.get(entry.config, ()) for entry in entries), default=())
    fewer = sorted((c for c in found if cycles.get(c, most) < most), key=lambda c: cycles[c])
    passed = first_right(entries[0], {c: cycles[c][0] for c in fewer}, evaluator)
    if passed is None:
        return
    outcome = next(each for each in built if each.config == passed.config)
    for held in entries:
        if outcome.cycles < cycles.get(held.config, ()):
            yield in_place_of(held, outcome, passed, len(found), run)


def first_right(
    held: Entry, likely: Mapping[KernelConfig, float], evaluator: OfflineEvaluator
) -> Outcome | None:
    """The check of the first config that is executed right and without a fault; each is printed
    with its figure.
    """
    for config, figure in likely.items():
        (checked,) = evaluator.evaluate("check", held.spec, held.problem, [config])
        print(f"{held.spec.name} {config.label}: {figure:.3f} {checked.status}",
              checked.detail[:200], flush=True)  # fmt: skip
        if checked.ok and checked.check is not None:
            return checked
    return None


def in_place_of(held: Entry, outcome: Outcome, checked: Outcome, tried: int, run: Run) -> Entry:
    """The entry of a config that serves in place of another, with the time of its outcome."""
    timing, default = outcome.timing, held.evidence.default_us
    assert checked.check is not None  # it passed
    return Entry(
        spec=held.spec,
        bucket=held.bucket,
        config=outcome.config,
        tritons=(settings.compiling_triton(),),
        result=Result(
            source="estimated" if timing else "untimed",
            median_us=timing.median_us if timing else None,
            speedup=default / timing.median_us if default and timing else None,
            max_abs_err_floors=checked.check.floors,
        ),
        evidence=EntryEvidence(
            run=run.id,
            digest=short_digest(outcome.digest),
            problem=held.problem,
            registers=outcome.registers,
            shared_bytes=outcome.shared_bytes,
            candidates=tried,
            legal=tried,
            default_us=default,
            low_us=timing.low_us if timing else None,
            high_us=timing.high_us if timing else None,
        ),
    )


def choose(
    table: Table, evaluator: OfflineEvaluator, others: Sequence[Table] = (), specs: str = "*"
) -> Table:
    """The table with its executed entries chosen anew, of specs whose names match; others are the
    tables of other GPUs. A kernel that served in another bucket keeps its versions of Triton, and
    one that another takes the place of goes on under those that this was not executed with. What
    the table's entry beats by more than NEAR goes.
    """
    on_chip = measured_on_chip(table.gpu, [table, *others])
    run, here, known = run_now(evaluator), settings.compiling_triton(), table.executed
    run = replace(run, id=run.id.replace("estimated", "executed"))
    chosen: list[Entry] = []
    for spec, group in groupby(table.entries, key=lambda entry: entry.spec):
        entries, mine = list(group), list[Entry]()
        if spec.direction not in DIRECTIONS or not fnmatchcase(spec.name, specs):
            continue
        measured = {b: c for (s, b), c in on_chip.items() if s == in_bfloat16(spec)}
        estimated = [entry for entry in entries if entry.result.source == "estimated"]
        table = without_beaten(table, estimated)
        for entry in as_measured(estimated, measured, evaluator, run):
            now = table.executed_for(*entry.key, here)
            if now is None or (now.result.median_us or 0.0) > (entry.result.median_us or 0.0):
                mine.append(entry)
        entries = [entry for entry in entries if entry.bucket not in measured]
        found = candidates(spec, table, chosen)
        for source, better in (("estimated", faster), ("untimed", leaner)):
            of_source = [entry for entry in entries if entry.result.source == source]
            if of_source:
                mine += better(of_source, found, evaluator, run)
        if estimated:
            held = [table.serving(*entry.key, here) or entry for entry in estimated]
            serving = {entry.key: entry for entry in (*held, *mine)}
            mine += handed_out(list(serving.values()), found, evaluator, run)
        chosen += mine
    for entry in chosen:
        table = table.with_entry(replace(entry, tritons=_versions(entry, known)), run)
    return table


def _versions(entry: Entry, known: Sequence[Entry]) -> tuple[str, ...]:
    """Those of a chosen entry: its own, those under which its kernel served in this bucket before,
    and those under which it serves in another, unless another kernel serves this one there.
    """
    kernel = entry.spec, entry.config, entry.evidence.digest
    alike = [e for e in known if (e.spec, e.config, e.evidence.digest) == kernel]
    here = [version for e in alike if e.bucket == entry.bucket for version in e.tritons]
    others = (e for e in known if e.key == entry.key and e not in alike)
    taken = {version for e in others for version in e.tritons}
    elsewhere = [version for e in alike for version in e.tritons if version not in taken]
    found = dict.fromkeys((*entry.tritons, *here, *elsewhere))
    return tuple(sorted(found, key=version_number))


def without_beaten(table: Table, entries: Sequence[Entry]) -> Table:
    """The table without the executed entries that these of the same spec and bucket beat by more
    than NEAR, as those of an older model may be.
    """
    us = {entry.key: entry.result.median_us for entry in entries}

    def beaten(executed: Entry) -> bool:
        mine, theirs = executed.result.median_us, us.get(executed.key)
        return mine is not None and theirs is not None and mine > theirs * (1 + NEAR)

    kept = [entry for entry in table.executed if not beaten(entry)]
    return table.of([*table.entries, *kept]).in_order()


def admit(table: Table, evaluator: OfflineEvaluator, specs: str = "*") -> Table:
    """The table with the installed Triton among the versions of each executed entry that holds, of
    specs whose names match; of several for a bucket, of the latest chosen.
    """
    here, kept = settings.compiling_triton(), list(table.entries)
    for spec, group in groupby(table.executed, key=lambda entry: entry.spec):
        entries = list(group)
        if not fnmatchcase(spec.name, specs):
            kept += entries
            continue
        held = set[KernelConfig]()
        for config in dict.fromkeys(entry.config for entry in entries):
            having = next(entry for entry in entries if entry.config == config)
            if why := _why_it_does_not_hold(having, evaluator):
                print(f"{spec.name} {config.label}: {why}", flush=True)
            else:
                held.add(config)
        taken = set[Bucket]()
        for entry in sorted(entries, key=lambda entry: entry.evidence.run or "", reverse=True):
            versions = [each for each in entry.tritons if each != here]
            if entry.config in held and entry.bucket not in taken:
                taken.add(entry.bucket)
                versions = sorted([*versions, here], key=version_number)
            if versions:
                kept.append(replace(entry, tritons=tuple(versions)))
        print(
            f"{spec.name}: {len(held)} of {len({e.config for e in entries})} kernels hold "
            f"with Triton {version('triton')}",
            flush=True,
        )
    return table.of(kept).in_order()


def _why_it_does_not_hold(entry: Entry, evaluator: OfflineEvaluator) -> str | None:
    """Why the entry's kernel does not serve under the installed Triton; None if it does."""
    of = entry.spec, entry.problem, [entry.config]
    us = entry.result.median_us
    for stage in ("compile", "check"):
        (found,) = evaluator.evaluate(stage, *of)
        if not found.ok:
            return f"{stage} {found.status} {found.detail[:300]}"
        if stage == "compile" and us is not None and found.shortcomings:
            (here,) = evaluator.evaluate("timed", *of)
            if here.timing is None or here.timing.median_us > (1 + NEAR) * us:
                return "its loops spill, or overlap too little, and it is estimated slower"
    return None
