"""Output for people: explanations, the HTML report, calibration, plots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.lazy import attach

if TYPE_CHECKING:
    from flashgen.report.html import write_report

__all__ = ["write_report"]

__getattr__, __dir__ = attach(
    __name__,
    {"write_report": "flashgen.report.html"},
)
