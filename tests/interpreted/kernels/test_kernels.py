"""Every kernel variant against float64 on the nasty shapes; hypothesis draws more."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.evaluate.check import check_kernel, compared, trial_of
from flashgen.kernels.launch import bind
from flashgen.kernels.loader import load_kernel
from flashgen.kernels.render import render
from flashgen.reference.cases import CheckCase
from flashgen.schedules.defaults import default_config, default_spec
from flashgen.spec.problem import Problem
from tests.makers import make_config, make_spec
from tests.nasty_cases import nasty_cases
from tests.proving import alternating, prove

WAYS = [
    ("fa2", "pointer"),
    ("fa2", "descriptor"),
    ("s_ahead", "pointer"),
    ("s_ahead", "descriptor"),
    ("fa1", "pointer"),
]
MASKS = ("none", "causal")


def in_turn(values: tuple[Any, ...]) -> list[Any]:
    """Each of these values with each way and mask. Every pair of two of the three is in make test;
    the other half is slow.
    """
    slow = pytest.mark.slow("make test has every pair of value, way and mask")
    return [
        pytest.param(value, way, mask, marks=() if (v + w + m) % 2 == 0 else slow)
        for (v, value), (w, way), (m, mask) in itertools.product(
            enumerate(values), enumerate(WAYS), enumerate(MASKS)
        )
    ]


@pytest.mark.parametrize(
    ("dtype", "way", "mask"), in_turn(("float16", "bfloat16", "float32")), ids=str
)
def test_nasty_shapes(dtype: str, way: tuple[str, str], mask: str, seed: int) -> None:
    spec = make_spec(dtype, 64, mask)
    config = make_config(64, 32, schedule=way[0], loads=way[1])
    prove(spec, config, seed, nasty_cases(config.br, config.bc))


@pytest.mark.parametrize(("tile", "way", "mask"), in_turn(((32, 64), (16, 16))), ids=str)
def test_tiles_of_other_shapes(
    tile: tuple[int, int], way: tuple[str, str], mask: str, seed: int
) -> None:
    br, bc = tile
    order = "longest_first" if mask == "causal" and way[0] != "fa1" else "plain"
    config = make_config(br, bc, schedule=way[0], loads=way[1], order=order)
    prove(make_spec("bfloat16", 32, mask), config, seed, nasty_cases(br, bc))


@pytest.mark.parametrize(
    "dims",
    [
        *((40, 40), (192, 128)),
        *(
            pytest.param(d, marks=pytest.mark.slow("make test proves a sample of it"))
            for d in ((80, 80), (96, 96), (192, 192), (16, 256))
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize(("way", "mask"), alternating(WAYS[:4], MASKS))
def test_padded_head_dims(
    dims: tuple[int, int], way: tuple[str, str], mask: str, seed: int
) -> None:
    spec = make_spec("bfloat16", dims[0], mask, head_dim_v=dims[1])
    prove(spec, make_config(32, 32, schedule=way[0], loads=way[1]), seed)


@pytest.mark.parametrize(
    ("dtype", "dims"), alternating(["float16", "float32"], [(64, 64), (40, 56), (16, 64)])
)
def test_default_kernels_take_the_true_head_dims(
    dims: tuple[int, int], dtype: str, seed: int, tmp_path: Path
) -> None:
    for mask in MASKS:
        asked = make_spec(dtype, dims[0], mask, head_dim_v=dims[1])
        spec = default_spec(asked)
        config = default_config(asked)
        rendered = render(spec, config)
        path = tmp_path / f"{rendered.name}.py"
        path.write_text(rendered.source)
        kernel = load_kernel(path, rendered.text_name, rendered.name)
        for number, case in enumerate(nasty_cases(config.br, config.bc)):
            # Inputs are drawn for the spec that is asked; the kernel is that of the padded one.
            verdict = compared(bind(kernel, asked, config), trial_of(asked, case, seed + number))
            assert verdict.passed, (case, seed + number, verdict)


@pytest.mark.parametrize(("way", "mask"), alternating(WAYS, MASKS))
def test_tf32_operands_are_rounded_by_the_kernel(
    way: tuple[str, str], mask: str, seed: int
) -> None:
    """The matrix unit would cut the low bits off, which the oracle does not accept."""
    spec = make_spec("float32", 64, mask, precision="tf32")
    config = make_config(64, 32, schedule=way[0], loads=way[1])
    rendered = render(spec, config)
    prove(spec, config, seed, nasty_cases(config.br, config.bc))
    cut = rendered.source.replace(" + 0x1000) & -0x2000", ") & -0x2000")
    assert cut != rendered.source
    truncating = dataclasses.replace(rendered, source=cut)
    assert not check_kernel(truncating, spec, config, seed=seed).passed


sizes = st.integers(1, 100)


@settings(max_examples=20)
@given(
    seq_q=sizes, seq_k=sizes, kv_heads=st.integers(1, 2), group=st.integers(1, 3), batch=st.integers(1, 2),
    alignment=st.sampled_from(["top_left", "bottom_right"]), layout=st.sampled_from(["bhsd", "bshd", "sliced"]),
    mask=st.sampled_from(MASKS), way=st.sampled_from(WAYS), tile=st.sampled_from([(16, 16), (32, 16), (16, 64)]),
    seed=st.integers(0, 1 << 30),
)  # fmt: skip
def test_drawn_shapes(
    seq_q: int, seq_k: int, kv_heads: int, group: int, batch: int, alignment: str, layout: str,
    mask: str, way: tuple[str, str], tile: tuple[int, int], seed: int,
) -> None:  # fmt: skip
    problem = Problem(
        batch=batch, heads=kv_heads * group, kv_heads=kv_heads, seq_q=seq_q, seq_k=seq_k
    )
    case = CheckCase(problem=problem, alignment=alignment, layout=layout)
    config = make_config(*tile, schedule=way[0], loads=way[1])
    prove(make_spec("bfloat16", 16, mask, head_dim_v=24), config, seed, [case])
