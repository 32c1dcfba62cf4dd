"""Clocks, power and temperature of a GPU, and whether its clock is steady during a run.

Readings come from nvidia-ml-py, which the extra "tune" installs. A value that it does not report is
None.

Times taken at different clocks do not compare: at half the clock every candidate looks twice as
slow as those before it, and would be dropped. A measurement at another clock is marked UNSTEADY and
repeated after WAITS_S. A clock that stays changed ends the run, because accepting it would mean
timing everything again.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from flashgen.errors import FlashgenError
from flashgen.evaluate.workers.answers import WorkerUnfit


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
    """The current conditions of CUDA device `index`; all None if nothing reports them."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return Conditions()
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


def _nvml_handle(nvml: Any, index: int) -> Any:
    """By UUID: CUDA_VISIBLE_DEVICES renumbers only CUDA's devices."""
    import torch

    uuid = torch.cuda.get_device_properties(index).uuid
    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")


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
        self._off: Counter[Hashable] = Counter()  # in a row, that were taken at another clock

    def why_unsteady(self, mhz: float | None, search: Hashable = None) -> str:
        """Why a measurement with a final clock of `mhz` must be repeated; "" if it need not.
        search: whose it is, which repeats its own.

        None, an unknown clock, counts as the usual one. Raises ClockChanged once all repetitions
        are used up.
        """
        if mhz is None:
            return ""
        if self.usual_mhz is None:
            self.usual_mhz = mhz
        usual = self.usual_mhz
        if max(mhz, usual) <= SAME_WITHIN * min(mhz, usual):
            self._off[search] = 0
            return ""
        self._off[search] += 1
        moved = f"from {usual:.0f} to {mhz:.0f} MHz"
        if self._off[search] > len(WAITS_S):
            raise ClockChanged(
                f"the GPU's clock went {moved} in the middle of the run and stays there, and times "
                f"at the two do not compare: nothing is lost, so see to it with `nvidia-smi -q -d "
                f"CLOCK,PERFORMANCE` and run the same command again; to tune at the clock of now, "
                f"name another folder with --out"
            )
        return f"the GPU's clock went {moved}"
