"""Worker: the remote end of a cluster's actor. Its child imports torch and Triton, not it."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Mapping
from typing import Any

import flashgen
from flashgen import paths
from flashgen.compile.known_bugs import installed_triton
from flashgen.errors import ToolchainError
from flashgen.evaluate.payloads import placed
from flashgen.evaluate.pools import Children, Device
from flashgen.evaluate.workers.answers import Answer, Done, Pool, Task
from flashgen.files import temporary_folder
from flashgen.tune.devices import LIST_LIMIT_S

Files = Mapping[str, str]


class Worker:
    """The remote end: evaluates on one core, or on the one GPU that Ray lets it see."""

    def __init__(self, *, gpu: bool, query: str) -> None:
        self._pool: Pool = Device() if gpu else Children(1)
        self._query = query if gpu else None
        self._folder = contextlib.ExitStack()
        self._cache = self._folder.enter_context(temporary_folder("worker"))

    def live(self) -> None:
        """Never returns: whoever waits for it learns at once that this process is gone."""
        threading.Event().wait()

    def describe(self) -> dict[str, Any]:
        """{flashgen, code, triton, gpus}: versions, and the fields of a Gpu for each that it sees.

        Raises ToolchainError.
        """
        gpus: list[dict[str, Any]] = []
        if self._query is not None:
            asked = Task(function=self._query, payload={}, limit_s=LIST_LIMIT_S, kind="device")
            answer = self._pool.submit(asked).result()
            if not isinstance(answer, Done):
                raise ToolchainError(f"torch cannot describe the GPU: {answer}")
            gpus = answer.value["gpus"]
        return versions() | {"gpus": gpus}

    def run(self, task: Task) -> tuple[Answer, Files]:
        """The answer to a task, and the small files that it left for its cache, by name."""
        with temporary_folder("task") as folder:
            cache = folder if task.kind == "compile" else self._cache
            answer = self._pool.submit(placed(task, cache=cache)).result()
            return answer, {path.name: path.read_text() for path in folder.glob("*.json")}


def versions() -> dict[str, str]:
    """What must be equal on all workers of a run, by name. code: a digest of flashgen's files."""
    code = hashlib.sha256()
    folders = (paths.PACKAGE, "*.py"), (paths.templates_dir(), "*.jinja")
    for path in (path for folder, name in folders for path in sorted(folder.rglob(name))):
        code.update(path.read_bytes())
    return {
        "flashgen": flashgen.__version__,
        "Triton": installed_triton(),
        "code of flashgen": code.hexdigest()[:12],
    }
