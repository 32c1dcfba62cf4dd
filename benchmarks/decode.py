"""Decode on a GPU: flashgen's kernels over contiguous and paged caches, and the peers, in one run.

    python benchmarks/decode.py [--dtype bf16] [--head-dim 128] [--batch 64] [--seq 8192]
    python benchmarks/decode.py --smoke       every path with tiny sizes on a CPU; measures nothing

One query a sequence, 32 query heads to 8 of K and V, batches from 1 to 128 and caches from 1k to
128k keys, all of them full; cases whose K and V take more than --gigabytes are left out, and named.
A decode is bound by the bytes of K and V: beside each time stand GB/s, and their share of what a
copy of COPY_BYTES reached in the same run, reading and writing counted. Protocol, judging and file
are those of forward.py, beside this one; a time in which the GPU cannot have read K and V is
refused. Exit codes: as of forward.py.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import forward as shared
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flashgen import decoding, measure, reference
from flashgen.decoding import Cache
from flashgen.errors import FlashgenError
from flashgen.gpu import Gpu
from flashgen.grid import bytes_moved
from flashgen.launch import device_gpu
from flashgen.launch_decode import Decode
from flashgen.measure_decode import in_pages, make_decode
from flashgen.outcome import Timing
from flashgen.problem import Problem, flops
from flashgen.runtime import Dispatcher
from flashgen.spec import AttentionSpec, parse_dtype

HEADS, KV_HEADS = 32, 8
PAGE_SIZES = (16, 256)
COPY_BYTES = 1 << 30

Attention = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One batch and length, with its inputs; paged: the same cache by page size."""

    spec: AttentionSpec
    problem: Problem
    call: Decode
    paged: dict[int, Cache]

    @property
    def bytes(self) -> float:
        """What a decode must read and write."""
        return bytes_moved(self.spec, self.problem)


@dataclass(frozen=True, kw_only=True)
class Line:
    """What one contender did. share: of the copy's GB/s."""

    name: str
    detail: str
    status: str  # ok, wrong, refused, unavailable
    timing: Timing | None = None
    gbs: float | None = None
    share: float | None = None
    floors: float | None = None


def contenders(case: Case) -> dict[str, tuple[str, Attention]]:
    """By name: which kernel, as far as it can be told, and a call that returns O."""
    dispatcher = shared.dispatcher_of("flashgen")
    q, cache = case.call.q, case.call.cache
    found = {"flashgen": _ours(dispatcher, q, cache)}
    for size, paged in case.paged.items():
        found[f"flashgen, pages of {size}"] = _ours(dispatcher, q, paged)
    sdpa = functools.partial(scaled_dot_product_attention, q, cache.k, cache.v, enable_gqa=True)
    found["SDPA"] = f"torch {torch.__version__}, by its own choice", sdpa
    try:
        package: Any = importlib.import_module("flash_attn")
    except ImportError:
        return found
    turned = [x.transpose(1, 2).contiguous() for x in (q, cache.k, cache.v)]

    def flash_attn() -> Tensor:
        o: Tensor = package.flash_attn_with_kvcache(*turned, cache_seqlens=cache.lengths)
        return o.transpose(1, 2)

    return found | {"flash_attn": (f"flash_attn {package.__version__}", flash_attn)}


def _ours(dispatcher: Dispatcher, q: Tensor, cache: Cache) -> tuple[str, Attention]:
    k, v = (x.transpose(1, 2) if cache.paged else x for x in (cache.k, cache.v))
    beside = {"lengths": cache.lengths, "block_table": cache.block_table}
    why = dispatcher.explain_decode(q, k, v, **beside)
    detail = str(why) if why.selection is None else (
        f"{why.selection.choice.kernel}, {why.selection.choice.source}, {why.selection.rung}"
    )  # fmt: skip
    return detail, lambda: dispatcher.decode(q, k, v, **beside)


def run_case(
    case: Case, gpu: Gpu | None, stopwatch: measure.Stopwatch, copy_gbs: float | None
) -> list[Line]:
    """Judge every contender, then time those that are right in alternation."""
    lines: dict[str, Line] = {}
    racing: dict[str, Attention] = {}
    for name, (detail, attention) in contenders(case).items():
        lines[name] = judged(name, detail, attention, case)
        if lines[name].status == "ok":
            racing[name] = attention
    ceiling = measure.Ceiling(operations=flops(case.spec, case.problem), peak_tflops=None)
    try:
        raced = measure.interleave(
            list(racing.values()), stopwatch=stopwatch, ceilings=[ceiling] * len(racing)
        )
    except measure.Unsteady as error:
        refused = {n: replace(lines[n], status="refused", detail=str(error)) for n in racing}
        return list((lines | refused).values())
    for name, each in zip(racing, raced, strict=True):
        if gpu is not None:  # the times of a smoke run mean nothing
            lines[name] = timed(lines[name], each.timing, case, gpu, copy_gbs)
    return list(lines.values())


def timed(line: Line, timing: Timing, case: Case, gpu: Gpu, copy_gbs: float | None) -> Line:
    """A line with its time, refused where the memory is not so fast."""
    gbs = case.bytes / timing.median_us * 1e-3
    if gpu.bandwidth_gbs and gbs > measure.PEAK_MARGIN * gpu.bandwidth_gbs:
        return replace(
            line, status="refused", detail=f"{gbs:.0f} GB/s: it cannot have read K and V"
        )
    share = gbs / copy_gbs if copy_gbs else None
    return replace(line, timing=timing, gbs=gbs, share=share)


def judged(name: str, detail: str, attention: Attention, case: Case) -> Line:
    """Whether a contender runs here and is right, by the first and last sequences."""
    try:
        o = attention()
    except torch.AcceleratorError:  # the GPU's context is spoiled
        raise
    except (RuntimeError, ValueError, TypeError) as error:  # how torch and its peers decline
        sentence = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Line(name=name, detail=sentence[:200], status="unavailable")
    floors = 0.0
    for number in {0, case.problem.batch - 1}:
        one = slice(number, number + 1)
        k, v = decoding.sequence(case.call.cache, number, case.problem.seq_k)
        lse = torch.zeros(o[one].shape[:3], device=o.device)  # most peers return none
        verdict = reference.judge(
            o[one], lse, case.call.q[one], k, v, scale=case.call.scale, diagonal=None
        )
        floors = max(floors, verdict.floors)
    status = "ok" if floors <= reference.FLOORS_ACCEPTED else "wrong"
    return Line(name=name, detail=detail, status=status, floors=floors)


def copy_rate(device: str, stopwatch: measure.Stopwatch) -> float:
    """GB/s of a large copy, bytes read and bytes written."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    ceiling = measure.Ceiling(operations=0.0, peak_tflops=None)
    timing = measure.measure(
        lambda: target.copy_(source), effort="timed", stopwatch=stopwatch, ceiling=ceiling
    )
    return 2 * COPY_BYTES / timing.median_us * 1e-3


def cases(options: argparse.Namespace, device: str, sms: int) -> Iterator[Case]:
    """The batches and lengths asked for, as far as they fit."""
    for head_dim in options.head_dim:
        spec = AttentionSpec(
            direction="decode",
            dtype=parse_dtype(options.dtype),  # type: ignore[arg-type]  # it returns no other
            head_dim=head_dim,
            head_dim_v=head_dim,
            mask="none",
        )
        for batch in options.batch:
            for seq in options.seq:
                problem = Problem(batch=batch, heads=HEADS, kv_heads=KV_HEADS, seq_q=1, seq_k=seq)
                if bytes_moved(spec, problem) > options.gigabytes * 1e9:
                    print(f"\nbatch {batch}, {seq} keys: left out, K and V take too much memory")
                    continue
                call = make_decode(spec, problem, shared.SEED, device, sms)
                paged = {s: in_pages(call.cache, s, shared.SEED) for s in PAGE_SIZES}
                yield Case(spec=spec, problem=problem, call=call, paged=paged)


def print_case(case: Case, lines: Sequence[Line]) -> None:
    """One table a case."""
    p = case.problem
    print(f"\n{case.spec.name}  batch {p.batch}, heads {p.heads}/{p.kv_heads}, {p.seq_k} keys")
    for line in lines:
        error = "" if line.floors is None else f"{line.floors:.2f} floors"
        if line.timing is None or line.gbs is None:
            print(f"  {line.name:24}{line.status:12}{error:>12}  {line.detail}")
            continue
        share = "" if line.share is None else f"{line.share:.0%} of copy"
        figures = f"{line.timing.median_us:10.1f} us{line.gbs:9.0f} GB/s{share:>14}"
        print(f"  {line.name:24}{figures}{error:>14}  {line.detail}")


def parsed(arguments: list[str]) -> argparse.Namespace:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="decode.py", description=description)
    parser.add_argument("--dtype", default="bf16")
    for option in ("--head-dim", "--batch", "--seq"):
        parser.add_argument(option, type=int, action="append")
    parser.add_argument("--gigabytes", type=float, default=24.0, help="of K and V, at most")
    parser.add_argument("--index", type=int, default=0, help="of the CUDA device")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<slug>/decode.json")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU; no measuring")
    options = parser.parse_args(arguments)
    options.given = arguments
    options.head_dim = options.head_dim or ([16] if options.smoke else [128])
    options.batch = options.batch or ([1, 2] if options.smoke else [1, 4, 16, 64, 128])
    options.seq = options.seq or ([33] if options.smoke else [1 << n for n in range(10, 18)])
    return options


@torch.no_grad()
def main(arguments: list[str]) -> int:
    """Walk the cases; forward.py's main does so for attention."""
    options = parsed(arguments)
    gpu: Gpu | None = None
    stopwatch: measure.Stopwatch = shared.SmokeStopwatch()
    device, copy_gbs = "cpu", None
    if options.smoke:
        print("smoke run on a CPU: every path is walked with tiny sizes, and nothing is measured")
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        print(
            "decode.py needs a GPU and torch sees none; --smoke runs without one", file=sys.stderr
        )
        return 3
    else:
        gpu, device = device_gpu(options.index), f"cuda:{options.index}"
        stopwatch = measure.CudaStopwatch(options.index, gpu.l2_bytes)
    record: dict[str, Any] = shared.provenance("decode", gpu, options) | {"cases": []}
    with nullcontext() if gpu is None else torch.cuda.device(options.index):
        if gpu is not None:
            copy_gbs = copy_rate(device, stopwatch)
            print(f"a copy of {COPY_BYTES >> 20} MiB moves {copy_gbs:.0f} GB/s")
        record["copy_gbs"] = copy_gbs
        for case in cases(options, device, gpu.sms if gpu else 1):
            before = measure.clocks_and_power(options.index) if gpu else None
            lines = run_case(case, gpu, stopwatch, copy_gbs)
            after = measure.clocks_and_power(options.index) if gpu else None
            print_case(case, lines)
            record["cases"].append({
                "spec": asdict(case.spec), "problem": asdict(case.problem),
                "before": before and asdict(before), "after": after and asdict(after),
                "lines": [asdict(line) for line in lines],
            })  # fmt: skip
    shared.write(record, "decode", options.out, gpu)
    every = [line for case in record["cases"] for line in case["lines"]]
    if options.smoke:
        return 0 if all(line["status"] == "ok" for line in every) else 1
    return 0 if any(line["timing"] for line in every) else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except FlashgenError as error:
        sys.exit(f"decode.py: {error}")
