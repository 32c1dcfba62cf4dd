"""Compiles a kernel for a named architecture without a GPU: Rendered -> Compiled.

Triton's compiler runs in this process and may abort it: callers that must survive use a child.
Results are cached by (digest, architecture, Triton version): a JSON file of facts, with the binary
next to it.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from flashgen import settings
from flashgen.compile import gcn, sass
from flashgen.compile.loops import LoopFacts, issued, main_loops, spilling_loops
from flashgen.errors import FlashgenError, InvalidArgument, ToolchainError, ToolKilled
from flashgen.files import content_of, temporary_folder, write_whole
from flashgen.kernels.loader import load_kernel, toolchain_error
from flashgen.kernels.render import Rendered
from flashgen.kernels.signature import compile_signature
from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.data_sheets import LIMITS
from flashgen.spec.records import Record, parsed, value_of

FACTS = 6
"""Version of the facts in a cache file; raise it whenever their computation changes."""

# C7510 to C7518 are of wgmma that waits; of the others C7508 says that setmaxnreg is ignored.
_ADVISORY = re.compile(r"\(C75(?:1[0-8]\)|\d\d\) Potential Performance Loss).*")
_SPILL_STORES = re.compile(r"(\d+) bytes spill stores")


class CompileFailed(FlashgenError, RuntimeError):
    """The compiler refused a kernel; the message is the first informative line of its output."""


@dataclass(frozen=True, kw_only=True)
class Compiled(Record):
    """The result of compiling a kernel for one architecture.

    registers are 32-bit registers per thread, spill_bytes what a thread spills to its stack,
    shared_bytes dynamic shared memory per block. loop has the facts of the steady main loop and
    other_loops those of the others, such as the masked one; None and () in a kernel without a
    loop. advisories are ptxas' remarks that it serialized wgmma or did not hand registers over.
    whole: compiled to store results, not float32 parts (signature.compile_signature). spilling:
    spills and instructions of each loop that spills. tensor_columns: of tensor memory, of a block;
    above 0 only if it uses tcgen05. only_traps: its body is a trap, so that it computes nothing.
    issued: instructions of all warps of a block for one tile, and of these the exp2 of MUFU.
    """

    name: str
    digest: str
    arch: str
    triton: str
    num_warps: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    loop: LoopFacts | None
    advisories: tuple[str, ...]
    other_loops: tuple[LoopFacts, ...] = ()
    whole: bool = False
    spilling: tuple[tuple[int, int], ...] = ()
    tensor_columns: int = 0
    only_traps: bool = False
    issued: tuple[int, int] | None = None

    @property
    def spill_share(self) -> float:
        """The largest share of spills among the instructions of a loop; 1 if a kernel spills whose
        loops cannot be read.
        """
        if self.loop is None and not self.spilling:
            return float(self.spill_bytes > 0)
        of_main = ((loop.spills, loop.instructions) for loop in self.loops)
        return max(spills / length for spills, length in (*of_main, *self.spilling))

    @property
    def main_spill_share(self) -> float:
        """The same of the main loops alone, where they are known: others run once or a few times a
        program, however many instructions they have.
        """
        if self.loop is None:
            return self.spill_share
        return max(loop.spills / loop.instructions for loop in self.loops)

    @property
    def loops(self) -> tuple[LoopFacts, ...]:
        """All main loops, the steady one first."""
        return () if self.loop is None else (self.loop, *self.other_loops)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """The Compiled of a record that to_json made. Raises InvalidArgument."""
        made = super().from_json(record)
        made.must_be_possible()
        return made

    def must_be_possible(self) -> None:
        """Raise InvalidArgument where figures contradict each other."""
        lengths = [loop.instructions for loop in self.loops]
        if min((*lengths, *(length for _, length in self.spilling)), default=1) < 1:
            raise InvalidArgument("a loop must have an instruction: got none")
        if any(not 0 <= spills <= length for spills, length in self.spilling):
            raise InvalidArgument("a loop must have as many instructions as spills, or more")
        if self.num_warps < 1 or self.shared_bytes < 0:
            raise InvalidArgument(
                f"a kernel must have a warp, and bytes of shared memory >= 0: got "
                f"{self.num_warps} and {self.shared_bytes}"
            )
        if min(self.registers, self.spill_bytes, self.tensor_columns, *(self.issued or ())) < 0:
            raise InvalidArgument("registers, spills, columns and instructions must be >= 0")


def compile_kernel(
    rendered: Rendered,
    spec: AttentionSpec,
    config: KernelConfig,
    arch: str,
    *,
    whole: bool = False,
    cache: Path | None = None,
) -> Compiled:
    """Compile for `arch` (sm_90, gfx942, ...), or read the result of an earlier call from folder
    `cache`. whole: as signature.compile_signature has it.

    Raises CompileFailed if the compiler refuses, ToolchainError if TRITON_INTERPRET is set, a tool
    is missing or the cache cannot be written.
    """
    import triton

    refuse_interpreting()
    version = str(triton.__version__)
    if cache is None:
        with temporary_folder("compile") as folder:
            return _compile(rendered, spec, config, arch, folder, version, whole)
    found = recall(rendered.digest, arch, version, cache, whole=whole)
    return found or _compile(rendered, spec, config, arch, cache, version, whole)


def refuse_interpreting() -> None:
    """Raise ToolchainError where TRITON_INTERPRET is set."""
    if settings.interpreting():
        raise ToolchainError(
            "TRITON_INTERPRET must not be set in a process that compiles: unset it"
        )


def recall(
    digest: str,
    arch: str,
    triton: str,
    cache: Path,
    *,
    whole: bool = False,
    facts_only: bool = False,
) -> Compiled | None:
    """The cached result of a kernel; None if there is none, or it is incomplete or has other
    FACTS. facts_only: its binary may lie on another machine.
    """
    path = cache_file(digest, arch, triton, cache, "json", whole=whole)
    try:
        record = value_of(dict[str, Any], parsed(content_of(path)), "the record")
        if record.pop("facts", None) != FACTS:
            return None
        found = Compiled.from_json(record)
        found.must_be_possible()
    except (OSError, ValueError):
        return None
    asked_for = (found.digest, found.arch, found.triton, found.whole) == (
        digest, arch, triton, whole,
    )  # fmt: skip
    binary = cache_file(digest, arch, triton, cache, "cubin", whole=whole)
    return found if asked_for and (facts_only or binary.is_file()) else None


def cache_file(
    digest: str, arch: str, triton: str, cache: Path, suffix: str, *, whole: bool = False
) -> Path:
    """The cache file of a kernel's facts ("json") or binary ("cubin", for AMD as well)."""
    variant = "-whole" if whole else ""
    return cache / f"{digest.removeprefix('sha256:')[:32]}-{arch}-triton{triton}{variant}.{suffix}"


def _compile(
    rendered: Rendered,
    spec: AttentionSpec,
    config: KernelConfig,
    arch: str,
    folder: Path,
    triton: str,
    whole: bool,
) -> Compiled:
    source = folder / f"{rendered.name}-{rendered.digest.removeprefix('sha256:')[:12]}.py"
    write_whole(source, rendered.source)
    built, log = build(source, rendered, spec, config, arch, whole=whole)
    if arch.startswith("sm_"):
        binary = built.asm["cubin"]
        listing = sass.disassemble(binary)
        stores = _SPILL_STORES.search(log)
        spill_bytes = int(stores[1]) if stores else listing.stack_bytes
    else:
        binary = built.asm["hsaco"]
        listing = gcn.parse(built.asm["amdgcn"])
        spill_bytes = listing.stack_bytes
    loops = main_loops(listing)
    compiled = Compiled(
        name=rendered.name,
        digest=rendered.digest,
        arch=arch,
        triton=triton,
        num_warps=config.block_warps(spec),
        registers=listing.registers,
        spill_bytes=spill_bytes,
        shared_bytes=int(built.metadata.shared),
        loop=loops[0] if loops else None,
        advisories=tuple(dict.fromkeys(_ADVISORY.findall(log))),
        other_loops=loops[1:],
        whole=whole,
        spilling=spilling_loops(listing),
        tensor_columns=int(getattr(built.metadata, "tmem_size", 0) or 0),
        only_traps=listing.only_traps,
        issued=issued(listing, config.block_warps(spec)),
    )
    facts = json.dumps({"facts": FACTS, **compiled.to_json()}, indent=1)
    # The facts are written last: if they exist, so does the binary.
    for suffix, content in (("cubin", binary), ("json", facts)):
        path = cache_file(rendered.digest, arch, triton, folder, suffix, whole=whole)
        write_whole(path, content)
    return compiled


def build(
    source: Path,
    rendered: Rendered,
    spec: AttentionSpec,
    config: KernelConfig,
    arch: str,
    *,
    whole: bool = False,
) -> tuple[Any, str]:
    """Triton's CompiledKernel and the output of ptxas."""
    ast = source_of(
        load_kernel(source, rendered.text_name, rendered.name), spec, config, whole=whole
    )
    with _ptxas_log() as log:
        return compiled_by_triton(ast, rendered.name, spec, config, arch), log.getvalue()


def compiled_by_triton(
    source: Any, name: str, spec: AttentionSpec, config: KernelConfig, arch: str
) -> Any:
    """Triton's CompiledKernel of what source_of() gave. Raises CompileFailed or ToolchainError."""
    import triton

    try:
        return triton.compile(source, target=target_of(arch), options=config.launch_options(spec))
    except Exception as error:  # Triton, LLVM and ptxas each raise classes of their own
        unknown = "" if arch in LIMITS else f", which is none of {', '.join(LIMITS)}"
        reason = f"{name} for {arch}{unknown}: {_first_line(error)}"
        if re.search(r"failed with error code (-9|137)\b", str(error)):
            raise ToolKilled(f"ptxas was ended by SIGKILL while it compiled {name}") from None
        raise toolchain_error(error) or CompileFailed(reason) from error


def source_of(kernel: Any, spec: AttentionSpec, config: KernelConfig, *, whole: bool) -> Any:
    """A loaded kernel as Triton compiles it, with the types of a launch of aligned tensors. whole:
    as compile_signature has it.
    """
    if config.interpretable:
        from triton.compiler import ASTSource as Source
    else:
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    signature = compile_signature(spec, config, kernel.arg_names, whole=whole)
    return Source(
        fn=kernel,
        signature=signature.types,
        constexprs=signature.constexprs,
        attrs=signature.attrs,
    )


def target_of(arch: str) -> Any:
    """Triton's GPUTarget of an architecture: sm_90, gfx942."""
    from triton.backends.compiler import GPUTarget

    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    return GPUTarget("hip", arch, warp_size(arch))


def warp_size(arch: str) -> int:
    """Threads of a warp: 64 of AMD's CDNA, 32 of all else."""
    return 64 if arch.startswith("gfx9") else 32


@contextlib.contextmanager
def _ptxas_log() -> Iterator[io.StringIO]:
    """Collects the output of Triton, including the log of ptxas, which it otherwise hides.

    Triton's own cache has no log, so it is not read; results are still written to it.
    """
    from triton import knobs

    log = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        yield log


def _first_line(error: BaseException) -> str:
    """The most informative line of a compiler's message: that of ptxas, or the innermost cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in lines:
        if re.match(r"ptxas\b.*\b(error|fatal)\b", line):
            return line
    message = getattr(error, "error_message", None)
    if error.__cause__ is not None:
        return _first_line(error.__cause__)
    if message:
        return str(message).strip().splitlines()[0]
    return lines[0] if lines else type(error).__name__
