"""Goals of a run's searches: what each starts from, of this GPU's table and of those of others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from flashgen.evaluate.evaluator import triton_version
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.space import measured_seeds, own_seeds, tuned_default
from flashgen.search.goal import Found, Goal, goal_for
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import bucket_of
from flashgen.table.entry import must_have_run
from flashgen.table.table import Table
from flashgen.tune.donors import DEFAULT, Donors
from flashgen.tune.options import Piece, TuneOptions
from flashgen.tune.transfer import EntryKey, measured_for, measured_on_chip, neighbours


class Goals:
    """The goals of the searches of `options` on `gpu`, by what tables hold.

    Searches are independent: they see `began_with`, the table that the run found, less what the
    run searches. tables: those of all GPUs; on_gpu: kernels are measured. With from_tables, what
    `began_with` holds and the run does not search is lent, too, as a killed run may have written
    more than that into its table.
    """

    def __init__(
        self, options: TuneOptions, gpu: Gpu, began_with: Table, tables: Collection[Table], *,
        on_gpu: bool,
    ) -> None:  # fmt: skip
        self._from_tables = options.from_tables
        self._gpu = gpu
        self._began_with = began_with
        self._on_gpu = on_gpu
        self._searched = {(spec, bucket_of(problem.seq_k)) for spec, problem in options.work}
        others = [table for table in tables if table.gpu.slug != gpu.slug]
        if options.from_tables:
            kept = (e for e in began_with.entries if e.key not in self._searched)
            others.append(began_with.of(kept))
        self.donors = Donors(others, gpu)
        self._measured = {} if on_gpu else measured_on_chip(gpu, tables)

    def of_tables(self, piece: Piece) -> Goal:
        """To take the best of what tables hold for one spec and length. Without a GPU, where a
        trial takes a second, also of own_seeds(), which tables made before may not have compared.
        """
        spec, problem = piece
        default = tuned_default(spec, self._gpu)
        lent = self.donors.chosen(spec, bucket_of(problem.seq_k), on_gpu=self._on_gpu)
        trusted = self._trusted(piece)
        known = (*self._executed(piece), *((trusted,) if trusted else ()), *lent)
        own = () if self._on_gpu else own_seeds(spec, self._gpu)
        return Goal(
            spec=spec,
            problem=problem,
            legal=(*known, *measured_seeds(spec, self._gpu), default, *own),
            seeds=(),
            default=default,
            incumbent=self.incumbent(piece, {}),
            derived=True,
            trusted=trusted,
        )

    def of_search(self, piece: Piece, derived: Mapping[Piece, Found]) -> Goal:
        """To search one spec at one length. derived: what was the best of tables before."""
        spec, problem = piece
        bucket = bucket_of(problem.seq_k)
        chosen = self.donors.chosen(spec, bucket, on_gpu=self._on_gpu)
        others = (*self._executed(piece), *chosen)
        if self._from_tables:
            others += self.donors.runners_up(spec, bucket, on_gpu=self._on_gpu)
        goal = goal_for(
            spec,
            problem,
            self._gpu,
            self.incumbent(piece, derived),
            neighbours=neighbours(self._began_with, spec, bucket, leave_out=self._searched),
            elsewhere=others,
            on_gpu=self._on_gpu,
        )
        if self._from_tables:  # a space does not list all that is legal
            goal = replace(goal, legal=tuple(dict.fromkeys((*goal.legal, *others))))
        return goal

    def incumbent(self, piece: Piece, derived: Mapping[Piece, Found]) -> KernelConfig | None:
        """What a search must beat: what the table holds, or what was better of other tables."""
        spec, bucket = piece[0], bucket_of(piece[1].seq_k)
        if piece in derived:
            return derived[piece].winner.config
        triton = triton_version() if self._on_gpu else ""  # an executed entry is no rival offline
        held = self._began_with.serving(spec, bucket, triton)
        if held is None or why_illegal(spec, held.config, self._gpu) is not None:
            return None
        if held.config.executed and not self._on_gpu:
            return None  # no estimate may stand for it, and none replaces its time
        return held.config

    def donor_of(self, piece: Piece, config: KernelConfig) -> str | None:
        """Whose table lends a config for one spec and length; where none does, None for a tile of
        its schedule, which this run has chosen, or else DEFAULT.
        """
        lent = self.donors.chosen(piece[0], bucket_of(piece[1].seq_k), on_gpu=False)
        own = config.kernel in own_seeds(piece[0], self._gpu)
        return lent.get(config.kernel, None if own else DEFAULT)

    def measured(self, key: EntryKey) -> KernelConfig | None:
        """What the same chip, or else a like one, was measured with for a spec and bucket; None
        where this run measures.
        """
        return measured_for(self._measured, *key)

    def _executed(self, piece: Piece) -> tuple[KernelConfig, ...]:
        """What was executed on a CPU for this GPU, which only measures now."""
        spec, bucket = piece[0], bucket_of(piece[1].seq_k)
        found = self._began_with.executed if self._on_gpu else ()
        return tuple(entry.config for entry in found if entry.key == (spec, bucket))

    def _trusted(self, piece: Piece) -> KernelConfig | None:
        """What the same chip was measured with for a like piece, if it may be chosen here."""
        spec = piece[0]
        config = self.measured((spec, bucket_of(piece[1].seq_k)))
        if config is None or must_have_run(config) or why_illegal(spec, config, self._gpu):
            return None
        return config
