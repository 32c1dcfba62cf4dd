"""What a worker answers, as values of the right types within their bounds; the tasks' judges.

A worker may be wrong: its memory is spoiled, it has another version, or it lies. An answer is read
before it reaches a log, a cache or a table. What cannot be the result of its task is an
InvalidArgument, which says why. A plausible lie is not found here: `flashgen verify` finds it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashgen.compile.compiler import Compiled
from flashgen.errors import InvalidArgument
from flashgen.estimate.replay import Replay
from flashgen.evaluate.gpu_state import Conditions
from flashgen.evaluate.payloads import Check, Compile, Final, Launches, Measure
from flashgen.evaluate.tasks import ceilings
from flashgen.schedules.outcome import CheckResult, Timing
from flashgen.spec.records import record_of, value_of

LSE = 1.0
"""No kernel passes with more of the tolerance of LSE."""

SLACK = 1e-6
"""Of figures that are computed in floating point."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """The result of the compile task. replay is None if there can be no estimate; no_estimate then
    gives the reason.
    """

    compiled: Compiled
    replay: Replay | None
    no_estimate: str = ""

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Built:
        """The Built of the compile task's answer. Raises InvalidArgument."""
        made = record_of(cls, record, "the answer")
        made.compiled.must_be_possible()
        if made.replay is not None:
            made.replay.must_agree()
        return made


@dataclass(frozen=True, kw_only=True)
class Round:
    """The result of a final round: the times of the kernels, and each one's median of each pass."""

    timings: tuple[Timing, ...]
    passes: tuple[tuple[float, ...], ...]
    sdpa: Timing | None
    conditions: Conditions


def built_of(value: object, asked: Compile) -> Built:
    """The answer of a compile task. Raises InvalidArgument."""
    made = Built.from_json(value_of(dict[str, Any], value, "the answer"))
    found = made.compiled.digest, made.compiled.arch, made.compiled.whole
    due = asked.digest, asked.gpu.arch, asked.whole
    if found != due:
        raise InvalidArgument(f"the answer must be of the kernel {due}: got {found}")
    return made


def check_of(value: object, seed: int) -> CheckResult:
    """The answer of a check task, whose figures may be NaN: a kernel may write NaN. Raises
    InvalidArgument.
    """
    from flashgen.reference.attention import FLOORS_ACCEPTED  # imports torch

    fields = value_of(dict[str, Any], value, "the answer")
    none = {key: x for key, x in fields.items() if isinstance(x, float) and not math.isfinite(x)}
    if none.keys() - {"floors", "rms", "lse_error"}:
        raise InvalidArgument(f"{min(none)} must be a whole number: got {none[min(none)]}")
    result = record_of(CheckResult, fields | dict.fromkeys(none, 0.0), "the answer")
    if result.seed != seed:
        raise InvalidArgument(f"seed must be {seed}: got {result.seed}")
    right = result.floors <= FLOORS_ACCEPTED and result.lse_error <= LSE and result.cases >= 1
    if result.passed and not right:
        raise InvalidArgument(
            f"a kernel that passes must have at most {FLOORS_ACCEPTED:g} floors, an LSE of {LSE:g} "
            f"and a case: got {result.floors:g}, {result.lse_error:g} and {result.cases}"
        )
    return CheckResult(**fields)


def timing_of(value: object, launches: Launches) -> Timing:
    """The answer of a measure task. Raises InvalidArgument, and Implausible for a time that no GPU
    of the peak takes.
    """
    timing = record_of(Timing, value, "the answer")
    _must_be_of(timing, launches)
    return timing


def round_of(value: object, asked: Final) -> Round:
    """The answer of a final round. Raises as timing_of."""
    found = record_of(Round, value, "the answer")
    count = len(asked.configs)
    if not len(found.timings) == len(found.passes) == count:
        raise InvalidArgument(
            f"the answer must have times and passes of {count} kernels: got "
            f"{len(found.timings)} and {len(found.passes)}"
        )
    for timing in (*found.timings, *filter(None, [found.sdpa])):
        _must_be_of(timing, asked.launches)
    lengths = {len(medians) for medians in found.passes}
    if len(lengths) > 1 or min((us for medians in found.passes for us in medians), default=1) <= 0:
        raise InvalidArgument("the answer must have as many passes of each kernel, all > 0 us")
    for timing, medians in zip(found.timings, found.passes, strict=True):
        if medians and min(medians) > timing.median_us * 1.01 + 0.001:  # they are rounded
            raise InvalidArgument(
                f"a median of {timing.median_us:g} us must not lie below all of its passes: got "
                f"{min(medians):g} us at least"
            )
    return found


def _must_be_of(timing: Timing, launches: Launches) -> None:
    """Raise InvalidArgument unless a time can be one of these launches."""
    low, median, high = timing.low_us, timing.median_us, timing.high_us
    if not low <= median * (1 + SLACK) or not median <= high * (1 + SLACK) or timing.samples < 1:
        raise InvalidArgument(
            f"the time must have samples, and low <= median <= high: got {timing.samples}, "
            f"{low:g}, {median:g} and {high:g} us"
        )
    limits = ceilings(launches)
    each = timing.batches_us or (median,)
    if len(each) != len(limits):
        raise InvalidArgument(f"the time must be of {len(limits)} problems: got {len(each)}")
    for us, limit in zip(each, limits, strict=True):
        limit.refuse_above(Timing(median_us=us, low_us=us, high_us=us))
    mean = math.exp(math.fsum(map(math.log, each)) / len(each))
    if abs(mean - median) > 1e-3 * median:
        raise InvalidArgument(
            f"the median must be the mean of all problems, {mean:g}: got {median:g}"
        )


def judge_compile(payload: object, value: object) -> None:
    """Raise ValueError unless `value` can be the answer of this compile task."""
    built_of(value, record_of(Compile, payload, "the task"))


def judge_check(payload: object, value: object) -> None:
    """The same of a check task."""
    asked = record_of(Check, payload, "the task")
    where = check_of(value, asked.seed).where
    if (where == "gpu") != asked.device.startswith("cuda"):
        raise InvalidArgument(f"the kernel was to be checked on {asked.device}: got {where}")


def judge_measure(payload: object, value: object) -> None:
    """The same of a measure task."""
    timing_of(value, record_of(Measure, payload, "the task").launches)


def judge_final(payload: object, value: object) -> None:
    """The same of a final round."""
    round_of(value, record_of(Final, payload, "the task"))
