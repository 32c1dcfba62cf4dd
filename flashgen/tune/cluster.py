"""Workers of a run as actors of Ray (https://docs.ray.io): one for each core, and for each GPU.

An actor has a child process of its own, with the limits of one host: a kernel that crashes or hangs
costs a child. What costs the actor, its node or its network costs what was under way there. Actors
are started on each node that there is and that comes, and anew where one was lost. Ray is imported
here alone, once a cluster is named.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from flashgen import paths
from flashgen.errors import FlashgenError, InvalidArgument, NoGpuError, ToolchainError
from flashgen.evaluate.build import cpu_count
from flashgen.evaluate.pools import Pools
from flashgen.evaluate.workers.answers import (
    Pool,
    WorkerLost,
    WorkerUnfit,
)
from flashgen.evaluate.workers.crew import Crew
from flashgen.evaluate.workers.pool import TaskLimits
from flashgen.spec.gpu import OFFLINE_TARGET, Gpu
from flashgen.spec.records import value_of
from flashgen.tune import devices
from flashgen.tune.actor_seat import DIED, Seat, first_line
from flashgen.tune.places import Say, TargetOptions, TuningTarget, offline_targets, warn
from flashgen.tune.worker import Worker, versions

LOCAL = "local"
"""Names a Ray of this process' own, on this host."""

START_S = 120.0
"""Until the first actors say what they are: a node on a network file system imports slowly."""

PATIENCE_S = 120.0
"""Without any worker, until the run ends: nodes may come back."""

LOOK_S = 1.0
"""Between two looks at the nodes, and for actors that hang."""

AGAIN_S = 5.0
"""Until another actor is started where one was lost."""

OBJECT_STORE_BYTES = 80 << 20
"""Of a local Ray: tasks and answers are a few KB each."""


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
                self._refuse(slot, first_line(cause))
            return
        try:
            crew = self._crew_of(slot, value_of(dict[str, Any], said, "what it says of itself"))
        except Exception as error:  # a worker may say anything
            self._refuse(slot, first_line(error))
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
                f"no Ray answers at {address} ({first_line(error)}): start one with `ray start`, "
                f"or name local"
            ) from None
    try:
        yield ray
    finally:
        if mine:
            ray.shutdown()
