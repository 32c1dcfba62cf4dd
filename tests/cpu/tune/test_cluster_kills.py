"""kill -9 of workers, nodes and drivers at random moments: nothing is lost, and the end is the same."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashgen import paths
from flashgen.search.log import outcomes_of
from tests.cpu.tune.test_cluster import H200, ROOT, actors, written

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = pytest.mark.slow("starts and kills nodes of Ray: minutes")

KILLS = 20

DRIVER = """
import pathlib, sys
import ray
from rich.console import Console
from flashgen import paths
from flashgen.evaluate.on_gpu import GpuEvaluator
from flashgen.search.goal import Budget
from flashgen.table import emit
from flashgen.evaluate.workers import crew
from flashgen.tune import cluster, devices, evaluators, tune
from flashgen.tune.options import TuneOptions
from tests.cpu.tune.test_cluster import FAKES, SPECS

out = pathlib.Path(sys.argv[1])
ray.init(address="auto", _node_ip_address=sys.argv[2], log_to_driver=False, logging_level="ERROR")
devices.QUERY = "tests.fleet_fakes:visible"
paths.shipped_configs_dir = lambda: out / "nothing shipped"
emit.write = lambda *_: []
cluster.AGAIN_S = 0.1
crew.MOST_DEATHS = 1000  # here the test kills, at random, and no task is to blame
evaluators.make_evaluator = lambda place, out, log: GpuEvaluator(
    place.gpu, 0, paths.state_dir(out), tasks=FAKES, pools=place.pools
)
options = TuneOptions(
    specs=SPECS, seqs=(512, 2048, 4096, 16384), budget=Budget(trials=40), out=out, cluster="auto"
)
print(f"{len(tune.tune(options, Console(width=200)))} tables", flush=True)
"""


class Nodes:
    """A Ray of one head without GPUs, where drivers run, and two nodes that a test may kill.

    Each has an address of its own: a driver is a part of the node with its host's address, and ends
    with that.
    """

    def __init__(self) -> None:
        self.ray = cluster_utils.Cluster(
            initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
        )
        self._numbers = itertools.count(2)
        self.killable = [self._add() for _ in range(2)]

    def _add(self) -> Any:
        address = f"127.0.0.{next(self._numbers)}"
        return self.ray.add_node(
            num_cpus=2, num_gpus=1, node_ip_address=address, include_dashboard=False
        )

    def kill(self, number: int) -> None:
        """Kill a node and what runs there; another one comes."""
        self.ray.remove_node(self.killable[number], allow_graceful=False)
        self.killable[number] = self._add()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    for name, value in {
        "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    made = Nodes()
    monkeypatch.setenv("RAY_ADDRESS", made.ray.address)
    yield made
    made.ray.shutdown()


def started(out: Path, nodes: Nodes) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", DRIVER, str(out), nodes.ray.head_node.node_ip_address]
    log = (out.parent / f"{out.name}.printed").open("ab")
    return subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)


def test_twenty_kills_change_nothing(nodes: Nodes, tmp_path: Path) -> None:
    assert started(tmp_path / "calm", nodes).wait() == 0, (tmp_path / "calm.printed").read_text()
    chance, killed = random.Random(0), Counter[str]()
    out = tmp_path / "killed"
    driver = started(out, nodes)
    while killed.total() < KILLS:
        log = paths.log_file(out, H200.slug)
        size = log.stat().st_size if log.exists() else 0
        deadline = time.monotonic() + 120  # the run goes on before it is disturbed again
        while driver.poll() is None and time.monotonic() < deadline:
            if log.exists() and log.stat().st_size > size:
                break
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.5))
        what = chance.choice(("worker", "worker", "node", "driver"))
        if driver.poll() is not None:
            assert driver.returncode in (0, -signal.SIGKILL)
            break
        if what == "driver":
            driver.kill()
            assert driver.wait() == -signal.SIGKILL
            driver = started(out, nodes)
        elif what == "node":
            nodes.kill(chance.randrange(2))
        elif found := actors():
            os.kill(chance.choice(found), signal.SIGKILL)
        killed[what] += 1
    assert driver.wait() == 0, (tmp_path / "killed.printed").read_text()
    assert written(out, H200.slug) == written(tmp_path / "calm", H200.slug)
    keys = [
        (o.stage, o.spec, o.problem, o.config)
        for o in outcomes_of(paths.log_file(out, H200.slug), lambda _: None)
    ]
    assert len(keys) == len(set(keys))
    printed = (tmp_path / "killed.printed").read_text()
    assert killed.total() == KILLS, killed
    assert re.search(r"Lost a worker: .*done again\s+elsewhere", printed)
    assert not list(out.rglob("*.py")), "no kernel was blamed"
    print(killed)
