"""Shared by all tests: options, one cache of compiled kernels a run, and which tests one worker runs."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A test may be slow because the machine does much else: no deadlines, and no judgement of speed.
settings.register_profile(
    "flashgen",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("flashgen")

CACHE = "TESTS_CACHE"
"""Names the folder of tests/compiled.py: of this run, or of a longer one, such as .ci/run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden from the templates"
    )
    parser.addoption(
        "--why-slow",
        action="store_true",
        help="run nothing; list the slow tests with their reasons",
    )


def pytest_configure(config: pytest.Config) -> None:
    """One folder for all that a run compiles. Workers and programs inherit the environment. They
    heed SIGINT, which a shell has its background commands ignore: some tests send it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if CACHE not in os.environ:
        os.environ[CACHE] = tempfile.mkdtemp(prefix="flashgen-tests-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(CACHE), ignore_errors=True))
    os.environ["TRITON_CACHE_DIR"] = str(Path(os.environ[CACHE]) / "triton")


def pytest_collection_finish() -> None:
    """Half a million objects of torch and of the collection stay to the end: no pass of the garbage
    collector visits them again, and passes are rarer. They took a twentieth of all CPU time.
    """
    gc.freeze()
    gc.set_threshold(10_000, *gc.get_threshold()[1:])


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """--why-slow: one line a file and reason."""
    if not session.config.getoption("--why-slow"):
        return None
    found = Counter(
        (item.nodeid.partition("::")[0], *mark.args)
        for item in session.items
        if (mark := item.get_closest_marker("slow"))
    )
    print()
    for why, count in sorted(found.items()):
        print(f"{count:5}  {': '.join(why)}")
    print(f"{found.total():5}  in all")
    return True


def pytest_unconfigure() -> None:
    if programs := sys.modules.get("tests.programs"):
        programs.RUNNING.close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker runs all tests of a file: what one compiles, others find."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):  # type: ignore[misc]
        def remove_node(self, node: Any) -> str | None:
            """As in LoadFileScheduling, but the test that lost its worker is not run again: it
            would cost every other worker, and each time as long as its timeout.
            """
            workload = self.assigned_work.pop(node)
            open_tests = [
                (unit, test)
                for unit in workload.values()
                for test, over in unit.items()
                if not over
            ]
            if not open_tests:
                return None
            unit, crashed = open_tests[0]
            unit[crashed] = True
            self.workqueue.update((s, u) for s, u in workload.items() if not all(u.values()))
            for other in self.nodes:
                self._reschedule(other)
            return str(crashed)

    return ByFile(config, log)


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))
