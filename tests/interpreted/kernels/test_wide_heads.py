"""Head dims above 256: forward and decode with V in parts, and gradients, against float64; mutants."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashgen.evaluate.check_cache import DecodeCase
from flashgen.runtime.varlen import attention_varlen
from flashgen.schedules.defaults import default_config, default_spec
from tests.makers import each, make_config, make_spec
from tests.proving import mutant_passes, prove, sampled
from tests.serving import serve

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize(
    "parts",
    [
        2,
        *(
            pytest.param(n, marks=pytest.mark.slow("make test proves a sample of it"))
            for n in (1, 4)
        ),
    ],
)
@pytest.mark.parametrize("direction", ["forward", "decode"])
def test_parts(direction: Any, parts: int, seed: int) -> None:
    spec = make_spec("bfloat16", 320, "causal", direction=direction, head_dim_v=400)
    prove(spec, make_config(16, 16, v_parts=parts), seed, step=2)


@pytest.mark.parametrize("direction", ["forward", "decode"])
def test_defaults_take_the_true_head_dims(direction: Any, seed: int) -> None:
    """V of 40 columns leaves the second part none."""
    asked = make_spec("float32", 264, direction=direction, head_dim_v=40)
    prove(default_spec(asked), default_config(asked), seed, step=2)


@pytest.mark.parametrize(
    "on",
    [
        {"window": True, "softcap": True, "sink": True}, {"bias": "additive", "alibi": True},
        {"kv_dtype": "float8_e4m3"}, {"paged": True, "kv_dtype": "int8", "kv_scales": "page"},
    ],
    ids=lambda on: "-".join(on),
)  # fmt: skip
def test_decode_with_features(on: dict[str, Any], seed: int) -> None:
    case = DecodeCase(lengths=(37, 0, 16), capacity=40, seq_q=3, group=2, splits=3)
    spec = make_spec("float16", 512, "causal", direction="decode", **on)
    prove(spec, make_config(16, 16, v_parts=2), seed, [case])


@pytest.mark.parametrize(
    "on", each([{"dropout": True, "sink": True}, {"fp8": True}], 2), ids=lambda on: "-".join(on)
)
def test_forward_with_features(on: dict[str, Any], seed: int) -> None:
    spec = make_spec("float16", 512, "causal", **on)
    prove(spec, make_config(32, 32, v_parts=4), seed, step=3)


@pytest.mark.parametrize("direction", ["combine", "append"])
def test_what_goes_with_decode(direction: Any, seed: int) -> None:
    prove(make_spec("bfloat16", 512, direction=direction), make_config(16, 16, num_stages=1), seed)


@pytest.mark.parametrize("parts", [2, 4])
def test_packed_sequences(parts: int, seed: int) -> None:
    """Places of no sequence are zeroed in every part."""
    spec = make_spec("bfloat16", 320, "causal", varlen=True, head_dim_v=400)
    prove(spec, make_config(16, 16, v_parts=parts), seed, step=2)


def test_packed_sequences_over_pages(seed: int) -> None:
    spec = make_spec("bfloat16", 512, "causal", varlen=True, paged=True, window=True)
    prove(spec, default_config(spec), seed, step=2)


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("direction", ["backward_delta", "backward_dkv", "backward_dq"])
def test_gradients(direction: Any, varlen: bool, seed: int) -> None:
    asked = make_spec("bfloat16", 320, "causal", head_dim_v=512, varlen=varlen)
    spec = default_spec(asked.for_direction(direction))
    prove(spec, default_config(spec), seed, step=2)


def test_the_gradient_of_a_bias(seed: int) -> None:
    spec = make_spec("float16", 512, direction="backward_dbias", bias="additive")
    prove(spec, default_config(spec), seed, step=2)


def test_a_mutant_that_zeroes_the_first_part_alone_is_caught() -> None:
    spec, config = make_spec("bfloat16", 128, varlen=True), make_config(16, 16, v_parts=2)
    line = "        dims_v = first_dim_v + tl.arange"
    assert not mutant_passes(spec, config, line, "        dims_v = tl.arange")


MUTANTS = {
    "the first part twice": ("tl.program_id(0) % V_PARTS * V_PART", "tl.program_id(0) % V_PARTS * 0"),
    "parts of other rows": ("tl.program_id(0) // V_PARTS", "tl.program_id(0) // 4 * 2"),
    "LSE of no part": ("(first_dim_v == 0)", "(first_dim_v < 0)"),
    "V of the first part": ("first_dim_v + tl.arange", "0 * first_dim_v + tl.arange"),
}  # fmt: skip


@pytest.mark.parametrize("direction", ["forward", "decode"])
@pytest.mark.parametrize("name", sampled(MUTANTS))
def test_mutant_is_caught(name: str, direction: Any) -> None:
    line, broken = MUTANTS[name]
    spec = make_spec("bfloat16", 128, "causal", direction=direction)
    assert not mutant_passes(spec, make_config(16, 16, v_parts=2), line, broken)


def test_the_dispatcher_serves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.randn(1, 2, 5, 296), torch.randn(1, 1, 90, 296)
    v = torch.randn(1, 1, 90, 512)
    dispatcher = serve(monkeypatch)
    assert "_v2" in str(dispatcher.explain(q, k, v, causal=True))
    o = dispatcher.attention(q, k, v, causal=True)
    by_decode = dispatcher.decode(q, k, v)
    monkeypatch.delenv("FLASHGEN_GPU")
    want = dispatcher.attention(q, k, v, causal=True)
    torch.testing.assert_close(o, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(by_decode, want, rtol=1e-4, atol=1e-4)


def test_packed_layers_of_gemma_4_have_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Head dim 512, from the public call to dQ, dK and dV."""
    generator = torch.Generator().manual_seed(5)
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)

    def run() -> list[torch.Tensor]:
        generator.manual_seed(5)
        x = [
            torch.randn(12, heads, 512, generator=generator).half().requires_grad_()
            for heads in (2, 1, 1)
        ]
        o = attention_varlen(*x, bounds, bounds, 7, 7, causal=True, scale=0.05)
        return [o, *torch.autograd.grad(o.float().sin().sum(), x)]

    serve(monkeypatch)
    found = run()
    monkeypatch.delenv("FLASHGEN_GPU")
    for x, want in zip(found, run(), strict=True):
        torch.testing.assert_close(x, want, rtol=0.02, atol=0.02)
