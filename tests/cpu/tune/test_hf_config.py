"""Public configurations of models: what is read of each, by hand in tests/data/hf_configs.yaml."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from flashgen.errors import InvalidArgument
from flashgen.spec.problem import bucket_of
from flashgen.tune.hf_config import attentions_of, from_hf_config, parts_of
from flashgen.tune.hf_fields import completed
from flashgen.tune.hf_kinds import Unread
from flashgen.tune.hf_layers import Attention, NoAttention
from flashgen.tune.hf_masks import SEES_ALL

PUBLIC: list[dict[str, Any]] = yaml.load(
    (Path(__file__).parents[2] / "data" / "hf_configs.yaml").read_text(), yaml.CSafeLoader
)
READ = [case for case in PUBLIC if "refused" not in case]
REFUSED = [case for case in PUBLIC if "refused" in case]
OFF = {"mask": "causal", "window": 0, "chunk": 0, "length": None, "fixed": False}
FLAGS = dict.fromkeys(("softcap", "sink", "alibi", "bias"), False)


def name_of(case: dict[str, Any]) -> str:
    return str(case["model"])


def expected(case: dict[str, Any]) -> Counter[Attention]:
    found: Counter[Attention] = Counter()
    for fields in case["layers"]:
        own = {key: value for key, value in fields.items() if key != "layers"}
        found[Attention(**(OFF | FLAGS | {"head_dim_v": own["head_dim"]} | own))] += fields[
            "layers"
        ]
    return found


def layers_of(config: dict[str, Any]) -> Counter[Attention]:
    """What is read of all parts, but for those that the reader leaves out."""
    found: Counter[Attention] = Counter()
    for where, part in parts_of(completed(config)):
        try:
            found.update(dict(attentions_of(part, where)))
        except (NoAttention, Unread):
            continue
    return found


def read(tmp_path: Path, config: dict[str, Any]) -> Any:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    return from_hf_config(path)


def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)


def test_there_are_sixty_of_different_types() -> None:
    types = {case["config"]["model_type"] for case in PUBLIC}
    assert len(types) >= 60


@pytest.mark.parametrize("case", READ, ids=name_of)
def test_a_public_configuration_is_read_right(case: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert layers_of(case["config"]) == expected(case)
    found = read(tmp_path, case["config"])
    lengths = [fields.get("length", 2**31) for fields in case["layers"]]
    longest = max(piece.problem.seq_k for piece in found.pieces)
    assert longest <= max(lengths)
    assert bucket_of(longest) == bucket_of(max(lengths))
    notes = "\n".join(found.notes)
    assert [words for words in case.get("left_out", ()) if words not in notes] == []
    assert ("is left out" in notes) is ("left_out" in case)


@pytest.mark.parametrize("case", READ, ids=name_of)
def test_without_transformers_it_is_read_right_or_it_says_what_it_read(
    case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_transformers(monkeypatch)
    if case.get("completed"):
        try:
            found = read(tmp_path, case["config"])
        except InvalidArgument:
            return
        assert any("these were read" in note for note in found.notes)
    else:
        assert layers_of(case["config"]) == expected(case)


@pytest.mark.parametrize("case", REFUSED, ids=name_of)
@pytest.mark.parametrize("alone", [False, True], ids=["transformers", "alone"])
def test_what_no_kernel_computes_is_refused_by_the_name_of_its_field(
    case: dict[str, Any], alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if alone:
        without_transformers(monkeypatch)
    with pytest.raises(InvalidArgument) as caught:
        read(tmp_path, case["config"])
    assert case["refused"] in str(caught.value)


# ---------------------------------------------------------------- a model type that nobody knows

STRANGE = {
    "model_type": "strange", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 4,
    "max_position_embeddings": 8192,
}  # fmt: skip


def test_the_fields_that_were_read_are_printed(tmp_path: Path) -> None:
    (note,) = read(tmp_path, STRANGE | {"num_kv_heads": 8, "rope_theta": 1.0}).notes
    assert note == (
        "transformers does not complete strange: the mask is causal, what no field says is off, and "
        "these were read: hidden_size 4096, num_attention_heads 32, num_hidden_layers 4, "
        "max_position_embeddings 8192, num_kv_heads 8"
    )


LOOKS_LIKE = [
    ({"kv_groups": 8}, "heads of K and V"),
    ({"multi_query_heads_num": 2}, "heads of K and V"),
    ({"key_value_groups": [1, 2, 4, 8]}, "heads of K and V"),
    ({"size_per_head": 64, "attn_head_size": 64}, "head dim"),
    ({"extra_attn_heads": 64}, None),
    ({"local_window_len": 512}, "window"),
    ({"swa_size": 512}, "window"),
    ({"chunk_len": 128}, "chunk"),
    ({"num_sink_tokens": 4}, "sink"),
    ({"qk_softcap": 30.0}, "softcap"),
    ({"attn_sparse_ratio": 0.5}, "sparse"),
]


@pytest.mark.parametrize(("fields", "what"), LOOKS_LIKE, ids=str)
def test_a_field_that_looks_as_if_it_decided_is_named(
    tmp_path: Path, fields: dict[str, Any], what: str | None
) -> None:
    """Refused where nothing else says as much; otherwise noted."""
    if what is None:
        notes = "\n".join(read(tmp_path, STRANGE | fields).notes)
        assert "not read, though it looks like heads: extra_attn_heads 64" in notes
        return
    with pytest.raises(InvalidArgument, match=f"this looks like {what}, and flashgen does not"):
        read(tmp_path, STRANGE | fields)


def test_a_field_that_another_one_explains_is_noted(tmp_path: Path) -> None:
    found = read(tmp_path, STRANGE | {"num_kv_heads": 8, "kv_groups": 4, "chunks": 0})
    assert "not read, though it looks like heads of K and V: kv_groups 4" in found.notes


def test_a_length_of_another_name_is_no_longest_bucket(tmp_path: Path) -> None:
    unknown = {k: v for k, v in STRANGE.items() if k != "max_position_embeddings"}
    with pytest.raises(InvalidArgument, match="max_tokens_len 4096: this looks like length"):
        read(tmp_path, unknown | {"max_tokens_len": 4096})
    for name in ("n_positions", "max_seq_len", "seq_length", "model_max_length", "n_ctx"):
        found = read(tmp_path, STRANGE | {name: 4096})
        assert max(piece.problem.seq_k for piece in found.pieces) == 4096


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_key_value_heads": None}, "num_key_value_heads is null, and no other field says the heads of K and V"),
        ({"head_dim": None}, "head_dim is null, and no other field says the head dim"),
        ({"num_kv_heads": 4, "n_head_kv": 8}, "num_kv_heads is 4 and n_head_kv is 8, and both mean heads of K and V"),
        ({"num_kv_heads": 5}, "the heads must be a multiple of those of K and V: got 32 and 5"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types lists 3 of 4 layers"),
        ({"layer_types": ["full_attention", "odd", "odd", "odd"]}, "layer_types has 'odd', an attention that flashgen does not know"),
        ({"layer_types": ["sliding_attention"] * 4}, "layers have a sliding window, and no field says how long it is"),
        ({"layer_types": ["chunked_attention"] * 4}, "layers are chunked, and no field says how long a chunk is"),
        ({"block_configs": [{"ffn": {}}] * 4}, "block_configs has {'ffn': {}} without its attention"),
        ({"block_configs": [{"attention": {"n_heads_in_group": 8, "num_sink_tokens": 4}}] * 4}, "block_configs has num_sink_tokens 4, which flashgen does not know"),
        ({"attn_type": "sparse"}, "attn_type is sparse: flashgen has no kernel for it"),
    ],
    ids=str,
)  # fmt: skip
def test_what_decides_and_is_null_or_unknown_is_no_default(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read(tmp_path, STRANGE | fields)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_part_whose_mask_no_name_tells_is_left_out(tmp_path: Path) -> None:
    found = read(tmp_path, STRANGE | {"odd_config": {k: STRANGE[k] for k in list(STRANGE)[1:]}})
    assert "odd_config: no field says whether its mask is causal: it is left out" in found.notes


@pytest.mark.parametrize("part", ["vision_config", "audio_config", "speech_config"])
def test_a_part_without_known_heads_is_named(tmp_path: Path, part: str) -> None:
    found = read(tmp_path, STRANGE | {part: {"head_counts": [3, 6], "dim_embed": [96, 192]}})
    assert any(note.startswith(f"{part} names none of num_attention_heads") for note in found.notes)


# ---------------------------------------------------------------- what transformers says


def test_null_means_what_the_class_says(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = read(tmp_path, STRANGE | {"model_type": "llama", "num_key_value_heads": None})
    assert {piece.problem.group for piece in found.pieces} == {1}
    assert found.notes == ()


def test_encoders_that_fill_masks_are_no_decoders() -> None:
    """Each is in SEES_ALL, has two sides, or is refused."""
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    for name in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        if name in SEES_ALL:
            continue
        try:
            masks = {each.mask for each in layers_of({"model_type": name})}
        except InvalidArgument:
            continue
        assert masks in (set(), {"none"}, {"none", "causal"}), name
