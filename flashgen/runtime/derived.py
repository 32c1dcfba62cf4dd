"""Functions whose arguments are those of another one, with its documentation of them."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Set
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

_ARGUMENTS = re.compile(r"^( *)Args:\n(.*?)(?=^\s*Returns:)", re.MULTILINE | re.DOTALL)

_LINE = re.compile(r"^ *(\w+): (.*)$", re.MULTILINE)
_REST = re.compile(r"^ *\*\*rest: .*$", re.MULTILINE)


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


def hands_on(other: Callable[..., Any], *but: str) -> Callable[[Function], Function]:
    """A decorator of a function that gives its `**rest` to `other`: its arguments are its own, then
    those of that function without `but`, in their order and with their documentation.
    """

    def derive(function: Function) -> Function:
        declared = inspect.signature(function)
        own = [each for each in declared.parameters.values() if each.kind is not each.VAR_KEYWORD]
        others = inspect.signature(other).parameters
        rest = [each for name, each in others.items() if name not in but]
        parameters = sorted((*own, *rest), key=lambda each: each.kind)  # keyword-only ones last
        allowed = {each.name for each in parameters}
        places = [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY]

        @functools.wraps(function)
        def called(*arguments: Any, **options: Any) -> Any:  # which torch.compile can trace
            if len(arguments) > len(places):
                raise TypeError(
                    f"{function.__name__}() takes {len(places)} positional arguments but "
                    f"{len(arguments)} were given"
                )
            for name in options:
                if name not in allowed:
                    raise TypeError(
                        f"{function.__name__}() got an unexpected keyword argument {name!r}"
                    )
            return function(**dict(zip(places, arguments, strict=False)), **options)

        called.__signature__ = declared.replace(parameters=parameters)  # type: ignore[attr-defined]
        called.__doc__ = _with_rest(function.__doc__ or "", other.__doc__ or "", allowed)
        return cast(Function, called)

    return derive


def _with_rest(text: str, other: str, names: Set[str]) -> str:
    """A documentation whose line of `**rest` is that of the arguments of `other` with these names,
    which it does not have itself; as it is where Python leaves documentation out.
    """
    if (found := _REST.search(text)) is None or (there := _ARGUMENTS.search(other)) is None:
        return text
    missing = names - {name for name, _ in _LINE.findall(text[: found.start()])}
    lines = [
        line for line in there[2].splitlines() if (at := _LINE.match(line)) and at[1] in missing
    ]
    return text.replace(found[0], "\n".join(lines), 1)


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
