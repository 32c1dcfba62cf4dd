"""examples/on_policy: what a batch samples from is, bit for bit, what a trainer computes."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgen.errors import InvalidArgument
from flashgen.runtime import transformers
from tests.serving import SLUG

PATH = Path(__file__).parents[3] / "examples" / "on_policy" / "on_policy.py"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    pytest.importorskip("transformers")
    return runpy.run_path(str(PATH))


@pytest.mark.parametrize(
    "slug",
    [SLUG, pytest.param("", marks=pytest.mark.slow("CPU tensors, which torch serves, as here"))],
)
def test_no_logit_differs(
    monkeypatch: pytest.MonkeyPatch, example: dict[str, Any], slug: str
) -> None:
    monkeypatch.setenv("FLASHGEN_GPU", slug)
    monkeypatch.setenv("FLASHGEN_INVARIANT", "1")
    different, count = example["differing"]()
    assert (different, count) == (0, 3 * 8 * 97)
    monkeypatch.setenv("FLASHGEN_INVARIANT", "0")
    assert example["differing"]()[0] > 0


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(1, 1, 4, 4, dtype=torch.bool),  # not causal
        torch.ones(1, 1, 4, 4, dtype=torch.bool).tril().triu(-1),  # a window
        torch.zeros(1, 1, 4, 4),  # added to scores
        torch.tensor([1, 0, 1, 1]).bool() & torch.ones(1, 1, 4, 4, dtype=torch.bool).tril(),
    ],
)
def test_another_mask_is_refused(mask: torch.Tensor) -> None:
    q = torch.zeros(1, 2, 4, 16)
    with pytest.raises(InvalidArgument, match="attention_mask must be causal, with padding to the"):
        transformers.attention_forward(torch.nn.Module(), q, q, q, mask, invariant=True)
