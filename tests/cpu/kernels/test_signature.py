"""kernels/signature.py: a launch looks in Triton's cache for what warmup and aot compile, for every feature and direction."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, NoReturn

import pytest
import triton
from triton.compiler import ASTSource

from flashgen.evaluate.check import cases_of, compared, trial_of
from flashgen.evaluate.check_cache import DecodeCase
from flashgen.kernels import signature
from flashgen.kernels.launch import bind
from flashgen.kernels.loader import load_text
from flashgen.kernels.render import render
from flashgen.schedules.config import KernelConfig, kernel_name
from flashgen.spec.attention import AttentionSpec
from tests.cpu.kernels.test_specialization import CompileOnlyDriver
from tests.pairs import alone


class Asked(Exception):
    """What Triton was to compile."""


class Uncompiled:
    """A kernel that says what a launch of it would look up, and compiles nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return self

    def __call__(self, *arguments: Any, **options: Any) -> NoReturn:
        def compile_(
            key: str,
            signature: dict[str, str],
            device: int,
            constants: Any,
            options: Any,
            attrs: Any,
            warmup: bool,
        ) -> NoReturn:
            raise Asked(ASTSource(self.kernel, signature, constants, attrs))

        self.kernel._do_compile = compile_
        self.kernel[(1,)](*arguments, **options)
        raise AssertionError("nothing was compiled")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)


OF_THE_CASES = "stride_do?", "?_descale_ptr"
"""In the cases dO is expanded, and the scales of fp8 operands are parts of one tensor."""

PROVEN = {kernel_name(*pair): pair for pair in alone()}


@pytest.mark.parametrize("name", PROVEN)
def test_a_launch_looks_for_what_is_compiled_ahead(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", CompileOnlyDriver())
    spec, config = PROVEN[name]
    rendered = render(spec, config)
    kernel = load_text(rendered)
    asked = facts_of(of_launch(Uncompiled(kernel), spec, config), kernel)
    ahead = []
    for whole in signature.variants(spec):
        made = signature.compile_signature(spec, config, kernel.arg_names, whole=whole)
        ahead.append(facts_of(ASTSource(kernel, made.types, made.constexprs, made.attrs), kernel))
    assert asked in ahead


def facts_of(source: ASTSource, kernel: Any) -> dict[str, tuple[object, ...]]:
    """What the key of Triton's cache has of each argument; its attributes are "-" where there is no list."""
    return {
        name: (
            source.signature[name],
            source.constants.get((place,)),
            source.attrs.get((place,), "-"),
        )
        for place, name in enumerate(kernel.arg_names)
        if not any(fnmatchcase(name, pattern) for pattern in OF_THE_CASES)
    }


def of_launch(kernel: Any, spec: AttentionSpec, config: KernelConfig) -> ASTSource:
    """What the launch of a case with contiguous tensors of whole tiles looks up; packed ones always are."""
    cases = [replace(case, varied=False) for case in cases_of(spec, config)]
    aligned = (c for c in cases if isinstance(c, DecodeCase) or c.problem.seq_k % config.bc == 0)
    case = next((case for case in aligned if case.layout == "bhsd"), cases[0])
    with pytest.raises(Asked) as raised:
        compared(bind(kernel, spec, config), trial_of(spec, case, 0))
    (found,) = raised.value.args
    assert isinstance(found, ASTSource)
    return found
