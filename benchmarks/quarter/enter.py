"""Enter what gpu_quarter.py measured: the table of the GPU, and benchmarks/results/<slug>/.

A table takes what the rounds decide, by the rule of the final round: times of one round alone
compare. The folder gets the lines, quarter.json as flashgen bench has it, a page and measured.svg.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from benchmarks.quarter.lines import Line, outcomes_of, page, read
from flashgen import paths
from flashgen.bench.listing import markdown
from flashgen.bench.record import SCHEMA, Measured
from flashgen.errors import FlashgenError
from flashgen.evaluate.gpu_state import Conditions
from flashgen.report.charts import BEST, COLOURS, WIDTH, standalone, svg
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.outcome import CheckResult, Outcome
from flashgen.schedules.space import legal_configs, tuned_default
from flashgen.search.decide import by_loss, choose, p_value
from flashgen.search.goal import RUNNERS_UP
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import BUCKET_SEQ, bucket_of, workload
from flashgen.spec.records import record_of
from flashgen.table import emit
from flashgen.table.entry import EntryEvidence, Run
from flashgen.table.table import Table
from flashgen.table.table_file import save
from flashgen.tune.progress import entry_with, runner_up_of
from flashgen.tune.run_files import held_table, with_conditions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BARS = {
    "flashgen, schedule hopper": (
        BEST, "ladder: hopper", "ladder: hopper, grouped", "ladder: pair: hopper",
        "ladder: ds: hopper", "ladder: two: hopper",  # which is the pair in the record of 2026
    ),
    "the same, fused": (COLOURS[5], "ladder: fused: hopper"),
    "flashgen, plain kernels": (COLOURS[5], "flashgen"),
    "cuDNN (torch)": (COLOURS[6], "SDPA cuDNN"),
    "FlexAttention (torch)": (COLOURS[6], "FlexAttention"),
    "FlashAttention-2 (torch)": (COLOURS[6], "SDPA flash"),
}  # fmt: skip
"""The bars of a panel of the picture, with their colours, each the fastest of these contenders. The
fused backward adds to dQ in no fixed order, so the tables leave it out.
"""
KEYS = 8192
"""The number of keys of the picture's cases."""


def rates(case: Mapping[str, Any]) -> dict[str, float]:
    """TFLOP/s by bar, of those that were right and measured."""
    measured = {
        line["name"]: line["tflops"]
        for line in case["lines"]
        if line["status"] == "ok" and line["tflops"]
    }
    return {
        bar: max(measured[name] for name in names if name in measured)
        for bar, (_, *names) in BARS.items()
        if not measured.keys().isdisjoint(names)
    }


def drawn(case: Mapping[str, Any]) -> bool:
    """Whether the picture has a case: a decode is bound by bytes, and has no TFLOP/s to compare."""
    shown = case["direction"] != "decode" and case["problem"]["seq_k"] == KEYS
    return shown and bool(rates(case))


def draw(cases: Sequence[Mapping[str, Any]], run: Mapping[str, Any], file: Path) -> None:
    """Write the picture, an SVG: a panel for each case, in TFLOP/s, below each other."""
    label = (
        f"TFLOP/s at {KEYS:,} keys, {run['dtype']}, {run['gpu']['name']}, {run['date'][:10]},\n"
        f"Triton {run['triton']}, torch {run['torch']}"
    )

    def panels(*found: Axes) -> None:
        most = max(rate for case in cases for rate in rates(case).values())
        for axes, case in zip(found, cases, strict=True):
            held = rates(case)
            colours = [BARS[name][0] for name in held]
            bars = axes.barh(list(held), list(held.values()), color=colours)
            axes.bar_label(bars, fmt="%.0f", padding=3)
            spec = case["spec"]
            mask = "causal" if spec["mask"] == "causal" else "no mask"
            title = f"{case['direction']}, head dim {spec['head_dim']}, {mask}"
            axes.set_title(title, fontsize="medium", loc="left")
            axes.set(xlim=(0, 1.12 * most), ylim=(len(held) - 0.5, -0.5), xticks=[])
            axes.tick_params(length=0)
            axes.grid(visible=False)
            axes.spines[:].set_visible(False)
        figure = found[0].get_figure()
        assert figure is not None
        figure.supxlabel(label, fontsize="medium")

    chart = svg(panels, label, (WIDTH, 30 + 82 * len(cases)), count=len(cases))
    file.write_text(standalone(chart))


def enter(files: Sequence[Path], out: Path) -> int:
    """Enter the lines of one GPU. Raises FlashgenError for those of several, or of a tiny run."""
    lines = [line for file in files for line in read(file)]
    abouts = [line for line in lines if line["kind"] == "about"]
    kinds = {(str(each["gpu"]), each["triton"], each["torch"], each["tiny"]) for each in abouts}
    if len(kinds) != 1 or abouts[0]["tiny"] or abouts[0]["gpu"] is None:
        raise FlashgenError(
            f"the lines must be measured, of one GPU, torch and Triton: got {len(kinds)} kinds, "
            f"{sum(each['tiny'] for each in abouts)} tiny runs"
        )
    about, gpu = abouts[0], record_of(Gpu, abouts[0]["gpu"])
    table = held_table(out, gpu)
    made = entered(table, lines, about)
    save(made, paths.table_file(out, gpu.slug))
    emit.write(emit.tables_for(out), paths.generated_dir(out))
    folder = out / "benchmarks" / "results" / gpu.slug
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    (folder / "quarter.jsonl.gz").write_bytes(gzip.compress(text, mtime=0))
    cases = [line["case"] for line in lines if "case" in line]
    run = {name: value for name, value in about.items() if name not in ("kind", "tiny", "run")}
    record = {"benchmark": "flashgen bench", "schema": SCHEMA, "runs": [run], "struck": []}
    record["cases"] = cases
    (folder / "quarter.json").write_text(json.dumps(record, indent=1) + "\n")
    versions = f"torch {about['torch']}, Triton {about['triton']}"
    first = f"{about['date'][:10]}, {versions}, measured by `benchmarks/gpu_quarter.py`."
    head = [first, "", "```text", *page(lines), "```"]
    found = [record_of(Measured, case) for case in cases]
    (folder / "quarter.md").write_text(markdown(found, head).replace("flashgen bench", gpu.name, 1))
    if shown := [case for case in cases if drawn(case)]:
        draw(shown, run, folder / "measured.svg")
    changed = sum(entry not in table.entries for entry in made.entries)
    print(f"{changed} entries are new in {paths.table_file(out, gpu.slug)}; see {folder}")
    print("The picture, pages and README state what was measured before: state what is now.")
    return 0


def entered(table: Table, lines: Sequence[Line], about: Line) -> Table:
    """The table with what one round of each spec and bucket decides: rather one at the length that
    tuning times, rather one with all samples, rather the last.
    """
    found = outcomes_of(lines)
    checks = {(o.spec, o.config.kernel): o.check for o in found if o.stage == "check" and o.ok}
    wrong = {(o.spec, o.config.kernel) for o in found if o.stage == "check" and not o.ok}
    day = datetime.fromisoformat(about["date"])
    run = Run(
        id=f"{day:%Y%m%dT%H%M%SZ}-measured",
        source="measured",
        **{name: about[name] for name in ("flashgen", "triton", "torch", "cuda", "protocol")},
    )
    states = [Conditions(**line["conditions"]) for line in lines if line.get("conditions")]
    run = with_conditions(run, SimpleNamespace(conditions=states[-1] if states else None))
    last: dict[Any, tuple[tuple[bool, bool], list[Outcome]]] = {}
    for line in lines:
        finals = [o for o in outcomes_of([line]) if o.stage == "final" and o.ok]
        finals = [o for o in finals if (o.spec, o.config.kernel) not in wrong]
        if not finals:
            continue
        spec, problem = finals[0].spec, finals[0].problem
        bucket = bucket_of(problem.seq_k)
        rank = problem.seq_k == BUCKET_SEQ[bucket], "full" in line["key"]
        as_tuned = spec.varlen or problem == workload(spec, problem.seq_k)
        if as_tuned and rank >= last.get((spec, bucket), (rank, []))[0]:
            last[spec, bucket] = rank, finals
    for _, finals in last.values():
        table = decided(table, finals, checks, run)
    return table


def decided(
    table: Table, finals: Sequence[Outcome], checks: Mapping[Any, CheckResult | None], run: Run
) -> Table:
    """The table after one round, which changes nothing where a measured entry stays."""
    spec, problem, gpu = finals[0].spec, finals[0].problem, table.gpu
    key = (spec, bucket_of(problem.seq_k))
    held = table.serving(*key, run.triton)
    default = tuned_default(spec, gpu)
    order = by_loss(finals)
    timed = {each.config: each for each in order}
    rivals = [timed[c] for c in dict.fromkeys((held and held.config, default)) if c in timed]
    winner = choose(order, rivals)
    if winner is None or why_illegal(spec, winner.config, gpu) or default not in timed:
        return table
    if held and held.config == winner.config and held.result.source == "measured":
        return table
    check = checks.get((spec, winner.config.kernel))
    if check is None:
        print(f"{spec.name} {problem.label}: {winner.config.label} won, and was not compared there")
        return table
    evidence = EntryEvidence(
        problem=problem,
        candidates=len(finals),
        legal=len(legal_configs(spec, gpu, on_gpu=True)),
        p_value=p_value(winner, order, rivals),
        runners_up=tuple(runner_up_of(o) for o in order if o is not winner)[:RUNNERS_UP],
    )
    made = entry_with(spec, evidence, replace(winner, check=check), timed[default], run.id)
    return table.with_entry(made, run)
