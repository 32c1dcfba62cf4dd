"""The host's time of a kept attention() without gradients beside torch's SDPA with its flash kernel, in microseconds:

    RECORDING_CUDA_QUIET=1 python -m tests.driver.overhead [HEAD_DIM]

Neither call waits, and the driver neither checks nor records, so what is timed is the path to the launch. CPU time, in
20 interleaved blocks, prints one JSON object.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashgen

BLOCKS, CALLS = 20, 500


def block(call: Callable[[], object]) -> float:
    """CPU microseconds of one call."""
    begin = time.thread_time()
    for _ in range(CALLS):
        call()
    return (time.thread_time() - begin) / CALLS * 1e6


def main(head_dim: int) -> None:
    q, k, v = (
        torch.empty(4, 16, 2048, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )

    def ours() -> object:
        return flashgen.attention(q, k, v, causal=True)

    def sdpa() -> object:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for call in (ours, sdpa):
            for _ in range(50):
                call()
        pairs = [(block(ours), block(sdpa)) for _ in range(BLOCKS)]
    ratio = statistics.median(mine / theirs for mine, theirs in pairs)
    mine, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(json.dumps({"flashgen_us": mine, "sdpa_us": theirs, "ratio": ratio}))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 128)
