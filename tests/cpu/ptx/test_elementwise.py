"""Each form of instruction that works lane by lane, against its definition."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashgen.ptx import instructions
from flashgen.ptx.decode import TABLE
from flashgen.ptx.instructions import load_all
from flashgen.ptx.program import InvalidPtx
from flashgen.ptx.types import bfloat16_to_float, float_to_bfloat16
from tests.ptx_snippets import Array, kernel, lanes, run

RNG = np.random.default_rng(0)
F32 = (RNG.standard_normal(32) * 4).astype(np.float32)
G32 = (RNG.standard_normal(32) * 4).astype(np.float32)
SPECIAL = np.resize(
    np.array([0.0, -0.0, 1.5, -2.5, 0.5, np.nan, np.inf, -np.inf, 1e-40, 3e38], np.float32), 32
)
U32 = RNG.integers(0, 2**32, 32, dtype=np.uint32)
V32 = RNG.integers(1, 2**32, 32, dtype=np.uint32)
S32, T32 = U32.view(np.int32), V32.view(np.int32)
U64 = RNG.integers(0, 2**64, 32, dtype=np.uint64)
V64 = RNG.integers(1, 2**64, 32, dtype=np.uint64)
SMALL = RNG.integers(0, 40, 32, dtype=np.uint32)
HALF = F32.astype(np.float16)
U16S = U32.view(np.uint16)
BF16 = float_to_bfloat16(F32)
PAIRS = np.resize(BF16, 64)


U16, V16 = (RNG.integers(0, 2**16, 32, dtype=np.uint16) for _ in range(2))
S64 = U64.view(np.int64)
P64, Q64 = ((RNG.standard_normal(64) * 4).astype(np.float32).view(np.uint64) for _ in range(2))


def pairwise(function: Callable[..., Array]) -> Callable[..., Array]:
    """A function of float32, of both halves of 64 bits."""
    return lambda *arrays: function(*(a.view(np.float32) for a in arrays)).view(np.uint64)


def python(function: Callable[..., int], bits: int) -> Callable[..., Array]:
    """A function of Python's integers, lane by lane."""
    dtype = np.dtype(f"u{bits // 8}")
    return lambda *arrays: np.array(
        [function(*map(int, values)) % 2**bits for values in zip(*arrays, strict=True)], dtype
    )


def signed_bytes(number: int) -> tuple[int, ...]:
    """The four bytes of 32 bits, each with its sign."""
    return struct.unpack("4b", (number % 2**32).to_bytes(4, "little"))


def quotient(a: int, b: int) -> int:
    """Division rounded towards zero."""
    size = abs(a) // abs(b)
    return size if (a < 0) == (b < 0) else -size


def ordered(a: Array, b: Array) -> Array:
    return ~(np.isnan(a) | np.isnan(b))


def directed(exact: Callable[..., Fraction], towards: float | None) -> Callable[..., Array]:
    """A function of fractions, rounded to the float that is next towards -inf or inf; None: 0."""

    def one(*values: np.floating[Any]) -> np.floating[Any]:
        true, dtype = exact(*(Fraction(float(value)) for value in values)), type(values[0])
        nearest = dtype(float(true))
        aim = dtype((-np.inf if true > 0 else np.inf) if towards is None else towards)
        over = Fraction(float(nearest)) - true
        return np.nextafter(nearest, aim) if over and (over > 0) == (aim < 0) else nearest

    return lambda *arrays: np.array([one(*values) for values in zip(*arrays, strict=True)])


F64, G64 = (RNG.standard_normal(32) for _ in range(2))
TINY64 = G64 * 1e-20
TINY = (F32 * np.float32(1e-20)).astype(np.float32)
CASES: list[tuple[str, list[Array], Any, Callable[..., Array]]] = [
    ("add.s32 {d}, {0}, {1};", [U32, V32], np.uint32, lambda a, b: a + b),
    ("add.rm.f32 {d}, {0}, {1};", [F32, TINY], np.float32, directed(lambda a, b: a + b, -np.inf)),
    ("add.rp.f32 {d}, {0}, {1};", [F32, G32], np.float32, directed(lambda a, b: a + b, np.inf)),
    ("sub.rz.f32 {d}, {0}, {1};", [F32, TINY], np.float32, directed(lambda a, b: a - b, None)),
    ("mul.rz.f32 {d}, {0}, {1};", [F32, G32], np.float32, directed(lambda a, b: a * b, None)),
    ("fma.rm.f32 {d}, {0}, {1}, {2};", [F32, G32, TINY], np.float32, directed(lambda a, b, c: a * b + c, -np.inf)),
    ("add.s64 {d}, {0}, {1};", [U64, V64], np.uint64, lambda a, b: a + b),
    ("sub.s32 {d}, {0}, {1};", [U32, V32], np.uint32, lambda a, b: a - b),
    ("add.sat.s32 {d}, {0}, {1};", [S32, T32], np.int32, lambda a, b: np.clip(a.astype(np.int64) + b, -(2**31), 2**31 - 1).astype(np.int32)),
    ("mul.lo.s32 {d}, {0}, {1};", [U32, V32], np.uint32, lambda a, b: a * b),
    ("mul.hi.u32 {d}, {0}, {1};", [U32, V32], np.uint32, python(lambda a, b: a * b >> 32, 32)),
    ("mul.hi.s32 {d}, {0}, {1};", [S32, T32], np.uint32, python(lambda a, b: a * b >> 32, 32)),
    ("mul.hi.u64 {d}, {0}, {1};", [U64, V64], np.uint64, python(lambda a, b: a * b >> 64, 64)),
    ("mul.wide.s32 {d}, {0}, {1};", [S32, T32], np.int64, lambda a, b: a.astype(np.int64) * b),
    ("mul.wide.u32 {d}, {0}, 20;", [U32], np.uint64, lambda a: a.astype(np.uint64) * np.uint64(20)),
    ("mad.lo.s32 {d}, {0}, {1}, {0};", [U32, V32], np.uint32, lambda a, b: a * b + a),
    ("mad.wide.s32 {d}, {0}, {1}, {2};", [S32, T32, U64], np.uint64, lambda a, b, c: (a.astype(np.int64) * b).view(np.uint64) + c),
    ("sad.s32 {d}, {0}, {1}, 9;", [S32, T32], np.uint32, python(lambda a, b: abs(a - b) + 9, 32)),
    ("sad.u32 {d}, {0}, {1}, {0};", [U32, V32], np.uint32, python(lambda a, b: abs(a - b) + a, 32)),
    ("add.rm.f64 {d}, {0}, {1};", [F64, TINY64], np.float64, directed(lambda a, b: a + b, -np.inf)),
    ("mul.rp.f64 {d}, {0}, {1};", [F64, G64], np.float64, directed(lambda a, b: a * b, np.inf)),
    ("fma.rz.f64 {d}, {0}, {1}, {0};", [F64, G64], np.float64, directed(lambda a, b: a * b + a, None)),
    ("fma.rn.f64 {d}, {0}, {1}, {2};", [F64, G64, -F64 * G64], np.float64, lambda a, b, c: np.array([float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in zip(a, b, c, strict=True)])),
    ("div.rz.f64 {d}, {0}, {1};", [F64, G64], np.float64, directed(lambda a, b: a / b, None)),
    ("div.rm.f32 {d}, {0}, {1};", [F32, G32], np.float32, directed(lambda a, b: a / b, -np.inf)),
    ("rcp.rp.f32 {d}, {0};", [F32], np.float32, directed(lambda a: 1 / a, np.inf)),
    ("sqrt.rz.f32 {d}, {0};", [F32 * F32], np.float32, lambda a: np.nextafter(x := np.sqrt(a), np.where(x.astype(np.float64)**2 > a, 0, x).astype(np.float32))),
    ("cvt.rz.f32.f64 {d}, {0};", [F64], np.float32, lambda a: np.where(abs(x := a.astype(np.float32)) > abs(a), np.nextafter(x, np.float32(0)), x)),
    ("cvt.rm.f32.s32 {d}, {0};", [S32], np.float32, lambda a: np.where((x := a.astype(np.float32)) > a.astype(np.float64), np.nextafter(x, np.float32(-np.inf)), x)),
    ("cvt.rp.f64.u64 {d}, {0};", [U64], np.float64, lambda a: np.array([x if int(x) >= int(n) else np.nextafter(x, np.inf) for n in a for x in [np.float64(n)]])),
    ("add.s16x2 {d}, {0}, {1};", [U32, V32], np.uint32, lambda a, b: (a.view(np.uint16) + b.view(np.uint16)).view(np.uint32)),
    ("max.s16x2 {d}, {0}, {1};", [U32, V32], np.uint32, lambda a, b: np.maximum(a.view(np.int16), b.view(np.int16)).view(np.uint32)),
    ("min.u16x2 {d}, {0}, {1};", [U32, V32], np.uint32, lambda a, b: np.minimum(a.view(np.uint16), b.view(np.uint16)).view(np.uint32)),
    ("setp.gt.bf16x2 %p1|%p2, {0}, {1}; selp.b32 {d}, 1, 0, %p1; @%p2 add.s32 {d}, {d}, 2;", [PAIRS.view(np.uint32), PAIRS[::-1].copy().view(np.uint32)], np.uint32, lambda a, b: (bfloat16_to_float(a.view(np.uint16)) > bfloat16_to_float(b.view(np.uint16))).reshape(32, 2) @ np.array([1, 2], np.uint32)),
    ("min.xorsign.abs.f32 {d}, {0}, {1};", [F32, G32], np.float32, lambda a, b: np.minimum(abs(a), abs(b)) * np.sign(a) * np.sign(b)),
    ("max.xorsign.abs.f32 {d}, {0}, {1};", [SPECIAL, F32], np.float32, lambda a, b: np.copysign(np.fmax(abs(a), abs(b)), np.copysign(1, a) * b)),
    ("add.cc.u32 %r40, {0}, {1}; addc.u32 {d}, 0, 0;", [U32, V32], np.uint32, python(lambda a, b: a + b >> 32, 32)),
    ("add.cc.u32 %r40, {0}, {1}; addc.cc.u32 %r41, {0}, -1; addc.u32 {d}, {1}, 0;", [U32, V32], np.uint32, python(lambda a, b: b + ((a + 2**32 - 1 + (a + b >> 32)) >> 32), 32)),
    ("sub.cc.u32 %r40, {0}, {1}; subc.cc.u32 %r41, {0}, {0}; subc.u32 {d}, {1}, 5;", [U32, V32], np.uint32, python(lambda a, b: b - 5 - (a < b), 32)),
    ("mad.lo.cc.u32 %r40, {0}, {1}, {0}; madc.hi.u32 {d}, {0}, {1}, 7;", [U32, V32], np.uint32, python(lambda a, b: (a * b + a >> 32) + 7, 32)),
    ("mad.lo.cc.u64 %d10, {0}, {1}, {0}; madc.hi.u64 {d}, {0}, {1}, {1};", [U64, V64], np.uint64, python(lambda a, b: (a * b + a >> 64) + b, 64)),
    ("div.s32 {d}, {0}, {1};", [S32, T32], np.uint32, python(quotient, 32)),
    ("div.u32 {d}, {0}, {1};", [U32, V32], np.uint32, lambda a, b: a // b),
    ("rem.s32 {d}, {0}, {1};", [S32, T32], np.uint32, python(lambda a, b: a - quotient(a, b) * b, 32)),
    ("rem.u64 {d}, {0}, {1};", [U64, V64], np.uint64, lambda a, b: a % b),
    ("min.s32 {d}, {0}, {1};", [S32, T32], np.int32, np.minimum),
    ("min.relu.s32 {d}, {0}, {1};", [S32, T32], np.int32, lambda a, b: np.maximum(np.minimum(a, b), 0)),
    ("max.u32 {d}, {0}, {1};", [U32, V32], np.uint32, np.maximum),
    ("neg.s32 {d}, {0};", [S32], np.int32, np.negative),
    ("abs.s32 {d}, {0};", [S32], np.int32, np.abs),
    ("and.b32 {d}, {0}, {1};", [U32, V32], np.uint32, np.bitwise_and),
    ("or.b64 {d}, {0}, {1};", [U64, V64], np.uint64, np.bitwise_or),
    ("xor.b32 {d}, {0}, -1;", [U32], np.uint32, np.invert),
    ("not.b32 {d}, {0};", [U32], np.uint32, np.invert),
    ("shl.b32 {d}, {0}, {1};", [U32, SMALL], np.uint32, python(lambda a, n: a << n, 32)),
    ("shr.u32 {d}, {0}, {1};", [U32, SMALL], np.uint32, python(lambda a, n: a >> n, 32)),
    ("shr.s32 {d}, {0}, {1};", [S32, SMALL], np.uint32, python(lambda a, n: a >> n, 32)),
    ("shr.s64 {d}, {0}, 40;", [U64.view(np.int64)], np.int64, lambda a: a >> 40),
    ("shf.l.wrap.b32 {d}, {0}, {1}, {2};", [U32, V32, SMALL], np.uint32, python(lambda a, b, n: ((b << 32 | a) << (n & 31)) >> 32, 32)),
    ("shf.r.clamp.b32 {d}, {0}, {1}, {2};", [U32, V32, SMALL], np.uint32, python(lambda a, b, n: (b << 32 | a) >> min(n, 32), 32)),
    ("bfe.u32 {d}, {0}, 5, 7;", [U32], np.uint32, lambda a: (a >> np.uint32(5)) & np.uint32(127)),
    ("bfe.s32 {d}, {0}, 5, 7;", [S32], np.int32, lambda a: (a << 20) >> 25),
    ("bfe.s32 {d}, {0}, 28, 9;", [S32], np.int32, lambda a: a >> 28),
    ("bfi.b32 {d}, {0}, {1}, 4, 8;", [U32, V32], np.uint32, python(lambda a, b: b & ~0xFF0 | (a & 0xFF) << 4, 32)),
    ("popc.b32 {d}, {0};", [U32], np.uint32, python(int.bit_count, 32)),
    ("clz.b32 {d}, {0};", [SMALL], np.uint32, python(lambda a: 32 - a.bit_length(), 32)),
    ("bfind.u32 {d}, {0};", [U32], np.uint32, python(lambda a: a.bit_length() - 1, 32)),
    ("brev.b32 {d}, {0};", [U32], np.uint32, python(lambda a: int(f"{a:032b}"[::-1], 2), 32)),
    ("prmt.b32 {d}, {0}, {1}, 0x5410;", [U32, V32], np.uint32, python(lambda a, b: a & 0xFFFF | (b & 0xFFFF) << 16, 32)),
    ("prmt.b32 {d}, {0}, {1}, 0xB762;", [U32, V32], np.uint32, python(lambda a, b: (a >> 16 & 0xFF) | (b >> 16 & 0xFF) << 8 | (b >> 24 & 0xFF) << 16 | (0xFF << 24 if a >> 31 else 0), 32)),
    ("lop3.b32 {d}, {0}, {1}, {0}, 0x96;", [U32, V32], np.uint32, lambda a, b: a ^ b ^ a),
    ("lop3.b32 {d}, {0}, {1}, {2}, 0xE8;", [U32, V32, SMALL], np.uint32, lambda a, b, c: a & b | a & c | b & c),
    ("add.f32 {d}, {0}, {1};", [F32, G32], np.float32, np.add),
    ("sub.rn.f32 {d}, {0}, {1};", [F32, G32], np.float32, np.subtract),
    ("mul.f32 {d}, {0}, 0f40000000;", [F32], np.float32, lambda a: a * 2),
    ("mul.ftz.f32 {d}, {0}, 0f3F800000;", [SPECIAL], np.float32, lambda a: np.where(a == np.float32(1e-40), np.float32(0), a)),
    ("add.sat.f32 {d}, {0}, {1};", [F32, G32], np.float32, lambda a, b: np.clip(a + b, 0, 1)),
    ("fma.rn.f32 {d}, {0}, {1}, {0};", [F32, G32], np.float32, lambda a, b: (a.astype(np.float64) * b + a).astype(np.float32)),
    ("div.full.f32 {d}, {0}, {1};", [F32, G32], np.float32, np.divide),
    ("max.f32 {d}, {0}, {1};", [SPECIAL, G32], np.float32, np.fmax),
    ("max.NaN.f32 {d}, {0}, {1};", [SPECIAL, G32], np.float32, np.maximum),
    ("min.f32 {d}, {0}, {1};", [G32, SPECIAL], np.float32, np.fmin),
    ("max.f32 {d}, {0}, {1}, {2};", [F32, G32, SPECIAL], np.float32, lambda a, b, c: np.fmax(np.fmax(a, b), c)),
    ("neg.f32 {d}, {0};", [F32], np.float32, np.negative),
    ("abs.f32 {d}, {0};", [F32], np.float32, np.abs),
    ("ex2.approx.ftz.f32 {d}, {0};", [F32], np.float32, np.exp2),
    ("lg2.approx.f32 {d}, {0};", [np.abs(F32)], np.float32, np.log2),
    ("rcp.approx.f32 {d}, {0};", [F32], np.float32, lambda a: np.float32(1) / a),
    ("sqrt.rn.f32 {d}, {0};", [np.abs(F32)], np.float32, np.sqrt),
    ("rsqrt.approx.f32 {d}, {0};", [np.abs(F32)], np.float32, lambda a: np.float32(1) / np.sqrt(a)),
    ("tanh.approx.f32 {d}, {0};", [F32], np.float32, np.tanh),
    ("copysign.f32 {d}, {0}, {1};", [F32, G32], np.float32, lambda a, b: np.copysign(b, a)),
    ("add.f16 {d}, {0}, {0};", [HALF], np.float16, lambda a: a + a),
    ("fma.rn.bf16 {d}, {0}, {0}, {0};", [BF16], np.uint16, lambda a: float_to_bfloat16(bfloat16_to_float(a) ** 2 + bfloat16_to_float(a))),
    ("mul.bf16x2 {d}, {0}, {0};", [PAIRS.view(np.uint32)], np.uint32, lambda a: float_to_bfloat16(bfloat16_to_float(PAIRS) ** 2).view(np.uint32)),
    ("add.f32x2 {d}, {0}, {0};", [U64], np.uint64, lambda a: (a.view(np.float32) * 2).view(np.uint64)),
    ("setp.lt.s32 %p1, {0}, {1}; selp.b32 {d}, {0}, {1}, %p1;", [S32, T32], np.int32, np.minimum),
    ("setp.lt.f32 %p1, {0}, {1}; selp.b32 {d}, 1, 0, %p1;", [SPECIAL, G32], np.uint32, lambda a, b: (a < b).astype(np.uint32)),
    ("setp.geu.f32 %p1, {0}, {1}; selp.b32 {d}, 1, 0, %p1;", [SPECIAL, G32], np.uint32, lambda a, b: ((a >= b) | ~ordered(a, b)).astype(np.uint32)),
    ("setp.ne.f32 %p1, {0}, {0}; selp.b32 {d}, 1, 0, %p1;", [SPECIAL], np.uint32, lambda a: np.zeros(32, np.uint32)),
    ("setp.neu.f32 %p1, {0}, {0}; selp.b32 {d}, 1, 0, %p1;", [SPECIAL], np.uint32, lambda a: np.isnan(a).astype(np.uint32)),
    ("setp.nan.f32 %p1, {0}, {1}; selp.b32 {d}, 1, 0, %p1;", [SPECIAL, G32], np.uint32, lambda a, b: (~ordered(a, b)).astype(np.uint32)),
    ("setp.eq.s32 %p2, {0}, 3; setp.gt.and.u32 %p1, {0}, 1, %p2; selp.b32 {d}, 1, 0, %p1;", [SMALL], np.uint32, lambda a: (a == 3).astype(np.uint32)),
    ("setp.lt.u32 %p1|%p2, {0}, 20; selp.b32 {d}, 1, 0, %p2;", [SMALL], np.uint32, lambda a: (a >= 20).astype(np.uint32)),
    ("set.lt.u32.f32 {d}, {0}, {1};", [F32, G32], np.uint32, lambda a, b: np.where(a < b, np.uint32(2**32 - 1), np.uint32(0))),
    ("mov.pred %p1, 0; mov.pred %p2, -1; mov.pred %p3, 1; selp.b32 %r50, 5, {0}, %p1; selp.b32 %r51, %r50, 5, %p2; selp.b32 {d}, %r51, 5, %p3;", [SMALL], np.uint32, lambda a: a),
    ("setp.lt.u32 %p1, {0}, 20; not.pred %p2, %p1; xor.pred %p3, %p1, %p2; selp.b32 {d}, {0}, 0, %p3;", [SMALL], np.uint32, lambda a: a),
    ("mov.b32 {d}, 7; setp.lt.u32 %p1, {0}, 20; @%p1 mov.b32 {d}, 9;", [SMALL], np.uint32, lambda a: np.where(a < 20, np.uint32(9), np.uint32(7))),
    ("setp.lt.u32 %p1, {0}, 20; @!%p1 mov.b32 {d}, 9; @%p1 mov.b32 {d}, {0};", [SMALL], np.uint32, lambda a: np.where(a < 20, a, np.uint32(9))),
    ("cvt.s64.s32 {d}, {0};", [S32], np.int64, lambda a: a.astype(np.int64)),
    ("cvt.u64.u32 {d}, {0};", [U32], np.uint64, lambda a: a.astype(np.uint64)),
    ("cvt.u16.u32 {d}, {0};", [U32], np.uint16, lambda a: a.astype(np.uint16)),
    ("cvt.rn.f32.s32 {d}, {0};", [S32], np.float32, lambda a: a.astype(np.float32)),
    ("cvt.rzi.s32.f32 {d}, {0};", [F32], np.int32, lambda a: np.trunc(a).astype(np.int32)),
    ("cvt.rni.s32.f32 {d}, {0};", [SPECIAL], np.int32, lambda a: np.array([int(np.clip(np.rint(np.nan_to_num(x, posinf=np.inf, neginf=-np.inf)), -2.0**31, 2.0**31 - 1)) for x in a.astype(np.float64)], np.int32)),
    ("cvt.rmi.f32.f32 {d}, {0};", [F32], np.float32, np.floor),
    ("cvt.rn.f16.f32 {d}, {0};", [F32], np.float16, lambda a: a.astype(np.float16)),
    ("cvt.f32.f16 {d}, {0};", [HALF], np.float32, lambda a: a.astype(np.float32)),
    ("cvt.rn.bf16.f32 {d}, {0};", [F32], np.uint16, float_to_bfloat16),
    ("cvt.f32.bf16 {d}, {0};", [BF16], np.float32, bfloat16_to_float),
    ("cvt.rn.bf16x2.f32 {d}, {0}, {1};", [F32, G32], np.uint32, lambda a, b: np.stack([float_to_bfloat16(b), float_to_bfloat16(a)], 1).view(np.uint32)[:, 0]),
    ("cvt.rn.f16x2.f32 {d}, {0}, {1};", [F32, G32], np.uint32, lambda a, b: np.stack([b, a], 1).astype(np.float16).view(np.uint32)[:, 0]),
    ("cvt.rn.satfinite.e4m3x2.f32 {d}, {0}, {1};", [np.float32([1.0, -448.0, 1e9, 0.0] * 8), np.float32([1.0625, 2.0**-9, -0.0, 17.0] * 8)], np.uint16, lambda a, b: np.resize(np.uint16([0x3838, 0xFE01, 0x7E80, 0x0058]), 32)),
    ("cvt.rn.f16x2.e4m3x2 {d}, {0};", [np.resize(np.uint16([0x3838, 0xFE01]), 32)], np.uint32, lambda a: np.resize(np.float16([1, 1, 2.0**-9, -448]), 64).view(np.uint32)),
    ("mov.b64 {d}, {{{0}, {1}}};", [U32, V32], np.uint64, lambda a, b: b.astype(np.uint64) << np.uint64(32) | a),
    ("mov.b32 {{%h10, %h11}}, {0}; mov.b32 {d}, {{%h11, %h10}};", [U32], np.uint32, lambda a: a << np.uint32(16) | a >> np.uint32(16)),
    ("mov.u32 {d}, %laneid;", [], np.uint32, lambda: np.arange(32, dtype=np.uint32)),
    ("mov.u32 {d}, %ntid.x;", [], np.uint32, lambda: np.full(32, 32, np.uint32)),
    ("mov.u32 {d}, %lanemask_lt;", [], np.uint32, lambda: (np.uint32(1) << np.arange(32, dtype=np.uint32)) - np.uint32(1)),
    ("and.b64 {d}, {0}, {1};", [U64, V64], np.uint64, np.bitwise_and),
    ("xor.b64 {d}, {0}, {1};", [U64, V64], np.uint64, np.bitwise_xor),
    ("and.b16 {d}, {0}, {1};", [U16, V16], np.uint16, np.bitwise_and),
    ("or.b16 {d}, {0}, {1};", [U16, V16], np.uint16, np.bitwise_or),
    ("shl.b16 {d}, {0}, 3;", [U16], np.uint16, lambda a: a << 3),
    ("shl.b32 {d}, {0}, 32;", [U32], np.uint32, lambda a: 0 * a),
    ("shl.b64 {d}, {0}, 33;", [U64], np.uint64, lambda a: a << np.uint64(33)),
    ("shr.u64 {d}, {0}, 33;", [U64], np.uint64, lambda a: a >> np.uint64(33)),
    ("mul.lo.s64 {d}, {0}, {1};", [U64, V64], np.uint64, lambda a, b: a * b),
    ("mad.lo.s64 {d}, {0}, {1}, {0};", [U64, V64], np.uint64, lambda a, b: a * b + a),
    ("max.s32 {d}, {0}, {1};", [S32, T32], np.int32, np.maximum),
    ("sub.f32 {d}, {0}, {1};", [F32, G32], np.float32, np.subtract),
    ("fma.rn.ftz.f32 {d}, {0}, {1}, {2};", [TINY, F32, G32], np.float32, lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32)),
    ("fma.rn.f32.bf16 {d}, {0}, {0}, {1};", [BF16, G32], np.float32, lambda a, c: (bfloat16_to_float(a).astype(np.float64) ** 2 + c).astype(np.float32)),
    ("sub.f32.f16 {d}, {0}, {1};", [HALF, G32], np.float32, lambda a, b: a.astype(np.float32) - b),
    ("mul.f32x2 {d}, {0}, {1};", [P64, Q64], np.uint64, pairwise(np.multiply)),
    ("sub.f32x2 {d}, {0}, {1};", [P64, Q64], np.uint64, pairwise(np.subtract)),
    ("fma.rn.f32x2 {d}, {0}, {1}, {0};", [P64, Q64], np.uint64, pairwise(lambda a, b: (a.astype(np.float64) * b + a).astype(np.float32))),
    ("add.rm.ftz.f32x2 {d}, {0}, {1};", [P64, Q64], np.uint64, pairwise(directed(lambda a, b: a + b, -np.inf))),
    ("setp.eq.b32 %p1, {0}, 3; selp.f32 {d}, {1}, {2}, %p1;", [SMALL, F32, G32], np.float32, lambda n, a, b: np.where(n == 3, a, b)),
    ("setp.ne.b32 %p1, {0}, 3; selp.b16 {d}, {1}, {2}, %p1;", [SMALL, U16, V16], np.uint16, lambda n, a, b: np.where(n != 3, a, b)),
    ("setp.ne.b64 %p1, {0}, {1}; selp.b64 {d}, {0}, 5, %p1;", [U64, V64], np.uint64, lambda a, b: a),
    *(
        (f"setp.{word}.{kind} %p1, {{0}}, {{1}}; selp.b32 {{d}}, 1, 0, %p1;", [a, b], np.uint32,
         lambda a, b, compare=compare: compare(a, b).astype(np.uint32))
        for word, compare in (("eq", np.equal), ("ge", np.greater_equal), ("gt", np.greater), ("le", np.less_equal), ("lt", np.less))
        for kind, a, b in (("s32", S32, T32), ("u32", U32, V32), ("s64", S64, V64.view(np.int64)), ("u64", U64, V64), ("f32", SPECIAL, G32))
    ),
    ("setp.lt.s32 %p1, {0}, 0; setp.gt.u32 %p2, {1}, 20; and.pred %p3, %p1, %p2; or.pred %p4, %p1, %p2; selp.b32 %r50, 1, 0, %p3; selp.b32 {d}, 2, %r50, %p4;", [S32, SMALL], np.uint32, lambda a, b: np.where((a < 0) | (b > 20), np.uint32(2), np.uint32(0))),
    ("cvt.u32.u16 {d}, {0};", [U16], np.uint32, lambda a: a.astype(np.uint32)),
    ("cvt.u32.u64 {d}, {0};", [U64], np.uint32, lambda a: a.astype(np.uint32)),
    ("mov.b16 {d}, {0};", [U16], np.uint16, lambda a: a),
    ("mov.u16 {d}, 7;", [], np.uint16, lambda: np.full(32, 7, np.uint16)),
    ("mov.u64 {d}, {0};", [U64], np.uint64, lambda a: a),
    ("mov.u32 %r61, smem; mad.lo.s32 %r62, %r60, 16, %r61; st.shared.v4.b32 [%r62], {{{0}, {1}, {0}, {1}}}; ld.shared.v2.b64 {{%d1, %d2}}, [%r62]; xor.b64 {d}, %d1, 1; ld.shared.v4.b32 {{%r1, %r2, %r3, %r4}}, [%r62]; sub.s32 %r1, %r1, %r3; cvt.u64.u32 %d3, %r1; add.s64 {d}, {d}, %d3;", [U32, V32], np.uint64, lambda a, b: (b.astype(np.uint64) << np.uint64(32) | a) ^ np.uint64(1)),
    ("mov.u32 %r61, smem; mad.lo.s32 %r62, %r60, 8, %r61; st.shared.v2.b16 [%r62], {{{0}, {1}}}; st.shared.b16 [%r62+4], {0}; st.shared.b16 [%r62+6], {0}; ld.shared.v2.b32 {{%r1, %r2}}, [%r62]; ld.shared.s32 %r3, [%r62+4]; sub.s32 %r2, %r2, %r3; add.s32 {d}, %r1, %r2;", [U16, V16], np.uint32, lambda a, b: b.astype(np.uint32) << np.uint32(16) | a),
    ("mov.u32 %r61, smem; mad.lo.s32 %r62, %r60, 8, %r61; st.shared.v2.b32 [%r62], {{{0}, 0}}; ld.shared.b8 %h1, [%r62+1]; cvt.u32.u16 {d}, %h1;", [U32], np.uint32, lambda a: a >> np.uint32(8) & np.uint32(255)),
    ("ld.param.b64 %d1, [p1]; cvta.global.u64 %d1, %d1; mad.wide.u32 %d2, %r60, 4, %d1; st.global.b32 [%d2], {0}; ld.global.b32 {d}, [%d2];", [U32], np.uint32, lambda a: a),
    ("mov.b32 %r61, p1; cvt.u64.u32 %d1, %r61; cvta.param.u64 %d1, %d1; cvta.to.param.u64 %d1, %d1; ld.param.b64 %d1, [%d1]; mad.wide.u32 %d2, %r60, 4, %d1; st.global.b32 [%d2], {0}; ld.global.b32 {d}, [%d2];", [U32], np.uint32, lambda a: a),
    ("mov.b64 %d1, p1; ld.param.b64 %d2, [p1]; ld.param.u64 %d3, [%d1]; sub.s64 {d}, %d2, %d3;", [U64], np.uint64, lambda a: a * np.uint64(0)),
    ("ld.param.b32 %r1, [p0]; ld.param.s32 %r2, [p0]; sub.s32 {d}, %r1, %r2;", [U32], np.uint32, lambda a: a * 0),
    ("dp4a.s32.s32 {d}, {0}, {1}, {2};", [S32, T32, SMALL], np.uint32, python(lambda a, b, c: sum(x * y for x, y in zip(signed_bytes(a), signed_bytes(b), strict=True)) + c, 32)),
    ("dp4a.u32.u32 {d}, {0}, {1}, {2};", [U32, V32, SMALL], np.uint32, python(lambda a, b, c: sum((a >> n & 255) * (b >> n & 255) for n in (0, 8, 16, 24)) + c, 32)),
    ("sin.approx.f32 {d}, {0};", [F32], np.float32, np.sin),
    ("cos.approx.f32 {d}, {0};", [F32], np.float32, np.cos),
    *(
        (f"testp.{which}.f32 %p1, {{0}}; selp.b32 {{d}}, 1, 0, %p1;", [SPECIAL], np.uint32, lambda a, kind=kind: kind(a).astype(np.uint32))
        for which, kind in (("finite", np.isfinite), ("infinite", np.isinf), ("notanumber", np.isnan), ("number", lambda a: ~np.isnan(a)))
    ),
    ("mapa.shared::cluster.u32 {d}, {0}, 0;", [U32], np.uint32, lambda a: a),
    ("mov.u32 {d}, 5; setp.lt.u32 %p1, {0}, 20; @%p1 bra GO; trap; GO: add.s32 {d}, {d}, {0};", [SMALL % 20], np.uint32, lambda a: a + 5),
    *(
        (f"ld.param.b64 %d1, [p0]; {hint}; mov.b32 {{d}}, {{0}};", [U32], np.uint32, lambda a: a)
        for hint in (
            "prefetch.global.L2 [%d1]", "prefetchu.L1 [%d1]", "applypriority.global.L2::evict_normal [%d1], 128", "discard.global.L2 [%d1], 128",
            "createpolicy.fractional.L2::evict_first.b64 %d2, 0f3F800000", "membar.gl", "nanosleep.u32 100", "griddepcontrol.wait", "pmevent 1",
        )
    ),
    ("ld.param.b64 %d1, [p0]; mad.wide.u32 %d1, %r60, 4, %d1; ldu.global.b32 {d}, [%d1];", [U32], np.uint32, lambda a: a),
]  # fmt: skip


@pytest.mark.parametrize(
    "case", CASES, ids=[case[0].replace("{", "").replace("}", "") for case in CASES]
)
def test_an_instruction_does_what_it_is_defined_to(case: tuple[Any, ...]) -> None:
    text, inputs, dtype, expected = case
    with np.errstate(all="ignore"):
        wanted = expected(*inputs).astype(dtype)
    found = lanes(text, inputs, dtype)
    np.testing.assert_array_equal(
        found.view(f"u{found.itemsize}"), wanted.view(f"u{found.itemsize}")
    ) if not np.issubdtype(dtype, np.floating) else np.testing.assert_array_equal(found, wanted)


SHUFFLES = [
    ("shfl.sync.bfly.b32 {d}, {0}, 4, 31, -1;", U32[np.arange(32) ^ 4]),
    ("shfl.sync.idx.b32 {d}, {0}, 3, 31, -1;", np.full(32, U32[3])),
    ("shfl.sync.up.b32 {d}, {0}, 1, 0, -1;", U32[np.maximum(np.arange(32) - 1, 0)]),
    ("shfl.sync.down.b32 {d}, {0}, 2, 31, -1;", U32[np.where(np.arange(32) < 30, np.arange(32) + 2, np.arange(32))]),
    ("shfl.sync.idx.b32 {d}, {0}, 1, 0x1c07, -1;", U32[np.arange(32) // 4 * 4 + 1]),
    ("setp.lt.u32 %p1, {0}, 0x80000000; vote.sync.ballot.b32 {d}, %p1, -1;", np.full(32, int((U32 < 2**31) @ (1 << np.arange(32))), np.uint32)),
    ("setp.lt.u32 %p1, {0}, 0x80000000; vote.sync.any.pred %p2, %p1, -1; selp.b32 {d}, 1, 0, %p2;", np.ones(32, np.uint32)),
    ("and.b32 {0}, {0}, 3; match.any.sync.b32 {d}, {0}, -1;", (((U32 & 3)[:, None] == (U32 & 3)[None, :]) @ (1 << np.arange(32))).astype(np.uint32)),
    ("redux.sync.max.u32 {d}, {0}, -1;", np.full(32, U32.max())),
    ("redux.sync.or.b32 {d}, {0}, -1;", np.full(32, np.bitwise_or.reduce(U32))),
    ("redux.sync.add.s32 {d}, {0}, -1;", np.full(32, U32.sum(dtype=np.uint32))),
    ("elect.sync %r50|%p1, -1; selp.b32 {d}, {0}, 0, %p1;", np.where(np.arange(32) == 0, U32, np.uint32(0))),
    ("activemask.b32 {d};", np.full(32, 2**32 - 1, np.uint32)),
    # Element (row, column) of 16 bits is half column % 2 of lane 4 * row + column / 2.
    ("movmatrix.sync.aligned.m8n8.trans.b16 {d}, {0};", np.array([U16S[8 * (2 * (n % 4) + half) + n // 4] for n in range(32) for half in range(2)]).view(np.uint32)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), SHUFFLES, ids=[text for text, _ in SHUFFLES])
def test_lanes_exchange_values(text: str, expected: Array) -> None:
    np.testing.assert_array_equal(lanes(text, [U32], np.uint32), expected)


def test_lanes_that_diverge_meet_again() -> None:
    body = """setp.lt.u32 %p1, {0}, 10;
    @%p1 bra SMALL;
    mul.lo.s32 {d}, {0}, 2;
    bra.uni DONE;
    SMALL: add.s32 {d}, {0}, 100;
    DONE: add.s32 {d}, {d}, 1;
    shfl.sync.bfly.b32 {d}, {d}, 1, 31, -1;"""
    expected = (np.where(SMALL < 10, SMALL + 100, SMALL * 2) + 1)[np.arange(32) ^ 1]
    np.testing.assert_array_equal(lanes(body, [SMALL], np.uint32), expected)


def test_each_lane_has_its_own_trip_count() -> None:
    body = "mov.b32 {d}, 0; LOOP: add.s32 {d}, {d}, 1; setp.lt.u32 %p1, {d}, {0}; @%p1 bra LOOP;"
    np.testing.assert_array_equal(lanes(body, [SMALL], np.uint32), np.maximum(SMALL, 1))


def test_a_branch_by_index_takes_the_label_of_its_lane() -> None:
    body = """and.b32 %r40, {0}, 1;
    TABLE: .branchtargets EVEN, ODD;
    brx.idx %r40, TABLE;
    EVEN: mov.b32 {d}, 2; bra DONE;
    ODD: mov.b32 {d}, 1;
    DONE: add.s32 {d}, {d}, 0;"""
    np.testing.assert_array_equal(lanes(body, [SMALL], np.uint32), 2 - (SMALL & 1))


@pytest.mark.parametrize("word", ["ret;", "exit;"])
def test_lanes_that_have_left_do_nothing_more(word: str) -> None:
    body = f"""mov.u32 %r60, %tid.x; ld.param.u64 %d20, [p0]; mad.wide.u32 %d20, %r60, 4, %d20;
    setp.lt.u32 %p1, %r60, 10; @%p1 {word} st.global.b32 [%d20], 7;"""
    (left,), report = run(kernel(body, 1), [np.zeros(32, np.uint32)])
    np.testing.assert_array_equal(left, np.where(np.arange(32) < 10, 0, 7))
    assert not report.findings


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("red.global.add.f32 [%d20], 0f3F800000;", 32.0),
        ("atom.global.gpu.relaxed.max.u32 %r5, [%d20], %r60;", np.uint32(31).view(np.float32)),
        ("atom.global.cas.b32 %r5, [%d20], 0, 0x40000000;", 2.0),
        ("atom.global.exch.b32 %r5, [%d20], 0x40400000;", 3.0),
    ],
)
def test_atomics_combine_all_lanes(text: str, expected: float) -> None:
    body = f"mov.u32 %r60, %tid.x; ld.param.u64 %d20, [p0]; {text}"
    (left,), report = run(kernel(body, 1), [np.zeros(1, np.float32)])
    assert left[0] == np.float32(expected)
    assert not report.findings


@pytest.mark.parametrize("count", [2, 4])
def test_an_atomic_of_a_vector_returns_what_was_there(count: int) -> None:
    old, ones = (
        ", ".join(each) for each in ([f"%r{2 + n}" for n in range(count)], ["%r1"] * count)
    )
    body = f"""mov.u32 %r60, %tid.x; ld.param.u64 %d20, [p0]; ld.param.u64 %d21, [p1]; mov.b32 %r1, 0f3F800000;
    mad.wide.u32 %d22, %r60, {4 * count}, %d20; mad.wide.u32 %d23, %r60, {4 * count}, %d21;
    atom.global.add.v{count}.f32 {{{old}}}, [%d22], {{{ones}}}; st.global.v{count}.b32 [%d23], {{{old}}};
    ld.global.v{count}.b32 {{{old}}}, [%d22]; st.global.v{count}.b32 [%d22], {{{old}}};"""
    start = np.arange(32 * count, dtype=np.float32)
    (left, before), report = run(kernel(body, 2), [start, start * 0])
    np.testing.assert_array_equal(left, start + 1)
    np.testing.assert_array_equal(before, start)
    assert not report.findings


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("frobnicate.b32 %r1, %r2;", "the instruction frobnicate"),
        ("add.rz.bf16 %h1, %h2, %h3;", ".rz of bf16"),
        (
            "mma.sync.aligned.m8n8k4.row.col.f32.bf16.bf16.f32 {%r1}, {%r2}, {%r3}, {%r1};",
            "this shape",
        ),
        ("add.s32 %r1, %r2, %r99;", "%r99 is not declared"),
        ("bra NOWHERE;", "must be a label"),
        ("ld.shared.b32 %r1, [%r2+%r3];", "an address that is not known"),
    ],
)
def test_what_is_not_known_is_an_error_that_names_it(text: str, named: str) -> None:
    with pytest.raises(InvalidPtx, match=named.replace(".", r"\.")) as error:
        run(kernel(text, 0), [])
    assert "PTX line" in str(error.value) or named in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("; ModuleID = 'amd'\n.amdgcn_target", "this is not PTX"),
        (kernel("mov.b32 %r1, 0;", 0)[:-8], "truncated"),
        (kernel("", 0) + kernel("", 0).split("64\n")[1], "exactly|must have one kernel: got 2"),
        (kernel("", 0).replace(".reqntid 32", ""), "must state its threads"),
    ],
)
def test_bad_text_gets_one_sentence(text: str, said: str) -> None:
    with pytest.raises(InvalidPtx, match=said):
        run(text, [])


def test_every_module_of_instructions_is_loaded() -> None:
    """Its only variables are the modules that it imports."""
    modules = {path.stem for path in Path(instructions.__path__[0]).glob("*.py")} - {"__init__"}
    assert set(load_all.__code__.co_varnames) == modules


def test_every_instruction_has_a_test() -> None:
    """In a text of this folder."""
    load_all()
    texts = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    missing = [opcode for opcode in TABLE if not re.search(rf"\b{opcode}[.; ]", texts)]
    assert missing == []
