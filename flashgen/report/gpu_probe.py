"""What torch, CUDA and NVML say of a GPU, for `flashgen doctor`. Runs in a child process: a driver
may hang or crash.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import asdict, dataclass
from typing import Any

from flashgen.spec.records import record_of

CLOCKS_SET = 0x2
"""nvmlClocksEventReasonApplicationsClocksSetting."""

SLOWED = {
    0x4: "its power limit",
    0x8: "a hardware slowdown",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "the power supply",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons that slow a GPU down (NVML API Reference,
NvmlClocksEventReasons)."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """Look at the CUDA device of an index."""

    index: int


def look(payload: dict[str, Any]) -> dict[str, Any]:
    """The task of a child process: the fields of a Look -> what doctor.py shows. gpu is null
    where there is none or Triton cannot use it, and `why` says the reason.
    """
    import torch

    index = record_of(Look, payload, "the task").index
    found: dict[str, Any] = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    found |= {"gpu": None, "why": "", "conditions": None, "memory_gb": None, "nvml": {}}
    if not torch.cuda.is_available():
        found["why"] = _why_none(torch)
        return found
    from flashgen.evaluate.gpu_state import clocks_and_power
    from flashgen.kernels.launch import device_gpu

    properties = torch.cuda.get_device_properties(index)
    found["name"] = properties.name
    found["memory_gb"] = round(properties.total_memory / 1e9, 1)
    found["conditions"] = asdict(clocks_and_power(index))
    found["nvml"] = by_nvml(f"{getattr(properties, 'uuid', '')}")
    try:
        found["gpu"] = asdict(device_gpu(index))
    except Exception as error:  # Triton's driver may fail in any way
        found["why"] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


def _why_none(torch: Any) -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return "torch is a build for the CPU"
    try:
        torch.cuda.init()
    except Exception as error:  # torch raises RuntimeError or AssertionError
        return str(error).splitlines()[0]
    return f"{torch.cuda.device_count()} devices are visible"


def by_nvml(uuid: str) -> dict[str, Any]:
    """{error}, or {driver, mig, sm_max_mhz, sm_set_mhz, sm_default_mhz, reasons, processes}, with
    null for what is not reported.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return {"error": "nvidia-ml-py is not installed"}
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return {"error": str(error)}

    def ask(function: str, *arguments: Any) -> Any:
        with contextlib.suppress(nvml.NVMLError, AttributeError):  # by board, driver and rights
            return getattr(nvml, function)(*arguments)
        return None

    try:
        driver = ask("nvmlSystemGetDriverVersion")
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        handle = ask("nvmlDeviceGetHandleByUUID", name) if uuid else None
        if handle is None:
            return {"driver": driver, "error": f"the driver shows no device {name}"}
        mig = ask("nvmlDeviceGetMigMode", handle)
        return {
            "driver": driver.decode() if isinstance(driver, bytes) else driver,
            "mig": None if mig is None else bool(mig[0]),
            "sm_max_mhz": ask("nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM),
            "sm_set_mhz": ask("nvmlDeviceGetApplicationsClock", handle, nvml.NVML_CLOCK_SM),
            "sm_default_mhz": ask(
                "nvmlDeviceGetDefaultApplicationsClock", handle, nvml.NVML_CLOCK_SM
            ),
            "reasons": ask("nvmlDeviceGetCurrentClocksEventReasons", handle),
            "processes": _count(ask("nvmlDeviceGetComputeRunningProcesses", handle)),
        }
    finally:
        ask("nvmlShutdown")


def _count(found: Any) -> int | None:
    return None if found is None else len(found)
