"""The repairs of Triton's interpreter, and whether they are still needed."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton

from flashgen.kernels import interpreter
from flashgen.kernels.loader import load_kernel

KERNEL = """
import triton
import triton.language as tl


@triton.jit
def dot_and_cast(a_ptr, b_ptr, product_ptr, cast_ptr, x_ptr):
    rows = tl.arange(0, 32)
    tile = rows[:, None] * 32 + rows[None, :]
    product = tl.dot(tl.load(a_ptr + tile), tl.load(b_ptr + tile))
    tl.store(product_ptr + tile, product)
    tl.store(cast_ptr + tile, tl.load(x_ptr + tile).to(tl.bfloat16))
"""


def run(tmp_path: Path) -> tuple[float, float]:
    """The largest error of a bfloat16 product, and the share of casts that are not round-to-nearest-even."""
    path = tmp_path / "dot_and_cast.py"
    path.write_text(KERNEL)
    kernel = load_kernel(path, "dot_and_cast")
    a, b = (torch.randn(32, 32).bfloat16() for _ in range(2))
    x, product, cast = (
        torch.randn(32, 32),
        torch.empty(32, 32),
        torch.empty(32, 32, dtype=torch.bfloat16),
    )
    kernel[(1,)](a, b, product, cast, x)
    return float((product - a.float() @ b.float()).abs().max()), float(
        (cast != x.bfloat16()).float().mean()
    )


LOG2 = """
import triton
import triton.language as tl


@triton.jit
def log2(x_ptr):
    places = x_ptr + tl.arange(0, 4)
    tl.store(places, tl.math.log2(tl.load(places)))
"""


@pytest.mark.filterwarnings("error")
def test_the_logarithm_of_a_sum_of_nothing_says_nothing(tmp_path: Path) -> None:
    """It is -inf, the LSE of a row without keys, on a GPU too."""
    path = tmp_path / "log2.py"
    path.write_text(LOG2)
    x = torch.tensor([0.0, 1.0, 8.0, 0.25])
    load_kernel(path, "log2")[(1,)](x)
    assert x.tolist() == [-float("inf"), 0.0, 3.0, -2.0]


def test_repaired_dot_and_cast_are_right(tmp_path: Path) -> None:
    error, wrong_casts = run(tmp_path)
    assert error < 1e-4
    assert wrong_casts == 0.0


def test_the_repairs_are_still_needed(tmp_path: Path) -> None:
    """When this fails, Triton has mended its interpreter: delete the repair that is needed no more."""
    program = (
        "import pathlib, sys\n"
        "from flashgen.kernels import interpreter\n"
        "interpreter._repair = lambda: None\n"
        "from tests.interpreted.kernels.test_interpreter import run\n"
        "print(*run(pathlib.Path(sys.argv[1])))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    error, wrong_casts = map(float, done.stdout.split())
    assert error > 1.0, "dot multiplies bfloat16 rightly now"
    assert wrong_casts > 0.1, "float32 -> bfloat16 rounds rightly now"


COUNTING = """
import triton
import triton.language as tl


@triton.jit
def total(x_ptr):
    return tl.sum(tl.load(x_ptr + tl.arange(0, 16)))


@triton.jit
def counting(x_ptr, found_ptr, big):
    tl.store(found_ptr, total(x_ptr))
    tl.store(found_ptr + 1, big + big)
"""


def test_the_language_is_patched_once_and_no_overflow_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each program calls two device functions, total and sum, and adds whole numbers."""
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter as runtime

    path = tmp_path / "counting.py"
    path.write_text(COUNTING)
    kernel = load_kernel(path, "counting")
    x, found = torch.arange(16, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    kernel[(1,)](x, found, 3)
    patched, checked = [], []
    patch, less_equal = runtime._patch_builtin, TritonSemantic.less_equal
    monkeypatch.setattr(runtime, "_patch_builtin", lambda *a: [patched.append(a), patch(*a)])
    monkeypatch.setattr(
        TritonSemantic, "less_equal", lambda *a: (checked.append(a), less_equal(*a))[1]
    )
    with np.errstate(over="ignore"):
        kernel[(3,)](x, found, 1 << 30)
    assert found.tolist() == [120, -(1 << 31)]  # it wraps, as on a GPU
    assert not patched
    assert not checked


def test_equal_types_are_one_object_and_are_checked_as_before() -> None:
    import triton.language as tl
    from triton.runtime.interpreter import interpreter_semantic as semantic

    interpreter.prepare()
    tile = tl.block_type(tl.int32, [16, tl.constexpr(32)])
    assert tile is tl.block_type(tl.int32, tl.core.tuple([16, 32]))
    others = [(tl.int32, [32, 16]), (tl.int32, [16]), (tl.uint32, [16, 32])]
    pointers = [tl.pointer_type(tl.int32, address_space=space) for space in (1, 3)]
    others += [(pointer, [16, 32]) for pointer in pointers]
    assert len({id(tl.block_type(*other)) for other in others} | {id(tile)}) == 6
    for _ in range(2):  # an illegal one is kept neither
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.int32, [16, 24])

    row, column = semantic.full([1, 32], 3, tl.int32), semantic.full([16, 1], 4, tl.int32)
    added = semantic.add(row, column, False)
    assert added.type is tile
    assert added.shape.values == [16, 32]
    assert added.numel.value == 512
    assert added.handle.data.tolist() == [[7] * 32] * 16
    with pytest.raises(ValueError, match="incompatible dimensions"):
        semantic.add(added, semantic.full([16, 16], 1, tl.int32), False)
    halves = semantic.full([16], 1.5, tl.float16)  # a quotient of halves is a float32
    assert semantic.truediv(halves, halves).dtype == tl.float32


def test_operands_are_promoted_as_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pair of types and shapes, with every set of options, beside what the repair replaced."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import interpreter_semantic as semantic

    interpreter.prepare()
    quick = TritonSemantic.binary_op_type_checking_impl
    scalars = (tl.int1, tl.int8, tl.int32, tl.int64, tl.uint8, tl.uint32, tl.float16, tl.float32)
    values = [semantic.scalar_constant(1, scalar) for scalar in scalars]
    values.append(
        semantic.cast(semantic.scalar_constant(64, tl.int64), tl.pointer_type(tl.float32))
    )
    numbers = [0, 3, -1, 1 << 31, 1 << 40, True, 0.0, -0.0, 1.5, float("inf")]
    shapes: list[list[int]] = [[], [4], [1, 4], [8, 1], [8, 4]]
    tensors = [semantic.splat(value, shape) for value in values for shape in shapes]
    options = [(), (True, True), (True, False), (False, False, True, True), (False, False, False)]
    pairs = [*product(tensors, tensors), *product(tensors, numbers), *product(numbers, tensors)]
    for (lhs, rhs), given in product(pairs, options):
        found = _promoted(quick, semantic, lhs, rhs, *given)
        with monkeypatch.context() as patch:
            broadcast = TritonSemantic.broadcast_impl_value.__wrapped__
            patch.setattr(TritonSemantic, "broadcast_impl_value", broadcast)
            expected = _promoted(quick.__wrapped__, semantic, lhs, rhs, *given)
        assert found == expected, (lhs, rhs, given)


def _promoted(promote: Any, *arguments: Any) -> Any:
    """Type, dtype and bytes of both operands, or which error there is."""
    try:
        with np.errstate(over="ignore"):
            both = promote(*arguments)
        return [
            (str(each.type), str(each.handle.dtype), each.handle.data.dtype, each.handle.data.shape,
             each.handle.data.tobytes())
            for each in both
        ]  # fmt: skip
    except Exception as error:
        return type(error), str(error)


def test_rounding_matches_torch_on_the_odd_values() -> None:
    values = np.array(
        [0.0, -0.0, 1.0, 1.00390625, 1.01171875, 3.3e38, 3.4e38, -3.4e38, 1e-40, np.inf, -np.inf],
        np.float32,
    )
    ours = interpreter.widen_bfloat16(interpreter.round_to_bfloat16(values))
    np.testing.assert_array_equal(ours, torch.from_numpy(values).bfloat16().float().numpy())
    assert np.isnan(
        interpreter.widen_bfloat16(interpreter.round_to_bfloat16(np.float32([np.nan])))
    ).all()


@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_shapes_are_kept(shape: tuple[int, ...]) -> None:
    assert interpreter.round_to_bfloat16(np.ones(shape, np.float32)).shape == shape


def test_a_loop_under_triton_3_6_has_numbers_for_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its int of an array of one element is an error from numpy 2.5 on."""

    class Bound:
        handle = SimpleNamespace(data=np.array([7], dtype=np.int32))

    def patch(tensor: Any, scope: Any) -> None:
        scope.set_attr(tensor, "__index__", lambda self: self.refused)

    monkeypatch.setattr(triton.runtime.interpreter, "_patch_lang_tensor", patch)
    for version, wraps in (("3.7.1", False), ("3.6.0", True)):
        monkeypatch.setattr(triton, "__version__", version)
        interpreter._index_by_item()
        assert (triton.runtime.interpreter._patch_lang_tensor is not patch) is wraps
    triton.runtime.interpreter._patch_lang_tensor(Bound, SimpleNamespace(set_attr=setattr))
    assert list(range(Bound())) == list(range(7))  # type: ignore[call-overload]
