"""report/calibrate.py, report/charts.py and search/log.py: figures one can compute by hand, from logs that are made up."""

from __future__ import annotations

import gzip
import json
import math
import sys
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashgen import __main__, files, paths
from flashgen.report.calibrate import (
    Calibration,
    calibration,
    calibrations,
    pairs_of,
    table_lines,
)
from flashgen.schedules.outcome import Outcome, Status, Timing
from flashgen.schedules.space import legal_configs
from flashgen.search.decide import ranks, spearman
from flashgen.search.log import outcomes_of
from flashgen.spec.problem import workload
from tests.makers import make_spec
from tests.tables import H200

SPEC = make_spec()
LONG, LONGER = workload(SPEC, 4096), workload(SPEC, 16384)
FA2 = [c for c in legal_configs(SPEC, H200) if (c.schedule, c.loads) == ("fa2", "pointer")]
TMA = [c for c in legal_configs(SPEC, H200) if (c.schedule, c.loads) == ("fa2", "descriptor")]

# Estimates and measurements whose ranks differ by 1, 1, 0, 0, 0: Spearman 1 - 6 * 2 / (5 * 24).
GOOD = ((10, 12), (20, 11), (30, 33), (40, 48), (50, 50))
# By 2, 2, 2, 3, 3: 1 - 6 * 30 / (5 * 24). The first pick takes twice the best, so do the first three.
POOR = ((10, 16), (20, 20), (30, 24), (40, 8), (50, 12))


def outcome(
    config: Any, estimated: float | None, measured: float | None, **changes: Any
) -> Outcome:
    made = Outcome(
        spec=SPEC,
        problem=LONG,
        config=config,
        stage="timed",
        status=Status.OK,
        source="measured",
        gpu="nvidia_h200",
        triton="3.7.1",
        digest="sha256:" + "0" * 64,
        protocol=1,
        timing=None
        if measured is None
        else Timing(median_us=measured, low_us=measured, high_us=measured),
        estimate=None
        if estimated is None
        else Timing(median_us=estimated, low_us=0.8 * estimated, high_us=1.6 * estimated),
    )
    return replace(made, **changes)


def search(
    times: Iterable[tuple[float, float]], configs: Any = FA2, **changes: Any
) -> list[Outcome]:
    return [outcome(c, *pair, **changes) for c, pair in zip(configs, times, strict=False)]


def figures(outcomes: Iterable[Outcome]) -> Calibration:
    return calibration(pairs_of(outcomes)[0])


def test_equal_values_share_their_mean_rank() -> None:
    assert ranks([5.0, 1.0, 5.0, 9.0]) == [2.5, 1.0, 2.5, 4.0]
    # Ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4: covariance 4.5, variances 4.5 and 5.
    assert spearman([1, 2, 2, 3], [10, 20, 30, 40]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert spearman([1, 2, 3], [30, 20, 10]) == pytest.approx(-1)
    assert spearman([7, 7, 7], [1, 2, 3]) is None


def test_the_ranks_and_regrets_of_two_searches() -> None:
    found = figures(search(GOOD) + search(POOR, problem=LONGER))
    assert (found.configs, found.searches) == (10, 2)
    assert found.rank == pytest.approx((0.9 - 0.5) / 2)
    assert found.first == pytest.approx(math.sqrt(12 / 11 * 16 / 8) - 1)
    assert found.worst is not None
    assert found.worst.regret == pytest.approx(1.0)
    assert (found.worst.first.outcome.config, found.worst.best.outcome.config) == (FA2[0], FA2[3])
    assert found.best_of_three == pytest.approx(math.sqrt(11 / 11 * 16 / 8) - 1)
    assert found.worst_of_three == pytest.approx(1.0)


def test_time_errors_are_factors_whichever_way() -> None:
    times = [(100, 100 * ratio) for ratio in (0.5, 0.8, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 2.0, 4.0)]
    found = figures(search(times))
    # Excesses in order: 0, .1, .2, .25, .3, .4, .5, 1, 1, 3; the ninth of ten is the 90th percentile.
    assert found.error == pytest.approx((0.3 + 0.4) / 2)
    assert found.error_90 == pytest.approx(1.0)
    assert found.off == pytest.approx((1.2 + 1.3) / 2)
    assert found.in_band == pytest.approx(0.7)  # of 0.8 to 1.6: not 0.5, 2 and 4


def test_a_small_search_has_an_error_and_no_rank() -> None:
    found = figures(search(GOOD[:4]))
    assert (found.configs, found.searches) == (4, 0)
    assert (found.rank, found.first, found.worst, found.best_of_three) == (None,) * 4
    assert found.error == pytest.approx((0.2 + 0.2) / 2)
    assert " -  " in table_lines([found])[-1]
    assert figures(search(GOOD[:4]) + search(GOOD, problem=LONGER)).rank == pytest.approx(0.9)


def test_families_are_told_apart_and_compared_within() -> None:
    every, descriptor, pointer = calibrations(pairs_of(search(GOOD) + search(POOR, TMA))[0])
    assert (every.family, every.configs, every.searches) == (None, 10, 1)
    assert (descriptor.family, pointer.family) == ("fa2 descriptor", "fa2 pointer")
    assert (descriptor.rank, pointer.rank) == (pytest.approx(-0.5), pytest.approx(0.9))
    assert every.first == pytest.approx(12 / 8 - 1)  # 10 us is estimated twice: the first of both


def test_each_backward_kernel_is_a_family_of_its_own() -> None:
    directions = ("forward", "backward_dq", "backward_dkv", "backward_fused")
    told = [
        made
        for direction in directions
        for made in search(GOOD, TMA, spec=SPEC.for_direction(direction))
    ]
    rows = calibrations(pairs_of(told)[0])
    assert [(row.family, row.configs) for row in rows] == [
        (None, 20),
        ("dkv fa2 descriptor", 5),
        ("dq fa2 descriptor", 5),
        ("fa2 descriptor", 5),
        ("fused fa2 descriptor", 5),
    ]
    assert max(map(len, table_lines(rows))) == 80


def test_two_tritons_and_two_protocols_are_two_searches() -> None:
    for change in ({"triton": "3.8.0"}, {"protocol": 2}):
        assert figures(search(GOOD) + search(POOR, **change)).searches == 2


def test_a_config_counts_once_by_its_most_trusted_time() -> None:
    of = FA2[0]
    rough, timed, final = (outcome(of, 10, us) for us in (30.0, 20.0, 15.0))
    rough, final = replace(rough, stage="rough"), replace(final, stage="final")
    again = outcome(of, 10, 21.0)
    for given, wanted in (
        ([rough], 30.0),
        ([rough, final], 15.0),
        ([timed, final, rough], 20.0),
        ([timed, again, final], 21.0),
    ):
        pairs, alone = pairs_of(given)
        assert ([pair.measured_us for pair in pairs], alone) == ([wanted], 0)


def test_what_is_dropped_counts_and_what_was_not_measured_does_not() -> None:
    dropped = outcome(FA2[0], 10, 30, stage="rough", status=Status.DROPPED)
    estimated = outcome(FA2[1], 10, 10, source="estimated")
    compiled = outcome(FA2[2], 10, None, stage="compile")
    pairs, alone = pairs_of([dropped, estimated, compiled, outcome(FA2[3], None, 10)])
    assert [pair.outcome.config for pair in pairs] == [FA2[0]]
    assert alone == 1


def write(path: Path, outcomes: Iterable[Outcome], tail: str = "") -> Path:
    lines = [json.dumps(each.to_json()) + "\n" for each in outcomes]
    path.write_text("".join(lines) + tail)
    return path


def test_records_are_read_and_the_file_is_left_as_it_was(tmp_path: Path) -> None:
    log = write(tmp_path / "log", search(GOOD), tail='{"spec":')
    text, notices = log.read_text(), []
    assert outcomes_of(log, notices.append) == search(GOOD)
    assert notices == [f"{log}: the last record is torn; it is left out"]
    assert (log.read_text(), [p.name for p in tmp_path.iterdir()]) == (text, ["log"])


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run `flashgen calibrate` in an empty folder: (exit code, standard output, standard error)."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run_line(*arguments: object) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as caught:
            __main__.main(["calibrate", *map(str, arguments)])
        return (caught.value.code or 0, *capsys.readouterr())

    return run_line


def test_the_command_prints_a_table_a_gpu_and_draws(run, tmp_path: Path) -> None:
    h200 = write(tmp_path / "h200.jsonl", search(GOOD) + search(POOR, TMA))
    l4 = write(tmp_path / "l4.jsonl", search(GOOD, gpu="nvidia_l4"), tail="torn")
    code, output, errors = run(h200, l4)
    assert (code, errors) == (0, "")
    assert output.startswith(f"{l4}: the last record is torn; it is left out\nnvidia_h200\n")
    rows = [" ".join(line.split()) for line in output.splitlines()]
    assert rows.count("fa2 pointer 5/1 0.90 9.1 9.1 0.0 0.0 20 82 80") == 2
    assert "fa2 descriptor 5/1 -0.50 100.0 100.0 100.0 100.0 60 400 60" in rows
    assert any(row.startswith("all 10/1 ") for row in rows)
    assert f"Worst first pick: {FA2[0].label}, 50.0% slower than {TMA[3].label}" in output
    assert output.index("nvidia_h200\n") < output.index("nvidia_l4\n")
    assert max(map(len, output.split("Worst")[0].splitlines()[1:])) <= 80
    assert output.endswith("Drawn: calibration.png\n")
    assert Path("calibration.png").read_bytes().startswith(b"\x89PNG")


def test_measurements_without_estimates_are_counted_and_left_out(run, tmp_path: Path) -> None:
    old = [outcome(config, None, 10) for config in FA2[5:8]]
    code, output, _ = run(write(tmp_path / "log", search(GOOD) + old), "--plot", tmp_path / "p.png")
    assert code == 0
    assert output.startswith("3 measured configs have no estimate and are left out.\n")
    assert "5/1   0.90" in output


@pytest.mark.parametrize(
    ("content", "code", "sentence"),
    [
        (b"", 1, "no outcome of LOG was measured, 0 outcomes in all: name a log"),
        (search(GOOD, source="estimated"), 1, "no outcome of LOG was measured, 5 outcomes in all"),
        ([outcome(FA2[0], None, 9)], 1, "no measured config of LOG has an estimate, of 1 configs"),
        (b"\x89PNG\r\n\x1a\n\x00\xff", 1, "LOG, line 1: this is no record of an outcome ("),
        (b"[1, 2]\n", 1, "LOG, line 1: this is no record of an outcome ("),
        (b'{"schema": 1}\n', 1, "LOG, line 1: this is no record of an outcome (the record has the unknown key 'schema')"),
        (None, 2, "LOG: there is no such log; flashgen tune writes"),
    ],
    ids=["empty", "estimates", "old", "png", "list", "other", "missing"],
)  # fmt: skip
def test_bad_input_gets_one_sentence(run, tmp_path: Path, content, code, sentence) -> None:
    log = tmp_path / "log"
    if isinstance(content, bytes):
        log.write_bytes(content)
    elif content is not None:
        write(log, content)
    found, output, errors = run(log)
    assert (found, output) == (code, "")
    assert errors.startswith(f"flashgen: {sentence.replace('LOG', str(log))}"), errors
    assert errors.count("\n") == 1
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("packed", [False, True])
def test_a_landscape_of_others_is_no_log(run, tmp_path: Path, packed: bool) -> None:
    """Those in benchmarks/landscapes are of the T4 format, without flashgen's outcomes."""
    content = b'{"results": [{"measurements": [{"name": "time", "value": 3}]}]}\n'
    file = tmp_path / ("packed.json.gz" if packed else "plain.json")
    file.write_bytes(gzip.compress(content) if packed else content)
    code, _, errors = run(file)
    assert code == 1
    assert errors.startswith(f"flashgen: {file}, line 1: this is no record of an outcome (")
    assert errors.count("\n") == 1


def test_a_packed_log_is_read_and_a_damaged_one_is_one_sentence(run, tmp_path: Path) -> None:
    plain = write(tmp_path / "log.jsonl", search(GOOD)).read_bytes()
    packed = tmp_path / "log.jsonl.gz"
    packed.write_bytes(gzip.compress(plain))
    assert run(packed)[0] == 0
    packed.write_bytes(gzip.compress(plain)[:-20])
    code, _, errors = run(packed)
    assert code == 1
    assert errors.startswith(f"flashgen: {packed} is no gzip file (")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.gz"])
def test_a_log_is_refused_by_its_size_when_unpacked(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """6 MB may unpack to 6 GB: no more is unpacked than the limit."""
    monkeypatch.setattr(files, "MOST_UNPACKED", 3 << 20)
    content, log = b"\n" * (30 << 20), tmp_path / name
    log.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    tracemalloc.start()
    code, _, errors = run(log)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (code, errors) == (1, f"flashgen: {log}: files over 3 MB are refused; name another\n")
    assert peak < 20 << 20


def test_without_matplotlib_there_are_the_figures(run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    log = write(tmp_path / "log", search(GOOD))
    code, output, _ = run(log)
    assert code == 0
    assert "5/1   0.90" in output
    assert output.endswith(f"No plot: charts need matplotlib: {paths.install_command('tune')}\n")
    code, output, errors = run(log, "--plot", "asked.png")
    assert code == 1
    assert "5/1   0.90" in output
    assert errors == f"flashgen: charts need matplotlib: {paths.install_command('tune')}\n"
