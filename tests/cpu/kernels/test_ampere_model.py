"""Schedule ampere's text, run by a model of Gluon: its copies, its tiles, its results."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from flashgen.evaluate.check import check_loaded
from flashgen.evaluate.gluon_model import GluonModel, Misuse
from flashgen.kernels.render import render
from flashgen.reference.cases import CheckCase
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig
from flashgen.spec.problem import Problem
from tests.makers import make_config, make_spec


def ampere(br: int = 64, bc: int = 32, order: str = "plain") -> KernelConfig:
    return make_config(br, bc, num_warps=br // 16, num_stages=1, schedule="ampere", order=order)


def case(seq_q: int, seq_k: int, **options: Any) -> CheckCase:
    heads = {"heads": options.pop("heads", 1), "kv_heads": options.pop("kv", 1)}
    problem = Problem(batch=options.pop("batch", 1), seq_q=seq_q, seq_k=seq_k, **heads)
    return CheckCase(problem=problem, **options)


CASES = (
    case(70, 139),
    case(65, 31, batch=2, heads=4, kv=2, layout="bshd"),
    case(64, 64, layout="sliced"),
    case(130, 40, alignment="top_left"),
    case(3, 97),
)


def run(spec: AttentionSpec, config: KernelConfig, line: str = "", broken: str = "") -> bool:
    """Whether the kernel passes the check, with a line broken or as it is."""
    rendered = render(spec, config)
    assert line in rendered.source, f"the mutated line is not in {rendered.name}: {line}"
    model = GluonModel(
        rendered.source.replace(line, broken) if line else rendered.source, rendered.text_name
    )
    return check_loaded(model, spec, config, cases=CASES, seed=5).passed


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize(
    ("dtype", "dims", "config"),
    [
        ("bfloat16", (256, 256), ampere(128, 64)),
        ("bfloat16", (64, 64), ampere()),
        ("float16", (128, 128), ampere(128, 128)),
        ("float16", (192, 128), ampere(64, 64)),
        ("bfloat16", (64, 192), ampere(128, 32)),
    ],
    ids=["d256", "d64", "d128", "d192x128", "d64x192"],
)
def test_results(dtype: str, dims: tuple[int, int], config: KernelConfig, mask: str) -> None:
    spec = make_spec(dtype, dims[0], mask, head_dim_v=dims[1])
    assert run(spec, config)
    if spec.causal:
        assert run(spec, dataclasses.replace(config, order="longest_first"))


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_all_short_lengths(mask: str) -> None:
    """Every way in which the masked tiles lie about the diagonal and the end of the keys."""
    spec = make_spec("bfloat16", 64, mask)
    rendered = render(spec, ampere())
    lengths = [(q, k) for q in (1, 31, 64, 65) for k in (1, 2, 31, 32, 33, 63, 64, 65, 96, 97, 130)]
    cases = [case(q, k, alignment=a) for q, k in lengths for a in ("bottom_right", "top_left")]
    model = GluonModel(rendered.source, rendered.text_name)
    result = check_loaded(model, spec, ampere(), cases=cases, seed=3)
    assert result.passed, result


D256, D256_CAUSAL = make_spec("bfloat16", 256), make_spec("bfloat16", 256, "causal")
WAIT = "        async_copy.wait_group(0)\n        v_ptrs +="
WRONG = {
    "scale": (D256, "p = gl.exp2(s * scale_log2e", "p = gl.exp2(s"),
    "rescale of a part": (D256, "acc2 * rescale[:, None])", "acc2)"),
    "part of K": (D256, "(k1, k_ptrs + 64,", "(k1, k_ptrs,"),
    "part of V": (D256, "(v3, v_ptrs + 192,", "(v3, v_ptrs,"),
    "part of O": (D256, "gl.store(o_ptrs + 128,", "gl.store(o_ptrs,"),
    "sum over the parts": (D256, "k3.permute((1, 0)).load(B_LAYOUT), s)", "k3.permute((1, 0)).load(B_LAYOUT), zeros)"),
    "step of V": (D256, "v_ptrs += BC * stride_vs", "v_ptrs += 0"),
    "step of K": (D256, "k_ptrs += BC * stride_ks", "k_ptrs += 0"),
    "ragged tile": (D256, "last_key = rows * 0 + (seq_k - 1)", "last_key = rows * 0 + seq_k"),
    "diagonal": (D256_CAUSAL, "gl.minimum(rows + diagonal, seq_k - 1)", "gl.minimum(rows + diagonal + 1, seq_k - 1)"),
    "keys that all rows see": (D256_CAUSAL, "row_start + diagonal + 1, 0", "row_start + diagonal + BC, 0"),
    "one masked tile fewer": (D256_CAUSAL, "BR // BC + 1", "BR // BC"),
    "rows without a key": (D256_CAUSAL, "gl.where(whole_sum == 0.0, 1.0, whole_sum)", "whole_sum"),
    "GQA": (D256, "kv_head = head // group", "kv_head = head * 0"),
    "sums of lanes": (D256, "gl.sum(row_sum, 1)", "gl.max(row_sum, 1)"),
    "V is awaited": (D256, WAIT, "        v_ptrs +="),
    "K is awaited": (D256, "        async_copy.wait_group(0)\n        copy_async(v0", "        copy_async(v0"),
    "the last copy is awaited": (D256, "    async_copy.wait_group(0)\n    # A row", "    # A row"),
    "V takes the place of K": (D256, "(v1, v_ptrs", "(k1, v_ptrs"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", WRONG)
def test_a_broken_text_is_found(name: str) -> None:
    spec, line, broken = WRONG[name]
    try:
        assert not run(spec, ampere(), line, broken)
    except Misuse:
        return


def test_each_copy_is_spoiled_until_it_is_awaited() -> None:
    """The three that only a wait tells from the right text raise, whatever the numbers are."""
    for name in ("V is awaited", "K is awaited", "the last copy is awaited"):
        spec, line, broken = WRONG[name]
        with pytest.raises(Misuse):
            run(spec, ampere(), line, broken)
