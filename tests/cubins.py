"""Cubins for tests of the estimator, compiled here: no GPU, and none of them is ever run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashgen.compile.compiler import Compiled, cache_file
from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec
from tests.compiled import compile_one, cubin_of
from tests.data import published_backward, published_gemm, published_kernels
from tests.data.single_phase import attend

ALIGNED = [["tt.divisibility", 16]]
VARIANTS = ("PAGE", "CAUSAL", "SPLIT", "BOUNDS", "NATURAL", "BY_ROWS")


@dataclass(frozen=True, kw_only=True)
class Cubin:
    """A kernel's machine code and what a launch of it takes; shared_bytes of a block."""

    code: bytes
    arch: str
    num_warps: int
    shared_bytes: int

    def geometry(self) -> dict[str, Any]:
        """The arguments of estimate_cubin that follow from the kernel."""
        return {"arch": self.arch, "num_warps": self.num_warps, "shared_bytes": self.shared_bytes}


def single_phase(br: int, bc: int, num_warps: int, num_stages: int) -> Cubin:
    """tests/data/single_phase.py for sm_80, fp16, head_dim 64, contiguous rows."""
    constants = {"ROWS": br, "KEYS": bc, "DIM": 64}
    constants |= {f"{name}_column": 1 for name in ("out", "query", "key", "value")}
    types, attrs = {}, {}
    for place, name in enumerate(attend.arg_names):
        pointer = name in ("out", "query", "key", "value")
        types[name] = "*fp16" if pointer else "fp32" if name == "scale" else "i32"
        if name in constants:
            types[name] = "constexpr"
        elif pointer or "_" in name or name == "length":
            attrs[(place,)] = ALIGNED
    source = ASTSource(fn=attend, signature=types, constexprs=constants, attrs=attrs)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    built = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options)
    return Cubin(
        code=built.asm["cubin"],
        arch="sm_80",
        num_warps=num_warps,
        shared_bytes=built.metadata.shared,
    )


def published(
    arch: str, config: Sequence[int], *, shape: Mapping[str, int], **variant: int
) -> Cubin:
    """tests/data/published_kernels.py in fp16: config is br, bc, num_warps and num_stages; shape as
    in published_landscapes.yaml; variant: the constants of `attend`, in lower case, False unless
    named.
    """
    br, bc, num_warps, num_stages = config
    group = shape["heads"] // shape["kv_heads"]
    values: dict[str, Any] = {"ROWS": br, "KEYS": bc, "DIM": shape["head_dim"], "GROUP": group}
    values |= {name: int(variant.get(name.lower(), 0)) for name in VARIANTS}
    values |= {f"{name}_column": 1 for name in ("out", "query", "key", "value")}
    types, attrs = {}, {}
    for place, name in enumerate(published_kernels.attend.arg_names):
        types[name] = {"scale": "fp32", "pages": "*i32"}.get(name, "i32")
        if name in ("out", "query", "key", "value"):
            types[name] = "*fp16"
        if name in values:
            types[name] = "constexpr"
        elif types[name] != "fp32":
            attrs[(place,)] = ALIGNED
    source = ASTSource(fn=published_kernels.attend, signature=types, constexprs=values, attrs=attrs)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    built = triton.compile(source, target=target, options=options)
    return Cubin(
        code=built.asm["cubin"],
        arch=arch,
        num_warps=num_warps,
        shared_bytes=built.metadata.shared,
    )


def product(
    arch: str, config: Sequence[int], *, by_columns: bool, whole: bool, operands: str = "fp16"
) -> Cubin:
    """tests/data/published_gemm.py, by default in fp16: config is the rows, columns and depth of a tile,
    num_stages and num_warps; by_columns: how A is stored; whole: the depth divides k.
    """
    rows, columns, depth, num_stages, num_warps = config
    values: dict[str, Any] = {"ROWS": rows, "COLUMNS": columns, "DEPTH": depth, "WHOLE": whole}
    values |= {"b_column": 1, "a_row" if by_columns else "a_column": 1}
    types, attrs = {}, {}
    for place, name in enumerate(published_gemm.multiply.arg_names):
        types[name] = f"*{operands}" if name in ("a", "b") else "*fp16" if name == "c" else "i32"
        if name in values:
            types[name] = "constexpr"
        else:
            attrs[(place,)] = ALIGNED
    source = ASTSource(fn=published_gemm.multiply, signature=types, constexprs=values, attrs=attrs)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    built = triton.compile(source, target=target, options=options)
    return Cubin(
        code=built.asm["cubin"],
        arch=arch,
        num_warps=num_warps,
        shared_bytes=built.metadata.shared,
    )


def backward(arch: str, config: Sequence[int], name: str) -> Cubin:
    """A kernel of tests/data/published_backward.py in fp16, head dim 64: config as for published()."""
    br, bc, num_warps, num_stages = config
    values = {"ROWS": br, "KEYS": bc, "DIM": 64}
    function = getattr(published_backward, name)
    types, attrs = {}, {}
    for place, argument in enumerate(function.arg_names):
        types[argument] = {"scale": "fp32", "lse": "*fp32", "delta": "*fp32"}.get(argument, "*fp16")
        if argument in values:
            types[argument] = "constexpr"
        elif argument in ("head_stride", "row_stride", "length"):
            types[argument] = "i32"
        if types[argument] not in ("constexpr", "fp32"):
            attrs[(place,)] = ALIGNED
    source = ASTSource(fn=function, signature=types, constexprs=values, attrs=attrs)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    built = triton.compile(source, target=target, options=options)
    return Cubin(
        code=built.asm["cubin"],
        arch=arch,
        num_warps=num_warps,
        shared_bytes=built.metadata.shared,
    )


def own(
    spec: AttentionSpec, config: KernelConfig, arch: str, cache: Path
) -> tuple[Cubin, Compiled]:
    """A kernel of flashgen's templates, and what the compiler left of it in `cache`."""
    compiled = compile_one(spec, config, arch)
    code = cubin_of(compiled)
    cache_file(compiled.digest, arch, compiled.triton, cache, "cubin").write_bytes(code)
    cubin = Cubin(
        code=code,
        arch=arch,
        num_warps=config.num_warps,
        shared_bytes=compiled.shared_bytes,
    )
    return cubin, compiled


def roles(*, keys: int = 128, dim: int = 64, stages: int = 2, unequal: bool = False) -> Cubin:
    """tests/data/warp_roles.py for sm_90, fp16."""
    from triton.experimental.gluon._runtime import GluonASTSource

    from tests.data.warp_roles import attend_by_roles

    swizzle = min(128, 2 * dim)
    layout = f"NVMMASharedLayout(swizzle_byte_width={swizzle},element_bitwidth=16,rank=2)"
    rows = {"query": 64, "key": keys, "value": keys, "out": 64}
    types = {name: f"tensordesc<fp16[{count},{dim}],{layout}>" for name, count in rows.items()}
    constants = {"KEYS": keys, "DIM": dim, "STAGES": stages, "UNEQUAL": unequal}
    types |= {"tiles": "i32", **dict.fromkeys(constants, "constexpr")}
    source = GluonASTSource(fn=attend_by_roles, signature=types, constexprs=constants, attrs={})
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return Cubin(
        code=built.asm["cubin"], arch="sm_90", num_warps=4, shared_bytes=built.metadata.shared
    )
