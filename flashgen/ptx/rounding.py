"""Rounding in a direction (PTX ISA 9.7.3): .rz towards zero, .rm down, .rp up. The result that is
rounded to nearest is on the right side of the exact one, or a step off.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from flashgen.ptx.types import Array

_EXCESS: dict[str, Callable[..., Fraction]] = {
    "add": lambda found, a, b: found - (a + b),
    "sub": lambda found, a, b: found - (a - b),
    "mul": lambda found, a, b: found - a * b,
    "fma": lambda found, a, b, c: found - (a * b + c),
    "div": lambda found, a, b: found - a / b,
    "rcp": lambda found, a: found - 1 / a,
    "sqrt": lambda found, a: found * found - a,
    "cvt": lambda found, a: found - a,
}
"""By how much a result is too large, or a number of the same sign."""

Function = Callable[..., Array]


def directed(opcode: str, direction: str, nearest: Function) -> Function:
    """An operation rounded in a direction; nearest: the same rounded to nearest."""
    opcode = "fma" if opcode == "mad" else opcode

    def function(*values: Array) -> Array:
        found = nearest(*values)
        quick = found.dtype == np.float32 and opcode in ("add", "sub", "mul", "fma")
        excess = _excess_of_singles if quick else _excess
        return towards(direction, found, excess(opcode, found, *values))

    return function


def towards(direction: str, found: Array, excess: Array) -> Array:
    """Results moved by a step where they are on the wrong side. excess: its sign is that of what a
    result is too large by.
    """
    if direction == "rz":
        return np.where(
            excess * np.sign(found) > 0, np.nextafter(found, found.dtype.type(0)), found
        )
    aim = found.dtype.type(-np.inf if direction == "rm" else np.inf)
    return np.where(excess * np.sign(aim) < 0, np.nextafter(found, aim), found)


def _excess_of_singles(opcode: str, found: Array, *values: Array) -> Array:
    """Of float32: in float64 a product is exact, and a sum is with its error (Knuth, TAOCP 4.2.2,
    theorem B).
    """
    left, right, *added = (value.astype(np.float64) for value in values)
    if opcode in ("mul", "fma"):
        left, right = left * right, added[0] if added else np.zeros_like(left)
    elif opcode == "sub":
        right = -right
    exact = left + right
    part = exact - left
    error = (left - (exact - part)) + (right - part)
    excess: Array = found - exact - error
    return excess


def _excess(opcode: str, found: Array, *values: Array) -> Array:
    """Of any type, lane by lane; 0 where an operand is no finite number."""
    excess = np.zeros(len(found))
    finite = np.logical_and.reduce([np.isfinite(value) for value in values]) & ~np.isnan(found)
    for lane in np.flatnonzero(finite):
        given = [Fraction(value[lane].item()) for value in values]
        if np.isfinite(found[lane]):
            beyond = _EXCESS[opcode](Fraction(found[lane].item()), *given)
            excess[lane] = (beyond > 0) - (beyond < 0)
        elif given[-1] or opcode not in ("div", "rcp"):  # too large for the type
            excess[lane] = np.sign(found[lane])
    return excess
