"""Samples from a small model in a batch, and computes the logits of the same tokens as a trainer.

    python examples/on_policy/on_policy.py

Prompts of several lengths are padded to the left, and tokens are generated one by one from a cache.
The trainer runs each sequence alone, whole. Where a logit differs in a bit, the policy that sampled
is not the one that is trained. With plain kernels they differ; with FLASHGEN_INVARIANT=1 none does.
Linear layers are computed row by row here: those of a BLAS depend on the batch, too. On a CPU torch
serves attention; with TRITON_INTERPRET=1 FLASHGEN_GPU=nvidia_h200 the kernels of that GPU do.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from flashgen.runtime import transformers as flashgen_attention

PROMPTS = (3, 11, 6)
"""Tokens of each prompt."""
NEW_TOKENS = 8
VOCABULARY = 97


class RowLinear(nn.Linear):
    """A linear layer whose rows are the same bits in any batch: one product after the other."""

    def forward(self, x: Tensor) -> Tensor:
        """The product of x (..., in_features) and the weight."""
        columns = self.weight.T.contiguous()
        found = x.new_zeros((*x.shape[:-1], self.out_features))
        for i in range(self.in_features):
            found += x[..., i : i + 1] * columns[i]
        return found


def tiny_model() -> LlamaForCausalLM:
    """A Llama of two layers and random weights, its linear layers row by row."""
    torch.manual_seed(0)
    flashgen_attention.register()
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation="flashgen",
        pad_token_id=0, eos_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.__class__ = RowLinear
    return model


@torch.no_grad()
def sampled(model: LlamaForCausalLM, prompts: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The tokens of each sequence with the new ones, and the logits (NEW_TOKENS, vocabulary) that
    these were drawn from.
    """
    longest = max(map(len, prompts))
    pads = [longest - len(prompt) for prompt in prompts]
    tokens = torch.stack(
        [
            torch.cat([prompt.new_zeros(pad), prompt])
            for prompt, pad in zip(prompts, pads, strict=True)
        ]
    )
    mask = (torch.arange(longest) >= torch.tensor(pads)[:, None]).long()
    torch.manual_seed(1)
    made = model.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.stack(made.logits, 1)
    return [row[pad:] for row, pad in zip(made.sequences, pads, strict=True)], list(logits)


@torch.no_grad()
def of_a_trainer(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """The logits of the same draws, of one sequence alone and whole."""
    found: Tensor = model(tokens[None, :-1]).logits[0, -NEW_TOKENS:]
    return found


def differing() -> tuple[int, int]:
    """How many logits differ in a bit between sampling and training, and how many there are."""
    model = tiny_model()
    prompts = [
        torch.randint(1, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n))
        for n in PROMPTS
    ]
    sequences, logits = sampled(model, prompts)
    pairs = [
        (drawn, of_a_trainer(model, tokens))
        for drawn, tokens in zip(logits, sequences, strict=True)
    ]
    return sum(int((a != b).sum()) for a, b in pairs), sum(a.numel() for a, _ in pairs)


def main() -> None:
    """Print both counts."""
    argparse.ArgumentParser(prog="on_policy.py", description=__doc__).parse_args()
    for name, value in (("plain", "0"), ("invariant", "1")):
        os.environ["FLASHGEN_INVARIANT"] = value
        different, count = differing()
        print(f"{name:9}  {different:5} of {count} logits differ between sampling and training")


if __name__ == "__main__":
    main()
