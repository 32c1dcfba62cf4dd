"""What `flashgen bench` measured on a GPU, as bars: flashgen beside the other implementations.

    python benchmarks/measured.py benchmarks/results/nvidia_h200/bench.json

Writes measured.svg beside the file: a panel per case of one length, in TFLOP/s. Every bar is from
that file, and is left out where it was wrong or not measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flashgen.report.charts import panels, save

BARS = {
    "flashgen, schedule hopper": (
        "ladder: hopper", "ladder: hopper, grouped", "ladder: two: hopper",
    ),
    "the same, fused": ("ladder: fused: hopper",),
    "flashgen, plain kernels": ("flashgen",),
    "cuDNN (torch)": ("SDPA cuDNN",),
    "FlexAttention (torch)": ("FlexAttention",),
    "FlashAttention-2 (torch)": ("SDPA flash",),
}  # fmt: skip
"""The bars of a panel, each the fastest of these contenders: of the steps of schedule hopper those
that the table of the H200 chose. The fused backward adds to dQ in no fixed order, so the tables
leave it out.
"""
COLOURS = ("#0072b2", "#4a9cc9", "#93c5e0", "0.6", "0.6", "0.6")
PANEL_INCHES = (4.4, 1.8)


def rates(case: Mapping[str, Any]) -> dict[str, float]:
    """TFLOP/s by bar, of those that were right and measured."""
    measured = {
        line["name"]: line["tflops"]
        for line in case["lines"]
        if line["status"] == "ok" and line["tflops"]
    }
    return {
        bar: max(measured[name] for name in names if name in measured)
        for bar, names in BARS.items()
        if not measured.keys().isdisjoint(names)
    }


def title(case: Mapping[str, Any]) -> str:
    """The case in words."""
    spec, problem = case["spec"], case["problem"]
    mask = "causal" if spec["mask"] == "causal" else "no mask"
    return f"{case['direction']}, head dim {spec['head_dim']}, {mask}, {problem['seq_k']:,} keys"


def draw(cases: Sequence[Mapping[str, Any]], run: Mapping[str, Any], file: Path) -> None:
    """Write the picture."""
    figure, found = panels(len(cases), columns=2, inches=PANEL_INCHES)
    most = max(rate for case in cases for rate in rates(case).values())
    for axes, case in zip(found, cases, strict=True):
        held = rates(case)
        names = [name for name in BARS if name in held]
        colours = dict(zip(BARS, COLOURS, strict=True))
        drawn = axes.barh(
            names, [held[name] for name in names], color=[colours[name] for name in names]
        )
        axes.bar_label(drawn, fmt="%.0f", padding=3, fontsize=7)
        axes.set_title(title(case), fontsize=8)
        axes.set_xlim(0, 1.12 * most)
        axes.invert_yaxis()
        axes.tick_params(labelsize=7, length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    gpu = run["gpu"]["name"]
    figure.supxlabel(
        f"TFLOP/s, measured on an {gpu} on {run['date'][:10]}, {run['dtype']}; "
        f"Triton {run['triton']}, torch {run['torch']}",
        fontsize=7,
    )
    save(figure, file, "bench")


def main() -> int:
    """Draw the picture of a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bench", type=Path, help="bench.json")
    path = parser.parse_args().bench
    held = json.loads(path.read_text(encoding="utf-8"))
    cases = [case for case in held["cases"] if case["direction"] != "decode"]
    file = path.with_name("measured.svg")
    draw(cases, held["runs"][0], file)
    print(f"written: {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
