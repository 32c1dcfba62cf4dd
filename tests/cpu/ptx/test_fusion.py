"""Alike instructions that run as one do what they do one by one."""

from __future__ import annotations

import numpy as np
import pytest

from flashgen.ptx import execute
from flashgen.ptx.execute import Loaded
from flashgen.ptx.findings import Report
from flashgen.ptx.text import parse
from tests.ptx_snippets import Array, kernel, run

COPIES = 3

TEMPLATES = [  # of registers a, b and c that hold 32 bits, to d; w of 64, h and g of 16, p and q
    "add.s32 d, a, b;", "sub.s32 d, a, K;", "mul.lo.s32 d, a, b;", "mad.lo.s32 d, a, b, c;",
    "mul.hi.u32 d, a, b;", "mul.wide.s32 w, a, K; cvt.u32.u64 d, w;", "div.s32 d, a, b;",
    "mul.hi.u64 w, w, w; cvt.u32.u64 d, w;", "add.f32 d, a, b;", "fma.rn.ftz.f32 d, a, b, c;",
    "add.rz.f32 d, a, b;", "min.NaN.f32 d, a, b;", "max.xorsign.abs.f32 d, a, b;",
    "neg.f32 d, a;", "abs.s32 d, a;", "and.b32 d, a, b;", "not.b32 d, a;", "shl.b32 d, a, K;",
    "shr.s32 d, a, b;", "shf.l.wrap.b32 d, a, b, c;", "lop3.b32 d, a, b, c, 0x96;",
    "bfe.u32 d, a, 5, 9;", "bfe.s32 d, a, b, c;", "prmt.b32 d, a, b, 0x5410;",
    "prmt.b32 d, a, b, c;", "setp.lt.s32 p, a, b; selp.b32 d, a, c, p;",
    "setp.gt.f32 p|q, a, b; selp.b32 d, 1, 2, q;", "cvt.rn.bf16x2.f32 d, a, b;",
    "cvt.rn.f16.f32 h, a; cvt.f32.f16 d, h;", "cvt.rzi.s32.f32 d, a;", "cvt.sat.f32.s32 d, a;",
    "mov.b64 w, {a, b}; mov.b64 {d, e}, w;", "fma.rn.bf16x2 d, a, b, c;", "ex2.approx.ftz.f32 d, a;",
    "mov.b64 w, {a, b}; fma.rn.f32x2 w, w, w, w; mov.b64 {d, e}, w;", "rcp.approx.ftz.f32 d, a;",
    "shfl.sync.bfly.b32 d, a, 4, 31, -1;", "shfl.sync.up.b32 d|p, a, b, 0, -1;",
    "movmatrix.sync.aligned.m8n8.trans.b16 d, a;", "st.shared.b32 [s+K], a; ld.shared.b32 d, [s+K];",
    "st.shared.v2.b32 [t+N], {a, b}; ld.shared.v2.b32 {d, _}, [t+N];", "mov.b32 d, K;",
    "stmatrix.sync.aligned.m8n8.x2.shared.b16 [m+N], {a, b};"
    " ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {d, e}, [m+N];",
    "mov.b32 d, a; mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {d, e, x, y}, {a, b, c, a},"
    " {b, c}, {d, e, x, y}; mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {d, e, x, y},"
    " {c, b, a, b}, {a, b}, {d, e, x, y};",
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {d, e, x, y}, {a, b, c, a}, {b, c},"
    " {d, e, x, y};",
    "max.f32 d, a, b; max.f32 e, d, c; max.f32 d, e, a;", "add.f32 d, a, b; add.f32 d, d, c;",
    "@z add.s32 d, a, b;", "@!z sub.s32 d, a, b;", "cp.async.cg.shared.global [u+H], [g], 16;",
]  # fmt: skip


def module(template: str) -> str:
    """The instructions of a template three times, each followed by those of the next one."""
    body = [
        "mov.u32 %r70, %tid.x; ld.param.u64 %d30, [p0]; ld.param.u64 %d31, [p1];",
        "mad.wide.u32 %d32, %r70, 4, %d30; mad.wide.u32 %d33, %r70, 4, %d31;",
        "shl.b32 %r71, %r70, 2; shl.b32 %r72, %r70, 3; shl.b32 %r73, %r70, 4; mov.u32 %r74, smem;",
        "add.u32 %r71, %r71, %r74; add.u32 %r72, %r72, %r74; add.u32 %r73, %r73, %r74;",
        "setp.lt.u32 %p9, %r70, 40; mad.wide.u32 %d34, %r70, 16, %d30;",
    ]
    names = []
    for copy in range(COPIES):
        at = 10 * copy
        held = {name: f"%r{at + n}" for n, name in enumerate("abcdexy")}
        names.append(
            {**held, "w": f"%d{copy}", "h": f"%h{copy}", "p": f"%p{2 * copy}", "q": f"%p{2 * copy + 1}",
             "z": "%p9", "s": "%r71", "t": "%r72", "m": "%r73", "u": "%r73", "g": "%d34",
             "K": str(128 * copy + 4), "N": str(512 * copy), "H": str(512 * copy)}
        )  # fmt: skip
        for n, name in enumerate("abc"):
            body.append(f"ld.global.b32 {held[name]}, [%d32+{128 * (3 * copy + n)}];")
        body += [f"mov.b32 {held[n]}, {copy + 7};" for n in "dexy"] + [f"mov.b64 %d{copy}, -9;"]
    for instruction in filter(None, template.split(";")):
        for each in names:
            words = "".join(_named(instruction, each))
            body.append(f"{words};")
    body.append("cp.async.wait_all;" if "cp.async" in template else "")
    for copy, each in enumerate(names):
        result = each["d"]
        if "cp.async" in template:
            body.append(f"ld.shared.b32 {result}, [{each['u']}+{each['H']}];")
        body.append(f"st.global.b32 [%d33+{128 * copy}], {result};")
    return kernel("\n".join(body), 2)


def _named(instruction: str, names: dict[str, str]) -> list[str]:
    """An instruction with its single letters replaced: none of them is in an opcode alone."""
    found, word = [], ""
    for letter in instruction + " ":
        if letter.isalnum() or letter in "._":
            word += letter
            continue
        found += [names.get(word, word), letter]
        word = ""
    return found


def results(text: str) -> tuple[Array, Report]:
    rng = np.random.default_rng(0)
    given = rng.integers(0, 2**32, (9, 32), dtype=np.uint32)
    given[:3] = rng.standard_normal((3, 32)).astype(np.float32).view(np.uint32)
    (_, found), report = run(text, [given, np.zeros((COPIES, 32), np.uint32)])
    return found, report


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_group_gives_what_its_instructions_give(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = module(template)
    loaded = Loaded(parse(text))
    opcodes = {
        loaded.program.instructions[at].opcode for at, group in enumerate(loaded.fusions) if group
    }
    for instruction in filter(None, template.split(";")):
        opcode = next(word for word in instruction.split() if not word.startswith("@"))
        assert opcode in opcodes
    together, report = results(text)
    monkeypatch.setattr(execute, "fusions", lambda program, *_: (None,) * len(program.instructions))
    apart, expected = results(text)
    assert together.tobytes() == apart.tobytes()
    assert (report.steps, list(report.lines())) == (expected.steps, list(expected.lines()))
    assert not report.findings


@pytest.mark.parametrize("space", ["global", "shared"])
def test_the_second_of_two_loads_is_out_of_bounds(space: str) -> None:
    address = {"global": "ld.param.u64 %d2, [p0];", "shared": "mov.u32 %r2, smem;"}[space]
    base = {"global": "%d2", "shared": "%r2"}[space]
    body = f"ld.{space}.b32 %r3, [{base}]; ld.{space}.b32 %r4, [{base}+4096];"
    _, report = run(kernel(address + body, 1), [np.zeros(32, np.uint32)])
    (finding,) = [each for each in report.findings if each.check == "memcheck"]
    assert finding.lane == 0
    assert f"[{base}+4096]" in finding.instruction.text
