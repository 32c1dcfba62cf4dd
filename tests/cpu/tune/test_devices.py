"""fleet: a worker a GPU, of one product; they end with it, and it fails only if all do."""

from __future__ import annotations

import ast
import io
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from flashgen.errors import FlashgenError, InvalidArgument, NoGpuError, ToolchainError
from flashgen.tune import devices as fleet
from flashgen.tune.devices import Device, FleetOptions, chosen, devices
from tests.fleet_fakes import WORKER

H200 = tuple(Device(index=index, name="NVIDIA H200") for index in range(4))
PROGRAM = (sys.executable, "-c", WORKER)


def test_the_devices_are_those_that_torch_lists() -> None:
    assert devices("tests.fleet_fakes:eight") == tuple(
        Device(index=index, name="NVIDIA H200") for index in range(8)
    )
    with pytest.raises(NoGpuError, match="torch sees no GPU here"):
        devices("tests.fleet_fakes:none")
    with pytest.raises(ToolchainError, match=r"cannot list the GPUs .*driver too old"):
        devices("tests.fleet_fakes:broken")


def test_torch_is_asked_for_names(monkeypatch: pytest.MonkeyPatch) -> None:
    products = [SimpleNamespace(name=name) for name in ("NVIDIA H200", "NVIDIA L4")]
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: len(products),
        get_device_properties=products.__getitem__,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert fleet.list_devices({}) == {"names": ["NVIDIA H200", "NVIDIA L4"]}
    cuda.is_available = lambda: False
    assert fleet.list_devices({}) == {"names": []}


@pytest.mark.parametrize(
    ("text", "indices"), [("all", (0, 1, 2, 3)), ("0,2", (0, 2)), ("3", (3,)), (" 2, 1", (2, 1))]
)
def test_all_or_some_are_chosen(text: str, indices: tuple[int, ...]) -> None:
    assert tuple(device.index for device in chosen(text, H200)) == indices


@pytest.mark.parametrize("text", ["", "4", "0,0", "0,", "-1", "one", "ALL", "0 1"])
def test_others_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"--gpus must be all, or indices of 0, 1, 2, 3"):
        chosen(text, H200)


def test_two_products_are_refused_and_one_of_them_is_not() -> None:
    found = devices("tests.fleet_fakes:mixed")
    with pytest.raises(InvalidArgument, match=r"one product.*0 nvidia_h200, 1 nvidia_l4"):
        chosen("all", found)
    assert chosen("0,2", found) == (found[0], found[2])


def run(folder: Path, do: str, **fields: object) -> str:
    """Run a fleet of as many fake workers as there are words in `do`; what it printed."""
    screen = io.StringIO()
    options = FleetOptions(
        arguments=("tune", "--out", str(folder), "--do", do),
        devices=H200[: len(do.split(","))],
        out=folder,
        **fields,  # type: ignore[arg-type]
    )
    fleet.run(options, Console(file=screen, width=120), PROGRAM)
    return screen.getvalue()


def started(folder: Path, index: int) -> tuple[list[str], int]:
    """The arguments of a worker, and its process."""
    text, _, pid = (folder / f"worker {index}").read_text().rpartition(" ")
    return ast.literal_eval(text), int(pid)


def test_each_worker_has_its_gpu_and_all_have_one_storage(tmp_path: Path) -> None:
    printed = run(tmp_path, "end,end", jobs=7)
    lines = [started(tmp_path, index)[0] for index in (0, 1)]
    assert lines[0][:5] == ["tune", "--out", str(tmp_path), "--do", "end,end"]
    journal = f"journal://{tmp_path}/.flashgen/fleet.journal"
    assert [line[5:] for line in lines] == [
        ["--gpus", str(index), "--storage", journal, "--jobs", "3"] for index in (0, 1)
    ]
    assert printed.count("hello of 0") == printed.count("done by 0") == 1
    assert "of 1" not in printed  # they print the same


def test_a_storage_that_is_named_is_passed_on(tmp_path: Path) -> None:
    run(tmp_path, "end", storage="postgresql://db/x")
    assert started(tmp_path, 0)[0][-3:-2] == ["postgresql://db/x"]
    assert not (tmp_path / ".flashgen").exists()


@pytest.mark.parametrize("way", ["fail", "die"])
def test_the_death_of_some_is_told_and_survived(tmp_path: Path, way: str) -> None:
    printed = run(tmp_path, f"{way},end")
    how = {"fail": "exit code 1: flashgen: no luck [red] today", "die": "SIGKILL: hello of 0"}[way]
    assert f"GPU 0: its worker {'ended with' if way == 'fail' else 'was ended by'} {how}" in printed
    assert "done by 1" in printed  # whose lines are shown from then on


def test_when_all_fail_it_has_failed(tmp_path: Path) -> None:
    with pytest.raises(FlashgenError, match=r"all 2 workers failed; .*GPU 0.*no luck") as caught:
        run(tmp_path, "fail,die")
    assert "\n" not in str(caught.value)


def test_an_old_journal_is_no_part_of_a_new_run(tmp_path: Path) -> None:
    state = tmp_path / ".flashgen"
    state.mkdir()
    for name in ("fleet.journal", "fleet.journal.0123", "nvidia_h200.jsonl"):
        (state / name).touch()
    run(tmp_path, "end")
    assert sorted(path.name for path in state.iterdir()) == ["fleet.lock", "nvidia_h200.jsonl"]


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FlashgenError, match="cannot be written"):
        run(tmp_path / "file", "end")


class Fleet:
    """A fleet in a process of its own, whose workers have all begun."""

    def __init__(self, folder: Path, do: str) -> None:
        self.pid = os.fork()  # a new interpreter takes seconds to import
        if not self.pid:
            self._be_one(folder, do)
        files = [folder / f"worker {index}" for index in range(len(do.split(",")))]
        deadline = time.monotonic() + 300
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        self.workers = [started(folder, index)[1] for index in range(len(files))]

    def _be_one(self, folder: Path, do: str) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        fleet.LEAVE_S = 1.0 if "hang" in do else 300.0
        status = 1
        try:
            run(folder, do)
        except KeyboardInterrupt:
            status = 130
        finally:
            os._exit(status)

    def wait(self) -> int:
        """Its exit code; then no worker is left, or will be in a moment."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        deadline = time.monotonic() + 120
        while any(runs(pid) for pid in self.workers):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return code


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_an_interrupt_reaches_the_workers_once_and_is_waited_for(tmp_path: Path) -> None:
    begun = Fleet(tmp_path, "wait,wait")
    os.kill(begun.pid, signal.SIGINT)
    assert begun.wait() == 130
    assert sorted(path.name for path in tmp_path.glob("left *")) == ["left 0", "left 1"]


def test_who_does_not_heed_it_is_killed(tmp_path: Path) -> None:
    begun = Fleet(tmp_path, "hang,wait")
    os.kill(begun.pid, signal.SIGINT)
    assert begun.wait() == 130


def test_workers_die_with_their_fleet_and_a_second_one_waits_till_then(tmp_path: Path) -> None:
    begun = Fleet(tmp_path, "hang,wait")
    with pytest.raises(FlashgenError, match="another fleet tunes in"):
        run(tmp_path, "end")
    os.kill(begun.pid, signal.SIGKILL)
    assert begun.wait() == -signal.SIGKILL
    run(tmp_path, "end")
