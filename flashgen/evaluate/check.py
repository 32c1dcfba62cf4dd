"""Compares a kernel with float64 before it is timed or written. Rendered -> CheckResult.

The cases of its direction; for each a trial, which is the call and the comparison of its results;
the worst of all is the verdict. Whatever runs a call can be checked: the kernel on a GPU; without
one, in Triton's interpreter, or where that cannot, the compiled program by flashgen.ptx.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from flashgen.errors import ToolchainError
from flashgen.evaluate.check_attention import attention_cases, attention_trial
from flashgen.evaluate.check_cache import DecodeCase, cache_cases, cache_trial, split_trial
from flashgen.evaluate.executed import ExecutedKernel
from flashgen.evaluate.surroundings import Surroundings, tensors_in
from flashgen.files import temporary_folder
from flashgen.kernels import interpreter
from flashgen.kernels.launch import bind
from flashgen.kernels.loader import load_kernel
from flashgen.kernels.plan import Kernel
from flashgen.kernels.render import Rendered
from flashgen.kernels.stream_memory import forget_counters
from flashgen.reference.attention import Comparison, pooled
from flashgen.reference.cases import CheckCase, Trial
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import CheckResult
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.vocabulary import DECODING

AnyCase = CheckCase | DecodeCase
Runner = Callable[[Any], Any]
"""Runs the call of a trial, and returns what the launcher of its direction returns."""

PROTOCOL = 7
"""Version of the cases and the reference; check results of other versions are not reused."""
AGAIN = 1_000_003
"""Between the seeds of one case: far from those of the cases after it."""


def cases_of(spec: AttentionSpec, config: KernelConfig, device: str = "cpu") -> tuple[AnyCase, ...]:
    """The cases every candidate of a direction must pass on a device."""
    cached = spec.direction in DECODING and not spec.varlen
    cases = cache_cases if cached else attention_cases
    return cases(spec, config, device)


def trial_of(
    spec: AttentionSpec, case: AnyCase, seed: int, device: torch.device | str = "cpu"
) -> Trial:
    """A case with inputs drawn from the seed. The rms counts where scores are even alone: otherwise
    the few rows in which two keys are near the maximum carry it.
    """
    if isinstance(case, DecodeCase):
        trial = cache_trial(spec, case, seed, device)
    elif spec.direction == "decode":
        trial = split_trial(spec, case, seed, device)
    else:
        trial = attention_trial(spec, case, seed, device)
    if case.scores == "even":
        return trial
    return replace(trial, compare=lambda found: replace(trial.compare(found), elements=0))


def check_kernel(
    rendered: Rendered,
    spec: AttentionSpec,
    config: KernelConfig,
    *,
    device: str = "cpu",
    arch: str = "",
    seed: int = 0,
    cases: Sequence[AnyCase] | None = None,
) -> CheckResult:
    """Run a kernel on every case, with fresh inputs, and compare with float64.

    Errors of the launch are not caught.

    Args:
        rendered: the text of the kernel.
        spec: what it computes.
        config: how it computes it.
        device: "cpu" needs TRITON_INTERPRET=1 from the start, but unset where config is executed.
        arch: for what a config that is executed is compiled.
        seed: what inputs are drawn from.
        cases: the cases; those of the spec unless given.

    Returns:
        The largest errors, and what failed.

    Raises:
        ToolchainError: if the kernel cannot run on the device.

    Examples:
        >>> from flashgen.evaluate.check import check_kernel
        >>> check_kernel(render(spec, config), spec, config).passed  # doctest: +SKIP
        True
    """
    if device == "cpu" and config.executed:
        executed = ExecutedKernel(rendered, spec, config, arch)
        found = check_loaded(executed, spec, config, seed=seed, cases=cases)
        return replace(found, where="executed")
    if device == "cpu" and not interpreter.active():
        raise ToolchainError(
            "a kernel is checked on the CPU in Triton's interpreter: "
            "start the process with TRITON_INTERPRET=1"
        )
    with temporary_folder("check") as folder:
        path = folder / f"{rendered.name}.py"
        path.write_text(rendered.source)
        kernel = load_kernel(path, rendered.text_name, rendered.name)
        return check_loaded(kernel, spec, config, device=device, seed=seed, cases=cases)


def check_loaded(
    kernel: Kernel,
    spec: AttentionSpec,
    config: KernelConfig,
    *,
    device: str = "cpu",
    seed: int = 0,
    cases: Sequence[AnyCase] | None = None,
) -> CheckResult:
    """check_kernel for a kernel that is loaded already."""
    chosen = cases_of(spec, config, device) if cases is None else tuple(cases)
    forget_counters()
    run = bind(kernel, spec, config)
    worst, detail, count = Comparison(), "no case", 0
    for number, case in enumerate(chosen):
        verdict = verdict_of(run, spec, case, seed + number, device)
        count += 1
        if number == 0 or verdict.badness > worst.badness:
            worst, detail = verdict, f"worst at {case}, seed {seed + number}"
        if not verdict.passed:
            break
    return CheckResult(
        passed=worst.passed,
        floors=worst.floors,
        rms=worst.rms,
        lse_error=worst.lse,
        cases=count,
        seed=seed,
        where="gpu" if torch.device(device).type == "cuda" else "interpreter",
        detail=detail,
    )


def verdict_of(
    run: Runner, spec: AttentionSpec, case: AnyCase, seed: int, device: str
) -> Comparison:
    """The comparison of a case. If the rms alone is above its limit, that of three draws of it: the
    rms of a right kernel is there once in some thousands of draws, that of a biased one each time.
    """
    verdict = compared(run, trial_of(spec, case, seed, device), twice=_twice(spec, case, device))
    if verdict.passed or not replace(verdict, elements=0).passed:
        return verdict
    again = (seed + AGAIN, seed + 2 * AGAIN)
    return pooled((verdict, *(compared(run, trial_of(spec, case, s, device)) for s in again)))


def _twice(spec: AttentionSpec, case: AnyCase, device: str) -> bool:
    """Whether a case runs twice: one of its few tiles on a CPU, each on a GPU. The sums of the
    fused backward have no order.
    """
    few = case.scores == "falling" and spec.direction not in ("append", "combine")
    return spec.direction != "backward_fused" and (few or torch.device(device).type == "cuda")


def compared(run: Runner, trial: Trial, *, twice: bool = False) -> Comparison:
    """Run a trial's call, with outputs filled with NaN by the allocator, and judge the results.

    What touches memory beside its outputs is infinitely wrong, and so is what twice gives other
    bits.
    """
    import numpy as np

    # -inf and 0 are correct for rows without keys; numpy would warn while computing them.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"), poisoned_outputs():
        with Surroundings(trial.call) as around:
            found = run(trial.call)
        again = run(trial.call) if twice and around.kept else found
    verdict = trial.compare(found)
    same = again is found or _same_bits(again, found)
    return verdict if around.kept and same else replace(verdict, floors=math.inf)


def _same_bits(one: Any, other: Any) -> bool:
    """Whether the tensors of two results are equal to the bit, NaN too."""
    pairs = zip(tensors_in(one), tensors_in(other), strict=True)
    return all(torch.equal(*(x.contiguous().view(torch.uint8) for x in pair)) for pair in pairs)


@contextlib.contextmanager
def poisoned_outputs() -> Iterator[None]:
    """While active, torch.empty returns NaN: an element that the kernel does not write cannot
    pass.
    """
    of_torch: Any = torch.utils.deterministic
    fill, mode = of_torch.fill_uninitialized_memory, torch.get_deterministic_debug_mode()
    of_torch.fill_uninitialized_memory = True
    torch.set_deterministic_debug_mode("warn")  # without the import of Inductor
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        of_torch.fill_uninitialized_memory = fill
