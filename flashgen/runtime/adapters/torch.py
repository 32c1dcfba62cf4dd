"""flashgen as one of torch's implementations of flash attention (torch.nn.attention): the calls of
scaled_dot_product_attention and varlen_attn that torch gives to flash run on flashgen's kernels.

    import flashgen.runtime
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    flashgen.runtime.torch.register()
    activate_flash_attention_impl("flashgen")  # restore_flash_attention_impl() undoes it

torch decides which calls go to flash, and pads head dims to multiples of 8. Its operators are
replaced under the key of CUDA alone, below autograd, whose formula calls the backward operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.nn.attention import register_flash_attention_impl

from flashgen import settings
from flashgen.errors import InvalidArgument
from flashgen.inputs.features import PLAIN, Window, check_invariant, features_of
from flashgen.inputs.packed import from_bounds
from flashgen.runtime import folders, torch_modes
from flashgen.runtime.adapters.seq_first import in_steps, window_within
from flashgen.runtime.call import Call, Saved, WantedGradients

NAME = "flashgen"
"""The name of the implementation."""

_ALL = WantedGradients(q=True, k=True, v=True, bias=False, sinks=False)


def register(*, invariant: bool = False) -> None:
    """Make flashgen one of torch's implementations of flash attention.

    It is then among torch.nn.attention.list_flash_attention_impls(). Nothing changes before
    activate_flash_attention_impl("flashgen"). Of several registrations the last one counts.

    Args:
        invariant: as of attention (docs/invariance.md), where torch chooses this backend.

    Returns:
        None.

    Raises:
        InvalidArgument: if invariant is no bool.
        RuntimeError: whatever torch raises when it refuses an implementation.

    Examples:
        >>> import flashgen.runtime
        >>> from torch.nn.attention import list_flash_attention_impls
        >>> flashgen.runtime.torch.register()
        >>> "flashgen" in list_flash_attention_impls()
        True
    """
    check_invariant(invariant)
    register_flash_attention_impl(NAME, register_fn=partial(_Activated, invariant))


class _Activated:
    """The operators of torch, replaced until remove()."""

    def __init__(self, invariant: bool) -> None:
        self._library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for name, function in OPERATORS.items():
            if hasattr(torch.ops.aten, name):  # torch 2.11 lacks the one that writes in place
                served = partial(function, invariant=invariant)
                self._library.impl(name, served, "CUDA")  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Give torch's own operators back."""
        self._library._destroy()  # type: ignore[no-untyped-call]


def _sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    invariant: bool = False,
) -> tuple[Any, ...]:
    """O (batch, heads, seq_q, dim), LSE, two that are None, the lengths, and as _flash_forward."""
    rng = torch_modes.draw_rng(dropout_p, query.device)
    call = _call(is_causal, scale, dropout_p=dropout_p, rng=rng, invariant=invariant)
    o, lse = _forward(call, query, key, value)
    lengths = None, None, query.shape[2], key.shape[2]
    return o, lse, *lengths, *_drawn(query, rng, return_debug_mask)


def _sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
    invariant: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    rng = _rng(dropout_p, philox_seed)
    call = _call(is_causal, scale, dropout_p=dropout_p, rng=rng, invariant=invariant)
    return backward_of(call, Saved(query, key, value, out, logsumexp), grad_out)


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    invariant: bool = False,
) -> tuple[Tensor, ...]:
    """O (batch, seq_q, heads, dim), or of packed sequences (places, heads, dim), LSE (batch, heads,
    seq_q) or (heads, places), the random state of dropout, uint64 (2,), and two that are empty.
    num_splits has no effect: every row is summed by one program.
    """
    causal, window = _windowed(is_causal, window_size_left, window_size_right, max_k)
    sequences = None
    if cum_seq_q is not None:
        sequences = from_bounds(
            cum_seq_q, cum_seq_k, max_q, max_k, seqused_k=seqused_k, block_table=block_table,
            page_size=1 if block_table is None else key.shape[1],
        ).within(query.shape[0], key.shape[0])  # fmt: skip
    elif seqused_k is not None or block_table is not None:
        raise InvalidArgument("seqused_k and block_table need cum_seq_q: got None")
    rng = torch_modes.draw_rng(dropout_p, query.device)
    call = _call(
        causal, scale, dropout_p=dropout_p, rng=rng, window=window, sequences=sequences,
        alibi_slopes=alibi_slopes, invariant=invariant,
    )  # fmt: skip
    q, k, v = map(_heads_first, (query, key, value))
    o, lse = _forward(call, q, k, v)
    o, lse = _as_given(o, query), lse if sequences is None else lse[0]
    return o, lse, *_drawn(query, rng, return_debug_mask)


def _flash_forward_into(out: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """_flash_forward that writes O into out, and returns LSE."""
    o, lse, *_ = _flash_forward(*arguments, **options)
    out.copy_(o)
    return lse


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    invariant: bool = False,
) -> tuple[Tensor, ...]:
    causal, window = _windowed(is_causal, window_size_left, window_size_right, max_k)
    sequences = None
    if cum_seq_q is not None:
        found = from_bounds(cum_seq_q, cum_seq_k, max_q, max_k)
        sequences = found.within(query.shape[0], key.shape[0])
    rng = _rng(dropout_p, rng_state)
    call = _call(
        causal, scale, dropout_p=dropout_p, rng=rng, window=window, sequences=sequences,
        invariant=invariant,
    )  # fmt: skip
    return gradients_of(call, Saved(query, key, value, out, logsumexp), grad_out)


OPERATORS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_forward_into,
    "_flash_attention_backward": _flash_backward,
}
"""What serves each operator of torch, which documents none; an argument invariant is ours."""


@torch_modes.without_gradients
def _forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """O (B, H, Sq, d) and LSE (B, H, Sq), float32."""
    if v.shape[-1] != q.shape[-1]:  # torch makes O in the shape of query
        raise InvalidArgument(
            f"value must have the head dim of query, {q.shape[-1]}: got {v.shape[-1]}"
        )
    dispatcher, query = folders.current(), q
    call = replace(call, scale=call.scale_of(q))  # of the head dim before in_steps()
    q, k, v, _ = in_steps(q, k, v, call.scale)
    lse: Tensor | None
    if call.features is PLAIN:
        o, lse = dispatcher.attention(
            q, k, v, causal=call.causal, scale=call.scale, return_lse=True
        )
    else:
        o, lse = dispatcher.general.serve_eager(call, q, k, v)
    assert lse is not None  # return_lse
    return _laid_out_as(query, o), lse


def backward_of(call: Call, saved: Saved, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV, deterministic where torch.use_deterministic_algorithms() asks for it."""
    given, scale = saved[:3], call.scale_of(saved.q)
    call, tensors = replace(call, scale=scale).parts
    q, k, v, _ = in_steps(*given, scale)
    o, do, *_ = in_steps(saved.o, do, do, scale)
    made = Saved(q, k, v, o, saved.lse, tensors)
    found = folders.current().passes.backward(call, made, do, None, _ALL)
    dq, dk, dv = (
        _laid_out_as(x, dx) for x, dx in zip(given, found, strict=False) if dx is not None
    )
    return dq, dk, dv


def gradients_of(call: Call, given: Saved, grad_out: Tensor) -> tuple[Tensor, ...]:
    """backward_of() tensors (batch, seq, heads, dim) with LSE (batch, heads, seq), or of packed
    sequences (places, heads, dim) with LSE (heads, places).
    """
    q, k, v, o, do = map(_heads_first, (*given[:4], grad_out))
    lse = given.lse if call.features.sequences is None else given.lse[None]
    return tuple(map(_as_given, backward_of(call, Saved(q, k, v, o, lse), do), given[:3]))


def _call(causal: bool, scale: float | None, *, invariant: bool, **features: Any) -> Call:
    """A call. Torch's flash attention aligns the diagonal at the bottom right."""
    return Call(
        causal=causal,
        scale=scale,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        features=features_of(
            causal=causal, invariant=invariant or settings.invariant(), **features
        ),
    )


def _windowed(
    is_causal: bool, left: int | None, right: int | None, max_k: int
) -> tuple[bool, Window | None]:
    """The mask and the window of a call. A window that ends at the diagonal is a causal mask."""
    sides = -1 if left is None else left, -1 if right is None else right
    return is_causal or right == 0, window_within(sides, max_k)


def _drawn(query: Tensor, rng: Tensor | None, debug: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The last three results of a forward: seed and offset as uint64 (2,), and two empty ones."""
    if debug:
        raise InvalidArgument("return_debug_mask must be False: flashgen never makes P")
    seed = query.new_empty(2, dtype=torch.uint64) if rng is None else rng
    unused = query.new_empty((), dtype=torch.uint64)
    return seed.view(torch.uint64), unused, query.new_empty(0)


def _rng(dropout_p: float, state: Tensor) -> Tensor | None:
    return state.view(torch.int64) if dropout_p else None


def _heads_first(x: Tensor) -> Tensor:
    """(batch, seq, heads, dim), or packed (places, heads, dim), as (batch, heads, seq, dim)."""
    return x.transpose(1, 2) if x.ndim == 4 else x.transpose(0, 1)[None]


def _as_given(x: Tensor, given: Tensor) -> Tensor:
    """What _heads_first undoes."""
    return x.transpose(1, 2) if given.ndim == 4 else x[0].transpose(0, 1)


def _laid_out_as(given: Tensor, found: Tensor) -> Tensor:
    """O or a gradient, (B, H, S, d), without the padding of d, in the strides of empty_like(given),
    which torch's tracing expects.
    """
    if found.stride() == given.stride() and found.shape == given.shape:
        return found
    like = torch.empty_like(given)
    return found if found.stride() == like.stride() else like.copy_(found[..., : given.shape[3]])
