"""Sizes and strides that 32 bits would not hold: refused by name, or copied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashgen import attention, decode
from flashgen.errors import InvalidArgument
from flashgen.inputs.features import Features
from flashgen.kernels.arguments import feature_arguments, near
from flashgen.kernels.launch_backward import Backward, run_dbias
from flashgen.runtime.varlen import attention_varlen
from flashgen.spec.vocabulary import LONGEST

FEW = torch.zeros(1, 1, 2, 16)
MANY = torch.zeros(1, 1, 1, 16).expand(1, 1, LONGEST + 1, 16)


def test_a_sequence_has_at_most_so_many() -> None:
    """The sums of two positions and a window are then below 2^31."""
    with pytest.raises(InvalidArgument, match=f"k must have at most {LONGEST} .*: got"):
        attention(FEW, MANY, MANY)
    with pytest.raises(InvalidArgument, match=f"q must have at most {LONGEST} .*: got"):
        attention(MANY, FEW, FEW)
    with pytest.raises(InvalidArgument, match=f"k must have at most {LONGEST} .*: got"):
        decode(FEW, MANY, MANY)
    left, right = Features(window=(2**40, 2**40)).bounds(LONGEST, LONGEST)
    assert LONGEST + left < 2**31 > LONGEST + right


def far(*shape: int, step: int) -> Any:
    strides = [1] * len(shape)
    strides[0 if len(shape) == 2 else -1] = step
    return torch.empty_strided(shape, strides, device="meta", dtype=torch.float32)


def test_what_lies_far_apart_is_copied() -> None:
    slopes = far(2, 3, step=2**31)
    assert near(slopes).is_contiguous()
    assert near(slopes[:1]) is not None
    close = far(2, 3, step=2**30)
    assert near(close) is close
    for step, wanted in ((2**23, 1), (2**23 - 1, 2**23 - 1)):
        found = feature_arguments(
            Features(bias=far(1, 1, 1, 3, step=step)), (1, 1, 2, 3), torch.device("meta")
        )
        assert found["stride_bias_k"] == wanted


def test_one_element_for_too_many_scores_has_no_gradient() -> None:
    plan: Any = SimpleNamespace(config=SimpleNamespace(br=64, bc=64))
    q = torch.empty(1, 1, 16, 16, device="meta").expand(32, 32, 16, 16)
    k = torch.empty(1, 1, 1, 16, device="meta").expand(32, 32, 2**28, 16)
    call = Backward(
        q=q, k=k, v=k, do=q, lse=q[..., 0], delta=q[..., 0], scale=1.0, diagonal=None,
        features=Features(bias=torch.empty(1, 1, 1, 1, device="meta")),
    )  # fmt: skip
    with pytest.raises(InvalidArgument, match=r"bias of shape .* expand it"):
        run_dbias(plan, call)


@pytest.mark.parametrize(
    "cu", [[0, 2, 1], [-1, 1, 2], [1, 1, 2], [0, 1, 3], [0, 2**31, 2], [2**62, 0, 1]]
)
@pytest.mark.parametrize("side", ["cu_seqlens_q", "cu_seqlens_k"])
def test_the_cpu_refuses_bounds_outside_of_the_tensors(cu: list[int], side: str) -> None:
    x, good = torch.zeros(2, 1, 16), torch.tensor([0, 1, 2])
    bounds = {"cu_seqlens_q": good, "cu_seqlens_k": good} | {side: torch.tensor(cu)}
    with pytest.raises(InvalidArgument, match=f"{side} must ascend from 0 to at most 2"):
        attention_varlen(x, x, x, max_seqlen_q=2, max_seqlen_k=2, **bounds)
