"""Rows of packed sequences in transformers, known by position_ids that begin anew: no mask of all
tokens by all is made where a kernel serves, and logits and gradients are those of eager.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashgen.errors import InvalidArgument
from flashgen.runtime import transformers as backend
from flashgen.runtime import transformers_packing as packing
from tests.language_models import CONFIGS, make_model, transformers
from tests.serving import serve

pytestmark = pytest.mark.filterwarnings("ignore")

PACKED = [name for name in CONFIGS if name != "gpt_oss"]
"""Models that read from their positions where sequences are; that one does not, with eager either."""

ROWS = ((7, 1, 10), (4, 14))
"""Lengths of the sequences in each row of the batch."""


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch)
    backend.register()


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The whole masks that layers made of the numbers of sequences."""
    made: list[Tensor] = []
    mask_of = packing.mask_of
    monkeypatch.setattr(packing, "mask_of", lambda x: made.append(mask_of(x)) or made[-1])
    return made


def packed_batch(*rows: tuple[int, ...]) -> dict[str, Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(0, 60, (len(rows), sum(rows[0])))
    positions = [torch.cat([torch.arange(length) for length in row]) for row in rows]
    return {"input_ids": tokens, "position_ids": torch.stack(positions), "labels": tokens}


def of_layers(model: nn.Module, given: dict[str, Tensor]) -> list[Tensor | None]:
    """The masks that the layers are handed."""
    seen = []
    attention_forward = backend.attention_forward

    def noted(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *x: Any, **named: Any
    ) -> Any:
        seen.append(mask)
        return attention_forward(module, q, k, v, mask, *x, **named)

    interface = transformers.AttentionInterface
    for name in backend.NAMES:
        interface.register(name, noted)
    try:
        model(**given)
    finally:
        for name in backend.NAMES:
            interface.register(name, attention_forward)
    return seen


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["a row", "two rows"])
@pytest.mark.parametrize("name", PACKED)
def test_a_model_trains_as_with_eager(
    name: str, rows: tuple[tuple[int, ...], ...], masks: list[Tensor]
) -> None:
    given = packed_batch(*rows)

    def run(attention: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        model = make_model(name, attention)
        found = model(**given)
        found.loss.backward()
        return found.logits, found.loss, {n: x.grad for n, x in model.named_parameters()}

    (logits, loss, grads), wanted = run("flashgen"), run("eager")
    torch.testing.assert_close(logits, wanted[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss, wanted[1], rtol=1e-5, atol=1e-6)
    for parameter, grad in grads.items():
        torch.testing.assert_close(
            grad, wanted[2][parameter], rtol=1e-4, atol=1e-5,
            msg=lambda m, p=parameter: f"{p}: {m}",
        )  # fmt: skip
    assert masks == []


@pytest.mark.parametrize("name", [name for name in PACKED if name != "llama4"])
def test_no_layer_is_handed_a_mask_of_all_tokens(name: str, masks: list[Tensor]) -> None:
    model = make_model(name, "flashgen").eval()
    with torch.no_grad():
        seen = of_layers(model, packed_batch(*ROWS))
    assert len(seen) == 2
    for mask in seen:
        assert mask is not None
        assert mask.shape == (2, 1, 1, 2 + 18)
    assert masks == []


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_a_window_is_one_of_the_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch without padding, whose mask says so or is not given; gradients of sinks too."""
    windows = []
    dispatcher = backend.folders.current()
    attention = dispatcher.attention

    def noted(*tensors: Tensor, **options: Any) -> Any:
        windows.append((options.get("window"), options.get("bias") is None))
        return attention(*tensors, **options)

    monkeypatch.setattr(dispatcher, "attention", noted)
    tokens = torch.randint(0, 60, (2, 18))
    model = make_model(name, "flashgen")
    for given in ({}, {"attention_mask": torch.ones_like(tokens)}):
        windows.clear()
        model(input_ids=tokens, labels=tokens, **given).loss.backward()
        assert sorted(windows, key=str) == [((4, 0), True), (None, True)]
    padded = torch.ones_like(tokens)
    padded[1, :7] = 0
    windows.clear()
    model(input_ids=tokens, attention_mask=padded)
    assert [window for window, _ in windows] == [None, None]


def test_64k_tokens_take_half_a_megabyte() -> None:
    from transformers import masking_utils

    class Config:
        _attn_implementation = "flashgen"

    positions = torch.arange(65536)[None] % 4096
    numbers = masking_utils.find_packed_sequence_indices(positions)
    mask_function = masking_utils.and_masks(
        masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(numbers)
    )
    make = transformers.AttentionMaskInterface()["flashgen"]
    made = make(
        batch_size=1, q_length=65536, kv_length=65536, q_offset=0, kv_offset=0,
        mask_function=mask_function, attention_mask=None, allow_is_causal_skip=False,
        config=Config(), device=positions.device,
    )  # fmt: skip
    assert made.nbytes == 8 * (65536 + 2)
    found = packing.rows_of(made)
    assert found is not None
    assert (found.bounds.tolist(), found.longest) == (list(range(0, 65537, 4096)), 4096)


@pytest.mark.parametrize("window", [None, 3])
def test_the_mask_is_the_one_that_transformers_makes(window: int | None) -> None:
    from transformers import masking_utils as theirs

    positions = packed_batch(*ROWS)["position_ids"]
    numbers = theirs.find_packed_sequence_indices(positions)
    inner = theirs.causal_mask_function
    if window is not None:
        inner = theirs.sliding_window_causal_mask_function(window)
    sizes: dict[str, Any] = {"q_length": 18, "kv_length": 18, "q_offset": 0, "kv_offset": 0}
    for function in (
        theirs.and_masks(inner, theirs.packed_sequence_mask_function(numbers)),
        theirs.packed_sequence_compatibility_function(inner, positions, numbers),
    ):
        made = packing.numbers_of(mask_function=function, **sizes)
        assert made is not None
        sequences = packing.rows_of(made)
        assert sequences is not None
        assert sequences.window == window
        wanted = theirs.sdpa_mask(
            batch_size=2, mask_function=function, allow_is_causal_skip=False, **sizes
        )
        assert torch.equal(packing.mask_of(sequences), wanted)


def test_what_is_not_packed_alone_has_the_mask_of_transformers() -> None:
    from transformers import masking_utils as theirs

    numbers = torch.tensor([[0, 0, 1, 1]])
    packed = theirs.packed_sequence_mask_function(numbers)
    causal, window = theirs.causal_mask_function, theirs.sliding_window_overlay(2)
    sizes: dict[str, Any] = {"q_length": 4, "kv_length": 4, "q_offset": 0, "kv_offset": 0}

    def numbers_of(*parts: Any, **others: Any) -> Tensor | None:
        return packing.numbers_of(mask_function=theirs.and_masks(*parts), **sizes | others)

    assert numbers_of(causal, packed) is not None
    assert numbers_of(packed) is None  # not causal
    assert numbers_of(causal) is None
    assert numbers_of(causal, packed, window, window) is None
    assert numbers_of(causal, packed, lambda *_: True) is None
    assert numbers_of(theirs.or_masks(causal, window), packed) is None
    padded = torch.tensor([[True, True, True, False]])
    assert numbers_of(causal, packed, attention_mask=padded) is None
    assert numbers_of(causal, packed, attention_mask=torch.ones(1, 4)) is not None
    assert numbers_of(causal, window, attention_mask=padded) is None
    assert numbers_of(causal, window, q_offset=4, kv_length=8) is None
    assert numbers_of(causal, window, q_length=2, kv_length=2) is None  # it hides nothing
    assert numbers_of(causal, window) is not None
    assert numbers_of(causal, packed, kv_length=8) is None
    assert numbers_of(causal, packed, q_offset=4, kv_offset=4) is None


def attend(mask: Tensor, **others: Any) -> Tensor:
    x = torch.randn(1, 2, 4, 16)
    return backend.attention_forward(nn.Module(), x, x, x, mask, **others)[0]


NUMBERS = torch.tensor([0, 4, 0, 0, 1, 1])[None, None, None]


def test_bounds_that_say_the_same_are_taken_and_others_refused() -> None:
    def bounds(*cu: int) -> dict[str, Any]:
        of_both = torch.tensor(cu, dtype=torch.int32)
        return dict(zip(backend.BOUNDS, (of_both, of_both, 4, 4), strict=True))

    attend(NUMBERS.clone(), **bounds(0, 2, 4))
    attend(NUMBERS.clone(), **bounds(0, 2, 2, 4))  # an empty one among them
    for wrong in (bounds(0, 3, 4), bounds(0, 4), bounds(0, 2, 4) | {"sliding_window": 2}):
        with pytest.raises(InvalidArgument, match="attention_mask must not be given with cu_seq"):
            attend(NUMBERS.clone(), **wrong)


def test_a_model_that_cuts_the_mask_off_is_refused_and_one_that_drops_queries_served() -> None:
    with pytest.raises(InvalidArgument, match="attention_mask must not be given changed"):
        attend(NUMBERS[..., :4].clone())
    q, k = torch.randn(1, 2, 2, 16), torch.randn(1, 2, 4, 16)
    with pytest.raises(InvalidArgument, match="attention_mask must be broadcastable"):
        backend.attention_forward(nn.Module(), q, k, k, NUMBERS.clone())


def test_gradients_of_sinks_need_the_whole_mask(masks: list[Tensor]) -> None:
    """attention_varlen has none."""
    x, sinks = torch.randn(1, 2, 4, 16), torch.randn(2, requires_grad=True)
    given = nn.Module(), x, x, x, NUMBERS.clone()
    o = backend.attention_forward(*given, s_aux=sinks)[0]
    assert len(masks) == 1
    o.sum().backward()
    assert sinks.grad is not None
    with torch.no_grad():
        torch.testing.assert_close(backend.attention_forward(*given, s_aux=sinks)[0], o)
    assert len(masks) == 1


def test_an_invariant_layer_takes_packed_sequences() -> None:
    x = torch.randn(1, 2, 4, 16)
    o = backend.attention_forward(nn.Module(), x, x, x, NUMBERS.clone(), invariant=True)[0]
    for part in (slice(0, 2), slice(2, 4)):
        alone = x[:, :, part]
        want = backend.attention_forward(nn.Module(), alone, alone, alone, None, invariant=True)[0]
        assert torch.equal(o[:, part], want)


def test_what_torch_serves_has_the_whole_mask(masks: list[Tensor]) -> None:
    x = torch.randn(1, 2, 4, 6)  # a head dim that no kernel has
    o = backend.attention_forward(nn.Module(), x, x, x, NUMBERS.clone())[0]
    assert len(masks) == 1
    want = nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=masks[0])
    torch.testing.assert_close(o.transpose(1, 2), want)
    with torch.no_grad():
        backend.attention_forward(
            nn.Module(), x, x, x, NUMBERS.clone(), position_bias=torch.zeros(1, 2, 4, 4)
        )
    assert len(masks) == 2
