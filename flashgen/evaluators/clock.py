"""Clock: whether a GPU still clocks as it did when the other times of a run were taken.

What is measured at two clocks does not compare: at half the clock every candidate looks twice as
slow as those before, and is dropped. A measurement at another clock is marked UNSTEADY and repeated
after WAITS_S. A clock that stays where it is ends the run: to accept it, all that was timed before
would have to be timed again, and the next change would ask for that once more.
"""

from __future__ import annotations

from flashgen.errors import FlashgenError

SAME_WITHIN = 1.43
"""Clocks count as one if neither is more than so many times the other. Chosen, not measured: far
from 2, the halved clock, and above what a board's own boost goes up and down with its
temperature."""

WAITS_S = (5.0, 15.0, 60.0, 180.0)
"""Before a measurement is repeated, for the first time, the second...: some seconds for another
program to end, some minutes for a board to cool."""


class ClockChanged(FlashgenError, RuntimeError):
    """The GPU's clock changed in the middle of a run, and stayed where it is."""


class Clock:
    """The clock of a run's times, in MHz: `usual_mhz`, else what the first measurement tells."""

    def __init__(self, usual_mhz: float | None = None) -> None:
        self.usual_mhz = usual_mhz
        self._off = 0  # measurements in a row that were taken at another clock

    def why_unsteady(self, mhz: float | None) -> str:
        """Why a measurement after which the GPU clocked at `mhz` must be repeated; "" where not.

        None, a clock that is not told, is taken for the usual one. Raises ClockChanged once all
        repetitions are used up.
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
