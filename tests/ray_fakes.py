"""Stand-ins of Ray: an actor whose answers a test gives."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from flashgen.evaluate.workers.answers import Task


class Actor:
    """Stands for an actor's handle: what its future does is given."""

    def __init__(self, does: Callable[[Any], None]) -> None:
        from concurrent.futures import Future

        self.given: list[Any] = []

        class Method:
            def remote(method, task: Task) -> Any:
                future: Any = Future()
                self.given.append((task, future))
                does(future)
                return type("Reference", (), {"future": lambda _: future})()

        self.run = Method()


class Ray:
    """Stands for the module of Ray."""

    def __init__(self) -> None:
        self.killed: list[object] = []

    def kill(self, actor: object) -> None:
        self.killed.append(actor)


class AtOnce(Executor):
    """Does what it is given in the thread that gives it."""

    def submit(self, do: Any, /, *arguments: Any, **fields: Any) -> Any:
        do(*arguments, **fields)
