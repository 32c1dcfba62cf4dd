"""What the GPU reached of plain work in the same run: a large product by cuBLAS, a large copy."""

from __future__ import annotations

import torch

from flashgen import measure
from flashgen.bench.case import SEED
from flashgen.bench.race import Place

MATMUL_SIZE, SMOKE_MATMUL_SIZE = 8192, 32
COPY_BYTES, SMOKE_COPY_BYTES = 1 << 30, 1 << 10


def matmul_tflops(dtype: str, place: Place) -> float | None:
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


def copy_gbs(place: Place) -> float | None:
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
