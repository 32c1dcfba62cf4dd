"""Schedule ampere as the compiler makes it: copies of 16 bytes, no shuffles of P, few spills; and what it is estimated at."""

from __future__ import annotations

from typing import Any

import pytest
import triton

from flashgen.compile import sass
from flashgen.compile.compiler import target_of
from flashgen.compile.loops import main_bodies
from flashgen.compile.verdict import judge
from flashgen.kernels.loader import load_text
from flashgen.kernels.render import render
from flashgen.kernels.signature import compile_signature
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.legality import shared_bound_bytes, why_illegal
from flashgen.schedules.outcome import Status
from flashgen.schedules.space import legal_configs, seed_configs
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS, Gpu
from tests.compiled import compile_one, cubin_of
from tests.cpu.estimate.test_whole_rows import tflops
from tests.makers import each, make_config, make_spec

A100, RTX_4090 = TARGETS["nvidia_a100_sxm4_80gb"], TARGETS["nvidia_geforce_rtx_4090"]
pinned = pytest.mark.skipif(
    triton.__version__ != "3.7.1", reason="facts of the pinned Triton, 3.7.1"
)


def ampere(spec: AttentionSpec, br: int, bc: int, **fields: Any) -> KernelConfig:
    order = "longest_first" if spec.causal else "plain"
    fields = {"num_stages": 1, "order": order} | fields
    return make_config(br, bc, num_warps=br // 16, schedule="ampere", **fields)


@pinned
@pytest.mark.parametrize(
    ("gpu", "head_dim", "mask", "br", "bc", "least_tflops"),
    [
        (A100, 64, "causal", 64, 32, 0),
        *each([
            (A100, 256, "none", 128, 64, 190), (A100, 256, "causal", 128, 64, 190),
            (A100, 192, "causal", 64, 64, 185), (A100, 128, "causal", 128, 128, 200),
            (RTX_4090, 256, "none", 128, 32, 145), (RTX_4090, 256, "causal", 128, 32, 145),
        ]),
    ],
    ids=lambda value: getattr(value, "slug", str(value)),
)  # fmt: skip
def test_facts(gpu: Gpu, head_dim: int, mask: Any, br: int, bc: int, least_tflops: int) -> None:
    spec = make_spec("bfloat16", head_dim, mask)
    config = ampere(spec, br, bc)
    assert why_illegal(spec, config, gpu) is None
    assert config in seed_configs(spec, gpu)
    compiled = compile_one(spec, config, gpu.arch)
    assert judge(compiled, spec, config, gpu) == (Status.OK, "")
    assert compiled.shared_bytes == shared_bound_bytes(spec, config, gpu)
    (steady,) = main_bodies(sass.disassemble(cubin_of(compiled)))
    bases = [i.base for i in steady]
    # K and V, of which a thread copies 16 bytes at a time.
    assert bases.count("LDGSTS") == bc * 2 * head_dim * 2 // (16 * 32 * config.num_warps)
    # The maximum of two rows, of four lanes each; the sums wait.
    assert bases.count("SHFL") == 4
    assert bases.count("STS") == 0
    # All warps have K, then V.
    assert bases.count("BAR") == 2
    if least_tflops:
        assert tflops(spec, config, gpu) >= least_tflops


@pytest.mark.parametrize(
    ("spec", "config", "word"),
    [
        (make_spec("float32", 64), {}, "16 bits"),
        (make_spec("bfloat16", 64, dropout=True, window=True), {}, "features (dropout)"),
        (make_spec("bfloat16", 96), {}, "head dims 64"),
        (make_spec("bfloat16", 512), {}, "head dims 64"),
        (make_spec("bfloat16", 64), {"num_stages": 2}, "num_stages is 1"),
        (make_spec("bfloat16", 64), {"bc": 128}, "no more than rows"),
        (make_spec("bfloat16", 64), {"num_warps": 8}, "16 rows for each"),
        (make_spec("bfloat16", 64, "causal"), {"order": "grouped"}, "order grouped needs"),
        (make_spec("bfloat16", 64), {"whole_rows": True}, "schedule fa2"),
        (make_spec("bfloat16", 64, direction="backward_dq"), {}, "got ampere"),
    ],
    ids=["float32", "dropout", "d96", "d512", "stages", "keys", "warps", "order", "whole_rows", "dQ"],
)  # fmt: skip
def test_where_it_does_not_go(spec: AttentionSpec, config: dict[str, Any], word: str) -> None:
    fields = {"br": 64, "bc": 32, "num_warps": 4, "num_stages": 1, "schedule": "ampere"}
    asked = make_config(**fields | config)
    assert word in (why_illegal(spec, asked, A100) or "")


@pinned
def test_strides_that_are_multiples_of_8() -> None:
    """As a slice has them: Triton does not recognize them, and would refuse copies of 2 bytes."""
    from triton.experimental.gluon._runtime import GluonASTSource

    spec = make_spec("bfloat16", 64)
    config = ampere(spec, 64, 32)
    rendered = render(spec, config)
    kernel = load_text(rendered)
    signature = compile_signature(spec, config, kernel.arg_names)
    bases = {
        at: of for at, of in signature.attrs.items() if "stride" not in kernel.arg_names[at[0]]
    }
    source = GluonASTSource(kernel, signature.types, signature.constexprs, bases)
    built = triton.compile(source, target=target_of("sm_80"), options=config.launch_options(spec))
    copies = [i for i in sass.disassemble(built.asm["cubin"]).instructions if i.base == "LDGSTS"]
    assert copies
    assert all(i.opcode.endswith(".128") for i in copies)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_the_twin_of_an_invariant_kernel_is_of_its_class(dims: tuple[int, int]) -> None:
    spec = make_spec("bfloat16", dims[0], "causal", head_dim_v=dims[1], invariant=True)
    found = [c for c in legal_configs(spec, A100) if c.schedule == "ampere"]
    assert {config.bc for config in found} == {64}
    for config in found:
        assert why_illegal(spec, config.pointer_twin(spec), A100) is None


@pytest.mark.parametrize(
    "features",
    [
        {},
        {"window": True, "sink": True, "varlen": True, "paged": True},
        {"chunk": True, "alibi": True},
    ],
)
def test_who_has_it(features: dict[str, Any]) -> None:
    spec = make_spec("float16", 128, "causal", **features)
    for gpu in {gpu.arch: gpu for gpu in TARGETS.values()}.values():
        mma_sync = gpu.arch in ("sm_80", "sm_86", "sm_89", "sm_120", "sm_121")
        found = [c for c in legal_configs(spec, gpu) if c.schedule == "ampere"]
        assert bool(found) is mma_sync
        for config in found:
            assert config.executed
            assert why_illegal(spec, config.pointer_twin(spec), gpu) is None
            assert why_illegal(spec, config.textbook(spec), gpu) is None
