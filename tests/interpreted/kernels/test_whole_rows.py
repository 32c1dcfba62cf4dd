"""Products in parts (whole_rows): every feature of the forward against float64, and broken kernels."""

from __future__ import annotations

import re
from typing import Any

import pytest

from flashgen.evaluate.check import check_kernel
from flashgen.evaluate.check_attention import packed_case
from flashgen.evaluate.sanitize import executed_cases
from flashgen.kernels.render import render
from flashgen.reference.cases import CheckCase
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.whole_rows import WIDEST, o_parts, why_no_rows
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.features import FEATURE_WORDS, masks_of
from flashgen.spec.problem import Problem
from tests.makers import each, make_config, make_spec
from tests.proving import alternating, mutant_passes, sampled

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ROWS = make_config(64, 32, whole_rows=True)
CASES = [
    # Whole tiles and a ragged end; rows that see no key; two heads of K, strides of their own.
    CheckCase(problem=Problem(batch=1, heads=1, kv_heads=1, seq_q=70, seq_k=139)),
    CheckCase(problem=Problem(batch=2, heads=4, kv_heads=2, seq_q=65, seq_k=31), layout="bshd"),
]
CAUSAL, FULL = make_spec("bfloat16", 192, "causal"), make_spec("bfloat16", 192)


def prove(spec: AttentionSpec, config: KernelConfig, seed: int, cases: Any = CASES) -> None:
    assert why_no_rows(spec, config) is None
    result = check_kernel(render(spec, config), spec, config, seed=seed, cases=cases)
    assert result.passed, f"{spec.name}_{config.label}: {result}"


SHAPES: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "two parts": ((256, 256), {"br": 128}),
    "three parts": ((192, 192), {}),
    "parts of each number": ((192, 128), {}),
    "masked columns": ((72, 248), {}),
    "any head dim": ((256, 256), {"head_dims": "padded"}),
    "parts of O alone": ((128, 128), {"head_dims": "padded"}),
    "parts that are padding": ((136, 136), {"head_dims": "padded"}),
}


@pytest.mark.parametrize(("name", "mask"), alternating(SHAPES, ["none", "causal"]))
def test_forward(name: str, mask: Any, seed: int) -> None:
    dims, fields = SHAPES[name]
    spec = make_spec("bfloat16", dims[0], mask, head_dim_v=dims[1])
    prove(spec, make_config(**{"br": 64, "bc": 32, "whole_rows": True} | fields), seed)


def featured() -> list[Any]:
    """Each feature that a forward with operands of 16 bits has."""
    found = []
    for word in FEATURE_WORDS:
        masks = masks_of((word,))
        spec = make_spec("float16", 160, "causal" if "causal" in masks else "none", head_dim_v=256)
        spec = spec.with_features((word,))
        if spec.operand_bytes == 2:
            found.append(spec)
    return found


@pytest.mark.parametrize("spec", each(featured(), 3))
def test_features(spec: AttentionSpec, seed: int) -> None:
    of_its_own = spec.varlen or spec.block_mask
    prove(spec, ROWS, seed, executed_cases(spec, ROWS) if of_its_own else CASES)


@pytest.mark.parametrize("paged", [False, True], ids=["packed", "paged"])
def test_sequences_of_several_lengths(paged: bool, seed: int) -> None:
    """Places of no sequence are zeroed in every part of O."""
    spec = make_spec("bfloat16", 192, "causal", varlen=True, paged=paged)
    case = packed_case([(5, 40), (0, 33), (70, 1)], heads=2, kv_heads=1, spare=(3, 2), tail=(2, 0))
    prove(spec, ROWS, seed, [case])


DECODE_ROWS = make_config(16, 64, num_warps=1, num_stages=1, whole_rows=True)


@pytest.mark.parametrize("words", [(), ("sink", "softcap")], ids="_".join)
@pytest.mark.parametrize(
    "head_dim", [128, pytest.param(256, marks=pytest.mark.slow("make test has head dim 128"))]
)
def test_invariant_decode(head_dim: int, words: tuple[str, ...], seed: int) -> None:
    """Plain with all cases, and with every other one with features."""
    spec = make_spec("bfloat16", head_dim, "causal", direction="decode", paged=True, invariant=True)
    spec = spec.with_features(words)
    prove(spec, DECODE_ROWS, seed, executed_cases(spec, DECODE_ROWS)[:: 2 if words else 1])


@pytest.mark.parametrize(
    ("spec", "config"),
    [
        (make_spec("bfloat16", WIDEST), ROWS),
        (make_spec("bfloat16", WIDEST), make_config(128, 64, num_warps=8, num_stages=1, schedule="ampere")),
        (make_spec("bfloat16", 256, direction="decode", paged=True, invariant=True), DECODE_ROWS),
    ],
    ids=["fa2", "ampere", "decode"],
)  # fmt: skip
def test_the_tuples_of_a_text_have_room_for_the_most_parts(
    spec: AttentionSpec, config: KernelConfig
) -> None:
    """A slice of a tuple that is too short would leave the last parts out."""
    rendered = render(spec, config)
    numbers = dict(rendered.constants)
    assert numbers["O_PARTS"] >= 4
    for name in ("K_PARTS", "O_PARTS"):
        tuples = re.findall(rf"\(([\d, ]+)\)\[:{name}\]", rendered.source)
        assert tuples
        assert all(len(each.split(",")) >= numbers[name] for each in tuples)


@pytest.mark.parametrize(
    ("line", "broken"),
    [
        ("base + offsets + n * WIDTH", "base + offsets"),
        ("s = tl.dot(q[n], tl.trans(k[n]), s,", "s = tl.dot(q[n], tl.trans(k[n]),"),
        ("acc = [acc[n] * rescale[:, None]", "acc = [acc[n] * (rescale[:, None] if n < 7 else 1.0)"),
        ("tl.dot(p, v[n], acc[n]", "tl.dot(p, v[0], acc[n]"),
        ("o = [tl.where(whole, o[n], total[n])", "o = [o[n]"),
    ],
    ids=["place of a part", "sum of the parts", "rescale", "part of V", "total of a split"],
)  # fmt: skip
def test_mutant_of_a_decode_is_caught(line: str, broken: str) -> None:
    spec = make_spec("bfloat16", 128, direction="decode", paged=True, invariant=True)
    assert not mutant_passes(spec, DECODE_ROWS, line, broken)


MUTANTS = {
    "place of a part": (FULL, "base + offsets + n * WIDTH", "base + offsets"),
    "second part of K": (FULL, "tl.trans(k[n]), s,", "tl.trans(k[0]), s,"),
    "second part of V": (FULL, "tl.dot(p, v[n], acc[n]", "tl.dot(p, v[0], acc[n]"),
    "ragged part of V": (FULL, "tl.dot(p, v[n], acc[n]", "tl.dot(p, v[n % 2], acc[n]"),
    "sum over the parts of K": (FULL, "s = tl.dot(q[n], tl.trans(k[n]), s,", "s = tl.dot(q[n], tl.trans(k[n]),"),
    "rescale of the last part": (FULL, "[acc[n] * rescale[:, None]", "[acc[n] * (rescale[:, None] if n < 2 else 1.0)"),
    "place of a tile": (CAUSAL, "k_places = (start + keys)", "k_places = (0 * start + keys)"),
    "masked tiles of K": (CAUSAL, "k_base += full_end.to(tl.int64)", "k_base += 0 * full_end.to(tl.int64)"),
    "masked tiles of V": (FULL, "v_base += full_end.to(tl.int64)", "v_base += 0 * full_end.to(tl.int64)"),
    "division of a part": (FULL, "else acc[n] * inverse[:, None]", "else acc[n] * (inverse[:, None] if n < 1 else 1.0)"),
    "place of a part of O": (FULL, "o_base + o_offsets + n * V_PART, o[n]", "o_base + o_offsets, o[n]"),
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(MUTANTS))
def test_mutant_is_caught(name: str) -> None:
    spec, line, broken = MUTANTS[name]
    assert len(o_parts(spec, ROWS)) == 3
    assert not mutant_passes(spec, ROWS, line, broken, CASES[:1])


def test_the_unbroken_kernel_passes() -> None:
    assert mutant_passes(FULL, ROWS, "o[n]", "o[n]", CASES[:1])
    assert mutant_passes(CAUSAL, ROWS, "o[n]", "o[n]", CASES[:1])
