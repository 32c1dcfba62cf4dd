"""CPU tensors: torch serves, exactly, with flashgen's contract; bad arguments are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashgen import reference
from flashgen.errors import InvalidArgument
from flashgen.runtime import Dispatcher
from tests.makers import make_spec
from tests.package import make_default, make_dispatcher


@pytest.fixture(scope="module")
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Dispatcher:
    folder: Path = tmp_path_factory.mktemp("package")
    return make_dispatcher(folder, "nvidia_h200", "sm_90", [], [make_default(make_spec())])


def draw(sq: int, sk: int, heads: int = 4, kv: int = 2) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(sq * 100 + sk)
    return torch.randn(2, heads, sq, 32), torch.randn(2, kv, sk, 32), torch.randn(2, kv, sk, 48)


@pytest.mark.parametrize("causal", [False, True, "top_left", "bottom_right"])
@pytest.mark.parametrize(("sq", "sk"), [(8, 8), (5, 9), (9, 5), (3, 0), (0, 3)])
@pytest.mark.parametrize("return_lse", [False, True])
def test_cpu_attention(
    dispatcher: Dispatcher, causal: object, sq: int, sk: int, return_lse: bool
) -> None:
    q, k, v = draw(sq, sk)
    result = dispatcher.attention(q, k, v, causal=causal, scale=0.3, return_lse=return_lse)  # type: ignore[call-overload]
    diagonal = None if causal is False else 0 if causal == "top_left" else sk - sq
    o, lse = reference.attention(q.double(), k.double(), v.double(), scale=0.3, diagonal=diagonal)
    torch.testing.assert_close(result[0] if return_lse else result, o.float(), rtol=1e-5, atol=1e-5)
    if return_lse:
        torch.testing.assert_close(result[1], lse.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"scale": float("nan")}, "scale"),
        ({"causal": "diagonal"}, "causal"),
        ({"precision": "bf16x3"}, "precision"),
    ],
)
def test_a_bad_option_is_named(
    dispatcher: Dispatcher, options: dict[str, object], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        dispatcher.attention(*draw(4, 4), **options)  # type: ignore[call-overload]


def test_gradients_are_refused_not_dropped(dispatcher: Dispatcher) -> None:
    q, k, v = draw(4, 4)
    with pytest.raises(InvalidArgument, match="gradients"):
        dispatcher.attention(q.requires_grad_(), k, v)
    with torch.no_grad():
        dispatcher.attention(q, k, v)


def test_explain_says_that_torch_serves(dispatcher: Dispatcher) -> None:
    assert "torch" in str(dispatcher.explain(*draw(4, 4)))


def test_digest_tells_tables_apart(dispatcher: Dispatcher, tmp_path: Path) -> None:
    other = make_dispatcher(
        tmp_path, "nvidia_h200", "sm_90", [], [make_default(make_spec(head_dim=128))]
    )
    assert dispatcher.digest() != other.digest()
    assert dispatcher.digest() == dispatcher.digest()


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_scale_not_above_zero_under_a_mask(dispatcher: Dispatcher, scale: float) -> None:
    q, k, v = draw(6, 6)
    o, _ = reference.attention(q.double(), k.double(), v.double(), scale=scale, diagonal=0)
    torch.testing.assert_close(dispatcher.attention(q, k, v, causal=True, scale=scale), o.float())
