"""A program of test_failures.py: evaluates two kernels on the GPU and prints what became of them, a JSON line each.

python -m tests.driver.failing STAGE FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from flashgen.evaluate import on_gpu
from flashgen.evaluate.on_gpu import GpuEvaluator
from flashgen.evaluate.workers import pool
from flashgen.kernels.launch import device_gpu
from flashgen.spec.problem import Problem
from tests.makers import make_config, make_spec

SPEC = make_spec(head_dim=64, mask="causal")
CONFIGS = make_config(64, 64), make_config(128, 64)
PROBLEM = Problem(batch=2, heads=4, kv_heads=4, seq_q=1024, seq_k=1024)


def main(stage: str, folder: Path) -> None:
    on_gpu.CHECK_LIMIT_S = on_gpu.MEASURE_LIMIT_S = 12.0
    pool.HANGS = 2.0  # a kernel that hangs takes so many limits, and once more
    with GpuEvaluator(device_gpu(0), 0, folder, jobs=1) as evaluator:
        for outcome in evaluator.evaluate(stage, SPEC, PROBLEM, CONFIGS):  # type: ignore[arg-type]
            print(json.dumps([outcome.config.br, str(outcome.status), outcome.detail]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
