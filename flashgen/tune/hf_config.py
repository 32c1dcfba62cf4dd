"""Reads the Workload of the attention of a model from its Hugging Face config.json.

hf_fields reads the fields, hf_layers says which attention they describe. A model may have several:
text, vision and sound, encoder and decoder. Each is tuned at one length per bucket, up to the
longest that the model takes. Weight is layers times the most keys that a query sees, the work of
attention per token, so the longest length of the deepest part comes first.

Nothing that decides is dropped in silence: a part that cannot be read is named, and so are fields
that look as if they decided. If it is the model itself, the file is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashgen.errors import InvalidArgument
from flashgen.files import content_of
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import BUCKET_SEQ, TUNED_CHUNK, TUNED_WINDOW
from flashgen.spec.records import parsed, shown
from flashgen.spec.vocabulary import parse_dtype
from flashgen.tune.hf_fields import Fields, completed
from flashgen.tune.hf_kinds import Unread
from flashgen.tune.hf_layers import Attention, NoAttention, attentions, is_main, sides
from flashgen.tune.workloads import WeightedPiece, Workload, kernels_of, problem_of

_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "dropout_rate")
_NAMED = tuple(
    f"{part}_config" for part in ("text", "llm", "language", "vision", "audio", "speech")
)
"""Parts that are named where they have no attention that is known."""
_DEEPEST = 3
"""How deep parts of parts are looked for."""


def from_hf_config(
    path: Path, *, directions: Sequence[str] = ("forward",), cache: Mapping[str, Any] | None = None
) -> Workload:
    """The workload of a Hugging Face model's configuration.

    Args:
        path: config.json, or the model's folder.
        directions: as workloads.kernels_of; with the backward the model trains, with its dropout.
        cache: as workloads.kernels_of: how decode finds its keys.

    Returns:
        The specs and sizes of all layers.

    Raises:
        InvalidArgument: for a file that cannot be read, a field that decides and is not known, or
            an attention that no kernel supports.

    Examples:
        >>> from flashgen.tune.hf_config import from_hf_config
        >>> workload = from_hf_config(Path("Llama-3.1-8B/config.json"))  # doctest: +SKIP
    """
    path = path / "config.json" if path.is_dir() else path
    root = completed(_read(path))
    name = root.type or "of no model_type"
    training = any("backward" in word for word in directions)
    pieces: list[WeightedPiece] = []
    notes: list[str] = []
    without: list[str] = []
    for where, part in parts_of(root):
        try:
            found = attentions_of(part, where)
            for attention, layers in found:
                spec = _spec(root, part, attention, training)
                asked = [word for word in directions if word != "decode" or _decodes(attention)]
                if len(asked) < len(directions):
                    notes.append(f"{where} sees all tokens at once: no decode is tuned for it")
                for each in kernels_of(spec, asked, cache if "decode" in asked else None):
                    pieces += _pieces(each, attention, layers)
        except (NoAttention, Unread) as error:
            if is_main(where) and isinstance(error, Unread):
                raise InvalidArgument(f"{path}, {where}: {error}; write a workload") from None
            without.append(f"{where}{':' * isinstance(error, Unread)} {error}")
            continue
        except InvalidArgument as error:
            raise InvalidArgument(f"{path}, {where}: {error}") from None
        notes += _remarks(root, part, [attention for attention, _ in found])
    if not pieces:
        raise InvalidArgument(
            f"{path}: {name} has no attention that flashgen knows ({'; '.join(without or notes)}): "
            f"name another configuration, or write a workload"
        )
    left_out = [f"{reason}: it is left out" for reason in without]
    return Workload.of(name, pieces, dict.fromkeys([*left_out, *notes]))


def _read(path: Path) -> dict[str, Any]:
    try:
        config = parsed(content_of(path), finite=False)  # some have Infinity
    except FileNotFoundError:
        raise InvalidArgument(
            f"{path}: there is no such file; name the config.json of a model"
        ) from None
    except OSError as error:
        raise InvalidArgument(
            f"{path} cannot be read ({error.strerror}); name the config.json of a model"
        ) from None
    except ValueError as error:  # of JSON, and of UTF-8
        raise InvalidArgument(f"{path}: this is not JSON ({error}); download it again") from None
    if not isinstance(config, dict):
        raise InvalidArgument(f"{path}: a configuration must be a JSON object; download it again")
    return config


def parts_of(root: Fields) -> list[tuple[str, Fields]]:
    """The parts of a configuration that may have an attention, and their names.

    A text model that is nested stands for the fields at the top, which some files repeat.
    """
    found: list[tuple[str, Fields]] = []
    level = [("", root)]
    for _ in range(_DEEPEST):
        level = [(f"{above}{name}.", each) for above, part in level for name, each in part.parts()]
        found += [(where[:-1], part) for where, part in level if _may_have(where, part)]
    if any(is_main(where) for where, _ in found):
        return found
    return [("the model", root), *found]


def _may_have(where: str, part: Fields) -> bool:
    """Whether it has heads and a width: settings of one attention inside a model have no width."""
    names = [name for side in sides(part) for name in part.names("heads", side)]
    both = any(map(part.has, names)) and any(map(part.has, part.names("width")))
    return both or where.split(".")[-2] in _NAMED


def attentions_of(part: Fields, where: str) -> list[tuple[Attention, int]]:
    """The attentions of a part with their numbers of layers, of all sides. Raises as attentions."""
    return [found for side in sides(part, where) for found in attentions(part, where, side)]


def _spec(root: Fields, part: Fields, attention: Attention, training: bool) -> AttentionSpec:
    named = _dtype_of(root, part)
    return AttentionSpec(
        dtype=parse_dtype(named or "bfloat16"),  # type: ignore[arg-type]  # it returns no other
        head_dim=attention.head_dim,
        head_dim_v=attention.head_dim_v,
        mask=attention.mask,
        dropout=training and any(part.get(name) for name in _DROPOUT),
        bias="additive" if attention.bias else "none",
        alibi=attention.alibi,
        window=attention.window > 0,
        chunk=attention.chunk > 0,
        softcap=attention.softcap,
        sink=attention.sink,
    )


def _dtype_of(root: Fields, part: Fields) -> str | None:
    """The dtype that a part names, or the model; None for none and for auto."""
    for name in ("dtype", "torch_dtype"):
        for fields in (part, root):
            if (named := fields.given.get(name)) not in (None, "auto"):
                return str(named).removeprefix("torch.")
    return None


def _decodes(attention: Attention) -> bool:
    """Whether a model generates with it, a token at a time. Queries of a decoder over the keys of
    an encoder are as those of its own layers.
    """
    return attention.mask == "causal"


def _pieces(spec: AttentionSpec, attention: Attention, layers: int) -> Iterator[WeightedPiece]:
    """One piece for each bucket that the sequences of these layers fall into."""
    group = attention.heads // attention.kv_heads
    window = attention.window * (1 if attention.mask == "causal" else 2)
    for seq in _lengths(attention):
        seen = min(seq, window or seq, attention.chunk or seq)
        yield WeightedPiece(
            spec=spec, problem=problem_of(spec, seq, group), weight=float(layers * seen)
        )


def _lengths(attention: Attention) -> list[int]:
    """A length for each bucket that sequences fall into; none is longer than the model takes."""
    length = attention.length
    if attention.fixed and length is not None:
        return [length]
    longest = math.inf if length is None else length
    return [min(seq, length or seq) for b, seq in BUCKET_SEQ.items() if b.low <= longest]


def _remarks(root: Fields, part: Fields, found: Sequence[Attention]) -> Iterator[str]:
    """Sentences on differences between what is tuned and what the model runs, and on fields that
    were not read.
    """
    if _dtype_of(root, part) is None:
        yield "the configuration names no dtype: bfloat16 is tuned"
    for window in dict.fromkeys(each.window for each in found):
        if window not in (0, TUNED_WINDOW):
            yield (
                f"sliding_window is {window} keys: its kernels are tuned with a window of "
                f"{TUNED_WINDOW}"
            )
    for chunk in dict.fromkeys(each.chunk for each in found):
        if chunk not in (0, TUNED_CHUNK):
            yield f"a chunk is {chunk} keys: its kernels are tuned with chunks of {TUNED_CHUNK}"
    if any(each.length is None for each in found):
        yield "the configuration names no longest sequence: all buckets are tuned"
    for what, names in part.unread().items():
        said = ", ".join(f"{name} {shown(value)}" for name, value in names.items())
        yield f"not read, though it looks like {what}: {said}"
    if not part.known:
        mask = "causal" if any(each.mask == "causal" for each in found) else "off, too"
        yield (
            f"transformers does not complete {part.type or 'a file without a model_type'}: the "
            f"mask is {mask}, what no field says is off, and these were read: "
            f"{', '.join(part.read())}"
        )
