"""The kernels of a numeric class by their PTX: one arithmetic, and who breaks a rule is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flashgen.compile.arithmetic import arithmetic_of
from flashgen.schedules.config import KernelConfig, config_of
from flashgen.schedules.defaults import default_configs, default_spec
from flashgen.schedules.legality import why_illegal
from flashgen.spec.attention import AttentionSpec, spec_of
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import BUCKETS
from flashgen.table.table import Table
from flashgen.tune.invariance import compare, compare_classes
from tests.makers import make_config
from tests.tables import made_entry, made_run

FORWARD, DECODE = "fwd_bf16_d64_causal_invariant", "decode_bf16_d64_paged_invariant"
H200, A100 = TARGETS["nvidia_h200"], TARGETS["nvidia_a100_sxm4_80gb"]


def kernels(*names: tuple[str, str]) -> list[tuple[AttentionSpec, KernelConfig]]:
    return [(spec_of(spec), config_of(config)) for spec, config in names]


def test_a_prefill_and_a_decode_of_one_class() -> None:
    pair = kernels(
        (FORWARD, "br128_bc64_w8_s3_s_ahead_tma_lpt"), (DECODE, "br64_bc64_w4_s2_fa2_ptr")
    )
    assert [why_illegal(*kernel, H200) for kernel in pair] == [None, None]
    proof = compare(pair, H200)
    assert proof.others == ()
    assert proof.arithmetic.products == {"wgmma.mma_async k16.f32.bf16.bf16"}
    assert proof.arithmetic.chains == {4}  # 64 dims, and 64 keys, of 16 each
    assert len(proof.arithmetic.sums) == 1


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ("br16_bc64_w4_s2_fa2_ptr", "products mma.sync"),
        ("br64_bc32_w4_s2_fa2_ptr", "chains 2 and 4, and not 4"),
    ],
)
def test_another_product_or_tile_is_named(config: str, what: str) -> None:
    first, other = kernels((FORWARD, "br64_bc64_w4_s2_fa2_ptr"), (DECODE, config))
    assert why_illegal(*other, H200) is not None
    ((name, reason),) = compare([first, other], H200).others
    assert name.endswith(config)
    assert what in reason


@pytest.mark.slow("four seconds of compilation")
def test_a_row_in_the_lanes_of_several_warps_is_named() -> None:
    one_warp, four = kernels(
        (DECODE, "br16_bc64_w1_s2_fa2_ptr"), (DECODE, "br16_bc64_w4_s2_fa2_ptr")
    )
    assert "whole rows" in str(why_illegal(*four, A100))
    ((_, reason),) = compare([one_warp, four], A100).others
    assert reason.startswith("sums ")


def test_what_may_still_be_fused_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    options = KernelConfig.launch_options

    def fusing(self: KernelConfig, spec: AttentionSpec) -> dict[str, Any]:
        return options(self, spec) | {"enable_fp_fusion": True}

    monkeypatch.setattr(KernelConfig, "launch_options", fusing)
    ((_, reason),) = compare(kernels((DECODE, "br64_bc64_w4_s2_fa2_ptr")), H200).others
    assert "that ptxas may fuse" in reason


ROW = """
    ex2.approx.ftz.f32 %r1, %r11;
    ex2.approx.ftz.f32 %r2, %r12;
    ex2.approx.ftz.f32 %r3, %r13;
    {adds}
    shfl.sync.bfly.b32 %r6, %r5, 2, 31, -1;
    add.rn.f32 %r7, %r5, %r6;
    shfl.sync.bfly.b32 %r8, %r7, 1, 31, -1;
    add.rn.f32 %r9, %r7, %r8;
"""
IN_ORDER = "add.rn.f32 %r4, %r1, %r2;\n    add.rn.f32 %r5, %r4, %r3;"
OTHERWISE = "add.rn.f32 %r4, %r2, %r3;\n    add.rn.f32 %r5, %r1, %r4;"
IN_PAIRS = """mov.b64 %rd1, {%r1, %r1};
    mov.b64 %rd2, {%r2, %r2};
    add.rn.f32x2 %rd3, %rd1, %rd2;
    mov.b64 {%r4, %r21}, %rd3;
    add.rn.f32 %r5, %r4, %r3;"""


def test_the_order_of_a_sum_decides_and_how_it_is_written_does_not() -> None:
    first, other, pairs = (
        arithmetic_of(ROW.format(adds=adds)) for adds in (IN_ORDER, OTHERWISE, IN_PAIRS)
    )
    assert first.difference(pairs) is None
    assert str(first.difference(other)).startswith("sums ")
    lanes = arithmetic_of(ROW.format(adds=IN_ORDER).replace(", 2, 31", ", 1, 31", 1))
    assert str(first.difference(lanes)).startswith("sums ")
    fused = arithmetic_of(ROW.format(adds=IN_ORDER).replace("add.rn.f32 %r9", "add.f32 %r9"))
    assert fused.fusible == 1


@pytest.mark.slow("compiles nine kernels; make test compares kernels of a class by pairs")
def test_what_a_gpu_runs_without_entries_is_of_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """As flashgen verify --invariant does for all head dims: forward, packed, in pages, decode, dQ, dK and dV."""
    monkeypatch.setattr("flashgen.tune.invariance.HEAD_DIMS", (64,))
    proofs = list(compare_classes(Table(gpu=H200)))
    assert [proof.others for proof in proofs] == [(), (), ()]
    assert sum(proof.count for proof in proofs) >= 9


LOOPS = """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1}, {%r2}, {%r3}, {%r1};
$L__BB0_3:
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1}, {%r2}, {%r3}, {%r1};"""


def test_how_many_loops_follow_one_another_does_not_make_a_chain_longer() -> None:
    """As the masked loops on either side of a window do."""
    assert arithmetic_of(LOOPS).chains == {1}
    assert arithmetic_of(LOOPS.replace("$L__BB0_3:\n", "")).chains == {2}


@pytest.mark.slow("seven seconds of compilation")
def test_products_with_the_padding_of_a_head_dim_count() -> None:
    """Head dim 192 is served by a kernel of its own and by one that pads it to 256."""
    spec = spec_of("fwd_bf16_d192v128_causal_invariant")
    own = make_config(64, 64, num_warps=4, num_stages=2, whole_rows=True)
    padding = default_configs(default_spec(spec))[0]
    proof = compare([(default_spec(spec), padding), (spec, own)], A100)
    assert proof.others == ()
    assert 16 in proof.arithmetic.chains


LONG = pytest.mark.slow("two to ten seconds of compilation; make test compares pairs of a class")


@LONG
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_decode_in_parts_is_of_the_class(head_dim: int) -> None:
    """Its scores are one chain of products over all parts of K, as those of a whole tile."""
    spec = spec_of(f"decode_bf16_d{head_dim}_paged_invariant")
    parts = make_config(16, 64, num_warps=1, num_stages=3, whole_rows=True)
    proof = compare([(spec, replace(parts, whole_rows=False)), (spec, parts)], A100)
    assert proof.others == ()
    assert head_dim // 16 in proof.arithmetic.chains


def test_kernels_of_all_masks_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window changes no sum of the class: its kernels are compared with those without one."""
    monkeypatch.setattr("flashgen.tune.invariance.HEAD_DIMS", ())
    monkeypatch.setattr("flashgen.tune.invariance.compare", lambda kernels, gpu: list(kernels))
    table = Table(gpu=H200)
    for name in ("fwd_bf16_d64_causal_invariant", "fwd_bf16_d64_causal_window_sink_invariant"):
        entry = made_entry(spec_of(name), BUCKETS[2], make_config(64, 64, num_warps=4))
        table = table.with_entry(entry, made_run())
    classes = [[spec for spec, _ in kernels] for kernels in compare_classes(table)]
    assert len(classes) == 3
    for specs in classes:
        assert {bool(spec.window) for spec in specs} == {False, True}
    assert sum(spec.direction == "decode" for spec in classes[0]) >= 4


SHUFFLED = "shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;\nadd.rn.f32 %r3, %r1, %r2;\n"
WGMMA = "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%f1}, %rd1, %rd2, "


def test_what_decides_bits_and_what_does_not() -> None:
    summed = arithmetic_of(SHUFFLED)
    assert len(summed.sums) == 1
    masked = "selp.f32 %r1, %r9, 0fFF800000, %p1;\n" + SHUFFLED
    assert arithmetic_of("mov.f32 %r1, %r9;\n" + SHUFFLED).sums == arithmetic_of(masked).sums
    scaled = "ex2.approx.f32 %r9, %r8;\nmul.rn.f32 %r9, %r9, %r7;\n"
    masked_late = scaled + masked
    assert arithmetic_of(scaled + "mov.f32 %r1, %r9;\n" + SHUFFLED).sums == arithmetic_of(masked_late).sums  # fmt: skip
    assert arithmetic_of(scaled + SHUFFLED).sums != arithmetic_of(masked_late).sums
    assert arithmetic_of(SHUFFLED.replace("add", "mul")).sums == frozenset()
    for opcode in ("add.f32", "mul.ftz.f32"):
        assert arithmetic_of(f"{opcode} %r1, %r2, %r3;").fusible == 1
    assert arithmetic_of("div.full.f32 %r1, %r2, %r3;").approximate == {"div.full.f32"}


def test_both_halves_of_a_pair_are_followed() -> None:
    """Of which the second adds up over lanes."""
    shuffle, pair = "shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;\n", "mov.b64 %rd1, {%r5, %r1};\n"
    both = f"{shuffle}{pair}mov.b64 %rd2, {{%r6, %r2}};\nadd.rn.f32x2 %rd3, %rd1, %rd2;\n"
    assert arithmetic_of(both).sums == arithmetic_of(SHUFFLED).sums


@pytest.mark.parametrize("false", ["0", "%p1"])
def test_a_wgmma_that_overwrites_begins_a_chain(false: str) -> None:
    text = "mov.pred %p1, 0;\n" + "".join(
        f"{WGMMA}{scale}, 1, 1;\n" for scale in ("%p2", false, "1", "1")
    )
    assert arithmetic_of(text).chains == {1, 3}


def test_sums_differ_by_lane_operation_and_what_comes_from_the_other_lane() -> None:
    own = arithmetic_of(SHUFFLED).sums
    assert arithmetic_of(SHUFFLED.replace(", 1, 31", ", 2, 31")).sums != own
    assert arithmetic_of(SHUFFLED.replace("b32 %r2, %r1", "b32 %r2, %r9")).sums == frozenset()
    halved, negated = (f"{x}.rn.f32 %r1, %r9, %r8;\n{SHUFFLED}" for x in ("mul", "sub"))
    assert arithmetic_of(halved).sums != arithmetic_of(negated).sums


def test_a_register_that_is_overwritten_ends_a_chain() -> None:
    acc = WGMMA + "1, 1, 1;\n"
    assert arithmetic_of(acc + acc).chains == {2}
    assert arithmetic_of(f"{acc}mov.f32 %f1, 0f00000000;\n{acc}").chains == {1}


def test_other_approximations_are_a_difference() -> None:
    one = arithmetic_of("div.full.f32 %r1, %r2, %r3;")
    assert one.difference(arithmetic_of("")) == "approximate div.full.f32, and not none"
