"""The arguments of the kernels that serve a cache: decode, combine and append; signature.py has the
others. The order here is the one in which templates declare and launchers pass them.
"""

from __future__ import annotations

from flashgen.config import KernelConfig
from flashgen.spec import SHORT_DTYPE, AttentionSpec

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
