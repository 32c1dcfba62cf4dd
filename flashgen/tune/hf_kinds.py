"""Which layers of a model see all keys, which have a window or chunks, and which have no attention.

Families say it by a word for each layer, by lists of layers, or by numbers such as "every sixth".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from flashgen.spec.records import shown
from flashgen.tune.hf_fields import Fields

Side = Literal["encoder", "decoder"]
LayerKind = Literal["full", "sliding", "chunked", "none"]

_EVERY_OTHER = ("gemma2", "gpt_oss")
"""Models whose layers have the window and the full mask in turn, where no list says so."""
_KINDS: dict[Any, LayerKind] = {
    **dict.fromkeys(("full_attention", "attention", "global", "hybrid", "*", "full", "G"), "full"),
    **dict.fromkeys(("sliding_attention", "local", "sliding", "hybrid_sliding", "L"), "sliding"),
    "chunked_attention": "chunked",
    **dict.fromkeys(
        ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "moe", "mlp", "M", "-", "E"),
        "none",
    ),
}
_LISTS: dict[str, dict[Any, LayerKind]] = {
    "layer_types": _KINDS,
    "layers_block_type": _KINDS,
    "hybrid_override_pattern": _KINDS,
    "attn_type_list": {0: "none", 1: "full"},  # of MiniMax
    "hybrid_layer_pattern": {0: "full", 1: "sliding"},  # of MiMo
}
"""Fields with a word for each layer."""
_PLACES = ("attn_layer_indices", "full_attn_idxs")
"""Fields that list the layers with attention, of models whose others have none."""


class Unread(Exception):
    """A field decides and cannot be read; the message says which."""


def kinds_of(fields: Fields, side: Side | None) -> Sequence[LayerKind]:
    """The kind of each layer. Raises InvalidArgument, Unread."""
    layers = fields.number("layers", side=side)
    for name, words in _LISTS.items():
        listed = fields.get(name)
        if isinstance(listed, str if "pattern" in name and words is _KINDS else list) and listed:
            fields.skip("pattern")
            return _words(name, listed, words, layers)
    if layers is None:
        layers = 1
    pattern = fields.get("block_types")  # of Griffin, repeated
    if isinstance(pattern, list) and pattern:
        kinds = _words("block_types", pattern, _KINDS, len(pattern))
        local = fields.number("window") is not None
        kinds = ["sliding" if local and kind == "full" else kind for kind in kinds]
        return [kinds[layer % len(kinds)] for layer in range(layers)]
    types = fields.get("attention_types")  # of GPT-Neo: words, and how often they are repeated
    if isinstance(types, list):
        return _words("attention_types", _repeated(types, layers), _KINDS, layers)
    places = next((p for name in _PLACES if isinstance(p := fields.get(name), list)), None)
    linear = fields.get("linear_attn_config")  # of Kimi; layers begin at 1
    if isinstance(linear, dict) and isinstance(linear.get("full_attn_layers"), list):
        places = [place - 1 for place in linear["full_attn_layers"] if isinstance(place, int)]
    if places is not None:
        return ["full" if layer in places else "none" for layer in range(layers)]
    return _in_turn(fields, layers)


def _repeated(types: list[Any], layers: int) -> list[Any]:
    found: list[Any] = []
    for each in types:
        match each:
            case [list() as words, int() as times] if 0 < times <= layers:
                found += words * times
            case _:
                raise Unread(f"attention_types has {shown(each)}, no words and their number")
    return found


def _words(
    name: str, listed: Sequence[Any], words: Mapping[Any, LayerKind], layers: int | None
) -> list[LayerKind]:
    if layers is not None and len(listed) < layers:
        raise Unread(f"{name} lists {len(listed)} of {layers} layers")
    for word in listed:
        if not isinstance(word, str | int) or word not in words:
            raise Unread(f"{name} has {shown(word)}, an attention that flashgen does not know")
    return [words[word] for word in listed[:layers]]


def _in_turn(fields: Fields, layers: int) -> Sequence[LayerKind]:
    """The kinds where a number says which layers differ."""
    span = range(layers)
    every = _step(fields, "attn_layer_period")  # of Jamba
    if every:
        offset = fields.get("attn_layer_offset")
        first = offset if isinstance(offset, int) else 0
        return ["full" if layer % every == first else "none" for layer in span]
    every = _step(fields, "full_attention_interval")  # of Qwen3-Next
    if every:
        return ["none" if (layer + 1) % every else "full" for layer in span]
    chunk = fields.number("chunk")
    if chunk is not None:
        rotary = fields.get("no_rope_layers")  # 1: a layer with rotary embedding, and chunks
        if isinstance(rotary, list) and rotary:
            return ["chunked" if each else "full" for each in rotary[:layers]]
        every = _step(fields, "no_rope_layer_interval") or 4
        return ["chunked" if (layer + 1) % every else "full" for layer in span]
    if (fields.number("window") or 0) > 0 and fields.get("use_sliding_window") is not False:
        return _windowed(fields, layers)
    return ["full"] * layers


def _windowed(fields: Fields, layers: int) -> Sequence[LayerKind]:
    """The kinds of a model with a window."""
    span = range(layers)
    pattern = fields.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        kinds = [_KINDS[pattern[layer % len(pattern)]] for layer in span]
        return [*kinds[:-1], "full"]  # EXAONE: the last layer always sees all
    every = _step(fields, "sliding_window_pattern")
    if every:
        return ["sliding" if (layer + 1) % every else "full" for layer in span]
    every = _step(fields, "global_attn_every_n_layers")
    if every:
        first = 0 if fields.type == "modernbert" else 1
        return ["sliding" if (layer + first) % every else "full" for layer in span]
    if fields.type in _EVERY_OTHER:
        return ["full" if layer % 2 else "sliding" for layer in span]
    least = fields.get("max_window_layers")  # of Qwen2: the first ones see all
    if isinstance(least, int) and fields.get("use_sliding_window") is True:
        return ["sliding" if layer >= least else "full" for layer in span]
    return ["sliding"] * layers


def _step(fields: Fields, name: str) -> int:
    value = fields.get(name)
    whole = isinstance(value, int) and not isinstance(value, bool)
    return int(value) if whole and value > 0 else 0
