"""The drop-in for xformers, by interpreted kernels, with the biases of xformers itself: make -f tests/sessions.mk test-engines"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from flashgen.runtime import xformers as own
from tests import xformers_biases as biases
from tests.cpu.runtime.test_xformers import compare, draw
from tests.serving import record_directions, serve

theirs = pytest.importorskip("xformers.ops.fmha", reason="make -f tests/sessions.mk test-engines")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    directions = record_directions(monkeypatch)
    serve(monkeypatch)
    return directions


@pytest.mark.parametrize(
    "name", ["memory_efficient_attention", "memory_efficient_attention_forward"]
)
def test_arguments_are_theirs(name: str) -> None:
    def shown(module: Any) -> list[tuple[str, Any, Any]]:
        return [
            (x.name, x.default, x.kind)
            for x in inspect.signature(getattr(module, name)).parameters.values()
        ]

    assert shown(own) == shown(theirs)


def test_every_bias_is_served_or_named_in_the_documentation() -> None:
    """A class that is new in xformers must be one or the other."""
    module = theirs.attn_bias
    classes = {
        name
        for name, each in vars(module).items()
        if inspect.isclass(each) and issubclass(each, module.AttentionBias)
    } - {"AttentionBias"}
    lacking = {
        "PagedBlockDiagonalGappyKeysMask",
        "PagedBlockDiagonalCausalWithOffsetGappyKeysMask",
    }
    assert classes == {*own.DENSE, *own.PACKED, *lacking}


@pytest.mark.parametrize("name", biases.DENSE)
def test_a_batch(launched: list[str], name: str) -> None:
    shown, fields = biases.DENSE[name]
    bias, mask = getattr(theirs.attn_bias, name)(**fields), shown.block(4, 9)
    assert torch.equal(bias.materialize((4, 9)) == 0, mask)
    compare(bias, biases.hiding(mask), draw(4, 9), trains=True)
    assert launched[0] == "forward"


@pytest.mark.parametrize("name", biases.PACKED)
def test_packed_sequences(launched: list[str], name: str) -> None:
    bias, mask = biases.packed(name, theirs.attn_bias)
    assert torch.equal(bias.materialize(tuple(mask.shape)) == 0, mask)
    compare(bias, biases.hiding(mask), draw(*mask.shape), trains="Paged" not in name)
    assert launched[0] == "forward"


def test_a_bias_is_added(launched: list[str]) -> None:
    tensor = torch.randn(1, 4, 4, 9)
    bias = theirs.attn_bias.LowerTriangularMask().add_bias(tensor)
    hidden = biases.hiding(biases.Shown(diagonal="top").block(4, 9))
    compare(bias, tensor + hidden, draw(4, 9), trains=True)
    assert launched[0] == "forward"


def test_biases_of_a_list_of_tensors(launched: list[str]) -> None:
    """from_tensor_list(), which concatenates, and split(), which undoes it."""
    parts = [torch.randn(1, n, 4, 16) for n in (3, 7, 2)]
    bias, x = theirs.attn_bias.BlockDiagonalMask.from_tensor_list(parts)
    found = bias.make_causal().split(own.memory_efficient_attention(x, x, x, bias.make_causal()))
    for part, o in zip(parts, found, strict=True):
        rows = part.shape[1]
        hidden = biases.hiding(biases.Shown(diagonal="top").block(rows, rows))
        wanted = biases.exact(part, part, part, hidden)
        torch.testing.assert_close(o.double(), wanted, rtol=1e-5, atol=1e-5)
    assert launched == ["forward"]
