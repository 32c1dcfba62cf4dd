"""A kernel as the compiler made it, executed on the CPU: what check.py launches instead of a GPU's.

The PTX of a kernel is compiled once per text and type of output. Its launches go through
flashgen's own plans, as on a GPU, so that arguments, descriptors and grids are those of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from flashgen.compile.ptx import CompiledPtx, build_ptx
from flashgen.errors import LaunchError
from flashgen.kernels.render import Rendered
from flashgen.ptx.arguments import LaunchArgument, launch_of
from flashgen.ptx.execute import execute
from flashgen.ptx.findings import CHECKS, Report, Sanitizer
from flashgen.ptx.triton_kernel import loaded_text
from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.data_sheets import LIMITS


class ExecutedKernel:
    """A kernel of flashgen compiled for `arch`, with the interface of a Triton kernel. report holds
    what all launches found.

    A launch raises FaultsFound at the first finding if `raises` is set, and LaunchError if a block
    of `arch` does not have the shared memory. seed draws the order of blocks, warps and copies;
    each launch takes the next one.
    """

    def __init__(
        self,
        rendered: Rendered,
        spec: AttentionSpec,
        config: KernelConfig,
        arch: str,
        *,
        seed: int = 0,
        checks: Collection[Sanitizer] = CHECKS,
        raises: bool = True,
    ) -> None:
        self.rendered, self.spec, self.config, self.arch = rendered, spec, config, arch
        self.seed, self.checks, self.raises = seed, checks, raises
        self.report = Report()
        self.launches = 0
        self._built: dict[tuple[tuple[str, str], ...], CompiledPtx] = {}
        self._plain = build_ptx(rendered, spec, config, arch)
        self.arg_names = self._plain.arg_names

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., Report]:
        """kernel[grid](...), as Triton launches. Options such as num_warps are the config's."""
        return lambda *arguments, **options: self.launch(int(grid[0]), arguments)

    def launch(self, blocks: int, arguments: Sequence[Any]) -> Report:
        """Execute `blocks` programs on CPU tensors. Raises FaultsFound and LaunchError."""
        built = self._variant(arguments)
        if built.shared_bytes > (most := LIMITS[self.arch].shared_per_block):
            raise LaunchError(
                f"{self.rendered.name} takes {built.shared_bytes} bytes of shared memory: "
                f"{self.arch} has {most} a block"
            )
        given = [
            LaunchArgument(name=name, type=built.types[name], value=value)
            for name, value in zip(self.arg_names, arguments, strict=True)
            if built.types[name] != "constexpr"
        ]
        launch = launch_of(given, (blocks, 1, 1), built.shared_bytes, built.descriptors)
        report = execute(loaded_text(built.ptx), launch, seed=self.seed, checks=self.checks)
        self.seed += 1
        self.launches += 1
        self.report.merge(report)
        if self.raises:
            report.raise_if_any()
        return report

    def _variant(self, arguments: Sequence[Any]) -> CompiledPtx:
        """The kernel for the types of this launch's tensors: Triton compiles another one where they
        are not those of the signature, such as an output in float32, bounds in int64 or larger
        pages.
        """
        other = []
        for name, value in zip(self.arg_names, arguments, strict=True):
            expected = self._plain.types[name]
            if (block := getattr(value, "block_shape", None)) is not None:
                kind, rest = expected.split("[", 1)  # tensordesc<bf16[1, 1, 16, 64],...
                given = f"{kind}{list(block)}{rest[rest.index(']') + 1 :]}"
                if given != expected:
                    other.append((name, given))
            if expected.startswith("*") and isinstance(value, torch.Tensor):
                given = f"*{_TYPES.get(value.dtype, expected[1:])}"
                if given != expected:
                    other.append((name, given))
        if not other:
            return self._plain
        key = tuple(other)
        if key not in self._built:
            self._built[key] = build_ptx(
                self.rendered, self.spec, self.config, self.arch, types=dict(other)
            )
        return self._built[key]


_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
}
"""The types of tensors that a launch may have instead of the signature's."""
