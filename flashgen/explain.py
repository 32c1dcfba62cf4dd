"""Explain: which kernel would serve a call, from where, what limits it, and why no other does."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flashgen import anatomy, paths
from flashgen.anatomy import Anatomy, dissect
from flashgen.config import KernelConfig
from flashgen.entry import Entry
from flashgen.estimate import PROTOCOL
from flashgen.gpu import Gpu
from flashgen.neighbours import neighbours
from flashgen.problem import workload
from flashgen.rivals import history_of, loss_of, rivals, why_lost
from flashgen.runtime.select import Ladder
from flashgen.show import Package
from flashgen.spec import AttentionSpec
from flashgen.table import Table

WORTH_SAYING = 0.05
"""Shares of two kernels that differ by less are not set against each other."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A call to explain: its spec and keys, the GPU it is served as, the folder of the tables."""

    spec: AttentionSpec
    seq: int
    gpu: Gpu
    out: Path


def explanation(
    asked: Question, found: Ladder, package: Package, table: Table | None
) -> Iterator[str]:
    """Lines, indented by what they belong to, as they become known: compiling takes seconds.

    table is that of the GPU whose entry was found, if there is one.
    """
    choice = found.rungs[0].choice
    entry = table.find(choice.spec, choice.bucket) if table and choice.bucket else None
    yield from _served(asked, found, package, entry)
    # An entry is explained on the GPU that it was timed on: a relative's, where that serves.
    gpu = table.gpu if table and entry else asked.gpu
    problem = entry.result.problem if entry else workload(choice.spec, max(1, asked.seq))
    with _cache(asked.out) as cache:
        yield ""
        whole = dissect(choice.spec, choice.config, problem, gpu, cache)
        yield from _indented(_figures(whole, entry, choice.config, gpu))
        if table is not None and entry is not None:
            yield ""
            yield from _indented(_others(asked.out, table, entry, whole, cache))


def _served(asked: Question, found: Ladder, package: Package, entry: Entry | None) -> Iterator[str]:
    """Which kernel, on which rung, by which evidence; and what was passed over."""
    first = found.rungs[0]
    choice = first.choice
    timing = "" if choice.median_us is None else f", {choice.median_us:.1f} us"
    if timing and entry is not None:
        ran = entry.result.problem
        timing += f" at batch {ran.batch}, heads {ran.heads}, seq {ran.seq_k} on {first.slug}"
    lies = f"from {package.folder / ('defaults.py' if first.rung == 'default' else 'table.py')}"
    if first.rung == "rendered":
        lies = "its text is written to the user's cache by the first call"
    elif package.is_stale(choice):
        timing += ", stale"
    yield f"{asked.spec.name} on {asked.gpu.slug}: {choice.kernel}"
    yield f"  {first.rung}: {first.reason}"
    yield f"  {choice.source}{timing}; {lies}"
    if entry is not None and entry.result.source == "untimed":
        yield (
            "  chosen by rule, not by time: the first in the order of the seeds that is legal, "
            "spills nothing in its loops and is right"
        )
    yield from (f"  skipped {sentence}" for sentence in found.skipped)


def _figures(whole: Anatomy, entry: Entry | None, config: KernelConfig, gpu: Gpu) -> Iterator[str]:
    """What a kernel takes and what limits it; by the entry's figures if it cannot be compiled."""
    yield from anatomy.describe(whole)
    if whole.compiled is not None:
        made = whole.compiled
        yield from anatomy.occupancy(
            made.registers, made.shared_bytes, config.block_warps, gpu, spill_bytes=made.spill_bytes
        )
    elif entry is not None:
        yield from anatomy.occupancy(entry.registers, entry.shared_bytes, config.block_warps, gpu)


def _others(out: Path, table: Table, entry: Entry, whole: Anatomy, cache: Path) -> Iterator[str]:
    """Each runner-up of an entry and each rival of its log, and below it why it lost."""
    history, notes = history_of(paths.log_file(out, table.gpu.slug), table, entry)
    alike = None
    if entry.result.source == "estimated" and table.run_of(entry).protocol != PROTOCOL:
        yield "(the table's estimates are of an older model: tune again)"
    else:
        alike = neighbours(table, entry.spec, entry.bucket)
    held = {other.config: other for other in entry.runners_up}
    for config in (*held, *rivals(history, entry)):
        other = held.get(config)
        yield f"{'runner-up' if other else 'rival'}: {config.label}"
        loss = loss_of(config, entry, history, other.median_us if other else None)
        reason = why_lost(loss, entry, history, alike)
        if history.failure(config) is not None:
            yield f"  {reason}"
            continue
        source = other.source if other else entry.result.source
        time = "" if loss.us is None else f", {loss.us:.1f} us"
        its = Anatomy()
        if loss.slower is not None:
            its = dissect(entry.spec, config, entry.result.problem, table.gpu, cache)
        yield "  " + "; ".join((f"{source}{time}: {reason}", *_compared(its, whole)))
    if history.configs:
        yield f"its log has {history.tally()}"
    yield from notes


def _compared(its: Anatomy, winner: Anatomy) -> Iterator[str]:
    """What limits a kernel, and where it stands apart from the winner."""
    if its.usage is None or winner.usage is None or not its.replay or not winner.replay:
        return
    names, share = anatomy.limits(its.usage)
    yield f"limited by {names}, {share:.0%}"
    for what, mine, best in (
        ("matrix busy", its.usage.matrix, winner.usage.matrix),
        ("exp2 under wgmma", its.exp2_under_matrix, winner.exp2_under_matrix),
    ):
        if mine is not None and best is not None and abs(mine - best) >= WORTH_SAYING:
            yield f"{what} {mine:.0%}, the winner's {best:.0%}"
    mine_blocks, best_blocks = its.replay.residents, winner.replay.residents
    if mine_blocks != best_blocks:
        yield f"{anatomy.count(mine_blocks)} an SM, the winner's {best_blocks}"


@contextlib.contextmanager
def _cache(out: Path) -> Iterator[Path]:
    """The compile cache of `out` if there is one, else a folder for this command alone."""
    kept = paths.state_dir(out) / "compiled"
    if kept.is_dir():
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="flashgen-explain-") as folder:
        yield Path(folder)


def _indented(lines: Iterator[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)
