"""Run time over the block size, by the model or on this GPU; and the block rule beside tables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from examples.papers import forms, runs
from examples.papers.charts import Line
from examples.papers.finding import Check, Figure, Finding, charted, check, line, powers, tabled
from examples.papers.memories import PAPERS_GPU
from examples.papers.traffic import BR, HEADS, D, N, gigabytes
from flashgen import paths
from flashgen.errors import ToolchainError
from flashgen.files import temporary_folder
from flashgen.report.charts import Limit, Scale
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Timing
from flashgen.spec.gpu import TARGETS, Gpu
from flashgen.spec.problem import bucket_of

if TYPE_CHECKING:
    from flashgen.evaluate.measure import LaunchOnce, Stopwatch

BLOCKS = powers(16, 512)
ROWS = 32
"""B_r of every block: with 64 rows and 256 keys the accumulators of four warps do not fit their
registers."""
RULE_DIMS = (64, 128, 256)


def plateau() -> Finding:
    """FA-1's time over B_c: the model's for an A100, and measured where there is a GPU."""
    import torch

    times = {bc: _estimated(bc).median_us / 1e3 for bc in BLOCKS}
    bytes_ms = {
        bc: gigabytes(_bytes(bc)) / (PAPERS_GPU.bandwidth_gbs or math.inf) * 1e3 for bc in BLOCKS
    }
    near = {bc: times[bc] / bytes_ms[bc] for bc in BLOCKS}
    least, most = (end(near[bc] for bc in BLOCKS if bc <= 128) for end in (min, max))
    at = tuple(map(float, BLOCKS))
    model = charted(
        how=("estimated", "closed form"),
        title="FlashAttention-1 over B_c: estimated time",
        caption="Forward, batch 64, 16 heads, N 1,024, d 64, for an A100 with 40 GB. Estimated by "
        "this project's model, not measured. The dashed line is the bytes over 1,555 GB/s.",
        x=Scale(name="B_c, keys", at=at),
        y=Scale(name="estimated time, ms"),
        lines=(
            line("estimated time", times),
            line("bytes over bandwidth", bytes_ms, closed=True),
        ),
    )
    timed = _on_this_gpu() if torch.cuda.is_available() else None
    return Finding(
        checks=(
            check(
                "estimated",
                f"up to 128 the bytes decide: {least:.2f} to {most:.2f} times their time",
                most < 1.1 * least,
            ),
            check(
                "estimated",
                f"from 256 they do not: {near[256]:.2f} times at 256, {near[512]:.2f} at 512",
                near[256] > 1.1 * most and near[512] > 1.1 * near[256],
            ),
            check(
                "estimated",
                f"512 is no faster than 256: {times[512]:.2f} ms, {times[256]:.2f} ms",
                times[512] > 0.97 * times[256],
            ),
        ),
        figures=(model, *(timed or ())),
        notes=(
            "The bytes are those that the section on the block size counts. Beyond 256 a program's "
            "arithmetic takes longer than its bytes.",
            *(
                ()
                if timed
                else ("No GPU here, so no run time stands beside the counts. With one, it does.",)
            ),
        ),
    )


def _bytes(bc: int) -> int:
    return forms.total(forms.fa1(N, D, min(ROWS, bc), bc))


def _estimated(bc: int) -> Timing:
    """The model's time of FA-1 at the setting: every program walks all pairs of tiles of a head.

    Raises ToolchainError and NoEstimate.
    """
    import triton

    from flashgen.compile.compiler import cache_file, compile_kernel
    from flashgen.estimate.estimate import time_of
    from flashgen.estimate.replay import replay_cubin

    br = min(ROWS, bc)
    spec, config = runs.spec_of(D), runs.config_of(br, min(bc, 256), schedule="fa1")
    rendered = runs.rendered(spec, config, bc)
    gpu = PAPERS_GPU
    with temporary_folder("paper") as cache:
        compiled = compile_kernel(rendered, spec, config, gpu.arch, cache=cache)
        file = cache_file(compiled.digest, gpu.arch, triton.__version__, cache, "cubin")
        replayed = replay_cubin(
            file.read_bytes(),
            gpu,
            num_warps=config.num_warps,
            shared_bytes=compiled.shared_bytes,
        )
    trips = (N // br) * (N // bc)
    return time_of(replayed, [(trips,)] * HEADS, gpu, least_bytes=float(_bytes(bc) * HEADS))


def _on_this_gpu() -> tuple[Figure, Figure]:
    """What measured() gives for CUDA device 0."""
    from flashgen.evaluate.measure import CudaStopwatch
    from flashgen.kernels.launch import device_gpu

    gpu = device_gpu(0)
    return measured(gpu, "cuda", CudaStopwatch(0, gpu.l2_bytes))


def measured(gpu: Gpu, device: str, stopwatch: Stopwatch) -> tuple[Figure, Figure]:
    """Run times on a GPU at the setting: FA-1 over B_c, FA-2, and standard attention in torch.

    Raises ToolchainError where a kernel cannot be timed.
    """
    import torch

    from flashgen.evaluate.measure import Ceiling, measure
    from flashgen.kernels.launch import bind
    from flashgen.kernels.launch_forward import Forward

    q, k, v = (torch.randn(HEADS, 1, N, D, device=device, dtype=torch.float16) for _ in range(3))
    call = Forward(q=q, k=k, v=v, scale=D**-0.5, diagonal=None)
    spec = runs.spec_of(D)
    launches: dict[str, tuple[LaunchOnce, float]] = {}

    def add(name: str, config: KernelConfig, moved: int) -> None:
        plan = bind(runs.kernel_of(spec, config), spec, config)
        launches[name] = (lambda: plan(call)), gigabytes(moved)

    blocks = tuple(bc for bc in BLOCKS if bc <= 256)
    for bc in blocks:
        config = runs.config_of(min(ROWS, bc), bc, schedule="fa1")
        add(f"FlashAttention-1, B_c {bc}", config, _bytes(bc))
    add(
        f"FlashAttention-2, {BR} x 64", runs.config_of(BR, 64), forms.total(forms.fa2(N, D, BR, 64))
    )
    launches["standard, torch"] = (
        lambda: ((q @ k.mT) * D**-0.5).softmax(-1) @ v,
        gigabytes(forms.standard(N, D)),
    )
    ceiling = Ceiling(operations=4.0 * HEADS * N * N * D, peak_tflops=gpu.peak_tflops)
    times: dict[str, float] = {}
    for name, (run, _) in launches.items():
        try:
            found = measure(run, effort="timed", stopwatch=stopwatch, ceiling=ceiling)
        except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
            raise ToolchainError(f"{name} cannot be timed here: {error}") from error
        times[name] = found.median_us / 1e3
    fa1 = {bc: times[f"FlashAttention-1, B_c {bc}"] for bc in blocks}
    others = [name for name in times if not name.startswith("FlashAttention-1")]
    chart = charted(
        how=("measured",),
        title=f"FlashAttention-1 over B_c: measured on {gpu.name}",
        caption="The same setting, on this GPU, by the protocol of flashgen tune.",
        x=Scale(name="B_c, keys", at=blocks),
        y=Scale(name="median time, ms"),
        lines=(line("FlashAttention-1, measured", fa1),),
        limits=tuple(Limit(y=times[name], name=name) for name in others),
    )
    table = tabled(
        how=("measured", "closed form"),
        title=f"Run times on {gpu.name}",
        caption="Beside the bytes that each moves.",
        columns=("forward", "GB, closed form", "ms, measured"),
        rows=[(name, f"{launches[name][1]:.2f}", f"{ms:.3f}") for name, ms in times.items()],
    )
    return chart, table


def _at_most_the_rule(larger: list[str], points: int) -> Check:
    """Whether most of this many tiles are within the rule; larger: those that are not."""
    where = f", except on {'; '.join(larger)}" if larger else f" for all {points} tiles"
    return check(
        "looked up",
        f"the chosen B_c is at most the rule's{where}",
        2 * len(larger) < points,
        points=(points - len(larger), points),
    )


def block_rule() -> Finding:
    """B_c = ceil(M / 4d) with M the shared memory of a block, and what the shipped tables chose."""
    from flashgen.table.table_file import load

    rows, lines, larger = [], [], []
    shown, points, estimated = ("nvidia_a100_sxm4_80gb", "nvidia_l4"), 0, 0
    for slug in TARGETS:
        if not paths.shipped_table(slug).exists():
            continue
        table = load(paths.shipped_table(slug))
        elements = table.gpu.shared_per_block // 2
        chosen: dict[int, tuple[int, int]] = {}
        for d in RULE_DIMS:
            entry = table.find(runs.spec_of(d, dtype="bfloat16"), bucket_of(4096))
            if entry is not None:
                chosen[d] = entry.config.br, entry.config.bc
                estimated += entry.result.source != "measured"
        name, cells = table.gpu.name.removeprefix("NVIDIA "), dict.fromkeys(RULE_DIMS, "")
        for d, (br, bc) in chosen.items():
            rule = math.ceil(elements / (4 * d))
            if bc > rule:
                larger.append(f"{name}, d {d}: {bc}, the rule {rule}")
            cells[d] = f"{rule}; {br}x{bc}"
        rows.append((name, *cells.values()))
        points += len(chosen)
        if slug in shown and chosen:
            lines += _rule_lines(table.gpu, elements, chosen)
    return Finding(
        checks=(_at_most_the_rule(larger, points),),
        figures=(
            charted(
                how=("closed form", "looked up"),
                title="B_c by the rule, and as chosen",
                caption="Forward, bfloat16, no mask, 4,096 keys. The tables of this project "
                "choose smaller blocks of keys, and more rows.",
                x=Scale(name="d, elements", at=RULE_DIMS),
                y=Scale(name="B_c, keys", at=tuple(map(float, powers(16, 512)))),
                lines=tuple(lines),
            ),
            tabled(
                how=("closed form", "looked up"),
                title="The rule and the choice on each GPU",
                caption="B_c by the rule; then the tile chosen, rows x keys. M is the shared "
                "memory of a block, in elements of 2 bytes.",
                columns=("GPU", *(f"d {d}" for d in RULE_DIMS)),
                rows=tuple(rows),
            ),
        ),
        notes=(
            "The rule fills SRAM with one block each of Q, K, V and O; B_r is the smaller of B_c "
            "and d. Tuned kernels keep O in registers and load the next block while they compute, "
            "so registers limit them first.",
            f"{estimated} of the {points} tiles are the fastest by the model; the others were "
            "timed on a GPU.",
        ),
    )


def _rule_lines(gpu: Gpu, elements: int, chosen: dict[int, tuple[int, int]]) -> list[Line]:
    name = gpu.name.removeprefix("NVIDIA ").split("-")[0]
    rule = {d: math.ceil(elements / (4 * d)) for d in chosen}
    return [
        line(f"rule, {name}", rule, closed=True),
        line(f"chosen, {name}", {d: bc for d, (_, bc) in chosen.items()}),
    ]
