"""What warmup and aot compile is what the first launch looks for: every direction, schedule and load, and a decode in
one split as in several.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from triton import knobs

from flashgen.inputs.cache import Cache
from flashgen.kernels import launch
from flashgen.kernels.launch_cache import Decode
from flashgen.runtime import kernel_files
from flashgen.schedules.config import KernelConfig, kernel_name
from flashgen.spec.attention import AttentionSpec
from flashgen.table.table import Table
from flashgen.tune import precompile
from tests.driver.cases import GPU, call_of, kernels
from tests.makers import make_config, make_spec

SPEC = make_spec(head_dim=64, direction="decode")
CONFIG = make_config(16, 32)
KERNELS = kernels()


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All kernels, compiled ahead of time."""
    folder = tmp_path_factory.mktemp("packaged") / "aot"
    list(precompile.package(Table(gpu=GPU), list(KERNELS.values()), folder, jobs=2))
    return folder


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Triton's cache after all kernels were warmed up."""
    folder = tmp_path_factory.mktemp("warm")
    made = list(precompile.precompile(list(KERNELS.values()), GPU, cache=folder, jobs=2))
    assert [each.failure for each in made if each.failure] == []
    return folder


@pytest.fixture
def hits(tmp_path: Path) -> Iterator[list[bool]]:
    """For each kernel that Triton was asked for, whether its cache, new and empty, had it."""
    found: list[bool] = []
    with knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = str(tmp_path / "cache")
        knobs.compilation.listener = lambda **facts: found.append(facts["cache_hit"])
        yield found


def decoded(spec: AttentionSpec, config: KernelConfig, *, splits: int) -> None:
    """One launch of decode, which Triton looks up or compiles."""
    q = torch.empty(2, 4, 1, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.empty(2, 2, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.full((2,), 128, dtype=torch.int32, device="cuda")
    cache = Cache(k=k, v=v, lengths=lengths)
    plan = launch.bind(kernel_files.rendered(spec, config), spec, config)
    parts = plan(Decode(q=q, cache=cache, scale=0.1, sms=GPU.sms, splits=splits))
    assert parts.whole == (splits == 1)


@pytest.mark.parametrize("splits", [1, 3])
def test_a_decode_finds_what_was_warmed_up(hits: list[bool], tmp_path: Path, splits: int) -> None:
    kernel_files._rendered.clear()
    made = list(precompile.precompile([(SPEC, CONFIG)], GPU, cache=tmp_path / "cache", jobs=1))
    assert [each.failure for each in made] == [""]
    decoded(SPEC, CONFIG, splits=splits)
    assert hits == [True]


@pytest.mark.parametrize("splits", [1, 3])
def test_a_decode_finds_what_was_packaged(
    hits: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, splits: int
) -> None:
    kernel_files._rendered.clear()
    kernel_files.binaries.cache_clear()
    list(precompile.package(Table(gpu=GPU), [(SPEC, CONFIG)], tmp_path / "aot", jobs=1))
    monkeypatch.setenv("FLASHGEN_AOT", str(tmp_path / "aot"))
    assert kernel_files.offer(kernel_name(SPEC, CONFIG)) == 2
    decoded(SPEC, CONFIG, splits=splits)
    assert hits == [True]


def launched(name: str) -> None:
    """The first launch of a kernel."""
    spec, config = KERNELS[name]
    kernel_files._rendered.clear()
    launch.bind(kernel_files.rendered(spec, config), spec, config)(call_of(spec))


@pytest.mark.parametrize("name", list(KERNELS))
def test_every_kernel_finds_what_was_warmed_up(hits: list[bool], warm: Path, name: str) -> None:
    knobs.cache.dir = str(warm)
    launched(name)
    assert hits
    assert all(hits)


@pytest.mark.parametrize("name", list(KERNELS))
def test_every_kernel_finds_what_was_packaged(
    hits: list[bool], packaged: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    kernel_files.binaries.cache_clear()
    monkeypatch.setenv("FLASHGEN_AOT", str(packaged))
    assert kernel_files.offer(kernel_name(*KERNELS[name])) > 0
    launched(name)
    assert hits
    assert all(hits)
