"""Choice: all the runtime knows of a kernel it may launch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flashgen.schedules.config import KernelConfig, kernel_name
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Bucket
from flashgen.spec.vocabulary import Source


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A kernel, what it serves, and how long it took.

    An entry of a table has a bucket, and its kernel is a file of generated/kernels. Any other
    serves every length: bucket is None, and its text is rendered when it is first needed. median_us
    is None unless timed. tritons: of an executed entry, the versions of Triton under which it
    serves.
    """

    spec: AttentionSpec
    bucket: Bucket | None = None
    config: KernelConfig
    source: Source = "untimed"
    median_us: float | None = None
    tritons: tuple[str, ...] = ()

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return kernel_name(self.spec, self.config)

    @property
    def is_entry(self) -> bool:
        """Whether a table names the kernel."""
        return self.bucket is not None


Choices = Mapping[AttentionSpec, tuple[Choice, ...]]
"""The choices of one GPU."""


def by_spec(choices: Iterable[Choice]) -> Choices:
    """The choices of each spec."""
    found: dict[AttentionSpec, tuple[Choice, ...]] = {}
    for choice in choices:
        found[choice.spec] = (*found.get(choice.spec, ()), choice)
    return found
