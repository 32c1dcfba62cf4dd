"""A kernel's parameters, and its head: its decorator and its def."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flashgen.kernels.conditions import Condition, always


class Parameter(NamedTuple):
    """A parameter of a kernel.

    type is as Triton writes it, ":16" behind it for a multiple of 16 bytes or elements. {element}
    is that of Q, {cached} that of K and V, {out} that of results, {whole} the same but float32
    where results are parts; {by_k} and {by_v} are ":16" where the head dim of Q and K, or of V, is
    a multiple of 16. "i32:1" is 1 but for odd tensors, "desc" a descriptor, "constexpr" a number of
    the kernel (kernels/constants.py). note is the comment behind the name, heading one on a line
    before it. A number with specialized False never decides what Triton compiles.

    of says which texts have the parameter, given which of their kernels are given a value: to the
    others it is None.
    """

    name: str
    type: str = "i32"
    note: str = ""
    specialized: bool = True
    of: Condition = always
    given: Condition = always
    heading: str = ""

    @property
    def constant(self) -> bool:
        """Whether it is a number that the text is compiled for."""
        return self.type == "constexpr"

    @property
    def comment(self) -> str:
        """What stands behind it in a head."""
        return f"  # {self.note}" if self.note else ""


def number(
    name: str, note: str = "", of: Condition = always, given: Condition = always
) -> Parameter:
    """A number that never decides what Triton compiles."""
    return Parameter(name, "i32", note, False, of, given)


def constant(name: str, note: str = "", of: Condition = always) -> Parameter:
    """A number that the text is compiled for."""
    return Parameter(name, "constexpr", note, True, of)


def rows(tensor: str, note: str = "", of: Condition = always) -> Parameter:
    """Float32 numbers of rows, such as LSE."""
    return Parameter(f"{tensor}_ptr", "*fp32:16", note, of=of)


def head(name: str, found: Iterable[Parameter], language: str = "tl") -> str:
    """The decorator of a kernel and its def, whose parameters are these. language: tl, or gl.

    Parameters without a note share lines.
    """
    decorator, taken = "@gluon.jit" if language == "gl" else "@triton.jit", tuple(found)
    numbers = _wrapped([f'"{each.name}"' for each in taken if not each.specialized], 4)
    lines = [f"{decorator}(do_not_specialize=[", *numbers, "])  # fmt: skip", f"def {name}("]
    for apart, group in itertools.groupby(taken, lambda each: bool(each.note or each.heading)):
        rows = [(each, each.name + f": {language}.constexpr" * each.constant) for each in group]
        if not apart:
            lines += _wrapped([declared for _, declared in rows], 4)
            continue
        for each, declared in rows:
            lines += [f"    # {each.heading}"] * bool(each.heading)
            lines.append(f"    {declared},{each.comment}")
    return "\n".join([*lines, "):  # fmt: skip"])


def _wrapped(words: Sequence[str], indent: int) -> list[str]:
    """Lines of words, a comma behind each."""
    margin = " " * indent
    text = ", ".join(words).replace(": ", ":_")  # a name and its type stay together
    lines = textwrap.wrap(text, 99, initial_indent=margin, subsequent_indent=margin)
    return [line.replace(":_", ": ").removesuffix(",") + "," for line in lines]
