"""Reads the Workload of the attention of a model from its Hugging Face config.json.

Where transformers is installed and knows the model type, its AutoConfig completes the file: what
a file leaves out has the default of the model's class, and layer_types are listed. Without it, and
for models it does not know, the file is read as it is. Nothing is looked up on the network.

Model families use different names; _NAMES has those that are read. A model may have several
attentions: text and vision, encoder and decoder. Each is tuned at one length per bucket, up to the
longest that the model takes. Weight is layers times length, the work of attention per token, so the
longest length of the deepest part comes first.
"""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from flashgen.errors import InvalidArgument
from flashgen.files import content_of
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import BUCKET_SEQ, TUNED_WINDOW
from flashgen.spec.records import parsed, shown
from flashgen.spec.vocabulary import Mask, parse_dtype
from flashgen.tune.workloads import Piece, Workload, kernels_of, problem_of

Side = Literal["encoder", "decoder"]

LARGEST = 2**31 - 1
"""No number of a configuration that is read is larger."""

MOST = 2**20
"""A file with a larger count of anything is not given to transformers, which lists layers and
labels one by one."""

_COUNTS = ("num_", "n_", "encoder_", "decoder_")
"""How names of counts begin."""

_NAMES: dict[str, tuple[str, ...]] = {
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads"),
    "width": ("hidden_size", "n_embd", "d_model", "dim"),
    "head_dim": ("head_dim", "d_kv", "kv_channels"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "length": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
    "registers": ("num_register_tokens",),
}
_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "dropout_rate")
_PARTS = ("text_config", "vision_config")
_SEES_ALL = {
    # Encoders of text and sound: every token sees every other.
    "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "esm",
    "eurobert", "hubert", "layoutlm", "modernbert", "mpnet", "nomic_bert", "roberta", "roformer",
    "siglip_text_model", "siglip2_text_model", "wav2vec2", "wavlm", "xlm-roberta",
}  # fmt: skip
_CAPPED = "attn_logit_softcapping"
_EVERY_OTHER = ("gemma2", "gpt_oss")
"""Models whose layers have the window and the full mask in turn, where no list says so."""


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
        InvalidArgument: for a file that cannot be read, or an attention that no kernel supports.

    Examples:
        >>> from flashgen.tune.hf_config import from_hf_config
        >>> workload = from_hf_config(Path("Llama-3.1-8B/config.json"))  # doctest: +SKIP
    """
    path = path / "config.json" if path.is_dir() else path
    config = _completed(_read(path))
    name = str(config.get("model_type", "of no model_type"))
    training = any(word not in ("forward", "decode") for word in directions)
    pieces: list[Piece] = []
    notes: list[str] = []
    without: list[str] = []
    for where, part in _parts(config):
        try:
            for layers in _layers_alike(part):
                model = _Model(layers, training=training, sees=where == "vision_config")
                pieces += list(_pieces(model, directions, cache, notes))  # all or none
        except _NoAttention as error:
            without.append(f"{where} names {error}")
        except InvalidArgument as error:
            raise InvalidArgument(f"{path}, {where}: {error}") from None
    if not pieces:
        raise InvalidArgument(
            f"{path}: {name} has no attention that flashgen knows ({'; '.join(without)}): "
            f"name another configuration, or write a workload"
        )
    left_out = [f"{reason}: it is left out" for reason in without]
    return Workload.of(name, pieces, dict.fromkeys([*left_out, *notes]))


class _NoAttention(Exception):
    """A part of a configuration has no attention; the message says which names it lacks."""


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


def _completed(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with what its class in transformers adds; the same one if there is none."""
    if "model_type" not in config:
        return config
    given = [config, *(part for name in _PARTS if isinstance(part := config.get(name), dict))]
    if any(isinstance(part[name], int) and part[name] > MOST for part in given for name in part
           if name.startswith(_COUNTS)):  # fmt: skip
        return config
    try:
        from huggingface_hub import constants
        from transformers import AutoConfig
    except ImportError:
        return config
    fields = copy.deepcopy(config)
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # of fields that change no attention
    offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True  # some classes look up a repository that a field names
    try:
        made = AutoConfig.for_model(fields.pop("model_type"), **fields)
        own = _merged(made, config)
        for name in _PARTS:
            if (part := getattr(made, name, None)) is not None and not isinstance(part, dict):
                own[name] = _merged(part, config.get(name) or {})
    except Exception:  # classes of models raise what they like: then the file speaks for itself
        return config
    finally:
        constants.HF_HUB_OFFLINE = offline
        logging.disable(disabled)
    return own


def _merged(made: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration of transformers, by its common names too, under those that the
    file gives.
    """
    fields: dict[str, Any] = made.to_dict()
    named = {name: fields.get(own) for name, own in made.attribute_map.items()}
    return named | fields | {key: value for key, value in given.items() if value is not None}


def _parts(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parts that may have an attention, and their names. Parts inherit the dtype."""
    nested = [name for name in _PARTS if isinstance(config.get(name), dict)]
    if "text_config" not in nested:  # some name the text's at the top, beside a vision_config
        yield "the model", config
    shared = {name: config[name] for name in ("dtype", "torch_dtype") if config.get(name)}
    for name in nested:
        own = {key: value for key, value in config[name].items() if value is not None}
        yield name, shared | own


def _layers_alike(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A part, or one configuration for all layers whose fields are alike: per_layer_config has
    fields of some layers, as in Gemma 4, whose layers without a window have wider heads.
    """
    own = config.get("per_layer_config")
    if own is None:
        own = _of_full_layers(config)
    if not isinstance(own, dict) or not all(
        str(place).isdecimal() and isinstance(fields, dict) for place, fields in own.items()
    ):
        raise InvalidArgument(
            f"per_layer_config must have the fields of layers by number: got {shown(own)}"
        )
    if not own:
        yield config
        return
    layers = _Model(config, training=False, sees=False).number("layers") or 1
    alike: dict[str, list[int]] = {}
    for place, fields in own.items():
        if int(place) < layers:
            alike.setdefault(json.dumps(fields, sort_keys=True), []).append(int(place))
    special = {place for places in alike.values() for place in places}
    if len(special) < layers:
        yield config | _of_layers(config, lambda place: place not in special, layers - len(special))
    for fields_, places in alike.items():
        those = frozenset(places)
        yield config | _of_layers(config, those.__contains__, len(those)) | json.loads(fields_)


def _of_full_layers(config: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """What Gemma 4's file says of layers without a window, where no class of transformers does."""
    types, wide = config.get("layer_types"), config.get("global_head_dim")
    if not isinstance(types, list) or wide is None:
        return {}
    fields = {"head_dim": wide}
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
        fields["num_key_value_heads"] = config["num_global_key_value_heads"]
    return {place: fields for place, kind in enumerate(types) if kind == "full_attention"}


def _of_layers(
    config: Mapping[str, Any], chosen: Callable[[int], bool], count: int
) -> dict[str, Any]:
    """The fields that count and list layers, for `count` chosen ones."""
    lists = {
        name: [each for place, each in enumerate(config[name]) if chosen(place)]
        for name in ("layer_types", "no_rope_layers")
        if isinstance(config.get(name), list)
    }
    return {"num_hidden_layers": count, **lists}


class _Model:
    """One part of a configuration, read by the names of _NAMES."""

    def __init__(self, config: dict[str, Any], *, training: bool, sees: bool) -> None:
        inner = config.get("attn_config")  # of MPT and DBRX
        self.config: Mapping[str, Any] = (inner if isinstance(inner, dict) else {}) | config
        self.training = training
        self.sees = sees  # it is the vision_config of a model
        self.type = str(config.get("model_type", ""))

    @property
    def is_vision(self) -> bool:
        return "image_size" in self.config and "patch_size" in self.config

    @property
    def sides(self) -> tuple[Side | None, ...]:
        both = self.config.get("is_encoder_decoder") is True
        return ("encoder", "decoder") if both else (None,)

    def number(self, what: str, side: Side | None = None) -> int | None:
        """An integer under one of its names. Raises InvalidArgument for anything else."""
        for name in self.names(what, side):
            value = self.config.get(name)
            if value is None:
                continue
            least = 0 if what == "registers" else 1
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or not least <= value <= LARGEST:
                raise InvalidArgument(
                    f"{name} must be a whole number from {least} to {LARGEST}: got {shown(value)}"
                )
            return int(value)
        return None

    def names(self, what: str, side: Side | None) -> tuple[str, ...]:
        names = _NAMES[what]
        if what == "heads" and ("d_kv" in self.config or "attention_types" in self.config):
            names += ("num_heads",)  # T5 and GPT-Neo; state-space models mean something else by it
        if side is None:
            return names
        own = {
            "heads": (f"{side}_attention_heads",),
            "layers": (f"{side}_layers", f"num_{side}_layers"),
            "length": (f"max_{'source' if side == 'encoder' else 'target'}_positions",),
        }
        return (*own.get(what, ()), *names)

    def length(self, side: Side | None) -> int | None:
        """The maximum of tokens in a sequence. For an image: its patches, the class token,
        registers.
        """
        if not self.is_vision:
            return self.number("length", side)
        (high, wide), (patch_high, patch_wide) = map(self._edges, ("image_size", "patch_size"))
        registers = self.number("registers", side) or 0
        return (high // patch_high) * (wide // patch_wide) + 1 + registers

    def _edges(self, name: str) -> tuple[int, int]:
        value = self.config[name]
        edges = value if isinstance(value, list) else [value, value]
        if len(edges) != 2 or not all(
            isinstance(edge, int) and 0 < edge <= LARGEST for edge in edges
        ):
            raise InvalidArgument(f"{name} must be one or two whole numbers: got {shown(value)}")
        return edges[0], edges[1]

    def head_dims(self, heads: int, side: Side | None) -> tuple[int, int]:
        """Those of Q and K, and of V. Latent attention (DeepSeek) uses the sum of both its
        parts.
        """
        nope, rope = self.config.get("qk_nope_head_dim"), self.config.get("qk_rope_head_dim")
        if isinstance(nope, int) and isinstance(rope, int):
            of_v = self.config.get("v_head_dim")
            return nope + rope, of_v if isinstance(of_v, int) else nope
        head_dim, width = self.number("head_dim", side), self.number("width", side)
        if head_dim is not None:
            return head_dim, head_dim
        if width is None:
            raise _NoAttention(f"none of {', '.join(_NAMES['width'])}")
        if width % heads:
            raise InvalidArgument(
                f"the width must be a multiple of the heads: got {width} and {heads}"
            )
        return width // heads, width // heads

    def group(self, heads: int, side: Side | None) -> int:
        """Query heads per head of K and V."""
        if "qk_nope_head_dim" in self.config:
            return 1
        one = self.config.get("multi_query") is True  # Falcon and GPT-BigCode
        one = one and self.config.get("new_decoder_architecture") is not True
        one = one or self.config.get("attn_type") == "multiquery_attention"
        kv_heads = 1 if one else self.number("kv_heads", side) or heads
        if heads % kv_heads:
            raise InvalidArgument(
                f"the heads must be a multiple of those of K and V: got {heads} and {kv_heads}"
            )
        return heads // kv_heads

    def mask(self, side: Side | None) -> Mask:
        """None where every token sees every other."""
        if side is not None:
            return "none" if side == "encoder" else "causal"
        if self.config.get("is_decoder") is True:
            return "causal"
        named = self.config.get("architectures")
        masked = isinstance(named, list) and any("MaskedLM" in str(name) for name in named)
        two_ways = self.config.get("use_bidirectional_attention") is True
        if self.is_vision or masked or two_ways or self.type in _SEES_ALL:
            return "none"
        return "causal"

    def windowed(self, layers: int, length: int | None) -> int:
        """The number of layers with a window that hides something."""
        window, is_off = self.config.get("sliding_window"), self.config.get("use_sliding_window")
        if not isinstance(window, int) or is_off is False:
            return 0
        if length is not None and window >= length:
            return 0
        kinds, pattern = self.config.get("layer_types"), self.config.get("sliding_window_pattern")
        if isinstance(kinds, list):
            return sum(kind == "sliding_attention" for kind in kinds[:layers])
        if isinstance(pattern, int) and pattern > 0:
            return layers - layers // pattern
        return (layers + 1) // 2 if self.type in _EVERY_OTHER else layers

    def chunked(self, layers: int, length: int | None) -> int:
        """How many of the layers have chunks shorter than the longest sequence (Llama 4)."""
        size = self.config.get("attention_chunk_size")
        if not isinstance(size, int) or (length is not None and size >= length):
            return 0
        kinds, rotary = self.config.get("layer_types"), self.config.get("no_rope_layers")
        if isinstance(kinds, list):
            return sum(kind == "chunked_attention" for kind in kinds[:layers])
        if isinstance(rotary, list) and rotary:  # 1: a layer with rotary embedding, and chunks
            return sum(bool(each) for each in rotary[:layers])
        step = self.config.get("no_rope_layer_interval")
        return layers - layers // (step if isinstance(step, int) and step > 0 else 4)

    def dtype(self, notes: list[str]) -> str:
        named = self.config.get("dtype") or self.config.get("torch_dtype")
        if named in (None, "auto"):
            sentence = "the configuration names no dtype: bfloat16 is tuned"
            notes += [sentence] if sentence not in notes else []
            return "bfloat16"
        return parse_dtype(str(named).removeprefix("torch."))


def _pieces(
    model: _Model, directions: Sequence[str], cache: Mapping[str, Any] | None, notes: list[str]
) -> Iterator[Piece]:
    """The pieces of one part: of each attention a length for each bucket that its sequences fall
    into. Features without kernels are noted. Raises _NoAttention, InvalidArgument.
    """
    for side in model.sides:
        heads = model.number("heads", side)
        if heads is None:
            raise _NoAttention(f"none of {', '.join(model.names('heads', side))}")
        if model.sees and not model.is_vision:  # images of any size: no length is known
            raise _NoAttention("not both of image_size, patch_size")
        head_dim, head_dim_v = model.head_dims(heads, side)
        length = model.length(side)
        layers = model.number("layers", side) or 1
        plain = AttentionSpec(
            dtype=model.dtype(notes),  # type: ignore[arg-type]  # parse_dtype returns no other
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            mask=model.mask(side),
            dropout=model.training and any(model.config.get(name) for name in _DROPOUT),
            bias="additive" if "relative_attention_num_buckets" in model.config else "none",
            alibi=model.config.get("alibi") is True or model.type == "bloom",
            softcap=bool(model.config.get(_CAPPED)),
            sink=model.type == "gpt_oss",
        )
        windowed = model.windowed(layers, length)
        chunked = model.chunked(layers, length) if plain.causal else 0
        group = model.group(heads, side)
        for part, number in (
            (plain, layers - windowed - chunked),
            (replace(plain, window=True), windowed),
            (replace(plain, chunk=True) if chunked else plain, chunked),
        ):
            for seq in _lengths(length, fixed=model.is_vision) if number else ():
                for spec in kernels_of(part, directions, cache):
                    problem = problem_of(spec, seq, group)
                    yield Piece(spec=spec, problem=problem, weight=float(number * seq))
        notes += _remarks(model.config, length, windowed=bool(windowed))


def _lengths(length: int | None, *, fixed: bool) -> list[int]:
    """A length for each bucket that sequences fall into. length: the longest; None is unknown.
    fixed: all have that length.
    """
    if fixed and length is not None:
        return [length]
    longest = math.inf if length is None else length
    return [min(seq, length or seq) for b, seq in BUCKET_SEQ.items() if b.low <= longest]


def _remarks(config: Mapping[str, Any], length: int | None, *, windowed: bool) -> Iterator[str]:
    """Sentences on differences between what is tuned and what the model runs."""
    if windowed and config["sliding_window"] != TUNED_WINDOW:
        yield (
            f"sliding_window is {config['sliding_window']} keys: its kernels are tuned with a "
            f"window of {TUNED_WINDOW}"
        )
    if length is None:
        yield "the configuration names no longest sequence: all buckets are tuned"
