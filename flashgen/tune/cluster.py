"""Workers of a run as actors of Ray (https://docs.ray.io): one for each core, and for each GPU.

An actor has a child process of its own, with the limits of one host: a kernel that crashes or hangs
costs a child. What costs the actor, its node or its network costs what was under way there. Actors
are started on each node that there is and that comes, and anew where one was lost. Ray is imported
here alone, once a cluster is named.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashgen import paths
from flashgen.errors import FlashgenError, InvalidArgument, NoGpuError, ToolchainError, one_line
from flashgen.evaluate.build import cpu_count
from flashgen.evaluate.pools import Pools
from flashgen.evaluate.workers.answers import (
    Answer,
    Died,
    Done,
    Pool,
    Raised,
    Task,
    TimedOut,
    WorkerLost,
    WorkerUnfit,
    WrongAnswer,
    why_wrong,
)
from flashgen.evaluate.workers.crew import Crew
from flashgen.evaluate.workers.pool import TaskLimits
from flashgen.files import write_whole
from flashgen.spec.gpu import OFFLINE_TARGET, Gpu
from flashgen.spec.records import shown, value_of
from flashgen.tune import devices
from flashgen.tune.places import Say, TargetOptions, TuningTarget, offline_targets, warn
from flashgen.tune.worker import Worker, versions

LOCAL = "local"
"""Names a Ray of this process' own, on this host."""

START_S = 120.0
"""Until the first actors say what they are: a node on a network file system imports slowly."""

PATIENCE_S = 120.0
"""Without any worker, until the run ends: nodes may come back."""

GRACE_S = 30.0
"""On top of a task's own limit, until an actor counts as hung."""

LOOK_S = 1.0
"""Between two looks at the nodes, and for actors that hang."""

AGAIN_S = 5.0
"""Until another actor is started where one was lost."""

LONGEST_TEXT = 1 << 20
"""Characters of a message or a file of a worker: they have a few thousand."""

OBJECT_STORE_BYTES = 80 << 20
"""Of a local Ray: tasks and answers are a few KB each."""

DIED = "it died, or its node, or the network"


class Seat:
    """The near end of an actor, as a pool of one. where: its node, for people.

    answers: the thread that takes in answers. In Ray's own nothing of Ray may be called: it would
    wait for itself.
    """

    size = 1

    def __init__(
        self, ray: Any, actor: Any, where: str, limits: TaskLimits, answers: Executor
    ) -> None:
        self.where = where
        self._answers = answers
        self._ray = ray
        self._actor = actor
        self._limits = limits
        self._asked: tuple[Future[Answer], float, float] | None = None

    def submit(self, task: Task) -> Future[Answer]:
        """As Pool.submit."""
        future: Future[Answer] = Future()
        future.set_running_or_notify_cancel()
        # Twice: an actor tries what ran out of time once more.
        now, limit_s = time.monotonic(), 2 * self._limits.hang_s(task, first=True) + GRACE_S
        self._asked = future, now + limit_s, limit_s
        given = self._actor.run.remote(task).future()

        def answered(done: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the run is over
                self._answers.submit(self._answered, task, now, future, done)

        given.add_done_callback(answered)
        return future

    def close(self) -> None:
        """As Pool.close."""
        with contextlib.suppress(Exception):  # it is gone, or Ray is
            self._ray.kill(self._actor)

    def end_if_overdue(self) -> None:
        """Give up an actor that shows no life."""
        asked = self._asked
        if asked is not None and time.monotonic() > asked[1]:
            self.close()
            self._lose(asked[0], f"no answer within {asked[2]:.0f} s")

    def _answered(self, task: Task, begun: float, future: Future[Answer], done: Any) -> None:
        self._asked = None
        try:
            said = done.result()
        except Exception as error:  # Ray's own, or what the actor raised
            cause = getattr(error, "cause", None)
            why, kind = (DIED, WorkerLost) if cause is None else (_first_line(cause), WorkerUnfit)
            self._lose(future, why, kind)
            return
        try:
            answer, files = _answer_of(said, task)
        except ValueError as error:
            self._lose(future, f"it answers what cannot be: {_first_line(error)}", WrongAnswer)
            return
        except Exception as error:  # a future without an answer would stop the run
            self._lose(future, f"its answer cannot be read: {one_line(error)}", WorkerUnfit)
            return
        with contextlib.suppress(InvalidStateError):  # it was overdue
            try:
                for path, text in files.items():
                    write_whole(path, text)
            except FlashgenError as error:  # of this machine
                future.set_exception(error)
                return
            if isinstance(answer, Done):
                self._limits.learn(task, time.monotonic() - begun, first=True)
            future.set_result(answer)

    def _lose(self, future: Future[Answer], why: str, kind: type[WorkerLost] = WorkerLost) -> None:
        with contextlib.suppress(InvalidStateError):
            future.set_exception(kind(f"{self.where}: {why}", self.where))


def _answer_of(said: object, task: Task) -> tuple[Answer, Mapping[Path, str]]:
    """What Worker.run returned, read by types with bounds: the answer, and files to write. Raises
    ValueError where it cannot be the answer to this task: a worker may be spoiled, or lie.
    """
    if not isinstance(said, tuple) or len(said) != 2:
        raise ValueError(f"an answer and files were due: got {shown(said)}")
    answer, files = said
    types = _FIELDS.get(type(answer))
    if types is None or vars(answer).keys() != types.keys():
        raise ValueError(f"an answer was due: got {shown(answer)}")
    for name, kind in types.items():
        value = value_of(kind, getattr(answer, name), name)
        if isinstance(value, str) and len(value) > LONGEST_TEXT:
            raise ValueError(f"{name} must have at most {LONGEST_TEXT} characters")
    if why := why_wrong(task, answer):
        raise ValueError(why)
    return answer, _files_of(files, task)


def _files_of(said: object, task: Task) -> Mapping[Path, str]:
    """The files that a task leaves in its cache: small ones, named after the kernel. A task without
    a cache or a kernel leaves none.
    """
    files: dict[str, str] = value_of(dict[str, str], said, "the files")
    folder, digest = task.payload.get("cache"), task.payload.get("digest")
    if files and not (folder and digest):
        raise ValueError(f"no files were due: got {shown(list(files))}")
    begins = re.escape(str(digest).removeprefix("sha256:")[:32])
    for name, text in files.items():
        if not re.fullmatch(rf"{begins}[\w.-]*\.json", name) or len(text) > LONGEST_TEXT:
            raise ValueError(f"a small file of the kernel was due: got {shown(name)}")
    return {Path(str(folder)) / name: text for name, text in files.items()}


_FIELDS: dict[type, dict[str, Any]] = {
    Done: {"value": dict[str, Any]},
    Raised: {"kind": str, "message": str, "where": str, "ended": bool},
    Died: {"detail": str, "outside": bool},
    TimedOut: {"limit_s": float, "hung": bool},
}
"""The types of an answer's fields."""


@dataclass(eq=False)
class _Slot:
    """Room for an actor on a node. seat: the one that is there; gone: when that was lost."""

    node: str
    where: str
    gpu: bool
    actor: Any = None
    seat: Seat | None = None
    gone: float = 0.0
    asked: Any = None  # what it says of itself, in a future
    life: Any = None  # a future that raises when it dies
    refused: str = ""


@dataclass(eq=False)
class Cluster:
    """The actors of a run on all nodes of a Ray. cpu, and products by slug: the crews."""

    ray: Any
    say: Say
    with_gpus: bool
    query: str
    cpu: Crew = field(init=False)
    products: dict[str, tuple[Gpu, Crew]] = field(default_factory=dict)
    begun: bool = False

    def __post_init__(self) -> None:
        self.cpu = self._crew()
        self._slots: list[_Slot] = []
        self._seen: set[str] = set()
        self._limits = TaskLimits()
        self._answers = ThreadPoolExecutor(1)
        self._alone: dict[Crew, float] = {}
        self._told: set[str] = set()
        self._over = threading.Event()
        self._versions = versions()

    def start(self) -> None:
        """Start actors, and wait until they have said what they are, or START_S have passed."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            self.look()
            if self._slots and all(slot.seat or slot.refused for slot in self._slots):
                break
            self._over.wait(0.05)
        for slot in self._slots:
            if not slot.seat and not slot.refused:
                what = "GPUs" if slot.gpu else "cores"
                self._tell(
                    f"Not there yet: {slot.where}, whose {what} may be in use; "
                    f"it joins once they are free."
                )
        self.begun = True
        threading.Thread(target=self._watch, daemon=True).start()

    def look(self) -> None:
        """Start actors where there are none, take in those that are there, end those that hang."""
        alive = {node["NodeID"]: node for node in self.ray.nodes() if node["Alive"]}
        for name in alive.keys() - self._seen:
            self._slots += self._slots_of(alive[name])
        self._seen |= alive.keys()
        for slot in self._slots:
            if slot.refused or slot.node not in alive:
                continue
            if slot.seat is not None:
                slot.seat.end_if_overdue()
            elif slot.actor is None:
                if time.monotonic() - slot.gone > AGAIN_S:
                    self._start(slot)
            elif slot.asked.done():
                self._take_in(slot)
        for crew in (self.cpu, *(crew for _, crew in self.products.values())):
            since = self._alone.setdefault(crew, time.monotonic())
            if crew.size:
                del self._alone[crew]
            elif self.begun and time.monotonic() - since > PATIENCE_S:
                crew.fail(
                    FlashgenError(
                        f"the cluster has had no worker for {PATIENCE_S:.0f} s: nothing is lost; "
                        f"see `ray status`, and run the same command again"
                    )
                )

    def close(self) -> None:
        """End all actors."""
        self._over.set()
        for slot in self._slots:
            if slot.actor is not None:
                with contextlib.suppress(Exception):
                    self.ray.kill(slot.actor)
        for crew in (self.cpu, *(crew for _, crew in self.products.values())):
            crew.close()
        self._answers.shutdown(wait=False)

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            with contextlib.suppress(Exception):  # Ray does not answer: it may again
                self.look()

    def _slots_of(self, node: Mapping[str, Any]) -> list[_Slot]:
        held = node["Resources"]
        gpus = int(held.get("GPU", 0)) if self.with_gpus else 0
        where = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        cores = max(0, int(held.get("CPU", 0)) - gpus)
        counts = (True, gpus), (False, cores)
        return [
            _Slot(node=node["NodeID"], where=where, gpu=gpu, gone=-AGAIN_S)
            for gpu, count in counts
            for _ in range(count)
        ]

    def _start(self, slot: _Slot) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options = {
            "num_cpus": 1,
            "num_gpus": int(slot.gpu),
            "max_restarts": 0,
            "max_concurrency": 2,  # live() beside the rest, of which each awaits the one before
            "scheduling_strategy": NodeAffinitySchedulingStrategy(slot.node, soft=False),
        }
        made = self.ray.remote(Worker).options(**options)
        slot.actor = made.remote(gpu=slot.gpu, query=self.query)
        slot.asked = slot.actor.describe.remote().future()
        slot.life = slot.actor.live.remote().future()

    def _take_in(self, slot: _Slot) -> None:
        """Give a worker that has said what it is to its crew, or refuse it."""
        try:
            said = slot.asked.result()
        except Exception as error:
            cause = getattr(error, "cause", None)
            if cause is None:  # it died before it spoke
                slot.actor, slot.gone = None, time.monotonic()
            else:
                self._refuse(slot, _first_line(cause))
            return
        try:
            crew = self._crew_of(slot, value_of(dict[str, Any], said, "what it says of itself"))
        except Exception as error:  # a worker may say anything
            self._refuse(slot, _first_line(error))
            return
        seat = slot.seat = Seat(self.ray, slot.actor, slot.where, self._limits, self._answers)
        crew.add(seat)
        died = WorkerLost(f"{slot.where}: {DIED}", slot.where)

        def ended(_: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the run is over
                self._answers.submit(crew.discard, seat, died)

        slot.life.add_done_callback(ended)

    def _refuse(self, slot: _Slot, why: str) -> None:
        slot.refused = why
        self._tell(f"Left alone: {slot.where}: {why}")
        self._free(slot)

    def _crew_of(self, slot: _Slot, said: Mapping[str, Any]) -> Crew:
        """The crew of a worker that says this of itself. Raises FlashgenError if it may not be."""
        for name, here in self._versions.items():
            if said.get(name) != here:
                raise FlashgenError(f"its {name} is {said.get(name)}, and that of this run {here}")
        if not slot.gpu:
            return self.cpu
        gpus = value_of(tuple[Gpu, ...], said.get("gpus"), "its list of GPUs")
        if not gpus:
            raise FlashgenError("torch sees no GPU there")
        gpu = gpus[0]
        if gpu.slug not in self.products:
            if self.begun:
                raise FlashgenError(f"its {gpu.name} came when the run had begun; run it again")
            self.products[gpu.slug] = gpu, self._crew()
        known, crew = self.products[gpu.slug]
        if known != gpu:
            raise FlashgenError(f"its {gpu.name} has other facts than the first of that name")
        return crew

    def _crew(self) -> Crew:
        return Crew(on_loss=self._lost, hopeful=True)

    def _lost(self, seat: Pool, error: WorkerLost) -> None:
        for slot in self._slots:
            if slot.seat is seat:
                slot.seat, slot.actor, slot.gone = None, None, time.monotonic()
                if isinstance(error, WorkerUnfit):
                    slot.refused = str(error)
        if self._over.is_set():  # close() ended it
            return
        self._tell(f"Lost a worker: {error}; what it did is done again elsewhere.")

    def _free(self, slot: _Slot) -> None:
        with contextlib.suppress(Exception):
            self.ray.kill(slot.actor)
        slot.actor = None

    def _tell(self, sentence: str) -> None:
        """Say something once: a node has many cores."""
        if sentence not in self._told:
            self._told.add(sentence)
            self.say(sentence)


@contextlib.contextmanager
def opened(address: str, wanted: TargetOptions, say: Say) -> Iterator[tuple[TuningTarget, ...]]:
    """The places of a cluster: each GPU product, or all targets of `wanted`, offline.

    Raises NoGpuError if it has no GPU and no target is named, ToolchainError and FlashgenError.
    """
    offline = wanted.target is not None
    targets = offline_targets(wanted.target, "--target uses no GPU", say) if offline else ()
    with connected(address, wanted.jobs) as ray:
        cluster = Cluster(ray=ray, say=say, with_gpus=not offline, query=devices.QUERY)
        try:
            cluster.start()
            yield _places(cluster, targets, say)
        finally:
            cluster.close()


def _places(cluster: Cluster, targets: Sequence[Gpu], say: Say) -> tuple[TuningTarget, ...]:
    if not cluster.cpu.size:
        raise FlashgenError(
            f"no worker of the cluster has answered within {START_S:.0f} s: see `ray status`, and "
            f"that flashgen is installed on its nodes"
        )
    if targets:
        say(f"{cluster.cpu.size} workers of the cluster compile and check.")
        return tuple(TuningTarget(gpu=gpu, pools=Pools(cpu=cluster.cpu)) for gpu in targets)
    if not cluster.products:
        raise NoGpuError(
            f"the cluster has no GPU: without one, add --target {OFFLINE_TARGET}, or all"
        )
    for gpu, crew in cluster.products.values():
        say(f"Tuning for {gpu.name} ({gpu.slug}), measuring on {crew.size} of the cluster.")
        warn(gpu, say)
    return tuple(
        TuningTarget(gpu=gpu, pools=Pools(cpu=cluster.cpu, device=crew))
        for gpu, crew in cluster.products.values()
    )


@contextlib.contextmanager
def connected(address: str, jobs: int | None) -> Iterator[Any]:
    """The module of Ray, connected to a cluster: LOCAL, "auto" or ray://HOST:PORT.

    Raises InvalidArgument, ToolchainError if Ray is missing, FlashgenError if none answers.
    """
    if address not in (LOCAL, "auto") and not address.startswith("ray://"):
        raise InvalidArgument(f"cluster must be local, auto or ray://HOST:10001: got {address!r}")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
    try:
        import ray
    except ImportError:
        raise ToolchainError(f"--cluster needs Ray: {paths.install_command('cluster')}") from None
    options: dict[str, Any] = {"address": address}
    if address == LOCAL:
        os.environ.setdefault("RAY_worker_niceness", "0")  # otherwise 15: tasks would time out
        options |= {"num_cpus": jobs or cpu_count(), "include_dashboard": False}
        options["object_store_memory"] = OBJECT_STORE_BYTES
    mine = not ray.is_initialized()
    if mine:
        try:
            ray.init(log_to_driver=False, logging_level="ERROR", **options)
        except Exception as error:  # Ray has no common class of those
            raise FlashgenError(
                f"no Ray answers at {address} ({_first_line(error)}): start one with `ray start`, "
                f"or name local"
            ) from None
    try:
        yield ray
    finally:
        if mine:
            ray.shutdown()


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
