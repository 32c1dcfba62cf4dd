"""Opens the log, quarantine and evaluator of a tuning run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen import paths
from flashgen.evaluate.evaluator import Evaluator, triton_version
from flashgen.evaluate.offline import OfflineEvaluator
from flashgen.evaluate.on_gpu import GpuEvaluator
from flashgen.evaluate.quarantine import Quarantine, QuarantiningEvaluator
from flashgen.search.log import Log
from flashgen.spec.gpu import Gpu
from flashgen.tune.shared import Ledger
from flashgen.tune.shared.evaluator import SharedEvaluator


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """The log of a run, its evaluator, and the storage that it shares with other workers, if
    any.
    """

    log: Log
    evaluator: Evaluator
    ledger: Ledger | None


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where and how a run works. device: the CUDA device that is `gpu`; None: it is not present.

    jobs: compiler processes. storage: shared with other workers; request: must be equal on all of
    them. retry: retry kernels that killed a process before.
    """

    gpu: Gpu
    device: int | None
    out: Path
    jobs: int | None
    storage: str | None
    request: Mapping[str, Any]
    retry: bool
    notice: Callable[[str], None]


@contextlib.contextmanager
def opened(site: Site) -> Iterator[Workplace]:
    """The workplace at a site, closed at the end. Raises FlashgenError if it cannot be opened."""
    slug, notice = site.gpu.slug, site.notice
    with contextlib.ExitStack() as stack:
        ledger = None
        if site.storage is not None:
            ledger = stack.enter_context(
                Ledger(site.storage, gpu=slug, request=site.request, notice=notice)
            )
        log = stack.enter_context(
            Log(
                paths.log_file(site.out, slug),
                gpu=slug,
                triton=triton_version(),
                notice=notice,
                shared=ledger.id if ledger else None,
            )
        )
        quarantine = Quarantine(
            paths.quarantine_file(site.out, slug),
            triton=triton_version(),
            retry=site.retry,
            notice=notice,
        )
        evaluator: Evaluator = stack.enter_context(make_evaluator(site, log))
        evaluator = QuarantiningEvaluator(evaluator, quarantine)
        if ledger is not None:
            shared = SharedEvaluator(evaluator, ledger, memory=log, jobs=site.jobs, notice=notice)
            evaluator = stack.enter_context(shared)
        yield Workplace(log=log, evaluator=evaluator, ledger=ledger)


def make_evaluator(site: Site, log: Log) -> contextlib.AbstractContextManager[Evaluator]:
    """The evaluator: on the device, at the clock that the log recorded, or offline."""
    state = paths.state_dir(site.out)
    if site.device is None:
        return OfflineEvaluator(site.gpu, state, site.jobs)
    return GpuEvaluator(site.gpu, site.device, state, site.jobs, clock_mhz=log.clock_mhz)
