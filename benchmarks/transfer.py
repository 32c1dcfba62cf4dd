"""Compares flashgen tune --from-tables with full searches, by estimate. CPU only.

    python benchmarks/transfer.py nvidia_l4 [SLUG ...] [--specs 30] [--trials 60] [--out DIR]

For each GPU its own table is hidden, as if nobody had tuned it, and tables are made anew:

    DIR/lent       what other tables hold of PIECES, and of so many specs, evenly spread, in all
                   buckets. Only what finds nothing right there is searched, with so many trials.
                   Its CPU-seconds are scaled to all specs.
    DIR/searched   PIECES with full searches of so many trials each.

The output is how much slower the first is than the second; below 0 it is faster. A table in
DIR/searched is used as it is, so a run that was cut off goes on. GPUs of one architecture share
what they compile, so only the first of them says what a table costs.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console

from flashgen import paths
from flashgen.errors import FlashgenError
from flashgen.search.goal import Budget
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import bucket_of
from flashgen.table import emit
from flashgen.table.table import Table, load_with_evidence
from flashgen.tune import workloads
from flashgen.tune.options import TuneOptions
from flashgen.tune.places import Wanted
from flashgen.tune.story import Piece
from flashgen.tune.tune import tune

PIECES = (
    ("fwd_bf16_d128_causal", 8192),
    ("bwd_dkv_bf16_d64_causal", 2048),
    ("fwd_fp16_d96", 512),
    ("decode_bf16_d128_paged", 8192),
    ("bwd_dq_fp16_d64", 8192),
    ("fwd_bf16_d64_causal_window_sink", 2048),
)
"""Names of specs, and lengths: all directions but one, two dtypes, three head dims."""


@contextlib.contextmanager
def hidden(slug: str) -> Iterator[None]:
    """The shipped tables without that of a GPU; kernels are not generated."""
    with tempfile.TemporaryDirectory() as folder:
        shipped = Path(folder, "configs")
        shutil.copytree(paths.shipped_configs_dir(), shipped)
        (shipped / f"{slug}.yaml").unlink(missing_ok=True)
        with (
            mock.patch.object(paths, "shipped_configs_dir", return_value=shipped),
            mock.patch.object(emit, "write", return_value=[]),
        ):
            yield


def tuned(slug: str, pieces: Sequence[Piece], out: Path, budget: Budget, *, lent: bool) -> Table:
    """The table that tuning writes in a child process of one core."""
    options = TuneOptions(
        pieces=tuple(pieces),
        budget=budget,
        where=Wanted(target=slug, jobs=1),
        out=out,
        from_tables=lent,
    )
    console = Console(file=sys.stderr, width=160)
    try:
        tune(options, console)
    except FlashgenError as error:
        if not lent:
            raise
        console.print(str(error))  # of what is lent, some may be wrong or spill: see lacking()
    return load_with_evidence(paths.table_file(out, slug))


def lacking(table: Table, pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces that a table has no entry for."""
    return [piece for piece in pieces if table.find(piece[0], bucket_of(piece[1].seq_k)) is None]


def cpu_s() -> float:
    """CPU-seconds of this process and of the children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def compared(slug: str, specs: int, trials: int, out: Path) -> Iterator[str]:
    """The lines on a GPU."""
    work = workloads.of_tables(emit.tables_for(ROOT, evidence=True).values())
    every = list(dict.fromkeys(spec for spec, _ in work))
    spread = {every[number * len(every) // specs] for number in range(specs)}
    pieces = [piece for piece in work if (piece[0].name, piece[1].seq_k) in PIECES]
    if len(pieces) < len(PIECES):
        raise FlashgenError(f"tables must hold all of {PIECES}: only {len(pieces)} are there")
    began = cpu_s()
    with hidden(slug):
        some = [piece for piece in work if piece[0] in spread]
        made = tuned(slug, some or pieces, out / "lent", Budget(trials=1), lent=True)
        if nothing := lacking(made, some or pieces):
            yield f"{slug}: tables lend nothing that is right to {len(nothing)} specs and buckets"
            made = tuned(slug, nothing, out / "lent", Budget(trials=trials), lent=True)
            yield f"{slug}: a search of {trials} finds nothing for {len(lacking(made, nothing))}"
        took = cpu_s() - began
        if some:
            made = tuned(slug, pieces, out / "lent", Budget(trials=1), lent=True)
            yield (
                f"{slug}: {len(some)} specs and buckets of {len(spread)} specs took {took:.0f} "
                f"CPU-seconds, so all {len(work)} of {len(every)} specs take "
                f"{took * len(every) / len(spread) / 60:.1f} CPU-minutes"
            )
        file = paths.table_file(out / "searched", slug)
        if file.exists():
            full = load_with_evidence(file)
        else:
            full = tuned(slug, pieces, out / "searched", Budget(trials=trials), lent=False)
    for spec, problem in pieces:
        key = spec, bucket_of(problem.seq_k)
        lent, best = made.find(*key), full.find(*key)
        if lent is None or best is None:
            continue
        timed = [each.median_us for each in best.evidence.runners_up if each.median_us]
        least = min([best.result.median_us or 0.0, *timed])
        us = lent.result.median_us or 0.0
        yield (
            f"{slug} {spec.name} {problem.seq_k}: {lent.config.label} {us:.1f} us after "
            f"{lent.evidence.tried}, {best.config.label} {least:.1f} us at least after "
            f"{best.evidence.tried}: {us / least - 1:+.1%}"
        )


def main(arguments: Sequence[str]) -> int:
    """Print the lines of each GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("slug", nargs="+", choices=TARGETS, metavar="SLUG")
    parser.add_argument("--specs", type=int, default=30, help="0 for PIECES alone")
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("transfer"), metavar="DIR")
    asked = parser.parse_args(arguments)
    for slug in asked.slug:
        for line in compared(slug, asked.specs, asked.trials, asked.out.resolve()):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
