"""Tune a Triton kernel of your own: the matrix product of matmul.py (docs/tuning.md).

Without --measure, configs are checked by interpretation and estimated: no GPU is needed.
"""

import argparse
import functools
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flashgen.evaluate.payloads import COMPILE_ENV, DEVICE_ENV, INTERPRET_ENV
from flashgen.evaluate.workers.answers import Done, Task
from flashgen.evaluate.workers.pool import Workers
from flashgen.files import write_whole
from flashgen.search import Budget, ProductSpace, minimize

TILES = {"ROWS": (64, 128, 256), "COLUMNS": (64, 128, 256), "DEPTH": (32, 64), "GROUP": (8,)}
VALUES = TILES | {"num_warps": (4, 8), "num_stages": (2, 3, 4)}
SPACE = ProductSpace(VALUES, lambda point: point["ROWS"] * point["COLUMNS"] <= 128 * 256)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="nvidia_h200", help="the GPU that is tuned for")
    parser.add_argument("--measure", action="store_true", help="time on this machine's GPU, 0")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--record", type=Path, default=Path("gemm.json"), help="to resume from")
    asked = parser.parse_args()
    known = json.loads(asked.record.read_text()) if asked.record.exists() else {}
    compilers = Workers(os.cpu_count() or 1, env=COMPILE_ENV)
    runner = Workers(1, env=DEVICE_ENV if asked.measure else INTERPRET_ENV)

    def ask(workers: Workers, function: str, *points: dict) -> float | None:
        """Call a function of matmul.py in child processes, for points that are not on record."""
        payloads = [{"point": {**point}, "on": [asked.target, asked.measure]} for point in points]
        keys = [f"{function} {json.dumps(payload)}" for payload in payloads]
        tasks = (Task(function=f"matmul:{function}", payload=each, limit_s=60) for each in payloads)
        due = [(k, workers.submit(t)) for k, t in zip(keys, tasks, strict=True) if k not in known]
        for key, answer in ((key, future.result()) for key, future in due):
            known[key] = answer.value if isinstance(answer, Done) else {"failed": str(answer)}
            write_whole(asked.record, json.dumps(known, indent=0))
        return known[keys[-1]].get("found")

    def microseconds(point: dict) -> float | None:
        """The time of a point, None if it fails or is wrong; prints a row of the table."""
        timed = (runner, "measure") if asked.measure else (compilers, "estimate")
        found = ask(*timed, point) if ask(runner, "check", point) else None
        print(*map("{:>10}".format, (*point.values(), found or "failed")))
        return found

    guess = functools.partial(ask, compilers, "estimate")
    with compilers, runner:
        ask(compilers, "estimate", *map(SPACE.point, SPACE))  # ahead, on all cores
        how = "measured" if asked.measure else "estimated"
        print(f"Times are {how}, in us.")
        print(*map("{:>10}".format, (*VALUES, "us")))
        best = minimize(SPACE, microseconds, Budget(trials=asked.trials), guesses=guess)
        print("The best:", best.point, f"{best.value:.1f} us, {how}")
