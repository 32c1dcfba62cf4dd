"""The public functions: each calls the current dispatcher, which folders.use() may change.

The dispatcher is loaded with this module, because torch.compile cannot trace through the loading.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from flashgen.runtime import folders
from flashgen.runtime.keywords import hint

__all__ = ["attention", "decode", "digest", "explain", "explain_decode"]

Method = TypeVar("Method", bound=Callable[..., Any])


def _like(method: Method, function: Callable[..., Any]) -> Method:
    """A function with the name, signature and documentation of a method, as a name of flashgen."""
    functools.update_wrapper(function, method)
    function.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    function.__module__ = "flashgen"
    function.__qualname__ = method.__name__
    return cast(Method, function)


def _following(method: Method) -> Method:
    """The method of this name of whichever dispatcher is current at the call."""
    name = method.__name__

    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(folders.current(), name)(*args, **kwargs)
        except TypeError as error:
            if (better := hint(error)) is None:
                raise
            raise better from None

    return _like(method, function)


def _attention(
    q: Any, k: Any, v: Any, *, causal: Any = False, scale: Any = None, **others: Any
) -> Any:
    """As _following(), but a call of the most frequent kind is spared what ** takes."""
    serving = folders.current()
    if not others:
        found = serving.again(q, k, v, causal, scale)
        return serving.attention(q, k, v, causal=causal, scale=scale) if found is None else found[0]
    try:
        return serving.attention(q, k, v, causal=causal, scale=scale, **others)
    except TypeError as error:
        if (better := hint(error)) is None:
            raise
        raise better from None


_first = folders.current()

attention = _like(_first.attention, _attention)
decode = _following(_first.decode)
digest = _following(_first.digest)
explain = _following(_first.explain)
explain_decode = _following(_first.explain_decode)
