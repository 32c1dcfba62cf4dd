"""examples/on_policy: what a batch samples from is, bit for bit, what a trainer computes."""

from __future__ import annotations

import random
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashgen import decode
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


PAGE_SIZE = 16


def in_pages(x: Tensor, pads: list[int], order: list[int]) -> tuple[Tensor, Tensor]:
    """A cache (batch, heads, keys, dim) as a pool of pages, in this order, and the block table; without
    the pads.
    """
    most = -(-x.shape[2] // PAGE_SIZE)
    table = torch.tensor(order, dtype=torch.int32).view(len(pads), most)
    pool = x.new_full((len(order) * PAGE_SIZE, x.shape[1], x.shape[3]), 1e3)
    for rows, pad, pages in zip(x, pads, table.tolist(), strict=True):
        for key, row in enumerate(rows[:, pad:].transpose(0, 1)):
            pool[pages[key // PAGE_SIZE] * PAGE_SIZE + key % PAGE_SIZE] = row
    return pool.view(len(order), PAGE_SIZE, *pool.shape[1:]), table


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Serves the steps of a generation by decode() over pages; the batch of each is in the list."""
    attend, steps = transformers.attention_forward, list[int]()

    def over_pages(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any
    ) -> tuple[Tensor, None]:
        if query.shape[2] > 1:
            return attend(module, query, key, value, mask, **options)
        steps.append(len(query))
        pads = mask[:, 0, 0].int().argmax(1)
        count = len(query) * -(-key.shape[2] // PAGE_SIZE)
        order = random.Random(len(steps)).sample(range(count), count)
        (k, table), (v, _) = (in_pages(x, pads.tolist(), order) for x in (key, value))
        lengths = (key.shape[2] - pads).int()
        o = decode(query, k, v, lengths=lengths, block_table=table, scale=options["scaling"])
        return o.transpose(1, 2).contiguous(), None

    monkeypatch.setattr(transformers, "attention_forward", over_pages)
    yield steps
    monkeypatch.undo()
    transformers.register()


@pytest.mark.parametrize(
    "slug",
    [SLUG, pytest.param("", marks=pytest.mark.slow("CPU tensors, which torch serves, as here"))],
)
@pytest.mark.slow("make test has it without pages")
def test_no_logit_differs_where_sampling_reads_pages(
    monkeypatch: pytest.MonkeyPatch, example: dict[str, Any], paged: list[int], slug: str
) -> None:
    """The batch is padded to the left for its prompts, and its cache is in pages for each step."""
    monkeypatch.setenv("FLASHGEN_GPU", slug)
    monkeypatch.setenv("FLASHGEN_INVARIANT", "1")
    different, count = example["differing"]()
    assert (different, count) == (0, 3 * 8 * 97)
    assert paged == [3] * 2 * 7, "two layers, and all steps but the first"
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
