"""Clocks, power and temperature of a GPU, and whether its clock is steady during a run.

Readings come from nvidia-ml-py, or from nvidia-smi where that is missing. A value that neither
reports is None.

Times taken at different clocks do not compare: at half the clock every candidate looks twice as
slow as those before it, and would be dropped. A measurement at another clock is marked UNSTEADY and
repeated after WAITS_S. A clock that stays changed ends the run, because accepting it would mean
timing everything again.
"""

from __future__ import annotations

import contextlib
import importlib
import subprocess
from dataclasses import dataclass
from typing import Any

from flashgen.errors import FlashgenError
from flashgen.evaluate.workers.answers import WorkerUnfit

SMI_LIMIT_S = 20.0

_SMI_FIELDS = (
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "enforced.power.limit",
    "temperature.gpu",
)
"""What nvidia-smi is asked for; power last."""

_SMI_POWER = ("power.draw.instant", "power.draw")
"""The power of now, and what drivers have that do not know it."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The state of the GPU during a measurement; None for what its driver does not report."""

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
    """The current conditions of CUDA device `index`; all None if no tool reports them."""
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
    """The name of a CUDA device for both tools: CUDA_VISIBLE_DEVICES renumbers only CUDA's
    devices.
    """
    import torch

    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def _nvml_handle(nvml: Any, index: int) -> Any:
    return nvml.nvmlDeviceGetHandleByUUID(_uuid(index))


def _by_nvml(nvml: Any, handle: Any) -> Conditions:
    def ask(function: str, *arguments: Any) -> Any:
        with contextlib.suppress(nvml.NVMLError):  # not every board reports every value
            return getattr(nvml, function)(*arguments)
        return None

    driver = ask("nvmlSystemGetDriverVersion")
    power_mw = _instant_power_mw(nvml, handle) or ask("nvmlDeviceGetPowerUsage", handle)
    limit_mw = ask("nvmlDeviceGetEnforcedPowerLimit", handle)
    return Conditions(
        driver=driver.decode() if isinstance(driver, bytes) else driver,
        sm_mhz=ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
        memory_mhz=ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
        power_w=None if power_mw is None else power_mw / 1e3,
        power_limit_w=None if limit_mw is None else limit_mw / 1e3,
        temperature_c=ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
    )


def _instant_power_mw(nvml: Any, handle: Any) -> int | None:
    """The power of now: nvmlDeviceGetPowerUsage is the mean of the last second on Ampere (GA100
    excepted) and newer GPUs (NVML API reference), longer than a round's load. None where the driver
    does not report it.
    """
    try:
        (field,) = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
    except (nvml.NVMLError, AttributeError):
        return None
    return int(field.value.uiVal) if field.nvmlReturn == 0 else None


def _by_smi(index: int) -> Conditions:
    """The same by nvidia-smi, which comes with the driver."""
    told = next((told for name in _SMI_POWER if (told := _smi(index, name))), None)
    if told is None:
        return Conditions()
    driver, *numbers = told
    sm, memory, limit, temperature, power = map(_number, numbers)
    return Conditions(
        driver=driver,
        sm_mhz=_whole(sm),
        memory_mhz=_whole(memory),
        power_w=power,
        power_limit_w=limit,
        temperature_c=_whole(temperature),
    )


def _smi(index: int, power: str) -> list[str] | None:
    """The values of _SMI_FIELDS and of `power`; None if there is no such program or field."""
    fields = (*_SMI_FIELDS, power)
    try:
        done = subprocess.run(
            [
                "nvidia-smi",
                f"--id={_uuid(index)}",
                f"--query-gpu={','.join(fields)}",
                "--format=csv,noheader,nounits",
            ],
            capture_output=True,
            text=True,
            timeout=SMI_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError, RuntimeError, AssertionError):
        return None  # no program, or no answer; torch raises either of the last two
    told = [word.strip() for word in done.stdout.strip().split(",")]
    return told if len(told) == len(fields) else None


def _number(word: str) -> float | None:
    """A figure; None for "[N/A]" and its like."""
    try:
        return float(word)
    except ValueError:
        return None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


SAME_WITHIN = 1.43
"""Clocks count as one if neither is more than so many times the other. Chosen, not measured: far
from 2, the halved clock, and above what a board's own boost goes up and down with its
temperature."""

WAITS_S = (5.0, 15.0, 60.0, 180.0)
"""Before a measurement is repeated, for the first time, the second...: some seconds for another
program to end, some minutes for a board to cool."""


class ClockChanged(FlashgenError, RuntimeError):
    """The GPU's clock changed during a run and stayed changed."""


class DeviceLost(WorkerUnfit):
    """The GPU no longer answers, to a new process either."""


class Clock:
    """The clock of the times of a run, in MHz: `usual_mhz`, or else that of the first
    measurement.
    """

    def __init__(self, usual_mhz: float | None = None) -> None:
        self.usual_mhz = usual_mhz
        self._off = 0  # measurements in a row that were taken at another clock

    def why_unsteady(self, mhz: float | None) -> str:
        """Why a measurement with a final clock of `mhz` must be repeated; "" if it need not.

        None, an unknown clock, counts as the usual one. Raises ClockChanged once all repetitions
        are used up.
        """
        if mhz is None:
            return ""
        if self.usual_mhz is None:
            self.usual_mhz = mhz
        usual = self.usual_mhz
        if max(mhz, usual) <= SAME_WITHIN * min(mhz, usual):
            self._off = 0
            return ""
        self._off += 1
        moved = f"from {usual:.0f} to {mhz:.0f} MHz"
        if self._off > len(WAITS_S):
            raise ClockChanged(
                f"the GPU's clock went {moved} in the middle of the run and stays there, and times "
                f"at the two do not compare: nothing is lost, so see to it with `nvidia-smi -q -d "
                f"CLOCK,PERFORMANCE` and run the same command again; to tune at the clock of now, "
                f"name another folder with --out"
            )
        return f"the GPU's clock went {moved}"
