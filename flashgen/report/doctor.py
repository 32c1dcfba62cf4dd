"""Doctor: what a bug report needs, and whether this machine can compile, launch and measure.

Each ability is tried with one small kernel, in a child process with a time limit: compiled for the
GPU, or for an H200 where there is none; compared with float64 on the GPU; timed. diagnose() never
raises for a machine's fault: what fails is a line, with what to do about it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.compile.known_bugs import warnings_here
from flashgen.errors import FlashgenError
from flashgen.evaluate.payloads import DEVICE_ENV
from flashgen.evaluate.workers.answers import Answer, Died, Done, Task
from flashgen.evaluate.workers.pool import Workers
from flashgen.paths import install_command
from flashgen.report.gpu_probe import CLOCKS_SET, SLOWED, Look
from flashgen.report.machine import (
    Fact,
    driver,
    environment,
    folders,
    tables,
    toolchain,
    versions,
)
from flashgen.schedules.defaults import default_config
from flashgen.schedules.outcome import Outcome, Stage, Status
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import OFFLINE_TARGET, Gpu, known_target
from flashgen.spec.problem import workload

if TYPE_CHECKING:  # its modules import torch, which may be missing
    from flashgen.evaluate.evaluator import Evaluator

SCHEMA = 1
"""Of --json."""

LOOK_LIMIT_S = 60.0
SEQ = 1024

SPEC = AttentionSpec(dtype="float16", head_dim=64, head_dim_v=64, mask="none")

Opened = AbstractContextManager["Evaluator"]


def look(index: int) -> Answer:
    """gpu_probe.look in a child process; Died if none can start."""
    asked = asdict(Look(index=index))
    task = Task(function="flashgen.report.gpu_probe:look", payload=asked, limit_s=LOOK_LIMIT_S)
    try:
        with Workers(1, env=DEVICE_ENV) as workers:
            return workers.submit(task).result()
    except (FlashgenError, OSError) as error:
        return Died(str(error))


def offline(gpu: Gpu, folder: Path) -> Opened:
    """The evaluator without a GPU, in a folder."""
    from flashgen.evaluate.offline import OfflineEvaluator

    return OfflineEvaluator(gpu, folder, 1)


def on_gpu(gpu: Gpu, index: int, folder: Path) -> Opened:
    """The evaluator with the GPU of an index, in a folder."""
    from flashgen.evaluate.on_gpu import GpuEvaluator

    return GpuEvaluator(gpu, index, folder, 1)


@dataclass(frozen=True, kw_only=True)
class Ability:
    """Whether this machine can compile, launch or measure; why, or why not; what to do then."""

    name: str
    able: bool
    why: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Everything that doctor says. sections: the facts by what they are of."""

    sections: Mapping[str, tuple[Fact, ...]]
    abilities: tuple[Ability, ...]

    @property
    def facts(self) -> tuple[Fact, ...]:
        """Those of all sections."""
        return tuple(fact for section in self.sections.values() for fact in section)

    @property
    def remedies(self) -> tuple[str, ...]:
        """What to do, without duplicates."""
        found = [each.remedy for each in self.abilities] + [each.remedy for each in self.facts]
        return tuple(dict.fromkeys(remedy for remedy in found if remedy))

    def to_json(self) -> dict[str, Any]:
        """{schema, facts: {section: {name: value}}, can: {name: {able, why, remedy}}, remedies}."""
        facts = {
            name: {fact.name: fact.value for fact in section}
            for name, section in self.sections.items()
            if section
        }
        can = {each.name: asdict(each) for each in self.abilities}
        for each in can.values():
            del each["name"]
        return {"schema": SCHEMA, "facts": facts, "can": can, "remedies": list(self.remedies)}

    def lines(self) -> Iterator[str]:
        """One screen."""
        width = max(len(fact.name) for fact in self.facts) + 2
        for fact in self.facts:
            yield f"{'!' if fact.remedy else ' '} {fact.name:{width}}{fact.value}"
        yield ""
        for each in self.abilities:
            yield f"can {each.name:9} {'yes' if each.able else 'no'}: {each.why}"
        if self.remedies:
            yield "\nwhat to do:"
            yield from (f"- {remedy}" for remedy in self.remedies)


def diagnose(out: Path, index: int = 0) -> Diagnosis:
    """Read this machine and try its abilities. out: the folder that a tuner would write to."""
    looked = look(index)
    nothing: dict[str, Any] = {"gpu": None, "why": str(looked)}
    seen = looked.value if isinstance(looked, Done) else nothing
    gpu = None if seen["gpu"] is None else Gpu(**seen["gpu"])
    sections = {
        "tables": tables(gpu),
        "versions": versions(),
        "environment": environment(),
        "gpu": _of_gpu(seen, gpu),
        "toolchain": toolchain(),
        "folders": folders(out),
    }
    facts = {name: tuple(_read(name, section)) for name, section in sections.items()}
    return Diagnosis(sections=facts, abilities=tuple(_abilities(gpu, seen, index)))


def _read(name: str, section: Iterator[Fact]) -> Iterator[Fact]:
    """The facts of a section; if one cannot be read, why."""
    try:
        yield from section
    except Exception as error:  # a file or an installation that is broken in any way
        lines = f"{type(error).__name__}: {error}".strip().splitlines()
        yield Fact(name, lines[0], _remedy(lines[0]))


def _of_gpu(seen: Mapping[str, Any], gpu: Gpu | None) -> Iterator[Fact]:
    built = f"CUDA {seen['cuda']}" if seen.get("cuda") else seen.get("hip") and f"HIP {seen['hip']}"
    yield Fact("torch's build", built or ("CPU" if "cuda" in seen else "unknown"))
    if "name" not in seen:
        yield Fact("GPU", f"none: {seen['why']}")
        yield Fact("driver", driver() or "none is loaded")
        return
    slug = f"{gpu.slug}, {gpu.arch}, {gpu.sms} SMs" if gpu else seen["why"]
    yield Fact("GPU", f"{seen['name']} ({slug}), {seen['memory_gb']} GB")
    for warning in warnings_here(gpu.arch) if gpu else ():
        yield Fact("known bug", warning, "use another Triton, or see that the check passes twice")
    if gpu and gpu.without_tensor_cores:
        slow = f"Triton has no code for those of {gpu.arch}: kernels multiply without them"
        yield Fact("tensor cores", slow, "use torch's attention on this GPU: it uses them")
    nvml, conditions = seen["nvml"], seen["conditions"] or {}
    yield Fact("driver", nvml.get("driver") or conditions.get("driver") or "unknown")
    if "error" in nvml:
        yield Fact("NVML", nvml["error"], "install nvidia-ml-py, or run where NVML may be read")
    else:
        silent = [name for name, value in conditions.items() if value is None]
        yield Fact("NVML", f"does not report {', '.join(silent)}" if silent else "may be read")
        mig = {None: "not supported", True: "on", False: "off"}[nvml["mig"]]
        warning = "name the MIG slice in a bug report: tables are for whole GPUs"
        yield Fact("MIG", mig, warning if nvml["mig"] else "")
        others = nvml["processes"]
        alone = "end other programs on this GPU before measuring" if (others or 0) > 1 else ""
        yield Fact("processes", "unknown" if others is None else f"{others} on this GPU", alone)
    yield _clocks(nvml, conditions)


def _clocks(nvml: Mapping[str, Any], conditions: Mapping[str, Any]) -> Fact:
    """The SM clock, and what holds it. A lock by nvidia-smi -lgc is shown only while it limits the
    clock: NVML has no query for it.
    """
    now, most = conditions.get("sm_mhz"), nvml.get("sm_max_mhz")
    words = [f"SM {now or '?'} of {most or '?'} MHz"]
    reasons, chosen = nvml.get("reasons"), nvml.get("sm_set_mhz")
    slowed = [why for bit, why in SLOWED.items() if (reasons or 0) & bit]
    held = (reasons or 0) & CLOCKS_SET or chosen != nvml.get("sm_default_mhz")
    if reasons is None and chosen is None:
        words.append("whether they are set or locked is unknown")
    else:
        words.append(f"set to {chosen or '?'} MHz" if held else "not set")
    if slowed:
        words.append(f"held down by {', '.join(slowed)}")
    remedy = ""
    if held:
        remedy = "say in a bug report who set the clocks; nvidia-smi -rac and -rgc reset them"
    elif slowed:
        remedy = "let the GPU cool down, or raise its power limit, before measuring"
    return Fact("clocks", ", ".join(words), remedy)


def _abilities(gpu: Gpu | None, seen: Mapping[str, Any], index: int) -> Iterator[Ability]:
    """Compile, then launch, then measure: each needs the one before."""
    try:
        with tempfile.TemporaryDirectory(prefix="flashgen-doctor-") as folder:
            compiled = _compiles(gpu or known_target(OFFLINE_TARGET), Path(folder))
            yield compiled
            if gpu is None or not compiled.able:
                yield from _without_launch(gpu, seen)
            else:
                yield from _on_gpu(lambda: on_gpu(gpu, index, Path(folder)))
    except OSError as error:
        why = f"no temporary folder ({error.strerror})"
        for name in ("compile", "launch", "measure"):
            yield _no(name, why, "set TMPDIR to a folder that can be written")


def _no(name: str, why: str, remedy: str = "") -> Ability:
    return Ability(name=name, able=False, why=why, remedy=remedy or _remedy(why))


def _try(opened: Callable[[], Opened], *stages: Stage) -> Iterator[Outcome | str]:
    """The outcome of the default kernel at each stage, or why there is none; ends with the first
    that fails.
    """
    try:
        with opened() as evaluator:
            for stage in stages:
                (outcome,) = evaluator.evaluate(
                    stage, SPEC, workload(SPEC, SEQ), (default_config(SPEC),)
                )
                yield outcome
                if not outcome.ok:
                    return
    except Exception as error:  # of torch or Triton, whose installation may be broken in any way
        yield str(error) if isinstance(error, FlashgenError) else f"{type(error).__name__}: {error}"


def _compiles(gpu: Gpu, folder: Path) -> Ability:
    began = time.monotonic()
    (found,) = _try(lambda: offline(gpu, folder), "timed")
    if isinstance(found, str):
        return _no("compile", found)
    why = f"a kernel for {gpu.arch} in {time.monotonic() - began:.1f} s"
    if found.status is Status.NO_ESTIMATE:
        why = f"{why}, without an estimate ({found.detail})"
        remedy = f"for estimates: {install_command('offline')}"
        return Ability(name="compile", able=True, why=why, remedy=remedy)
    return Ability(name="compile", able=True, why=why) if found.ok else _failed("compile", found)


def _failed(name: str, outcome: Outcome) -> Ability:
    said, _, _ = outcome.detail.partition("; kernel kept in ")  # a folder that ends with doctor
    why = f"{outcome.status.value}: {said}"
    return _no(name, why, _remedy(why) or "report this as a bug")


def _without_launch(gpu: Gpu | None, seen: Mapping[str, Any]) -> Iterator[Ability]:
    why, remedy = seen["why"], ""
    if gpu is not None:
        why = "nothing compiles"
    elif "name" not in seen and not driver():
        why = f"no GPU driver is loaded ({why})"
        remedy = "without a GPU, kernels run in Triton's interpreter: TRITON_INTERPRET=1"
    yield _no("launch", why, remedy)
    instead = "" if gpu else f"estimates need no GPU: flashgen tune --target {OFFLINE_TARGET}"
    yield _no("measure", "nothing can be launched", instead)


def _on_gpu(opened: Callable[[], Opened]) -> Iterator[Ability]:
    """Launch, and measure what was launched."""
    yielded = 0
    for name, found in zip(("launch", "measure"), _try(opened, "check", "rough"), strict=False):
        yielded += 1
        if isinstance(found, str):
            yield _no(name, found)
        else:
            yield _worked(name, found) if found.ok else _failed(name, found)
    if yielded < 2:
        yield _no("measure", "nothing can be launched")


def _worked(name: str, outcome: Outcome) -> Ability:
    why = "done"
    if outcome.check is not None:
        why = f"right, {outcome.check.floors:.2f} of 2 floors from float64"
    elif outcome.timing is not None:
        timing = outcome.timing
        spread = (timing.high_us - timing.low_us) / timing.median_us
        why = f"{timing.median_us:.1f} us, 60 % of samples within {spread:.0%}"
    return Ability(name=name, able=True, why=why)


_REMEDIES = (
    ("C compiler", "install gcc or clang, or set CC"),
    ("Python.h", "install the headers of Python (python3-dev)"),
    (".yaml", "correct or delete this table, or unset FLASHGEN_CONFIGS"),
    ("FLASHGEN_CONFIGS", "let FLASHGEN_CONFIGS name a folder of tables, or unset it"),
    ("No module named 'torch'", "install torch: pip install torch"),
    ("No module named 'triton'", "install Triton: pip install triton"),
    ("package torch is missing", "install torch: pip install torch"),
    ("package triton is missing", "install Triton: pip install triton"),
    ("build for the CPU", "install a CUDA build of torch: pytorch.org names the command"),
    ("NVIDIA driver", "install the NVIDIA driver, or a torch for the one that is there"),
    ("0 devices", "CUDA_VISIBLE_DEVICES hides the GPUs: unset it"),
    ("Permission denied", "set TRITON_CACHE_DIR and TMPDIR to folders that can be written"),
    ("Read-only file system", "set TRITON_CACHE_DIR and TMPDIR to folders that can be written"),
    ("Not a directory", "set TRITON_CACHE_DIR and TMPDIR to folders that can be written"),
    ("out of memory", "end other programs on this GPU"),
    ("no answer within", "look for a hung GPU: nvidia-smi"),
)
"""What to do, by a part of an error."""


def _remedy(error: str) -> str:
    return next((remedy for part, remedy in _REMEDIES if part.lower() in error.lower()), "")
