"""The ladder: which kernel serves, on which rung, and why."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import pytest

from flashgen.runtime.choice import Choice, Choices, by_spec
from flashgen.runtime.selection import (
    Served,
    by_rows,
    ladder,
    tune_command,
)
from flashgen.schedules.config import kernel_name
from flashgen.schedules.defaults import WIDEST_DECODE, default_config, specs_with_default
from flashgen.schedules.legality import may_spill, why_illegal
from flashgen.schedules.space import tuned_default
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import ALIASES, TARGETS, Gpu
from flashgen.spec.problem import BUCKETS
from flashgen.spec.vocabulary import Direction
from tests.makers import make_config, make_spec
from tests.package import make_choice

SPEC = make_spec("bfloat16", 64, "causal")
H100, H200 = "nvidia_h100_80gb_hbm3", "nvidia_h200"
SMALL, BIG = make_config(64, 64), make_config(128, 64, num_warps=8)


def served(**tables: Iterable[Choice]) -> Served:
    archs = {slug: TARGETS[slug].arch for slug in tables}
    return Served(archs=archs, choices={slug: by_spec(held) for slug, held in tables.items()})


def rungs(table: Served, slug: str, seq: int) -> list[tuple[str, str]]:
    found = ladder(table, slug, TARGETS[slug], SPEC, seq)
    return [(s.rung, s.choice.config.label) for s in found.rungs]


def test_exact_then_nearest_then_default() -> None:
    table = served(
        nvidia_h200=(make_choice(SPEC, SMALL, BUCKETS[1]), make_choice(SPEC, BIG, BUCKETS[3]))
    )
    assert rungs(table, H200, 2000)[0] == ("exact", SMALL.label)
    assert rungs(table, H200, 20000)[0] == ("exact", BIG.label)
    assert rungs(table, H200, 100)[0] == ("nearest_bucket", SMALL.label)
    # Between two as near, the entry of the longer lengths.
    assert rungs(table, H200, 5000)[0] == ("nearest_bucket", BIG.label)
    assert rungs(table, H200, 2000)[-1][0] == "default"


def test_a_relative_serves_a_gpu_without_a_table() -> None:
    table = served(nvidia_h100_80gb_hbm3=(make_choice(SPEC, BIG, BUCKETS[2]),))
    assert [rung for rung, _ in rungs(table, H200, 5000)] == ["relative", "default"]
    assert [rung for rung, _ in rungs(table, "nvidia_l4", 5000)] == ["default"]


@pytest.mark.parametrize(
    ("slug", "lender"),
    [
        ("nvidia_b300_sxm6_ac", "nvidia_b200"),
        ("nvidia_gb10", "nvidia_geforce_rtx_5090"),
        ("amd_instinct_mi210", "amd_instinct_mi300x"),
    ],
)
def test_a_gpu_of_the_same_family_serves_where_the_architecture_has_none(
    slug: str, lender: str
) -> None:
    executed = dataclasses.replace(make_choice(SPEC, SMALL, BUCKETS[2]), tritons=("3.7",))
    table = served(**{lender: (executed, make_choice(SPEC, BIG, BUCKETS[2]))})
    assert rungs(table, slug, 5000)[:2] == [
        ("relative", BIG.label),
        ("default", rungs(table, slug, 5000)[1][1]),
    ]
    first = ladder(table, slug, TARGETS[slug], SPEC, 5000).rungs[0]
    assert "of the same family as" in first.reason
    assert rungs(table, H200, 5000)[0][0] == "default"


def test_the_tile_of_a_measured_kernel_in_gluon_serves_no_feature() -> None:
    """Its registers and its order are its own: the relative's plain entry lends its tile."""
    hopper = dataclasses.replace(BIG, schedule="hopper", loads="descriptor")
    capped = SPEC.with_features(("softcap",))
    own = (make_choice(SPEC, hopper, BUCKETS[2]), make_choice(SPEC, SMALL, BUCKETS[0]))
    table = served(nvidia_h200=own, nvidia_h100_80gb_hbm3=(make_choice(SPEC, BIG, BUCKETS[2]),))
    found = ladder(table, H200, TARGETS[H200], capped, 5000).rungs
    assert found[0].rung == "plain_tile"
    assert found[0].choice.config == BIG.textbook(SPEC)
    alone = ladder(served(nvidia_h200=own), H200, TARGETS[H200], capped, 5000).rungs
    assert alone[0].choice.config == SMALL.textbook(SPEC)


def test_packed_sequences_of_a_class_take_the_tile_of_its_entry() -> None:
    """Before that of the plain spec, which may be of another class."""
    of_class, plain = make_config(64, 64), make_config(128, 64, num_warps=8)
    invariant = dataclasses.replace(SPEC, invariant=True)
    own = (make_choice(SPEC, plain, BUCKETS[2]), make_choice(invariant, of_class, BUCKETS[2]))
    packed = dataclasses.replace(invariant, varlen=True)
    found = ladder(served(nvidia_l4=own), "nvidia_l4", TARGETS["nvidia_l4"], packed, 5000).rungs
    assert [(s.rung, s.choice.config) for s in found[:2]] == [
        ("plain_tile", of_class),
        ("plain_tile", plain),
    ]


def test_the_relative_of_a_gpu_nobody_listed_has_its_matrix_rate() -> None:
    choice = make_choice(SPEC, SMALL, BUCKETS[2])
    table = served(nvidia_l4=(choice,), nvidia_geforce_rtx_4090=(choice,))
    l40 = dataclasses.replace(TARGETS["nvidia_l40s"], name="NVIDIA L40")
    found = ladder(table, l40.slug, l40, SPEC, 5000)
    assert [s.slug for s in found.rungs] == ["nvidia_l4", "nvidia_geforce_rtx_4090", None]


def test_float32_and_smaller_head_dims_match_nothing() -> None:
    table = served(nvidia_h200=(make_choice(SPEC, BIG, BUCKETS[2]),))
    for other in (make_spec("bfloat16", 128, "causal"), make_spec("float32", 64, "causal")):
        found = ladder(table, H200, TARGETS[H200], other, 5000)
        assert [s.rung for s in found.rungs] == ["default"]
        assert found.rungs[0].choice.spec == other


class TestTheTwin:
    """A spec of one 16-bit type takes the config of the other's entry."""

    def test_it_comes_after_relatives_and_before_tiles(self) -> None:
        half = dataclasses.replace(SPEC, dtype="float16", window=True)
        twin = dataclasses.replace(half, dtype="bfloat16")
        table = served(
            nvidia_h200=(
                make_choice(twin, BIG, BUCKETS[1]),
                make_choice(SPEC, SMALL, BUCKETS[2]),
            )
        )
        found = ladder(table, H200, TARGETS[H200], half, 5000)
        assert [(s.rung, s.choice.config) for s in found.rungs] == [
            ("sibling", BIG),
            ("plain_tile", SMALL),
            ("default", default_config(half)),
        ]
        assert all(s.choice.spec.dtype == "float16" for s in found.rungs)
        own = served(
            nvidia_h100_80gb_hbm3=(make_choice(half, SMALL, BUCKETS[2]),),
            **{H200: table.choices[H200][twin]},
        )
        assert ladder(own, H200, TARGETS[H200], half, 5000).rungs[0].rung == "relative"

    @pytest.mark.parametrize("direction", ["backward_fused"])
    def test_the_fused_backward_is_chosen_by_its_time_alone(self, direction: Direction) -> None:
        half = dataclasses.replace(SPEC, dtype="float16").for_direction(direction)
        entry = make_choice(dataclasses.replace(half, dtype="bfloat16"), BIG, BUCKETS[2])
        found = ladder(served(nvidia_h200=(entry,)), H200, TARGETS[H200], half, 5000)
        assert [s.rung for s in found.rungs] == ["default"]

    @pytest.mark.parametrize(("dim", "tuned"), [(40, 64), (48, 64), (80, 96), (112, 128)])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_a_head_dim_takes_the_tile_of_the_next_that_is_tuned(
        self, dim: int, tuned: int, dtype: str
    ) -> None:
        tile = make_config(64, 32)
        entry = make_choice(make_spec("bfloat16", tuned, "causal"), tile, BUCKETS[2])
        asked = make_spec(dtype, dim, "causal")
        found = ladder(served(nvidia_l4=(entry,)), "nvidia_l4", TARGETS["nvidia_l4"], asked, 5000)
        assert (found.rungs[0].rung, found.rungs[0].choice.config) == ("plain_tile", tile)
        assert make_spec("bfloat16", tuned, "causal").name in found.rungs[0].reason


def test_no_other_table_is_read_where_the_own_one_serves() -> None:
    class Unread(dict[str, Choices]):
        def get(self, slug: str, default: object = None) -> Choices:  # type: ignore[override]
            assert slug == H200
            return self[slug]

    own = by_spec([make_choice(SPEC, BIG, BUCKETS[2])])
    table = Served(archs={H200: "sm_90", H100: "sm_90"}, choices=Unread({H200: own, H100: own}))
    assert [rung for rung, _ in rungs(table, H200, 100)] == ["nearest_bucket", "default"]


def test_an_entry_with_descriptors_never_serves_an_a100() -> None:
    choice = make_choice(SPEC, make_config(loads="descriptor"), BUCKETS[2])
    table = Served(archs={"a": "sm_80"}, choices={"a": by_spec([choice])})
    found = ladder(table, "nvidia_a100_sxm4_80gb", TARGETS["nvidia_a100_sxm4_80gb"], SPEC, 5000)
    assert [s.rung for s in found.rungs] == ["default"]
    (why,) = found.skipped
    assert "TMA" in why


LEGAL = pytest.mark.slow("tests/cpu/table/test_emit.py: the defaults are legal on all targets")


def test_the_command_to_improve_it_is_complete() -> None:
    command = tune_command(
        make_spec("float32", 192, "causal", head_dim_v=128, precision="tf32"), 5000
    )
    assert command == "flashgen tune --gpu --dtype tf32 --head-dim 192x128 --causal --seq 5000"


@pytest.mark.parametrize(
    "gpu",
    [
        pytest.param(gpu, id=arch, marks=() if arch in ("sm_80", "sm_90", "gfx90a") else LEGAL)
        for arch, gpu in {g.arch: g for g in TARGETS.values()}.items()
    ],
)
def test_every_listed_spec_has_a_default_where_no_table_serves(gpu: Gpu) -> None:
    nobody = Served(archs={}, choices={})
    for spec in specs_with_default():
        if spec.fp8 and why_illegal(spec, default_config(spec), gpu) is not None:
            continue  # refused by name: tests/cpu/runtime/test_fp8.py
        if spec.invariant and not gpu.is_nvidia:
            continue  # likewise: tests/cpu/schedules/test_numeric_class.py
        last = ladder(nobody, gpu.slug, gpu, spec, 5000).rungs[-1]
        assert last.rung == "default"


@pytest.mark.parametrize("slug", ["nvidia_a100_sxm4_80gb", "nvidia_l4", H200])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_a_search_is_compared_with_what_runs_untuned(slug: str, dims: tuple[int, int]) -> None:
    gpu, nobody = TARGETS[slug], Served(archs={}, choices={})
    plain = make_spec("bfloat16", dims[0], "causal", head_dim_v=dims[1])
    for spec in (plain, plain.for_direction("backward_dq"), plain.with_features(["window"])):
        untuned = ladder(nobody, slug, gpu, spec, 5000).rungs[0].choice.config
        assert untuned.whole_rows == (slug != H200 and dims[0] > 64 and spec.direction == "forward")
        assert tuned_default(spec, gpu) == dataclasses.replace(untuned, head_dims="exact")


def test_where_no_tf32_kernel_runs_the_ieee_one_does() -> None:
    tf32 = make_spec("float32", 64, precision="tf32")
    table = Served(archs={}, choices={})
    for slug, precision in (("amd_instinct_mi355x", "ieee"), ("amd_instinct_mi300x", "tf32")):
        found = ladder(table, slug, TARGETS[slug], tf32, 100)
        assert found.rungs[0].choice.spec.precision == precision


class TestThePlainTile:
    """A spec without an entry takes the tile of the entry that it has without its features."""

    WINDOW = make_spec("bfloat16", 64, "causal", window=True)
    AHEAD = make_config(64, 64, schedule="s_ahead", loads="descriptor", num_stages=3)

    def of(
        self, spec: AttentionSpec, *choices: Choice, slug: str = H200, seq: int = 5000
    ) -> list[tuple[str, str]]:
        found = ladder(served(nvidia_h200=choices), slug, TARGETS[slug], spec, seq)
        return [(s.rung, s.choice.kernel) for s in found.rungs]

    def test_it_is_textbook_and_its_twin_is_a_rung_of_its_own(self) -> None:
        textbook = dataclasses.replace(self.AHEAD, schedule="fa2")
        found = self.of(self.WINDOW, make_choice(SPEC, self.AHEAD, BUCKETS[2]))
        assert found == [
            ("plain_tile", kernel_name(self.WINDOW, textbook)),
            ("plain_tile", kernel_name(self.WINDOW, textbook.pointer_twin(self.WINDOW))),
            ("default", kernel_name(self.WINDOW, default_config(self.WINDOW))),
        ]

    def test_the_nearest_bucket_comes_first(self) -> None:
        choices = make_choice(SPEC, SMALL, BUCKETS[1]), make_choice(SPEC, BIG, BUCKETS[3])
        for seq, config in ((2000, SMALL), (20000, BIG)):
            assert self.of(self.WINDOW, *choices, seq=seq)[0] == (
                "plain_tile",
                kernel_name(self.WINDOW, config),
            )

    def test_an_entry_of_its_own_or_of_a_relative_comes_before(self) -> None:
        own = make_choice(self.WINDOW, SMALL, BUCKETS[1])
        plain = make_choice(SPEC, BIG, BUCKETS[2])
        assert self.of(self.WINDOW, own, plain)[0][0] == "nearest_bucket"
        table = served(nvidia_h100_80gb_hbm3=(own,), nvidia_h200=(plain,))
        found = ladder(table, H200, TARGETS[H200], self.WINDOW, 5000)
        assert [s.rung for s in found.rungs] == ["relative", "plain_tile", "default"]

    def test_another_architecture_another_mask_and_the_fused_backward_have_none(self) -> None:
        plain = make_choice(SPEC, BIG, BUCKETS[2])
        assert self.of(self.WINDOW, plain, slug="nvidia_l4")[0][0] == "default"
        unmasked = dataclasses.replace(self.WINDOW, mask="none")
        assert self.of(unmasked, plain)[0][0] == "default"
        fused = make_choice(SPEC.for_direction("backward_fused"), BIG, BUCKETS[2])
        assert self.of(self.WINDOW.for_direction("backward_fused"), fused)[0][0] == "default"

    def test_every_listed_spec_has_a_ladder(self) -> None:
        """Of every direction, a cache's and the gradient of a bias among them."""
        table, gpu = served(nvidia_h200=(make_choice(SPEC, BIG, BUCKETS[2]),)), TARGETS[H200]
        for spec in specs_with_default():
            assert ladder(table, H200, gpu, spec, 5000).rungs[-1].rung == "default"

    @pytest.mark.parametrize("slug", [H100, "nvidia_gh200_480gb"])
    def test_a_gpu_without_a_table_takes_the_tiles_of_a_relative(self, slug: str) -> None:
        table = served(nvidia_h200=(make_choice(SPEC, BIG, BUCKETS[2]),))
        found = ladder(table, slug, TARGETS[slug], self.WINDOW, 5000)
        assert found.rungs[0].rung == "plain_tile"

    def test_an_alias_takes_the_tiles_of_its_gpu(self) -> None:
        alias = next(alias for alias, slug in ALIASES.items() if slug == H200)
        gpu = dataclasses.replace(TARGETS[H200], name=alias)
        table = served(nvidia_h200=(make_choice(SPEC, BIG, BUCKETS[2]),))
        assert ladder(table, alias, gpu, self.WINDOW, 5000).rungs[0].rung == "plain_tile"

    def test_a_tile_that_may_spill_is_skipped_with_a_reason_unless_a_better_kernel_serves(
        self,
    ) -> None:
        plain = make_choice(SPEC, make_config(128, 128, num_warps=4), BUCKETS[2])
        found = ladder(served(nvidia_h200=(plain,)), H200, TARGETS[H200], self.WINDOW, 5000)
        assert [s.rung for s in found.rungs] == ["default"]
        (why,) = found.skipped
        assert "it may spill: O and S take 192 registers a thread" in why
        own = make_choice(self.WINDOW, BIG, BUCKETS[2])
        found = ladder(served(nvidia_h200=(plain, own)), H200, TARGETS[H200], self.WINDOW, 5000)
        assert ([s.rung for s in found.rungs], found.skipped) == (["exact", "default"], ())

    @pytest.mark.parametrize(
        ("words", "registers"),
        [(["window"], 96), (["bias"], 48), (["window", "softcap", "sink"], 48)],
    )
    def test_features_by_their_weight(self, words: list[str], registers: int) -> None:
        gpu = TARGETS["nvidia_h200"]
        for bc, num_warps in itertools.product((16, 32, 64, 128), (4, 8)):
            config = make_config(64, bc, num_warps=num_warps)
            held = (64 * 64 + 64 * bc) // (32 * num_warps)
            reason = may_spill(SPEC.with_features(words), config, gpu)
            assert ("may spill" in (reason or "")) == (held > registers)

    def test_tiles_of_a_bias_take_shared_memory(self) -> None:
        spec, gpu = make_spec("bfloat16", 16, bias="additive"), TARGETS["nvidia_l4"]
        config = make_config(64, 64, num_warps=8, num_stages=5)
        assert why_illegal(spec, config, gpu) is None
        assert may_spill(spec, config, gpu) is None
        wider = make_config(64, 128, num_warps=16, num_stages=5)
        assert "and the bias need" in (may_spill(spec, wider, gpu) or "")

    def test_explain_says_that_it_is_untimed(self) -> None:
        table = served(nvidia_h200=(make_choice(SPEC, BIG, BUCKETS[2]),))
        first = ladder(table, H200, TARGETS[H200], self.WINDOW, 5000).rungs[0]
        assert first.choice.source == "untimed"
        assert first.choice.median_us is None
        assert first.reason == (
            "no entry for fwd_bf16_d64_causal_window on nvidia_h200 or a GPU like it; the tile of "
            "fwd_bf16_d64_causal for seq_k in [4096, 16384) serves, untimed"
        )


def decodes(table: Served, slug: str, spec: AttentionSpec, rows: int) -> list[tuple[str, int, int]]:
    """The rungs of a decode of so many rows of a head: rung, br and stages, best first."""
    found = sorted(
        ladder(table, slug, TARGETS[slug], spec, 5000).rungs, key=lambda rung: by_rows(rung, rows)
    )
    return [(one.rung, one.choice.config.br, one.choice.config.num_stages) for one in found]


@pytest.mark.parametrize(
    ("rows", "first"), [(1, "exact"), (16, "exact"), (17, "default"), (64, "default")]
)
def test_an_entry_of_a_decode_serves_the_rows_that_its_tile_holds(rows: int, first: str) -> None:
    """Each program of a narrower one would read all keys again: by estimate 1.2 to 2.4 times the
    time of a default of 64 rows, on an A100 and an H200, at 32 and 64 rows.
    """
    spec = make_spec("bfloat16", 64, direction="decode")
    table = served(nvidia_h200=(make_choice(spec, make_config(16, 64, num_stages=4), BUCKETS[2]),))
    rung, br, _ = decodes(table, H200, spec, rows)[0]
    assert rung == first
    assert br >= min(rows, WIDEST_DECODE)
    wide = served(nvidia_h200=(make_choice(spec, make_config(64, 64), BUCKETS[2]),))
    assert decodes(wide, H200, spec, rows)[0][:2] == ("exact", 64)


def test_a_decode_of_several_queries_runs_the_tile_of_one() -> None:
    """The mask is what several queries need, and few rows fill the same tile."""
    one = make_spec("bfloat16", 128, direction="decode", paged=True)
    table = served(nvidia_h200=(make_choice(one, make_config(16, 128, num_stages=4), BUCKETS[2]),))
    several = dataclasses.replace(one, mask="causal")
    assert decodes(table, H200, several, 16)[0] == ("plain_tile", 16, 4)
    assert decodes(table, H200, several, 64)[0][:2] == ("default", 64)
    chunks = dataclasses.replace(several, chunk=True)
    assert "plain_tile" not in {rung for rung, *_ in decodes(table, H200, chunks, 16)}


@pytest.mark.parametrize(("slug", "stages"), [(H200, 2), ("nvidia_a100_sxm4_80gb", 3)])
def test_ptxas_serializes_no_default_of_hopper(slug: str, stages: int) -> None:
    spec = make_spec("bfloat16", 64, "causal", direction="decode")
    assert decodes(served(), slug, spec, 64)[0] == ("default", 64, stages)
    paged = dataclasses.replace(spec, paged=True)
    assert decodes(served(), slug, paged, 64)[0] == ("default", 64, 4)
