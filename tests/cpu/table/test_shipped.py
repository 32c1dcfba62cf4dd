"""The tables that ship, and generated/: complete, legal, current, and as compiled as they say."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
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
from flashgen.schedules.config import LONGEST_NAME, kernel_name
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.outcome import Status
from flashgen.search.decide import TIE
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.features import OFF, features_on
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import BUCKETS, Bucket, timed_problems
from flashgen.spec.vocabulary import BACKWARD, OF_DS, Direction
from flashgen.table import emit
from flashgen.table.entry import NO_EVIDENCE
from flashgen.table.evidence import evidence_file
from flashgen.table.table import APART, Table
from flashgen.table.table_file import load_with_evidence
from flashgen.tune.transfer import measured_for, measured_on_chip
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


@pytest.mark.parametrize("slug", [slug for slug in NVIDIA if estimable(TARGETS[slug].arch)])
def test_a_flat_cache_is_not_read_slower_than_pages(slug: str) -> None:
    """By estimate, of the same problem, within a tie; and all are timed for several batches."""
    held = {
        (entry.spec, entry.problem): entry
        for entry in table_of(slug).entries
        if entry.spec.direction == "decode" and not entry.spec.invariant
    }
    assert all(len(entry.evidence.batches_us) == 4 for entry in held.values())
    pairs = [
        (entry, held[twin])
        for (spec, problem), entry in held.items()
        if not spec.paged and (twin := (replace(spec, paged=True), problem)) in held
    ]
    assert pairs
    for flat, paged in pairs:
        assert flat.result.median_us is not None
        assert paged.result.median_us is not None
        assert flat.result.median_us <= TIE * paged.result.median_us, flat.spec.name


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


@pytest.mark.parametrize("slug", SHIPPED)
def test_no_derived_entry_is_slower_by_estimate_than_the_default_or_what_lost(slug: str) -> None:
    """One that lost may be faster only where the same chip was measured with the entry. A decode is
    chosen by its worst ratio, as another test says.
    """
    table = table_of(slug)
    measured = measured_on_chip(table.gpu, map(table_of, COMPLETE))
    for entry in table.entries:
        run, us, evidence = table.run_of(entry), entry.result.median_us, entry.evidence
        lent = run is not None and run.derived and us is not None
        if entry.spec.direction == "decode":
            continue
        if lent and measured_for(measured, entry.spec, entry.bucket) != entry.config:
            rivals = [evidence.default_us, *(other.median_us for other in evidence.runners_up)]
            least = min((rival for rival in rivals if rival), default=us)
            assert us <= least * (1 + 5e-5)  # five digits


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


@pytest.mark.parametrize(
    "rung",
    [
        pytest.param("relative", marks=pytest.mark.slow("a minute")),
        pytest.param("plain_tile", marks=pytest.mark.slow("half a minute")),
    ],
)
def test_what_cdna_2_takes_of_cdna_3_spills_in_no_loop(rung: str) -> None:
    """Kernels are compiled for the GPU's own architecture, so FAMILY says nothing of its binaries."""
    slug = "amd_instinct_mi210"
    gpu = TARGETS[slug]
    kernels = {
        (first.choice.spec, first.choice.config)
        for first in served_first(slug).values()
        if first.rung == rung
    }
    if rung == "relative":
        kernels |= {(each.spec, each.config) for each in table_of("amd_instinct_mi300x").entries}
    assert kernels
    for spec, config in kernels:
        assert not spec.fp8  # which CDNA 2 does not multiply
        assert why_illegal(spec, config, gpu) is None
        compiled = compile_one(spec, config, gpu.arch)
        assert judge(compiled, spec, config, gpu) == (Status.OK, ""), compiled.name
        assert compiled.spill_share == 0, compiled.name


def test_tables_are_short_enough_to_be_read() -> None:
    """300 lines for 440 buckets, executed entries among them; two for an entry where specs have
    fewer than two buckets, so that rows share little. And evidence of entries that are there.
    """
    total = 0
    for path in map(paths.shipped_table, SHIPPED):
        lines = path.read_text().splitlines()
        table = table_of(path.stem)
        buckets, specs = len(table.entries), len({entry.spec for entry in table.entries})
        shared = buckets > 100 and buckets >= 2 * specs
        assert len(lines) <= (300 * buckets / 440 if shared else 2 * buckets + 25), path
        assert max(map(len, lines)) <= 145, path
        evidence = evidence_file(path).read_text().count("\n")
        assert evidence == sum(entry.evidence != NO_EVIDENCE for entry in table.everything)
        total += len(lines)
    assert total < 7500


def test_neighbours_with_one_config_are_one_row() -> None:
    """Floors of one kernel are the largest that any run has seen, or they would part a row."""
    for slug in SHIPPED:
        entries = sorted(table_of(slug).entries, key=lambda e: (e.spec.name, e.bucket.low))
        for before, after in pairwise(entries):
            same = (before.spec, before.config) == (after.spec, after.config)
            if same and before.result.source == after.result.source:
                floors = before.result.max_abs_err_floors
                assert floors == after.result.max_abs_err_floors, (slug, before.spec.name)


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


def test_lines_that_are_there_are_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --missing: after a table has changed, only what is new in it is compiled."""
    part = sass_facts.sections_of(sass_facts.RESULT.read_text())[triton.__version__]
    every = [*sass_facts.shipped(), *sass_facts.of_hopper()]
    assert sass_facts.section(every, 1, part) == part
    lacking = "".join(line for line in part.splitlines(True) if every[0].config.label not in line)
    assert lacking != part
    assert sass_facts.section(every[:1], 1, lacking).splitlines()[-1] in part


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


@pytest.mark.parametrize("held", ["", "## Triton 3.6.0\n\nold\n", "## Triton 3.10.0\n\nold\n"])
def test_a_new_part_of_the_facts_leaves_the_others(held: str) -> None:
    text = sass_facts.merged(sass_facts.merged("", held), "## Triton 3.9.0\n\nnew\n")
    again = sass_facts.merged(text, "## Triton 3.9.0\n\nnewer\n")
    parts = sass_facts.sections_of(again)
    assert list(parts) == sorted(parts, key=lambda name: [int(n) for n in name.split(".")])
    assert parts["3.9.0"] == "## Triton 3.9.0\n\nnewer\n"
    assert {**sass_facts.sections_of(held), **parts} == parts
    assert sass_facts.differences(again, parts["3.9.0"]) == []


def test_the_summary_counts_the_kernels_that_break_no_rule() -> None:
    rows = "| `a` | 1 | nothing |\n| `b` | 2 | spills |\n"
    old = f"## Triton 3.9.0\n\n### sm_80, Triton 3.9.0\n\n{rows}"
    new = f"## Triton 3.10.0\n\n### sm_90, Triton 3.10.0\n\n{rows}| `c` | 3 | nothing |\n"
    text = sass_facts.merged(sass_facts.merged("", new), old)
    lines = [line for line in text.split("## Triton")[0].splitlines() if line.startswith("| ")]
    assert lines == [
        "| compiled for | 3.9.0 | 3.10.0 |",
        "| sm_80 | 1 of 2 | - |",
        "| sm_90 | - | 2 of 3 |",
    ]


def test_some_kernels_facts_are_compared_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """As make check does."""
    sm_80 = "### sm_80, Triton 3.9.0\n\n| `bwd_a` | 1 |\n\n"
    held = (
        f"## Triton 3.9.0\n\n{sm_80}### sm_90, Triton 3.9.0\n\n| `bwd_a` | 1 |\n| `fwd_b` | 2 |\n"
    )
    new = f"## Triton 3.9.0\n\n{sm_80}### sm_90, Triton 3.9.0\n\n| `bwd_a` | {{}} |\n"
    assert sass_facts.differences(held, new.format(1), ["bwd_*"]) == []
    found = sass_facts.differences(held, new.format(3), ["bwd_*", "x"])
    assert found[3:] == ["-sm_90: | `bwd_a` | 1 |", "+sm_90: | `bwd_a` | 3 |"]
    assert "-sm_90: | `fwd_b` | 2 |" in sass_facts.differences(held, new.format(1))
    for options in (["--kernel", "bwd_*"], ["--check", "--kernel", "none"]):
        with pytest.raises(SystemExit):
            sass_facts.main(options)
    assert "no kernel of the table is called none" in capsys.readouterr().err


class Alone:
    """A pool of processes that is this one."""

    def __init__(self, *_: object, **__: object) -> None:
        self.map = map

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_check_fails_where_the_file_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sass_facts, "ProcessPoolExecutor", Alone)
    text = sass_facts.RESULT.read_text()
    part = sass_facts.sections_of(text)[triton.__version__]
    delta = next(x for x in sass_facts.tables_of(part)["sm_90"] if "`bwd_delta_bf16_d96_" in x)
    other = tmp_path / "facts.md"
    other.write_text(text.replace(delta, delta.replace("| nothing |", "| spills |")))
    asked = ["--check", "--jobs", "1", "--kernel", delta.split("`")[1], "--out"]
    assert sass_facts.main([*asked, str(sass_facts.RESULT)]) == 0
    assert sass_facts.main([*asked, str(other)]) == 1


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


def test_names_of_committed_kernels_are_short() -> None:
    names = {
        kernel_name(entry.spec, config)
        for slug in COMPLETE
        for entry in table_of(slug).entries
        for config in emit.kernels_of(entry)
    }
    # A name of four features is longer by two words, all of them abbreviated.
    assert max(map(len, names)) <= LONGEST_NAME + len("_inv_pg")


@pytest.mark.parametrize("slug", COMPLETE)
def test_no_decode_loses_to_a_runner_up_for_some_number_of_sequences(slug: str) -> None:
    """By its worst ratio to the fastest, which is the least or that of a tie. It may be some percent
    more: configs that evidence does not keep were compared, too, and buckets share kernels.
    """
    for entry in table_of(slug).entries:
        kept = [entry.evidence.batches_us, *(o.batches_us for o in entry.evidence.runners_up)]
        times = [each for each in kept if each]
        if not entry.evidence.batches_us or len(times) < 2:
            continue
        assert {*map(len, times)} == {len(timed_problems(entry.spec, entry.problem))}
        fastest = [min(each) for each in zip(*times, strict=True)]
        worst = [max(a / b for a, b in zip(each, fastest, strict=True)) for each in times]
        assert worst[0] <= 1.06 * max(TIE, min(worst)), (entry.spec.name, entry.bucket, worst)


@pytest.mark.parametrize("slug", COMPLETE)
def test_no_shipped_kernel_is_a_trap(slug: str) -> None:
    """A kernel that takes more tensor memory than there is compiles to a trap of 4 registers."""
    few = [e.config.label for e in table_of(slug).entries if (e.evidence.registers or 0) < 16]
    assert not few
