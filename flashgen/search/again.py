"""Again: what was measured while the clock changed is marked, and measured once more."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing

from flashgen.config import KernelConfig
from flashgen.evaluators.clock import WAITS_S
from flashgen.outcome import Outcome, Status

_logger = logging.getLogger(__name__)


def steadily(
    evaluate: Callable[[Sequence[KernelConfig]], Iterator[Outcome]],
    configs: Sequence[KernelConfig],
    *,
    whole: bool,
    mark: Callable[..., None],
) -> Iterator[Outcome]:
    """One outcome a config, in their order; UNSTEADY only what stays so after each of WAITS_S.

    What is repeated goes to `mark` first, and nothing else is measured before it: the clock may
    still be off. A final round is repeated as a `whole`.
    """
    rest, waits = list(configs), list(WAITS_S)
    while rest:
        with closing(_generator(evaluate(rest))) as outcomes:
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


def _generator(outcomes: Iterator[Outcome]) -> Generator[Outcome, None, None]:
    """The same, as something that can be closed, and then closes `outcomes` if that can be."""
    yield from outcomes
