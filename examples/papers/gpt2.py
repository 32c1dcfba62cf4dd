"""How much faster GPT-2 trains: the paper's figures, and what attention alone explains."""

from __future__ import annotations

from dataclasses import dataclass

from examples.papers import forms, runs
from examples.papers.finding import Figure, Finding, Row, check, tabled
from examples.papers.memories import PAPERS_GPU
from flashgen import paths
from flashgen.errors import ToolchainError
from flashgen.files import temporary_folder
from flashgen.schedules.outcome import Timing
from flashgen.spec.problem import Problem, bucket_of
from flashgen.spec.vocabulary import Direction

N, D, VOCABULARY = 1024, 64, 50257
PROBLEM = Problem(batch=64, heads=16, kv_heads=16, seq_q=N, seq_k=N)
"""The paper's Figure 2, left; times are taken for its heads, and scaled to those of a model."""
TABLE = "nvidia_a100_sxm4_80gb"
"""Its tiles are used: the A100 with 40 GB, on which the paper trained, has the same SMs."""
PRINTED_MS = (41.7, 7.3)
"""Standard and FlashAttention, forward and backward, at PROBLEM: Figure 2, left."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A GPT-2 and the paper's days of training on 8 A100: its Table 2."""

    name: str
    layers: int
    heads: int
    huggingface: float
    megatron: float
    flash: float

    @property
    def width(self) -> int:
        """Elements of a token's vector."""
        return self.heads * D

    @property
    def step_flops(self) -> float:
        """Operations of the layers' matrix products and of the vocabulary's, for one sequence: two
        for each weight and token in the forward, four in the backward.
        """
        weights = 12 * self.layers * self.width**2 + VOCABULARY * self.width
        return 6.0 * weights * N


MODELS = (
    Model(name="GPT-2 small", layers=12, heads=12, huggingface=9.5, megatron=4.7, flash=2.7),
    Model(name="GPT-2 medium", layers=24, heads=16, huggingface=21.0, megatron=11.5, flash=6.9),
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Milliseconds of one sequence's training step: matrix products at the GPU's peak, standard
    attention at its full bandwidth, and this project's kernels by the model.
    """

    products: float
    standard: float
    tiled: float

    @property
    def speedup(self) -> float:
        """Of the whole step."""
        return (self.products + self.standard) / (self.products + self.tiled)


def step_of(model: Model, tiled_ms: float) -> Step:
    """The step of a model, with the time of tiled attention at PROBLEM."""
    gpu = PAPERS_GPU
    assert gpu.peak_tflops is not None  # of a data sheet
    assert gpu.bandwidth_gbs is not None
    share = model.layers * model.heads / (PROBLEM.batch * PROBLEM.heads)
    return Step(
        products=model.step_flops / gpu.peak_tflops / 1e9,
        standard=standard_ms() * share,
        tiled=tiled_ms * share,
    )


def standard_ms() -> float:
    """Standard attention at PROBLEM: its bytes over the bandwidth, which no kernel exceeds."""
    heads = PROBLEM.batch * PROBLEM.heads
    moved = forms.standard(N, D, backward=True, mask=True, dropout=True) * heads
    return moved / (PAPERS_GPU.bandwidth_gbs or 1.0) / 1e6


def training() -> Finding:
    """Estimated speedups of attention and of a step, beside those that the paper prints."""
    tiled = sum(timing.median_us for timing in estimates().values()) / 1e3
    attention = standard_ms() / tiled
    printed = PRINTED_MS[0] / PRINTED_MS[1]
    steps = {model.name: step_of(model, tiled) for model in MODELS}
    small, megatron = steps["GPT-2 small"], MODELS[0].megatron / MODELS[0].flash
    return Finding(
        checks=(
            check(
                "estimated",
                f"attention alone: {attention:.1f} times faster, {printed:.1f} by the paper's "
                "Figure 2",
                1 / 1.5 < attention / printed < 1.5,
            ),
            check(
                "estimated",
                f"a step of GPT-2 small: {small.speedup:.1f} times faster; the paper's days "
                f"are {megatron:.1f} times fewer than Megatron-LM's",
                1 / 1.25 < small.speedup / megatron < 1.25,
            ),
            check(
                "estimated",
                "attention alone does not explain 3.5 times: Megatron-LM, with standard "
                f"attention, is {MODELS[0].huggingface / MODELS[0].megatron:.1f} times as fast as "
                "Hugging Face",
                small.speedup < MODELS[0].huggingface / MODELS[0].flash,
            ),
        ),
        figures=(
            _speedups(steps),
            _milliseconds(steps),
        ),
        notes=(
            "The estimate takes matrix products at the GPU's peak, standard attention with mask "
            "and dropout at its full bandwidth, and nothing else. Real steps take longer in each "
            "part, and have other parts. Ours are causal, as GPT-2 is, and without dropout.",
            "So 3.5 is a product: 2.0 times by Megatron-LM's better code, which has standard "
            "attention, and 1.7 times by FlashAttention.",
        ),
    )


def _speedups(steps: dict[str, Step]) -> Figure:
    rows = []
    for model in MODELS:
        rows += [
            (f"{model.name}, to Hugging Face", model.huggingface / model.flash, "printed"),
            (f"{model.name}, to Megatron-LM", model.megatron / model.flash, "printed"),
            (f"{model.name}, one step", steps[model.name].speedup, "estimated"),
        ]
    most = max(times for _, times, _ in rows)
    return tabled(
        how=("looked up", "estimated"),
        title="Times faster with FlashAttention",
        caption=f"Training with N {N:,}: days on 8 A100 from the paper's Table 2, and an estimate "
        "of one step on one.",
        columns=("training", "times", "how"),
        rows=tuple(
            Row(name=name, cells=(f"{times:.2f}", how), bar=times / most)
            for name, times, how in rows
        ),
    )


def _milliseconds(steps: dict[str, Step]) -> Figure:
    return tabled(
        how=("closed form", "estimated"),
        title="Milliseconds of a step, one sequence",
        caption=f"{PAPERS_GPU.name}. Products: 6 operations for each weight and token, over the "
        "peak. Standard: bytes over the bandwidth. Ours: the model of this project.",
        columns=("model", "products", "standard attention", "ours"),
        rows=tuple(
            Row(
                name=name,
                cells=(f"{step.products:.2f}", f"{step.standard:.2f}", f"{step.tiled:.2f}"),
            )
            for name, step in steps.items()
        ),
    )


def estimates() -> dict[Direction, Timing]:
    """Estimated times of the causal kernels at PROBLEM, forward and backward, with the tiles of the
    shipped table. Raises ToolchainError, and NoEstimate of the row sums.
    """
    from flashgen.estimate.estimate import estimate_streaming
    from flashgen.report.kernel_limits import dissect
    from flashgen.table.table_file import load

    table, gpu = load(paths.shipped_table(TABLE)), PAPERS_GPU
    delta = runs.spec_of(D, direction="backward_delta")
    found: dict[Direction, Timing] = {"backward_delta": estimate_streaming(delta, PROBLEM, gpu)}
    directions: tuple[Direction, ...] = ("forward", "backward_dkv", "backward_dq")
    for direction in directions:
        spec = runs.spec_of(D, direction=direction, causal=True)
        entry = table.find(spec, bucket_of(N))
        assert entry is not None  # of every shipped table
        with temporary_folder("paper") as cache:
            kernel = dissect(spec, entry.config, PROBLEM, gpu, cache)
        if kernel.estimate is None:
            raise ToolchainError(kernel.unknown)
        found[direction] = kernel.estimate
    return found
