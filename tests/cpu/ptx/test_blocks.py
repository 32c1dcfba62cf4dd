"""Order between blocks: locks, flags, chains and grid barriers; which of them are right, and end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from flashgen import ptx
from flashgen.ptx.findings import Report
from tests.ptx_snippets import kernel, run


@triton.jit
def locked_sum(sums, lock, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    """The sum of all programs under a spin lock, as in Triton's tutorial of layer norm."""
    at = tl.arange(0, BLOCK)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(sums + at, tl.load(sums + at) + 1)
    if BARRIER:
        tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@pytest.mark.parametrize("barrier", [True, False])
def test_a_lock_is_right_only_with_a_barrier_before_it_is_released(barrier: bool) -> None:
    sums, lock = torch.zeros(512), torch.zeros(1, dtype=torch.int32)
    report = ptx.run(locked_sum, (5,), sums, lock, BLOCK=512, BARRIER=barrier, num_warps=4)
    assert sums.eq(5).all()
    assert report.checks() == (set() if barrier else {"racecheck"})


@triton.jit
def chained_scan(x, sums, flags, SEM: tl.constexpr):
    """Each program adds its value to the sum of the one before it, for which it waits."""
    block = tl.program_id(0)
    total = tl.load(x + block)
    if block > 0:
        while tl.atomic_add(flags + block - 1, 0, sem=SEM) == 0:
            pass
        total += tl.load(sums + block - 1)
    tl.store(sums + block, total)
    tl.debug_barrier()
    tl.atomic_xchg(flags + block, 1, sem=SEM)


@pytest.mark.parametrize(("sem", "checks"), [("acq_rel", set()), ("relaxed", {"racecheck"})])
def test_a_chain_of_blocks_ends(sem: str, checks: set[str]) -> None:
    x, flags = torch.arange(20.0), torch.zeros(20, dtype=torch.int32)
    for seed in range(3):
        sums = torch.zeros(20)
        report = ptx.run(chained_scan, (20,), x, sums, flags.zero_(), SEM=sem, seed=seed)
        torch.testing.assert_close(sums, x.cumsum(0))
        assert report.checks() == checks
        assert report.blocks == 20


@triton.jit
def polled(flag, out, LAST: tl.constexpr, TRIES: tl.constexpr):
    """The last program sets the flag that the others poll, TRIES times at most."""
    tries = 0
    if tl.program_id(0) == LAST:
        tl.atomic_xchg(flag, 1)
    else:
        while (tl.load(flag, volatile=True) == 0) & (tries < TRIES):
            tries += 1
    tl.store(out + tl.program_id(0), tries)


def test_a_block_that_counts_while_it_polls_makes_way() -> None:
    out = torch.zeros(4, dtype=torch.int32)
    for seed in range(3):
        flag = torch.zeros(1, dtype=torch.int32)
        report = ptx.launch(polled, (4,), flag, out, LAST=3, TRIES=10**6, seed=seed)
        assert out.max() < 1000
        assert report.steps < 20000


@triton.jit
def waits_for_nobody(flags):
    while tl.load(flags + tl.program_id(0), volatile=True) == 0:
        pass


def test_blocks_that_wait_for_ever_are_named_with_the_address() -> None:
    report = ptx.run(waits_for_nobody, (2,), torch.zeros(2, dtype=torch.int32))
    (finding,) = report.findings
    assert finding.check == "synccheck"
    for block in range(2):
        assert f"block {block}, warp 0 waits for byte {4 * block} of flags, which has 8 at " in str(
            finding
        )
    assert "test_blocks.py" in finding.message


GRID_BARRIER = """ld.param.u64 %d20, [p0]; ld.param.u64 %d21, [p1]; mov.u32 %r1, %ctaid.x; mov.u32 %r60, %tid.x;
ld.global.b32 %r9, [%d20]; ld.global.b32 %r8, [%d20+4]; ld.global.b32 %r7, [%d20+8];
mad.wide.u32 %d22, %r1, 4, %d20; bar.sync 0; setp.ne.u32 %p1, %r60, 0; @%p1 bra E;
{before} {arrive} W: {poll} setp.ne.u32 %p2, %r3, 3; @%p2 bra W; {after}
E: bar.sync 0; st.global.b32 [%d22], %r1;"""
ARRIVE, POLL = "red.relaxed.gpu.global.add.u32 [%d21], 1;", "ld.relaxed.gpu.global.b32 %r3, [%d21];"
FENCE = "fence.acq_rel.gpu;"


def after_grid_barrier(before: str, arrive: str, poll: str, after: str) -> Report:
    """All blocks read the three words that then each writes one of."""
    body = GRID_BARRIER.format(before=before, arrive=arrive, poll=poll, after=after)
    words, count = np.full(3, 9, np.uint32), np.zeros(1, np.uint32)
    (left, _), report = run(kernel(body, 2, 64), [words, count], grid=(3, 1, 1))
    assert left.tolist() == [0, 1, 2]
    return report


@pytest.mark.parametrize(
    ("parts", "right"),
    [
        ((FENCE, ARRIVE, POLL, FENCE), True),
        (("membar.gl;", ARRIVE, POLL.replace("relaxed.gpu", "volatile"), "membar.gl;"), True),
        (("", ARRIVE.replace("relaxed", "release"), POLL.replace("relaxed", "acquire"), ""), True),
        (("", ARRIVE, POLL, FENCE), False),
        ((FENCE, ARRIVE, POLL, ""), False),
        (("", ARRIVE.replace("relaxed.gpu", "release.cta"), POLL.replace("relaxed", "acquire"), ""), False),
    ],
)  # fmt: skip
def test_a_grid_barrier_orders_blocks_by_fences_or_release_and_acquire(
    parts: tuple[str, str, str, str], right: bool
) -> None:
    assert after_grid_barrier(*parts).checks() == (set() if right else {"racecheck"})


@pytest.mark.parametrize(
    ("second", "checks"),
    [
        ("atom.exch.release.gpu.global.b32 %r4,", set()),
        ("st.release.gpu.global.b32", {"racecheck"}),
    ],
)
def test_a_store_ends_the_releases_that_an_atomic_operation_goes_on_with(
    second: str, checks: set[str]
) -> None:
    """Block 2 acquires what block 1 released, which has only seen that block 0 released."""
    body = f"""ld.param.u64 %d20, [p0]; mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 0; @!%p1 bra W;
    st.global.b32 [%d20], 7; st.release.gpu.global.b32 [%d20+4], 1; bra E;
    W: ld.relaxed.gpu.global.b32 %r3, [%d20+4]; setp.ne.u32 %p2, %r3, %r1; @%p2 bra W;
    setp.eq.u32 %p3, %r1, 2; @!%p3 {second} [%d20+4], 2; @!%p3 bra E;
    ld.acquire.gpu.global.b32 %r3, [%d20+4]; ld.global.b32 %r5, [%d20]; E:"""
    text = kernel(body, 1)
    report = run(text, [np.zeros(2, np.uint32)], grid=(3, 1, 1))[1]
    assert report.checks() == checks, list(report.lines())
