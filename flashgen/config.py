"""KernelConfig: how a spec is computed. kernel_name() names the pair; why_illegal() says what
cannot be.

why_illegal is the one statement of legality: the space, the renderer, the evaluators, the table and
the runtime fallback all call it. It is a bound: what it rejects cannot run, what it passes may
still not fit once compiled, which compile.py then tells exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from flashgen.block_mask import BLOCK
from flashgen.errors import InvalidArgument
from flashgen.gpu import Gpu
from flashgen.spec import DECODING, AttentionSpec, padded

Schedule = Literal["fa1", "fa2", "s_ahead", "hopper"]
Loads = Literal["pointer", "descriptor"]
Order = Literal["plain", "longest_first"]
HeadDims = Literal["exact", "padded"]

OPTIONS = ("split_keys",)
"""Fields of a config that tables write out only where they are not at their defaults."""

TILES = (16, 32, 64, 128, 256)
HOPPER_BR = (128, 192)
"""Rows of Q in schedule hopper: two or three consumer warpgroups, WARPGROUP_ROWS each."""
WARPGROUP_ROWS = 64
WARPS = (1, 2, 4, 8, 16)
STAGES = (1, 2, 3, 4, 5)
SPLIT_KEYS = (1, 256, 512, 1024, 2048, 4096)

REGISTERS_PER_THREAD = {"sm": 255, "gfx": 512}
"""The most 32-bit registers a thread can name, by vendor."""

REGISTER_SPLIT = {2: (240, 24), 3: (160, 32)}
"""Registers of a consumer's thread and of the producer's in schedule hopper, by the number of
consumers: multiples of 8, all warpgroups' together 65,536 at most."""

BY_KEYS = ("backward_dkv", "backward_fused")
"""Directions whose programs own a tile of keys, and walk the rows of Q."""


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """One way to compute a spec. br rows of Q and bc rows of K/V make a tile, in every direction.

    schedule: fa2 (textbook order), s_ahead (the next QK^T issued before this tile's softmax), fa1
    (FlashAttention-1's loops) or hopper (Gluon: a warp that loads and br / 64 warpgroups that
    compute; num_warps are those of one warpgroup, num_stages the places of its ring). loads:
    pointer, or descriptor (TMA). order: of the tiles of Q, plain or longest_first (within a head).
    head_dims: exact (the spec's, known when compiling) or padded (the kernel takes the true ones as
    arguments and serves every head dim up to the spec's). split_keys: of direction decode, the keys
    a split takes at least, and there are as many splits as that gives; 1: as many as the rule of
    splits.py says. Raises InvalidArgument.
    """

    br: int
    bc: int
    num_warps: int
    num_stages: int
    schedule: Schedule = "fa2"
    loads: Loads = "pointer"
    order: Order = "plain"
    head_dims: HeadDims = "exact"
    split_keys: int = 1

    def __post_init__(self) -> None:
        for field, values in (
            ("br", HOPPER_BR if self.schedule == "hopper" else TILES),
            ("bc", TILES),
            ("num_warps", WARPS),
            ("num_stages", STAGES),
            ("schedule", get_args(Schedule)),
            ("loads", get_args(Loads)),
            ("order", get_args(Order)),
            ("head_dims", get_args(HeadDims)),
            ("split_keys", SPLIT_KEYS),
        ):
            value = getattr(self, field)
            if value not in values or isinstance(value, bool):
                raise InvalidArgument(
                    f"{field} must be one of {', '.join(map(str, values))}: got {value!r}"
                )

    @property
    def label(self) -> str:
        """The config in one word, as it stands in kernel names."""
        parts = [f"br{self.br}", f"bc{self.bc}", f"w{self.num_warps}", f"s{self.num_stages}"]
        parts += [self.schedule, self.loads]
        if self.order != "plain":
            parts.append(self.order)
        if self.head_dims != "exact":
            parts.append("any_dim")
        if self.split_keys > 1:
            parts.append(f"split{self.split_keys}")
        return "_".join(parts)

    @property
    def interpretable(self) -> bool:
        """Whether Triton's interpreter can run the kernel: not Gluon's, for which it has none."""
        return self.schedule != "hopper"

    @property
    def consumers(self) -> int:
        """Warpgroups that compute, in schedule hopper; 0 in all others."""
        return self.br // WARPGROUP_ROWS if self.schedule == "hopper" else 0

    @property
    def block_warps(self) -> int:
        """Warps of a block: in schedule hopper those of all consumers, and four of which one loads
        (registers are handed over by whole warpgroups).
        """
        return 4 * (self.consumers + 1) if self.schedule == "hopper" else self.num_warps

    @property
    def register_split(self) -> tuple[int, int]:
        """Registers of a thread that computes and of one that loads; schedule hopper alone."""
        return REGISTER_SPLIT[self.consumers]

    def pointer_twin(self) -> KernelConfig:
        """The config launched in this one's place where a call's tensors cannot have descriptors.

        s_ahead becomes fa2: without descriptors ptxas undoes the overlap, and often spills. So does
        hopper, in plain Triton's tile of 128 rows and 8 warps.
        """
        if self.loads == "pointer":
            return self
        if self.schedule == "hopper":
            return replace(self, loads="pointer", schedule="fa2", br=128, num_warps=8, num_stages=2)
        return replace(self, loads="pointer", schedule="fa2", num_stages=min(self.num_stages, 2))


def rows_of_eight(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Whether the kernel relies on strides that are multiples of 8 elements.

    So it is where contiguous rows are not multiples of 16 apart, the only class Triton sees by
    itself. The template tells Triton, and the launcher sees to it: both ask here.
    """
    exact_pointers = config.loads == "pointer" and config.head_dims == "exact"
    narrow = spec.head_dim % 16 != 0 or spec.head_dim_v % 16 != 0
    streams = spec.direction in ("combine", "append")
    return exact_pointers and config.schedule != "fa1" and narrow and not streams


def kernel_name(spec: AttentionSpec, config: KernelConfig) -> str:
    """The one name of a kernel: in the YAML, the file, the profiler and every error."""
    return f"{spec.name}_{config.label}"


_Tile = tuple[int, int, int, int]
_HEAD_DIMS = (16, 32, 64, 128, 256)
_DEFAULT_TILES: dict[str, dict[str, tuple[_Tile, ...]]] = {
    # br, bc, num_warps, num_stages for each of _HEAD_DIMS. Compiled with Triton 3.7.1 for sm_80,
    # sm_89, sm_90, sm_100, sm_120 and gfx942, these take at most 64 KiB of shared memory on gfx942,
    # which has no more (MI300X), 66 KiB elsewhere, and do not spill in a main loop; but on gfx942
    # the gradient of a bias in float32 at head dim 256 does. float32 by FMA has the fewest
    # registers left.
    "forward": {
        "half": ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 8, 2)),
        "tf32": ((64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 1)),
        "ieee": ((64, 64, 4, 2), (64, 64, 4, 2), (32, 16, 4, 2), (16, 16, 4, 2), (16, 16, 4, 1)),
    },
    "backward_delta": {
        "half": ((64, 16, 4, 1), (64, 16, 4, 1), (64, 16, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)),
        "ieee": ((64, 16, 4, 1), (64, 16, 4, 1), (64, 16, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)),
    },
    "backward_dkv": {
        "half": ((64, 64, 4, 2), (64, 64, 4, 2), (32, 64, 4, 2), (32, 32, 4, 2), (16, 32, 8, 2)),
        "tf32": ((64, 64, 4, 2), (32, 64, 4, 2), (32, 32, 4, 2), (16, 32, 4, 2), (16, 16, 4, 1)),
        "ieee": ((32, 64, 4, 2), (32, 32, 4, 2), (16, 32, 4, 2), (16, 16, 4, 2), (16, 16, 4, 1)),
    },
    "backward_dq": {
        "half": ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (32, 32, 4, 2), (32, 16, 8, 1)),
        "tf32": ((64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (16, 32, 4, 1), (16, 16, 4, 1)),
        "ieee": ((64, 32, 4, 2), (32, 32, 4, 2), (32, 16, 4, 2), (16, 16, 8, 1), (16, 16, 8, 2)),
    },
    "backward_dbias": {
        "half": ((64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (32, 16, 8, 1)),
        "tf32": ((32, 32, 4, 2), (32, 32, 4, 2), (32, 16, 4, 2), (16, 32, 4, 1), (16, 16, 8, 2)),
        "ieee": ((32, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 2), (16, 16, 4, 2), (16, 16, 8, 2)),
    },
    "decode": {
        "half": ((16, 64, 4, 3), (16, 64, 4, 3), (16, 64, 4, 3), (16, 64, 4, 2), (16, 32, 4, 2)),
        "tf32": ((16, 64, 4, 2), (16, 64, 4, 2), (16, 64, 4, 2), (16, 32, 4, 2), (16, 16, 4, 2)),
        "ieee": ((16, 64, 4, 2), (16, 64, 4, 2), (16, 32, 4, 2), (16, 16, 4, 2), (16, 16, 4, 1)),
    },
    "combine": {
        "half": ((16, 32, 1, 1), (16, 32, 1, 1), (16, 32, 2, 1), (16, 32, 4, 1), (16, 16, 4, 1)),
        "ieee": ((16, 32, 1, 1), (16, 32, 1, 1), (16, 32, 2, 1), (16, 32, 4, 1), (16, 16, 4, 1)),
    },
    "append": {
        "half": ((16, 16, 1, 1), (16, 16, 1, 1), (16, 16, 2, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
        "ieee": ((16, 16, 1, 1), (16, 16, 1, 1), (16, 16, 2, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    },
}  # fmt: skip
_DEFAULT_TILES["backward_fused"] = {
    # With one stage: dQ passes through shared memory too.
    kind: tuple((br, bc, warps, 1) for br, bc, warps, _ in tiles)
    for kind, tiles in _DEFAULT_TILES["backward_dkv"].items()
}


def default_config(spec: AttentionSpec) -> KernelConfig:
    """The conservative config of the spec's default kernel: legal on every known target."""
    kind = "half" if spec.element_bytes == 2 else spec.precision
    place = _HEAD_DIMS.index(default_head_dim(spec))
    br, bc, warps, stages = _DEFAULT_TILES[spec.direction][kind][place]
    # The loads of a block table run a stage ahead of the pages that they name.
    stages += spec.paged and spec.direction in ("decode", "forward")
    return KernelConfig(br=br, bc=bc, num_warps=warps, num_stages=stages, head_dims="padded")


def default_head_dim(spec: AttentionSpec) -> int:
    """The padded head dim whose default kernel serves this spec."""
    return padded(max(spec.head_dim, spec.head_dim_v))


def default_spec(spec: AttentionSpec) -> AttentionSpec:
    """The spec of the default kernel that serves `spec`: both head dims the same power of two."""
    head_dim = default_head_dim(spec)
    return replace(spec, head_dim=head_dim, head_dim_v=head_dim)


def why_illegal(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> str | None:
    """Why this config cannot run this spec on this GPU, in one sentence; None where it may.

    Judges what needs no compiler: the instruction set, and lower bounds of shared memory and
    registers.
    """
    for reason in (
        _illegal_pair(spec, config),
        _illegal_arch(spec, config, gpu),
        _too_much_shared(spec, config, gpu),
        _too_many_registers(spec, config, gpu),
    ):
        if reason is not None:
            return reason
    return None


def _illegal_pair(spec: AttentionSpec, config: KernelConfig) -> str | None:
    """What no GPU changes."""
    if spec.direction in DECODING:
        return _illegal_decoding(spec, config)
    if config.split_keys > 1:
        return f"split_keys goes with direction decode: got {spec.direction}"
    if config.order == "longest_first" and not spec.causal:
        return "order longest_first needs a causal mask: without one all tiles are equally long"
    if config.head_dims == "padded":
        if padded(spec.head_dim) != spec.head_dim or spec.head_dim != spec.head_dim_v:
            dims = f"{spec.head_dim} and {spec.head_dim_v}"
            return f"head_dims padded needs equal powers of two: got {dims}"
        if config.loads == "descriptor":
            return "head_dims padded goes with pointer loads: a default must take any tensor"
    if config.schedule == "fa1" and (config.loads, config.order) != ("pointer", "plain"):
        return "schedule fa1 goes with pointer loads and plain order"
    if config.schedule == "hopper" and (reason := _illegal_hopper(spec, config)) is not None:
        return reason
    if spec.varlen and (config.loads != "pointer" or config.schedule == "fa1"):
        return (
            "varlen goes with pointer loads, for a tile must end where its sequence does, and with "
            f"schedules fa2 and s_ahead: got {config.loads} and {config.schedule}"
        )
    if spec.block_mask and 256 in (config.br, config.bc):
        return f"block_mask has blocks of {BLOCK}, which tiles divide: got {config.br}x{config.bc}"
    if spec.paged and config.schedule != "fa2":
        return f"paged goes with schedule fa2: got {config.schedule}"
    if config.schedule != "fa2":
        if spec.direction != "forward":
            return f"direction {spec.direction} has schedule fa2 alone: got {config.schedule}"
        if spec.scores_featured or spec.block_mask:
            features = " and ".join(word for word in spec.feature_words if word != "varlen")
            return f"features ({features}) go with schedule fa2: got {config.schedule}"
    return _illegal_backward(spec, config)


def _illegal_hopper(spec: AttentionSpec, config: KernelConfig) -> str | None:
    """What the warp-specialized kernel has no variant of, whatever the GPU."""
    if config.loads != "descriptor":
        return f"schedule hopper goes with descriptor loads: got {config.loads}"
    if spec.element_bytes != 2:
        return f"schedule hopper multiplies 16-bit operands: got {spec.dtype}"
    if config.num_warps != 4:
        return f"schedule hopper has warpgroups of 4 warps: got num_warps={config.num_warps}"
    if config.num_stages < 2:
        return "schedule hopper needs num_stages 2 at least: its ring holds K of the next tile"
    if config.bc < 32:
        return f"schedule hopper has tiles of 32 keys at least: got bc={config.bc}"
    if min(spec.head_dim, spec.head_dim_v) < 33:
        dims = f"{spec.head_dim} and {spec.head_dim_v}"
        return f"schedule hopper has head dims padded to 64 and more: got {dims}"
    return None


def _illegal_backward(spec: AttentionSpec, config: KernelConfig) -> str | None:
    """What a backward direction's kernel has no variant of."""
    if config.order != "plain" and spec.direction not in ("forward", "backward_dq"):
        return (
            f"direction {spec.direction} has order plain alone, which begins with the longest: "
            f"got {config.order}"
        )
    if spec.direction in ("backward_delta", "backward_dbias") and config.loads != "pointer":
        return f"direction {spec.direction} has pointer loads alone: got {config.loads}"
    if spec.direction == "backward_delta" and (config.bc, config.num_stages) != (16, 1):
        return (
            "direction backward_delta has neither keys nor a loop, so bc is 16 and num_stages 1: "
            f"got {config.bc} and {config.num_stages}"
        )
    return None


def _illegal_decoding(spec: AttentionSpec, config: KernelConfig) -> str | None:
    """What the kernels of a cache have no variant of."""
    ways = (config.schedule, config.loads, config.order)
    if ways != ("fa2", "pointer", "plain"):
        return f"direction {spec.direction} has fa2, pointer and plain alone: got {', '.join(ways)}"
    if config.head_dims == "padded" and (
        padded(spec.head_dim) != spec.head_dim or spec.head_dim != spec.head_dim_v
    ):
        dims = f"{spec.head_dim} and {spec.head_dim_v}"
        return f"head_dims padded needs equal powers of two: got {dims}"
    if spec.direction == "decode":
        return None
    if config.split_keys > 1:
        return f"split_keys goes with direction decode: got {spec.direction}"
    tile, what = (config.br, "br") if spec.direction == "combine" else (config.bc, "bc")
    if (tile, config.num_stages) != (16, 1):
        return (
            f"direction {spec.direction} makes no use of {what} and num_stages, so they are 16 and "
            f"1: got {tile} and {config.num_stages}"
        )
    return None


def _illegal_arch(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> str | None:
    """What the instruction set rules out."""
    if config.loads == "descriptor" and not (gpu.is_nvidia and gpu.capability >= 90):
        return f"descriptor loads need the TMA unit of sm_90 and later: {gpu.slug} is {gpu.arch}"
    if config.schedule == "hopper" and gpu.arch != "sm_90":
        return f"schedule hopper is made of sm_90's wgmma: {gpu.slug} is {gpu.arch}"
    if spec.precision == "tf32" and gpu.arch == "gfx950":
        return "precision tf32 needs tf32 matrix instructions: gfx950 has none"
    threads = config.block_warps * gpu.warp_size
    if threads > 1024:
        return f"a block holds 1024 threads at most: num_warps={config.num_warps} makes {threads}"
    return None


def shared_bound_bytes(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> int:
    """A lower bound of the shared memory the compiled kernel takes, in bytes.

    A pipelined loop of n stages keeps n tiles of what it walks where wgmma reads them from shared
    memory, beside the tiles it holds, and s_ahead one more of K; elsewhere it keeps n - 1. Forward
    and dQ hold br rows (Q, and dO) and walk K and V; dK and dV hold K and V and walk Q and dO. Seen
    in kernels compiled with Triton 3.7.1.
    """
    dims = padded(spec.head_dim), padded(spec.head_dim_v)
    of_q, of_do = (config.br * dim * spec.element_bytes for dim in dims)
    of_k, of_v = (config.bc * dim * spec.element_bytes for dim in dims)
    if spec.direction in ("backward_delta", "combine", "append"):
        return 0
    if spec.direction in ("backward_dkv", "backward_fused"):
        held, walked = of_k + of_v, (of_q, of_do)
    else:
        alone = spec.direction in ("forward", "decode")
        held, walked = of_q if alone else of_q + of_do, (of_k, of_v)
    if config.schedule == "hopper":
        of_o = config.br * dims[1] * spec.element_bytes if dims[0] != dims[1] else 0
        return of_q + of_o + config.num_stages * (of_k + of_v)
    if config.schedule == "fa1" or config.num_stages == 1 or spec.direction == "backward_dbias":
        return max(walked)
    if spec.paged:  # the table is a load ahead of the pages, and takes stages for itself
        return max(walked)
    if _uses_wgmma(spec, config, gpu):
        ahead = of_k if config.schedule == "s_ahead" and config.loads == "descriptor" else 0
        return held + config.num_stages * sum(walked) + ahead
    return (config.num_stages - 1) * sum(walked)


def _uses_wgmma(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> bool:
    """Whether the products become warpgroup instructions: 64 rows and 4 warps at least, 16-bit
    operands.
    """
    return (
        gpu.arch == "sm_90"
        and spec.element_bytes == 2
        and (config.bc if spec.direction in BY_KEYS else config.br) >= 64
        and config.num_warps >= 4
    )


def _too_much_shared(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> str | None:
    need = shared_bound_bytes(spec, config, gpu)
    if need > gpu.shared_per_block:
        return (
            f"the tiles of Q, K and V need {need} bytes of shared memory at least: "
            f"{gpu.slug} has {gpu.shared_per_block} a block"
        )
    return None


def _too_many_registers(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> str | None:
    threads = config.num_warps * gpu.warp_size * max(1, config.consumers)
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
    if config.schedule == "hopper":
        # S of a tile is written while P of the one before, rounded, is being multiplied.
        return "O, S and P", config.br * dim_v + scores + scores // 2
    if spec.direction in ("forward", "decode"):
        return "O and S", config.br * dim_v + scores
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
