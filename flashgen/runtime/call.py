"""Call: the options of a call of attention. Saved: the inputs of its backward. And checks that
arguments are tensors that a kernel can use.

Nobody changes these dataclasses. They are not frozen, because one of each is made at every call,
and a frozen one takes three times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from flashgen.errors import InvalidArgument
from flashgen.spec.block_mask import BlockMask
from flashgen.spec.features import PLAIN, TENSORS, Features, tensors_of
from flashgen.spec.from_call import check_scale, diagonal_of
from flashgen.spec.packed import Sequences

Causal = bool | Literal["top_left", "bottom_right"]

PLAIN_TYPES = (Tensor, Parameter)
"""The types whose objects are their own memory. Of a subclass nobody knows what it adds."""


@dataclass(kw_only=True, eq=False)
class Call:
    """The options of one call. scale is the number itself, not None."""

    causal: Causal
    scale: float
    precision: str = "ieee"
    deterministic: bool = True

    def diagonal(self, q: Tensor, k: Tensor) -> int | None:
        """The offset of the causal diagonal, as spec.diagonal_of gives it."""
        return diagonal_of(self.causal, q.shape[2], k.shape[2])


@dataclass(kw_only=True, eq=False)
class Scalars:
    """The features of a call without their tensors, which autograd saves itself.

    packed: max_q, max_k and bottom_right of packed sequences. A block mask stays, because it never
    changes.
    """

    features: Features = PLAIN
    packed: tuple[int, int, bool] | None = None


@dataclass(kw_only=True, eq=False)
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


@dataclass(kw_only=True, eq=False)
class Wanted:
    """The requested gradients."""

    q: bool
    k: bool
    v: bool
    bias: bool
    sinks: bool


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Of q, k, v, the bias and the sinks; None if not requested."""

NO_SCALARS = Scalars()
_NONE = (None,) * len(TENSORS)


class TwoPasses(Protocol):
    """The forward and the backward pass: autograd.Passes, or those of cached calls."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, features: Features = ...
    ) -> tuple[Tensor, Tensor]:
        """O and LSE, as Passes.forward."""
        ...

    def backward(self, saved: Saved, do: Tensor, dlse: Tensor | None, wanted: Wanted) -> Gradients:
        """As Passes.backward."""
        ...


def parts_of(features: Features) -> tuple[Scalars, tuple[Tensor | None, ...]]:
    """The features as what is no tensor, and as tensors: TENSORS of spec/features.py and, of packed
    sequences, where they are.
    """
    packed, tensors = features.sequences, tensors_of(features)
    scalars = Scalars(
        features=features.with_tensors(_NONE, None),
        packed=None if packed is None else (packed.max_q, packed.max_k, packed.bottom_right),
    )
    return scalars, tensors + (() if packed is None else packed.bounds)


def features_of(scalars: Scalars, tensors: Sequence[Any]) -> Features:
    """The features of which parts_of made these."""
    if all(x is None for x in tensors):
        return scalars.features
    bounds, packed = tensors[len(TENSORS) :], None
    if scalars.packed is not None:
        q_begins, q_ends, k_begins, k_ends = bounds
        max_q, max_k, bottom_right = scalars.packed
        packed = Sequences(
            q_begins=q_begins,
            q_ends=q_ends,
            k_begins=k_begins,
            k_ends=k_ends,
            max_q=max_q,
            max_k=max_k,
            bottom_right=bottom_right,
        )
    return scalars.features.with_tensors(tensors, packed)


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


def scale_of(scale: float | None, head_dim: int) -> float:
    """check_scale() of a call that has gradients."""
    refuse_scale_gradient(scale)
    return check_scale(scale, head_dim)


def refuse_scale_gradient(scale: object) -> None:
    """Raise InvalidArgument for a scale that requires a gradient, which would be lost."""
    if isinstance(scale, Tensor) and scale.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument("scale has no gradient: detach it, or multiply q by it")


def check_plain(**named: object) -> None:
    """Raise InvalidArgument, naming the argument, for a subclass of Tensor: with a plain q it
    would reach a kernel as bare memory.
    """
    for name, x in named.items():
        if type(x) not in PLAIN_TYPES:
            raise InvalidArgument(
                f"{name} must be a plain tensor, as q is: got {type(x).__name__}; "
                "unwrap it, or wrap q likewise"
            )


def agree(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether three tensors certainly fit together: what a call of a resolved spec must still
    check.

    If False, from_tensors decides the remaining cases and names what is wrong.
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
    """Raise InvalidArgument for anything but a block mask, and under tracing, where operators do
    not support one.
    """
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
