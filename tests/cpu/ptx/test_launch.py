"""flashgen.ptx.launch on kernels that nobody made for it."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from flashgen import ptx
from flashgen.errors import InvalidArgument
from tests.makers import each
from tests.tutorials import TUTORIALS, USES_TMA, vector_sum


@pytest.mark.parametrize(
    "arch", each(["sm_80", "sm_100", "sm_90"], 2, "make test has two architectures")
)
@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_is_right(name: str, arch: str) -> None:
    if name in USES_TMA and arch == "sm_80":
        pytest.skip("sm_80 has no TMA unit")
    for seed in range(2):
        found, expected = TUTORIALS[name](target=arch, seed=seed)
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-2)


def test_a_gpu_may_be_named() -> None:
    x = torch.ones(64)
    out = torch.zeros(64)
    report = ptx.launch(vector_sum, (1,), x, x, out, 64, BLOCK=64, target="nvidia_h200")
    assert report.blocks == 1
    assert report.steps > 10
    assert out.eq(2).all()


@triton.jit
def beyond(x, out, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at + count))


def test_a_load_outside_of_its_tensor_is_found_with_the_kernels_line() -> None:
    with pytest.raises(
        ptx.FaultsFound, match=r"memcheck: test_launch\.py:\d+: it reads .* of x"
    ) as error:
        ptx.launch(beyond, (1,), torch.ones(64), torch.zeros(64), 8, BLOCK=64)
    assert error.value.report.checks() == {"memcheck"}
    report = ptx.run(beyond, (1,), torch.ones(64), torch.zeros(64), 8, BLOCK=64)
    assert report.checks() == {"memcheck"}


def test_a_view_has_its_own_bounds() -> None:
    held = torch.ones(128)
    with pytest.raises(ptx.FaultsFound, match="byte 256 of x, which has 256"):
        ptx.launch(beyond, (1,), held[:64], torch.zeros(64), 8, BLOCK=64)
    ptx.launch(beyond, (1,), held, torch.zeros(64), 8, BLOCK=64)


@triton.jit
def every_program_writes(out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.full((BLOCK,), 0, tl.int32) + tl.program_id(0))


def test_programs_that_write_the_same_place_race() -> None:
    out = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(ptx.FaultsFound, match=r"racecheck: .* of out, which block"):
        ptx.launch(every_program_writes, (3,), out, BLOCK=64)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ptx.launch(print, (1,)), "under @triton.jit"),
        (lambda: ptx.launch(vector_sum, (1,), torch.ones(4)), "the argument y is missing"),
        (lambda: ptx.launch(vector_sum, (1,), "x", 1, 2, 3, BLOCK=4), "x must be a tensor or a number"),
        (lambda: ptx.launch(every_program_writes, (1, 1, 1, 1), torch.zeros(4), BLOCK=4), "one to three"),
        (lambda: ptx.launch(every_program_writes, (1,), torch.zeros(4), BLOCK=4, target="gfx942"), "NVIDIA|known"),
        (lambda: ptx.launch(every_program_writes, (1,), torch.zeros(4, device="meta"), BLOCK=4), "CPU tensor"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_get_one_sentence(call, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidArgument, match=said) as error:
        call()
    assert "\n" not in str(error.value)
