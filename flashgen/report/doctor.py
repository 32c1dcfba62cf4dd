"""Doctor: what a bug report needs, and whether this machine can compile, launch and measure.

Each ability is tried with one small kernel, in a child process with a time limit: compiled for the
GPU, or for an H200 where there is none; compared with float64 on the GPU; timed. diagnose() never
raises for a machine's fault: what fails is a line, with what to do about it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashgen.errors import FlashgenError
from flashgen.evaluate.tasks import COMPILE_ENV, DEVICE_ENV, Tasks, kernel_payload
from flashgen.evaluate.workers.answers import Answer, Died, Done, Task
from flashgen.evaluate.workers.pool import Workers
from flashgen.report.gpu_probe import CLOCKS_SET, SLOWED
from flashgen.report.machine import (
    Fact,
    driver,
    environment,
    folders,
    tables,
    toolchain,
    versions,
)
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.defaults import default_config
from flashgen.spec.gpu import Gpu, known_target
from flashgen.spec.outcome import Timing
from flashgen.spec.problem import workload

SCHEMA = 1
"""Of --json."""

TARGET = "nvidia_h200"
"""What is compiled for where there is no GPU."""

LOOK_LIMIT_S, TRY_LIMIT_S = 60.0, 120.0
SEQ = 1024

SPEC = AttentionSpec(dtype="float16", head_dim=64, head_dim_v=64, mask="none")

Ask = Callable[[str, Mapping[str, Any], float, Mapping[str, str | None]], Answer]
"""A function of a child process, its payload, the limit in seconds, and the environment."""


@dataclass(frozen=True, kw_only=True)
class Ability:
    """Whether this machine can compile, launch or measure; why, or why not; what to do then."""

    name: str
    able: bool
    why: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Everything that doctor says."""

    facts: tuple[Fact, ...]
    abilities: tuple[Ability, ...]

    @property
    def remedies(self) -> tuple[str, ...]:
        """What to do, without duplicates."""
        found = [each.remedy for each in self.abilities] + [each.remedy for each in self.facts]
        return tuple(dict.fromkeys(remedy for remedy in found if remedy))

    def to_json(self) -> dict[str, Any]:
        """{schema, facts: {section: {name: value}}, can: {name: {able, why, remedy}}, remedies}."""
        sections: dict[str, dict[str, str]] = {}
        for fact in self.facts:
            sections.setdefault(fact.section, {})[fact.name] = fact.value
        can = {each.name: asdict(each) for each in self.abilities}
        for each in can.values():
            del each["name"]
        return {"schema": SCHEMA, "facts": sections, "can": can, "remedies": list(self.remedies)}

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


def in_child(
    function: str, payload: Mapping[str, Any], limit_s: float, env: Mapping[str, str | None]
) -> Answer:
    """The answer of a function in a child process; Died if no child can start."""
    try:
        with Workers(1, env=env) as workers:
            task = Task(function=function, payload=dict(payload), limit_s=limit_s)
            return workers.submit(task).result()
    except (FlashgenError, OSError) as error:
        return Died(str(error))


def diagnose(out: Path, index: int = 0, ask: Ask = in_child) -> Diagnosis:
    """Read this machine and try its abilities. out: the folder that a tuner would write to."""
    looked = ask("flashgen.report.gpu_probe:look", {"index": index}, LOOK_LIMIT_S, DEVICE_ENV)
    nothing: dict[str, Any] = {"gpu": None, "why": str(looked)}
    seen = looked.value if isinstance(looked, Done) else nothing
    gpu = None if seen["gpu"] is None else Gpu(**seen["gpu"])
    sections = {
        "versions": versions(),
        "environment": environment(),
        "gpu": _of_gpu(seen, gpu),
        "toolchain": toolchain(),
        "folders": folders(out),
        "tables": tables(gpu),
    }
    facts = [fact for name, section in sections.items() for fact in _read(name, section)]
    return Diagnosis(facts=tuple(facts), abilities=tuple(_abilities(gpu, seen, index, ask)))


def _read(name: str, section: Iterator[Fact]) -> Iterator[Fact]:
    """The facts of a section; if one cannot be read, why."""
    try:
        yield from section
    except Exception as error:  # a file or an installation that is broken in any way
        lines = f"{type(error).__name__}: {error}".strip().splitlines()
        yield Fact(section=name, name=name, value=lines[0], remedy=_remedy(lines[0]))


def _of_gpu(seen: Mapping[str, Any], gpu: Gpu | None) -> Iterator[Fact]:
    def fact(name: str, value: object, remedy: str = "") -> Fact:
        return Fact(section="gpu", name=name, value=str(value), remedy=remedy)

    built = f"CUDA {seen['cuda']}" if seen.get("cuda") else seen.get("hip") and f"HIP {seen['hip']}"
    yield fact("torch's build", built or ("CPU" if "cuda" in seen else "unknown"))
    if "name" not in seen:
        yield fact("GPU", f"none: {seen['why']}")
        yield fact("driver", driver() or "none is loaded")
        return
    slug = f"{gpu.slug}, {gpu.arch}, {gpu.sms} SMs" if gpu else seen["why"]
    yield fact("GPU", f"{seen['name']} ({slug}), {seen['memory_gb']} GB")
    nvml, conditions = seen["nvml"], seen["conditions"] or {}
    yield fact("driver", nvml.get("driver") or conditions.get("driver") or "unknown")
    if "error" in nvml:
        yield fact("NVML", nvml["error"], "install nvidia-ml-py, or run where NVML may be read")
    else:
        silent = [name for name, value in conditions.items() if value is None]
        yield fact("NVML", f"does not report {', '.join(silent)}" if silent else "may be read")
        mig = {None: "not supported", True: "on", False: "off"}[nvml["mig"]]
        warning = "name the MIG slice in a bug report: tables are for whole GPUs"
        yield fact("MIG", mig, warning if nvml["mig"] else "")
        others = nvml["processes"]
        alone = "end other programs on this GPU before measuring" if (others or 0) > 1 else ""
        yield fact("processes", "unknown" if others is None else f"{others} on this GPU", alone)
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
    return Fact(section="gpu", name="clocks", value=", ".join(words), remedy=remedy)


def _abilities(gpu: Gpu | None, seen: Mapping[str, Any], index: int, ask: Ask) -> Iterator[Ability]:
    """Compile, then launch, then measure: each needs the one before."""
    try:
        with tempfile.TemporaryDirectory(prefix="flashgen-doctor-") as folder:
            compiled = _compiles(gpu or known_target(TARGET), Path(folder), ask)
            yield compiled
            launched = _launches(gpu, seen, index, compiled, ask)
            yield launched
            yield _measures(gpu, seen, index, launched, Path(folder), ask)
    except OSError as error:
        why = f"no temporary folder ({error.strerror})"
        for name in ("compile", "launch", "measure"):
            yield Ability(name=name, able=False, why=why, remedy="set TMPDIR")


def _kernel() -> dict[str, Any]:
    return kernel_payload(SPEC, default_config(SPEC))


def _compiles(gpu: Gpu, folder: Path, ask: Ask) -> Ability:
    payload = _kernel() | {"gpu": asdict(gpu), "cache": str(folder)}
    began = time.monotonic()
    answer = ask(Tasks().compile, payload, TRY_LIMIT_S, COMPILE_ENV)
    if not isinstance(answer, Done):
        return Ability(name="compile", able=False, why=str(answer), remedy=_remedy(str(answer)))
    built, missing = answer.value["compiled"], answer.value["no_estimate"]
    why = f"{built['name']} for {gpu.arch} in {time.monotonic() - began:.1f} s"
    remedy = "for estimates: pip install 'flashgen[offline]'" if missing else ""
    return Ability(
        name="compile",
        able=True,
        why=f"{why}, without an estimate ({missing})" if missing else why,
        remedy=remedy,
    )


def _launches(
    gpu: Gpu | None, seen: Mapping[str, Any], index: int, compiled: Ability, ask: Ask
) -> Ability:
    def no(why: str, remedy: str) -> Ability:
        return Ability(name="launch", able=False, why=why, remedy=remedy)

    if gpu is None:
        if "name" not in seen and not driver():
            instead = "without a GPU, kernels run in Triton's interpreter: TRITON_INTERPRET=1"
            return no(f"no GPU driver is loaded ({seen['why']})", instead)
        return no(seen["why"], _remedy(seen["why"]))
    if not compiled.able:
        return no("nothing compiles", "")
    payload = _kernel() | {"device": f"cuda:{index}", "seed": 0}
    answer = ask(Tasks().check, payload, TRY_LIMIT_S, DEVICE_ENV)
    if not isinstance(answer, Done):
        return no(str(answer), _remedy(str(answer)))
    found = answer.value
    if not found["passed"]:
        return no(f"the result is wrong: {found['detail']}", "report this as a bug")
    why = f"right, {found['floors']:.2f} of 2 floors from float64"
    return Ability(name="launch", able=True, why=why)


def _measures(
    gpu: Gpu | None,
    seen: Mapping[str, Any],
    index: int,
    launched: Ability,
    folder: Path,
    ask: Ask,
) -> Ability:
    if gpu is None or not launched.able:
        return Ability(
            name="measure",
            able=False,
            why="nothing can be launched",
            remedy="" if gpu else f"estimates need no GPU: flashgen tune --target {TARGET}",
        )
    payload = _kernel() | {
        "problem": asdict(workload(SPEC, SEQ)),
        "device": f"cuda:{index}",
        "seed": 0,
        "effort": "rough",
        "l2_bytes": gpu.l2_bytes,
        "peak_tflops": gpu.peak_tflops,
        "cache": str(folder),
    }
    answer = ask(Tasks().measure, payload, TRY_LIMIT_S, DEVICE_ENV)
    if not isinstance(answer, Done):
        return Ability(name="measure", able=False, why=str(answer), remedy=_remedy(str(answer)))
    timing = Timing(**answer.value)
    spread = (timing.high_us - timing.low_us) / timing.median_us
    why = f"{timing.median_us:.1f} us, 60 % of samples within {spread:.0%}"
    return Ability(name="measure", able=True, why=why)


_REMEDIES = (
    ("C compiler", "install gcc or clang, or set CC"),
    ("Python.h", "install the headers of Python (python3-dev)"),
    ("No module named 'yaml'", "install the tuner's packages: pip install 'flashgen[tune]'"),
    (".yaml", "mend or delete this table, or unset FLASHGEN_CONFIGS"),
    ("FLASHGEN_CONFIGS", "let FLASHGEN_CONFIGS name a folder of tables, or unset it"),
    ("No module named 'triton'", "install Triton: pip install triton"),
    ("package torch is missing", "install torch: pip install torch"),
    ("package triton is missing", "install Triton: pip install triton"),
    ("build for the CPU", "install a CUDA build of torch: pytorch.org names the command"),
    ("NVIDIA driver", "install the NVIDIA driver, or a torch for the one that is there"),
    ("0 devices", "CUDA_VISIBLE_DEVICES hides the GPUs: unset it"),
    ("Permission denied", "set TRITON_CACHE_DIR and TMPDIR to folders that can be written"),
    ("Read-only file system", "set TRITON_CACHE_DIR and TMPDIR to folders that can be written"),
    ("out of memory", "end other programs on this GPU"),
    ("no answer within", "look for a hung GPU: nvidia-smi"),
)
"""What to do, by a part of an error."""


def _remedy(error: str) -> str:
    return next((remedy for part, remedy in _REMEDIES if part.lower() in error.lower()), "")
