"""merge(): attention over parts of the keys is attention over all of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen import attention, merge
from flashgen.errors import InvalidArgument
from tests.serving import leaves

NONE = float("-inf")


def draw(seq_k: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seq_k)
    q = torch.randn(2, 4, 9, 32, dtype=dtype)
    return q, torch.randn(2, 2, seq_k, 32, dtype=dtype), torch.randn(2, 2, seq_k, 16, dtype=dtype)


def over_parts(q: Tensor, k: Tensor, v: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    pieces = zip(k.split(sizes, 2), v.split(sizes, 2), strict=True)
    return merge([attention(q, *piece, return_lse=True) for piece in pieces])


def part(*lse: float) -> tuple[Tensor, Tensor]:
    """One of head dim 16, with an LSE of each query."""
    torch.manual_seed(len(lse))
    return torch.randn(1, 1, len(lse), 16), torch.tensor(lse).reshape(1, 1, -1)


@pytest.mark.parametrize("sizes", [(70,), (1, 69), (0, 30, 0, 40), (10, 20, 5, 35)])
def test_values_and_gradients_are_those_of_all_keys(sizes: tuple[int, ...]) -> None:
    tensors = draw(70)
    do, dlse = torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9)
    x, y = leaves(*tensors), leaves(*tensors)
    found, want = over_parts(*x, sizes), attention(*y, return_lse=True)
    torch.testing.assert_close(found, want)
    for one, other in zip(
        torch.autograd.grad(found, x, (do, dlse)), torch.autograd.grad(want, y, (do, dlse)),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(one, other, atol=3e-5, rtol=1e-4)


def test_a_causal_suffix_behind_a_shared_prefix() -> None:
    q, k, v = draw(40)
    prefix = attention(q, k[:, :, :31], v[:, :, :31], return_lse=True)
    suffix = attention(q, k[:, :, 31:], v[:, :, 31:], causal=True, return_lse=True)
    torch.testing.assert_close(
        merge([prefix, suffix]), attention(q, k, v, causal=True, return_lse=True)
    )


def test_gradients_in_float64() -> None:
    torch.manual_seed(0)
    outputs = [torch.randn(1, 2, 3, 4, dtype=torch.float64) for _ in range(3)]
    sums = [torch.randn(1, 2, 3, dtype=torch.float64) * 5 for _ in range(3)]
    sums[1][0, 0] = NONE
    x = leaves(*outputs, *sums)

    def merged(*x: Tensor) -> tuple[Tensor, Tensor]:
        return merge(list(zip(x[:3], x[3:], strict=True)))

    assert all(y.dtype is torch.float64 for y in merged(*x))
    assert torch.autograd.gradcheck(merged, x)


def test_a_part_without_keys_contributes_nothing() -> None:
    """Whatever its O holds; and where no part has keys, O = 0, LSE = -inf, and no gradient is NaN."""
    (o, lse), (other, _) = part(1.0, NONE, 90.0, NONE), part(NONE, 2.0, -90.0, NONE)
    other[0, 0, 0] = float("nan")
    o[0, 0, 3] = float("inf")
    x = leaves(o, lse, other, torch.tensor([NONE, 2.0, -90.0, NONE]).reshape(1, 1, -1))
    merged = merge([x[:2], x[2:]])
    assert torch.equal(
        merged[0][0, 0], torch.stack([o[0, 0, 0], other[0, 0, 1], o[0, 0, 2], o.new_zeros(16)])
    )
    assert merged[1].flatten().tolist() == [1.0, 2.0, 90.0, NONE]
    weights = (torch.ones_like(merged[0]), torch.ones_like(merged[1]))
    for gradient in torch.autograd.grad(merged, x, weights):
        assert gradient.isfinite().all()
        assert gradient[0, 0, 3].eq(0).all()


def test_scores_beyond_the_range_of_exp() -> None:
    one, two = part(1e4, -1e4), part(1e4, -1e4)
    o, lse = merge([one, two])
    torch.testing.assert_close(o, (one[0] + two[0]) / 2)
    torch.testing.assert_close(lse, one[1] + torch.log(torch.tensor(2.0)))


def test_sums_are_float32_whatever_the_dtype() -> None:
    """A thousand parts of one: bfloat16 sums would stop growing at 256."""
    o, lse = part(0.0, 1.0)
    found, total = merge([(o.bfloat16(), lse)] * 1000)
    assert torch.equal(found, o.bfloat16())
    torch.testing.assert_close(total, lse + torch.log(torch.tensor(1000.0)))


@pytest.mark.parametrize(
    ("one", "other", "want"),
    [
        (torch.float16, torch.float16, torch.float16),
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float16, torch.float64, torch.float64),
    ],
)  # fmt: skip
def test_o_has_the_promoted_dtype(one: torch.dtype, other: torch.dtype, want: torch.dtype) -> None:
    o, lse = part(0.5, 1.0)
    found = merge([(o.to(one), lse), (o.to(other), lse)])
    assert (found[0].dtype, found[1].dtype) == (want, torch.float32)
    assert merge([(o.to(one), lse.double()), (o.to(one), lse)])[1].dtype is torch.float64


def test_shapes_without_elements() -> None:
    for shape in ((0, 2, 3, 16), (1, 2, 0, 16)):
        o, lse = merge([(torch.zeros(shape), torch.zeros(shape[:3]))] * 2)
        assert (o.shape, lse.shape) == (shape, shape[:3])


def test_it_compiles_without_a_graph_break() -> None:
    parts = [part(1.0, NONE), part(2.0, NONE)]
    compiled = torch.compile(merge, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(parts), merge(parts))


OUT, LSE = torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3)


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ([], "parts must be a sequence of one or more (o, lse): got 0 parts"),
        (7, "parts must be a sequence of one or more (o, lse): got int"),
        ([(OUT, LSE), OUT], "parts[1] must be a pair of tensors (o, lse)"),
        ([(OUT, LSE, LSE)], "parts[0] must be a pair of tensors (o, lse)"),
        ([(OUT, None)], "parts[0] must be a pair of tensors (o, lse)"),
        ([(OUT[0], LSE[0])], "o must have shape (batch, heads, seq, head_dim): got (2, 3, 16)"),
        ([(OUT, LSE), (OUT[:, :1], LSE)], "o of parts[1] must be floating, of shape (1, 2, 3, 16), on cpu"),
        ([(OUT, LSE), (OUT, LSE[..., None])], "lse of parts[1] must be floating, of shape (1, 2, 3), on cpu"),
        ([(OUT.int(), LSE)], "o of parts[0] must be floating"),
        ([(OUT, LSE.half())], "lse of parts[0] must be float32 or float64: got torch.float16"),
        ([(OUT, LSE), (OUT.to("meta"), LSE)], "on cpu: got torch.float32 (1, 2, 3, 16) on meta"),
    ],
)  # fmt: skip
def test_what_cannot_be_merged_is_a_sentence(parts: Any, sentence: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(sentence)):
        merge(parts)
