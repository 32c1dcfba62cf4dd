"""How undefined values travel from register to register, and where they are reported."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cpu.ptx.test_checks import report_of
from tests.ptx_snippets import lanes

# %r2, %h2, %d2 and %p2 are undefined, %r3 to %r5 and %p1 are defined. P writes %r2 in lanes 0 to 15.
DEFINED = "mov.b32 %r3, 0x10000; mov.b32 %r4, 3; mov.b32 %r5, 0; mov.b16 %h3, 7; setp.lt.u32 %p1, %r60, 16;"
P = "@%p1 mov.b32 %r2, 5;"

TRAVELS = {
    "mov.b32 %r1, %r2; st.shared.b32 [%r62], %r1;": "stores the register %r1, which depends on %r2",
    "add.s32 %r1, %r2, 1; st.global.b32 [%d21], %r1;": "stores the register %r1",
    "st.global.b32 [%d2], %r3;": "takes an address from the register %d2",
    "add.s64 %d1, %d2, %d20; ld.global.b32 %r1, [%d1];": "takes an address from the register %d1",
    "@%p2 st.shared.b32 [%r62], %r3;": "is guarded by the register %p2",
    "setp.eq.u32 %p3, %r2, 0; @%p3 bra E; E:": "is guarded by the register %p3, which depends on %r2",
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r6, %r7, %r8, %r9}, {%r3, %r3, %r3, %r2}, {%r3, %r3}, {%r3, %r3, %r3, %r3};": "multiplies the register %r2",
    "mov.b32 %r1, {%h3, %h2}; st.shared.b32 [%r62], %r1;": "stores",
    "mov.b32 %r1, {%h3, %h2}; shr.u32 %r1, %r1, 8; st.shared.b8 [%r62], %r1;": "",
    "mov.b32 %r1, {%h3, %h2}; shr.u32 %r1, %r1, 9; st.shared.b8 [%r62], %r1;": "stores",
    "mov.b32 %r1, {%h3, %h2}; mov.b32 {%h4, %h5}, %r1; st.shared.b16 [%r62], %h4;": "",
    "mov.b32 %r1, {%h3, %h2}; mov.b32 {%h4, %h5}, %r1; st.shared.b16 [%r62], %h5;": "stores",
    "mov.b32 %r1, {%h3, %h2}; cvt.s32.s16 %r1, %r1; st.shared.b32 [%r62], %r1;": "",
    "mov.b32 %r1, {%h2, %h3}; cvt.s32.s16 %r1, %r1; st.shared.b32 [%r62], %r1;": "stores",
    "mov.b32 %r1, {%h3, %h2}; prmt.b32 %r1, %r1, %r3, 0x5410; st.shared.b32 [%r62], %r1;": "",
    "mov.b32 %r1, {%h3, %h2}; prmt.b32 %r1, %r1, %r3, 0x5412; st.shared.b32 [%r62], %r1;": "stores",
    "prmt.b32 %r1, %r3, %r3, %r2; st.shared.b8 [%r62], %r1;": "stores",
    "cvt.rn.satfinite.e4m3x2.f32 %h1, %r2, %r3; st.shared.b8 [%r62], %h1;": "",
    "cvt.rn.satfinite.e4m3x2.f32 %h1, %r3, %r2; st.shared.b8 [%r62], %h1;": "stores",
    "cvt.rn.bf16x2.f32 %r1, %r2, %r3; add.bf16x2 %r1, %r1, %r1; st.shared.b16 [%r62], %r1;": "",
    "cvt.rn.bf16x2.f32 %r1, %r3, %r2; add.bf16x2 %r1, %r1, %r1; st.shared.b16 [%r62], %r1;": "stores",
    "cvt.rn.f32.s32 %r1, %r2; st.shared.b32 [%r62], %r1;": "stores",
    "and.b32 %r1, %r2, %r5; st.shared.b32 [%r62], %r1;": "",
    "and.b32 %r1, %r2, 0xFF00; st.shared.b8 [%r62], %r1;": "",
    "and.b32 %r1, %r2, %r4; st.shared.b32 [%r62], %r1;": "stores",
    "or.b32 %r1, %r2, -1; st.shared.b32 [%r62], %r1;": "",
    "or.b32 %r1, %r2, %r4; st.shared.b32 [%r62], %r1;": "stores",
    "xor.b32 %r1, %r2, %r2; st.shared.b32 [%r62], %r1;": "stores",
    "selp.b32 %r1, %r3, %r2, %p1; @%p1 st.shared.b32 [%r62], %r1;": "",
    "selp.b32 %r1, %r3, %r2, %p1; st.shared.b32 [%r62], %r1;": "lane 16",
    "selp.b32 %r1, %r3, %r4, %p2; st.shared.b32 [%r62], %r1;": "stores the register %r1, which depends on %p2",
    "and.pred %p3, %p1, %p2; not.pred %p4, %p1; and.pred %p3, %p3, %p4; @%p3 st.shared.b32 [%r62], %r3;": "",
    P + "@%p1 st.shared.b32 [%r62], %r2;": "",
    P + "st.shared.b32 [%r62], %r2;": "lane 16",
    P + "shfl.sync.idx.b32 %r1, %r2, 3, 31, -1; st.shared.b32 [%r62], %r1;": "",
    P + "shfl.sync.idx.b32 %r1, %r2, 20, 31, -1; st.shared.b32 [%r62], %r1;": "lane 0",
    P + "redux.sync.add.s32 %r1, %r2, -1; @%p1 st.shared.b32 [%r62], %r1;": "lane 0",
    P + "mov.b32 %r2, 4; st.shared.b32 [%r62], %r2;": "",
    P + "add.s32 %r2, %r2, 1; @!%p1 mov.b32 %r2, 4; st.shared.b32 [%r62], %r2;": "",
}  # fmt: skip


@pytest.mark.parametrize(("body", "said"), TRAVELS.items(), ids=TRAVELS)
def test_an_undefined_value_is_reported_where_it_matters(body: str, said: str) -> None:
    report = report_of(DEFINED + body, threads=32)
    if not said:
        assert list(report.lines()) == []
    else:
        finding, *_ = report.findings
        assert finding.check == "initcheck"
        assert said in str(finding)
        assert "to which nothing was written" in finding.message


def test_an_undefined_value_spoils_what_is_computed_of_it() -> None:
    """So that a wrong result shows, too."""
    ones = np.ones(32, np.float32)
    assert np.isnan(lanes("add.f32 {d}, {0}, %r40;", [ones], np.float32, check=False)).all()
