"""compile/compiler.py and verdict.py: real compiles for several architectures, the cache, and what judge says of the results."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton

from flashgen.compile import compiler, sass
from flashgen.compile.compiler import Compiled, CompileFailed, cache_file, compile_kernel, recall
from flashgen.compile.verdict import judge, residents, shortcomings
from flashgen.errors import InvalidArgument, ToolchainError, ToolKilled
from flashgen.kernels.render import Rendered, render
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Status
from flashgen.schedules.textbook import LEAST_OVERLAP
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS, Gpu
from flashgen.spec.vocabulary import Direction
from tests.compiled import compile_one, made_compiled, made_loop
from tests.listings import listing
from tests.makers import make_config, make_spec

A100, H200 = TARGETS["nvidia_a100_sxm4_80gb"], TARGETS["nvidia_h200"]
B200 = TARGETS["nvidia_b200"]
MI300X, RX_7900 = TARGETS["amd_instinct_mi300x"], TARGETS["amd_radeon_rx_7900_xtx"]
Build = Callable[[AttentionSpec, KernelConfig, str], Compiled]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def build() -> Build:
    return compile_one


def test_s_ahead_on_hopper_runs_exp2_under_its_own_wgmma(build: Build) -> None:
    spec = make_spec(head_dim=64)
    config = make_config(128, 64, num_warps=8, schedule="s_ahead", loads="descriptor")
    compiled = build(spec, config, "sm_90")
    assert compiled.loop is not None
    # Eight warps share the two products of a 128x64 tile: 4 * br * bc * head_dim operations.
    assert compiled.loop.matrix_flops * 8 == 4 * 128 * 64 * 64
    assert compiled.loop.warpgroup_arrives == 2
    assert (compiled.loop.exp2_under_matrix or 0) >= LEAST_OVERLAP
    assert compiled.advisories == ()
    assert judge(compiled, spec, config, H200) == (Status.OK, "")


def test_a_causal_kernel_has_a_steady_and_a_masked_loop(build: Build) -> None:
    spec, config = make_spec(mask="causal"), make_config(64, 32)
    compiled = build(spec, config, "sm_80")
    steady, masked = compiled.loops
    assert steady == compiled.loop
    assert steady.matrix_flops * 4 == masked.matrix_flops * 4 == 4 * 64 * 32 * 64
    assert masked.other > steady.other
    assert steady.exp2_under_matrix is None
    assert 0 < compiled.registers <= 255
    assert compiled.shared_bytes >= 2 * 32 * 64 * 2
    assert (compiled.arch, compiled.triton) == ("sm_80", triton.__version__)


@pytest.mark.slow("ptxas takes seconds where registers are too few")
def test_a_tile_too_large_spills_and_is_serialized(build: Build) -> None:
    spec, config = make_spec("float16", head_dim=64), make_config(256, 128)
    compiled = build(spec, config, "sm_90")
    assert compiled.spill_bytes > 0
    assert compiled.loop is not None
    assert compiled.loop.spills > 0
    assert compiled.loop.warpgroup_arrives > 2
    assert any("C751" in advisory and "serialized" in advisory for advisory in compiled.advisories)
    assert judge(compiled, spec, config, H200)[0] is Status.SPILLS


def test_float32_without_matrix_instructions(build: Build) -> None:
    compiled = build(make_spec("float32", head_dim=16), make_config(16, 16, num_warps=1), "sm_80")
    assert compiled.loop is not None
    assert compiled.loop.matrix_instructions == compiled.loop.matrix_flops == 0
    assert compiled.loop.fp32 > 100


def small() -> tuple[Rendered, AttentionSpec, KernelConfig]:
    spec, config = make_spec("float16", head_dim=16), make_config(16, 16, num_warps=1, num_stages=1)
    return render(spec, config), spec, config


def test_what_the_cache_holds_is_not_compiled_again(cache: Path) -> None:
    rendered, spec, config = small()
    first = compile_kernel(rendered, spec, config, "sm_80", cache=cache)
    unusable = replace(rendered, source="raise AssertionError('compiled again')\n")
    assert compile_kernel(unusable, spec, config, "sm_80", cache=cache) == first
    binary = cache_file(rendered.digest, "sm_80", triton.__version__, cache, "cubin")
    assert binary.read_bytes().startswith(b"\x7fELF")
    assert not list(cache.glob(".*"))  # nothing half written stays


@pytest.mark.parametrize("damage", ["torn", "empty", "foreign", "older", "no binary", "no file"])
def test_a_damaged_cache_file_is_as_good_as_none(tmp_path: Path, damage: str) -> None:
    compiled = made_compiled()
    facts, binary = (
        cache_file(compiled.digest, compiled.arch, compiled.triton, tmp_path, suffix)
        for suffix in ("json", "cubin")
    )
    whole = json.dumps({"facts": compiler.FACTS, **compiled.to_json()})
    facts.write_text(whole)
    binary.write_bytes(b"code")
    assert recall(compiled.digest, compiled.arch, compiled.triton, tmp_path) == compiled
    if damage == "no binary":
        binary.unlink()
    elif damage == "no file":
        facts.unlink()
    else:
        record = json.loads(whole)
        changed = {
            "torn": whole[:-20],
            "empty": "",
            "foreign": "[1, 2]",
            "older": json.dumps(record | {"facts": 0}),
        }
        facts.write_text(changed[damage])
    assert recall(compiled.digest, compiled.arch, compiled.triton, tmp_path) is None


def test_facts_survive_json() -> None:
    compiled = made_compiled(
        advisories=("C7510",), other_loops=(made_loop(exp2_under_matrix=None),)
    )
    assert Compiled.from_json(json.loads(json.dumps(compiled.to_json()))) == compiled
    assert Compiled.from_json(made_compiled(loop=None).to_json()).loop is None
    for empty in ({"loop": made_loop(instructions=0)}, {"spilling": ((1, 0),)}):
        with pytest.raises(InvalidArgument, match="a loop must have an instruction"):
            Compiled.from_json(made_compiled(**empty).to_json())
    for none in ({"num_warps": 0}, {"shared_bytes": -1024}):
        with pytest.raises(InvalidArgument, match="a kernel must have a warp, and bytes of shared"):
            Compiled.from_json(made_compiled(**none).to_json())


def test_a_refusal_says_what_the_compiler_said() -> None:
    rendered, spec, config = small()
    broken = replace(
        rendered, source=rendered.source.replace("tl.dot(q[0], ", "tl.dot(no_such_name, ")
    )
    assert broken.source != rendered.source
    with pytest.raises(CompileFailed, match=r"br16_bc16.* for sm_80: .*no_such_name") as error:
        compile_kernel(broken, spec, config, "sm_80")
    assert "\n" not in str(error.value)


def test_a_compiler_that_was_killed_says_nothing_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ptxas = tmp_path / "ptxas"
    ptxas.write_text(
        '#!/bin/sh\ncase "$*" in *--version*) echo "release 12.9, V12.9.86";; *) kill -9 $$;; esac\n'
    )
    ptxas.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(ptxas))
    with pytest.raises(
        ToolKilled, match=r"ptxas was ended by SIGKILL while it compiled .*br16_bc16"
    ):
        compile_kernel(*small(), "sm_80")


def test_an_interpreting_process_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ToolchainError, match="TRITON_INTERPRET"):
        compile_kernel(*small(), "sm_80")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.write_text("no folder")
    with pytest.raises(ToolchainError, match=f"{folder}.* cannot be written"):
        compile_kernel(*small(), "sm_80", cache=folder)


FA2 = make_config(128, 64, num_warps=8)
AHEAD = make_config(128, 64, num_warps=8, schedule="s_ahead", loads="descriptor")


@pytest.mark.parametrize(
    ("direction", "rows", "dim", "most"),
    [
        ("backward_dq", 128, 64, 5),  # dP and its sum are issued in halves
        ("backward_dq", 128, 256, 3),
        ("backward_dkv", 64, 64, 4),
        ("backward_dkv", 128, 64, 8),  # 64 rows after another
        ("backward_dkv", 64, 256, 4),
        ("backward_fused", 128, 64, 5),
    ],
)
def test_hopper_has_no_more_batches_than_its_text(
    direction: Direction, rows: int, dim: int, most: int
) -> None:
    way: dict[str, Any] = {"num_warps": 8, "schedule": "hopper", "loads": "descriptor"}
    spec, config = make_spec("bfloat16", dim, direction=direction), make_config(rows, 64, **way)
    for arrives, status in ((most, Status.OK), (most + 1, Status.SERIALIZED)):
        built = made_compiled(loop=made_loop(warpgroup_arrives=arrives))
        assert judge(built, spec, config, H200)[0] is status


@pytest.mark.parametrize(
    ("facts", "config", "gpu", "status", "says"),
    [
        ({}, FA2, H200, Status.OK, ""),
        ({"shared_bytes": 232449}, FA2, H200, Status.OUT_OF_RESOURCES, "232449"),
        ({"shared_bytes": 232448}, FA2, H200, Status.OK, ""),
        ({"num_warps": 16, "registers": 255}, FA2, H200, Status.OUT_OF_RESOURCES, "255 registers"),
        ({"loop": made_loop(spills=4)}, FA2, H200, Status.OK, ""),  # 1 % of 400
        ({"loop": made_loop(spills=5)}, FA2, H200, Status.SPILLS, "5 loads and stores"),
        ({"other_loops": (made_loop(spills=6),)}, FA2, H200, Status.SPILLS, "6 loads and stores"),
        ({"spilling": ((2, 200),)}, FA2, H200, Status.OK, ""),
        ({"spilling": ((90, 100),)}, FA2, H200, Status.OK, ""),  # beside its main loops
        ({"loop": None, "spilling": ((9, 90),)}, FA2, H200, Status.SPILLS, "90 instructions"),
        ({"spill_bytes": 8}, FA2, H200, Status.OK, ""),  # outside the loops
        ({"tensor_columns": 512}, FA2, B200, Status.OK, ""),
        ({"tensor_columns": 576}, FA2, B200, Status.OUT_OF_RESOURCES, "576 columns"),
        ({"only_traps": True}, FA2, B200, Status.WRONG, "trap"),
        ({"loop": None, "spill_bytes": 8}, FA2, H200, Status.SPILLS, "8 bytes"),
        ({"advisories": ("(C7511) serialized",)}, FA2, H200, Status.SERIALIZED, "C7511"),
        (
            {"loop": made_loop(warpgroup_arrives=12)},
            FA2,
            H200,
            Status.SERIALIZED,
            "cut them into 12",
        ),
        ({"loop": made_loop(exp2_under_matrix=0.0)}, FA2, H200, Status.OK, ""),
        ({"loop": made_loop(exp2_under_matrix=0.0)}, AHEAD, H200, Status.OK, ""),  # a rank
    ],
)
def test_judge(
    facts: dict[str, Any], config: KernelConfig, gpu: Gpu, status: Status, says: str
) -> None:
    found, detail = judge(made_compiled(**facts), make_spec(), config, gpu)
    assert found is status
    assert says in detail
    assert bool(detail) == (status is not Status.OK)


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        ({"loop": made_loop(spills=50)}, Status.OK),
        ({"loop": None, "spill_bytes": 8}, Status.OK),
        ({"spilling": ((90, 100),)}, Status.OK),
        ({"tensor_columns": 576}, Status.OUT_OF_RESOURCES),
        ({"only_traps": True}, Status.WRONG),
        ({"advisories": ("(C7511) serialized",)}, Status.SERIALIZED),
    ],
)
def test_where_a_gpu_measures_spills_are_not_refused(facts: dict[str, Any], status: Status) -> None:
    found, _ = judge(made_compiled(**facts), make_spec(), FA2, H200, measures=True)
    assert found is status


@pytest.mark.parametrize(
    ("facts", "config", "count"),
    [
        ({}, AHEAD, 0),
        ({"loop": made_loop(spills=1)}, FA2, 1),
        ({"spilling": ((1, 900),)}, FA2, 0),  # beside its main loops, or around them
        ({"loop": None, "spilling": ((1, 900),)}, FA2, 1),
        ({"loop": made_loop(exp2_under_matrix=0.84)}, AHEAD, 1),
        ({"loop": made_loop(exp2_under_matrix=0.85)}, AHEAD, 0),
        ({"loop": made_loop(exp2_under_matrix=None)}, AHEAD, 1),
        ({"loop": made_loop(exp2_under_matrix=None), "arch": "sm_80"}, AHEAD, 0),
        ({"loop": made_loop(exp2_under_matrix=0.0)}, FA2, 0),
        ({"loop": made_loop(exp2_under_matrix=0.5, spills=9)}, AHEAD, 2),
    ],
)
def test_signs_of_a_slow_kernel(facts: dict[str, Any], config: KernelConfig, count: int) -> None:
    assert shortcomings(made_compiled(**facts), make_spec(), config) == count


@pytest.mark.skipif(triton.__version__ != "3.7.1", reason="facts of the pinned Triton, 3.7.1")
def test_a_kernel_that_takes_more_tensor_memory_than_there_is(build: Build) -> None:
    """It compiles, to a trap: 32 entries of the B200's table were such kernels."""
    spec = make_spec("bfloat16", 96, direction="backward_fused")
    config = make_config(64, 128, num_warps=8, num_stages=3)
    compiled = build(spec, config, "sm_100")
    assert compiled.tensor_columns == 576
    assert compiled.only_traps
    status, detail = judge(compiled, spec, config, B200, measures=True)
    assert status is Status.OUT_OF_RESOURCES
    assert detail == "it takes 576 columns of tensor memory: an SM has 512"
    assert judge(replace(compiled, tensor_columns=0), spec, config, B200)[0] is Status.WRONG
    assert residents(compiled, B200) == 0


def test_a_trap_that_stores_nothing_is_a_kernel_that_computes_nothing() -> None:
    """The body that ptxas 13.1 writes for backward_fused, d128, 64x128: 576 columns are taken."""
    trap = listing("LDC R1, c[0x0][0x37c]", "BPT.TRAP 0x1", "BRA {top}", "top:", "NOP")
    assert trap.only_traps
    asserts = listing("LDC R1, c[0x0][0x37c]", "@P0 BPT.TRAP 0x1", "STG.E [R2], R1", "EXIT")
    assert not asserts.only_traps
    assert not listing("LDC R1, c[0x0][0x37c]", "EXIT").only_traps


@pytest.mark.parametrize(
    ("facts", "gpu", "blocks"),
    [
        # Tensor memory: 512 columns an SM.
        ({"num_warps": 4, "registers": 32, "shared_bytes": 0, "tensor_columns": 128}, B200, 4),
        ({"num_warps": 4, "registers": 32, "shared_bytes": 0, "tensor_columns": 160}, B200, 3),
        ({"num_warps": 4, "registers": 32, "shared_bytes": 0, "tensor_columns": 512}, B200, 1),
        ({"num_warps": 4, "registers": 128, "shared_bytes": 1024}, H200, 4),
        (
            {"num_warps": 4, "registers": 129, "shared_bytes": 1024},
            H200,
            3,
        ),  # 4,128 rounded up to 4,352 a warp
        ({"num_warps": 8, "registers": 255, "shared_bytes": 1024}, H200, 1),
        ({"num_warps": 4, "registers": 32, "shared_bytes": 112 * 1024}, H200, 2),
        (
            {"num_warps": 4, "registers": 32, "shared_bytes": 114 * 1024},
            H200,
            1,
        ),  # 1 KiB each is reserved
        ({"num_warps": 4, "registers": 32, "shared_bytes": 0}, H200, 16),  # 64 warps
        (
            {"num_warps": 8, "registers": 16, "shared_bytes": 0},
            H200,
            8,
        ),  # as many as registers for 16
        ({"num_warps": 4, "registers": 100, "shared_bytes": 0}, H200, 4),  # 3,200 a warp would be 5
        ({"num_warps": 1, "registers": 16, "shared_bytes": 0}, H200, 32),
        ({"num_warps": 8, "registers": 168, "shared_bytes": 232449}, H200, 0),
        ({"num_warps": 4, "registers": 128, "shared_bytes": 64 * 1024}, MI300X, 1),
        ({"num_warps": 4, "registers": 257, "shared_bytes": 0}, MI300X, 1),  # 512 a thread
        ({"num_warps": 4, "registers": 168, "shared_bytes": 0}, MI300X, 3),
        ({"num_warps": 4, "registers": 169, "shared_bytes": 0}, MI300X, 2),  # rounded up to 176
        ({"num_warps": 4, "registers": 256, "shared_bytes": 64 * 1024}, RX_7900, 2),  # two halves
        ({"num_warps": 4, "registers": 240, "shared_bytes": 0}, RX_7900, 6),  # 1536 a thread
        ({"num_warps": 4, "registers": 256, "shared_bytes": 0}, RX_7900, 5),  # rounded up to 264
    ],
)
def test_residents(facts: dict[str, Any], gpu: Gpu, blocks: int) -> None:
    assert residents(made_compiled(**facts), gpu) == blocks


@pytest.mark.parametrize(
    ("remark", "counts"),
    [
        ("(C7510) Potential Performance Loss: wgmma.mma_async is serialized", True),
        ("(C7508) Potential Performance Loss: 'setmaxnreg' ignored", True),
        ("(C7516) wgmma.mma_async is serialized", True),
        ("(C7900) Potential Performance Loss: of another kind", False),
    ],
)
def test_what_ptxas_regrets_is_an_advisory(remark: str, counts: bool) -> None:
    log = f"ptxas info    : {remark} in the function 'k'\nptxas info    : Used 168 registers\n"
    assert compiler._ADVISORY.findall(log) == [f"{remark} in the function 'k'"] * counts


def test_multiply_add_is_one_instruction_whatever_triton_defaults_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton 3.9 warns that 3.10 will make two."""
    from triton import knobs

    monkeypatch.setattr(knobs.language, "default_fp_fusion", False)
    spec, config = make_spec(), make_config(32, 32)
    compiled = compile_kernel(render(spec, config), spec, config, "sm_80", cache=tmp_path)
    binary = cache_file(compiled.digest, "sm_80", compiled.triton, tmp_path, "cubin")
    found = [i.base for i in sass.disassemble(binary.read_bytes()).instructions]
    assert found.count("FFMA") > found.count("FADD")


def test_compiling_imports_no_torch() -> None:
    """Its import takes longer than most kernels do."""
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from flashgen.compile import compiler\n"
        "from flashgen.estimate import replay\n"
        "from flashgen.evaluate import tasks\n"
        "from flashgen.kernels import loader, render, signature\n"
        "import triton.compiler\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
