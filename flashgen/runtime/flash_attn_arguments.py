"""What the functions of flash_attn make of their arguments before they are flashgen's: packed
tensors, windows, head dims.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from flashgen.asked import check_scale
from flashgen.errors import InvalidArgument
from flashgen.features import UNBOUNDED, Window, window_of
from flashgen.runtime.call import check_tensors
from flashgen.spec import HEAD_DIM_STEP, MIN_HEAD_DIM

Results = Tensor | tuple[Tensor, Tensor, Tensor | None]


def check_dimensions(count: str, size: int, **named: Tensor) -> None:
    """Raise InvalidArgument, naming the argument, unless each is a tensor of so many dimensions;
    count: their number in words.
    """
    check_tensors(**named)
    for name, x in named.items():
        if x.ndim != size:
            raise InvalidArgument(f"{name} must have {count} dimensions: got {tuple(x.shape)}")


def unpacked(name: str, x: Tensor, places: str, parts: int) -> tuple[Tensor, ...]:
    """The parts of qkv or kv, (places, parts, heads, head_dim). Raises InvalidArgument."""
    check_tensors(**{name: x})
    at = places.count(",") + 1
    if x.ndim != at + 3 or x.shape[at] != parts:
        raise InvalidArgument(
            f"{name} must have shape ({places}, {parts}, heads, head_dim): got {tuple(x.shape)}"
        )
    return x.unbind(at)


def check_probabilities(asked: bool, dropout_p: float) -> None:
    """Raise InvalidArgument where the dropped P is asked for."""
    if asked and dropout_p:
        raise InvalidArgument(
            "return_attn_probs must be False with dropout: flashgen never makes the dropped P"
        )


def window_within(window: Window | None, keys: int) -> Window | None:
    """A window over so many keys: a side that reaches as far has no end, as FlashAttention 2 has
    it, and None is a window without any. Raises InvalidArgument.
    """
    if type(window) is tuple and window == (-1, -1):
        return None
    sides = window_of(window)
    if sides is None:
        return None
    left, right = (UNBOUNDED if side >= keys else side for side in sides)
    return None if left == right == UNBOUNDED else (left, right)


def cap_of(softcap: float | None) -> float | None:
    """None for the default, which is no cap; attention() judges all others."""
    return None if type(softcap) is float and softcap == 0.0 else softcap


def in_steps(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float | None]:
    """q, k and v (..., head dim) with zeros behind their elements up to a head dim that kernels
    have, as FlashAttention 2 pads them: a product with zeros adds nothing, and O's last elements
    are zeros, to be cut off. With the scale, which is of the head dim that was given.
    """
    dim, dim_v = q.shape[-1], v.shape[-1]
    if dim != k.shape[-1] or (_fits(dim) and _fits(dim_v)):
        return q, k, v, scale
    return _padded(q), _padded(k), _padded(v), check_scale(scale, dim) if scale is None else scale


def _fits(dim: int) -> bool:
    """Whether it needs no padding; of no element it is another's to say."""
    return dim % HEAD_DIM_STEP == 0 and (dim >= MIN_HEAD_DIM or dim == 0)


def _padded(x: Tensor) -> Tensor:
    dim = x.shape[-1]
    wanted = max(MIN_HEAD_DIM, -(-dim // HEAD_DIM_STEP) * HEAD_DIM_STEP)
    return x if _fits(dim) else pad(x, (0, wanted - dim))
