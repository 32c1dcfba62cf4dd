"""Features: what a call may bring, and what it is told otherwise."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.errors import InvalidArgument
from flashgen.inputs.features import PLAIN, TENSORS, Features, Fp8, tensors_of_heads, window_of
from flashgen.inputs.from_call import from_tensors
from flashgen.inputs.packed import from_bounds
from flashgen.kernels.arguments import feature_arguments
from flashgen.kernels.launch_cache import Append
from flashgen.runtime.decode import CacheArguments, check_call
from flashgen.runtime.kv_cache import append
from flashgen.schedules.config import LONGEST_NAME, kernel_name
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.features import PER_HEAD
from tests.makers import make_config, make_spec


def spec_of(**features: Any) -> AttentionSpec:
    q, k = torch.zeros(2, 4, 5, 32), torch.zeros(2, 2, 7, 32)
    return from_tensors(q, k, k, causal=True, features=Features(**features))[0]


RNG = torch.tensor([1, 2])


def test_the_spec_names_what_the_call_brings() -> None:
    assert spec_of() == make_spec("float32", 32, "causal")
    assert spec_of(bias=torch.zeros(1, 4, 1, 7)).bias == "additive"
    assert spec_of(bias=torch.ones(2, 1, 5, 7, dtype=torch.bool)).bias == "boolean"
    assert spec_of(slopes=torch.ones(4)).alibi
    assert spec_of(slopes=torch.ones(2, 4)).alibi
    assert spec_of(dropout_p=0.1, rng=RNG).dropout
    assert not spec_of(dropout_p=0.0, rng=RNG).dropout
    assert spec_of(window=(3, -1)).window
    assert spec_of(softcap=30.0).softcap
    assert spec_of(sinks=torch.zeros(4)).sink
    names = [spec_of(**given).name for given in ({"window": (0, 0)}, {"softcap": 1.0})]
    assert names == ["fwd_fp32_d32_causal_window", "fwd_fp32_d32_causal_softcap"]
    assert spec_of(sinks=torch.zeros(4)).name == "fwd_fp32_d32_causal_sink"


@pytest.mark.parametrize(
    ("features", "named"),
    [
        ({"dropout_p": 1.5, "rng": RNG}, "dropout_p"),
        ({"dropout_p": 0.5}, "rng"),
        ({"dropout_p": 0.5, "rng": torch.tensor([1])}, "rng"),
        ({"dropout_p": 0.5, "rng": torch.tensor([1.0, 2.0])}, "rng"),
        ({"bias": torch.zeros(1, 4, 5, 6)}, "bias"),
        ({"bias": torch.zeros(5, 7)}, "bias"),
        ({"bias": torch.zeros(1, 1, 5, 7, dtype=torch.float64)}, "bias"),
        ({"slopes": torch.ones(3)}, "slopes"),
        ({"slopes": torch.ones(4, dtype=torch.float16)}, "slopes"),
        ({"slopes": torch.ones(4, device="meta")}, "slopes"),
        ({"window": (-1, -1)}, "window"),
        ({"window": (-2, 0)}, "window"),
        ({"softcap": -1.0}, "softcap"),
        ({"softcap": float("nan")}, "softcap"),
        ({"sinks": torch.zeros(3)}, "sinks"),
        ({"sinks": torch.zeros(4, 1)}, "sinks"),
        ({"sinks": torch.zeros(4, dtype=torch.float16)}, "sinks"),
        ({"sinks": torch.zeros(4, device="meta")}, "sinks"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(features: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        spec_of(**features)


def test_threshold_is_the_probability() -> None:
    for p in (0.0, 0.25, 0.5, 1.0):
        threshold = Features(dropout_p=p, rng=RNG).dropout_threshold
        assert -(2**31) <= threshold < 2**31
        assert abs((threshold + 2**31) / 2**32 - p) < 2**-31


@pytest.mark.parametrize(
    ("given", "causal", "found"),
    [
        (None, False, None),
        ((3, 2), False, (3, 2)),
        ([3, None], False, (3, -1)),
        ((None, -1), False, None),
        ((0, 0), True, (0, -1)),  # the causal diagonal ends the right side
        ((-1, 5), True, None),
    ],
)
def test_a_window_is_normal(given: Any, causal: bool, found: Any) -> None:
    assert window_of(given, causal=causal) == found


@pytest.mark.parametrize("given", [3, (1,), (1, 2, 3), (1.5, 0), (-2, 0), (True, 0), "ab"])
def test_what_is_no_window_is_named(given: Any) -> None:
    with pytest.raises(InvalidArgument, match="window must be"):
        window_of(given)


def test_a_window_reaches_no_further_than_the_lengths() -> None:
    """So that rows, keys and bounds add up in 32 bits."""
    assert Features(window=(2**40, -1)).bounds(5, 7) == (12, 12)
    assert Features(window=(3, 0)).bounds(5, 7) == (3, 0)


def test_numbers_of_heads_are_found_by_the_names_in_their_rows() -> None:
    for name, row in PER_HEAD.items():
        assert row.arguments[0].name == f"{name}_ptr"
    given = [torch.ones(4) for _ in PER_HEAD]
    found = dict(zip(TENSORS, tensors_of_heads(given), strict=True))
    assert [found[name] is x for name, x in zip(PER_HEAD, given, strict=True)] == [True] * len(
        given
    )
    assert sum(x is not None for x in found.values()) == len(given)
    assert tensors_of_heads(()) == (None,) * len(TENSORS)


def test_plain_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAIN.dropout_p = 0.5  # type: ignore[misc]


def negated(x: Tensor) -> Tensor:
    """The same values, the memory holding their negatives, as of torch.complex(a, b).conj().imag."""
    return torch._neg_view(-x)


def plain(tensors: list[Any], count: int) -> None:
    found = [x for x in tensors if isinstance(x, Tensor)]
    assert len(found) == count
    assert not any(x.is_neg() for x in found)


def test_kernels_are_handed_memory_that_holds_what_is_meant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of every tensor beside q, k and v."""

    factors = {name: negated(torch.ones(2, 2)) for name in ("q_descale", "k_descale", "v_descale")}
    counts = negated(torch.tensor([0, 2, 5]))
    packed = from_bounds(
        counts, counts, 3, 3, seqused_q=counts[1:], page_size=4,
        block_table=negated(torch.ones(2, 2, dtype=torch.int32)),
    )  # fmt: skip
    features = Features(
        bias=negated(torch.ones(1, 1, 5, 5)), slopes=negated(torch.ones(4)),
        sinks=negated(torch.ones(4)), fp8=Fp8(**factors), sequences=packed,
    )  # fmt: skip
    found = feature_arguments(features, (2, 4, 5, 5), torch.device("cpu"))
    plain(list(found.values()), 3 + 3 + 4 + 1)

    numbers = negated(torch.ones(2, dtype=torch.int32))
    q, k = torch.zeros(2, 4, 1, 16).half(), torch.zeros(2, 2, 8, 16).to(torch.int8)
    scales = {name: negated(torch.ones(2)) for name in ("k_scale", "v_scale")}
    cache = check_call(
        q,
        k,
        k,
        CacheArguments(lengths=numbers, cache_batch_idx=numbers, cache_leftpad=numbers, **scales),
    )
    plain([cache.lengths, cache.rows, cache.leftpad, cache.k_scale, cache.v_scale], 5)
    pool = k.transpose(1, 2)
    beside = CacheArguments(lengths=numbers, block_table=numbers[:, None], **scales)
    cache = check_call(q, pool, pool, beside)
    plain([cache.block_table], 1)

    asked: list[Append] = []
    monkeypatch.setattr(
        "flashgen.runtime.appender.by_torch", lambda call, rotary: asked.append(call)
    )
    new, turns = torch.zeros(2, 2, 1, 16), negated(torch.ones(8, 4))
    append(*torch.zeros(2, 2, 2, 8, 16), new, new, numbers, q=new, cos=turns, sin=turns)
    (call,) = asked
    assert call.rotation is not None
    plain([call.cache.lengths, call.rotation.cos, call.rotation.sin], 3)


def test_a_kernel_has_the_longest_name_that_is_short_enough() -> None:
    plain = make_config(64, 64)
    wide = make_config(
        br=128, bc=32, num_warps=8, num_stages=3, order="longest_first", whole_rows=True
    )
    both = make_spec(head_dim=256, mask="causal", window=True, softcap=True)
    longer = replace(plain, order="longest_first")
    assert kernel_name(both, plain) == "fwd_bf16_d256_causal_window_softcap_br64_bc64_w4_s2_fa2_ptr"
    assert kernel_name(both, longer) == "fwd_bf16_d256_causal_win_cap_br64_bc64_w4_s2_fa2_ptr_lpt"
    assert kernel_name(both, wide) == "fwd_bf16_d256_caus_win_cap_br128_bc32_w8_s3_fa2_ptr_lpt_rows"
    assert len(kernel_name(both, wide)) == LONGEST_NAME
