"""Opens the log, quarantine and evaluator of a GPU product that a run tunes for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from flashgen import paths
from flashgen.evaluate.evaluator import Evaluator, triton_version
from flashgen.evaluate.offline import OfflineEvaluator
from flashgen.evaluate.on_gpu import GpuEvaluator
from flashgen.evaluate.quarantine import Quarantine, QuarantiningEvaluator
from flashgen.search.log import Log
from flashgen.tune.options import TuneOptions
from flashgen.tune.places import TuningTarget


@contextlib.contextmanager
def opened(
    place: TuningTarget, options: TuneOptions, notice: Callable[[str], None]
) -> Iterator[tuple[Log, Evaluator]]:
    """The log of a product and its evaluator, closed at the end. Raises FlashgenError."""
    slug, out = place.gpu.slug, options.out
    with Log(paths.log_file(out, slug), gpu=slug, triton=triton_version(), notice=notice) as log:
        quarantine = Quarantine(
            paths.quarantine_file(out, slug),
            triton=triton_version(),
            retry=options.retry_quarantined,
            notice=notice,
        )
        with make_evaluator(place, out, log) as evaluator:
            yield log, QuarantiningEvaluator(evaluator, quarantine)


def make_evaluator(
    place: TuningTarget, out: Path, log: Log
) -> contextlib.AbstractContextManager[Evaluator]:
    """The evaluator: on GPUs, at the clock that the log recorded, or offline."""
    gpu, pools, state = place.gpu, place.pools, paths.state_dir(out)
    if pools.device is None:
        return OfflineEvaluator(gpu, state, pools=pools)
    return GpuEvaluator(gpu, 0, state, clock_mhz=log.clock_mhz, pools=pools)
