"""Entries, configs/<slug>.yaml in and out, and generated/ made from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.lazy import attach

if TYPE_CHECKING:
    from flashgen.table.table import Table, load, save

__all__ = ["Table", "load", "save"]

__getattr__, __dir__ = attach(
    __name__,
    dict.fromkeys(__all__, "flashgen.table.table"),
)
