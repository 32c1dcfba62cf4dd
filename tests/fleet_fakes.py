"""GPUs that a test takes for real ones."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flashgen.evaluate.workers.answers import Done, Task
from flashgen.spec.gpu import TARGETS
from flashgen.tune.worker import Worker


def mixed(_: dict[str, Any]) -> dict[str, Any]:
    slugs = ("nvidia_h200", "nvidia_l4", "nvidia_h200")
    return {"gpus": [asdict(TARGETS[slug]) for slug in slugs]}


def visible(_: dict[str, Any]) -> dict[str, Any]:
    """What an actor sees of a host whose first two GPUs are H200, the third an L4."""
    slug = "nvidia_l4" if os.environ.get("CUDA_VISIBLE_DEVICES") == "2" else "nvidia_h200"
    return {"gpus": [asdict(TARGETS[slug])]}


def none(_: dict[str, Any]) -> dict[str, Any]:
    return {"gpus": []}


def broken(_: dict[str, Any]) -> dict[str, Any]:
    raise RuntimeError("driver too old")


class Liar(Worker):
    """A worker whose first answer of all, which creates a file, is the lie that the task names."""

    def run(self, task: Task) -> Any:
        try:
            Path(task.payload["file"]).touch(exist_ok=False)
        except FileExistsError:
            return super().run(task)
        return {"garbage": "garbage", "form": (Done({"us": -1.0}), {"../x.json": ""})}[
            task.payload["lie"]
        ]
