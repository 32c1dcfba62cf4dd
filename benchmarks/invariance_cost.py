"""What invariant=True costs by estimate: kernels of the numeric class beside the table's choice.

    python benchmarks/invariance_cost.py [SLUG...]

For each GPU, prefill (bfloat16, causal) and a step of decode over pages. The kernels of the class
are the tiles below, not all that a search would try. Nothing is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from flashgen.cli.options import named_table
from flashgen.compile.compiler import compile_kernel, judge
from flashgen.errors import FlashgenError
from flashgen.estimate.estimate import estimate
from flashgen.estimate.sm import cached_replay
from flashgen.estimate.trip_counts import tuned_splits
from flashgen.files import temporary_folder
from flashgen.kernels.render import render
from flashgen.spec.attention import AttentionSpec, spec_of
from flashgen.spec.config import KernelConfig, config_of
from flashgen.spec.gpu import Gpu
from flashgen.spec.legality import why_illegal
from flashgen.spec.outcome import Status
from flashgen.spec.problem import Problem

GPUS = ("nvidia_h100_80gb_hbm3", "nvidia_a100_sxm4_80gb", "nvidia_geforce_rtx_4090")
SPECS = (
    "fwd_bf16_d64_causal", "fwd_bf16_d128_causal", "fwd_bf16_d256_causal", "decode_bf16_d64_paged",
    "decode_bf16_d128_paged", "decode_bf16_d256_paged",
)  # fmt: skip
BUCKETS = (4096, 16384)
PREFILL = (
    "br128_bc64_w8_s3_s_ahead_tma_lpt_r128", "br128_bc64_w8_s3_fa2_tma_lpt_r128",
    "br128_bc64_w8_s3_s_ahead_tma_lpt", "br128_bc64_w8_s2_s_ahead_tma_lpt",
    "br128_bc64_w8_s2_fa2_tma_lpt", "br128_bc64_w8_s3_s_ahead_ptr_lpt",
    "br128_bc64_w8_s2_fa2_ptr_lpt_rows", "br64_bc64_w4_s2_fa2_ptr_lpt_rows",
    "br128_bc64_w8_s2_fa2_ptr_lpt", "br64_bc64_w4_s2_fa2_ptr_lpt",
)  # fmt: skip
DECODE = (
    "br64_bc64_w4_s2_fa2_ptr", "br64_bc64_w4_s3_fa2_ptr", "br64_bc64_w4_s4_fa2_ptr",
    "br128_bc64_w8_s2_fa2_ptr", "br64_bc64_w4_s2_fa2_ptr_v2", "br16_bc64_w1_s2_fa2_ptr_v2",
    "br16_bc64_w1_s2_fa2_ptr", "br16_bc64_w1_s3_fa2_ptr", "br16_bc64_w1_s4_fa2_ptr",
)  # fmt: skip


def class_us(spec: AttentionSpec, problem: Problem, gpu: Gpu, cache: Path) -> tuple[float, str]:
    """The least estimate of the kernels of the class, and its config. Raises FlashgenError."""
    found = []
    for label in DECODE if spec.direction == "decode" else PREFILL:
        config = config_of(label)
        if why_illegal(spec, config, gpu) is None:
            us = estimated(spec, config, problem, gpu, cache)
            found += [] if us is None else [(us, label)]
    if not found:
        raise FlashgenError(f"no kernel of {spec.name} fits {gpu.slug}")
    return min(found)


def estimated(
    spec: AttentionSpec, config: KernelConfig, problem: Problem, gpu: Gpu, cache: Path
) -> float | None:
    """Microseconds by estimate; None for a kernel that no table would have."""
    whole = spec.direction == "decode" and tuned_splits(spec, config, problem, gpu.sms) == 1
    compiled = compile_kernel(
        render(spec, config), spec, config, gpu.arch, whole=whole, cache=cache
    )
    if judge(compiled, spec, config, gpu)[0] is not Status.OK:
        return None
    return estimate(cached_replay(compiled, gpu, cache), spec, config, problem, gpu).median_us


def rows(slug: str, cache: Path) -> Iterator[str]:
    """A line of the table for each spec and bucket that the GPU's table has."""
    table = named_table(slug, Path(), evidence=True)
    for name in SPECS:
        spec = spec_of(name)
        for entry in table.entries:
            us = entry.result.median_us
            if entry.spec != spec or entry.bucket.low not in BUCKETS or us is None:
                continue
            own = spec_of(f"{name}_invariant")
            found, label = class_us(own, entry.evidence.problem, table.gpu, cache)
            size, cost = entry.evidence.problem.label, f"{100 * (found / us - 1):+.0f} %"
            yield f"| {slug} | {name} | {size} | {us:.0f} | {found:.0f} | {cost} | `{label}` |"


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gpus", nargs="*", default=GPUS, metavar="SLUG")
    with temporary_folder("cost") as cache:
        for slug in parser.parse_args().gpus:
            for line in rows(slug, cache):
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
