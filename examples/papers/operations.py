"""Floating-point operations: of standard and tiled attention, and those that no matrix product
does.
"""

from __future__ import annotations

from examples.papers import forms, runs
from examples.papers import standard as standard_attention
from examples.papers.charts import Line
from examples.papers.finding import Figure, Finding, charted, check, line, powers, tabled
from flashgen.estimate.machines import MACHINES
from flashgen.report.charts import Scale
from flashgen.spec.gpu import Gpu

D = 64
TILE = 64
LANES = 128
"""Results in a clock cycle of an SM whose float32 instructions occupy a pipe for one cycle."""


def flops() -> Finding:
    """Operations of matrix products over N, what a causal mask saves, and those of each kernel."""
    lengths = powers(128, 512)
    counts: dict[str, list[int]] = {"standard": [], "tiles": [], "tiles, causal": []}
    for n in lengths:
        of = runs.head(n, D)
        standard = standard_attention.run(of.q[0, 0], of.k[0, 0], of.v[0, 0])
        counts["standard"].append(standard.counter.matrix_flops)
        counts["tiles"].append(runs.forward("fa2", TILE, TILE, n, D).matrix_flops)
        causal = runs.forward("fa2", TILE, TILE, n, D, causal=True)
        counts["tiles, causal"].append(causal.matrix_flops)
    whole = [forms.matrix_flops(n, D, TILE, TILE) for n in lengths]
    halved = [forms.matrix_flops(n, D, TILE, TILE, True) for n in lengths]
    products = _products_of_kernels()
    expected = {"standard": (2, 4), "one kernel": (2, 5), "two kernels": (2, 4 + 3)}
    long = powers(128, 1 << 14)
    form = [(float(n), 100 * (1 - (n // TILE + 1) / (2 * n // TILE))) for n in long]
    saved = [
        100 * (1 - few / many) for few, many in zip(counts["tiles, causal"], whole, strict=True)
    ]
    return Finding(
        checks=(
            check(
                "counted",
                "standard attention and tiles need exactly 4 N^2 d operations in the forward",
                counts["standard"] == counts["tiles"] == whole,
            ),
            check(
                "counted",
                f"with a causal mask they are 4 N^2 d (T + 1) / 2T, with T = N / {TILE} tiles",
                counts["tiles, causal"] == halved,
            ),
            check(
                "counted",
                "the backward by tiles computes S again: 5 products in place of 4, or 4 + 3 "
                "as two kernels",
                products == expected,
            ),
        ),
        figures=(
            charted(
                how=("counted", "closed form"),
                title="Operations of the matrix products, forward",
                caption=f"One head, d {D}, tiles of {TILE} x {TILE}. The marks of standard "
                "attention lie under those of the tiles: the two do equally many.",
                x=Scale(name="N, keys", at=lengths),
                y=Scale(name="million operations"),
                lines=(
                    *(_line(f"{name}, counted", lengths, found) for name, found in counts.items()),
                    _line("4 N^2 d", lengths, whole, closed=True),
                ),
            ),
            charted(
                how=("counted", "closed form"),
                title="What a causal mask saves",
                caption="A tile above the diagonal is not computed. One on it is computed "
                "whole, so short sequences save less than half. Standard attention saves none.",
                x=Scale(name="N, keys", at=tuple(float(n) for n in long[::2])),
                y=Scale(name="operations saved, %", log=False, low=0.0),
                lines=(
                    line("(T - 1) / 2T", form, closed=True),
                    line("tiles, counted", zip(lengths, saved, strict=True), scattered=True),
                ),
            ),
            _products_table(products),
        ),
        notes=(
            "The paper's Figure 2 prints 66.6 and 75.2 GFLOPs for the forward and the backward, a "
            f"factor of 1.13. Seven products in place of six are a factor of {7 / 6:.2f}.",
        ),
    )


def _line(name: str, at: tuple[int, ...], counts: list[int], **kind: bool) -> Line:
    """Counts at some sizes, in millions."""
    return line(name, {n: count / 1e6 for n, count in zip(at, counts, strict=True)}, **kind)


def _products_of_kernels() -> dict[str, tuple[int, int]]:
    """Matrix products of N x N x d that the forward and the backward do: standard, and by tiles
    with the backward as one kernel and as two.
    """
    n, one = 128, forms.matrix_flops(128, D, TILE, TILE, products=1)
    of, do = runs.head(n, D), runs.head(n, D + 1).q[0, 0, :, :D].contiguous()
    q, k, v = of.q[0, 0], of.k[0, 0], of.v[0, 0]
    ahead = standard_attention.run(q, k, v).counter.matrix_flops
    both = standard_attention.run(q, k, v, do).counter.matrix_flops
    forward = runs.forward("fa2", TILE, TILE, n, D).matrix_flops
    fused, dkv, dq = (
        runs.backward(direction, TILE, TILE, n, D).matrix_flops
        for direction in ("backward_fused", "backward_dkv", "backward_dq")
    )
    return {
        "standard": (ahead // one, (both - ahead) // one),
        "one kernel": (forward // one, fused // one),
        "two kernels": (forward // one, (dkv + dq) // one),
    }


def _products_table(products: dict[str, tuple[int, int]]) -> Figure:
    names = {
        "standard": "standard, S and P kept in memory",
        "one kernel": "tiles, the backward as one kernel",
        "two kernels": "tiles, the backward as two kernels",
    }
    return tabled(
        how=("counted",),
        title="Matrix products of N x N x d",
        caption="Kept in memory, P need not be computed again. One kernel for dQ and one for dK "
        "and dV each compute S and dP.",
        columns=("attention", "forward", "backward"),
        rows=[(names[name], str(a), str(b)) for name, (a, b) in products.items()],
    )


def other(gpu: Gpu) -> Finding:
    """Operations outside matrix products, of FlashAttention-1 and 2 over B_c."""
    n, blocks = 512, powers(16, 256)
    fa1 = [runs.forward("fa1", TILE, bc, n, D).other_flops for bc in blocks]
    fa2 = [runs.forward("fa2", TILE, bc, n, D).other_flops for bc in blocks]
    forms1 = [forms.other_flops_fa1(n, D, bc) for bc in blocks]
    forms2 = [forms.other_flops_fa2(n, D, bc) for bc in blocks]
    # Only what is done to O grows with d: halving d shows its operations, for each element of O.
    half1 = runs.forward("fa1", TILE, TILE, n, D // 2).other_flops
    half2 = runs.forward("fa2", TILE, TILE, n, D // 2).other_flops
    at, elements = blocks.index(TILE), n * D / 2
    of_o = [(fa1[at] - half1) / elements, (fa2[at] - half2) / elements]
    tiles = n // TILE

    return Finding(
        checks=(
            check(
                "counted",
                f"{len(blocks)} counts of each algorithm equal their closed forms",
                (fa1, fa2) == (forms1, forms2),
            ),
            check(
                "counted",
                f"FlashAttention-2 does fewer at every B_c: {1 - fa2[0] / fa1[0]:.0%} fewer "
                f"at {blocks[0]}, {1 - fa2[-1] / fa1[-1]:.0%} at {blocks[-1]}",
                all(few < many for few, many in zip(fa2, fa1, strict=True)),
            ),
            check(
                "counted",
                f"each element of O, over {tiles} tiles: {of_o[0]:g} operations in "
                f"FlashAttention-1, {of_o[1]:g} in FlashAttention-2",
                of_o == [3 * tiles, tiles + 1],
            ),
        ),
        figures=(
            charted(
                how=("counted", "closed form"),
                title="Operations outside matrix products",
                caption=f"Forward of one head, N {n}, d {D}. Five for each score are common to "
                "both. FlashAttention-1 spends three for each element of O in every tile of "
                "keys, FlashAttention-2 one, and one at the end.",
                x=Scale(name="B_c, keys in a tile", at=blocks),
                y=Scale(name="million operations", log=False, low=0.0),
                lines=(
                    _line("FlashAttention-1, counted", blocks, fa1, scattered=True),
                    _line("its closed form", blocks, forms1, closed=True),
                    _line("FlashAttention-2, counted", blocks, fa2, scattered=True),
                    _line("its closed form", blocks, forms2, closed=True),
                ),
            ),
        ),
        notes=(
            _cost(gpu),
            "Counted are float operations of each element: additions, products, exponentials, "
            "maxima. Comparisons, selections and conversions are not.",
        ),
    )


def _cost(gpu: Gpu) -> str:
    """How much dearer a float32 operation is than one of a matrix product, by the data sheet."""
    machine = MACHINES.get(gpu.arch)
    if machine is None or gpu.clock_mhz is None or gpu.peak_tflops is None:
        return f"What an operation outside matrix products costs on {gpu.name} is not known here."
    tflops = 2 * LANES / machine.fp32 * gpu.sms * gpu.clock_mhz * 1e-6
    return (
        f"{gpu.name} does {gpu.peak_tflops:.0f} trillion operations a second in matrix products of "
        f"16 bits, and {tflops:.1f} trillion in float32 outside them. So one of these takes as "
        f"long as {gpu.peak_tflops / tflops:.0f} in a product."
    )
