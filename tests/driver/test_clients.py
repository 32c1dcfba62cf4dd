"""The drop-ins of other packages' functions in CUDA graphs: a capture of a call holds its launches and no wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.runtime import flash_attn, flash_attn_3, flash_attn_4, sdpa, xformers
from tests.driver.cases import tensors
from tests.driver.events import Capture, Launch, Recording
from tests.driver.test_graphs import captured
from tests.xformers_biases import StandIns


def heads_last() -> list[Tensor]:
    """q, k and v (2, 512, 8, 128)."""
    return [x.transpose(1, 2).contiguous() for x in tensors(2, 8, 512, 128)[:3]]


def of_sdpa() -> Any:
    return sdpa.scaled_dot_product_attention(*tensors(2, 8, 512, 128)[:3], is_causal=True)


def of_xformers(packed: bool) -> Callable[[], Any]:
    q, k, v = heads_last()
    if packed:
        q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
        starts = [0, 100, 1024]
        info = StandIns()._SeqLenInfo(
            seqstart=torch.tensor(starts, dtype=torch.int32, device="cuda"), seqstart_py=starts,
            max_seqlen=924,
        )  # fmt: skip
        bias = StandIns().BlockDiagonalCausalMask(q_seqinfo=info, k_seqinfo=info)
    else:
        bias = StandIns().LowerTriangularMask()
    return lambda: xformers.memory_efficient_attention(q, k, v, bias)


def of_diffusers() -> Callable[[], Any]:
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
    from flashgen.runtime.diffusers import register

    backend, (q, k, v) = register(), heads_last()
    mask = torch.ones(2, 512, dtype=torch.bool, device="cuda")
    return lambda: dispatch.dispatch_attention_fn(q, k, v, attn_mask=mask, backend=backend)


def function(module: Any) -> Callable[[], Any]:
    q, k, v = heads_last()
    return lambda: module.flash_attn_func(q, k, v, causal=True)


CALLS: dict[str, Callable[[], Callable[[], Any]]] = {
    "sdpa": lambda: of_sdpa,
    "diffusers": of_diffusers,
    "flash_attn": lambda: function(flash_attn),
    "flash_attn_3": lambda: function(flash_attn_3),
    "flash_attn_4": lambda: function(flash_attn_4),
    "xformers": lambda: of_xformers(False),
    "xformers packed": lambda: of_xformers(True),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_capture_is_whole(recording: Recording, name: str) -> None:
    call = CALLS[name]()
    for _ in range(2):
        call()
    captured(call)
    (capture,) = recording.of(Capture)
    assert not capture.broken
    launches = [each for each in recording.of(Launch) if each.captured]
    assert len(launches) == 1
