"""Entries, configs/<slug>.yaml in and out, and generated/ made from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.lazy import attach

if TYPE_CHECKING:
    from flashgen.table.table import Table
    from flashgen.table.table_file import load, save

__all__ = ["Table", "load", "save"]

__getattr__, __dir__ = attach(
    __name__,
    {
        "Table": "flashgen.table.table",
        "load": "flashgen.table.table_file",
        "save": "flashgen.table.table_file",
    },
)
