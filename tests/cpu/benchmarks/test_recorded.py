"""benchmarks/recorded.py: logs of flashgen and T4 results, read, written and searched."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recorded import Landscape, dump, from_outcomes, read, replay
from flashgen.errors import FlashgenError, InvalidArgument
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Outcome, Source, Stage, Status, Timing
from flashgen.schedules.space import legal_configs, seed_configs, tuned_default
from flashgen.search import Method
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import workload
from tests.makers import make_config, make_spec

POINTS = tuple({"x": x, "way": way, "fast": x > 1} for x in (1, 2) for way in "ab")
MADE = Landscape(
    name="made up",
    source="measured",
    unit="us",
    points=POINTS,
    times=(4.0, None, 2.0, 2.5),
    seeds=(3, 0),
    guesses=(1.0, None, 3.0, 2.0),
)


class TestLandscape:
    def test_the_best_is_the_least_time(self) -> None:
        assert MADE.best == 2.0

    def test_one_without_a_time_is_none(self) -> None:
        with pytest.raises(InvalidArgument, match="needs a point with a time: made up has none"):
            replace(MADE, times=(None,) * 4)

    def test_points_are_a_space(self) -> None:
        with pytest.raises(InvalidArgument, match="no point may stand in a space twice"):
            replace(MADE, points=(*POINTS[:3], POINTS[0]))

    @pytest.mark.parametrize("seed", [4, -1, "first"])
    def test_seeds_are_numbers_of_points(self, seed: Any) -> None:
        with pytest.raises(InvalidArgument, match="seeds are numbers of points, 0 to 3: made up"):
            replace(MADE, seeds=(0, seed))


class TestReplay:
    def test_regret_is_by_how_much_the_best_so_far_is_slower(self) -> None:
        exhaustive = Method(sampler="exhaustive")
        assert replay(MADE, exhaustive, 80, warm=False) == (1.0, 1.0, 0.0, 0.0)
        assert replay(MADE, exhaustive, 3, warm=False) == (1.0, 1.0, 0.0)

    def test_a_landscapes_seeds_come_first(self) -> None:
        assert replay(MADE, Method(sampler="exhaustive"), 80) == (0.25, 0.25, 0.25, 0.0)

    def test_it_is_infinite_until_something_runs(self) -> None:
        late = replace(MADE, times=(None, None, None, 2.5), seeds=(1, 2))
        inf = math.inf
        assert replay(late, Method(sampler="exhaustive"), 4) == (inf, inf, inf, 0.0)
        assert replay(late, Method(), 2) == (inf, 0.0)  # the second guess

    def test_guesses_are_heeded_where_it_is_warm(self) -> None:
        guessed = replace(MADE, times=(9.0, 8.0, 2.0, 7.0), seeds=(), guesses=(9.0, 8.0, 2.0, 7.0))
        cold = {replay(guessed, Method(seed=seed), 1, warm=False) for seed in range(12)}
        warm = {replay(guessed, Method(seed=seed), 1) for seed in range(12)}
        assert warm == {(0.0,)}
        assert len(cold) > 1

    @pytest.mark.parametrize("sampler", ["auto", "random"])
    def test_it_never_rises_and_ends_at_nothing(self, sampler: Any) -> None:
        points = tuple({"x": x, "y": y} for x in range(5) for y in range(4))
        wide = Landscape(
            name="wide", source="recorded", unit="ms", points=points,
            times=tuple(None if x == 3 else 5.0 + (x - 2) ** 2 + y for x in range(5) for y in range(4)),
        )  # fmt: skip
        regrets = replay(wide, Method(sampler=sampler), 80)
        assert len(regrets) == len(points)
        assert list(regrets) == sorted(regrets, reverse=True)
        assert regrets[-1] == 0.0


def write(folder: Path, content: str, name: str = "cache.json") -> Path:
    path = folder / name
    path.write_text(content)
    return path


def one(path: Path) -> Landscape:
    (found,) = read(path)
    return found


class TestT4:
    @pytest.mark.parametrize("zipped", [False, True])
    def test_what_is_dumped_is_read_again(self, zipped: bool, tmp_path: Path) -> None:
        for number, made in enumerate((MADE, replace(MADE, guesses=None, seeds=(), unit="ms"))):
            path = tmp_path / f"{number}.json"
            text = dump(made).encode()
            path.write_bytes(gzip.compress(text) if zipped else text)
            assert one(path) == made

    def test_what_is_dumped_has_what_the_format_asks_for(self) -> None:
        record = json.loads(dump(MADE))
        assert record["schema_version"] == "1.0.0"
        assert len(record["results"]) == 4
        for result in record["results"]:
            assert {"configuration", "times", "invalidity", "correctness"} <= set(result)
        first, failed = record["results"][:2]
        assert (first["invalidity"], first["correctness"]) == ("correct", 1)
        assert first["measurements"][0] == {"name": "time", "value": 4.0, "unit": "us"}
        assert (failed["invalidity"], failed["correctness"]) == ("runtime", 0)
        assert failed["measurements"] == []
        assert dump(MADE).count("\n") == 4 + 4  # a line a result, for whoever reads a diff

    def test_results_of_another_tuner(self, tmp_path: Path) -> None:
        """As Kernel Tuner writes them: more measurements than one, kinds of failure, no names."""

        def result(x: int, invalidity: str, **measured: float) -> dict[str, Any]:
            return {
                "timestamp": "2023-12-21 10:44:42.236642+00:00",
                "configuration": {"x": x},
                "times": {"compilation": 661.5, "runtimes": [12.3, 12.2]},
                "invalidity": invalidity,
                "correctness": int(invalidity == "correct"),
                "measurements": [
                    {"name": name, "value": value, "unit": "ms" if name == "time" else ""}
                    for name, value in measured.items()
                ],
                "objectives": ["time"],
            }

        results = [
            result(16, "correct", gflops=615.7, time=12.25),
            result(32, "compile"),
            result(64, "constraints", time=3.0),
            result(128, "correct", time=1e20),
            result(16, "correct", time=11.5),
        ]
        found = one(write(tmp_path, json.dumps({"results": results}), "A100_T4.json"))
        assert found == Landscape(
            name="A100_T4",
            source="recorded",
            unit="ms",
            points=({"x": 16}, {"x": 32}, {"x": 64}, {"x": 128}),
            times=(11.5, None, None, None),
        )

    def test_a_correct_result_has_a_time(self, tmp_path: Path) -> None:
        result = {
            "configuration": {"x": 16},
            "invalidity": "correct",
            "measurements": [{"name": "energy", "value": 3.0, "unit": "J"}],
        }
        path = write(tmp_path, json.dumps({"results": [result]}))
        with pytest.raises(FlashgenError) as caught:
            read(path)
        assert str(caught.value) == (
            f"{path}: a correct result must have a measurement named time: {{'x': 16}} has energy"
        )


SPEC = make_spec("bfloat16", 64)
A100 = TARGETS["nvidia_a100_sxm4_80gb"]
LEGAL = legal_configs(SPEC, A100)
DEFAULT = tuned_default(SPEC)


def outcome(
    config: KernelConfig,
    us: float | None = None,
    stage: Stage = "timed",
    status: Status = Status.OK,
    source: Source = "measured",
    guess: float | None = None,
    **changes: Any,
) -> Outcome:
    def timing(us: float | None) -> Timing | None:
        return None if us is None else Timing(median_us=us, low_us=us, high_us=us)

    made = Outcome(
        spec=SPEC,
        problem=workload(SPEC, 4096),
        config=config,
        stage=stage,
        status=status,
        source=source,
        gpu=A100.slug,
        triton="3.7.1",
        digest="sha256:" + "0" * 64,
        protocol=1,
        timing=timing(us),
        estimate=timing(guess),
    )
    return replace(made, **changes)


def times(outcomes: Iterable[Outcome]) -> dict[KernelConfig, float | None]:
    (found,) = from_outcomes(outcomes)
    return {
        KernelConfig(**point): time  # type: ignore[arg-type]
        for point, time in zip(found.points, found.times, strict=True)
    }


COUNTS: dict[str, tuple[list[Outcome], dict[int, float | None]]] = {
    "a failure at any stage": (
        [
            outcome(LEGAL[0], stage="compile"),
            outcome(LEGAL[0], 10.0),
            outcome(LEGAL[1], stage="compile", status=Status.SPILLS),
            outcome(LEGAL[2], stage="check", status=Status.WRONG),
            outcome(LEGAL[3], stage="rough", status=Status.RUN_ERROR),
        ],
        {0: 10.0, 1: None, 2: None, 3: None},
    ),
    "nothing where nothing is said": (
        [
            outcome(LEGAL[0], 10.0),
            outcome(LEGAL[1], stage="compile"),  # and never timed
            outcome(LEGAL[2], 11.0, status=Status.UNSTEADY),
            outcome(LEGAL[3], status=Status.NO_ESTIMATE),
            outcome(LEGAL[4], stage="compile", status=Status.QUARANTINED),
            outcome(LEGAL[5], stage="compile", status=Status.COMPILE_ERROR),
            outcome(LEGAL[5], stage="compile"),  # failed once, and passed later
            outcome(LEGAL[6], stage="compile", status=Status.SPILLS, triton="3.6.0"),
        ],
        {0: 10.0},
    ),
    "the best measured stage": (
        [
            outcome(LEGAL[0], us, stage=stage)
            for stage, us in (("rough", 1.0), ("timed", 3.0), ("final", 2.0))
        ],
        {0: 3.0},
    ),
    "the last of a stage": ([outcome(LEGAL[0], 2.0), outcome(LEGAL[0], 3.0)], {0: 3.0}),
    "the rough time of what was dropped": (
        [
            outcome(LEGAL[0], 10.0),
            outcome(LEGAL[1], 90.0, stage="rough", status=Status.DROPPED),
        ],
        {0: 10.0, 1: 90.0},
    ),
}


class TestLog:
    def test_a_file(self, tmp_path: Path) -> None:
        lines = [json.dumps(outcome(c, 10.0 + n).to_json()) for n, c in enumerate(LEGAL[:3])]
        path = write(tmp_path, "\n".join(lines) + '\n{"torn', f"{A100.slug}.jsonl")
        notices: list[str] = []
        (found,) = read(path, notices.append)
        assert found.name == "nvidia_a100_sxm4_80gb fwd_bf16_d64 seq 4096"
        assert (found.source, found.unit, found.guesses) == ("measured", "us", None)
        assert found.points == tuple(asdict(config) for config in LEGAL[:3])
        assert found.times == (10.0, 11.0, 12.0)
        assert len(notices) == 1
        assert "torn" in notices[0]

    def test_points_stand_in_the_order_of_their_space(self) -> None:
        known = times(outcome(config, 10.0) for config in reversed(LEGAL[:9]))
        assert list(known) == list(LEGAL[:9])

    def test_seeds_are_what_every_search_tries_first(self) -> None:
        seeds = seed_configs(SPEC, A100)
        (found,) = from_outcomes(outcome(config, 10.0) for config in LEGAL)
        expected = dict.fromkeys((DEFAULT, *seeds))
        assert [KernelConfig(**found.points[seed]) for seed in found.seeds] == list(expected)  # type: ignore[arg-type]
        (fewer,) = from_outcomes(outcome(config, 10.0) for config in LEGAL if config != seeds[0])
        assert len(fewer.seeds) == len(found.seeds) - 1

    @pytest.mark.parametrize("what", COUNTS)
    def test_what_counts(self, what: str) -> None:
        outcomes, expected = COUNTS[what]
        assert times(outcomes) == {LEGAL[n]: us for n, us in expected.items()}

    @pytest.mark.parametrize(
        "changes",
        [
            {"problem": workload(SPEC, 512)},
            {"gpu": "nvidia_h200"},
            {"triton": "3.6.0"},
            {"protocol": 2},
            {"source": "estimated"},
            {"spec": make_spec("float16", 64)},
        ],
        ids=lambda changes: next(iter(changes)),
    )
    def test_what_cannot_be_compared_stands_apart(self, changes: dict[str, Any]) -> None:
        found = from_outcomes(
            [outcome(LEGAL[0], 10.0), replace(outcome(LEGAL[0], 20.0), **changes)]
        )
        assert [each.times for each in found] == [(10.0,), (20.0,)]

    def test_estimates_beside_measurements_are_guesses(self) -> None:
        (found,) = from_outcomes(
            [outcome(LEGAL[0], 10.0, guess=7.0), outcome(LEGAL[1], 11.0), outcome(LEGAL[2])]
        )
        assert found.guesses == (7.0, None, None)

    def test_of_a_gpu_nobody_knows_there_are_no_seeds(self) -> None:
        config = make_config(64, 64)
        (found,) = from_outcomes(outcome(each, 10.0, gpu="acme_1") for each in (config, *LEGAL[:2]))
        assert found.seeds == ()
        assert found.points[0] == asdict(config)

    def test_where_nothing_was_timed_there_is_none(self, tmp_path: Path) -> None:
        record = json.dumps(outcome(LEGAL[0], stage="compile").to_json())
        path = write(tmp_path, record + "\n", "gpu.jsonl")
        with pytest.raises(FlashgenError) as caught:
            read(path)
        assert str(caught.value) == f"{path}: a log must hold the time of a config: it holds none"


TEXT = dump(MADE).encode()
DAMAGED: dict[bytes, str] = {
    b"": "must be JSON, gzipped or not",
    b"\xff\xfe\x00": "must be JSON, gzipped or not",
    TEXT[:-40]: "must be JSON, gzipped or not",
    b"\x1f\x8b": "must be JSON, gzipped or not",
    gzip.compress(TEXT, mtime=0)[:-30]: "must be JSON, gzipped or not",
    gzip.compress(TEXT, mtime=0)[:20] + bytes(200): "must be JSON, gzipped or not",
    b"[" * 100_000: "must be JSON, gzipped or not",
    b"[]": "must be results in the T4 format",
    b'{"results": [{}]}': "must be results in the T4 format",
    b'{"results": [{"configuration": {"x": 1}, "measurements": [{}]}]}': "in the T4 format",
    b'{"flashgen": [], "results": []}': "must be results in the T4 format",
    b'{"results": []}': "must have a point at least",
    b'{"results": [{"configuration": {"x": 1}, "invalidity": "runtime"}]}': "a has none",
    TEXT.replace(b'"seeds": [3, 0]', b'"seeds": [3, 9]'): "seeds are numbers of points",
}


@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: str(content[:12]))
def test_a_damaged_file_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(FlashgenError, match=DAMAGED[content]) as caught:
        read(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_none_or_no_log_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="there is no such"):
        read(tmp_path / "no.jsonl")
    with pytest.raises(FlashgenError, match="cannot be read"):
        read(tmp_path)
    with pytest.raises(FlashgenError, match="line 1"):
        read(write(tmp_path, "{}\n", "gpu.jsonl"))
