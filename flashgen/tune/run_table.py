"""RunTable: the table that a tuning run writes, and which of its results enter it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flashgen import paths
from flashgen.evaluate.evaluator import Evaluator
from flashgen.schedules.outcome import STRENGTH
from flashgen.search.goal import Found
from flashgen.table.entry import Entry, Run
from flashgen.table.table import Table
from flashgen.table.table_file import save
from flashgen.tune.options import TuneOptions
from flashgen.tune.run_files import Session, held_table, request_of, run_now, text_of_entry
from flashgen.tune.transfer import EntryKey


class RunTable:
    """The table of one GPU while a run writes it.

    began_with: what the run found when it first began, before it was killed, if it was. walked:
    the same with the results of this process; table: what stands in the file, where a killed run
    may have written more. found: all results, also those that did not enter. run: the record of
    this run. resumed: it goes on after a kill.
    """

    def __init__(
        self, options: TuneOptions, evaluator: Evaluator, notice: Callable[[str], None]
    ) -> None:
        gpu = evaluator.gpu
        self._options = options
        self._file = paths.table_file(options.out, gpu.slug)
        self._session_file = paths.session_file(options.out, gpu.slug)
        self.table = held_table(options.out, gpu)
        session = Session.begin(
            self._session_file,
            request=request_of(options, evaluator.source),
            run=run_now(evaluator, options.shard),
            table=self.table,
            notice=notice,
            new=not self._file.exists(),
        )
        self._new = session.new
        self.resumed = session.resumed
        self.walked: Table = session.found(gpu)
        self.began_with = self.walked
        # What a round before the kill told of clocks and power stands in the table it wrote.
        written = {run.id: run for run in self.table.runs}
        self.run = written.get(session.run.id, session.run)
        self.found: dict[EntryKey, Entry] = {}
        self._written: set[EntryKey] = set()
        self._undecided: dict[EntryKey, bool] = {}

    @property
    def undecided(self) -> int:
        """How many results lack the verdict on a rival."""
        return sum(self._undecided.values())

    @property
    def changed(self) -> bool:
        """Whether the table is another than the run found when it first began: a killed run may
        have changed it, and not have generated its kernels.
        """
        return self.table != self.began_with

    @property
    def writes(self) -> bool:
        """Whether a run that ends writes the table: where it changed, and into a folder that had
        none, which gets the shipped one where nothing that was found beat it.
        """
        return self.changed or (self._new and bool(self.found and self.table.everything))

    def enter(self, entry: Entry, run: Run, found: Found, *, measured: bool) -> str | None:
        """Put a result of `run` into the table, and save it; the sentence that says why it is not
        written, if it is not. measured: the same chip was measured with what the table holds.
        """
        held = self.walked.find(*entry.key)
        self.found[entry.key] = entry
        self._undecided[entry.key] = bool(found.undecided)
        stays = self._why_held_stays(held, entry, found, measured=measured)
        if stays:
            return f"the table's entry stays: {stays}"
        self.put(entry, run)
        if self.table.find(*entry.key) is None:
            return "not written: dK/dV and dQ of the table take no longer together"
        return None

    def share(self, old: Entry, new: Entry) -> bool:
        """Put what became of an entry by sharing kernels; whether it is written."""
        if new == old or self._restates(old, new):
            return False
        mine = new.evidence.run == self.run.id
        self.put(new, self.run if mine else self.walked.run_of(new))
        if new.key in self.found or new.config != old.config:
            self.found[new.key] = new
        return True

    def put(self, entry: Entry, run: Run | None) -> None:
        """Put an entry of a run into the table and save it."""
        self._written.add(entry.key)
        self.walked = self.walked.with_entry(entry, run)
        self.table = self.table.with_entry(entry, run).without_idle()
        self.save()

    def save(self) -> None:
        """Write the table."""
        save(self.table, self._file)

    def end(self) -> None:
        """All is generated: delete the session."""
        self._session_file.unlink(missing_ok=True)

    def _why_held_stays(
        self, held: Entry | None, entry: Entry, found: Found, *, measured: bool
    ) -> str | None:
        """Why the new entry is not written, if it is not."""
        if held is None:
            return None
        old, new = held.result.source, entry.result.source
        if STRENGTH[new] < STRENGTH[old]:
            return f"it is {old}, and {new} never replaces that"
        if measured:
            return f"the same chip was measured with it, and {new} never replaces that"
        if found.incumbent is not None and found.incumbent.undecided:
            return f"it has no verdict ({found.incumbent.status})"
        if self._options.improve_only and not found.replaced and STRENGTH[new] == STRENGTH[old]:
            return "nothing beat it"
        if held.key not in self._written and self._restates(held, entry):
            return "the same config is chosen; its estimates stay (--restate)"
        run = self.walked.run_of(held)
        # Of one round p differs: the winner was a challenger before, and is the incumbent now.
        evidence = replace(entry.evidence, run=held.evidence.run, p_value=held.evidence.p_value)
        named = replace(entry, evidence=evidence)
        same = text_of_entry(self.table.gpu, named) == text_of_entry(self.table.gpu, held)
        if same and run and run.protocol == self.run.protocol:
            return "it says the same"
        return None

    def _restates(self, old: Entry, new: Entry) -> bool:
        """Whether the new entry is of the same kernel, and has estimates again, which restate()
        writes. A folder without a table takes what was found.
        """
        same = new.config == old.config and new.evidence.digest == old.evidence.digest
        estimated = new.result.source == old.result.source != "measured"
        return same and estimated and not self._new
