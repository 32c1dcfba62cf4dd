"""Block masks as values: what they mean, what they keep, what is refused; and CPU tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashgen.errors import InvalidArgument
from flashgen.estimate.trip_counts import grid
from flashgen.evaluate.inputs import make_features
from flashgen.runtime.block_mask import BlockMask, dense, document, from_boolean, prefix_lm
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.space import legal_configs
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import Problem, flops
from flashgen.spec.vocabulary import BLOCK
from generated.dispatcher import attention
from tests.makers import make_config, make_spec

LENGTHS = st.sampled_from([1, 5, 127, 128, 129, 256, 300])
SETTINGS = settings(max_examples=25)


def listed_alike(mask: BlockMask) -> None:
    """The lists by keys name the blocks that those by rows name, of the same kind and elements."""
    found: list[set[tuple[int, ...]]] = []
    for side, turned in ((mask.by_rows, False), (mask.by_keys, True)):
        entries = set()
        for b, h, own in torch.cartesian_prod(*(torch.arange(n) for n in side.counts.shape[:3])):
            whole, partial = side.counts[b, h, own].tolist()
            blocks = side.blocks[b, h, own].tolist()
            tiles = side.tiles[b, h, own].tolist()
            for n in range(whole + partial):
                pair = (blocks[n], int(own)) if turned else (int(own), blocks[n])
                entries.add((int(b), int(h), *pair, -1 if n < whole else tiles[n]))
        found.append(entries)
    assert found[0] == found[1]


@SETTINGS
@given(seq_q=LENGTHS, seq_k=LENGTHS, number=st.integers(0, 1000), causal=st.booleans())
def test_documents(seq_q: int, seq_k: int, number: int, causal: bool) -> None:
    """Ids in any order; those below 0 are of no document."""
    generator = torch.Generator().manual_seed(number)
    of_q, of_k = (torch.randint(-1, 3, (2, n), generator=generator) for n in (seq_q, seq_k))
    if number % 2:
        of_q, of_k = of_q.sort(1).values, of_k.sort(1).values
    mask = document(of_q, of_k, causal=causal)
    meant = (of_q[:, :, None] == of_k[:, None]) & (of_q >= 0)[:, :, None]
    if causal:
        meant &= torch.ones(seq_q, seq_k, dtype=torch.bool).tril(seq_k - seq_q)
    assert torch.equal(dense(mask)[:, 0], meant)
    listed_alike(mask)


@SETTINGS
@given(seq_q=LENGTHS, seq_k=LENGTHS, number=st.integers(0, 1000))
def test_prefixes(seq_q: int, seq_k: int, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    prefix = torch.randint(seq_k + 2, (3,), generator=generator)
    mask = prefix_lm(prefix, seq_q, seq_k)
    rows, keys = torch.arange(seq_q)[:, None], torch.arange(seq_k)[None]
    meant = (keys < prefix[:, None, None]) | (keys <= rows + seq_k - seq_q)
    assert torch.equal(dense(mask)[:, 0], meant)
    listed_alike(mask)


@SETTINGS
@given(seq_q=LENGTHS, seq_k=LENGTHS, number=st.integers(0, 1000), wide=st.integers(2, 4))
def test_any_boolean(seq_q: int, seq_k: int, number: int, wide: int) -> None:
    generator = torch.Generator().manual_seed(number)
    drawn = torch.rand((2, 3, seq_q, seq_k)[-wide:], generator=generator) > 0.5
    drawn[..., :BLOCK] = bool(number % 2)
    mask = from_boolean(drawn)
    assert torch.equal(dense(mask), drawn[(None,) * (4 - wide)])
    listed_alike(mask)


def test_a_diagonal_costs_one_tile() -> None:
    """8192 tokens in documents of 512: 4 MB as a boolean mask of one document, 16 KiB here."""
    mask = document(torch.arange(8192) // 512, causal=True)
    assert mask.tiles.shape == (1, BLOCK, BLOCK)
    assert mask.by_rows.counts[0, 0, :5].tolist() == [[0, 1], [1, 1], [2, 1], [3, 1], [0, 1]]
    assert mask.by_keys.counts[0, 0, :5].tolist() == [[3, 1], [2, 1], [1, 1], [0, 1], [3, 1]]
    whole = document(torch.zeros(256, dtype=torch.int64))
    assert whole.by_rows.counts.tolist() == [[[[2, 0], [2, 0]]]]


def test_a_ragged_end_is_never_whole() -> None:
    """What lies beyond the keys is masked by the elements, for whole blocks are not."""
    mask = from_boolean(torch.ones(10, 130, dtype=torch.bool))
    assert mask.by_rows.counts.tolist() == [[[[1, 1]]]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_boolean(torch.ones(3, 3)), "mask must be bool"),
        (lambda: from_boolean(torch.ones(3, dtype=torch.bool)), "mask must be bool"),
        (lambda: from_boolean([[True]]), "mask must be bool .* got list"),  # type: ignore[arg-type]
        (lambda: from_boolean(torch.ones(0, 8, dtype=torch.bool)), r"mask must be bool .* \(0, 8\)"),
        (lambda: prefix_lm(torch.zeros(2).int(), 0, 4), "seq_q must be a whole number above 0: got 0"),
        (lambda: prefix_lm(torch.zeros(2).int(), 4, "x"), "seq_k must be .* got 'x'"),  # type: ignore[arg-type]
        (lambda: prefix_lm(torch.zeros(2).int(), 4.0, 4), "seq_q must be .* got 4.0"),  # type: ignore[arg-type]
        (lambda: document(torch.zeros(3)), "document_ids must be whole numbers"),
        (lambda: document(torch.zeros(2, 3).int(), torch.zeros(3, 3).int()), "batch of document"),
        (lambda: prefix_lm(torch.zeros(2, 2).int(), 3, 3), "prefix_lengths must be whole numbers"),
    ],
)  # fmt: skip
def test_what_is_no_mask_is_named(make: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make()


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_cpu_tensors_and_their_gradients() -> None:
    q, k, v = (draw(2, 2, 20, 16).requires_grad_() for _ in range(3))
    ids = torch.arange(20) // 7
    o = attention(q, k, v, block_mask=document(ids, causal=True))
    meant = (ids[:, None] == ids) & torch.ones(20, 20, dtype=torch.bool).tril()
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=meant)
    torch.testing.assert_close(o, want)
    found, wanted = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (o, want))
    for grad, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"block_mask": torch.ones(20, 20)}, "block_mask must be made by"),
        ({"block_mask": document(torch.zeros(21).int())}, "block_mask must be for the lengths"),
        ({"block_mask": document(torch.zeros(3, 20).int())}, "block_mask must have 1 or 2 batches"),
        ({"causal": True}, "block_mask needs mask none"),
        ({"window": (3, 3)}, "block_mask excludes window"),
        ({"bias": torch.zeros(20, 20)}, "block_mask excludes bias"),
    ],
)
def test_what_does_not_fit_is_named(given: dict[str, Any], message: str) -> None:
    q = draw(2, 2, 20, 16)
    options = {"block_mask": document(torch.zeros(20, dtype=torch.int32))} | given
    with pytest.raises(InvalidArgument, match=message):
        attention(q, q, q, **options)


def test_where_torch_traces_it_is_refused() -> None:
    q, mask = draw(1, 1, 20, 16), document(torch.zeros(20, dtype=torch.int32))
    torch._dynamo.reset()
    call = torch.compile(lambda x: attention(x, x, x, block_mask=mask), backend="eager")
    with pytest.raises(Exception, match="block_mask must be None where torch traces"):
        call(q)


def test_what_is_legal() -> None:
    gpu = TARGETS["nvidia_h200"]
    spec = make_spec("bfloat16", 64, block_mask=True)
    assert spec.name == "fwd_bf16_d64_blockmask"
    configs = legal_configs(spec, gpu)
    assert {c.loads for c in configs} == {"pointer", "descriptor"}
    assert {c.schedule for c in configs} == {"fa2"}
    assert max(max(c.br, c.bc) for c in configs) == BLOCK
    assert "blocks of 128" in str(why_illegal(spec, make_config(256, 64), gpu))


@pytest.mark.parametrize("direction", ["forward", "backward_dq", "backward_dkv"])
@pytest.mark.parametrize("seq", [512, 2048, 2500])
def test_trips_are_those_of_the_mask_that_is_tuned(direction: Any, seq: int) -> None:
    spec = make_spec("bfloat16", 64, block_mask=True).for_direction(direction)
    problem = Problem(batch=1, heads=2, kv_heads=1, seq_q=seq, seq_k=seq)
    mask = make_features(spec, problem, 0, "cpu").block_mask
    assert mask is not None
    by_keys, config = direction == "backward_dkv", make_config(64, 32)
    side = mask.by_keys if by_keys else mask.by_rows
    own, walked = (32, 64) if by_keys else (64, 32)
    times = BLOCK // walked * (2 if by_keys else 1)
    # A ragged block is listed as partial; in the estimate it is as whole as the others.
    expected = [sum(side.counts[0, 0, n // BLOCK].tolist()) * times for n in range(0, seq, own)]
    trips = grid(spec, config, problem, TARGETS["nvidia_h200"], loops=2)
    assert [sum(both) for both in trips[: len(expected)]] == expected
    assert grid(spec, config, problem, TARGETS["nvidia_h200"], loops=1)[0] == (expected[0],)


def test_flops_count_what_lies_inside_documents() -> None:
    spec = make_spec("bfloat16", 64, block_mask=True)
    problem = Problem(batch=2, heads=4, kv_heads=4, seq_q=4096, seq_k=4096)
    assert flops(spec, problem) == 4 * 2 * 4 * 4096 * 1024 * 64 / 2
