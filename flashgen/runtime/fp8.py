"""attention() of float8_e4m3 operands: forward alone, on sm_89 and later.

q, k and v come in 8 bits with float32 factors, by the names of FlashAttention-3; both products are
of e4m3, P too, with float32 accumulation. docs/numerics.md says how right that is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashgen.errors import InvalidArgument, shown
from flashgen.inputs.features import Fp8, Window, named_tensors, tensors_of
from flashgen.inputs.from_call import from_tensors
from flashgen.inputs.tensors import broadcasts
from flashgen.kernels.arguments import empty_like_layout
from flashgen.runtime import folders, torch_modes
from flashgen.runtime.call import Call, Causal, check_plain, check_tensors
from flashgen.runtime.eager import attention as eager
from flashgen.runtime.general_path import asked_features
from flashgen.runtime.keywords import hinting

OUT_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


@hinting
@torch_modes.without_gradients
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    causal: Causal = False,
    scale: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax(scale * Q K^T + bias) V of float8_e4m3fn tensors; O is of out_dtype.

    CPU tensors are computed in float32. There is no gradient. Factors are positive.

    Args:
        q: (batch, heads, seq_q, head_dim), torch.float8_e4m3fn.
        k: (batch, kv_heads, seq_k, head_dim); kv_heads divides heads.
        v: (batch, kv_heads, seq_k, head_dim_v).
        q_descale: float32, one number, (kv_heads,) or (batch, kv_heads); None is 1.
        k_descale: the same of k.
        v_descale: the same of v.
        out_dtype: of O, bfloat16 or float16.
        causal: True or "bottom_right" (the last query sees the last key), "top_left", or False.
        scale: what scores are multiplied by; 1/sqrt(head_dim) unless given.
        bias: to (batch, heads, seq_q, seq_k): float, added to scores, or bool, True may attend.
        alibi_slopes: float32 (heads,) or (batch, heads), ALiBi.
        window: (left, right) keys a query sees beside its diagonal; None or -1 is no end.
        softcap: scores become softcap * tanh(score / softcap) before bias and masks; 0 is none.
        sinks: float32 (heads,): a score that each row of a head sums besides its keys'.

    Returns:
        O (batch, heads, seq_q, head_dim_v) and LSE (batch, heads, seq_q), float32.

    Raises:
        InvalidArgument: naming the argument, or for a GPU without e4m3 products; a ValueError.

    Examples:
        >>> import torch
        >>> from flashgen.runtime import fp8
        >>> q = torch.randn(1, 2, 8, 64).to(torch.float8_e4m3fn)
        >>> o, lse = fp8.attention(q, q, q, causal=True)
        >>> o.dtype
        torch.bfloat16
    """
    check_tensors(q=q, k=k, v=v)
    check_plain(q=q, k=k, v=v)
    if not isinstance(out_dtype, torch.dtype) or out_dtype not in OUT_DTYPES:
        raise InvalidArgument(f"out_dtype must be bfloat16 or float16: got {shown(out_dtype)}")
    named = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    factors = {name: _factor(name, x, q, k) for name, x in named.items()}
    features = asked_features(
        q, causal=causal is not False, bias=bias, alibi_slopes=alibi_slopes, window=window,
        softcap=softcap, sinks=sinks, fp8=Fp8(**factors, dtype=OUT_DTYPES[out_dtype]),
    )  # fmt: skip
    check_plain(**named_tensors(tensors_of(features)))
    from_tensors(q, k, v, causal=causal, features=features)
    call, tensors = Call(causal=causal, scale=scale, features=features).parts
    dispatcher = folders.current()
    if dispatcher.resolver.left_to_torch(q.device):
        o, lse = eager.attention(
            q, k, v, scale=call.scale_of(q), diagonal=call.diagonal(q, k), features=features
        )
        return empty_like_layout(q, v.shape[3], out_dtype).copy_(o), lse.float()
    return dispatcher.passes.forward(call, q, k, v, tensors)


def _factor(name: str, x: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
    """A factor as (batch, kv_heads). Raises InvalidArgument."""
    shape = (q.shape[0], k.shape[1]) if k.ndim == q.ndim == 4 else (1, 1)
    if x is None:
        return torch.ones((), device=q.device).expand(shape)
    check_tensors(**{name: x})
    if not broadcasts(x.shape, shape) or x.dtype != torch.float32 or x.device != q.device:
        raise InvalidArgument(
            f"{name} must be float32, one number or of shape ({shape[1]},) or {shape}, on the "
            f"device of q, {q.device}: got {x.dtype} {tuple(x.shape)} on {x.device}"
        )
    return x.expand(shape)
