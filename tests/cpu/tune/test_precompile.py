"""tune/precompile.py and runtime/kernel_files.py: what was compiled ahead is what a launch looks for, to the letter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton import knobs
from triton.runtime.cache import get_cache_manager

from flashgen import paths
from flashgen.compile.sass import disassemble
from flashgen.errors import InvalidArgument
from flashgen.kernels import launch, launch_backward, loader
from flashgen.kernels.loader import load_text
from flashgen.kernels.render import render
from flashgen.runtime import Dispatcher, kernel_files
from flashgen.runtime.choice import Choice
from flashgen.runtime.launcher import Launcher
from flashgen.runtime.selection import Served, ladder
from flashgen.schedules.config import KernelConfig, kernel_name
from flashgen.schedules.defaults import default_config, default_spec, plain_specs
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import BUCKETS
from flashgen.table.table import Table
from flashgen.table.table_file import load
from flashgen.tune import precompile
from tests.cpu.kernels.test_specialization import CompileOnly, CompileOnlyDriver
from tests.makers import make_config, make_spec
from tests.serving import SHIPPED
from tests.tables import made_entry, made_run

H200 = TARGETS["nvidia_h200"]
SPEC = make_spec(head_dim=64)
TILE = make_config(64, 32, loads="descriptor")
DEFAULT = default_spec(make_spec(head_dim=24, mask="causal"))
KERNELS: tuple[tuple[AttentionSpec, KernelConfig], ...] = (
    (SPEC, TILE),
    (SPEC, TILE.pointer_twin(SPEC)),
    (DEFAULT, default_config(DEFAULT)),
    (SPEC.for_direction("backward_delta"), make_config(64, 16, num_stages=1)),
    (SPEC.for_direction("backward_dkv"), make_config(32, 32)),
    (SPEC.for_direction("backward_dq"), make_config(32, 32, loads="descriptor")),
)
NAMES = [kernel_name(*pair) for pair in KERNELS]
OTHERS = pytest.mark.slow("make test has a plain kernel by pointer")
KEY = "ab" * 32


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of Triton that is empty, and folders that were not read before."""
    monkeypatch.setattr(triton.runtime.driver, "_active", CompileOnlyDriver())
    kernel_files.binaries.cache_clear()
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path / "cache")
        yield tmp_path / "cache"
    kernel_files.binaries.cache_clear()


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `flashgen aot` would write, of KERNELS."""
    out = tmp_path_factory.mktemp("aot")
    made = list(precompile.package(Table(gpu=H200), KERNELS, out, jobs=1))
    assert [(each.name, each.failure) for each in made] == [(name, "") for name in NAMES]
    return out


def launched(spec: AttentionSpec, config: KernelConfig, folder: Path | None = None) -> Any:
    """What Triton compiles or finds when the launcher launches this kernel on aligned tensors: that
    of a file in `folder`, or rendered in memory.
    """
    rendered = render(spec, config)
    if folder is None:
        kernel = load_text(rendered)
    else:
        path = folder / f"{rendered.name}.py"
        path.write_text(rendered.source)
        kernel = loader.load_kernel(path, rendered.text_name, rendered.name)
    q, k, v = (torch.zeros((2, 4, 96, 64), dtype=torch.bfloat16) for _ in range(3))
    rows = torch.zeros(2, 4, 96)
    only, diagonal = CompileOnly(kernel), 0 if spec.causal else None
    if config.head_dims == "padded":
        q, k, v = (x[..., :16].contiguous() for x in (q, k, v))
    if spec.direction == "forward":
        launch.launch(only, spec, config, q, k, v, scale=0.1, diagonal=diagonal)
    elif spec.direction == "backward_delta":
        launch.bind(only, spec, config)(launch_backward.Delta(o=q, do=k, dlse=rows))
    else:
        call = launch_backward.Backward(
            q=q, k=k, v=v, do=q.clone(), lse=rows, delta=rows, scale=0.1, diagonal=diagonal
        )
        launch.bind(only, spec, config)(call)
    (built,) = kernel.device_caches[0][0].values()
    return built


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each kernel that Triton was asked for, whether its cache had it."""
    hits: list[bool] = []
    with knobs.compilation.scope():
        knobs.compilation.listener = lambda **facts: hits.append(facts["cache_hit"])
        yield hits  # type: ignore[misc]


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, id=name, marks=() if place == 1 else OTHERS)
        for place, (pair, name) in enumerate(zip(KERNELS, NAMES, strict=True))
    ],
)
def test_a_launch_finds_what_was_compiled_ahead(
    packaged: Path,
    pair: tuple[AttentionSpec, KernelConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compilations: list[bool],
) -> None:
    monkeypatch.setenv("FLASHGEN_AOT", str(packaged))
    assert kernel_files.offer(kernel_name(*pair)) == 1
    assert kernel_files.offer(kernel_name(*pair)) == 0  # it is there
    found = launched(*pair)
    assert launched(*pair, tmp_path).hash == found.hash  # of the same text in a file
    assert compilations == [True, True]
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path / "other")
        anew = launched(*pair, tmp_path)
    assert compilations == [True, True, False]
    # The same instructions; the lines of the source they name are in other folders.
    assert disassemble(found.asm["cubin"]) == disassemble(anew.asm["cubin"])


def test_a_kernel_of_another_text_is_compiled(
    packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilations: list[bool]
) -> None:
    """The folder holds a kernel of the same name, made from an older template."""
    monkeypatch.setenv("FLASHGEN_AOT", str(packaged))
    assert kernel_files.offer(NAMES[1]) == 1
    spec, config = KERNELS[1]
    rendered = render(spec, config)
    path = tmp_path / f"{rendered.name}.py"
    path.write_text(rendered.source.replace("-3.4028234663852886e38", "-2.0e30"))
    q = torch.zeros((1, 1, 64, 64), dtype=torch.bfloat16)
    kernel = CompileOnly(loader.load_kernel(path, rendered.text_name, rendered.name))
    launch.launch(kernel, spec, config, q, q, q, scale=0.1, diagonal=None)
    assert compilations == [False]


def test_another_triton_is_said_once_and_offers_nothing(
    packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    manifest = packaged / H200.slug / kernel_files.MANIFEST
    text = manifest.read_text().replace(f'"{triton.__version__}"', '"3.0.0"')
    (tmp_path / "old" / "x").mkdir(parents=True)
    (tmp_path / "old" / "x" / kernel_files.MANIFEST).write_text(text)
    monkeypatch.setenv("FLASHGEN_AOT", str(tmp_path / "old"))
    assert [kernel_files.offer(name) for name in NAMES] == [0] * len(NAMES)
    assert caplog.text.count("is of Triton 3.0.0") == 1


def test_a_binary_that_is_gone_is_compiled(
    packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    folder = tmp_path / "part" / "x"
    folder.mkdir(parents=True)
    (folder / kernel_files.MANIFEST).write_text(
        (packaged / H200.slug / kernel_files.MANIFEST).read_text()
    )
    monkeypatch.setenv("FLASHGEN_AOT", str(folder.parent))
    assert kernel_files.offer(NAMES[0]) == 0
    assert "compiled when first called" in caplog.text


@pytest.mark.parametrize("suffix", [".json", ".cubin"])
def test_a_damaged_file_never_reaches_the_cache(
    packaged: Path, fresh_cache: Path, tmp_path: Path, monkeypatch: Any, caplog: Any, suffix: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(packaged, folder)
    (path,) = folder.rglob(f"{NAMES[0]}{suffix}")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    monkeypatch.setenv("FLASHGEN_AOT", str(folder))
    assert kernel_files.offer(NAMES[0]) == 0
    assert f"{path} is damaged" in caplog.text
    assert not [found for found in fresh_cache.rglob("*") if found.is_file()]
    assert kernel_files.offer(NAMES[1]) == 1


def test_a_cache_that_cannot_be_written_is_a_warning(
    packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHGEN_AOT", str(packaged))
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path / "file" / "cache")
        assert kernel_files.offer(NAMES[0]) == 0
    assert "compiled when first called" in caplog.text


def test_without_the_variable_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHGEN_AOT", raising=False)
    assert kernel_files.offer(NAMES[0]) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (None, "must name a folder that `flashgen aot` made"),
        ({"schema": 1}, r"schema 2 \(schema 1\): run flashgen aot again"),
        ({"triton": 3}, "triton must be text"),
        ({"triton": "\x1b[2J"}, "triton must be printable"),
        ({"kernels": []}, "kernels must be an object"),
        ({"kernels": {"a": {}}}, "a must be a list"),
        ({"kernels": {"a": [{"key": KEY}]}}, "lacks the key 'files'"),
        ({"kernels": {"a": [{"key": KEY, "files": {"a.json": KEY}}]}}, "metadata"),
        (
            {"kernels": {"a": [{"key": KEY, "files": {"../a.json": KEY, "a.cubin": KEY}}]}},
            "metadata",
        ),
        ({"kernels": {"a": [{"key": "..", "files": {"a.json": KEY, "a.cubin": KEY}}]}}, "64 hex"),
        ({"kernels": {"a": [{"key": KEY, "files": {"a.json": KEY, "a.cubin": None}}]}}, "64 hex"),
        ({"kernels": [[[]]] * 30}, "nested|an object"),
    ],
)
def test_a_folder_that_is_none_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, said: str
) -> None:
    (tmp_path / "x").mkdir()
    good = {"schema": 2, "gpu": "x", "arch": "sm_90", "triton": triton.__version__, "kernels": {}}
    if change is not None:
        (tmp_path / "x" / kernel_files.MANIFEST).write_text(json.dumps(good | change))
    monkeypatch.setenv("FLASHGEN_AOT", str(tmp_path))
    with pytest.raises(InvalidArgument, match=said):
        kernel_files.offer("a")


def test_the_runtime_offers_before_it_imports(
    packaged: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the launcher does, for a kernel that is rendered."""
    offered: list[str] = []
    monkeypatch.setattr(kernel_files, "offer", lambda name: offered.append(name) or 1)
    choice = Choice(
        spec=DEFAULT, bucket=None, config=default_config(DEFAULT), source="untimed", median_us=None
    )
    kernel_files.kernel("generated", choice, choice.config)
    assert offered == [NAMES[2]]


class TestWhichKernels:
    TABLE = Table(gpu=H200).with_entry(made_entry(SPEC, BUCKETS[2], TILE), made_run())

    def test_entries_and_their_twins(self) -> None:
        pairs = precompile.kernels_to_build(self.TABLE, H200, defaults=False)
        assert pairs[:2] == ((SPEC, TILE), (SPEC, TILE.pointer_twin(SPEC)))
        assert {spec.direction for spec, _ in pairs[2:]} == {"decode", "combine"}
        assert {config.br for spec, config in pairs[2:] if spec.direction == "decode"} == {16, 64}
        amd = precompile.kernels_to_build(
            replace(self.TABLE, gpu=TARGETS["amd_instinct_mi300x"]), TARGETS["amd_instinct_mi300x"],
            defaults=False,
        )  # fmt: skip
        assert {spec.direction for spec, _ in amd} == {"forward"}

    def test_the_combine_kernel_that_starts_early(self) -> None:
        decode = SPEC.for_direction("decode")
        early = make_config(16, 64, pdl=True)
        table = Table(gpu=H200).with_entry(made_entry(decode, BUCKETS[2], early), made_run())
        pairs = precompile.kernels_to_build(table, H200, defaults=False)
        merging = decode.for_direction("combine")
        assert {config.pdl for spec, config in pairs if spec == merging} == {True}

    def test_what_the_gpu_cannot_run_is_left_out(self) -> None:
        large = make_config(128, 128, num_warps=8, num_stages=4)
        table = Table(gpu=H200).with_entry(made_entry(SPEC, BUCKETS[2], large), made_run())
        small = replace(H200, name="NVIDIA H200 NVL", shared_per_block=100 << 10)
        pairs = precompile.kernels_to_build(table, small, defaults=False)
        assert pairs[0] == (SPEC, default_config(SPEC))
        assert {spec.direction for spec, _ in pairs[1:]} == {"decode", "combine"}

    def test_a_feature_takes_the_tile_of_the_plain_entry(self) -> None:
        pairs = precompile.kernels_to_build(self.TABLE, H200, defaults=False, features=["window"])
        window = SPEC.with_features(["window"])
        default = (window, default_config(window))
        assert pairs[2:4] == ((window, TILE), (window, TILE.pointer_twin(window)))
        assert default in pairs[4:]
        others = [pair for pair in pairs[4:] if pair[0].direction not in ("decode", "combine")]
        assert all(spec.window and c.head_dims == "padded" for spec, c in others)
        with pytest.raises(InvalidArgument, match="--feature must be one of"):
            precompile.kernels_to_build(self.TABLE, H200, defaults=False, features=["no"])

    @pytest.mark.slow("4 s each; tests/driver launches what was packaged")
    @pytest.mark.parametrize("slug", ["nvidia_h100_pcie", "nvidia_h200", "nvidia_l4"])
    @pytest.mark.parametrize("seq", [100, 5000])
    def test_they_are_what_a_call_launches(
        self, slug: str, seq: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of the shipped tables: aligned or not, with features or not, rendered or a file."""
        table, gpu = load(paths.shipped_table("nvidia_h200")), TARGETS[slug]
        if slug == "nvidia_l4":
            table = load(paths.shipped_table(slug))
        built = set(
            precompile.kernels_to_build(
                table, gpu, defaults=True, features=["window", "softcap"], head_dims=[40, 80]
            )
        )
        served = Served(
            archs={table.gpu.slug: SHIPPED.archs[table.gpu.slug]},
            choices={table.gpu.slug: SHIPPED.choices[table.gpu.slug]},
        )
        plain = [make_spec(dtype, dim, mask) for dtype in ("bfloat16", "float16")
                 for dim in (40, 64, 80, 128, 256) for mask in ("none", "causal")]  # fmt: skip
        for spec in (*plain, *(spec.with_features(["window", "softcap"]) for spec in plain)):
            for direction in ("forward", "backward_dkv", "backward_dq", "backward_delta"):
                found = ladder(served, slug, gpu, spec.for_direction(direction), seq)
                launcher = Launcher("generated", found.rungs)
                for steps in (launcher._aligned, launcher._unaligned):
                    assert (steps.selection.choice.spec, steps.config) in built
            monkeypatch.setenv("FLASHGEN_GPU", slug)
            own = Dispatcher(package="generated", archs=served.archs, choices=served.choices)
            for rows in (1, 20, 500):
                for part in own.resolver._split_kernels(spec, seq, torch.device("cpu"), rows):
                    assert (part.selection.choice.spec, part._aligned.config) in built

    def test_defaults_are_those_without_features(self) -> None:
        pairs = precompile.kernels_to_build(None, H200, defaults=True)
        assert {kernel_name(*pair) for pair in pairs} == {
            kernel_name(spec, default_config(spec)) for spec in plain_specs()
        }


def test_what_does_not_compile_is_told_and_left_out(tmp_path: Path) -> None:
    bad = replace(H200, arch="sm_1")
    (made,) = precompile.package(Table(gpu=bad), KERNELS[1:2], tmp_path, jobs=1)
    assert made.keys == ()
    assert made.failure
    assert json.loads((tmp_path / bad.slug / kernel_files.MANIFEST).read_text())["kernels"] == {}


def test_what_triton_has_is_not_compiled_again(fresh_cache: Path) -> None:
    (first,) = precompile.precompile(KERNELS[1:2], H200, cache=fresh_cache, jobs=1)
    group = get_cache_manager(first.keys[0]).get_group(f"{first.name}.json")
    assert group
    before = Path(group[f"{first.name}.cubin"]).stat().st_mtime_ns
    (again,) = precompile.precompile(KERNELS[1:2], H200, cache=fresh_cache, jobs=1)
    assert again.keys == first.keys
    assert Path(group[f"{first.name}.cubin"]).stat().st_mtime_ns == before
