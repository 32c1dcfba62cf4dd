"""A kernel as a specialist would have written it: what its constants decide is decided.

Kernels of one text differ in constants: numbers, switches, and arguments that are None. resolved()
takes a text that has them in place and leaves what one kernel computes. Branches that are never
taken go, and phases of a static_range are written out, one behind the other. Triton makes the same
code of both. Statements that stay are kept as they are written, with their comments.
"""

from __future__ import annotations

import ast
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from flashgen.kernels.render import Rendered, in_place, quoted

KnownNames = dict[str, object]
"""What names stand for: a constant, or _GIVEN."""

_UNKNOWN, _GIVEN = object(), object()
"""What only a launch knows; an argument that is not None, of which no more is known."""

_SWITCH = bool | str | None
"""Constants that stand in place of their names; numbers keep theirs."""

_OPERATORS: Mapping[type, Callable[..., object]] = {
    ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.BitAnd: operator.and_,
    ast.Not: operator.not_, ast.USub: operator.neg,
}  # fmt: skip
_NEUTRAL: Mapping[type, object] = {ast.Add: 0, ast.Sub: 0, ast.FloorDiv: 1, ast.BitAnd: True}
"""What changes nothing as the right operand; of a sum and of &, as the left one too."""


def variant(rendered: Rendered) -> str:
    """A kernel to be read, or run, by itself: numbers in place, static branches resolved."""
    return resolved(in_place(rendered))


def resolved(text: str) -> str:
    """A text without what the constants of its kernel rule out. The kernel is the last function,
    and assigns its constants first, as render.in_place() writes them.

    Examples:
        >>> print(resolved('''def kernel(x_ptr):
        ...     SCALE: tl.constexpr = None
        ...     x = tl.load(x_ptr)
        ...     if SCALE is not None:
        ...         x *= SCALE
        ...     tl.store(x_ptr, x)
        ... '''), end="")
        def kernel(x_ptr):
            x = tl.load(x_ptr)
            tl.store(x_ptr, x)
    """
    *_, kernel = _functions(ast.parse(text))
    known: KnownNames = dict.fromkeys((each.arg for each in kernel.args.args), _GIVEN)
    lines = text.splitlines()
    head = _before(lines, kernel.body[0].lineno)
    body = _Kernel(text).written(kernel.body, known, head, 0)
    return _without_unused("\n".join([*lines[:head], *body]) + "\n")


class _Kernel:
    """The statements of a kernel, written anew from its text."""

    def __init__(self, text: str) -> None:
        self._text, self._lines = text, text.splitlines()
        sizes = (len(line) + 1 for line in self._lines)
        self._starts = list(itertools.accumulate(sizes, initial=0))
        self._phases: set[str] = set()

    def written(
        self, body: Iterable[ast.stmt], known: KnownNames, after: int, left: int
    ) -> Iterator[str]:
        """The lines of these statements, the first of which follows line `after`, moved to the left
        by so many columns. known changes as the statements say.
        """
        for node in body:
            above = self._lines[after : node.lineno - 1]
            after = node.end_lineno or node.lineno
            if lines := list(self._statement(node, known, left)):
                yield from _moved(above, left)
                yield from lines

    def _statement(self, node: ast.stmt, known: KnownNames, left: int) -> Iterator[str]:
        if isinstance(node, ast.If):
            yield from self._branches(node, known, left, "if")
        elif isinstance(node, ast.For):
            yield from self._loop(node, known, left)
        else:
            lines = self._with(node, node.end_lineno or 0, node, known)
            if not _assign(node, known):
                yield from _moved(lines, left)

    def _branches(self, node: ast.If, known: KnownNames, left: int, word: str) -> Iterator[str]:
        """The branch that is taken; both, where a launch decides. word: if, or elif."""
        otherwise = f"{' ' * (node.col_offset - left)}else:"
        test = folded(node.test, known)
        if test is not _UNKNOWN:
            body = node.body if test else node.orelse
            if (other := self._elif(body)) is not None:
                yield from self._branches(other, known, left, word)
            elif body:
                yield from [otherwise] * (word == "elif")
                inwards = 0 if word == "elif" else body[0].col_offset - node.col_offset
                after = _before(self._lines, body[0].lineno)
                yield from self.written(body, known, after, left + inwards)
            return
        after = _before(self._lines, node.body[0].lineno)
        first, *more = self._with(node, after, node.test, known)
        yield from _moved([re.sub(r"^( *)(el)?if ", rf"\1{word} ", first), *more], left)
        one, two = dict(known), dict(known)
        yield from self.written(node.body, one, after, left)
        if (other := self._elif(node.orelse)) is not None:
            yield from self._branches(other, two, left, "elif")
        elif node.orelse:
            yield otherwise
            after = _before(self._lines, node.orelse[0].lineno)
            yield from self.written(node.orelse, two, after, left)
        known.clear()
        known.update(one.items() & two.items())

    def _elif(self, body: Sequence[ast.stmt]) -> ast.If | None:
        """The statement that an elif is; None for a body of an else."""
        if body and isinstance(body[0], ast.If):
            line = self._lines[body[0].lineno - 1]
            return body[0] if line.lstrip().startswith("elif ") else None
        return None

    def _loop(self, node: ast.For, known: KnownNames, left: int) -> Iterator[str]:
        """A loop; or its phases, one behind the other."""
        after = _before(self._lines, node.body[0].lineno)
        name = ast.unparse(node.target)
        phases = _phases(node, known)
        for known[name] in phases:
            self._phases.add(name)
            inwards = node.body[0].col_offset - node.col_offset
            yield from self.written(node.body, known, after, left + inwards)
        if not phases:
            for changed in _names(node, ast.Store):
                known.pop(changed, None)
            yield from _moved(self._with(node, after, node.iter, known), left)
            yield from self.written(node.body, dict(known), after, left)

    def _with(self, statement: ast.stmt, end: int, node: ast.AST, known: KnownNames) -> list[str]:
        """The lines of a statement up to line `end`, with the node in it resolved."""
        first, last = self._span(node)
        start, stop = self._starts[statement.lineno - 1], self._starts[end] - 1
        old, new = self._text[first:last], self._expression(node, known)
        if new != old:
            new = re.sub(r"(?<![\w\])])\((\w+)\)", r"\1", new)  # no brackets around a name
        return (self._text[start:first] + new + self._text[last:stop]).split("\n")

    def _span(self, node: ast.AST) -> tuple[int, int]:
        return (
            self._starts[node.lineno - 1] + node.col_offset,  # type: ignore[attr-defined]
            self._starts[node.end_lineno - 1] + node.end_col_offset,  # type: ignore[attr-defined]
        )

    def _expression(self, node: ast.AST, known: KnownNames) -> str:
        if isinstance(node, ast.ListComp):  # its names are its own
            known = {name: known[name] for name in known.keys() - _names(node, ast.Store)}
        simpler = self._simpler(node, known) if isinstance(node, ast.expr) else None
        if simpler is not None:
            return simpler
        at, end = self._span(node)
        pieces = []
        placed = [child for child in ast.iter_child_nodes(node) if hasattr(child, "lineno")]
        for child in sorted(placed, key=self._span):
            start, stop = self._span(child)
            pieces += [self._text[at:start], self._expression(child, known)]
            at = stop
        return "".join([*pieces, self._text[at:end]])

    def _simpler(self, node: ast.expr, known: KnownNames) -> str | None:
        """An expression that its constants make simpler; None for any other."""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            return None
        value = folded(node, known)
        named = isinstance(node, ast.Name) and node.id in self._phases & known.keys()
        if not isinstance(node, ast.Constant) and (named or isinstance(value, _SWITCH)):
            return quoted(value) if isinstance(value, str) else repr(value)
        if isinstance(node, ast.IfExp) and (test := folded(node.test, known)) is not _UNKNOWN:
            return self._expression(node.body if test else node.orelse, known)
        if isinstance(node, ast.BoolOp):
            left = [each for each in node.values if folded(each, known) is _UNKNOWN]
            word = " and " if isinstance(node.op, ast.And) else " or "
            if not left:  # an operand is the value, which keeps its name
                chosen = (each for each in node.values if folded(each, known) == value)
                return self._expression(next(chosen), known)
            if len(left) < len(node.values):
                return word.join(self._expression(each, known) for each in left)
        if isinstance(node, ast.BinOp):
            return self._product(node, known)
        if isinstance(node, ast.Call):
            return self._call(node, known)
        return None

    def _product(self, node: ast.BinOp, known: KnownNames) -> str | None:
        """A sum, a product or the like without an operand that changes nothing."""
        neutral = _NEUTRAL.get(type(node.op))
        left, right = folded(node.left, known), folded(node.right, known)
        if neutral is not None and right == neutral and not isinstance(node.right, ast.Constant):
            kept = node.left
        elif left == neutral and isinstance(node.op, ast.Add | ast.BitAnd):
            kept = node.right
        else:
            return "0" if folded(node, known) == 0 else None
        (start, end), (first, last) = self._span(node), self._span(kept)
        bracketed = last < end if kept is node.right else start < first
        text = self._expression(kept, known)
        return f"({text})" if bracketed else text

    def _call(self, node: ast.Call, known: KnownNames) -> str | None:
        """A call without a mask that is True, and without what is None; of two functions, that
        which is called.
        """
        values = {each.arg: folded(each.value, known) for each in node.keywords}
        gone = {name for name in values if values[name] is None}
        gone |= {"mask", "other"} if values.get("mask") is True else set()
        if not gone and not isinstance(node.func, ast.IfExp):
            return None
        kept = [*node.args, *(each for each in node.keywords if each.arg not in gone)]
        given = ", ".join(self._expression(each, known) for each in kept)
        return f"{self._expression(node.func, known)}({given})"


def folded(node: ast.expr, known: KnownNames) -> object:
    """The value of an expression, where constants decide it; _UNKNOWN where a launch does."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        value = known.get(node.id, _UNKNOWN)
        return _UNKNOWN if value is _GIVEN else value
    if isinstance(node, ast.IfExp):
        test = folded(node.test, known)
        chosen = node.body if test else node.orelse
        return test if test is _UNKNOWN else folded(chosen, known)
    if isinstance(node, ast.BoolOp):
        values = [folded(each, known) for each in node.values]
        decides = isinstance(node.op, ast.Or)
        for value in values:  # an operand is the value, as Python has it
            if value is _UNKNOWN:
                break
            if bool(value) is decides:
                return value
        else:
            return values[-1]
        if any(value is not _UNKNOWN and bool(value) is decides for value in values):
            return decides
        return _UNKNOWN
    if isinstance(node, ast.UnaryOp):
        return _applied(node.op, folded(node.operand, known))
    if isinstance(node, ast.BinOp):
        left, right = folded(node.left, known), folded(node.right, known)
        if isinstance(node.op, ast.Mod) and right == 1:
            return 0
        if isinstance(node.op, ast.Mult) and 0 in (left, right):
            return 0
        return _applied(node.op, left, right)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        (other,) = node.comparators
        given = isinstance(node.left, ast.Name) and known.get(node.left.id) is _GIVEN
        if given and isinstance(node.ops[0], ast.Is | ast.IsNot):
            return isinstance(node.ops[0], ast.IsNot)
        return _applied(node.ops[0], folded(node.left, known), folded(other, known))
    return _UNKNOWN


def _applied(how: ast.AST, *operands: object) -> object:
    """The result of an operator; _UNKNOWN of an unknown operand, and of other operators."""
    if _UNKNOWN in operands or type(how) not in _OPERATORS:
        return _UNKNOWN
    return _OPERATORS[type(how)](*operands)


def _assign(node: ast.stmt, known: KnownNames) -> bool:
    """Put into known what this statement says; whether all that read it have it in place."""
    value = _UNKNOWN
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        value = folded(node.value, known)
    for name in _names(node, ast.Store):
        known.pop(name, None)
        if value is not _UNKNOWN:
            known[name] = value
    return isinstance(value, _SWITCH)


def _phases(node: ast.For, known: KnownNames) -> Sequence[int]:
    """The turns of a static_range that branches tell apart, or its only one; none of any other
    loop.
    """
    call = node.iter
    if not isinstance(call, ast.Call):
        return ()
    kind = call.func
    if isinstance(kind, ast.IfExp) and (test := folded(kind.test, known)) is not _UNKNOWN:
        kind = kind.body if test else kind.orelse
    bounds = [each for each in (folded(arg, known) for arg in call.args) if isinstance(each, int)]
    if not ast.unparse(kind).endswith(".static_range") or len(bounds) < len(call.args):
        return ()
    turns = range(*bounds)
    tests = [each.test for each in ast.walk(node) if isinstance(each, ast.If | ast.IfExp)]
    told_apart = any(ast.unparse(node.target) in _names(test, ast.Load) for test in tests)
    return turns if told_apart or len(turns) == 1 else ()


def _without_unused(text: str) -> str:
    """A text without functions that nobody calls and constants that nobody reads."""
    tree, lines = ast.parse(text), text.splitlines()
    *others, kernel = _functions(tree)
    read = _names(tree, ast.Load)
    unused: list[ast.stmt] = [each for each in others if each.name not in read]
    unused += [each for each in _constants(kernel) if not _names(each, ast.Store) & read]
    for node in sorted(unused, key=lambda each: -each.lineno):
        decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        first = min([node.lineno, *(each.lineno for each in decorators)]) - 1
        while lines[first - 1].lstrip().startswith("#"):
            first -= 1
        del lines[first : node.end_lineno]
    text = re.sub(r":\n\n+(?= )", ":\n", "\n".join(lines) + "\n")
    text = re.sub(r"\n{4,}", "\n\n\n", re.sub(r"\n{3,}(?= )", "\n\n", text))
    return _without_unused(text) if unused else text


def _constants(kernel: ast.FunctionDef) -> Iterator[ast.stmt]:
    """The statements that name a constant."""
    for node in (each for each in ast.walk(kernel) if isinstance(each, ast.stmt)):
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if value is not None and folded(value, {}) is not _UNKNOWN:
            yield node


def _functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in tree.body if isinstance(node, ast.FunctionDef)]


def _names(node: ast.AST, how: type[ast.expr_context]) -> set[str]:
    """The names in it that are loaded, or stored."""
    found = (each for each in ast.walk(node) if isinstance(each, ast.Name))
    return {each.id for each in found if isinstance(each.ctx, how)}


def _before(lines: Sequence[str], line: int) -> int:
    """The last line before this one that is neither empty nor a comment."""
    line -= 1
    while lines[line - 1].lstrip()[:1] in ("", "#"):
        line -= 1
    return line


def _moved(lines: Iterable[str], left: int) -> Iterator[str]:
    """Lines moved to the left by so many columns."""
    return (line[left:] for line in lines)
