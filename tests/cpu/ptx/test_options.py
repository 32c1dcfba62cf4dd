"""What a launch takes beside tensors and numbers: options of Triton, decorated kernels, pointers in
memory, tensor maps made on the device; and what it says where Triton fails.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from flashgen import ptx
from flashgen.errors import InvalidArgument
from flashgen.ptx.tensor_map import ENCODED, TensorMap, decoded
from tests.cpu.ptx.test_checks import report_of


@triton.jit
def triple(x, out, BLOCK: tl.constexpr):
    tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) * 3)


def hook(given: dict[str, object]) -> None:
    given["out"].fill_(-1)  # type: ignore[attr-defined]


heuristic = triton.heuristics({"BLOCK": lambda given: 2 * given["HALF"]})
autotuned = triton.autotune(
    [triton.Config({"HALF": 16}, num_warps=2, pre_hook=hook), triton.Config({"HALF": 8})], key=[]
)


@autotuned
@heuristic
@triton.jit
def decorated(x, out, HALF: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) * 3)


@pytest.mark.parametrize("grid", [2, (2,), lambda given: triton.cdiv(64, given["BLOCK"]), [2, 1]])
def test_a_grid_may_be_a_number(grid: object) -> None:
    x, out = torch.arange(64.0), torch.zeros(64)
    report = ptx.launch(triple, grid, x, out, BLOCK=32, launch_pdl=True, num_stages=2, debug=True)  # type: ignore[arg-type]
    assert report.blocks == 2
    assert torch.equal(out, 3 * x)


@pytest.mark.parametrize(("given", "size"), [({}, 32), ({"HALF": 8}, 16)])
def test_an_autotuned_kernel_takes_its_first_config(given: dict[str, int], size: int) -> None:
    x, out = torch.arange(64.0), torch.zeros(64)
    ptx.launch(decorated, 1, x, out, **given)
    assert torch.equal(out[:size], 3 * x[:size])
    assert out[size:].eq(-1).all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_ctas": 2}, "num_ctas=2 is not supported: clusters"),
        ({"stream": 0}, "stream=0 is not supported"),
        ({"warp_size": 64}, "warp_size=64 is not supported"),
        ({"BLOK": 2}, "BLOK is neither an argument of triple nor an option of Triton"),
        ({"num_warps": 3}, "cannot compile triple for sm_90: num_warps must be a power of 2"),
        ({"memory": [3]}, "memory must hold tensors: got int"),
        ({"x": 3}, "x is given twice"),
    ],
)
def test_an_option_that_is_not_taken_is_named(options: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said) as error:
        ptx.launch(triple, 1, torch.zeros(32), torch.zeros(32), BLOCK=32, **options)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_options_that_change_nothing_are_taken() -> None:
    ptx.launch(triple, 1, torch.zeros(32), torch.zeros(32), BLOCK=32, num_ctas=1, warp_size=32)


@pytest.mark.parametrize("grid", ["ab", (1.5, None), object()])
def test_a_grid_of_something_else_is_refused(grid: object) -> None:
    with pytest.raises(InvalidArgument, match="a grid must consist of numbers"):
        ptx.launch(triple, grid, torch.zeros(32), torch.zeros(32), BLOCK=32)  # type: ignore[arg-type]


@triton.jit
def gathered(table, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.load(table + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    tl.store(out + tl.program_id(0) * BLOCK + at, tl.load(row + at))


@triton.jit
def indexed(table, out, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), tl.load(out + tl.load(table) + tl.arange(0, BLOCK)))


def test_pointers_in_memory_lead_to_the_tensors_that_are_named() -> None:
    rows, out = [torch.randn(64) for _ in range(3)], torch.zeros(3, 64)
    table = torch.tensor([row.data_ptr() for row in rows])
    ptx.launch(gathered, 3, table, out, BLOCK=64, memory=rows)
    assert torch.equal(out, torch.stack(rows))
    loaded = "the address was loaded from memory: pass its tensor in memory="
    with pytest.raises(ptx.FaultsFound, match=loaded):
        ptx.launch(gathered, 3, table, out, BLOCK=64)
    (finding,) = ptx.run(indexed, 1, table, out, BLOCK=64).findings
    assert loaded not in finding.message  # of an index that is too large


@triton.jit
def doubled(x, out, rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [BM, BN])
    target = tl.make_tensor_descriptor(out, [rows, columns], [columns, 1], [BM, BN])
    row = tl.program_id(0) * BM
    for column in range(0, columns, BN):
        target.store([row, column], source.load([row, column]) * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_descriptors_may_be_made_on_the_device(target: str, dtype: torch.dtype) -> None:
    x, out = torch.randn(48, 72).to(dtype), torch.zeros(49, 72).to(dtype)
    ptx.launch(doubled, 2, x, out[:48], 48, 72, BM=32, BN=32, target=target)
    assert torch.equal(out[:48], 2 * x)
    assert out[48].eq(0).all()


@triton.jit
def copied(source, out, BM: tl.constexpr, BN: tl.constexpr):
    at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    tl.store(out + at, source.load([4, 0]))


@pytest.mark.parametrize(("padding", "fill"), [("zero", 0.0), ("nan", float("nan"))])
def test_a_descriptor_says_what_lies_outside_of_its_tensor(padding: str, fill: float) -> None:
    x, out = torch.randn(8, 32), torch.zeros(8, 32)
    ptx.launch(copied, 1, TensorDescriptor(x, [8, 32], [32, 1], [8, 32], padding), out, BM=8, BN=32)
    assert torch.equal(out[:4], x[4:])
    torch.testing.assert_close(out[4:], torch.full((4, 32), fill), equal_nan=True)


def encoded(**fields: object) -> bytes:
    """A map of 10 rows of 64 float16, in boxes of 8 by 32."""
    made = np.zeros(1, ENCODED)
    values = {
        "global_address": 4096, "global_stride": [128, 0, 0, 0], "global_dim": [64, 10, 0, 0, 0],
        "box_dim": [32, 8, 0, 0, 0], "element_stride": [1, 1, 0, 0, 0], "rank": 1, "elemtype": 6,
        "swizzle_mode": 2, "fill_mode": 1,
    }  # fmt: skip
    for name, value in (values | fields).items():
        made[name] = value
    return made.tobytes()


def test_a_map_made_on_the_device_is_read_field_by_field() -> None:
    assert decoded(encoded()) == TensorMap(
        address=4096, shape=(10, 64), strides=(64, 1), box=(8, 32), size=2, swizzle=64, fill=0x7FFF
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 6), ("elemtype", 13), ("swizzle_mode", 4), ("interleave_layout", 1),
        ("element_stride", [2, 1, 0, 0, 0]), ("global_address", 8), ("global_stride", [8, 0, 0, 0]),
        ("box_dim", [0, 8, 0, 0, 0]), ("box_dim", [512, 8, 0, 0, 0]),
    ],
)  # fmt: skip
def test_a_map_that_the_tma_unit_does_not_take_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match="a tensor map"):
        decoded(encoded(**{field: value}))


def test_a_field_of_a_map_is_written_in_place() -> None:
    body = """setp.eq.u32 %p1, %r60, 0;
    @%p1 tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r61], 2, %r62;
    @%p1 ld.shared.b32 %r1, [%r61+48]; @%p1 st.global.b32 [%d20], %r1; @%p1 ld.shared.b32 %r1, [%r61+44];
    tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%d20], [%r61], 128;"""
    found = [finding.message for finding in report_of(body, threads=32).findings]
    assert [re.search(r"byte \d+", message)[0] for message in found] == ["byte 44", "byte 0"]  # type: ignore[index]


@triton.jit
def specialized(a, b, c, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    for tile in tl.range(0, 2, 1, warp_specialize=True):
        total = tl.zeros((BM, BN), tl.float32)
        for depth in range(0, 64, BK):
            total = tl.dot(a.load([0, depth]), b.load([0, depth]).T, total)
        c.store([0, tile], total.to(tl.float16))


def test_a_failure_of_tritons_passes_is_a_sentence_and_a_file(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """triton-lang/triton#11587, 128 rows for four warps."""
    described = [
        TensorDescriptor.from_tensor(torch.zeros(256, 128).half(), block)
        for block in ([128, 64], [128, 64], [128, 128])
    ]
    with pytest.raises(InvalidArgument) as error:
        ptx.launch(specialized, 1, *described, BM=128, BN=128, BK=64, target="sm_90")
    found = re.fullmatch(
        r"Triton cannot compile specialized for sm_90: its pass \w+ failed "
        r"\(its output is in (\S+\.log)\)", str(error.value)
    )  # fmt: skip
    assert found
    log = Path(found[1])
    assert "tt.descriptor_load" in log.read_text()
    log.unlink()
    assert capfd.readouterr().err == ""


@triton.jit
def no_such_name(x):
    tl.store(x, nowhere)  # noqa: F821


def test_an_error_in_the_kernel_is_a_sentence() -> None:
    with pytest.raises(InvalidArgument, match=r"cannot compile no_such_name .*nowhere") as error:
        ptx.launch(no_such_name, 1, torch.zeros(1))
    Path(re.search(r"\S+\.log", str(error.value))[0]).unlink()  # type: ignore[index]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """A cache of Triton's for one test."""
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        yield tmp_path


@pytest.mark.parametrize("damage", ["", "{", "// PTX"])
@pytest.mark.parametrize("pattern", ["*.ptx", "triple.json", "__grp__*"])
def test_a_damaged_cache_is_a_miss(cache: Path, pattern: str, damage: str) -> None:
    for _ in range(2):
        x, out = torch.arange(32.0), torch.zeros(32)
        ptx.launch(triple, 1, x, out, BLOCK=32)
        assert torch.equal(out, 3 * x)
        (file,) = cache.rglob(pattern)
        file.write_text(damage)
