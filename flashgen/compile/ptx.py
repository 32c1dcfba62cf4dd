"""Compiles a kernel up to PTX: Rendered -> Built, for flashgen.ptx to execute.

ptxas is left out, which takes most of the time of a compilation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashgen.compile.compiler import compiled_by_triton, refuse_interpreting, source_of
from flashgen.files import temporary_folder, write_whole
from flashgen.kernels.loader import load_kernel
from flashgen.kernels.render import Rendered
from flashgen.ptx.triton_compile import without_assembler
from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class CompiledPtx:
    """PTX with what a launch needs: the kernel's arguments in order, their types by name, bytes of
    dynamic shared memory, and of each tensor descriptor its box and swizzle.
    """

    ptx: str
    arg_names: tuple[str, ...]
    types: dict[str, str]
    shared_bytes: int
    descriptors: tuple[dict[str, Any], ...]


def build_ptx(
    rendered: Rendered,
    spec: AttentionSpec,
    config: KernelConfig,
    arch: str,
    *,
    types: Mapping[str, str] | None = None,
) -> CompiledPtx:
    """The PTX of a kernel for `arch`. types: of arguments that are not those of the signature, such
    as {"o_ptr": "*bf16"}. Raises CompileFailed or ToolchainError.
    """
    refuse_interpreting()
    with temporary_folder("ptx") as folder:
        path = folder / f"{rendered.name}.py"
        write_whole(path, rendered.source)
        kernel = load_kernel(path, rendered.text_name, rendered.name)
        source = source_of(kernel, spec, config, whole=False)
        source.signature.update(types or {})
        with without_assembler():
            made = compiled_by_triton(source, rendered.name, spec, config, arch)
    return CompiledPtx(
        ptx=made.asm["ptx"],
        arg_names=tuple(kernel.arg_names),
        types=dict(source.signature),
        shared_bytes=int(made.metadata.shared),
        descriptors=tuple(
            dict(each) for each in getattr(made.metadata, "tensordesc_meta", None) or ()
        ),
    )
