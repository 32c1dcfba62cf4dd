"""Kernels of every direction, schedule, load and order that are legal on the first device, and calls of them there."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from flashgen.inputs.cache import Cache
from flashgen.inputs.features import PLAIN, Features
from flashgen.kernels.launch_backward import Backward, Delta
from flashgen.kernels.launch_cache import Append, Combine, Decode, Parts
from flashgen.kernels.launch_forward import Forward
from flashgen.kernels.plan import KernelCall
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.space import legal_configs
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from tests.makers import make_spec

SLUGS = {
    "h200": "nvidia_h200",
    "b200": "nvidia_b200",
    "a100": "nvidia_a100_sxm4_80gb",
    "rtx4090": "nvidia_geforce_rtx_4090",
}
GPU = TARGETS[SLUGS[os.environ.get("RECORDING_CUDA_DEVICES", "h200")]]
BATCH, HEADS, KV_HEADS, SEQ, DIM = 2, 4, 2, 256, 64
SCALE = 0.125

Kernel = tuple[AttentionSpec, KernelConfig]


def kernels() -> dict[str, Kernel]:
    """One for each schedule with each load, and for each order with and without a persistent grid, of each direction:
    the first of the search space.
    """
    causal = make_spec(head_dim=DIM, mask="causal")
    specs = [
        causal.for_direction(direction)
        for direction in ("forward", "backward_dkv", "backward_dq", "backward_fused")
    ]
    specs += [
        causal.for_direction("backward_delta"),
        make_spec(head_dim=DIM, bias="additive").for_direction("backward_dbias"),
    ]
    specs += [
        make_spec(head_dim=DIM, direction=direction)
        for direction in ("decode", "combine", "append")
    ]
    found: dict[str, Kernel] = {}
    for spec in specs:
        grid = legal_configs(spec, GPU, on_gpu=True)
        for by in (
            lambda config: (config.schedule, config.loads),
            lambda config: (config.order, f"persistent {config.persistent}"),
        ):
            firsts: dict[tuple[str, str], KernelConfig] = {}
            for config in grid:
                firsts.setdefault(by(config), config)
            for config in firsts.values():
                found.setdefault(f"{spec.direction} {config.label}", (spec, config))
    return found


def tensors(*shape: int, count: int = 3, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Tensors of one shape."""
    return [torch.empty(shape, device="cuda", dtype=dtype) for _ in range(count)]


def call_of(spec: AttentionSpec) -> KernelCall[object]:
    """A call of a kernel of this spec."""
    q, o, do = tensors(BATCH, HEADS, SEQ, DIM)
    k, v, *_ = tensors(BATCH, KV_HEADS, SEQ, DIM)
    diagonal = 0 if spec.causal else None
    rows, *_ = tensors(BATCH, HEADS, SEQ, count=1, dtype=torch.float32)
    lengths = torch.full((BATCH,), SEQ, dtype=torch.int32, device="cuda")
    match spec.direction:
        case "forward":
            return Forward(q=q, k=k, v=v, scale=SCALE, diagonal=diagonal)
        case "backward_delta":
            return Delta(o=o, do=do, dlse=None)
        case "decode":
            cache = Cache(k=k, v=v, lengths=lengths)
            return Decode(
                q=q[:, :, :1].contiguous(), cache=cache, scale=SCALE, sms=GPU.sms, splits=3
            )
        case "combine":
            parts, *_ = tensors(3, BATCH, HEADS, 1, DIM, count=1, dtype=torch.float32)
            lse, *_ = tensors(3, BATCH, HEADS, 1, count=1, dtype=torch.float32)
            return Combine(parts=Parts(o=parts, lse=lse), q=q[:, :, :1].contiguous())
        case "append":
            new_k, new_v, *_ = tensors(BATCH, KV_HEADS, 1, DIM)
            return Append(k=new_k, v=new_v, cache=Cache(k=k, v=v, lengths=lengths))
    bias, *_ = tensors(BATCH, HEADS, SEQ, SEQ, count=1)
    features = Features(bias=bias) if spec.bias == "additive" else PLAIN
    delta = rows.clone()
    return Backward(
        q=q, k=k, v=v, do=do, lse=rows, delta=delta, scale=SCALE, diagonal=diagonal, features=features
    )  # fmt: skip
