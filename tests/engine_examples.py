"""The modules of examples/engine_kernels, and a kernel for them of no engine: tests/engine_standin.py."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import torch

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "engine_kernels"
sys.path.insert(0, str(FOLDER))

import engines  # noqa: E402
import launches  # noqa: E402

__all__ = ["EDIT", "FOLDER", "POINT", "WORK", "engines", "launches", "standin"]

POINT = {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 8}
WORK = engines.Work(heads=4, kv_heads=2, dim=32, queries=(70,), keys=(70,))
LINE = "    BLOCK, num_warps = 16, 4\n"
EDIT = (LINE, "    BLOCK, num_warps = {BLOCK_M}, {num_warps}  # {why} {capability}\n")


def call(module: ModuleType, work: engines.Work, given: engines.Inputs) -> torch.Tensor:
    out = torch.empty_like(given.q)
    k, v = (engines.contiguous(pages, given.table, work) for pages in (given.k, given.v))
    module.attend(given.q, k, v, out)
    return out


def standin(*edits: tuple[str, str]) -> engines.EngineKernel:
    return engines.EngineKernel(
        module="tests.engine_standin", kernel="kernel_of_engine", values={}, edits=edits or (EDIT,),
        call=call, trips=lambda point, work: [], tile=("BLOCK_M", "BLOCK_N"), check=WORK,
    )  # fmt: skip
