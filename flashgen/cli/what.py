"""What to tune or compare: options for a model, a workload or specs, and the searches they name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashgen.cli.options import (
    CausalOption,
    Directions,
    DTypes,
    FeatureNames,
    HeadDimsOption,
    Kv,
    NoFeature,
    Paged,
    cache_fields,
    check_least,
    check_no_feature,
    named_directions,
    named_spec,
    spec_filter,
    with_cache,
)
from flashgen.errors import InvalidArgument
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.features import masks_of
from flashgen.spec.problem import Problem, workload

if TYPE_CHECKING:
    from flashgen.tune.workloads import WeightedPiece

Pieces = tuple[tuple[AttentionSpec, Problem], ...]


@dataclass(frozen=True, kw_only=True)
class What:
    """What: a model, a workload, or specs."""

    hf_config: Annotated[
        Path | None, typer.Option(help="config.json of a model on Hugging Face.")
    ] = None
    workload: Annotated[
        Path | None, typer.Option(help="YAML file of specs, lengths and their weights.")
    ] = None
    direction: Directions = None
    dtype: DTypes = None
    head_dim: HeadDimsOption = None
    causal: CausalOption = None
    seq: Annotated[
        list[int] | None,
        typer.Option(help="Number of keys, 4096 by default; it stands for its bucket. Repeatable."),
    ] = None
    feature: FeatureNames = None
    no_feature: NoFeature = False
    invariant: Annotated[
        bool,
        typer.Option(help="Only kernels that give the same bits in any batch: for invariant=True."),
    ] = False
    paged: Paged = False
    kv: Kv = None

    def __post_init__(self) -> None:
        for length in self.seq or ():
            check_least("--seq", length, 1)
        check_no_feature(self.feature, self.no_feature)
        listed = (self.dtype, self.head_dim, self.causal, self.seq, self.feature)
        of_both = (self.direction, self.paged or None, self.kv)
        if self.workload is not None and self.hf_config is not None:
            raise InvalidArgument("--workload and --hf-config exclude each other: name one")
        if self.workload is not None and any(each is not None for each in (*listed, *of_both)):
            raise InvalidArgument(
                "--workload says what to tune: leave out "
                "--dtype, --head-dim, --causal, --feature, --seq, --direction, --paged and --kv, "
                "or put them into the file"
            )
        if self.hf_config is not None and any(each is not None for each in listed):
            raise InvalidArgument(
                "--hf-config says what to tune: "
                "leave out --dtype, --head-dim, --causal, --feature and --seq"
            )

    @property
    def in_file(self) -> bool:
        """Whether a file says what is meant."""
        return self.workload is not None or self.hf_config is not None

    @property
    def names_specs(self) -> bool:
        """Whether options say which specs are meant."""
        return any(
            (self.direction, self.dtype, self.head_dim, self.seq, self.features, self.cache)
        ) or (self.causal is not None)

    @property
    def features(self) -> list[str]:
        """The words of all features that are given."""
        return [*(self.feature or ()), *["invariant"] * self.invariant]

    @property
    def cache(self) -> Mapping[str, Any]:
        """The fields of a cache that are given."""
        return cache_fields(self.paged, self.kv)

    def specs(self) -> tuple[AttentionSpec, ...]:
        """All specs that the options name."""
        self._demand_tables()
        features = self.features
        either = [mask == "causal" for mask in masks_of(features)]
        backward = "backward" in (self.direction or ())
        kernels = named_directions(self.direction or ["forward"])
        if backward and "bias" in features:
            kernels += [] if "backward_dbias" in kernels else ["backward_dbias"]
        if backward and "invariant" in features:
            kernels = [kernel for kernel in kernels if kernel != "backward_fused"]
        named = [
            named_spec(word, dims, masked).with_features(features).for_direction(kernel)
            for kernel in kernels
            for word in self.dtype or ["bf16"]
            for dims in self.head_dim or ["64", "128"]
            for masked in (either if self.causal is None else [self.causal])
        ]
        return tuple(with_cache(spec, self.cache) for spec in named)

    def pieces(self, say: Callable[[str], object]) -> Pieces:
        """What is searched for the file, heaviest first, after printing it; without one nothing.
        Raises InvalidArgument.
        """
        return tuple((piece.spec, piece.problem) for piece in self._of_file(say))

    def weighted(self, say: Callable[[str], object]) -> tuple[WeightedPiece, ...]:
        """The pieces of the file; without one those of specs and lengths, which weigh the same.
        Raises InvalidArgument.
        """
        if self.in_file:
            return self._of_file(say)
        from flashgen.tune.options import DEFAULT_SEQ
        from flashgen.tune.workloads import WeightedPiece

        return tuple(
            WeightedPiece(spec=spec, problem=workload(spec, seq))
            for spec in self.specs()
            for seq in self.seq or [DEFAULT_SEQ]
        )

    def _of_file(self, say: Callable[[str], object]) -> tuple[WeightedPiece, ...]:
        """The pieces of the file, after printing it; without one none. With --invariant each is in
        its numeric class, but for the fused backward, which adds up in any order.
        """
        self._demand_tables()
        from flashgen.tune import hf_config, workloads

        if self.workload is not None:
            found = workloads.load(self.workload)
        elif self.hf_config is not None:
            directions = tuple(self.direction or ["forward"])
            found = hf_config.from_hf_config(
                self.hf_config, directions=directions, cache=self.cache
            )
        else:
            return ()
        for line in (f"{found.name}:", *found.lines(), *found.notes):
            say(line)
        if not self.invariant:
            return found.pieces
        return tuple(
            replace(piece, spec=replace(piece.spec, invariant=True))
            for piece in found.pieces
            if piece.spec.direction != "backward_fused"
        )

    def _demand_tables(self) -> None:
        if self.no_feature:
            raise InvalidArgument(
                "--no-feature selects specs of tables: leave it out, or add --from-tables to tune "
                "without a file"
            )

    def of_tables(self, out: Path) -> Pieces:
        """What tables hold of all that the options name. Raises InvalidArgument if nothing."""
        from flashgen.table.emit import tables_for
        from flashgen.tune import workloads

        wanted = spec_filter(
            self.direction,
            self.dtype,
            self.head_dim,
            self.causal,
            self.features,
            only=self.no_feature,
        )
        cache = self.cache.items()
        found = workloads.of_tables(
            tables_for(out, evidence=True).values(),
            lambda spec: wanted(spec) and cache <= asdict(spec).items(),
            self.seq,
        )
        if not found:
            raise InvalidArgument(
                "--from-tables needs a spec and a length of a table, and the options name none "
                "that a table has: leave out some, or --from-tables"
            )
        return found
