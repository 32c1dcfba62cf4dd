"""Compares pruners on the repeated times of an H200's final rounds: flashgen's Drop, and Optuna's
WilcoxonPruner. CPU only; a replay.

    python benchmarks/pruners.py

A final round times its configs in passes, so a pass is a step that trials share. Of each round the
first trial is the config that was fastest, with all passes; then each other config reports pass
after pass until it is pruned. `passes` is the share that was needed, `lost` how many were pruned
although their median is less than TIE slower than the best.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import optuna
from optuna.pruners import BasePruner, WilcoxonPruner

from flashgen.schedules.outcome import Outcome
from flashgen.search.history import outcomes_of
from flashgen.search.study import Drop

LOG = ROOT / "benchmarks" / "results" / "nvidia_h200" / "tuning.jsonl.gz"
TIE = 1.01


def rounds() -> list[list[Outcome]]:
    """The final rounds of the log, each the fastest first, less those of one config."""
    found: dict[object, dict[object, Outcome]] = defaultdict(dict)
    for outcome in outcomes_of(LOG, print):
        if outcome.stage == "final" and outcome.ok and outcome.passes_us:
            key = outcome.spec, outcome.problem, len(outcome.passes_us)
            found[key][outcome.config] = outcome
    ranked = [sorted(each.values(), key=median) for each in found.values()]
    return [each for each in ranked if len(each) > 1]


def median(outcome: Outcome) -> float:
    """The time of an outcome in microseconds."""
    assert outcome.timing is not None
    return outcome.timing.median_us


def pruned_after(pruner: BasePruner, best: Outcome, other: Outcome) -> int | None:
    """After how many passes a config is pruned; None if it is not."""
    study = optuna.create_study(pruner=pruner)
    first = study.ask()
    for step, value in enumerate(best.passes_us):
        first.report(value, step)
    study.tell(first, median(best))
    trial = study.ask()
    for step, value in enumerate(other.passes_us):
        trial.report(value, step)
        if trial.should_prune():
            return step + 1
    return None


def main() -> None:
    """Print a table."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore")
    made = {"Drop(1.5)": Drop(), "Drop(1.05)": Drop(1.05)}
    made |= {f"WilcoxonPruner({p})": WilcoxonPruner(p_threshold=p) for p in (0.1, 0.01)}
    some = rounds()
    print(f"{len(some)} rounds, {sum(map(len, some)) - len(some)} configs beside the best\n")
    print("| pruner | pruned | passes | lost |\n|---|---|---|---|")
    for name, pruner in made.items():
        pruned = lost = used = total = 0
        for best, *others in some:
            for other in others:
                after = pruned_after(pruner, best, other)
                pruned += after is not None
                lost += after is not None and median(other) < TIE * median(best)
                used += after or len(other.passes_us)
                total += len(other.passes_us)
        print(f"| {name} | {pruned} | {used / total:.0%} | {lost} |")


if __name__ == "__main__":
    main()
