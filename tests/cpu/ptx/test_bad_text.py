"""Texts that are no PTX, or of which no kernel could be: one sentence each, and no launch without end."""

from __future__ import annotations

import pytest

from flashgen.errors import InvalidArgument
from flashgen.ptx.execute import Loaded, execute
from flashgen.ptx.machine import LaunchInputs
from flashgen.ptx.program import InvalidPtx
from flashgen.ptx.text import parse
from tests.ptx_snippets import kernel


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (kernel("mul.wide.u32 %d1;", 0), r"operands that do not fit \(IndexError.*PTX line"),
        (kernel("add.u32 %r1, , %r2;", 0), "an operand that is missing, PTX line"),
        (kernel("mov.u32 %r1, " + "[" * 3000 + "%r2" + "]" * 3000 + ";", 0), "brackets within"),
        (kernel("not.pred %p1, !smem;", 0), "a negation of no register, PTX line"),
        (kernel("mov.u32 %r1, " + "9" * 5000 + ";", 0), "do not fit|cannot be read"),
        (kernel("", 0, registers=".reg .b32 %q<99999999999>;"), "may declare 262144 registers"),
        (kernel("", 0, threads=1 << 20), "a block must have 1 to 1024 threads: got 1048576"),
        (".shared .b8 x[9999999999];\n" + kernel("", 0), "x must have at most 16777216 bytes"),
        (".shared .align 0 .b8 x[8];\n" + kernel("", 0), "x must be aligned"),
        (".global .nosuch x;\n" + kernel("", 0), r"a type that is not known: \.nosuch x"),
        (kernel("", 1).replace(".u64 p0", ".nosuch p0"), r"a type that is not known: \.nosuch p0"),
        (kernel("x" * 5000 + " %r1;", 0), "is not known: xxxx"),
    ],
)
def test_it_is_one_sentence(text: str, said: str) -> None:
    with pytest.raises(InvalidPtx, match=said) as caught:
        Loaded(parse(text))
    assert len(str(caught.value)) < 1000


def launch(*grid: int) -> LaunchInputs:
    return LaunchInputs(grid=grid, parameters=(), buffers=())  # type: ignore[arg-type]  # of three


def test_what_cannot_be_executed_is_one_sentence() -> None:
    loaded = Loaded(parse(kernel("mov.u32 %r2, 1; add.u32 %r1, %r2;", 0)))
    with pytest.raises(InvalidPtx, match=r"it cannot be executed \(TypeError.*PTX line 10: add"):
        execute(loaded, launch(1, 1, 1))


def test_a_launch_that_never_ends_is_a_finding() -> None:
    loaded = Loaded(parse(kernel("LOOP: bra LOOP;", 0)))
    report = execute(loaded, launch(1, 1, 1), most_steps=5000)
    assert "the launch does not end within 5000 steps" in str(report.findings[0])


def test_the_limit_is_of_all_blocks_together() -> None:
    loaded = Loaded(parse(kernel("mov.u32 %r1, 1;", 0)))
    assert not execute(loaded, launch(9, 1, 1), most_steps=10).findings[1:]
    assert execute(loaded, launch(9, 1, 1), most_steps=10).findings
    assert not execute(loaded, launch(9, 1, 1), most_steps=200).findings


def test_a_grid_of_too_many_blocks_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="a grid must have at most 16777216 blocks"):
        execute(Loaded(parse(kernel("", 0))), launch(1 << 20, 1 << 20, 1))
