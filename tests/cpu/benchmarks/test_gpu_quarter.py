"""benchmarks/gpu_quarter.py: what it does in its seconds, and how it goes on behind what hangs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import gpu_quarter as program
from benchmarks.quarter import experiments, lines, place
from flashgen.evaluate.evaluator import triton_version
from flashgen.schedules.config import kernel_name
from flashgen.schedules.hopper import HOPPER
from flashgen.spec.gpu import TARGETS, Gpu
from flashgen.spec.problem import workload
from tests.makers import make_config, make_spec
from tests.tables import H200

PROGRAM = Path(program.__file__)
STUB = """
import os, time
from flashgen.evaluate.workers.child import Unrecoverable

def begin(payload):
    from dataclasses import asdict
    from flashgen.spec.gpu import TARGETS
    return {"about": {"kind": "about"}, "gpu": asdict(TARGETS["nvidia_h200"]), "first_line": "stub"}

def measured(payload):
    kind = payload["item"]["kind"]
    if kind == "k0":
        time.sleep(3600)
    if kind == "k1":
        os._exit(9)
    if kind == "k2":
        raise Unrecoverable from RuntimeError("illegal access")
    if kind == "k3":
        raise ValueError("refused")
    if kind == "k4":
        import a_package_that_nobody_has
    return {"status": "ok", "detail": str(os.getpid())}
"""


def asked(out: Path, **more: Any) -> Namespace:
    given = {"out": out, "prepared": out, "tiny": True, "only": None, "jobs": 1, "execute": False}
    return Namespace(**given | {"seconds": 600.0} | more)


@pytest.mark.slow("7 s; tests/driver has all experiments")
def test_a_tiny_run_does_what_a_cpu_can_and_goes_on_behind_what_is_there(tmp_path: Path) -> None:
    known = {"kind": "floors", "key": "floors", "experiment": "floors", "seconds": 15.0}
    lines.append(tmp_path / program.LINES, known | {"status": "given up", "outcomes": []})
    words = ["run", "--tiny", "--out", str(tmp_path), "--only", "floors", "forward", "last"]
    done = subprocess.run([sys.executable, PROGRAM, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no GPU, nothing is measured" in done.stdout
    assert "floors: 0 of 1 ok" in done.stdout
    found = lines.read(tmp_path / program.LINES)[2:]
    assert [each["kind"] for each in found] == ["round", "case", "check"]
    assert {each["status"] for each in found} == {"ok"}
    named = {each["name"]: each["status"] for each in found[1]["case"]["lines"]}
    assert named["flashgen"] == named["SDPA math"] == "ok"
    assert [each["source"] for each in found[2]["outcomes"]] == ["untimed"]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven items, and a child that hangs in the first of them."""
    (tmp_path / "stub_of_child.py").write_text(STUB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(program, "CHILD", "stub_of_child:")
    listed = experiments.Experiment(name="a", seconds=99, items=partial(_items, 0, 7))
    monkeypatch.setattr(experiments, "EXPERIMENTS", [listed])


def test_what_hangs_or_dies_costs_its_own_seconds_and_another_child_goes_on(
    stub: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "ITEM_S", 0.3)
    assert program.run(asked(tmp_path)) == 0
    first, *found = lines.read(tmp_path / program.LINES)
    assert first["kind"] == "about"
    assert [(each["status"], each["detail"]) for each in found[:5]] == [
        ("given up", "hung"),
        ("given up", "the worker ended with exit code 9"),
        ("broken", "illegal access"),
        ("failed", "refused"),
        ("failed", "the package a_package_that_nobody_has is missing: install it"),
    ]
    assert {each["status"] for each in found[5:]} == {"ok"}
    assert len({each["detail"] for each in found[5:]}) == 1
    assert capsys.readouterr().out.startswith("stub\na: 2 of 7 ok")


def test_a_run_ends_by_itself_behind_what_hangs_to_the_end(
    stub: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock stands still until the item is asked for: a machine may take long to start."""
    since: list[float] = []
    ask = program.Launcher.ask

    def asked_for(self: program.Launcher, name: str, *rest: Any) -> Any:
        if name == "measured":
            since.append(time.time())
        return ask(self, name, *rest)

    clock = SimpleNamespace(time=lambda: time.time() - since[0] if since else 0.0)
    monkeypatch.setattr(program, "time", clock)
    monkeypatch.setattr(program.Launcher, "ask", asked_for)
    assert program.run(asked(tmp_path, seconds=2.0)) == 0
    assert len(since) == 1
    assert [line["kind"] for line in lines.read(tmp_path / program.LINES)] == ["about"]


def test_an_experiment_has_its_seconds_and_those_that_were_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = [
        experiments.Experiment(name=name, seconds=s, items=partial(_items, first, last))
        for name, s, first, last in (("a", 10, 0, 4), ("b", 7, 4, 5), ("c", 2, 5, 8))
    ]
    monkeypatch.setattr(experiments, "EXPERIMENTS", listed)
    done: list[lines.Line] = []
    for _, item in program.todo(asked(tmp_path, tiny=False), H200, done):
        done.append({"key": item.key, "seconds": 4.0})
    # a ends 2 s late, b leaves 1 of its 7, with which c has 3: one item. What was cut off follows.
    assert [each["key"] for each in done] == ["k0", "k1", "k2", "k4", "k5", "k3", "k6", "k7"]


def _items(first: int, last: int, *_: object) -> Any:
    return (experiments.Item(kind=f"k{number}") for number in range(first, last))


def test_a_way_is_measured_where_it_is_legal() -> None:
    def packed(gpu: Gpu, direction: str) -> set[str]:
        items = [item for item in experiments._packed(gpu, []) if item.kind == "round"]
        of = [item for item in items if item.spec and item.spec.direction == direction]
        return {config.schedule for item in of for config in item.configs}

    for direction in ("forward", "backward_dkv", "backward_dq"):
        assert "hopper" in packed(H200, direction)
        assert "hopper" not in packed(TARGETS["nvidia_l4"], direction)
        assert packed(TARGETS["nvidia_l4"], direction)


def test_each_feature_of_schedule_hopper_is_checked_and_measured() -> None:
    for several in ((experiments._right,), (experiments._packed, experiments._features)):
        every = [item for items in several for item in items(H200, [])]
        of = [item.spec for item in every if any(c.schedule == "hopper" for c in item.configs)]
        for name in HOPPER.features["forward"]:
            assert any(getattr(spec, name) for spec in of if spec), name


def test_kernels_of_calls_and_of_merged_splits_are_compiled_before() -> None:
    names = {kernel_name(*pair) for pair in experiments.pairs_of(["decode", "host"], H200)}
    assert {name.partition("_br")[0] for name in names} == {
        "decode_bf16_d128", "decode_bf16_d128_paged", "combine_bf16_d128", "combine_bf16_d64",
        "fwd_bf16_d64", "fwd_bf16_d64_causal", "fwd_bf16_d64_causal_window", "decode_bf16_d64_paged",
        "fwd_bf16_d64_causal_alibi", "decode_bf16_d64_sink_paged", "decode_bf16_d64_window_paged",
    }  # fmt: skip


@pytest.mark.slow("20 seconds; make test has a tiny run, which compiles what it launches")
def test_what_is_launched_is_compiled_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, config = make_spec(), make_config(64, 32)
    item = experiments.Item(kind="round", spec=spec, problem=workload(spec, 512), configs=(config,))
    listed = experiments.Experiment(name="a", seconds=1, items=lambda *_: iter([item]))
    monkeypatch.setattr(experiments, "EXPERIMENTS", [listed])
    assert program.prepare(asked(tmp_path / "made", target=[H200.slug])) == 0
    shutil.unpack_archive(tmp_path / "made.tar.xz", tmp_path / "there")
    manifest = json.loads((tmp_path / "there/aot" / H200.slug / "manifest.json").read_text())
    assert (len(manifest["kernels"]), manifest["triton"]) == (1, triton_version())
    monkeypatch.setenv("FLASHGEN_AOT", str(tmp_path / "there/aot"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(place, "device_gpu", lambda index: H200)
    monkeypatch.setattr(place.os, "nice", lambda by: by)
    assert place.ahead({"only": None}) == {}
    assert {each.suffix for each in (tmp_path / "cache").rglob("*.*")} == {".json", ".cubin"}
    (fact,) = lines.outcomes_of([{"outcomes": lines.read(tmp_path / "there/facts.jsonl")}])
    assert fact.ok
    assert fact.timing is not None
    assert (fact.gpu, fact.spec, fact.problem, fact.config) == (
        H200.slug,
        spec,
        item.problem,
        config,
    )
