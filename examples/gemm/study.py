"""The matrix product of matmul.py in a study of Optuna: times are estimated, for an H200."""

import argparse
import sys
from pathlib import Path

import optuna

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from matmul import estimate

from flashgen.search import KernelSampler, ProductSpace

VALUES = {"ROWS": (64, 128, 256), "COLUMNS": (64, 128, 256), "DEPTH": (32, 64), "GROUP": (8,)}
VALUES |= {"num_warps": (4, 8), "num_stages": (2, 3, 4)}
SPACE = ProductSpace(VALUES, lambda point: point["ROWS"] * point["COLUMNS"] <= 128 * 256)


def objective(trial: optuna.Trial) -> float:
    """The estimated microseconds of a trial's kernel."""
    point = {name: trial.suggest_categorical(name, some) for name, some in VALUES.items()}
    return estimate({"point": point, "on": ["nvidia_h200", False]})["found"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=12, help="kernels that are compiled")
    asked = parser.parse_args()
    study = optuna.create_study(sampler=KernelSampler(SPACE))
    study.optimize(objective, n_trials=asked.trials)
    print("The best:", study.best_params, f"{study.best_value:.1f} us, estimated")
