"""flashgen within Hugging Face transformers: tiny models of random weights, beside "eager"."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from flashgen.errors import InvalidArgument, ToolchainError
from flashgen.runtime import transformers as backend
from flashgen.runtime.adapters.transformers_attention import BOUNDS
from flashgen.runtime.sdpa import scaled_dot_product_attention
from tests.language_models import CONFIGS, batch, make_model, trained
from tests.makers import each
from tests.serving import record_directions, serve

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    directions = record_directions(monkeypatch)
    serve(monkeypatch)
    backend.register()
    return directions


@pytest.mark.parametrize(
    ("name", "padding"),
    [
        pytest.param(
            name,
            padding,
            marks=pytest.mark.slow("make test has each model and padding, in turn")
            if (number + turn) % 3 == 0
            else (),
        )
        for number, name in enumerate(CONFIGS)
        for turn, padding in enumerate(("none", "left", "right"))
    ],
)
def test_a_model_trains_as_with_eager(launched: list[str], name: str, padding: str) -> None:
    # Both names, in turn: transformers treats the first, with "flash" in it, in its own way.
    attention = backend.NAMES[padding == "right" or name == "gpt_oss"]
    logits, loss, grads = trained(make_model(name, attention), batch(padding))
    # Both layers ran by kernels, forward and backward.
    assert launched.count("forward") == launched.count("backward_dkv") == 2
    wanted_logits, wanted_loss, wanted = trained(make_model(name, "eager"), batch(padding))
    torch.testing.assert_close(logits, wanted_logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-5, atol=1e-6)
    assert grads.keys() == wanted.keys()
    for parameter, grad in grads.items():
        torch.testing.assert_close(
            grad, wanted[parameter], rtol=1e-4, atol=1e-5, msg=lambda m, p=parameter: f"{p}: {m}"
        )


def test_caps_windows_and_sinks_make_a_difference(launched: list[str]) -> None:
    """That the models above are no plain ones: each without one of them says something else."""
    for name, option in (
        ("gemma2", {"attn_logit_softcapping": None}), ("gemma2", {"sliding_window": 64}),
        ("gpt_oss", {"sliding_window": 64}), ("gpt_oss", {}),
    ):  # fmt: skip
        model = make_model(name, "eager").eval()
        wanted = model(batch("none")["input_ids"]).logits
        other = make_model(name, backend.NAMES[1], **option).eval()
        if not option:
            for parameter, x in other.named_parameters():
                if "sinks" in parameter:
                    nn.init.constant_(x, -1e4)
        found = other(batch("none")["input_ids"]).logits
        assert not torch.allclose(found, wanted, rtol=1e-2, atol=1e-3), (name, option)


def test_padding_would_be_missed_without_the_mask_function(launched: list[str]) -> None:
    """What the second registration is for: without it the same model goes silently wrong."""
    from transformers import AttentionInterface

    AttentionInterface.register("FlashGen_maskless", backend.attention_forward)
    wanted = trained(make_model("llama", "eager"), batch("left"))[0]
    found = trained(make_model("llama", "FlashGen_maskless"), batch("left"))[0]
    assert not torch.allclose(found, wanted, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("given", "torchs"),
    [
        ({}, {"is_causal": True}),
        ({"is_causal": False}, {}),
        ({"scaling": 0.4}, {"is_causal": True, "scale": 0.4}),
        ({"dropout": 0.5}, {"is_causal": True, "dropout_p": 0.5}),
    ],
    ids=str,
)
def test_what_a_layer_asks_for_is_done(
    launched: list[str], given: dict[str, Any], torchs: dict[str, Any]
) -> None:
    """Tiny models ask for no dropout, and for the scale that is the default anyway."""
    q, k, v = (torch.randn(2, heads, 9, 16) for heads in (4, 2, 2))
    torch.manual_seed(5)
    found, weights = backend.attention_forward(nn.Module(), q, k, v, None, **given)
    torch.manual_seed(5)
    want = scaled_dot_product_attention(q, k, v, enable_gqa=True, **torchs)
    assert weights is None
    assert torch.equal(found, want.transpose(1, 2))
    assert found.is_contiguous()
    one = backend.attention_forward(nn.Module(), q[:, :, -1:], k, v, None, **given)[0]
    if "dropout" not in given:  # a single query, the last, sees all
        torch.testing.assert_close(one, found[:, -1:], rtol=1e-5, atol=1e-6)


def test_a_module_says_that_it_is_not_causal(launched: list[str]) -> None:
    module, q = nn.Module(), torch.randn(1, 2, 9, 16)
    module.is_causal = False  # type: ignore[assignment]
    found = backend.attention_forward(module, q, q, q, None)[0]
    assert torch.equal(found, scaled_dot_product_attention(q, q, q).transpose(1, 2))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_with_an_attention_of_its_own_is_refused(
    launched: list[str], compiled: bool
) -> None:
    """Bloom adds whatever mask it is given: of a boolean one it would make another model."""
    config = transformers.BloomConfig(vocab_size=60, hidden_size=64, n_layer=1, n_head=2)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=backend.NAMES[0]
    )
    run = torch.compile(model, backend="eager") if compiled else model
    with pytest.raises(InvalidArgument, match='must be "eager" for BloomModel'):
        run(input_ids=batch("none")["input_ids"])


@pytest.mark.slow("5 s; tests/cpu compiles models without kernels")
def test_a_model_compiles_into_one_graph(launched: list[str]) -> None:
    torch._dynamo.reset()
    model, given = make_model("llama", "flashgen"), batch("right")
    wanted = trained(model, given)
    model.zero_grad()
    found = trained(torch.compile(model, fullgraph=True, backend="aot_eager"), given)  # type: ignore[arg-type]
    assert launched.count("backward_dkv") == 2 * 2
    torch.testing.assert_close(found[:2], wanted[:2], rtol=1e-5, atol=1e-6)
    for (name, grad), other in zip(wanted[2].items(), found[2].values(), strict=True):
        torch.testing.assert_close(
            other, grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("bounded", [True, False], ids=["bounds", "positions"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_packed_batch_is_each_sequence_alone(
    launched: list[str], name: str, bounded: bool
) -> None:
    """As a collator packs it, with its bounds or with positions that begin anew alone: logits and
    gradients of the sequences alone.
    """
    model = make_model(name, "flashgen")
    torch.manual_seed(2)
    texts = [torch.randint(1, 60, (1, length)) for length in (7, 1, 12)]
    wanted = torch.cat([model(input_ids=text).logits for text in texts], 1)
    launched.clear()
    cu = torch.tensor([0, 7, 8, 20], dtype=torch.int32)
    bounds = dict(zip(BOUNDS, (cu, cu, 12, 12), strict=True)) if bounded else {}
    positions = torch.cat([torch.arange(text.shape[1]) for text in texts])[None]
    packed = torch.cat(texts, 1)
    found = model(input_ids=packed, position_ids=positions, use_cache=False, **bounds).logits
    assert launched == ["forward"] * 2
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(found)
    gradients = [
        torch.autograd.grad((weights * logits).sum(), list(model.parameters()))
        for logits in (found, wanted)
    ]
    for grad, want in zip(*gradients, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-3, atol=1e-4)


def test_part_of_the_bounds_is_refused_by_name(launched: list[str]) -> None:
    q = torch.randn(1, 2, 4, 16)
    bounds = {"cu_seq_lens_q": torch.tensor([0, 4]), "cu_seq_lens_k": torch.tensor([0, 4])}
    with pytest.raises(InvalidArgument, match="max_length_q must be given"):
        backend.attention_forward(nn.Module(), q, q, q, None, **bounds)


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ToolchainError, match="pip install 'transformers"):
        backend.register()


def test_other_names_with_flash_in_them_are_still_flash_attns(launched: list[str]) -> None:
    from transformers import AttentionInterface

    AttentionInterface.register("flashier", backend.attention_forward)
    with pytest.raises((ValueError, ImportError)):
        make_model("gpt2", "flashier")


def test_t5_trains_by_kernels_as_with_eager(launched: list[str]) -> None:
    """Its position bias is folded into the masks, and kernels compute its gradient."""
    config = transformers.T5Config(
        vocab_size=60, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
        relative_attention_num_buckets=8, relative_attention_max_distance=20,
    )  # fmt: skip
    given = batch("right") | {"decoder_input_ids": batch("none")["input_ids"][:, :9]}
    given["labels"] = given["labels"][:, :9].contiguous()
    found = []
    for attention in ("FlashGen", "eager"):
        torch.manual_seed(0)
        model = transformers.AutoModelForSeq2SeqLM.from_config(
            config, attn_implementation=attention
        )
        for name, x in model.named_parameters():
            if "relative_attention_bias" in name:
                nn.init.normal_(x)
        model(**given).loss.backward()
        found.append({name: x.grad for name, x in model.named_parameters()})
    assert launched.count("forward") == launched.count("backward_dkv") == 3
    assert launched.count("backward_dbias") == 2  # a cross attention has none
    for name, wanted in found[1].items():
        if "relative_attention_bias" in name:
            assert wanted.abs().max() > 1e-4
        torch.testing.assert_close(
            found[0][name], wanted, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("padding", each(["left", "none"], 2, "make test proves a sample of it"))
def test_generation_with_a_cache_is_eagers(launched: list[str], padding: str) -> None:
    given = {name: x for name, x in batch(padding).items() if name != "labels"}
    texts = []
    for attention in (*backend.NAMES, "eager"):
        model = make_model("llama", attention).eval()
        made = model.generate(  # type: ignore[operator]
            **given, max_new_tokens=3, do_sample=False, use_cache=True, pad_token_id=0
        )
        texts.append(made)
    assert all(torch.equal(made, texts[-1]) for made in texts)
    assert "backward_dkv" not in launched
