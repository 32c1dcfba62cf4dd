"""Call: what a call of attention asks beside its tensors. Saved: what its backward starts from.
Which objects are tensors that a kernel may be handed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from flashgen.errors import InvalidArgument
from flashgen.spec.block_mask import BlockMask
from flashgen.spec.features import PLAIN, Features
from flashgen.spec.from_call import check_scale, diagonal_of
from flashgen.spec.packed import Sequences

Causal = bool | Literal["top_left", "bottom_right"]

PLAIN_TYPES = (Tensor, Parameter)
"""The types whose objects are their own memory. Of a subclass nobody knows what it adds."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """The options of one call. scale is the number itself, no longer None."""

    causal: Causal
    scale: float
    precision: str = "ieee"
    deterministic: bool = True

    def diagonal(self, q: Tensor, k: Tensor) -> int | None:
        """The offset of the causal diagonal, as spec.diagonal_of gives it."""
        return diagonal_of(self.causal, q.shape[2], k.shape[2])


@dataclass(frozen=True, kw_only=True)
class Scalars:
    """The features of a call that are no tensors, as Features holds them. packed: of packed
    sequences, max_q, max_k and bottom_right. A block mask is made once, and never changed.
    """

    dropout_p: float = 0.0
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    packed: tuple[int, int, bool] | None = None
    block_mask: BlockMask | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Saved:
    """A forward's arguments and results: q (B, H, Sq, d), k (B, Hkv, Sk, d), v (B, Hkv, Sk, d_v), o
    (B, H, Sq, d_v) of one dtype, lse (B, H, Sq) float32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    call: Call
    features: Features = PLAIN


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The gradients that are asked for."""

    q: bool
    k: bool
    v: bool
    bias: bool
    sinks: bool


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Of q, k, v, the bias and the sinks; None where none was asked for."""

NO_SCALARS = Scalars()


def features_of(
    bias: Tensor | None,
    slopes: Tensor | None,
    rng: Tensor | None,
    sinks: Tensor | None,
    scalars: Scalars,
    bounds: tuple[Tensor, ...] = (),
) -> Features:
    """The features as one value; PLAIN where there are none. bounds: what bounds_of gave."""
    if (
        scalars.packed is None
        and scalars.block_mask is None
        and bias is None
        and slopes is None
        and rng is None
        and sinks is None
        and scalars.window is None
        and scalars.softcap == 0.0
    ):
        return PLAIN
    return Features(
        bias=bias,
        slopes=slopes,
        rng=rng,
        sinks=sinks,
        dropout_p=scalars.dropout_p,
        window=scalars.window,
        softcap=scalars.softcap,
        sequences=_sequences_of(scalars.packed, bounds),
        block_mask=scalars.block_mask,
    )


def bounds_of(features: Features) -> tuple[Tensor, ...]:
    """The tensors that say where packed sequences are; () where nothing is packed."""
    packed = features.sequences
    return () if packed is None else packed.bounds


def _sequences_of(
    packed: tuple[int, int, bool] | None, bounds: tuple[Tensor, ...]
) -> Sequences | None:
    if packed is None:
        return None
    q_begins, q_ends, k_begins, k_ends = bounds
    max_q, max_k, bottom_right = packed
    return Sequences(
        q_begins=q_begins,
        q_ends=q_ends,
        k_begins=k_begins,
        k_ends=k_ends,
        max_q=max_q,
        max_k=max_k,
        bottom_right=bottom_right,
    )


def scalars_of(features: Features) -> Scalars:
    """The features that are no tensors."""
    if features is PLAIN:
        return NO_SCALARS
    packed = features.sequences
    return Scalars(
        dropout_p=features.dropout_p,
        window=features.window,
        softcap=features.softcap,
        packed=None if packed is None else (packed.max_q, packed.max_k, packed.bottom_right),
        block_mask=features.block_mask,
    )


def check_tensors(**named: object) -> None:
    """Raise InvalidArgument, naming the argument, unless each is a tensor, neither nested nor
    sparse.
    """
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise InvalidArgument(f"{name} must be a tensor: got {type(x).__name__}")
        if x.is_nested:
            raise InvalidArgument(f"{name} must not be nested: pad its sequences to one length")
        if x.layout is not torch.strided:
            raise InvalidArgument(f"{name} must be dense: got {x.layout}; call .to_dense()")


def tensors_given(**named: Tensor | None) -> dict[str, Tensor]:
    """Those that are not None, by name. Raises as check_tensors."""
    given = {name: x for name, x in named.items() if x is not None}
    check_tensors(**given)
    return given


def in_four(bias: Tensor | None) -> Tensor | None:
    """A bias with dimensions of 1 put before its own, up to four."""
    return bias[(None,) * (4 - bias.ndim)] if bias is not None and bias.ndim < 4 else bias


def scale_of(scale: float | None, head_dim: int) -> float:
    """check_scale() of a call that has gradients."""
    refuse_scale_gradient(scale)
    return check_scale(scale, head_dim)


def refuse_scale_gradient(scale: object) -> None:
    """Raise InvalidArgument for a scale that asks for a gradient, which would be lost."""
    if isinstance(scale, Tensor) and scale.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument("scale has no gradient: detach it, or multiply q by it")


def check_plain(**named: object) -> None:
    """Raise InvalidArgument, naming the argument, for a subclass of Tensor: beside a plain q it
    would reach a kernel as bare memory.
    """
    for name, x in named.items():
        if type(x) not in PLAIN_TYPES:
            raise InvalidArgument(
                f"{name} must be a plain tensor, as q is: got {type(x).__name__}; "
                "unwrap it, or wrap q likewise"
            )


def agree(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether three tensors surely fit together: what a call of a resolved spec must still check.

    False asks from_tensors, which judges the odd cases and names what is wrong.
    """
    try:
        a, b, c = q.shape, k.shape, v.shape
    except (AttributeError, RuntimeError):  # no tensor, or a nested one
        return False
    return (
        len(a) == len(b) == len(c) == 4
        and a[0] == b[0] == c[0]
        and b[1] == c[1]
        and a[1] >= b[1] > 0
        and a[1] % b[1] == 0
        and b[2] == c[2]
        and a[3] == b[3]
        and q.dtype == k.dtype == v.dtype
        and q.device == k.device == v.device
        and type(k) in PLAIN_TYPES
        and type(v) in PLAIN_TYPES
        and q.layout is k.layout is v.layout is torch.strided
    )


def check_block_mask(mask: object, *, traced: bool) -> None:
    """Raise InvalidArgument for what is no block mask, and where operators know none."""
    if not isinstance(mask, BlockMask):
        raise InvalidArgument(
            "block_mask must be made by flashgen.runtime.block_mask, by from_boolean for example: "
            f"got {type(mask).__name__}"
        )
    if traced:
        raise InvalidArgument(
            "block_mask must be None where torch traces: call attention under "
            "torch.compiler.disable"
        )
