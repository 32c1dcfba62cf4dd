"""Opens the log, quarantine and evaluator of a GPU product that a run tunes for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flashgen import paths
from flashgen.evaluate.evaluator import Evaluator, triton_version
from flashgen.evaluate.offline import OfflineEvaluator
from flashgen.evaluate.on_gpu import GpuEvaluator
from flashgen.evaluate.pools import Pools
from flashgen.evaluate.quarantine import Quarantine, QuarantiningEvaluator
from flashgen.search.log import Log
from flashgen.spec.gpu import Gpu


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """The log of a product, its evaluator, and the pools that this uses."""

    log: Log
    evaluator: Evaluator
    pools: Pools


@dataclass(frozen=True, kw_only=True)
class Site:
    """A GPU product, and who evaluates for it: on GPUs where pools has some, otherwise offline.

    retry: retry kernels that killed a process before.
    """

    gpu: Gpu
    pools: Pools
    out: Path
    retry: bool
    notice: Callable[[str], None]


@contextlib.contextmanager
def opened(site: Site) -> Iterator[Workplace]:
    """The workplace at a site, closed at the end. Raises FlashgenError if it cannot be opened."""
    slug, notice = site.gpu.slug, site.notice
    log_file = paths.log_file(site.out, slug)
    with Log(log_file, gpu=slug, triton=triton_version(), notice=notice) as log:
        quarantine = Quarantine(
            paths.quarantine_file(site.out, slug),
            triton=triton_version(),
            retry=site.retry,
            notice=notice,
        )
        with make_evaluator(site, log) as evaluator:
            evaluator = QuarantiningEvaluator(evaluator, quarantine)
            yield Workplace(log=log, evaluator=evaluator, pools=site.pools)


def make_evaluator(site: Site, log: Log) -> contextlib.AbstractContextManager[Evaluator]:
    """The evaluator: on GPUs, at the clock that the log recorded, or offline."""
    state = paths.state_dir(site.out)
    if site.pools.device is None:
        return OfflineEvaluator(site.gpu, state, pools=site.pools)
    return GpuEvaluator(site.gpu, 0, state, clock_mhz=log.clock_mhz, pools=site.pools)
