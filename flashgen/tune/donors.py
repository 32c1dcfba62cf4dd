"""Donors: the entries of other GPUs' tables, which lend their configs and their check's result."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace

from flashgen.estimate.estimate import estimable
from flashgen.evaluate.evaluator import Evaluator, Request, WrappingEvaluator
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.defaults import default_spec, other_half, plainer_specs
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.outcome import STRENGTH, CheckResult, Outcome, Status
from flashgen.schedules.space import likely_order
from flashgen.search.goal import rendered_digest
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu, unlikeness
from flashgen.spec.problem import Bucket
from flashgen.spec.vocabulary import DECODING
from flashgen.table.entry import Entry, Run, must_have_run, short_digest
from flashgen.table.table import Table

ALIKE = 12
"""Configs that were chosen for specs that are alike, at most, of which each is compiled."""

DEFAULT = "default"
"""The donor of an entry whose config is the default, which no table had for its spec."""


@dataclass(frozen=True, kw_only=True)
class Donor:
    """An entry that lends its config, and the GPU whose table has it."""

    gpu: Gpu
    entry: Entry


class Donors:
    """The entries that may lend a config to `gpu`: those that its own table holds of other buckets
    come first, then those of the nearest GPUs.

    What a table was lent itself it does not lend again. Where times can be estimated, entries that
    no time chose lend only to specs for which nothing else is legal: their configs rarely win, and
    each must be compiled. Those of AMD lend nothing to GPUs of NVIDIA.
    """

    def __init__(self, tables: Iterable[Table], gpu: Gpu) -> None:
        self._gpu = gpu
        self._estimable = estimable(gpu.arch)
        self._of: dict[AttentionSpec, list[Donor]] = defaultdict(list)
        self._floors: dict[AttentionSpec, dict[str, float]] = {}
        lending = [table for table in tables if table.gpu.is_nvidia or not gpu.is_nvidia]
        lending.sort(key=lambda each: (each.gpu.arch != gpu.arch, unlikeness(each.gpu, gpu)))
        for table in lending:
            for entry in table.entries:
                if not is_derived(table, entry):
                    self._of[entry.spec].append(Donor(gpu=table.gpu, entry=entry))

    def chosen(
        self, spec: AttentionSpec, bucket: Bucket, *, on_gpu: bool
    ) -> dict[KernelConfig, str]:
        """What tables chose that is legal here, and the donor of each: this GPU's own first, then
        those for this bucket before others; GPUs of the same architecture before others, measured
        entries before others.
        Then up to ALIKE configs that they chose for specs that are alike. Last, without a GPU, the
        same tiles in another order: under windows and chunks, where blocks have about the same
        work, and of causal gradients.

        on_gpu: also kernels that only an entry may have that ran. Without a GPU the runners-up of
        their entries stand in for them.
        """
        own = [
            (config, donor)
            for donor in self._sorted(spec, bucket)
            for config in _lending(donor.entry, on_gpu=on_gpu)
        ]
        others = [
            (config, donor)
            for one in _alike(spec)
            for donor in self._sorted(one, bucket)
            for lent in _lending(donor.entry, on_gpu=on_gpu)
            for config in _plainer(lent, spec)
        ]
        gradient = spec.causal and spec.direction != "forward"
        if not on_gpu and (spec.window or spec.chunk or gradient):
            own += [(_in_other_order(config, spec), donor) for config, donor in own]
        found = self._legal(spec, own, on_gpu=on_gpu)
        alike = self._legal(spec, others, on_gpu=on_gpu)
        new = (item for item in alike.items() if item[0] not in found)
        return found | dict(itertools.islice(new, ALIKE))

    def runners_up(
        self, spec: AttentionSpec, bucket: Bucket, *, on_gpu: bool
    ) -> tuple[KernelConfig, ...]:
        """The runners-up of the entries of this spec, in the same order."""
        found = [
            (other.config, donor)
            for donor in self._sorted(spec, bucket)
            for other in donor.entry.evidence.runners_up
        ]
        return tuple(self._legal(spec, found, on_gpu=on_gpu))

    def _sorted(self, spec: AttentionSpec, bucket: Bucket) -> list[Donor]:
        return sorted(
            self._of[spec],
            key=lambda each: (
                each.gpu.slug != self._gpu.slug,
                each.entry.bucket != bucket,
                each.gpu.arch != self._gpu.arch,
                -STRENGTH[each.entry.result.source],
            ),
        )

    def _legal(
        self, spec: AttentionSpec, found: Iterable[tuple[KernelConfig, Donor]], *, on_gpu: bool
    ) -> dict[KernelConfig, str]:
        usable = [
            (config, donor)
            for config, donor in found
            if (on_gpu or not must_have_run(config))
            and why_illegal(spec, config.kernel, self._gpu) is None
        ]
        timed = [each for each in usable if each[1].entry.result.source != "untimed"]
        first: dict[KernelConfig, str] = {}
        for config, donor in timed if self._estimable and timed else usable:
            first.setdefault(config.kernel, donor.gpu.slug)
        return first

    def floors(self, spec: AttentionSpec) -> dict[str, float]:
        """The errors of kernels that were right when they were tuned, by their short digests.

        A pointer twin was right too, and has not changed where its kernel has not.
        """
        if spec not in self._floors:
            found = self._floors.setdefault(spec, {})
            for entry in (donor.entry for donor in self._of[spec]):
                kernels = (entry.config, entry.config.pointer_twin(spec))
                digests = [short_digest(rendered_digest(spec, each)) for each in kernels]
                if digests[0] == entry.evidence.digest:
                    for digest in digests:
                        found.setdefault(digest, entry.result.max_abs_err_floors)
        return self._floors[spec]


class CheckedByDonors(WrappingEvaluator):
    """`inner`, without a GPU, for kernels whose donors know their errors: a text does not depend on
    the GPU, so it is not checked again.
    """

    def __init__(self, inner: Evaluator, donors: Donors) -> None:
        super().__init__(inner)
        self._donors = donors

    def answers(
        self, request: Request, configs: Sequence[KernelConfig]
    ) -> Generator[Outcome, None, None]:
        """As BaseEvaluator.answers. A result that a donor knows names no cases."""
        spec, digests, floors = request.spec, {}, {}
        if request.stage == "check":
            digests = {config: rendered_digest(spec, config) for config in configs}
            floors = self._donors.floors(spec)
        known = {
            config: request.outcome(
                config, Status.OK, digest=digest, check=_known(floors[short_digest(digest)])
            )
            for config, digest in digests.items()
            if short_digest(digest) in floors
        }
        yield from self._beside(known, request, configs)


def _alike(spec: AttentionSpec) -> tuple[AttentionSpec, ...]:
    """Specs that do the same work, or it with less, nearest first: a cache in pages or without,
    without invariant, with padded head dims, in the other 16-bit type, without packing, without
    features.
    """
    pages = spec.direction == "decode" and spec.kv_scales != "page"
    near = (
        replace(spec, paged=not spec.paged) if pages else None,
        replace(spec, invariant=False),
        default_spec(spec),
        other_half(spec),
        replace(spec, varlen=False, paged=spec.paged and spec.direction in DECODING),
    )
    found = dict.fromkeys((*filter(None, near), *plainer_specs(spec)))
    return tuple(one for one in found if one != spec)


def _plainer(config: KernelConfig, spec: AttentionSpec) -> tuple[KernelConfig, ...]:
    """A config that another spec was given, and the forms of its tile that more specs can have."""
    textbook = config.textbook(spec)
    return tuple(dict.fromkeys((config, textbook, textbook.pointer_twin(spec))))


def _lending(entry: Entry, *, on_gpu: bool) -> tuple[KernelConfig, ...]:
    """What an entry lends: its config, or its runners-up where that must have run."""
    if on_gpu or not must_have_run(entry.config):
        return (entry.config,)
    return tuple(other.config for other in entry.evidence.runners_up)


def _in_other_order(config: KernelConfig, spec: AttentionSpec) -> KernelConfig:
    """The config in the likeliest order of tiles, or in plain order if it has that. With a window
    the order balances little, but it takes registers: 136 and 128 a thread, so three and four
    blocks on an SM of an L4 (docs/notes/2026-11-28-transfer.md).
    """
    likely = likely_order(spec)
    return replace(config, order="plain" if config.order == likely else likely)


def _known(floors: float) -> CheckResult:
    return CheckResult(
        passed=True,
        floors=floors,
        lse_error=0.0,
        cases=0,
        seed=0,
        where="interpreter",
        detail="checked for the table of another GPU",
    )


def derived_run(run: Run, donor: str) -> Run:
    """What a run is like for entries that `donor` lent."""
    return replace(run, id=f"{run.id}-{donor}", donor=donor)


def is_derived(table: Table, entry: Entry) -> bool:
    """Whether an entry's config was lent by another GPU's table, and searched by nobody here."""
    run = table.run_of(entry)
    return run is not None and run.derived and run.donor != table.gpu.slug
