"""tcgen05 and tensor memory of sm_100, against matrices and the rules of the PTX ISA."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from flashgen.ptx.findings import Report
from flashgen.ptx.instructions.tensor_product import shape_of
from tests.blackwell import attention
from tests.ptx_snippets import KINDS, RNG, Array, drawn, kernel, run, values

ALLOC = "@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r61], 128;"
FREE = "@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r64, 128;"
START = """mov.u32 %r60, %tid.x; mov.u32 %r61, smem; setp.lt.u32 %p1, %r60, 32; setp.eq.u32 %p2, %r60, 0;
{alloc} @%p2 mbarrier.init.shared::cta.b64 [%r61+8], 1; bar.sync 0;
ld.shared.b32 %r64, [%r61]; shl.b32 %r63, %r60, 16; and.b32 %r63, %r63, 0x600000; add.s32 %r65, %r64, %r63;
"""
WAIT = "W: mbarrier.try_wait.parity.shared::cta.b64 %p9, [%r61+8], 0; @!%p9 bra W;"
COMMIT = "@%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r61+8];"
WAIT_LD, WAIT_ST = "tcgen05.wait::ld.sync.aligned;", "tcgen05.wait::st.sync.aligned;"
REGISTERS = ".reg .b32 %q<128>;"


def group(count: int, first: int = 0) -> str:
    return "{" + ",".join(f"%q{first + n}" for n in range(count)) + "}"


def ld(address: str, count: int, shape: str = "32x32b", split: str = "") -> str:
    return f"tcgen05.ld.sync.aligned.{shape}.b32 {group(count)}, [{address}]{split};"


def st(address: str, count: int, shape: str = "32x32b", split: str = "") -> str:
    return f"tcgen05.st.sync.aligned.{shape}.b32 [{address}]{split}, {group(count)};"


def from_global(count: int, parameter: str = "p0") -> str:
    """%q0, ...: `count` words of each thread's row of a parameter."""
    loads = "".join(f"ld.global.b32 %q{n}, [%d1+{4 * n}];" for n in range(count))
    return f"ld.param.u64 %d1, [{parameter}]; mad.wide.u32 %d1, %r60, {4 * count}, %d1; {loads}"


def to_global(count: int, parameter: str) -> str:
    stores = "".join(f"st.global.b32 [%d2+{4 * n}], %q{n};" for n in range(count))
    return f"ld.param.u64 %d2, [{parameter}]; mad.wide.u32 %d2, %r60, {4 * count}, %d2; {stores}"


def to_shared(words: int) -> str:
    """The words of p0 to byte 1024 of shared memory and on, seen by the tensor cores."""
    copies = "".join(
        f"ld.global.b32 %r1, [%d0+{512 * n}]; st.shared.b32 [%r2+{1024 + 512 * n}], %r1;"
        for n in range(words // 128)
    )
    return (
        "ld.param.u64 %d0, [p0]; mad.wide.u32 %d0, %r60, 4, %d0; mad.lo.s32 %r2, %r60, 4, %r61;"
        f"{copies} fence.proxy.async.shared::cta; bar.sync 0;"
    )


def text(body: str, parameters: int, *, alloc: str = ALLOC, free: str = f"bar.sync 0; {FREE}") -> str:  # fmt: skip
    return kernel(START.format(alloc=alloc) + body + free, parameters, 128, REGISTERS)


# Moves

DEFINED: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "32x32b.x8": lambda r, t: (t, r),
    "16x64b.x4": lambda r, t: (t // 4 + 8 * (t % 2), t // 2 % 2 + 2 * r),
    "16x128b.x4": lambda r, t: (t // 4 + 8 * (r % 2), t % 4 + r // 2 * 4),
    "16x256b.x2": lambda r, t: (t // 4 + r // 2 % 2 * 8, t % 4 * 2 + r % 2 + r // 4 * 8),
    "16x32bx2.x8": lambda r, t: (t % 16, r + t // 16 * 24),
}
"""Lane and column of a register and thread (PTX ISA 9.7.16.2.3.1)."""


@pytest.mark.parametrize("shape", DEFINED)
def test_registers_are_lanes_and_columns(shape: str) -> None:
    count = 4 if shape == "16x64b.x4" else 8
    split = ", 24" if "x2." in shape else ""
    source = np.arange(128 * 32, dtype=np.uint32).reshape(128, 32)
    body = (
        f"{from_global(32)} {st('%r65', 32, '32x32b.x32')} {WAIT_ST}"
        f"{ld('%r65', count, shape, split)} {WAIT_LD} {to_global(count, 'p1')}"
        f"{st('%r65+64', count, shape, split)} {WAIT_ST} {ld('%r65+64', 32, '32x32b.x32')} {WAIT_LD}"
        f"{to_global(32, 'p2')}"
    )
    whole = f"{from_global(32)} {st('%r65+64', 32, '32x32b.x32')} {WAIT_ST}" + body
    for seed in range(2):
        (_, found, back), report = run(
            text(whole, 3), [source, np.zeros((128, count), np.uint32), source * 0], seed=seed
        )
        assert list(report.lines()) == []
        np.testing.assert_array_equal(back, source)
        for thread in (0, 5, 17, 31, 40, 127):
            at = [DEFINED[shape](r, thread % 32) for r in range(count)]
            expected = [source[thread // 32 * 32 + lane, column] for lane, column in at]
            np.testing.assert_array_equal(found[thread], expected)


@pytest.mark.parametrize(
    ("shape", "split", "columns"),
    [("32x32b.x16", "", 16), ("32x32b.x128", "", 128), ("16x32bx2.x16", ", 16", 32), ("16x32bx2.x64", ", 64", 128)],
)  # fmt: skip
def test_what_is_stored_is_loaded(shape: str, split: str, columns: int) -> None:
    count = int(shape.split("x")[-1])
    source = np.arange(128 * count, dtype=np.uint32).reshape(128, count)
    body = (
        f"{from_global(count)} {st('%r65', count, shape, split)} {WAIT_ST}"
        f"{ld('%r65', count, shape, split)} {WAIT_LD} {to_global(count, 'p1')}"
    )
    (_, found), report = run(text(body, 2), [source, source * 0])
    assert list(report.lines()) == []
    np.testing.assert_array_equal(found, source)
    body += ld(f"%r65+{columns}", 1, "32x32b.x1") + WAIT_LD
    _, report = run(text(body, 2), [source, source * 0])
    assert report.checks() == ({"memcheck"} if columns == 128 else set())


COPIES = {
    "128x256b": lambda lane: lane,
    "128x128b": lambda lane: lane,
    "64x128b.warpx2::02_13": lambda lane: lane % 64,
    "64x128b.warpx2::01_23": lambda lane: lane // 64 * 32 + lane % 32,
    "32x128b.warpx4": lambda lane: lane % 32,
    "4x256b": lambda lane: lane // 32,
}


@pytest.mark.parametrize("shape", COPIES)
def test_shared_memory_is_copied_to_lanes(shape: str) -> None:
    words = 8 if "256b" in shape else 4
    source = RNG.integers(0, 2**32, (128, 8), dtype=np.uint32)
    core = source.reshape(16, 8, 2, 4).transpose(0, 2, 1, 3)  # 8 rows of 16 bytes lie together
    high = (128 >> 4) << 16 | (256 >> 4) << 32 | 1 << 46
    body = f"""{to_shared(1024)} add.s32 %r3, %r61, 1024; shr.u32 %r3, %r3, 4; cvt.u64.u32 %d3, %r3;
    or.b64 %d3, %d3, {high}; @%p2 tcgen05.cp.cta_group::1.{shape} [%r64+32], %d3; {COMMIT} {WAIT}
    {ld("%r65+32", words, f"32x32b.x{words}")} {WAIT_LD} {to_global(words, "p1")}"""
    (_, found), report = run(
        text(body, 2), [np.ascontiguousarray(core), np.zeros((128, words), np.uint32)], shared=8192
    )
    assert list(report.lines()) == []
    for lane in (0, 32, 64, 96) if shape == "4x256b" else (0, 7, 33, 64, 70, 101, 127):
        np.testing.assert_array_equal(found[lane], source[COPIES[shape](lane), :words])


# Products

N = 64
LAYOUTS = {"none": 0, "swizzle 32": 6, "swizzle 128 along M": 2, "none along M": 0}


def placed(matrix: Array, layout: str) -> tuple[Array, int]:
    """A matrix of 32 bytes a row as shared memory holds it, and the upper bits of its descriptor."""
    size, (rows, k_count) = matrix.itemsize, matrix.shape
    r, k = np.arange(rows)[:, None], np.arange(k_count)[None, :]
    if layout == "none":  # 8 rows of 16 bytes are a core matrix; two of them along K
        at, leading, stride = (
            r // 8 * 256 + k * size // 16 * 128 + r % 8 * 16 + k * size % 16,
            128,
            256,
        )
    elif layout == "swizzle 32":
        at, leading, stride = r * 32 + k * size, 0, 256
        at = at ^ (at >> 7 & 1) << 4
    elif layout == "none along M":
        per = 16 // size
        at, leading, stride = r // per * 256 + k // 8 * 128 + k % 8 * 16 + r % per * size, 128, 256
    else:
        per, stride = 128 // size, 1024
        leading = k_count // 8 * stride
        at = r // per * leading + k // 8 * stride + k % 8 * 128 + r % per * size
        at = at ^ (at >> 7 & 7) << 4
    content = np.zeros(matrix.size, matrix.dtype)
    content[at // size] = matrix
    return content, leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | LAYOUTS[layout] << 61


def described(kind: str, m: int, *, along_m: bool = False, negated: bool = False) -> int:
    element = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "s8": 1}[kind]
    of_d = 2 if kind == "s8" else 1
    return of_d << 4 | element * 0x480 | negated << 13 | along_m * 0x18000 | N >> 3 << 17 | m >> 4 << 24  # fmt: skip


def product(
    kind: str, layout: str = "none", *, m: int = 128, a_in_memory: bool = False, adds: int = 0,
    negated: bool = False, rest: str = "", commit: str = COMMIT + WAIT, seed: int = 0, before: str = "",
    after: str = "", free: str = f"bar.sync 0; {FREE}", high_bits: int = 0,
) -> tuple[Array, Array, Report]:  # fmt: skip
    """A product of 128 by 64 by 32 bytes; the accumulator holds ones if it adds. The result, A B and
    the report.
    """
    a, b = drawn(kind, (m, KINDS[kind][1])), drawn(kind, (N, KINDS[kind][1]))
    (of_a, high), (of_b, high_b) = placed(a, layout), placed(b, layout)
    content = np.concatenate([of_a, of_b]).view(np.uint32)
    named = {"s8": "i8", "e4m3": "f8f6f4", "tf32": "tf32"}.get(kind, "f16")
    shape, split = ("32x32b.x64", "") if m == 128 else ("16x32bx2.x32", ", 32")
    count = 64 if m == 128 else 32
    one = "1" if kind == "s8" else "0f3F800000"
    operand, load_a = "%d3", ""
    if a_in_memory:
        operand = "[%r64+96]"
        load_a = f"{from_global(8)} {st('%r65+96', 8, '32x32b.x8')} {WAIT_ST} bar.sync 0;"
        content = np.concatenate([a.reshape(-1), of_b]).view(np.uint32)
    high |= high_bits
    body = f"""{to_shared(len(content))} {load_a}
    {"".join(f"mov.b32 %q{n}, {one};" for n in range(count))} {st("%r65", count, shape, split)} {WAIT_ST} bar.sync 0;
    add.s32 %r3, %r61, 1024; shr.u32 %r3, %r3, 4; cvt.u64.u32 %d3, %r3; or.b64 %d3, %d3, {high};
    add.s32 %r4, %r61, {1024 + 32 * m}; shr.u32 %r4, %r4, 4; cvt.u64.u32 %d4, %r4; or.b64 %d4, %d4, {high_b};
    mov.b32 %r5, {described(kind, m, along_m="along" in layout, negated=negated)}; setp.ne.u32 %p3, {adds}, 0;
    {before} @%p2 tcgen05.mma.cta_group::1.kind::{named} [%r64], {operand}, %d4, %r5, {rest.format("%p3")};
    {commit} {ld("%r65", count, shape, split)} {WAIT_LD} {to_global(count, "p1")} {after}"""
    (_, out), report = run(
        text(body, 2, free=free), [content, np.zeros((128, count), np.int32 if kind == "s8" else np.float32)],
        shared=8192, seed=seed,
    )  # fmt: skip
    if m == 64:  # 16 threads a warp have rows, the others the second half of their columns
        out = out.reshape(4, 2, 16, 32).transpose(0, 2, 1, 3).reshape(64, 64)
    return out, values(kind, a) @ values(kind, b).T, report


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_a_product_reads_shared_memory(kind: str, layout: str) -> None:
    for seed in range(2):
        found, expected, report = product(kind, layout, rest="{}", seed=seed)
        assert list(report.lines()) == []
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", ["tf32", "e4m3", "s8"])
def test_a_product_of_other_types(kind: str) -> None:
    found, expected, report = product(kind, "swizzle 32", rest="{}", adds=1)
    assert list(report.lines()) == []
    np.testing.assert_array_equal(found, expected + 1)


@pytest.mark.parametrize("m", [64, 128])
def test_a_product_adds_to_its_accumulator(m: int) -> None:
    found, expected, report = product("bf16", m=m, rest="{}", adds=1)
    assert list(report.lines()) == []
    np.testing.assert_array_equal(found, expected + 1)


def test_a_is_read_from_tensor_memory() -> None:
    found, expected, report = product("bf16", a_in_memory=True, rest="{}")
    assert list(report.lines()) == []
    np.testing.assert_array_equal(found, expected)


def test_a_product_is_negated_and_its_accumulator_scaled() -> None:
    found, expected, _ = product("f16", negated=True, adds=1, rest="{}, 3")
    np.testing.assert_array_equal(found, 0.125 - expected)


def test_lanes_can_be_left_out() -> None:
    found, expected, _ = product("f16", rest="{{0, 1, -1, 0}}, {}")
    left = np.isin(np.arange(128) // 32, 2) | (np.arange(128) == 32)
    np.testing.assert_array_equal(found, np.where(left[:, None], 1, expected))


# Checks

IDLE = {"rest": "{}"}
WRONG = {
    "no wait for the product": ("racecheck", {"commit": COMMIT}, "tcgen05 of warp 0 wrote"),
    "no proxy fence": ("racecheck", {"before": "st.shared.b32 [%r2+1024], %r1; bar.sync 0;"}, "through tcgen05"),
    "columns nobody wrote": ("initcheck", {"rest": "1", "before": "add.s32 %r64, %r64, 64;"}, "nobody has written"),
    "a store that nobody waits for": ("racecheck", {"before": st("%r65+1", 1, "32x32b.x1") + "bar.sync 0;", "rest": "1"}, "tcgen05.st of warp"),
    "an accumulator beyond the columns": ("memcheck", {"before": "add.s32 %r64, %r64, 96;"}, "the block holds"),
    "a lane that no matrix begins in": ("memcheck", {"before": "add.s32 %r64, %r64, 0x100000;"}, "cannot begin in lane 16"),
    "a swizzle that is none": ("memcheck", {"high_bits": 7 << 61}, "swizzling mode is 7"),
    "a descriptor of another GPU": ("memcheck", {"before": "mov.b64 %d4, 64;"}, "bits 46 to 48"),
    "a matrix beyond shared memory": ("memcheck", {"before": "add.s64 %d4, %d4, 400;"}, "of which the block has 8192"),
    "three quarters of a row": ("memcheck", {"before": "add.s32 %r5, %r5, 0x20000;"}, "a product of 128 by 72"),
    "an element type of no kind": ("memcheck", {"before": "or.b32 %r5, %r5, 0x380;"}, "an element type"),
    "a product by every lane": ("synccheck", {"before": "setp.lt.u32 %p2, %r60, 32;"}, "32 threads do"),
    "columns given back under a product": ("racecheck", {"commit": "", "after": f"bar.sync 0; {FREE}", "free": ""}, "gives back"),
    "columns that are kept": ("synccheck", {"free": ""}, "are not given back"),
    "other columns given back": ("memcheck", {"free": "@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r64, 64;"}, "gives back 64"),
    "another warp's lanes": ("memcheck", {"after": ld("%r64", 1, "32x32b.x1")}, "a warp of this number"),
    "columns after the permit": ("synccheck", {"after": "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r61+16], 32;"}, "after relinquish"),
    "columns that nobody has": ("synccheck", {"after": "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r61+16], 512;"}, "waits for 512 columns"),
    "33 columns": ("memcheck", {"after": "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r61+16], 33;"}, "got 33"),
    "a product that nobody awaits": ("synccheck", {"commit": "", "free": ""}, "under way at the end"),
    "a load that overwrites nothing": ("racecheck", {"after": ld("%r65", 1, "32x32b.x1") + st("%r65", 1, "32x32b.x1") + WAIT_ST}, "tcgen05.ld of warp"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_check_finds(name: str) -> None:
    check, options, said = WRONG[name]
    reports = [product("f16", **{**IDLE, **options}, seed=seed)[2] for seed in range(5)]  # type: ignore[arg-type]
    found = [each for report in reports for each in report.findings if each.check == check]
    assert any(said in each.message for each in found), [list(r.lines()) for r in reports]


RELAXED = """setp.lt.u32 %p4, %r60, 128; {store} {wait} {before}
mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [%r61+24];
V: mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 %p8, [%r61+24], 0; @!%p8 bra V; {after}
@%p2 tcgen05.cp.cta_group::1.128x128b [%r64], %d3; """
BEFORE, AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"


@pytest.mark.parametrize(
    ("before", "after", "finds"), [(BEFORE, AFTER, False), ("", AFTER, True), (BEFORE, "", True)]
)
def test_relaxed_waits_need_fences_of_tensor_memory(before: str, after: str, finds: bool) -> None:
    high = (128 >> 4) << 16 | (256 >> 4) << 32 | 1 << 46
    store = st("%r65", 4, "32x32b.x4")
    body = f"""{from_global(4)} {to_shared(1024)} @%p2 mbarrier.init.shared::cta.b64 [%r61+24], 128; bar.sync 0;
    add.s32 %r3, %r61, 1024; shr.u32 %r3, %r3, 4; cvt.u64.u32 %d3, %r3; or.b64 %d3, %d3, {high};
    {RELAXED.format(store=store, wait=WAIT_ST, before=before, after=after)} {COMMIT} {WAIT}"""
    _, report = run(text(body, 1), [np.zeros((128, 8), np.uint32)], shared=8192)
    assert report.checks() == ({"racecheck"} if finds else set()), list(report.lines())


def test_products_of_two_warps_are_ordered_by_a_fence() -> None:
    """PTX ISA 9.7.16.6.4.3: the first need not be complete."""
    second = """setp.eq.u32 %p2, %r60, 32;
    @%p2 tcgen05.mma.cta_group::1.kind::f16 [%r64], %d3, %d4, %r5, 1; """
    for fence, expected in ((BEFORE, set()), ("", {"racecheck"})):
        commit = f"{fence} bar.sync 0; {second} {COMMIT} {WAIT}"
        found, whole, report = product("f16", rest="{}", commit=commit)
        assert report.checks() == expected, list(report.lines())
        if fence:
            np.testing.assert_array_equal(found, 2 * whole)


@pytest.mark.parametrize("bits", [1 << 2, 1 << 3, 1 << 6, 1 << 31, 3 << 4])
def test_a_descriptor_of_what_is_not_modelled_is_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=r"sparsity|accumulator"):
        shape_of("kind::f16", described("f16", 128) | bits)


@pytest.mark.slow("2.6 s; schedule blackwell is executed in make test")
def test_a_schedule_by_hand_is_right() -> None:
    for seed in range(3):
        found, expected = attention(seed=seed)
        torch.testing.assert_close(found, expected, rtol=5e-3, atol=5e-3)
