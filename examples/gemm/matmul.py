"""A user's own kernel, c = a b of contiguous float16 matrices, and what becomes of a point of it.

The functions take and return JSON: they run in child processes, which may crash or hang.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

M = N = K = 4096
CHECKED = (384, 256, 128)
"""M, N and K of the check. No tile is larger, and there is more than one in each direction."""


@triton.jit
def matmul(
    a, b, c, m, n, k,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of c. Tiles of GROUP rows run together, so that they find their data in the L2."""
    tiles = tl.cdiv(n, COLUMNS)
    group, within = tl.program_id(0) // (GROUP * tiles), tl.program_id(0) % (GROUP * tiles)
    high = min(GROUP, tl.cdiv(m, ROWS) - group * GROUP)
    rows = (group * GROUP + within % high) * ROWS + tl.arange(0, ROWS)
    columns = within // high * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    a_at = a + (rows % m)[:, None] * k + depth[None, :]
    b_at = b + depth[:, None] * n + (columns % n)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, k, DEPTH):
        left = k - start
        total = tl.dot(
            tl.load(a_at, mask=depth[None, :] < left, other=0.0),
            tl.load(b_at, mask=depth[:, None] < left, other=0.0),
            total,
        )
        a_at += DEPTH
        b_at += DEPTH * n
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(c + rows[:, None] * n + columns[None, :], total.to(tl.float16), mask=inside)


def constants(point: dict[str, int]) -> dict[str, int]:
    """The constexpr arguments of a point."""
    return {name: point[name] for name in ("ROWS", "COLUMNS", "DEPTH", "GROUP")}


def options(point: dict[str, int]) -> dict[str, int]:
    """The launch options of a point."""
    return {name: point[name] for name in ("num_warps", "num_stages")}


def estimate(payload: dict[str, Any]) -> dict[str, float]:
    """Compile a point for a GPU, present or not: {point, on: [target, ...]} -> {found: us}."""
    from triton.compiler import ASTSource

    from flashgen.compile.compiler import target_of
    from flashgen.estimate import estimate_cubin
    from flashgen.spec.gpu import known_target

    point, gpu = payload["point"], known_target(payload["on"][0])
    types = dict.fromkeys(("a", "b", "c"), "*fp16") | dict.fromkeys(("m", "n", "k"), "i32")
    source = ASTSource(
        fn=matmul,
        signature=types | dict.fromkeys(constants(point), "constexpr"),
        constexprs=constants(point),
        attrs={(place,): [["tt.divisibility", 16]] for place in range(6)},
    )
    built = triton.compile(source, target=target_of(gpu.arch), options=options(point))
    turns = triton.cdiv(K, point["DEPTH"])
    timing = estimate_cubin(
        built.asm["cubin"],
        arch=gpu.arch,
        num_warps=point["num_warps"],
        shared_bytes=built.metadata.shared,
        blocks=[(turns,)] * (triton.cdiv(M, point["ROWS"]) * triton.cdiv(N, point["COLUMNS"])),
        target=gpu,
    )
    return {"found": round(timing.median_us, 1)}


def check(payload: dict[str, Any]) -> dict[str, bool]:
    """Whether a point computes what float64 does, up to rounding: {point} -> {found}."""
    from flashgen.reference.attention import compared

    m, n, k = CHECKED
    a, b = _inputs(m, n, k)
    found = _run(a, b, payload["point"])
    exact = a.double() @ b.double()
    ideal = exact.float().half()
    return {"found": compared(found, exact, ideal, float((a.abs() @ b.abs()).max())).passed}


def measure(payload: dict[str, Any]) -> dict[str, float]:
    """The time of a point on this GPU: {point, on: [target, ...]} -> {found: us}."""
    from flashgen.evaluate.measure import Ceiling, CudaStopwatch
    from flashgen.evaluate.measure import measure as measured
    from flashgen.spec.gpu import known_target

    gpu, (a, b) = known_target(payload["on"][0]), _inputs(M, N, K)
    timing = measured(
        lambda: _run(a, b, payload["point"]),
        effort="timed",
        stopwatch=CudaStopwatch(0, gpu.l2_bytes),
        ceiling=Ceiling(operations=2 * M * N * K, peak_tflops=gpu.peak_tflops),
    )
    return {"found": round(timing.median_us, 1)}


def _inputs(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    return torch.randn(m, k, device=device).half(), torch.randn(k, n, device=device).half()


def _run(a: torch.Tensor, b: torch.Tensor, point: dict[str, int]) -> torch.Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(m, point["ROWS"]) * triton.cdiv(n, point["COLUMNS"]),)
    matmul[grid](a, b, c, m, n, k, **constants(point), **options(point))
    return c
