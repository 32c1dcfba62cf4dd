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
from flashgen.gpu import TARGETS, Gpu
from flashgen.spec import DECODING, AttentionSpec, padded

Schedule = Literal["fa1", "fa2", "s_ahead", "hopper", "auto"]
Loads = Literal["pointer", "descriptor"]
Order = Literal["plain", "longest_first", "head_reversal", "grouped"]
HeadDims = Literal["exact", "padded"]
Widening = Literal["bits", "native"]

OPTIONS = ("split_keys", "persistent", "widening", "v_parts")
"""Fields of a config that tables write out only where they are not at their defaults."""

TILES = (16, 32, 64, 128, 256)
HOPPER_BR = (128, 192)
"""Rows of Q in schedule hopper: two or three consumer warpgroups, WARPGROUP_ROWS each."""
WARPGROUP_ROWS = 64
AUTO_WARPS, AUTO_BLOCK_WARPS = 4, 12
"""num_warps of schedule auto, and the warps that Triton 3.6 to 3.9 make of them."""
AUTO_BR = {"sm_90": (64,), "sm_100": (64, 128)}
"""Rows of Q for which Triton deals out the loop of schedule auto, by architecture."""
WARPS = (1, 2, 4, 8, 16)
STAGES = (1, 2, 3, 4, 5)
V_PARTS = (1, 2, 4)
SPLIT_KEYS = (1, 256, 512, 1024, 2048, 4096)

REGISTERS_PER_THREAD = {"sm": 255, "gfx": 512}
"""The most 32-bit registers a thread can name, by vendor."""

REGISTER_SPLIT = {2: (240, 24), 3: (160, 32)}
"""Registers of a consumer's thread and of the producer's in schedule hopper, by the number of
consumers: multiples of 8, all warpgroups' together 65,536 at most."""

FP8_DEPTH = 32
"""Elements that an fp8 matrix instruction sums at least (PTX ISA: mma m16n8k32, wgmma k32)."""

BY_KEYS = ("backward_dkv", "backward_fused")
"""Directions whose programs own a tile of keys, and walk the rows of Q."""
AHEAD = ("forward", "backward_dq", *BY_KEYS)
"""Directions that have schedule s_ahead."""


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """One way to compute a spec. br rows of Q and bc rows of K/V make a tile, in every direction.

    schedule: fa2 (textbook order), s_ahead (a product issued before the exp2 that need not wait for
    it: the next QK^T in the forward, dO V^T of the same tile in the backward), fa1
    (FlashAttention-1's loops), auto (fa2 in one loop, which Triton's compiler deals out to warps
    that load and warps that compute) or hopper (Gluon: a warp that loads and br / 64 warpgroups
    that compute; num_warps are those of one warpgroup, num_stages the places of its ring). loads:
    pointer, or descriptor (TMA). order: of the tiles of Q, plain, longest_first (within a head),
    head_reversal (so in every second head, a long tile after a short one) or grouped (longest
    first, heads whose K and V fit in L2 together). persistent: as many programs as SMs, each takes
    every n-th tile.
    head_dims: exact (the spec's, known when compiling) or padded (the kernel takes the true ones as
    arguments and serves every head dim up to the spec's). split_keys: of direction decode, the keys
    a split takes at least, and there are as many splits as that gives; 1: as many as the rule of
    splits.py says. widening: how a decode makes 16-bit elements of float8_e4m3 ones: by arithmetic
    on their bits, which every GPU does, or by its own instruction. v_parts: of a forward or decode,
    the programs that share a tile of rows, each with a part of the columns of V and O, and all of
    S. Raises InvalidArgument.
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
    persistent: bool = False
    widening: Widening = "bits"
    v_parts: int = 1

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
            ("widening", get_args(Widening)),
            ("v_parts", V_PARTS),
        ):
            value = getattr(self, field)
            if value not in values or isinstance(value, bool):
                raise InvalidArgument(
                    f"{field} must be one of {', '.join(map(str, values))}: got {value!r}"
                )
        if not isinstance(self.persistent, bool):
            raise InvalidArgument(f"persistent must be true or false: got {self.persistent!r}")

    @property
    def label(self) -> str:
        """The config in one word, as it stands in kernel names."""
        parts = [f"br{self.br}", f"bc{self.bc}", f"w{self.num_warps}", f"s{self.num_stages}"]
        parts += [self.schedule, self.loads]
        if self.order != "plain":
            parts.append(self.order)
        if self.persistent:
            parts.append("persistent")
        if self.head_dims != "exact":
            parts.append("any_dim")
        if self.split_keys > 1:
            parts.append(f"split{self.split_keys}")
        if self.widening != "bits":
            parts.append(self.widening)
        if self.v_parts > 1:
            parts.append(f"v{self.v_parts}")
        return "_".join(parts)

    @property
    def takes_heads(self) -> bool:
        """Whether the kernel is told how many heads there are in all, which its grid does not say
        or does not end with.
        """
        return self.persistent or self.order == "grouped"

    @property
    def interpretable(self) -> bool:
        """Whether Triton's interpreter can run the kernel: not Gluon's, for which it has none."""
        return self.schedule != "hopper"

    @property
    def needs_gpu(self) -> bool:
        """Whether only a GPU can say that the kernel is right: no interpreter runs Gluon, and none
        shows what the compiler makes of one warp's code when it deals it out to several.
        """
        return self.schedule in ("hopper", "auto")

    @property
    def consumers(self) -> int:
        """Warpgroups that compute, in schedule hopper; 0 in all others."""
        return self.br // WARPGROUP_ROWS if self.schedule == "hopper" else 0

    @property
    def block_warps(self) -> int:
        """Warps of a block: in schedule hopper those of all consumers, and four of which one loads
        (registers are handed over by whole warpgroups); in schedule auto as Triton adds them.
        """
        if self.schedule == "auto":
            return AUTO_BLOCK_WARPS
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
_HEAD_DIMS = (16, 32, 64, 128, 256, 512)
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
_WIDEST_TILES: dict[str, dict[str, _Tile]] = {
    # The same for head dims above 256, forward and decode in two parts of V: at most 48 KiB of
    # shared memory on gfx942, 82 KiB elsewhere.
    "forward": {"half": (32, 32, 8, 2), "tf32": (16, 16, 4, 1), "ieee": (16, 16, 4, 1)},
    "decode": {"half": (16, 32, 8, 2), "tf32": (16, 16, 4, 1), "ieee": (16, 16, 4, 1)},
    "combine": {"half": (16, 16, 4, 1), "ieee": (16, 16, 4, 1)},
    "append": {"half": (16, 16, 4, 1), "ieee": (16, 16, 4, 1)},
}
_DEFAULT_TILES["backward_fused"] = {
    # With one stage: dQ passes through shared memory too.
    kind: tuple((br, bc, warps, 1) for br, bc, warps, _ in tiles)
    for kind, tiles in _DEFAULT_TILES["backward_dkv"].items()
}


WIDEST_DECODE = 64
"""Rows that a default of decode takes together at most: beyond, a second program reads the keys
from L2."""


def default_config(spec: AttentionSpec) -> KernelConfig:
    """The conservative config of the spec's default kernel: legal on every known target."""
    if default_head_dim(spec) == _HEAD_DIMS[-1]:
        return _widest_tile(spec)
    kind = "half" if spec.element_bytes == 2 else spec.precision
    place = _HEAD_DIMS.index(default_head_dim(spec))
    br, bc, warps, stages = _DEFAULT_TILES[spec.direction][kind][place]
    if spec.bias != "none" and br * bc == 64 * 64:
        br = 32  # 64 x 64 elements of a mask take the registers of sm_80, and a loop spills
    # The loads of a block table run a stage ahead of the pages that they name.
    stages += spec.paged and spec.direction in ("decode", "forward")
    return KernelConfig(br=br, bc=bc, num_warps=warps, num_stages=stages, head_dims="padded")


def _widest_tile(spec: AttentionSpec) -> KernelConfig:
    """The default of head dims above 256, whose backward there is none of."""
    kind = "half" if spec.element_bytes == 2 else spec.precision
    br, bc, warps, stages = _WIDEST_TILES[spec.direction][kind]
    stages += spec.paged and spec.direction == "decode"
    parts = 2 if spec.direction in ("forward", "decode") else 1
    return KernelConfig(
        br=br, bc=bc, num_warps=warps, num_stages=stages, head_dims="padded", v_parts=parts
    )


def default_configs(spec: AttentionSpec) -> tuple[KernelConfig, ...]:
    """The configs of all default kernels of a spec: default_config, and for decode a wider one
    where it is legal on all known targets that the first is; of a float8 cache both once more, by
    the instruction that widens its elements where there is one.
    """
    first = default_config(spec)
    if spec.direction != "decode":
        return (first,)
    wide = replace(first, br=WIDEST_DECODE)
    fits = all(
        why_illegal(spec, wide, gpu) is None or why_illegal(spec, first, gpu) is not None
        for gpu in TARGETS.values()
    )
    found: tuple[KernelConfig, ...] = (first, wide) if fits else (first,)
    if spec.kv_dtype == "float8_e4m3":
        found += tuple(replace(config, widening="native") for config in found)
    return found


def default_head_dim(spec: AttentionSpec) -> int:
    """The padded head dim whose default kernel serves this spec."""
    least = FP8_DEPTH if spec.fp8 else 0
    return padded(max(spec.head_dim, spec.head_dim_v, least))


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
    if config.v_parts > 1 and (config.takes_heads or config.order == "head_reversal"):
        return (
            "v_parts goes with order plain or longest_first, and not with persistent: "
            f"got {config.order}{' and persistent' * config.persistent}"
        )
    if config.v_parts > 1:
        ways = (spec.direction, config.schedule, config.loads)
        if ways not in (("forward", "fa2", "pointer"), ("decode", "fa2", "pointer")):
            return f"v_parts goes with forward and decode, fa2 and pointer: got {', '.join(ways)}"
        if padded(spec.head_dim_v) // config.v_parts < 64:
            return (
                "a part of V has 64 columns at least: "
                f"got head_dim_v {spec.head_dim_v} and v_parts {config.v_parts}"
            )
    if config.widening == "native" and (spec.direction, spec.kv_dtype) != ("decode", "float8_e4m3"):
        return (
            "widening native goes with direction decode and kv_dtype float8_e4m3: "
            f"got {spec.direction} and {spec.kv_dtype}"
        )
    if spec.direction in DECODING:
        return _illegal_decoding(spec, config)
    if config.split_keys > 1:
        return f"split_keys goes with direction decode: got {spec.direction}"
    if config.order != "plain" and not spec.causal:
        return f"order {config.order} needs a causal mask: without one all tiles are equally long"
    if (reason := _illegal_order(spec, config)) is not None:
        return reason
    if config.head_dims == "padded":
        if padded(spec.head_dim) != spec.head_dim or spec.head_dim != spec.head_dim_v:
            dims = f"{spec.head_dim} and {spec.head_dim_v}"
            return f"head_dims padded needs equal powers of two: got {dims}"
        if config.loads == "descriptor":
            return "head_dims padded goes with pointer loads: a default must take any tensor"
    if spec.fp8 and config.loads == "descriptor" and (spec.head_dim % 16 or spec.head_dim_v % 16):
        return (
            "descriptor loads need rows of whole 16 bytes, so that fp8 takes head dims that are "
            f"multiples of 16: got {spec.head_dim} and {spec.head_dim_v}"
        )
    if spec.fp8 and min(padded(spec.head_dim), padded(spec.head_dim_v), config.bc) < FP8_DEPTH:
        return (
            f"fp8 products are {FP8_DEPTH} deep: got head dims {spec.head_dim} and "
            f"{spec.head_dim_v}, bc {config.bc}"
        )
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
    if config.schedule == "auto" and (reason := _illegal_auto(spec, config)) is not None:
        return reason
    if config.schedule != "fa2":
        if spec.direction != "forward" and (
            config.schedule != "s_ahead" or spec.direction not in AHEAD
        ):
            has = "schedules fa2 and s_ahead" if spec.direction in AHEAD else "schedule fa2"
            return f"direction {spec.direction} has {has} alone: got {config.schedule}"
        packed = spec.varlen and spec.direction != "forward"
        if spec.scores_featured or spec.block_mask or packed:
            words = (word for word in spec.feature_words if packed or word != "varlen")
            features = " and ".join(words)
            return f"features ({features}) go with schedule fa2: got {config.schedule}"
    return _illegal_backward(spec, config)


def _illegal_auto(spec: AttentionSpec, config: KernelConfig) -> str | None:
    """What Triton does not deal out to warps, whatever the GPU (docs/hopper.md has what does)."""
    if config.loads != "descriptor":
        return f"schedule auto goes with descriptor loads: got {config.loads}"
    if spec.element_bytes != 2:
        return f"schedule auto multiplies 16-bit operands: got {spec.dtype}"
    if config.num_warps != AUTO_WARPS:
        return f"schedule auto has num_warps {AUTO_WARPS}: got {config.num_warps}"
    if config.num_stages < 2:
        return "schedule auto needs num_stages 2 at least: its loads run ahead"
    if min(spec.head_dim, spec.head_dim_v) < 33 or config.bc < 64:
        return "schedule auto has head dims padded to 64 and more, and tiles of 64 keys and more"
    return None


def _illegal_order(spec: AttentionSpec, config: KernelConfig) -> str | None:
    """What only the plain forward template has a variant of."""
    plainly = spec.direction == "forward" and config.schedule in ("fa2", "s_ahead")
    if spec.block_mask and config.persistent:
        return "block_mask goes without persistent"
    if spec.varlen and (config.takes_heads or config.order == "head_reversal"):
        return (
            "varlen goes with order plain or longest_first, and not with persistent, for its tiles "
            f"are not all there: got {config.order}{' and persistent' * config.persistent}"
        )
    if config.order in ("head_reversal", "grouped") and not plainly:
        return (
            f"order {config.order} goes with direction forward and schedule fa2 or s_ahead: "
            f"got {spec.direction} and {config.schedule}"
        )
    if config.persistent and not plainly:
        return (
            f"persistent goes with direction forward and schedule fa2 or s_ahead: "
            f"got {spec.direction} and {config.schedule}"
        )
    return None


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
    if config.persistent:
        return f"persistent goes with direction forward: got {spec.direction}"
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
    if spec.fp8 and not (gpu.is_nvidia and gpu.capability >= 89):
        other = ", which multiplies e4m3fnuz, another type" if gpu.arch == "gfx942" else ""
        return (
            "fp8 needs the float8_e4m3 matrix instructions of sm_89 and later: "
            f"{gpu.slug} is {gpu.arch}{other}"
        )
    if config.widening == "native" and not (gpu.is_nvidia and gpu.capability >= 89):
        return (
            f"widening native needs the e4m3 instructions of sm_89 and later: {gpu.slug} is "
            f"{gpu.arch}"
        )
    if config.schedule == "auto" and config.br not in AUTO_BR.get(gpu.arch, ()):
        known = " or ".join(f"br {max(br)} at most on {arch}" for arch, br in AUTO_BR.items())
        return f"schedule auto needs {known}: got br={config.br}, and {gpu.slug} is {gpu.arch}"
    if spec.precision == "tf32" and gpu.arch == "gfx950":
        return "precision tf32 needs tf32 matrix instructions: gfx950 has none"
    threads = config.block_warps * gpu.warp_size
    if threads > 1024:
        return f"a block holds 1024 threads at most: num_warps={config.num_warps} makes {threads}"
    return None


def shared_bound_bytes(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> int:
    """A lower bound of the shared memory the compiled kernel takes, in bytes.

    A pipelined loop of n stages keeps n tiles of what it walks where wgmma reads them from shared
    memory, beside the tiles it holds, and the forward's s_ahead one more of K; elsewhere it keeps
    n - 1. Forward and dQ hold br rows (Q, and dO) and walk K and V; dK and dV hold K and V and walk
    Q and dO. Seen in kernels compiled with Triton 3.7.1.
    """
    dims = padded(spec.head_dim), padded(spec.head_dim_v)
    of_q, of_do = (config.br * dim * spec.operand_bytes for dim in dims)
    of_k, of_v = (config.bc * dim * spec.kv_bytes for dim in dims)
    of_v //= config.v_parts
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
        next_k = ("forward", "s_ahead", "descriptor")
        ahead = of_k if (spec.direction, config.schedule, config.loads) == next_k else 0
        # O of a tile is stored from a place of its own while Q of the next is loaded.
        stored = of_do if config.persistent and config.loads == "descriptor" else 0
        return held + config.num_stages * sum(walked) + ahead + stored
    return (config.num_stages - 1) * sum(walked)


def _uses_wgmma(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> bool:
    """Whether the products become warpgroup instructions: 64 rows and 4 warps at least, 16-bit
    operands.
    """
    return (
        gpu.arch == "sm_90"
        and spec.element_bytes == spec.kv_bytes == 2
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
    if config.schedule == "auto" and gpu.arch == "sm_100":
        return None  # accumulators lie in tensor memory, which Triton reads by parts
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
