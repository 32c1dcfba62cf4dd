"""Clusters: actors of a local Ray, which describe GPUs that a test makes up and are killed at will."""

from __future__ import annotations

import contextlib
import io
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from flashgen import paths
from flashgen.errors import FlashgenError, InvalidArgument, ToolchainError
from flashgen.evaluate.on_gpu import GpuEvaluator
from flashgen.evaluate.payloads import Check, Tasks
from flashgen.evaluate.pools import Children, Device
from flashgen.evaluate.workers.answers import (
    Answer,
    Died,
    Done,
    Task,
    TimedOut,
    WorkerLost,
    WorkerUnfit,
    WrongAnswer,
)
from flashgen.evaluate.workers.crew import Crew
from flashgen.evaluate.workers.pool import TaskLimits
from flashgen.search.goal import Budget
from flashgen.spec.gpu import TARGETS
from flashgen.table import emit
from flashgen.tune import actor_seat, cluster, evaluators, tune, worker
from flashgen.tune.actor_seat import Seat
from flashgen.tune.cluster import Cluster
from flashgen.tune.options import TuneOptions
from flashgen.tune.places import TargetOptions
from flashgen.version import VERSION
from tests import fleet_fakes, programs
from tests.makers import make_config, make_spec
from tests.ray_fakes import Actor, AtOnce, Fleet, Ray

ray = pytest.importorskip("ray")
ROOT = Path(__file__).resolve().parents[3]
H200, L4 = TARGETS["nvidia_h200"], TARGETS["nvidia_l4"]
SPECS = (make_spec(), make_spec(mask="causal"))
FAKES = Tasks(
    compile="tests.worker_faults:compile_one",
    check="tests.worker_faults:check_one",
    measure="tests.worker_faults:measure_one",
    final="tests.worker_faults:measure_round",
    answers="tests.worker_faults:device_answers",
)


@pytest.fixture(scope="module")
def local() -> Iterator[None]:
    """A Ray of four cores and three GPUs, where actors find the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            address="local", num_cpus=4, num_gpus=3, include_dashboard=False, log_to_driver=False,
            logging_level="ERROR", object_store_memory=80 << 20,
        )  # fmt: skip
        yield
        ray.shutdown()


def actors() -> list[int]:
    """The processes of the actors of a Ray that this process started: children of its raylets."""
    listed = subprocess.run(
        ["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    mine = {pid for pid, parent, _ in rows if int(parent) == os.getpid()}
    return [int(pid) for pid, parent, name in rows if parent in mine and name[:11] == "ray::Worker"]


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Path, str]]:
    """Tune over the cluster, with tasks that a test makes up; the folder, and what was printed."""
    monkeypatch.setattr("flashgen.tune.devices.QUERY", "tests.fleet_fakes:visible")
    monkeypatch.setattr(paths, "shipped_configs_dir", lambda: tmp_path / "nothing shipped")
    monkeypatch.setattr(emit, "write", lambda *_: [])
    monkeypatch.setattr(cluster, "AGAIN_S", 0.1)
    monkeypatch.setattr(
        evaluators,
        "make_evaluator",
        lambda place, out, _: GpuEvaluator(
            place.gpu, 0, paths.state_dir(out), tasks=FAKES, pools=place.pools
        ),
    )

    def tuned(name: str) -> tuple[Path, str]:
        screen = io.StringIO()
        options = TuneOptions(
            specs=SPECS, seqs=(512,), budget=Budget(trials=6), out=tmp_path / name,
            cluster="local",
        )  # fmt: skip
        tune.tune(options, Console(file=screen, width=200))
        return tmp_path / name, screen.getvalue()

    return tuned


def written(folder: Path, slug: str) -> str:
    """The table's text, less when."""
    when = r"20\d{6}T\d{6}Z|20\d\d-\d\d-\d\dT[\d:]+Z"
    return re.sub(when, "", paths.table_file(folder, slug).read_text())


@pytest.mark.slow("twenty seconds of Ray's processes")
@pytest.mark.usefixtures("local")
def test_every_product_is_tuned_and_what_is_killed_changes_nothing(tuned: Any) -> None:
    """One after the other all actors are killed while the second run lasts."""
    calm, said = tuned("calm")
    assert "Tuning for NVIDIA H200 (nvidia_h200), measuring on 2 of the cluster." in said
    assert "Tuning for NVIDIA L4 (nvidia_l4), measuring on 1 of the cluster." in said
    while actors():  # the first run's end
        time.sleep(0.05)

    over, killed = threading.Event(), list[int]()

    def kill() -> None:
        chance = random.Random(0)
        while not over.wait(chance.uniform(0.1, 0.4)):
            found = [pid for pid in actors() if pid not in killed]
            if found and len(killed) < 4:
                killed.append(chance.choice(found))
                os.kill(killed[-1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        disturbed, said = tuned("disturbed")
    finally:
        over.set()
        killer.join()
    assert killed
    for gpu in (H200, L4):
        assert written(disturbed, gpu.slug) == written(calm, gpu.slug)


@pytest.mark.parametrize(
    "lie", ["garbage", pytest.param("form", marks=pytest.mark.slow("make test has garbage"))]
)
@pytest.mark.usefixtures("local")
def test_a_lie_over_ray_costs_its_worker_and_nothing_else(
    lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "Worker", fleet_fakes.Liar)
    said: list[str] = []
    run = Cluster(ray=ray, say=said.append, with_gpus=False, query="")
    payload = {"cache": str(tmp_path / "cache"), "file": str(tmp_path / "lied"), "lie": lie}
    try:
        run.start()
        before = run.cpu.size
        task = Task(function="tests.worker_faults:echo", payload=payload, limit_s=60.0)
        answer = run.cpu.submit(task).result()
        assert isinstance(answer, Done)
        assert answer.value["lie"] == lie
        run.look()
        assert run.cpu.size == before - 1
    finally:
        run.close()
    assert ["it answers what cannot be" in sentence for sentence in said] == [True]
    assert [path.name for path in tmp_path.iterdir()] == ["lied"]


def kill_idle(found: list[int]) -> None:
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    while set(found) & set(actors()):
        time.sleep(0.02)


@pytest.mark.slow("eight seconds of Ray's processes")
@pytest.mark.usefixtures("local")
def test_the_products_of_all_gpus_are_known_though_workers_died_before_the_run_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An H200's worker dies before the L4's has spoken: Ray gives its GPU to the L4's next worker."""
    monkeypatch.setattr(cluster, "AGAIN_S", 0.1)
    take_in, killed = Cluster._take_in, list[int]()

    def and_kill(self: Cluster, slot: Any) -> None:
        take_in(self, slot)
        if slot.gpu and not killed:
            killed.extend(actors())
            kill_idle(killed)

    monkeypatch.setattr(Cluster, "_take_in", and_kill)
    said: list[str] = []
    made = Cluster(ray=ray, say=said.append, with_gpus=True, query="tests.fleet_fakes:visible")
    try:
        made.start()
        assert killed
        sizes = {slug: crew.size for slug, (_, crew) in made.products.items()}
        assert sizes == {"nvidia_h200": 2, "nvidia_l4": 1}
        assert made.cpu.size == 1
        task = Task(function="tests.worker_faults:compile_one", payload={"cache": ""}, limit_s=60.0)
        monkeypatch.setattr("flashgen.evaluate.workers.crew.MOST_DEATHS", 1)
        dead = actors()
        kill_idle(dead)  # the next task is given to none of these, and blamed for none
        while not (made.cpu.size and set(actors()) - set(dead)):
            time.sleep(0.05)  # the test's own time limit ends this
        assert not isinstance(made.cpu.submit(task).result(), Died)
    finally:
        made.close()


@pytest.mark.slow("starts a Ray of its own: half a minute")
def test_a_cluster_is_reached_from_elsewhere(tmp_path: Path) -> None:
    """By Ray's client, whose handles lack some of what those of a node of the cluster have."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "GRPC_POLL_STRATEGY": "poll",  # with epoll1 the server of clients sometimes dies as it forks
    }
    gcs, client = free_ports(2)
    head = subprocess.Popen(
        [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=2",
            f"--port={gcs}", f"--ray-client-server-port={client}", "--include-dashboard=false",
        ],
        env=environment, cwd=tmp_path, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        assert head.stdout is not None
        assert any("Ray runtime started" in line for line in head.stdout)
        done = subprocess.run(
            [
                sys.executable, "-m", "flashgen", "tune", "--cluster", f"ray://127.0.0.1:{client}",
                "--target", "nvidia_l4", "--head-dim", "64", "--no-causal", "--seq", "1024",
                "--trials", "3", "--out", "out",
            ],
            env=environment, cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        head.wait()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 workers of the cluster compile and check." in done.stdout
    assert paths.table_file(tmp_path / "out", "nvidia_l4").exists()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


TASK = Task(function="any", payload={"cache": ""}, limit_s=0.0)


def test_what_an_actor_answers_and_what_it_leaves_arrive(tmp_path: Path) -> None:
    actor = Actor(lambda future: future.set_result((Done({"x": 1}), {"k-sm_90.json": "{}"})))
    seat = Seat(Ray(), actor, "n1", TaskLimits(), AtOnce())
    task = replace(TASK, payload={"cache": str(tmp_path / "cache"), "digest": "sha256:k"})
    assert seat.submit(task).result() == Done({"x": 1})
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["k-sm_90.json"]


def never(payload: object, value: object) -> None:
    raise ValueError(f"{value} is no answer to {payload}")


def test_an_answer_is_judged_and_limits_are_learnt_of_what_was_done() -> None:
    limits, said = TaskLimits(), [(TimedOut(1.0), {}), (Done({}), {}), (Done({}), {})]
    seat = Seat(Ray(), Actor(lambda f: f.set_result(said.pop(0))), "n1", limits, AtOnce())
    for learnt in ([], [TASK.function]):
        seat.submit(TASK).result(timeout=0)
        assert [*limits._slowest] == learnt
    with pytest.raises(WrongAnswer, match="is no answer to"):
        seat.submit(replace(TASK, judge=f"{__name__}:never")).result(timeout=0)


CHECK = asdict(Check(spec=SPECS[0], config=make_config(64, 64), device="cpu", seed=0))


LONG = "x" * ((1 << 20) + 1)


class Odd:
    """What no worker of flashgen sends."""

    def __repr__(self) -> str:
        raise KeyError("odd")


@pytest.mark.parametrize(
    ("payload", "said", "why"),
    [
        (CHECK, (Done({"x": 1}), {"k.json": "{}"}), "no files were due: got ['k.json']"),
        ({"cache": ""}, (Done({}), {"k.json": "{}"}), "no files were due"),
        ({"digest": "sha256:k"}, (Done({}), {"k.json": "{}"}), "no files were due"),
        ({"cache": "c", "digest": "k"}, (Done({}), {"j.json": ""}), "a small file of the kernel"),
        ({"cache": "c", "digest": "k"}, (Done({}), {"k.json": "\ud800"}), "text of Unicode"),
        ({"cache": "c", "digest": "k"}, (Done({}), {"k.json/../j.py": ""}), "a small file of the"),
        ({"cache": "c", "digest": "k"}, (Done({}), {"k.json": LONG}), "a small file of the kernel"),
        ({}, (Died(LONG), {}), "detail must have at most 1048576 characters"),
        ({}, Odd(), "its answer cannot be read: KeyError: 'odd'"),
        ({}, (Done({}), Odd()), "its answer cannot be read: KeyError: 'odd'"),
    ],
)
def test_an_answer_that_cannot_be_read_costs_its_worker_and_ends_the_wait(
    payload: dict[str, Any], said: object, why: str
) -> None:
    actor = Actor(lambda future: future.set_result(said))
    task = replace(TASK, payload=payload)
    with pytest.raises(WorkerUnfit, match=re.escape(why)) as caught:
        Seat(Ray(), actor, "n1", TaskLimits(), AtOnce()).submit(task).result(timeout=0)
    assert str(caught.value).startswith("n1: ")


@pytest.mark.parametrize(
    "said",
    [None, [], "garbage", Odd(), {}, {"gpus": 5}, {"gpus": [5]}, {"gpus": [{"name": "H200"}]}],
)
def test_a_worker_that_describes_nothing_is_left_alone_and_not_started_again(said: object) -> None:
    said_of_it, used = list[str](), Ray()
    run = Cluster(ray=used, say=said_of_it.append, with_gpus=True, query="")
    slot = cluster._Slot(node="n", where="n1 (10.0.0.1)", gpu=True, actor="its actor")
    slot.asked = Future()
    versions = worker.versions() if isinstance(said, dict) and said else {}
    slot.asked.set_result(said | versions if isinstance(said, dict) else said)
    run._take_in(slot)
    assert slot.refused
    assert slot.seat is None
    assert used.killed == ["its actor"]
    assert len(said_of_it) == 1
    assert said_of_it[0].startswith("Left alone: n1 (10.0.0.1): ")


def test_a_worker_that_lies_is_told_by_name_and_not_started_again() -> None:
    told: list[str] = []
    run = Cluster(ray=Ray(), say=told.append, with_gpus=False, query="")
    seats = [Seat(Ray(), Actor(answer), name, TaskLimits(), AtOnce()) for name, answer in (
        ("n1", lambda future: future.set_result("garbage")),
        ("n2", lambda future: future.set_result((Done({"x": 1}), {}))),
    )]  # fmt: skip
    slots = [
        cluster._Slot(node="n", where=s.where, gpu=False, actor=s._actor, seat=s) for s in seats
    ]
    run._slots = slots
    for seat in seats:
        run.cpu.add(seat)
    assert run.cpu.submit(replace(TASK, payload={})).result(timeout=60) == Done({"x": 1})
    assert [bool(slot.refused) for slot in slots] == [True, False]
    assert "n1: it answers what cannot be" in slots[0].refused
    assert told == [f"Lost a worker: {slots[0].refused}; what it did is done again elsewhere."]


def test_a_task_that_makes_three_workers_answer_what_cannot_be_is_given_up() -> None:
    crew = Crew(hopeful=True)
    for name in ("n1", "n2", "n3"):
        crew.add(
            Seat(Ray(), Actor(lambda f: f.set_result("garbage")), name, TaskLimits(), AtOnce())
        )
    answer = crew.submit(TASK).result(timeout=60)
    assert isinstance(answer, Died)
    assert not answer.outside
    assert crew.size == 0


def test_an_actor_that_dies_is_lost_and_one_that_cannot_work_is_not_to_blame() -> None:
    class Remote(Exception):
        cause = ToolchainError("No space left on device")

    for error, kind, said in (
        (
            RuntimeError("The actor died unexpectedly.\nmore"),
            WorkerLost,
            "n1: it died, or its node",
        ),
        (Remote(), WorkerUnfit, "n1: No space left"),
    ):
        seat = Seat(
            Ray(),
            Actor(lambda future, error=error: future.set_exception(error)),
            "n1",
            TaskLimits(),
            AtOnce(),
        )
        with pytest.raises(kind, match=said) as caught:
            seat.submit(TASK).result()
        assert caught.value.blames is (kind is WorkerLost)


def test_an_actor_that_hangs_is_ended_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_seat, "GRACE_S", 0.0)
    monkeypatch.setattr("flashgen.evaluate.workers.pool.FIRST_TASK_S", 600.0)
    monkeypatch.setattr("flashgen.evaluate.workers.pool.HANGS", 0.5)
    used, actor = Ray(), Actor(lambda _: None)
    seat = Seat(used, actor, "n1", TaskLimits(), AtOnce())
    future = seat.submit(TASK)
    seat.end_if_overdue()
    assert not future.done()
    later = time.monotonic() + 601.0
    monkeypatch.setattr(cluster.time, "monotonic", lambda: later)
    idle = Seat(used, Actor(lambda f: f.set_result((Done({}), {}))), "n1", TaskLimits(), AtOnce())
    idle.submit(TASK).result()
    monkeypatch.setattr(cluster.time, "monotonic", lambda: later + 601.0)
    run = Cluster(ray=(fleet := Fleet(n1={})), say=str, with_gpus=False, query="")
    n1 = fleet.nodes()[0]["NodeID"]
    run._slots = [cluster._Slot(node=n1, where="n1", gpu=False, seat=s) for s in (seat, idle)]
    run.look()
    assert used.killed == [actor]
    with pytest.raises(WorkerLost, match="n1: no answer within 600 s"):
        future.result()
    actor.given[0][1].set_result((Done({}), {}))  # too late: it changes nothing


def test_others_are_refused_by_name() -> None:
    said: list[str] = []
    made = Cluster(ray=Ray(), say=said.append, with_gpus=True, query="")
    here = worker.versions()
    fields = vars(H200) if hasattr(H200, "__dict__") else {}
    slot = cluster._Slot(node="n", where="n1 (10.0.0.1)", gpu=True)

    def crew_of(**changes: Any) -> Any:
        return made._crew_of(slot, here | {"gpus": [fields]} | changes)

    assert crew_of() is made.products["nvidia_h200"][1]
    for name in here:
        with pytest.raises(FlashgenError, match=rf"its {name} is 0.0.1, and that of this run"):
            crew_of(**{name: "0.0.1"})
    with pytest.raises(FlashgenError, match="torch sees no GPU there"):
        crew_of(gpus=[])
    with pytest.raises(FlashgenError, match="other facts than the first of that name"):
        crew_of(gpus=[fields | {"sms": 66}])
    made.begun = True
    assert crew_of() is made.products["nvidia_h200"][1]  # one more of a product that is tuned
    with pytest.raises(FlashgenError, match="came when the run had begun"):
        crew_of(gpus=[vars(L4)])


HERE = worker.versions() | {"gpus": [asdict(H200)]}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of clusters: it says `now`, in seconds."""
    made = SimpleNamespace(now=1000.0)
    made.monotonic = lambda: made.now
    monkeypatch.setattr(cluster, "time", made)
    return made


def of_fleet(fleet: Fleet, told: list[str], *, with_gpus: bool = True) -> Cluster:
    made = Cluster(ray=fleet, say=told.append, with_gpus=with_gpus, query="")
    made._answers = AtOnce()  # type: ignore[assignment]
    return made


def test_each_core_and_each_gpu_of_a_node_that_is_there_has_one_actor() -> None:
    """A core is for each that works for a GPU."""
    for with_gpus, actors in (
        (True, {("n1", 1): 2, ("n1", 0): 3, ("n2", 0): 2}),
        (False, {("n1", 0): 5, ("n2", 0): 2}),
    ):
        fleet = Fleet(n1={"CPU": 5.0, "GPU": 2.0}, n2={"CPU": 2.0}, dead={"CPU": 8.0})
        fleet.gone = {"dead"}
        run = of_fleet(fleet, [], with_gpus=with_gpus)
        run.look()
        run.look()
        assert Counter((each.node, each.options["num_gpus"]) for each in fleet.started) == actors
        for each in fleet.started:
            assert not each.options["scheduling_strategy"].soft
            some = [each.options[name] for name in ("num_cpus", "max_restarts", "max_concurrency")]
            assert some == [1, 0, 2]


def test_who_is_lost_is_started_again_where_its_node_is_and_who_is_refused_never(
    clock: SimpleNamespace,
) -> None:
    fleet = Fleet(n1={"CPU": 1.0}, n2={"CPU": 1.0})
    run = of_fleet(fleet, told := [])
    run.look()
    died, unfit = sorted(fleet.started, key=lambda each: each.node)
    died.says.set_exception(RuntimeError("it died before it spoke"))
    unfit.says.set_result({})
    run.look()
    assert fleet.killed == [unfit]
    run.look()
    assert len(fleet.started) == 2  # not at once
    clock.now += 6.0
    run.look()
    run.look()
    assert [each.node for each in fleet.started[2:]] == ["n1"]
    fleet.started[2].says.set_result(HERE)
    run.look()
    assert run.cpu.size == 1
    fleet.started[2].life.set_exception(RuntimeError("it died"))
    assert run.cpu.size == 0
    fleet.gone = {"n1"}
    clock.now += 6.0
    run.look()
    assert len(fleet.started) == 3
    fleet.gone.clear()
    run.look()
    assert [each.node for each in fleet.started[3:]] == ["n1"]
    assert [sentence.split(":")[0] for sentence in told] == ["Left alone", "Lost a worker"]


def test_crews_that_lose_all_workers_wait_for_two_minutes_and_then_fail(
    clock: SimpleNamespace,
) -> None:
    fleet = Fleet(n1={"CPU": 2.0, "GPU": 1.0})
    run = of_fleet(fleet, [])
    run.look()
    for each in fleet.started:
        each.says.set_result(HERE)
    run.look()
    run.begun = True
    futures = [crew.submit(TASK) for crew in (run.cpu, run.products["nvidia_h200"][1])]
    clock.now += 1000.0  # all this time there were workers
    for each in fleet.started[:]:
        each.given[0][1].set_exception(RuntimeError("its node is gone"))
    run.look()
    clock.now += 119.0
    run.look()
    assert not any(future.done() for future in futures)
    clock.now += 2.0
    run.look()
    for future in futures:
        with pytest.raises(FlashgenError, match="has had no worker for 120 s"):
            future.result(timeout=0)


def test_a_start_awaits_all_says_who_is_missing_and_an_end_ends_all(clock: SimpleNamespace) -> None:
    class Slow(Fleet):
        """A look takes 50 s; at the first all but n1 and n2 are silent, at the third n3 speaks."""

        def nodes(self) -> list[dict[str, Any]]:
            clock.now += 50.0
            for each in self.started:
                due = {"n1": 1100.0, "n2": 1100.0, "n3": 1150.0}.get(each.node, math.inf)
                if clock.now >= due and not each.says.done():
                    each.says.set_result({} if each.node == "n2" else HERE)
            return super().nodes()

    fleet = Slow(n1={"CPU": 1.0}, n2={"CPU": 2.0}, n3={"CPU": 1.0}, n4={"GPU": 1.0})
    run = of_fleet(fleet, told := [])
    run.start()
    assert run.cpu.size == 2
    run.close()
    assert told == [
        f"Left alone: n2 (10.0.0.1): its flashgen is None, and that of this run {VERSION}",
        "Not there yet: n4 (10.0.0.1), whose GPUs may be in use; it joins once they are free.",
    ]
    assert {*fleet.killed} == {*fleet.started}


def test_a_cluster_where_nobody_answers_is_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "connected", lambda *_: contextlib.nullcontext(Fleet()))
    monkeypatch.setattr(cluster, "START_S", 0.0)
    with (
        pytest.raises(FlashgenError, match="no worker of the cluster has answered within 0 s"),
        cluster.opened("auto", TargetOptions(), str),
    ):
        pass


def test_a_worker_keeps_its_cache_and_sends_what_a_compile_left() -> None:
    made = worker.Worker(gpu=False, query="")
    made._pool = Children(1)
    folders = []

    def submit(task: Task) -> Future[Answer]:
        folders.append(Path(task.payload["cache"]))
        (folders[-1] / f"{task.function}.json").write_text("{}")
        (folders[-1] / "binary").touch()
        done: Future[Answer] = Future()
        done.set_result(Done({}))
        return done

    made._pool.submit = submit  # type: ignore[method-assign]
    kinds: list[Any] = ["compile", "compile", "interpret", "interpret"]
    sent = [made.run(replace(TASK, function=f"k{n}", kind=kind)) for n, kind in enumerate(kinds)]
    assert sent == [(Done({}), {f"k{n}.json": "{}"} if n < 2 else {}) for n in range(4)]
    assert folders[2] == folders[3]
    assert not folders[0].exists()
    assert made.describe() == worker.versions() | {"gpus": []}  # it asks no GPU
    assert isinstance(worker.Worker(gpu=True, query="")._pool, Device)


def test_what_must_be_equal_on_all_workers_is_all_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = worker.versions()
    for name in ("PACKAGE", "templates_dir"):
        monkeypatch.setattr(paths, name, tmp_path if name.isupper() else lambda: tmp_path)
        changed = worker.versions()
        assert [key for key in here if here[key] != changed[key]] == ["code of flashgen"]
        here = changed


def test_addresses_and_whose_ray_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness"):
        monkeypatch.setenv(name, "0")
    for running, address in ((False, "local"), (False, "ray://head:10001"), (True, "auto")):
        stub = SimpleNamespace(
            is_initialized=partial(bool, running),
            init=lambda **options: asked.append((options["address"], options.get("num_cpus"))),
            shutdown=lambda: asked.append("ended"),
        )
        monkeypatch.setitem(sys.modules, "ray", stub)
        with cluster.connected(address, 3) as connected:
            assert connected is stub
    assert asked == [("local", 3), "ended", ("ray://head:10001", None), "ended"]


def test_addresses_and_a_ray_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(InvalidArgument, match="cluster must be local, auto or ray://"),
        cluster.connected("10.0.0.1", None),
    ):
        pass
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(ToolchainError, match=r"--cluster needs Ray: .*pip install .*ray\[client\]"),
        cluster.connected("auto", None),
    ):
        pass


def test_ray_is_imported_only_where_it_is_asked_for() -> None:
    program = (
        "import sys, flashgen.cli, flashgen.tune.tune, flashgen.tune.cluster; "
        "sys.exit('ray' in sys.modules)"
    )
    assert programs.run(["-c", program]).returncode == 0
