"""Peak memory of one attention layer, forward and backward, by sequence length, on a GPU.

    python benchmarks/memory.py [--dtype bf16] [--head-dim 64] [--heads 16] [--out FILE] [--smoke]

flashgen is compared with standard attention, which stores S and P, and torch SDPA. The result is
the peak of torch's allocator during a forward and a backward, less Q, K, V and dO, which existed
before: O, LSE, the gradients, and all intermediate tensors. It does not depend on the load of the
GPU. If a length does not fit, the result is "out of memory".

Memory is linear in the length if the bytes per token, the last column, are constant. --smoke runs
the same passes with tiny sizes on a CPU, where memory is not counted. Exit codes: 0 done, 3 no GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashgen
from flashgen import attention
from flashgen.spec.vocabulary import parse_dtype

LENGTHS = tuple(1 << power for power in range(10, 17))  # 1k to 64k
SMOKE_LENGTHS = (16, 33)

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Peak:
    """One result; peak_bytes is None if the GPU had too little memory, or nothing was counted."""

    contender: str
    seq: int
    peak_bytes: int | None
    counted: bool = True

    def row(self) -> str:
        """The line that is printed."""
        if not self.counted:
            return f"{self.contender:10}{self.seq:8}   ran on a CPU, not counted"
        if self.peak_bytes is None:
            return f"{self.contender:10}{self.seq:8}   out of memory"
        mebibytes, each = self.peak_bytes / 2**20, self.peak_bytes / self.seq
        return f"{self.contender:10}{self.seq:8}{mebibytes:13.1f} MiB{each:12.0f} bytes a token"


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(d)) V with a causal mask, each step a tensor of its own."""
    seq = q.shape[2]
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[3])
    seen = torch.ones(seq, seq, dtype=torch.bool, device=q.device).tril()
    return torch.softmax(s.masked_fill(~seen, float("-inf")), -1) @ v


CONTENDERS: dict[str, Attention] = {
    "standard": standard,
    "torch SDPA": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
    "flashgen": lambda q, k, v: attention(q, k, v, causal=True),
}


def measure(contender: str, seq: int, options: argparse.Namespace) -> Peak:
    """The peak of the second of two passes: the first compiles and loads kernels."""
    shape = (1, options.heads, seq, options.head_dim)
    dtype = getattr(torch, parse_dtype(options.dtype))
    device = "cpu" if options.smoke else "cuda"
    q, k, v = (torch.randn(shape, dtype=dtype, device=device).requires_grad_() for _ in range(3))
    do = torch.randn(shape, dtype=dtype, device=device)
    if options.smoke:
        CONTENDERS[contender](q, k, v).backward(do)
        return Peak(contender=contender, seq=seq, peak_bytes=None, counted=False)
    try:
        for _ in range(2):
            for x in (q, k, v):
                x.grad = None
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            CONTENDERS[contender](q, k, v).backward(do)
            torch.cuda.synchronize()
        return Peak(
            contender=contender, seq=seq, peak_bytes=torch.cuda.max_memory_allocated() - before
        )
    except torch.OutOfMemoryError:
        return Peak(contender=contender, seq=seq, peak_bytes=None)
    finally:
        del q, k, v, do
        gc.collect()
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", default="bf16", help="fp16, bf16 or fp32")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--seq", type=int, nargs="+", default=LENGTHS, help="lengths")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU, no figures")
    options = parser.parse_args()
    if options.smoke:
        options.heads, options.seq = 1, SMOKE_LENGTHS
    elif not torch.cuda.is_available():
        print("benchmarks/memory.py needs a GPU: torch sees none here", file=sys.stderr)
        return 3
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    peaks = []
    for contender in CONTENDERS:
        for seq in options.seq:
            peaks.append(measure(contender, seq, options))
            print(peaks[-1].row(), flush=True)
        if options.out:
            write(peaks, options)
    return 0


def write(peaks: list[Peak], options: argparse.Namespace) -> None:
    """All figures so far, and what they were taken with."""
    import triton

    record = {
        "benchmark": "memory", "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": None if options.smoke else torch.cuda.get_device_name(),
        "flashgen": flashgen.__version__,
        "torch": torch.__version__, "triton": triton.__version__, "batch": 1,
        "heads": options.heads, "head_dim": options.head_dim, "dtype": options.dtype,
        "causal": True, "peaks": [asdict(peak) for peak in peaks],
    }  # fmt: skip
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
