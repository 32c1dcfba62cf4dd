"""Facts of kernels for AMD, read from the assembly that the compiler wrote."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from flashgen.compile import gcn
from flashgen.compile.bounds import cycles_a_score
from flashgen.compile.compiler import CompileFailed, warp_size
from flashgen.compile.loops import main_loops
from flashgen.compile.verdict import judge
from flashgen.errors import ToolchainError
from flashgen.kernels.text import text_name
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.outcome import Status
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS, Gpu
from flashgen.spec.vocabulary import BACKWARD, Direction
from flashgen.table.emit import kernels_of, tables_for
from tests.compiled import compile_one, made_compiled, made_loop
from tests.makers import make_config, make_spec

ROOT = Path(__file__).resolve().parents[3]
GPUS = {
    TARGETS[slug].arch: TARGETS[slug]
    for slug in (
        "amd_instinct_mi210",
        "amd_instinct_mi300x",
        "amd_instinct_mi355x",
        "amd_radeon_rx_7900_xtx",
        "amd_radeon_rx_9070_xt",
    )
}
SLOW = pytest.mark.slow("make test compiles for one of them")
TEXT = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
kernel:
	s_load_dwordx2 s[0:1], s[4:5], 0x0
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
	ds_read_b128 v[0:3], v8
	ds_read2st64_b64 v[0:3], v8 offset1:1
	ds_read_u16_d16_hi v4, v8
	v_mfma_f32_32x32x8_bf16 v[0:15], v[0:1], v[2:3], v[0:15]
	v_exp_f32_e32 v0, v0
	v_pk_mul_f32 v[0:1], v[0:1], v[2:3]
	v_cvt_f16_f32_e32 v0, v1
	scratch_load_dword v1, off, off         ; 4-byte Folded Reload
	s_cbranch_scc1 .LBB0_1
; %bb.2:
	s_endpgm
    .private_segment_fixed_size: 16
    .vgpr_count:     40
    .wavefront_size: 64
"""


def test_counts_of_a_loop() -> None:
    listing = gcn.parse(TEXT)
    assert (listing.arch, listing.registers, listing.stack_bytes) == ("gfx942", 40, 16)
    (loop,) = main_loops(listing)
    assert loop.instructions == 9
    assert (loop.matrix_instructions, loop.matrix_flops) == (1, 2 * 32 * 32 * 8)
    assert (loop.exp2, loop.fp32, loop.other, loop.spills) == (1, 1, 1, 1)
    assert loop.shared_bytes == 64 * (16 + 16 + 4)  # a bank is 4 bytes wide


ROTATED = TEXT.replace("s_load_dwordx2 s[0:1], s[4:5], 0x0", "s_branch .LBB0_2").replace(
    "	s_cbranch_scc1 .LBB0_1\n; %bb.2:",
    """	s_cbranch_scc1 .LBB0_4
.LBB0_2:
	v_mfma_f32_32x32x8_bf16 v[0:15], v[0:1], v[2:3], v[0:15]
	s_cbranch_scc0 .LBB0_1
.LBB0_4:""",
)


def test_a_loop_may_end_before_its_header() -> None:
    """LLVM places the last part of a loop before its header, where that saves a branch."""
    (loop,) = main_loops(gcn.parse(ROTATED))
    assert (loop.instructions, loop.matrix_instructions, loop.exp2) == (11, 2, 1)


@pytest.mark.parametrize(
    "text", ["", TEXT.replace("gfx942", "sm_90"), TEXT.replace("vgpr", "sgpr")]
)
def test_a_text_without_a_kernel_is_refused(text: str) -> None:
    with pytest.raises(ToolchainError, match="no assembly"):
        gcn.parse(text)


@pytest.mark.parametrize(
    "arch",
    [pytest.param(arch, marks=() if arch == "gfx942" else SLOW) for arch in GPUS],
)
def test_products_and_exp2_of_a_tile(arch: str) -> None:
    """All warps together multiply a tile once, and take exp2 of each score and of each row's
    growth.
    """
    spec, config = make_spec("bfloat16", head_dim=64), make_config(128, 32, num_warps=4)
    compiled = compile_one(spec, config, arch)
    assert compiled.loop is not None
    products = 2 * 2 * config.br * config.bc * spec.head_dim
    assert compiled.loop.matrix_flops * config.num_warps == products
    scores = config.br * config.bc // (config.num_warps * warp_size(arch))
    assert scores < compiled.loop.exp2 <= scores + 2
    assert judge(compiled, spec, config, GPUS[arch]) == (Status.OK, "")
    assert compiled.issued is not None
    assert 0 < compiled.issued[0] < config.num_warps * compiled.loop.instructions


@pytest.mark.slow("six seconds of compilation")
def test_a_kernel_that_spills_in_its_loop_is_refused() -> None:
    spec, config = make_spec("bfloat16", head_dim=128), make_config(64, 64, num_stages=1)
    compiled = compile_one(spec, config, "gfx1100")
    assert compiled.spill_bytes > 0
    assert compiled.main_spill_share > 0.01
    assert judge(compiled, spec, config, GPUS["gfx1100"])[0] is Status.SPILLS


def test_the_busiest_unit_bounds_a_score() -> None:
    """Of 128 x 64 scores on an MI300X: one instruction in a cycle, 16 exp2, 2048 operations, 128
    bytes of shared memory.
    """
    spec, config, gpu = make_spec(head_dim=128), make_config(128, 64), GPUS["gfx942"]
    loop = made_loop(matrix_flops=2**20, shared_bytes=32768)
    compiled = replace(made_compiled(), arch="gfx942", num_warps=4, loop=loop, issued=(1024, 128))
    assert cycles_a_score(compiled, spec, config, gpu) == (0.25, 0.125)
    slow = replace(compiled, issued=(4096, 128))
    assert cycles_a_score(slow, spec, config, gpu) == (0.5, 0.5)
    loaded = replace(compiled, loop=replace(loop, shared_bytes=262144))
    assert cycles_a_score(loaded, spec, config, gpu) == (1.0, 0.125)
    twice = replace(compiled, loop=replace(loop, matrix_flops=2**21))
    assert cycles_a_score(twice, spec, config, gpu) == (0.5, 0.125)
    assert cycles_a_score(compiled, spec, config, replace(gpu, arch="gfx1030")) is None


@pytest.mark.parametrize(
    ("fields", "cycles"),
    [({}, 0.0625), ({"fp8": True}, 0.03125), ({"dtype": "float32", "precision": "tf32"}, 0.125)],
)
def test_the_matrix_units_bound_a_score_by_its_operands(
    fields: dict[str, Any], cycles: float
) -> None:
    """4 x 128 operations a score on a B200: 8192 of 16 bits in a cycle."""
    spec, config = make_spec(head_dim=128, **fields), make_config(128, 64)
    compiled = replace(made_compiled(), arch="sm_100", num_warps=4, issued=(1, 0))
    bound = cycles_a_score(compiled, spec, config, TARGETS["nvidia_b200"])
    assert bound is not None
    assert bound[0] == cycles


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(CompileFailed, match=r"gfx9999, which is none of sm_80, .*gfx1201"):
        compile_one(make_spec(), make_config(), "gfx9999")


def small(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> KernelConfig:
    """A config of the same text that is legal on `gpu` and compiles soon: of a small tile, shared
    by many warps, so that little spills.
    """
    for br, bc, warps in product((16, 32, 64, 128), (16, 32, 64, 128), (8, 4, 2, 1)):
        made = replace(config, br=br, bc=bc, num_warps=warps, num_stages=1)
        same = text_name(spec, made) == text_name(spec, config)
        if same and why_illegal(spec, made, gpu) is None:
            return made
    return config


def kernels_of_plain_texts(direction: Direction) -> dict[str, tuple[AttentionSpec, KernelConfig]]:
    """A kernel of each plain Triton text of a direction that loads by pointer, of all tables."""
    found: dict[str, tuple[AttentionSpec, KernelConfig]] = {}
    for table in tables_for(ROOT).values():
        for entry in (each for each in table.entries if each.spec.direction == direction):
            for config in kernels_of(entry):
                name = text_name(entry.spec, config)
                if config.interpretable and config.loads == "pointer" and name not in found:
                    found[name] = entry.spec, small(entry.spec, config, table.gpu)
    return found


@pytest.mark.slow("a minute or two each")
@pytest.mark.parametrize("direction", ["forward", *BACKWARD, "decode"])
@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201"])
def test_every_plain_text_compiles_for_rdna(arch: str, direction: Direction) -> None:
    """With a small tile: it is the text that compiles."""
    texts = kernels_of_plain_texts(direction)
    assert texts
    for name, (spec, config) in texts.items():
        compiled = compile_one(spec, config, arch)
        assert compiled.registers > 0, name


def test_encodings_and_dual_instructions_count_as_what_they_do() -> None:
    def made(opcode: str) -> gcn.GcnInstruction:
        return gcn.GcnInstruction(0, "", opcode, "", None)

    assert all(made(f"v_exp_f32{end}").is_exp2 for end in ("", "_e32", "_e64", "_dpp", "_sdwa"))
    assert all(made(f"v_{kind}mul_f32").is_fp32 for kind in ("", "dual_", "pk_"))


def test_a_text_without_an_instruction_is_no_kernel() -> None:
    with pytest.raises(ToolchainError, match="no assembly that flashgen can read"):
        gcn.parse('  .amdgcn_target "amdgcn-amd-amdhsa--gfx942"\n  .vgpr_count: 64\n')
