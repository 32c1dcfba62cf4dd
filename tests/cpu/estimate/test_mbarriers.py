"""estimate/mbarriers.py: which ring an instruction names, wherever ptxas has put its address."""

from __future__ import annotations

import pytest
import triton

from flashgen.estimate.mbarriers import BarrierAddress, address_of, families, place_of
from flashgen.estimate.replay import cached_replay
from flashgen.spec.gpu import TARGETS
from tests.compiled import cache, compile_one
from tests.listings import listing
from tests.makers import make_config, make_spec

WINDOW = "ULEA UR5, UR8, UR5, 0x18"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("SYNCS.PHASECHK P0, [UR22+0x8000], R3", 0x8000),
        ("SYNCS.PHASECHK P0, [UR22+URZ+0x18], R3", 0x18),
        ("SYNCS.PHASECHK P0, [UR22+-0x20], R3", -0x20),
        ("SYNCS.PHASECHK P0, [UR22], R3", 0),
        ("SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R7+UR7+0x24570], RZ", 0x24570),
        ("SYNCS.PHASECHK P0, R3", None),
    ],
)
def test_the_constant_of_an_instruction(text: str, address: int | None) -> None:
    assert address_of(listing(text).instructions[0]) == address


@pytest.mark.parametrize(
    ("lines", "offset", "fixed"),
    [
        ([WINDOW, "SYNCS.PHASECHK P0, [UR5+0x8000], R3"], 0x8000, True),
        (["SYNCS.PHASECHK P0, [UR5+0x8000], R3"], 0x8000, False),
        ([WINDOW, "UIADD3 UR6, UR5, 0x130, URZ", "SYNCS.PHASECHK P0, [UR6+-0x20], R3"], 0x110, True),
        (
            [WINDOW, "ULEA UR6, UR7, UR5, 0x3", "UIADD3 UR6, UR6, 0x130, URZ",
             "UIMAD UR9, UR10, -0x18, UR6", "SYNCS.ARRIVE.TRANS64 RZ, [UR9], RZ"],
            0x130, False,
        ),
        (
            [WINDOW, "UIMAD UR23, UR19, UR18, 0x148", "IMAD.MOV.U32 R141, RZ, RZ, UR5",
             "SYNCS.PHASECHK P0, [R141+UR23], R22"],
            0x148, False,
        ),
        ([WINDOW, "UMOV UR6, 0xfffffff8", "SYNCS.PHASECHK P0, [UR6+UR5+0x40], R3"], 0x38, True),
    ],
)  # fmt: skip
def test_constants_in_registers_count(lines: list[str], offset: int, fixed: bool) -> None:
    code = listing(*lines).instructions
    assert place_of(code, len(code) - 1, 0) == BarrierAddress(offset=offset, fixed=fixed)


def test_a_register_of_another_role_is_not_read() -> None:
    code = listing("UMOV UR6, 0x100", "SYNCS.PHASECHK P0, [UR6+0x40], R3").instructions
    assert place_of(code, 1, code[0].address).offset == 0x140
    assert place_of(code, 1, code[1].address) == BarrierAddress(offset=0x40, fixed=False)


def test_the_place_before_or_behind_is_of_the_same_ring() -> None:
    walked = {0x110: True, 0x118: True, 0x130: False, 0x148: True, 0x150: True, 0x168: False}
    named = {
        16 * n: (BarrierAddress(offset=offset, fixed=False), full)
        for n, (offset, full) in enumerate(walked.items())
    }
    initialized = frozenset(first + 8 * n for first in range(0x110, 0x190, 0x20) for n in range(3))
    found = families(named, initialized)
    assert list(found.values()) == [0x110, 0x110, 0x130, 0x150, 0x150, 0x168]


def test_rings_of_one_mbarrier_each_are_apart() -> None:
    one, other = BarrierAddress(offset=0x110, fixed=True), BarrierAddress(offset=0x118, fixed=True)
    assert families({0: (one, True), 16: (other, True)}, frozenset({0x110, 0x118})) == {
        0: 0x110,
        16: 0x118,
    }
    full, empty = (
        BarrierAddress(offset=0x110, fixed=False),
        BarrierAddress(offset=0x118, fixed=False),
    )
    found = families({0: (full, True), 16: (empty, False)}, frozenset({0x110, 0x118}))
    assert found == {0: 0x110, 16: 0x118}


@pytest.mark.skipif(triton.__version__ != "3.7.1", reason="facts of the pinned Triton, 3.7.1")
@pytest.mark.slow("two kernels of schedule hopper")
def test_an_invariant_kernel_of_three_stages_does_not_deadlock() -> None:
    """ptxas names its places by registers alone, and its loops run from the second tile on."""
    gpu = TARGETS["nvidia_h200"]
    spec = make_spec("bfloat16", 64, "causal", invariant=True)
    cycles = []
    for stages in (2, 3):
        config = make_config(
            128, 64, num_warps=8, num_stages=stages, schedule="hopper", loads="descriptor",
            order="longest_first",
        )  # fmt: skip
        replay = cached_replay(compile_one(spec, config, gpu.arch), gpu, cache())
        cycles.append(max(replay.cycles[0]))
    assert cycles[1] == pytest.approx(cycles[0], rel=0.1)
