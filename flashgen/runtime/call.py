"""Call: what is asked, in one object that goes from the public function to the launch. Tensors
travel beside it. And checks that arguments are tensors that a kernel can use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from flashgen.errors import InvalidArgument
from flashgen.inputs.block_mask import BlockMask
from flashgen.inputs.features import PLAIN, Features, numbers_of
from flashgen.inputs.from_call import check_scale, diagonal_of

Causal = bool | Literal["top_left", "bottom_right"]

PLAIN_TYPES = (Tensor, Parameter)
"""The types whose objects are their own memory. Of a subclass nobody knows what it adds."""

Tensors = tuple[Tensor | None, ...]
"""Those of features, in the order of Features.parts; () where there are none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """What a call asks for, but for its tensors.

    scale      as the caller gave it; None is 1/sqrt(head_dim)
    features   with their tensors until `parts` takes them out
    """

    causal: Causal = False
    scale: float | None = None
    precision: str = "ieee"
    deterministic: bool = True
    features: Features = PLAIN

    def scale_of(self, q: Tensor) -> float:
        """The number that scores are multiplied by. Raises InvalidArgument."""
        return check_scale(self.scale, q.shape[-1] if q.ndim else 0)  # its shape is judged later

    def diagonal(self, q: Tensor, k: Tensor) -> int | None:
        """The offset of the causal diagonal, as spec.diagonal_of gives it."""
        return diagonal_of(self.causal, q.shape[2], k.shape[2])

    @property
    def parts(self) -> tuple[Call, Tensors]:
        """The call without tensors, and the tensors of its features."""
        features, tensors = (PLAIN, ()) if self.features is PLAIN else self.features.parts
        if not tensors:
            return self, ()
        bare = Call(
            causal=self.causal, scale=self.scale, precision=self.precision,
            deterministic=self.deterministic, features=features,
        )  # fmt: skip
        return bare, tensors

    @functools.cached_property
    def options(self) -> tuple[object, ...] | None:
        """What of it decides the launches of a backward, but for tensors; None where no key may
        hold it.
        """
        features, packed = self.features, self.features.sequences
        if features.block_mask is not None or not holds(self.causal, self.scale):
            return None
        return numbers_of(features), None if packed is None else packed.numbers

    def features_with(self, tensors: Tensors) -> Features:
        """The features with their tensors."""
        return self.features.with_tensors(tensors) if tensors else self.features


def holds(causal: object, scale: object) -> bool:
    """Whether a key may hold these options: their types are those that calls should use."""
    return type(causal) in (bool, str) and (scale is None or type(scale) is float)


class Saved(NamedTuple):
    """A forward's tensors, which its backward needs: q (B, H, Sq, d), k (B, Hkv, Sk, d), v (B, Hkv,
    Sk, d_v), o (B, H, Sq, d_v) of one dtype, lse (B, H, Sq) float32, and those of features.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    tensors: Tensors = ()


class WantedGradients(NamedTuple):
    """The requested gradients."""

    q: bool
    k: bool
    v: bool
    bias: bool
    sinks: bool


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Of q, k, v, the bias and the sinks; None if not requested."""


TwoPasses = tuple[
    Callable[[Call, Tensor, Tensor, Tensor, Tensors], tuple[Tensor, Tensor]],
    Callable[[Call, Saved, Tensor, Tensor | None, WantedGradients], Gradients],
]
"""The forward and the backward pass: those of autograd.Passes, or others like them."""


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


def check_is_block_mask(mask: object, *, traced: bool) -> None:
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
