"""launch(): any Triton or Gluon kernel, compiled for a GPU and executed on CPU tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

from flashgen.errors import InvalidArgument
from flashgen.ptx.arguments import LaunchArgument, launch_of
from flashgen.ptx.execute import Loaded, execute
from flashgen.ptx.findings import CHECKS, Report, Sanitizer
from flashgen.ptx.text import parse
from flashgen.spec.gpu import known_target

ALIGNED = 16
"""What Triton looks for in pointers and integers: multiples of so many bytes, or of that number."""

_DTYPES = {
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64",
    "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "u8", "bool": "i1",
    "uint16": "u16", "uint32": "u32", "uint64": "u64",
    "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5",
}  # fmt: skip

_COMPILE_OPTIONS = ("num_warps", "num_stages", "maxnreg", "num_ctas", "enable_fp_fusion")


def launch(
    kernel: Any,
    grid: tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]],
    *args: Any,
    target: str = "nvidia_h200",
    seed: int = 0,
    checks: Collection[Sanitizer] = CHECKS,
    **options: Any,
) -> Report:
    """Compile a kernel for a GPU, and execute its PTX on CPU tensors; no GPU is needed.

    The tensors hold what the kernel has written.

    Args:
        kernel: a function under @triton.jit or @gluon.jit; of an autotuned one, its fn.
        grid: up to three numbers, or a function of the kernel's arguments by name.
        args: tensors on the CPU, tensor descriptors of them, numbers.
        target: a GPU that flashgen knows, or an architecture (sm_80 to sm_120).
        seed: draws the order of blocks, warps and asynchronous copies.
        checks: of memcheck, racecheck, initcheck, synccheck those that run; memcheck always does.
        options: further arguments of the kernel by name, and num_warps, num_stages, maxnreg.

    Returns:
        The Report of what was executed, without a finding.

    Raises:
        FaultsFound: if a check found something; its report has all of it.
        InvalidArgument: naming the argument; it is a ValueError.
        InvalidPtx: for an instruction that is not known.

    Examples:
        >>> import torch, triton, triton.language as tl
        >>> from flashgen import ptx
        >>> @triton.jit
        ... def double(x, out, BLOCK: tl.constexpr):
        ...     at = tl.arange(0, BLOCK)
        ...     tl.store(out + at, 2 * tl.load(x + at))
        >>> x, out = torch.ones(64), torch.zeros(64)
        >>> ptx.launch(double, (1,), x, out, BLOCK=64, target="nvidia_h200").blocks
        1
        >>> out.eq(2).all().item()
        True
    """
    report = run(kernel, grid, *args, target=target, seed=seed, checks=checks, **options)
    report.raise_if_any()
    return report


def run(
    kernel: Any,
    grid: tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]],
    *args: Any,
    target: str = "nvidia_h200",
    seed: int = 0,
    checks: Collection[Sanitizer] = CHECKS,
    **options: Any,
) -> Report:
    """launch() that returns what its checks found instead of raising it.

    Args:
        kernel: as launch() has it.
        grid: as launch() has it.
        args: as launch() has them.
        target: as launch() has it.
        seed: as launch() has it.
        checks: as launch() has them.
        options: as launch() has them.

    Returns:
        The Report of what was executed, with its findings.

    Raises:
        InvalidArgument: naming the argument; it is a ValueError.
        InvalidPtx: for an instruction that is not known.

    Examples:
        >>> import torch, triton, triton.language as tl
        >>> from flashgen import ptx
        >>> @triton.jit
        ... def copy(x, out, BLOCK: tl.constexpr):
        ...     at = tl.arange(0, BLOCK)
        ...     tl.store(out + at, tl.load(x + at))
        >>> report = ptx.run(copy, (1,), torch.ones(32), torch.zeros(64), BLOCK=64)
        >>> report.checks()
        frozenset({'memcheck'})
    """
    if not hasattr(kernel, "arg_names") or not hasattr(kernel, "params"):
        raise InvalidArgument(
            f"kernel must be a function under @triton.jit: got {type(kernel).__name__}; of an "
            "autotuned kernel pass .fn and a configuration's constants"
        )
    settings = {name: options.pop(name) for name in _COMPILE_OPTIONS if name in options}
    values = _values(kernel, args, options)
    sizes = grid(values) if callable(grid) else grid
    if not 1 <= len(sizes) <= 3:
        raise InvalidArgument(f"a grid must have one to three numbers: got {sizes}")
    types, constants, attributes = _signature(kernel, values)
    built = _compiled(kernel, types, constants, attributes, _architecture(target), settings)
    arguments = [
        LaunchArgument(name=name, type=kind, value=values[name])
        for name, kind in types.items()
        if kind != "constexpr"
    ]
    blocks = [*map(int, sizes), 1, 1][:3]
    made = launch_of(
        arguments,
        (blocks[0], blocks[1], blocks[2]),
        int(built.metadata.shared),
        [dict(each) for each in getattr(built.metadata, "tensordesc_meta", None) or ()],
        int(getattr(built.metadata, "global_scratch_size", 0) or 0)
        * blocks[0] * blocks[1] * blocks[2],
    )  # fmt: skip
    return execute(loaded_text(built.asm["ptx"]), made, seed=seed, checks=checks)


@functools.lru_cache(maxsize=32)
def loaded_text(ptx: str) -> Loaded:
    """The decoded program of a PTX text, decoded once."""
    return Loaded(parse(ptx))


def _architecture(target: str) -> int:
    """90 of sm_90, or of the slug of a GPU."""
    arch = target if target.startswith("sm_") else known_target(target).arch
    if not arch.startswith("sm_") or not arch[3:].rstrip("a").isdigit():
        raise InvalidArgument(f"target must be an NVIDIA GPU: got {target}")
    return int(arch[3:].rstrip("a"))


def _values(kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The value of each of the kernel's arguments by name."""
    names = list(kernel.arg_names)
    if len(args) > len(names):
        raise InvalidArgument(f"the kernel takes {len(names)} arguments: got {len(args)}")
    values = dict(zip(names, args, strict=False))
    for name, value in named.items():
        if name not in names or name in values:
            raise InvalidArgument(f"{name} is no argument of the kernel, or is given twice")
        values[name] = value
    for parameter in kernel.params:
        if parameter.name not in values:
            if not parameter.has_default:
                raise InvalidArgument(f"the argument {parameter.name} is missing")
            values[parameter.name] = parameter.default
    return {name: values[name] for name in names}


def _signature(
    kernel: Any, values: dict[str, Any]
) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], list[list[object]]]]:
    """Types, constants and what may be assumed, as a launch on a GPU has them: None and integers
    that are 1 are constants, multiples of 16 are known to be.
    """
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for number, parameter in enumerate(kernel.params):
        name, value = parameter.name, values[parameter.name]
        specialised = not parameter.do_not_specialize
        one = isinstance(value, int) and not isinstance(value, bool) and value == 1 and specialised
        if parameter.is_constexpr or value is None or one or callable(value):
            types[name], constants[name] = "constexpr", value
            continue
        types[name] = _type_of(name, value)
        base = value.data_ptr() if hasattr(value, "data_ptr") else value
        aligned = isinstance(base, int) and not isinstance(value, bool) and base % ALIGNED == 0
        if aligned and specialised and not parameter.do_not_specialize_on_alignment:
            attributes[number,] = [["tt.divisibility", 16]]
    return types, constants, attributes


def _type_of(name: str, value: Any) -> str:
    """Triton's name of the type of an argument."""
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise InvalidArgument(f"{name} must fit 64 bits: got {value}")
        return "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
    if isinstance(value, float):
        return "fp32"
    tensor = getattr(value, "base", value)
    dtype = _DTYPES.get(str(getattr(tensor, "dtype", "")).removeprefix("torch."))
    if dtype is None:
        raise InvalidArgument(f"{name} must be a tensor or a number: got {type(value).__name__}")
    if not hasattr(value, "block_shape"):
        return f"*{dtype}"
    layout = getattr(value, "layout", None)
    return f"tensordesc<{dtype}{list(value.block_shape)}{',' + repr(layout) if layout else ''}>"


def _compiled(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    attributes: dict[tuple[int, ...], list[list[object]]],
    capability: int,
    settings: dict[str, Any],
) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    if getattr(kernel, "is_gluon", lambda: False)():
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source
    source = Source(fn=kernel, signature=types, constexprs=constants, attrs=attributes)
    with without_assembler():
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=settings)


@contextlib.contextmanager
def without_assembler() -> Iterator[None]:
    """Triton compiles to PTX and leaves out ptxas, which takes most of the time."""
    from triton import knobs

    if not hasattr(knobs.runtime, "add_stages_inspection_hook"):
        yield
        return
    before = knobs.runtime.add_stages_inspection_hook
    knobs.runtime.add_stages_inspection_hook = _stop_at_ptx
    try:
        yield
    finally:
        knobs.runtime.add_stages_inspection_hook = before


def _stop_at_ptx(
    backend: Any = None, stages: Any = None, options: Any = None, language: Any = None,
    capability: Any = None,
) -> tuple[str, str]:  # fmt: skip
    """Triton's hook for stages: the last one gives nothing. Without arguments it is asked for what
    distinguishes its results in the cache.
    """
    if stages is not None:
        stages["cubin"] = lambda source, metadata: b""
    return "flashgen-ptx-only", "flashgen-ptx-only"
