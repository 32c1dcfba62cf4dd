"""Stand-ins of Ray: an actor whose answers a test gives, and nodes where such are started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from functools import partial
from types import SimpleNamespace
from typing import Any

from flashgen.evaluate.workers.answers import Task


class Actor:
    """Stands for an actor's handle: what its future does is given."""

    def __init__(self, does: Callable[[Any], None] = lambda _: None) -> None:
        self.given: list[Any] = []

        def run(task: Task) -> Any:
            future: Any = Future()
            self.given.append((task, future))
            does(future)
            return SimpleNamespace(future=lambda: future)

        self.run = SimpleNamespace(remote=run)


class Ray:
    """Stands for the module of Ray."""

    def __init__(self) -> None:
        self.killed: list[object] = []

    def kill(self, actor: object) -> None:
        self.killed.append(actor)


class Unawaited(Future[Any]):
    """A future for which nobody may wait."""

    def result(self, timeout: float | None = None) -> Any:
        return super().result(timeout=0)


class Started(Actor):
    """One that a Fleet started, with these options. says: what it says of itself; life: raises when
    it dies.
    """

    def __init__(self, options: Mapping[str, Any], **_: Any) -> None:
        super().__init__()
        self.options = options
        self.node = bytes.fromhex(options["scheduling_strategy"].node_id).rstrip(b"\0").decode()
        self.says, self.life = Unawaited(), Unawaited()
        for name, future in (("describe", self.says), ("live", self.life)):
            reference = SimpleNamespace(future=partial(lambda future: future, future))
            setattr(self, name, SimpleNamespace(remote=partial(lambda it: it, reference)))


class Fleet(Ray):
    """A Ray of nodes with these resources by name, of which some are gone."""

    def __init__(self, **nodes: Mapping[str, float]) -> None:
        super().__init__()
        self.resources, self.gone = nodes, set[str]()
        self.started: list[Started] = []

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": name.encode().ljust(28, b"\0").hex(), "Alive": name not in self.gone,
                "Resources": held, "NodeManagerHostname": name, "NodeManagerAddress": "10.0.0.1",
            }
            for name, held in self.resources.items()
        ]  # fmt: skip

    def remote(self, _: type) -> Any:
        return self

    def options(self, **options: Any) -> Any:
        def remote(**fields: Any) -> Started:
            self.started.append(Started(options, **fields))
            return self.started[-1]

        return SimpleNamespace(remote=remote)

    def kill(self, actor: object) -> None:
        super().kill(actor)
        if isinstance(actor, Started) and not actor.life.done():
            actor.life.set_exception(RuntimeError("it was killed"))


class AtOnce(Executor):
    """Does what it is given in the thread that gives it."""

    def submit(self, do: Any, /, *arguments: Any, **fields: Any) -> Any:
        do(*arguments, **fields)
