"""Kernels compiled by the tests: each once a run, whichever test or worker asks first."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flashgen.compile.compiler import Compiled, cache_file, compile_kernel
from flashgen.compile.loops import LoopFacts
from flashgen.kernels.render import render
from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec

Job = tuple[AttentionSpec, KernelConfig, str]
"""A kernel and the architecture that it is compiled for."""


def made_loop(**fields: Any) -> LoopFacts:
    counts: dict[str, Any] = {
        "instructions": 400,
        "matrix_instructions": 12,
        "matrix_flops": 524288,
        "exp2": 34,
        "fp32": 136,
        "other": 100,
        "shared_bytes": 13312,
        "spills": 0,
        "warpgroup_arrives": 2,
        "exp2_under_matrix": 1.0,
    }
    return LoopFacts(**(counts | fields))


def made_compiled(**fields: Any) -> Compiled:
    facts: dict[str, Any] = {
        "name": "kernel",
        "digest": "sha256:" + "0" * 64,
        "arch": "sm_90",
        "triton": "3.7.1",
        "num_warps": 8,
        "registers": 168,
        "spill_bytes": 0,
        "shared_bytes": 98304,
        "loop": made_loop(),
        "advisories": (),
    }
    return Compiled(**(facts | fields))


def cache() -> Path:
    """The run's folder, for what takes a cache of compiled kernels."""
    return Path(os.environ["TESTS_CACHE"]) / "compiled"


def compile_one(spec: AttentionSpec, config: KernelConfig, arch: str) -> Compiled:
    """compile_kernel() of the rendered kernel, from the cache where it is there."""
    return compile_kernel(render(spec, config), spec, config, arch, cache=cache())


def cubin_of(compiled: Compiled) -> bytes:
    """The binary of what compile_one() returned."""
    return cache_file(
        compiled.digest, compiled.arch, compiled.triton, cache(), "cubin"
    ).read_bytes()


def compile_all(jobs: Iterable[Job]) -> list[Compiled]:
    """In this process: there are as many workers as cores."""
    return [compile_one(*job) for job in jobs]
