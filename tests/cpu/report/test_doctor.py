"""flashgen doctor on machines of all sorts, made up here: nothing is compiled and no GPU is needed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from flashgen import paths
from flashgen.compile import known_bugs
from flashgen.errors import ToolchainError
from flashgen.evaluate.workers.answers import Answer, Died, Done
from flashgen.report import doctor, gpu_probe, machine
from flashgen.report.doctor import Diagnosis, diagnose
from flashgen.schedules.outcome import Source, Stage, Status
from flashgen.spec.gpu import TARGETS, Gpu
from tests.fakes import Failing, FakeEvaluator

ROOT = Path(__file__).resolve().parents[3]
H200 = TARGETS["nvidia_h200"]

CONDITIONS = {
    "driver": "580.1", "sm_mhz": 1980, "memory_mhz": 3201, "power_w": 90.0, "power_limit_w": 700.0,
    "temperature_c": 40,
}  # fmt: skip
NVML = {
    "driver": "580.1", "mig": False, "sm_max_mhz": 1980, "sm_set_mhz": 1980,
    "sm_default_mhz": 1980, "reasons": 1, "processes": 1,
}  # fmt: skip
SEEN = {
    "cuda": "13.0", "hip": None, "gpu": asdict(H200), "why": "", "name": "NVIDIA H200",
    "memory_gb": 150.8, "conditions": CONDITIONS, "nvml": NVML,
}  # fmt: skip
NONE = {"cuda": None, "hip": None, "gpu": None, "why": "torch is a build for the CPU", "nvml": {}}


class Machine:
    """A machine that looks like `seen`, and whose kernels fail at a stage as `failing` says."""

    def __init__(self, seen: Answer | None = None, failing: Failing | None = None) -> None:
        self.seen = seen or Done(SEEN)
        self.failing = failing or (lambda stage, config: None)
        self.opened: list[tuple[Any, ...]] = []
        self.error: Exception | None = None

    def evaluator(self, source: Source, gpu: Gpu, *place: Any) -> FakeEvaluator:
        self.opened.append((source, gpu.slug, *place[:-1]))
        if self.error is not None:
            raise self.error
        return FakeEvaluator(us=lambda config: 20.0, gpu=gpu, failing=self.failing, source=source)

    def diagnose(self, folder: Path, index: int = 0, **tools: Any) -> Diagnosis:
        made = {
            "look": lambda _: self.seen,
            "offline": lambda gpu, folder: self.evaluator("estimated", gpu, folder),
            "on_gpu": lambda gpu, index, folder: self.evaluator("measured", gpu, index, folder),
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, tool in (made | tools).items():
                patch.setattr(doctor, name, tool)
            return diagnose(folder, index)


def at(stage: Stage, status: Status) -> Failing:
    return lambda found, config: status if found == stage else None


def seen(**changes: Any) -> Done:
    nvml = NVML | changes.pop("nvml", {})
    return Done(SEEN | {"nvml": nvml} | changes)


def found(folder: Path, look: Answer | None = None, failing: Failing | None = None) -> Diagnosis:
    return Machine(look, failing).diagnose(folder)


def value(diagnosis: Diagnosis, name: str) -> str:
    (fact,) = (fact for fact in diagnosis.facts if fact.name == name)
    return fact.value


def remedy(diagnosis: Diagnosis, name: str) -> str:
    (fact,) = (fact for fact in diagnosis.facts if fact.name == name)
    return fact.remedy


def able(diagnosis: Diagnosis) -> list[bool]:
    return [each.able for each in diagnosis.abilities]


@pytest.fixture(autouse=True)
def private_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    for name in ("FLASHGEN_GPU", "FLASHGEN_CONFIGS", "FLASHGEN_GENERATED", "CC"):
        monkeypatch.delenv(name, raising=False)


def test_a_machine_in_order_has_nothing_to_do(tmp_path: Path) -> None:
    good = found(tmp_path)
    assert able(good) == [True, True, True]
    assert good.remedies == ()
    assert value(good, "GPU") == "NVIDIA H200 (nvidia_h200, sm_90, 132 SMs), 150.8 GB"
    assert value(good, "clocks") == "SM 1980 of 1980 MHz, not set"
    assert value(good, "NVML") == "may be read"
    assert value(good, "MIG") == "off"
    lines = list(good.lines())
    assert lines[-3:] == [
        lines[-3],
        "can launch    yes: right, 1.00 of 2 floors from float64",
        "can measure   yes: 20.0 us, 60 % of samples within 5%",
    ]
    assert lines[-3].startswith("can compile   yes: a kernel for sm_90 in ")
    assert len(lines) <= 40


def test_each_ability_is_tried_on_the_gpu_that_is_named(tmp_path: Path) -> None:
    made = Machine()
    made.diagnose(tmp_path, 3)
    assert made.opened == [("estimated", "nvidia_h200"), ("measured", "nvidia_h200", 3)]


def test_json_has_what_the_screen_has(tmp_path: Path) -> None:
    bad = found(tmp_path, failing=at("check", Status.TIMEOUT))
    record = json.loads(json.dumps(bad.to_json()))
    assert record["schema"] == 1
    assert record["facts"]["gpu"]["driver"] == "580.1"
    assert record["can"]["compile"]["able"] is True
    assert record["can"]["launch"] == {
        "able": False, "why": "timeout: made to fail", "remedy": "report this as a bug",
    }  # fmt: skip
    assert record["can"]["measure"]["why"] == "nothing can be launched"
    assert record["remedies"] == ["report this as a bug"]


def test_without_a_gpu_it_compiles_for_an_h100(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "KERNEL_DRIVER", tmp_path / "none")
    made = Machine(Done(NONE))
    bare = made.diagnose(tmp_path)
    assert able(bare) == [True, False, False]
    assert made.opened == [("estimated", "nvidia_h100_80gb_hbm3")]
    assert value(bare, "GPU") == "none: torch is a build for the CPU"
    assert any("TRITON_INTERPRET=1" in each for each in bare.remedies)
    assert value(bare, "table").startswith("none: there is no GPU; ")


def test_a_driver_without_a_torch_for_it_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Kernel Module  580.1\nGCC\n")
    monkeypatch.setattr(machine, "KERNEL_DRIVER", tmp_path / "version")
    bare = found(tmp_path, look=Done(NONE))
    assert value(bare, "driver") == "NVIDIA UNIX Kernel Module  580.1"
    assert bare.abilities[1].remedy.startswith("install a CUDA build of torch")


@pytest.mark.parametrize(
    ("nvml", "says", "to_do"),
    [
        ({"sm_set_mhz": 1500}, "set to 1500 MHz", "who set the clocks"),
        ({"reasons": 0x2}, "set to 1980 MHz", "who set the clocks"),
        ({"reasons": 0x44}, "not set, held down by its power limit, heat (hardware)", "cool down"),
        ({"reasons": None, "sm_set_mhz": None, "sm_default_mhz": None}, "unknown", ""),
    ],
)
def test_clocks(nvml: dict[str, Any], says: str, to_do: str, tmp_path: Path) -> None:
    one = found(tmp_path, look=seen(nvml=nvml))
    assert value(one, "clocks").endswith(says)
    assert to_do in remedy(one, "clocks")
    assert bool(remedy(one, "clocks")) == bool(to_do)


def test_known_bugs_of_triton_on_this_gpu_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_bugs, "version", lambda _: "3.6.0")
    one = found(tmp_path, look=seen(gpu=asdict(TARGETS["nvidia_b200"])))
    assert "triton-lang/triton#9871" in value(one, "known bug")
    assert "another Triton" in remedy(one, "known bug")
    assert not [fact for fact in found(tmp_path).facts if fact.name == "known bug"]


@pytest.mark.parametrize(("arch", "told"), [("sm_70", True), ("sm_75", True), ("sm_80", False)])
def test_a_gpu_whose_tensor_cores_triton_does_not_use_is_told(
    arch: str, told: bool, tmp_path: Path
) -> None:
    gpu = asdict(H200) | {"name": "NVIDIA X", "arch": arch}
    one = found(tmp_path, look=Done(SEEN | {"gpu": gpu}))
    facts = [fact for fact in one.facts if fact.name == "tensor cores"]
    assert bool(facts) == told
    if told:
        assert arch in value(one, "tensor cores")
        assert "torch's attention" in remedy(one, "tensor cores")


def test_mig_other_programs_and_missing_rights_are_told(tmp_path: Path) -> None:
    one = found(
        tmp_path,
        look=seen(
            nvml={"mig": True, "processes": 3}, conditions=CONDITIONS | {"power_w": None}
        ),
    )  # fmt: skip
    assert value(one, "MIG") == "on"
    assert value(one, "processes") == "3 on this GPU"
    assert value(one, "NVML") == "does not report power_w"
    assert len([each for each in one.remedies if "MIG" in each or "other programs" in each]) == 2
    denied = found(tmp_path, look=Done(SEEN | {"nvml": {"error": "Insufficient Permissions"}}))
    assert value(denied, "NVML") == "Insufficient Permissions"
    assert able(denied) == [True, True, True]


@pytest.mark.parametrize(
    ("error", "to_do"),
    [
        ("RuntimeError: Failed to find C compiler. Please specify via CC", "install gcc or clang"),
        ("fatal error: Python.h: No such file or directory", "headers of Python"),
        ("ModuleNotFoundError: No module named 'triton'", "pip install triton"),
        ("PermissionError: [Errno 13] Permission denied: '/.triton'", "TRITON_CACHE_DIR"),
        ("OSError: [Errno 30] Read-only file system: '/.triton'", "TRITON_CACHE_DIR"),
        ("no answer within 120 s", "nvidia-smi"),
    ],
)
def test_what_does_not_compile_is_not_launched(error: str, to_do: str, tmp_path: Path) -> None:
    made = Machine()
    made.error = ToolchainError(error)
    one = made.diagnose(tmp_path)
    assert able(one) == [False, False, False]
    assert to_do in one.abilities[0].remedy
    assert [source for source, *_ in made.opened] == ["estimated"]


def test_a_kernel_without_an_estimate_compiles(tmp_path: Path) -> None:
    one = found(tmp_path, failing=at("timed", Status.NO_ESTIMATE))
    assert able(one) == [True, True, True]
    assert "without an estimate (made to fail)" in one.abilities[0].why
    assert one.remedies == (f"for estimates: {paths.install_command('offline')}",)


@pytest.mark.parametrize(
    ("stage", "can"),
    [
        ("timed", [False, False, False]),
        ("check", [True, False, False]),
        ("rough", [True, True, False]),
    ],
)
def test_a_kernel_that_fails_is_a_bug_of_flashgens(
    stage: Stage, can: list[bool], tmp_path: Path
) -> None:
    one = found(tmp_path, failing=at(stage, Status.WRONG))
    assert able(one) == can
    assert one.remedies == ("report this as a bug",)


def test_a_device_whose_children_cannot_start(tmp_path: Path) -> None:
    made = Machine()
    one = made.diagnose(tmp_path, on_gpu=_no_children)
    assert able(one) == [True, False, False]
    assert one.abilities[1].why == "no child process starts"


def _no_children(gpu: Gpu, index: int, folder: Path) -> FakeEvaluator:
    raise ToolchainError("no child process starts")


def test_a_probe_that_dies_leaves_the_rest(tmp_path: Path) -> None:
    one = found(tmp_path, look=Died("it was killed by SIGSEGV"))
    assert value(one, "GPU") == "none: it was killed by SIGSEGV"
    assert able(one) == [True, False, False]


def test_which_table_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first three lines: the table, its folder, and the command that makes it better."""
    one = found(tmp_path)
    assert [fact.name for fact in one.facts[:3]] == ["table", "serves", "to improve"]
    assert value(one, "table").startswith("nvidia_h200, ")
    assert "entries (" in value(one, "table")
    assert value(one, "to improve") == "flashgen tune --gpu"
    alias = asdict(H200) | {"name": "NVIDIA H200 NVL"}
    assert value(found(tmp_path, look=Done(SEEN | {"gpu": alias})), "table").startswith(
        "nvidia_h200, "
    )
    unlisted = asdict(H200) | {"name": "NVIDIA H900"}
    one = found(tmp_path, look=Done(SEEN | {"gpu": unlisted}))
    assert value(one, "table").startswith("none for nvidia_h900: the entries of nvidia_")
    nothing_like = asdict(H200) | {"name": "NVIDIA X", "arch": "sm_75"}
    one = found(tmp_path, look=Done(SEEN | {"gpu": nothing_like}))
    assert value(one, "table") == "none for nvidia_x: default kernels serve"
    assert all(fact.name != "to improve" for fact in one.facts)  # it says to use torch's attention
    assert value(found(tmp_path, look=Done(NONE)), "to improve") == "flashgen tune --target SLUG"
    monkeypatch.setenv("FLASHGEN_GPU", "nvidia_l4")
    one = found(tmp_path, look=Done(NONE))
    assert value(one, "table").startswith("nvidia_l4")
    assert value(one, "to improve") == "flashgen tune --target nvidia_l4"
    assert value(one, "FLASHGEN_GPU") == "nvidia_l4"
    monkeypatch.setenv("FLASHGEN_GPU", "nvidia_geforce_rtx_3060")
    one = found(tmp_path, look=Done(NONE))
    assert value(one, "to improve") == "flashgen tune --gpu --from-tables"


@pytest.mark.parametrize("slug", TARGETS)
def test_every_known_gpu_gets_its_table_and_the_command_that_makes_it_better(slug: str) -> None:
    gpu = TARGETS[slug]
    serving, folder, better = machine.tables(gpu)
    own = serving.value.startswith(f"{slug}, ")
    if not own:
        sentence = rf"none for {slug}: the entries of \S+ serve, the most like it: .*"
        lent = re.fullmatch(sentence, serving.value)
        assert lent or gpu.arch.startswith("gfx")
    assert folder.value == str(paths.shipped_generated_dir())
    assert better.value == "flashgen tune --gpu" + " --from-tables" * (not own)


def test_a_table_that_cannot_be_read_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHGEN_CONFIGS", str(tmp_path))
    (tmp_path / "nvidia_l4.yaml").write_text("schema: [")
    one = found(tmp_path)
    assert "nvidia_l4.yaml" in value(one, "tables")
    assert remedy(one, "tables").startswith("correct or delete")
    monkeypatch.setenv("FLASHGEN_CONFIGS", str(tmp_path / "nowhere"))
    assert "FLASHGEN_CONFIGS" in remedy(found(tmp_path), "tables")


def test_folders_that_others_may_write_or_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "triton"
    cache.mkdir(mode=0o700)
    assert remedy(found(tmp_path), "Triton's cache") == ""
    cache.chmod(0o777)
    assert value(found(tmp_path), "Triton's cache").endswith("others may write to it")
    assert "yours alone" in remedy(found(tmp_path), "Triton's cache")
    monkeypatch.setattr(machine.os, "getuid", lambda: 4321)
    monkeypatch.setattr(machine.Path, "stat", lambda self, **_: os.stat_result([0o700] * 10))
    assert machine._shared(cache) == "belongs to another user"
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert value(found(tmp_path), "Triton's cache").endswith("not there yet, cannot be written")
    assert "TRITON_CACHE_DIR" in remedy(found(tmp_path), "Triton's cache")


def test_no_compiler_and_a_compiler_that_is_named_wrongly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    assert value(found(tmp_path), "C compiler") == "none: CC is no-such-compiler -O2"
    monkeypatch.setenv("CC", "'unbalanced")
    assert value(found(tmp_path), "toolchain") == "ValueError: No closing quotation"
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert value(found(tmp_path), "C compiler") == "none"
    assert "gcc or clang" in remedy(found(tmp_path), "C compiler")


def fake_nvml(**functions: Any) -> types.ModuleType:
    """A pynvml whose other functions are refused, as to a user without rights."""

    class NVMLError(Exception):
        pass

    def refused(*_: Any) -> Any:
        raise NVMLError("Insufficient Permissions")

    made = types.ModuleType("pynvml")
    made.NVMLError = NVMLError  # type: ignore[attr-defined]
    made.NVML_CLOCK_SM = 1  # type: ignore[attr-defined]
    made.__getattr__ = lambda name: functions.get(name, refused)  # type: ignore[method-assign]
    return made


def test_nvml_with_and_without_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    assert gpu_probe.by_nvml("abc") == {"error": "Insufficient Permissions"}
    begun = {"nvmlInit": lambda: None, "nvmlSystemGetDriverVersion": lambda: b"580.1"}
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**begun))
    assert gpu_probe.by_nvml("abc")["error"] == "the driver shows no device GPU-abc"
    named: list[str] = []
    begun["nvmlDeviceGetHandleByUUID"] = lambda name: named.append(name) or 7  # type: ignore[assignment, misc, func-returns-value]
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**begun))
    assert gpu_probe.by_nvml("MIG-abc") == {
        "driver": "580.1", "mig": None, "sm_max_mhz": None, "sm_set_mhz": None,
        "sm_default_mhz": None, "reasons": None, "processes": None,
    }  # fmt: skip
    assert named == ["MIG-abc"]
    begun["nvmlDeviceGetMigMode"] = lambda handle: [1, 1]  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**begun))
    assert gpu_probe.by_nvml("abc")["mig"] is True
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_probe.by_nvml("abc") == {"error": "nvidia-ml-py is not installed"}


def fake_torch(**cuda: Any) -> types.SimpleNamespace:
    version = types.SimpleNamespace(cuda=cuda.pop("version", None), hip=None)
    return types.SimpleNamespace(version=version, cuda=types.SimpleNamespace(**cuda))


def test_the_probe_says_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(**cuda: Any) -> str:
        made = fake_torch(is_available=lambda: False, **cuda)
        monkeypatch.setitem(sys.modules, "torch", made)
        said = gpu_probe.look({"index": 0})
        assert said["gpu"] is None
        return str(said["why"])

    def no_driver() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check")

    assert why() == "torch is a build for the CPU"
    assert why(version="13.0", init=no_driver) == "Found no NVIDIA driver on your system."
    hidden = why(version="13.0", init=lambda: None, device_count=lambda: 0)
    assert "CUDA_VISIBLE_DEVICES" in doctor._remedy(hidden)


def test_the_probe_reads_a_gpu_and_a_driver_that_triton_cannot_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flashgen.evaluate import gpu_state

    properties = types.SimpleNamespace(name="NVIDIA H200", total_memory=150_754_820_096, uuid="u-1")
    made = fake_torch(
        version="13.0", is_available=lambda: True, get_device_properties=lambda index: properties
    )
    launch = types.ModuleType("flashgen.kernels.launch")
    launch.device_gpu = lambda index: H200  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", made)
    monkeypatch.setitem(sys.modules, "flashgen.kernels.launch", launch)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(gpu_state, "clocks_and_power", lambda index: gpu_state.Conditions(sm_mhz=7))
    said = gpu_probe.look({"index": 0})
    assert (said["gpu"], said["name"], said["memory_gb"]) == (asdict(H200), "NVIDIA H200", 150.8)
    assert said["conditions"]["sm_mhz"] == 7
    assert said["nvml"] == {"error": "nvidia-ml-py is not installed"}

    def broken(index: int) -> None:
        raise RuntimeError("Triton needs a C compiler\nat once")

    launch.device_gpu = broken  # type: ignore[attr-defined]
    said = gpu_probe.look({"index": 0})
    assert said["why"] == "RuntimeError: Triton needs a C compiler"
    assert (said["gpu"], said["name"]) == (None, "NVIDIA H200")


def test_the_command_without_torch_triton_nvml_and_a_home(tmp_path: Path) -> None:
    """Nothing can be done there, and that is what it says."""
    broken = tmp_path / "site"
    broken.mkdir()
    for name in ("torch", "triton", "pynvml"):
        error = f"raise ModuleNotFoundError(\"No module named '{name}'\", name='{name}')\n"
        (broken / f"{name}.py").write_text(error)
    env = {name: text for name, text in os.environ.items() if not name.startswith("TRITON_")}
    env |= {"PYTHONPATH": f"{broken}:{ROOT}", "HOME": "/dev/null/home"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "flashgen", "doctor", "--json"],
        cwd=tmp_path, env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert [each["able"] for each in record["can"].values()] == [False, False, False]
    assert record["facts"]["gpu"]["GPU"] == "none: the package torch is missing: install it"
    assert record["facts"]["folders"]["Triton's cache"].endswith("cannot be written")
    assert any(
        "pip install torch" in each or "pip install triton" in each for each in record["remedies"]
    )


@pytest.mark.slow("compiles a kernel in a process that imports torch")
def test_the_command_on_this_machine(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flashgen", "doctor", "--json", "--out", tmp_path],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    can = json.loads(done.stdout)["can"]
    assert can["compile"]["able"] is True, can
    torch = pytest.importorskip("torch")
    assert can["launch"]["able"] is can["measure"]["able"] is torch.cuda.is_available(), can
