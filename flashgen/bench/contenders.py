"""The contenders of a case: flashgen with its table, its default, and torch's own attention.

A contender is made, then called. If either raises, the contender is unavailable here, and the
others are not affected. bench/peers.py has those of other packages, bench/ladder.py flashgen's
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashgen.bench.case import PAGE_SIZES, BenchCase, BenchInputs, TimedPass
from flashgen.errors import FlashgenError
from flashgen.runtime import Dispatcher, folders
from flashgen.runtime.selection import BY_TIME
from flashgen.runtime.ways import WAYS
from flashgen.spec.vocabulary import Direction

AttentionFunction = Callable[..., Tensor]
"""Of q, k and v, O (B, H, Sq, d_v); of decode, whose operands are bound, of nothing."""

BACKWARD_KERNELS: tuple[Direction, ...] = (
    "backward_delta", *(direction for directions in WAYS.values() for direction in directions),
)  # fmt: skip


class LeftOut(FlashgenError):
    """A contender that is not available here by design; neither it nor the machine is at fault."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """A contender ready to be called. detail names the kernel, if known. around: in which its
    forward and its backward run.
    """

    attention: AttentionFunction
    detail: str
    around: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An implementation of attention. group: its word of --contender. own: flashgen's, which is
    timed only if it is correct; a peer is timed and shown with its error.
    """

    name: str
    group: str
    make: Callable[[BenchInputs], Made]
    own: bool = False


SCORES_BYTES: dict[TimedPass, float] = {"forward": 20e9, "backward": 6e9, "both": 6e9}
"""The largest S that SDPA's math backend may create: the others need memory too."""

SDPA = (
    ("SDPA flash", SDPBackend.FLASH_ATTENTION),
    ("SDPA cuDNN", SDPBackend.CUDNN_ATTENTION),
    ("SDPA efficient", SDPBackend.EFFICIENT_ATTENTION),
    ("SDPA math", SDPBackend.MATH),
)


def dispatchers() -> tuple[Dispatcher, Dispatcher]:
    """The dispatcher of the tables in use, and one without. Raises GeneratedError if there are
    none.
    """
    tuned = folders.current()
    assert isinstance(tuned, Dispatcher)
    untuned = Dispatcher(package=tuned.resolver.package, archs={}, choices={})
    # It has no tables by design: suppress the advice to tune.
    untuned.resolver.advises = False
    return tuned, untuned


def flashgen_and_torch(
    case: BenchCase, tuned: Dispatcher, untuned: Dispatcher, *, smoke: bool
) -> Iterator[Contender]:
    """Flashgen tuned and untuned, SDPA by backend, and FlexAttention."""
    yield from _ours("flashgen", "flashgen", tuned, case)
    yield from _ours("flashgen default", "default", untuned, case)
    if case.direction == "decode":
        yield Contender(name="SDPA", group="sdpa", make=_sdpa_of_one)
        return
    for name, backend in SDPA[-1:] if smoke else SDPA:
        yield Contender(name=name, group="sdpa", make=partial(_sdpa, backend, case))
    if case.direction == "forward" or not smoke:  # it has no backward on a CPU
        yield Contender(name="FlexAttention", group="flex", make=partial(_flex, case, not smoke))


def sdpa_deterministic(case: BenchCase) -> Iterator[Contender]:
    """SDPA with gradients of the same bits each time. Of its fast backends flash alone has them:
    torch refuses cuDNN's, whose own deterministic mode it does not reach (pytorch/pytorch#182551).
    """
    if case.direction in ("backward", "both"):

        def make(x: BenchInputs) -> Made:
            return replace(_sdpa(SDPBackend.FLASH_ATTENTION, case, x), around=_deterministic)

        yield Contender(name="SDPA flash, deterministic", group="sdpa", make=make)


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms imports Inductor
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def _ours(name: str, group: str, dispatcher: Dispatcher, case: BenchCase) -> Iterator[Contender]:
    contender = partial(Contender, group=group, own=True)
    if case.direction != "decode":
        yield contender(name=name, make=partial(_served, dispatcher, case))
        return
    yield contender(name=name, make=partial(_decoded, dispatcher, None))
    for size in PAGE_SIZES if group == "flashgen" else ():
        yield contender(name=f"{name}, pages of {size}", make=partial(_decoded, dispatcher, size))


def _served(dispatcher: Dispatcher, case: BenchCase, x: BenchInputs) -> Made:
    causal = case.spec.causal
    kernels = []
    for direction in served_directions(case.direction):
        why = dispatcher.explain(x.q, x.k, x.v, causal=causal, direction=direction)
        untimed = why.selection is None or why.selection.choice.median_us is None
        if direction not in BY_TIME or not untimed:
            kernels.append(_kernel(why))
    return Made(
        attention=lambda q, k, v: dispatcher.attention(q, k, v, causal=causal),
        detail="; ".join(kernels),
    )


def served_directions(direction: TimedPass) -> tuple[Any, ...]:
    """The directions of kernels that a pass may launch."""
    if direction == "forward":
        return ("forward",)
    return BACKWARD_KERNELS if direction == "backward" else ("forward", *BACKWARD_KERNELS)


def _decoded(dispatcher: Dispatcher, page_size: int | None, x: BenchInputs) -> Made:
    cache = x.cache if page_size is None else x.paged[page_size]
    assert cache is not None  # of decode
    k, v = (c.transpose(1, 2) if cache.paged else c for c in (cache.k, cache.v))
    beside: dict[str, Any] = {"lengths": cache.lengths, "block_table": cache.block_table}
    return Made(
        attention=lambda: dispatcher.decode(x.q, k, v, **beside),
        detail=_kernel(dispatcher.explain_decode(x.q, k, v, **beside)),
    )


def _kernel(why: Any) -> str:
    """The kernel that an Explanation names, and its source."""
    if why.selection is None:
        return "served by torch"
    choice = why.selection.choice
    return f"{why.twin or choice.kernel}, {choice.source}, {why.selection.rung}"


def _sdpa(backend: SDPBackend, case: BenchCase, _: BenchInputs) -> Made:
    p = case.problem
    scores = 4 * p.batch * p.heads * p.seq_q * p.seq_k  # bytes, in float32
    if backend is SDPBackend.MATH and scores > SCORES_BYTES[case.direction]:
        raise LeftOut(f"it makes the whole of S, {scores / 1e9:.0f} GB and several times over")

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                q, k, v, is_causal=case.spec.causal, enable_gqa=p.heads != p.kv_heads
            )

    return Made(attention=attention, detail=f"torch {torch.__version__}")


def _sdpa_of_one(x: BenchInputs) -> Made:
    return Made(
        attention=lambda: scaled_dot_product_attention(x.q, x.k, x.v, enable_gqa=True),
        detail=f"torch {torch.__version__}, by its own choice",
    )


def _flex(case: BenchCase, compiled: bool, x: BenchInputs) -> Made:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask, p = None, case.problem
    if case.spec.causal:
        mask = create_block_mask(_sees, None, None, p.seq_q, p.seq_k, device=x.q.device)
    function: Any = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
    grouped = p.heads != p.kv_heads
    return Made(
        attention=lambda q, k, v: function(q, k, v, block_mask=mask, enable_gqa=grouped),
        detail=f"torch {torch.__version__}, {'compiled' if compiled else 'eager'}",
    )


def _sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key
