"""The functions of triton.language and libdevice are executed: a few of them, or all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.language_sweep import ARCHITECTURES, device_library, language, swept, table, tried

REFUSED = {"fdiv"}
"""Functions of tl that Triton 3.7.1 does not compile in float16 and bfloat16."""


def test_a_function_is_right_wrong_or_refused() -> None:
    wanted = ("sin(float32)", "fdiv(float16, float16)", "sum(int8)")
    sine, refused, total = (
        next(each for each in language() if str(each) == name) for name in wanted
    )
    verdicts = [tried(each, "sm_90", 2) for each in (sine, refused, total)]
    verdicts.append(tried(replace(sine, expected=torch.cos), "sm_90", 2))
    assert [each.said[:9] for each in verdicts] == ["", "Triton ca", "", "wrong: er"]
    lines = list(table(verdicts))
    assert "| elementwise | 2 | 2 | 2 | 1 | 0 | 1 | 1 |" in lines
    assert "| rows | 1 | 1 | 1 | 1 | 0 | 0 | 0 |" in lines


def test_the_signatures_of_libdevice_are_read_from_its_source() -> None:
    held = {str(each): each.result for each in device_library()}
    assert held["ldexp(float64, int32)"] == "float64"
    assert len(held) > 300


@pytest.mark.slow("compiles and executes 4,400 kernels")
@pytest.mark.parametrize("target", ARCHITECTURES)
def test_every_function_is_right(target: str) -> None:
    verdicts = list(swept((*language(), *device_library()), [target]))
    assert {each.function.name for each in verdicts if each.refused} <= REFUSED
    wrong = [f"{each.function}: {each.said}" for each in verdicts if each.said and not each.refused]
    assert wrong == []
