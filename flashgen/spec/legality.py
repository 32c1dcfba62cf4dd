"""Which config can compute which spec on which GPU: why_illegal.

The space, the renderer, the evaluators, the table and the runtime fallback all call it. It is a
bound, without a compiler, on the shared memory and registers a config needs: what it rejects cannot
run, and what it passes may still not fit once compiled, which compile/compiler.py finds out.
"""

from __future__ import annotations

from flashgen.spec.attention import AttentionSpec
from flashgen.spec.block_mask import BLOCK
from flashgen.spec.config import (
    AHEAD,
    AUTO_BR,
    AUTO_WARPS,
    BY_KEYS,
    FP8_DEPTH,
    TENSOR_COLUMNS,
    TENSOR_ROWS,
    TILES,
    WARPGROUP,
    WARPGROUP_ROWS,
    KernelConfig,
    k_pieces,
    o_apart,
    shares_keys,
    sum_columns,
    sums_one,
    walked_side,
)
from flashgen.spec.gpu import Gpu
from flashgen.spec.numeric_class import why_other_class, why_other_products
from flashgen.spec.vocabulary import DECODING, padded
from flashgen.spec.whole_rows import MMA_SYNC, WIDEST, k_parts, o_parts, why_no_rows

BLACKWELL = ("sm_100", "sm_103")
"""Architectures with tcgen05 and tensor memory that Triton compiles for."""
AMPERE_WARPS = (4, 8)
"""Warps of schedule ampere, 16 rows each."""
ROLES_BYTES = 512
"""Shared memory that Triton 3.7.1 takes for warps with roles; each barrier takes 8 bytes more."""

REGISTERS_PER_THREAD = {"sm_": 255, "gfx9": 512, "gfx1": 256}
"""The most 32-bit registers a thread can name: of NVIDIA, CDNA and RDNA."""


def shared_bound_bytes(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> int:
    """A lower bound of the shared memory the compiled kernel takes, in bytes.

    A pipelined loop of n stages keeps n tiles of what it walks where products read them in shared
    memory (_reads_shared), beside the tiles it holds, and the forward's s_ahead one more of K, but
    for 128 keys of head dim 128. Elsewhere it keeps n - 1, but for AMD's order of two chained
    products at 4 stages, which keeps one. Of a block mask the lists are a load ahead of the tiles,
    and leave them no more than 2 stages. Of fp8 V is turned over on its way to wgmma, and where
    pointers load it there is one tile of that. Forward and dQ hold br rows (Q, and dO) and walk K
    and V; dK and dV hold K and V and walk Q and dO. Seen in kernels compiled with Triton 3.7.1.
    """
    dims = padded(spec.head_dim), padded(spec.head_dim_v)
    if config.whole_rows:  # the parts need less padding
        dims = k_parts(spec, config)[-1], o_parts(spec, config)[-1]
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
    if config.schedule == "ampere":  # Q, and one place for each of K and V
        return (
            config.br * spec.head_dim * spec.element_bytes
            + config.bc * (spec.head_dim + spec.head_dim_v) * spec.element_bytes
        )
    if config.schedule == "blackwell" and spec.direction == "forward":
        # One ring, in which K and V take turns.
        if k_pieces(spec) > 1:
            of_q, of_k = (each // dims[0] * 64 * k_pieces(spec) for each in (of_q, of_k))
        return of_q + config.num_stages * of_k + of_do * o_apart(spec, config)
    if config.schedule == "blackwell":
        of_ds = config.br * config.bc * spec.element_bytes
        beside = ROLES_BYTES + (of_ds if spec.direction == "backward_fused" else 0)
        if spec.direction in BY_KEYS:  # LSE and delta of a tile of rows, in float32
            beside += config.num_stages * 2 * config.br * 4
        if walked_side(spec) == 64 and spec.direction == "backward_dq":  # V has one place
            return held + beside + config.num_stages * of_k + of_v
        if sums_one(spec):  # dO has one place
            return held + beside + config.num_stages * of_q + of_do
        return held + beside + config.num_stages * sum(walked)
    if config.schedule == "hopper":
        beside = of_do if spec.direction == "forward" and o_apart(spec, config) else 0
        beside += config.br * dims[1] * 4 * spec.invariant  # the total of closed segments, float32
        of_p = config.br * config.bc * spec.element_bytes
        if spec.direction in BY_KEYS and shares_keys(spec):  # P in two places, and dS
            beside = 3 * of_p
        elif spec.direction == "backward_fused":  # dS passes through shared memory, in two places
            beside = 2 * of_p
        if spec.direction == "backward_dq" and shares_keys(spec):  # V has one place
            return held + config.num_stages * of_k + of_v
        return held + beside + config.num_stages * sum(walked)
    if config.schedule == "fa1" or config.num_stages == 1 or spec.direction == "backward_dbias":
        return max(walked)
    if spec.paged:  # the table is a load ahead of the pages, and takes stages for itself
        return max(walked)
    stages = min(config.num_stages, 2) if spec.block_mask else config.num_stages
    if _reads_shared(spec, config, gpu):
        next_k = ("forward", "s_ahead", "descriptor")
        ahead = of_k if (spec.direction, config.schedule, config.loads) == next_k else 0
        if dims[0] == config.bc == 128:  # the template frees the first K before the loop
            ahead = 0
        # O of a tile is stored from a separate buffer while Q of the next is loaded.
        of_o = config.br * dims[1] * spec.element_bytes
        stored = of_o if config.persistent and config.loads == "descriptor" else 0
        if spec.fp8 and config.loads == "pointer":
            return held + stages * of_k + of_v
        return held + stages * sum(walked) + ahead + stored
    chained = not gpu.is_nvidia and config.num_stages == 4
    return (1 if chained else stages - 1) * sum(walked)


def _reads_shared(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> bool:
    """Whether the products read their operands in shared memory, by wgmma or tcgen05: 64 rows and 4
    warps at least, operands of 16 bits or float8_e4m3. With fewer rows of Q, not all products of dK
    and dV do on sm_100.
    """
    by_keys = spec.direction in BY_KEYS
    side = config.bc if by_keys else config.br
    if by_keys and gpu.arch in BLACKWELL:
        side = min(side, config.br)
    return (
        gpu.arch in ("sm_90", *BLACKWELL)
        and spec.element_bytes == 2
        and spec.kv_bytes == spec.operand_bytes
        and side >= 64
        and config.num_warps >= 4
    )


def too_much_shared(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> str | None:
    """Why the config's tiles cannot fit a block's shared memory; None if they may."""
    need = shared_bound_bytes(spec, config, gpu)
    if need > gpu.shared_per_block:
        return (
            f"the tiles of Q, K and V need {need} bytes of shared memory at least: "
            f"{gpu.slug} has {gpu.shared_per_block} a block"
        )
    return None


PER_SCORE = ("bias", "boolean-mask", "dropout", "fp8")
"""Features that load or compute a value for each score, or convert each operand."""


def may_spill(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> str | None:
    """Why the features of a spec may not fit a tile that was chosen for its plain spec; None where
    they fit.

    A bound on the float32 accumulators of a thread. Of the kernels that the tables' tiles and the
    features make, compiled with Triton 3.7.1 for sm_80, sm_89, sm_90, sm_100 and sm_120, those
    within the bound spill in no main loop. tests/cpu/compile/test_plain_tiles.py compiles them.
    """
    what, elements = _accumulators(spec, config)
    held = elements // (config.num_warps * gpu.warp_size)
    words = spec.feature_words
    if set(words) & set(PER_SCORE) or len(words) > 2:
        room = 48
    elif config.loads == "descriptor":
        room = 160 if spec.direction == "forward" else 128
    else:
        # Other head dims have a mask on every load, which alone is safe: of tiles of d64 to d128 at
        # head dims 40, 80 and 112, compiled for sm_80, sm_89 and sm_100, none within 96 spilled in
        # a loop.
        exact = not words or (
            padded(spec.head_dim) == spec.head_dim and padded(spec.head_dim_v) == spec.head_dim_v
        )
        room = 96 if exact else 80
    if held > room:
        return f"it may spill: {what} take {held} registers a thread, of which {room} are safe"
    if spec.bias != "none":  # its tiles are loaded ahead too, in 4 bytes at most
        ahead = 4 * config.br * config.bc * max(1, config.num_stages - 1)
        need = shared_bound_bytes(spec, config, gpu) + ahead
        if need > gpu.shared_per_block:
            return (
                f"the tiles of Q, K, V and the bias need {need} bytes of shared memory: "
                f"{gpu.slug} has {gpu.shared_per_block} a block"
            )
    return None


def too_many_registers(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> str | None:
    """Why the config's accumulators cannot fit a thread's registers; None if they may."""
    if config.schedule in ("auto", "blackwell") and gpu.arch in BLACKWELL:
        return None  # accumulators lie in tensor memory, which Triton reads by parts
    threads = config.num_warps * gpu.warp_size
    what, elements = _accumulators(spec, config)
    need = elements // threads
    limit = next(most for arch, most in REGISTERS_PER_THREAD.items() if gpu.arch.startswith(arch))
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
    sums = config.bc * (dim + dim_v)
    if config.schedule == "hopper" and shares_keys(spec) and spec.direction == "backward_fused":
        return "dK, dV and dQ", sums + config.br * dim  # S and dP are over by then
    return "dK, dV, P and dP", sums + 2 * scores


def why_illegal(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> str | None:
    """Why this config cannot run this spec on this GPU, in one sentence.

    Checks what needs no compiler: the variants that templates have, the instruction set, and lower
    bounds of shared memory and registers.

    Args:
        spec: what is computed.
        config: how it is computed.
        gpu: what the kernel must fit.

    Returns:
        The sentence; None if it may run.

    Raises:
        Nothing: spec, config and gpu were checked when they were made.

    Examples:
        >>> from flashgen.spec import TARGETS, AttentionSpec, why_illegal
        >>> from flashgen.spec.defaults import default_config
        >>> spec = AttentionSpec(dtype="bfloat16", head_dim=64, head_dim_v=64, mask="causal")
        >>> print(why_illegal(spec, default_config(spec), TARGETS["nvidia_h200"]))
        None
    """
    for judge in _OF_TEMPLATES:
        if (reason := judge(spec, config)) is not None:
            return reason
    if (reason := why_unserved(spec, gpu)) is not None:
        return reason
    for judge_on in (_arch, why_other_products, too_much_shared, too_many_registers):
        if (reason := judge_on(spec, config, gpu)) is not None:
            return reason
    return None


def why_unserved(spec: AttentionSpec, gpu: Gpu) -> str | None:
    """Why no config runs this spec on this GPU, in one sentence; None if one may."""
    if spec.invariant and not gpu.is_nvidia:
        return f"invariant needs a GPU of NVIDIA, whose code is compared: {gpu.slug} is {gpu.arch}"
    if spec.fp8 and not (gpu.is_nvidia and gpu.capability >= 89):
        other = {
            "gfx942": ", which multiplies e4m3fnuz, another type",
            "gfx950": ", of whose float8_e4m3 matrix instructions flashgen has no variant",
        }.get(gpu.arch, "")
        return (
            "fp8 is made of the float8_e4m3 matrix instructions of sm_89 and later: "
            f"{gpu.slug} is {gpu.arch}{other}"
        )
    return None


def _v_parts(spec: AttentionSpec, config: KernelConfig) -> str | None:
    if config.v_parts == 1:
        return None
    if config.takes_heads or config.order == "head_reversal":
        return (
            "v_parts needs order plain or longest_first, and excludes persistent: "
            f"got {_order_of(config)}"
        )
    ways = (spec.direction, config.schedule, config.loads)
    if ways not in (("forward", "fa2", "pointer"), ("decode", "fa2", "pointer")):
        return (
            "v_parts needs direction forward or decode, schedule fa2 and pointer loads: "
            f"got {', '.join(ways)}"
        )
    if padded(spec.head_dim_v) // config.v_parts < 64:
        return (
            "a part of V has 64 columns at least: "
            f"got head_dim_v {spec.head_dim_v} and v_parts {config.v_parts}"
        )
    return None


def _head_dims(spec: AttentionSpec, config: KernelConfig) -> str | None:
    if config.head_dims == "exact":
        return None
    if padded(spec.head_dim) != spec.head_dim or spec.head_dim != spec.head_dim_v:
        dims = f"{spec.head_dim} and {spec.head_dim_v}"
        return f"head_dims padded needs equal powers of two: got {dims}"
    if config.loads == "descriptor":
        return "head_dims padded needs pointer loads: a default must take any tensor"
    if config.schedule == "fa1":
        return (
            "head_dims padded needs a schedule that takes the true head dims: "
            f"got {config.schedule}"
        )
    return None


def _of_a_cache(spec: AttentionSpec, config: KernelConfig) -> str | None:
    """Options and limits of the directions of a cache."""
    if config.split_keys > 1 and spec.direction != "decode":
        return f"split_keys needs direction decode: got {spec.direction}"
    if config.blocks_per_sm > 1 and (spec.direction != "decode" or spec.invariant):
        return (
            "blocks_per_sm needs direction decode without invariant, whose parts are fixed: "
            f"got {spec.name}"
        )
    if config.blocks_per_sm > 1 and config.split_keys > 1:
        return (
            "blocks_per_sm and split_keys exclude each other, as each says how keys are split: "
            f"got {config.blocks_per_sm} and {config.split_keys}"
        )
    if config.widening == "native" and (spec.direction, spec.kv_dtype) != ("decode", "float8_e4m3"):
        return (
            "widening native needs direction decode and kv_dtype float8_e4m3: "
            f"got {spec.direction} and {spec.kv_dtype}"
        )
    if spec.direction not in DECODING:
        return None
    ways = (config.schedule, config.loads, config.order)
    if ways != ("fa2", "pointer", "plain"):
        return f"direction {spec.direction} has fa2, pointer and plain alone: got {', '.join(ways)}"
    if spec.direction == "decode":
        return None
    tile, what = (config.br, "br") if spec.direction == "combine" else (config.bc, "bc")
    if (tile, config.num_stages) != (16, 1):
        return (
            f"direction {spec.direction} makes no use of {what} and num_stages, so they are 16 and "
            f"1: got {tile} and {config.num_stages}"
        )
    return None


def _order(spec: AttentionSpec, config: KernelConfig) -> str | None:
    if config.order == "plain" and not config.persistent:
        return None
    if config.order != "plain" and not spec.causal:
        return f"order {config.order} needs a causal mask: without one all tiles are equally long"
    if spec.block_mask and config.persistent:
        return (
            "block_mask excludes persistent, which assigns tiles beforehand, because only its "
            f"lists say how long each takes: got {_order_of(config)}"
        )
    if spec.varlen and (config.takes_heads or config.order == "head_reversal"):
        return (
            "varlen needs order plain or longest_first, and excludes persistent, because some "
            f"of its tiles are empty: got {_order_of(config)}"
        )
    ways = ("fa2", "s_ahead", "hopper", "blackwell")
    has = spec.direction == "forward" and config.schedule in ways
    for what, needed in (
        (f"order {config.order}", config.order in ("head_reversal", "grouped")),
        ("persistent", config.persistent),
    ):
        if needed and not has:
            return (
                f"{what} needs direction forward and schedule {', '.join(ways)}: "
                f"got {spec.direction} and {config.schedule}"
            )
    if config.order != "plain" and spec.direction not in ("forward", "backward_dq"):
        return (
            f"direction {spec.direction} has order plain alone, which begins with the longest: "
            f"got {config.order}"
        )
    return None


def _order_of(config: KernelConfig) -> str:
    return f"{config.order}{' and persistent' * config.persistent}"


def _fp8(spec: AttentionSpec, config: KernelConfig) -> str | None:
    if not spec.fp8:
        return None
    dims = f"{spec.head_dim} and {spec.head_dim_v}"
    if config.loads == "descriptor" and (spec.head_dim % 16 or spec.head_dim_v % 16):
        return (
            "descriptor loads need rows of whole 16 bytes, so that fp8 takes head dims that are "
            f"multiples of 16: got {dims}"
        )
    if min(padded(spec.head_dim), padded(spec.head_dim_v), config.bc) < FP8_DEPTH:
        return f"fp8 products are {FP8_DEPTH} deep: got head dims {dims}, bc {config.bc}"
    return None


_SCHEDULES = dict.fromkeys(AHEAD, ("s_ahead", "hopper", "blackwell"))
"""The schedules of gradients besides fa2."""


def _schedule(spec: AttentionSpec, config: KernelConfig) -> str | None:
    """Which directions and features have which schedule."""
    if config.schedule == "fa1" and (config.loads, config.order) != ("pointer", "plain"):
        return "schedule fa1 needs pointer loads and plain order"
    if spec.varlen and (config.loads != "pointer" or config.schedule == "fa1"):
        return (
            "varlen needs pointer loads, because a tile must end where its sequence does, and "
            f"schedule fa2 or s_ahead: got {config.loads} and {config.schedule}"
        )
    if spec.block_mask and 256 in (config.br, config.bc):
        return f"block_mask has blocks of {BLOCK}, which tiles divide: got {config.br}x{config.bc}"
    if spec.paged and config.schedule != "fa2":
        return f"paged needs schedule fa2: got {config.schedule}"
    if config.schedule == "fa2":
        return None
    if spec.direction != "forward":
        has = ("fa2", *_SCHEDULES.get(spec.direction, ()))
        if config.schedule not in has:
            listed = f"schedules {', '.join(has[:-1])} and {has[-1]}" if has[1:] else "schedule fa2"
            return f"direction {spec.direction} has {listed} alone: got {config.schedule}"
    packed = spec.varlen and spec.direction != "forward"
    if spec.scores_featured or spec.block_mask or packed:
        words = (word for word in spec.feature_words if packed or word != "varlen")
        features = " and ".join(words)
        return f"features ({features}) need schedule fa2: got {config.schedule}"
    return None


def _with_roles(spec: AttentionSpec, config: KernelConfig) -> str | None:
    """Variants that no kernel has whose warps have roles, by Triton or by its text."""
    if config.schedule not in ("auto", "hopper", "blackwell"):
        return None
    schedule, dims = f"schedule {config.schedule}", f"{spec.head_dim} and {spec.head_dim_v}"
    if config.loads != "descriptor":
        return f"{schedule} needs descriptor loads: got {config.loads}"
    if spec.element_bytes != 2:
        return f"{schedule} multiplies 16-bit operands: got {spec.dtype}"
    if config.num_stages < 2:
        return f"{schedule} needs num_stages 2 at least: its loads run ahead of its products"
    if min(spec.head_dim, spec.head_dim_v) < 33:
        return f"{schedule} has head dims padded to 64 and more: got {dims}"
    return None


def _auto(spec: AttentionSpec, config: KernelConfig) -> str | None:
    """What Triton cannot warp-specialize, whatever the GPU (docs/kernels.md has what it can)."""
    if config.schedule != "auto":
        return None
    if config.num_warps != AUTO_WARPS:
        return f"schedule auto has num_warps {AUTO_WARPS}: got {config.num_warps}"
    if config.bc < 64:
        return f"schedule auto has tiles of 64 keys and more: got bc={config.bc}"
    return None


def _hopper(spec: AttentionSpec, config: KernelConfig) -> str | None:
    """Variants that the warp-specialized kernel does not have, whatever the GPU."""
    if config.schedule != "hopper":
        return None
    by_keys = spec.direction in BY_KEYS
    side, owned, walked = ("bc", config.bc, config.br) if by_keys else ("br", config.br, config.bc)
    if by_keys and shares_keys(spec):
        if (owned, walked, config.num_warps) != (WARPGROUP_ROWS, WARPGROUP_ROWS, 2 * WARPGROUP):
            return (
                f"schedule hopper has tiles of {WARPGROUP_ROWS}x{WARPGROUP_ROWS} and 8 warps in "
                f"{spec.direction} above head dim 128: got {config.br}x{config.bc} and "
                f"num_warps={config.num_warps}"
            )
        if min(padded(spec.head_dim), padded(spec.head_dim_v)) < 128:
            dims = f"{spec.head_dim} and {spec.head_dim_v}"
            return (
                f"schedule hopper has head dims of at least 65 where one is above 128: got {dims}"
            )
    elif owned != WARPGROUP_ROWS * config.consumers:
        return (
            f"schedule hopper has {WARPGROUP_ROWS} of {side} for every {WARPGROUP} warps: "
            f"got {side}={owned} and num_warps={config.num_warps}"
        )
    if by_keys and owned not in TILES:
        return f"K and V of a block lie in shared tiles, powers of two: got bc={owned}"
    least, walks = (64, "br") if by_keys else (32, "bc")
    if walked < least or walked not in TILES:
        return (
            f"schedule hopper walks tiles of {least} at least, powers of two: got {walks}={walked}"
        )
    if config.persistent and config.consumers == 3 and config.bc > 64:
        # Seen with Triton 3.6 to 3.9: spills, or half of exp2 not overlapped.
        return (
            "schedule hopper, persistent and with three consumers, has registers for tiles of 64 "
            f"keys at most: got bc={config.bc}"
        )
    return None


def _blackwell(spec: AttentionSpec, config: KernelConfig) -> str | None:
    """Variants that the kernel of tcgen05 does not have, whatever the GPU."""
    if config.schedule != "blackwell":
        if config.exp2_by_fma or config.rescale_log2:
            return (
                "exp2_by_fma and rescale_log2 need schedule blackwell: "
                f"got {config.schedule}, {config.exp2_by_fma} and {config.rescale_log2}"
            )
        return None
    if spec.direction != "forward":
        return _blackwell_gradient(spec, config)
    dims = f"{spec.head_dim} and {spec.head_dim_v}"
    wide, pieces = padded(spec.head_dim_v) > TENSOR_ROWS, k_pieces(spec) > 1
    if pieces and wide:
        return f"schedule blackwell has head dim 129 to 192 with V up to 128: got {dims}"
    if not pieces and padded(spec.head_dim) != padded(spec.head_dim_v):
        return f"schedule blackwell has K and V in one ring, padded alike: got head dims {dims}"
    row_tiles = 1 if wide else 2
    if config.row_tiles != row_tiles or config.num_warps != WARPGROUP * row_tiles:
        return (
            f"schedule blackwell has br {TENSOR_ROWS * row_tiles} and {WARPGROUP * row_tiles} "
            f"warps of softmax for head dims {dims}, by its tensor memory: "
            f"got br={config.br} and num_warps={config.num_warps}"
        )
    if config.bc not in (64, 128):
        return f"schedule blackwell has tiles of 64 or 128 keys: got bc={config.bc}"
    return None


def _blackwell_gradient(spec: AttentionSpec, config: KernelConfig) -> str | None:
    """What the backward of schedule blackwell does not have."""
    if config.rescale_log2:
        return f"rescale_log2 needs direction forward: got {spec.direction}"
    side = walked_side(spec)
    br, bc = (side, TENSOR_ROWS) if spec.direction in BY_KEYS else (TENSOR_ROWS, side)
    if (config.br, config.bc) != (br, bc) or config.num_warps != 2 * WARPGROUP:
        return (
            f"schedule blackwell has tiles of {br}x{bc} and {2 * WARPGROUP} warps that "
            f"compute in {spec.direction} at head dims {spec.head_dim} and {spec.head_dim_v}: "
            f"got {config.br}x{config.bc} and num_warps={config.num_warps}"
        )
    # Beside the sums, dP and S; of dQ two of S. That of a fused kernel takes the place of dP.
    columns = sum_columns(spec) + (2 if spec.direction in BY_KEYS else 3) * side
    if columns > TENSOR_COLUMNS:
        return (
            f"head dims {spec.head_dim} and {spec.head_dim_v} take {columns} columns of tensor "
            f"memory in {spec.direction}, which has {TENSOR_COLUMNS}"
        )
    return None


def _next_s(spec: AttentionSpec, config: KernelConfig) -> str | None:
    if not config.next_s:
        return None
    if (spec.direction, config.schedule) != ("backward_fused", "hopper") or shares_keys(spec):
        return (
            "next_s needs direction backward_fused, schedule hopper and head dims up to 128: "
            f"got {spec.direction}, {config.schedule}, {spec.head_dim} and {spec.head_dim_v}"
        )
    return None


def _ampere(spec: AttentionSpec, config: KernelConfig) -> str | None:
    """Variants that the Gluon kernel for mma.sync does not have, whatever the GPU."""
    if config.schedule != "ampere":
        return None
    if (spec.direction, config.loads) != ("forward", "pointer"):
        return (
            "schedule ampere needs direction forward and pointer loads: "
            f"got {spec.direction} and {config.loads}"
        )
    others = [word for word in spec.feature_words if word != "invariant"]
    if spec.element_bytes != 2 or others:
        return (
            "schedule ampere has operands of 16 bits and no features but invariant: "
            f"got {spec.dtype}{' with ' * bool(others)}{' and '.join(others)}"
        )
    if config.num_warps not in AMPERE_WARPS or config.br != 16 * config.num_warps:
        return (
            "schedule ampere has 16 rows for each of 4 or 8 warps: "
            f"got br={config.br} and num_warps={config.num_warps}"
        )
    if config.bc not in (32, 64, 128) or config.bc > config.br or config.num_stages != 1:
        return (
            "schedule ampere has tiles of 32 to 128 keys, no more than rows, in one place, so that "
            f"num_stages is 1: got bc={config.bc} and num_stages={config.num_stages}"
        )
    dims = spec.head_dim, spec.head_dim_v
    if any(dim % 64 or dim > WIDEST for dim in dims):
        return f"schedule ampere has head dims 64, 128, 192 and 256: got {dims[0]} and {dims[1]}"
    return None


def _maxnreg(spec: AttentionSpec, config: KernelConfig) -> str | None:
    if config.maxnreg == 0:
        return None
    ways = (spec.direction, config.schedule, config.loads)
    if ways not in (("forward", "s_ahead", "descriptor"), ("forward", "fa2", "descriptor")):
        return (
            "maxnreg needs direction forward, schedule fa2 or s_ahead and descriptor loads: "
            f"got {', '.join(ways)}"
        )
    if config.num_warps != 8 or max(padded(spec.head_dim), padded(spec.head_dim_v)) > 64:
        return (
            f"maxnreg={config.maxnreg} is for two blocks of 8 warps an SM, at head dims up to 64: "
            f"got num_warps={config.num_warps}, head dims {spec.head_dim} and {spec.head_dim_v}"
        )
    return None


def _backward(spec: AttentionSpec, config: KernelConfig) -> str | None:
    """Variants that the kernel of a backward direction does not have."""
    if spec.direction in ("backward_delta", "backward_dbias") and config.loads != "pointer":
        return f"direction {spec.direction} has pointer loads alone: got {config.loads}"
    if spec.direction == "backward_delta" and (config.bc, config.num_stages) != (16, 1):
        return (
            "direction backward_delta has neither keys nor a loop, so bc is 16 and num_stages 1: "
            f"got {config.bc} and {config.num_stages}"
        )
    return None


_OF_TEMPLATES = (
    _v_parts,
    _head_dims,
    _of_a_cache,
    _order,
    _fp8,
    _schedule,
    _with_roles,
    _auto,
    _hopper,
    _blackwell,
    _ampere,
    _maxnreg,
    _next_s,
    _backward,
    why_no_rows,
    why_other_class,
)
"""What no GPU changes, each rule in a function."""


def _arch(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> str | None:
    """What the instruction set rules out."""
    if config.loads == "descriptor" and not (gpu.is_nvidia and gpu.capability >= 90):
        return f"descriptor loads need the TMA unit of sm_90 and later: {gpu.slug} is {gpu.arch}"
    if config.maxnreg and gpu.arch != "sm_90":
        return f"maxnreg was found to pay on sm_90 alone: {gpu.slug} is {gpu.arch}"
    if config.whole_rows and gpu.arch not in MMA_SYNC:
        return f"whole_rows is made for mma.sync: {gpu.slug} is {gpu.arch}"
    if config.schedule == "ampere" and gpu.arch not in MMA_SYNC:
        return f"schedule ampere is made for mma.sync: {gpu.slug} is {gpu.arch}"
    if config.schedule == "blackwell" and gpu.arch not in BLACKWELL:
        return f"schedule blackwell is made of tcgen05 of sm_100: {gpu.slug} is {gpu.arch}"
    if config.schedule == "s_ahead" and gpu.arch in BLACKWELL:
        return (
            "schedule s_ahead is wrong in tensor memory: Triton lets the next product overwrite S "
            f"before all warps have read it, and {gpu.slug} is {gpu.arch}"
        )
    if config.schedule == "hopper" and gpu.arch != "sm_90":
        return f"schedule hopper is made of sm_90's wgmma: {gpu.slug} is {gpu.arch}"
    if config.widening == "native" and not (gpu.is_nvidia and gpu.capability >= 89):
        return (
            f"widening native is made of the e4m3 instructions of sm_89 and later: {gpu.slug} is "
            f"{gpu.arch}"
        )
    if config.schedule == "auto" and config.br not in AUTO_BR.get(gpu.arch, ()):
        known = " or ".join(f"br {max(br)} at most on {arch}" for arch, br in AUTO_BR.items())
        return f"schedule auto needs {known}: got br={config.br}, and {gpu.slug} is {gpu.arch}"
    if spec.precision == "tf32" and not gpu.is_nvidia and gpu.arch != "gfx942":
        return f"precision tf32 needs tf32 matrix instructions: {gpu.arch} has none"
    threads = config.block_warps(spec) * gpu.warp_size
    if threads > 1024:
        return f"a block holds 1024 threads at most: num_warps={config.num_warps} makes {threads}"
    return None
