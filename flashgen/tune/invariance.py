"""Compares the kernels of each numeric class as Triton compiles them for a GPU, by their PTX."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from flashgen.compile.arithmetic import Arithmetic, arithmetic_of
from flashgen.compile.ptx import build_ptx
from flashgen.kernels.render import render
from flashgen.schedules.base import BY_KEYS
from flashgen.schedules.config import KernelConfig, kernel_name
from flashgen.schedules.defaults import default_configs, default_spec
from flashgen.schedules.legality import why_illegal
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.vocabulary import Direction, padded
from flashgen.table.table import Table

ProvenKernel = tuple[AttentionSpec, KernelConfig]
HEAD_DIMS = (64, 128, 256)
"""Of the classes that are compared beside those of a table: bfloat16, causal."""
DEPTH_BYTES = 32
"""Of a row or column that one matrix instruction multiplies: k16 of 16-bit operands."""
_OF_ROWS = ("forward", "decode")


@dataclass(frozen=True, kw_only=True)
class ClassProof:
    """The kernels of one class: its name, their number, what the first of them computes with, and
    the others that differ, with the reason.
    """

    name: str
    count: int
    arithmetic: Arithmetic
    others: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        agree = f"{self.count - len(self.others)} of {self.count} kernels agree"
        lines = [f"{self.name}: {agree}: {self.arithmetic}"]
        lines += [f"  {name} differs: {reason}" for name, reason in self.others]
        return "\n".join(lines)


def compare_classes(table: Table) -> Iterator[ClassProof]:
    """The classes of a table, and of bfloat16 at HEAD_DIMS: entries, their pointer twins, and the
    default kernels that serve beside them. Raises CompileFailed and ToolchainError.
    """
    plain = [_causal(dim) for dim in HEAD_DIMS]
    own = [entry for entry in table.everything if entry.spec.invariant]
    classes: dict[tuple[object, ...], dict[ProvenKernel, None]] = {}
    for spec in (*plain, *(entry.spec for entry in own)):
        for kernel in _defaults(spec, table.gpu):
            classes.setdefault(_class(kernel[0]), {})[kernel] = None
    for entry in own:
        for config in dict.fromkeys((entry.config, entry.config.pointer_twin(entry.spec))):
            if _compared(entry.spec.direction):
                classes[_class(entry.spec)][entry.spec, config] = None
    for kernels in classes.values():
        yield compare(kernels, table.gpu)


def compare(kernels: Iterable[ProvenKernel], gpu: Gpu) -> ClassProof:
    """Whether kernels of one class compute in one way: as the first of them."""
    found = [(kernel, _arithmetic(*kernel, gpu.arch)) for kernel in kernels]
    (spec, _), first = found[0]
    others = []
    for (own, config), arithmetic in found:
        if (reason := arithmetic.difference(first)) is not None:
            others.append((kernel_name(own, config), reason))
    return ClassProof(name=spec.name, count=len(found), arithmetic=first, others=tuple(others))


def _arithmetic(spec: AttentionSpec, config: KernelConfig, arch: str) -> Arithmetic:
    """Chains over the head dim as they are where it is padded: that adds products with 0."""
    found = arithmetic_of(build_ptx(render(spec, config), spec, config, arch).ptx)
    padded_to = {
        dim * spec.element_bytes // DEPTH_BYTES: padded(dim) * spec.element_bytes // DEPTH_BYTES
        for dim in (spec.head_dim, spec.head_dim_v)
    }
    return replace(found, chains=frozenset(padded_to.get(n, n) for n in found.chains))


def _causal(dim: int) -> AttentionSpec:
    return AttentionSpec(
        dtype="bfloat16", head_dim=dim, head_dim_v=dim, mask="causal", invariant=True
    )


def _compared(direction: Direction) -> bool:
    return direction in (*_OF_ROWS, "backward_dq", "backward_dkv")


def _class(spec: AttentionSpec) -> tuple[object, ...]:
    """What kernels of one class share: O and LSE of forward and decode, dQ, or dK and dV."""
    written = "rows" if spec.direction in _OF_ROWS else spec.direction
    dims = default_spec(spec).head_dim
    return (written, spec.dtype, spec.precision, dims, spec.softcap, spec.alibi)


def _defaults(spec: AttentionSpec, gpu: Gpu) -> Iterator[ProvenKernel]:
    """The default kernels of prefill, packed and over pages, of decode, and of the gradients."""
    forward = replace(
        spec, direction="forward", varlen=False, paged=False, leftpad=False, indexed=False
    )
    step = forward.for_direction("decode")
    gradients = [forward.for_direction(each) for each in ("backward_dq", BY_KEYS[0])]
    packed = [replace(each, varlen=True) for each in (forward, *gradients)]
    pages = [replace(packed[0], paged=True), replace(step, paged=True)]
    for each in (forward, step, *packed, *pages, *gradients):
        whole = default_spec(each)
        for config in default_configs(whole):
            if why_illegal(whole, config, gpu) is None:
                yield whole, config
