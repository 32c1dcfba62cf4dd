"""Tiles for the Triton attention of vLLM and SGLang, estimated, beside published times. CPU only.

    PYTHONPATH=vllm-and-sglang python benchmarks/engine_kernels.py --record engine_kernels.json

Tunes the kernels of examples/engine_kernels for Llama 3.1 8B and three GPUs, compares estimates
with two published pairs of before and after, and writes results/engine_kernels.{json,md}. A killed
run resumes from the record.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "engine_kernels.json"
sys.path[:0] = [str(ROOT / "examples" / "engine_kernels"), str(ROOT)]

import triton
from engines import Work
from tune import LLAMA, WORTH, Session, tuned, work_of

TARGETS = ("nvidia_h100_80gb_hbm3", "nvidia_a100_sxm4_80gb", "nvidia_l4")
TRIALS = {"vllm-prefill": 16, "vllm-decode": 12, "sglang-decode": 12}
BATCH = argparse.Namespace(prompt=8192, batch=16, context=4096)

VLLM_PAIR = {
    "source": "github.com/vllm-project/vllm/pull/20690, 2025-07-09",
    "target": "nvidia_h100_80gb_hbm3",
    "before_ms": 664.7519522656997,
    "after_ms": 372.3039971664548,
    "prompt": 10000,
    "layers": 32,
    "before": {"BLOCK_M": 16, "TILE_SIZE": 16, "num_warps": 4, "num_stages": 3},
    "after": [
        {"BLOCK_M": 64, "TILE_SIZE": 32, "num_warps": 4, "num_stages": 3},
        {"BLOCK_M": 64, "TILE_SIZE": 64, "num_warps": 4, "num_stages": 3},
    ],
}
"""Latency of a request with 4 new tokens, the average. The text that could be read does not name
the new tiles: these two are what the authors' repository has for long prompts, commented out
(foundation-model-stack/vllm-triton-backend, triton_unified_attention.py). Before, a tile was a page
of 16 keys. All else of the request is the same, so the difference is attention's."""

SGLANG_PAIR = {
    "source": "github.com/sgl-project/sglang/pull/22350, 2026-04-08",
    "target": "nvidia_h200",
    "sizes": [  # tokens, heads, head dim, ms before, ms after
        (128, 32, 128, 0.0152, 0.0134),
        (512, 32, 128, 0.0343, 0.0285),
        (2048, 32, 128, 0.2288, 0.1873),
        (8192, 32, 128, 2.8707, 2.5478),
        (2048, 4, 64, 0.0622, 0.0354),
        (8192, 32, 64, 1.7139, 1.2781),
    ],
}
"""Milliseconds of the prefill kernel. The text names no batch, KV heads, mask and type: taken for
one sequence, as many KV heads, the causal mask that is the function's default, and bfloat16."""


def estimated(session: Session, name: str, point: dict[str, int], work: Work, target: str) -> float:
    """The microseconds of a point."""
    found = session.ask("estimate", point=point, kernel=name, work=asdict(work), target=target)
    if "found" not in found:
        sys.exit(f"{name} {point}: {found['failed']}")
    return float(found["found"])


def llama(name: str, **changes: int) -> Work:
    """A batch of Llama 3.1 8B."""
    return work_of(name, LLAMA, argparse.Namespace(**vars(BATCH) | changes))


def vllm_pair(session: Session) -> dict[str, Any]:
    """The published pair of vLLM beside its estimates."""
    work = llama("vllm-prefill", prompt=VLLM_PAIR["prompt"])
    points = [VLLM_PAIR["before"], *VLLM_PAIR["after"]]
    us = [estimated(session, "vllm-prefill", p, work, VLLM_PAIR["target"]) for p in points]
    saved = (VLLM_PAIR["before_ms"] - VLLM_PAIR["after_ms"]) / VLLM_PAIR["layers"] * 1e3
    return {**VLLM_PAIR, "saved_us_of_a_layer": round(saved), "estimated_us": us}


def sglang_pair(session: Session) -> dict[str, Any]:
    """The published pair of SGLang beside its estimates."""
    rows = []
    for tokens, heads, dim, before, after in SGLANG_PAIR["sizes"]:
        work = Work(heads=heads, kv_heads=heads, dim=dim, queries=[tokens], keys=[tokens])
        old = {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 4 if dim <= 64 else 8, "num_stages": 1}
        new = {"BLOCK_M": 64, "BLOCK_N": 128 if dim <= 64 else 64, "num_warps": 4, "num_stages": 3}
        us = [
            estimated(session, "sglang-prefill", point, work, SGLANG_PAIR["target"])
            for point in (old, new)
        ]
        rows.append({
            "tokens": tokens, "heads": heads, "dim": dim,
            "published_us": [round(1e3 * before, 1), round(1e3 * after, 1)], "estimated_us": us,
        })  # fmt: skip
    return {key: SGLANG_PAIR[key] for key in ("source", "target")} | {"sizes": rows}


def tuning(session: Session, target: str, name: str, trials: int) -> dict[str, Any]:
    """What the search found for one kernel on one GPU."""
    work = llama(name)
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
    return "\n".join([*lines, "", *published(found)]) + "\n"


def published(found: dict[str, Any]) -> list[str]:
    """The lines of the published pairs."""
    pair = found["vllm"]
    before, *after = pair["estimated_us"]
    factor, of_layer = pair["before_ms"] / pair["after_ms"], pair["saved_us_of_a_layer"]
    lines = [
        "## vLLM pull request 20690",
        "",
        f"An H100, a prompt of {pair['prompt']} tokens: {pair['before_ms']:.0f} ms before,"
        f" {pair['after_ms']:.0f} ms after, {factor:.2f} times for",
        f"a whole request. That is {of_layer} us saved in each of {pair['layers']} layers. The new"
        " tiles are not",
        "known; two likely ones are estimated, with the kernel of vLLM 0.33.0:",
        "",
        "| choice | us of a layer | gain | us saved | of the published | gain of a request |",
        "|---|---|---|---|---|---|",
        f"| before: {short(pair['before'])} | {before:.0f} | | | | |",
    ]
    for point, us in zip(pair["after"], after, strict=True):
        saved = before - us
        request = 1 + saved * 1e-3 * pair["layers"] / pair["after_ms"]
        shown = (f"{us:.0f}", f"{before / us:.2f}", f"{saved:.0f}", f"{saved / of_layer:.2f}")
        lines.append(f"| {' | '.join((short(point), *shown, f'{request:.2f}'))} |")
    lines += [
        "",
        "## SGLang pull request 22350",
        "",
        "An H200, the prefill kernel: 128 x 128 without a pipeline before; 64 x 64 (64 x 128 for",
        "head dim 64), 4 warps, 3 stages after. Its 1.21 is a mean over 16 sizes; six are listed:",
        "",
        "| tokens | heads | dim | published us | estimated us | published gain | estimated gain |",
        "|---|---|---|---|---|---|---|",
    ]
    gains = []
    for row in found["sglang"]["sizes"]:
        pairs = (row["published_us"], row["estimated_us"])
        gains.append([old / new for old, new in pairs])
        told = (" to ".join(map(us_of, pair)) for pair in pairs)
        shown = (*told, *(f"{gain:.2f}" for gain in gains[-1]))
        lines.append(
            f"| {row['tokens']} | {row['heads']} | {row['dim']} | " + " | ".join(shown) + " |"
        )
    means = [math.prod(column) ** (1 / len(gains)) for column in zip(*gains, strict=True)]
    right = sum((ours > 1) == (theirs > 1) for theirs, ours in gains)
    return [
        *lines,
        "",
        f"Geometric means: {means[0]:.2f} published, {means[1]:.2f} estimated. The order of before",
        f"and after is right in {right} of {len(gains)} sizes. With head dim 64 the kernel before",
        "spills 656 bytes a thread (Triton 3.7.1), which the estimate makes too slow.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, required=True, help="answers, to resume from")
    asked = parser.parse_args()
    with Session(asked.record) as session:
        found: dict[str, Any] = {"triton": triton.__version__}
        found |= {"sglang": sglang_pair(session), "vllm": vllm_pair(session)}
        found["tuned"] = [
            tuning(session, target, name, trials)
            for target in TARGETS
            for name, trials in TRIALS.items()
        ]
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(page(found))


if __name__ == "__main__":
    main()
