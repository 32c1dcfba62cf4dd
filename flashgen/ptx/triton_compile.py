"""Triton's compiler, asked for PTX: options, failures and a damaged cache."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from flashgen.errors import InvalidArgument, cut

Read = TypeVar("Read")

_REFUSED = {
    "num_ctas": "clusters of blocks are not executed",
    "arch": "target= names the GPU",
    "backend_name": "target= names the GPU",
    "warp_size": "a warp of NVIDIA's GPUs has 32 threads",
    "supported_fp8_dtypes": "they follow from the target",
    "deprecated_fp8_dot_operand_dtypes": "they follow from the target",
    "stream": "there are no streams on a CPU",
    "device": "target= names the GPU",
    "warmup": "run without it",
}
"""Options that are not taken, and why."""


class Specialization(NamedTuple):
    """What Triton compiles a kernel for: types, constants and what it may assume of arguments."""

    types: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int, ...], list[list[object]]]


def options_of(kernel: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Take from `given` what is no argument of the kernel: options of Triton's compiler and launch.
    Raises InvalidArgument for one that has no meaning here, and for one that nobody knows.
    """
    from triton.backends.nvidia.compiler import CUDAOptions

    names = [name for name in given if name not in kernel.arg_names]
    known = set(CUDAOptions.__dataclass_fields__) | {"launch_pdl", "launch_cooperative_grid"}
    for name in names:
        if name in _REFUSED and given[name] != getattr(CUDAOptions, name, None):
            raise InvalidArgument(f"{name}={given[name]!r} is not supported: {_REFUSED[name]}")
        if name not in known and name not in _REFUSED:
            raise InvalidArgument(
                f"{name} is neither an argument of {kernel.__name__} nor an option of Triton"
            )
    taken = {name: given.pop(name) for name in names}
    return {name: value for name, value in taken.items() if name not in _REFUSED}


def compiled(
    kernel: Any,
    specialization: Specialization,
    capability: int,
    options: dict[str, Any],
    read: Callable[[str], Read],
) -> tuple[Any, Read]:
    """What Triton makes of a kernel, and its PTX as `read` gives it. A cache that cannot be read is
    a miss. Raises InvalidArgument if Triton fails: one sentence, which names a file with the log.
    """
    try:
        built = _compile(kernel, specialization, capability, options)
        return built, read(built.asm["ptx"])
    except InvalidArgument:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        built = _compile(kernel, specialization, capability, options, anew=True)
        return built, read(built.asm["ptx"])


def _compile(
    kernel: Any,
    specialization: Specialization,
    capability: int,
    options: dict[str, Any],
    *,
    anew: bool = False,
) -> Any:
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler.errors import TritonError

    if getattr(kernel, "is_gluon", lambda: False)():
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source
    types, constants, attributes = specialization
    source = Source(fn=kernel, signature=types, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    with tempfile.TemporaryFile() as log, without_assembler(), knobs.compilation.scope():
        knobs.compilation.always_compile |= anew
        try:
            with _stderr_to(log):
                built = triton.compile(source, target=target, options=options)
        except (TritonError, RuntimeError, AssertionError, NotImplementedError) as error:
            log.seek(0)
            said = log.read().decode(errors="replace")
            raise InvalidArgument(_sentence(kernel.__name__, capability, said, error)) from error
        log.seek(0)
        sys.stderr.write(log.read().decode(errors="replace"))
    return built


def _sentence(name: str, capability: int, said: str, error: Exception) -> str:
    """Why Triton failed; all that it said is in a file."""
    passes = re.search(r"Pipeline failed while executing \[`(\w+)`", said)
    lines = [type(error).__name__, *str(error).splitlines()]
    last = next(line for line in reversed(lines) if re.search(r"\w", line))
    why = f"its pass {passes[1]} failed" if passes else cut(last.strip())
    sentence = f"Triton cannot compile {name} for sm_{capability}: {why}"
    if not said and isinstance(error, AssertionError):
        return sentence
    with tempfile.NamedTemporaryFile(
        "w", prefix="flashgen-triton-", suffix=".log", delete=False
    ) as file:
        file.write(f"{said}\n{error}\n")
    return f"{sentence} (its output is in {file.name})"


@contextlib.contextmanager
def _stderr_to(file: Any) -> Iterator[None]:
    """What this process writes to stderr, compiled code too, goes to a file."""
    sys.stderr.flush()
    before = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


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
