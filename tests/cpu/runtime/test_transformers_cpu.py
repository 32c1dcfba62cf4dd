"""The backend of transformers on CPU tensors, where torch and the reference serve: the kernels are in
tests/interpreted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeAttention

from flashgen.errors import InvalidArgument, ToolchainError
from flashgen.runtime import transformers as backend
from flashgen.runtime.adapters.transformers_attention import IGNORED
from tests.language_models import CONFIGS, batch, make_model, trained, transformers
from tests.makers import each
from tests.serving import serve

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch)
    backend.register()


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_a_model_trains_as_with_eager(name: str, padding: str) -> None:
    logits, loss, grads = trained(make_model(name, backend.NAMES[1]), batch(padding))
    wanted_logits, wanted_loss, wanted = trained(make_model(name, "eager"), batch(padding))
    torch.testing.assert_close(logits, wanted_logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-5, atol=1e-6)
    assert grads.keys() == wanted.keys()
    assert name != "gpt_oss" or any("sinks" in parameter for parameter in grads)
    for parameter, grad in grads.items():
        torch.testing.assert_close(
            grad, wanted[parameter], rtol=1e-4, atol=1e-5, msg=lambda m, p=parameter: f"{p}: {m}"
        )


X = torch.zeros(1, 2, 4, 16)


def attend(mask: Tensor | None = None, **arguments: Any) -> Tensor:
    return backend.attention_forward(torch.nn.Module(), X, X, X, mask, **arguments)[0]


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("head_mask", "eager"),
        ("indices", "eager"),
        ("block_indices", "eager"),
        ("cache", "sdpa"),
        ("new", "eager"),
    ],
)
def test_an_argument_that_is_not_understood_is_refused_by_name(name: str, instead: str) -> None:
    with pytest.raises(
        InvalidArgument, match=f'^{name} must not be given.*use attn_.*="{instead}"'
    ):
        attend(**{name: torch.ones(2)})
    attend(**{name: None})


def test_arguments_that_change_no_score_are_ignored() -> None:
    wanted = attend()
    for name in IGNORED:
        assert torch.equal(attend(**{name: 1}), wanted)


@pytest.mark.parametrize("shape", [(1, 4), (4, 4), (1, 4, 4)])
def test_masks_of_other_than_four_dimensions_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match="attention_mask must have 4 dimensions"):
        attend(torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_masks_of_integers_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(InvalidArgument, match="attention_mask must be bool or floating"):
        attend(torch.ones(1, 1, 4, 4, dtype=dtype))


def layer(**config: Any) -> torch.nn.Module:
    made = torch.nn.Module()
    made.config = SimpleNamespace(**config)  # type: ignore[assignment]
    return made


def of_nllb() -> torch.nn.Module:
    """A layer of a model that is written for eager, and says is_causal=False in its decoder."""
    made = object.__new__(NllbMoeAttention)
    torch.nn.Module.__init__(made)
    made.is_causal = False
    return made


@pytest.mark.parametrize(
    ("module", "queries", "given", "refusal"),
    [
        (
            torch.nn.Module(),
            4,
            {"position_bias": X[:, :, :, :4]},
            "position_bias must not be given",
        ),
        (of_nllb(), 4, {}, "cu_seq_lens_q must not be given"),
        (layer(use_bidirectional_attention=True), 4, {}, "cu_seq_lens_q must not be given"),
        (layer(num_kv_shared_layers=2), 2, {}, "logits_to_keep must be 0"),
    ],
)
def test_a_packed_batch_is_refused_where_its_bounds_do_not_say_all(
    module: torch.nn.Module, queries: int, given: dict[str, Any], refusal: str
) -> None:
    cu = torch.tensor([0, 4], dtype=torch.int32)
    bounds = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 4, "max_length_k": 4}
    q = X[:, :, :queries]
    with pytest.raises(InvalidArgument, match=refusal):
        backend.attention_forward(module, q, X, X, None, **bounds, **given)
    if queries == 4 and not given:
        backend.attention_forward(module, q, X, X, None, is_causal=False, **bounds)


def packed_mask(lengths: tuple[int, ...], chunk: int = 99, window: int = 99) -> Tensor:
    """Which keys causal sequences in one row see, bool (1, 1, tokens, tokens)."""
    sequence = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    place = torch.cat([torch.arange(n) for n in lengths])
    behind = place[:, None] - place
    chunks = place // chunk
    seen = (sequence[:, None] == sequence) & (behind >= 0) & (behind < window)
    return (seen & (chunks[:, None] == chunks))[None, None]


def packed_call(
    mask: Tensor | None, lengths: tuple[int, ...], module: torch.nn.Module, **options: Any
) -> Tensor:
    """O (1, tokens, 4, 16) of a packed batch."""
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    q, k, v = torch.randn(3, 1, 4, sum(lengths), 16, generator=torch.Generator().manual_seed(1))
    bounds = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
    bounds |= dict.fromkeys(("max_length_q", "max_length_k"), max(lengths))
    o, _ = backend.attention_forward(module, q, k, v, mask, is_causal=True, **bounds, **options)
    return o


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize(
    ("masked", "options", "chunk"),
    [
        ({}, {}, None),
        ({}, {}, 4),
        ({"chunk": 4}, {}, 4),
        ({"window": 3}, {"sliding_window": 3}, None),
    ],
)
def test_the_mask_of_a_packed_batch_is_honoured(
    masked: dict[str, int], options: dict[str, int], chunk: int | None, additive: bool
) -> None:
    lengths = 7, 1, 10
    module = layer(attention_chunk_size=chunk) if chunk else layer()
    mask = packed_mask(lengths, **masked)
    q, k, v = torch.randn(3, 1, 4, 18, 16, generator=torch.Generator().manual_seed(1))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    if additive:
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    for _ in range(2):
        o = packed_call(mask, lengths, module, **options)
        torch.testing.assert_close(o.transpose(1, 2), want)
        assert o.is_contiguous()


def _image(mask: Tensor) -> Tensor:
    """Tokens 2 to 5 see each other, as those of an image do."""
    shown = mask.clone()
    shown[..., 2:6, 2:6] = True
    return shown


WRONG_MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "an image": _image,
    "a hidden key": lambda mask: mask & (torch.arange(18) != 3),
    "a dynamic mask": lambda mask: torch.where(mask, torch.linspace(0, 1, 18), -1e38),
    "a penalty": lambda mask: torch.where(mask, 0.0, -3.0),
    "chunks without a size": lambda mask: packed_mask((7, 1, 10), chunk=4),
    "other keys": lambda mask: mask[..., :17],
    "a mask of two dimensions": lambda mask: mask[0, 0],
}


@pytest.mark.parametrize("name", WRONG_MASKS)
def test_what_the_bounds_of_a_packed_batch_do_not_say_is_refused(name: str) -> None:
    mask = WRONG_MASKS[name](packed_mask((7, 1, 10)))
    with pytest.raises(
        InvalidArgument, match="attention_mask must not be given with cu_seq_lens_q"
    ):
        packed_call(mask, (7, 1, 10), layer())


@pytest.mark.parametrize("mask", ["none", "bool", "float", "causal"])
def test_a_position_bias_is_added_and_has_a_gradient(mask: str) -> None:
    q, k, v = (torch.randn(2, 2, 5, 16) for _ in range(3))
    bias = torch.randn(1, 2, 5, 5, requires_grad=True)
    visible = torch.rand(2, 1, 5, 5) > 0.4
    visible[..., 0] = True
    if mask in ("none", "causal"):
        visible = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril(0 if mask == "causal" else 9)
    hidden = torch.zeros(2, 1, 5, 5).masked_fill(~visible, torch.finfo(torch.float32).min)
    given = {"bool": visible, "float": hidden}.get(mask)
    found = backend.attention_forward(
        torch.nn.Module(), q, k, v, given, position_bias=bias, is_causal=mask == "causal"
    )[0]
    scores = q @ k.transpose(2, 3) / 4 + bias + hidden
    wanted = (scores.softmax(3) @ v).transpose(1, 2)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    grads = [torch.autograd.grad(o.square().sum(), bias)[0] for o in (found, wanted)]
    assert grads[1].abs().max() > 0.01
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def bert(**options: Any) -> Any:
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, **options,
    )  # fmt: skip
    return transformers.AutoModel.from_config(config, attn_implementation="flashgen")


def test_attention_weights_are_refused_however_they_are_wanted() -> None:
    tokens = batch("none")["input_ids"]
    for name in (*CONFIGS, "bert"):
        model = bert() if name == "bert" else make_model(name, backend.NAMES[0])
        model(input_ids=tokens, output_attentions=False)
        with pytest.raises(InvalidArgument, match="output_attentions must not be True"):
            model(input_ids=tokens, output_attentions=True)
    with pytest.raises(InvalidArgument, match="output_attentions must not be True"):
        attend(output_attentions=True)
    with pytest.raises(InvalidArgument, match="output_attentions must not be True"):
        bert(output_attentions=True)(input_ids=tokens)
    with pytest.raises(InvalidArgument, match="output_attentions must not be True"):
        make_model("llama", "FlashGen").generate(  # type: ignore[operator]
            tokens, max_new_tokens=1, output_attentions=True, return_dict_in_generate=True
        )


def test_attention_weights_of_other_implementations_are_theirs() -> None:
    model = bert()
    model.set_attn_implementation("eager")
    given = {"input_ids": batch("none")["input_ids"], "output_attentions": True}
    assert model(**given).attentions[0].shape == (2, 2, 18, 18)
    model.set_attn_implementation("FlashGen")
    with pytest.raises(InvalidArgument, match="output_attentions must not be True"):
        model(**given)


def test_attention_weights_are_refused_by_position() -> None:
    """As models of older design take them, whose forward names the argument."""

    class Old(transformers.BertModel):  # type: ignore[misc]
        def forward(self, tokens: Tensor, output_attentions: bool = False) -> Any:
            return super().forward(tokens)

    config = bert().config
    config._attn_implementation = "flashgen"
    tokens = batch("none")["input_ids"]
    Old(config)(tokens, False)
    with pytest.raises(InvalidArgument, match="output_attentions must not be True"):
        Old(config)(tokens, True)


@pytest.mark.parametrize("name", each(["gpt_oss", "llama", "gemma2"], 3, "two seconds a model"))
def test_continuous_batching_generates_what_each_prompt_alone_does(name: str) -> None:
    """In pages, which prompts enter in parts; with windows and sinks."""
    prompts = [[5, 6, 7, 9, 11, 3, 8], [8, 9], list(range(1, 13)), [33]]
    eager = make_model(name, "eager", use_cache=True).eval()
    eager.generation_config.eos_token_id = None
    options: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    wanted = [
        eager.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    model = make_model(name, "flashgen", use_cache=True).eval()
    found = model.generate_batch(
        inputs=prompts,
        generation_config=transformers.GenerationConfig(eos_token_id=-1, **options),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            num_blocks=32, block_size=4, max_batch_tokens=16, auto_switch_to_flash=False
        ),
        progress_bar=False,
    )
    assert sorted(each.generated_tokens for each in found.values()) == sorted(wanted)
    assert model.config._attn_implementation == "flashgen"


@pytest.mark.parametrize(
    ("name", "attention", "named"),
    [("llama", "FlashGen", 'attn_implementation="flashgen"'), ("llama4", "flashgen", "without chunks")],
)  # fmt: skip
def test_what_continuous_batching_lacks_is_refused_where_it_begins(
    name: str, attention: str, named: str
) -> None:
    model = make_model(name, attention).eval()
    with pytest.raises(InvalidArgument, match=f"generate_batch must.*{named}"):
        model.generate_batch(inputs=[[5, 6, 7], [8, 9]])
    with pytest.raises(InvalidArgument, match="generate_batch must"):
        model.init_continuous_batching()


def test_a_package_that_does_not_import_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('no operator nms')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)

    def broken(name: str) -> Any:
        try:
            import torchvision  # noqa: F401
        except RuntimeError as error:
            raise ModuleNotFoundError(f"Could not import {name}", name="transformers") from error

    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    monkeypatch.setattr(sys.modules["transformers"], "__getattr__", broken, raising=False)
    with pytest.raises(ToolchainError, match=r"import of torchvision fails: .*no operator nms"):
        backend.register()


def test_registering_twice_changes_nothing() -> None:
    chooses = transformers.PreTrainedModel.get_correct_attn_implementation
    backend.register()
    assert transformers.PreTrainedModel.get_correct_attn_implementation is chooses
    model = bert()
    model.set_attn_implementation("eager")
    model.set_attn_implementation("flashgen")
    assert len(model._forward_pre_hooks) == 1
