"""Compiles what the steps of a campaign will launch, in their order, while they measure.

    python benchmarks/compile_ahead.py --gpu GPU.json --state CAMPAIGN/.flashgen [--jobs N]

gpu_campaign.py starts it and ends it. It needs no GPU: GPU.json has the fields of a Gpu. It runs at
the lowest priority and leaves one core to the process that launches. The compilers of the steps
look into the same folder first, so a step waits only for what is not there yet.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.first_checks import Pair, kernels
from flashgen.bench import ladder
from flashgen.evaluate.build import Builder, cpu_count
from flashgen.evaluate.tasks import COMPILE_ENV, Tasks
from flashgen.evaluate.workers.pool import Workers
from flashgen.search.goal import goal_for
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.legality import why_illegal
from flashgen.spec.problem import workload

LOWEST = 19
"""Of os.nice: whatever else wants a core gets it."""

HEAD_DIMS, MASKS = (128, 64), ("none", "causal")
TUNED_SEQ = 4096


def pairs(gpu: Gpu) -> list[Pair]:
    """What the first checks, the ladder and the tuner of the forward may compile, without
    duplicates, in the order in which they need it.
    """
    return list(dict.fromkeys(chain(kernels(gpu), _of_ladder(gpu), _of_tuner(gpu))))


def specs() -> list[AttentionSpec]:
    """The specs of the ladder and of the tuner, in their order."""
    return [
        AttentionSpec(dtype="bfloat16", head_dim=dim, head_dim_v=dim, mask=mask)
        for dim in HEAD_DIMS
        for mask in MASKS
    ]


def _of_ladder(gpu: Gpu) -> Iterator[Pair]:
    for spec in specs():
        for step in ladder.STEPS:
            for config in step.candidates(spec):
                if why_illegal(spec, config, gpu) is None:
                    yield spec, config


def _of_tuner(gpu: Gpu) -> Iterator[Pair]:
    """The seeds of all searches, then a config of each in turn: which ones a sampler will propose
    is not known.
    """
    goals = [goal_for(spec, workload(spec, TUNED_SEQ), gpu, on_gpu=True) for spec in specs()]
    for goal in goals:
        yield from ((goal.spec, config) for config in goal.first)
    for turn in zip_longest(*(goal.space for goal in goals)):
        for goal, config in zip(goals, turn, strict=True):
            if config is not None:
                yield goal.spec, config


def compile_all(
    wanted: Iterable[Pair], gpu: Gpu, state: Path, *, jobs: int, tasks: Tasks | None = None
) -> Iterator[str]:
    """Compile kernels into the cache of STATE, and yield a line for each."""
    with Workers(jobs, env=COMPILE_ENV) as workers:
        builder = Builder(gpu, state, workers, tasks or Tasks())
        # The problem decides which variant of a decode is compiled, and nothing of these.
        started = [
            (builder.start(spec, workload(spec, TUNED_SEQ), config), spec, config)
            for spec, config in wanted
        ]
        for build, spec, config in started:
            yield f"{spec.name} {config.label} {builder.verdict(build).status.value}"


def main(arguments: Sequence[str]) -> int:
    """Compile until all is done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", type=Path, required=True, metavar="FILE", help="fields of a Gpu")
    parser.add_argument("--state", type=Path, required=True, metavar="DIR")
    parser.add_argument("--jobs", type=int, default=max(1, cpu_count() - 1), help="processes")
    asked = parser.parse_args(arguments)
    os.nice(LOWEST)
    gpu = Gpu(**json.loads(asked.gpu.read_text(encoding="utf-8")))
    for line in compile_all(pairs(gpu), gpu, asked.state, jobs=asked.jobs):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
