"""Products and the moves of their fragments, against matrices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from flashgen.ptx.fragments import ELEMENTS
from tests.ptx_snippets import KINDS, RNG, Array, drawn, kernel, run, values


def register_rows(matrix: Array) -> Array:
    """(registers, 32 lanes) of 32 bits: PTX ISA 9.7.14.5, A of 16 rows or B transposed of 8."""
    words = np.ascontiguousarray(matrix).view(np.uint32)  # (rows, 32-bit words along k)
    found = []
    for column in range(0, words.shape[1], 4):
        for row in range(0, words.shape[0], 8):
            found.append(words[row : row + 8, column : column + 4].reshape(32))
    return np.stack(found)


def test_tf32_is_cut_off() -> None:
    """10 bits of mantissa are read."""
    given = np.float32([1 + 2.0**-10 + 2.0**-11, -1 - 2.0**-20]).view(np.uint32)
    assert ELEMENTS["tf32"].load(given).tolist() == [1 + 2.0**-10, -1.0]


@pytest.mark.parametrize("kind", KINDS)
def test_mma_multiplies(kind: str) -> None:
    _, k = KINDS[kind]
    a, b = drawn(kind, (16, k)), drawn(kind, (8, k))  # B by columns
    c = RNG.integers(-5, 5, (16, 8)).astype(np.int32 if kind == "s8" else np.float32)
    fragments = np.concatenate([register_rows(a), register_rows(b)])
    of_a, count = len(register_rows(a)), len(fragments)
    of_c = np.stack(
        [c[h : h + 8].reshape(8, 4, 2)[:, :, p].reshape(32) for h in (0, 8) for p in (0, 1)]
    )
    inputs = np.concatenate([fragments, of_c.view(np.uint32)])
    names = [f"%r{n}" for n in range(len(inputs))]
    lines = ["mov.u32 %r60, %tid.x; ld.param.u64 %d0, [p0]; mad.wide.u32 %d0, %r60, 4, %d0;"]
    lines += [f"ld.global.b32 {name}, [%d0+{128 * n}];" for n, name in enumerate(names)]
    total = "s32" if kind == "s8" else "f32"
    lines.append(
        f"mma.sync.aligned.m16n8k{k}.row.col.{total}.{kind}.{kind}.{total} "
        f"{{%r40,%r41,%r42,%r43}}, {{{','.join(names[:of_a])}}}, {{{','.join(names[of_a:count])}}}, "
        f"{{{','.join(names[count:])}}};"
    )
    lines += [f"st.global.b32 [%d0+{128 * n}], %r{40 + n};" for n in range(4)]
    (left,), report = run(kernel("\n".join(lines), 1), [inputs])
    assert not report.findings
    found = left[:4].view(c.dtype)
    expected = values(kind, a) @ values(kind, b).T + c
    rows = np.vstack([np.stack([found[2 * h], found[2 * h + 1]], 1).reshape(8, 8) for h in (0, 1)])
    np.testing.assert_array_equal(rows, expected.astype(c.dtype))


@pytest.mark.parametrize(("rows", "k"), [(8, 4), (16, 4), (16, 8), (16, 16)])
def test_mma_multiplies_doubles(rows: int, k: int) -> None:
    a, b, c = (RNG.integers(-9, 9, shape).astype(float) for shape in ((rows, k), (8, k), (rows, 8)))
    lane = np.arange(32)
    inputs = [
        a[lane // 4 + row, lane % 4 + at] for at in range(0, k, 4) for row in range(0, rows, 8)
    ]
    inputs += [b[lane // 4, lane % 4 + at] for at in range(0, k, 4)]
    inputs += [c[lane // 4 + row, lane % 4 * 2 + at] for row in range(0, rows, 8) for at in (0, 1)]
    names = [f"%d{n}" for n in range(len(inputs))]
    of_a, of_b = rows * k // 32, k // 4
    groups = names[:of_a], names[of_a : of_a + of_b], names[of_a + of_b :]
    listed = ", ".join("{" + ",".join(group) + "}" for group in (groups[2], *groups))
    lines = ["mov.u32 %r60, %tid.x; ld.param.u64 %d30, [p0]; mad.wide.u32 %d30, %r60, 8, %d30;"]
    lines += [f"ld.global.b64 {name}, [%d30+{256 * n}];" for n, name in enumerate(names)]
    lines.append(f"mma.sync.aligned.m{rows}n8k{k}.row.col.f64.f64.f64.f64 {listed};")
    lines += [f"st.global.b64 [%d30+{256 * n}], {name};" for n, name in enumerate(groups[2])]
    (left,), report = run(kernel("\n".join(lines), 1), [np.stack(inputs)])
    assert not report.findings
    found = np.zeros((rows, 8))
    for n in range(len(groups[2])):
        found[lane // 4 + n // 2 * 8, lane % 4 * 2 + n % 2] = left[n]
    np.testing.assert_array_equal(found, a @ b.T + c)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_are_loaded_and_stored(count: int, transposed: bool) -> None:
    source = np.arange(count * 64, dtype=np.uint16).reshape(count, 8, 8)
    group = "{" + ",".join(f"%r{n}" for n in range(count)) + "}"
    trans = ".trans" if transposed else ""
    body = f"""mov.u32 %r60, %tid.x; mov.u32 %r61, smem; ld.param.u64 %d0, [p0];
    mul.lo.s32 %r59, %r60, {count * 4}; cvt.u64.u32 %d1, %r59; add.s64 %d0, %d0, %d1; add.s32 %r58, %r61, %r59;
    {"".join(f"ld.global.b32 %r{n}, [%d0+{4 * n}]; st.shared.b32 [%r58+{4 * n}], %r{n};" for n in range(count))}
    bar.sync 0;
    and.b32 %r57, %r60, {8 * count - 1}; mad.lo.s32 %r57, %r57, 16, %r61;
    ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {group}, [%r57];
    add.s32 %r57, %r57, 512;
    stmatrix.sync.aligned.m8n8.x{count}.shared.b16 [%r57], {group};
    bar.sync 0;
    {"".join(f"ld.shared.b32 %r{n}, [%r58+{512 + 4 * n}]; st.global.b32 [%d0+{4 * n}], %r{n};" for n in range(count))}"""
    (left,), report = run(kernel(body, 1), [source])
    assert list(report.lines()) == []
    np.testing.assert_array_equal(left, source.transpose(0, 2, 1) if transposed else source)


def wgmma(
    kind: str, layout: str, *, wait: str = "wgmma.wait_group.sync.aligned 0;", fence: str = "fence.proxy.async;",
    products: Sequence[tuple[int, int, int]] = ((1, 1, 1),), seed: int = 0, initial: str = "0f3F800000",
    of_a: str = "%d2",
) -> tuple[Array, Array, object]:  # fmt: skip
    """A product of 64 by 16 by 16 from shared memory, K-major under a swizzle of 32 bytes. products:
    of each instruction whether it accumulates, at first on ones, and the scales of A and of B.
    """
    a, b = drawn(kind, (64, 16)), drawn(kind, (16, 16))
    lay = {"swizzle 32": 3, "none": 0}[layout]
    size = 2

    def placed(matrix: Array) -> Array:
        out = np.zeros(matrix.size, matrix.dtype)
        for r in range(matrix.shape[0]):
            for k in range(16):
                if lay:
                    at = r * 32 + k * size
                    at ^= (at >> 7 & 1) << 4
                else:  # core matrices of 8 rows by 16 bytes, those along K next to each other
                    at = r // 8 * 256 + k // 8 * 128 + r % 8 * 16 + k % 8 * size
                out[at // size] = matrix[r, k]
        return out

    content = np.concatenate([placed(a), placed(b)])  # 2048 and 512 bytes
    registers = ",".join(f"%r{n}" for n in range(8))
    high = lay << 62 | (256 >> 4) << 32 | (128 >> 4) << 16
    body = f"""mov.u32 %r60, %tid.x; mov.u32 %r61, smem; ld.param.u64 %d0, [p0]; mad.wide.u32 %d1, %r60, 4, %d0;
    mad.lo.s32 %r59, %r60, 4, %r61;
    {"".join(f"ld.global.b32 %r20, [%d1+{512 * n}]; st.shared.b32 [%r59+{512 * n}], %r20;" for n in range(5))}
    {fence} bar.sync 0;
    shr.u32 %r58, %r61, 4; cvt.u64.u32 %d2, %r58; or.b64 %d2, %d2, {high}; add.s64 %d3, %d2, {2048 >> 4};
    {"".join(f"mov.b32 %r{n}, {initial};" for n in range(8))}
    wgmma.fence.sync.aligned;
    {"".join(f"wgmma.mma_async.sync.aligned.m64n16k16.f32.{kind}.{kind} {{{registers}}}, {of_a}, %d3, {p}, {x}, {y}, 0, 0;" for p, x, y in products)}
    wgmma.commit_group.sync.aligned;
    {wait}
    ld.param.u64 %d4, [p1]; mad.wide.u32 %d4, %r60, 32, %d4;
    {"".join(f"st.global.b32 [%d4+{4 * n}], %r{n};" for n in range(8))}"""
    (_, out), report = run(
        kernel(body, 2, 128), [content, np.zeros((128, 8), np.float32)], shared=4096, seed=seed
    )
    lanes = out.reshape(4, 8, 4, 2, 2, 2)  # warp, row, lane of four, columns / 8, half, pair
    product = lanes.transpose(0, 4, 1, 3, 2, 5).reshape(64, 16)
    expected, once = np.ones((64, 16)), values(kind, a) @ values(kind, b).T
    for accumulates, scale_a, scale_b in products:
        expected = scale_a * scale_b * once + accumulates * expected
    return product, expected, report


@pytest.mark.parametrize("layout", ["swizzle 32", "none"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_wgmma_multiplies_from_shared_memory(kind: str, layout: str) -> None:
    for seed in range(3):
        product, expected, report = wgmma(kind, layout, seed=seed)
        assert list(report.lines()) == []  # type: ignore[attr-defined]
        np.testing.assert_array_equal(product, expected)


@pytest.mark.parametrize(
    "products",
    [
        [(1, -1, 1)],
        [(1, 1, -1)],
        [(1, -1, -1)],
        [(1, 1, 1), (0, -1, 1)],  # the other way round the first would count
        [(1, 1, 1), (0, 1, 1), (1, 1, 1)],
    ],
)
def test_products_of_wgmma_have_signs_and_an_order(products: list[tuple[int, int, int]]) -> None:
    for seed in range(3):
        product, expected, report = wgmma("f16", "none", products=products, seed=seed)
        assert list(report.lines()) == []  # type: ignore[attr-defined]
        np.testing.assert_array_equal(product, expected)


@pytest.mark.parametrize(("accumulates", "checks"), [(1, {"initcheck"}), (0, set())])
def test_accumulators_must_be_defined_where_they_count(accumulates: int, checks: set[str]) -> None:
    report = wgmma("f16", "none", products=[(accumulates, 1, 1)], initial="%r70")[2]
    assert report.checks() == checks  # type: ignore[attr-defined]


def test_wgmma_without_a_fence_between_the_proxies_is_a_race() -> None:
    _, _, report = wgmma("bf16", "none", fence="")
    assert report.checks() == {"racecheck"}  # type: ignore[attr-defined]


def test_accumulators_that_are_read_before_the_wait_are_found() -> None:
    _, _, report = wgmma("bf16", "none", wait="wgmma.wait_group.sync.aligned 1;")
    assert report.checks() == {"synccheck"}  # type: ignore[attr-defined]
    assert "before it has waited for the wgmma" in report.findings[0].message  # type: ignore[attr-defined]


@pytest.mark.parametrize(("register", "said"), [("%r0", "writes it"), ("%r30", "reads it")])
def test_registers_of_a_product_stay_until_it_is_awaited(register: str, said: str) -> None:
    made = "".join(f"mov.b32 %r{n}, 0;" for n in range(30, 34)) + "fence.proxy.async;"
    for early in ("", f"mov.b32 {register}, 1;"):
        _, _, report = wgmma(
            "f16", "none", of_a="{%r30, %r31, %r32, %r33}", fence=made,
            wait=f"{early} wgmma.wait_group.sync.aligned 0;",
        )  # fmt: skip
        found: list[str] = list(report.lines())  # type: ignore[attr-defined]
        assert bool(found) == bool(early), found
        assert all(f"it has written {register} before the wgmma that {said}" in x for x in found)


def test_the_warps_of_a_group_issue_one_product() -> None:
    apart = "0f3F800000; setp.ge.u32 %p1, %r60, 32; @%p1 add.s64 %d3, %d2, 1"
    report = wgmma("f16", "none", initial=apart)[2]
    (said,) = report.lines()  # type: ignore[attr-defined]
    assert "the warps of its warpgroup issue different products" in said
