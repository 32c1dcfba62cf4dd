"""Which attention the layers of a model have, from the fields of its configuration.

Layers differ: some have a window or chunks, some have other heads, some have no attention. Each
layer is read by itself, and those that are alike are counted. What decides and cannot be read is an
error that names the field (Unread).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashgen.errors import InvalidArgument
from flashgen.spec.records import shown
from flashgen.spec.vocabulary import Mask
from flashgen.tune.hf_fields import ALIASES, LARGEST, Fields
from flashgen.tune.hf_kinds import LayerKind, Side, Unread, kinds_of
from flashgen.tune.hf_masks import mask_of


class NoAttention(Exception):
    """A configuration names no heads."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The attention of layers that are alike.

    Args:
        heads: of Q.
        kv_heads: of K and V; they divide heads.
        head_dim: of Q and K.
        head_dim_v: of V.
        mask: none where every token sees every other.
        window: keys that a query sees before its own, and behind it without a mask; 0 is all.
        chunk: keys of a chunk; 0 is no chunks.
        softcap: scores are capped.
        sink: a row sums a score besides.
        alibi: scores fall with the distance.
        bias: scores have a bias.
        length: the longest sequence in tokens; None is unknown.
        fixed: every sequence is that long.
    """

    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    mask: Mask
    window: int = 0
    chunk: int = 0
    softcap: bool = False
    sink: bool = False
    alibi: bool = False
    bias: bool = False
    length: int | None = None
    fixed: bool = False


_SINKS = ("flint", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "openai_privacy_filter")
_NO_SOFTMAX = ("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm")
"""Models whose heads are of a recurrence."""
_NO_CLASS_TOKEN = (
    "aimv2", "gemma3_vision", "idefics2_vision", "idefics3_vision", "janus_vision_model", "pixtral",
    "siglip_vision_model", "siglip2_vision_model", "siglip", "smolvlm_vision", "vit_mae_decoder",
)  # fmt: skip
_SPARSE = {"attention_type": ("block_sparse",), "attn_type": ("sparse", "block_sparse")}
_MAIN = ("the model", "text_config", "llm_config", "language_config", "decoder", "thinker_config")
"""Parts without which a model is not read at all."""


def is_main(where: str) -> bool:
    """Whether a part is the model itself, not its eyes or ears."""
    return where.rpartition(".")[2] in _MAIN


def sides(fields: Fields, where: str = "the model") -> tuple[Side | None, ...]:
    """The encoder and the decoder of a model that has both, or the one that is used; else None."""
    if fields.get("is_encoder_decoder") is not True:
        if any(map(fields.has, ALIASES["heads"])):
            return (None,)
        alone_sides: tuple[Side, ...] = ("encoder", "decoder")  # as decoders of TrOCR name theirs
        found = (s for s in alone_sides if any(map(fields.has, fields.names("heads", s))))
        return (next(found, None),)
    part = where.rpartition(".")[2]
    named = fields.get("architectures")
    alone = isinstance(named, list) and all(str(each).endswith("EncoderModel") for each in named)
    if "encoder" in part or (named and alone):  # as T5 beside a decoder of sound or images
        return ("encoder",)
    return ("decoder",) if "decoder" in part else ("encoder", "decoder")


def attentions(
    fields: Fields, where: str = "the model", side: Side | None = None
) -> list[tuple[Attention, int]]:
    """The attentions of a part of a model, each with its number of layers.

    where: what the configuration calls the part. Raises InvalidArgument for values of wrong types,
    NoAttention without heads, Unread where a field that decides cannot be read.
    """
    if fields.type in _NO_SOFTMAX:
        raise NoAttention("has heads of a recurrence, and no softmax attention")
    if fields.number("heads", side=side) is None:
        raise NoAttention(f"names none of {', '.join(fields.names('heads', side))}")
    own = _own_fields(fields)
    kinds = kinds_of(fields, side)
    elsewhere = fields.get("cross_attention_layers")  # of Mllama: they see images alone
    found: Counter[Attention] = Counter()
    for layer, kind in enumerate(kinds):
        crosses = isinstance(elsewhere, list) and layer in elsewhere
        more = None if crosses else own.get(layer, {})
        if kind != "none" and more is not None:
            found[_Layer(fields.over(more), where, side, layer).attention(kind)] += 1
    if not found:
        raise NoAttention("has no layer with softmax attention")
    _demand_read(fields, found)
    return list(found.items())


def _demand_read(fields: Fields, found: Mapping[Attention, int]) -> None:
    """Raises Unread if a field looks like something that no field that was read says."""
    has = {
        "heads": True,
        "heads of K and V": any(fields.get(name) for name in ALIASES["heads of K and V"])
        or any(each.kv_heads < each.heads for each in found),
        "head dim": any(fields.get(name) for name in ALIASES["head dim"])
        or any(each.head_dim_v != each.head_dim for each in found),
        "window": any(fields.get(name) for name in ALIASES["window"]),
        "chunk": any(fields.get(name) for name in ALIASES["chunk"]),
        "sink": any(each.sink for each in found),
        "softcap": any(each.softcap for each in found),
        "length": any(each.length is not None for each in found),
    }
    for what, names in fields.unread().items():
        if not has.get(what, False):
            said = ", ".join(f"{name} {shown(value)}" for name, value in names.items())
            raise Unread(f"{said}: this looks like {what}, and flashgen does not know the name")


def _own_fields(fields: Fields) -> dict[int, dict[str, Any] | None]:
    """The fields of single layers, by number; None where a layer has no attention.

    per_layer_config has them as fields, as in Gemma 4, whose layers without a window have wider
    heads; block_configs has them in a form of its own (Nemotron-NAS).
    """
    own = fields.get("per_layer_config")
    if own is not None:
        if not isinstance(own, dict) or not all(
            str(place).isdecimal() and isinstance(each, dict) for place, each in own.items()
        ):
            raise InvalidArgument(
                f"per_layer_config must have the fields of layers by number: got {shown(own)}"
            )
        return {int(place): each for place, each in own.items()}
    blocks = fields.get("block_configs")
    if isinstance(blocks, list) and all(isinstance(block, dict) for block in blocks):
        return dict(enumerate(map(_block, blocks)))
    return {}


def _block(block: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fields of one block of block_configs."""
    own = block.get("attention")
    if not isinstance(own, dict):
        raise Unread(f"block_configs has {shown(block)} without its attention")
    if own.get("no_op") or own.get("replace_with_linear"):
        return None
    known = ("n_heads_in_group", "num_key_value_heads")
    for name, value in own.items():
        if value and name not in known:
            raise Unread(f"block_configs has {name} {shown(value)}, which flashgen does not know")
    return {name: own[name] for name in known if own.get(name) is not None}


class _Layer:
    """One layer of a part."""

    def __init__(self, fields: Fields, where: str, side: Side | None, layer: int) -> None:
        self.fields, self.side, self.layer = fields, side, layer
        self.where = where.rpartition(".")[2]
        get = fields.get
        self.is_vision = get("image_size") is not None and get("patch_size") is not None

    def number(self, what: str) -> int | None:
        return self.fields.number(what, side=self.side, layer=self.layer)

    def attention(self, kind: LayerKind) -> Attention:
        """Its attention. Raises as attentions."""
        self._of_kind(kind)
        heads = self.number("heads") or 1
        self._demand_dense()
        length = self.length()
        mask = mask_of(self.fields, self.where, self.side, is_vision=self.is_vision)
        head_dim, head_dim_v = self.head_dims(heads)
        window, chunk = 0, 0
        if kind == "sliding":
            window = self.window()
        if kind == "chunked":
            chunk = self.number("chunk") or 0
            if not chunk:
                raise Unread("layers are chunked, and no field says how long a chunk is")
        return Attention(
            heads=heads,
            kv_heads=self.kv_heads(heads),
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            mask=mask,
            window=window if length is None or window < length else 0,
            chunk=chunk if mask == "causal" and (length is None or chunk < length) else 0,
            softcap=self.softcap(),
            sink=self.sink(kind),
            alibi=self.alibi(),
            bias=self.bias(),
            length=length,
            fixed=self.is_vision,
        )

    def _of_kind(self, kind: LayerKind) -> None:
        """Takes the fields that only layers of this kind have."""
        fields, get = self.fields, self.fields.get
        more: dict[str, Any] = {}
        if kind == "sliding":
            names = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
            more = {name: get(f"swa_{name}") for name in names}  # of MiMo
            heads, other = get("num_sliding_attention_heads"), get("attention_other_setting")
            more["num_attention_heads"] = more["num_attention_heads"] or heads
            if isinstance(other, dict):  # of Step 3.5
                more |= {name: other.get(name) for name in (*names, "num_attention_groups")}
        elif kind == "full" and get("global_head_dim") is not None:  # of Gemma 4
            more["head_dim"] = get("global_head_dim")
            if get("attention_k_eq_v"):
                more["num_key_value_heads"] = get("num_global_key_value_heads")
        self.fields = fields.over({k: value for k, value in more.items() if value is not None})

    def _demand_dense(self) -> None:
        for name, words in _SPARSE.items():
            if (value := self.fields.get(name)) in words:
                raise Unread(f"{name} is {value}: flashgen has no kernel for it")

    def kv_heads(self, heads: int) -> int:
        get = self.fields.get
        if get("qk_nope_head_dim") is not None:  # latent attention: each query head has its own
            return heads
        one = get("multi_query") is True and get("new_decoder_architecture") is not True
        if one or get("attn_type") == "multiquery_attention":  # Falcon, GPT-BigCode; MPT
            return 1
        if get("multi_query_attention") is False:  # ChatGLM
            return heads
        group = self.number("query heads of a group")
        if group and heads % group:
            raise InvalidArgument(
                f"the heads must be a multiple of those of a group: got {heads} and {group}"
            )
        number = heads // group if group else self.number("heads of K and V")
        if number is None:
            self._demand_no_null("heads of K and V")
            number = heads
        if heads % number:
            raise InvalidArgument(
                f"the heads must be a multiple of those of K and V: got {heads} and {number}"
            )
        return number

    def _demand_no_null(self, what: str) -> None:
        if (name := self.fields.is_null(what)) is not None:
            raise Unread(f"{name} is null, and no other field says the {what}")

    def head_dims(self, heads: int) -> tuple[int, int]:
        """Those of Q and K, and of V. Latent attention (DeepSeek) uses the sum of both its
        parts.
        """
        nope, rope = self.fields.get("qk_nope_head_dim"), self.fields.get("qk_rope_head_dim")
        of_v = self.number("head dim of V")
        if isinstance(nope, int) and isinstance(rope, int):
            return nope + rope, nope if of_v is None else of_v
        head_dim, width = self.number("head dim"), self.number("width")
        if head_dim is None:
            self._demand_no_null("head dim")
            if width is None:
                raise NoAttention(f"names none of {', '.join(ALIASES['width'])}")
            if width % heads:
                raise InvalidArgument(
                    f"the width must be a multiple of the heads: got {width} and {heads}"
                )
            head_dim = width // heads
        return head_dim, head_dim if of_v is None else of_v

    def length(self) -> int | None:
        """The maximum of tokens in a sequence. For an image: its patches, the class token,
        registers.
        """
        looks_at_images = any(word in self.where for word in ("vision", "visual", "image"))
        if not self.is_vision:
            if looks_at_images:
                raise Unread(
                    "it has not both of image_size, patch_size, so its images have any size"
                )
            return self.number("length")
        (high, wide), (patch_high, patch_wide) = map(self._edges, ("image_size", "patch_size"))
        patches = (high // patch_high) * (wide // patch_wide)
        if self.fields.type in _NO_CLASS_TOKEN:
            return patches
        more = 2 if self.fields.type == "deit" else 1
        return patches + more + (self.number("registers") or 0)

    def _edges(self, name: str) -> tuple[int, int]:
        value = self.fields.get(name)
        edges = value if isinstance(value, list | tuple) else [value, value]
        if len(edges) != 2 or not all(
            isinstance(edge, int) and 0 < edge <= LARGEST for edge in edges
        ):
            raise InvalidArgument(f"{name} must be one or two whole numbers: got {shown(value)}")
        return edges[0], edges[1]

    def window(self) -> int:
        size = self.number("window")
        if self.fields.get("attention_types") is not None:  # GPT-Neo
            size = self.fields.get("window_size")
        if not isinstance(size, int) or size <= 0:
            raise Unread("layers have a sliding window, and no field says how long it is")
        # These count the keys on both sides.
        both = ("local_attention", "use_bidirectional_attention")
        return size // 2 if any(self.fields.get(name) for name in both) else size

    def softcap(self) -> bool:
        return any(bool(self.fields.get(name)) for name in ALIASES["softcap"])

    def sink(self, kind: LayerKind) -> bool:
        flag = (
            "add_swa_attention_sink_bias" if kind == "sliding" else "add_full_attention_sink_bias"
        )
        return self.fields.get(flag) is True or self.fields.type in _SINKS

    def alibi(self) -> bool:
        get = self.fields.get
        if self.fields.type == "baichuan":  # of 13 billion parameters: no field says it
            return get("max_position_embeddings") is None
        named = get("position_embedding_type") == "alibi" or self.fields.type == "bloom"
        return named or get("alibi") is True

    def bias(self) -> bool:
        get = self.fields.get
        flags = ("relative_attention", "use_relative_position_bias",
                 "use_shared_relative_position_bias", "has_relative_attention_bias")  # fmt: skip
        relative = str(get("position_embeddings_type") or "").startswith("relative")
        asked = any(get(flag) is True for flag in flags) or relative
        wavlm = self.fields.type == "wavlm"
        return asked or wavlm or get("relative_attention_num_buckets") is not None
