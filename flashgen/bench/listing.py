"""Output of a bench: the lines of a case, all cases as Markdown, flashgen against its best peer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from flashgen.bench.case import BenchCase
from flashgen.bench.race import RaceResult
from flashgen.bench.record import Measured

PEERS = ("SDPA flash", "SDPA cuDNN", "SDPA")
"""Torch's own fastest: the goal is relative to it."""

LONG = 4096
"""Keys from which the goal holds."""


def case_lines(case: BenchCase, lines: Iterable[RaceResult]) -> Iterator[str]:
    """One table per case."""
    p = case.problem
    heads = f"{p.heads}" if p.heads == p.kv_heads else f"{p.heads}/{p.kv_heads}"
    yield f"\n{case.direction} {case.spec.name}  batch {p.batch}, heads {heads}, {p.seq_k} keys"
    lines = list(lines)
    width = max(28, *(len(line.name) + 2 for line in lines), 0)
    for line in lines:
        name = f"{line.name:{width}}"
        floors = "" if line.floors is None else f"{line.floors:.2f} floors"
        if line.timing is None:
            yield f"  {name}{line.status:12}{floors:>12}  {line.detail}"
            continue
        t = line.timing
        band = f"({t.low_us:.1f} to {t.high_us:.1f})"
        share = "" if line.share is None else f"{line.share:.0%}"
        wrong = "" if line.status == "ok" else f" {line.status.upper()}"
        figures = f"{t.median_us:10.1f} us  {band:22}{_rate(line):>14}{share:>6}"
        yield f"  {name}{figures}{floors:>14}{wrong}  {line.detail}"


def _rate(line: RaceResult) -> str:
    if line.gbs is not None:
        return f"{line.gbs:.0f} GB/s"
    return "" if line.tflops is None else f"{line.tflops:.1f} TFLOP/s"


def markdown(cases: Iterable[Measured], head: Iterable[str]) -> str:
    """All cases: a table per direction, head dim, mask and batch of decode; a row per contender,
    a column per length. Times of a contender beyond the accepted floors are struck through.
    """
    groups: dict[str, list[Measured]] = {}
    for case in cases:
        groups.setdefault(_title(case), []).append(case)
    out = ["# flashgen bench", "", *head, ""]
    for title, members in groups.items():
        members.sort(key=lambda case: int(case.problem["seq_k"]))
        names = list(dict.fromkeys(line.name for case in members for line in case.lines))
        unit = "GB/s" if members[0].direction == "decode" else "TFLOP/s"
        seqs = [str(case.problem["seq_k"]) for case in members]
        out += [f"## {title}", "", f"{unit} (floors), by keys", ""]
        out += [f"| contender | {' | '.join(seqs)} |", f"|---|{'---:|' * len(seqs)}"]
        for name in names:
            cells = [_cell(_of(case, name)) for case in members]
            out.append(f"| {name} | {' | '.join(cells)} |")
        out += ["", *_kernels_of_steps(members)]
    return "\n".join(out)


def _kernels_of_steps(cases: Iterable[Measured]) -> Iterator[str]:
    """Which kernel each step of the ladder ran, and an empty line."""
    steps = [
        f"- {line.name}, {case.problem['seq_k']} keys: {line.detail}"
        for case in cases
        for line in case.lines
        if line.name.startswith("ladder") and line.detail
    ]
    yield from (*steps, "") if steps else ()


def _title(case: Measured) -> str:
    spec = case.spec
    last = "causal" if spec["mask"] == "causal" else "no mask"
    if case.direction == "decode":
        last = f"batch {case.problem['batch']}"
    return f"{case.direction}, {spec['dtype']}, head dim {spec['head_dim']}, {last}"


def _of(case: Measured, name: str) -> RaceResult | None:
    return next((line for line in case.lines if line.name == name), None)


def _cell(line: RaceResult | None) -> str:
    if line is None:
        return "-"
    floors = "" if line.floors is None else f" ({line.floors:.2f})"
    if line.rate is None:
        return f"{line.status}{floors}"
    return f"{line.rate:.0f}{floors}" if line.status == "ok" else f"~~{line.rate:.0f}~~{floors}"


def summaries(cases: Iterable[Measured]) -> Iterator[str]:
    """For each direction, flashgen over the best correct one of PEERS at LONG keys and more: the
    least ratio, and the geometric mean.
    """
    ratios: dict[str, dict[str, float]] = {}
    for case in cases:
        ours = _of(case, "flashgen")
        peers = [
            line.timing.median_us
            for line in case.lines
            if line.name in PEERS and line.status == "ok" and line.timing
        ]
        if not (ours and ours.timing and ours.status == "ok" and peers):
            continue
        if case.problem["seq_k"] >= LONG:
            mine = ratios.setdefault(case.direction, {})
            mine[case.key] = min(peers) / ours.timing.median_us
    for direction, mine in ratios.items():
        mean = math.exp(sum(map(math.log, mine.values())) / len(mine))
        worst = min(mine, key=lambda key: mine[key])
        yield (
            f"{direction}: flashgen over the best of {', '.join(PEERS[:2])} from {LONG} keys: "
            f"{mean:.2f} in geometric mean of {len(mine)}, least {mine[worst]:.2f} ({worst})"
        )
