"""GPUs that a test takes for real ones."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from flashgen.spec.gpu import TARGETS


def mixed(_: dict[str, Any]) -> dict[str, Any]:
    slugs = ("nvidia_h200", "nvidia_l4", "nvidia_h200")
    return {"gpus": [asdict(TARGETS[slug]) for slug in slugs]}


def none(_: dict[str, Any]) -> dict[str, Any]:
    return {"gpus": []}


def broken(_: dict[str, Any]) -> dict[str, Any]:
    raise RuntimeError("driver too old")
