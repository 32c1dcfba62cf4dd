"""Tune: for each spec and length search, write the winner into the table; then emit the kernels."""

from __future__ import annotations

import importlib.metadata
import shlex
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

import flashgen
from flashgen import generate, paths
from flashgen.config import why_illegal
from flashgen.entry import Entry, Result, Run, RunnerUp
from flashgen.errors import FlashgenError, InvalidArgument, NoGpuError
from flashgen.estimate import estimable, require_estimator
from flashgen.evaluate import Evaluator, protocol_of, triton_version
from flashgen.evaluators.gpu import GpuEvaluator
from flashgen.evaluators.offline import OfflineEvaluator
from flashgen.gpu import Gpu, known_target
from flashgen.log import Log
from flashgen.measure import Conditions
from flashgen.neighbours import neighbours
from flashgen.outcome import STRENGTH, Outcome, Stage
from flashgen.search import search
from flashgen.search.goal import Budget, Found, Method, NothingRight, Progress, goal_for
from flashgen.session import Session
from flashgen.show import entries_grid
from flashgen.spec import SHORT_DTYPE, AttentionSpec, Problem, bucket_of, flops, workload
from flashgen.table import Table, dump, load, save

OFFLINE_TARGET = "nvidia_h200"
"""Tuned for where there is no GPU and none is named."""

DEFAULT_SEQ = 4096


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What `flashgen tune` was asked. Raises InvalidArgument.

    gpu: demand the GPU of this machine; target: tune offline for that slug; neither: a GPU if there
    is one. seqs: lengths to run, at most one a bucket. time_budget: seconds for all specs together.
    """

    specs: tuple[AttentionSpec, ...]
    seqs: tuple[int, ...] = (DEFAULT_SEQ,)
    gpu: bool = False
    target: str | None = None
    budget: Budget = field(default_factory=Budget)
    method: Method = field(default_factory=Method)
    out: Path = Path()
    improve_only: bool = False
    jobs: int | None = None

    def __post_init__(self) -> None:
        if self.gpu and self.target is not None:
            raise InvalidArgument("gpu and target exclude each other: name one of --gpu, --target")
        for number, seq in enumerate(self.seqs):
            for other in self.seqs[:number]:
                if bucket_of(seq) == bucket_of(other):
                    raise InvalidArgument(
                        f"seq must name at most one length a bucket: "
                        f"got {other} and {seq} of {bucket_of(seq)}"
                    )

    @property
    def work(self) -> tuple[tuple[AttentionSpec, Problem], ...]:
        """What is searched, in order."""
        specs = dict.fromkeys(self.specs)
        return tuple((spec, workload(spec, seq)) for spec in specs for seq in sorted(self.seqs))


def tune(options: TuneOptions, console: Console) -> Table:
    """Search all specs and lengths, write DIR/configs/<slug>.yaml and DIR/generated; return the
    table.

    The table is saved after each search, and every outcome is in the log, so an interrupt loses
    only what was in flight. Raises FlashgenError; at the end, too, where a spec had no right
    config.
    """
    gpu, measured = _choose_gpu(options, console)
    state, log_file = paths.state_dir(options.out), paths.log_file(options.out, gpu.slug)
    failures: list[str] = []
    with (
        Log(log_file, gpu=gpu.slug, triton=triton_version(), notice=console.print) as log,
        _evaluator(gpu, measured, state, options.jobs) as evaluator,
    ):
        story = _Story(options, console, log, evaluator)
        try:
            for spec, problem in story.searches():
                try:
                    story.search(spec, problem)
                except NothingRight as error:
                    failures.append(str(error))
                    console.print(str(error))
        except (KeyboardInterrupt, FlashgenError):
            story.emit_what_there_is()
            raise
        story.end()
    story.report()
    if failures:
        raise FlashgenError(
            f"{len(failures)} of {len(options.work)} searches found no right config: "
            f"{log_file} says what became of each; all other results are saved"
        )
    return story.table


class _Story:
    """One run of the tuner: the table it writes, and the bar it shows meanwhile.

    Searches see the table that the run found and what it has chosen since. The one that is written
    holds, after a kill, more already: what the same run chose before it was killed.
    """

    def __init__(
        self, options: TuneOptions, console: Console, log: Log, evaluator: Evaluator
    ) -> None:
        self.options = options
        self.console = console
        self.log = log
        self.evaluator = evaluator
        self.table = self._held = _held_table(options.out, evaluator.gpu)
        self.found: list[Entry] = []
        self._session = Session.begin(
            paths.session_file(options.out, evaluator.gpu.slug),
            request=_request(options, evaluator),
            run=_run(evaluator),
            table=self.table,
            notice=console.print,
        )
        self._walked = self._session.found
        self._run = self._session.run
        if self._session.resumed:
            console.print(f"Going on with the run begun {self._run.date}.")
        self._begun = time.monotonic()
        self._done = 0
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[stage]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            speed_estimate_period=600,
        )
        self._task = self._bar.add_task("", total=len(options.work), stage="")

    def searches(self) -> Iterator[tuple[AttentionSpec, Problem]]:
        """What is to be searched, with the progress bar on the screen."""
        with self._bar:
            for number, (spec, problem) in enumerate(self.options.work):
                self._done = number
                where = f"{number + 1}/{len(self.options.work)} {_title(spec, problem)}"
                self._bar.update(self._task, completed=number, description=where, stage="")
                yield spec, problem
            self._bar.update(self._task, completed=len(self.options.work), stage="done")

    def search(self, spec: AttentionSpec, problem: Problem) -> None:
        """Search one spec at one length; put what was found into the table, and save it."""
        gpu, bucket = self.evaluator.gpu, bucket_of(problem.seq_k)
        held = self._walked.find(spec, bucket)
        incumbent = held.config if held and why_illegal(spec, held.config, gpu) is None else None
        to_come = [(s, bucket_of(p.seq_k)) for s, p in self.options.work[self._done :]]
        alike = neighbours(self._walked, spec, bucket, leave_out=to_come)
        found = search(
            goal_for(spec, problem, gpu, incumbent, alike),
            self.evaluator,
            self.log,
            budget=self._budget(),
            method=self.options.method,
            notify=self._show,
        )
        self._run = _with_conditions(self._run, self.evaluator)
        entry = _entry(spec, problem, found, self._run.id)
        self.found.append(entry)
        self.console.print(_sentence(entry, found))
        stays = self._why_held_stays(held, entry, found)
        if stays:
            self.console.print(f"  the table's entry stays: {stays}")
            return
        self._walked = self._walked.with_entry(entry, self._run)
        self.table = self.table.with_entry(entry, self._run)
        save(self.table, paths.table_file(self.options.out, gpu.slug))

    def end(self) -> None:
        """All is searched: emit the kernels, and forget what a killed run would need."""
        self.emit()
        self._session.end()

    def emit(self) -> None:
        """Make DIR/generated say what the tables say."""
        folder = paths.generated_dir(self.options.out)
        generate.write(generate.tables_for(self.options.out), folder)

    def emit_what_there_is(self) -> None:
        """Emit after an error, if the table has changed; a second error does not hide the first."""
        try:
            if self.table != self._held:
                self.emit()
        except FlashgenError as error:
            self.console.print(f"generated/ is not what the table says, {error}")

    def report(self) -> None:
        """Print what was found, where it is, and what to try next."""
        out, slug = self.options.out, self.evaluator.gpu.slug
        elsewhere = "" if out == Path() else shlex.quote(str(out))
        option = elsewhere and f" --out {elsewhere}"
        there = elsewhere and f"cd {elsewhere} && "
        proof = "--gpu" if self.evaluator.source == "measured" else f"--target {slug}"
        self.console.print()
        self.console.print(entries_grid(self.found))
        self.console.print(
            f"\nWritten: {paths.table_file(out, slug)} and {paths.generated_dir(out)}. Try next:"
        )
        last = self.found[-1] if self.found else None
        if last is not None:
            self.console.print(f"  flashgen explain {_call(last)} --gpu-slug {slug}{option}")
        self.console.print(f"  flashgen verify {proof}{option}")
        self.console.print(
            f"  {there}python -c 'from generated.dispatcher import attention; help(attention)'"
        )

    def _budget(self) -> Budget:
        """The share of the time left that the present search may take."""
        budget = self.options.budget
        if budget.seconds is None:
            return budget
        left = max(0.0, budget.seconds - (time.monotonic() - self._begun))
        return replace(budget, seconds=left / (len(self.options.work) - self._done))

    def _show(self, progress: Progress) -> None:
        best = "" if progress.best_us is None else f", best {progress.best_us:.1f} us"
        self._bar.update(
            self._task,
            completed=self._done + progress.done / progress.total,
            stage=f"{progress.stage}{best}",
        )

    def _why_held_stays(self, held: Entry | None, entry: Entry, found: Found) -> str | None:
        """Why the new entry is not written, if it is not."""
        if held is None:
            return None
        old, new = held.result.source, entry.result.source
        if STRENGTH[new] < STRENGTH[old]:
            return f"it is {old}, and {new} never replaces that"
        if self.options.improve_only and not found.replaced and STRENGTH[new] == STRENGTH[old]:
            return "nothing beat it"
        if _text(self.table.gpu, replace(entry, run=held.run)) == _text(self.table.gpu, held):
            return "it says the same"
        return None


def _choose_gpu(options: TuneOptions, console: Console) -> tuple[Gpu, bool]:
    """The GPU to tune for, and whether it is here; says which, and why nothing is measured."""
    if options.target is None:
        from flashgen.launch import device_gpu

        try:
            gpu = device_gpu(0)
        except NoGpuError:
            if options.gpu:
                raise
        else:
            console.print(f"Tuning for {gpu.name} ({gpu.slug}), measuring on it.")
            return gpu, True
    gpu = known_target(options.target or OFFLINE_TARGET)
    why = "--target asks for no GPU" if options.target else "there is no GPU here"
    result = "the results are estimates"
    if estimable(gpu.arch):
        require_estimator()
    else:
        result = f"the estimator does not know {gpu.arch}, so configs are chosen by rule"
    console.print(
        f"Tuning offline for {gpu.name} ({gpu.slug}): {result}; nothing is measured, because {why}."
    )
    return gpu, False


def _request(options: TuneOptions, evaluator: Evaluator) -> dict[str, Any]:
    """What was asked, as far as it decides the path of the run. Time does, and cannot be kept."""
    stages: tuple[Stage, ...] = ("compile", "check", "timed", "final")
    return {
        "work": [[asdict(spec), asdict(problem)] for spec, problem in options.work],
        "trials": options.budget.trials,
        "method": asdict(options.method),
        "improve_only": options.improve_only,
        "source": evaluator.source,
        "triton": triton_version(),
        "protocols": [protocol_of(stage, evaluator.source) for stage in stages],
    }


def _evaluator(
    gpu: Gpu, measured: bool, state: Path, jobs: int | None
) -> AbstractContextManager[Evaluator]:
    return GpuEvaluator(gpu, 0, state, jobs) if measured else OfflineEvaluator(gpu, state, jobs)


def _held_table(out: Path, gpu: Gpu) -> Table:
    """DIR's table if there is one, else the shipped one, else an empty one. Its GPU is `gpu`."""
    for path in (paths.table_file(out, gpu.slug), paths.shipped_table(gpu.slug)):
        if path.exists():
            return replace(load(path), gpu=gpu)
    return Table(gpu=gpu)


def _text(gpu: Gpu, entry: Entry) -> str:
    """An entry as it stands in a file, where figures have fewer digits."""
    return dump(Table(gpu=gpu, entries=(entry,)))


def _run(evaluator: Evaluator) -> Run:
    """The run under way, as the table records it."""
    now = datetime.now(UTC)
    cuda = None
    if evaluator.source == "measured":
        import torch

        cuda = torch.version.cuda
    return Run(
        id=f"{now:%Y%m%dT%H%M%SZ}-{evaluator.source}",
        date=f"{now:%Y-%m-%dT%H:%M:%SZ}",
        source=evaluator.source,
        flashgen=flashgen.__version__,
        triton=triton_version(),
        torch=importlib.metadata.version("torch"),
        cuda=cuda,
        driver=None,
        clocks=None,
        power=None,
        protocol=protocol_of("final", evaluator.source),
    )


def _with_conditions(run: Run, evaluator: Evaluator) -> Run:
    """The run with the clocks and the power of the latest final round."""
    conditions: Conditions | None = getattr(evaluator, "conditions", None)
    if conditions is None:
        return run
    clocks = _joined(
        ", ", ("SM {} MHz", conditions.sm_mhz), ("memory {} MHz", conditions.memory_mhz)
    )
    power = _joined(
        " of ", ("{:.0f} W", conditions.power_w), ("{:.0f} W", conditions.power_limit_w)
    )
    return replace(run, driver=conditions.driver, clocks=clocks, power=power)


def _joined(between: str, *parts: tuple[str, float | None]) -> str | None:
    """The figures that are known, in words; None where none is."""
    known = [words.format(figure) for words, figure in parts if figure is not None]
    return between.join(known) or None


def _entry(spec: AttentionSpec, problem: Problem, found: Found, run: str) -> Entry:
    """The row of the table. The winner was compiled and checked, so its facts are there."""
    winner = found.winner
    assert winner.registers is not None
    assert winner.shared_bytes is not None
    assert winner.check is not None
    timing = winner.timing
    default = found.default.timing
    return Entry(
        spec=spec,
        bucket=bucket_of(problem.seq_k),
        config=winner.config,
        digest=winner.digest,
        shared_bytes=winner.shared_bytes,
        registers=winner.registers,
        run=run,
        result=Result(
            source=winner.source,
            problem=problem,
            median_us=timing.median_us if timing else None,
            p20_us=timing.low_us if timing else None,
            p80_us=timing.high_us if timing else None,
            tflops=timing.tflops(flops(spec, problem)) if timing else None,
            default_us=default.median_us if default else None,
            sdpa_us=winner.sdpa_us,
            max_abs_err_floors=winner.check.floors,
            candidates=found.candidates,
            legal=found.legal,
        ),
        runners_up=tuple(_runner_up(outcome) for outcome in found.runners_up),
    )


def _runner_up(outcome: Outcome) -> RunnerUp:
    return RunnerUp(
        config=outcome.config,
        source=outcome.source,
        median_us=outcome.timing.median_us if outcome.timing else None,
        digest=outcome.digest,
    )


def _title(spec: AttentionSpec, problem: Problem) -> str:
    return f"{spec.name} seq {problem.seq_k}"


def _sentence(entry: Entry, found: Found) -> str:
    """One line on a finished search."""
    result = entry.result
    words = [entry.config.label, result.source]
    if result.median_us is not None:
        words += [f"{result.median_us:.1f} us"]
    if result.speedup is not None:
        words += [f"{result.speedup:.2f} x default"]
    tried = f"{found.candidates} of {found.legal}"
    words += [
        f"all {found.legal} legal configs tried" if found.exhaustive else f"{tried} configs tried"
    ]
    return f"{_title(entry.spec, result.problem)}: {', '.join(words)}"


def _call(entry: Entry) -> str:
    """The options of `flashgen explain` for this entry."""
    spec = entry.spec
    dtype = "tf32" if spec.precision == "tf32" else SHORT_DTYPE[spec.dtype]
    dims = str(spec.head_dim)
    if spec.head_dim_v != spec.head_dim:
        dims += f"x{spec.head_dim_v}"
    causal = " --causal" if spec.causal else ""
    kernel = "" if spec.direction == "forward" else f" --direction {spec.direction}"
    return f"--dtype {dtype} --head-dim {dims} --seq {entry.result.problem.seq_k}{causal}{kernel}"
