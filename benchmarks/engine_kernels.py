"""Tiles for the Triton attention of vLLM and SGLang, estimated. CPU only.

    PYTHONPATH=vllm-and-sglang python benchmarks/engine_kernels.py --record engine_kernels.json

Tunes the kernels of examples/engine_kernels for Llama 3.1 8B and three GPUs, and writes
results/engine_kernels.{json,md}. A killed run resumes from the record.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "engine_kernels.json"
sys.path[:0] = [str(ROOT / "examples" / "engine_kernels"), str(ROOT)]

import triton
from tune import LLAMA, WORTH, Session, tuned, work_of

TARGETS = ("nvidia_h100_80gb_hbm3", "nvidia_a100_sxm4_80gb", "nvidia_l4")
TRIALS = {"vllm-prefill": 16, "vllm-decode": 12, "sglang-decode": 12}
BATCH = argparse.Namespace(prompt=8192, batch=16, context=4096)


def tuning(session: Session, target: str, name: str, trials: int) -> dict[str, Any]:
    """What the search found for one kernel on one GPU."""
    work = work_of(name, LLAMA, BATCH)
    default, best = tuned(session, name, work, target, trials)
    failed = sum(each.value is None for each in best.evaluations)
    return {
        "kernel": name, "target": target, "default": default["numbers"],
        "default_us": default["found"], "best": dict(best.point), "best_us": best.value,
        "evaluated": len(best.evaluations), "failed": failed,
    }  # fmt: skip


def short(numbers: dict[str, int]) -> str:
    """A choice as it stands in a table: 64 x 32, 4 warps, 3 stages."""
    tile = " x ".join(str(n) for name, n in numbers.items() if not name.startswith("num_"))
    warps, stages = numbers["num_warps"], numbers["num_stages"]
    return f"{tile}, {warps} warp{'s' * (warps > 1)}, {stages} stage{'s' * (stages > 1)}"


def us_of(us: float) -> str:
    """A time as it stands in a table."""
    return f"{us:.0f}" if us >= 100 else f"{us:.1f}"


def page(found: dict[str, Any]) -> str:
    """The page of results."""
    lines = [
        "# Tiles for the kernels of vLLM and SGLang",
        "",
        "Written by `benchmarks/engine_kernels.py`, which says what was asked. Llama 3.1 8B,",
        f"bfloat16: a prompt of {BATCH.prompt} tokens, or a decode of {BATCH.batch} sequences of"
        f" {BATCH.context}",
        f"keys. vLLM 0.33.0, SGLang 0.5.23, Triton {found['triton']}.",
        "**Estimated: none of these times was measured.** Each tile was interpreted and compared",
        "with float64. Differences under 10 % mean nothing.",
        "",
        "| kernel | GPU | its own choice | us | best of the search | us | gain |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["tuned"]:
        old, new = row["default_us"], row["best_us"]
        gain = f"{old / new:.2f}" if new <= WORTH * old else "none"
        cells = (row["kernel"], row["target"], short(row["default"]), us_of(old))
        cells += (short(row["best"]), us_of(new), gain)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, required=True, help="answers, to resume from")
    asked = parser.parse_args()
    with Session(asked.record) as session:
        found: dict[str, Any] = {"triton": triton.__version__}
        found["tuned"] = [
            tuning(session, target, name, trials)
            for target in TARGETS
            for name, trials in TRIALS.items()
        ]
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    file = RESULTS.with_suffix(".md")  # its later sections are of November 2026
    _, mark, rest = file.read_text().partition("\n## ")
    file.write_text(page(found) + mark + rest)


if __name__ == "__main__":
    main()
