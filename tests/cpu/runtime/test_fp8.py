"""The fp8 forward without a GPU: what refuses it, by name; how right its floor is; its tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgen.errors import InvalidArgument, NoEstimate
from flashgen.estimate.trip_counts import grid
from flashgen.inputs.features import Features, Fp8
from flashgen.reference import attention as reference
from flashgen.runtime import fp8
from flashgen.runtime.eager import attention as eager
from flashgen.runtime.selection import Served, ladder, tune_command
from flashgen.schedules.defaults import default_config, featured_specs
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.space import legal_configs, seed_configs
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import Problem, bytes_moved, workload
from flashgen.table.entry import NO_EVIDENCE
from flashgen.table.table_file import dump, parse
from tests.makers import make_config, make_spec
from tests.tables import made_entry, made_table

SPEC = make_spec("bfloat16", 128, "causal", fp8=True)
BY_ARCH = {gpu.arch: gpu for gpu in TARGETS.values()}


@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "sm_100", "sm_120"])
def test_it_is_legal_from_sm_89_on(arch: str) -> None:
    gpu = BY_ARCH[arch]
    assert why_illegal(SPEC, default_config(SPEC), gpu) is None
    configs = legal_configs(SPEC, gpu)
    assert seed_configs(SPEC, gpu)
    assert {config.schedule for config in configs} == {"fa2"}
    assert min(config.bc for config in configs) == 32


@pytest.mark.parametrize(
    ("arch", "why"),
    [
        ("sm_80", "is sm_80"),
        ("gfx942", "e4m3fnuz, another type"),
        ("gfx950", "of whose float8_e4m3 matrix instructions flashgen has no variant"),
    ],
)
def test_it_is_refused_by_name_elsewhere(arch: str, why: str) -> None:
    reason = why_illegal(SPEC, default_config(SPEC), BY_ARCH[arch]) or ""
    assert "fp8 is made of the float8_e4m3 matrix instructions of sm_89 and later" in reason
    assert why in reason
    with pytest.raises(InvalidArgument, match=why):
        ladder(Served(archs={}, choices={}), "one", BY_ARCH[arch], SPEC, 100)


def test_products_are_32_deep() -> None:
    gpu = BY_ARCH["sm_90"]
    assert "32 deep" in (why_illegal(SPEC, make_config(64, 16), gpu) or "")
    narrow = make_spec("bfloat16", 40, fp8=True)
    by_descriptor = make_config(64, 64, loads="descriptor")
    assert "whole 16 bytes" in (why_illegal(narrow, by_descriptor, gpu) or "")
    narrow = make_spec("bfloat16", 16, fp8=True)
    assert "32 deep" in (why_illegal(narrow, make_config(64, 64), gpu) or "")


def test_its_table_and_its_command() -> None:
    entry = replace(
        made_entry(spec=SPEC, config=make_config(128, 64), source="untimed"), evidence=NO_EVIDENCE
    )
    table = made_table(entry)
    text = dump(table)
    assert "- untimed: fwd_bf16_d128_causal\n  fp8 " in text
    assert parse(text, Path(f"{table.gpu.slug}.yaml")) == table
    assert "--feature fp8" in tune_command(SPEC, 4096)


def test_generate_makes_forwards_alone() -> None:
    specs = list(featured_specs(("fp8",)))
    assert {spec.direction for spec in specs} == {"forward"}
    assert {spec.dtype for spec in specs} == {"float16", "bfloat16"}
    assert min(spec.head_dim for spec in specs) == 32


def test_no_estimate_and_its_bytes() -> None:
    with pytest.raises(NoEstimate, match="no rate in the model"):
        grid(SPEC, make_config(64, 64), workload(SPEC, 2048), TARGETS["nvidia_h200"], loops=2)
    problem = Problem(batch=1, heads=1, kv_heads=1, seq_q=10, seq_k=20)
    assert bytes_moved(SPEC, problem) == 10 * 128 + 2 * 20 * 128 + 10 * 128 * 2 + 10 * 4


def test_the_floor_is_that_of_p_in_e4m3() -> None:
    """Of many keys it falls as their errors cancel; it is far above a 16-bit forward's."""
    torch.manual_seed(0)
    floors = []
    for keys in (64, 1024):
        q, k, v = (torch.randn(1, 1, n, 64).to(torch.float8_e4m3fn) for n in (64, keys, keys))
        one = torch.ones(1, 1)
        features = Features(fp8=Fp8(q_descale=one, k_descale=one, v_descale=one))
        call: dict[str, Any] = {"scale": 0.125, "diagonal": None}
        exact, _ = eager.attention(q.double(), k.double(), v.double(), **call, features=features)
        ideal, _ = reference.rounded_attention(q, k, v, precision="ieee", **call, features=features)
        half, _ = reference.rounded_attention(
            q.bfloat16(), k.bfloat16(), v.bfloat16(), precision="ieee", **call
        )
        floors.append(float((ideal.double() - exact).abs().max()))
        assert floors[-1] > 3 * float((half.double() - exact).abs().max())
    assert floors[1] < floors[0] < 0.1


def test_a_row_that_met_another_maximum_passes() -> None:
    """The five worst of 300 draws of one row: by one maximum alone 2.4 to 3.6 floors."""
    worst = []
    for number in (28, 109, 132, 145, 213):
        torch.manual_seed(number)
        q, k, v = (torch.randn(1, 1, n, 32).to(torch.float8_e4m3fn) for n in (1, 67, 67))
        one = torch.ones(1, 1)
        features = Features(fp8=Fp8(q_descale=one, k_descale=one, v_descale=one, dtype="float16"))
        call: dict[str, Any] = {"scale": 0.18, "diagonal": None, "features": features}
        o, lse = reference.rounded_attention(q, k, v, precision="ieee", **call, maximum=0.4)
        worst.append(reference.judge(o, lse, q, k, v, **call).floors)
    assert max(worst) <= reference.FLOORS_ACCEPTED


Q = torch.randn(2, 4, 5, 32).to(torch.float8_e4m3fn)
K = torch.randn(2, 2, 9, 32).to(torch.float8_e4m3fn)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "halves": ({"q": Q.half(), "k": K.half(), "v": K.half()}, "q must be float8_e4m3fn: got float16"),
    "mixed": ({"k": K.half()}, "k must have the dtype of q"),
    "the other float8": ({"q": Q.to(torch.float8_e5m2), "k": K.to(torch.float8_e5m2), "v": K.to(torch.float8_e5m2)}, "q must be float8_e4m3fn"),
    "float32 O": ({"out_dtype": torch.float32}, "out_dtype must be bfloat16 or float16"),
    "factor of three heads": ({"k_descale": torch.ones(3)}, r"k_descale must be float32, one number or of shape \(2,\)"),
    "double factor": ({"v_descale": torch.ones(2).double()}, "v_descale must be float32"),
    "a number": ({"q_descale": 1.0}, "q_descale must be a tensor"),
    "rank": ({"q": Q[0]}, "q must have shape"),
    "window": ({"window": 3}, "window must be"),
    "bias": ({"bias": 3}, "bias must be a tensor: got int"),
    "slopes": ({"alibi_slopes": "x"}, "alibi_slopes must be a tensor: got str"),
    "sinks": ({"sinks": [1]}, "sinks must be a tensor: got list"),
    "a list for a dtype": ({"out_dtype": [1]}, "out_dtype must be bfloat16 or float16"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_misuse_is_named(name: str) -> None:
    change, sentence = REFUSED[name]
    arguments: dict[str, Any] = {"q": Q, "k": K, "v": K} | change
    with pytest.raises(InvalidArgument, match=sentence):
        fp8.attention(**arguments)


def test_cpu_tensors_are_computed_in_float32() -> None:
    o, lse = fp8.attention(Q, K, K, v_descale=torch.tensor(2.0), scale=0.1)
    s = 0.1 * Q.float() @ K.float().repeat_interleave(2, 1).mT
    expected = s.softmax(-1) @ (2.0 * K.float()).repeat_interleave(2, 1)
    torch.testing.assert_close(o, expected.bfloat16())
    torch.testing.assert_close(lse, s.logsumexp(-1))
