"""tune --dry-run: what would be searched, and about how long it takes; nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from flashgen.estimate.estimate import estimable
from flashgen.evaluate.measure import BUDGETS
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.space import legal_configs, measured_seeds, own_seeds, tuned_default
from flashgen.search.explore import LOOK_AHEAD
from flashgen.search.staged import FINALISTS
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import Problem, bucket_of
from flashgen.table.emit import tables_for
from flashgen.table.table import Table
from flashgen.tune import places
from flashgen.tune.donors import Donors
from flashgen.tune.options import TuneOptions
from flashgen.tune.progress import duration, title_of

SHOWN = 40
"""Searches that are named, at most; the heaviest come first."""

CORE_S = 3.9
"""Of a core, for each config of a search: it is compiled and estimated, and the best are checked. A
search of 24 of fwd_bf16_d128_causal for an L4 took 94 CPU-seconds (29 November 2026)."""

TIMED_SHARE = 0.5
"""Of the configs that are timed roughly, so many are near enough to the best to be timed again;
assumed."""


def lines(options: TuneOptions, say: Callable[[str], object]) -> Iterator[str]:
    """A line for each search, for each GPU that the options name, then the time of all. Raises
    NoGpuError and InvalidArgument as a run does.
    """
    targets, devices = places.choose(options.where, say)
    jobs = places.jobs_of(options.where, devices)
    tables = tables_for(options.out, evidence=True).values() if options.from_tables else ()
    for gpu in (*targets, *places.by_product(devices)):
        counts = _Counts(options=options, gpu=gpu, on_gpu=gpu in devices.values(), tables=tables)
        seconds = 0.0
        for number, (spec, problem) in enumerate(options.searches):
            tried, legal = counts.of(spec, problem)
            seconds += seconds_of(tried, counts.compiled(tried, legal), jobs, on_gpu=counts.on_gpu)
            if number < SHOWN and not legal:
                why = why_illegal(spec, tuned_default(spec, gpu), gpu)
                yield f"{title_of(spec, problem)}: no config is legal: {why}"
            elif number < SHOWN:
                where = f"heads {problem.heads}/{problem.kv_heads}, {bucket_of(problem.seq_k)}"
                yield f"{title_of(spec, problem)}, {where}: {tried} of {legal} configs"
        if (count := len(options.searches)) > SHOWN:
            yield f"and {count - SHOWN} more"
        seconds /= max(1, list(devices.values()).count(gpu))
        yield f"{gpu.slug}: {count} search{'es' * (count != 1)}, {_time(options, seconds, jobs)}"


class _Counts:
    """How many configs the searches of a GPU try."""

    def __init__(
        self, *, options: TuneOptions, gpu: Gpu, on_gpu: bool, tables: Iterable[Table]
    ) -> None:
        self.on_gpu = on_gpu
        self._gpu = gpu
        self._exhaustive = options.method.sampler == "exhaustive"
        self._trials = options.budget.trials
        self._donors = Donors(tables, gpu) if options.from_tables else None

    def of(self, spec: AttentionSpec, problem: Problem) -> tuple[int, int]:
        """How many a search tries, and of how many."""
        legal = {*legal_configs(spec, self._gpu, on_gpu=self.on_gpu)}
        lent = set[KernelConfig]()
        if self._donors is not None:
            chosen = self._donors.chosen(spec, bucket_of(problem.seq_k), on_gpu=self.on_gpu)
            lent = {*chosen, *measured_seeds(spec, self._gpu), tuned_default(spec, self._gpu)}
            if not self.on_gpu:
                lent |= {*own_seeds(spec, self._gpu)}
        count = len(legal | lent)
        tried = count if self._exhaustive else min(self._trials, count)
        return max(len(lent), tried), count

    def compiled(self, tried: int, legal: int) -> int:
        """How many are compiled for it: where estimates say what to measure, ahead of that."""
        ahead = self.on_gpu and estimable(self._gpu.arch)
        return min(legal, LOOK_AHEAD * tried) if ahead else tried


def seconds_of(tried: int, compiled: int, jobs: int, *, on_gpu: bool) -> float:
    """About how long a search takes that compiles and tries so many configs."""
    cores_s = compiled * CORE_S / jobs
    if not on_gpu:
        return cores_s
    rough, timed, final = (
        budget.warm_s + budget.sample_s
        for budget in (BUDGETS["rough"], BUDGETS["timed"], BUDGETS["final"])
    )
    measuring_s = tried * (rough + TIMED_SHARE * timed) + (FINALISTS + 2) * final
    return max(cores_s, measuring_s)


def _time(options: TuneOptions, seconds: float, jobs: int) -> str:
    cores = f"with {jobs} process{'es' * (jobs != 1)}"
    most = options.budget.seconds
    if most is not None and most < seconds:
        return (
            f"{duration(most)} by --time-budget; all of them take about {duration(seconds)} {cores}"
        )
    return f"about {duration(seconds)} {cores}; what the log of --out has is not tried again"
