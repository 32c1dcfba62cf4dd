"""Bounds: the least that a config takes of a GPU's shared memory and registers, with no compiler.

What they refuse cannot run; what they pass may still not fit once compiled, which compile.py tells.
"""

from __future__ import annotations

from flashgen.config import BY_KEYS, KernelConfig, o_apart
from flashgen.gpu import Gpu
from flashgen.spec import AttentionSpec, padded

REGISTERS_PER_THREAD = {"sm": 255, "gfx": 512}
"""The most 32-bit registers a thread can name, by vendor."""


def shared_bound_bytes(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> int:
    """A lower bound of the shared memory the compiled kernel takes, in bytes.

    A pipelined loop of n stages keeps n tiles of what it walks where wgmma reads them from shared
    memory, beside the tiles it holds, and the forward's s_ahead one more of K; elsewhere it keeps
    n - 1, but for AMD's order of two chained products at 4 stages, which keeps one. Of a
    block mask the lists are a load ahead of the tiles, and leave them no more than 2 stages. Of fp8
    V is turned over on its way to wgmma, and where pointers load it there is one tile of that.
    Forward and dQ hold br rows (Q, and dO) and walk K and V; dK and dV hold K and V and walk Q and
    dO. Seen in kernels compiled with Triton 3.7.1.
    """
    dims = padded(spec.head_dim), padded(spec.head_dim_v)
    of_q, of_do = (config.br * dim * spec.operand_bytes for dim in dims)
    of_k, of_v = (config.bc * dim * spec.kv_bytes for dim in dims)
    of_v //= config.v_parts
    if spec.direction in ("backward_delta", "combine", "append"):
        return 0
    if spec.direction in BY_KEYS:
        held, walked = of_k + of_v, (of_q, of_do)
    else:
        alone = spec.direction in ("forward", "decode")
        held, walked = of_q if alone else of_q + of_do, (of_k, of_v)
    if config.schedule == "hopper":
        beside = of_do if spec.direction == "forward" and o_apart(spec, config) else 0
        if spec.direction == "backward_fused":  # dS passes through shared memory
            beside = config.br * config.bc * spec.element_bytes
        return held + beside + config.num_stages * sum(walked)
    if config.schedule == "fa1" or config.num_stages == 1 or spec.direction == "backward_dbias":
        return max(walked)
    if spec.paged:  # the table is a load ahead of the pages, and takes stages for itself
        return max(walked)
    stages = min(config.num_stages, 2) if spec.block_mask else config.num_stages
    if _uses_wgmma(spec, config, gpu):
        next_k = ("forward", "s_ahead", "descriptor")
        ahead = of_k if (spec.direction, config.schedule, config.loads) == next_k else 0
        # O of a tile is stored from a place of its own while Q of the next is loaded.
        of_o = config.br * dims[1] * spec.element_bytes
        stored = of_o if config.persistent and config.loads == "descriptor" else 0
        if spec.fp8 and config.loads == "pointer":
            return held + stages * of_k + of_v
        return held + stages * sum(walked) + ahead + stored
    chained = not gpu.is_nvidia and config.num_stages == 4
    return (1 if chained else stages - 1) * sum(walked)


def _uses_wgmma(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> bool:
    """Whether the products become warpgroup instructions: 64 rows and 4 warps at least, operands
    of 16 bits or float8_e4m3.
    """
    return (
        gpu.arch == "sm_90"
        and spec.element_bytes == 2
        and spec.kv_bytes == spec.operand_bytes
        and (config.bc if spec.direction in BY_KEYS else config.br) >= 64
        and config.num_warps >= 4
    )


def too_much_shared(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> str | None:
    """Why the config's tiles cannot fit a block's shared memory; None where they may."""
    need = shared_bound_bytes(spec, config, gpu)
    if need > gpu.shared_per_block:
        return (
            f"the tiles of Q, K and V need {need} bytes of shared memory at least: "
            f"{gpu.slug} has {gpu.shared_per_block} a block"
        )
    return None


def too_many_registers(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> str | None:
    """Why the config's accumulators cannot fit a thread's registers; None where they may."""
    if config.schedule == "auto" and gpu.arch == "sm_100":
        return None  # accumulators lie in tensor memory, which Triton reads by parts
    threads = config.num_warps * gpu.warp_size
    what, elements = _accumulators(spec, config)
    need = elements // threads
    limit = REGISTERS_PER_THREAD["sm" if gpu.is_nvidia else "gfx"]
    limit = min(limit, gpu.registers_per_sm // threads)
    if config.schedule == "hopper":
        limit = config.register_split[0]
    if need > limit:
        return (
            f"the float32 accumulators of {what} need {need} registers a thread: "
            f"num_warps={config.num_warps} leaves {limit}"
        )
    return None


def _accumulators(spec: AttentionSpec, config: KernelConfig) -> tuple[str, int]:
    """What a program holds in registers at once, in words and in float32 elements.

    The backward needs P until dP is there, so two tiles of scores.
    """
    dim, dim_v = padded(spec.head_dim), padded(spec.head_dim_v)
    scores = config.br * config.bc
    if (config.schedule, spec.direction) == ("hopper", "forward"):
        # S of a tile is written while P of the one before, rounded, is being multiplied.
        return "O, S and P", config.br * dim_v + scores + scores // 2
    if spec.direction in ("forward", "decode"):
        return "O and S", config.br * dim_v // config.v_parts + scores
    if spec.direction == "combine":
        return "the parts of O", config.bc * dim_v
    if spec.direction == "append":
        return "K or V", config.br * max(dim, dim_v)
    if spec.direction == "backward_delta":
        return "dO * O", config.br * dim_v
    if spec.direction == "backward_dq":
        return "dQ, P and dP", config.br * dim + 2 * scores
    if spec.direction == "backward_dbias":
        return "dBias, P and dP", 3 * scores
    return "dK, dV, P and dP", config.bc * (dim + dim_v) + 2 * scores
