"""merge(): attention over disjoint sets of keys, put together by log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from flashgen.errors import InvalidArgument

NONE = float("-inf")


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention of the same queries over the keys of all parts, from that over each part's keys.

    All parts have one shape and one device. Where the LSE of a part is -inf, as without keys, its O
    is not read. Sums are float32, or float64 where a tensor is. Differentiable with respect to each
    o and lse.

    Args:
        parts: one or more (o, lse) as attention(return_lse=True) returns them.

    Returns:
        O (batch, heads, seq, head_dim) of the dtype to which torch promotes those of the parts,
        bfloat16 and float16 to float32; and LSE (batch, heads, seq), float32, or float64 where a
        part is. Where the LSE of all parts is -inf, O = 0 and LSE = -inf.

    Raises:
        InvalidArgument: naming the argument; it is a ValueError.

    Examples:
        >>> import torch, flashgen
        >>> q, k = torch.randn(1, 2, 4, 64), torch.randn(1, 2, 10, 64)
        >>> halves = [flashgen.attention(q, x, x, return_lse=True) for x in k.split(5, dim=2)]
        >>> o, lse = flashgen.merge(halves)
        >>> torch.allclose(o, flashgen.attention(q, k, k), atol=1e-5)
        True
    """
    _check(parts)
    outputs, sums = [o for o, _ in parts], [lse for _, lse in parts]
    dtype = reduce(torch.promote_types, (o.dtype for o in outputs))
    lse_dtype = reduce(torch.promote_types, (lse.dtype for lse in sums))
    exact = torch.promote_types(torch.promote_types(dtype, lse_dtype), torch.float32)
    sums = [lse.to(exact) for lse in sums]
    # The result does not depend on what is subtracted, so its gradient is not needed.
    highest = reduce(torch.maximum, sums).detach()
    highest = torch.where(highest == NONE, 0.0, highest)
    total, merged = torch.zeros_like(highest), torch.zeros_like(outputs[0], dtype=exact)
    for o, lse in zip(outputs, sums, strict=True):
        weight = (lse - highest).exp()
        total = total + weight
        seen = torch.where((lse == NONE)[..., None], 0.0, o.to(exact))
        merged = merged + weight[..., None] * seen
    # log(0) and 0/0 would have gradients of NaN, even where they are masked afterwards.
    nothing = total == 0.0
    total = torch.where(nothing, 1.0, total)
    lse = torch.where(nothing, NONE, highest + total.log())
    return (merged / total[..., None]).to(dtype), lse.to(lse_dtype)


def _check(parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    if not isinstance(parts, Sequence) or not parts:
        got = f"{len(parts)} parts" if isinstance(parts, Sequence) else type(parts).__name__
        raise InvalidArgument(f"parts must be a sequence of one or more (o, lse): got {got}")
    for number, part in enumerate(parts):
        if not (
            isinstance(part, Sequence)
            and len(part) == 2
            and all(isinstance(x, Tensor) for x in part)
        ):
            raise InvalidArgument(f"parts[{number}] must be a pair of tensors (o, lse)")
    first = parts[0][0]
    if first.ndim != 4:
        raise InvalidArgument(
            f"o must have shape (batch, heads, seq, head_dim): got {tuple(first.shape)} in parts[0]"
        )
    for number, (o, lse) in enumerate(parts):
        _check_tensor(f"o of parts[{number}]", o, first.shape, first.device)
        _check_tensor(f"lse of parts[{number}]", lse, first.shape[:3], first.device)
        if lse.dtype not in (torch.float32, torch.float64):
            raise InvalidArgument(
                f"lse of parts[{number}] must be float32 or float64: got {lse.dtype}"
            )


def _check_tensor(name: str, x: Tensor, shape: torch.Size, device: torch.device) -> None:
    if x.shape != shape or x.device != device or not x.is_floating_point():
        raise InvalidArgument(
            f"{name} must be floating, of shape {tuple(shape)}, on {device}: "
            f"got {x.dtype} {tuple(x.shape)} on {x.device}"
        )
