"""The steps of benchmarks/gpu_campaign.py: one command each, most valuable first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command, and the seconds that it may take of all runs together before later steps begin.

    least: a shorter turn would show nothing. after: steps that must be over, because this one uses
    their result. In the commands {out} is the folder, {seconds} the limit of this turn, {budget}
    what is left of `seconds`, {jobs} a number of processes that share the GPU. proof: a regular
    expression that the output must contain for exit status 0 to count as done; not required in a
    smoke run.
    """

    name: str
    command: str
    smoke: str
    seconds: float
    least: float = 30.0
    after: tuple[str, ...] = ()
    proof: str = ""


BENCH = "python -m flashgen bench"
PEERS = "--contender flashgen --contender default --contender sdpa"
LADDER = f"{PEERS} --contender flex --contender ladder"

TESTS = (
    "python -m pytest -q -p no:cacheprovider --timeout 120 --timeout-method thread "
    "-o faulthandler_timeout=100 --passed {out}/tests_passed.txt"
)
"""tests_passed.txt.failed has the failures. A worker of xdist dies of --timeout without a word:
faulthandler says before where it stood.
"""
PASSED = r"\b[1-9]\d* passed\b|\bpassed in earlier runs: [1-9]"
"""pytest exits with 0 where all tests are skipped."""

ALONE = "tests/gpu/test_evaluator_gpu.py tests/gpu/test_overhead_gpu.py"
"""These tests measure: nothing else may run on the GPU."""


def _ladder(head_dim: int, seconds: int) -> Step:
    return Step(
        name=f"ladder_d{head_dim}",
        command=f"{BENCH} --head-dim {head_dim} --seq 8192 {LADDER} "
        "--time-budget {seconds} --out {out}",
        smoke=f"{BENCH} --smoke --head-dim {head_dim} --no-causal {LADDER} --out {{out}}",
        seconds=seconds,
        least=110,  # a case is recorded as a whole
    )


STEPS = (
    Step(
        name="first_checks",
        command="python benchmarks/first_checks.py --time-budget {seconds} --out {out}",
        smoke="python benchmarks/first_checks.py --smoke --out {out}",
        seconds=180,
    ),
    _ladder(128, 300),
    _ladder(64, 360),  # more tiles fit, so more is compiled
    Step(
        name="tune",
        command="python -m flashgen tune --gpu --dtype bf16 --head-dim 128 --head-dim 64 "
        "--seq 4096 --trials 40 --time-budget {budget} --out {out}",
        smoke="python -m flashgen tune --target nvidia_l4 --head-dim 64 --no-causal --trials 1 "
        "--jobs 1 --out {out}",
        seconds=480,
        least=60,
    ),
    Step(
        name="forward_tuned",
        command=f"{BENCH} --tuned {{out}} --head-dim 128 --head-dim 64 --seq 4096 --seq 16384 "
        f"{PEERS} --time-budget {{seconds}} --out {{out}}/forward_tuned",
        smoke=f"{BENCH} --smoke --tuned {{out}} --seq 33 --no-causal --contender flashgen "
        "--out {out}/forward_tuned",
        seconds=280,
        after=("tune",),
    ),
    Step(
        name="backward",
        command=f"{BENCH} --direction backward --head-dim 128 --head-dim 64 --seq 8192 "
        f"{PEERS} --time-budget {{seconds}} --out {{out}}",
        smoke=f"{BENCH} --direction backward --smoke --seq 33 --no-causal --out {{out}}",
        seconds=200,
    ),
    Step(
        name="decode",
        command=f"{BENCH} --direction decode --head-dim 128 --batch 1 --batch 64 --seq 4096 "
        "--seq 32768 --time-budget {seconds} --out {out}",
        smoke=f"{BENCH} --direction decode --smoke --batch 2 --out {{out}}",
        seconds=120,
    ),
    Step(
        name="overhead",
        command="python benchmarks/dispatch_overhead.py --json {out}/overhead.json",
        smoke="python benchmarks/dispatch_overhead.py --json {out}/overhead.json",
        seconds=60,
    ),
    Step(
        name="tests",
        command=f"{TESTS} -n {{jobs}} tests/gpu/test_training_gpu.py tests/gpu/test_decode_gpu.py "
        "tests/gpu/test_varlen_gpu.py tests/gpu/test_forward_gpu.py "
        "tests/gpu/test_gpu_schedules.py",
        smoke=f"{TESTS} tests/gpu/test_forward_gpu.py",
        seconds=360,
        proof=PASSED,
    ),
    Step(
        name="tests_that_measure",
        command=f"{TESTS} {ALONE}",
        smoke=f"{TESTS} tests/gpu/test_overhead_gpu.py",
        seconds=120,
        proof=PASSED,
    ),
    Step(
        name="tune_backward",
        command="python -m flashgen tune --gpu --direction backward --dtype bf16 --head-dim 128 "
        "--head-dim 64 --seq 4096 --trials 24 --time-budget {budget} --out {out}/tuned_backward",
        smoke="python -m flashgen tune --target nvidia_l4 --direction backward_delta "
        "--head-dim 64 --no-causal --trials 1 --jobs 1 --out {out}/tuned_backward",
        seconds=300,
        least=60,
    ),
    Step(
        name="training",
        command=f"{BENCH} --direction both --direction backward --head-dim 128 --head-dim 64 "
        f"--seq 4096 --seq 16384 {PEERS} --time-budget {{seconds}} --out {{out}}",
        smoke=f"{BENCH} --direction both --smoke --seq 33 --no-causal --out {{out}}",
        seconds=300,
    ),
    Step(
        name="forward",
        command=f"{BENCH} --head-dim 128 --head-dim 64 --seq 4096 --seq 16384 --seq 1024 "
        f"{PEERS} --time-budget {{seconds}} --out {{out}}",
        smoke=f"{BENCH} --smoke --seq 33 --no-causal {PEERS} --out {{out}}",
        seconds=200,
    ),
    Step(
        name="freeze",
        command="python benchmarks/landscape.py freeze --state {out}/.flashgen "
        "--out {out}/landscape_estimates.json",
        smoke="python benchmarks/landscape.py freeze --smoke --state {out}/.flashgen "
        "--out {out}/landscape_estimates.json",
        seconds=300,
    ),
    Step(
        name="landscape",
        command="python benchmarks/landscape.py measure --state {out}/.flashgen "
        "--estimates {out}/landscape_estimates.json --time-budget {seconds} "
        "--out {out}/landscape_forward.json",
        smoke="python benchmarks/landscape.py measure --smoke --state {out}/.flashgen "
        "--estimates {out}/landscape_estimates.json --out {out}/landscape_forward.json",
        seconds=600,
        after=("freeze",),
    ),
    Step(
        name="gpt2",
        command="python examples/gpt2/train.py --attention eager sdpa flashgen "
        "--json {out}/gpt2.json --plot {out}/gpt2.png",
        smoke="python examples/gpt2/train.py --attention eager sdpa flashgen --device cpu "
        "--layers 1 --heads 2 --width 32 --length 32 --batch 1 --steps 2 --warm 1 "
        "--json {out}/gpt2.json",
        seconds=180,
    ),
    Step(
        name="memory",
        command="python benchmarks/memory.py --out {out}/memory.json",
        smoke="python benchmarks/memory.py --smoke --out {out}/memory.json",
        seconds=120,
    ),
)
