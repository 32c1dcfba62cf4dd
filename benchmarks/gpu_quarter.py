"""A quarter of an hour on a GPU: ten minutes of experiments, those first that decide the most.

    python benchmarks/gpu_quarter.py run [--out DIR]         there: writes DIR/quarter.jsonl
    python benchmarks/gpu_quarter.py prepare [--out DIR]     here, before: compiles what is launched
    python benchmarks/gpu_quarter.py enter FILE [--out DIR]  here, after: table, page and picture

run works through quarter/experiments.py, each experiment for its own seconds and those that earlier
ones left, and ends by itself. A result is a line of JSON, on disk before the next begins, and the
same command goes on behind it. A child process launches. If it hangs or loses its context, its item
is given up, and another child goes on. All cores but one compile ahead, at the lowest priority.

prepare writes quarter-prepared.tar.xz, which travels, and which run looks for. It runs under the
Triton of the other machine, and needs no GPU. Triton's key of a kernel has no path, but the bytes
of its library: the wheel must be the same, for the same Python. Otherwise run compiles.

--tiny: one item of each kind in each experiment, small; without a GPU, what the interpreter runs.
It measures nothing, and enter refuses it. Exit codes: 0 done, 1 failed, 2 usage, 3 no GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.quarter.experiments import Experiment, Item, chosen, items_of, pairs_of
from benchmarks.quarter.lines import Line, append, page, read
from flashgen.errors import FlashgenError, InvalidArgument, NoGpuError, ToolchainError
from flashgen.evaluate.workers import usage
from flashgen.evaluate.workers.answers import Answer, Done, Raised, Task, TimedOut
from flashgen.evaluate.workers.child import Child
from flashgen.evaluate.workers.pool import Workers, child_environment
from flashgen.spec.gpu import Gpu, known_target
from flashgen.spec.records import record_of

SECONDS, ITEM_S, SETUP_S, TINY = 590.0, 40.0, 90.0, 15
"""Of a run; when an item hangs; when the import of torch and the making of a context do. A tiny run
may take so many times as long, on a machine that does much else."""
NO_GPU = 3
TARGETS = ("nvidia_h200", "nvidia_h100_80gb_hbm3")
LINES, CARRIED = "quarter.jsonl", "quarter-prepared.tar.xz"
CHILD = "benchmarks.quarter.place:"
"""What child processes do."""


def tiny(items: Sequence[Item]) -> list[Item]:
    """The first of each kind, in small sizes, of its first and its last config."""
    first: dict[str, Item] = {}
    for item in items:
        first.setdefault(item.kind, item)
    found = []
    for item in first.values():
        if p := item.problem:
            small = {"batch": 1, "heads": 2, "kv_heads": 1 + (p.group == 1), "seq_k": 64}
            p = replace(p, **small, seq_q=min(p.seq_q, 64))
        configs = tuple(dict.fromkeys((*item.configs[:1], *item.configs[-1:])))
        found.append(replace(item, problem=p, configs=configs))
    return found


def run(asked: argparse.Namespace) -> int:
    """Let a child launch until all is done or the time is over, then print a page."""
    end, path, carried = time.time() + asked.seconds, asked.out / LINES, asked.out / "prepared"
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.prepared.is_file() and not (asked.tiny or carried.exists()):
        shutil.unpack_archive(asked.prepared, carried)
    env = {"FLASHGEN_AOT": str(carried / "aot")} if carried.exists() else {}
    given: dict[str, Any] = {"out": str(asked.out), "tiny": asked.tiny}
    lines = [line for line in read(path) if line["kind"] != "about"]
    patience = TINY if asked.tiny else 1
    item_s, setup_s = ITEM_S * patience, SETUP_S * patience
    with closing(Launcher(env, setup_s, end)) as launcher, Workers(1, env=env) as compiler:
        answer = launcher.ask("begin", given, item_s)
        if not isinstance(answer, Done):
            print(answer, file=sys.stderr)
            return NO_GPU if isinstance(answer, Raised) and answer.kind == "NoGpuError" else 1
        print(answer.value["first_line"], flush=True)
        append(path, answer.value["about"])
        if not asked.tiny:
            ahead = {"only": asked.only}
            compiler.submit(Task(function=CHILD + "ahead", payload=ahead, limit_s=asked.seconds))
        gpu = record_of(Gpu, answer.value["gpu"])
        for experiment, item in todo(asked, gpu, lines):
            if (began := time.time()) >= end:
                break
            answer = launcher.ask("measured", given | {"item": asdict(item)}, item_s)
            if isinstance(answer, TimedOut) and time.time() >= end:
                break
            line = {"kind": item.kind, "key": item.key, "experiment": experiment.name}
            line |= {"outcomes": []} | told(answer) | {"seconds": round(time.time() - began, 2)}
            append(path, line)
            lines.append(line)
    print("\n".join(page(lines)))
    return 0


class Launcher:
    """A child process that launches; after one that hung or died, another."""

    def __init__(self, env: dict[str, str], setup_s: float, end: float) -> None:
        self._env, self._setup_s, self._end = child_environment(env), setup_s, end
        self._child: Child | None = None

    def ask(self, name: str, payload: dict[str, Any], limit_s: float) -> Answer:
        """What a function of the child says, which hangs after so many seconds, or at the end."""
        if self._child is None or not self._child.can_serve():
            self.close()
            self._child = Child(self._env, usage.machine())
            self._child.wait_until_ready()
            limit_s += self._setup_s
        limit_s = max(0.1, min(limit_s, self._end - time.time()))
        task = Task(function=CHILD + name, payload=payload, limit_s=limit_s)
        try:
            return self._child.ask(task, limit_s, limit_s)
        except ToolchainError as error:  # a package is missing, or the disk is full
            return Raised("ToolchainError", str(error), "")

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.discard()


def told(answer: Answer) -> Line:
    """The part of a line that an answer is."""
    if isinstance(answer, Done):
        return answer.value
    if isinstance(answer, Raised):
        text = (answer.message or answer.kind).strip().partition("\n")[0][:300]
        return {"status": "broken" if answer.ended else "failed", "detail": text}
    why = "hung" if isinstance(answer, TimedOut) else str(answer)
    return {"status": "given up", "detail": why}


def todo(
    asked: argparse.Namespace, gpu: Gpu, lines: list[Line]
) -> Iterator[tuple[Experiment, Item]]:
    """All items without a line, each experiment within its seconds and those that earlier ones
    left; then those that were cut off. The line of an item is there when the next is asked for.
    """
    known = {line["key"] for line in lines}
    for free in (False, True):
        left = 0.0
        for experiment in chosen(asked.only):
            left += experiment.seconds
            items = list(experiment.items(gpu, lines))
            for item in tiny(items) if asked.tiny else items:
                if item.key not in known and (left > 0 or free):
                    known.add(item.key)
                    yield experiment, item
                    left -= lines[-1]["seconds"]


def prepare(asked: argparse.Namespace) -> int:
    """Compile and estimate, for each target, what run launches there."""
    from flashgen.evaluate import offline
    from flashgen.table.table import Table
    from flashgen.tune.precompile import package

    vars(offline)["CHECK_LIMIT_S"] = 900.0  # of a machine that does much else
    asked.out.mkdir(parents=True, exist_ok=True)
    os.environ["TRITON_CACHE_DIR"] = str((asked.out / "triton").resolve())
    gpus, facts = [known_target(slug) for slug in asked.target], asked.out / "facts.jsonl"
    facts.unlink(missing_ok=True)
    for gpu in gpus:
        with offline.OfflineEvaluator(gpu, asked.out / "state", asked.jobs) as evaluator:
            for item in items_of(asked.only, gpu):
                for stage in ("timed", *["check"] * asked.execute):
                    configs = item.configs if item.problem else ()
                    for o in evaluator.evaluate(stage, item.spec, item.problem, configs):
                        append(facts, o.to_json())
    pairs = dict.fromkeys(pair for gpu in gpus for pair in pairs_of(asked.only, gpu))
    cache, aot = asked.out / "triton", asked.out / "aot"
    made = list(package(Table(gpu=gpus[0]), pairs, aot, jobs=asked.jobs, cache=cache))
    for each in made:
        print(*([f"{each.name}: {each.failure}\n"] if each.failure else ()), end="")
    archive = asked.out.with_name(f"{asked.out.name}.tar.xz")
    with tarfile.open(archive, "w:xz", preset=3) as file:  # with their line numbers, a fifth
        file.add(aot, "aot")
        file.add(facts, "facts.jsonl")
    size = archive.stat().st_size / 2**20
    print(f"{archive}: {sum(not each.failure for each in made)} kernels, {size:.1f} MiB")
    return 0


def main(arguments: Sequence[str]) -> int:
    """Run, prepare or enter."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("run", "prepare", "enter"))
    parser.add_argument("file", nargs="*", type=Path, help="of enter: the lines of a run")
    parser.add_argument("--out", type=Path, help="the folder that is written")
    parser.add_argument("--prepared", type=Path, default=Path(CARRIED), help="of run")
    parser.add_argument("--only", nargs="+", help="of run and prepare: names of experiments")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of run")
    parser.add_argument("--tiny", action="store_true", help="of run: small, and measures nothing")
    parser.add_argument("--target", nargs="+", default=TARGETS, help="of prepare: slugs of GPUs")
    parser.add_argument("--execute", action="store_true", help="of prepare: on this CPU, an hour")
    parser.add_argument("--jobs", type=int, help="of prepare")
    asked = parser.parse_args(arguments)
    outs = {"prepare": Path("quarter-prepared"), "enter": Path()}
    asked.out = (asked.out or outs.get(asked.what, Path("quarter"))).resolve()
    asked.prepared = asked.prepared.resolve()
    try:
        if asked.what == "enter":
            from benchmarks.quarter.enter import enter

            return enter(asked.file, asked.out)
        return {"run": run, "prepare": prepare}[asked.what](asked)
    except FlashgenError as error:
        print(error, file=sys.stderr)
        return NO_GPU if isinstance(error, NoGpuError) else 1 + isinstance(error, InvalidArgument)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
