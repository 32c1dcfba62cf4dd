"""Calling conventions: how a public function gives its tensors, and how kernels take them.

Kernels take q, k and v as (batch, heads, seq, head_dim) and the tensors of features. A function
gives some of these in another form or order. Kept calls repeat launches from what it gave, so that
nothing is computed between the call and its launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from flashgen.inputs.features import TENSORS, tensors_of_heads
from flashgen.inputs.packed import OF_PLACES, places_of
from flashgen.kernels.stream_memory import zeros
from flashgen.runtime.call import Tensors
from flashgen.spec.features import PER_HEAD

Given = tuple[Tensor | None, ...]
"""The tensors of a call, in an order that its function fixes; None for what is left out."""

BOUNDS = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "table"
"""What says where packed sequences are, behind q, k and v. Numbers of heads follow."""


class Convention(NamedTuple):
    """What a call gives: q, k, v, and other tensors.

    name: for keys. places: of each other tensor by the arguments of kernels that are views of it.
    tensors: makes of them those of features, as Features.parts has them. packed: q, k, v, O and
    their gradients are (places, heads, head_dim) and LSE is (heads, places). paged: k and v are
    pools (pages, page_size, kv_heads, head_dim).
    """

    name: str
    places: dict[str, int]
    tensors: Callable[[Given], Tensors]
    packed: bool = False
    paged: bool = False

    def named(self, *between: str) -> dict[str, int]:
        """Which of q, k, v, `between` and the other tensors the arguments of kernels are."""
        first = {name: place for place, name in enumerate(("q", "k", "v", *between))}
        return first | {name: len(first) + place for name, place in self.places.items()}

    def inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As kernels take them."""
        return heads_first(q, k, v, paged=self.paged) if self.packed else (q, k, v)

    def results(self, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Of what kernels made."""
        return packed_again(o, lse) if self.packed else (o, lse)

    def saved(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor,
        dlse: Tensor | None, *others: Tensor | None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """The tensors of a backward as kernels take them."""
        tensors = self.tensors(others)
        if not self.packed:
            return q, k, v, o, lse, do, dlse, *tensors
        dlse = None if dlse is None else dlse[None]
        do = do.transpose(0, 1)[None]
        return *self.inputs(q, k, v), _as_made(o), lse[None], do, dlse, *tensors

    def gradients(self, dq: Any, dk: Any, dv: Any, *others: Any) -> tuple[Any, ...]:
        """Of what the kernels of a backward made."""
        if not self.packed:
            return dq, dk, dv, *others
        return *(None if x is None else x[0].transpose(0, 1) for x in (dq, dk, dv)), *others


def heads_first(q: Tensor, k: Tensor, v: Tensor, *, paged: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Packed q, k and v, or pools of pages, as kernels take them: (batch, heads, seq, head_dim)."""
    q = q.transpose(0, 1)[None]
    if paged:
        return q, k.transpose(1, 2), v.transpose(1, 2)
    return q, k.transpose(0, 1)[None], v.transpose(0, 1)[None]


def packed_again(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """O (places, heads, head_dim_v) and LSE (heads, places) of what kernels made. The gradients of
    both are views, as they would not be of o[0].
    """
    return o.squeeze(0).transpose(0, 1), lse.squeeze(0)


def _as_made(o: Tensor) -> Tensor:
    """O of packed_again() in the strides of what a kernel made: they decide what is compiled."""
    (places, heads, head_dim_v), (of_place, of_head, step) = o.shape, o.stride()
    strides = o.numel(), of_head, of_place, step
    return o.as_strided((1, heads, places, head_dim_v), strides)


def _ordered(*names: str) -> dict[str, int]:
    return {name.removeprefix("block_"): place for place, name in enumerate(names)}


def _of_bounds(others: Given) -> Tensors:
    bounds, heads = others[: len(BOUNDS)], others[len(BOUNDS) :]
    return *tensors_of_heads(heads), *places_of(*bounds, zeros=zeros)  # type: ignore[arg-type]


def _of_places(others: Given) -> Tensors:
    return *tensors_of_heads(others[len(OF_PLACES) :]), *others[: len(OF_PLACES)]


FEATURES = Convention("features", _ordered(*TENSORS, *OF_PLACES), tuple)
"""All as kernels take it."""
HEADS = Convention(
    "heads", _ordered(*PER_HEAD), lambda heads: tensors_of_heads(heads) if heads else ()
)
"""attention(): numbers of heads, or nothing."""
PLACES = Convention("places", _ordered(*OF_PLACES, *PER_HEAD), _of_places, packed=True)
"""attention_varlen() with lengths in use, once the places of sequences are computed."""


def bounds(*, paged: bool, used_k: bool) -> Convention:
    """attention_varlen() where kernels read BOUNDS. used_k: seqused_k ends the keys of a sequence,
    as it does of pages alone.
    """
    found = _ordered(*BOUNDS, *PER_HEAD)
    for side in "qk":
        found[f"{side}_begins"] = found[f"{side}_ends"] = found[f"cu_seqlens_{side}"]
    if used_k:
        found["k_ends"] = found["seqused_k"]
    return Convention("bounds", found, _of_bounds, packed=True, paged=paged)
