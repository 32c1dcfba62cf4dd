"""Explain: which kernel serves a call, why it was chosen, what limits it, and why others lost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from flashgen import paths
from flashgen.errors import FlashgenError
from flashgen.estimate.estimate import PROTOCOL
from flashgen.files import temporary_folder
from flashgen.report import kernel_limits
from flashgen.report.history import TIMED_STAGES, Searches, SearchHistory
from flashgen.report.kernel_limits import Anatomy, dissect
from flashgen.runtime.selection import Ladder
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Outcome, Status
from flashgen.schedules.space import seed_configs
from flashgen.search.decide import TIE
from flashgen.search.log import outcomes_of
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import workload
from flashgen.table.emit import is_stale
from flashgen.table.entry import Entry
from flashgen.table.evidence import missing
from flashgen.table.table import Table
from flashgen.tune.transfer import neighbours

RIVALS, FAILURES = 5, 2
"""Configs of the log that are named; so many of them that failed, where others are left."""

SAME = 0.0005
"""Times nearer to each other than this print as the same."""

FAILED: dict[Status, str] = {
    Status.ILLEGAL: "is illegal",
    Status.COMPILE_ERROR: "does not compile",
    Status.COMPILE_CRASH: "crashes the compiler",
    Status.TIMEOUT: "ran past its time limit",
    Status.OUT_OF_RESOURCES: "does not fit",
    Status.SPILLS: "spills",
    Status.SERIALIZED: "has its matrix instructions serialized",
    Status.NO_OVERLAP: "does not overlap",
    Status.WRONG: "is wrong",
    Status.RUN_ERROR: "failed when it ran",
    Status.CRASHED: "crashed when it ran",
    Status.KILLED: "was killed from outside",
    Status.QUARANTINED: "is in quarantine",
    Status.UNSTEADY: "was never timed at a steady clock",
}
"""What keeps a config from being chosen; the outcome's detail says more."""


def history_of(log: Path, table: Table, entry: Entry) -> tuple[SearchHistory, list[str]]:
    """The search of an entry of `table` from a log, and sentences on what is missing."""
    notes: list[str] = []
    outcomes: list[Outcome] = []
    if not log.exists():
        notes.append(f"rivals are not known: there is no log {log}")
    else:
        try:
            outcomes = outcomes_of(log, notes.append)
        except FlashgenError as error:
            notes.append(f"rivals are not known: {error}")
    history = Searches(outcomes).of(entry, table.run_of(entry))
    if outcomes and not history.configs:
        notes.append(f"rivals are not known: {log} holds nothing of this search")
    return history, notes


def rivals(history: SearchHistory, entry: Entry) -> list[KernelConfig]:
    """Up to RIVALS configs to name: the fastest after winner and runners-up, and a few failures.

    For each kind of failure, the config that has most in common with the winner.
    """
    named = {entry.config, *(other.config for other in entry.evidence.runners_up)}
    others = [config for config in history.configs if config not in named]
    times = {c: t for c in others if (t := history.last_timing(c)) and not history.failure(c)}
    fastest = sorted(times, key=lambda config: times[config].median_us)
    kinds: dict[Status, KernelConfig] = {}
    for config in sorted(others, key=lambda config: _differences(config, entry.config)):
        failed = history.failure(config)
        if failed is not None:
            kinds.setdefault(failed.status, config)
    failures = list(kinds.values())
    room = RIVALS - min(FAILURES, len(failures))
    chosen = fastest[:room] + failures
    return (chosen + fastest[room:])[:RIVALS]


def _differences(one: KernelConfig, other: KernelConfig) -> int:
    names = [field.name for field in fields(KernelConfig)]
    return sum(getattr(one, name) != getattr(other, name) for name in names)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A config that lost: its time and the winner's, from the same stage if the log has both.

    within_spread: its samples reach down to the winner's.
    """

    config: KernelConfig
    us: float | None
    winner_us: float | None
    within_spread: bool = False

    @property
    def slower(self) -> float | None:
        """How much slower it is than the winner: 0.04 is 4 %; negative if it is faster."""
        return self.us / self.winner_us - 1 if self.us and self.winner_us else None


def loss_of(
    config: KernelConfig, entry: Entry, history: SearchHistory, table_us: float | None = None
) -> Loss:
    """How a config's time compares; table_us is its time in the table, if it is a runner-up."""
    for stage in TIMED_STAGES:
        mine, best = history.timing(config, stage), history.timing(entry.config, stage)
        if mine and best:
            return Loss(
                config=config,
                us=mine.median_us,
                winner_us=best.median_us,
                within_spread=mine.low_us <= best.high_us,
            )
    last = history.last_timing(config)
    us = table_us if table_us is not None or last is None else last.median_us
    return Loss(config=config, us=us, winner_us=entry.result.median_us)


def why_lost(
    loss: Loss, entry: Entry, history: SearchHistory, neighbours: tuple[KernelConfig, ...] | None
) -> str:
    """Why a config was not chosen, in a few words.

    neighbours: configs of the entries that search/decide.py counts in a tie; None if the entry was
    chosen before ties were broken that way.
    """
    failed = history.failure(loss.config)
    if failed is not None:
        return (
            f"{FAILED[failed.status]}: {failed.detail}" if failed.detail else FAILED[failed.status]
        )
    slower = loss.slower
    if slower is None:
        return "not timed, and later by rule"
    words = f"{slower:.1%} slower" if slower >= 0 else f"{-slower:.1%} faster"
    if abs(slower) < SAME:
        words = "as fast"
    twin = history.twin_failure(entry.spec, loss.config)
    if twin is not None and slower < TIE - 1:
        return f"{words}, but its pointer twin {FAILED[twin.status]}"
    if entry.result.source == "measured":
        if slower < 0:
            return f"{words}, but not beyond the spread of what it had to beat"
        return words + (", within the spread" if loss.within_spread else "")
    assert loss.us is not None  # or slower would be None
    tied = loss.us <= TIE * min(history.least_us(), loss.winner_us or loss.us)
    if tied and neighbours is not None:
        return f"{words}, a tie: {_why_tie_broken(loss.config, entry, history, neighbours)}"
    return words


def _why_tie_broken(
    config: KernelConfig, entry: Entry, history: SearchHistory, neighbours: tuple[KernelConfig, ...]
) -> str:
    """Why the winner was preferred among equal estimates, by the rule of search/decide.py."""
    if history.fact(config, "spill_bytes") and not history.fact(entry.config, "spill_bytes"):
        return "the winner spills nothing"
    ours, theirs = neighbours.count(entry.config.kernel), neighbours.count(config.kernel)
    if ours > theirs:
        return f"{ours} neighbours share the winner's config, {theirs} this one"
    registers = history.fact(config, "registers")
    taken = entry.evidence.registers
    if ours == theirs and registers is not None and taken is not None and registers > taken:
        return f"the winner has fewer registers, {taken}, not {registers}"
    return "the winner was preferred as the more robust"


WORTH_SAYING = 0.05
"""Shares of two kernels that differ by less are not set against each other."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A call to explain: its spec and keys, the GPU it is served as, the folder of the tables.

    compiled: whether to compile the kernel and those that lost, and to read the log of the search.
    """

    spec: AttentionSpec
    seq: int
    gpu: Gpu
    out: Path
    compiled: bool = False


def explanation(
    question: Question, found: Ladder, folder: Path, table: Table | None
) -> Iterator[str]:
    """Lines, indented by what they belong to, as they become known: compiling takes seconds.

    table is that of the GPU whose entry was found, if there is one, with its evidence.
    """
    choice = found.rungs[0].choice
    entry = (
        table.find(choice.spec, choice.bucket, choice.config) if table and choice.bucket else None
    )
    yield from _served(question, found, folder, entry)
    # An entry is explained on the GPU that it was timed on: a relative's, where that serves.
    gpu = table.gpu if table and entry else question.gpu
    if not question.compiled:
        yield ""
        yield from _indented(_recorded(table, entry, gpu))
        return
    problem = entry.problem if entry else workload(choice.spec, max(1, question.seq))
    with _cache(question.out) as cache:
        yield ""
        whole = dissect(choice.spec, choice.config, problem, gpu, cache)
        yield from _indented(_figures(whole, entry, gpu))
        if entry is not None:
            yield from _indented(_specialized(entry, gpu, cache))
        if table is not None and entry is not None:
            yield ""
            yield from _indented(_others(question.out, table, entry, whole, cache))


def _served(question: Question, found: Ladder, folder: Path, entry: Entry | None) -> Iterator[str]:
    """Which kernel, on which rung, by which evidence; and what was passed over."""
    first = found.rungs[0]
    choice = first.choice
    timing = "" if choice.median_us is None else f", {choice.median_us:.1f} us"
    if timing and entry is not None:
        ran = entry.problem
        timing += f" at batch {ran.batch}, heads {ran.heads}, seq {ran.seq_k} on {first.slug}"
    lies = f"from {folder / 'tables' / f'{first.slug}.py'}"
    if not choice.is_entry:
        lies = "its text is rendered by the first call"
    elif entry is not None and is_stale(entry):
        timing += ", stale"
    yield f"{question.spec.name} on {question.gpu.slug}: {choice.kernel}"
    yield f"  {first.rung}: {first.reason}"
    yield f"  {choice.source}{timing}; {lies}"
    if choice.source == "untimed" and choice.tritons:
        yield (
            "  counted, not timed: it takes fewer cycles a score than the entry in whose place it "
            "serves, on the pipe that bounds it, or as many and fewer to issue"
        )
    elif entry is not None and entry.result.source == "untimed":
        yield (
            "  chosen by rule, not by time: right, no spills in a loop, then the fewest cycles a "
            "score takes on the pipe that bounds it"
        )
    if choice.config.executed and choice.source != "measured":
        by = f" {', '.join(choice.tritons)}" if choice.tritons else ""
        yield f"  Gluon: what Triton{by} compiles was executed on a CPU, and not yet timed on a GPU"
        others = (rung.choice for rung in found.rungs[1:])
        plain = next((each.kernel for each in others if not each.config.executed), "no kernel")
        yield f"  FLASHGEN_PLAIN=1 runs {plain} instead"
    yield from (f"  skipped {sentence}" for sentence in found.skipped)


def _recorded(table: Table | None, entry: Entry | None, gpu: Gpu) -> Iterator[str]:
    """What table and evidence say of an entry: its interval, what it takes, and its runners-up."""
    if table is None or entry is None:
        yield "no entry says what it takes: --compile does"
        return
    low, high = entry.evidence.low_us, entry.evidence.high_us
    if low is not None and high is not None:
        measured = entry.result.source == "measured"
        what = "20th to 80th percentile" if measured else "interval of the estimate"
        yield f"{what} {low:.1f} to {high:.1f} us"
    if entry.result.speedup is not None:
        yield f"{entry.result.speedup:.2f} times as fast as the default tile"
    yield from _taken(entry, gpu)
    yield from missing([entry])
    yield from _losers(table, entry, SearchHistory(()), ())
    yield "--compile says what limits each kernel, and names rivals of the log"


def _figures(whole: Anatomy, entry: Entry | None, gpu: Gpu) -> Iterator[str]:
    """What a kernel takes and what limits it; by the entry's figures if it cannot be compiled."""
    yield from kernel_limits.describe(whole)
    if whole.compiled is not None:
        made = whole.compiled
        yield from kernel_limits.occupancy(
            made.registers, made.shared_bytes, made.num_warps, gpu, spill_bytes=made.spill_bytes
        )
    elif entry is not None:
        yield from _taken(entry, gpu)


def _taken(entry: Entry, gpu: Gpu) -> Iterator[str]:
    """What the kernel of an entry takes of an SM, where its evidence says so."""
    registers, shared = entry.evidence.registers, entry.evidence.shared_bytes
    if registers is not None and shared is not None:
        warps = entry.config.block_warps(entry.spec)
        yield from kernel_limits.occupancy(registers, shared, warps, gpu)


def _others(out: Path, table: Table, entry: Entry, whole: Anatomy, cache: Path) -> Iterator[str]:
    """Each runner-up of an entry and each rival of its log, and below it why it lost."""
    history, notes = history_of(paths.log_file(out, table.gpu.slug), table, entry)

    def compared(config: KernelConfig) -> Iterator[str]:
        its = dissect(entry.spec, config, entry.problem, table.gpu, cache)
        return _compared(its, whole)

    yield from _losers(table, entry, history, rivals(history, entry), compared)
    if history.configs:
        yield f"its log has {history.tally()}"
    yield from notes


def _specialized(entry: Entry, gpu: Gpu, cache: Path) -> Iterator[str]:
    """What the model says of a schedule in Gluon, which a search without a GPU leaves out."""
    if entry.result.source == "measured" or entry.tritons:
        return
    seeds = seed_configs(entry.spec, gpu, on_gpu=True)
    config = next((each for each in seeds if each.specialized), None)
    if config is None:
        return
    its = dissect(entry.spec, config, entry.problem, gpu, cache)
    yield f"not a candidate without a GPU: {config.label}"
    if its.estimate is None:
        yield f"  no estimate: {its.unknown}"
        return
    low, high = its.estimate.low_us, its.estimate.high_us
    yield f"  the estimator gives it {its.estimate.median_us:.1f} us (band {low:.1f} to {high:.1f})"


def _losers(
    table: Table,
    entry: Entry,
    history: SearchHistory,
    others: Sequence[KernelConfig],
    compared: Callable[[KernelConfig], Iterable[str]] = lambda _: (),
) -> Iterator[str]:
    """Each runner-up of an entry and each of the others, and below it why it lost; compared says
    more of one that was timed.
    """
    alike = None
    run = table.run_of(entry)
    if entry.result.source == "estimated" and run and run.protocol != PROTOCOL:
        command = f"flashgen tune --target {table.gpu.slug} --restate"
        yield f"(the table's estimates are of an older model: {command})"
    else:
        alike = neighbours(table, entry.spec, entry.bucket)
    held = {other.config: other for other in entry.evidence.fastest_first}
    for config in (*held, *others):
        other = held.get(config)
        yield f"{'runner-up' if other else 'rival'}: {config.label}"
        loss = loss_of(config, entry, history, other.median_us if other else None)
        reason = why_lost(loss, entry, history, alike)
        if history.failure(config) is not None:
            yield f"  {reason}"
            continue
        source = other.source if other else entry.result.source
        time = "" if loss.us is None else f", {loss.us:.1f} us"
        more = compared(config) if loss.slower is not None else ()
        yield "  " + "; ".join((f"{source}{time}: {reason}", *more))


def _compared(its: Anatomy, winner: Anatomy) -> Iterator[str]:
    """What limits a kernel, and where it stands apart from the winner."""
    if its.usage is None or winner.usage is None or not its.replay or not winner.replay:
        return
    names, share = kernel_limits.limits(its.usage)
    yield f"limited by {names}, {share:.0%}"
    for what, mine, best in (
        ("matrix busy", its.usage.matrix, winner.usage.matrix),
        ("exp2 overlapped", its.exp2_under_matrix, winner.exp2_under_matrix),
    ):
        if mine is not None and best is not None and abs(mine - best) >= WORTH_SAYING:
            yield f"{what} {mine:.0%}, the winner's {best:.0%}"
    mine_blocks, best_blocks = its.replay.residents, winner.replay.residents
    if mine_blocks != best_blocks:
        yield f"{kernel_limits.count(mine_blocks)} an SM, the winner's {best_blocks}"


@contextlib.contextmanager
def _cache(out: Path) -> Iterator[Path]:
    """The compile cache of `out` if there is one, else a folder for this command alone."""
    kept = paths.state_dir(out) / "compiled"
    if kept.is_dir():
        yield kept
        return
    with temporary_folder("explain") as folder:
        yield folder


def _indented(lines: Iterator[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)
