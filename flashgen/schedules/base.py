"""Schedule: all that is known of one way to compute attention, as a module of this package says it.

The defaults are those of the textbook's, schedule fa2. A schedule overrides what it has of its own,
and config.py lists it; everything else in flashgen asks SCHEDULES[config.schedule].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.vocabulary import Direction, padded

Loads = Literal["pointer", "descriptor"]
Order = Literal["plain", "longest_first", "head_reversal", "grouped"]
HeadDims = Literal["exact", "padded"]

LOADS_LABEL: dict[Loads, str] = {"pointer": "ptr", "descriptor": "tma"}
ORDER_LABEL: dict[Order, str] = {
    "plain": "",
    "longest_first": "_lpt",
    "head_reversal": "_rev",
    "grouped": "_grp",
}
"""How labels write the fields loads and order; lpt: longest processing time first."""

TILES = (16, 32, 64, 128, 256)
WARPS = (1, 2, 4, 8, 16)
STAGES = (1, 2, 3, 4, 5)
V_PARTS = (1, 2, 4)
MAXNREG = (0, 128)
"""Registers a thread takes at most, 0 for no limit: with 128, two blocks of 8 warps share an SM."""

WARPGROUP, WARPGROUP_ROWS = 4, 64
"""Warps of a warpgroup, and the rows of its products: wgmma, or tcgen05."""
MMA_SYNC = ("sm_80", "sm_86", "sm_89", "sm_120", "sm_121")
"""Architectures of NVIDIA whose products are mma.sync in every tile."""
TENSOR_MEMORY = ("sm_100", "sm_103")
"""Those whose products are tcgen05, with accumulators in tensor memory."""
TENSOR_ROWS, TENSOR_COLUMNS = 128, 512
"""Lanes of tensor memory, and its columns of 32 bits (PTX ISA, tcgen05)."""
FP8_DEPTH = 32
"""Elements that an fp8 matrix instruction sums at least (PTX ISA: mma m16n8k32, wgmma k32)."""

BY_KEYS: tuple[Direction, ...] = ("backward_dkv", "backward_fused", "backward_ds")
"""Directions whose programs own a tile of keys, and walk the rows of Q."""
AHEAD: tuple[Direction, ...] = ("forward", "backward_dq", *BY_KEYS)
"""Directions that have several schedules."""
IN_ORDER: tuple[Direction, ...] = ("backward_dkv", "backward_dq", "backward_ds")
"""The gradients whose sums have an order."""

TileShape = tuple[int, int, int, int]
"""br, bc, num_warps, num_stages."""
FieldChoice = Mapping[str, Any]
"""Fields of a config that are chosen together."""


def one_of(values: Iterable[Any], label: str = "", rank: int = 1) -> dict[str, Any]:
    """What a field of a config may be, and how a label shows it where it is not the default: {} is
    a number. Labels begin with the lowest rank; fields of one rank are in the order of the class.
    """
    return {"values": tuple(values), "label": label, "rank": rank}


FLAG = (False, True)


@dataclass(frozen=True, kw_only=True)
class CommonFields:
    """What every schedule has of KernelConfig, which documents each field."""

    br: int = field(metadata=one_of(TILES))
    bc: int = field(metadata=one_of(TILES))
    num_warps: int = field(metadata=one_of(WARPS))
    num_stages: int = field(metadata=one_of(STAGES))
    schedule: str = "fa2"
    loads: Loads = field(default="pointer", metadata=one_of(LOADS_LABEL))
    order: Order = field(default="plain", metadata=one_of(ORDER_LABEL))
    persistent: bool = field(default=False, metadata=one_of(FLAG, "_pers", 0))
    head_dims: HeadDims = field(default="exact", metadata=one_of(("exact", "padded"), "_anydim", 0))
    v_parts: int = field(default=1, metadata=one_of(V_PARTS, "_v{}"))
    maxnreg: int = field(default=0, metadata=one_of(MAXNREG, "_r{}"))
    whole_rows: bool = field(default=False, metadata=one_of(FLAG, "_rows"))


class Bytes(NamedTuple):
    """Bytes of the tiles of a program, padded: q and do have br rows, k and v bc. It holds some of
    them, and walks two, a tile of each at a time. shared: products read their operands in shared
    memory. chained: AMD's order of two products at 4 stages.
    """

    q: int
    k: int
    v: int
    do: int
    held: int
    walked: tuple[int, int]
    shared: bool
    chained: bool


TEMPLATES: dict[Direction, str] = {
    "forward": "attention_fwd.py.jinja",
    "backward_delta": "attention_bwd_delta.py.jinja",
    "backward_dkv": "attention_bwd_dkv.py.jinja",
    "backward_dq": "attention_bwd_dq.py.jinja",
    "backward_fused": "attention_bwd_dkv.py.jinja",
    "backward_dbias": "attention_bwd_dbias.py.jinja",
    "backward_ds": "attention_bwd_dkv.py.jinja",
    "backward_dq_of_ds": "attention_bwd_dq_of_ds.py.jinja",
    "decode": "attention_decode.py.jinja",
    "combine": "attention_combine.py.jinja",
    "append": "append_kv.py.jinja",
}
"""The textbook's, by direction."""

Fields = TypeVar("Fields", bound=CommonFields)


class Schedule(Generic[Fields]):
    """One way to compute attention. In methods, config is one of this schedule."""

    name: str
    gluon = False  # its text is Gluon, which Triton's interpreter does not run
    roles = False
    """Its warps have roles, by its text or by Triton, whose versions make different programs."""
    every_feature = False  # it has every feature, in pages, too
    directions: tuple[Direction, ...] = ("forward",)  # what it computes
    own_text: tuple[Direction, ...] = ()  # directions of which it has a template of its own
    features: ClassVar[Mapping[Direction, tuple[str, ...]]] = {}
    """Features that its own texts have, by their fields of a spec."""
    in_class: tuple[Direction, ...] = ()
    """Directions in which it sums in the order of the numeric class of an invariant spec."""
    orders = False  # its forward has all orders, and persistent grids
    hands_out = False  # a persistent program takes its next tile from a counter, not every n-th
    hands_out_gradients: tuple[Direction, ...] = ()  # directions that have such programs, too
    closes_sums = True  # its texts may close partial sums, as invariant specs need it
    state_in_memory = False
    """O and its sums pass through memory, as a program walks all rows of a head."""
    in_parts = False  # all its products are in parts of 64 columns
    ahead = False  # S of a tile is computed before P of the last one is multiplied
    last_apart = False  # and its forward's last tile comes behind the loops, unless it is invariant
    masked_apart = False  # its forward's tiles at the diagonal and the end come behind the loop
    mask_first: tuple[Direction, ...] = ()
    """Directions whose loop over tiles with a mask is listed before that over the others."""
    unestimated = ""  # why its time has no estimate
    admitted = 0  # how many likely configs of a spec a table may list as executed
    archs: tuple[str, ...] = ()
    """The only architectures that have its instructions; none where all do."""
    made = ""  # of or for what it is made, where only these have it
    accumulates_in_tensor_memory = False  # where the GPU has it
    least_overlap: ClassVar[Mapping[Direction, float]] = {}
    """The share of exp2 that it is made to issue under wgmma on sm_90, by direction."""
    loads: Loads = "descriptor"  # those of its own tiles
    tiles: ClassVar[Mapping[Direction, tuple[TileShape, ...]]] = {}
    """The likely ones, the likeliest first."""
    ways: ClassVar[Mapping[Direction, tuple[FieldChoice, ...]]] = {}
    """The choices of its own fields, with each tile; the first with every order."""
    gpu_ways: ClassVar[Mapping[Direction, tuple[FieldChoice, ...]]] = {}
    """Further ones, which no estimate ranks."""
    values: ClassVar[Mapping[str, tuple[int, ...]]] = {}
    """What fields may be, where that differs from CommonFields."""
    notes: ClassVar[Mapping[str, str]] = {}  # what an error says beside these values

    def template(self, direction: Direction) -> str:
        """The file of templates/ that it is rendered from."""
        own = f"_{self.name}.py" if direction in self.own_text else ".py"
        return TEMPLATES[direction].replace(".py", own)

    def shared_keys(self, spec: AttentionSpec) -> bool:
        """Whether two warpgroups own the same keys, and each half of what is summed."""
        return False

    def worth_trying(self, spec: AttentionSpec, config: Fields, gpu: Gpu) -> bool:
        """Whether it may bring something there."""
        return True

    def why_not(self, spec: AttentionSpec, config: Fields) -> str | None:
        """Why its text has no such variant, whatever the GPU."""
        return None

    def why_not_on(self, config: Fields, gpu: Gpu) -> str | None:
        """Why a GPU cannot run it."""
        if not self.archs or gpu.arch in self.archs:
            return None
        return f"schedule {self.name} is made {self.made}: {gpu.slug} is {gpu.arch}"

    def shared_bytes(self, spec: AttentionSpec, config: Fields, tiles: Bytes) -> int:
        """A lower bound of its shared memory.

        A pipelined loop of n stages keeps n tiles of what it walks where products read them in
        shared memory. Elsewhere it keeps n - 1, but for AMD's order of two chained products, which
        keeps one. Of a block mask the lists are a load ahead of the tiles, and leave them no more
        than 2 stages. Of fp8 V is turned over on its way to wgmma, and where pointers load it there
        is one tile of that. Seen in kernels compiled with Triton 3.7.1.
        """
        walked = tiles.walked
        if self.state_in_memory or config.num_stages == 1 or spec.direction == "backward_dbias":
            return max(walked)
        if spec.paged:  # the table is a load ahead of the pages, and takes stages for itself
            return max(walked)
        stages = min(config.num_stages, 2) if spec.block_mask else config.num_stages
        if not tiles.shared:
            return (1 if tiles.chained else stages - 1) * sum(walked)
        if spec.fp8 and config.loads == "pointer":
            return tiles.held + stages * tiles.k + tiles.v
        # O of a tile is stored from a separate buffer while Q of the next is loaded.
        apart = config.persistent and config.loads == "descriptor"
        of_o = tiles.do // spec.operand_bytes * spec.element_bytes * apart
        return tiles.held + stages * sum(walked) + of_o + self.bytes_ahead(spec, config, tiles)

    def bytes_ahead(self, spec: AttentionSpec, config: Fields, tiles: Bytes) -> int:
        """What it has in shared memory of the next tile."""
        return 0

    def register_limit(self, config: Fields, gpu: Gpu, limit: int) -> int | None:
        """Registers of a thread that accumulates, of those that a GPU leaves it; None where
        accumulators lie elsewhere.
        """
        return None if self.accumulates_in_tensor_memory and gpu.arch in TENSOR_MEMORY else limit

    def accumulators(self, spec: AttentionSpec, config: Fields) -> tuple[str, int]:
        """What a program holds in registers at once, in words and in float32 elements.

        The backward needs P until dP is there, so two tiles of scores.
        """
        dim, dim_v = padded(spec.head_dim), padded(spec.head_dim_v)
        scores = config.br * config.bc
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
        if spec.direction == "backward_dq_of_ds":
            return "dQ", config.br * dim
        if spec.direction == "backward_dbias":
            return "dBias, P and dP", 3 * scores
        return "dK, dV, P and dP", config.bc * (dim + dim_v) + 2 * scores

    def block_warps(self, spec: AttentionSpec, config: Fields) -> int:
        """Warps of a block."""
        return config.num_warps

    def consumers(self, config: Fields) -> int:
        """Warpgroups that compute and have a loop each; 0 where all warps run one."""
        return 0

    def blocks_of_a_tile(self, spec: AttentionSpec) -> int:
        """Programs that compute the scores of the same tile."""
        return 1

    def twin(self, spec: AttentionSpec, config: Fields) -> Fields:
        """The config launched instead if a call's tensors cannot have descriptors. Without them
        ptxas undoes the overlap of s_ahead, and often spills.
        """
        if config.loads == "pointer":
            return config
        stages = min(config.num_stages, 2)
        return replace(config, loads="pointer", schedule="fa2", num_stages=stages, maxnreg=0)

    def switches(self, spec: AttentionSpec, config: Fields) -> dict[str, int | bool]:
        """Numbers that its texts alone are compiled for, by name."""
        return {}

    def block(
        self, spec: AttentionSpec, config: Fields, tensor: str, page_size: int
    ) -> tuple[int, int]:
        """Rows and padded columns of the blocks that it loads or stores of a tensor by descriptor:
        q, k, v, o, and do, dq, dk, dv and ds, the gradients. page_size: where K and V lie in pages.
        """
        if tensor == "ds":
            return config.bc, config.br
        rows = config.bc if tensor in ("k", "v", "dk", "dv") else config.br
        return rows, padded(spec.head_dim if tensor in ("q", "k", "dq", "dk") else spec.head_dim_v)

    def added(self, shape: Sequence[int], rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """How dQ (batch, heads, seq, dim) lies in memory while tiles of so many rows are added to
        it, and the order of these dimensions that makes rows of them; none where they are rows.
        """
        return tuple(shape), ()

    def batches(self, spec: AttentionSpec, config: Fields) -> int:
        """Batches of wgmma that the text of a tile opens: one a product."""
        return spec.products


MOST_BOX_ROWS = 64
"""Of a page that the TMA unit loads at once."""
SWIZZLED_COLUMNS = 64
"""Columns of a box, that lie side by side in a swizzled tile: 128 bytes."""


def box_of_page(page_size: int, rows: int) -> tuple[int, int]:
    """Rows and columns of the boxes, each of one page, of a tile of so many rows of K or V."""
    return min(page_size, MOST_BOX_ROWS, rows), SWIZZLED_COLUMNS


def wide(spec: AttentionSpec) -> bool:
    """Whether a head dim is padded to 256 and more."""
    return max(padded(spec.head_dim), padded(spec.head_dim_v)) > 128


def specialized_twin(
    spec: AttentionSpec, config: Fields, smaller: FieldChoice, own: FieldChoice
) -> Fields:
    """The pointer twin of a schedule in Gluon whose warps have roles: plain Triton's tile of 128
    rows, or keys, and 8 warps; above head dim 128 with `smaller`, as it has all that it walks in
    two places, where Gluon has one ring, or one place of V. Larger tiles do not fit, or spill.
    own: its own fields, as they are off.
    """
    plain = {side: 128 for side in ("br", "bc") if getattr(config, side) not in PLAIN_SIDES}
    plain |= {"num_warps": 8, "num_stages": 2, **own, **(smaller if wide(spec) else {})}
    return replace(config, loads="pointer", schedule="fa2", **plain)  # type: ignore[arg-type]


PLAIN_SIDES = (16, 32, 64, 128)
"""Sides of the pointer twin of a schedule in Gluon, of which 256 rows would spill."""
