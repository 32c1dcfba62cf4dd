"""Attention on CPU tensors: torch's SDPA where it is exact, otherwise eager/, so code
runs anywhere. Both are differentiable any number of times.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flashgen.errors import InvalidArgument
from flashgen.inputs.cache import Cache
from flashgen.inputs.features import FLOAT32_MAX, PLAIN, Features
from flashgen.inputs.packed import Sequences
from flashgen.kernels.arguments import empty_like_layout
from flashgen.runtime import torch_modes
from flashgen.runtime.call import Call, Gradients, Saved, Tensors, WantedGradients
from flashgen.runtime.eager import attention as eager
from flashgen.runtime.eager import gradients
from flashgen.runtime.eager.cache import sequence
from flashgen.spec.features import PER_HEAD


def attention_by_torch(
    call: Call, q: Tensor, k: Tensor, v: Tensor, tensors: Tensors = (), *, return_lse: bool = True
) -> tuple[Tensor, Tensor | None]:
    """O (B, H, Sq, d_v) of q's dtype, and LSE (B, H, Sq) float32 if requested. Arguments must be
    checked.

    SDPA supports only the top-left diagonal, returns no LSE, and has no rule for empty keys; a
    scale that is not above 0 meets its mask of -inf and gives NaN; and of scores that are NaN or
    infinite it loses some. Under autocast both compute in the dtype of q all the same. Raises
    InvalidArgument under torch.vmap, as the kernels do.
    """
    causal, scale, features = call.causal, call.scale_of(q), call.features_with(tensors)
    if torch_modes.transformed():
        of_heads = (getattr(features, name) for name in PER_HEAD)
        torch_modes.refuse_batched(q, k, v, features.bias, *of_heads)
    seq_q, seq_k = q.shape[2], k.shape[2]
    leaves = (x for x in (q, k, v, features.sinks) if x is not None and x.requires_grad)
    if features.invariant and torch.is_grad_enabled() and any(True for _ in leaves):
        raise InvalidArgument(
            "invariant has gradients on GPUs and in Triton's interpreter alone: "
            "got CPU tensors that require them; detach them"
        )
    if features.sequences is not None:
        return packed_by_torch(call, q, k, v, features, features.sequences)
    plain = features is PLAIN and (causal is False or causal == "top_left" or seq_q == seq_k)
    with torch.autocast("cpu", enabled=False):
        sizes_fit = not return_lse and scale > 0 and seq_k > 0 and q.numel() > 0
        if plain and sizes_fit and _scores_are_finite(q, k, scale):
            grouped = q.shape[1] != k.shape[1]
            o = scaled_dot_product_attention(
                q, k, v, is_causal=causal is not False, scale=scale, enable_gqa=grouped
            )
            return o, None
        o, lse = eager.attention(
            q, k, v, scale=scale, diagonal=call.diagonal(q, k), features=features
        )
    return o.to(q.dtype), lse.float() if return_lse else None


def packed_by_torch(
    call: Call, q: Tensor, k: Tensor, v: Tensor, features: Features, packed: Sequences
) -> tuple[Tensor, Tensor]:
    """attention_by_torch of packed sequences: one by one, but with dropout, which counts all
    places.
    """
    packed.check_places(q.shape[2], k.shape[2])
    if features.dropout_p > 0.0:
        with torch.autocast("cpu", enabled=False):
            diagonal = None if call.causal is False else 0
            o, lse = eager.attention(
                q, k, v, scale=call.scale_of(q), diagonal=diagonal, features=features
            )
        return o.to(q.dtype), lse.float()
    o = q.new_zeros((*q.shape[:3], v.shape[3]))
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=torch.float32)
    for number, (q_begin, seq_q, k_begin, seq_k) in enumerate(packed.lengths()):
        rows, keys = slice(q_begin, q_begin + seq_q), slice(k_begin, k_begin + seq_k)
        if packed.paged:
            cache = Cache(k=k, v=v, lengths=packed.k_ends, block_table=packed.block_table)
            own_k, own_v = sequence(cache, number, seq_k)
        else:
            own_k, own_v = k[:, :, keys], v[:, :, keys]
        own = replace(features.of_sequence(number), sequences=None)
        asked = replace(call, features=own)
        found = attention_by_torch(asked, q[:, :, rows], own_k, own_v)
        o[:, :, rows] = found[0]
        if found[1] is not None:  # return_lse
            lse[:, :, rows] = found[1]
    return o, lse


def _scores_are_finite(q: Tensor, k: Tensor, scale: float) -> bool:
    """Whether no score can be NaN or infinite, by the largest elements of q and k. True under a
    transform of torch.func, where no value can be read.
    """
    if torch_modes.transformed():
        return True
    largest_q, largest_k = (max(map(abs, map(float, x.detach().aminmax()))) for x in (q, k))
    return largest_q * largest_k * q.shape[3] * max(scale, 1.0) < FLOAT32_MAX


def forward_by_torch(
    call: Call, q: Tensor, k: Tensor, v: Tensor, tensors: Tensors
) -> tuple[Tensor, Tensor]:
    """O and LSE as attention_by_torch gives them, O laid out in memory as the kernels do."""
    o, lse = attention_by_torch(call, q, k, v, tensors)
    assert lse is not None
    return empty_like_layout(q, v.shape[3]).copy_(o), lse


def backward_by_torch(
    call: Call, saved: Saved, do: Tensor, dlse: Tensor | None, wanted: WantedGradients
) -> Gradients:
    """The gradients by their formulas, laid out in memory as the kernels do."""
    inputs = gradients.GradientInputs(
        q=saved.q,
        k=saved.k,
        v=saved.v,
        do=do,
        dlse=torch.zeros_like(saved.lse) if dlse is None else dlse,
        scale=call.scale_of(saved.q),
        diagonal=call.diagonal(saved.q, saved.k),
        features=call.features_with(saved.tensors),
        precision="ieee",
    )
    delta = gradients.delta_of(saved.o.float(), do.float(), inputs.dlse)
    found = gradients.rounded_gradients(inputs, saved.lse, delta)

    def laid_out(name: str, x: Tensor, requested: bool) -> Tensor | None:
        if not requested:
            return None
        return empty_like_layout(x, x.shape[3]).copy_(found[name])

    return (
        laid_out("dq", saved.q, wanted.q),
        laid_out("dk", saved.k, wanted.k),
        laid_out("dv", saved.v, wanted.v),
        found["dbias"].contiguous() if wanted.bias else None,
        found["dsinks"] if wanted.sinks else None,
    )
