"""Functions whose arguments are those of another one, with its documentation of them."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

_ARGUMENTS = re.compile(r"^( *)Args:\n(.*?)(?=^\s*Returns:)", re.MULTILINE | re.DOTALL)


def explains(other: Callable[..., Any], **own: str) -> Callable[[Function], Function]:
    """A decorator of a function that says what `other` would do: it takes the arguments of that
    function, then those of `own` by name, which has their documentation. It is called with all of
    them, defaults filled in. `return_lse` has no effect there.
    """

    def derive(function: Function) -> Function:
        given, declared = inspect.signature(other), inspect.signature(function)
        added = [declared.parameters[name] for name in own]
        signature = given.replace(
            parameters=[*given.parameters.values(), *added],
            return_annotation=declared.return_annotation,
        )

        @functools.wraps(function)
        def called(*arguments: Any, **options: Any) -> Any:
            try:
                bound = signature.bind(*arguments, **options)
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            bound.apply_defaults()
            return function(*bound.args, **bound.kwargs)

        called.__signature__ = signature  # type: ignore[attr-defined]
        called.__doc__ = _documented(function.__doc__ or "", other.__doc__ or "", own)
        return cast(Function, called)

    return derive


def _documented(text: str, other: str, own: Mapping[str, str]) -> str:
    """A documentation with the arguments of another one and its own; as it is where Python leaves
    documentation out.
    """
    if (found := _ARGUMENTS.search(other)) is None:
        return text
    indent, lines = found[1], re.sub(r"return_lse: .*", "return_lse: has no effect.", found[2])
    added = "".join(f"{indent}    {name}: {what}\n" for name, what in own.items())
    arguments = f"{indent}Args:\n{lines.rstrip()}\n{added}\n"
    return text.replace(f"{indent}Returns:", f"{arguments}{indent}Returns:", 1)
