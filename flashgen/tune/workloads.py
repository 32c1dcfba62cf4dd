"""Workload: what to tune, in order; read from a YAML file written by hand.

The order is by weight, heaviest first; equal weights follow the order of the file. So a run that is
stopped, or whose time is up, has tuned what matters most.

Each piece runs the standard problem of spec.workload, which fills a GPU, with the model's ratio of
query heads to heads of K and V.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from flashgen.errors import InvalidArgument
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.features import FEATURES, OFF, features_on
from flashgen.spec.problem import BUCKETS, Bucket, Problem, bucket_of, workload
from flashgen.spec.vocabulary import BACKWARD, Direction, Mask, Precision, parse_dtype
from flashgen.table.yaml import Nodes, text_of

if TYPE_CHECKING:
    import yaml

    from flashgen.table.table import Table


@dataclass(frozen=True, kw_only=True)
class WeightedPiece:
    """One search of a workload. weight: its relative weight, above 0."""

    spec: AttentionSpec
    problem: Problem
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise InvalidArgument(f"weight must be finite and more than 0: got {self.weight}")

    @property
    def key(self) -> tuple[AttentionSpec, Bucket]:
        """The key of its entry in a table."""
        return self.spec, bucket_of(self.problem.seq_k)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What to tune, by weight, without duplicate specs and buckets.

    notes: sentences for the user on what could not be included.
    """

    name: str
    pieces: tuple[WeightedPiece, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, pieces: Iterable[WeightedPiece], notes: Iterable[str] = ()) -> Workload:
        """The workload of these pieces. Of one spec and bucket the heaviest piece stays:
        backward_delta, for one, has no mask and serves several specs.
        """
        found: dict[tuple[AttentionSpec, Bucket], WeightedPiece] = {}
        for piece in pieces:
            held = found.setdefault(piece.key, piece)
            if piece.weight > held.weight:
                found[piece.key] = piece
        order = sorted(found.values(), key=lambda piece: -piece.weight)
        return cls(name=name, pieces=tuple(order), notes=tuple(notes))

    @property
    def work(self) -> tuple[tuple[AttentionSpec, Problem], ...]:
        """What is searched, in order."""
        return tuple((piece.spec, piece.problem) for piece in self.pieces)

    def lines(self) -> list[str]:
        """One line per piece: its share of all weights, and its name."""
        total = sum(piece.weight for piece in self.pieces)
        return [
            f"{piece.weight / total:5.1%}  {piece.spec.name} seq {piece.problem.seq_k}, "
            f"heads {piece.problem.heads}/{piece.problem.kv_heads}"
            for piece in self.pieces
        ]


def problem_of(spec: AttentionSpec, seq: int, group: int = 1) -> Problem:
    """The standard problem at length `seq` with `group` query heads per head of K and V.

    The number of query heads is as near to that of spec.workload as whole groups allow.
    """
    if group < 1:
        raise InvalidArgument(f"group must be at least 1: got {group}")
    filling = workload(spec, seq)
    kv_heads = max(1, filling.heads // group)
    return replace(filling, heads=kv_heads * group, kv_heads=kv_heads)


CACHE = tuple(dict.fromkeys(row.field for row in FEATURES if not row.word))
"""The fields of a spec that describe a cache: its pages, and the dtype of its elements."""


def one_token_step(spec: AttentionSpec, cache: Mapping[str, Any]) -> AttentionSpec:
    """The spec that decode() looks for when a model with this attention generates one token.

    The token sees every key, so a causal mask stays only where a feature needs it. `cache` has
    fields of CACHE. Raises InvalidArgument.
    """
    needed: Mask = next((row.mask for row in features_on(spec) if row.mask), "none")
    step = spec.for_direction("decode")
    return replace(step, mask=needed, dropout=False, **cache)


PACKED_WORDS = "packed_forward", "packed_backward", "paged_prefill"


def kernels_of(
    spec: AttentionSpec, words: Iterable[str], cache: Mapping[str, Any] | None = None
) -> list[AttentionSpec]:
    """The specs of all kernels that these words name for the attention of a forward spec.

    A word is forward; backward, all kernels of the gradients, or one of them; packed_forward and
    packed_backward, the same of packed sequences; paged_prefill, packed queries over keys in pages;
    or decode: a one-token step over a cache, which has the fields of CACHE that are given. Raises
    InvalidArgument.
    """
    words = tuple(words)
    if cache and "decode" not in words:
        raise InvalidArgument(f"{', '.join(cache)} needs direction decode: add it")
    found: list[AttentionSpec] = []
    for word in words:
        if word == "decode":
            found.append(one_token_step(spec, cache or {}))
        elif word == "paged_prefill":
            found.append(replace(spec, varlen=True, paged=True, dropout=False))
        elif word in ("packed_forward", "packed_backward"):
            found += _kernels(replace(spec, varlen=True), word.removeprefix("packed_"))
        elif word in ("backward", *get_args(Direction)):
            found += _kernels(spec, word)
        else:
            known = ", ".join(("backward", *get_args(Direction), *PACKED_WORDS))
            raise InvalidArgument(f"directions must be some of {known}: got {word!r}")
    return list(dict.fromkeys(found))


def _kernels(spec: AttentionSpec, word: str) -> list[AttentionSpec]:
    """The kernels of a direction, or of the whole backward."""
    if word != "backward":
        return [spec.for_direction(word)]  # type: ignore[arg-type]  # a direction
    bias: tuple[Direction, ...] = ("backward_dbias",) if spec.bias == "additive" else ()
    return [spec.for_direction(direction) for direction in (*BACKWARD, *bias)]


MOST_USED = BUCKETS[2]
"""The bucket that comes first: the others of a spec run its entry until they have their own."""


def of_tables(
    tables: Iterable[Table],
    wanted: Callable[[AttentionSpec], bool] = lambda _: True,
    seqs: Iterable[int] | None = None,
) -> tuple[tuple[AttentionSpec, Problem], ...]:
    """What tables hold, the most used first.

    wanted: which specs. seqs: lengths to run in place of those of the tables, one per bucket. Of
    several problems for a bucket that of most tables counts.
    """
    counted: dict[tuple[AttentionSpec, Bucket], Counter[Problem]] = defaultdict(Counter)
    for table in tables:
        for entry in table.entries:
            if wanted(entry.spec):
                counted[entry.key][entry.problem] += 1
    held = {key: problems.most_common(1)[0][0] for key, problems in counted.items()}
    if seqs is not None:
        lengths = {bucket_of(seq): seq for seq in seqs}
        held = {
            (spec, bucket): workload(spec, lengths[bucket])
            for spec, bucket in held
            if bucket in lengths
        }
    order = sorted(held, key=lambda key: (key[1] != MOST_USED, _use(key[0]), key[1].low))
    return tuple((spec, held[spec, bucket]) for spec, bucket in order)


def _use(spec: AttentionSpec) -> tuple[Any, ...]:
    """Sorts specs by use, the most used first; judged, not counted."""
    dims = (128, 64, 256)
    return (
        spec.dtype != "bfloat16",
        spec.direction not in ("forward", "decode"),
        len(spec.feature_words),
        dims.index(spec.head_dim) if spec.head_dim in dims else len(dims),
        spec.sort_key,
    )


def load(path: Path) -> Workload:
    """The workload of a YAML file. Raises InvalidArgument that names file, line and remedy."""
    try:
        text = text_of(path, InvalidArgument)
    except FileNotFoundError:
        raise InvalidArgument(
            f"{path}: there is no such workload; examples/workloads/ of flashgen has some to copy"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(
            f"{path}: cannot be read as UTF-8 text ({error}); name a YAML file"
        ) from None
    return parse(text, path)


def parse(text: str, path: Path) -> Workload:
    """The workload in a text; `path` appears in errors. Raises InvalidArgument."""
    nodes = Nodes(path, InvalidArgument)
    parts = nodes.keys(nodes.root(text), ("name", "specs"))
    name = nodes.value(parts["name"], str, "name")
    pieces: list[WeightedPiece] = []
    lines: dict[tuple[AttentionSpec, Bucket], int] = {}
    for node in nodes.items(parts["specs"], "specs"):
        for piece, mark in _pieces(nodes, node):
            spec, bucket = piece.key
            if piece.key in lines and spec.direction != "backward_delta":  # it serves several
                nodes.fail(
                    mark,
                    f"{spec.name} {bucket} is in line {lines[piece.key]} already, and "
                    f"one length stands for a bucket; remove one of them",
                )
            lines[piece.key] = mark.line + 1
            pieces.append(piece)
    if not pieces:
        nodes.fail(parts["specs"].start_mark, "specs must hold a spec and a length; add them")
    return Workload.of(name, pieces)


@dataclass(frozen=True, kw_only=True)
class _Plain:
    """One spec of a file without its lengths and features: heads and kv_heads are the model's."""

    dtype: str
    head_dim: int
    mask: Mask
    head_dim_v: int | None = None
    precision: Precision = "ieee"
    heads: int = 1
    kv_heads: int | None = None
    directions: tuple[str, ...] = ("forward",)
    weight: float = 1.0

    def __post_init__(self) -> None:
        self.kernels()
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        if not kv_heads or self.heads < kv_heads or self.heads % kv_heads:
            raise InvalidArgument(
                f"heads must be a multiple of kv_heads: got {self.heads} and {kv_heads}"
            )

    @property
    def group(self) -> int:
        """Query heads per head of K and V."""
        return self.heads // (self.kv_heads or self.heads)

    def kernels(self) -> list[AttentionSpec]:
        """The specs of all directions."""
        forward = AttentionSpec(
            dtype=parse_dtype(self.dtype),  # type: ignore[arg-type]  # it returns no other
            head_dim=self.head_dim,
            head_dim_v=self.head_dim if self.head_dim_v is None else self.head_dim_v,
            mask=self.mask,
            precision=self.precision,
            **{name: getattr(self, name) for name in OFF if name not in CACHE},
        )
        cache = {name: getattr(self, name) for name in CACHE if getattr(self, name) != OFF[name]}
        return kernels_of(forward, self.directions, cache)


_TYPES = get_type_hints(AttentionSpec)
_Request: Any = make_dataclass(
    "_Request",
    [(name, _TYPES[name], field(default=off)) for name, off in OFF.items()],
    bases=(_Plain,),
    frozen=True,
    kw_only=True,
)
"""A spec of a file with its features, each a key that a table has too."""


def _pieces(nodes: Nodes, node: yaml.Node) -> Iterator[tuple[WeightedPiece, yaml.Mark]]:
    """The pieces of one spec of a file: for each length all directions, with the length's line."""
    request = nodes.record(node, _Request, beside=("seqs",))
    for seq, weight, mark in _weights(nodes, nodes.keys(node, None)["seqs"]):
        for spec in request.kernels():
            try:
                problem = problem_of(spec, seq, request.group)
                yield (
                    WeightedPiece(spec=spec, problem=problem, weight=weight * request.weight),
                    mark,
                )
            except InvalidArgument as error:
                nodes.fail(mark, f"{error}; correct it")


def _weights(nodes: Nodes, node: yaml.Node) -> list[tuple[int, float, yaml.Mark]]:
    """The lengths of `seqs` and their weights: all 1 for a list, or those of a mapping."""
    if nodes.is_list(node):
        found = nodes.items(node, "seqs")
        return [
            (nodes.value(each, int, "a length of seqs"), 1.0, each.start_mark) for each in found
        ]
    lengths = []
    for seq, weight in nodes.keys(node, None).items():
        if not re.fullmatch(r"[0-9]{1,18}", seq):
            nodes.fail(weight.start_mark, f"a length of seqs must be a whole number: got {seq!r}")
        value = nodes.value(weight, float, f"the weight of length {seq}")
        lengths.append((int(seq), value, weight.start_mark))
    return lengths
