"""What a kernel is handed beside its tensors, and what of them it can be handed.

The order is that of signature.py: what changes scores, what orders of tiles and schedules ask for,
and where sequences or blocks of a mask lie.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Protocol

import torch
from torch import Tensor

from flashgen.features import Features
from flashgen.sequences import Sequences

logger = logging.getLogger("flashgen.launch")

LOG2_E = 1.4426950408889634


class Takes(Protocol):
    """What of a kernel decides which arguments features become: launch.py's Plan has it."""

    causal: bool
    takes_sink: bool
    by_keys: bool


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The kernels take a scale above 0: a negative one is carried by q, and 0 makes q 0, both
    exactly.
    """
    if scale > 0:
        return q, scale
    if q.element_size() == 1:  # torch has no minus of float8, but their bytes have a sign
        turned = (q.view(torch.uint8) ^ 128).view(q.dtype)
        return (turned, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
    return (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)


def in_eights(x: Tensor) -> Tensor:
    """x, copied if its strides are no multiples of 8 elements: kernels of such head dims rely on
    it.
    """
    if lies_in_eights(x):
        return x
    _say_copied()
    return x.contiguous()


def lies_in_eights(x: Tensor) -> bool:
    """Whether all its strides but the last are multiples of 8 elements."""
    return all(
        length <= 1 or stride % 8 == 0
        for length, stride in zip(x.shape[:3], x.stride()[:3], strict=True)
    )


@functools.cache
def _say_copied() -> None:
    """Once a process, whatever the lengths."""
    logger.warning("tensors are copied whose strides are no multiples of 8 elements")


def feature_arguments(
    plan: Takes, features: Features, batch: int, heads: int, seq_q: int, seq_k: int
) -> list[Any]:
    """What a kernel takes of the features that change scores, in the order of its arguments."""
    arguments: list[Any] = []
    if features.bias is not None:
        bias = features.bias.resolve_neg().expand(batch, heads, seq_q, seq_k)
        if bias.dtype is torch.bool:
            bias = bias.view(torch.uint8)
        arguments += [bias, *bias.stride()]
    if features.slopes is not None:
        slopes = features.slopes.resolve_neg().expand(batch, heads)
        arguments += [slopes, *slopes.stride()]
    if features.rng is not None:
        arguments += [features.rng, features.dropout_threshold, features.keep_scale]
    if features.window is not None:
        left, right = features.bounds(seq_q, seq_k)
        arguments += [left] if plan.causal else [left, right]
    if features.softcap > 0.0:
        cap_log2e = features.softcap * LOG2_E
        arguments += [cap_log2e, 1.0 / cap_log2e]
    if plan.takes_sink and features.sinks is not None:
        arguments.append(features.sinks.resolve_neg().contiguous())
    if features.fp8 is not None:
        factors = [x.resolve_neg() for x in features.fp8.factors]
        arguments += [*factors, *(stride for x in factors for stride in x.stride())]
    return arguments


def place_arguments(plan: Takes, features: Features) -> list[Any]:
    """What a kernel takes last: where packed sequences lie, or the lists of a block mask."""
    arguments: list[Any] = []
    if (packed := features.sequences) is not None:
        arguments += [*(x.resolve_neg() for x in packed.bounds), packed.count]
        if packed.block_table is not None:
            table = packed.block_table.resolve_neg()
            arguments += [table, table.stride(0), packed.page_bits]
    if (mask := features.block_mask) is not None:
        *_, rows, keys = mask.shape
        own, other = (keys, rows) if plan.by_keys else (rows, keys)
        arguments += [*mask.listed(by_keys=plan.by_keys), *mask.steps, own, other]
    return arguments


def diagonal_argument(
    diagonal: int | None, seq_q: int, seq_k: int, packed: Sequences | None
) -> int:
    """What a kernel that takes a diagonal is told: where it is, or of packed sequences, each of
    which has its own, at which end it is.
    """
    if packed is not None:
        return int(diagonal is None or packed.bottom_right)
    return seq_k - seq_q if diagonal is None else diagonal
