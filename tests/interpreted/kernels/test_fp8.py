"""The fp8 forward against float64 over what its operands hold: alone, with features, and mutants."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashgen.inputs.features import Features, Fp8
from flashgen.reference import attention as reference
from flashgen.runtime import fp8
from flashgen.schedules.defaults import default_config, default_spec
from flashgen.spec.attention import AttentionSpec
from tests.makers import make_config, make_spec
from tests.nasty_cases import nasty_cases
from tests.proving import mutant_passes, prove, sampled
from tests.serving import record_directions, serve

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def fp8_spec(
    dtype: str = "bfloat16", dim: int = 32, mask: str = "none", **fields: Any
) -> AttentionSpec:
    return make_spec(dtype, dim, mask, fp8=True, **fields)


@pytest.mark.parametrize(("dtype", "mask"), [("float16", "causal"), ("bfloat16", "none")])
def test_nasty_cases(dtype: str, mask: str, seed: int) -> None:
    prove(fp8_spec(dtype, 32, mask), make_config(32, 32), seed, nasty_cases(32, 32))


@pytest.mark.parametrize("loads", ["pointer", "descriptor"])
def test_what_tuning_checks(loads: Any, seed: int) -> None:
    prove(fp8_spec(dim=64, mask="causal", head_dim_v=48), make_config(32, 64, loads=loads), seed)


@pytest.mark.parametrize(
    "on",
    [
        {"window": True, "softcap": True}, {"sink": True}, {"bias": "additive", "alibi": True},
        {"dropout": True, "bias": "boolean"},
    ],
    ids=lambda on: "-".join(on),
)  # fmt: skip
def test_with_features(on: dict[str, Any], seed: int) -> None:
    prove(fp8_spec("float16", 32, "causal", **on), make_config(32, 32), seed, step=2)


def test_default_kernels_take_the_true_head_dims(seed: int) -> None:
    asked = fp8_spec(dim=16, head_dim_v=24)
    assert default_spec(asked).head_dim == 32  # a product is 32 deep
    prove(default_spec(asked), default_config(asked), seed)


MUTANTS = {
    "factor of Q forgotten": ("(q_scale * k_scale)", "k_scale"),
    "factor of K forgotten": ("(q_scale * k_scale)", "q_scale"),
    "factor of V forgotten": ("o = [o[n] * v_scale", "o = [o[n]"),
    "factor of another head": ("kv_head * stride_v_descale_h", "0 * stride_v_descale_h"),
    "factor of another batch": ("batch * stride_k_descale_b", "0 * stride_k_descale_b"),
    "P not scaled": ("(new_max - P_EXPONENT)[:, None]", "new_max[:, None]"),
    "LSE with the scale of P": ("row_max - P_EXPONENT + tl.log2(row_sum)", "row_max + tl.log2(row_sum)"),
    "O by q's type": ("o[n].to(o_ptr.dtype.element_ty)", "o[n].to(q[0].dtype)"),
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(MUTANTS))
def test_mutant_is_caught(name: str) -> None:
    line, broken = MUTANTS[name]
    assert not mutant_passes(fp8_spec(dim=32), make_config(32, 32), line, broken)


def test_the_sink_is_counted_beside_the_scaled_sum() -> None:
    spec, config = fp8_spec(dim=32, sink=True), make_config(32, 32)
    line = "tl.exp2(sink - (new_max - P_EXPONENT))"
    assert not mutant_passes(spec, config, line, "tl.exp2(sink - new_max)")


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
def test_the_public_call(out_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel, by torch, and by the oracle; two out_dtypes are two kernels; scales below 0."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (
        torch.randn(2, heads, 40, 32, generator=generator).to(torch.float8_e4m3fn)
        for heads in (4, 2, 2)
    )
    options: dict[str, Any] = {
        "q_descale": torch.tensor(0.7), "k_descale": torch.tensor([0.5, 1.5]),
        "v_descale": torch.tensor([[0.5, 2.0], [1.0, 3.0]]), "causal": True, "out_dtype": out_dtype,
    }  # fmt: skip
    features = Features(
        fp8=Fp8(
            q_descale=options["q_descale"].expand(2, 2), k_descale=options["k_descale"].expand(2, 2),
            v_descale=options["v_descale"], dtype=str(out_dtype).removeprefix("torch."),
        )
    )  # fmt: skip
    launched = record_directions(monkeypatch)
    serve(monkeypatch)
    for scale in (0.2, -0.2):
        o, lse = fp8.attention(q, k, v, scale=scale, **options)
        assert o.dtype == out_dtype
        verdict = reference.judge(o, lse, q, k, v, scale=scale, diagonal=0, features=features)
        assert verdict.passed, verdict
    assert launched == ["forward", "forward"]
    monkeypatch.delenv("FLASHGEN_GPU")
    by_torch, of_torch = fp8.attention(q, k, v, scale=-0.2, **options)
    torch.testing.assert_close(lse, of_torch, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(o.float(), by_torch.float(), rtol=0.1, atol=0.1)
