"""FlashAttention-4 compiled without a GPU, for benchmarks/machine_code_sm100.py.

    PYTHONPATH=... python benchmarks/compile_fa4.py forward|backward HEAD_DIM none|causal FOLDER

A process of its own, whose path has flash-attn-4 and nvidia-cutlass-dsl. It leaves cubins and PTX
in FOLDER, and last shared.json: the bytes of shared memory that each kernel allocates, in the order
of compilation, which no cubin tells. FlashAttention-4 compiles when its functions are called with
fake tensors. It then asks the GPU only for its number of SMs; DataSheet answers that for a B200.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from flashgen.spec.gpu import TARGETS

B200 = TARGETS["nvidia_b200"]
KEYS = 8192
MODEL_WIDTH = 2048


class DataSheet:
    """What cutlass.utils.HardwareInfo would ask the driver, of a B200."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Takes the device number, and ignores it."""

    def get_device_multiprocessor_count(self) -> int:
        """SMs of the GPU."""
        return B200.sms

    def get_max_active_clusters(self, cluster_size: int, *_: Any, **__: Any) -> int:
        """Clusters that run at once, if each SM holds one block."""
        return B200.sms // cluster_size

    def get_l2_cache_size_in_bytes(self) -> int:
        """L2 of the GPU."""
        return B200.l2_bytes


def environment(folder: Path) -> dict[str, str]:
    """What must be set before the packages are imported."""
    return {
        "FLASH_ATTENTION_ARCH": "sm_100",
        "FLASH_ATTENTION_NUM_SMS": str(B200.sms),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
        "CUTE_DSL_ARCH": "sm_100a",
        "CUTE_DSL_KEEP_CUBIN": "1",
        "CUTE_DSL_KEEP_PTX": "1",
        "CUTE_DSL_DUMP_DIR": str(folder),
        "CUTE_DSL_CACHE_DIR": str(folder / "cache"),
    }


def count_shared(allocator: Any) -> list[int]:
    """Makes an allocator of shared memory count; one of its instances is made for each kernel."""
    found: dict[Any, int] = {}
    sums: list[int] = []
    original = allocator._smem_alloca

    def counting(self: Any, layout: Any, dtype: Any, *rest: Any, **more: Any) -> Any:
        if self not in found:
            found[self] = len(sums)
            sums.append(0)
        sums[found[self]] += cutlass_size(layout) * dtype.width // 8
        return original(self, layout, dtype, *rest, **more)

    allocator._smem_alloca = counting
    return sums


def cutlass_size(layout: Any) -> int:
    """Elements of a layout."""
    from cutlass import cute  # type: ignore[import-not-found]

    return int(cute.size(layout))


def main(direction: str, head_dim: int, mask: str, folder: Path) -> None:
    """Compile one direction, a model width of MODEL_WIDTH, in bfloat16."""
    os.environ.update(environment(folder))
    import cutlass  # type: ignore[import-not-found]
    import torch
    from flash_attn.cute import interface  # type: ignore[import-not-found]
    from torch._subclasses.fake_tensor import FakeTensorMode

    cutlass.utils.HardwareInfo = DataSheet
    shared = count_shared(cutlass.utils.SmemAllocator)
    heads, causal = MODEL_WIDTH // head_dim, mask == "causal"

    def tensor() -> torch.Tensor:
        return torch.empty(1, KEYS, heads, head_dim, dtype=torch.bfloat16, device="cuda")

    with FakeTensorMode():
        q, k, v = tensor(), tensor(), tensor()
        if direction == "forward":
            interface._flash_attn_fwd(q, k, v, causal=causal, return_lse=True)
        else:
            lse = torch.empty(1, heads, KEYS, dtype=torch.float32, device="cuda")
            interface._flash_attn_bwd(q, k, v, tensor(), tensor(), lse, causal=causal)
    (folder / "shared.json").write_text(json.dumps(shared))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("direction", choices=("forward", "backward"))
    parser.add_argument("head_dim", type=int)
    parser.add_argument("mask", choices=("none", "causal"))
    parser.add_argument("folder", type=Path)
    main(**vars(parser.parse_args()))
