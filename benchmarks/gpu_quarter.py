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
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.quarter.experiments import EXPERIMENTS, Experiment, Item, kernels
from benchmarks.quarter.lines import append, page, read
from flashgen import settings
from flashgen.errors import FlashgenError, InvalidArgument, NoGpuError
from flashgen.evaluate.build import cpu_count
from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu, known_target

SECONDS, ITEM_S, SETUP_S, TINY_S = 590.0, 40.0, 90.0, 600.0
"""Of a run; when an item hangs; when the import of torch and the making of a context do; when
either does in a tiny run, on a machine that does much else."""
BROKEN, NO_GPU, LOWEST = 5, 3, 19
TARGETS = ("nvidia_h200", "nvidia_h100_80gb_hbm3")
LINES, CARRIED = "quarter.jsonl", "quarter-prepared.tar.xz"


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
    """Let children work until all is done or the time is over, then print a page."""
    end, now = time.time() + asked.seconds, asked.out / "now.json"
    asked.out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "work", "--out", asked.out, "--until", str(end)]
    carried = asked.out / "prepared"
    if asked.prepared.is_file() and not (asked.tiny or carried.exists()):
        shutil.unpack_archive(asked.prepared, carried)
    command += ["--prepared", carried, *["--tiny"] * asked.tiny]
    command += ["--only", *asked.only] if asked.only else []
    env = dict(os.environ)
    if carried.exists():
        env["FLASHGEN_AOT"] = str(carried / "aot")
    with contextlib.ExitStack() as stack:
        if not asked.tiny:
            log = stack.enter_context((asked.out / "ahead.log").open("w"))
            stack.enter_context(_process([*command, "--ahead"], env, log))
        code, at = -1, {}
        while code != 0 and time.time() < end:
            setup_s = TINY_S if asked.tiny else SETUP_S
            now.write_text(json.dumps({"until": time.time() + setup_s}))
            with _process(command, env) as child:
                code = _watched(child, now, end)
            at = json.loads(now.read_text())
            if "key" not in at:  # nothing was left, or not even the device was reached
                break
            if code not in (0, BROKEN) and time.time() < end:
                why = "hung" if code == -signal.SIGKILL else f"its process ended with {code}"
                at["seconds"] = round(time.time() - at.pop("began"), 2)
                append(asked.out / LINES, at | {"status": "given up", "detail": why})
    print("\n".join(page(read(asked.out / LINES))))
    return code if code in (0, NO_GPU) else int("key" not in at)


@contextlib.contextmanager
def _process(
    command: Sequence[str | Path], env: dict[str, str], log: IO[str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a group of its own, which ends with this block. log: of what it says."""
    child = subprocess.Popen(
        command, env=env, cwd=ROOT, start_new_session=True, stdout=log, stderr=log
    )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _watched(child: subprocess.Popen[bytes], now: Path, end: float) -> int:
    """Wait for a child; kill it if its item hangs, and at the end."""
    until = end
    while child.poll() is None:
        with contextlib.suppress(ValueError):  # it is being written
            until = min(end, json.loads(now.read_text())["until"])
        if time.time() > until:
            os.killpg(child.pid, signal.SIGKILL)
        time.sleep(0.05)
    return child.wait()


def work(asked: argparse.Namespace) -> int:
    """All items, each experiment within its seconds; then those that were cut off."""
    if asked.ahead:
        return ahead(asked)
    import torch

    if torch.cuda.is_available():
        offer_carried()
    else:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    from benchmarks.quarter.place import Place

    path, now, mine = asked.out / LINES, asked.out / "now.json", f"{asked.until:.0f}"
    place = Place(asked)
    append(path, place.about | {"run": mine})
    print(place.first_line, flush=True)
    for free in (False, True):
        left = 0.0
        for experiment in chosen(asked):
            lines = [line for line in read(path) if line["kind"] != "about"]
            known = {line["key"] for line in lines}
            own = [e for e in lines if (e["experiment"], e["run"]) == (experiment.name, mine)]
            left += experiment.seconds - sum(line["seconds"] for line in own)
            items = list(experiment.items(place.gpu, lines))
            for item in tiny(items) if asked.tiny else items:
                if item.key in known or not (left > 0 or free):
                    continue
                line = {"kind": item.kind, "key": item.key, "experiment": experiment.name,
                        "run": mine, "outcomes": []}  # fmt: skip
                began = time.time()
                until = began + (TINY_S if asked.tiny else ITEM_S)
                now.write_text(json.dumps(line | {"began": began, "until": until}))
                line |= place.measured(item)
                line["seconds"] = round(time.time() - began, 2)
                append(path, line)
                lines.append(line)
                known.add(item.key)
                left -= line["seconds"]
                if line["status"] == "broken":
                    os._exit(BROKEN)  # what torch does at exit would hang
    return 0


def chosen(asked: argparse.Namespace) -> list[Experiment]:
    """The experiments that are asked for."""
    return [each for each in EXPERIMENTS if not asked.only or each.name in asked.only]


def items_of(asked: argparse.Namespace, gpu: Gpu) -> list[Item]:
    """All items that do not depend on results."""
    return [item for experiment in chosen(asked) for item in experiment.items(gpu, [])]


def pairs_of(asked: argparse.Namespace, gpu: Gpu) -> list[tuple[AttentionSpec, KernelConfig]]:
    """What all items launch, in their order."""
    items = items_of(asked, gpu)
    return list(dict.fromkeys(pair for item in items for pair in kernels(item, gpu)))


def offer_carried() -> None:
    """Put the kernels that are carried into Triton's cache, which finds them by their keys."""
    from flashgen.runtime.kernel_files import binaries, offer

    carried = settings.aot_folder()
    for name in binaries(carried) if carried else ():
        offer(name)


def ahead(asked: argparse.Namespace) -> int:
    """Compile what is launched, but for what Triton's cache has."""
    from flashgen.kernels.launch import device_gpu
    from flashgen.tune.precompile import precompile

    os.nice(LOWEST)
    offer_carried()
    gpu = device_gpu(0)
    list(precompile(pairs_of(asked, gpu), gpu, jobs=max(1, cpu_count() - 1)))
    return 0


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
            for item in items_of(asked, gpu):
                for stage in ("timed", *["check"] * asked.execute):
                    configs = item.configs if item.problem else ()
                    for o in evaluator.evaluate(stage, item.spec, item.problem, configs):
                        append(facts, o.to_json())
    pairs = dict.fromkeys(pair for gpu in gpus for pair in pairs_of(asked, gpu))
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
    parser.add_argument("what", choices=("run", "prepare", "enter", "work"))
    parser.add_argument("file", nargs="*", type=Path, help="of enter: the lines of a run")
    parser.add_argument("--out", type=Path, help="the folder that is written")
    parser.add_argument("--prepared", type=Path, default=Path(CARRIED), help="of run")
    parser.add_argument("--only", nargs="+", help="of run and prepare: names of experiments")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of run")
    parser.add_argument("--tiny", action="store_true", help="of run: small, and measures nothing")
    parser.add_argument("--target", nargs="+", default=TARGETS, help="of prepare: slugs of GPUs")
    parser.add_argument("--execute", action="store_true", help="of prepare: on this CPU, an hour")
    parser.add_argument("--jobs", type=int, help="of prepare")
    parser.add_argument("--ahead", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    outs = {"prepare": Path("quarter-prepared"), "enter": Path()}
    asked.out = (asked.out or outs.get(asked.what, Path("quarter"))).resolve()
    asked.prepared = asked.prepared.resolve()
    try:
        if asked.what == "enter":
            from benchmarks.quarter.enter import enter

            return enter(asked.file, asked.out)
        return {"run": run, "work": work, "prepare": prepare}[asked.what](asked)
    except FlashgenError as error:
        print(error, file=sys.stderr)
        return NO_GPU if isinstance(error, NoGpuError) else 1 + isinstance(error, InvalidArgument)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
