"""The definition of right, checked against torch and against itself."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from flashgen.reference import attention as reference
from flashgen.reference.attention import compared, float32_products, judge, rounded_attention
from flashgen.reference.cases import CheckCase, make_inputs
from flashgen.runtime.eager import attention as eager
from flashgen.runtime.eager.visibility import places
from flashgen.spec.problem import Problem
from tests.makers import make_spec
from tests.nasty_cases import nasty_cases


def draw(sq: int, sk: int, heads: int = 2, kv: int = 2, seed: int = 0) -> tuple[torch.Tensor, ...]:
    case = CheckCase(problem=Problem(batch=2, heads=heads, kv_heads=kv, seq_q=sq, seq_k=sk))
    return make_inputs(make_spec("float32", 32), case, seed, "cpu")


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_agrees_with_torch_sdpa(heads: tuple[int, int], causal: bool) -> None:
    q, k, v = (x.double() for x in draw(37, 37, *heads))
    o, _ = eager.attention(q, k, v, scale=0.2, diagonal=0 if causal else None)
    sdpa = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=0.2, enable_gqa=heads[0] != heads[1]
    )
    torch.testing.assert_close(o, sdpa, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("sq", "sk"), [(5, 9), (9, 5)])
def test_lse_and_diagonal_by_definition(sq: int, sk: int) -> None:
    q, k, v = (x.double() for x in draw(sq, sk))
    o, lse = eager.attention(q, k, v, scale=0.3, diagonal=sk - sq)
    for i in range(sq):
        seen = i + sk - sq + 1
        if seen <= 0:
            assert (o[:, :, i] == 0).all()
            assert (lse[:, :, i] == float("-inf")).all()
            continue
        s = 0.3 * torch.einsum("bhd,bhkd->bhk", q[:, :, i], k[:, :, :seen])
        torch.testing.assert_close(lse[:, :, i], s.logsumexp(-1))
        torch.testing.assert_close(
            o[:, :, i], torch.einsum("bhk,bhkd->bhd", s.softmax(-1), v[:, :, :seen])
        )


@pytest.mark.parametrize(("head_dim", "seed"), [(64, 69), (192, 195), (256, 228)])
def test_a_small_lse_of_large_products_may_be_off_by_their_rounding(
    head_dim: int, seed: int
) -> None:
    """In a row whose scores of 150 hide behind the mask, products of 600 cancel: the ideal kernel's LSE of about 1 was
    refused in 7 of 1,600 draws, by up to 3.8 times the limit.
    """
    problem = Problem(batch=1, heads=1, kv_heads=1, seq_q=128, seq_k=96)
    spec = make_spec("float16", head_dim, "causal")
    q, k, v = make_inputs(spec, CheckCase(problem=problem, scores="falling"), seed, "cpu")
    scale = 1 / math.sqrt(head_dim)
    with float32_products():
        o, lse = rounded_attention(q, k, v, scale=scale, diagonal=-32, precision="ieee")
    assert judge(o, lse, q, k, v, scale=scale, diagonal=-32).passed
    shifted = judge(o, lse + 2.0**-11, q, k, v, scale=scale, diagonal=-32)
    assert shifted.lse > 1


@pytest.mark.parametrize("window", [(2, 1), (0, 0), (-1, 2), (3, -1)])
def test_a_window_by_definition(window: tuple[int, int]) -> None:
    """Of 4 queries, the last of which stands at the last of 9 keys."""
    left, right = (10 if side < 0 else side for side in window)
    near = [[i + 5 - left <= j <= i + 5 + right for j in range(9)] for i in range(4)]
    assert places(4, 9, None, torch.device("cpu"), None).in_window(window).tolist() == near


def test_gradcheck_in_float64() -> None:
    q, k, v = (x.double().requires_grad_() for x in draw(4, 6))
    assert torch.autograd.gradcheck(
        lambda *x: eager.attention(*x, scale=0.5, diagonal=2), (q, k, v), atol=1e-6
    )


def test_no_keys_gives_zero_and_minus_infinity() -> None:
    q, k, v = draw(3, 0)
    o, lse = eager.attention(q, k, v, scale=1.0, diagonal=None)
    assert o.shape == q.shape
    assert (o == 0).all()
    assert (lse == float("-inf")).all()


def verdict_of(change: str) -> reference.Comparison:
    q, k, v = (x.bfloat16() for x in draw(40, 50))
    o, lse = reference.rounded_attention(q, k, v, scale=0.2, diagonal=None, precision="ieee")
    if change == "nan in O":
        o[0, 0, 3, 3] = float("nan")
    elif change == "nan in LSE":
        lse[0, 1, 2] = float("nan")
    elif change == "O off":
        o = o + 0.05
    elif change == "LSE off":
        lse = lse + 2.0**-12
    elif change == "LSE infinite":
        lse[0, 0, 0] = float("-inf")
    return judge(o, lse, q, k, v, scale=0.2, diagonal=None)


def test_the_floor_itself_passes() -> None:
    verdict = verdict_of("nothing")
    assert verdict.passed
    assert verdict.floors <= 1.0


@pytest.mark.parametrize("change", ["nan in O", "nan in LSE", "O off", "LSE off", "LSE infinite"])
def test_what_is_wrong_never_passes(change: str) -> None:
    assert not verdict_of(change).passed


@pytest.mark.parametrize(("dtype", "v"), [(torch.bfloat16, 1.9945), (torch.float16, 1.9997)])
def test_scales_of_keys_round_p_times_them(dtype: torch.dtype, v: float) -> None:
    """One key has each row: P alone is 1, and exact; 1 times a third of the largest scale is not."""
    q, k = torch.ones(1, 1, 1, 16, dtype=dtype), torch.zeros(1, 1, 2, 16)
    k[0, 0, 0] = 1e3
    value = torch.tensor(v)

    def ideal(*scales: float) -> Tensor:
        o, _ = reference.rounded_attention(
            q, k, value.expand(1, 1, 2, 1), scale=1.0, diagonal=None, precision="ieee",
            v_scales=torch.tensor(scales)[None, None, :, None],
        )  # fmt: skip
        return o.flatten()[0]

    third = torch.tensor(1 / 3)
    assert ideal(1.0, 3.0) == (value * (third.to(dtype).float() / third)).to(dtype)
    assert ideal(1.0, 3.0) != ideal(3.0, 3.0) == value.to(dtype)


def test_tf32_rounding() -> None:
    x = torch.tensor([1.0, 1.0 + 2**-10, 1.0 + 2**-11, 1.0 + 2**-12, -1.0 - 2**-11, 3.0])
    expected = torch.tensor([1.0, 1.0 + 2**-10, 1.0 + 2**-10, 1.0, -1.0 - 2**-10, 3.0])
    assert torch.equal(eager.round_to_tf32(x), expected)


def test_tf32_verdict_is_looser_only_by_its_own_floor() -> None:
    q, k, v = draw(64, 64)
    o, lse = reference.rounded_attention(q, k, v, scale=0.2, diagonal=None, precision="tf32")
    options = {"scale": 0.2, "diagonal": None}
    assert judge(o, lse, q, k, v, precision="tf32", **options).passed
    assert not judge(o, lse, q, k, v, precision="ieee", **options).passed


def test_inputs_are_replayable_and_layouts_are_what_they_say() -> None:
    spec = make_spec("bfloat16", 40, head_dim_v=24)
    for layout in ("bhsd", "bshd", "sliced"):
        case = CheckCase(
            problem=Problem(batch=2, heads=4, kv_heads=2, seq_q=5, seq_k=7), layout=layout
        )
        q, k, v = make_inputs(spec, case, 11, "cpu")
        again = make_inputs(spec, case, 11, "cpu")
        assert all(torch.equal(a, b) for a, b in zip((q, k, v), again, strict=True))
        assert q.shape == (2, 4, 5, 40)
        assert k.shape == (2, 2, 7, 40)
        assert v.shape == (2, 2, 7, 24)
        assert q.stride(-1) == 1
        assert q.is_contiguous() == (layout == "bhsd")


def test_nasty_cases_hold_what_they_promise() -> None:
    cases = nasty_cases(64, 32)
    pairs = {(c.problem.seq_q, c.problem.seq_k) for c in cases}
    assert {(1, 1), (63, 31), (64, 32), (65, 33)} <= pairs
    assert any(c.problem.seq_q > c.problem.seq_k and c.alignment == "bottom_right" for c in cases)
    assert {c.problem.group for c in cases} >= {1, 2, 3}
    assert {c.layout for c in cases} == {"bhsd", "bshd", "sliced"}
    assert all(dataclasses.is_dataclass(c) for c in cases)


def test_the_rms_counts_the_rows_that_carry_the_error() -> None:
    exact = torch.rand(1, 1, 100, 16, generator=torch.Generator().manual_seed(1)).double()
    rounded = exact + 1e-3 * torch.randn(exact.shape, generator=torch.Generator().manual_seed(2))
    alike = compared(rounded.float(), exact, rounded, 1.0)
    assert 0.8 * exact.numel() < alike.elements <= exact.numel()
    one_row = exact.clone()
    one_row[0, 0, 7] += 1.0
    assert compared(one_row.float(), exact, one_row, 1.0).elements == 16
    assert compared(exact.float(), exact, exact, 1.0).elements == exact.numel()
