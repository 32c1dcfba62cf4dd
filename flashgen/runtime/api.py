"""The public functions: each calls the current dispatcher, which registry.use() may change.

The dispatcher is loaded with this module, because torch.compile cannot trace through the loading.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from flashgen.runtime import registry
from flashgen.runtime.dispatcher import Dispatcher

__all__ = ["attention", "decode", "digest", "explain", "explain_decode"]

Method = TypeVar("Method", bound=Callable[..., Any])


def _following(method: Method) -> Method:
    """The method of this name of whichever dispatcher is current at the call."""
    name = method.__name__

    @functools.wraps(method)
    def function(*args: Any, **kwargs: Any) -> Any:
        return getattr(registry.current(), name)(*args, **kwargs)

    function.__module__ = "flashgen"
    function.__qualname__ = name
    return cast(Method, function)


_first = cast(Dispatcher, registry.current())

attention = _following(_first.attention)
decode = _following(_first.decode)
digest = _following(_first.digest)
explain = _following(_first.explain)
explain_decode = _following(_first.explain_decode)
