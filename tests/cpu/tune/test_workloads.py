"""Workloads: strict YAML, the order of tuning, and what is read from a model's configuration."""

from __future__ import annotations

import importlib
import json
import logging
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgen.errors import InvalidArgument
from flashgen.inputs.features import Features, fields_of
from flashgen.runtime import decode
from flashgen.runtime.call import Call
from flashgen.runtime.decode import CacheArguments
from flashgen.spec.problem import Problem, workload
from flashgen.spec.vocabulary import BACKWARD
from flashgen.tune.hf_config import from_hf_config
from flashgen.tune.workloads import WeightedPiece, Workload, kernels_of, load, parse, problem_of
from tests.makers import make_spec

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "workloads"

PLAIN = """\
name: one
specs:
- dtype: bf16
  head_dim: 128
  mask: causal
  heads: 32
  kv_heads: 8
  seqs: {512: 1, 8192: 2.5}
- {dtype: float32, precision: tf32, head_dim: 64, mask: none, alibi: true, weight: 2, seqs: [2048]}
"""


def parsed(text: str) -> Workload:
    return parse(text, Path("w.yaml"))


def titles(found: Workload) -> list[str]:
    return [f"{piece.spec.name} {piece.problem.seq_k}" for piece in found.pieces]


# ---------------------------------------------------------------- the file


def test_the_heaviest_comes_first() -> None:
    found = parsed(PLAIN)
    names = ["fwd_bf16_d128_causal 8192", "fwd_tf32_d64_alibi 2048", "fwd_bf16_d128_causal 512"]
    assert titles(found) == names
    assert [piece.weight for piece in found.pieces] == [2.5, 2.0, 1.0]
    assert found.work == tuple((piece.spec, piece.problem) for piece in found.pieces)
    assert found.lines()[0] == "45.5%  fwd_bf16_d128_causal seq 8192, heads 16/4"


def test_equal_weights_stay_in_the_order_of_the_file() -> None:
    found = parsed(
        "name: w\nspecs:\n- {dtype: fp16, head_dim: 64, mask: none, seqs: [8192, 512, 2048]}\n"
    )
    assert [piece.problem.seq_k for piece in found.pieces] == [8192, 512, 2048]


def test_directions_are_the_kernels_of_a_training_step() -> None:
    text = "name: w\nspecs:\n- {dtype: fp16, head_dim: 64, mask: causal, dropout: true, bias: additive,"
    found = parsed(f"{text} directions: [forward, backward], seqs: [512]}}\n")
    assert [piece.spec.direction for piece in found.pieces] == [
        "forward",
        "backward_delta",
        "backward_dkv",
        "backward_dq",
        "backward_fused",
        "backward_dbias",
    ]
    assert all(
        piece.spec.dropout for piece in found.pieces if piece.spec.direction != "backward_delta"
    )


def test_a_kernel_that_serves_two_specs_is_searched_once_at_the_heavier_weight() -> None:
    form = "- {{dtype: fp16, head_dim: 64, mask: {}, directions: [backward_delta], weight: {}, seqs: [512]}}\n"
    found = parsed("name: w\nspecs:\n" + form.format("none", 1) + form.format("causal", 3))
    assert [(p.spec.name, p.weight) for p in found.pieces] == [("bwd_delta_fp16_d64", 3.0)]


@pytest.mark.parametrize(
    ("head_dim", "group", "heads"),
    [
        (128, 1, (16, 16)),
        (128, 4, (16, 4)),
        (128, 7, (14, 2)),
        (64, 71, (71, 1)),
        (256, 16, (16, 1)),
    ],
)
def test_a_problem_has_the_head_ratio_of_the_model(
    head_dim: int, group: int, heads: tuple[int, int]
) -> None:
    spec = make_spec(head_dim=head_dim)
    problem, standard = problem_of(spec, 2048, group), workload(spec, 2048)
    assert (problem.heads, problem.kv_heads) == heads
    assert problem.group == group
    assert (problem.batch, problem.seq_q, problem.seq_k) == (standard.batch, 2048, 2048)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("mask: causal", "mask: causal\n  causal: true", "line 6: unknown key 'causal'; remove it (known: dtype,"),
        ("name: one", "name: one\nnotes: x", "line 2: unknown key 'notes'"),
        ("mask: causal", "mask: causal\n  mask: none", "line 6: the key 'mask' is here twice"),
        ("  mask: causal\n", "", "line 3: the key 'mask' is missing; add it"),
        ("  seqs: {512: 1, 8192: 2.5}\n", "", "line 3: the key 'seqs' is missing; add it"),
        ("mask: causal", "mask: window", "line 5: mask must be one of none, causal"),
        ("dtype: bf16", "dtype: int8", "line 3: dtype must be one of bf16, fp16, fp32: got 'int8'"),
        ("head_dim: 128", "head_dim: 100", "line 3: head_dim must be a multiple of 8 from 16 to 512: got 100"),
        ("head_dim: 128", "head_dim: wide", "line 4: head_dim must be a whole number >= 0; write it in digits: got 'wide'"),
        ("kv_heads: 8", "kv_heads: 5", "line 3: heads must be a multiple of kv_heads: got 32 and 5"),
        ("kv_heads: 8", "kv_heads: 0", "line 3: heads must be a multiple of kv_heads: got 32 and 0"),
        ("8192: 2.5", "600: 2", "line 8: fwd_bf16_d128_causal [1, 1024) is in line 8 already"),
        ("512: 1", "0: 1", "line 8: seq must be from 1 to 16777216: got 0"),
        ("512: 1", "long: 1", "line 8: a length of seqs must be a whole number: got 'long'"),
        ("512: 1", "512: 0", "line 8: weight must be finite and more than 0: got 0.0"),
        ("512: 1", "512: much", "line 8: the weight of length 512 must be a number; write it like 12.5: got 'much'"),
        ("{512: 1, 8192: 2.5}", "512", "line 8: a mapping must stand here"),
        ("seqs: [2048]", "seqs: [2048], directions: [sideways]", "line 9: directions must be some of backward, forward"),
        ("seqs: [2048]", "seqs: [2048], directions: [backward_dbias]", "line 9: direction backward_dbias needs bias additive"),
        ("alibi: true", "alibi: yes", "line 9: alibi must be true or false: got 'yes'"),
        ("precision: tf32", "precision: high", "line 9: precision must be one of ieee, tf32"),
        ("specs:", "specs: [", "this is not YAML"),
    ],
)  # fmt: skip
def test_what_a_file_may_not_say_is_named_with_its_line(old: str, new: str, said: str) -> None:
    assert PLAIN.count(old) == 1
    with pytest.raises(InvalidArgument) as caught:
        parsed(PLAIN.replace(old, new))
    assert str(caught.value).startswith("w.yaml, line ")
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["", "name: w\nspecs: []\n", "- 1\n", "just a word"])
def test_a_file_without_specs_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"w\.yaml, line \d"):
        parsed(text)


def test_a_spec_may_stand_twice_with_other_directions_but_not_with_the_same() -> None:
    form = "- {{dtype: fp16, head_dim: 64, mask: none, directions: [{}], seqs: [512]}}\n"
    both = "name: w\nspecs:\n" + form.format("forward") + form.format("backward_dq")
    assert titles(parsed(both)) == ["fwd_fp16_d64 512", "bwd_dq_fp16_d64 512"]
    with pytest.raises(InvalidArgument, match=r"line 5: bwd_dq_fp16_d64 .* in line 4 already"):
        parsed(both + form.format("backward_dq"))


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="there is no such workload; examples/workloads/"):
        load(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\n")
    with pytest.raises(InvalidArgument, match="cannot be read as UTF-8 text"):
        load(tmp_path / "latin.yaml")


def test_weights_and_words_are_checked_in_python_too() -> None:
    with pytest.raises(InvalidArgument, match="weight must be finite and more than 0"):
        WeightedPiece(spec=make_spec(), problem=workload(make_spec(), 512), weight=-1.0)
    with pytest.raises(InvalidArgument, match="directions must be some of"):
        kernels_of(make_spec(), ["up"])


def test_packed_words_name_the_kernels_of_packed_sequences() -> None:
    spec = make_spec("bfloat16", 64, "causal", sink=True)
    packed = replace(spec, varlen=True)
    assert kernels_of(spec, ["packed_forward"]) == [packed]
    assert kernels_of(spec, ["paged_prefill"]) == [replace(packed, paged=True)]
    gradients = kernels_of(spec, ["packed_backward"])
    assert [each.direction for each in gradients] == list(BACKWARD)
    assert all(each.varlen for each in gradients if each.direction != "backward_delta")
    dropped = replace(spec, dropout=True)
    assert not kernels_of(dropped, ["paged_prefill"])[0].dropout  # pages are for inference


@pytest.mark.parametrize(
    ("file", "kernels", "words"),
    [("vit-l", 5, {"", "varlen"}), ("gpt-2", 5, {"", "dropout", "varlen"})],
)
def test_an_example_is_what_it_says(file: str, kernels: int, words: set[str]) -> None:
    pieces = load(EXAMPLES / f"{file}.yaml").pieces
    assert {piece.spec.head_dim for piece in pieces} == {64}
    assert len({piece.spec.direction for piece in pieces}) == kernels
    assert {" ".join(piece.spec.feature_words) for piece in pieces} == words


_OF_16_BITS = {"torch_dtype": "bfloat16", "max_position_embeddings": 131072}
MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "llama-4-scout": {
        "model_type": "llama4_text", "num_attention_heads": 40, "num_key_value_heads": 8,
        "hidden_size": 5120, "head_dim": 128, "num_hidden_layers": 48,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_hidden_layers": 48,
    },
    "gemma-2-2b": {
        "model_type": "gemma2", "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "num_hidden_layers": 26, "attn_logit_softcapping": 50.0, "sliding_window": 4096,
    },
    "gemma-3-4b": {
        "model_type": "gemma3_text", "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "num_hidden_layers": 34, "sliding_window": 1024, "sliding_window_pattern": 6,
    },
    "gemma-4-31b": {
        "model_type": "gemma4_text", "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256,
        "num_hidden_layers": 60, "sliding_window": 1024, "global_head_dim": 512, "attention_k_eq_v": True,
        "num_global_key_value_heads": 4,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "num_hidden_layers": 24, "sliding_window": 128,
    },
    "mistral-7b": {
        "model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_hidden_layers": 32, "sliding_window": 4096,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "num_attention_heads": 128, "num_key_value_heads": 128,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_hidden_layers": 61,
    },
}  # fmt: skip


@pytest.mark.parametrize("file", MODELS)
def test_an_example_tunes_what_its_models_configuration_says(tmp_path: Path, file: str) -> None:
    """Prompts, packed and over pages, generation over pages, and training: the same specs at the
    same ratio of heads.
    """
    words = ("forward", "packed_forward", "paged_prefill", "decode", "backward", "packed_backward")
    model = read(tmp_path, MODELS[file] | _OF_16_BITS, directions=words, cache={"paged": True})
    written = load(EXAMPLES / f"{file}.yaml").pieces
    found = {(p.spec, p.problem.heads, p.problem.kv_heads) for p in model.pieces}
    assert {(p.spec, p.problem.heads, p.problem.kv_heads) for p in written} == found


def test_all_examples_are_tested() -> None:
    assert {path.stem for path in EXAMPLES.iterdir()} == {"vit-l", "gpt-2", *MODELS}


# ---------------------------------------------------------------- a step of one token


@pytest.mark.parametrize(
    "features",
    [
        Features(),
        Features(window=(4095, 0)),
        Features(softcap=50.0),
        Features(window=(4095, 0), sinks=torch.zeros(4)),
    ],
    ids=["plain", "window", "softcap", "window and sink"],
)
def test_decode_finds_what_a_model_was_tuned_for(features: Features) -> None:
    """What a causal attention tunes for decode is what decode(causal=True) asks the table for."""
    forward = make_spec("bfloat16", 64, "causal", **fields_of(features.key))
    q = torch.zeros(2, 4, 1, 64, dtype=torch.bfloat16)
    pool, pages = torch.zeros(2, 16, 2, 64, dtype=torch.bfloat16), torch.zeros(2, 4).int()
    cache = decode.check_call(q, pool, pool, CacheArguments(lengths=pages[:, 0], block_table=pages))
    step = decode.decode_spec(Call(causal=True, features=features), q, cache)
    assert kernels_of(forward, ["decode"], {"paged": True}) == [step]


def test_a_cache_goes_with_decode() -> None:
    with pytest.raises(InvalidArgument, match="paged needs direction decode: add it"):
        kernels_of(make_spec(), ["forward"], {"paged": True})
    with pytest.raises(InvalidArgument, match="line 3: kv_dtype, kv_scales needs direction"):
        parsed(
            "name: w\nspecs:\n- {dtype: bf16, head_dim: 64, mask: none, kv_dtype: int8, "
            "kv_scales: page, seqs: [512]}\n"
        )


# ---------------------------------------------------------------- a model's configuration

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "attn_pdrop": 0.1,
}
VIT = {
    "model_type": "vit",
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "image_size": 224,
    "patch_size": 16,
    "torch_dtype": "float32",
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 61,
    "head_dim": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}


def read(tmp_path: Path, config: dict[str, Any], **options: Any) -> Workload:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return from_hf_config(path, **options)


def sizes(found: Workload) -> list[tuple[str, int, int, int]]:
    return [
        (p.spec.name, p.problem.seq_k, p.problem.heads, p.problem.kv_heads) for p in found.pieces
    ]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, [("fwd_bf16_d128_causal", n, 16, 4) for n in (8192, 2048, 512)]),
        (LLAMA | {"head_dim": 64}, [("fwd_bf16_d64_causal", n, 32, 8) for n in (8192, 2048, 512)]),
        (LLAMA | {"torch_dtype": "torch.float16", "num_key_value_heads": None, "max_position_embeddings": 300},
         [("fwd_fp16_d128_causal", 300, 16, 16)]),
        (LLAMA | {"max_position_embeddings": 40960},
         [("fwd_bf16_d128_causal", n, 16, 4) for n in (16384, 8192, 2048, 512)]),
        (GPT2, [("fwd_bf16_d64_causal", 1024, 32, 32), ("fwd_bf16_d64_causal", 512, 32, 32)]),
        (VIT, [("fwd_fp32_d64", 197, 32, 32)]),
        (VIT | {"image_size": 384}, [("fwd_fp32_d64", 577, 32, 32)]),
        (VIT | {"image_size": [224, 448], "num_register_tokens": 4, "dtype": "float16"},
         [("fwd_fp16_d64", 14 * 28 + 1 + 4, 32, 32)]),
        (DEEPSEEK, [("fwd_bf16_d192v128_causal", n, 10, 10) for n in (4096, 2048, 512)]),
        (LLAMA | {"model_type": "bert", "max_position_embeddings": 512}, [("fwd_bf16_d128", 512, 16, 4)]),
        (LLAMA | {"architectures": ["NewForMaskedLM"], "max_position_embeddings": 512}, [("fwd_bf16_d128", 512, 16, 4)]),
        (LLAMA | {"model_type": "bert", "is_decoder": True, "max_position_embeddings": 512},
         [("fwd_bf16_d128_causal", 512, 16, 4)]),
        (LLAMA | {"model_type": "falcon", "alibi": True, "multi_query": True, "num_attention_heads": 64, "max_position_embeddings": 512},
         [("fwd_bf16_d64_causal_alibi", 512, 64, 1)]),
        (LLAMA | {"multi_query": True, "new_decoder_architecture": True, "max_position_embeddings": 512},
         [("fwd_bf16_d128_causal", 512, 16, 4)]),
        ({"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "max_seq_len": 512, "dtype": "bfloat16",
          "attn_config": {"alibi": True, "kv_n_heads": 8}}, [("fwd_bf16_d128_causal_alibi", 512, 16, 4)]),
        ({"model_type": "t5", "is_encoder_decoder": True, "d_model": 512, "d_kv": 64, "num_heads": 8, "num_layers": 6,
          "num_decoder_layers": 3, "relative_attention_num_buckets": 32, "n_positions": 512, "dtype": "bfloat16"},
         [("fwd_bf16_d64_bias", 512, 32, 32), ("fwd_bf16_d64_causal_bias", 512, 32, 32)]),
    ],
)  # fmt: skip
def test_a_configuration_says_what_to_tune(
    tmp_path: Path, config: dict[str, Any], expected: list[tuple[str, int, int, int]]
) -> None:
    assert sizes(read(tmp_path, config)) == expected


def test_training_takes_the_backward_and_the_dropout_of_attention(tmp_path: Path) -> None:
    found = read(tmp_path, GPT2, directions=("forward", "backward"))
    first = [piece.spec.name for piece in found.pieces if piece.problem.seq_k == 1024]
    assert first == [
        "fwd_bf16_d64_causal_dropout",
        "bwd_delta_bf16_d64",
        "bwd_dkv_bf16_d64_causal_dropout",
        "bwd_dq_bf16_d64_causal_dropout",
        "bwd_fused_bf16_d64_causal_dropout",
    ]
    for directions in (["forward"], ["packed_forward", "decode"]):
        found = read(tmp_path, GPT2, directions=directions)
        assert not any(piece.spec.dropout for piece in found.pieces)


def test_of_several_attentions_the_deeper_and_longer_comes_first(tmp_path: Path) -> None:
    config = {
        "model_type": "both",
        "text_config": LLAMA | {"torch_dtype": None},
        "vision_config": VIT,
        "dtype": "float16",
    }
    found = read(tmp_path, config)
    assert sizes(found) == [
        ("fwd_fp16_d128_causal", 8192, 16, 4),
        ("fwd_fp16_d128_causal", 2048, 16, 4),
        ("fwd_fp16_d128_causal", 512, 16, 4),
        ("fwd_fp16_d64", 197, 32, 32),
    ]  # fmt: skip
    assert [piece.weight for piece in found.pieces] == [32 * 8192, 32 * 2048, 32 * 512, 24 * 197]
    decoding = read(tmp_path, config, directions=["decode"])
    assert {piece.spec.name for piece in decoding.pieces} == {"decode_fp16_d128"}
    assert "vision_config sees all tokens at once: no decode is tuned for it" in decoding.notes
    with pytest.raises(InvalidArgument, match="the model sees all tokens at once"):
        read(tmp_path, VIT, directions=["decode"])
    beside = {key: value for key, value in config.items() if key != "text_config"} | LLAMA
    assert sizes(read(tmp_path, beside))[0] == ("fwd_fp16_d128_causal", 8192, 16, 4)


@pytest.mark.parametrize(
    ("config", "note"),
    [
        (LLAMA | {"sliding_window": 128}, "sliding_window is 128 keys: its kernels are tuned with a window of 4096"),
        (LLAMA | {"torch_dtype": None}, "names no dtype: bfloat16 is tuned"),
        (LLAMA | {"max_position_embeddings": None}, "names no longest sequence: all buckets are tuned"),
        (LLAMA | {"vision_config": {"depth": 3}}, "vision_config names none of num_attention_heads"),
    ],
)  # fmt: skip
def test_what_is_not_taken_over_is_noted(tmp_path: Path, config: dict[str, Any], note: str) -> None:
    assert any(note in said for said in read(tmp_path, config).notes)


@pytest.mark.parametrize(
    "window",
    [{"sliding_window": None}, {"sliding_window": 4096, "use_sliding_window": False}, {"sliding_window": 8192}],
)  # fmt: skip
def test_a_window_that_hides_nothing_is_none(tmp_path: Path, window: dict[str, Any]) -> None:
    found = read(tmp_path, LLAMA | window)
    assert found.notes == ()
    assert not any(piece.spec.window for piece in found.pieces)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "mamba", "hidden_size": 768, "state_size": 16},
         "mamba has no attention that flashgen knows (the model has heads of a recurrence, and no softmax attention)"),
        ({"model_type": "mamba2", "hidden_size": 4096, "num_heads": 128, "head_dim": 64, "state_size": 128},
         "mamba2 has no attention"),
        ({"model_type": "resnet", "hidden_sizes": [256, 512]}, "resnet has no attention"),
        ({}, "of no model_type has no attention"),
        ({"text_config": {"num_attention_heads": 8}}, "text_config names none of hidden_size, n_embd, n_embed, d_model"),
        (LLAMA | {"num_attention_heads": 48}, "the model: the width must be a multiple of the heads: got 4096 and 48"),
        (LLAMA | {"num_key_value_heads": 5}, "the model: the heads must be a multiple of those of K and V: got 32 and 5"),
        (LLAMA | {"head_dim": 576}, "the model: head_dim must be a multiple of 8 from 16 to 512: got 576"),
        (LLAMA | {"num_attention_heads": "many"}, "num_attention_heads must be a whole number from 1 to 2147483647: got 'many'"),
        (LLAMA | {"torch_dtype": "float8_e4m3fn"}, "dtype must be one of bf16, fp16, fp32: got 'float8_e4m3fn'"),
        (VIT | {"patch_size": 0}, "patch_size must be one or two whole numbers: got 0"),
        (VIT | {"image_size": [1, 2, 3]}, "image_size must be one or two whole numbers: got [1, 2, 3]"),
    ],
)  # fmt: skip
def test_a_configuration_that_cannot_be_tuned_is_one_sentence(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read(tmp_path, config)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(InvalidArgument, match="there is no such file"):
        from_hf_config(path)
    path.write_text("{")
    with pytest.raises(InvalidArgument, match="this is not JSON"):
        from_hf_config(path)
    path.write_text("[1]")
    with pytest.raises(InvalidArgument, match="must be a JSON object"):
        from_hf_config(path)


def test_a_models_folder_serves_as_well(tmp_path: Path) -> None:
    found = read(tmp_path, LLAMA)
    assert from_hf_config(tmp_path) == found
    assert found.pieces[0].problem == Problem(batch=2, heads=16, kv_heads=4, seq_q=8192, seq_k=8192)


GEMMA3 = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024},
}  # fmt: skip
MISTRAL = {
    "model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 8192, "dtype": "bfloat16",
}  # fmt: skip


class TestTransformersCompletesAFile:
    """What a file leaves out has the default of the model's class, as when the model is loaded."""

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("transformers")

    def test_images_of_any_size_are_left_out(self, tmp_path: Path) -> None:
        """Qwen2-VL names its heads in its own way, and no size: no length is known, nor a mask."""
        vision = {"depth": 32, "embed_dim": 1280, "num_heads": 16, "patch_size": 14}
        found = read(tmp_path, MISTRAL | {"model_type": "qwen2_vl", "vision_config": vision})
        assert {p.spec.name for p in found.pieces} == {"fwd_bf16_d128_causal"}
        assert (
            found.notes[0]
            == "vision_config: it has not both of image_size, patch_size, so its images have any size: it is left out"
        )

    def test_null_is_no_default(self, tmp_path: Path) -> None:
        """Mistral has a window unless the file has null."""
        names = {
            null: {p.spec.name for p in read(tmp_path, MISTRAL | more).pieces}
            for null, more in ((False, {}), (True, {"sliding_window": None}))
        }
        assert names == {False: {"fwd_bf16_d128_causal_window"}, True: {"fwd_bf16_d128_causal"}}

    def test_without_it_the_file_is_read_as_it_is(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        assert {p.spec.name for p in read(tmp_path, MISTRAL).pieces} == {"fwd_bf16_d128_causal"}
        with pytest.raises(InvalidArgument, match="text_config names none of num_attention_heads"):
            read(tmp_path, GEMMA3)

    def test_layers_with_fields_of_their_own_are_pieces_of_their_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Gemma 4 lists them when its class completes the file; its own file names two fields."""
        wide = {f"{place:02d}": {"head_dim": 512} for place in range(5, 30, 6)}
        gemma = {"model_type": "gemma4_text", "num_hidden_layers": 30, "per_layer_config": wide}
        for change in ({}, {"per_layer_config": None, "global_head_dim": 512}):
            found = read(tmp_path, gemma | change)
            assert {p.spec.name: p.weight for p in found.pieces if p.problem.seq_k == 2048} == {
                "fwd_bf16_d256_causal_window": 25 * 512, "fwd_bf16_d512_causal": 5 * 2048,
            }  # fmt: skip
        monkeypatch.setitem(sys.modules, "transformers", None)
        types = ["sliding_attention", "full_attention"]
        found = read(
            tmp_path, MODELS["gemma-4-31b"] | {"num_hidden_layers": 2, "layer_types": types}
        )
        assert {(p.spec.name, p.problem.heads, p.problem.kv_heads) for p in found.pieces} == {
            ("fwd_bf16_d256_causal_window", 8, 4), ("fwd_bf16_d512_causal", 8, 1),
        }  # fmt: skip
        with pytest.raises(
            InvalidArgument, match="per_layer_config must have the fields of layers"
        ):
            read(tmp_path, gemma | {"num_attention_heads": 8, "per_layer_config": {"x": {}}})

    @pytest.mark.parametrize(
        "change",
        [
            {"num_labels": 2**31 - 1, "sliding_window": None},
            {"to_dict": 1, "sliding_window": None},
            {"rms_norm_eps": "x"},
        ],
    )
    def test_what_it_cannot_take_is_read_as_it_is(
        self, tmp_path: Path, change: dict[str, Any]
    ) -> None:
        found = read(tmp_path, MISTRAL | change)
        assert {p.spec.name for p in found.pieces} == {"fwd_bf16_d128_causal"}
        assert logging.root.manager.disable == 0

    @pytest.mark.parametrize("model_type", ["detr", "dpt", "upernet"])
    def test_a_repository_that_the_file_names_is_not_looked_up(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
    ) -> None:
        asked: list[Any] = []

        def resolved(*address: Any, **_: Any) -> None:
            asked.append(address)
            raise OSError("no network")

        monkeypatch.setattr(socket, "getaddrinfo", resolved)
        constants = importlib.import_module("huggingface_hub.constants")
        before = constants.HF_HUB_OFFLINE
        named = {"model_type": model_type, "backbone": "a/b", "use_timm_backbone": False}
        read(tmp_path, MISTRAL | named)
        assert asked == []
        assert before == constants.HF_HUB_OFFLINE
