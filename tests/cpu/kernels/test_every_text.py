"""Each text compiles with the Triton that is installed: test-driver-oldest runs this with the oldest."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from flashgen import paths
from flashgen.compile.compiler import compile_kernel
from flashgen.kernels.render import render
from flashgen.kernels.text import text_name
from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec
from flashgen.table.table_file import load
from tests.tables import SHIPPED


@functools.cache
def one_of_each() -> dict[str, tuple[AttentionSpec, KernelConfig, str]]:
    """By text, the kernel of a table with the most features, and its architecture."""
    found: dict[str, tuple[AttentionSpec, KernelConfig, str]] = {}
    for slug in SHIPPED:
        table = load(paths.shipped_table(slug))
        for entry in table.everything if table.gpu.is_nvidia else ():
            name = text_name(entry.spec, entry.config)
            held = found.get(name)
            if held is None or len(held[0].name) < len(entry.spec.name):
                found[name] = entry.spec, entry.config, table.gpu.arch
    return found


@pytest.mark.slow("make test compiles these in the tests of each")
@pytest.mark.parametrize(
    "name", [path.stem for path in paths.shipped_generated_dir().glob("kernels/[!_]*.py")]
)
def test_it_compiles(name: str, tmp_path: Path) -> None:
    if name not in one_of_each():
        pytest.skip("no table of NVIDIA has it")
    spec, config, arch = one_of_each()[name]
    compile_kernel(render(spec, config), spec, config, arch, whole=False, cache=tmp_path)
