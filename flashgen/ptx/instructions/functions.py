"""Functions of floats (PTX ISA 9.7.3.12 to 9.7.3.22). Approximations are correctly rounded here, or
as good as numpy's functions.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flashgen.ptx.decode import Form, elementwise, instruction
from flashgen.ptx.instructions.arithmetic import in_direction
from flashgen.ptx.types import Array, DecodedStep, flush

_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: x.dtype.type(1) / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: x.dtype.type(1) / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@instruction(*_FUNCTIONS)
def function(form: Form) -> DecodedStep:
    """One source, one destination; .approx, .ftz and, of sqrt and rcp, a rounding."""
    form.hint("approx")
    flushes, kind = form.flag("ftz"), form.format()
    inner = in_direction(form, _FUNCTIONS[form.opcode], kind)

    def applied(x: Array) -> Array:
        found = flush(inner(flush(x))) if flushes else inner(x)
        # NaN is 0x7fffffff (PTX ISA 9.7.3), and has no sign of its own.
        nan = np.isnan(found)
        return np.where(nan, np.abs(found), found) if np.count_nonzero(nan) else found

    return elementwise(form, applied, kind, [kind])


@instruction("copysign")
def copy_sign(form: Form) -> DecodedStep:
    """9.7.3.2: the sign of a and the size of b."""
    kind = form.format()
    return elementwise(form, lambda a, b: np.copysign(b, a), kind, [kind] * 2)


@instruction("testp")
def test(form: Form) -> DecodedStep:
    """9.7.3.1: what kind of number it is."""
    which = form.choice("finite", "infinite", "number", "notanumber")
    tests: dict[str, Callable[[Array], Array]] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
    }
    value, write = form.numbers(form.operands[1], form.format()), form.store(form.operands[0])
    return lambda warp, mask: write(warp, tests[which](value(warp)), mask)
