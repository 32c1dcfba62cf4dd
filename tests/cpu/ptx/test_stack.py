"""The stack: local memory, calls, what a kernel prints and asserts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from flashgen import ptx
from flashgen.ptx.program import InvalidPtx
from tests.ptx_snippets import HEADER, kernel, lanes, run

NUMBERS = np.arange(32, dtype=np.uint32)
LOCAL = ".local .align 8 .b8 depot[16]; .reg .b64 %SP, %SPL; mov.b64 %SPL, depot; cvta.local.u64 %SP, %SPL;"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("st.local.b32 [%SPL+4], {0}; ld.local.b32 {d}, [%SPL+4];", NUMBERS),
        ("st.b32 [%SP+4], {0}; ld.b32 {d}, [%SP+4];", NUMBERS),
        ("st.local.v2.b32 [%SPL+8], {{{0}, 7}}; ld.local.b64 %d1, [%SPL+8]; cvt.u32.u64 {d}, %d1;", NUMBERS),
        ("st.local.b8 [%SPL], 255; ld.local.s8 {d}, [%SPL];", NUMBERS * 0 - 1),
        ("cvta.to.local.u64 %d1, %SP; st.local.b32 [%d1], 3; ld.b32 {d}, [%SP];", NUMBERS * 0 + 3),
        # each lane at an address of its own
        ("and.b32 %r1, {0}, 1; shl.b32 %r1, %r1, 2; st.local.v2.b32 [%SPL], {{5, 6}}; ld.local.b32 {d}, [%r1];", NUMBERS % 2 + 5),
    ],
)  # fmt: skip
def test_each_lane_has_a_stack(body: str, expected: np.ndarray) -> None:  # type: ignore[type-arg]
    np.testing.assert_array_equal(lanes(LOCAL + body, [NUMBERS], np.uint32), expected)


@pytest.mark.parametrize(
    ("body", "check", "said"),
    [
        ("ld.local.b32 %r1, [%SPL+16];", "memcheck", "4 bytes at byte 16 of a stack of 16 bytes"),
        ("st.local.b32 [%SPL+-4], 1;", "memcheck", "it writes 4 bytes at byte -4"),
        ("ld.local.b32 %r1, [%SPL+4]; st.shared.b32 [smem], %r1;", "initcheck", "stores the register %r1, which depends on the stack"),
        ("st.local.b32 [%SPL], %r5; ld.local.b32 %r1, [%SPL]; st.shared.b32 [smem], %r1;", "initcheck", "which depends on the stack"),
        ("mov.u32 %r5, %laneid; setp.lt.u32 %p1, %r5, 9; @%p1 st.local.b32 [%SPL], 1; ld.local.b32 %r1, [%SPL]; st.shared.b32 [smem], %r1;", "initcheck", "lane 9"),
    ],
)  # fmt: skip
def test_a_stack_is_checked(body: str, check: str, said: str) -> None:
    report = run(kernel(LOCAL + body, 0), [])[1]
    finding, *_ = report.findings
    assert finding.check == check
    assert said in str(finding)


FUNCTION = """.func (.param .align 8 .b8 func_retval0[8]) half(.param .b32 half_param_0) {
.reg .b32 %r<5>; .reg .pred %p<3>; ld.param.b32 %r1, [half_param_0]; and.b32 %r2, %r1, 1; setp.eq.s32 %p1, %r2, 0;
st.param.b32 [func_retval0+4], %r1; @%p1 bra EVEN; st.param.b32 [func_retval0], 0; ret;
EVEN: shr.u32 %r3, %r1, 1; st.param.b32 [func_retval0], %r3; @%p1 ret; trap; }
"""
CALL = """{{ .param .b32 param0; .param .align 8 .b8 retval0[8]; st.param.b32 [param0], {0};
call.uni (retval0), half, (param0); ld.param.b32 %r40, [retval0]; ld.param.b32 %r41, [retval0+4]; }}
"""


def test_a_function_has_its_own_registers_and_returns_lane_by_lane() -> None:
    twice = CALL + "mov.b32 %r3, %r40;" + CALL.replace("{0}", "%r40") + "add.s32 {d}, %r3, %r40;"
    body = (
        "mov.b32 {d}, 0; setp.lt.u32 %p1, {0}, 20; @!%p1 bra OUT;"
        + twice
        + "OUT: add.s32 {d}, {d}, 1;"
    )
    half = np.where(NUMBERS % 2, 0, NUMBERS // 2)
    quarter = np.where(half % 2, 0, half // 2)
    found = lanes(body, [NUMBERS], np.uint32, functions=FUNCTION)
    np.testing.assert_array_equal(found, np.where(NUMBERS < 20, half + quarter, 0) + 1)


@pytest.mark.parametrize(
    ("function", "call", "said"),
    [
        ("", "call.uni nowhere, ();", "the function nowhere is not known"),
        (".func f() { call.uni f, (); ret; }", "call.uni f, ();", "a call that is not known"),
        (".func f(.param .b32 a) { ret; }", "call.uni f, (b);", "b is not declared"),
        (".func f() { add.s32 %r1, %r1, 1; ret; }", "call.uni f, ();", "%r1 is not declared"),
    ],
)
def test_a_call_that_is_not_known_is_an_error(function: str, call: str, said: str) -> None:
    text = kernel(call, 0).replace(HEADER, HEADER + function)
    with pytest.raises(InvalidPtx, match=said):
        run(text, [])


@triton.jit(noinline=True)
def scaled(value, factor):
    return value * factor, value + 1


@triton.jit
def calls(x, out, stride, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    first, second = scaled(tl.program_id(0), stride)
    tl.store(out + tl.program_id(0) * BLOCK + at, tl.load(x + first + at) + second)


def test_a_function_that_is_not_inlined_is_called() -> None:
    x, out = torch.arange(64.0), torch.zeros(2, 16)
    ptx.launch(calls, (2,), x, out, 20, BLOCK=16)
    torch.testing.assert_close(out, torch.stack([x[:16] + 1, x[20:36] + 2]))


@triton.jit
def prints(x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.device_print("value", value, at)
    tl.device_assert(value < 30, "it is too large")


def test_a_kernel_prints(capsys: pytest.CaptureFixture[str]) -> None:
    ptx.launch(prints, (1,), torch.arange(32.0) - 1.5, BLOCK=32, num_warps=1)
    lines = capsys.readouterr().out.splitlines()
    assert "pid (0, 0, 0) idx ( 3) value: (operand 0) 1.500000" in lines
    assert "pid (0, 0, 0) idx (31) value: (operand 1) 31" in lines
    assert len(lines) == 64


def test_formats_of_c() -> None:
    from flashgen.ptx.instructions.stack import _CONVERSION

    assert [found[0] for found in _CONVERSION.finditer("%d %-3lld%% %.2f %*u %p %s %hhx")] == [
        "%d", "%-3lld", "%%", "%.2f", "%*u", "%p", "%s", "%hhx",
    ]  # fmt: skip


@pytest.mark.parametrize("debug", [True, False])
def test_an_assertion_fails_under_debug(debug: bool) -> None:
    report = ptx.run(prints, (1,), torch.arange(32.0), BLOCK=32, debug=debug)
    assert report.checks() == ({"memcheck"} if debug else set())
    if debug:
        assert "the assertion fails: it is too large, " in str(report.findings[0])


def test_clocks_move() -> None:
    for clock in ("%clock64", "%globaltimer"):
        body = f"mov.u64 %d1, {clock}; mov.u64 %d2, {clock}; sub.u64 {{d}}, %d2, %d1;"
        assert (lanes(body, [NUMBERS], np.uint64) > 0).all()
