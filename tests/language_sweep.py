"""Every function of triton.language and of its libdevice, in each dtype that it has, executed.

python -m tests.language_sweep prints a table as in docs/numerics.md, of all architectures or of those it names.

Results are compared with torch's, in float64 or int64. torch lacks some of libdevice's functions: they must run
without a finding.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import itertools
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.language.extra.cuda import libdevice

from flashgen import ptx
from flashgen.errors import FlashgenError

ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
WARPS = (1, 2, 4, 8)
SIZE = 256
"""Elements of an argument: 16 rows of 16 where a function is of matrices."""

FLOATS = ("float32", "float16", "bfloat16", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
EVERY = (*FLOATS, *INTEGERS)


@dataclass(frozen=True)
class Function:
    """A function in one dtype. call: what the kernel stores, of x, y and z; dtypes: theirs. expected:
    the result by torch, of the arguments as float64 or int64; None if torch does not have it. shape:
    of the result.
    """

    group: str
    name: str
    call: str
    dtypes: tuple[str, ...]
    result: str
    expected: Callable[..., Tensor] | None = field(default=None, compare=False)
    tolerance: float = 0.0
    shape: str = "BLOCK"

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.dtypes)})"


def elementwise(
    name: str, call: str, dtypes: tuple[str, ...], expected: Callable[..., Tensor], count: int = 1, **more: Any
) -> Iterator[Function]:  # fmt: skip
    """A function whose arguments and result have one dtype."""
    for dtype in dtypes:
        yield Function("elementwise", name, call, (dtype,) * count, dtype, expected, **more)


@cache
def language() -> tuple[Function, ...]:
    """The functions of triton.language."""
    f32 = ("float32",)
    wide = ("float32", "float64")
    math = [
        *elementwise("abs", "tl.abs(x)", (*FLOATS, "int8", "int16", "int32", "int64"), torch.abs),
        *elementwise("add", "tl.add(x, y)", EVERY, torch.add, 2),
        *elementwise("sub", "tl.sub(x, y)", EVERY, torch.sub, 2),
        *elementwise("mul", "tl.mul(x, y)", EVERY, torch.mul, 2),
        *elementwise("maximum", "tl.maximum(x, y)", EVERY, torch.maximum, 2),
        *elementwise("minimum", "tl.minimum(x, y)", EVERY, torch.minimum, 2),
        *elementwise("maximum of NaN", "tl.maximum(x, y, tl.PropagateNan.ALL)", FLOATS, torch.maximum, 2),
        *elementwise("clamp", "tl.clamp(x, y, y + 1)", FLOATS, lambda x, y: torch.clamp(x, y, y + 1), 2, tolerance=1e-2),
        *elementwise("clamp of NaN", "tl.clamp(x, y, y + 1, tl.PropagateNan.ALL)", FLOATS, lambda x, y: torch.clamp(x, y, y + 1), 2, tolerance=1e-2),
        *elementwise("fma", "tl.fma(x, y, z)", FLOATS, lambda x, y, z: x * y + z, 3, tolerance=1e-6),
        *elementwise("where", "tl.where(x > y, x, z)", EVERY, lambda x, y, z: torch.where(x > y, x, z), 3),
        *elementwise("cdiv", "tl.cdiv(x, y)", ("int32", "int64"), lambda x, y: (x + y - 1).div(y, rounding_mode="trunc"), 2),
        *elementwise("quotient", "x // y", INTEGERS, lambda x, y: x.div(y, rounding_mode="trunc"), 2),
        *elementwise("remainder", "x % y", INTEGERS, torch.fmod, 2),
        *elementwise("division", "x / y", FLOATS, torch.div, 2, tolerance=1e-6),
        *elementwise("fdiv", "tl.fdiv(x, y)", FLOATS, torch.div, 2, tolerance=1e-6),
        *elementwise("div_rn", "tl.div_rn(x, y)", f32, torch.div, 2, tolerance=6e-8),
        *elementwise("sqrt", "tl.sqrt(tl.abs(x))", wide, lambda x: x.abs().sqrt(), tolerance=1e-6),
        *elementwise("sqrt_rn", "tl.sqrt_rn(tl.abs(x))", f32, lambda x: x.abs().sqrt(), tolerance=6e-8),
        *elementwise("rsqrt", "tl.rsqrt(tl.abs(x))", wide, lambda x: x.abs().rsqrt(), tolerance=1e-6),
        *elementwise("exp", "tl.exp(x)", wide, torch.exp, tolerance=1e-6),
        *elementwise("exp2", "tl.exp2(x)", wide, torch.exp2, tolerance=1e-6),
        *elementwise("log", "tl.log(tl.abs(x))", wide, lambda x: x.abs().log(), tolerance=1e-6),
        *elementwise("log2", "tl.log2(tl.abs(x))", wide, lambda x: x.abs().log2(), tolerance=1e-6),
        *elementwise("sin", "tl.sin(x * 1000)", wide, lambda x: torch.sin(x * 1000), tolerance=1e-4),
        *elementwise("cos", "tl.cos(x)", wide, torch.cos, tolerance=1e-6),
        *elementwise("erf", "tl.erf(x)", wide, torch.erf, tolerance=1e-6),
        *elementwise("floor", "tl.floor(x)", wide, torch.floor),
        *elementwise("ceil", "tl.ceil(x)", wide, torch.ceil),
        *elementwise("sigmoid", "tl.sigmoid(x)", wide, torch.sigmoid, tolerance=1e-6),
        *elementwise("umulhi", "tl.umulhi(x, y)", ("int32", "uint32"), lambda x, y: (x & 0xFFFFFFFF) * (y & 0xFFFFFFFF) >> 32, 2),
        *elementwise("and, or, xor, not", "(x & y) ^ (x | ~y)", INTEGERS, lambda x, y: (x & y) ^ (x | ~y), 2),
        *elementwise("shifts", "(x << 3) ^ (x >> 2)", INTEGERS, lambda x: (x << 3) ^ (x >> 2)),
    ]  # fmt: skip
    casts = [
        Function("cast", f"to {to}", f"x.to({_TL[to]})", (of,), to, lambda x: x, 1e-1)
        for of in EVERY for to in EVERY if of != to
    ]  # fmt: skip
    return (*math, *casts, *_rows(), *_drawn())


_TL = {name: f"tl.{name}" for name in EVERY}


def _rows() -> Iterator[Function]:
    """Functions along an axis of 16 by 16 elements."""
    square, row = "BLOCK", "16"
    of_rows: list[tuple[str, str, tuple[str, ...], Callable[..., Tensor], str]] = [
        ("sum", "tl.sum(x, 1)", EVERY, lambda x: x.sum(1), row),
        ("max", "tl.max(x, 1)", EVERY, lambda x: x.amax(1), row),
        ("min", "tl.min(x, 0)", EVERY, lambda x: x.amin(0), row),
        ("argmax", "tl.argmax(x, 1).to(x.dtype)", EVERY, lambda x: x.argmax(1), row),
        ("argmin", "tl.argmin(x, 0).to(x.dtype)", EVERY, lambda x: x.argmin(0), row),
        ("xor_sum", "tl.xor_sum(x, 1)", INTEGERS, lambda x: _folded(x, torch.bitwise_xor), row),
        ("reduce_or", "tl.reduce_or(x, 1)", INTEGERS, lambda x: _folded(x, torch.bitwise_or), row),
        ("reduce", "tl.reduce(x, 1, product)", EVERY, lambda x: x.prod(1), row),
        ("cumsum", "tl.cumsum(x, 1)", EVERY, lambda x: x.cumsum(1), square),
        ("cumprod", "tl.cumprod(x, 0)", FLOATS, lambda x: x.cumprod(0), square),
        ("associative_scan", "tl.associative_scan(x, 1, product, reverse=True)", FLOATS, lambda x: x.flip(1).cumprod(1).flip(1), square),
        ("softmax", "tl.softmax(x, 1, keep_dims=True)", ("float32",), lambda x: x.softmax(1), square),
        ("sort", "tl.sort(x)", EVERY, lambda x: x.sort(1).values, square),
        ("topk", "tl.topk(x, 4)", EVERY, lambda x: x.topk(4, 1).values, "64"),
        ("flip", "tl.flip(x, 1)", EVERY, lambda x: x.flip(1), square),
        ("trans", "tl.trans(x)", EVERY, lambda x: x.T, square),
        ("reshape", "tl.reshape(x, (4, 64)).permute(1, 0)", EVERY, lambda x: x.reshape(4, 64).T, square),
        ("join", "tl.join(x, x + 1)", EVERY, lambda x: torch.stack([x, x + 1], 2), "2 * BLOCK"),
        ("interleave", "tl.interleave(x, x)", EVERY, lambda x: x.repeat_interleave(2, 1), "2 * BLOCK"),
        ("split", "tl.split(x.reshape(16, 8, 2))[1]", EVERY, lambda x: x[:, 1::2], "128"),
        ("broadcast", "tl.broadcast_to(x[:, None, :], (16, 2, 16))", EVERY, lambda x: x[:, None].expand(16, 2, 16), "2 * BLOCK"),
        ("gather", "tl.gather(x, tl.zeros((16, 16), tl.int32) + tl.arange(0, 16)[:, None], 1)", EVERY, lambda x: x.diagonal()[:, None].expand(16, 16), square),
        ("dot", "tl.dot(x, tl.trans(x), out_dtype=tl.float32).to(x.dtype)", ("float32", "float16", "bfloat16"), lambda x: x @ x.T, square),
        ("dot", "tl.dot(x, tl.trans(x))", ("float64",), lambda x: x @ x.T, square),
        ("dot", "tl.dot(x.reshape(8, 32), x.reshape(8, 32).trans()).to(x.dtype)", ("int8",), lambda x: (r := x.reshape(8, 32)) @ r.T, "64"),
    ]  # fmt: skip
    for name, call, dtypes, expected, shape in of_rows:
        for dtype in dtypes:
            yield Function(
                "rows",
                name,
                call,
                (dtype,),
                dtype,
                expected,
                1e-1 if dtype in FLOATS[1:3] else 1e-2 if name == "dot" else 1e-3,  # by tf32
                shape,
            )


def _folded(x: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    found = x[:, 0]
    for column in x.T[1:]:
        found = function(found, column)
    return found


def _drawn() -> Iterator[Function]:
    """Random numbers, a histogram, atomic operations."""
    for name, result in (("rand", "float32"), ("randn", "float32"), ("randint", "int32")):
        yield Function("random", name, f"tl.{name}(7, x)", ("int32",), result)
    flat = "x.reshape(256)"
    yield Function(
        "rows",
        "cat",
        f"tl.cat({flat}, {flat}, can_reorder=True)",
        ("float32",),
        "float32",
        shape="2 * BLOCK",
    )
    yield Function("random", "rand4x", "tl.rand4x(7, x)[2]", ("int32",), "float32")
    yield Function("random", "randn4x", "tl.randn4x(7, x)[1]", ("int32",), "float32")
    yield Function("random", "philox", "tl.philox(7, x, x, x, x)[3]", ("uint32",), "uint32")
    yield Function("rows", "histogram", "tl.histogram(tl.abs(x.reshape(256)) & 15, 16)", ("int32",), "int32",
                   lambda x: (x.reshape(-1).abs() & 15).bincount(minlength=16), 0, "16")  # fmt: skip
    yield Function("elementwise", "inline_asm_elementwise", "tl.inline_asm_elementwise('add.s32 $0, $1, 5;', '=r,r', [x], tl.int32, True, 1)", ("int32",), "int32", lambda x: x + 5)  # fmt: skip
    yield Function("elementwise", "map_elementwise", "tl.map_elementwise(product, x, y)", ("float32",) * 2, "float32", torch.mul)  # fmt: skip
    atomics = {
        "add": (*FLOATS, "int32", "int64", "uint32", "uint64"), "max": ("float32", "int32", "int64", "uint32", "uint64"),
        "min": ("float32", "int32", "int64", "uint32", "uint64"), "and": ("int32", "int64"), "or": ("int32", "int64"),
        "xor": ("int32", "int64"), "xchg": ("float32", "int32", "int64"),
    }  # fmt: skip
    combine: dict[str, Callable[..., Tensor]] = {
        "add": torch.add, "max": torch.maximum, "min": torch.minimum, "and": torch.bitwise_and,
        "or": torch.bitwise_or, "xor": torch.bitwise_xor, "xchg": lambda x, y: y,
    }  # fmt: skip
    for name, dtypes in atomics.items():
        for dtype in dtypes:
            yield Function("atomics", f"atomic_{name}", f"tl.atomic_{name}(px + at, y)", (dtype,) * 2, f"in place {dtype}", combine[name], 1e-2)  # fmt: skip
    for dtype in ("int32", "int64"):
        yield Function("atomics", "atomic_cas", "tl.atomic_cas(px + at, x, y)", (dtype,) * 2, f"in place {dtype}", lambda x, y: y)  # fmt: skip


_SINGLE: dict[str, Callable[..., Tensor]] = {
    "abs": torch.abs, "fabs": torch.abs, "llabs": torch.abs, "ceil": torch.ceil, "floor": torch.floor, "trunc": torch.trunc,
    "rint": torch.round, "nearbyint": torch.round, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "cbrt": lambda x: x.sign() * x.abs() ** (1 / 3),
    "rcbrt": lambda x: x.sign() * x.abs() ** (-1 / 3), "exp": torch.exp, "exp2": torch.exp2, "exp10": lambda x: 10**x, "expm1": torch.expm1,
    "log": torch.log, "log2": torch.log2, "log10": torch.log10, "log1p": torch.log1p, "sin": torch.sin, "cos": torch.cos, "tan": torch.tan,
    "asin": torch.asin, "acos": torch.acos, "atan": torch.atan, "sinh": torch.sinh, "cosh": torch.cosh, "tanh": torch.tanh, "asinh": torch.asinh,
    "acosh": torch.acosh, "atanh": torch.atanh, "erf": torch.erf, "erfc": torch.erfc, "erfinv": torch.erfinv, "lgamma": torch.lgamma,
    "tgamma": lambda x: torch.special.gammaln(x).exp() * torch.where((x < 0) & (x.floor() % 2 != 0), -1.0, 1.0),
    "j0": torch.special.bessel_j0, "j1": torch.special.bessel_j1, "y0": torch.special.bessel_y0, "y1": torch.special.bessel_y1,
    "cyl_bessel_i0": torch.special.i0, "cyl_bessel_i1": torch.special.i1, "erfcx": torch.special.erfcx, "normcdf": torch.special.ndtr,
    "normcdfinv": torch.special.ndtri, "sinpi": lambda x: torch.sin(torch.pi * x), "cospi": lambda x: torch.cos(torch.pi * x),
    "saturatef": lambda x: x.clamp(0, 1), "fast_sinf": torch.sin, "fast_cosf": torch.cos, "fast_tanf": torch.tan, "fast_expf": torch.exp,
    "fast_exp10f": lambda x: 10**x, "fast_logf": torch.log, "fast_log2f": torch.log2, "fast_log10f": torch.log10, "fast_tanhf": torch.tanh,
    "pow": torch.pow, "fast_powf": torch.pow, "fmod": torch.fmod, "hypot": torch.hypot, "atan2": torch.atan2, "copysign": torch.copysign,
    "fdim": lambda x, y: (x - y).clamp(0), "fast_dividef": torch.div, "rhypot": lambda x, y: 1 / torch.hypot(x, y), "fma": lambda x, y, z: x * y + z,
    "norm3d": lambda x, y, z: (x * x + y * y + z * z).sqrt(), "rnorm3d": lambda x, y, z: (x * x + y * y + z * z).rsqrt(),
    "nextafter": lambda x, y: x, "add_rn": torch.add, "sub_rn": torch.sub, "mul_rn": torch.mul, "div_rn": torch.div, "rcp_rn": torch.reciprocal,
    "sqrt_rn": torch.sqrt, "isnan": torch.isnan, "isinf": torch.isinf, "finitef": torch.isfinite, "signbit": torch.signbit,
    "mulhi": lambda x, y: x * y >> 32, "mul24": torch.mul, "hadd": lambda x, y: (x + y) >> 1, "rhadd": lambda x, y: (x + y + 1) >> 1,
    "sad": lambda x, y, z: (x - y).abs() + z, "ffs": lambda x: (x & -x).float().log2() + 1, "popc": lambda x: sum((x >> n) & 1 for n in range(32)),
}  # fmt: skip
_DIRECTED = re.compile(r"(add|sub|mul|div|rcp|sqrt|fma|\w+2\w+)_r[dnuz]$")
"""Functions that round in a direction: the exact value is an ulp away."""


def _of_library(name: str, dtypes: list[str]) -> tuple[Callable[..., Tensor] | None, float]:
    """What torch says of a function of libdevice, and how near it must be."""
    near = 1e-3 if name.startswith("fast_") else 2e-5 if "float32" in dtypes else 1e-9
    if found := _DIRECTED.match(name):
        exact = found[1]
        of_integer = "2" in exact and not exact.endswith(("2float", "2double"))
        return (
            (None, 0.0)
            if of_integer
            else (_SINGLE.get(f"{exact}_rn", _SINGLE.get(exact, lambda x: x)), 3e-7)
        )
    if (name in ("popc", "mulhi") and "int64" in dtypes) or (
        name == "mulhi" and "uint64" in dtypes
    ):
        return None, 0.0
    return _SINGLE.get(name), near


@cache
def device_library() -> tuple[Function, ...]:
    """The functions of libdevice, by the signatures in its source."""
    names = {"fp16": "float16", "fp32": "float32", "fp64": "float64"}
    found = []
    for item in ast.parse(inspect.getsource(libdevice)).body:
        if not isinstance(item, ast.FunctionDef):
            continue
        signatures = [pair for each in ast.walk(item) if isinstance(each, ast.Dict) for pair in zip(each.keys, each.values, strict=True)]  # fmt: skip
        for key, value in signatures:
            kinds = [
                constant.value
                for part in (key, value)
                if part is not None
                for constant in ast.walk(part)
                if isinstance(constant, ast.Constant) and not constant.value.startswith("__nv")
            ]
            dtypes = [names.get(kind, kind) for kind in kinds]
            given = ", ".join("xyzw"[: len(dtypes) - 1])
            expected, near = _of_library(item.name, dtypes)
            call = f"libdevice.{item.name}({given})"
            found.append(
                Function(
                    "libdevice", item.name, call, tuple(dtypes[:-1]), dtypes[-1], expected, near
                )
            )
    return tuple(found)


KERNEL = """@triton.jit
def {name}(px, py, pz, pw, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK){square}
    {loads}
    {store}


"""
HEAD = """import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice


@triton.jit
def product(a, b):
    return a * b


"""


@cache
def kernels() -> dict[Function, Any]:
    """A kernel of each function; Triton reads their source from a file."""
    functions = (*language(), *device_library())
    text = HEAD
    for number, function in enumerate(functions):
        square = ".reshape(16, 16)" if function.group == "rows" else ""
        loads = "; ".join(
            f"{v} = tl.load(p{v} + at)" for v, _ in zip("xyzw", function.dtypes, strict=False)
        )
        store = function.call
        if not function.result.startswith("in place"):
            store = f"result = {function.call}\n    tl.store(out + tl.arange(0, {function.shape}), tl.reshape(result, ({function.shape},)))"
        text += KERNEL.format(name=f"kernel_{number}", square=square, loads=loads, store=store)
    folder = Path(tempfile.mkdtemp(prefix="flashgen-sweep-"))
    (folder / "kernels.py").write_text(text)
    spec = importlib.util.spec_from_file_location("language_sweep_kernels", folder / "kernels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {function: getattr(module, f"kernel_{n}") for n, function in enumerate(functions)}


def arguments(function: Function) -> list[Tensor]:
    """Numbers about 0, of which none is."""
    generator = torch.Generator().manual_seed(len(function.dtypes))
    found = []
    for name in function.dtypes:
        dtype = getattr(torch, name)
        if dtype.is_floating_point:
            found.append((torch.randn(SIZE, generator=generator) + 0.01).to(dtype))
        else:
            low = 1 if name.startswith("uint") else -60
            drawn = torch.randint(low, 60, (SIZE,), generator=generator)
            found.append(torch.where(drawn == 0, 7, drawn).to(dtype))
    return found


def difference(function: Function, given: list[Tensor], found: Tensor) -> float:
    """The largest error relative to the expected results, or to 1 where these are smaller."""
    assert function.expected is not None
    shaped = [each.reshape(16, 16) for each in given] if function.group == "rows" else given
    exact = [each.double() if each.dtype.is_floating_point else each.long() for each in shaped]
    expected = function.expected(*exact).reshape(-1)
    if found.dtype.is_floating_point:
        wanted, got = expected.to(found.dtype).double(), found.double()
        same = (wanted == got) | (wanted.isnan() & got.isnan())
        errors = torch.where(same, 0, (got - wanted).abs() / wanted.abs().clamp(1))
        return float(errors.nan_to_num(torch.inf, torch.inf).max())
    if expected.dtype.is_floating_point:  # GPUs keep to the limits where C++ leaves it open
        limits = torch.iinfo(found.dtype)
        expected = expected.clamp(limits.min, limits.max)
    same = expected.to(found.dtype).long() == found.long()
    return float(not bool(same.all()))


REFUSED = "Triton cannot compile"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of a function on a target. said: "" if it is right, or why not."""

    function: Function
    target: str
    said: str = ""
    error: float | None = None

    @property
    def refused(self) -> bool:
        """Whether Triton itself does not compile it."""
        return self.said.startswith(REFUSED)


def tried(function: Function, target: str, warps: int) -> Verdict:
    """Execute one function."""
    given = arguments(function)
    kind = function.result.removeprefix("in place ")
    count = {"BLOCK": SIZE, "2 * BLOCK": 2 * SIZE}.get(function.shape) or int(function.shape)
    out = torch.zeros(count, dtype=getattr(torch, kind))
    copies = [each.clone() for each in given]
    padded = [*copies, *[out] * 4][:4]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Triton's, about dtypes that overflow
        try:
            report = ptx.run(
                kernels()[function], 1, *padded, out, BLOCK=SIZE, target=target, num_warps=warps
            )
        except FlashgenError as error:
            if log := re.search(r"\S+\.log", str(error)):
                Path(log[0]).unlink()
            return Verdict(function=function, target=target, said=str(error))
    if report.findings:
        return Verdict(function=function, target=target, said=str(report.findings[0]))
    if function.expected is None:
        return Verdict(function=function, target=target)
    error_found = difference(function, given, copies[0] if kind != function.result else out)
    said = "" if error_found <= function.tolerance else f"wrong: error {error_found:.1e}"
    return Verdict(function=function, target=target, said=said, error=error_found)


def swept(
    functions: Iterable[Function], targets: Sequence[str] = ARCHITECTURES
) -> Iterator[Verdict]:
    """Each function on each target, with 1, 2, 4 or 8 warps in turn."""
    for number, (function, target) in enumerate(itertools.product(functions, targets)):
        yield tried(function, target, WARPS[number % len(WARPS)])


def table(verdicts: Iterable[Verdict]) -> Iterator[str]:
    """The rows of docs/numerics.md."""
    yield "| functions | in dtypes | executed | right by torch | not compared | refused by Triton | fail |"
    yield "|---|---|---|---|---|---|---|"
    for group, found in itertools.groupby(
        sorted(verdicts, key=lambda each: each.function.group), key=lambda each: each.function.group
    ):
        of_group = list(found)
        refused = [each for each in of_group if each.refused]
        failed = [each for each in of_group if each.said and not each.refused]
        right = [each for each in of_group if not each.said and each.error is not None]
        names = {each.function.name for each in of_group}
        forms = {each.function for each in of_group}
        alone = len(of_group) - len(refused) - len(failed) - len(right)
        counts = (
            len(names),
            len(forms),
            len(of_group) - len(refused),
            len(right),
            alone,
            len(refused),
            len(failed),
        )
        yield f"| {group} | " + " | ".join(map(str, counts)) + " |"


if __name__ == "__main__":
    chosen = sys.argv[1:] or ARCHITECTURES
    print("\n".join(table(swept((*language(), *device_library()), chosen))))
