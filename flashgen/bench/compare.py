"""Whether flashgen is faster than SDPA and flash_attn for what a user runs: `flashgen compare`.

    searches of a model, a workload or specs -> cases -> judged and raced as by bench -> one table

Without a GPU the times are those of its table: flashgen's, and SDPA's where the run that measured
the entry timed it too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from flashgen.bench.case import BenchCase, make_inputs
from flashgen.bench.contenders import dispatchers, flashgen_and_torch
from flashgen.bench.peers import peers
from flashgen.bench.race import RaceResult, run_case
from flashgen.bench.run import compiled_backward, on_device, place_of
from flashgen.evaluate.evaluator import triton_version
from flashgen.schedules.outcome import Timing
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem, bucket_of
from flashgen.table.table import Table
from flashgen.tune.workloads import WeightedPiece

GROUPS = ("flashgen", "sdpa", "flash-attn-2", "flash-attn-3", "flash-attn-4")
"""The contenders, by their word of `flashgen bench --contender`."""

Verdict = Literal["yes", "no", "unknown"]


@dataclass(frozen=True, kw_only=True)
class ComparedCase:
    """One case: the results of flashgen and of the others. note: why something is missing, or which
    kernel serves. weight: of its ratio in the mean.
    """

    title: str
    ours: RaceResult | None = None
    others: tuple[RaceResult, ...] = ()
    note: str = ""
    weight: float = 1.0

    def best(self, group: str) -> RaceResult | None:
        """The fastest right one of the others whose group begins so; else one without a time."""
        return _best([line for line in self.others if line.group.startswith(group)])

    @property
    def ratio(self) -> float | None:
        """The time of the best of the others over flashgen's; None if one of them is unknown."""
        us = min((_us(line) for line in self.others if line.status == "ok"), default=math.inf)
        mine = _us(self.ours) if self.ours and self.ours.status == "ok" else math.inf
        return us / mine if max(us, mine) < math.inf else None

    @property
    def faster(self) -> Verdict:
        """Whether flashgen is faster beyond noise: its 80th percentile below the other's 20th."""
        rivals = [line.timing for line in self.others if line.status == "ok" and line.timing]
        if not rivals or self.ours is None or (self.ours.status == "ok" and not self.ours.timing):
            return "unknown"
        best = min(rivals, key=lambda timing: timing.median_us)
        mine = self.ours.timing if self.ours.status == "ok" else None
        return "yes" if mine is not None and mine.high_us < best.low_us else "no"


def _us(line: RaceResult) -> float:
    return line.timing.median_us if line.timing else math.inf


def _best(lines: Sequence[RaceResult]) -> RaceResult | None:
    """The fastest right one; if none is right, the fastest."""
    right = [line for line in lines if line.status == "ok"]
    return min(right or lines, key=_us, default=None)


def cases_of(
    pieces: Iterable[WeightedPiece], *, smoke: bool
) -> tuple[dict[BenchCase, float], list[ComparedCase]]:
    """The cases of searches with their weights, most operations first, and rows for what cannot be
    compared. The kernels of a backward have one weight together, that of the heaviest.
    """
    found: dict[BenchCase, float] = {}
    left: list[ComparedCase] = []
    for piece in pieces:
        spec, problem = piece.spec, piece.problem
        if spec.direction == "backward_delta":  # it has no mask, and is part of every backward
            continue
        why = _why_not(spec)
        if why:
            left.append(ComparedCase(title=f"{spec.name}, {problem.seq_k} keys", note=why))
            continue
        case = _case(spec, problem)
        if smoke:
            group = case.problem.heads // case.problem.kv_heads
            queries = 1 if case.direction == "decode" else 33
            sizes = Problem(batch=1, heads=group, kv_heads=1, seq_q=queries, seq_k=33)
            case = replace(case, problem=sizes)
        found[case] = max(piece.weight, found.get(case, 0.0))
    return dict(sorted(found.items(), key=lambda pair: -pair[0].operations)), left


def _why_not(spec: AttentionSpec) -> str:
    """Why SDPA and flash_attn have nothing to compare with; "" where they have."""
    words = [*spec.feature_words, *spec.cache_options.replace("--", "").split()]
    if spec.precision != "ieee":
        words.append(spec.precision)
    return f"not compared: SDPA and flash_attn are called without {', '.join(words)}" * bool(words)


def _case(spec: AttentionSpec, problem: Problem) -> BenchCase:
    """The case of a search. All kernels of a backward are one, whose heads are not grouped: so
    many scores of a whole group would not fit beside the float64 reference.
    """
    if spec.direction == "decode":
        return BenchCase(direction="decode", spec=replace(spec, mask="none"), problem=problem)
    if spec.direction == "forward":
        return BenchCase(direction="forward", spec=spec, problem=problem)
    forward = spec.for_direction("forward")
    ungrouped = replace(problem, kv_heads=problem.heads)
    return BenchCase(direction="backward", spec=forward, problem=ungrouped)


def title_of(case: BenchCase) -> str:
    """What is compared, in the words of the options."""
    name = case.spec.name.split("_", 1)[1]
    return f"{case.direction} {name}, {_sizes(case.problem)}"


def _sizes(p: Problem) -> str:
    heads = f"{p.heads}" if p.heads == p.kv_heads else f"{p.heads}/{p.kv_heads}"
    return f"{p.seq_k} keys, {p.batch} x {heads} heads"


def compare(
    cases: Iterable[BenchCase],
    say: Callable[[str], object],
    *,
    index: int,
    seconds: float,
    smoke: bool = False,
) -> Iterator[ComparedCase]:
    """A row for each case as it becomes known, on the CUDA device of this index, or, for a smoke
    run, on the CPU without times. No case starts that would not end within `seconds`, judged by the
    longest before. Raises Spoiled.
    """
    began, longest = time.monotonic(), 0.0
    place, (tuned, untuned) = place_of(index, smoke=smoke), dispatchers()
    with torch.no_grad(), on_device(place), compiled_backward():
        for case in cases:
            spent = time.monotonic() - began
            if spent + longest > seconds:
                yield ComparedCase(title=title_of(case), note="not begun: the time is over")
                continue
            say(f"{spent:.0f} s: {title_of(case)}")
            everybody = (*flashgen_and_torch(case, tuned, untuned, smoke=smoke), *peers(case))
            contenders = [each for each in everybody if each.group in GROUPS]
            lines, _ = run_case(case, make_inputs(case, place.device), contenders, place)
            yield _row(case, lines)
            longest = max(longest, time.monotonic() - began - spent)


def _row(case: BenchCase, lines: Sequence[RaceResult]) -> ComparedCase:
    """The best of flashgen's own, of pages and of the whole cache, beside the others."""
    own = [line for line in lines if line.own]
    ours = _best(own)
    assert ours is not None  # flashgen serves every case
    others = tuple(line for line in lines if not line.own)
    where = [ours.name.removeprefix("flashgen, ")] * (ours.name != "flashgen")
    wrong = [f"{line.name} is {line.status}" for line in own if line.status == "wrong"]
    note = "; ".join(filter(None, (ours.detail, *where, *wrong)))
    return ComparedCase(title=title_of(case), ours=ours, others=others, note=note)


def of_table(cases: Iterable[BenchCase], table: Table) -> Iterator[ComparedCase]:
    """The same by what a table holds: nothing runs. The entry is the one that serves under this
    Triton. A table has one problem for each bucket: where another one was asked for, the row is of
    the table's, and its note says so.
    """
    for case in cases:
        key = case.spec, bucket_of(case.problem.seq_k)
        if case.direction == "backward":
            yield ComparedCase(
                title=title_of(case), note="a table has its kernels apart: see flashgen show"
            )
            continue
        held, entry = table.find(*key), table.serving(*key, triton_version())
        us = entry.result.median_us if entry else None
        if entry is None or us is None:
            yield ComparedCase(title=title_of(case), note=f"{table.gpu.slug} has no time of it")
            continue
        measured = entry.evidence
        sdpa_us = next(
            (e.evidence.sdpa_us for e in (entry, held) if e and e.evidence.sdpa_us), None
        )
        title = title_of(replace(case, problem=entry.problem))
        ours = _published("flashgen", us, measured.low_us or us, measured.high_us or us)
        notes = [f"{entry.config.label}, {entry.result.source}"]
        if entry.problem != case.problem:
            notes.append(f"the table's problem in place of {_sizes(case.problem)}")
        if measured.batches_us:
            notes.append("the mean of several batches")
        others: tuple[RaceResult, ...] = ()
        if sdpa_us is None:
            notes.append("no time of SDPA on this GPU is published")
        else:
            others = (_published("SDPA", sdpa_us, sdpa_us, sdpa_us),)
        yield ComparedCase(title=title, ours=ours, others=others, note="; ".join(notes))


def _published(name: str, us: float, low_us: float, high_us: float) -> RaceResult:
    timing = Timing(median_us=us, low_us=low_us, high_us=high_us, samples=1)
    return RaceResult(name=name, group=name.lower(), detail="", status="ok", timing=timing)


HEADINGS = ("what", "SDPA", "flash_attn", "flashgen", "ratio", "faster")


def lines(rows: Sequence[ComparedCase]) -> Iterator[str]:
    """The table, then what it says together. ratio: the best of the others over flashgen."""
    cells = [HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADINGS))]
    for number, row in enumerate(cells):
        told = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"{told}  {rows[number - 1].note if number else ''}".rstrip()
    verdicts = [row.faster for row in rows]
    ratios = [(row.weight, row.ratio) for row in rows if row.ratio is not None]
    if not ratios:
        yield "\nNo case has a time of both: whether flashgen is faster is not known."
        return
    logs = sum(weight * math.log(ratio) for weight, ratio in ratios)
    mean = math.exp(logs / sum(weight for weight, _ in ratios))
    equal = len({weight for weight, _ in ratios}) == 1
    counted = "each case counted once" if equal else "by the weights of the file"
    unknown = f", unknown in {verdicts.count('unknown')}" if "unknown" in verdicts else ""
    yield (
        f"\nflashgen is faster than the best of the others in {verdicts.count('yes')} of "
        f"{len(verdicts)} cases{unknown}: {mean:.2f} x in geometric mean, {counted}."
    )


def _cells(row: ComparedCase) -> tuple[str, ...]:
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f} x"
    sdpa, flash = row.best("sdpa"), row.best("flash-attn")
    return row.title, _cell(sdpa), _cell(flash), _cell(row.ours), ratio, row.faster


def _cell(line: RaceResult | None) -> str:
    if line is None:
        return "-"
    backend = line.name.removeprefix("SDPA").removeprefix("flash_attn").strip()
    named = f" {backend}" if backend and line.name != "flashgen" else ""
    if line.timing is None:
        return f"{line.status}{named}"
    wrong = "" if line.status == "ok" else f" {line.status.upper()}"
    return f"{line.timing.median_us:.1f} us{named}{wrong}"
