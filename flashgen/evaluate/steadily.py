"""steadily: a measurement taken while the clock changed is marked and repeated."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from flashgen.evaluate.evaluator import closable
from flashgen.evaluate.gpu_state import WAITS_S
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Outcome, Status

_logger = logging.getLogger(__name__)


def steadily(
    evaluate: Callable[[Sequence[KernelConfig]], Iterator[Outcome]],
    configs: Sequence[KernelConfig],
    *,
    whole: bool,
    mark: Callable[..., None],
) -> Iterator[Outcome]:
    """One outcome per config, in their order. UNSTEADY ones are repeated after each of WAITS_S.

    An outcome to be repeated is passed to `mark` first. Nothing else is measured before it is
    repeated, because the clock may still be off. A final round is repeated as a `whole`.
    """
    rest, waits = list(configs), list(WAITS_S)
    while rest:
        with closing(closable(evaluate(rest))) as outcomes:
            for batch in [list(outcomes)] if whole else ([each] for each in outcomes):
                unsteady = [each for each in batch if each.status is Status.UNSTEADY]
                if unsteady and waits:
                    mark(*batch)
                    break
                yield from batch
                rest, waits = rest[len(batch) :], list(WAITS_S)
            else:
                return
        wait_s = waits.pop(0)
        _logger.warning("%s: measured again in %.0f s", unsteady[0].detail, wait_s)
        time.sleep(wait_s)
