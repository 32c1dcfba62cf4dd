"""The arguments of a kernel, by direction and variant, and what Triton may assume of them.

The order here is the order in which templates declare arguments and launchers pass them.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import BY_KEYS, WARPGROUP_ROWS, KernelConfig
from flashgen.spec.vocabulary import DECODING, SHORT_DTYPE, padded

_UNALIGNED = (
    "stride_lse", "stride_table", "stride_cos", "stride_sin",
    "stride_slopes_b", "stride_slopes_h", "stride_bias_k",
    "stride_k_scale_p", "stride_k_scale_h", "stride_v_scale_p", "stride_v_scale_h",
)  # fmt: skip
"""Strides that nothing is told of: those of float32 rows and of tables, and of keys of a bias."""


def decoding_types(spec: AttentionSpec, config: KernelConfig) -> dict[str, str]:
    """The types of a kernel's arguments by name; a decode is compiled as one of several splits."""
    of_direction = {"decode": _decode, "combine": _combine, "append": _append}
    return of_direction[spec.direction](spec, config)


def decoding_aligned(spec: AttentionSpec, name: str, kind: str) -> bool:
    """Whether an aligned call's argument is a multiple of 16, Triton's alignment class."""
    if kind.startswith("*") or name in ("head_dim", "head_dim_v"):
        return True
    if name in ("stride_bias_b", "stride_bias_h", "stride_bias_q"):
        return True
    if not name.startswith("stride_") or name in _UNALIGNED:
        return False
    tensor = name.removeprefix("stride_").removeprefix("new_")[0]
    of_v = tensor == "v" or (tensor in "op" and spec.direction != "append")
    return (spec.head_dim_v if of_v else spec.head_dim) % 16 == 0


def _placing(spec: AttentionSpec) -> list[str]:
    """The tensors that say where in a cache the keys of a sequence are, beside a block table."""
    return ["rows_ptr"] * spec.indexed + ["leftpad_ptr"] * spec.leftpad


def _scaling(spec: AttentionSpec) -> dict[str, str]:
    """The scales of an 8-bit cache, and their strides."""
    if spec.kv_dtype == "same":
        return {}
    strides = [
        f"stride_{x}_scale_{d}" for x in "kv" for d in ("ph" if spec.kv_scales == "page" else "h")
    ]
    return {"k_scale_ptr": "*fp32", "v_scale_ptr": "*fp32"} | dict.fromkeys(strides, "i32")


def _element_of_cache(spec: AttentionSpec, config: KernelConfig) -> str:
    """What a kernel is told a cache holds: of 8 bits bytes, unless it widens them natively."""
    if spec.kv_dtype == "same":
        return SHORT_DTYPE[spec.dtype]
    return "fp8e4nv" if config.widening == "native" else "i8"


def _decode(spec: AttentionSpec, config: KernelConfig) -> dict[str, str]:
    element = SHORT_DTYPE[spec.dtype]
    outer = "p" if spec.paged else "b"
    of_cache = _element_of_cache(spec, config)
    types = {"q_ptr": f"*{element}", "k_ptr": f"*{of_cache}", "v_ptr": f"*{of_cache}"}
    types |= {"o_ptr": "*fp32", "lse_ptr": "*fp32", "lengths_ptr": "*i32"}
    if spec.paged:
        types["table_ptr"] = "*i32"
    types |= dict.fromkeys(_placing(spec), "*i32")
    types |= _scaling(spec)
    strides = ["qb", "qh", "qs", *(f"{x}{d}" for x in "kv" for d in (outer, "h", "s"))]
    strides += ["ob", "oh", "os", "part", "lse"]
    types |= {f"stride_{name}": "i32" for name in strides}
    if spec.paged:
        types |= {"stride_table": "i32", "page_bits": "i32"}
    types["scale_log2e"] = "fp32"
    types |= dict.fromkeys(("heads", "group", "seq_q", "seq_k", "splits"), "i32")
    if config.head_dims == "padded":
        types |= {"head_dim": "i32", "head_dim_v": "i32"}
    return types


def _combine(spec: AttentionSpec, config: KernelConfig) -> dict[str, str]:
    types = {"part_o_ptr": "*fp32", "part_lse_ptr": "*fp32"}
    types |= {"o_ptr": f"*{SHORT_DTYPE[spec.dtype]}", "lse_ptr": "*fp32"}
    strides = ("stride_part", "stride_lse", "stride_ob", "stride_oh", "stride_os")
    types |= dict.fromkeys((*strides, "heads", "seq_q", "count"), "i32")
    return types | ({"head_dim_v": "i32"} if config.head_dims == "padded" else {})


def _append(spec: AttentionSpec, config: KernelConfig) -> dict[str, str]:
    element = SHORT_DTYPE[spec.dtype]
    outer = "p" if spec.paged else "b"
    pointers = ["new_k", "new_v", "k", "v", *(["q", "o"] if spec.rotary != "none" else [])]
    types = {f"{x}_ptr": f"*{element}" for x in pointers}
    if spec.kv_dtype != "same":
        types |= {"k_ptr": "*i8", "v_ptr": "*i8"}
    types["lengths_ptr"] = "*i32"
    if spec.paged:
        types["table_ptr"] = "*i32"
    types |= dict.fromkeys(_placing(spec), "*i32")
    types |= _scaling(spec)
    if spec.rotary != "none":
        types |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    strides = [f"new_{x}{d}" for x in "kv" for d in "bhs"]
    strides += [f"{x}{d}" for x in "kv" for d in (outer, "h", "s")]
    if spec.rotary != "none":
        strides += [f"{x}{d}" for x in "qo" for d in "bhs"]
    types |= {f"stride_{name}": "i32" for name in strides}
    if spec.paged:
        types |= {"stride_table": "i32", "page_bits": "i32"}
    sizes = ["heads", "kv_heads", "new_keys", "seq_k"]
    if spec.rotary != "none":
        sizes = ["stride_cos", "stride_sin", *sizes, "seq_q", "rotary_dim", "q_step"]
    types |= dict.fromkeys(sizes, "i32")
    if config.head_dims == "padded":
        types |= {"head_dim": "i32", "head_dim_v": "i32"}
    return types


TENSORS: dict[str, tuple[str, ...]] = {
    "forward": ("q", "k", "v", "o"),
    "backward_delta": ("o", "do"),
    "backward_dkv": ("q", "k", "v", "do", "dk", "dv"),
    "backward_dq": ("q", "k", "v", "do", "dq"),
    "backward_fused": ("q", "k", "v", "do", "dk", "dv"),
    "backward_dbias": ("q", "k", "v", "do"),
}
"""The strided tensors of a direction's kernel; do, dq, dk, dv are the gradients of O, Q, K, V."""

_OF_V = ("v", "o", "do", "dv")
_ROWS_OF_K = ("k", "v", "dk", "dv")
_BY_CONSUMERS = {
    "forward": ("q", "o"),
    "backward_dq": ("q", "do", "dq"),
    **dict.fromkeys(BY_KEYS, ("dk", "dv")),
}
"""What every consumer of schedule hopper loads or stores by itself, its own rows alone."""

SEQUENCE_POINTERS = ("q_begins_ptr", "q_ends_ptr", "k_begins_ptr", "k_ends_ptr")

DBIAS_SIZES = (
    "dbias_rows",
    "dbias_keys",
    "row_tiles",
    "key_tiles",
    "head_tiles",
    "row_steps",
    "key_steps",
    "head_steps",
    "batch_steps",
)


@dataclass(frozen=True, kw_only=True)
class Signature:
    """A kernel's argument types and what Triton may assume of them, as triton.compiler.ASTSource
    takes it.
    """

    types: dict[str, str]
    constexprs: dict[str, object]
    attrs: dict[tuple[int, ...], list[list[object]]]


def compile_signature(spec: AttentionSpec, config: KernelConfig) -> Signature:
    """What a launch with aligned tensors would specialize on, with no tensor and no GPU.

    Strides that are multiples of 16 elements are the class of every contiguous tensor whose head
    dim is one; so are the head dims that a padded kernel takes as arguments. The keys of a bias are
    next to each other. Lengths, head counts and the diagonal are never specialized on.
    """
    if spec.direction in DECODING:
        types, aligns = decoding_types(spec, config) | _features(spec), decoding_aligned
    else:
        types, aligns = _tensors(spec, config) | _sizes(spec, config) | _features(spec), _aligned
    if config.takes_heads:
        types["batch_heads"] = "i32"
    if config.order == "grouped":
        types["heads_together"] = "i32"
    if config.schedule == "fa1":
        types |= {"acc_ptr": "*fp32", "sum_ptr": "*fp32", "max_ptr": "*fp32"}
    if spec.direction == "backward_dbias":
        types |= dict.fromkeys(DBIAS_SIZES, "i32")
    types |= _sequences(spec) | _block_mask(spec)
    constexprs: dict[str, object] = {"stride_bias_k": 1} if spec.bias != "none" else {}
    types |= dict.fromkeys(constexprs, "constexpr")
    aligned = [i for i, (name, kind) in enumerate(types.items()) if aligns(spec, name, kind)]
    return Signature(
        types=types,
        constexprs=constexprs,
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )


def _tensors(spec: AttentionSpec, config: KernelConfig) -> dict[str, str]:
    """Pointers or descriptors, then float32 rows, then the strides of the pointers."""
    element = "fp8e4nv" if spec.fp8 else SHORT_DTYPE[spec.dtype]
    of_o = SHORT_DTYPE[spec.dtype]
    strided = TENSORS[spec.direction]
    statistics = {
        "forward": ("lse_ptr",),
        "backward_delta": ("dlse_ptr", "delta_ptr"),
        "backward_fused": ("lse_ptr", "delta_ptr", "dq_ptr"),
    }.get(spec.direction, ("lse_ptr", "delta_ptr"))
    types: dict[str, str] = {}
    if config.loads == "descriptor":
        for x in strided:
            rows = config.bc if x in _ROWS_OF_K else config.br
            dim = spec.head_dim_v if x in _OF_V else spec.head_dim
            if config.schedule == "hopper" and x in _BY_CONSUMERS[spec.direction]:
                rows = WARPGROUP_ROWS
            # Letter by letter as a launch has it: Triton keeps binaries by this text.
            layout = f",{gluon_layout_text()}" if config.schedule == "hopper" else ""
            kind = of_o if x == "o" else element
            types[f"{x}_desc"] = f"tensordesc<{kind}{[1, 1, rows, padded(dim)]}{layout}>"
    else:
        types |= {f"{x}_ptr": f"*{of_o if x == 'o' else element}" for x in strided}
    if spec.direction == "backward_dbias":
        types["dbias_ptr"] = "*fp32"
    types |= dict.fromkeys(statistics, "*fp32")
    if config.loads == "pointer":
        for x in strided:
            paged = spec.paged and x in _ROWS_OF_K
            places = "phs" if paged else "hs" if spec.varlen else "bhs"
            types |= {f"stride_{x}{d}": "i32" for d in places}
    if spec.direction == "backward_delta":
        types |= {f"stride_dl{d}": "i32" for d in "bhs"}
    return types


def gluon_layout_text() -> str:
    """The layout in shared memory of a block of 16-bit elements, at least 64 of them a row, as
    Gluon prints it: swizzled over 128 bytes, for the TMA unit and wgmma alike.
    """
    return (
        "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4, "
        "transposed=False, fp4_padded=False, cga_layout=[])"
    )


def _sizes(spec: AttentionSpec, config: KernelConfig) -> dict[str, str]:
    any_dim = config.head_dims == "padded"
    if spec.direction == "backward_delta":
        types = {"heads": "i32", "seq_q": "i32", "dlse_rows": "i32"}
        return types | ({"head_dim_v": "i32"} if any_dim else {})
    types = {"scale_log2e": "fp32", "heads": "i32", "group": "i32"}
    if spec.varlen:
        longest = "max_seq_k" if spec.direction in BY_KEYS else "max_seq_q"
        types["total_q"] = "i32"
        types |= {"total_k": "i32"} if spec.counts_keys else {}
        types[longest] = "i32"
    else:
        types |= {"seq_q": "i32", "seq_k": "i32"}
    if spec.direction not in ("forward", "backward_dbias"):
        types = {"scale": "fp32", **types}
    if spec.takes_diagonal:
        types["bottom_right" if spec.varlen else "diagonal"] = "i32"
    if any_dim:
        types |= {"head_dim": "i32", "head_dim_v": "i32"}
    return types


def _features(spec: AttentionSpec) -> dict[str, str]:
    dtype = SHORT_DTYPE[spec.dtype]
    return {each.name: each.type.format(dtype=dtype) for each in spec.feature_arguments}


def _sequences(spec: AttentionSpec) -> dict[str, str]:
    """Where packed sequences are: 32-bit places, as FlashAttention has them."""
    if not spec.varlen:
        return {}
    types = dict.fromkeys(SEQUENCE_POINTERS, "*i32") | {"sequences": "i32"}
    if spec.paged:
        types |= {"table_ptr": "*i32", "stride_table": "i32", "page_bits": "i32"}
    return types


def _block_mask(spec: AttentionSpec) -> dict[str, str]:
    """The lists of a block mask, and its elements."""
    if not spec.block_mask:
        return {}
    lists = ("block_counts_ptr", "blocks_ptr", "block_tiles_ptr")
    numbers = ("mask_step_b", "mask_step_h", "own_blocks", "listed")
    return dict.fromkeys(lists, "*i32") | {"tiles_ptr": "*u8"} | dict.fromkeys(numbers, "i32")


def _aligned(spec: AttentionSpec, name: str, kind: str) -> bool:
    """Whether an aligned call's argument is a multiple of 16, Triton's alignment class."""
    if name in SEQUENCE_POINTERS:  # a view behind the first element is not
        return False
    if kind.startswith("*") or name in ("head_dim", "head_dim_v"):
        return True
    if name in ("stride_bias_b", "stride_bias_h", "stride_bias_q"):
        return True
    tensor = name.removeprefix("stride_")[:-1]
    if tensor == name[:-1] or tensor not in TENSORS[spec.direction]:
        return False
    dim = spec.head_dim_v if tensor in _OF_V else spec.head_dim
    return dim % 16 == 0
