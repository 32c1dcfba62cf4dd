"""launch(): any Triton or Gluon kernel, compiled for a GPU and executed on CPU tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from flashgen.errors import InvalidArgument
from flashgen.ptx.arguments import LaunchArgument, launch_of
from flashgen.ptx.execute import Loaded, execute
from flashgen.ptx.findings import CHECKS, Report, Sanitizer
from flashgen.ptx.text import parse
from flashgen.ptx.triton_compile import Specialization, compiled, options_of
from flashgen.spec.gpu import known_target

ALIGNED = 16
"""What Triton looks for in pointers and integers: multiples of so many bytes, or of that number."""

_DTYPES = {
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64",
    "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "u8", "bool": "i1",
    "uint16": "u16", "uint32": "u32", "uint64": "u64",
    "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5",
}  # fmt: skip

LaunchGrid = int | tuple[int, ...] | Callable[[dict[str, Any]], int | tuple[int, ...]]


def launch(
    kernel: Any,
    grid: LaunchGrid,
    *args: Any,
    target: str = "nvidia_h200",
    seed: int = 0,
    checks: Collection[Sanitizer] = CHECKS,
    memory: Sequence[Any] = (),
    **options: Any,
) -> Report:
    """Compile a kernel for a GPU, and execute its PTX on CPU tensors; no GPU is needed.

    The tensors hold what the kernel has written. Of an autotuned kernel the first config is taken,
    for arguments that are not given.

    Args:
        kernel: a function under @triton.jit or @gluon.jit; other decorators of Triton may follow.
        grid: a number, up to three of them, or a function of the kernel's arguments by name.
        args: tensors on the CPU, tensor descriptors of them, numbers.
        target: a GPU that flashgen knows, or an architecture (sm_80 to sm_120).
        seed: draws the order of blocks, warps and asynchronous copies.
        checks: of memcheck, racecheck, initcheck, synccheck those that run; memcheck always does.
        memory: tensors whose addresses the kernel loads from memory.
        options: further arguments of the kernel by name, and options of a launch of Triton's.

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
    report = run(
        kernel, grid, *args, target=target, seed=seed, checks=checks, memory=memory, **options
    )
    report.raise_if_any()
    return report


def run(
    kernel: Any,
    grid: LaunchGrid,
    *args: Any,
    target: str = "nvidia_h200",
    seed: int = 0,
    checks: Collection[Sanitizer] = CHECKS,
    memory: Sequence[Any] = (),
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
        memory: as launch() has it.
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
    kernel, named = _decorated(kernel, args, options)
    settings = options_of(kernel, named)
    values = _values(kernel, args, named)
    blocks = _blocks(grid, values)
    specialization = _specialization(kernel, values)
    architecture = _architecture(target)
    built, loaded = compiled(kernel, specialization, architecture, settings, loaded_text)
    arguments = [
        LaunchArgument(name=name, type=kind, value=values[name])
        for name, kind in specialization.types.items()
        if kind != "constexpr"
    ]
    scratch = int(getattr(built.metadata, "global_scratch_size", 0) or 0)
    made = launch_of(
        arguments,
        blocks,
        int(built.metadata.shared),
        [dict(each) for each in getattr(built.metadata, "tensordesc_meta", None) or ()],
        scratch * math.prod(blocks),
        memory,
    )
    return execute(loaded, made, seed=seed, checks=checks)


@functools.lru_cache(maxsize=32)
def loaded_text(ptx: str) -> Loaded:
    """The decoded program of a PTX text, decoded once."""
    return Loaded(parse(ptx))


def _decorated(
    kernel: Any, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The function under @triton.jit, and its arguments by name with those that decorators add: the
    first config of @triton.autotune, and the values of @triton.heuristics.
    """
    named = dict(named)
    while not hasattr(kernel, "params"):
        given = {**dict(zip(getattr(kernel, "arg_names", ()), args, strict=False)), **named}
        if configs := getattr(kernel, "configs", None):
            named = configs[0].all_kwargs() | named
            if configs[0].pre_hook is not None:
                configs[0].pre_hook(given | named)
        elif isinstance(values := getattr(kernel, "values", None), dict):
            for name, heuristic in values.items():
                named[name] = given[name] = heuristic(given)
        else:
            raise InvalidArgument(
                f"kernel must be a function under @triton.jit: got {type(kernel).__name__}"
            )
        kernel = kernel.fn
    return kernel, named


def _blocks(grid: LaunchGrid, values: dict[str, Any]) -> tuple[int, int, int]:
    """The blocks along three axes."""
    given = grid(values) if callable(grid) else grid
    try:
        sizes = [int(size) for size in (given if isinstance(given, Sequence) else (given,))]
    except (TypeError, ValueError):
        raise InvalidArgument(f"a grid must consist of numbers: got {given!r}") from None
    if not 1 <= len(sizes) <= 3:
        raise InvalidArgument(f"a grid must have one to three numbers: got {given}")
    x, y, z = [*sizes, 1, 1][:3]
    return x, y, z


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
        if name in values:
            raise InvalidArgument(f"{name} is given twice")
        values[name] = value
    for parameter in kernel.params:
        if parameter.name not in values:
            if not parameter.has_default:
                raise InvalidArgument(f"the argument {parameter.name} is missing")
            values[parameter.name] = parameter.default
    return {name: values[name] for name in names}


def _specialization(kernel: Any, values: dict[str, Any]) -> Specialization:
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
    return Specialization(types, constants, attributes)


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
