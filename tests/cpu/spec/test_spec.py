"""AttentionSpec, Problem, buckets: what is asked, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from flashgen.errors import InvalidArgument
from flashgen.inputs.from_call import check_scale, diagonal_of, from_tensors
from flashgen.spec import problem as problems
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.features import FEATURE_WORDS
from flashgen.spec.problem import (
    BUCKETS,
    Problem,
    bucket_of,
    flops,
    sequences_of,
    workload,
)
from flashgen.spec.vocabulary import (
    DECODING,
    Direction,
    padded,
    parse_dtype,
)
from tests.makers import make_spec


def test_names_are_distinct_over_all_fields() -> None:
    specs = [
        make_spec(dtype, d, mask, head_dim_v=dv)
        for dtype, d, dv, mask in itertools.product(
            ("float16", "bfloat16", "float32"), (64, 128), (64, 96), ("none", "causal")
        )
    ]
    specs.append(make_spec("float32", precision="tf32"))
    specs += [make_spec("float16", 64, bias=bias) for bias in ("additive", "boolean")]
    flags = [row for row in FEATURE_WORDS.values() if row.value is True]
    specs += [make_spec("float16", 64, row.mask or "none", **{row.field: True}) for row in flags]
    others = [each for each in get_args(Direction)[1:] if each not in DECODING]
    specs += [with_bias().for_direction(direction) for direction in others]
    cached = make_spec("bfloat16", 64, "causal", direction="decode")
    specs += [cached, dataclasses.replace(cached, paged=True)]
    specs += [
        dataclasses.replace(cached, **{flag: True}) for flag in ("indexed", "leftpad", "sink")
    ]
    specs += [dataclasses.replace(cached, kv_dtype=kv) for kv in ("float8_e4m3", "int8")]
    in_pages = dataclasses.replace(cached, paged=True, kv_dtype="int8")
    specs += [in_pages, dataclasses.replace(in_pages, kv_scales="page")]
    specs += [cached.for_direction(direction) for direction in ("combine", "append")]
    specs.append(dataclasses.replace(specs[-1], rotary="halves"))
    assert len({spec.name for spec in specs}) == len(specs)
    assert make_spec(head_dim=192, head_dim_v=128, mask="causal").name == "fwd_bf16_d192v128_causal"


def with_bias(**fields: Any) -> AttentionSpec:
    return make_spec("bfloat16", 128, "causal", bias="additive", **fields)


def test_names_say_direction_and_features() -> None:
    spec = with_bias(dropout=True, alibi=True)
    assert spec.name == "fwd_bf16_d128_causal_bias_alibi_dropout"
    dkv = make_spec("bfloat16", 128, "causal").for_direction("backward_dkv")
    assert dkv.name == "bwd_dkv_bf16_d128_causal"


def test_feature_words_turn_features_on() -> None:
    plain = make_spec("bfloat16", 64)
    spec = plain.with_features(["window", "softcap", "sink", "alibi", "dropout", "boolean-mask"])
    assert spec.name == "fwd_bf16_d64_boolmask_alibi_dropout_window_softcap_sink"
    assert plain.with_features(spec.feature_words) == spec
    assert plain.feature_words == ()
    assert not plain.featured
    for word, row in FEATURE_WORDS.items():
        one = dataclasses.replace(plain, mask=row.mask or "none").with_features([word])
        assert one.featured
        assert one.feature_words == (word,)
    with pytest.raises(InvalidArgument, match=r"--feature must be one of .*softcap.*: got .cap."):
        plain.with_features(["cap"])
    with pytest.raises(InvalidArgument, match="one of bias and boolean-mask"):
        plain.with_features(["bias", "boolean-mask"])


def test_a_sink_is_the_forwards_alone() -> None:
    """A backward kernel has it in LSE: the plain one, tuned, serves."""
    spec = make_spec("bfloat16", 64, "causal", sink=True)
    assert spec.for_direction("backward_dkv") == make_spec("bfloat16", 64, "causal").for_direction(
        "backward_dkv"
    )
    assert spec.for_direction("forward") == spec


def test_a_spec_has_one_of_each_direction() -> None:
    spec = make_spec("float32", 64, "causal", head_dim_v=96, precision="tf32", dropout=True)
    assert spec.for_direction("backward_dq").for_direction("forward") == spec
    delta = spec.for_direction("backward_delta")
    assert delta == make_spec("float32", 96, direction="backward_delta")


@pytest.mark.parametrize("direction", [d for d in get_args(Direction) if d not in DECODING])
def test_flops_by_direction(direction: Any) -> None:
    """A product of (Sq x d) and (d x Sk) is 2 Sq Sk d; a causal mask hides half of a square."""
    problem = Problem(batch=2, heads=3, kv_heads=3, seq_q=100, seq_k=200)
    products = {
        "forward": 2,
        "backward_dkv": 4,
        "backward_dq": 3,
        "backward_fused": 5,
        "backward_dbias": 2,
        "backward_ds": 4,
        "backward_dq_of_ds": 1,
    }
    spec = with_bias().for_direction(direction)
    expected = products.get(direction, 0) * 2 * 3 * 2 * 100 * 200 * 128 * (1 - 100 / 400)
    assert flops(spec, problem) == (expected or 2 * 2 * 3 * 100 * 128)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"direction": "sideways"}, "direction"),
        ({"bias": "some"}, "bias"),
        ({"dropout": 1}, "dropout"),
        ({"alibi": "yes"}, "alibi"),
        ({"window": 128}, "window"),
        ({"softcap": 1.0}, "softcap"),
        ({"direction": "backward_dq", "sink": True}, "sink"),
        ({"direction": "backward_delta", "softcap": True}, "backward_delta"),
        ({"direction": "backward_dbias"}, "bias"),
        ({"direction": "backward_dbias", "bias": "boolean"}, "bias"),
        ({"direction": "backward_delta", "mask": "causal"}, "backward_delta"),
        ({"direction": "backward_delta", "dropout": True}, "backward_delta"),
        ({"direction": "backward_delta", "head_dim_v": 128}, "backward_delta"),
        ({"dtype": "float64"}, "dtype"),
        ({"head_dim": 12}, "head_dim"),
        ({"head_dim": 520}, "head_dim"),
        ({"head_dim": 68}, "head_dim"),
        ({"head_dim_v": 8}, "head_dim_v"),
        ({"mask": "window"}, "mask"),
        ({"precision": "tf32"}, "precision"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        make_spec(**fields)  # type: ignore[arg-type]


def test_dtype_has_two_spellings_and_no_third() -> None:
    assert parse_dtype("bf16") == parse_dtype("bfloat16") == "bfloat16"
    with pytest.raises(InvalidArgument, match="fp8"):
        parse_dtype("fp8")


def test_padded_head_dims() -> None:
    assert [padded(d) for d in (16, 24, 40, 64, 80, 96, 192, 256)] == [
        16,
        32,
        64,
        64,
        128,
        128,
        256,
        256,
    ]


def test_buckets_cover_every_length_once() -> None:
    for seq in (0, 1, 1023, 1024, 4095, 4096, 16383, 16384, 1 << 24):
        assert sum(max(seq, 1) in bucket for bucket in BUCKETS) == 1
        assert max(seq, 1) in bucket_of(seq)


def test_workload_is_the_papers_setting() -> None:
    for seq in (512, 4096, 16384):
        problem = workload(make_spec(head_dim=128), seq)
        assert problem.batch * problem.seq_q == 16384
        assert problem.heads * 128 == 2048
    assert workload(make_spec(), 65536).batch == 1
    full = flops(make_spec(head_dim=128), workload(make_spec(head_dim=128), 4096))
    assert full == 4 * 16384 * 4096 * 2048
    with pytest.raises(InvalidArgument, match="seq"):
        workload(make_spec(), 0)


def test_packed_sequences_are_mixed_and_as_many_tokens() -> None:
    packed = make_spec(head_dim=128, mask="causal", varlen=True)
    for seq in (512, 2048, 8192, 16384):
        problem = workload(packed, seq)
        lengths = [each.seq_k for each in sequences_of(packed, problem)]
        assert lengths[0] == max(lengths) == seq
        assert len(set(lengths)) == problem.batch >= 4
        assert min(lengths) >= seq / 16
        assert 16384 <= sum(lengths) <= 2.5 * 16384
        assert (
            sum(length % 64 == 0 for length in lengths) <= len(lengths) / 4
        )  # no tile is favoured
    paged = workload(replace(packed, paged=True), 8192)
    assert (paged.seq_q, paged.seq_k, paged.batch) == (2048, 8192, 4)
    plain = make_spec(head_dim=128)
    assert sequences_of(plain, workload(plain, 512)) == (workload(plain, 512),)


@pytest.mark.parametrize("field", ["batch", "heads", "kv_heads", "seq_q", "seq_k"])
def test_a_negative_size_is_named(field: str) -> None:
    sizes = {"batch": 1, "heads": 2, "kv_heads": 2, "seq_q": 3, "seq_k": 4, field: -1}
    with pytest.raises(InvalidArgument, match=field):
        Problem(**sizes)


def test_heads_that_kv_heads_do_not_divide_are_named() -> None:
    with pytest.raises(InvalidArgument, match="multiple of kv_heads: got 3 and 2"):
        Problem(batch=1, heads=3, kv_heads=2, seq_q=1, seq_k=1)


@pytest.mark.parametrize(("seq_q", "seq_k"), [(10, 10), (3, 10), (12, 9), (4, 4)])
def test_operations_in_chunks_are_those_of_pairs_in_one(
    seq_q: int, seq_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problems, "TUNED_CHUNK", 4)
    first = max(seq_k - seq_q, 0)
    pairs = [(i, j) for i in range(first, seq_k) for j in range(i + 1) if i // 4 == j // 4]
    problem = Problem(batch=1, heads=1, kv_heads=1, seq_q=seq_q, seq_k=seq_k)
    found = flops(make_spec(head_dim=64, mask="causal", chunk=True), problem)
    assert found == pytest.approx(4 * 64 * len(pairs))


def test_diagonals() -> None:
    assert diagonal_of(False, 3, 5) is None
    assert diagonal_of(True, 3, 5) == diagonal_of("bottom_right", 3, 5) == 2
    assert diagonal_of("top_left", 3, 5) == 0
    with pytest.raises(InvalidArgument, match="causal"):
        diagonal_of("left", 3, 5)


def test_scale_must_be_finite() -> None:
    assert check_scale(None, 64) == 0.125
    assert check_scale(-2.0, 64) == -2.0
    assert check_scale(0, 64) == 0.0
    for bad in (float("nan"), float("inf"), 1e-50, -1e39):
        with pytest.raises(InvalidArgument, match="scale"):
            check_scale(bad, 64)


def tensors(**changes: object) -> dict[str, torch.Tensor]:
    shapes = {"q": (2, 4, 5, 64), "k": (2, 2, 7, 64), "v": (2, 2, 7, 32)} | changes
    return {name: torch.zeros(shape) for name, shape in shapes.items()}  # type: ignore[arg-type]


def test_from_tensors_reads_spec_and_problem() -> None:
    spec, problem = from_tensors(**tensors(), causal=True, precision="tf32")
    assert spec == make_spec("float32", 64, "causal", head_dim_v=32, precision="tf32")
    assert problem == Problem(batch=2, heads=4, kv_heads=2, seq_q=5, seq_k=7)
    assert problem.group == 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"q": (4, 5, 64)}, "q must have shape"),
        ({"k": (3, 2, 7, 64)}, "k must have the batch"),
        ({"k": (2, 2, 8, 64)}, "v must have the heads and length"),
        ({"k": (2, 2, 7, 32)}, "k must have the head_dim"),
        ({"q": (2, 3, 5, 64)}, "heads"),
        ({"q": (2, 4, 5, 20), "k": (2, 2, 7, 20)}, "head_dim of q"),
        ({"v": (2, 2, 7, 300)}, "head_dim of v"),
    ],
)
def test_tensors_that_do_not_fit_are_named(changes: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        from_tensors(**tensors(**changes), causal=False)


def test_mixed_dtypes_and_devices_are_named() -> None:
    given = tensors()
    with pytest.raises(InvalidArgument, match="v must have the dtype"):
        from_tensors(**given | {"v": given["v"].half()}, causal=False)
    with pytest.raises(InvalidArgument, match="k must be on the device"):
        from_tensors(**given | {"k": given["k"].to("meta")}, causal=False)
    with pytest.raises(InvalidArgument, match="float64"):
        from_tensors(**{n: t.double() for n, t in given.items()}, causal=False)
    with pytest.raises(InvalidArgument, match="precision"):
        from_tensors(**given, causal=False, precision="fp8")


def test_the_queries_of_a_decode_see_nearly_all_keys() -> None:
    problem = Problem(batch=2, heads=4, kv_heads=2, seq_q=1, seq_k=100)
    decode = make_spec("bfloat16", 128, "causal", direction="decode")
    assert flops(decode, problem) == pytest.approx(2 * 2 * 2 * 4 * 100 * 128, rel=0.01)
    assert flops(decode.for_direction("combine"), problem) == 2 * 4 * 100 * 128 * 2
    assert flops(decode.for_direction("append"), problem) == 0


def test_decoding_runs_many_sequences_of_few_queries() -> None:
    decode = make_spec("bfloat16", 128, direction="decode")
    assert workload(decode, 4096) == Problem(batch=64, heads=32, kv_heads=8, seq_q=1, seq_k=4096)
    assert workload(dataclasses.replace(decode, mask="causal"), 4096).seq_q == 4


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"direction": "forward", "paged": True}, "paged needs direction decode or append"),
        ({"direction": "combine", "paged": True}, "paged needs"),
        ({"direction": "decode", "rotary": "halves"}, "rotary halves needs direction append"),
        (
            {"direction": "decode", "dropout": True},
            "dropout needs attention or its gradients: got direction decode",
        ),
        ({"direction": "forward", "varlen": True, "fp8": True}, "varlen excludes fp8"),
        ({"direction": "append", "varlen": True}, "kernels without scores have no queries"),
        *(
            ({"direction": "decode", "varlen": True, **other}, "decode with varlen excludes")
            for other in ({"indexed": True}, {"leftpad": True}, {"invariant": True})
        ),
        ({"direction": "combine", "sink": True}, "sink needs direction forward or decode"),
        (
            {"direction": "append", "window": True},
            "append has no scores, so it takes no feature",
        ),
        ({"direction": "append", "leftpad": True}, "leftpad needs direction decode"),
        ({"direction": "decode", "indexed": True, "paged": True}, "indexed excludes paged"),
        (
            {"direction": "forward", "indexed": True},
            "indexed needs direction decode or append",
        ),
        (
            {"direction": "forward", "kv_dtype": "int8"},
            "kv_dtype int8 needs direction decode or append",
        ),
        (
            {"direction": "decode", "dtype": "float32", "kv_dtype": "int8"},
            "needs dtype float16 or bfloat16",
        ),
        (
            {"direction": "decode", "kv_dtype": "fp8"},
            "kv_dtype must be one of same, float8_e4m3, int8",
        ),
        (
            {"direction": "decode", "kv_dtype": "int8", "kv_scales": "page"},
            "kv_scales page needs paged",
        ),
        (
            {"direction": "append", "paged": True, "kv_scales": "page"},
            "kv_scales page needs paged and an 8-bit",
        ),
        (
            {"direction": "backward_dq", "fp8": True},
            "fp8 needs direction forward, because it has no gradient",
        ),
        (
            {"direction": "forward", "dtype": "float32", "fp8": True},
            "fp8 needs dtype float16 or bfloat16",
        ),
        ({"direction": "combine", "mask": "causal"}, "combine has no scores"),
        ({"direction": "append", "dtype": "float32", "precision": "tf32"}, "append has no scores"),
        ({"direction": "decode", "paged": 1}, "paged must be true or false"),
    ],
)
def test_what_kernels_of_a_cache_cannot_be_asked(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidArgument, match=what):
        make_spec(**fields)
