"""Attention on CPU tensors: torch's SDPA where it is exact, else the reference; so that code runs
anywhere.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flashgen import reference
from flashgen.spec import diagonal_of


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool | str, scale: float, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """O (B, H, Sq, d_v) of q's dtype, and LSE (B, H, Sq) float32 if asked for. Checked arguments
    only.

    SDPA knows the top-left diagonal alone, gives no LSE, and has no rule for empty keys; a scale
    that is not above 0 meets its mask of -inf, and makes NaN.
    """
    seq_q, seq_k = q.shape[2], k.shape[2]
    plain = causal is False or causal == "top_left" or seq_q == seq_k
    if plain and not return_lse and scale > 0 and seq_k > 0 and q.numel() > 0:
        o = scaled_dot_product_attention(
            q, k, v, is_causal=causal is not False, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return o, None
    o, lse = reference.attention(q, k, v, scale=scale, diagonal=diagonal_of(causal, seq_q, seq_k))
    return o.to(q.dtype), lse.float() if return_lse else None
