"""Choice: all the runtime knows of a kernel it may launch; and the rows of generated/table.py,
which become choices when a GPU is first looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig, kernel_name
from flashgen.spec.problem import BUCKETS, Bucket
from flashgen.spec.structure import text_name
from flashgen.spec.vocabulary import Source


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A kernel, what it serves, and what it took when it was compiled.

    An entry of a table has a bucket, and its text is a file of generated/kernels. Any other
    serves every length: bucket is None, and digest is "", since its text is rendered when it is
    first needed. shared_bytes and registers are the compiler's figures, or None where the kernel
    was not compiled for one GPU alone. median_us is None unless timed.
    """

    spec: AttentionSpec
    bucket: Bucket | None
    config: KernelConfig
    kernel: str
    digest: str
    shared_bytes: int | None
    registers: int | None
    source: Source
    median_us: float | None

    @property
    def is_entry(self) -> bool:
        """Whether a table names the kernel."""
        return self.bucket is not None


class Row(NamedTuple):
    """The kernel of one bucket, which `low` names, by the name of its config.

    digest is given where the kernel's text has changed since it was timed: the entry is stale.
    """

    source: Source
    low: int
    config: str
    shared_bytes: int | None = None
    registers: int | None = None
    median_us: float | None = None
    digest: str | None = None


_BUCKETS = {bucket.low: bucket for bucket in BUCKETS}


def of_rows(
    spec: AttentionSpec,
    rows: Iterable[Row],
    configs: Mapping[str, KernelConfig],
    digests: Mapping[str, str],
) -> tuple[Choice, ...]:
    """The choices of one spec; configs by name, digests of today's texts by the texts' names."""
    return tuple(
        Choice(
            spec=spec,
            bucket=_BUCKETS[row.low],
            config=(config := configs[row.config]),
            kernel=kernel_name(spec, config),
            digest=row.digest or digests[text_name(spec, config)],
            shared_bytes=row.shared_bytes,
            registers=row.registers,
            source=row.source,
            median_us=row.median_us,
        )
        for row in rows
    )


class Choices(Mapping[str, tuple[Choice, ...]]):
    """The choices of each GPU by slug, made by a function when they are first looked up."""

    def __init__(self, makers: Mapping[str, Callable[[], tuple[Choice, ...]]]) -> None:
        self._makers = makers
        self._made: dict[str, tuple[Choice, ...]] = {}

    def __getitem__(self, slug: str) -> tuple[Choice, ...]:
        if slug not in self._made:
            self._made[slug] = self._makers[slug]()
        return self._made[slug]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)
