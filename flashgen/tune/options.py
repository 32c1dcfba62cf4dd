"""The options of `flashgen tune`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from flashgen.errors import InvalidArgument
from flashgen.search.goal import Budget, Method
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem, bucket_of, workload
from flashgen.tune.places import TargetOptions
from flashgen.tune.share_kernels import MAX_REGRET

Piece = tuple[AttentionSpec, Problem]

DEFAULT_SEQ = 4096


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """The options of `flashgen tune`. Raises InvalidArgument.

    where: the GPUs; cluster: the Ray that has them, as cluster.connected has it. seqs: lengths to
    run, at most one per bucket; pieces: those of a workload instead. budget.seconds is for all
    specs together. shard: (i, n) for the i-th of n parts of the specs, from 1.
    """

    specs: tuple[AttentionSpec, ...] = ()
    seqs: tuple[int, ...] = (DEFAULT_SEQ,)
    where: TargetOptions = field(default_factory=TargetOptions)
    cluster: str | None = None
    budget: Budget = field(default_factory=Budget)
    method: Method = field(default_factory=lambda: Method(likely_first=True))
    out: Path = Path()
    from_tables: bool = False
    improve_only: bool = False
    retry_quarantined: bool = False
    max_regret: float = MAX_REGRET
    shard: tuple[int, int] = (1, 1)
    pieces: tuple[Piece, ...] = ()

    def __post_init__(self) -> None:
        for number, seq in enumerate(self.seqs):
            for other in self.seqs[:number]:
                if bucket_of(seq) == bucket_of(other):
                    raise InvalidArgument(
                        f"seq must name at most one length a bucket: "
                        f"got {other} and {seq} of {bucket_of(seq)}"
                    )
        specs = len({spec for spec, _ in self.work})  # raises for a length that cannot be
        part, parts = self.shard
        if not 1 <= part <= parts <= specs:
            raise InvalidArgument(
                f"shard must be i/n, i from 1 to n, and n at most the number of specs, "
                f"{specs}: got {part}/{parts}"
            )

    @property
    def work(self) -> tuple[Piece, ...]:
        """What all shards search together, in order."""
        if self.pieces:
            return self.pieces
        specs = dict.fromkeys(self.specs)
        return tuple((spec, workload(spec, seq)) for spec in specs for seq in sorted(self.seqs))

    @property
    def searches(self) -> tuple[Piece, ...]:
        """What this shard searches, in order: specs are dealt out, with all their lengths."""
        part, parts = self.shard
        mine = tuple(dict.fromkeys(spec for spec, _ in self.work))[part - 1 :: parts]
        return tuple(piece for piece in self.work if piece[0] in mine)
