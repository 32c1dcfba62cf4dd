"""Which texts have a parameter, and which of their kernels are given a value of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashgen.schedules.ampere import AMPERE
from flashgen.schedules.base import AHEAD, TEMPLATES, Schedule
from flashgen.schedules.blackwell import BLACKWELL
from flashgen.schedules.config import SCHEDULES, KernelConfig
from flashgen.schedules.hopper import HOPPER
from flashgen.schedules.hopper import runs_ahead as hopper_runs_ahead
from flashgen.schedules.textbook import FA1, FA2, S_AHEAD
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.vocabulary import DECODING, OF_DS

Condition = Callable[[AttentionSpec, KernelConfig], bool]


def always(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Everywhere."""
    return True


def pointer(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Loads by pointer."""
    return config.loads == "pointer"


def described(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Loads by descriptor."""
    return config.loads == "descriptor"


def varlen(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Packed sequences."""
    return spec.varlen


def paged(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Keys in pages of a cache."""
    return spec.paged


def may_pack(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Texts whose kernels may be of packed sequences."""
    if spec.block_mask or (config.persistent and not handed_out(spec, config)):
        return False
    its = SCHEDULES[config.schedule]
    if config.interpretable:
        tiled = spec.direction in (*AHEAD, "backward_dq_of_ds", "decode")
        return tiled and config.loads == "pointer" and not its.state_in_memory
    return "varlen" in its.features.get(spec.direction, ())


def may_page(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Texts whose kernels may have keys in pages: of some texts, all have."""
    if spec.direction in DECODING:
        return True
    one_text = either(fa2, ampere)(spec, config) and spec.direction == "forward"
    return spec.paged or (one_text and may_pack(spec, config))


def handed_out(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Tiles from a counter."""
    return config.persistent and SCHEDULES[config.schedule].hands_out


def block_mask(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Blocks in a list."""
    return spec.block_mask


def of_segments(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Texts that may close partial sums."""
    return SCHEDULES[config.schedule].closes_sums and not spec.block_mask


def rotary(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Rotated queries and keys."""
    return spec.rotary != "none"


def indexed(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Rows of a cache by a tensor."""
    return spec.indexed


def narrow(spec: AttentionSpec, config: KernelConfig) -> bool:
    """8-bit keys and values."""
    return spec.kv_dtype != "same"


def by_page(spec: AttentionSpec, config: KernelConfig) -> bool:
    """A scale for each page."""
    return spec.kv_scales == "page"


def fused(spec: AttentionSpec, config: KernelConfig) -> bool:
    """DQ in the kernel of dK and dV."""
    return spec.direction == "backward_fused"


def keeps_ds(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Texts of dK and dV that may store dS."""
    in_gluon = fused(spec, config) and config.specialized
    return not (in_gluon or spec.block_mask or config.persistent)


def stores_ds(spec: AttentionSpec, config: KernelConfig) -> bool:
    """DS in memory."""
    return spec.direction in OF_DS


def diagonal(spec: AttentionSpec, config: KernelConfig) -> bool:
    """A diagonal."""
    return spec.takes_diagonal


def runs_ahead(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Schedule hopper's fused gradients, where S of a tile may come before dQ of the last one."""
    return hopper(spec, config) and hopper_runs_ahead(spec)


def any_dim(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Head dims as arguments."""
    return config.head_dims == "padded"


def has_parts(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Texts whose products are in parts, if only of one."""
    rows = spec.direction in ("forward", "decode") and not fa1(spec, config)
    return rows and (plain(spec, config) or ampere(spec, config))


def of(schedule: Schedule[Any]) -> Condition:
    """Texts of one schedule."""
    return lambda spec, config: config.schedule == schedule.name


def plain(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Texts in Triton, not in Gluon."""
    return config.interpretable


def specialized(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Texts that deal roles to warps."""
    return config.specialized


def textbook(spec: AttentionSpec, config: KernelConfig) -> bool:
    """The textbook's text of a direction, which has every feature."""
    return SCHEDULES[config.schedule].template(spec.direction) == TEMPLATES[spec.direction]


def both(*conditions: Condition) -> Condition:
    """All of these conditions."""
    return lambda spec, config: all(each(spec, config) for each in conditions)


def either(*conditions: Condition) -> Condition:
    """Any of these conditions."""
    return lambda spec, config: any(each(spec, config) for each in conditions)


def negated(condition: Condition) -> Condition:
    """Not this one."""
    return lambda spec, config: not condition(spec, config)


def _takes_fp8(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Whether kernels of a text may have fp8, whose products and sums differ."""
    return spec.direction == "forward" and textbook(spec, config)


def of_feature(field: str) -> Condition:
    """Which texts have the parameters of a feature."""
    if field == "fp8":
        return _takes_fp8
    if field == "dropout":
        return lambda s, c: s.direction != "decode" and textbook(s, c)
    if field == "sink":
        return lambda s, c: s.direction in ("forward", "decode") and _has(s, c, field)
    return lambda s, c: _has(s, c, field)


def _has(spec: AttentionSpec, config: KernelConfig, field: str) -> bool:
    """Whether the kernels of a text may have a feature."""
    own = SCHEDULES[config.schedule].features.get(spec.direction, ())
    return textbook(spec, config) or field in own


def on_for(field: str, value: object, unless_causal: bool) -> Condition:
    """A feature that is on."""
    return lambda s, c: getattr(s, field) == value and not (unless_causal and s.causal)


hopper, blackwell, ampere, ahead, fa1, fa2 = (
    of(HOPPER), of(BLACKWELL), of(AMPERE), of(S_AHEAD), of(FA1), of(FA2),
)  # fmt: skip
one_length, tiled = negated(varlen), negated(fa1)
packed_blocks = both(described, may_pack)
