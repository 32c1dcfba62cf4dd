"""Checks a few kernels of every schedule on a GPU, the first minutes of a campaign.

    python benchmarks/first_checks.py --out FOLDER [--time-budget SECONDS]

bfloat16 kernels at head dims 128, 64 and 256. A schedule has up to three configs of the causal
forward, which differ in loads, order and persistence where they can, one without a mask, and one
kernel of dK and dV, of dQ, of all three gradients and of decode; of schedule auto
one forward with a mask and one without, of fa1 one with. The first config of every schedule comes
first, then the second, so that the run covers all schedules early. Each kernel is compared with
float64 in a child process, which may hang or crash; meanwhile the next ones compile on all cores.

FOLDER/first_checks.jsonl has each outcome as soon as it is known: the same command resumes.
--smoke checks one kernel of each schedule that the interpreter runs. Exit codes: 0 all are right or
refused by the compiler's facts, 1 some are wrong or a schedule has no right kernel, 2 usage, 3 no
GPU, 4 time is over and the same command resumes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.landscape import Journal
from flashgen import paths
from flashgen.errors import FlashgenError, NoGpuError
from flashgen.evaluate.evaluator import Evaluator
from flashgen.kernels.render import render
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig, Schedule
from flashgen.spec.gpu import Gpu, known_target
from flashgen.spec.legality import why_illegal
from flashgen.spec.outcome import Outcome, Status
from flashgen.spec.problem import workload
from flashgen.spec.space import legal_configs, seed_configs
from flashgen.spec.vocabulary import Direction

Pair = tuple[AttentionSpec, KernelConfig]

HEAD_DIMS, MASKS = (128, 64, 256), ("causal", "none")
EACH = 3
"""Configs of a schedule, at one head dim and mask of the forward."""
OTHERS: tuple[Direction, ...] = ("backward_dkv", "backward_dq", "backward_fused", "decode")
SCHEDULES: tuple[Schedule, ...] = ("blackwell", "hopper", "ampere", "s_ahead", "fa2", "auto", "fa1")
"""The most promising first; no search tries the last."""
SEQ = 1024
LATE = 4
SMOKE_TARGET = "nvidia_h200"

REFUSED = (Status.SPILLS, Status.OUT_OF_RESOURCES, Status.SERIALIZED, Status.NO_OVERLAP)
"""What a search refuses by the compiler's facts: neither right nor wrong."""


def kernels(gpu: Gpu, *, each: int = EACH) -> list[Pair]:
    """What is checked, in order."""
    ranked = [
        (rank, spec, config)
        for spec in specs()
        for likely in [_likely(spec, gpu)]
        for schedule in SCHEDULES
        for most in [_most(spec, schedule, each)]
        for rank, config in enumerate(_of_schedule(spec, gpu, schedule, likely)[:most])
    ]
    ranked.sort(key=lambda found: found[0])
    return [(spec, config) for _, spec, config in ranked]


def _most(spec: AttentionSpec, schedule: Schedule, each: int) -> int:
    """Configs of a schedule: several of the causal forward, else one, and of those that nobody
    tunes for no more, so that all are checked in three minutes (campaign_clock.py).
    """
    if schedule == "fa1":
        return int(spec.causal)
    return each if spec.direction == "forward" and spec.causal and schedule != "auto" else 1


def specs() -> list[AttentionSpec]:
    """The forward specs, the most used first, then causal gradients and decode."""
    forward = [
        AttentionSpec(dtype="bfloat16", head_dim=dim, head_dim_v=dim, mask=mask)
        for dim in HEAD_DIMS
        for mask in MASKS
    ]
    causal = [spec for spec in forward if spec.causal]
    return forward + [replace(spec, direction=way) for spec in causal for way in OTHERS]


@cache
def _likely(spec: AttentionSpec, gpu: Gpu) -> list[KernelConfig]:
    """The configs of a search, the seeds first."""
    seeds, legal = (of(spec, gpu, on_gpu=True) for of in (seed_configs, legal_configs))
    return list(dict.fromkeys((*seeds, *legal)))


def _of_schedule(
    spec: AttentionSpec, gpu: Gpu, schedule: Schedule, likely: Sequence[KernelConfig]
) -> list[KernelConfig]:
    """The configs of a schedule, the likely ones first, but each new way of loads, order and
    persistence before a second tile of a known one.
    """
    configs = [config for config in likely if config.schedule == schedule]
    if schedule == "fa1":
        textbook = dict.fromkeys(
            replace(config, schedule="fa1", order="plain", num_stages=1)  # more does not fit
            for config in likely
            if config.schedule == "fa2" and not config.persistent
        )
        configs = [config for config in textbook if why_illegal(spec, config, gpu) is None]
    seen: Counter[Any] = Counter()
    turns = {}
    for config in configs:
        way = config.loads, config.order, config.persistent
        turns[config] = seen[way]
        seen[way] += 1
    return sorted(configs, key=turns.__getitem__)


def check(
    pairs: Sequence[Pair], evaluator: Evaluator, journal: Journal, *, seconds: float | None
) -> bool:
    """Check what the journal does not have yet; returns whether all is known."""
    end = None if seconds is None else time.monotonic() + seconds
    journal.begin()
    known = {(outcome.spec, outcome.config): outcome for _, outcome in journal.read()}
    missing = [pair for pair in pairs if not _is_known(pair, known)]
    for spec, group in groupby(missing, key=lambda pair: pair[0]):
        configs = [config for _, config in group]
        for outcome in evaluator.evaluate("check", spec, workload(spec, SEQ), configs):
            journal.add(0, outcome)
            print(_line(outcome), flush=True)
            if end is not None and time.monotonic() > end:
                return not _missing(pairs, journal)
    return True


def _is_known(pair: Pair, known: dict[Pair, Outcome]) -> bool:
    outcome = known.get(pair)
    return outcome is not None and outcome.digest == render(*pair).digest


def _missing(pairs: Sequence[Pair], journal: Journal) -> bool:
    return not set(pairs) <= {(outcome.spec, outcome.config) for _, outcome in journal.read()}


def _line(outcome: Outcome) -> str:
    words = (outcome.spec.name, outcome.config.label, outcome.status.value, outcome.detail)
    return "  ".join(word for word in words if word)


def faults(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A sentence for each wrong kernel, and for each schedule without a right one."""
    for each in outcomes:
        if not each.ok and each.status not in REFUSED:
            yield _line(each)
    right: dict[tuple[str, str], bool] = {}
    for each in outcomes:
        kind = each.spec.direction, each.config.schedule
        right[kind] = right.get(kind, False) or each.ok
    for (direction, schedule), found in right.items():
        if not found:
            yield f"no {direction} of schedule {schedule} is right"


def summary(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """One line per schedule: how many kernels are right, refused and wrong."""
    for schedule in dict.fromkeys(each.config.schedule for each in outcomes):
        mine = [each for each in outcomes if each.config.schedule == schedule]
        right = sum(each.ok for each in mine)
        refused = sum(each.status in REFUSED for each in mine)
        yield f"{schedule:8} {right} right, {refused} refused, {len(mine) - right - refused} wrong"


def _evaluator(asked: argparse.Namespace, gpu: Gpu) -> Any:
    state = paths.state_dir(asked.out)
    if asked.smoke:
        from flashgen.evaluate.offline import OfflineEvaluator

        return OfflineEvaluator(gpu, state, jobs=1)
    from flashgen.evaluate.on_gpu import GpuEvaluator

    return GpuEvaluator(gpu, 0, state)


def _pairs(gpu: Gpu, *, smoke: bool) -> list[Pair]:
    if not smoke:
        return kernels(gpu)
    small = specs()[3]  # head dim 64, no mask
    found = [config for spec, config in kernels(gpu, each=1) if spec == small]
    return [(small, config) for config in found if not config.executed]


def main(arguments: Sequence[str]) -> int:
    """Check, then print the counts and the faults."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--time-budget", type=float, metavar="SECONDS")
    parser.add_argument("--smoke", action="store_true", help="a few kernels in the interpreter")
    asked = parser.parse_args(arguments)
    journal = Journal(path=asked.out / "first_checks.jsonl")
    try:
        gpu = known_target(SMOKE_TARGET) if asked.smoke else _device()
        pairs = _pairs(gpu, smoke=asked.smoke)
        with _evaluator(asked, gpu) as evaluator:
            complete = check(pairs, evaluator, journal, seconds=asked.time_budget)
    except FlashgenError as error:
        print(error, file=sys.stderr)
        return 3 if isinstance(error, NoGpuError) else 1
    latest = {(outcome.spec, outcome.config): outcome for _, outcome in journal.read()}
    found = [latest[pair] for pair in pairs if pair in latest]
    print("\n".join([f"{len(found)} of {len(pairs)} kernels checked", *summary(found)]))
    if not complete:
        return LATE
    wrong = list(faults(found))
    print("\n".join(wrong))
    return bool(wrong)


def _device() -> Gpu:
    from flashgen.kernels.launch import device_gpu

    return device_gpu(0, instead="python benchmarks/first_checks.py --smoke")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
