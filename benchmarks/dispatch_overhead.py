"""Python time of a call until its kernel is launched, compared with plain Triton and torch SDPA.

    python benchmarks/dispatch_overhead.py [--json FILE]

Rows, each the time of one call on tensors of shape (1, 1, 16, 64), the median and the least over
many batches:

    lookup           from the tensors of a resolved spec to its launcher
    Triton launch    kernel[grid](...) of a kernel with pointers: Triton's own way to its driver
    direct launch    the same kernel, launched by flashgen/kernels/direct_launch.py
    call by Triton   attention() as a whole, its kernels launched by Triton: FLASHGEN_DIRECT=0
    new kind         attention() for a kind of call not met before, of a resolved spec: launched
                     directly
    second call      the same of a kind that was met once, which binds its launch for the next
    call             attention() as a whole, of a kind that was met
    window           the same with a window
    ALiBi            the same with slopes, a tensor that is given anew
    torch SDPA       scaled_dot_product_attention as it is
    call, graph      the same two where q requires gradients
    SDPA, graph
    decode           decode() over a cache in pages: a kernel of splits, and the one that merges
    decode, window   the same with a window
    decode, sinks    the same with sinks, a tensor that is given anew
    packed           attention_varlen() of two sequences
    flash_attn       flash_attn_func of flashgen.runtime.flash_attn, as "call"
    kvcache          flash_attn_with_kvcache, as "decode", its lengths a tensor

On a GPU these are what a program waits for: kernels are queued, and awaited between the batches.
Without one the driver is one that launches nothing, so that what CUDA's driver takes is in no row
but SDPA's, which computes; and CPU tensors go the way of a GPU's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton
from torch.nn.functional import scaled_dot_product_attention
from triton.backends.compiler import GPUTarget

import flashgen
import flashgen.runtime.flash_attn as flash_attn
from flashgen import paths
from flashgen.kernels.launch import bind
from flashgen.kernels.launch_forward import Forward, forward_arguments
from flashgen.kernels.loader import load_text
from flashgen.kernels.plan import NOTHING
from flashgen.kernels.render import render
from flashgen.runtime import Dispatcher
from flashgen.runtime.call import Call
from flashgen.runtime.generated_tables import served_from
from flashgen.runtime.resolver import Resolver, key
from flashgen.runtime.varlen import attention_varlen
from flashgen.schedules.defaults import default_config, default_spec
from flashgen.spec.attention import spec_of

SHAPE = (1, 1, 16, 64)
BATCH = 25  # so few that most batches meet no other process; far from filling CUDA's queue
BATCHES = 500
SERVED_AS = "nvidia_h200"
CAUSAL = Call(causal=True)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Microseconds of one call: the median and the least of the means of all batches."""

    name: str
    median_us: float
    least_us: float


def no_launch() -> SimpleNamespace:
    """A driver of Triton's for an H200 that compiles, and launches nothing."""
    return SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        launcher_cls=lambda src, metadata: lambda *_: None,
        utils=SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": 232448, "max_num_regs": 65536},
            load_binary=lambda *_: (object(), None, 0, 0, 1024),  # without a module it loads again
            unload_module=lambda module: None,
        ),
    )


def timed(calls: dict[str, Callable[[], object]]) -> list[Cost]:
    """Time each call in batches, after one that compiles and warms caches."""
    found = []
    for name, call in calls.items():
        means = []
        for _ in range(BATCHES + 1):
            began = time.perf_counter()
            for _ in range(BATCH):
                call()
            means.append((time.perf_counter() - began) / BATCH * 1e6)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        median = statistics.median(means[1:])
        found.append(Cost(name=name, median_us=median, least_us=min(means[1:])))
    return found


def dispatcher() -> Dispatcher:
    """One that has resolved what is timed."""
    served = served_from(paths.shipped_generated_dir())
    made = Dispatcher(package="generated", archs=served.archs, choices=served.choices)
    made.attention(*tensors(), causal=True)
    return made


def tensors() -> list[torch.Tensor]:
    """Q, k and v."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [torch.randn(SHAPE, dtype=torch.bfloat16, device=device) for _ in range(3)]


def costs() -> list[Cost]:
    """All rows."""
    torch.set_num_threads(1)
    q, k, v = tensors()
    served = dispatcher()
    resolved, calls = served.resolver.launchers, served.calls
    if key(CAUSAL, q, v) not in resolved:
        raise SystemExit("the spec was not resolved, so that there is no look-up to measure")
    slopes = torch.ones(1, device=q.device)

    def call(**more: Any) -> object:
        return served.attention(q, k, v, causal=True, **more)

    def as_new() -> object:
        calls.clear()
        return call()

    def as_second() -> object:
        for kept in calls.young.values():
            kept.replay, kept._tries = kept._bind, 0
        return call()

    def sdpa() -> object:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    rows = timed({"lookup": lambda: resolved.get(key(CAUSAL, q, v))} | plain_launches(q, k, v))
    with mock.patch.dict(os.environ, {"FLASHGEN_DIRECT": "0"}):
        rows += timed({"call by Triton": call})
    rows += timed(
        {
            "new kind": as_new,
            "second call": as_second,
            "call": call,
            "window": lambda: call(window=(4, 0)),
            "ALiBi": lambda: call(alibi_slopes=slopes),
            "torch SDPA": sdpa,
        }
    )
    with torch.enable_grad():
        q.requires_grad_()
        rows += timed({"call, graph": call, "SDPA, graph": sdpa})
        q.requires_grad_(False)
    return rows + timed(decoding(served, q, k, v))


def decoding(
    served: Dispatcher, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """The calls of decode(), one sequence of 8192 keys in pages of 64, of packed ones, and of the
    drop-in.
    """
    step = q[:, :, :1].contiguous()
    pool = torch.zeros((128, 64, 1, 64), dtype=q.dtype, device=q.device)
    pages = torch.arange(128, dtype=torch.int32, device=q.device)[None]
    lengths = torch.full((1,), 8192, dtype=torch.int32, device=q.device)
    sinks = torch.zeros(1, device=q.device)
    q, k, v, of_step = (x.transpose(1, 2).contiguous() for x in (q, k, v, step))
    packed, bounds = (q[0], k[0], v[0]), torch.tensor([0, 8, 16], device=q.device).int()

    def decode(**more: Any) -> object:
        return served.decode(step, pool, pool, lengths=lengths, block_table=pages, **more)

    return {
        "decode": decode,
        "decode, window": lambda: decode(window=(4096, 0)),
        "decode, sinks": lambda: decode(sinks=sinks),
        "packed": lambda: attention_varlen(*packed, bounds, bounds, 8, 8, causal=True),
        "flash_attn": lambda: flash_attn.flash_attn_func(q, k, v, causal=True),
        "kvcache": lambda: flash_attn.flash_attn_with_kvcache(
            of_step, pool, pool, cache_seqlens=lengths, block_table=pages, causal=True
        ),
    }


def plain_launches(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """The launches of one kernel alone, its arguments laid out before."""
    spec = default_spec(spec_of("fwd_bf16_d64"))
    config = default_config(spec)
    kernel = load_text(render(spec, config))
    o, lse = torch.empty_like(q), torch.empty(SHAPE[:3], device=q.device)
    plan, call = bind(kernel, spec, config), Forward(q=q, k=k, v=v, scale=0.125, diagonal=None)
    arguments = plan.in_order(forward_arguments(plan, call, o, lse)[1] | {NOTHING: None})
    options, direct = config.launch_options(spec), plan.direct
    return {
        "Triton launch": lambda: kernel[(1,)](*arguments, *direct.constants, **options),
        "direct launch": lambda: direct(1, arguments),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    os.environ.pop("FLASHGEN_DIRECT", None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ["FLASHGEN_GPU"] = SERVED_AS
        triton.runtime.driver._active = no_launch()
        Resolver.left_to_torch = lambda self, device: False  # type: ignore[method-assign]
    with torch.no_grad():
        rows = costs()
    where = f"on {torch.cuda.get_device_name()}" if on_gpu else "without a GPU: nothing is launched"
    print(f"{where}\n{'':16}{'median us':>11}{'least us':>11}")
    for row in rows:
        print(f"{row.name:16}{row.median_us:11.2f}{row.least_us:11.2f}")
    if options.json:
        record: dict[str, Any] = {
            "shape": SHAPE, "dtype": "bfloat16", "gpu": on_gpu, "where": where,
            "flashgen": flashgen.__version__, "torch": torch.__version__,
            "triton": triton.__version__, "python": platform.python_version(),
            "machine": platform.machine(), "rows": [asdict(row) for row in rows],
        }  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
