"""benchmarks/landscape.py: the sample, what is frozen, what is measured after it, and who reads that."""

from __future__ import annotations

import io
import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import landscape as program
from benchmarks.landscape import Journal, check_frozen, dump, freeze, measure, merged, sample
from benchmarks.recorded import read
from flashgen.errors import FlashgenError
from flashgen.evaluate.evaluator import triton_version
from flashgen.kernels.render import render
from flashgen.report.calibrate import pairs_of
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Outcome, Stage, Status
from flashgen.schedules.space import legal_configs
from flashgen.search.history import outcomes_of
from flashgen.spec.gpu import TARGETS
from tests.fakes import FakeEvaluator, Killed
from tests.makers import make_spec
from tests.replayed import ReplayEvaluator

H200 = TARGETS["nvidia_h200"]
SPECS = (make_spec("bfloat16", 64), make_spec("bfloat16", 128, mask="causal"))


def us(config: KernelConfig) -> float:
    return 100.0 + config.br + config.bc / 4 + config.num_stages


class Fake(FakeEvaluator):
    """Times grow by a microsecond from pass to pass; digests are those of the text."""

    def outcome(self, stage: Stage, spec: Any, problem: Any, config: Any) -> Outcome:
        made = super().outcome(stage, spec, problem, config)
        times = self.__dict__.setdefault("times", Counter())
        if made.timing and self.source == "measured":
            median_us = made.timing.median_us + times[spec, config]
            times[spec, config] += 1
            made = replace(made, timing=replace(made.timing, median_us=median_us))
        digest = render(spec, config).digest
        return replace(made, digest=digest, triton=triton_version())


def estimates(configs: int = 3, **fields: Any) -> list[Outcome]:
    fake = Fake(us=lambda c: us(c) / 2, gpu=H200, source="estimated", **fields)
    return list(freeze(SPECS, fake, configs=configs, seed=7, seq=4096, say=lambda _: None))


def measured(
    folder: Path, frozen: Sequence[Outcome], fake: Fake | None = None, **options: Any
) -> bool:
    given: dict[str, Any] = {"passes": 3, "seconds": None, "seed": 1, "say": lambda _: None}
    journal = Journal(path=folder / "land.jsonl")
    return measure(frozen, fake or Fake(us=us, gpu=H200), journal, **(given | options))


def test_a_sample_has_so_many_of_each_schedule_drawn_by_chance() -> None:
    spec = SPECS[0]
    drawn = sample(spec, H200, 60, 0)
    legal = legal_configs(spec, H200, on_gpu=True)
    there = Counter(config.schedule for config in legal)
    assert {"fa2", "s_ahead", "hopper", "auto"} == set(there)
    assert Counter(c.schedule for c in drawn) == {s: min(60, n) for s, n in there.items()}
    assert len(set(drawn)) == len(drawn)
    assert set(drawn) <= set(legal)
    assert drawn == sample(spec, H200, 60, 0)
    assert set(drawn) != set(sample(spec, H200, 60, 1))
    first = [c for c in legal if c.schedule == "fa2"][:60]
    assert set(first) != {c for c in drawn if c.schedule == "fa2"}  # not the likely ones


def test_what_is_measured_is_what_was_frozen_and_stands_beside_it(tmp_path: Path) -> None:
    broken = estimates()[0].config
    frozen = estimates(failing=lambda _, c: Status.SPILLS if c == broken else None)
    wrong = next(o.config for o in frozen if o.ok)
    fake = Fake(
        us=us, gpu=H200, guess=lambda c: 1.0,  # an estimate made later, which must not count
        failing=lambda stage, c: Status.WRONG if (stage, c) == ("check", wrong) else None,
    )  # fmt: skip
    assert measured(tmp_path, frozen, fake)
    assert broken not in fake.configs("compile")
    assert wrong not in fake.configs("timed")
    file = tmp_path / "land.json"
    file.write_text(dump(merged(frozen, Journal(path=tmp_path / "land.jsonl").read()), {"a": 1}))
    outcomes = outcomes_of(file, lambda _: None)
    pairs, alone = pairs_of(outcomes)
    sound = [o for o in frozen if o.config not in (broken, wrong)]
    assert (len(pairs), alone) == (len(sound), 0)
    for pair in pairs:
        assert pair.estimate.median_us == us(pair.outcome.config) / 2
        assert (
            pair.measured_us == us(pair.outcome.config) + 1
        )  # of three passes the one in the middle
    found = read(file)
    assert [each.name.split()[1] for each in found] == [spec.name for spec in SPECS]
    assert all(each.source == "measured" and each.guesses for each in found)
    assert sum(time is None for each in found for time in each.times) == 2
    (timed,) = [o for o in outcomes if o.stage == "timed" and o.config == sound[0].config][:1]
    assert timed.passes_us == tuple(us(timed.config) + n for n in range(3))


def test_the_replay_evaluator_answers_all_stages_from_it(tmp_path: Path) -> None:
    frozen = estimates()
    measured(tmp_path, frozen)
    outcomes = merged(frozen, Journal(path=tmp_path / "land.jsonl").read())
    replayed = ReplayEvaluator(outcomes, H200)
    one = frozen[0]
    for stage in ("compile", "check", "rough", "timed", "final"):
        (answer,) = replayed.evaluate(stage, one.spec, one.problem, [one.config])
        assert (answer.ok, answer.stage) == (True, stage)
        assert (answer.timing is None) == (stage in ("compile", "check"))


@pytest.mark.parametrize("kill_after", [5, 23, 61])
def test_a_run_that_was_killed_goes_on_and_ends_alike(tmp_path: Path, kill_after: int) -> None:
    frozen = estimates()
    whole = Fake(us=us, gpu=H200)
    assert measured(tmp_path / "whole", frozen, whole)
    killed = Fake(us=us, gpu=H200, kill_after=kill_after)
    with pytest.raises(Killed):
        measured(tmp_path / "a", frozen, killed)
    with (tmp_path / "a" / "land.jsonl").open("a") as file:
        file.write('{"pass": 0, "outc')  # as a kill leaves it
    again = Fake(us=us, gpu=H200, asked=list(killed.asked))
    assert measured(tmp_path / "a", frozen, again)
    timed = Counter(again.configs("timed"))
    assert timed == Counter(3 * [o.config for o in frozen])  # some are of both specs
    assert measured(tmp_path / "a", frozen, Fake(us=us, gpu=H200, kill_after=0))  # nothing is left


def test_what_time_allows_is_a_sample_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = estimates(configs=10)
    fake = Fake(us=us, gpu=H200)
    monkeypatch.setattr(program, "BATCH", 8)
    monkeypatch.setattr(time, "monotonic", lambda: float(len(fake.asked)))
    assert not measured(tmp_path, frozen, fake, seconds=60.0)
    assert 55 <= len(fake.asked) <= 70
    reached = set(fake.configs("timed"))
    assert len(reached) == len(fake.configs("timed"))  # all once before any twice
    assert {o.spec for o in frozen if o.config in reached} == set(SPECS)
    assert len({config.schedule for config in reached}) >= 3


def test_what_is_unsteady_is_left_for_the_next_run(tmp_path: Path) -> None:
    frozen = estimates()
    shaky = frozen[0].config
    fake = Fake(
        us=us, gpu=H200,
        failing=lambda s, c: Status.UNSTEADY if (s, c) == ("timed", shaky) else None,
    )  # fmt: skip
    assert not measured(tmp_path, frozen, fake)
    again = Fake(us=us, gpu=H200)
    assert measured(tmp_path, frozen, again)
    assert set(again.configs("timed")) == {shaky}


def test_estimates_of_something_else_are_refused() -> None:
    frozen = estimates(configs=1)
    check_frozen(frozen, H200)
    for changes, says in (
        ({"gpu": "nvidia_l4"}, "must be of GPU nvidia_h200, which is here: they are of nvidia_l4"),
        ({"triton": "3.6.0"}, "of Triton"),
        ({"digest": "sha256:0"}, "has another text since its estimate was frozen"),
    ):
        with pytest.raises(FlashgenError, match=says):
            check_frozen([replace(each, **changes) for each in frozen], H200)
    with pytest.raises(FlashgenError, match="they are of nothing"):
        check_frozen([], H200)


def test_the_program_refuses_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text(json.dumps({"outcomes": [3]}))
    out = str(tmp_path / "out.json")
    for name, code in (("absent.json", 2), ("no.json", 1)):
        with redirect_stderr(io.StringIO()) as said:
            arguments = ["measure", "--smoke", "--estimates", str(tmp_path / name), "--out", out]
            assert program.main(arguments) == code
        assert said.getvalue().count("\n") == 1
    assert not Path(out).exists()


@pytest.mark.slow(
    "compiles and interprets real kernels: a minute, and stand-ins are tested in make test"
)
def test_a_smoke_run_walks_both(tmp_path: Path) -> None:
    here = ["--smoke", "--jobs", "1", "--state", str(tmp_path / "state")]
    frozen, out = tmp_path / "estimates.json", tmp_path / "landscape.json"
    assert program.main(["freeze", *here, "--out", str(frozen)]) == 0
    schedules = {outcome.config.schedule for outcome in outcomes_of(frozen, print)}
    assert schedules == {"fa2", "s_ahead", "hopper", "auto"}
    arguments = ["measure", *here, "--estimates", str(frozen), "--out", str(out)]
    assert program.main(arguments) == 0
    record = json.loads(out.read_text())
    assert record["about"]["measured"] is False
    assert record["about"]["frozen"]["commit"] is None
    assert program.main(arguments) == 0
