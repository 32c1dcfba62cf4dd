"""Features: what a call may bring beside q, k and v: a bias or mask, ALiBi slopes, dropout, a
sliding window, a cap of the scores, attention sinks, sequences of several lengths, block
masks.

What each means, in one place, for the reference, the kernels and the runtime. torch is not
imported: tensors are read by their attributes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Literal

from flashgen.errors import InvalidArgument
from flashgen.spec.block_mask import BlockMask, check_block_mask
from flashgen.spec.packed import Sequences, check_sequences

if TYPE_CHECKING:
    from torch import Tensor

Bias = Literal["none", "additive", "boolean"]

MASKED_BELOW = -1.0e30 / 1.4426950408889634
"""A bias at or below this masks its element, as -inf does: times log2(e) it is where the kernels'
maximum starts. Masks made of the most negative finite bfloat16 or float32 are such."""

FLOAT_BIAS = ("float16", "bfloat16", "float32")


@dataclass(frozen=True, kw_only=True, eq=False)
class Fp8:
    """What a forward of float8_e4m3 Q, K and V brings: float32 factors of each, (B, Hkv), by which
    elements are multiplied, in any strides; and the dtype of O, float16 or bfloat16.
    """

    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor
    dtype: str = "bfloat16"

    @property
    def factors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Those of Q, K and V."""
        return self.q_descale, self.k_descale, self.v_descale


UNBOUNDED = -1
"""A side of a window without an end."""

FAR = 1 << 62
"""Keys to a side that no call has, and that torch's 64 bits would not hold beside a place."""

Window = tuple[int | None, int | None]
"""(left, right) as calls are given it; window_of() says what that is."""


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
    window      keys to the left and to the right that a query sees, UNBOUNDED for all: query i sees
                key j where i + diagonal - left <= j <= i + diagonal + right, diagonal as for
                slopes. A causal mask holds beside it
    softcap     0 for none, or the cap of the scores, before bias, slopes and masks: a score s, with
                its scale, becomes softcap * tanh(s / softcap) (Gemma 2, arXiv 2408.00118)
    sinks       (H,) float32 or of q's dtype: the score of a key without a value, which each row of
                a head sees, whatever its masks (gpt-oss). LSE includes it
    sequences   where the sequences of packed q, k and v are: a query sees the keys of its own one
                alone, and diagonal is that of its sequence; B of slopes counts sequences
    fp8         the factors of float8_e4m3 Q, K and V
    block_mask  which queries see which keys, in place of a causal mask, window and bias
    """

    bias: Tensor | None = None
    slopes: Tensor | None = None
    dropout_p: float = 0.0
    rng: Tensor | None = None
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    sequences: Sequences | None = None
    fp8: Fp8 | None = None
    block_mask: BlockMask | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.dropout_p <= 1.0:
            raise InvalidArgument(f"dropout_p must be from 0 to 1: got {self.dropout_p!r}")
        if self.dropout_p > 0.0 and self.rng is None:
            raise InvalidArgument("dropout_p above 0 needs rng, a seed and an offset: got none")
        if self.window is not None and self.window != window_of(self.window):
            raise InvalidArgument(f"window must have a bounded side, or be None: got {self.window}")
        check_softcap(self.softcap)

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

    def bounds(self, seq_q: int, seq_k: int) -> tuple[int, int]:
        """The window's keys to the left and right, as far as these lengths go: never UNBOUNDED."""
        far = seq_q + seq_k
        left, right = self.window or (UNBOUNDED, UNBOUNDED)
        return far if left < 0 else min(left, far), far if right < 0 else min(right, far)


def window_of(window: object, *, causal: bool = False) -> tuple[int, int] | None:
    """The window as Features holds it, of (left, right), each a whole number of keys, or None or -1
    for all of them; None where it hides nothing: a causal mask ends the right side by itself.

    Raises InvalidArgument for anything else.
    """
    if window is None:
        return None
    sides = tuple(window) if isinstance(window, tuple | list) else ()
    if len(sides) != 2 or not all(map(_is_side, sides)):
        raise InvalidArgument(
            "window must be (left, right), whole numbers of keys, each None or -1 for no end: "
            f"got {window!r}"
        )
    left, right = (UNBOUNDED if side is None or side >= FAR else int(side) for side in sides)
    if causal:
        right = UNBOUNDED
    return None if left == right == UNBOUNDED else (left, right)


def limits_of(
    window: object, softcap: object, *, causal: bool
) -> tuple[tuple[int, int] | None, float | None]:
    """window_of() and check_softcap(), each None where it changes nothing: a drop-in's (-1, -1) and
    0.0 are no features.
    """
    return window_of(window, causal=causal), check_softcap(softcap) or None


def _is_side(side: object) -> bool:
    return side is None or (isinstance(side, int) and not isinstance(side, bool) and side >= -1)


def check_softcap(softcap: object) -> float:
    """The cap as Features holds it; None is 0, no cap. Raises InvalidArgument for what is no number
    of 0 or more.
    """
    cap = 0.0 if softcap is None else softcap
    number = float(cap) if isinstance(cap, Real) and not isinstance(cap, bool) else math.nan
    if not 0.0 <= number < math.inf:
        raise InvalidArgument(f"softcap must be finite and 0 or more, 0 for none: got {softcap!r}")
    return number


PLAIN = Features()
"""No feature."""


def check_features(features: Features, q: Tensor, k: Tensor) -> None:
    """Raise InvalidArgument, naming the argument, unless the features fit q and k."""
    keys = k.shape[2]
    if features.sequences is not None:
        check_sequences(features.sequences, q, k)
    if features.block_mask is not None:
        check_block_mask(features.block_mask, q, k)
    check_for_keys(features, q, keys)


def check_for_keys(features: Features, q: Tensor, keys: int) -> None:
    """check_features for so many keys, in a tensor or in a cache that has room for them."""
    shape = (*q.shape[:3], keys)
    if features.sequences is not None:
        shape = (features.sequences.count, *shape[1:])
    tensors = {
        "bias": features.bias,
        "alibi_slopes": features.slopes,
        "rng": features.rng,
        "sinks": features.sinks,
    }
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != q.device:
            raise InvalidArgument(
                f"{name} must be on the device of q, {q.device}: got {tensor.device}"
            )
    if features.bias is not None:
        _check_bias(features.bias, shape)
    if features.slopes is not None:
        _check_slopes(features.slopes, shape)
    if features.sinks is not None:
        _check_sinks(features.sinks, q)
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


def _check_sinks(sinks: Tensor, q: Tensor) -> None:
    heads = q.shape[1]
    if tuple(sinks.shape) != (heads,) or str(sinks.dtype) not in ("torch.float32", str(q.dtype)):
        raise InvalidArgument(
            f"sinks must be of shape ({heads},), float32 or of the dtype of q, {q.dtype}: "
            f"got {sinks.dtype} {tuple(sinks.shape)}"
        )
