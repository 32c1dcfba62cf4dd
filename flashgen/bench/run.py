"""flashgen bench on one screen: check, time and record each case, then print the table and plots.

Ceilings are what the GPU reached on plain work in the same run: a large cuBLAS product, a large
copy.
"""

from __future__ import annotations

import contextlib
import functools
import shlex
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flashgen import paths, settings
from flashgen.bench import listing, picture
from flashgen.bench.case import SEED, BenchCase, Sizes, cases, left_out, make_inputs
from flashgen.bench.contenders import Contender, dispatchers, flashgen_and_torch
from flashgen.bench.ladder import LadderSteps
from flashgen.bench.peers import deterministic_peers, peers
from flashgen.bench.race import CaseDevice, RaceResult, SmokeStopwatch, Spoiled, run_case
from flashgen.bench.record import BenchRecord, provenance
from flashgen.errors import FlashgenError, NoGpuError, ToolchainError
from flashgen.evaluate import measure
from flashgen.files import temporary_folder, write_whole
from flashgen.kernels.launch import device_gpu
from flashgen.runtime import Dispatcher
from flashgen.spec.gpu import known_target
from flashgen.tune.places import Say

MATMUL_SIZE, SMOKE_MATMUL_SIZE = 8192, 32
COPY_BYTES, SMOKE_COPY_BYTES = 1 << 30, 1 << 10


def matmul_tflops(dtype: str, place: CaseDevice) -> float | None:
    """TFLOP/s of a product of two square matrices, random normal. Raises Implausible, Unsteady."""
    size = MATMUL_SIZE if place.gpu else SMOKE_MATMUL_SIZE
    generator = torch.Generator(device=place.device).manual_seed(SEED)
    a, b = (
        torch.randn((size, size), generator=generator, device=place.device).to(
            getattr(torch, dtype)
        )
        for _ in range(2)
    )
    out = torch.empty_like(a)
    operations = 2.0 * size**3
    peak = place.gpu.peak_tflops if place.gpu else None
    timing = measure.measure(
        lambda: torch.mm(a, b, out=out),
        effort="timed",
        stopwatch=place.stopwatch,
        ceiling=measure.Ceiling(operations=operations, peak_tflops=peak),
    )
    return timing.tflops(operations) if place.gpu else None


def copy_gbs(place: CaseDevice) -> float | None:
    """GB/s of a copy, bytes read and bytes written. Raises Implausible and Unsteady."""
    size = COPY_BYTES if place.gpu else SMOKE_COPY_BYTES
    source = torch.empty(size, dtype=torch.uint8, device=place.device).random_()
    target = torch.empty_like(source)
    timing = measure.measure(
        lambda: target.copy_(source),
        effort="timed",
        stopwatch=place.stopwatch,
        ceiling=measure.Ceiling(operations=0.0, peak_tflops=None),
    )
    return 2 * size / timing.median_us * 1e-3 if place.gpu else None


SMOKE_TARGET = "nvidia_h200"
STRUCK = "an earlier run was killed while it was running: it is left out of this case"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of a run. groups: words of bench.GROUPS, none meaning all; seconds: after which no
    new case starts; index: of the CUDA device; command: the command line.
    """

    sizes: Sizes
    groups: Sequence[str]
    out: Path
    seconds: float | None
    index: int
    command: Sequence[str]

    @property
    def smoke(self) -> bool:
        """Whether every path runs with tiny sizes on a CPU and nothing is measured."""
        return self.sizes.smoke


def run(options: BenchOptions, say: Say) -> None:
    """Run all cases that are missing in the folder, and write the results after each.

    Raises NoGpuError without a GPU, unless it is a smoke run; FlashgenError if nothing could be
    timed or, in a smoke run, some contender failed; and the errors of BenchRecord.
    """
    began = time.monotonic()
    if options.smoke:
        say("smoke run on a CPU: every path runs with tiny sizes, and nothing is measured")
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    elif not torch.cuda.is_available():
        raise NoGpuError("flashgen bench needs a GPU and torch sees none: --smoke runs without one")
    place = place_of(options.index, smoke=options.smoke)
    tuned, untuned = dispatchers()
    run_ = provenance(
        place.gpu,
        command=shlex.join(["flashgen", *options.command]),
        dtype=options.sizes.dtype,
        tables=tuned.digest(),
        conditions=place.conditions(),
    )
    record = BenchRecord(options.out, run_)  # before the ceilings: it may refuse
    with torch.no_grad(), on_device(place), compiled_backward():
        place = _with_ceilings(place, options.sizes.dtype, say)
        run_ |= {"matmul_tflops": place.matmul_tflops, "copy_gbs": place.copy_gbs}
        for sentence in left_out(options.sizes):
            say(sentence)
        with _ladder(options, place, tuned) as ladder:
            site = _Site(
                options=options, place=place, tuned=tuned, untuned=untuned, ladder=ladder,
                record=record,
            )  # fmt: skip
            left = _walk(site, say, began)
    _write(site, say)
    if left:
        say(f"{left} cases are left, because the time is over: the same command resumes")
    _demand_figures(site, left)


@dataclass(frozen=True, kw_only=True)
class _Site:
    """What every case of a run needs."""

    options: BenchOptions
    place: CaseDevice
    tuned: Dispatcher
    untuned: Dispatcher
    ladder: LadderSteps
    record: BenchRecord

    def contenders(self, case: BenchCase) -> list[Contender]:
        """The requested contenders of a case."""
        smoke = self.options.smoke
        everybody = [
            *flashgen_and_torch(case, self.tuned, self.untuned, smoke=smoke),
            *self.ladder.contenders(case),
            *peers(case),
            *([] if smoke else deterministic_peers(case)),
        ]
        groups = self.options.groups
        return [each for each in everybody if not groups or each.group in groups]


def _walk(site: _Site, say: Say, began: float) -> int:
    """Run the missing cases; returns how many were not reached in time."""
    options, record, longest = site.options, site.record, 0.0
    missing = [
        case
        for case in cases(options.sizes)
        if record.missing(case, [each.name for each in site.contenders(case)])
    ]
    for number, case in enumerate(missing):
        spent = time.monotonic() - began
        if options.seconds is not None and spent + longest > options.seconds:
            return len(missing) - number
        _run_one(site, case, say)
        longest = max(longest, time.monotonic() - began - spent)
    return 0


def _run_one(site: _Site, case: BenchCase, say: Say) -> None:
    record, place = site.record, site.place
    known = record.cases.get(case.key)
    contenders = site.contenders(case)
    struck = record.struck(case)
    before = place.conditions()
    x = make_inputs(case, place.device)
    try:
        found, during = run_case(
            case,
            x,
            [each for each in contenders if each.name not in struck],
            place,
            meanwhile=functools.partial(record.at_work, case),
        )
    except Spoiled as error:
        record.strike(case, error.contender)
        raise FlashgenError(f"{error}; the same command resumes without it") from error
    finally:
        record.at_work(None, "")
        torch.compiler.reset()  # FlexAttention compiles each size; its limit of them is small
    lines = {line.name: line for line in found}
    lines |= {each.name: _struck(each) for each in contenders if each.name in struck}
    if known is not None:  # contenders that an earlier run timed and this one does not request
        lines = {line.name: line for line in known.lines} | lines
    record.add(case, tuple(lines.values()), (before, during, place.conditions()))
    for text in listing.case_lines(case, lines.values()):
        say(text)
    if during is not None:
        say(f"  meanwhile: {during}")


def _struck(contender: Contender) -> RaceResult:
    return RaceResult(
        name=contender.name, group=contender.group, own=contender.own, detail=STRUCK,
        status="unavailable",
    )  # fmt: skip


def place_of(index: int, *, smoke: bool) -> CaseDevice:
    """The CUDA device of an index, or, for a smoke run, the CPU."""
    if smoke:
        return CaseDevice(gpu=None, index=0, stopwatch=SmokeStopwatch())
    gpu = device_gpu(index)
    stopwatch = measure.CudaStopwatch(index, gpu.l2_bytes)
    return CaseDevice(gpu=gpu, index=index, stopwatch=stopwatch)


def on_device(place: CaseDevice) -> contextlib.AbstractContextManager[Any]:
    """Makes the place's device the current one."""
    return contextlib.nullcontext() if place.gpu is None else torch.cuda.device(place.index)


@contextlib.contextmanager
def compiled_backward() -> Iterator[None]:
    """What FlexAttention compiles would else free what a second backward needs."""
    from torch._functorch import config

    before = config.donated_buffer
    config.donated_buffer = False
    try:
        yield
    finally:
        config.donated_buffer = before


def _with_ceilings(place: CaseDevice, dtype: str, say: Say) -> CaseDevice:
    """The place with the ceilings reached there; None, with a notice, if a time was refused."""
    found: dict[str, float | None] = {}
    for name, ask in (
        ("matmul_tflops", functools.partial(matmul_tflops, dtype, place)),
        ("copy_gbs", functools.partial(copy_gbs, place)),
    ):
        try:
            found[name] = ask()
        except (measure.Implausible, measure.Unsteady) as error:
            say(f"{name}: {error}")
    if place.gpu is not None:
        told = {name: "unknown" if not rate else f"{rate:.0f}" for name, rate in found.items()}
        say(f"cuBLAS {told.get('matmul_tflops')} TFLOP/s, copy {told.get('copy_gbs')} GB/s")
        say(f"clocks, power and temperature: {place.conditions()}")
    return replace(place, **found)  # type: ignore[arg-type]  # the fields are named above


@contextlib.contextmanager
def _ladder(options: BenchOptions, place: CaseDevice, tuned: Dispatcher) -> Iterator[LadderSteps]:
    """Selects the ladder's steps with an evaluator on a GPU, whose children end with the run."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(temporary_folder("bench"))
        evaluator, gpu = None, place.gpu
        if gpu is not None and (not options.groups or "ladder" in options.groups):
            from flashgen.evaluate.on_gpu import GpuEvaluator

            state = paths.state_dir(options.out)
            evaluator = stack.enter_context(GpuEvaluator(gpu, options.index, state))
        here = gpu or known_target(settings.served_gpu() or SMOKE_TARGET)
        yield LadderSteps(gpu=here, served=tuned.served, evaluator=evaluator, folder=folder)


def _write(site: _Site, say: Say) -> None:
    """The table and the pictures of all results so far."""
    record, out, place = site.record, site.options.out, site.place
    found = list(record.cases.values())
    summaries = list(listing.summaries(found))
    for sentence in summaries:
        say(sentence)
    whose = place.gpu.name if place.gpu else "a smoke run: nothing was measured"
    head = [f"{whose}. Figures beyond 2 floors are struck through.", "", *summaries]
    write_whole(out / "bench.md", listing.markdown(found, head))
    try:
        ceilings = place.matmul_tflops, place.copy_gbs
        footer = picture.footer_of(record.run)
        files = picture.draw(found, out, ceilings=ceilings, footer=footer)
    except ToolchainError as error:
        files = []
        say(f"No pictures: {error}")
    names = ", ".join(file.name for file in [record.path, out / "bench.md", *files])
    say(f"\nwritten to {out}: {names}")


def _demand_figures(site: _Site, left: int) -> None:
    """Raise FlashgenError if nothing was timed or a smoke run found an error."""
    wanted = [case.key for case in cases(site.options.sizes)]
    found = [site.record.cases[key] for key in wanted if key in site.record.cases]
    lines = [line for case in found for line in case.lines]
    if site.options.smoke:
        broken = [line for line in lines if line.status not in ("ok", "left out")]
        if broken:
            told = "; ".join(f"{line.name}, {line.status}: {line.detail}" for line in broken)
            raise FlashgenError(f"{len(broken)} contenders failed in a smoke run: {told}")
    elif not any(line.timing for line in lines) and not left:
        raise FlashgenError(f"nothing could be timed: {site.record.path} says why")
