"""Clocks, power and temperature of a GPU, by nvidia-ml-py, or by nvidia-smi where that is missing.

What neither tells is None: a figure without its conditions says so, and none is made up.
"""

from __future__ import annotations

import contextlib
import importlib
import subprocess
from dataclasses import dataclass
from typing import Any

SMI_LIMIT_S = 20.0

_SMI_FIELDS = {
    "driver": "driver_version",
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "power_limit_w": "enforced.power.limit",
    "temperature_c": "temperature.gpu",
}
"""What nvidia-smi calls the fields of Conditions."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The state of the GPU while it was measured; None for what its driver does not tell."""

    driver: str | None = None
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None

    def __str__(self) -> str:
        """In words: SM 1755 MHz, 652 of 700 W, 61 C; or unknown."""
        limit = "" if self.power_limit_w is None else f" of {self.power_limit_w:.0f}"
        words = (
            self.sm_mhz and f"SM {self.sm_mhz} MHz",
            self.memory_mhz and f"memory {self.memory_mhz} MHz",
            None if self.power_w is None else f"{self.power_w:.0f}{limit} W",
            None if self.temperature_c is None else f"{self.temperature_c} C",
        )
        return ", ".join(word for word in words if word) or "unknown"


def clocks_and_power(index: int) -> Conditions:
    """The conditions of CUDA device `index` now; all None where nobody tells them."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return _by_smi(index)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return Conditions()
    try:
        return _by_nvml(nvml, _nvml_handle(nvml, index))
    except nvml.NVMLError:
        return Conditions()
    finally:
        nvml.nvmlShutdown()


def _uuid(index: int) -> str:
    """The name that both tools know a CUDA device by: CUDA_VISIBLE_DEVICES renumbers CUDA's devices
    only.
    """
    import torch

    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def _nvml_handle(nvml: Any, index: int) -> Any:
    return nvml.nvmlDeviceGetHandleByUUID(_uuid(index))


def _by_nvml(nvml: Any, handle: Any) -> Conditions:
    def ask(function: str, *arguments: Any) -> Any:
        with contextlib.suppress(nvml.NVMLError):  # not every board answers every question
            return getattr(nvml, function)(*arguments)
        return None

    driver = ask("nvmlSystemGetDriverVersion")
    power_mw = ask("nvmlDeviceGetPowerUsage", handle)
    limit_mw = ask("nvmlDeviceGetEnforcedPowerLimit", handle)
    return Conditions(
        driver=driver.decode() if isinstance(driver, bytes) else driver,
        sm_mhz=ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
        memory_mhz=ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
        power_w=None if power_mw is None else power_mw / 1e3,
        power_limit_w=None if limit_mw is None else limit_mw / 1e3,
        temperature_c=ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
    )


def _by_smi(index: int) -> Conditions:
    """The same by the program of the driver, which a machine with a GPU usually has."""
    try:
        asked = [
            "nvidia-smi",
            f"--id={_uuid(index)}",
            f"--query-gpu={','.join(_SMI_FIELDS.values())}",
            "--format=csv,noheader,nounits",
        ]
        done = subprocess.run(
            asked, capture_output=True, text=True, timeout=SMI_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError, RuntimeError, AssertionError):
        return Conditions()  # no program, no answer; torch refuses in either of the last two ways
    told = [word.strip() for word in done.stdout.strip().split(",")]
    if len(told) != len(_SMI_FIELDS):
        return Conditions()
    driver, *numbers = told
    sm, memory, power, limit, temperature = map(_number, numbers)
    return Conditions(
        driver=driver,
        sm_mhz=_whole(sm),
        memory_mhz=_whole(memory),
        power_w=power,
        power_limit_w=limit,
        temperature_c=_whole(temperature),
    )


def _number(word: str) -> float | None:
    """A figure; None for "[N/A]" and its like."""
    try:
        return float(word)
    except ValueError:
        return None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
