"""tune --dry-run: what would be searched, and about how long it takes; nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flashgen.evaluate.build import cpu_count
from flashgen.evaluate.measure import BUDGETS
from flashgen.schedules.space import legal_configs
from flashgen.search.staged import FINALISTS
from flashgen.spec.problem import bucket_of
from flashgen.tune import places
from flashgen.tune.options import TuneOptions
from flashgen.tune.progress import duration, title_of

SHOWN = 40
"""Searches that are named, at most; the heaviest come first."""

CORE_S = 3.1
"""Of a core, to compile, check and estimate a config: 1,108 CPU-seconds for six searches of 60
(docs/lab-notes.md, 27 November 2026)."""

TIMED_SHARE = 0.5
"""Of the configs that are timed roughly, so many are near enough to the best to be timed again;
assumed."""


def lines(options: TuneOptions, say: Callable[[str], object]) -> Iterator[str]:
    """A line for each search, for each GPU that the options name, then the time of all. Raises
    NoGpuError and InvalidArgument as a run does.
    """
    targets, devices = places.choose(options.where, say)
    jobs = options.where.jobs or max(1, cpu_count() - len(devices))
    for gpu in (*targets, *places.by_product(devices)):
        on_gpu = gpu in devices.values()
        count, seconds = 0, 0.0
        for number, (spec, problem) in enumerate(options.searches):
            legal = len(legal_configs(spec, gpu, on_gpu=on_gpu))
            tried = min(options.budget.trials, legal)
            seconds += seconds_of(tried, jobs, on_gpu=on_gpu)
            count += 1
            if number < SHOWN:
                where = f"heads {problem.heads}/{problem.kv_heads}, {bucket_of(problem.seq_k)}"
                yield f"{title_of(spec, problem)}, {where}: {tried} of {legal} configs"
        if count > SHOWN:
            yield f"and {count - SHOWN} more"
        seconds /= max(1, list(devices.values()).count(gpu))
        yield f"{gpu.slug}: {count} search{'es' * (count != 1)}, {_time(options, seconds, jobs)}"


def seconds_of(tried: int, jobs: int, *, on_gpu: bool) -> float:
    """About how long a search takes that tries so many configs."""
    cores_s = tried * CORE_S / jobs
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
