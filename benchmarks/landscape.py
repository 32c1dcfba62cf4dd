"""Measures a landscape of forward kernels on a GPU, to validate estimates made before it.

    python benchmarks/landscape.py freeze --out ESTIMATES      compile and estimate; needs no GPU
    git commit ESTIMATES                                       before anything is measured
    python benchmarks/landscape.py measure --estimates ESTIMATES --out LANDSCAPE --time-budget 900

For bfloat16 at head dims 64, 128 and 256, causal and not, `freeze` draws --configs random configs
of each schedule, or all if there are fewer. This is an unbiased sample, which no search gives: on a
GPU a search times what is estimated well. `measure` checks and times what was frozen, in one random
order over all specs and schedules, so that an interrupted run is a sample too. It repeats this in
--passes passes, against drifts. Inputs are random normal; kernels that fail are failing points.

LANDSCAPE.jsonl next to the result has each outcome as soon as it is known: the same command
resumes. The result and the estimates are outcomes, which benchmarks.recorded.read, `flashgen
calibrate` and the replay evaluator read. Each time comes with its frozen estimate.

--smoke runs both with one config per schedule on a CPU and measures nothing. Exit codes: 0 all
done, 1 failed, 2 usage, 3 no GPU, 4 time is over and the same command resumes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flashgen.bench.record import provenance
from flashgen.errors import FlashgenError, InvalidArgument, NoGpuError
from flashgen.evaluate.evaluator import Evaluator, triton_version
from flashgen.files import write_whole
from flashgen.kernels.render import render
from flashgen.report.calibrate import LEGEND, by_gpu, calibrations, pairs_of, table_lines
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Outcome, Stage, Status
from flashgen.schedules.space import legal_configs
from flashgen.search.history import outcomes_of
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu, known_target
from flashgen.spec.problem import workload

HEAD_DIMS, MASKS = (64, 128, 256), ("none", "causal")
CONFIGS, SEQ, PASSES = 80, 8192, 3
TARGET = "nvidia_h200"
BATCH = 24
"""Configs that are compiled ahead, side by side, while others are timed."""
LATE = 4
"""The exit code where time is over."""

BEFORE: tuple[Stage, ...] = ("compile", "check")

TIMED_ALL_THE_SAME = (Status.OK, Status.NO_ESTIMATE)
"""What a frozen outcome may say of a kernel that is then measured; others failed to compile."""

Say = Callable[[str], object]


def sample(spec: AttentionSpec, gpu: Gpu, configs: int, seed: int) -> list[KernelConfig]:
    """Random legal configs, `configs` of each schedule; all if there are fewer."""
    schedules: dict[str, list[KernelConfig]] = defaultdict(list)
    for config in legal_configs(spec, gpu, on_gpu=True):
        schedules[config.schedule].append(config)
    return [
        config
        for name, legal in schedules.items()
        for config in random.Random(f"{seed} {spec.name} {name}").sample(
            legal, min(configs, len(legal))
        )
    ]


def freeze(
    specs: Sequence[AttentionSpec], evaluator: Evaluator, *, configs: int, seed: int, seq: int,
    say: Say,
) -> Iterator[Outcome]:  # fmt: skip
    """Estimate a sample of each spec, by an evaluator without a GPU."""
    for spec in specs:
        drawn = sample(spec, evaluator.gpu, configs, seed)
        found = list(evaluator.evaluate("timed", spec, workload(spec, seq), drawn))
        told = Counter(outcome.status.value for outcome in found)
        say(f"{spec.name}: {len(found)} configs, {', '.join(f'{n} {s}' for s, n in told.items())}")
        yield from found


@dataclass(frozen=True, kw_only=True)
class Journal:
    """The outcomes of a landscape in progress, in the order in which they became known."""

    path: Path

    def read(self) -> list[tuple[int, Outcome]]:
        """Passes and outcomes; an incomplete last line is ignored."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").split("\n")[:-1]
        records = map(json.loads, lines)
        return [(each["pass"], Outcome.from_json(each["outcome"])) for each in records]

    def begin(self) -> None:
        """Remove an incomplete last line, so that the next one is complete."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            whole = self.path.read_bytes()
            self.path.write_bytes(whole[: whole.rfind(b"\n") + 1])

    def add(self, number: int, outcome: Outcome) -> None:
        """Append an outcome; it is on disk before the next one starts."""
        with self.path.open("a", encoding="utf-8") as file:
            print(json.dumps({"pass": number, "outcome": outcome.to_json()}), file=file)


def check_frozen(frozen: Sequence[Outcome], gpu: Gpu) -> None:
    """Raise FlashgenError if the estimates are not for these kernels on this GPU."""
    for what, wanted, found in (
        ("GPU", {gpu.slug}, {each.gpu for each in frozen}),
        ("Triton", {triton_version()}, {each.triton for each in frozen}),
    ):
        if found != wanted:
            raise FlashgenError(
                f"the estimates must be of {what} {', '.join(wanted)}, which is here: they are of "
                f"{', '.join(sorted(found)) or 'nothing'}; freeze them again"
            )
    for each in frozen:
        if each.digest and render(each.spec, each.config).digest != each.digest:
            raise FlashgenError(
                f"the kernel {each.spec.name} {each.config.label} has another text since its "
                "estimate was frozen: freeze them again, and commit"
            )


def measure(
    frozen: Sequence[Outcome], evaluator: Evaluator, journal: Journal, *, passes: int,
    seconds: float | None, seed: int, say: Say,
) -> bool:  # fmt: skip
    """Measure what was frozen and is missing; returns whether all is done. Unsteady outcomes are
    left for the next run. Raises the errors of the evaluator; earlier results are in the
    journal.
    """
    end = None if seconds is None else time.monotonic() + seconds
    journal.begin()
    known = journal.read()
    order = [each for each in frozen if each.status in TIMED_ALL_THE_SAME]
    random.Random(seed).shuffle(order)
    failed = {_key(outcome) for _, outcome in known if not outcome.ok}
    done = {(number, _key(outcome)) for number, outcome in known if outcome.stage == "timed"}
    complete = True
    for number in range(passes):
        missing = [e for e in order if (number, _key(e)) not in done and _key(e) not in failed]
        say(f"pass {number + 1} of {passes}: {len(missing)} of {len(order)} configs")
        for batch in _batches(missing):
            for outcome in _evaluated(evaluator, batch, check=number == 0):
                if outcome.status is Status.UNSTEADY:
                    complete = False
                    continue
                journal.add(number, outcome)
                if not outcome.ok:
                    failed.add(_key(outcome))
                if end is not None and time.monotonic() > end:
                    return False
    return complete


def _batches(items: Sequence[Outcome]) -> Iterator[Sequence[Outcome]]:
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]


def _evaluated(evaluator: Evaluator, batch: Sequence[Outcome], *, check: bool) -> Iterator[Outcome]:
    """The outcomes of a batch, those of a spec together: they compile in parallel. check: first
    each is compiled and checked, and failures end there.
    """
    groups: dict[AttentionSpec, list[Outcome]] = defaultdict(list)
    for each in batch:
        groups[each.spec].append(each)
    for spec, members in groups.items():
        problem, configs = members[0].problem, [each.config for each in members]
        for stage in BEFORE if check else ():
            passed = []
            for outcome in evaluator.evaluate(stage, spec, problem, configs):
                yield outcome
                if outcome.ok:
                    passed.append(outcome.config)
            configs = passed
        yield from evaluator.evaluate("timed", spec, problem, configs)


def _key(outcome: Outcome) -> tuple[AttentionSpec, KernelConfig]:
    return outcome.spec, outcome.config


def merged(frozen: Sequence[Outcome], known: Iterable[tuple[int, Outcome]]) -> list[Outcome]:
    """The outcomes of each config, one per stage, in the order of `frozen`: its time is that of
    the middle pass, and passes_us has all; its estimate is the frozen one. Configs that
    neither failed nor were timed yet are left out.
    """
    found: dict[tuple[AttentionSpec, KernelConfig], list[Outcome]] = defaultdict(list)
    for _, outcome in known:
        found[_key(outcome)].append(outcome)
    whole: list[Outcome] = []
    for each in frozen:
        outcomes = found[_key(each)]
        if each.status not in TIMED_ALL_THE_SAME:
            whole.append(replace(each, stage="compile", timing=None, estimate=None))
        elif any(o.stage == "timed" or not o.ok for o in outcomes):
            whole += [replace(o, estimate=each.timing) for o in _one_a_stage(outcomes)]
    return whole


def _one_a_stage(outcomes: Sequence[Outcome]) -> Iterator[Outcome]:
    yield from (outcome for outcome in outcomes if outcome.stage != "timed")
    timed = [outcome for outcome in outcomes if outcome.stage == "timed"]
    broken = next((outcome for outcome in timed if not outcome.ok), None)
    if broken is not None:
        yield broken
    elif timed:
        medians = [outcome.timing.median_us for outcome in timed if outcome.timing]
        middle = medians.index(statistics.median_low(medians))
        yield replace(timed[middle], passes_us=tuple(medians))


def dump(outcomes: Sequence[Outcome], about: dict[str, Any]) -> str:
    """The file: its provenance, then one outcome per line, without default values."""
    head = json.dumps({"benchmark": "landscape_forward", "schema": 1, "about": about}, indent=1)
    lines = ",\n".join(json.dumps(_slim(outcome)) for outcome in outcomes)
    return head[: head.rindex("\n}")] + f',\n "outcomes": [\n{lines}\n]}}\n'


def _slim(value: Any) -> Any:
    """A dataclass as JSON, without fields at their default."""
    if not is_dataclass(value):
        return value
    return {
        field.name: _slim(found)
        for field in fields(value)
        if (found := getattr(value, field.name)) != field.default
    }


def _about(gpu: Gpu | None, command: Sequence[str], **more: Any) -> dict[str, Any]:
    line = shlex.join(["python", "benchmarks/landscape.py", *command])
    made = provenance(gpu, command=line, dtype="bfloat16", tables="", conditions=None)
    for name in ("tables", "conditions", "seed"):  # of flashgen bench
        del made[name]
    return made | more


def _committed(path: Path) -> str | None:
    """The commit that has the file in this state; None if there is none."""
    git = ["git", "-C", str(path.resolve().parent)]
    try:
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--ignored", "--", path.name],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if changed.returncode or changed.stdout.strip():
            return None
        last = subprocess.run(
            [*git, "log", "-1", "--format=%H", "--", path.name],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError:  # no git here
        return None
    return last.stdout.strip() or None


def run_freeze(asked: argparse.Namespace, command: Sequence[str]) -> int:
    """Write the estimates."""
    from flashgen.evaluate.offline import OfflineEvaluator

    gpu = known_target(asked.target)
    specs = [
        AttentionSpec(dtype="bfloat16", head_dim=dim, head_dim_v=dim, mask=mask)
        for dim in asked.head_dim
        for mask in asked.mask
    ]
    with OfflineEvaluator(gpu, asked.state, asked.jobs) as evaluator:
        made = freeze(
            specs, evaluator, configs=asked.configs, seed=asked.seed, seq=asked.seq, say=_say
        )
        outcomes = list(made)
    about = _about(None, command, target=gpu.slug, configs=asked.configs, sampler_seed=asked.seed)
    write_whole(asked.out, dump(outcomes, about))
    print(f"Written: {asked.out}, {len(outcomes)} configs. Commit it before anything is measured.")
    return 0


def run_measure(asked: argparse.Namespace, command: Sequence[str]) -> int:
    """Measure, and write what is known by now."""
    frozen = outcomes_of(asked.estimates, _say)
    gpu = known_target(frozen[0].gpu) if asked.smoke and frozen else _device()
    check_frozen(frozen, gpu)
    committed = _committed(asked.estimates)
    if committed is None:
        _say(f"{asked.estimates} is not committed: nothing proves that it was made before")
    journal = Journal(path=asked.out.with_suffix(".jsonl"))
    complete = False
    with _evaluator(asked, gpu) as evaluator:
        try:
            complete = measure(
                frozen, evaluator, journal, passes=asked.passes, seconds=asked.time_budget,
                seed=asked.seed, say=_say,
            )  # fmt: skip
        finally:
            outcomes = merged(frozen, journal.read())
            about = _about(
                None if asked.smoke else gpu, command, complete=complete, passes=asked.passes,
                frozen={
                    "file": asked.estimates.name,
                    "sha256": hashlib.sha256(asked.estimates.read_bytes()).hexdigest(),
                    "commit": committed,
                },
            )  # fmt: skip
            write_whole(asked.out, dump(outcomes, about))
            _tell(outcomes, frozen, asked.out)
    return 0 if complete else LATE


def _tell(outcomes: Sequence[Outcome], frozen: Sequence[Outcome], out: Path) -> None:
    reached = len({_key(outcome) for outcome in outcomes})
    print(f"Written: {out}, {reached} of {len(frozen)} configs")
    pairs, alone = pairs_of(outcomes)
    for slug, found in by_gpu(pairs).items():
        print(f"{slug}: {len(found)} measured beside their estimates, {alone} without")
        print("\n".join([*table_lines(calibrations(found)), LEGEND]))


def _device() -> Gpu:
    from flashgen.kernels.launch import device_gpu

    return device_gpu(0, instead="python benchmarks/landscape.py measure --smoke")


def _evaluator(asked: argparse.Namespace, gpu: Gpu) -> Any:
    if asked.smoke:
        from flashgen.evaluate.offline import OfflineEvaluator

        return OfflineEvaluator(gpu, asked.state, asked.jobs)
    from flashgen.evaluate.on_gpu import GpuEvaluator

    return GpuEvaluator(gpu, 0, asked.state, asked.jobs)


def _say(text: str) -> None:
    print(text, flush=True)


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    steps = parser.add_subparsers(dest="step", required=True)
    freezing, measuring = steps.add_parser("freeze"), steps.add_parser("measure")
    freezing.add_argument("--target", default=TARGET, help="the slug of the GPU")
    freezing.add_argument("--head-dim", type=int, action="append", help="64, 128, 256")
    freezing.add_argument("--mask", action="append", choices=MASKS)
    freezing.add_argument("--configs", type=int, default=CONFIGS, help="of each schedule")
    freezing.add_argument("--seq", type=int, default=SEQ)
    measuring.add_argument("--estimates", type=Path, required=True, metavar="FILE")
    measuring.add_argument("--passes", type=int, default=PASSES)
    measuring.add_argument("--time-budget", type=float, metavar="SECONDS")
    for step in (freezing, measuring):
        step.add_argument("--out", type=Path, required=True, metavar="FILE")
        step.add_argument("--seed", type=int, default=0)
        step.add_argument("--jobs", type=int)
        step.add_argument("--state", type=Path, default=Path(".flashgen"), help="what is compiled")
        step.add_argument("--smoke", action="store_true", help="tiny, on a CPU; measures nothing")
    asked = parser.parse_args(arguments)
    if asked.step == "freeze":
        asked.head_dim = asked.head_dim or ([64] if asked.smoke else HEAD_DIMS)
        asked.mask = asked.mask or (["none"] if asked.smoke else MASKS)
        if asked.smoke:
            asked.configs, asked.seq = 1, 128
    for name in ("configs", "passes", "jobs"):
        if getattr(asked, name, None) is not None and getattr(asked, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return asked


def main(arguments: Sequence[str]) -> int:
    """Freeze or measure."""
    asked = _arguments(arguments)
    try:
        return (run_freeze if asked.step == "freeze" else run_measure)(asked, arguments)
    except FlashgenError as error:
        print(error, file=sys.stderr)
        usage = 2 if isinstance(error, InvalidArgument) else 1
        return 3 if isinstance(error, NoGpuError) else usage


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
