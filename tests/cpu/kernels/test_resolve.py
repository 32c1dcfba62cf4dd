"""Kernels to be read alone: what their constants decide is decided, and nothing else changes."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import replace

import pytest
from triton._C.libtriton import ir
from triton.compiler.compiler import make_backend

from flashgen.compile.compiler import source_of, target_of
from flashgen.kernels.loader import load_text
from flashgen.kernels.render import Rendered, digest_of, in_place, render
from flashgen.kernels.resolve import resolved, variant
from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec
from tests.makers import each, make_config, make_spec
from tests.pairs import alone, in_pairs

ARCH = "sm_90"


@functools.cache
def twenty() -> list[tuple[AttentionSpec, KernelConfig]]:
    found = [pair for pair in (*alone(), *in_pairs()) if pair[1].interpretable]
    return found[:: len(found) // 20][:20]


def kernel(*lines: str) -> str:
    """A kernel with these statements, which takes x_ptr, n and m."""
    return "\n".join(["def kernel(x_ptr, n, m):", *(f"    {line}" for line in lines)]) + "\n"


def test_of_a_static_branch_the_side_that_is_taken_stays() -> None:
    text = kernel(
        "CAUSAL: tl.constexpr = True",
        "# Both sides have a comment.",
        "if CAUSAL:",
        "    # This one is taken.",
        "    x = n",
        "else:",
        "    # This one is not.",
        "    x = m",
        "store(x)",
    )
    taken = ("# Both sides have a comment.", "# This one is taken.", "x = n", "store(x)")
    assert resolved(text) == kernel(*taken)


def test_a_name_of_a_comprehension_is_no_phase() -> None:
    phases = ("for n in tl.static_range(2):", "    if n == 0:", "        x = m", "    store(x, n)")
    held = ("x = m", "store(x, 0)", "store(x, 1)", "store([x[n] for n in (0, 1)])")
    assert resolved(kernel(*phases, held[-1])) == kernel(*held)


def test_of_a_chain_that_a_launch_decides_in_part_that_part_stays() -> None:
    text = kernel(
        "ORDER: tl.constexpr = 'plain'",
        "if ORDER == 'grouped':",
        "    x = 1 * n",
        "elif n > 1:",
        "    x = 2 * n",
        "elif ORDER == 'plain':",
        "    x = 3 * n",
        "else:",
        "    x = 4 * n",
        "store(x)",
    )
    left = ("if n > 1:", "    x = 2 * n", "else:", "    x = 3 * n", "store(x)")
    assert resolved(text) == kernel(*left)


def test_phases_that_branches_tell_apart_are_written_out() -> None:
    text = kernel(
        "FIRST: tl.constexpr = None",
        "for phase in tl.static_range(0 if FIRST is not None else 1, 3):",
        "    end = n if phase == 1 else m",
        "    for i in tl.range(0, end):",
        "        if phase == 2:",
        "            check(i)",
        "        add(i, phase)",
    )
    one = ("end = n", "for i in tl.range(0, end):", "    add(i, 1)")
    two = ("end = m", "for i in tl.range(0, end):", "    check(i)", "    add(i, 2)")
    assert resolved(text) == kernel(*one, *two)


@pytest.mark.parametrize(
    ("size", "left"),
    [
        (512, ("for part in tl.range(n, m, SIZE):", "    add(part)")),
        (None, ("add(0)",)),
    ],
)
def test_a_loop_of_one_turn_or_several_is_that_which_it_is(
    size: int | None, left: tuple[str, ...]
) -> None:
    text = kernel(
        f"SIZE: tl.constexpr = {size}",
        "LOOPS: tl.constexpr = SIZE is not None",
        "for part in (tl.range if LOOPS else tl.static_range)(",
        "    n if LOOPS else 0,",
        "    m if LOOPS else 1,",
        "    SIZE if LOOPS else 1,",
        "):",
        "    add(part)",
    )
    first = ("SIZE: tl.constexpr = 512",) if size else ()
    assert resolved(text) == kernel(*first, *left)


def test_a_static_range_without_branches_stays() -> None:
    text = kernel("for w in tl.static_range(2):", "    add(w)")
    assert resolved(text) == text


def test_what_only_a_launch_knows_stays() -> None:
    text = kernel(
        "if n > m:",
        "    x = load(x_ptr)",
        "else:",
        "    # Nothing is loaded.",
        "    x = n",
        "store(x)",
    )
    assert resolved(text) == text


def test_a_name_with_another_value_on_either_side_of_a_branch_is_not_known_behind_it() -> None:
    text = kernel("y = 1", "if n > m:", "    y = 2", "x = 3 * n if y == 1 else m", "store(x)")
    assert resolved(text) == text


def test_a_name_that_a_loop_changes_is_not_known_in_it() -> None:
    text = kernel(
        "first = 0",
        "for i in tl.range(0, n):",
        "    add(i + first)",
        "    first = 1 + i",
    )
    assert resolved(text) == text


def test_masks_that_are_true_and_arguments_that_are_none_leave_a_call() -> None:
    text = kernel(
        "PRECISION: tl.constexpr = None",
        "in_dims = True",
        "x = tl.load(x_ptr, mask=in_dims, other=0.0)",
        "y = tl.load(x_ptr, mask=(n < m) & in_dims, other=0.0)",
        "store(tl.dot(x, y, input_precision=PRECISION))",
    )
    assert resolved(text) == kernel(
        "x = tl.load(x_ptr)",
        "y = tl.load(x_ptr, mask=(n < m), other=0.0)",
        "store(tl.dot(x, y))",
    )


def test_a_zero_that_stands_in_the_text_stays() -> None:
    text = kernel("ZERO: tl.constexpr = 0.0", "x = n * m + 0.0", "store(x - ZERO)")
    # Of -0.0, + 0.0 makes 0.0.
    assert resolved(text) == kernel("x = n * m + 0.0", "store(x)")


def test_numbers_keep_their_names() -> None:
    text = kernel("BR: tl.constexpr = 128", "rows = n * BR", "store(rows)")
    assert resolved(text) == text


def test_functions_that_nobody_calls_go() -> None:
    of_nobody = "@triton.jit\ndef tanh(x):\n    return x\n\n\n"
    text = kernel("CAP: tl.constexpr = None", "x = n if CAP is None else tanh(n)", "store(x)")
    assert resolved(of_nobody + text).lstrip() == kernel("x = n", "store(x)")
    assert resolved(of_nobody + text.replace("None", "1", 1)).startswith(of_nobody)


def first_ir(rendered: Rendered, spec: AttentionSpec, config: KernelConfig) -> str:
    """What Triton's front end makes of a kernel, without names."""
    backend = make_backend(target_of(ARCH))
    source = source_of(load_text(rendered), spec, config, whole=False)
    options = {**config.launch_options(spec), **source.parse_options()}
    parsed = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(parsed), backend.get_module_map()
    module = source.make_ir(target_of(ARCH), parsed, *functions, context)
    stages: dict[str, object] = {}
    backend.add_stages(stages, parsed, source.language)
    module = next(iter(stages.values()))(module, {})  # type: ignore[operator]
    return without_names(module.str_nodebug())


def without_names(text: str) -> str:
    """IR whose values are numbered as they come, with constants where they are used."""
    constant = re.compile(r"^ *(%[\w-]+) = (arith\.constant [^:\n]*)(:.*)?\n", re.MULTILINE)
    values = {found[1]: found[2] for found in constant.finditer(text)}
    left = re.sub(r"%[\w-]+", lambda found: values.get(found[0], found[0]), constant.sub("", text))
    numbers: dict[str, str] = {}
    return re.sub(r"%[\w-]+", lambda found: numbers.setdefault(found[0], f"%{len(numbers)}"), left)


@pytest.mark.parametrize("number", each(range(20), 3))
def test_a_variant_computes_what_the_kernel_computes_and_has_no_switch_left(number: int) -> None:
    spec, config = twenty()[number]
    rendered = render(spec, config)
    text = variant(rendered)
    alone = replace(
        rendered, text_name=rendered.name, source=text, text_digest=digest_of(text), constants=()
    )
    name = rf"@{rendered.text_name}\b"
    assert first_ir(alone, spec, config) == re.sub(
        name, f"@{rendered.name}", first_ir(rendered, spec, config)
    )

    tree = ast.parse(text)
    *_, kernel = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    switches = {name for name, value in rendered.constants if isinstance(value, bool | None | str)}
    found = [node for node in ast.walk(kernel) if isinstance(node, ast.Name)]
    names = {node.id for node in found}
    own = {node.id for node in found if isinstance(node.ctx, ast.Store)}  # in place of an argument
    assert switches & names <= own
    assert "phase" not in names


def test_a_plain_kernel_is_short() -> None:
    rendered = render(make_spec(), make_config())
    assert len(variant(rendered).splitlines()) < len(in_place(rendered).splitlines()) / 2
