"""benchmarks/gpu_quarter.py: what it measures in ten minutes, how it goes on, and what is entered afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import gpu_quarter as program
from benchmarks.quarter import enter, experiments, lines
from flashgen.errors import FlashgenError
from flashgen.spec.config import config_of
from flashgen.spec.problem import bucket_of, workload
from flashgen.table.table import load
from tests.fakes import FakeEvaluator
from tests.makers import make_spec
from tests.tables import H200

PROGRAM = Path(program.__file__)
STUB = """
import json, os, sys, time
out = sys.argv[sys.argv.index("--out") + 1]
children = sorted(os.listdir(out + "/children"))
open(out + f"/children/{len(children)}", "w").close()
item = {"kind": "check", "key": f"k{len(children)}", "experiment": "right", "run": "1", "seconds": 1.0, "outcomes": []}
open(out + "/now.json", "w").write(json.dumps(item | {"until": time.time() + (0.2 if not children else 60)}))
time.sleep(60) if not children else os._exit(9 if len(children) == 1 else 0)
"""


def asked(out: Path, **more: Any) -> Namespace:
    given = {"out": out, "prepared": out, "tiny": True, "only": None, "seconds": 60.0, "until": 1e6, "ahead": False}
    return Namespace(**given | more)


def test_a_tiny_run_does_what_a_cpu_can_and_goes_on_behind_what_is_there(tmp_path: Path) -> None:
    known = {"kind": "floors", "key": "floors", "experiment": "floors", "run": "1", "seconds": 15.0}
    lines.append(tmp_path / program.LINES, known | {"status": "given up", "outcomes": []})
    words = ["run", "--tiny", "--out", str(tmp_path), "--only", "floors", "forward", "last"]
    done = subprocess.run([sys.executable, PROGRAM, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no GPU, nothing is measured" in done.stdout
    assert "floors: 0 of 1 ok" in done.stdout
    found = lines.read(tmp_path / program.LINES)[2:]
    assert [each["experiment"] for each in found] == ["forward"] * 2 + ["last"] * 2
    (case,) = (each["case"] for each in found if "case" in each)
    assert {"flashgen", "SDPA math"} <= {e["name"] for e in case["lines"] if e["status"] == "ok"}
    checks = [o for each in found if each["kind"] == "check" for o in each["outcomes"]]
    assert {each["status"] for each in checks} == {"ok"}
    assert {each["source"] for each in checks} == {"untimed"}


def test_what_hangs_or_dies_is_given_up_and_the_next_child_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "children").mkdir()
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setattr(program, "__file__", str(tmp_path / "stub.py"))
    assert program.run(asked(tmp_path)) == 0
    found = lines.read(tmp_path / program.LINES)
    assert [(each["key"], each["detail"]) for each in found] == [("k0", "hung"), ("k1", "its process ended with 9")]
    assert "given up: k0: hung" in capsys.readouterr().out


def test_an_experiment_has_its_seconds_and_those_that_were_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec()
    kinds = [experiments.Item(kind=f"k{n}", spec=spec, problem=workload(spec, 512)) for n in range(8)]
    clock = [0.0]

    class Place:
        about = {"kind": "about"}
        first_line, gpu = "", H200

        def __init__(self, _: Namespace) -> None: ...

        def measured(self, item: experiments.Item) -> lines.Line:
            clock[0] += 4.0
            return {"status": "ok"}

    monkeypatch.setitem(sys.modules, "benchmarks.quarter.place", SimpleNamespace(Place=Place))
    monkeypatch.setattr(program, "time", SimpleNamespace(time=lambda: clock[0]))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    named = [("a", 10, kinds[:4]), ("b", 7, kinds[4:5]), ("c", 2, kinds[5:])]
    monkeypatch.setattr(program, "EXPERIMENTS", [
        experiments.Experiment(name=name, seconds=s, items=lambda g, ls, its=its: iter(its)) for name, s, its in named
    ])  # fmt: skip
    assert program.work(asked(tmp_path, tiny=False)) == 0
    done = [each["kind"] for each in lines.read(tmp_path / program.LINES)[1:]]
    # a ends 2 s late, b leaves one of its 7, with which c has 3: one item. The rest follows.
    assert done == ["k0", "k1", "k2", "k4", "k5", "k3", "k6", "k7"]


def test_a_way_is_measured_as_soon_as_it_is_legal(monkeypatch: pytest.MonkeyPatch) -> None:
    def packed() -> set[str]:
        items = [item for item in experiments._packed(H200, []) if item.kind == "round"]
        return {config.schedule for item in items for config in item.configs}

    assert "hopper" not in packed()
    more, legal = config_of("br128_bc128_w8_s2_hopper_tma_lpt"), experiments.legal
    monkeypatch.setattr(experiments, "legal", lambda spec, gpu: (more, *legal(spec, gpu)))
    assert "hopper" in packed()


def about(**more: Any) -> lines.Line:
    versions = {"flashgen": "0.1.0", "triton": "3.6.0", "torch": "2.11.0", "cuda": "13.0", "protocol": 3}
    made = {"kind": "about", "tiny": False, "gpu": asdict(H200), "date": "2026-12-01T00:00:00+00:00"}
    return made | versions | {"dtype": "bfloat16"} | more


def test_what_a_round_decides_is_entered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = make_spec(head_dim=96, mask="causal")
    problem, config = workload(spec, 8192), experiments.ways(spec, H200)[0]
    us = {c: 900.0 for c in experiments.rivals(spec, H200, 8192)} | {config: 500.0}
    fake = FakeEvaluator(us=us.__getitem__, gpu=H200)
    finals = [replace(o, passes_us=(us[o.config],) * 10, estimate=o.timing, triton="3.6.0")
              for o in fake.evaluate("final", spec, problem, list(us))]  # fmt: skip
    (check,) = fake.evaluate("check", spec, problem, [config])
    line = {"kind": "round", "key": "round", "experiment": "head dims", "status": "ok", "seconds": 1.0}
    line |= {"outcomes": [o.to_json() for o in (*finals, check)], "conditions": {"driver": "580", "sm_mhz": 1980}}
    bench = json.loads((PROGRAM.parent / "results" / H200.slug / "bench.json").read_text())["cases"][0]
    case = {"kind": "case", "key": "c", "experiment": "forward", "status": "ok", "seconds": 1.0, "case": bench}
    for each in (about(), line, case):
        lines.append(tmp_path / "quarter.jsonl", each)
    assert program.main(["enter", str(tmp_path / "quarter.jsonl"), "--out", str(tmp_path)]) == 0
    entry = load(tmp_path / "configs" / f"{H200.slug}.yaml").find(spec, bucket_of(8192))
    assert entry is not None
    assert (entry.config, entry.result.source, entry.result.median_us) == (config, "measured", 500.0)
    folder = tmp_path / "benchmarks" / "results" / H200.slug
    assert "hopper" in (folder / "quarter.md").read_text()
    assert "702" in (folder / "measured.svg").read_text()
    with pytest.raises(FlashgenError, match="1 tiny"):
        lines.append(tmp_path / "tiny.jsonl", about(tiny=True))
        enter.enter([tmp_path / "tiny.jsonl"], tmp_path)
