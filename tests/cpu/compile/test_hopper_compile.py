"""What the compiler makes of schedule hopper: facts of its machine code for sm_90a.

None of these kernels has run. A new ptxas may undo what is held here, and no other test would tell.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

import pytest
import triton

from flashgen.compile import loops, sass
from flashgen.compile.compiler import Compiled
from flashgen.compile.ptx import build_ptx
from flashgen.compile.sass import Instruction, Listing
from flashgen.compile.verdict import judge, overlap, residents
from flashgen.estimate import sm
from flashgen.estimate.machines import MACHINES, ArchModel
from flashgen.estimate.sm import Scoreboard
from flashgen.kernels.render import render
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.hopper import HOPPER_OVERLAP, REGISTER_SPLIT, o_apart
from flashgen.schedules.legality import shared_bound_bytes, why_illegal
from flashgen.schedules.outcome import Status
from flashgen.schedules.space import legal_configs
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from tests.compiled import compile_one, cubin_of
from tests.cpu.kernels.test_blackwell_forward import blackwell
from tests.makers import each, hopper, make_config, make_spec

H200 = TARGETS["nvidia_h200"]
Pair = tuple[AttentionSpec, KernelConfig]
Build = Callable[[AttentionSpec, KernelConfig], tuple[Compiled, Listing]]


@pytest.fixture(scope="module")
def build() -> Build:
    @functools.cache
    def built(spec: AttentionSpec, config: KernelConfig) -> tuple[Compiled, Listing]:
        compiled = compile_one(spec, config, "sm_90")
        return compiled, sass.disassemble(cubin_of(compiled))

    return built


SHOWN = [
    (make_spec(dtype, dim, mask), config)
    for dtype, dim, config, masks in (
        ("bfloat16", 64, hopper(192, 128), ("none", "causal")),
        ("bfloat16", 128, hopper(128, 128), ("none", "causal")),
        ("bfloat16", 256, hopper(128, 64), ("none", "causal")),
        ("float16", 96, hopper(128, 64, 3), ("causal",)),
    )
    for mask in masks
]


PERSISTENT = [
    (make_spec("bfloat16", 64, "causal"), hopper(192, 64, 2, "grouped", persistent=True)),
    (make_spec("bfloat16", 128), hopper(128, 128, persistent=True)),
    (make_spec("bfloat16", 128, "causal"), hopper(128, 128, 2, "longest_first", persistent=True)),
    (make_spec("float16", 256, "causal"), hopper(128, 64, 2, "head_reversal", persistent=True)),
]
EVERY_ONE = [
    *SHOWN,
    (make_spec("bfloat16", 128, "causal"), hopper(128, 128, 2, "grouped")),
    *PERSISTENT,
]
QUICK = [SHOWN[5], PERSISTENT[0]]
"""Two head dims, both ways to deal out tiles. All tests of this file that make test has are of these
two kernels."""


def sampled(pairs: Sequence[Pair]) -> list[Any]:
    """Those that are not QUICK are slow: ptxas takes seconds for each."""
    slow = pytest.mark.slow("make test compiles two of them")
    return [pytest.param(*pair, marks=() if pair in QUICK else slow) for pair in pairs]


def name_of(value: object) -> str:
    return value.label if isinstance(value, KernelConfig) else getattr(value, "name", str(value))


@pytest.mark.parametrize(("spec", "config"), sampled(EVERY_ONE), ids=name_of)
def test_the_schedule_survives_ptxas(
    build: Build, spec: AttentionSpec, config: KernelConfig
) -> None:
    compiled, _ = build(spec, config)
    assert judge(compiled, spec, config, H200) == (Status.OK, "")
    # A loop of every consumer, with a branch to the mask where there is a diagonal.
    assert len(compiled.loops) == config.consumers * (2 if spec.causal else 1)
    for loop in compiled.loops:
        assert loop.spills == 0
        assert loop.warpgroup_arrives == 2
        assert (loop.exp2_under_matrix or 0) >= HOPPER_OVERLAP
    dims = {64: 64, 96: 128, 128: 128, 256: 256}[spec.head_dim]
    # Four warps of a consumer share the two products of its 64 rows.
    assert {loop.matrix_flops * 4 for loop in compiled.loops} == {4 * 64 * config.bc * dims}
    assert compiled.advisories == ()
    assert overlap(compiled, config) >= HOPPER_OVERLAP


AT_MOST = {(64, "none"): 6.4, (64, "causal"): 6.4, (128, "none"): 7.0, (128, "causal"): 7.05,
           (256, "none"): 12.75, (256, "causal"): 12.9}  # fmt: skip
"""Instructions of a thread for each of its scores, in the steady loop of the slowest consumer.
FlashAttention-3 needs 6.58 and 6.73, 6.75 and 7.33, 11.65 and 11.38 (with 80 keys a tile)."""


@pytest.mark.skipif(triton.__version__ != "3.7.1", reason="counts of other compilers differ")
@pytest.mark.parametrize(("spec", "config"), sampled(SHOWN[:6]), ids=name_of)
def test_instructions_a_score(build: Build, spec: AttentionSpec, config: KernelConfig) -> None:
    compiled, listing = build(spec, config)
    steady, masked = compiled.loops[: config.consumers], compiled.loops[config.consumers :]
    scores = 64 * config.bc / 128
    assert max(loop.instructions for loop in steady) / scores <= AT_MOST[spec.head_dim, spec.mask]
    assert all(loop.instructions / scores <= 15 for loop in masked)
    barriers = 4 if spec.head_dim <= 128 else 2  # two turns, the anchor, and one of Triton's
    for body in loops.main_bodies(listing):
        assert sum(i.base == "BAR" for i in body) == barriers
        assert sum(i.base == "SHFL" for i in body) == 4, "of the maximum; sums stay in their lanes"


def board(
    build: Build, spec: AttentionSpec, config: KernelConfig, machine: ArchModel = MACHINES["sm_90"]
) -> Scoreboard:
    compiled, listing = build(spec, config)
    with patch.object(sm, "machine_of", lambda _: machine):
        return Scoreboard(listing, H200, num_warps=4, shared_bytes=compiled.shared_bytes)


def ideal(spec: AttentionSpec, config: KernelConfig) -> int:
    """Cycles in which the matrix pipe of an SM does both products of a tile: 4096 FLOP each."""
    return 4 * config.br * config.bc * spec.head_dim // 4096


@pytest.mark.parametrize(("spec", "config"), [SHOWN[5]], ids=name_of)
def test_masked_and_steady_tiles_are_replayed_apart(
    build: Build, spec: AttentionSpec, config: KernelConfig
) -> None:
    """Of one loop: with its mask in the first phase, without in the second, by both consumers."""
    found = board(build, spec, config)
    assert found.phases == ((0, 2), (1, 3))
    assert [len(body) for body in found.main[::2]] > [len(body) for body in found.main[1::2]]
    made = found._program(found.phases[1], 1)
    assert sorted(made.arrivals) == [0, 0, 8, 8], "TMA fills K and V, eight warps empty them"
    masked, steady = found.trip_cycles(1)
    assert masked >= steady
    assert steady <= 1.02 * ideal(spec, config)


@pytest.mark.slow("replays each kernel on eight machines")
@pytest.mark.skipif(triton.__version__ != "3.7.1", reason="the code of other compilers differs")
@pytest.mark.parametrize(("spec", "config"), SHOWN[:6], ids=name_of)
def test_the_matrix_pipe_is_busy(build: Build, spec: AttentionSpec, config: KernelConfig) -> None:
    """A steady tile in the mean of machines whose latencies differ by up to 30 %."""
    usual = MACHINES["sm_90"]
    vague = [x.name for x in fields(ArchModel) if x.name.endswith("_late")] + ["l2_burst_bytes"]
    shares = []
    for number in range(8):
        draw = random.Random(number)
        drawn = {name: getattr(usual, name) * draw.uniform(0.7, 1.3) for name in vague}
        cycles = board(build, spec, config, replace(usual, **drawn)).trip_cycles(1)
        shares.append(cycles[-1] / ideal(spec, config))
    assert sum(shares) / 8 <= (1.6 if spec.head_dim == 64 else 1.02), shares


@pytest.mark.parametrize(("spec", "config"), sampled(EVERY_ONE), ids=name_of)
def test_it_fits_an_sm(build: Build, spec: AttentionSpec, config: KernelConfig) -> None:
    compiled, listing = build(spec, config)
    assert compiled.num_warps == config.block_warps(spec) == 4 * (config.consumers + 1)
    assert compiled.registers * 32 * compiled.num_warps <= 65536
    assert residents(compiled, H200) >= 1
    bound = shared_bound_bytes(spec, config, H200)
    assert bound <= compiled.shared_bytes <= bound + 1024  # barriers, and what Triton adds
    computing, loading = REGISTER_SPLIT[config.consumers]
    asked = {i.operands.split()[-1] for i in listing.instructions if i.base == "USETMAXREG"}
    assert {hex(computing), hex(loading)} <= asked
    assert config.consumers * computing + loading <= 512


@pytest.mark.parametrize(("spec", "config"), sampled(EVERY_ONE), ids=name_of)
def test_the_barriers_of_the_machine_code(
    build: Build, spec: AttentionSpec, config: KernelConfig
) -> None:
    """Per turn of a loop: each barrier of the text once, whatever the compiler moved."""
    _, listing = build(spec, config)
    main = loops.main_bodies(listing)
    consumers = [role for role in loops.roles(listing, main) if role.loops[0] in main]
    assert len(consumers) == config.consumers
    turns = spec.head_dim <= 128
    met = []
    for role in consumers:
        met += [_named(body) for body in role.loops]
        for body in role.loops:
            waits, arrivals = _waits(body), _arrivals(body)
            assert (len(waits), len(arrivals)) == (2, 2), "K and V full; K and V empty"
            assert _never(body) == 1, "the anchor"
    expected = [{(w, "SYNC"), ((w + 1) % config.consumers, "ARV")} for w in range(config.consumers)]
    twice = 2 if spec.causal else 1
    for pair in expected:
        assert met.count(pair if turns else set()) == (twice if turns else len(met))
    producer = [loop for loop in loops.loops(listing.instructions) if _loads(loop)]
    assert len(producer) == 1 + config.persistent
    ring = min(producer, key=len)
    assert len(_waits(ring)) == 2
    assert len(_arrivals(ring)) == 2
    # A load is 64 elements wide: what 128 bytes of swizzle hold.
    assert len(_loads(ring)) == 2 * max(1, {96: 128}.get(spec.head_dim, spec.head_dim) // 64)


@pytest.mark.parametrize(("spec", "config"), sampled(PERSISTENT), ids=name_of)
def test_the_barriers_of_a_tile_of_o(
    build: Build, spec: AttentionSpec, config: KernelConfig
) -> None:
    """Of the loop over tiles, without those over keys: full Q, K and last V, and the number of the
    next tile, each given back.
    """
    _, listing = build(spec, config)
    main = loops.main_bodies(listing)
    of_keys = {i.address for body in main for i in body}
    found = loops.loops(listing.instructions)
    tiles = [x for x in found if x not in main and any(_holds(x, body) for body in main)]
    assert len(tiles) == config.consumers
    for loop in tiles:
        once = [i for i in loop if i.address not in of_keys]
        waits, arrivals = _waits(once), _arrivals(once)
        assert (len(waits), len(arrivals)) == (4, 4)
        stored = ("STSM", "FENCE", "BAR", "UTMASTG")
        code = [i.base for i in once if i.base in stored or _store_wait(i) or i in arrivals]
        if o_apart(spec, config):
            # The TMA unit has read O of the tile before, as all four warps know; then comes this O.
            before = code.index("STSM")
            assert code[before - 2 : before] == ["DEPBAR", "BAR"]
            assert code[-3:] == ["UTMASTG", "BAR", "SYNCS"]
        else:
            # It has read O, as all four warps know; then the place is Q's again.
            assert code[-6:] == ["UTMASTG", "DEPBAR", "BAR", "SYNCS", "BAR", "SYNCS"]
    of_producer = sorted((loop for loop in found if _loads(loop)), key=len)
    once = [i for i in of_producer[1] if i not in of_producer[0]]
    assert len(_waits(once)) == 3 + config.consumers, (
        "first K, last V, every Q, and the place of a number"
    )


@pytest.mark.slow("seven seconds of compilation")
def test_triton_takes_none_of_our_named_barriers(build: Build) -> None:
    """Its own are numbered from 0: one a partition, and one to start them."""
    _, listing = build(*SHOWN[1])
    barriers = [i for i in listing.instructions if i.base == "BAR"]
    threads: dict[int, set[int | None]] = {}
    for i in barriers:
        if i.barrier_name is None:
            # Consumers that share the code of their ends have the name in a register.
            assert i.operands.endswith("0x80"), "one warpgroup"
        else:
            threads.setdefault(i.barrier_name, set()).add(i.barrier_threads)
    ours = {8, 9, 10, 15}
    assert ours < set(threads)
    assert {name for name in threads if name > 7} == ours
    assert all(threads[name] == {256} for name in ours), "two warpgroups each"


def test_o_is_fenced_before_it_is_stored(build: Build) -> None:
    """Written by all four warps, ordered for the TMA unit, awaited, then stored."""
    _, listing = build(*SHOWN[2])
    code = [i for i in listing.instructions if i.base in ("STSM", "STS", "FENCE", "BAR", "UTMASTG")]
    stores = [n for n, i in enumerate(code) if i.base == "UTMASTG"]
    assert len(stores) >= 2
    for n in (n for n in stores if code[n - 1].base != "UTMASTG"):
        assert [i.base for i in code[n - 2 : n]] == ["FENCE", "BAR"]
        assert code[n - 3].base in ("STSM", "STS")


@pytest.mark.parametrize(
    ("arch", "config"),
    [
        ("sm_90", hopper(128, 128, 2, persistent=True)),
        ("sm_100", replace(blackwell(), persistent=True)),
    ],
)
def test_slopes_of_packed_sequences_that_see_all_keys_are_handed_out(
    arch: str, config: KernelConfig
) -> None:
    """Each has a diagonal, from which slopes count, and no last key."""
    spec = make_spec("bfloat16", 64, varlen=True, alibi=True)
    assert "atom" in build_ptx(render(spec, config), spec, config, arch).ptx


@pytest.mark.slow("make test proves a sample of it")
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_the_space_has_sound_kernels_of_every_head_dim(
    build: Build, head_dim: int, mask: str, persistent: bool
) -> None:
    """Some spill or do not fit, and are refused; of each head dim at least one is sound."""
    spec = make_spec("bfloat16", head_dim, mask)
    configs = [
        config
        for config in legal_configs(spec, H200, on_gpu=True)
        if (config.schedule, config.order, config.persistent) == ("hopper", "plain", persistent)
    ]
    assert configs
    verdicts = {c.label: judge(build(spec, c)[0], spec, c, H200)[0] for c in configs}
    assert Status.OK in verdicts.values(), verdicts
    assert set(verdicts.values()) <= {Status.OK, Status.SPILLS, Status.OUT_OF_RESOURCES}, verdicts


@pytest.mark.slow("ptxas takes seconds where registers are too few")
def test_registers_too_few_are_told(build: Build) -> None:
    """Three consumers of 160 registers do not hold 128 columns of S beside 128 of O."""
    spec, config = make_spec("bfloat16", 128), hopper(192, 128)
    assert why_illegal(spec, config, H200) is None
    compiled, _ = build(spec, config)
    assert judge(compiled, spec, config, H200)[0] is Status.SPILLS


def _named(body: Sequence[Instruction]) -> set[tuple[int, str]]:
    """The turns that a loop takes and gives: (warpgroup, SYNC or ARV)."""
    found = set()
    for i in body:
        if i.barrier_name in (8, 9, 10) and not i.predicate:
            found.add((i.barrier_name - 8, i.opcode.split(".")[1]))
    return found


def _holds(outer: Sequence[Instruction], inner: Sequence[Instruction]) -> bool:
    """Whether a loop is around another one."""
    around = outer[0].address <= inner[0].address and inner[-1].address <= outer[-1].address
    return around and len(outer) > len(inner)


def _store_wait(i: Instruction) -> bool:
    """Whether nothing is left after it that the TMA unit has yet to read for a store."""
    return i.opcode == "DEPBAR.LE" and i.operands == "SB0, 0x0"


def _waits(body: Sequence[Instruction]) -> list[Instruction]:
    return [i for i in body if i.opcode.startswith("SYNCS.PHASECHK")]


def _arrivals(body: Sequence[Instruction]) -> list[Instruction]:
    return [i for i in body if i.opcode.startswith("SYNCS.ARRIVE")]


def _loads(body: Sequence[Instruction]) -> list[Instruction]:
    return [i for i in body if i.is_bulk_load]


def _never(body: Sequence[Instruction]) -> int:
    return sum(i.opcode.startswith("BAR.ARV") and i.operands.startswith("0xf") for i in body)


COSTS: dict[str, tuple[dict[str, Any], int, int]] = {
    "packed, window": ({"varlen": True, "window": True}, 455, 713),
    "packed": ({"varlen": True}, 451, 581),
    "window": ({"window": True}, 455, 713),
    "chunk": ({"chunk": True}, 455, 713),
    "sink": ({"sink": True}, 452, 580),
    "alibi": ({"alibi": True}, 582, 714),
    "softcap": ({"softcap": True}, 1604, 1732),
}
"""Features, and the instructions of a tile that no mask and that a mask hides keys of: without any 448 to 452, and 580."""


PAIR: dict[str, tuple[AttentionSpec, KernelConfig]] = {
    "dK and dV": (
        make_spec("bfloat16", 128, "causal", direction="backward_dkv"),
        make_config(64, 128, num_warps=8, num_stages=2, schedule="hopper", loads="descriptor"),
    ),
    "dQ": (make_spec("bfloat16", 128, "causal", direction="backward_dq"), hopper(128, 128)),
}
PAIR_COSTS: dict[tuple[str, str], tuple[int, int]] = {
    ("dK and dV", "varlen window"): (280, 420),
    ("dK and dV", "varlen"): (280, 350),
    ("dK and dV", "window"): (280, 420),
    ("dK and dV", "chunk"): (280, 420),
    ("dK and dV", "alibi"): (385, 445),
    ("dK and dV", "softcap"): (895, 992),
    ("dQ", "varlen window"): (440, 702),
    ("dQ", "varlen"): (424, 568),
    ("dQ", "window"): (440, 702),
    ("dQ", "chunk"): (440, 704),
    ("dQ", "softcap"): (1645, 1854),
}
"""As COSTS, of the gradients, which have 276 and 445 without features, and 422 and 662."""


@pytest.mark.skipif(triton.__version__ != "3.7.1", reason="facts of the pinned Triton, 3.7.1")
@pytest.mark.parametrize(
    ("kernel", "words"),
    each(PAIR_COSTS),
)
def test_what_a_feature_costs_in_a_gradient(build: Build, kernel: str, words: str) -> None:
    """A tile that a mask hides nothing of takes the cycles of the plain kernel's, and one that it
    does at most a tenth more, softcap aside.
    """
    plain, config = PAIR[kernel]
    whole, masked = PAIR_COSTS[kernel, words]
    spec = replace(plain, **dict.fromkeys(words.split(), True))
    found = build(spec, config)[0].loops
    assert len(found) in (4, 6), "of each of two consumers a loop without a mask, and one or two"
    assert sorted(loop.instructions for loop in found)[1] <= whole
    assert max(loop.instructions for loop in found) <= masked
    assert not any(loop.spills for loop in found)
    if words != "softcap":
        most = max(board(build, plain, config).trip_cycles(1))
        cycles = board(build, spec, config).trip_cycles(1)
        assert min(cycles) <= 1.05 * most
        assert max(cycles) <= 1.1 * most


@pytest.mark.skipif(triton.__version__ != "3.7.1", reason="facts of the pinned Triton, 3.7.1")
@pytest.mark.parametrize("name", each(COSTS))
def test_what_a_feature_costs_in_a_tile(name: str) -> None:
    features, whole, masked = COSTS[name]
    spec = make_spec("bfloat16", 128, "causal", **features)
    found = compile_one(spec, hopper(128, 128, 2, "longest_first"), "sm_90").loops
    assert len(found) == 4, "of each of two consumers a way with a mask and one without"
    assert sorted(loop.instructions for loop in found)[1] <= whole
    assert max(loop.instructions for loop in found) <= masked
    assert not any(loop.spills for loop in found)
