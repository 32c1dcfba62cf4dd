"""Packed sequences, known by position_ids that begin anew, and sliding windows in transformers: no mask
of all tokens by all is made where a kernel serves, and logits and gradients are those of eager.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from transformers import masking_utils as theirs

from flashgen.errors import InvalidArgument
from flashgen.runtime import folders
from flashgen.runtime import transformers as backend
from flashgen.runtime.adapters.transformers_attention import BOUNDS
from flashgen.runtime.adapters.transformers_packing import (
    SequenceMask,
    in_graph,
    sequence_mask,
    traced_mask,
)
from tests.language_models import CONFIGS, LLAMA, make_model, transformers
from tests.makers import each
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
    """The whole masks that layers made."""
    made: list[Tensor] = []
    whole = SequenceMask.whole
    monkeypatch.setattr(SequenceMask, "whole", lambda x: made.append(whole(x)) or made[-1])
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


@pytest.mark.parametrize("name", PACKED)
def test_no_layer_is_handed_a_mask_of_all_tokens(name: str, masks: list[Tensor]) -> None:
    model = make_model(name, "flashgen").eval()
    with torch.no_grad():
        seen = of_layers(model, packed_batch(*ROWS))
    assert len(seen) == 2
    assert all(isinstance(mask, SequenceMask) for mask in seen)
    assert masks == []


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_a_window_is_one_of_the_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch without padding, whose mask says so or is not given; gradients of sinks too."""
    windows = []
    dispatcher = folders.current()
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


def of_packed(inner: Any, positions: Tensor, numbers: Tensor) -> Any:
    """The mask function that transformers makes of packed rows."""
    return theirs.and_masks(
        theirs.packed_sequence_mask_function(numbers),
        theirs.remap_positions_for_packed_sequence(inner, positions),
    )


def made_by(mask_function: Any, size: int, **options: Any) -> Tensor:
    """What the registered mask function makes."""

    class Config:
        _attn_implementation = "flashgen"

    make = transformers.AttentionMaskInterface()["flashgen"]
    given: dict[str, Any] = {
        "batch_size": 1, "q_length": size, "kv_length": size, "q_offset": 0, "kv_offset": 0,
        "attention_mask": None, "allow_is_causal_skip": False, "device": torch.device("cpu"),
    }  # fmt: skip
    made: Tensor = make(mask_function=mask_function, config=Config(), **given | options)
    return made


def test_64k_tokens_take_half_a_megabyte() -> None:
    """A mask of them would take 4 GiB."""
    positions = torch.arange(65536)[None] % 4096
    numbers = theirs.find_packed_sequence_indices(positions)
    made = made_by(
        theirs.and_masks(
            theirs.causal_mask_function, theirs.packed_sequence_mask_function(numbers)
        ),
        65536,
    )
    assert isinstance(made, SequenceMask)
    assert made.shape == (1, 1, 65536, 65536)
    assert made.numbers is not None
    assert made.numbers.nbytes == 8 * 65536
    assert made.packed.bounds.tolist() == list(range(0, 65537, 4096))
    assert (made.packed.longest, made.made) == (4096, None)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_the_mask_is_the_one_that_transformers_makes(window: int | None, packed: bool) -> None:
    """Whatever reads it, and also from then on."""
    positions = packed_batch(*ROWS)["position_ids"]
    numbers = theirs.find_packed_sequence_indices(positions)
    inner = theirs.causal_mask_function
    if window is not None:
        inner = theirs.sliding_window_causal_mask_function(window)
    elif not packed:
        return  # which the causal flag says
    functions = [inner]
    if packed:
        functions = [
            theirs.and_masks(inner, theirs.packed_sequence_mask_function(numbers)),
            of_packed(inner, positions, numbers),
        ]
    for function in functions:
        made = made_by(function, 18, batch_size=2)
        assert isinstance(made, SequenceMask)
        assert (made.window, made.numbers is None, made.dtype) == (window, not packed, torch.bool)
        wanted = theirs.sdpa_mask(
            batch_size=2, mask_function=function, allow_is_causal_skip=False, q_length=18,
            kv_length=18, q_offset=0, kv_offset=0,
        )  # fmt: skip
        wanted = wanted.expand(2, 1, 18, 18)
        assert torch.equal(made[:, :, 3:, :9], wanted[:, :, 3:, :9])
        assert torch.equal(made.logical_not(), ~wanted)
        assert torch.equal(torch.where(made, 0.0, -1.0), torch.where(wanted, 0.0, -1.0))


def test_what_is_neither_has_the_mask_of_transformers() -> None:
    numbers = torch.tensor([[0, 0, 1, 1]])
    packed = theirs.packed_sequence_mask_function(numbers)
    causal, window = theirs.causal_mask_function, theirs.sliding_window_overlay(2)
    sizes: dict[str, Any] = {"q_length": 4, "kv_length": 4, "q_offset": 0, "kv_offset": 0}

    def found(*parts: Any, **others: Any) -> bool:
        function = theirs.and_masks(*parts)
        return sequence_mask(mask_function=function, **sizes | others) is not None

    assert found(causal, packed)
    assert found(causal, packed, attention_mask=torch.ones(1, 4))
    assert found(causal, window)
    assert not found(packed)  # not causal
    assert not found(causal)
    assert not found(causal, packed, window, window)
    assert not found(causal, packed, lambda *_: True)
    assert not found(theirs.or_masks(causal, window), packed)
    assert not found(causal, packed, kv_length=8)
    assert not found(causal, packed, q_offset=4, kv_offset=4)
    assert not found(causal, window, q_offset=4, kv_length=8)
    assert not found(causal, window, q_length=2, kv_length=2)  # it hides nothing
    padded = torch.tensor([[True, True, True, False]])
    assert not found(causal, packed, attention_mask=padded)
    assert not found(causal, window, attention_mask=padded)


FUNCTIONS: dict[str, tuple[Any, int | None]] = {
    "causal": (theirs.causal_mask_function, None),
    "window": (theirs.sliding_window_causal_mask_function(3), 3),
    "chunks": (theirs.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int)), 4),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_graph_knows_the_mask_without_its_closure(name: str) -> None:
    positions = packed_batch(*ROWS)["position_ids"]
    numbers = theirs.find_packed_sequence_indices(positions)
    inner, size = FUNCTIONS[name]
    function = of_packed(inner, positions, numbers)
    given: dict[str, Any] = {
        "mask_function": function, "batch_size": 2, "q_length": 18, "kv_length": 18,
    }  # fmt: skip
    options = {"local_size": size, "use_vmap": False}
    found = traced_mask(**given, **options, allow_is_causal_skip=False)
    assert found is not None
    wanted = theirs.sdpa_mask(**given, q_offset=0, kv_offset=0, allow_is_causal_skip=False)
    assert torch.equal(found.whole(), wanted)
    for others in (
        {"use_vmap": True},  # masks of a caller's own
        {"mask_function": theirs.or_masks(function, inner)},  # token types
        {"allow_is_bidirectional_skip": False},
        {"attention_mask": torch.ones(2, 18, dtype=torch.bool)},
        {"kv_length": 20},
        {"q_offset": 2, "kv_offset": 2},
    ):
        assert traced_mask(**given | {"use_vmap": False} | others) is None


@pytest.mark.parametrize("name", ["window", "chunks"])
def test_a_graph_knows_the_mask_of_rows_that_are_one_sequence(name: str) -> None:
    """Of a window it knows the kernel's window; what is as long as a row hides nothing."""
    function, size = FUNCTIONS[name]

    class Config:
        attention_chunk_size = 4 if name == "chunks" else None

    given: dict[str, Any] = {
        "mask_function": function,
        "batch_size": 2,
        "q_length": 18,
        "kv_length": 18,
    }
    options: dict[str, Any] = {"use_vmap": False, "config": Config()}
    found = traced_mask(**given, **options, local_size=size)
    assert found is not None
    assert (found.numbers is None, found.window) == (name == "window", size)
    wanted = theirs.sdpa_mask(**given, q_offset=0, kv_offset=0, allow_is_causal_skip=False)
    assert torch.equal(found.whole(), wanted.expand(2, 1, 18, 18))
    assert traced_mask(**given, **options, local_size=18) is None


def mask(window: int | None = None) -> SequenceMask:
    """Two sequences of two tokens each."""
    return SequenceMask(1, 4, None, numbers=torch.tensor([[0, 0, 1, 1]]), window=window)


X = torch.randn(1, 2, 4, 16)


def attend(given: Tensor, q: Tensor = X, **others: Any) -> Tensor:
    x = X if q.shape[3] == X.shape[3] else q
    return backend.attention_forward(nn.Module(), q, x, x, given, **others)[0]


def bounds(*cu: int) -> dict[str, Any]:
    of_both = torch.tensor(cu, dtype=torch.int32)
    return dict(zip(BOUNDS, (of_both, of_both, 4, 4), strict=True))


def test_bounds_that_say_the_same_are_taken_and_others_refused(masks: list[Tensor]) -> None:
    attend(mask(), **bounds(0, 2, 4))
    attend(mask(), **bounds(0, 2, 2, 4))  # an empty one among them
    attend(mask(), **bounds(0, 1, 2, 4))  # the mask hides nothing within these
    row = SequenceMask(1, 4, None, numbers=None, window=2)
    attend(row, **bounds(0, 2, 4), sliding_window=2)
    assert masks == []
    for wrong in (bounds(0, 3, 4), bounds(0, 4), bounds(0, 4) | {"sliding_window": 2}):
        with pytest.raises(InvalidArgument, match="attention_mask must not be given with cu_seq"):
            attend(mask(), **wrong)


def test_a_mask_that_a_model_read_or_changed_is_taken_as_it_is(masks: list[Tensor]) -> None:
    """It may have been changed through a view: the layers that follow do not look at what it said."""
    changed = mask()
    changed[..., 0] = False
    hidden = attend(changed)
    wanted = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]).bool()
    torch.testing.assert_close(hidden, attend(wanted[None, None]))
    masks.clear()
    attend(mask())
    assert masks == []


def test_dropped_queries_have_the_rows_of_the_mask() -> None:
    whole = mask()
    q, k = torch.randn(1, 2, 2, 16), torch.randn(1, 2, 4, 16)
    with pytest.raises(InvalidArgument, match="attention_mask must be broadcastable"):
        backend.attention_forward(nn.Module(), q, k, k, whole)
    o, _ = backend.attention_forward(nn.Module(), q, k, k, whole[:, :, -2:])
    assert o.shape == (1, 2, 2, 16)


@pytest.mark.parametrize("packed", [True, False])
def test_compiled_layers_take_the_mask_of_a_model_that_is_not(packed: bool) -> None:
    """As regional compilation does; without a break."""
    name = "llama" if packed else "gemma2"
    given = packed_batch(*ROWS)
    if not packed:
        del given["position_ids"]
    with torch.no_grad():
        wanted = make_model(name, "eager").eval()(**given).logits
        model = make_model(name, "flashgen").eval()
        for each in model.model.layers:
            each.compile(backend="eager", fullgraph=True)
        torch.testing.assert_close(model(**given).logits, wanted, rtol=1e-4, atol=1e-5)


LENGTHS = ((7, 1, 10), (4, 14), (9, 2, 3, 4), (3,) * 6)


@pytest.mark.parametrize(
    ("name", "bounded"),
    each(
        [
            ("llama", False),
            ("llama", True),
            ("llama4", True),
            ("gemma2", False),
            ("llama4", False),
            ("gpt_oss", False),
        ],
        6,
        "three seconds a model",
    ),
)
def test_a_compiled_model_trains_as_with_eager(
    name: str, bounded: bool, masks: list[Tensor]
) -> None:
    """One graph, which other lengths do not compile again but for the first ones of bounds, and of
    which no tensor has an element for each pair of tokens.
    """
    torch._dynamo.reset()
    sizes: list[int] = []

    def noted(graph: Any, _: Any) -> Any:
        values = (node.meta.get("val") for node in graph.graph.nodes)
        sizes.extend(x.numel() for x in values if isinstance(x, Tensor))
        return graph

    model, eager = make_model(name, "flashgen"), make_model(name, "eager")
    backend_ = aot_autograd(fw_compiler=noted, bw_compiler=noted)
    compiled = torch.compile(model, fullgraph=True, backend=backend_)
    for number, lengths in enumerate(LENGTHS):
        given: dict[str, Any] = dict(packed_batch(lengths))
        more = bounds(*itertools.accumulate(lengths, initial=0)) if bounded else {}
        if bounded:
            more |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
        eager.zero_grad()
        model.zero_grad()
        with torch._dynamo.config.patch(error_on_recompile=number > bounded):
            found = compiled(**given, **more)
        found.loss.backward()
        wanted = eager(**given)
        wanted.loss.backward()
        torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-4, atol=1e-5)
        for x, y in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)
    assert masks == []
    assert 18 * 18 not in sizes


def test_a_mask_that_a_graph_reads_or_changes_is_taken_as_it_is(masks: list[Tensor]) -> None:
    """By layers behind it, as where torch does not compile."""
    numbers = torch.tensor([[0, 0, 1, 1]])

    def call(q: Tensor, numbers: Tensor, column: int | None) -> tuple[Tensor, Tensor]:
        given = in_graph(numbers, None)
        if column is not None:
            given[..., column] = False
        return backend.attention_forward(nn.Module(), q, q, q, given)[0], given.logical_not()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for column in (None, 0):
        for found, wanted in zip(
            compiled(X, numbers, column), call(X, numbers, column), strict=True
        ):
            torch.testing.assert_close(found, wanted)


def test_token_types_within_packed_rows_are_honoured() -> None:
    """Images of Gemma 3, whose tokens see each other in both directions."""
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    layers = ["sliding_attention", "full_attention"]
    text = LLAMA | {"head_dim": 24, "sliding_window": 5, "layer_types": layers}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    given = packed_batch(*ROWS)
    types = torch.zeros_like(given["input_ids"])
    for row, places in ((0, slice(2, 5)), (0, slice(9, 13)), (1, slice(1, 6))):
        types[row, places] = 1

    def run(attention: str, **more: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        kind = transformers.Gemma3ForConditionalGeneration
        model = kind._from_config(config, attn_implementation=attention).train()
        found = model(**given, **more)
        found.loss.backward()
        return found.logits, *(x.grad for x in model.parameters() if x.grad is not None)

    wanted, found = run("eager", token_type_ids=types), run("flashgen", token_type_ids=types)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert (run("eager")[0] - wanted[0]).abs().max() > 0.1


def test_gradients_of_sinks_need_no_mask(masks: list[Tensor]) -> None:
    sinks = torch.randn(2, requires_grad=True)
    o, wanted = attend(mask(), s_aux=sinks), attend(mask().logical_not().logical_not(), s_aux=sinks)
    assert len(masks) == 1  # of the second
    torch.testing.assert_close(o, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(o.square().sum(), sinks),
        torch.autograd.grad(wanted.square().sum(), sinks),
    )


def test_an_invariant_layer_takes_packed_sequences() -> None:
    o = attend(mask(), invariant=True)
    for part in (slice(0, 2), slice(2, 4)):
        alone = X[:, :, part]
        want = backend.attention_forward(nn.Module(), alone, alone, alone, None, invariant=True)[0]
        assert torch.equal(o[:, part], want)


def test_what_torch_serves_has_the_whole_mask(masks: list[Tensor]) -> None:
    x = torch.randn(1, 2, 4, 6)  # a head dim that no kernel has
    o = attend(mask(), x)
    assert len(masks) == 1
    want = nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=masks[0])
    torch.testing.assert_close(o.transpose(1, 2), want)
    attend(mask(), position_bias=torch.zeros(1, 2, 4, 4))
    assert len(masks) == 2
