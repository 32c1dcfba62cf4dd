"""What each check finds in a few lines of PTX, and that it is silent where the lines are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.ptx.findings import Report, Sanitizer
from flashgen.ptx.tensor_map import ENCODED, TensorMap, decoded
from tests.ptx_snippets import kernel, run

THREAD = (
    "mov.u32 %r60, %tid.x; mov.u32 %r61, smem; shl.b32 %r62, %r60, 2; add.s32 %r62, %r61, %r62;"
)
GLOBAL = "ld.param.u64 %d20, [p0]; mad.wide.u32 %d21, %r60, 4, %d20;"


def report_of(
    body: str, *, threads: int = 64, blocks: int = 1, seed: int = 0, extra: str = ""
) -> Report:
    """The report of a kernel with one tensor of 64 floats and 1 KB of shared memory."""
    text = kernel(THREAD + GLOBAL + body, 1, threads, extra=extra)
    return run(text, [np.zeros(64, np.float32)], grid=(blocks, 1, 1), shared=1024, seed=seed)[1]


WRONG: list[tuple[str, Sanitizer, str, str]] = [
    ("a load behind a tensor", "memcheck", "ld.global.b32 %r1, [%d21+4];", "byte 256 of p0, which has 256"),
    ("a store before a tensor", "memcheck", "st.global.b32 [%d21+-4], %r60;", "4 bytes before p0"),
    ("a load that is not aligned", "memcheck", "ld.global.b32 %r1, [%d20+2];", "not aligned"),
    ("a vector that is not aligned", "memcheck", "ld.global.v2.b32 {%r1, %r2}, [%d20+4];", "not aligned"),
    ("shared memory of another block", "memcheck", "st.shared.b32 [%r62+900], %r60;", "of which the block has 1024"),
    ("shared memory not aligned", "memcheck", "st.shared.b64 [%r61+4], %d20;", "not aligned"),
    ("a parameter behind its end", "memcheck", "ld.param.u64 %d1, [p0+8];", "of a parameter that has 8"),
    ("shared memory nobody wrote", "initcheck", "ld.shared.b32 %r1, [%r62];", "which nobody has written"),
    ("a register nobody wrote", "initcheck", "st.shared.b32 [%r62], %r2;", "stores the register %r2, to which"),
    ("two warps write one word", "racecheck", "st.shared.b32 [%r61], %r60;", "nothing orders the two"),
    (
        "a warp reads what another writes", "racecheck",
        "st.shared.b32 [%r62], %r60; bar.warp.sync -1; xor.b32 %r5, %r60, 32; shl.b32 %r5, %r5, 2; "
        "add.s32 %r5, %r5, %r61; ld.shared.b32 %r6, [%r5];", "nothing orders the two",
    ),
    (
        "a warp overwrites what another reads", "racecheck",
        "st.shared.b32 [%r62], 1; bar.sync 0; ld.shared.b32 %r6, [%r61]; mov.b32 %r7, %r6; "
        "setp.eq.u32 %p1, %r60, 0; @%p1 st.shared.b32 [%r61], 2;", "has read",
    ),
    ("two warps write one word of a tensor", "racecheck", "st.global.b32 [%d20], %r60;", "of p0, which another warp"),
    (
        "a warp overwrites what another reads of a tensor", "racecheck",
        "setp.ge.u32 %p1, %r60, 32; @%p1 bra W; ld.global.b32 %r1, [%d20]; bra E; W: st.global.b32 [%d20], %r60; E:",
        "writes byte 0 of p0, which another warp read",
    ),
    ("half of a warp comes to a barrier", "synccheck", "setp.lt.u32 %p1, %r60, 16; @%p1 bar.sync 0;", "16 do"),
    ("a barrier of half a warp", "synccheck", "bar.sync 1, 48;", "not whole warps"),
    ("a barrier of two counts", "synccheck",
     "setp.lt.u32 %p1, %r60, 32; mov.b32 %r1, 96; @%p1 mov.b32 %r1, 128; bar.sync 1, %r1;", "where warps"),
    ("a warp misses the barrier", "synccheck", "setp.lt.u32 %p1, %r60, 32; @%p1 bar.sync 0;", "deadlock: warp 0 waits for barrier 0"),
    ("a warp arrives and nobody waits", "synccheck", "bar.arrive 1, 96;", "nobody else did"),
    ("a shuffle with lanes elsewhere", "synccheck", "setp.lt.u32 %p1, %r60, 8; @%p1 shfl.sync.idx.b32 %r1, %r60, 0, 31, -1;", "elsewhere"),
    ("an mbarrier that has ended", "synccheck",
     "setp.eq.u32 %p1, %r60, 0; @%p1 mbarrier.init.shared::cta.b64 [%r61], 64; bar.sync 0; @%p1 mbarrier.inval.shared::cta.b64 [%r61]; "
     "bar.sync 0; mbarrier.arrive.shared::cta.b64 _, [%r61];", "there is no mbarrier"),
    ("an mbarrier nobody made", "synccheck", "mbarrier.arrive.shared::cta.b64 _, [%r61];", "there is no mbarrier"),
    (
        "an mbarrier that never completes", "synccheck",
        "setp.eq.u32 %p1, %r60, 0; @%p1 mbarrier.init.shared::cta.b64 [%r61], 2; bar.sync 0; "
        "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r61]; "
        "W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r61], 0; @!%p2 bra W;",
        "1 of 2 arrivals",
    ),
    ("half of a warp comes to a barrier, and the others end", "synccheck",
     "mov.u32 %r1, %laneid; setp.ge.u32 %p1, %r1, 16; @%p1 bra OUT; bar.sync 0; bra E; OUT: ret; E:", "16 do"),
    ("a trap behind a barrier that half of a warp comes to", "memcheck",
     "mov.u32 %r1, %laneid; setp.ge.u32 %p1, %r1, 16; @%p1 bra OUT; bar.sync 0; bra E; OUT: trap; E:", "it traps"),
    ("a trap", "memcheck", "setp.eq.u32 %p1, %r60, 3; @%p1 trap;", "it traps"),
    (
        "an mbarrier that awaits bytes at the end", "synccheck",
        "setp.eq.u32 %p1, %r60, 0; @%p1 mbarrier.init.shared::cta.b64 [%r61], 1; bar.sync 0; "
        "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r61], 16;", "at the end",
    ),
    (
        "a phase that is awaited twice", "synccheck",
        "setp.eq.u32 %p1, %r60, 0; @%p1 mbarrier.init.shared::cta.b64 [%r61], 64; bar.sync 0; mbarrier.arrive.shared::cta.b64 _, [%r61]; "
        "W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r61], 0; @!%p2 bra W; "
        "V: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r61], 0; @!%p2 bra V;", "it waits again for phase 0 of the mbarrier at byte 0",
    ),
    (
        "an mbarrier that is made twice", "synccheck",
        "setp.eq.u32 %p1, %r60, 0; @%p1 mbarrier.init.shared::cta.b64 [%r61], 1; @%p1 mbarrier.init.shared::cta.b64 [%r61], 1;",
        "it initialises an mbarrier that is in use",
    ),
    (
        "an arrival too many", "synccheck",
        "setp.eq.u32 %p1, %r60, 0; @%p1 mbarrier.init.shared::cta.b64 [%r61], 2; bar.sync 0; "
        "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r61], 3;", "3 arrivals",
    ),
    (
        "an mbarrier that is used before it is known", "racecheck",
        "setp.eq.u32 %p1, %r60, 0; @%p1 mbarrier.init.shared::cta.b64 [%r61], 64; "
        "W: setp.lt.u32 %p3, %r60, 32; mbarrier.arrive.shared::cta.b64 _, [%r61];", "uses the mbarrier at",
    ),
    (
        "lanes that wait for two phases", "synccheck",
        "setp.eq.u32 %p1, %r60, 0; @%p1 mbarrier.init.shared::cta.b64 [%r61], 64; bar.sync 0; mbarrier.arrive.shared::cta.b64 _, [%r61]; "
        "and.b32 %r1, %r60, 1; mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r61], %r1;", "different mbarriers or phases",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", WRONG, ids=[case[0] for case in WRONG])
def test_a_check_finds(case: tuple[str, Sanitizer, str, str]) -> None:
    _, check, body, said = case
    reports = [report_of(body, seed=seed) for seed in range(4)]
    found = [finding for report in reports for finding in report.findings if finding.check == check]
    assert any(said in finding.message for finding in found), [list(r.lines()) for r in reports]


def test_blocks_race_for_a_tensor_unless_they_use_atomics() -> None:
    same = "mov.b32 %r1, 7; st.global.b32 [%d20], %r1;"
    assert report_of(same, threads=32, blocks=2).checks() == set()
    own = "mov.u32 %r1, %ctaid.x; st.global.b32 [%d20], %r1;"
    assert report_of(own, threads=32, blocks=2).checks() == {"racecheck"}
    assert report_of("red.global.add.u32 [%d20], %r60;", threads=32, blocks=2).checks() == set()
    read_by_all = "ld.global.b32 %r1, [%d20]; mov.u32 %r2, %ctaid.x; setp.eq.u32 %p1, %r2, 1; "
    assert report_of(read_by_all, threads=32, blocks=2).checks() == set()
    last_writes = read_by_all + "@%p1 st.global.b32 [%d20], 7;"
    assert report_of(last_writes, threads=32, blocks=2).checks() == {"racecheck"}


SILENT = {
    "a barrier between": "st.shared.b32 [%r62], %r60; bar.sync 0; xor.b32 %r5, %r60, 32; shl.b32 %r5, %r5, 2; add.s32 %r5, %r5, %r61; ld.shared.b32 %r6, [%r5];",
    "a barrier by its other name": "st.shared.b32 [%r62], %r60; barrier.sync 1; xor.b32 %r5, %r60, 32; shl.b32 %r5, %r5, 2; add.s32 %r5, %r5, %r61; ld.shared.b32 %r6, [%r5];",
    "lanes that come to a barrier one after another": "mov.u32 %r1, %laneid; setp.ge.u32 %p1, %r1, 16; @%p1 bra OUT; IN: bar.sync 0; bra E; OUT: mov.b32 %r2, 0; bra IN; E:",
    "the same value by all": "st.shared.b32 [%r61], 7;",
    "each lane its own place": "st.shared.b32 [%r62], %r60; ld.shared.b32 %r1, [%r62]; st.global.b32 [%d21], %r1;",
    "arrive and sync": "setp.ge.u32 %p1, %r60, 32; @%p1 bra C; st.shared.b32 [%r62], 1; bar.arrive 1, 64; bra E; C: bar.sync 1, 64; ld.shared.b32 %r1, [%r62+-128]; E:",
    "an mbarrier between": "setp.eq.u32 %p1, %r60, 0; @%p1 mbarrier.init.shared::cta.b64 [%r61], 32; bar.sync 0; setp.ge.u32 %p2, %r60, 32; @%p2 bra C; st.shared.b32 [%r62+128], 1; mbarrier.arrive.shared::cta.b64 _, [%r61]; bra E; C: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r61], 0; @!%p3 bra C; ld.shared.b32 %r1, [%r62]; E:",
    "bytes expected and complete": "setp.eq.u32 %p1, %r60, 0; @%p1 mbarrier.init.shared::cta.b64 [%r61], 1; bar.sync 0; @%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r61], 16; @%p1 mbarrier.arrive.shared::cta.b64 _, [%r61]; @%p1 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r61], 16; W: mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r61], 0; @!%p2 bra W;",
    "an mbarrier that is made anew": "setp.eq.u32 %p1, %r60, 0; @%p1 mbarrier.init.shared::cta.b64 [%r61], 1; @%p1 mbarrier.inval.shared::cta.b64 [%r61]; @%p1 mbarrier.init.shared::cta.b64 [%r61], 1;",
    "two phases awaited": "setp.eq.u32 %p1, %r60, 0; @%p1 mbarrier.init.shared::cta.b64 [%r61], 64; bar.sync 0; mbarrier.arrive.shared::cta.b64 _, [%r61]; W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r61], 0; @!%p2 bra W; mbarrier.arrive.shared::cta.b64 _, [%r61]; V: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r61], 1; @!%p2 bra V;",
    "an mbarrier between, awaited by its state": "setp.eq.u32 %p1, %r60, 0; @%p1 mbarrier.init.shared::cta.b64 [%r61], 64; bar.sync 0; st.shared.b32 [%r62+128], 1; mbarrier.arrive.shared::cta.b64 %d1, [%r61]; W: mbarrier.try_wait.shared::cta.b64 %p3, [%r61], %d1; @!%p3 bra W; xor.b32 %r5, %r60, 32; shl.b32 %r5, %r5, 2; add.s32 %r5, %r5, %r61; ld.shared.b32 %r6, [%r5+128];",
    "copies that arrive": "setp.eq.u32 %p1, %r60, 0; @%p1 mbarrier.init.shared::cta.b64 [%r61], 64; bar.sync 0; cp.async.ca.shared.global [%r62+128], [%d21], 4; cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r61]; W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r61], 0; @!%p2 bra W; xor.b32 %r5, %r62, 128; ld.shared.b32 %r1, [%r5+128];",
}  # fmt: skip


@pytest.mark.parametrize("body", SILENT.values(), ids=SILENT)
def test_right_programs_have_no_finding(body: str) -> None:
    for seed in range(4):
        assert list(report_of(body, seed=seed).lines()) == []


def test_a_finding_names_the_line_of_the_source() -> None:
    body = '.file 1 "/somewhere/mine.py"\n'
    text = kernel(".loc 1 17 4\nld.shared.b32 %r1, [smem];", 0) + body
    _, report = run(text, [])
    (finding,) = report.findings
    assert str(finding.instruction.source) == "mine.py:17"
    assert str(finding).startswith("initcheck: mine.py:17: it reads byte 0 of shared memory")


def test_checks_can_be_left_out() -> None:
    text = kernel("ld.shared.b32 %r1, [smem];", 0)
    assert run(text, [], checks=("memcheck",))[1].findings == []


REGISTERS = [
    ("setmaxnreg.inc.sync.aligned.u32 240;", "deadlock: warp 0 waits for"),
    ("setmaxnreg.dec.sync.aligned.u32 168;", "lowers the registers from 128 to 168"),
    ("setmaxnreg.inc.sync.aligned.u32 96;", "raises the registers from 128 to 96"),
]


@pytest.mark.parametrize(("body", "said"), REGISTERS)
def test_registers_are_handed_over_within_the_pool(body: str, said: str) -> None:
    (finding,) = report_of(body, extra=".maxnreg 128\n").findings
    assert finding.check == "synccheck"
    assert said in finding.message


def test_a_pool_of_registers_is_shared_by_the_warps() -> None:
    body = """setp.ge.u32 %p1, %r60, 32; @%p1 bra TAKE; setmaxnreg.dec.sync.aligned.u32 64; bra END;
    TAKE: setmaxnreg.inc.sync.aligned.u32 192; END:"""
    assert report_of(body, extra=".maxnreg 128\n").findings == []


# Copies

CP_ASYNC = """setp.lt.u32 %p1, %r60, 32; @!%p1 bra END; shl.b32 %r1, %r60, 3;
cp.async.ca.shared.global [%r62], [%d21], 4, {size}; cp.async.commit_group; {wait}
ld.shared.b32 %r2, [%r62]; st.global.b32 [%d21+128], %r2; END:"""


def test_cp_async_is_there_after_its_wait() -> None:
    body = CP_ASYNC.format(size="4", wait="cp.async.wait_group 0;")
    start = np.arange(64, dtype=np.float32)
    for seed in range(4):
        (left,), report = run(
            kernel(THREAD + GLOBAL + body, 1, 64), [start], seed=seed, shared=1024
        )
        assert list(report.lines()) == []
        np.testing.assert_array_equal(left, np.tile(start[:32], 2))


def test_cp_async_fills_up_with_zeros() -> None:
    body = "mov.b32 %r9, 0;" + CP_ASYNC.format(size="%r9", wait="cp.async.wait_all;")
    (left,), _ = run(kernel(THREAD + GLOBAL + body, 1, 64), [np.ones(64, np.float32)], shared=1024)
    np.testing.assert_array_equal(left[32:], 0)


def test_cp_async_copies_16_bytes_a_lane() -> None:
    body = """setp.ge.u32 %p1, %r60, 16; @%p1 bra END; mad.lo.s32 %r2, %r60, 16, %r61; mad.wide.u32 %d22, %r60, 16, %d20;
    cp.async.cg.shared.global [%r2], [%d22], 16; cp.async.commit_group; cp.async.wait_group 0;
    ld.shared.v4.b32 {%r3, %r4, %r5, %r6}, [%r2]; st.global.v4.b32 [%d22], {%r6, %r5, %r4, %r3}; END:"""
    start = np.arange(64, dtype=np.float32)
    for seed in range(3):
        text = kernel(THREAD + GLOBAL + body, 1, 64)
        (left,), report = run(text, [start], seed=seed, shared=1024)
        assert list(report.lines()) == []
        np.testing.assert_array_equal(left.reshape(16, 4), start.reshape(16, 4)[:, ::-1])


def test_cp_async_without_a_wait_is_a_race() -> None:
    body = CP_ASYNC.format(size="4", wait="cp.async.wait_group 1;")
    assert report_of(body).checks() == {"racecheck"}


BOX = """setp.eq.u32 %p1, %r60, 0; @%p1 mbarrier.init.shared::cta.b64 [%r61+1024], 1; bar.sync 0;
mov.b64 %d1, p0; cvta.param.u64 %d1, %d1; mov.b32 %r1, {x}; mov.b32 %r2, {y};
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r61+1024], {bytes};
@%p1 cp.async.bulk.tensor.{dims}d.shared::cta.global.mbarrier::complete_tx::bytes [%r61], [%d1, {{%r1, %r2{more}}}], [%r61+1024];
{wait}
mad.lo.s32 %r3, %r60, 8, %r61; ld.shared.b64 %d2, [%r3]; ld.param.u64 %d20, [p1]; mad.wide.u32 %d21, %r60, 8, %d20;
st.global.b64 [%d21], %d2; {store}"""
WAIT = "W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r61+1024], 0; @!%p2 bra W;"


def loaded(
    x: int = 0, y: int = 0, expected: int = 512, wait: str = WAIT, store: str = "", swizzle: int = 0,
    seed: int = 0, dims: int = 2, fill: int = 0, at: int = 0,
) -> tuple[np.ndarray, Report, np.ndarray]:  # type: ignore[type-arg]  # fmt: skip
    """A box of 8 rows of 32 float16 out of (20, 64), loaded by the TMA unit and copied out."""
    source = np.arange(20 * 64, dtype=np.float16).reshape(20, 64)
    text = kernel(THREAD + BOX.format(x=x, y=y, bytes=expected, wait=wait, store=store, dims=dims, more=", 0" * (dims - 2)), 2, 64)  # fmt: skip
    text = text.replace("::bytes [%r61]", f"::bytes [%r61+{at}]")
    made = TensorMap(
        address=0x10000, shape=(1,) * (dims - 2) + (20, 64), strides=(1280,) * (dims - 2) + (64, 1),
        box=(1,) * (dims - 2) + (8, 32), size=2, swizzle=swizzle, fill=fill,
    )  # fmt: skip
    (left, out), report = run(
        text, [source, np.zeros((8, 32), np.float16)], shared=2048, seed=seed, maps={0: made}
    )
    return out, report, left


@pytest.mark.parametrize("dims", [2, 4])
@pytest.mark.parametrize(("x", "y"), [(0, 0), (32, 5), (48, 16), (-8, -2)])
def test_a_box_is_loaded_with_zeros_outside(x: int, y: int, dims: int) -> None:
    out, report, source = loaded(x, y, dims=dims)
    padded = np.pad(source, 40)
    np.testing.assert_array_equal(out, padded[40 + y : 48 + y, 40 + x : 72 + x])
    assert list(report.lines()) == []


def test_a_box_is_filled_outside_of_its_tensor() -> None:
    out, _, source = loaded(48, 16, fill=0x7FFF)
    padded = np.pad(source, 40, constant_values=np.uint16(0x7FFF).view(np.float16))
    np.testing.assert_array_equal(out.view(np.uint16), padded[56:64, 88:120].view(np.uint16))


def test_a_swizzled_box_has_its_16_bytes_exchanged() -> None:
    out, _, source = loaded(swizzle=64)
    rows = source[:8, :32].reshape(8, 4, 8)
    expected = np.stack([rows[r][np.arange(4) ^ (r // 2 & 3)] for r in range(8)])
    np.testing.assert_array_equal(out.reshape(8, 4, 8), expected)


def test_a_box_that_is_read_too_early_is_a_race() -> None:
    for seed in range(3):
        assert "racecheck" in loaded(wait="", seed=seed)[1].checks()


def test_a_block_that_made_way_goes_on_when_its_copy_lands() -> None:
    """It reads the same again and again, as a producer reads its pages, and makes way for other
    blocks; then all of its warps wait for the copy.
    """
    reads = """ld.param.u64 %d3, [p1]; mov.b32 %r8, 0; L: ld.volatile.global.b32 %r9, [%d3];
    add.s32 %r8, %r8, 1; setp.lt.u32 %p3, %r8, 40; @%p3 bra L; """
    for seed in range(9):
        out, report, source = loaded(wait=reads + WAIT, seed=seed)
        np.testing.assert_array_equal(out, source[:8, :32])
        assert list(report.lines()) == []
        (finding,) = loaded(wait=reads + WAIT, expected=1024, seed=seed)[1].findings
        assert "deadlock: warp" in finding.message


@pytest.mark.parametrize("expected", [256, 1024])
def test_a_wrong_count_of_bytes_is_found(expected: int) -> None:
    found = [loaded(expected=expected, seed=seed)[1].checks() for seed in range(3)]
    assert any(found)


STORE = """bar.sync 0; add.s32 %r4, %r3, 512; st.shared.b64 [%r4], %d2; {fence} bar.sync 0;
add.s32 %r5, %r61, 512; mov.b32 %r6, 12;
@%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d1, {{%r1, %r6}}], [%r5];
cp.async.bulk.commit_group; {wait}"""
FENCE, DONE = "fence.proxy.async.shared::cta;", "cp.async.bulk.wait_group 0;"


@pytest.mark.parametrize("read", ["", ".read"])
def test_a_box_is_stored(read: str) -> None:
    for seed in range(3):
        done = DONE.replace("_group", f"_group{read}")
        _, report, left = loaded(store=STORE.format(fence=FENCE, wait=done), seed=seed)
        np.testing.assert_array_equal(left[12:20, :32], np.arange(20 * 64).reshape(20, 64)[:8, :32])
        assert list(report.lines()) == []


def test_a_store_without_a_fence_between_the_proxies_is_a_race() -> None:
    report = loaded(store=STORE.format(fence="", wait=DONE))[1]
    assert report.checks() == {"racecheck"}
    assert "through cp.async.bulk" in report.findings[0].message


def test_a_block_that_ends_before_its_store_is_found() -> None:
    assert loaded(store=STORE.format(fence=FENCE, wait=""))[1].checks() == {"synccheck"}


@pytest.mark.parametrize(
    ("at", "said"), [(64, "byte 64 is not aligned to 128"), (1664, "of which the block has 2048")]
)
def test_a_box_lies_in_shared_memory_and_is_aligned(at: int, said: str) -> None:
    (finding,) = loaded(at=at)[1].findings
    assert (finding.check, said in finding.message) == ("memcheck", True)


def encoded(**fields: Any) -> bytes:
    """A tensor map that a program makes: a box of (8, 16) float16 of (32, 64)."""
    made = np.zeros(1, ENCODED)
    for name, value in (
        {"rank": 1, "elemtype": 6, "global_dim": (64, 32, 0, 0, 0), "box_dim": (16, 8, 0, 0, 0)}
        | {"global_stride": (128, 0, 0, 0), "element_stride": (1, 1, 0, 0, 0)}
        | fields
    ).items():
        made[name] = value
    return made.tobytes()


def test_a_tensor_map_that_a_program_makes() -> None:
    found = decoded(encoded(global_address=4096))
    assert (found.address, found.shape, found.strides) == (4096, (32, 64), (64, 1))
    assert (found.box, found.size, found.fill) == ((8, 16), 2, 0)
    assert decoded(encoded(fill_mode=1)).fill == 0x7FFF


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"global_stride": (120, 0, 0, 0)}, "not aligned to 16 bytes"),
        ({"global_address": 8}, "not aligned to 16 bytes"),
        ({"box_dim": (512, 8, 0, 0, 0)}, "with a box of"),
        ({"box_dim": (0, 8, 0, 0, 0)}, "with a box of"),
        ({"element_stride": (2, 1, 0, 0, 0)}, "skips or interleaves"),
        ({"interleave_layout": 1}, "skips or interleaves"),
        ({"rank": 5}, "of 6 dimensions"),
        ({"swizzle_mode": 4}, "a tensor map of 2 dimensions"),
    ],
)
def test_a_tensor_map_that_the_unit_does_not_take(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        decoded(encoded(**fields))
