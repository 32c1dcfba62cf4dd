"""A kernel's parameters, and its head: its decorator and its def."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flashgen.kernels.conditions import Condition, always

WIDTH = 100
"""Of a line of a head."""


class Parameter(NamedTuple):
    """A parameter of a kernel.

    type is as Triton writes it, ":16" behind it for a multiple of 16 bytes or elements. {element}
    is that of Q, {cached} that of K and V, {out} that of results, {whole} the same but float32
    where results are parts; {by_k} and {by_v} are ":16" where the head dim of Q and K, or of V, is
    a multiple of 16. "i32:1" is 1 but for odd tensors, "desc" a descriptor, "constexpr" a number of
    the kernel (kernels/constants.py). note is the comment behind it, which ends its line of the
    head, heading one on a line before it; first: it begins a line. A number with specialized False
    never decides what Triton compiles.

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
    first: bool = False

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


def rows(
    tensor: str, note: str = "", of: Condition = always, given: Condition = always
) -> Parameter:
    """Float32 numbers of rows, such as LSE."""
    return Parameter(f"{tensor}_ptr", "*fp32:16", note, of=of, given=given)


def begun(found: Iterable[Parameter]) -> tuple[Parameter, ...]:
    """Parameters that share lines of a head, of which the first begins one."""
    first, *others = found
    return first._replace(first=True), *others


def head(name: str, found: Iterable[Parameter], language: str = "tl") -> str:
    """The decorator of a kernel and its def, whose parameters are these. language: tl, or gl.

    Parameters share lines up to one with a note, which says something of its line, or of itself.
    """
    decorator, taken = "@gluon.jit" if language == "gl" else "@triton.jit", tuple(found)
    numbers = ", ".join(f'"{each.name}"' for each in taken if not each.specialized).split()
    lines = _filled(numbers, f"{decorator}(do_not_specialize=[", "])  # fmt: skip")
    lines.append(f"def {name}(")
    line: list[str] = []
    for each in taken:
        if each.first or each.heading:
            lines += _filled(line)
            line = []
        lines += [f"    # {each.heading}"] * bool(each.heading)
        line.append(each.name + f": {language}.constexpr" * each.constant + ",")
        if each.note:
            lines += _filled(line, behind=each.comment)
            line = []
    return "\n".join([*lines, *_filled(line), "):  # fmt: skip"])


def _filled(words: Sequence[str], before: str = "    ", behind: str = "") -> list[str]:
    """Lines of these words, the first behind `before`, the last with `behind` at its end."""
    lines = [before]
    for n, word in enumerate(words, 1):
        space = " " * (not lines[-1].endswith((" ", "[")))
        last = behind if n == len(words) else ""
        if lines[-1].strip() and len(lines[-1] + space + word + last) > WIDTH:
            lines.append("    ")
            space = ""
        lines[-1] += space + word
    lines[-1] += behind
    return [line for line in lines if line.strip()]
