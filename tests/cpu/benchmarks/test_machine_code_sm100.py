"""benchmarks/machine_code_sm100.py on loops written by hand; no package, no compiler."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import duel
from benchmarks import machine_code_sm100 as program
from benchmarks.duel import Cell, Row
from benchmarks.machine_code_sm100 import Part, Shape, figures, part_of, steady
from flashgen.compile.sass import Listing
from flashgen.errors import ToolchainError
from tests.listings import listing
from tests.makers import make_config, make_spec

SHAPE = Shape(tile=(256, 128), softmax=8, products=2)
CELL: Cell = ("forward", 64, "none")


def kernel(*, product: str = "UTCHMMA", width: int = 64, products: int = 2) -> Listing:
    """Four roles, each a loop; the load warp has a loop of TMA inside another."""
    product += " gdesc[UR4], gdesc[UR6], tmem[UR8]"
    return listing(
        "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xb8",
        "softmax:",
        f"LDTM.x{width} R4, tmem[UR4]",
        f"LDTM.x{width} R68, tmem[UR4+0x40]",
        "MUFU.EX2 R4, R4",
        "STTM.x64 tmem[UR4], R4",
        "@P0 BRA {softmax}",
        "USETMAXREG.DEALLOC.CTAPOOL 0x50",
        "correction:",
        "LDTM.x32 R4, tmem[UR4]",
        "STTM.x32 tmem[UR4], R4",
        "LDL R1, [R2]",
        "@P0 BRA {correction}",
        "USETMAXREG.DEALLOC.CTAPOOL 0x30",
        "products:",
        *(product,) * products,
        "@P0 BRA {products}",
        "tile:",
        "NOP",
        "loads:",
        "UTMALDG.2D [UR8], [UR4]",
        "@P0 BRA {loads}",
        "UTMALDG.2D [UR8], [UR4]",
        "@P1 BRA {tile}",
        "EXIT",
    )


def test_the_loop_of_each_role() -> None:
    found = steady(kernel(), SHAPE)
    assert {role: len(body) for role, body in found.items()} == {
        "softmax": 5, "correction": 4, "products": 3, "loads": 2,
    }  # fmt: skip


def test_counts_a_score_are_of_all_warps_of_a_role() -> None:
    part = part_of(kernel(), SHAPE, shared_bytes=1000, tensor_columns=512)
    assert part.registers == "184/80/48/48"
    assert list(part.loops) == ["softmax", "correction", "products", "loads"]
    assert part.per_score == {
        "softmax": 5 * 8 / 1024, "correction": 4 * 4 / 1024, "products": 3 / 1024,
        "loads": 2 / 1024,
    }  # fmt: skip
    assert part.mufu == 1 / 128
    assert part.spills == 1


@pytest.mark.parametrize(
    ("product", "count", "warps"),
    [
        ("UTCHMMA", 2, 1),
        ("UTCHMMA", 4, 1 / 2),
        ("UTCHMMA.2CTA", 2, 1 / 2),
        ("UTCHMMA.2CTA", 4, 1 / 4),
    ],
)
def test_products_of_two_blocks_or_two_tiles_count_once(
    product: str, count: int, warps: float
) -> None:
    body = steady(kernel(product=product, products=count), SHAPE)["products"]
    assert program.warps_of("products", body, SHAPE) == warps


def test_a_backward_reads_s_and_dp() -> None:
    half = Shape(tile=(128, 128), softmax=8, products=2)
    assert half.scores == 64
    assert len(steady(kernel(), half)["softmax"]) == 5


def test_a_softmax_of_another_tile_is_refused() -> None:
    with pytest.raises(ToolchainError, match="no softmax loop of 128 scores"):
        steady(kernel(width=16), SHAPE)


def test_masked_tiles_may_have_a_loop_of_their_own() -> None:
    tile = ("LDTM.x64 R4, tmem[UR4]", "LDTM.x64 R68, tmem[UR4+0x40]", "MUFU.EX2 R4, R4")
    code = listing(
        "masked:", *tile, "FSEL R4, R4, R5, P1", "@P0 BRA {masked}", "top:", *tile,
        "@P0 BRA {top}", "EXIT",
    )  # fmt: skip
    assert program.masked(code, SHAPE) == 5
    assert program.masked(kernel(), SHAPE) == 0


def test_reading_without_writing_is_a_reduction() -> None:
    code = listing("top:", "LDTM.x32 R4, tmem[UR4]", "UTMAREDG.3D [UR4], [UR6]", "@P0 BRA {top}")
    assert program.task(code.instructions) == "reduction"
    assert program.task(listing("FADD R1, R2, R3").instructions) == ""


def part(**loops: int) -> Part:
    return Part(
        tile=(128, 64),
        registers="96",
        shared_bytes=10,
        tensor_columns=128,
        loops=loops,
        per_score={role: count / 64 for role, count in loops.items()},
        mufu=1.0,
        spills=1,
    )


def row(count: int, **more: Any) -> Row:
    parts = [part(softmax=count)]
    return duel.row_of(CELL, "whose", parts, figures(parts)) | more


def test_products_of_a_tile_of_ours() -> None:
    way: dict[str, Any] = {"num_warps": 8, "schedule": "blackwell", "loads": "descriptor"}
    halves = make_config(128, 128, **way)
    forward = make_spec("bfloat16", 128)
    assert program.products_of(forward, make_config(256, 128, **way)) == 32
    assert program.products_of(forward.for_direction("backward_dkv"), halves) == 32
    assert program.products_of(forward.for_direction("backward_dq"), halves) == 24
    assert program.products_of(forward.for_direction("backward_fused"), halves) == 40
    wide, side = make_spec("bfloat16", 256, direction="backward_dkv"), make_config(64, 128, **way)
    assert program.products_of(wide, side) == 40  # those of dK and those of dV


def test_two_blocks_that_compute_the_same_scores_count_twice() -> None:
    one, two = (
        part_of(kernel(), replace(SHAPE, blocks=blocks), shared_bytes=0, tensor_columns=512)
        for blocks in (1, 2)
    )
    assert two.loops == one.loops
    assert two.per_score == {role: 2 * count for role, count in one.per_score.items()}
    assert two.mufu == 2 * one.mufu


def test_the_fused_backward_is_compared_where_tensor_memory_has_it() -> None:
    found = {dim: program.fused(("backward", dim, "causal")) for dim in (64, 128, 256)}
    assert [[config.num_stages for _, config in found[dim]] for dim in found] == [[4], [2], []]
    assert program.fused(("forward", 64, "causal")) == []
    served = duel.served(("backward", 64, "none"), program.B200)
    assert [(name, ships) for name, _, ships in served] == [("plain", False), ("blackwell", True)]


def test_two_kernels_of_a_backward_are_added() -> None:
    both = [part(softmax=64, loads=32), part(softmax=64)]
    found = duel.row_of(CELL, "flashgen, plain", both, figures(both))
    assert (found["tile"], found["registers"]) == ("128x64 + 128x64", "96 + 96")
    assert found["loops"] == {"softmax": "64 + 64", "loads": "32"}
    assert found["per_score"] == {"softmax": 2.0, "loads": 0.5}
    assert (found["all"], found["mufu"], found["spills"]) == (2.5, 2.0, 2)


@pytest.mark.parametrize(
    ("direction", "roles"),
    [
        ("forward", ("softmax", "correction", "products", "loads")),
        ("backward", ("softmax", "reduction", "products", "loads")),
    ],
)
def test_the_documented_figures_are_those_of_the_results(
    direction: str, roles: tuple[str, ...]
) -> None:
    record = json.loads(program.DUEL.result.with_suffix(".json").read_text())
    text = (program.ROOT / "docs" / "kernels.md").read_text()
    shown = [
        each
        for each in record["rows"]
        if each["direction"] == direction and not each["whose"].endswith("plain")
        if direction == "forward" or each["head_dim"] <= 128
    ]
    assert len(shown) == 12
    for each in shown:
        whose = each["whose"].removeprefix("flashgen, ")
        loops = " | ".join(each["loops"].get(role, "") or "-" for role in roles)
        line = f"| {each['head_dim']}, {each['mask']} | {whose} | {loops} | {each['all']:.2f} |"
        if direction == "forward":
            by_fma = round((1 - each["mufu"]) * 128) + 1  # one more exp2 is of the factor of O
            line += f" {by_fma} |"
        assert line in text
