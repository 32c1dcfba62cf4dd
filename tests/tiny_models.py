"""A tiny model of random weights for each model type of transformers, and what it is given.

No list of models is written here. A configuration is that of its class's defaults, with small
numbers in place of its sizes, which are recognized by the names of their fields; so are those of its
sub-configurations. FIELDS has what cannot be recognized. Types that this does not make a working
model of are reported as not built.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.language_models import OF_CHUNKS

MAX_PARAMETERS = 16_000_000
LENGTH, DECODER_LENGTH = 18, 9
PADS = 7
IMAGE = 32

SIZES: tuple[tuple[str, int], ...] = (
    ("token_id|token_index|version|num_labels$|num_mel|_channels|group_norm|feat_extract", 0),
    ("vocab|n_token", 99),
    (r"sliding_window$|^window_size$|local_attention$|local_window_size", 5),
    ("attention_window", 4),
    OF_CHUNKS,
    ("first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    ("key_value_heads|kv_heads|multi_query_group_num|num_query_groups", 2),
    (r"heads?$|^n_head$|n_heads_", 4),
    ("experts_per_tok|top_k|topk_group|moe_k|num_selected_experts|n_group", 1),
    ("index_topk|topk_tokens", 4),
    ("index_kpool", 2),
    ("num_.*experts|n_routed_experts|n_shared_experts", 4),
    ("num_nextn|num_mtp|mtp_num", 0),
    ("^qk_head_dim", 16),
    ("qk_nope_head_dim|rope_head_dim", 8),
    ("lora_rank", 16),
    (r"head_dim|^d_kv$|head_size|kv_channels|^d_head$|^rotary_dim$", 16),
    (r"(^|_)(n_layers?|layers|num_layers|depth|num_.*_layers|num_blocks)$", 2),
    ("image_size|img_size|input_size", IMAGE),
    ("patch_size", 8),
    ("intermediate|ffn|inner_dim|d_ff|mlp_dim|n_inner|feed_forward|d_inner", 64),
    ("hidden_size|hidden_dim|d_model|n_embd|embed|(^|_)dim$|width|projection_size|channel_dim", 64),
    ("max_.*position|n_positions|max_seq|n_ctx|max_source|max_target|context_length", 128),
)
"""What replaces a positive integer of a field whose name the pattern is found in, if it is smaller;
0: nothing does. The first pattern counts."""

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}

NEEDED = {"head_dim": 16, "num_key_value_heads": 2, "num_experts_per_tok": 1}
"""Fields that models of some types need and whose default is None."""

EVERY_HEAD = {"num_key_value_heads": 4}
FORECAST = {"prediction_length": 6, "context_length": 12, "lags_sequence": [1, 2]}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_ssm": 128}
SECTIONS = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [4, 2, 2]}
MROPE = {"rope_parameters": SECTIONS}

FIELDS: dict[str, dict[str, Any]] = {
    "autoformer": FORECAST,
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "clvp_encoder": {"hidden_size": 128},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "ernie4_5_vl_moe_text": {"rope_parameters": SECTIONS | {"mrope_section": [3, 3, 2]}},
    "esm": {"vocab_size": 99, "pad_token_id": 0, "mask_token_id": 3},
    "esmc": EVERY_HEAD,
    "falcon_h1": MAMBA,
    "gemma4_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "glm4v_moe_text": {"rope_parameters": SECTIONS | {"mrope_section": [2, 1, 1]}},
    "glm4v_text": MROPE,
    "glm5_next_text": EVERY_HEAD,
    "glm_image_text": MROPE,
    "glm_ocr_text": MROPE,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": MAMBA,
    "informer": FORECAST,
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "longformer": {"attention_window": [4, 4]},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 1,
    },
    "mistral4": {"head_dim": 16},
    "owlv2_text_model": {"max_position_embeddings": 64},
    "owlvit_text_model": {"max_position_embeddings": 64},
    "paddleocr_vl_text": MROPE,
    "qwen2_5_omni_talker": MROPE,
    "qwen2_5_omni_text": MROPE,
    "qwen2_5_vl_text": MROPE,
    "qwen2_vl_text": MROPE,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "step3p5": {"sliding_window": 5},
    "time_series_transformer": FORECAST,
    "xlnet": {"d_head": 16},
}
"""By model type, what its name does not say."""


LEFT_OUT = {"vits": "random weights predict hours of speech"}


def make_config(model_type: str) -> Any:
    """A configuration of this type; raises whatever its class raises."""
    from transformers import CONFIG_MAPPING

    if model_type in LEFT_OUT:
        raise ValueError(LEFT_OUT[model_type])
    return _small(CONFIG_MAPPING[model_type])


def _small(config_class: Any) -> Any:
    default = config_class()
    made: dict[str, Any] = {}
    for name, value in default.to_dict().items():
        if name in NEEDED and value is None:
            made[name] = NEEDED[name]
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            size = next((size for pattern, size in SIZES if re.search(pattern, name)), 0)
            if size:
                made[name] = min(size, value)
    tokens = [name for name in vars(default) if re.search("_token_(id|index)$", name)]
    for index, name in enumerate(tokens):
        if isinstance(getattr(default, name), int):
            made[name] = TOKENS.get(name, 80 + index % 18)
    rotary = getattr(default, "qk_rope_head_dim", None)
    if rotary is not None and getattr(default, "head_dim", None) in (None, rotary):
        made["head_dim"] = made["qk_rope_head_dim"]
    if "kv_lora_rank" in made and "num_key_value_heads" in made:
        made["num_key_value_heads"] = made["num_attention_heads"]
    _set_layers(default, made)
    _set_rotary(default, made)
    for name in getattr(default, "sub_configs", ()):
        part = getattr(default, name, None)
        if part is not None and hasattr(type(part), "model_type"):
            made[name] = _small(type(part))
    return config_class(**made | FIELDS.get(config_class.model_type, {}))


def _set_layers(default: Any, made: dict[str, Any]) -> None:
    """One layer of each type, two at least."""
    types = getattr(default, "layer_types", None)
    name = getattr(default, "attribute_map", {}).get("layer_types", "layer_types")
    if isinstance(getattr(type(default), name, None), property):
        return
    if isinstance(types, list) and types and "num_hidden_layers" in made:
        kinds = list(dict.fromkeys(types))
        made["num_hidden_layers"] = max(2, len(kinds))
        made["layer_types"] = (kinds * 2)[: made["num_hidden_layers"]]


def _set_rotary(default: Any, made: dict[str, Any]) -> None:
    """Sections of rotary dims that sum up to half of a small head dim."""
    for name in ("rope_parameters", "rope_scaling"):
        given = getattr(default, name, None)
        if not isinstance(given, dict) or "mrope_section" not in given:
            continue
        half = round(made.get("head_dim", 16) * given.get("partial_rotary_factor", 1.0)) // 2
        made[name] = given | {"mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}


def model_class(config: Any) -> type[nn.Module]:
    """The class that has the most of a model: that which writes text, if there is one."""
    import transformers

    with_images = "vision_config" in getattr(config, "sub_configs", ())
    for mapping in (
        transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if with_images else {},
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        transformers.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
        transformers.MODEL_FOR_MASKED_LM_MAPPING,
        transformers.MODEL_MAPPING,
    ):
        found = mapping.get(type(config), None)
        if found is not None:
            chosen: type[nn.Module] = found[0] if isinstance(found, tuple) else found
            return chosen
    return _class_of_a_part(type(config))


def _class_of_a_part(config: type) -> type[nn.Module]:
    """The model of a sub-configuration, which no mapping has: it is in the same package."""
    package = importlib.import_module(config.__module__.rpartition(".")[0])
    found = []
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith("modeling_"):
            for model in vars(
                importlib.import_module(f"{package.__name__}.{module.name}")
            ).values():
                if inspect.isclass(model) and getattr(model, "config_class", None) is config:
                    found.append(model)
    named = [model for model in found if not model.__name__.endswith("PreTrainedModel")]
    if not named:
        raise LookupError("no class of models takes this configuration")
    return min(named, key=lambda model: (not model.__name__.endswith("Model"), len(model.__name__)))


def make_model(config: Any, attention: str) -> nn.Module:
    """A model whose weights depend on its parameters' names and shapes alone. Raises ValueError
    for one of too many parameters.
    """
    kind: Any = model_class(config)
    config = copy.deepcopy(config)
    if attention == "eager":
        with torch.device("meta"):
            count = sum(x.numel() for x in kind._from_config(copy.deepcopy(config)).parameters())
        if count > MAX_PARAMETERS:
            raise ValueError(f"{count} parameters are too many")
    torch.manual_seed(0)
    config._attn_implementation = attention
    model: nn.Module = kind._from_config(config, attn_implementation=attention)
    _randomize(model)
    return model.eval()


@torch.no_grad()
def _randomize(model: nn.Module) -> None:
    """Weights that keep the size of what passes them, so that scores differ by some units. Those
    that models start with are so small that all probabilities are nearly equal.
    """
    generator = torch.Generator().manual_seed(0)
    for name, x in model.named_parameters():
        if not x.is_floating_point():
            continue
        noise = torch.randn(x.shape, generator=generator)
        if "sink" in name or (re.search("embed|relative|bias", name) and x.ndim > 1):
            x.copy_(noise)
        elif x.ndim > 1:
            x.copy_(noise * 1.2 * max(1, x.shape[1:].numel()) ** -0.5)
        else:
            x.add_(0.1 * noise)


def inputs(model: nn.Module, padding: str) -> Iterator[dict[str, Tensor]]:
    """What the model may be called with, the likeliest first. Of two texts the second is padded
    "left", "right" or "both", or none is: "none".
    """
    config: Any = model.config
    names = inspect.signature(model.forward).parameters
    vision, audio = (getattr(config, part, config) for part in ("vision_config", "audio_config"))
    generator = torch.Generator().manual_seed(2)
    text: dict[str, Tensor] = {}
    if "input_ids" in names:
        text = _texts(config, padding)
        if "attention_mask" not in names:
            del text["attention_mask"]
    decoder = {}
    if "decoder_input_ids" in names:
        decoder = {"decoder_input_ids": _texts(config, "none")["input_ids"][:, :DECODER_LENGTH]}
    if text:
        yield text | decoder
    if "inputs_embeds" in names and not text:
        width = getattr(config, "hidden_size", 64)
        embedded = torch.randn(2, LENGTH, width, generator=generator)
        yield {"inputs_embeds": embedded} | (
            {"attention_mask": _texts(config, padding)["attention_mask"]}
            if "attention_mask" in names
            else {}
        )
    for name in ("grid_thw", "image_grid_thw"):
        if name in names and not text:
            yield _grid(config, names) | {name: torch.tensor([[1, 4, 4], [1, 4, 8]])}
    if "past_values" in names:
        values = torch.randn(2, 14 + 6, generator=generator)
        times = torch.zeros(2, 20, 0)
        yield {
            "past_values": values[:, :14], "past_time_features": times[:, :14],
            "past_observed_mask": torch.ones(2, 14), "future_values": values[:, 14:],
            "future_time_features": times[:, 14:],
        }  # fmt: skip
    if "pixel_values" in names:
        size = getattr(vision, "image_size", IMAGE)
        shape = (size, size) if isinstance(size, int) else tuple(size or (IMAGE, IMAGE))[-2:]
        images = torch.randn(2, getattr(vision, "num_channels", 3), *shape, generator=generator)
        if text:
            yield text | decoder | {"pixel_values": images}
        yield {"pixel_values": images}
        frames = getattr(vision, "num_frames", 4)
        yield {"pixel_values": images[:, None].expand(-1, frames, -1, -1, -1)}
    for name in ("input_features", "input_values"):
        if name in names:
            bins = getattr(audio, "num_mel_bins", 80)
            frames = 2 * getattr(audio, "max_source_positions", 64)
            for size in ((bins, frames), (frames, bins), (2000,)):
                values = torch.randn(2, *size, generator=generator)
                yield {name: values} | decoder
                if text:
                    yield text | {name: values}


def _grid(config: Any, names: Iterable[str]) -> dict[str, Tensor]:
    """Patches of two images, 4x4 and 4x8 of them, one in a row, as vision towers pack them."""
    width = getattr(config, "in_channels", getattr(config, "num_channels", 3))
    width *= getattr(config, "temporal_patch_size", 1) * config.patch_size**2
    name = "pixel_values" if "pixel_values" in names else "hidden_states"
    return {name: torch.randn(48, width, generator=torch.Generator().manual_seed(2))}


def _texts(config: Any, padding: str) -> dict[str, Tensor]:
    vocabulary = getattr(config.get_text_config(), "vocab_size", 60) or 60
    tokens = torch.randint(
        3, max(4, min(vocabulary, 60)), (2, LENGTH), generator=torch.Generator().manual_seed(1)
    )
    mask = torch.ones_like(tokens)
    if padding == "left":
        mask[1, :PADS] = 0
    if padding == "both":
        mask[1, : PADS // 2] = mask[1, -PADS // 2 :] = 0
    if padding == "right":
        mask[1, -PADS:] = 0
    return {"input_ids": tokens, "attention_mask": mask}
