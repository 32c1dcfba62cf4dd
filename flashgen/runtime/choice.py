"""Choice: one row of generated/table.py, all the runtime knows of a kernel it may launch."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig
from flashgen.spec.outcome import Source
from flashgen.spec.problem import Bucket


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A kernel, what it serves, and what it took when it was compiled.

    An entry of a table has a bucket, and its kernel is a file of generated/kernels. Any other
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
