"""Which config can compute which spec on which GPU: why_illegal.

The space, the renderer, the evaluators, the table and the runtime fallback all call it. It is a
bound, without a compiler, on the shared memory and registers a config needs: what it rejects cannot
run, and what it passes may still not fit once compiled, which compile/verdict.py finds out.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.schedules import blackwell, decode, hopper
from flashgen.schedules.base import BY_KEYS, FP8_DEPTH, MMA_SYNC, TENSOR_MEMORY, Bytes, Order, wide
from flashgen.schedules.config import SCHEDULES, KernelConfig
from flashgen.schedules.numeric_class import why_other_class, why_other_products
from flashgen.schedules.whole_rows import k_parts, o_parts, why_no_rows
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.features import features_on
from flashgen.spec.gpu import Gpu
from flashgen.spec.vocabulary import BLOCK, OF_DS, Direction, padded

REGISTERS_PER_THREAD = {"sm_": 255, "gfx9": 512, "gfx1": 256}
"""The most 32-bit registers a thread can name: of NVIDIA, CDNA and RDNA."""


def shared_bound_bytes(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> int:
    """A lower bound of the shared memory the compiled kernel takes, in bytes.

    Forward and dQ hold br rows (Q, and dO) and walk K and V; dK and dV hold K and V and walk Q and
    dO. How many tiles of these lie there is the schedule's.
    """
    if spec.direction in ("backward_delta", "combine", "append"):
        return 0
    dims = padded(spec.head_dim), padded(spec.head_dim_v)
    if config.whole_rows:  # the parts need less padding
        dims = k_parts(spec, config)[-1], o_parts(spec, config)[-1]
    of_q, of_do = (config.br * dim * spec.operand_bytes for dim in dims)
    of_k, of_v = (config.bc * dim * spec.kv_bytes for dim in dims)
    of_v //= config.v_parts
    if spec.direction == "backward_dq_of_ds":  # it walks tiles of dS and of K
        of_v = config.br * config.bc * spec.element_bytes
    if spec.direction in BY_KEYS:
        held, walked = of_k + of_v, (of_q, of_do)
    else:
        alone = spec.direction in ("forward", "decode")
        held, walked = of_q if alone else of_q + of_do, (of_k, of_v)
        held *= spec.direction != "backward_dq_of_ds"
    chained = not gpu.is_nvidia and config.num_stages == 4
    shared = _reads_shared(spec, config, gpu)
    tiles = Bytes(of_q, of_k, of_v, of_do, held, walked, shared, chained)
    return SCHEDULES[config.schedule].shared_bytes(spec, config, tiles)


def _reads_shared(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> bool:
    """Whether the products read their operands in shared memory, by wgmma or tcgen05: 64 rows and 4
    warps at least, operands of 16 bits or float8_e4m3. With fewer rows of Q, not all products of dK
    and dV do on sm_100.
    """
    by_keys = spec.direction in BY_KEYS
    side = config.bc if by_keys else config.br
    if by_keys and gpu.arch in TENSOR_MEMORY:
        side = min(side, config.br)
    return (
        gpu.arch in ("sm_90", *TENSOR_MEMORY)
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


ORDERS_OF: Mapping[Direction, tuple[Order, ...]] = {
    "forward": ("longest_first", "head_reversal", "grouped"),
    "backward_dq": ("longest_first", "grouped"),
    "backward_dq_of_ds": ("longest_first",),
    "backward_dkv": ("grouped",),
    "backward_fused": ("grouped",),
}
"""Orders besides plain, which under a mask begins with a head's longest tile where programs own
keys, and with its shortest where they own rows.
"""
DS_TILE = 128
"""Rows and keys of a tile of dS, of which all is written where any is seen."""

PER_SCORE = ("bias", "boolean-mask", "dropout", "fp8")
"""Features that load or compute a value for each score, or convert each operand."""


def may_spill(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> str | None:
    """Why the features of a spec may not fit a tile that was chosen for its plain spec; None where
    they fit.

    A bound on the float32 accumulators of a thread. Of the kernels that the tables' tiles and the
    features make, compiled with Triton 3.7.1 for sm_80, sm_89, sm_90, sm_100 and sm_120, those
    within the bound spill in no main loop. tests/cpu/compile/test_plain_tiles.py compiles them.
    """
    what, elements = SCHEDULES[config.schedule].accumulators(spec, config)
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
    its, threads = SCHEDULES[config.schedule], config.num_warps * gpu.warp_size
    most = next(most for arch, most in REGISTERS_PER_THREAD.items() if gpu.arch.startswith(arch))
    limit = its.register_limit(config, gpu, min(most, gpu.registers_per_sm // threads))
    if limit is None:
        return None
    what, elements = its.accumulators(spec, config)
    need = elements // threads
    if need > limit:
        return (
            f"the float32 accumulators of {what} need {need} registers a thread: "
            f"num_warps={config.num_warps} leaves {limit}"
        )
    return None


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
        >>> from flashgen.schedules.defaults import default_config
        >>> spec = AttentionSpec(dtype="bfloat16", head_dim=64, head_dim_v=64, mask="causal")
        >>> print(why_illegal(spec, default_config(spec), TARGETS["nvidia_h200"]))
        None
    """
    for rule in _OF_TEMPLATES:
        if (reason := rule(spec, config)) is not None:
            return reason
    if (reason := why_unserved(spec, gpu)) is not None:
        return reason
    for rule_on in (_arch, why_other_products, too_much_shared, too_many_registers):
        if (reason := rule_on(spec, config, gpu)) is not None:
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
    if SCHEDULES[config.schedule].state_in_memory:
        return (
            "head_dims padded needs a schedule that takes the true head dims: "
            f"got {config.schedule}"
        )
    return None


def _order(spec: AttentionSpec, config: KernelConfig) -> str | None:
    if config.order == "plain":
        return None
    if not spec.causal:
        return f"order {config.order} needs a causal mask: without one all tiles are equally long"
    has = ORDERS_OF.get(spec.direction, ())
    if config.order not in has:
        listed = ", ".join(("plain", *has))
        return f"direction {spec.direction} has order {listed} alone: got {config.order}"
    if spec.direction != "forward" or config.order == "longest_first":
        return None
    if spec.varlen:
        return (
            "varlen needs order plain or longest_first in a forward, because some tiles are empty: "
            f"got {_order_of(config)}"
        )
    return _has_orders(config, f"order {config.order}")


def _persistent(spec: AttentionSpec, config: KernelConfig) -> str | None:
    if not config.persistent:
        return None
    if spec.block_mask:
        return (
            "block_mask excludes persistent, which assigns tiles beforehand, because only its "
            f"lists say how long each takes: got {_order_of(config)}"
        )
    if spec.varlen and not SCHEDULES[config.schedule].hands_out:
        return (
            "varlen needs persistent of schedules that hand tiles out alone, because some are "
            f"empty: got {_order_of(config)} and {config.schedule}"
        )
    if spec.direction != "forward":
        return _persistent_gradient(spec, config)
    return _has_orders(config, "persistent")


def _persistent_gradient(spec: AttentionSpec, config: KernelConfig) -> str | None:
    has = SCHEDULES[config.schedule].hands_out_gradients
    if spec.direction not in has:
        return (
            "persistent needs direction forward, or schedule hopper and direction backward_dkv or "
            f"backward_dq: got {spec.direction} and {config.schedule}"
        )
    if wide(spec):
        return (
            "persistent gradients need head dims up to 128, of which two tiles fit shared memory: "
            f"got {spec.head_dim} and {spec.head_dim_v}"
        )
    return None


def _has_orders(config: KernelConfig, what: str) -> str | None:
    if SCHEDULES[config.schedule].orders:
        return None
    ways = ", ".join(name for name, schedule in SCHEDULES.items() if schedule.orders)
    return f"{what} needs schedule {ways}: got {config.schedule}"


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


def _schedule(spec: AttentionSpec, config: KernelConfig) -> str | None:
    """Which directions and features have which schedule."""
    its = SCHEDULES[config.schedule]
    if its.state_in_memory and (config.loads, config.order) != ("pointer", "plain"):
        return f"schedule {its.name} needs pointer loads and plain order"
    own = its.features.get(spec.direction, ())
    if spec.varlen and "varlen" not in own and (config.loads != "pointer" or its.state_in_memory):
        return (
            "varlen needs pointer loads, because a tile must end where its sequence does, and "
            f"schedule fa2 or s_ahead: got {config.loads} and {config.schedule}"
        )
    if spec.block_mask and 256 in (config.br, config.bc):
        return f"block_mask has blocks of {BLOCK}, which tiles divide: got {config.br}x{config.bc}"
    if spec.paged and not its.every_feature and "paged" not in own:
        return f"paged needs schedule fa2: got {config.schedule}"
    if its.every_feature:
        return None
    if spec.direction != "forward" and spec.direction not in its.directions:
        has = [name for name, each in SCHEDULES.items() if spec.direction in each.directions]
        listed = f"schedules {', '.join(has[:-1])} and {has[-1]}" if has[1:] else "schedule fa2"
        return f"direction {spec.direction} has {listed} alone: got {config.schedule}"
    packed = spec.varlen and spec.direction != "forward" and "varlen" not in own
    lacking = [row for row in features_on(spec) if row.field not in own]
    if any(row.scores for row in lacking) or spec.block_mask or packed:
        words = (row.word for row in lacking if row.word and (packed or row.word != "varlen"))
        features = " and ".join(words)
        return f"features ({features}) need schedule fa2: got {config.schedule}"
    reason = _why_no_roles(spec, config) if its.roles else None
    return reason or its.why_not(spec, config)


def _why_no_roles(spec: AttentionSpec, config: KernelConfig) -> str | None:
    """Variants that no kernel has whose warps have roles, by Triton or by its text."""
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
    if spec.direction in OF_DS and max(config.br, config.bc) > DS_TILE:
        return (
            f"dS is written and read in whole tiles of {DS_TILE} rows and keys, which tiles "
            f"divide: got {config.br}x{config.bc}"
        )
    if spec.direction == "backward_delta" and (config.bc, config.num_stages) != (16, 1):
        return (
            "direction backward_delta has neither keys nor a loop, so bc is 16 and num_stages 1: "
            f"got {config.bc} and {config.num_stages}"
        )
    return None


_OF_TEMPLATES = (
    _v_parts,
    _head_dims,
    decode.why_not,
    _order,
    _persistent,
    _fp8,
    _schedule,
    blackwell.why_no_exp2,
    _maxnreg,
    hopper.why_no_next_s,
    hopper.why_no_turns,
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
    if (reason := SCHEDULES[config.schedule].why_not_on(config, gpu)) is not None:
        return reason
    if config.widening == "native" and not (gpu.is_nvidia and gpu.capability >= 89):
        return (
            f"widening native is made of the e4m3 instructions of sm_89 and later: {gpu.slug} is "
            f"{gpu.arch}"
        )
    if config.pdl and not (gpu.is_nvidia and gpu.capability >= 90):
        return (
            f"pdl, programmatic dependent launch, needs sm_90 and later: {gpu.slug} is {gpu.arch}"
        )
    if spec.precision == "tf32" and not gpu.is_nvidia and gpu.arch != "gfx942":
        return f"precision tf32 needs tf32 matrix instructions: {gpu.arch} has none"
    threads = config.block_warps(spec) * gpu.warp_size
    if threads > 1024:
        return f"a block holds 1024 threads at most: num_warps={config.num_warps} makes {threads}"
    return None
