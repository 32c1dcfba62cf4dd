"""The tables that ship, and generated/: complete, legal, current, and as compiled as they say."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
import triton

from benchmarks import sass_facts
from flashgen import paths
from flashgen.compile.verdict import judge
from flashgen.estimate.estimate import estimable
from flashgen.estimate.trip_counts import tuned_splits
from flashgen.runtime.generated_tables import served_from
from flashgen.runtime.selection import Selection, ladder
from flashgen.schedules.base import AHEAD, Order
from flashgen.schedules.config import kernel_name
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.outcome import Status
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.features import OFF, features_on
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import BUCKETS, Bucket, timed_problems
from flashgen.spec.vocabulary import BACKWARD, OF_DS, Direction
from flashgen.table import emit
from flashgen.table.table import APART, Table
from flashgen.table.table_file import load_with_evidence
from flashgen.tune.workloads import load
from tests.compiled import compile_all, compile_one
from tests.cpu.spec.test_gpu import PUBLISHED_TFLOPS
from tests.tables import SHIPPED

COMPLETE = (
    "nvidia_h200",
    "nvidia_h100_80gb_hbm3",
    "nvidia_a100_sxm4_80gb",
    "nvidia_l4",
    "nvidia_geforce_rtx_4090",
    "nvidia_geforce_rtx_5090",
    "nvidia_b200",
)
WORKLOADS = sorted((Path(__file__).resolve().parents[3] / "examples" / "workloads").glob("*.yaml"))
HEAD_DIMS = (64, 96, 128, 192, 256)


@cache
def table_of(slug: str) -> Table:
    return load_with_evidence(paths.shipped_table(slug))


@pytest.mark.parametrize("slug", COMPLETE)
def test_a_table_is_complete(slug: str) -> None:
    held: dict[Direction, set[object]] = {}
    for entry in table_of(slug).entries:
        spec = entry.spec
        key = spec.dtype, spec.head_dim, spec.mask, entry.bucket
        held.setdefault(spec.direction, set()).add(key)
    expected = set(product(("float16", "bfloat16"), HEAD_DIMS, ("none", "causal"), BUCKETS))
    for direction in ("forward", *APART):
        assert held[direction] >= expected, direction
    # A delta kernel sees no mask.
    assert held["backward_delta"] >= {key for key in expected if "none" in key}


NVIDIA = tuple(sorted(slug for slug in SHIPPED if TARGETS[slug].is_nvidia))
AMD = tuple(sorted({*SHIPPED} - {*NVIDIA}))


@cache
def needed(file: Path) -> dict[tuple[AttentionSpec, Bucket], None]:
    """What a workload has for a table."""
    return dict.fromkeys(piece.key for piece in load(file).pieces)


def spills_everywhere(slug: str, spec: AttentionSpec) -> bool:
    """Whether no entry serves a spec on a GPU of RDNA, because all tiles that were compiled for it
    spill more than a hundredth of a main loop (docs/notes/2026-11-27-amd.md).
    """
    dims, gradient = max(spec.head_dim, spec.head_dim_v), spec.direction in APART
    if slug == "amd_radeon_rx_7900_xtx":
        rows = spec.direction == "forward" or (spec.direction == "decode" and spec.paged)
        return (
            (gradient and dims >= 128)
            or (rows and dims == 512)
            or spec.name == "fwd_bf16_d256_causal_softcap_varlen_paged"
        )
    keys = spec.direction == "backward_dkv"
    return slug == "amd_radeon_rx_9070_xt" and ((keys and dims > 128) or (gradient and dims == 512))


@pytest.mark.parametrize("slug", NVIDIA)
@pytest.mark.parametrize("file", WORKLOADS, ids=lambda file: file.stem)
def test_what_a_model_needs_is_tuned(slug: str, file: Path) -> None:
    """A fused backward that is slower than the two kernels is not written."""
    table = table_of(slug)
    missing = [key for key in needed(file) if table.find(*key) is None]
    for spec, bucket in missing:
        assert spec.direction == "backward_fused", spec.name
        assert all(table.find(spec.for_direction(each), bucket) for each in APART), spec.name


@pytest.mark.parametrize("slug", AMD)
def test_a_table_that_no_time_chose_has_an_entry_of_each_spec(slug: str) -> None:
    """In some bucket: without times, its neighbours would have the same config."""
    held = {entry.spec for entry in table_of(slug).entries}
    wanted = {
        spec
        for file in WORKLOADS
        for spec, _ in needed(file)
        if spec.direction != "backward_fused" and not spills_everywhere(slug, spec)
    }
    assert not {spec.name for spec in wanted - held}


@pytest.mark.parametrize("slug", SHIPPED)
def test_gradients_of_a_feature_have_entries_where_its_forward_has(slug: str) -> None:
    held = {entry.spec for entry in table_of(slug).everything}
    features = ("window", "sink", "softcap", "bias")
    wanted = {
        spec.for_direction(direction)
        for spec in held
        if spec.direction == "forward"
        and any(getattr(spec, name) != OFF[name] for name in features)
        if not (spec.paged or spec.invariant)
        for direction in (*APART, *["backward_dbias"] * (spec.bias == "additive"))
    }
    assert wanted
    assert not {spec.name for spec in wanted - held if not spills_everywhere(slug, spec)}


@cache
def served_first(slug: str) -> dict[tuple[AttentionSpec, Bucket], Selection]:
    """What serves each spec and bucket of examples/workloads on a GPU."""
    tables = served_from(paths.shipped_generated_dir())
    pieces = {
        key: None
        for file in WORKLOADS
        for key in needed(file)
        if key[0].direction != "backward_fused"  # which serves by its time alone
    }
    return {
        (spec, bucket): ladder(tables, slug, TARGETS[slug], spec, bucket.low).rungs[0]
        for spec, bucket in pieces
    }


ONE_OF_AN_ARCH = {TARGETS[slug].arch: slug for slug in (*PUBLISHED_TFLOPS, *SHIPPED)}.values()
OTHERS = pytest.mark.slow("make test has a GPU of each architecture, and what tables have")


@pytest.mark.parametrize(
    "slug",
    [
        pytest.param(slug, marks=() if slug in ONE_OF_AN_ARCH else OTHERS)
        for slug in PUBLISHED_TFLOPS
    ],
)
def test_no_known_gpu_runs_an_untuned_tile_of_what_a_model_needs(slug: str) -> None:
    found, untuned = served_first(slug), ("default", "plain_tile")
    names = {spec.name for (spec, _), first in found.items() if first.rung in untuned}
    assert names == {spec.name for spec, _ in found if spills_everywhere(slug, spec)}


@pytest.mark.parametrize("slug", NVIDIA)
def test_every_table_of_nvidia_has_the_widest_layers_of_gemma_4(slug: str) -> None:
    """Of a prefill, packed too, as vLLM has it, of its training and of a decode, in every bucket: 512 is
    no head dim of HEAD_DIMS.
    """
    names = {f"fwd_bf16_d512_causal{more}" for more in ("", "_varlen", "_varlen_paged")}
    names |= {f"bwd_{kernel}_bf16_d512_causal" for kernel in ("dkv", "dq")}
    names |= {"decode_bf16_d512", "decode_bf16_d512_paged"}
    held = {(entry.spec.name, entry.bucket) for entry in table_of(slug).entries}
    assert set(product(names, BUCKETS)) - held == set()


@pytest.mark.parametrize("slug", COMPLETE)
def test_every_entry_is_legal_current_checked_and_honest(slug: str) -> None:
    table = table_of(slug)
    for entry in table.entries:
        gpu, spec, result = table.gpu, entry.spec, entry.result
        assert why_illegal(spec, entry.config, gpu) is None
        evidence = entry.evidence
        assert (evidence.shared_bytes or 0) <= gpu.shared_per_block
        assert 0 < (evidence.registers or 0) <= 255
        assert result.max_abs_err_floors <= 2.0
        # Of what was tried of a backward kernel with wide heads, or of a numeric class, few fit the
        # registers; nor does another table always have two more that fit the 99 KiB of sm_120.
        run = table.run_of(entry)
        few = spec.direction != "forward" or spec.invariant or (run is not None and run.derived)
        assert len(entry.evidence.runners_up) == 2 or few
        if result.source != "measured":  # a measured entry is served after its template changed
            assert not emit.is_stale(entry)
            assert result.source == ("estimated" if estimable(gpu.arch) else "untimed")
        assert (result.median_us is None) == (result.source == "untimed")
        # A kernel that was executed on a CPU alone is taken for its estimate.
        assert entry.config.interpretable or result.source != "untimed"
        if entry.tflops is not None:
            assert gpu.peak_tflops is not None
            # us has five digits: an estimate at the peak may round to just above it
            assert entry.tflops < gpu.peak_tflops * (1 + 5e-5)


PLAIN = frozenset(
    f"fwd_{dtype}_d{dim}{mask}"
    for dtype, dim, mask in product(("bf16", "fp16"), (64, 128), ("", "_causal"))
)


@pytest.mark.parametrize(
    "slug",
    [
        "amd_instinct_mi300x",
        *(
            pytest.param(slug, marks=pytest.mark.slow("make test has the MI300X"))
            for slug in AMD
            if slug != "amd_instinct_mi300x"
        ),
    ],
)
def test_a_table_of_amd_is_chosen_by_facts_of_kernels_that_do_not_spill(slug: str) -> None:
    table = table_of(slug)
    for entry in table.entries:
        assert why_illegal(entry.spec, entry.config, table.gpu) is None
        assert not emit.is_stale(entry)
        assert entry.result.source == "untimed"
        assert entry.result.max_abs_err_floors <= 2.0
    forward = {entry.spec.name: entry for entry in table.entries}
    assert forward.keys() >= PLAIN
    entry = forward["fwd_bf16_d128_causal"]
    compiled = compile_one(entry.spec, entry.config, table.gpu.arch)
    assert judge(compiled, entry.spec, entry.config, table.gpu) == (Status.OK, "")
    assert compiled.loop is not None
    assert compiled.loop.spills == 0


def test_generated_agrees_with_tables_and_templates() -> None:
    assert emit.check(emit.tables_for(paths.ROOT), paths.generated_dir(paths.ROOT)) == []


def test_the_facts_are_of_the_kernels_that_ship() -> None:
    recorded = sass_facts.sections_of(sass_facts.RESULT.read_text())[triton.__version__]
    found = {
        heading: [line.split("`")[1] for line in lines]
        for heading, lines in sass_facts.tables_of(recorded).items()
    }
    names: dict[str, list[str]] = {}
    for heading, _, spec, config in (*sass_facts.shipped(), *sass_facts.of_hopper()):
        names.setdefault(heading, []).append(kernel_name(spec, config))
    assert found == names
    archs = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
    assert list(names) == [*archs, sass_facts.HOPPER]


SPILLING = {"3.9.0": ["bwd_dkv_bf16_d128_causal", "bwd_fused_bf16_d256"]}
"""Kernels of schedule hopper that spill a register or two in a main loop: refused there."""


def test_the_facts_of_hopper_are_of_every_order_and_break_no_rule_but_one_with_one_triton() -> None:
    pairs = [(spec, config) for *_, spec, config in sass_facts.of_hopper()]
    # That with dS is in no table yet.
    assert {spec.direction for spec, _ in pairs} == {"forward", *AHEAD} - set(OF_DS)
    assert {(c.order, c.persistent) for spec, c in pairs if spec.causal} == set(
        product(get_args(Order), (False, True))
    )
    assert {(spec.dtype, spec.head_dim, spec.mask) for spec, c in pairs if c.persistent} == set(
        product(("float16", "bfloat16"), (64, 128, 256), ("none", "causal"))
    )
    for version, part in sass_facts.sections_of(sass_facts.RESULT.read_text()).items():
        lines = sass_facts.tables_of(part)[sass_facts.HOPPER]
        assert len(lines) == len(pairs), version
        broken = [line.split("_br")[0][3:] for line in lines if not line.endswith("| nothing |")]
        assert broken == SPILLING.get(version, []), version


def is_common(spec: AttentionSpec) -> bool:
    """Of head dim 128 in bfloat16, causal, without a feature."""
    common = (128, "bfloat16", "causal")
    return (spec.head_dim, spec.dtype, spec.mask) == common and not features_on(spec)


SPILLS = {
    "bwd_dkv_bf16_d96_causal": 2,
    "bwd_dkv_bf16_d128_causal_invariant": 2,
    "bwd_dkv_bf16_d512_causal": 5,
    "bwd_fused_bf16_d96": 4,
}
"""Loads and stores of spilled registers in the main loops of shipped kernels for Hopper, of which all
others have none. They cost what the replay says (docs/tuning.md). The facts have those of other
architectures."""
ALL = (
    "make test has the forward's of head dim 128 for Hopper, causal, in bfloat16, without features"
)


@pytest.mark.parametrize(
    ("arch", "direction", "all_of_them"),
    [
        ("sm_90", "forward", False),
        *(
            pytest.param(arch, direction, True, marks=pytest.mark.slow(ALL))
            for arch in ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
            for direction in ("forward", *BACKWARD, "decode")
        ),
    ],
)
def test_compiled_facts_of_every_shipped_kernel(
    arch: str, direction: Direction, all_of_them: bool
) -> None:
    kernels = [
        kernel
        for kernel in sass_facts.shipped()
        if (kernel.heading, kernel.spec.direction) == (arch, direction)
        and (all_of_them or is_common(kernel.spec))
    ]
    assert kernels
    part = sass_facts.sections_of(sass_facts.RESULT.read_text())[triton.__version__]
    recorded = sass_facts.tables_of(part)[arch]
    built = compile_all((spec, config, arch) for _, _, spec, config in kernels)
    for kernel, compiled in zip(kernels, built, strict=True):
        _, gpu, spec, config = kernel
        table = table_of(gpu.slug)
        entry, *more = (e for e in table.entries if (e.spec, e.config) == (spec, config))
        run = table.run_of(entry)
        assert run is not None
        # What is compiled here stores parts: a decode of one split runs another variant.
        runs = direction != "decode" or any(
            tuned_splits(spec, config, problem, gpu.sms) > 1
            for e in (entry, *more)
            for problem in timed_problems(spec, e.problem)
        )
        if runs:
            assert judge(compiled, spec, config, gpu) == (Status.OK, ""), compiled.name
        spills = sum(loop.spills for loop in compiled.loops)
        if arch == "sm_90" and runs:
            assert spills == SPILLS.get(spec.name.replace("fp16", "bf16"), 0), compiled.name
        if config.schedule == "s_ahead" and arch == "sm_90":
            assert compiled.loop is not None
            least = 0.85 if direction == "forward" else 0.81  # a rank by now: docs/tuning.md
            assert (compiled.loop.exp2_under_matrix or 0) >= least
        # An entry of decode from before protocol 9 has those of the kernel that stores results.
        if run.triton == triton.__version__ and direction != "decode":
            facts = (compiled.registers, compiled.shared_bytes)
            assert facts == (entry.evidence.registers, entry.evidence.shared_bytes), compiled.name
        line = sass_facts.line(compiled, kernel)
        assert line.endswith("| spills |" if spills else "| nothing |"), line
        if line in recorded:
            continue
        # Of a few texts Triton makes one of two machine codes, at random in each process.
        words = [sys.executable, sass_facts.__file__, "--check", "--kernel", compiled.name]
        again = (subprocess.run(words, capture_output=True).returncode == 0 for _ in range(6))
        assert any(again), f"run make -f tests/sessions.mk facts, and see why it is now: {line}"


@pytest.mark.parametrize("slug", COMPLETE)
def test_no_shipped_kernel_is_a_trap(slug: str) -> None:
    """A kernel that takes more tensor memory than there is compiles to a trap of 4 registers."""
    few = [e.config.label for e in table_of(slug).entries if (e.evidence.registers or 0) < 16]
    assert not few
