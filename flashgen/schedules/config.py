"""KernelConfig: how a spec is computed; SCHEDULES, which say all that depends on its schedule.

kernel_name() names a spec and a config together; legality.py says which go together.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields, replace
from typing import Any

from flashgen.errors import InvalidArgument
from flashgen.schedules.ampere import AMPERE
from flashgen.schedules.auto import AUTO
from flashgen.schedules.base import FLAG, LOADS_LABEL, ORDER_LABEL, WARPGROUP, Schedule
from flashgen.schedules.blackwell import BLACKWELL, BlackwellFields
from flashgen.schedules.decode import DecodeFields
from flashgen.schedules.hopper import HOPPER, HopperFields
from flashgen.schedules.textbook import FA1, FA2, S_AHEAD
from flashgen.spec.attention import AttentionSpec

SCHEDULES: Mapping[str, Schedule[Any]] = {
    each.name: each for each in (FA1, FA2, S_AHEAD, HOPPER, BLACKWELL, AMPERE, AUTO)
}
LONGEST_NAME = 60
"""Characters of a kernel's name beyond which its features are abbreviated."""


@dataclass(frozen=True, kw_only=True)
class KernelConfig(BlackwellFields, HopperFields, DecodeFields):
    """One way to compute a spec.

    Schedules: fa2 is the textbook order; s_ahead issues a product before the exp2 that need not
    wait for it; fa1 has FlashAttention-1's loops; auto is fa2 whose loop Triton deals out to warps
    with roles; ampere, hopper and blackwell are Gluon for mma.sync, wgmma and tcgen05. The modules
    of flashgen.schedules describe them.

    Orders: plain; longest_first within a head; head_reversal, so in every second head, which puts a
    long tile after a short one; grouped, longest first over the heads of a run (grid_rules.py).

    Args:
        br: rows of Q in a tile, in every direction.
        bc: rows of K and V in a tile.
        num_warps: warps that compute.
        num_stages: tiles of loads under way; of schedule hopper, the places of its rings.
        schedule: the order of products, exp2 and loads in the loop.
        loads: pointer, or descriptor (TMA).
        order: the order in which tiles of Q, or of K, are computed.
        persistent: as many programs as SMs, each with every n-th tile; in Gluon, the next left.
        head_dims: exact (known when compiling), or padded (arguments: serves all up to the spec's).
        v_parts: programs that share a tile of rows, each with a part of the columns of V and O.
        maxnreg: registers that a thread takes at most; 0 is as many as ptxas wants.
        whole_rows: of mma.sync, a warp has whole rows. No knob: whole_rows.py derives it.
        split_keys: of a decode, the least keys of a split; 1 is the rule of grid_rules.py.
        widening: how a decode widens float8_e4m3: on their bits, or by the GPU's own instruction.
        pdl: of a decode, its combine kernel starts before it ends (programmatic dependent launch).
        blocks_per_sm: of a decode's launch, not its kernel: blocks on an SM that splits fill.
        next_s: of hopper's fused backward, S of the next tile comes before dQ of this one is added.
        no_turns: of hopper's forward, consumers multiply when they come to it, not in turn.
        exp2_by_fma: of 32 exp2 of schedule blackwell, those that multiply-add computes.
        rescale_log2: of schedule blackwell, growth of a row's maximum that leaves O as it is.

    Raises:
        InvalidArgument: naming the field.

    Examples:
        >>> from flashgen.spec import KernelConfig
        >>> KernelConfig(br=128, bc=64, num_warps=8, num_stages=3, schedule="s_ahead").label
        'br128_bc64_w8_s3_s_ahead_ptr'
    """

    def __post_init__(self) -> None:
        its = SCHEDULES.get(self.schedule, FA2)
        for name, values in _VALUES.items():
            value = getattr(self, name)
            if values == FLAG:
                if not isinstance(value, bool):
                    raise InvalidArgument(f"{name} must be true or false: got {value!r}")
            elif value not in (known := its.values.get(name, values)) or isinstance(value, bool):
                listed = f"{', '.join(map(str, known))}{its.notes.get(name, '')}"
                raise InvalidArgument(f"{name} must be one of {listed}: got {value!r}")

    @property
    def label(self) -> str:
        """The config in one word, as it stands in tables, listings and kernel names:
        br128_bc64_w8_s2_fa2_tma_lpt. Fields at their defaults are left out.
        """
        tile = f"br{self.br}_bc{self.bc}_w{self.num_warps}_s{self.num_stages}"
        label = f"{tile}_{self.schedule}_{LOADS_LABEL[self.loads]}{ORDER_LABEL[self.order]}"
        for each in _LABELED:
            if (value := getattr(self, each.name)) != each.default:
                label += each.metadata["label"].format(value)
        return label

    @property
    def kernel(self) -> KernelConfig:
        """The config without what only its launch depends on: two with the same are one kernel."""
        return self if self.blocks_per_sm == 1 else replace(self, blocks_per_sm=1)

    @property
    def takes_heads(self) -> bool:
        """Whether the number of heads is an argument of a forward, because its grid does not
        tell.
        """
        return self.persistent or self.order == "grouped"

    @property
    def interpretable(self) -> bool:
        """Whether Triton's interpreter can run the kernel: not for Gluon."""
        return not SCHEDULES[self.schedule].gluon

    @property
    def executed(self) -> bool:
        """Whether a check without a GPU executes the compiled program, by flashgen.ptx: Triton's
        interpreter does not run Gluon, nor show what the compiler's warp specialization does.
        """
        its = SCHEDULES[self.schedule]
        return its.gluon or its.roles

    @property
    def needs_aligned(self) -> bool:
        """Whether base and strides of its tensors must be multiples of 16 bytes."""
        its = SCHEDULES[self.schedule]
        return self.loads == "descriptor" or (its.gluon and its.loads == "pointer")

    @property
    def specialized(self) -> bool:
        """Whether the text itself deals roles to warps (Gluon), and is loaded by descriptors."""
        its = SCHEDULES[self.schedule]
        return its.gluon and its.roles

    @property
    def consumers(self) -> int:
        """Warpgroups that compute and have a loop each; 0 where all warps run one."""
        return SCHEDULES[self.schedule].consumers(self)

    def launch_options(self, spec: AttentionSpec) -> dict[str, int]:
        """The options of Triton besides the arguments of a kernel, for compiling and launching.

        The text of a schedule whose warps have roles requests all but one warpgroup. Multiply-add
        is fused explicitly, because Triton 3.9 warns that 3.10 will not fuse by
        default. The text of an invariant kernel says itself which are fused: a compiler may choose
        by the context.
        """
        warps, fuses = WARPGROUP if self.specialized else self.num_warps, not spec.invariant
        options = {"num_warps": warps, "num_stages": self.num_stages, "enable_fp_fusion": fuses}
        if self.maxnreg:
            options["maxnreg"] = self.maxnreg
        if self.pdl and spec.direction == "combine":
            options["launch_pdl"] = True
        return options

    def block_warps(self, spec: AttentionSpec) -> int:
        """Warps of a block, with those that only load, multiply or store."""
        return SCHEDULES[self.schedule].block_warps(spec, self)

    def textbook(self, spec: AttentionSpec) -> KernelConfig:
        """The config with the same tile in the textbook schedule, fa2, which has every feature."""
        if not self.interpretable:
            return self.pointer_twin(spec)
        return replace(self, schedule=FA2.name, maxnreg=0)

    def pointer_twin(self, spec: AttentionSpec) -> KernelConfig:
        """The config launched instead if a call's tensors cannot have descriptors, of fa2."""
        twin: KernelConfig = SCHEDULES[self.schedule].twin(spec, self)
        return twin


_VALUES: dict[str, tuple[Any, ...]] = {
    each.name: each.metadata.get("values", tuple(SCHEDULES)) for each in fields(KernelConfig)
}
_LABELED: tuple[Field[Any], ...] = tuple(
    sorted(
        (each for each in fields(KernelConfig) if each.metadata.get("label")),
        key=lambda each: each.metadata["rank"],
    )
)
"""In the order in which a label has them."""
_NUMBER = "(?P<{}>[0-9]{{1,9}})"
_LABEL = (
    f"br{_NUMBER}_bc{_NUMBER}_w{_NUMBER}_s{_NUMBER}".format("br", "bc", "num_warps", "num_stages")
    + rf"_(?P<schedule>{'|'.join(SCHEDULES)})_(?P<loads>{'|'.join(LOADS_LABEL.values())})"
    + rf"(?P<order>{'|'.join(ORDER_LABEL.values())})"
    + "".join(
        f"({each.metadata['label'].replace('{}', _NUMBER.format(each.name))})?"
        if "{}" in each.metadata["label"]
        else f"(?P<{each.name}>{each.metadata['label']})?"
        for each in _LABELED
    )
)


@functools.lru_cache(4096)
def config_of(label: str) -> KernelConfig:
    """The config that a label names. Raises InvalidArgument."""
    found = re.fullmatch(_LABEL, label)
    if found is None:
        raise InvalidArgument(
            f"config must be a label like br128_bc64_w8_s2_fa2_ptr: got {label!r}"
        )
    words = {name: word for name, word in found.groupdict().items() if word is not None}
    chosen: dict[str, Any] = {
        name: int(word) if word.isdecimal() else _VALUES[name][-1]  # of two, not the default
        for name, word in words.items()
    }
    chosen["schedule"] = words["schedule"]
    chosen["loads"] = next(key for key, word in LOADS_LABEL.items() if word == words["loads"])
    chosen["order"] = next(key for key, word in ORDER_LABEL.items() if word == words["order"])
    config = KernelConfig(**chosen)
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
    in_memory = SCHEDULES[config.schedule].state_in_memory
    return exact_pointers and not in_memory and narrow and not streams


def kernel_name(spec: AttentionSpec, config: KernelConfig) -> str:
    """The one name of a kernel: its file, its function, in the profiler and in every error."""
    names = [f"{name}_{config.kernel.label}" for name in (spec.name, *spec.short_names)]
    return next((name for name in names if len(name) <= LONGEST_NAME), names[-1])
