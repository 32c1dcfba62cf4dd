"""Whether the mask of a model is causal, from its configuration: few have a field that says so."""

from __future__ import annotations

import re

from flashgen.spec.vocabulary import Mask
from flashgen.tune.hf_fields import Fields, is_generator
from flashgen.tune.hf_kinds import Side, Unread

SEES_ALL = {
    # Encoders of text: every token sees every other.
    "albert", "align_text_model", "altclip_text_model", "bert", "bridgetower_text_model", "bros",
    "camembert", "canine", "chinese_clip_text_model", "clap_text_model", "clvp_encoder", "dpr",
    "flava_text_model", "markuplm", "visual_bert", "vilt", "layoutlmv2", "convbert",
    "data2vec-text", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "esm", "esmc",
    "eurobert", "flaubert", "gte", "ibert", "jina_embeddings_v3", "layoutlm", "layoutlmv3", "lilt",
    "luke", "megatron-bert", "mobilebert",
    "modernbert", "modernvbert", "mpnet", "neomme", "new", "nomic_bert", "openai_privacy_filter",
    "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "siglip_text_model",
    "siglip2_text_model", "squeezebert", "tapas", "ultrabert", "ultravbert", "xlm", "xlm-roberta",
    "xlm-roberta-xl", "xmod",
    # Of sound.
    "audio-spectrogram-transformer", "data2vec-audio", "hubert", "parakeet_ctc", "sew", "sew-d",
    "unispeech", "unispeech-sat", "wav2vec2", "wav2vec2-bert", "wav2vec2-conformer", "wavlm",
}  # fmt: skip
_WRITES = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)$")
_INWARD = (
    "vision", "visual", "image", "audio", "speech", "encoder", "qformer", "perceiver", "detr",
    "mask_decoder",
)  # fmt: skip
_ONWARD = ("text", "llm", "language", "decoder", "talker", "thinker", "predictor")
_ENCODERS = re.compile(
    r"[_-](vision|vision_model|vision_encoder|encoder|qformer|audio|image_model|vit)$"
)
_DECODERS = re.compile(
    r"[_-](text|text_model|decoder|text_decoder|talker|thinker)$|^(csm|moshi|dia)"
)


def mask_of(fields: Fields, where: str, side: Side | None, *, is_vision: bool) -> Mask:
    """The mask of a part: none where every token sees every other. Raises Unread."""
    get, kind = fields.get, fields.type
    if side == "encoder":
        return "none"
    if get("is_decoder") is True:
        return "causal"
    two_ways = get("use_bidirectional_attention")
    if two_ways in (True, "all") or get("causal") is False or get("is_causal") is False:
        return "none"
    named = get("architectures")
    masked = isinstance(named, list) and any("MaskedLM" in str(name) for name in named)
    if is_vision or masked or kind in SEES_ALL or _ENCODERS.search(kind):
        return "none"
    if where == "the model":
        writes = isinstance(named, list) and any(_WRITES.search(str(name)) for name in named)
        known = fields.known and not writes and not _DECODERS.search(kind)
        if not known or is_generator(kind) is not False:
            return "causal"
    elif any(word in where for word in _INWARD):
        return "none"
    elif any(word in where for word in _ONWARD):
        return "causal"
    raise Unread("no field says whether its mask is causal")
