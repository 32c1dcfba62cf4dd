"""Provenance: the run that entries come from, as a table records it: when, and with what."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from datetime import UTC, datetime

import flashgen
from flashgen.entry import Run
from flashgen.evaluate import Evaluator, protocol_of, triton_version
from flashgen.measure import Conditions


def run_now(evaluator: Evaluator) -> Run:
    """A run that begins now. What only a final round can tell is None yet."""
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


def with_conditions(run: Run, evaluator: Evaluator) -> Run:
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
