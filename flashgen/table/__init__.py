"""Entries, configs/<slug>.yaml in and out, and generated/ made from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashgen.table.table import Table, load, save

__all__ = ["Table", "load", "save"]


def __getattr__(name: str) -> Any:
    if name in ("Table", "load", "save"):
        import flashgen.table.table as place

        return getattr(place, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
