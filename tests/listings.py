"""Listings written by hand, as cuobjdump prints them, for tests that count cycles."""

from __future__ import annotations

from typing import NamedTuple

from flashgen.compile.sass import Listing, parse

NONE = 7


class Line(NamedTuple):
    text: str
    control: int


def line(
    text: str,
    *,
    stall: int = 1,
    write: int = NONE,
    read: int = NONE,
    waits: tuple[int, ...] = (),
) -> Line:
    """An instruction that stalls its warp, sets barriers and waits for barriers."""
    mask = sum(1 << barrier for barrier in waits)
    return Line(text, stall | write << 5 | read << 8 | mask << 11)


def listing(*lines: str | Line, registers: int = 96, stack: int = 0) -> Listing:
    """A kernel; "{label}" stands for the address of the line "label:"."""
    addresses: dict[str, str] = {}
    code: list[Line] = []
    for each in lines:
        text, control = each if isinstance(each, Line) else line(each)
        if text.endswith(":"):
            addresses[text[:-1]] = f"0x{16 * len(code):x}"
        else:
            code.append(Line(text, control))
    printed = f"\n Function kernel:\n  REG:{registers} STACK:{stack} SHARED:0 LOCAL:0\n\n\tcode for sm_90a\n"
    for number, (text, control) in enumerate(code):
        printed += f"        /*{16 * number:04x}*/                   {text.format(**addresses)} ;"
        printed += f"{'':20}/* 0x{number:016x} */\n{'':80}/* 0x{control << 41:016x} */\n"
    return parse(printed)


def loop(*lines: str | Line, before: tuple[str | Line, ...] = (), stall: int = 5) -> Listing:
    """A kernel of one loop, whose closing branch stalls for so long."""
    return listing(*before, "top:", *lines, line("@P0 BRA {top}", stall=stall), "EXIT")
