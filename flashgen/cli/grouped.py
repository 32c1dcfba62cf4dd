"""Options in groups: a command takes frozen dataclasses, Typer sees their fields as options, and
--help shows each group in a panel of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from copy import copy
from typing import Annotated, Any, get_args, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of its dataclasses as parameters of its own.

    A field is annotated as a parameter of a Typer command is. The panel is the dataclass's
    docstring, without its full stop.
    """
    groups = get_type_hints(command)
    groups.pop("return", None)
    fields = {
        field.name: _parameter(field, get_type_hints(group, include_extras=True), group)
        for group in groups.values()
        for field in dataclasses.fields(group)
    }

    @functools.wraps(command)
    def flat(**given: Any) -> None:
        command(
            **{
                name: group(
                    **{field.name: given[field.name] for field in dataclasses.fields(group)}
                )
                for name, group in groups.items()
            }
        )

    flat.__signature__ = inspect.Signature(list(fields.values()))  # type: ignore[attr-defined]
    flat.__annotations__ = {name: each.annotation for name, each in fields.items()}
    del flat.__wrapped__  # Typer would look for its annotations
    return flat


def _parameter(field: dataclasses.Field[Any], hints: dict[str, Any], group: type) -> Any:
    """The parameter of a field, its option in the panel of the group."""
    kind, option = get_args(hints[field.name])
    option = copy(option)
    option.rich_help_panel = (group.__doc__ or "").rstrip(".")
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=field.default,
        annotation=Annotated[kind, option],
    )
