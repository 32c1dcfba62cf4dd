"""Files of a tuning run: its session, so that a killed run resumes, and its provenance.

A search depends on the table it starts from: incumbents are timed in the final round, and
neighbours break ties. A killed run has already changed that table. So a run first stores its
request and the table it found; the same request finds both again and takes the same path.
Provenance is what the table records about the run: date and versions.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import flashgen
from flashgen import paths
from flashgen.evaluate.evaluator import Evaluator, protocol_of, triton_version
from flashgen.evaluate.measure import Conditions
from flashgen.files import content_of, write_whole
from flashgen.schedules.outcome import Source, Stage
from flashgen.spec.gpu import Gpu
from flashgen.spec.records import parsed, record_of
from flashgen.table.entry import Entry, Run
from flashgen.table.evidence import evidence_text, with_lines
from flashgen.table.table import Table
from flashgen.table.table_file import dump, load_with_evidence, parse
from flashgen.tune.options import TuneOptions


@dataclass(frozen=True, kw_only=True)
class Session:
    """A run in progress, as its file has it: its request, its record in the table, and the table
    that it found, as text. new: the folder had no table of its own when the run began.

    The file is deleted when the run ends. If it exists, the run was killed or interrupted, and is
    `resumed`.
    """

    request: dict[str, Any]
    run: Run
    table: str
    evidence: str = ""
    new: bool = False
    resumed: bool = False

    @classmethod
    def begin(
        cls,
        path: Path,
        *,
        request: Mapping[str, Any],
        run: Run,
        table: Table,
        notice: Callable[[str], None],
        new: bool = False,
    ) -> Self:
        """Resume the run stored at `path` if its request is the same, otherwise start one.

        request: all that decides the path of the run, as JSON. run and table: those of a run that
        starts now. A file that cannot be read is ignored with a notice: only the order of finalists
        depends on it. Raises FlashgenError if the file cannot be written.
        """
        begun = cls(
            request=json.loads(json.dumps(request)),
            run=run,
            table=dump(table),
            evidence=evidence_text(table.everything),
            new=new,
        )
        try:
            kept = record_of(cls, parsed(content_of(path)))
            kept.found(table.gpu)
            if kept.request == begun.request:
                return replace(kept, resumed=True)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            notice(f"{path}: this is no record of a run ({error}); the run begins anew")
        write_whole(path, json.dumps(asdict(begun), indent=1) + "\n", durable=True)
        return begun

    def found(self, gpu: Gpu) -> Table:
        """The table that the run found, with its evidence, of this GPU."""
        table = parse(self.table, Path(f"{gpu.slug}.yaml"))
        return replace(
            table.of(with_lines(table, self.evidence, Path(f"{gpu.slug}.jsonl"))), gpu=gpu
        )


def run_now(evaluator: Evaluator, shard: tuple[int, int] = (1, 1)) -> Run:
    """A run that starts now, of shard (i, n). What only a final round can tell is None so far."""
    now = datetime.now(UTC)
    part = "" if shard == (1, 1) else f"-{shard[0]}of{shard[1]}"
    cuda = None
    if evaluator.source == "measured":
        import torch

        cuda = torch.version.cuda
    return Run(
        id=f"{now:%Y%m%dT%H%M%SZ}-{evaluator.source}{part}",
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
    """The known values, in words; None if there are none."""
    known = [words.format(figure) for words, figure in parts if figure is not None]
    return between.join(known) or None


def request_of(options: TuneOptions, source: Source) -> dict[str, Any]:
    """The part of the request that decides the path of the run. The time budget does too, but
    cannot be stored.
    """
    stages: tuple[Stage, ...] = ("compile", "check", "timed", "final")
    return {
        "work": [[asdict(spec), asdict(problem)] for spec, problem in options.work],
        "shard": options.shard,
        "trials": options.budget.trials,
        "method": asdict(options.method),
        "from_tables": options.from_tables,
        "improve_only": options.improve_only,
        "max_regret": options.max_regret,
        "source": source,
        "triton": triton_version(),
        "protocols": [protocol_of(stage, source) for stage in stages],
    }


def held_table(out: Path, gpu: Gpu) -> Table:
    """DIR's table if there is one, otherwise the shipped one, otherwise an empty one. Its GPU is
    `gpu`.
    """
    for path in (paths.table_file(out, gpu.slug), paths.shipped_table(gpu.slug)):
        if path.exists():
            return replace(load_with_evidence(path), gpu=gpu)
    return Table(gpu=gpu)


def text_of_entry(gpu: Gpu, entry: Entry) -> str:
    """An entry as in files, where figures have fewer digits."""
    return dump(Table(gpu=gpu, entries=(entry,))) + evidence_text((entry,))
