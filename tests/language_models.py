"""Tiny language models of random weights, as transformers makes them, and what they are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {"vocab_size": 60, "use_cache": False}
LLAMA = SMALL | {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
OF_CHUNKS = ("attention_chunk_size|attention_chunk", 7)
"""The names of fields that give a size of chunks, and a small one: a row of tiny_models.SIZES."""
CONFIGS: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, n_positions=64,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **SMALL,
    ),
    "llama": lambda: transformers.LlamaConfig(**LLAMA),
    "gemma": lambda: transformers.GemmaConfig(**LLAMA, head_dim=24),
    # Scores about the cap, a window of 5 in every other layer, and not the default scale.
    "gemma2": lambda: transformers.Gemma2Config(
        **LLAMA, head_dim=24, attn_logit_softcapping=0.05, sliding_window=5, query_pre_attn_scalar=9,
        final_logit_softcapping=None,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **LLAMA | {"max_position_embeddings": 4096}, head_dim=16, sliding_window=5,
        num_local_experts=2, num_experts_per_tok=1, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    # Chunks of 7 in the first layer; all keys, and no rotary embedding, in the second.
    "llama4": lambda: transformers.Llama4TextConfig(
        **LLAMA, head_dim=16, attention_chunk_size=7, no_rope_layers=[1, 0], moe_layers=[1],
        intermediate_size_mlp=64, num_local_experts=2, num_experts_per_tok=1, pad_token_id=0,
    ),
}  # fmt: skip


def make_model(name: str, attention: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config.update(options)
    config._attn_implementation = attention
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention
    )
    assert model.config._attn_implementation == attention
    for parameter, x in model.named_parameters():
        if "sinks" in parameter:
            nn.init.normal_(x)  # else they are alike, and small
    return model.train()


def batch(padding: str) -> dict[str, Tensor]:
    """Two sequences of 18 tokens, the second of 11 where it is padded."""
    torch.manual_seed(1)
    tokens = torch.randint(0, 60, (2, 18))
    mask = torch.ones_like(tokens)
    if padding == "left":
        mask[1, :7] = 0
    if padding == "right":
        mask[1, 11:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    if padding == "left":
        # Padding predicts it, from a row that sees nothing: 0 here as in torch, a mean of V in
        # eager. No training counts it.
        labels[1, 7] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def trained(model: nn.Module, given: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits of real tokens, loss, and the gradient of every parameter."""
    found = model(**given)
    found.loss.backward()
    grads = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return found.logits[given["attention_mask"] == 1], found.loss, grads
