"""Features: what a call may bring beside q, k and v: a bias or mask, ALiBi slopes, dropout.

What each means, in one place, for the reference, the kernels and the runtime. torch is not
imported: tensors are read by their attributes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from flashgen.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

Bias = Literal["none", "additive", "boolean"]

MASKED_BELOW = -1.0e30 / 1.4426950408889634
"""A bias at or below this masks its element, as -inf does: times log2(e) it is where the kernels'
maximum starts. Masks made of the most negative finite bfloat16 or float32 are such."""

FLOAT_BIAS = ("float16", "bfloat16", "float32")


@dataclass(frozen=True, kw_only=True, eq=False)
class Features:
    """The tensors and numbers of a call's features; all are off by default.

    bias        broadcastable to (B, H, Sq, Sk), four dimensions. float16, bfloat16 or float32: it
                is added to scale * Q K^T. bool: True where a query may attend to a key
    slopes      float32 (H,) or (B, H): ALiBi (arXiv 2108.12409); slope * |i + diagonal - j| is
                taken from the score of query i and key j, diagonal being Sk - Sq without a causal
                mask
    dropout_p   the probability with which an element of P is dropped, 0 to 1; the others are
                divided by 1 - dropout_p. LSE is that of P undropped
    rng         int64 (2,), seed and offset of the Philox generator that decides which, on the
                device of q: a kernel reads them when it runs, so a CUDA graph sees new values
    """

    bias: Tensor | None = None
    slopes: Tensor | None = None
    dropout_p: float = 0.0
    rng: Tensor | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.dropout_p <= 1.0:
            raise InvalidArgument(f"dropout_p must be from 0 to 1: got {self.dropout_p!r}")
        if self.dropout_p > 0.0 and self.rng is None:
            raise InvalidArgument("dropout_p above 0 needs rng, a seed and an offset: got none")

    @property
    def bias_kind(self) -> Bias:
        """Whether there is a bias to add, a boolean mask, or none."""
        if self.bias is None:
            return "none"
        return "boolean" if str(self.bias.dtype) == "torch.bool" else "additive"

    @property
    def dropout_threshold(self) -> int:
        """The least random word, read as a signed 32-bit integer, that keeps an element.

        An element is dropped with probability round(p * 2^32) / 2^32; of p = 1 see keep_scale.
        """
        return min(round(self.dropout_p * 2.0**32), 2**32 - 1) - 2**31

    @property
    def keep_scale(self) -> float:
        """What kept elements are multiplied by, 1 / (1 - p); 0 where p is 1."""
        return 1.0 / (1.0 - self.dropout_p) if self.dropout_p < 1.0 else 0.0


PLAIN = Features()
"""No feature."""


def check_features(features: Features, q: Tensor, k: Tensor) -> None:
    """Raise InvalidArgument, naming the argument, unless the features fit q and k."""
    shape = (*q.shape[:3], k.shape[2])
    tensors = {"bias": features.bias, "alibi_slopes": features.slopes, "rng": features.rng}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != q.device:
            raise InvalidArgument(
                f"{name} must be on the device of q, {q.device}: got {tensor.device}"
            )
    if features.bias is not None:
        _check_bias(features.bias, shape)
    if features.slopes is not None:
        _check_slopes(features.slopes, shape)
    if features.rng is not None and (
        str(features.rng.dtype) != "torch.int64" or tuple(features.rng.shape) != (2,)
    ):
        raise InvalidArgument(
            f"rng must be int64 of shape (2,), seed and offset: "
            f"got {features.rng.dtype} {tuple(features.rng.shape)}"
        )


def _check_bias(bias: Tensor, shape: tuple[int, ...]) -> None:
    dtype = str(bias.dtype).removeprefix("torch.")
    if dtype not in (*FLOAT_BIAS, "bool"):
        raise InvalidArgument(
            f"bias must be bool, float16, bfloat16 or float32: got {dtype}; convert it"
        )
    fits = bias.ndim == 4 and all(
        own in (1, asked) for own, asked in zip(bias.shape, shape, strict=True)
    )
    if not fits:
        raise InvalidArgument(
            f"bias must have four dimensions, each 1 or that of {shape}: got {tuple(bias.shape)}"
        )


def _check_slopes(slopes: Tensor, shape: tuple[int, ...]) -> None:
    batch, heads = shape[:2]
    if str(slopes.dtype) != "torch.float32" or tuple(slopes.shape) not in (
        (heads,),
        (batch, heads),
    ):
        raise InvalidArgument(
            f"alibi_slopes must be float32 of shape ({heads},) or ({batch}, {heads}): "
            f"got {slopes.dtype} {tuple(slopes.shape)}"
        )
