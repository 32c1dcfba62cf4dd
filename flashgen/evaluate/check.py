"""Compares a kernel with float64 before it is timed or written. Rendered -> CheckResult.

On a GPU the kernel runs there. Without one it runs in Triton's interpreter, or if it is of schedule
ampere on a model of Gluon, with the same tiles at reduced length: a few ragged and masked tiles,
where most errors show.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashgen.errors import ToolchainError
from flashgen.evaluate.check_cache import DecodeCase, decoding_cases, run_decoding
from flashgen.evaluate.check_packed import in_pages, varlen_cases
from flashgen.evaluate.gluon_model import GluonModel
from flashgen.files import temporary_folder
from flashgen.kernels import interpreter
from flashgen.kernels.launch import bind, launch
from flashgen.kernels.launch_backward import Backward, Delta
from flashgen.kernels.launch_forward import order_limits
from flashgen.kernels.loader import load_kernel
from flashgen.kernels.plan import Kernel
from flashgen.kernels.render import Rendered
from flashgen.reference import attention as reference
from flashgen.reference import cases as reference_cases
from flashgen.reference import gradients
from flashgen.reference.attention import Comparison
from flashgen.reference.cases import CheckCase
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.block_mask import BLOCK
from flashgen.spec.config import KernelConfig
from flashgen.spec.from_call import check_scale
from flashgen.spec.outcome import CheckResult
from flashgen.spec.problem import Problem
from flashgen.spec.vocabulary import DECODING

AnyCase = CheckCase | DecodeCase

PROTOCOL = 4
"""Version of the cases and the reference; check results of other versions are not reused."""


def check_cases(config: KernelConfig) -> tuple[CheckCase, ...]:
    """The cases every candidate must pass: ragged lengths with batches and shared heads, lengths
    aligned to the tiles, one key beyond a tile, more queries than keys, and rows without
    keys.
    """

    def case(
        sq: int, sk: int, batch: int = 1, heads: int = 1, kv: int = 1, **options: str
    ) -> CheckCase:
        problem = Problem(batch=batch, heads=heads, kv_heads=kv, seq_q=sq, seq_k=sk)
        return CheckCase(problem=problem, **options)

    br, bc = config.br, config.bc
    return (
        case(br + 5, 2 * bc + 7, batch=2, heads=6, kv=2, layout="bshd"),
        case(br, max(br, 2 * bc)),
        case(br, 2 * bc + 1),
        case(2 * br + 1, bc + 1, alignment="top_left"),
        case(max(br, bc) + 1, max(1, bc - 1)),
    )


def cases_of(spec: AttentionSpec, config: KernelConfig, device: str = "cpu") -> tuple[AnyCase, ...]:
    """The cases every candidate of a direction must pass on a device."""
    if spec.direction in DECODING:
        return decoding_cases(spec, config)
    if spec.block_mask:
        return block_mask_cases()
    if spec.varlen:
        return varlen_cases(config)
    return (*check_cases(config), *walking_cases(config, device))


def walking_cases(config: KernelConfig, device: str) -> tuple[CheckCase, ...]:
    """Further cases for a persistent kernel on a GPU, which has more SMs than check_cases has
    tiles: three tiles per program, of several lengths under a causal mask.
    """
    programs = order_limits(torch.device(device)).sms if config.persistent else 0
    most_tiles = max(
        case.problem.batch * case.problem.heads * -(-case.problem.seq_q // config.br)
        for case in check_cases(config)
    )
    if 3 * programs <= most_tiles:
        return ()
    kv_heads = -(-3 * programs // 6)  # two heads each, three tiles per head
    problem = Problem(
        batch=1,
        heads=2 * kv_heads,
        kv_heads=kv_heads,
        seq_q=2 * config.br + 1,
        seq_k=2 * config.br + config.bc + 7,
    )
    return (CheckCase(problem=problem, alignment="top_left"),)


def block_mask_cases() -> tuple[CheckCase, ...]:
    """Several blocks of queries and keys, ragged and whole ones; four cases, so that each kind
    of block mask occurs whatever the first seed.
    """

    def case(
        sq: int, sk: int, batch: int = 1, heads: int = 1, kv: int = 1, **options: str
    ) -> CheckCase:
        problem = Problem(batch=batch, heads=heads, kv_heads=kv, seq_q=sq, seq_k=sk)
        return CheckCase(problem=problem, **options)

    return (
        case(BLOCK + 5, 2 * BLOCK + 7, batch=2, heads=2, layout="bshd"),
        case(2 * BLOCK, BLOCK + 1, heads=2, kv=2),
        case(BLOCK + 1, 2 * BLOCK, batch=2),
        case(3, 3 * BLOCK - 1, heads=2),
    )


def check_kernel(
    rendered: Rendered,
    spec: AttentionSpec,
    config: KernelConfig,
    *,
    device: str = "cpu",
    seed: int = 0,
    cases: Sequence[AnyCase] | None = None,
) -> CheckResult:
    """Run a kernel on every case, with fresh inputs drawn from `seed`, and compare with float64.

    device "cpu" needs TRITON_INTERPRET=1 set before the process imported triton; otherwise raises
    ToolchainError. Errors of the launch are not caught.
    """
    if device == "cpu" and not interpreter.active():
        raise ToolchainError(
            "a kernel is checked on the CPU in Triton's interpreter: "
            "start the process with TRITON_INTERPRET=1"
        )
    if device == "cpu" and not config.interpretable:
        if config.needs_gpu:
            raise ToolchainError(not_checkable(config))
        model = GluonModel(rendered.source, rendered.name)
        return check_loaded(model, spec, config, device=device, seed=seed, cases=cases)
    with temporary_folder("check") as folder:
        path = folder / f"{rendered.name}.py"
        path.write_text(rendered.source)
        kernel = load_kernel(path, rendered.name)
        return check_loaded(kernel, spec, config, device=device, seed=seed, cases=cases)


def not_checkable(config: KernelConfig) -> str:
    """Why a kernel of this config cannot be checked without a GPU."""
    if config.interpretable:
        return (
            f"schedule {config.schedule} is not checkable here: the interpreter does not show what "
            "the compiler makes of its loop; check it on a GPU"
        )
    return (
        f"schedule {config.schedule} is not checkable here: it is Gluon, for which Triton has no "
        "interpreter; check it on an sm_90 GPU"
    )


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
    worst, at, number = Comparison(floors=0.0, lse=0.0), "no case", 0
    passed = True
    for number, case in enumerate(chosen):
        verdict = run_case(kernel, spec, config, case, seed=seed + number, device=device)
        passed = passed and verdict.passed
        if not verdict.passed or _badness(verdict) > _badness(worst):
            worst, at = verdict, f"{case}, seed {seed + number}"
        if not passed:
            break
    where = "gpu" if torch.device(device).type == "cuda" else "interpreter"
    return CheckResult(
        passed=passed,
        floors=worst.floors,
        lse_error=worst.lse,
        cases=number + 1 if chosen else 0,
        seed=seed,
        where=where,  # type: ignore[arg-type]  # one of the two literals above
        detail=f"worst at {at}",
    )


def _badness(verdict: Comparison) -> float:
    return max(verdict.floors / reference.FLOORS_ACCEPTED, verdict.lse)


def run_case(
    kernel: Kernel,
    spec: AttentionSpec,
    config: KernelConfig,
    case: AnyCase,
    *,
    seed: int,
    device: str,
) -> Comparison:
    """One case: inputs from the seed, outputs filled with NaN by the allocator, compared with
    float64.

    A backward kernel gets the O, LSE and delta of an ideally rounded forward, so that its errors
    are its own.
    """
    import numpy as np

    # -inf and 0 are correct for rows without keys; numpy would warn while computing them.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if isinstance(case, DecodeCase):
            with _poisoned_outputs():
                return run_decoding(kernel, spec, config, case, seed=seed, device=device)
        if spec.direction == "forward":
            return _run_forward(kernel, spec, config, case, seed, device)
        return _run_backward(kernel, spec, config, case, seed, device)


def _run_forward(
    kernel: Kernel,
    spec: AttentionSpec,
    config: KernelConfig,
    case: CheckCase,
    seed: int,
    device: str,
) -> Comparison:
    q, k, v = reference_cases.make_inputs(spec, case, seed, device)
    features = reference_cases.make_features(spec, case, seed, device)
    scale, diagonal = check_scale(None, spec.head_dim), case.diagonal(spec)
    keys, values, given = in_pages(k, v, features, case, seed) if spec.paged else (k, v, features)
    with _poisoned_outputs():
        o, lse = launch(
            kernel, spec, config, q, keys, values, scale=scale, diagonal=diagonal, features=given
        )
    return reference.judge(
        o,
        lse,
        q,
        k,
        v,
        scale=scale,
        diagonal=diagonal,
        precision=spec.precision,
        features=features,
    )


def _run_backward(
    kernel: Kernel,
    spec: AttentionSpec,
    config: KernelConfig,
    case: CheckCase,
    seed: int,
    device: str,
) -> Comparison:
    inputs = gradients.make_inputs(spec, case, seed, device)
    o, lse, delta = gradients.forward(inputs)
    if spec.direction == "backward_delta":
        with _poisoned_outputs():
            found = bind(kernel, spec, config)(Delta(o=o, do=inputs.do, dlse=inputs.dlse))
        return gradients.judge_delta(found, o, inputs.do, inputs.dlse)
    call = Backward(
        q=inputs.q,
        k=inputs.k,
        v=inputs.v,
        do=inputs.do,
        lse=lse,
        delta=delta,
        scale=inputs.scale,
        diagonal=inputs.diagonal,
        features=inputs.features,
    )
    with _poisoned_outputs():
        results = bind(kernel, spec, config)(call)
    return gradients.judge(spec.direction, results, inputs)


class _poisoned_outputs:
    """While active, torch.empty returns NaN: an element that the kernel does not write cannot
    pass.
    """

    def __enter__(self) -> None:
        self.fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        self.mode = torch.are_deterministic_algorithms_enabled()
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True, warn_only=True)

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(self.mode)
        torch.utils.deterministic.fill_uninitialized_memory = self.fill  # type: ignore[attr-defined]
