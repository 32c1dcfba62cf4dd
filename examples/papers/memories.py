"""The memories of a GPU, near and far, and how many operations a byte must be worth."""

from __future__ import annotations

from dataclasses import dataclass

from examples.papers import forms, runs
from examples.papers import standard as standard_attention
from examples.papers.finding import Check, Finding, charted, check, line, tabled
from examples.papers.operations import LANES
from flashgen.estimate.machines import MACHINES
from flashgen.report.charts import Scale
from flashgen.spec.data_sheets import DATA_SHEETS, SOURCES
from flashgen.spec.gpu import TARGETS, Gpu, product_of, slug_of

PAPERS_GPU = TARGETS["nvidia_a100_sxm4_40gb"]
PRINTED_SHARED_TBS = 19.0
"""Of the A100's SRAM, in the FlashAttention paper's Figure 1."""
BANKS_BYTES = 128
"""Bytes that shared memory gives an SM in a clock cycle: 32 banks of 4 bytes."""
N, D, BR = 512, 64, 128


@dataclass(frozen=True, kw_only=True)
class Memory:
    """One level. tbs: TB/s (1e12 bytes a second) of all SMs together, None if it is not known;
    source: where the bandwidth is from.
    """

    name: str
    bytes: float
    tbs: float | None
    source: str


def memories(gpu: Gpu) -> tuple[Memory, ...]:
    """Those of a known GPU, the nearest first."""
    machine, cycles = MACHINES.get(gpu.arch), gpu.sms * (gpu.clock_mhz or 0) * 1e6

    def of_sms(bytes_a_cycle: float | None) -> float | None:
        return bytes_a_cycle * cycles / 1e12 if bytes_a_cycle and cycles else None

    (sheet,) = (s for s in DATA_SHEETS if slug_of(s.name) == product_of(gpu.slug))
    operands = LANES / machine.fp32 * 3 * 4 if machine else None
    return (
        Memory(
            name="registers", bytes=gpu.registers_per_sm * 4 * gpu.sms, tbs=of_sms(operands),
            source="registers: three operands of each float32 multiply-add",
        ),
        Memory(
            name="shared memory", bytes=gpu.shared_per_sm * gpu.sms,
            tbs=of_sms(BANKS_BYTES if gpu.is_nvidia else None),
            source="shared memory: 32 banks of 4 bytes, CUDA C++ Programming Guide",
        ),
        Memory(
            name="L2", bytes=gpu.l2_bytes, tbs=of_sms(machine.l2_bytes if machine else None),
            source="L2: assumed or fitted by this project, flashgen/estimate/machines.py",
        ),
        Memory(
            name="HBM or GDDR", bytes=sheet.memory_gb * 1e9,
            tbs=None if gpu.bandwidth_gbs is None else gpu.bandwidth_gbs / 1e3,
            source="HBM or GDDR: data sheet",
        ),
    )  # fmt: skip


def hierarchy(gpu: Gpu) -> Finding:
    """Sizes and bandwidths, and operations for a byte: needed by the GPU, given by attention."""
    levels = memories(gpu)
    known = [level.tbs for level in levels if level.tbs is not None]
    papers = {level.name: level for level in memories(PAPERS_GPU)}
    shared = papers["shared memory"].tbs or 0.0
    standard, tiled = _intensities()
    guide = "CUDA C++ Programming Guide, technical specifications per compute capability"
    slower = check(
        "looked up",
        "each memory farther from the arithmetic is slower: "
        f"{', '.join(_figure(tbs) for tbs in known)} TB/s",
        known == sorted(set(known), reverse=True),
    )
    return Finding(
        checks=(
            *([slower] if len(known) > 1 else []),
            check(
                "closed form",
                f"shared memory of the paper's GPU: {shared:.1f} TB/s, 19 printed",
                abs(shared / PRINTED_SHARED_TBS - 1) < 0.05,
            ),
            _balance(gpu, standard, tiled),
        ),
        figures=(
            charted(
                how=("looked up", "closed form"),
                title=f"Memories of the {gpu.name}",
                caption="Large memories are slow, fast ones are small; both axes are "
                "logarithmic. Sizes and bandwidths are those of all SMs together.",
                x=Scale(name="size, MB"),
                y=Scale(name="bandwidth, TB/s"),
                lines=tuple(
                    line(level.name, [(level.bytes / 1e6, level.tbs)], scattered=True)
                    for level in levels
                    if level.tbs is not None
                ),
            ),
            tabled(
                how=("looked up", "closed form"),
                title="Sizes and bandwidths",
                caption=f"{gpu.sms} SMs. Sizes of L2 and HBM: {SOURCES[gpu.arch]}. Sizes of "
                f"an SM's memories: {guide if gpu.is_nvidia else SOURCES[gpu.arch]}.",
                columns=("memory", "size", "TB/s"),
                rows=[(level.name, _size(level.bytes), _figure(level.tbs)) for level in levels],
            ),
        ),
        notes=(
            "Where bandwidths are from. "
            + "; ".join(level.source for level in levels if level.tbs is not None)
            + ".",
            f"Counted at one head, N {N:,}, d {D}, forward: standard attention does {standard:.0f} "
            f"operations for each byte it requests from HBM, FlashAttention-2 with {BR} rows in a "
            f"tile {tiled:.0f}. Of the latter's bytes L2 serves most, which many programs read.",
            "Another GPU: python examples/papers memories --target SLUG (flashgen targets).",
        ),
    )


def _intensities() -> tuple[float, float]:
    """Matrix operations for a byte, counted: of standard attention and of FlashAttention-2."""
    of = runs.head(N, D)
    whole = standard_attention.run(of.q[0, 0], of.k[0, 0], of.v[0, 0]).counter
    tiled = runs.forward("fa2", BR, 64, N, D)
    return whole.matrix_flops / whole.bytes, tiled.matrix_flops / tiled.bytes


def _balance(gpu: Gpu, standard: float, tiled: float) -> Check:
    """That standard attention waits for memory on this GPU, by counts and by closed form."""
    peak, bandwidth = gpu.peak_tflops, gpu.bandwidth_gbs
    needed = peak * 1e3 / bandwidth if peak and bandwidth else 0.0
    form = 4 * N * N * D / forms.standard(N, D)
    return check(
        "counted",
        f"while HBM brings a byte, the GPU could do {needed:.0f} operations; standard "
        f"attention has {standard:.0f} for each byte, FlashAttention-2 {tiled:.0f}",
        standard == form and standard < needed and 2 * standard < tiled,
    )


def _figure(tbs: float | None) -> str:
    return "not known" if tbs is None else f"{tbs:.3g}"


def _size(count: float) -> str:
    return f"{count / 1e9:.0f} GB" if count >= 1e9 else f"{count / 2**20:.1f} MiB"
