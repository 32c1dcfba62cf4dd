"""The fields of a Hugging Face configuration, under the names that model families give them.

A field that the file gives comes first. What it leaves out has the default of the model's class in
transformers, where that is installed and knows the model type. Nothing is looked up on the network.

Fields remembers what was read. What was not read and looks like heads, windows or lengths is found
by its name (LOOKS), so that no field that decides is dropped in silence.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flashgen.errors import InvalidArgument
from flashgen.spec.records import shown

LARGEST = 2**31 - 1
"""No number of a configuration that is read is larger."""

MOST_LAYERS = 10_000
"""No model has more layers: they are read one by one."""

MOST = 2**20
"""A file with a larger count of anything is not given to transformers, which lists layers and
labels one by one."""

_COUNTS = ("num_", "n_", "encoder_", "decoder_")
"""How names of counts begin."""

ALIASES: dict[str, tuple[str, ...]] = {
    "heads": (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads",
        "num_query_heads", "num_attention_heads_per_layer",
    ),
    "heads of K and V": (
        "num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "kv_n_heads",
        "multi_query_group_num", "num_attention_groups", "num_query_groups",
        "num_key_value_heads_per_layer",
    ),
    "query heads of a group": ("n_heads_in_group",),
    "width": (
        "hidden_size", "n_embd", "n_embed", "d_model", "dim", "embed_dim", "emb_dim", "model_dim",
    ),
    "head dim": (
        "head_dim", "d_kv", "kv_channels", "attention_head_dim", "d_head", "dim_head", "head_size",
    ),
    "head dim of V": ("v_head_dim",),
    "layers": (
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "layers",
        "num_transformer_layers",
    ),
    "length": (
        "max_position_embeddings", "max_position_embedding", "n_positions", "n_ctx", "max_seq_len",
        "max_seq_length", "seq_length", "model_max_length", "max_sequence_length",
        "max_source_positions", "max_target_positions", "max_context_length", "context_length",
    ),
    "window": (
        "sliding_window", "sliding_window_size", "attention_window_size", "local_attention",
        "window_length",
    ),
    "chunk": ("attention_chunk_size",),
    "softcap": ("attn_logit_softcapping", "attention_logit_cap", "max_attn_value"),
    "registers": ("num_register_tokens",),
}  # fmt: skip
"""The names of each meaning."""

_SIDES: dict[str, tuple[str, ...]] = {
    "heads": ("{}_attention_heads", "{}_num_attention_heads", "num_{}_attention_heads"),
    "heads of K and V": ("{}_num_key_value_heads",),
    "layers": ("{}_layers", "num_{}_layers", "{}_num_hidden_layers", "num_hidden_layers"),
    "length": ("max_{}_position_embeddings",),
}
"""The names that a model with an encoder and a decoder gives a side's own."""

LOOKS: dict[str, re.Pattern[str]] = {
    what: re.compile(pattern)
    for what, pattern in {
        "head dim": r"head_(dim|size|width)|(^|_)(d|dim)_head|kv_channels|attention_hidden_size",
        "heads of K and V": r"(^|_)kv_|key_value|multi_query|(query|attention)_group|(^|_)n_groups",
        "heads": r"(^|_)heads?$|(^|_)heads_|^n_?head|[^_]_heads",
        "window": r"window|sliding|local_att|local_radius|(^|_)swa(_|$)|(^|_)local_(layer|attn)",
        "chunk": r"(^|_)chunk(s|ed)?(_|$)|attention_context",
        "sink": r"(^|_)sinks?(_|$)",
        "softcap": r"soft_?cap|logits?_cap|attn_value",
        "length": r"max_(\w+_)?(len|length|pos|positions?|seq|context|source|target)(_|$)"
        r"|(^|_)(n_ctx|n_positions|context_len\w*|seq_?len\w*|context_size)",
        "sparse": r"sparse|random_blocks|topk_blocks|index_topk|block_size|lsh_|compress_ratio",
        "frames or tiles": r"num_frames|tubelet|max_num_tiles",
    }.items()
}
"""What a name looks like, by meaning; the first that fits counts."""

_APART = re.compile(
    r"^(linear|mamba\d?|ssm|conv|moe|router|mtp|rope|rotary|indexer|index_(n_heads|head_dim)|lora"
    r"|diversity|final|mlp|gate|vision|audio|image|video|mm|qformer|perceiver|resampler|talker"
    r"|speech|t2u|tts|vocoder|cross|lm_head|time|mask|expert|shared|n_shared|output|hc|vit|encoder"
    r"|decoder|memory|adapter|projector|segmentation|detect|upsample|prompt|conf|sscp|max_window)_"
    r"|^(n_groups?|topk_group|num_beam_groups|max_length|min_length|max_new_tokens|block_size_mlp"
    r"|chunk_size_feed_forward|original_max_position_embeddings|max_2d_position_embeddings"
    r"|n_mamba_heads|mlstm\w*|max_bucket_distance|max_relative_position\w*|key_value_proj_dim"
    r"|num_conv_pos_embedding_groups|num_codevector_groups|num_expert_groups?|moe_\w+"
    r"|max_trained_positions|max_position_embeddings_per_layer|tokenizer_\w+|pretraining_\w+"
    r"|seq_classif_dropout|num_kv_shared_layers|kv_lora_rank|use_cache|qk_head_dim)$"
    r"|(^|_)(mamba|moe|router|mlp|expert|experts|vocab|rope|dropout|bias|scale|norm|init|token_id"
    r"|token_index|loss|weight|hidden_size|lm_head|rank|classifier|logit_softcapping_final)(_|$)"
)
"""Names that look like a meaning and are of something else than attention over tokens."""


_APART_IN = {
    "minimax": ("block_size",),
    "nemotron_h": ("chunk_size",),
    "qwen2_5_omni_talker": ("seconds_per_chunk",),
    "recurrent_gemma": ("logits_soft_cap",),
    "switch_transformers": ("num_sparse_encoder_layers", "num_sparse_decoder_layers"),
    "zamba2": ("chunk_size",),
}
"""The same, by model type: of recurrences, of logits, of experts."""


def completed(config: dict[str, Any]) -> Fields:
    """The fields of a configuration, with the defaults of its class where there is one."""
    return Fields(config, _class_of(config))


class Fields:
    """A configuration, or a part of it, that remembers what was read.

    given: what the file says. known: whether a class of transformers completes it.
    """

    def __init__(self, given: Mapping[str, Any], made: Any = None) -> None:
        inner = given.get("attn_config")  # of MPT and DBRX
        self.given = {**(inner if isinstance(inner, dict) else {}), **given}
        self.known = made is not None
        self.default = {} if made is None else _values(made)
        self.seen: set[str] = set()

    @property
    def type(self) -> str:
        """Its model_type, or ""."""
        return str(self.get("model_type") or "")

    def over(self, fields: Mapping[str, Any]) -> Fields:
        """The same with some fields replaced; what is read from it counts as read here."""
        made = copy.copy(self)
        made.given = {**self.given, **fields}
        return made

    def get(self, name: str) -> Any:
        """The value of a field: the file's, unless it is null, else that of its class."""
        self.seen.add(name)
        value = self.given.get(name)
        return self.default.get(name) if value is None else value

    def has(self, name: str) -> bool:
        """Whether the file or its class gives a field, which need not be read."""
        return self.given.get(name) is not None or self.default.get(name) is not None

    def skip(self, word: str) -> None:
        """Counts the fields with this word in their names as read: others say the same."""
        self.seen.update(name for name in (*self.given, *self.default) if word in name)

    def names(self, what: str, side: str | None = None) -> tuple[str, ...]:
        """The names of a meaning, those of a side first."""
        own = () if side is None else tuple(name.format(side) for name in _SIDES.get(what, ()))
        if what == "length" and side is not None:
            own += (f"max_{'source' if side == 'encoder' else 'target'}_positions",)
            own += ("max_position_embeddings", "n_positions")
            return own
        return own + ALIASES[what]

    def is_null(self, what: str) -> str | None:
        """The name under which the file says null for a meaning, where no class explains it."""
        if self.known:
            return None
        names = (name for name in ALIASES[what] if name in self.given and self.given[name] is None)
        return next(names, None)

    def number(self, what: str, *, side: str | None = None, layer: int = 0) -> int | None:
        """A whole number under one of its names. A list has one for each layer.

        Raises InvalidArgument for anything else, and where two names of a file disagree. Of
        several lengths the least counts.
        """
        names = self.names(what, side)
        self.seen.update(names)
        for source in (self.given, self.default):
            found = {n: v for n in names if (v := _of_layer(source.get(n), layer)) is not None}
            if side is not None:  # its own names hide those of both sides
                found = dict(list(found.items())[:1])
            if not found:
                continue
            for name, value in found.items():
                _check_number(name, value, what)
            if what == "length":
                return int(min(found.values()))
            if len(set(found.values())) > 1 and source is self.given:
                said = " and ".join(f"{name} is {value}" for name, value in found.items())
                raise InvalidArgument(f"{said}, and both mean {what}: remove the wrong one")
            return int(next(iter(found.values())))
        return None

    def parts(self) -> Iterator[tuple[str, Fields]]:
        """The nested configurations, by name."""
        for name in dict.fromkeys((*self.given, *self.default)):
            value, made = self.given.get(name), self.default.get(name)
            made = made if hasattr(made, "to_dict") else None
            if isinstance(value, dict) or made is not None:
                own = value if isinstance(value, dict) else {}
                yield name, Fields(own, made if made is not None else _class_of(own))

    def unread(self) -> dict[str, dict[str, Any]]:
        """By meaning, the fields that look like it and were not read."""
        found: dict[str, dict[str, Any]] = {}
        apart = _APART_IN.get(self.type, ())
        for name in dict.fromkeys((*self.given, *self.default)):
            if name in self.seen or name in apart or _APART.search(name):
                continue
            value = self.given.get(name)
            value = self.default.get(name) if value is None else value
            what = next((what for what, looks in LOOKS.items() if looks.search(name)), None)
            if what is not None and _decides(what, value):
                found.setdefault(what, {})[name] = value
        return found

    def read(self) -> Iterable[str]:
        """Name and value of each field that decides and was read."""
        names = [name for names in ALIASES.values() for name in names]
        return [
            f"{name} {shown(self.given[name])}"
            for name in self.given
            if self.given[name] is not None
            and name in self.seen
            and (name in names or any(looks.search(name) for looks in LOOKS.values()))
        ]


def _of_layer(value: Any, layer: int) -> Any:
    is_list = isinstance(value, list) and layer < len(value)
    return value[layer] if is_list else value


def _check_number(name: str, value: Any, what: str) -> None:
    if what == "softcap":
        return
    least = 0 if what in ("registers", "window") else 1
    most = MOST_LAYERS if what == "layers" else LARGEST
    whole = isinstance(value, int) and not isinstance(value, bool)
    if what == "window" and whole and value == -1:  # of no window
        return
    if not whole or not least <= value <= most:
        raise InvalidArgument(
            f"{name} must be a whole number from {least} to {most}: got {shown(value)}"
        )


def _decides(what: str, value: Any) -> bool:
    """Whether a value could say something about attention: no null, no zero, no false."""
    if isinstance(value, bool):
        return value and what not in ("heads", "head dim", "length", "frames or tiles")
    if isinstance(value, list | tuple):
        return any(_decides(what, each) for each in value)
    if isinstance(value, str):
        return what == "sparse" and bool(value)
    return isinstance(value, int | float) and value > (1 if what == "heads of K and V" else 0)


def _class_of(config: dict[str, Any]) -> Any:
    """The configuration as transformers completes it, or None."""
    if not isinstance(config.get("model_type"), str) or _is_huge(config):
        return None
    try:
        from huggingface_hub import constants
        from transformers import AutoConfig
    except ImportError:
        return None
    fields = copy.deepcopy({k: v for k, v in config.items() if k not in ("dtype", "torch_dtype")})
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # of fields that change no attention
    offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True  # some classes look up a repository that a field names
    try:
        made = AutoConfig.for_model(fields.pop("model_type"), **fields)
        made.to_dict()
        return made
    except Exception:  # classes of models raise what they like: then the file speaks for itself
        return None
    finally:
        constants.HF_HUB_OFFLINE = offline
        logging.disable(disabled)


def is_generator(model_type: str) -> bool | None:
    """Whether a model of this type writes tokens one by one; None if transformers cannot say."""
    try:
        from transformers.models.auto import modeling_auto as auto
    except ImportError:
        return None
    tasks = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT")
    names = (getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}) for task in tasks)
    return any(model_type in each for each in names)


def _is_huge(config: dict[str, Any]) -> bool:
    return any(
        (isinstance(value, dict) and _is_huge(value))
        or (isinstance(value, int) and value > MOST and name.startswith(_COUNTS))
        for name, value in config.items()
    )


_COMPUTED = ("layer_types", "layers_block_type")
"""Fields that some classes compute and do not list."""


def _values(made: Any) -> dict[str, Any]:
    """What a configuration of transformers says, by its own names and by the common ones."""
    values: dict[str, Any] = made.to_dict()
    for name, value in vars(made).items():
        if hasattr(value, "to_dict"):
            values[name] = value
    for name in (*made.attribute_map, *_COMPUTED):
        try:
            values.setdefault(name, getattr(made, name))
        except Exception:  # a property of a class raises what it likes
            continue
    return values
