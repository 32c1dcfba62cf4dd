"""compile/sass.py on listings written here; real cubins are in compile/test_compile.py and estimate/test_sm.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashgen.compile import sass
from flashgen.compile.sass import Control, control_of, parse, self_check
from flashgen.errors import ToolchainError, ToolKilled
from tests.listings import Line, line, listing


def test_an_instruction_is_taken_apart() -> None:
    found = listing("@!UP0 LDS.U.128 R4, [R2+0x10]", "EXIT", registers=168, stack=24)
    assert (found.arch, found.registers, found.stack_bytes) == ("sm_90", 168, 24)
    first, last = found.instructions
    assert (first.address, first.predicate, first.opcode) == (0, "@!UP0", "LDS.U.128")
    assert (first.base, first.operands) == ("LDS", "R4, [R2+0x10]")
    assert (last.address, last.opcode, last.operands) == (16, "EXIT", "")


@pytest.mark.parametrize("text", ["", "no machine code here", "REG:1 STACK:0 and nothing else"])
def test_text_without_code_is_refused(text: str) -> None:
    with pytest.raises(ToolchainError, match="no machine code"):
        parse(text)


def test_bytes_that_are_no_cubin_are_refused() -> None:
    with pytest.raises(ToolchainError, match="cuobjdump failed"):
        sass.disassemble(b"not a cubin")


def test_a_cuobjdump_that_was_killed_says_nothing_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    killed = tmp_path / "cuobjdump"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(sass, "cuobjdump", lambda: killed)
    with pytest.raises(ToolKilled, match="cuobjdump was ended by SIGKILL"):
        sass.disassemble(b"a cubin")


@pytest.mark.parametrize(
    ("high", "control"),
    [
        # No barrier set or waited for, as ptxas writes most: stall counts of 1 and 4.
        (0x000FE20000000800, Control(1, None, None, ())),
        (0x000FC80000000800, Control(4, None, None, ())),
        ((5 | 2 << 5 | 3 << 8 | 0b100001 << 11) << 41, Control(5, 2, 3, (0, 5))),
    ],
)
def test_control_bits(high: int, control: Control) -> None:
    assert control_of(high | 0x123) == control


SETS = line("LDS R4, [R2]", write=3)
WAITS = line("FADD R4, R4, R5", waits=(3,))


@pytest.mark.parametrize(
    "lines",
    [
        (SETS, WAITS, "EXIT"),
        (line("LDS R4, [R2]", read=3), WAITS, "EXIT"),
        # Set at the end of a turn, waited for at the start of the next.
        ("top:", WAITS, SETS, "@P0 BRA {top}", "EXIT"),
        # A retry behind the end sets for a wait that stands before it.
        (line("BRA {retry}"), "back:", WAITS, "EXIT", "retry:", SETS, "BRA {back}"),
    ],
)
def test_waits_that_something_sets(lines: tuple[str | Line, ...]) -> None:
    assert self_check(listing(*lines)) is None


@pytest.mark.parametrize(
    ("lines", "address"),
    [
        ((WAITS, "EXIT"), "0x0"),
        ((WAITS, SETS, "EXIT"), "0x0"),
        ((line("LDS R4, [R2]", write=2), WAITS), "0x10"),
        ((line("LDS R4, [R2]"), WAITS, "EXIT"), "0x10"),
    ],
)
def test_a_wait_that_nothing_sets_is_told(lines: tuple[str | Line, ...], address: str) -> None:
    said = self_check(listing(*lines))
    assert said == f"instruction {address} waits for barrier 3, which nothing sets"


def test_a_listing_without_control_bits_is_told() -> None:
    bare = parse("REG:8 STACK:0\n        /*0000*/                   EXIT ;\n")
    assert bare.instructions[0].control is None
    assert self_check(bare) == "its listing has instructions without control bits"
