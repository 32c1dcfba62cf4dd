"""A model of one SM: the time of a launch estimated from SASS, grid and target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashgen.estimate.estimate import estimate_cubin

__all__ = ["estimate_cubin"]


def __getattr__(name: str) -> Any:
    if name == "estimate_cubin":
        from flashgen.estimate.estimate import estimate_cubin

        return estimate_cubin
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
