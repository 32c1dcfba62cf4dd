"""KernelConfig: how a spec is computed. kernel_name() names the pair; spec/legality.py says what
cannot be.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import Literal, get_args

from flashgen.errors import InvalidArgument
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.vocabulary import Direction, padded

Schedule = Literal["fa1", "fa2", "s_ahead", "hopper", "blackwell", "ampere", "auto"]
Loads = Literal["pointer", "descriptor"]
Order = Literal["plain", "longest_first", "head_reversal", "grouped"]
HeadDims = Literal["exact", "padded"]
Widening = Literal["bits", "native"]

LOADS_LABEL: dict[Loads, str] = {"pointer": "ptr", "descriptor": "tma"}
ORDER_LABEL: dict[Order, str] = {
    "plain": "",
    "longest_first": "_lpt",
    "head_reversal": "_rev",
    "grouped": "_grp",
}
"""How labels write the fields loads and order; lpt: longest processing time first."""
LONGEST_NAME = 60
"""Characters of a kernel's name beyond which its features are abbreviated."""

TILES = (16, 32, 64, 128, 256)
PLAIN_SIDES = (16, 32, 64, 128)
"""Sides of the pointer twin of a schedule in Gluon, of which 256 rows would spill."""
HOPPER_SIDES = (*TILES, 192)
HOPPER_WARPS = (8, 12)
"""Warps that compute in schedule hopper: two or three warpgroups, the consumers."""
WARPGROUP, WARPGROUP_ROWS = 4, 64
"""Warps of a warpgroup, and what a consumer owns of a tile: rows of Q, or keys in BY_KEYS."""
AUTO_WARPS, AUTO_BLOCK_WARPS = 4, 12
"""num_warps of schedule auto, and the warps that Triton 3.6 to 3.9 make of them."""
AUTO_BR = {"sm_90": (64,), "sm_100": (64, 128)}
"""Rows of Q for which Triton deals out the loop of schedule auto, by architecture."""
WARPS = (1, 2, 4, 8, 16)
STAGES = (1, 2, 3, 4, 5)
V_PARTS = (1, 2, 4)
MAXNREG = (0, 128)
"""Registers a thread takes at most, 0 for no limit: with 128, two blocks of 8 warps share an SM."""
EXP2_BY_FMA = (0, 4, 6, 8, 12, 16)
"""Of 32 exp2 of schedule blackwell, those that multiply-add computes in place of MUFU."""
RESCALE_LOG2 = (0, 8)
"""By how much a row's maximum of schedule blackwell may grow, in log2, before O is rescaled. P of a
row is 2^8 at most then: far below float16's 65,504, and rounded to as many bits as below 1."""
SPLIT_KEYS = (1, 256, 512, 1024, 2048, 4096)
BLOCKS_PER_SM = range(1, 33)
"""Of a decode: no SM holds more."""

TENSOR_ROWS, TENSOR_COLUMNS = 128, 512
"""Lanes of tensor memory, which are rows of a tile of S and O of schedule blackwell, one a thread
(keys, where programs own keys); and its columns of 32 bits (PTX ISA, tcgen05)."""
WARP_ROWS = 32
"""Lanes of tensor memory that a warp reaches."""
REGISTER_SPLIT = {2: (240, 24), 3: (160, 32)}
"""Registers of a consumer's thread and of the producer's in schedule hopper, by the number of
consumers: multiples of 8, all warpgroups' together 65,536 at most."""

FP8_DEPTH = 32
"""Elements that an fp8 matrix instruction sums at least (PTX ISA: mma m16n8k32, wgmma k32)."""

BY_KEYS = ("backward_dkv", "backward_fused")
"""Directions whose programs own a tile of keys, and walk the rows of Q."""
AHEAD = ("forward", "backward_dq", *BY_KEYS)
"""Directions that have schedules s_ahead and hopper."""


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """One way to compute a spec.

    Schedules: fa2 is the textbook order; s_ahead issues a product before the exp2 that need not
    wait for it (the next QK^T in the forward, dO V^T of the same tile in the backward); fa1 has
    FlashAttention-1's loops; auto is fa2 in one loop, which Triton deals out to warps that load and
    warps that compute; ampere (Gluon) is fa2 for mma.sync, 16 rows a warp, its layouts written
    down, of one stage; hopper (Gluon) has a warp that loads beside num_warps that compute, in
    warpgroups of 64 rows, or 64 keys where programs own keys; blackwell (Gluon) has warps that
    load, multiply and rescale O beside num_warps of softmax, 32 rows a warp; in the backward none
    that rescale, and two warpgroups for a tile of 128 rows, or keys.

    Orders: plain; longest_first within a head; head_reversal, so in every second head, which puts a
    long tile after a short one; grouped, longest first over heads whose K and V fit in L2 together.

    Args:
        br: rows of Q in a tile, in every direction.
        bc: rows of K and V in a tile.
        num_warps: warps that compute.
        num_stages: tiles of loads under way; of schedule hopper, the places of its rings.
        schedule: the order of products, exp2 and loads in the loop.
        loads: pointer, or descriptor (TMA).
        order: the order in which tiles of Q are computed.
        head_dims: exact (known when compiling), or padded (arguments: serves all up to the spec's).
        split_keys: of a decode, the least keys of a split; 1 is the rule of spec/grid_rules.py.
        persistent: as many programs as SMs, each of which takes every n-th tile.
        widening: how a decode widens float8_e4m3: on their bits, or by the GPU's own instruction.
        v_parts: programs that share a tile of rows, each with a part of the columns of V and O.
        maxnreg: registers that a thread takes at most; 0 is as many as ptxas wants.
        whole_rows: of mma.sync, a warp has whole rows. No knob: spec/whole_rows.py derives it.
        next_s: of hopper's fused backward, S of the next tile comes before dQ of this one is added.
        exp2_by_fma: of 32 exp2 of schedule blackwell, those that multiply-add computes.
        rescale_log2: of schedule blackwell, growth of a row's maximum that leaves O as it is.
        blocks_per_sm: of a decode's launch, not its kernel: blocks on an SM that splits fill.

    Raises:
        InvalidArgument: naming the field.

    Examples:
        >>> from flashgen.spec import KernelConfig
        >>> KernelConfig(br=128, bc=64, num_warps=8, num_stages=3, schedule="s_ahead").label
        'br128_bc64_w8_s3_s_ahead_ptr'
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
    maxnreg: int = 0
    whole_rows: bool = False
    next_s: bool = False
    exp2_by_fma: int = 0
    rescale_log2: int = 0
    blocks_per_sm: int = 1

    def __post_init__(self) -> None:
        for field, values in (
            ("br", HOPPER_SIDES if self.schedule == "hopper" else TILES),
            ("bc", HOPPER_SIDES if self.schedule == "hopper" else TILES),
            ("num_warps", HOPPER_WARPS if self.schedule == "hopper" else WARPS),
            ("num_stages", STAGES),
            ("schedule", get_args(Schedule)),
            ("loads", get_args(Loads)),
            ("order", get_args(Order)),
            ("head_dims", get_args(HeadDims)),
            ("split_keys", SPLIT_KEYS),
            ("widening", get_args(Widening)),
            ("v_parts", V_PARTS),
            ("maxnreg", MAXNREG),
            ("exp2_by_fma", EXP2_BY_FMA),
            ("rescale_log2", RESCALE_LOG2),
            ("blocks_per_sm", BLOCKS_PER_SM),
        ):
            value = getattr(self, field)
            if value not in values or isinstance(value, bool):
                known = ", ".join(map(str, values))
                if self.schedule == "hopper" and field == "num_warps":
                    known += " in schedule hopper, those that compute (earlier: 4, of a warpgroup)"
                raise InvalidArgument(f"{field} must be one of {known}: got {value!r}")
        for field in ("persistent", "whole_rows", "next_s"):
            value = getattr(self, field)
            if not isinstance(value, bool):
                raise InvalidArgument(f"{field} must be true or false: got {value!r}")

    @property
    def label(self) -> str:
        """The config in one word, as it stands in tables, listings and kernel names:
        br128_bc64_w8_s2_fa2_tma_lpt. Fields at their defaults are left out.
        """
        tile = f"br{self.br}_bc{self.bc}_w{self.num_warps}_s{self.num_stages}"
        label = f"{tile}_{self.schedule}_{LOADS_LABEL[self.loads]}{ORDER_LABEL[self.order]}"
        label += "_pers" * self.persistent + "_anydim" * (self.head_dims == "padded")
        label += f"_split{self.split_keys}" * (self.split_keys > 1)
        label += "_native" * (self.widening == "native")
        label += f"_v{self.v_parts}" * (self.v_parts > 1)
        label += f"_r{self.maxnreg}" * (self.maxnreg > 0)
        label += "_rows" * self.whole_rows
        label += "_nexts" * self.next_s
        label += f"_fma{self.exp2_by_fma}" * (self.exp2_by_fma > 0)
        label += f"_lazy{self.rescale_log2}" * (self.rescale_log2 > 0)
        return label + f"_x{self.blocks_per_sm}" * (self.blocks_per_sm > 1)

    @property
    def kernel(self) -> KernelConfig:
        """The config without what only its launch depends on: two with the same are one kernel."""
        return self if self.blocks_per_sm == 1 else replace(self, blocks_per_sm=1)

    @property
    def takes_heads(self) -> bool:
        """Whether the number of heads is an argument of the kernel, because its grid does not
        tell.
        """
        return self.persistent or self.order == "grouped"

    @property
    def interpretable(self) -> bool:
        """Whether Triton's interpreter can run the kernel: not for Gluon."""
        return self.schedule not in ("hopper", "blackwell", "ampere")

    @property
    def executed(self) -> bool:
        """Whether a check without a GPU executes the compiled program, by flashgen.ptx: Triton's
        interpreter does not run Gluon, nor show what the compiler's warp specialization does.
        """
        return not self.interpretable or self.schedule == "auto"

    @property
    def needs_aligned(self) -> bool:
        """Whether base and strides of its tensors must be multiples of 16 bytes."""
        return self.loads == "descriptor" or self.schedule == "ampere"

    @property
    def consumers(self) -> int:
        """Warpgroups that compute, in schedule hopper; 0 in all others."""
        return self.num_warps // WARPGROUP if self.schedule == "hopper" else 0

    @property
    def specialized(self) -> bool:
        """Whether the text itself deals roles to warps (Gluon), and is loaded by descriptors."""
        return self.schedule in ("hopper", "blackwell")

    @property
    def row_tiles(self) -> int:
        """Tiles of 128 rows of a block of schedule blackwell; 0 in all others."""
        return self.br // TENSOR_ROWS if self.schedule == "blackwell" else 0

    def blocks_of_a_tile(self, spec: AttentionSpec) -> int:
        """Programs that compute the scores of the same tile."""
        return 2 if self.schedule == "blackwell" and sums_one(spec) else 1

    @property
    def halves(self) -> bool:
        """Whether two warpgroups share a tile, half of its columns each: schedule blackwell's
        backward.
        """
        return self.schedule == "blackwell" and WARP_ROWS * self.num_warps > self.br

    def launch_options(self, spec: AttentionSpec) -> dict[str, int]:
        """The options of Triton besides the arguments of a kernel, for compiling and launching.

        Schedules hopper and blackwell have the warps of one warpgroup: their text requests the
        others. Multiply-add is fused explicitly, because Triton 3.9 warns that 3.10 will not fuse
        by default. The text of an invariant kernel says itself which are fused: a compiler may
        choose by the context.
        """
        warps = WARPGROUP if self.specialized else self.num_warps
        fuses = not spec.invariant
        options = {"num_warps": warps, "num_stages": self.num_stages, "enable_fp_fusion": fuses}
        return options | ({"maxnreg": self.maxnreg} if self.maxnreg else {})

    def block_warps(self, spec: AttentionSpec) -> int:
        """Warps of a block: in schedule hopper those that compute, and four of which one loads
        (registers are handed over by whole warpgroups); in schedule blackwell two of these four
        multiply or load, and four more rescale O, or add dQ to memory in the fused backward; in
        schedule auto as Triton adds them.
        """
        if self.schedule == "auto":
            return AUTO_BLOCK_WARPS
        alone = self.halves and spec.direction != "backward_fused"
        more = {"hopper": 1, "blackwell": 1 if alone else 2}.get(self.schedule, 0)
        return self.num_warps + more * WARPGROUP

    @property
    def register_split(self) -> tuple[int, int]:
        """Registers of a thread that computes and of one that loads; schedule hopper alone."""
        return REGISTER_SPLIT[self.consumers]

    def textbook(self, spec: AttentionSpec) -> KernelConfig:
        """The config with the same tile in the textbook schedule, fa2, which has every feature."""
        if not self.interpretable:
            return self.pointer_twin(spec)
        return replace(self, schedule="fa2", maxnreg=0)

    def pointer_twin(self, spec: AttentionSpec) -> KernelConfig:
        """The config launched instead if a call's tensors cannot have descriptors.

        s_ahead becomes fa2: without descriptors ptxas undoes the overlap, and often spills. So do
        hopper and blackwell, in plain Triton's tile of 128 rows, or keys, and 8 warps; and ampere,
        in a tile of 64 rows that fits with every head dim, or is that of an invariant spec's class.
        """
        if self.schedule == "ampere":
            bc = self.bc if spec.invariant else min(self.bc, 32)
            rows = spec.invariant and spec.head_dim_v > 64
            return replace(
                self, schedule="fa2", br=64, bc=bc, num_warps=4, num_stages=2, whole_rows=rows
            )
        if self.loads == "pointer":
            return self
        if self.specialized:
            plain: dict[str, int] = {"num_warps": 8, "num_stages": 2, "next_s": False}
            plain |= {"exp2_by_fma": 0, "rescale_log2": 0}
            plain |= {side: 128 for side in ("br", "bc") if getattr(self, side) not in PLAIN_SIDES}
            plain |= {"br": 64} if self.halves else {}  # S and dP are in registers there
            if shares_keys(spec):
                plain |= self._wide_twin(spec.direction)
            return replace(self, loads="pointer", schedule="fa2", **plain)  # type: ignore[arg-type]
        stages = min(self.num_stages, 2)
        return replace(self, loads="pointer", schedule="fa2", num_stages=stages, maxnreg=0)

    def _wide_twin(self, direction: Direction) -> dict[str, int]:
        """What of the pointer twin is smaller above head dim 128: it has all that it walks in two
        places, where Gluon has one ring, or one place of V. Larger tiles do not fit, or spill.
        """
        if self.schedule == "hopper":
            return {"bc": 32} if direction == "backward_dq" else {}
        return {"br": 32, "bc": 32} if direction in BY_KEYS else {"bc": 64}


_LABEL = (
    r"br(?P<br>[0-9]{1,9})_bc(?P<bc>[0-9]{1,9})_w(?P<num_warps>[0-9]{1,9})_s(?P<num_stages>[0-9]{1,9})"
    rf"_(?P<schedule>{'|'.join(get_args(Schedule))})_(?P<loads>{'|'.join(LOADS_LABEL.values())})"
    rf"(?P<order>{'|'.join(ORDER_LABEL.values())})(?P<persistent>_pers)?(?P<any_dim>_anydim)?"
    r"(_split(?P<split_keys>[0-9]{1,9}))?(_(?P<widening>native))?(_v(?P<v_parts>[0-9]{1,9}))?"
    r"(_r(?P<maxnreg>[0-9]{1,9}))?(?P<whole_rows>_rows)?(?P<next_s>_nexts)?"
    r"(_fma(?P<exp2_by_fma>[0-9]{1,9}))?(_lazy(?P<rescale_log2>[0-9]{1,9}))?"
    r"(_x(?P<blocks_per_sm>[0-9]{1,9}))?"
)


@functools.lru_cache(4096)
def config_of(label: str) -> KernelConfig:
    """The config that a label names. Raises InvalidArgument."""
    found = re.fullmatch(_LABEL, label)
    if found is None:
        raise InvalidArgument(
            f"config must be a label like br128_bc64_w8_s2_fa2_ptr: got {label!r}"
        )
    config = KernelConfig(
        br=int(found["br"]),
        bc=int(found["bc"]),
        num_warps=int(found["num_warps"]),
        num_stages=int(found["num_stages"]),
        schedule=found["schedule"],  # type: ignore[arg-type]  # of the words in the pattern
        loads={label: loads for loads, label in LOADS_LABEL.items()}[found["loads"]],
        order={label: order for order, label in ORDER_LABEL.items()}[found["order"]],
        head_dims="padded" if found["any_dim"] else "exact",
        split_keys=int(found["split_keys"] or 1),
        persistent=found["persistent"] is not None,
        widening="native" if found["widening"] else "bits",
        v_parts=int(found["v_parts"] or 1),
        maxnreg=int(found["maxnreg"] or 0),
        whole_rows=found["whole_rows"] is not None,
        next_s=found["next_s"] is not None,
        exp2_by_fma=int(found["exp2_by_fma"] or 0),
        rescale_log2=int(found["rescale_log2"] or 0),
        blocks_per_sm=int(found["blocks_per_sm"] or 1),
    )
    if config.label != label:
        raise InvalidArgument(f"config must be written as its label {config.label}: got {label!r}")
    return config


def rows_of_eight(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Whether the kernel relies on strides that are multiples of 8 elements.

    That is so if contiguous rows are not multiples of 16 apart, the only class that Triton detects
    itself. The template declares it, and the launcher ensures it: both call this.
    """
    exact_pointers = config.loads == "pointer" and config.head_dims == "exact"
    narrow = spec.head_dim % 16 != 0 or spec.head_dim_v % 16 != 0
    streams = spec.direction in ("combine", "append")
    return exact_pointers and config.schedule != "fa1" and narrow and not streams


def o_apart(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Whether schedule hopper or blackwell stores O from its own buffer in shared memory, not from
    Q's.

    A persistent program loads Q of its next tile while O of this one is stored. From head dim 256
    on both do not fit, and Q waits. The template and the bound of shared memory call this.
    """
    if config.schedule == "blackwell":
        return config.persistent
    dim, dim_v = padded(spec.head_dim), padded(spec.head_dim_v)
    return dim != dim_v or (config.persistent and dim_v <= 128)


def k_pieces(spec: AttentionSpec) -> int:
    """In how many tiles of 64 columns schedule blackwell's forward has Q and K: 3 where they would
    be padded from 192 to 256, else 1 of all columns.
    """
    return 3 if spec.direction == "forward" and 128 < spec.head_dim <= 192 else 1


def walked_side(spec: AttentionSpec) -> int:
    """What schedule blackwell's backward walks at a time, keys for dQ, rows for dK and dV: 64 where
    a head dim is padded to 256, by shared memory and, beside sums of 256 columns, by tensor memory;
    else 128. The fused kernel has tiles of dQ, which take 128 lanes.
    """
    return 64 if spec.direction != "backward_fused" and shares_keys(spec) else TENSOR_ROWS


def s_places(spec: AttentionSpec) -> int:
    """How many tiles of S the backward of schedule blackwell has in tensor memory: two where they
    fit beside dP and what it sums, so that a product runs ahead; else one.
    """
    return 2 if sum_columns(spec) + 3 * walked_side(spec) <= TENSOR_COLUMNS else 1


def sum_columns(spec: AttentionSpec) -> int:
    """Columns of tensor memory of what its backward sums: dK, dV, or both, or dQ."""
    of_v = padded(spec.head_dim_v) if spec.direction in BY_KEYS and not sums_one(spec) else 0
    return padded(spec.head_dim) + of_v


def sums_one(spec: AttentionSpec) -> bool:
    """Whether a block of schedule blackwell sums either dK or dV, and two blocks share a tile of
    keys: where both are padded to 256, and do not fit beside S and dP of 64 rows.
    """
    dims = padded(spec.head_dim), padded(spec.head_dim_v)
    return spec.direction == "backward_dkv" and min(dims) > 128


def shares_keys(spec: AttentionSpec) -> bool:
    """Whether a head dim is padded to 256. There both consumers of schedule hopper's dK and dV
    share 64 keys, each with half of the columns of dK and dV: these of 64 keys do not fit one.
    """
    return max(padded(spec.head_dim), padded(spec.head_dim_v)) > 128


def batches(spec: AttentionSpec, config: KernelConfig) -> int:
    """Batches of wgmma that the text of a tile opens: one a product. Of schedule hopper dQ has dP
    and its sum in halves, and dK and dV take 64 rows of the tile after another.
    """
    if config.schedule == "hopper" and not shares_keys(spec):
        if spec.direction == "backward_dq":
            return spec.products + 2
        if spec.direction == "backward_dkv":
            return spec.products * (config.br // WARPGROUP_ROWS)
    return spec.products


def kernel_name(spec: AttentionSpec, config: KernelConfig) -> str:
    """The one name of a kernel: its file, its function, in the profiler and in every error."""
    names = [f"{name}_{config.kernel.label}" for name in (spec.name, *spec.short_names)]
    return next((name for name in names if len(name) <= LONGEST_NAME), names[-1])
