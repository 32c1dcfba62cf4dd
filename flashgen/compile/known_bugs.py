"""Versions of Triton that are known to compile wrong kernels for an architecture; from its issues.

flashgen has found none of these itself. All are of matrix products in tensor memory.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from flashgen.schedules.config import KernelConfig


@dataclass(frozen=True, kw_only=True)
class KnownBug:
    """A bug of Triton `since` and before `until` (None: no fixed version is known) on `archs`."""

    archs: tuple[str, ...]
    since: tuple[int, int]
    until: tuple[int, int] | None
    says: str
    issue: str


KNOWN_BUGS = (
    KnownBug(
        archs=("sm_100", "sm_103"),
        since=(3, 6),
        until=(3, 7),
        says="a kernel of 4 warps with tl.dot may be wrong, and differ from run to run",
        issue="triton-lang/triton#9871",
    ),
    KnownBug(
        archs=("sm_100",),
        since=(3, 7),
        until=(3, 8),
        says="with the ptxas of CUDA 13.1 a kernel may differ from run to run; 12.8 cures it",
        issue="pytorch/pytorch#181248",
    ),
    KnownBug(
        archs=("sm_103",),
        since=(3, 6),
        until=(3, 8),
        says="kernels of 4 and 8 warps with tl.dot may differ from run to run",
        issue="triton-lang/triton#10590",
    ),
    KnownBug(
        archs=("sm_103",),
        since=(3, 6),
        until=None,
        says="two tl.dot of one accumulator in a loop are wrong",
        issue="triton-lang/triton#10821",
    ),
)
"""What their reporters say of each; the last versions are those that somebody tried."""


def may_be_wrong(arch: str, config: KernelConfig) -> bool:
    """Whether a Triton that flashgen supports may make a wrong program of a config: tl.dot by four
    warps where it multiplies in tensor memory (triton-lang/triton#9871, pytorch/pytorch#181248).
    Schedules in Gluon have no tl.dot.
    """
    return arch in FOUR_WARPS.archs and config.num_warps == 4 and config.interpretable


FOUR_WARPS = KNOWN_BUGS[0]


def warnings_of(arch: str, triton: str) -> tuple[str, ...]:
    """A sentence of each bug that is known of a Triton version on an architecture."""
    number = tuple(map(int, re.findall(r"\d+", triton)[:2]))
    return tuple(
        f"Triton {triton} on {arch}: {bug.says} ({bug.issue}); see `pytest tests/gpu -k twice`"
        for bug in KNOWN_BUGS
        if arch.removesuffix("a") in bug.archs
        and bug.since <= number
        and (bug.until is None or number < bug.until)
    )


def warnings_here(arch: str) -> tuple[str, ...]:
    """Those of the Triton that is installed; none without one."""
    try:
        return warnings_of(arch, installed_triton())
    except PackageNotFoundError:
        return ()


def installed_triton() -> str:
    """Triton's version, without importing it. Raises PackageNotFoundError without one."""
    for name in ("triton-windows", "triton-rocm", "pytorch-triton-rocm"):
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return version("triton")
