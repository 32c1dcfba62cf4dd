"""One bench case: every contender checked against float64, then the accepted ones timed in
alternation.

Errors are in floors, those of reference/attention.py, at the size that is timed; flashgen's own
kernels may have 2. A whole problem is too large for float64, so the check covers as many heads of
the first sequence as fit in memory, or, for a decode, the first and last sequences.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from flashgen.bench.case import BenchCase, BenchInputs
from flashgen.bench.contenders import Contender, LeftOut, Made
from flashgen.errors import FlashgenError
from flashgen.evaluate import measure
from flashgen.evaluate.gpu_state import Conditions, clocks_and_power
from flashgen.inputs.features import PLAIN
from flashgen.reference import attention as reference
from flashgen.reference import gradients
from flashgen.runtime.eager import cache as eager_cache
from flashgen.runtime.eager.gradients import GradientInputs
from flashgen.schedules.outcome import Timing
from flashgen.spec.gpu import Gpu

FORWARD_ELEMENTS = 1 << 27
"""Elements of S compared with float64 at once, at most: 1 GiB, and the reference holds a few."""

BACKWARD_ELEMENTS = 1 << 25
"""The same of the backward, but for one head: the reference holds a dozen of this size."""


def floors(found: tuple[Tensor, ...], case: BenchCase, x: BenchInputs) -> float:
    """The worst error of what a pass returned: (O,), (dQ, dK, dV), or (O, dQ, dK, dV)."""
    if case.direction == "decode":
        return _of_decode(found[0], case, x)
    if case.direction == "forward":
        return _of_forward(found[0], case, x)
    if case.direction == "backward":
        return _of_backward(found, case, x)
    return max(_of_forward(found[0], case, x), _of_backward(found[1:], case, x))


def _heads(case: BenchCase, elements: int) -> int:
    p = case.problem
    return max(1, min(p.heads, elements // (p.seq_q * p.seq_k)))


def _of_forward(o: Tensor, case: BenchCase, x: BenchInputs) -> float:
    heads, group = _heads(case, FORWARD_ELEMENTS), case.problem.heads // case.problem.kv_heads
    heads -= heads % group if heads > group else 0  # whole groups, or some of the first
    q, o = x.q[:1, :heads], o[:1, :heads]
    k, v = (y[:1, : -(-heads // group)] for y in (x.k, x.v))
    lse = torch.zeros(o.shape[:3], device=o.device)  # most peers return none; O alone is compared
    return reference.judge(o, lse, q, k, v, scale=case.scale, diagonal=case.diagonal).floors


def _of_backward(found: tuple[Tensor, ...], case: BenchCase, x: BenchInputs) -> float:
    """The worst gradient. The heads are not grouped, so each has its own gradients."""
    heads = _heads(case, BACKWARD_ELEMENTS)
    q, k, v, do, *gradient = (y[:1, :heads] for y in (x.q, x.k, x.v, x.do, *found))
    inputs = GradientInputs(
        q=q,
        k=k,
        v=v,
        do=do,
        dlse=torch.zeros(q.shape[:3], device=q.device),
        scale=case.scale,
        diagonal=case.diagonal,
        features=PLAIN,
    )
    return gradients.judge("backward_fused", tuple(gradient), inputs).floors


def _of_decode(o: Tensor, case: BenchCase, x: BenchInputs) -> float:
    assert x.cache is not None  # of decode
    worst = 0.0
    for number in {0, case.problem.batch - 1}:
        one = slice(number, number + 1)
        k, v = eager_cache.sequence(x.cache, number, case.problem.seq_k)
        lse = torch.zeros(o[one].shape[:3], device=o.device)
        verdict = reference.judge(o[one], lse, x.q[one], k, v, scale=case.scale, diagonal=None)
        worst = max(worst, verdict.floors)
    return worst


Pass = Callable[[], tuple[Tensor, ...]]
"""The timed function: it returns all results, which are judged."""


class Spoiled(FlashgenError, RuntimeError):
    """A contender has broken the GPU's context: later results of this process mean nothing.

    contender is the one to exclude.
    """

    def __init__(self, sentence: str, contender: str) -> None:
        super().__init__(sentence)
        self.contender = contender


@dataclass(frozen=True, kw_only=True)
class RaceResult:
    """The result of one contender: a time and an error, or why there is none.

    status: ok; wrong, by its floors; refused, an impossible time; unavailable, it raised; left out,
    it does not apply here. share: of the ceiling of the same run, cuBLAS's TFLOP/s or, for a
    decode, the copy's GB/s.
    """

    name: str
    group: str
    detail: str
    status: str
    own: bool = False
    timing: Timing | None = None
    tflops: float | None = None
    gbs: float | None = None
    share: float | None = None
    floors: float | None = None

    @property
    def rate(self) -> float | None:
        """GB/s of a decode, TFLOP/s of all else."""
        return self.tflops if self.gbs is None else self.gbs


@dataclass(frozen=True, kw_only=True)
class CaseDevice:
    """Where a case runs: a GPU by CUDA's index, or, for a smoke run, the CPU.

    ceilings of the run, TFLOP/s of cuBLAS and GB/s of a copy; None: unknown.
    """

    gpu: Gpu | None
    index: int
    stopwatch: measure.Stopwatch
    matmul_tflops: float | None = None
    copy_gbs: float | None = None

    @property
    def device(self) -> str:
        """The name of the device in torch."""
        return "cpu" if self.gpu is None else f"cuda:{self.index}"

    def conditions(self) -> Conditions | None:
        """The current ones; None for a smoke run."""
        return None if self.gpu is None else clocks_and_power(self.index)


class SmokeStopwatch:
    """Runs on the CPU, on a clock 100 times too fast, so that all budgets end at once.

    Its times are made up: those of a busy CPU would be refused as unsteady.
    """

    def time(self, run: measure.LaunchOnce, count: int) -> list[float]:
        """20 milliseconds for each of `count` calls: so long that batches are of one."""
        for _ in range(count):
            run()
        return [measure.BATCH_US] * count

    def now(self) -> float:
        """Seconds, a hundred for each that passes."""
        return time.perf_counter() * 100

    def clock_mhz(self) -> float | None:
        """None: it has no device."""
        return None


def run_case(
    case: BenchCase,
    x: BenchInputs,
    contenders: Sequence[Contender],
    place: CaseDevice,
    *,
    meanwhile: Callable[[str], object] = lambda name: None,
) -> tuple[tuple[RaceResult, ...], Conditions | None]:
    """Judge every contender, then time them: their lines, and the GPU's conditions while they were
    running. meanwhile(name) is called with the current one. Raises Spoiled.
    """
    lines: dict[str, RaceResult] = {}
    racing: dict[str, Pass] = {}
    for contender in contenders:
        meanwhile(contender.name)
        line, ready = judged(contender, case, x)
        lines[contender.name] = line
        if ready is not None and (line.status == "ok" or not contender.own):
            racing[contender.name] = ready
    meanwhile("")
    if place.gpu is None:
        racing = dict(
            list(racing.items())[:2]
        )  # two show that racing works; its times mean nothing
    timings, refused = race(racing, place)
    for name, why in refused.items():
        lines[name] = replace(lines[name], status="refused", detail=why)
    for name, timing in timings.items():
        lines[name] = timed(lines[name], timing, case, place)
    during = None
    if place.gpu is not None and timings:
        measure.keep_busy([racing[name] for name in timings], list(timings.values()))
        during = place.conditions()
        torch.cuda.synchronize(place.device)
    return tuple(lines.values()), during


def judged(contender: Contender, case: BenchCase, x: BenchInputs) -> tuple[RaceResult, Pass | None]:
    """Whether a contender runs here and its distance from float64; and the function to time.

    A peer may raise anything and is unavailable then. Raises Spoiled.
    """
    line = RaceResult(
        name=contender.name, group=contender.group, detail="", status="unavailable",
        own=contender.own,
    )  # fmt: skip
    try:
        made = contender.make(x)
        ready = pass_of(made, case, x)
        error = floors(ready(), case, x)
        if x.q.is_cuda:
            torch.cuda.synchronize(x.q.device)
    except LeftOut as reason:
        return replace(line, status="left out", detail=str(reason)), None
    except torch.AcceleratorError as error_:
        sentence = f"{contender.name} failed in {case.key} and has broken the GPU's context"
        raise Spoiled(f"{sentence}: {_first_line(error_)}", contender.name) from error_
    except Exception as error_:  # how torch and its peers decline: no list of classes is complete
        if isinstance(error_, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
        return replace(line, detail=_first_line(error_)), None
    status = "ok" if error <= reference.FLOORS_ACCEPTED else "wrong"
    if not math.isfinite(error):
        return replace(line, detail=f"{made.detail} (not finite)".strip(), status=status), ready
    return replace(line, detail=made.detail, status=status, floors=error), ready


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]


def pass_of(made: Made, case: BenchCase, x: BenchInputs) -> Pass:
    """The function to time. For a backward, the forward has already run; both is a training
    step.
    """
    attention = made.attention
    if case.direction == "decode":
        return lambda: (attention(),)
    if case.direction == "forward":
        return lambda: (attention(x.q, x.k, x.v),)
    leaves = tuple(y.detach().requires_grad_() for y in (x.q, x.k, x.v))

    def both() -> tuple[Tensor, ...]:
        with made.around():
            with torch.enable_grad():
                o = attention(*leaves)
            return (o.detach(), *torch.autograd.grad(o, leaves, x.do))

    if case.direction == "both":
        return both
    with made.around(), torch.enable_grad():
        o = attention(*leaves)

    def backward() -> tuple[Tensor, ...]:
        with made.around():
            return torch.autograd.grad(o, leaves, x.do, retain_graph=True)

    return backward


def race(racing: Mapping[str, Pass], place: CaseDevice) -> tuple[dict[str, Timing], dict[str, str]]:
    """Time all in alternation: their timings, and sentences for those without one.

    Together with the others, a contender that ran by itself may lack memory: it is left out, and
    the race starts again. Raises Spoiled.
    """
    racing, again = dict(racing), True
    refused: dict[str, str] = {}
    turn = ""  # whose it is, to attribute a failure

    def taken(name: str, run: Pass) -> object:
        nonlocal turn
        turn = name
        return run()

    while racing:
        runs = [partial(taken, name, each) for name, each in racing.items()]
        # interleave stops at an implausible time; one contender's must not cost the others theirs.
        unbounded = measure.Ceiling(operations=1.0, peak_tflops=None)
        try:
            raced = measure.interleave(
                runs, stopwatch=place.stopwatch, ceilings=[unbounded] * len(runs)
            )
        except measure.Unsteady as error:
            if not again:
                return {}, refused | dict.fromkeys(racing, str(error))
            again = False
        except measure.Implausible as error:  # an event that never was: a time of 0
            return {}, refused | dict.fromkeys(racing, str(error))
        except torch.AcceleratorError as error:
            sentence = f"{turn} failed, or one before it, and has broken the GPU's context"
            raise Spoiled(f"{sentence}: {_first_line(error)}", turn) from error
        except RuntimeError as error:
            if turn not in racing:
                raise
            torch.cuda.empty_cache()
            refused[turn] = f"it runs by itself, but not with the others: {_first_line(error)}"
            del racing[turn]
        else:
            return {n: each.timing for n, each in zip(racing, raced, strict=True)}, refused
    return {}, refused


def timed(line: RaceResult, timing: Timing, case: BenchCase, place: CaseDevice) -> RaceResult:
    """The line with its time, refused if the GPU cannot have done the work. Times of a smoke run
    are dropped: they mean nothing.
    """
    gpu = place.gpu
    if gpu is None:
        return line
    ceiling = measure.Ceiling(operations=case.operations, peak_tflops=gpu.peak_tflops)
    try:
        ceiling.refuse_above(timing)
    except measure.Implausible as error:
        return replace(line, status="refused", detail=str(error))
    gbs = case.bytes / timing.median_us * 1e-3
    decoding = case.direction == "decode"
    if decoding and gpu.bandwidth_gbs and gbs > measure.PEAK_MARGIN * gpu.bandwidth_gbs:
        why = (
            f"{gbs:.0f} GB/s, and the peak is {gpu.bandwidth_gbs:.0f}: it cannot have read K and V"
        )
        return replace(line, status="refused", detail=why)
    tflops = timing.tflops(case.operations)
    rate, most = (gbs, place.copy_gbs) if decoding else (tflops, place.matmul_tflops)
    return replace(
        line,
        timing=timing,
        tflops=tflops,
        gbs=gbs if decoding else None,
        share=rate / most if most else None,
    )
