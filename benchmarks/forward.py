"""The forward pass on a GPU: flashgen's choice, its untuned default, and the peers, in one run.

    python benchmarks/forward.py [--dtype bf16] [--head-dim 64] [--seq 4096] [--out FILE]
    python benchmarks/forward.py --smoke      every path with tiny sizes on a CPU; measures nothing

The setting is that of the FlashAttention papers (16384 tokens, a model width of 2048), the protocol
that of flashgen/measure.py, and all contenders of one case run in alternation, so that clocks and
temperature treat them alike. Beside each time stands the error against float64 in floors (2 are
accepted): a fast wrong kernel is no contender. A time in which the GPU cannot have done the work is
refused. TFLOP/s follow the papers' convention: 4 * tokens * keys * width, halved for a causal mask.

The file written holds every figure with the GPU, its driver, clocks and power before and after each
case, the versions, the protocol, the seed and the commit. Exit codes: 0 done, 1 nothing could be
timed (of a smoke run: some contender failed), 3 no GPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashgen
from flashgen import measure, reference
from flashgen.asked import check_scale, diagonal_of
from flashgen.errors import FlashgenError
from flashgen.gpu import Gpu
from flashgen.launch import device_gpu
from flashgen.outcome import Timing
from flashgen.problem import Problem, flops, workload
from flashgen.runtime import Dispatcher
from flashgen.spec import AttentionSpec, parse_dtype
from generated.defaults import DEFAULTS
from generated.table import ARCHS, CHOICES

SEED = 20261121
JUDGED_ELEMENTS = 1 << 27
"""Elements of S compared with float64 at once, at most: 1 GiB, and the reference holds a few."""

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One spec at one size, with its inputs."""

    spec: AttentionSpec
    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Somebody's attention. detail says which kernel, as far as it can be told."""

    name: str
    attention: Attention
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Line:
    """What one contender did: a time and an error, or why there is none."""

    name: str
    detail: str
    status: str  # ok, wrong, refused, unavailable
    timing: Timing | None = None
    tflops: float | None = None
    floors: float | None = None


# The contenders


def contenders(case: Case, *, smoke: bool) -> list[Contender]:
    """All of them; whether they can run here shows when they are called."""
    backends = (
        ("SDPA flash", SDPBackend.FLASH_ATTENTION),
        ("SDPA cuDNN", SDPBackend.CUDNN_ATTENTION),
        ("SDPA efficient", SDPBackend.EFFICIENT_ATTENTION),
    )
    if smoke:
        backends = (("SDPA math", SDPBackend.MATH),)
    return [
        *(_ours(name, dispatcher_of(name), case) for name in ("flashgen", "flashgen default")),
        *(_sdpa(name, backend, case.spec.causal) for name, backend in backends),
        _flex(case, compiled=not smoke),
    ]


def dispatcher_of(name: str) -> Dispatcher:
    """That of "flashgen", which knows the tables, or of "flashgen default", which does not."""
    if name == "flashgen":
        return Dispatcher(package="generated", archs=ARCHS, choices=CHOICES, defaults=DEFAULTS)
    return Dispatcher(package="generated", archs={}, choices={}, defaults=DEFAULTS)


def _ours(name: str, dispatcher: Dispatcher, case: Case) -> Contender:
    causal = case.spec.causal
    why = dispatcher.explain(case.q, case.k, case.v, causal=causal)
    detail = str(why).splitlines()[0] if why.selection is None else (
        f"{why.selection.choice.kernel}, {why.selection.choice.source}, {why.selection.rung}"
    )  # fmt: skip
    return Contender(
        name=name,
        detail=detail,
        attention=lambda q, k, v: dispatcher.attention(q, k, v, causal=causal),
    )


def _sdpa(name: str, backend: SDPBackend, causal: bool) -> Contender:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return Contender(name=name, detail=f"torch {torch.__version__}", attention=attention)


def _flex(case: Case, *, compiled: bool) -> Contender:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = None
    if case.spec.causal:
        seq_q, seq_k = case.problem.seq_q, case.problem.seq_k
        mask = create_block_mask(_sees, None, None, seq_q, seq_k, device=case.q.device)
    function: Any = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
    return Contender(
        name="FlexAttention",
        detail=f"torch {torch.__version__}, {'compiled' if compiled else 'eager'}",
        attention=lambda q, k, v: function(q, k, v, block_mask=mask),
    )


def _sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


# One case


def run_case(
    case: Case, gpu: Gpu | None, stopwatch: measure.Stopwatch, *, smoke: bool
) -> list[Line]:
    """Judge every contender, then time those that are right in alternation."""
    lines: dict[str, Line] = {}
    racing: dict[str, measure.Run] = {}
    for contender in contenders(case, smoke=smoke):
        line = judged(contender, case)
        lines[contender.name] = line
        if line.status == "ok":
            racing[contender.name] = _bound(contender, case)
    race(lines, racing, flops(case.spec, case.problem), gpu, stopwatch)
    return list(lines.values())


def race(
    lines: dict[str, Line],
    racing: dict[str, measure.Run],
    operations: float,
    gpu: Gpu | None,
    stopwatch: measure.Stopwatch,
) -> None:
    """Time those that are right in alternation, and complete their lines."""
    # interleave stops at an implausible time; here one contender's must not cost the others theirs.
    unbounded = measure.Ceiling(operations=operations, peak_tflops=None)
    runs = list(racing.values())
    try:
        raced = measure.interleave(runs, stopwatch=stopwatch, ceilings=[unbounded] * len(runs))
    except measure.Unsteady as error:
        for name in racing:
            lines[name] = replace(lines[name], status="refused", detail=str(error))
        return
    ceiling = measure.Ceiling(operations=operations, peak_tflops=gpu.peak_tflops if gpu else None)
    for name, timing in zip(racing, [each.timing for each in raced], strict=True):
        line = lines[name]
        try:
            ceiling.refuse_above(timing)
        except measure.Implausible as error:
            lines[name] = replace(line, status="refused", detail=str(error))
        else:
            if (
                gpu is not None
            ):  # a smoke run has times of a CPU, which mean nothing and are not kept
                lines[name] = replace(line, timing=timing, tflops=timing.tflops(operations))


def _bound(contender: Contender, case: Case) -> Callable[[], Tensor]:
    return lambda: contender.attention(case.q, case.k, case.v)


def judged(contender: Contender, case: Case) -> Line:
    """Whether a contender runs here and is right."""
    try:
        o = contender.attention(case.q, case.k, case.v)
        floors = floors_of(o, case)
    except (
        torch.AcceleratorError
    ):  # the GPU's context is spoiled: nothing after it would mean anything
        raise
    except (RuntimeError, ValueError) as error:  # how torch and its peers decline
        sentence = (
            str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        )
        return Line(name=contender.name, detail=sentence[:200], status="unavailable")
    status = "ok" if floors <= reference.FLOORS_ACCEPTED else "wrong"
    return Line(name=contender.name, detail=contender.detail, status=status, floors=floors)


def floors_of(o: Tensor, case: Case) -> float:
    """The error of O in floors, over as many heads of the first sequence as fit in memory."""
    heads = max(
        1, min(case.problem.heads, JUDGED_ELEMENTS // (case.problem.seq_q * case.problem.seq_k))
    )
    q, k, v, o = (x[:1, :heads] for x in (case.q, case.k, case.v, o))
    scale = check_scale(None, case.spec.head_dim)
    diagonal = diagonal_of(case.spec.causal, case.problem.seq_q, case.problem.seq_k)
    # Most peers return no LSE; O alone is compared.
    lse = torch.zeros(o.shape[:3], device=o.device)
    return reference.judge(o, lse, q, k, v, scale=scale, diagonal=diagonal).floors


# All cases


def cases(options: argparse.Namespace, device: str) -> Iterator[Case]:
    """The specs and lengths asked for."""
    for head_dim in options.head_dim:
        for mask in ("none", "causal"):
            spec = AttentionSpec(
                dtype=parse_dtype(options.dtype), head_dim=head_dim, head_dim_v=head_dim, mask=mask
            )
            for seq in options.seq:
                problem = workload(spec, seq)
                if options.smoke:
                    problem = replace(problem, batch=1, heads=2, kv_heads=2)
                q, k, v = measure.make_inputs(spec, problem, SEED, device)
                yield Case(spec=spec, problem=problem, q=q, k=k, v=v)


class SmokeStopwatch:
    """Runs on the CPU, on a clock 100 times too fast, so that all budgets are over at once.

    It makes the times up: those of a CPU that others use as well would be refused as unsteady.
    """

    def time(self, run: measure.Run, count: int) -> list[float]:
        """A millisecond for each of `count` calls."""
        for _ in range(count):
            run()
        return [1000.0] * count

    def now(self) -> float:
        """Seconds, a hundred for each that passes."""
        return time.perf_counter() * 100

    def clock_mhz(self) -> float | None:
        """None: it has no device."""
        return None


def provenance(name: str, gpu: Gpu | None, options: argparse.Namespace) -> dict[str, Any]:
    """Where the figures come from."""
    import triton

    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "benchmark": name, "measured": gpu is not None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": asdict(gpu) if gpu else None, "protocol": measure.PROTOCOL, "seed": SEED,
        "command": shlex.join([f"benchmarks/{name}.py", *options.given]), "commit": commit or None,
        "flashgen": flashgen.__version__, "torch": torch.__version__, "triton": triton.__version__,
        "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
    }  # fmt: skip


def print_case(case: Case, lines: Sequence[Line]) -> None:
    """One table a case."""
    p = case.problem
    print(f"\n{case.spec.name}  batch {p.batch}, heads {p.heads}, seq {p.seq_q}")
    for line in lines:
        error = "" if line.floors is None else f"{line.floors:.2f} floors"
        if line.timing is None or line.tflops is None:
            print(f"  {line.name:18}{line.status:12}{error:>12}  {line.detail}")
            continue
        t = line.timing
        band = f"({t.low_us:.1f} to {t.high_us:.1f})"
        figures = f"{t.median_us:10.1f} us  {band:22}{line.tflops:8.1f} TFLOP/s"
        print(f"  {line.name:18}{figures}{error:>14}  {line.detail}")


def parsed(arguments: list[str], name: str, description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"{name}.py", description=description)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--head-dim", type=int, action="append")
    parser.add_argument("--seq", type=int, action="append")
    parser.add_argument("--index", type=int, default=0, help="of the CUDA device")
    parser.add_argument("--out", type=Path, help=f"default: benchmarks/results/<slug>/{name}.json")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes on a CPU; nothing is measured"
    )
    options = parser.parse_args(arguments)
    options.given = arguments
    options.head_dim = options.head_dim or ([64] if options.smoke else [64, 128])
    options.seq = options.seq or ([33, 64] if options.smoke else [512, 2048, 4096, 8192, 16384])
    return options


@torch.no_grad()
def main(
    arguments: list[str],
    *,
    name: str = "forward",
    description: str = (__doc__ or "").splitlines()[0],
    run_case: Callable[..., list[Line]] = run_case,
) -> int:
    """Walk the cases with a program's own run_case. backward.py is the other one."""
    options = parsed(arguments, name, description)
    gpu: Gpu | None = None
    if options.smoke:
        print("smoke run on a CPU: every path is walked with tiny sizes, and nothing is measured")
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        device, stopwatch = "cpu", SmokeStopwatch()
    elif not torch.cuda.is_available():
        print(
            f"{name}.py needs a GPU and torch sees none; --smoke runs without one", file=sys.stderr
        )
        return 3
    else:
        gpu, device = device_gpu(options.index), f"cuda:{options.index}"
        stopwatch = measure.CudaStopwatch(options.index, gpu.l2_bytes)
    record = provenance(name, gpu, options) | {"cases": []}
    with nullcontext() if gpu is None else torch.cuda.device(options.index):
        for case in cases(options, device):
            before = measure.clocks_and_power(options.index) if gpu else None
            lines = run_case(case, gpu, stopwatch, smoke=options.smoke)
            after = measure.clocks_and_power(options.index) if gpu else None
            print_case(case, lines)
            record["cases"].append({
                "spec": asdict(case.spec), "problem": asdict(case.problem),
                "before": before and asdict(before), "after": after and asdict(after),
                "lines": [asdict(line) for line in lines],
            })  # fmt: skip
            torch.compiler.reset()  # FlexAttention compiles each size; its limit of them is small
    write(record, name, options.out, gpu)
    lines_of_all = [line for case in record["cases"] for line in case["lines"]]
    done = all(line["status"] == "ok" for line in lines_of_all) if options.smoke else any(
        line["timing"] for line in lines_of_all
    )  # fmt: skip
    return 0 if done else 1


def write(record: dict[str, Any], name: str, out: Path | None, gpu: Gpu | None) -> None:
    """Write the record where it was asked for, or where results are kept (never a smoke run's)."""
    if out is None:
        if gpu is None:
            return
        out = ROOT / "benchmarks" / "results" / gpu.slug / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nwritten to {out}")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except FlashgenError as error:
        sys.exit(f"forward.py: {error}")
