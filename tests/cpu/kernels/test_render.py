"""The renderer and the rules of the templates: strict, deterministic, clean, readable."""

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from flashgen import paths
from flashgen.errors import FlashgenError
from flashgen.kernels import render
from flashgen.kernels.render import HEADER_LINES, code_of, digest_of
from flashgen.kernels.text import text_name
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.defaults import (
    default_config,
    default_configs,
    default_spec,
    specs_with_default,
)
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.space import legal_configs
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from flashgen.spec.vocabulary import DECODING, OF_DS, Direction
from flashgen.table.emit import kernels_of
from flashgen.table.table_file import load
from tests.makers import make_config, make_spec
from tests.pairs import alone, in_pairs
from tests.tables import SHIPPED

GOLDEN = Path(__file__).parents[2] / "golden"
H200, B200 = TARGETS["nvidia_h200"], TARGETS["nvidia_b200"]


def variants() -> list[tuple[AttentionSpec, KernelConfig]]:
    """Every structural variant of the templates once: mask, schedule, loads, order, head dims, dtype."""
    found = []
    for mask, schedule, loads, order, (d, dv) in itertools.product(
        ("none", "causal"), ("fa1", "fa2", "s_ahead", "auto"), ("pointer", "descriptor"),
        ("plain", "longest_first", "head_reversal", "grouped"), ((40, 40), (64, 64), (96, 96), (128, 96)),
    ):  # fmt: skip
        spec = make_spec("bfloat16", d, mask, head_dim_v=dv)
        config = make_config(64, 64, schedule=schedule, loads=loads, order=order)
        if why_illegal(spec, config, H200) is None:
            found.append((spec, config))
        persistent = replace(config, persistent=True)
        if why_illegal(spec, persistent, H200) is None:
            found.append((spec, persistent))
    for precision, mask in itertools.product(("ieee", "tf32"), ("none", "causal")):
        spec = default_spec(make_spec("float32", 64, mask, precision=precision))
        found.append((spec, default_config(spec)))
    found += hopper_variants() + blackwell_variants() + ampere_variants()
    return found + backward_variants() + decoding_variants()


def texts() -> dict[str, render.Rendered]:
    """One of the variants of each text, by the text's name."""
    return {rendered.text_name: rendered for rendered in rendered_variants()}


@functools.cache
def rendered_variants() -> tuple[render.Rendered, ...]:
    return tuple(render.render(*variant) for variant in variants())


def ampere_variants() -> list[tuple[AttentionSpec, KernelConfig]]:
    """The same of schedule ampere: with each number of parts, and longest first."""
    way: dict[str, Any] = {"schedule": "ampere", "num_warps": 8, "num_stages": 1}
    return [
        (
            make_spec("bfloat16", d, mask),
            make_config(128, 64, order="longest_first" if mask == "causal" else "plain", **way),
        )
        for d, mask in itertools.product((64, 128, 192, 256), ("none", "causal"))
    ]


def blackwell_variants() -> list[tuple[AttentionSpec, KernelConfig]]:
    """The same of schedule blackwell: two tiles of rows and one, Q and K in pieces, and gradients."""
    halves = make_config(128, 128, num_warps=8, schedule="blackwell", loads="descriptor")
    found = [
        (make_spec("bfloat16", d, mask, direction=direction), halves)
        for d, mask, direction in itertools.product(
            (64, 128), ("none", "causal"), ("backward_dkv", "backward_dq", "backward_fused")
        )
    ]
    one_v = replace(halves, bc=64)
    found += [
        (make_spec("bfloat16", 256, mask, direction="backward_dq"), one_v)
        for mask in ("none", "causal")
    ]
    for mask, order, persistent, (br, d, dv) in itertools.product(
        ("none", "causal"), ("plain", "grouped"), (False, True),
        ((256, 64, 64), (128, 256, 256), (256, 192, 128)),
    ):  # fmt: skip
        way: dict[str, Any] = {"schedule": "blackwell", "loads": "descriptor"}
        way |= {"num_warps": br // 32, "order": order, "persistent": persistent}
        config, spec = make_config(br, 64, **way), make_spec("bfloat16", d, mask, head_dim_v=dv)
        if why_illegal(spec, config, B200) is None:
            found.append((spec, config))
    return found


def hopper_variants() -> list[tuple[AttentionSpec, KernelConfig]]:
    """The same of schedule hopper: two consumers and three, O in Q's place and in its own."""
    found = []
    for mask, order, persistent, (br, d, dv) in itertools.product(
        ("none", "causal"), ("plain", "longest_first", "head_reversal", "grouped"), (False, True),
        ((192, 64, 64), (128, 256, 256), (128, 192, 128)),
    ):  # fmt: skip
        way: dict[str, Any] = {"schedule": "hopper", "loads": "descriptor", "num_warps": br // 16}
        config = make_config(br, 32, order=order, persistent=persistent, **way)
        spec = make_spec("bfloat16", d, mask, head_dim_v=dv)
        if why_illegal(spec, config, H200) is None:
            found.append((spec, config))
    way = {"schedule": "hopper", "loads": "descriptor"}
    for mask, (direction, br, bc, warps), (d, dv) in itertools.product(
        ("none", "causal"),
        (
            ("backward_dkv", 64, 128, 8),
            ("backward_fused", 64, 128, 8),
            ("backward_dq", 192, 64, 12),
        ),
        ((64, 64), (96, 64)),
    ):
        spec = make_spec("float16", d, mask, head_dim_v=dv, direction=direction)
        found.append((spec, make_config(br, bc, num_warps=warps, num_stages=3, **way)))
    for mask, (direction, br, bc, next_s, d, dv) in itertools.product(
        ("none", "causal"),
        (
            ("backward_fused", 128, 128, True, 64, 64),
            ("backward_fused", 64, 64, False, 256, 256),
            ("backward_dkv", 64, 64, False, 192, 128),
        ),
    ):
        spec = make_spec("bfloat16", d, mask, head_dim_v=dv, direction=direction)
        config = make_config(br, bc, num_warps=8, num_stages=2, next_s=next_s, **way)
        assert why_illegal(spec, config, H200) is None
        found.append((spec, config))
    for mask, direction in itertools.product(("none", "causal"), ("backward_dkv", "backward_dq")):
        order = "grouped" if mask == "causal" else "plain"
        config = make_config(128, 128, num_warps=8, order=order, persistent=True, **way)
        found.append((make_spec("bfloat16", 64, mask, direction=direction), config))
    return found


FEATURES: tuple[dict[str, Any], ...] = (
    {}, {"bias": "additive", "alibi": True, "dropout": True}, {"bias": "boolean"}, {"dropout": True},
    {"alibi": True}, {"bias": "additive"}, {"window": True}, {"softcap": True}, {"sink": True},
    {"bias": "additive", "alibi": True, "dropout": True, "window": True, "softcap": True},
    {"varlen": True}, {"varlen": True, "alibi": True, "dropout": True, "window": True},
    {"block_mask": True}, {"block_mask": True, "alibi": True, "dropout": True, "softcap": True},
)  # fmt: skip


def backward_variants() -> list[tuple[AttentionSpec, KernelConfig]]:
    """The same of the backward kernels and of the features; of loads, dtype and head dims every
    pair with each of them, and not every three.
    """
    found = []
    for direction, mask, features, loads, (dtype, precision), dims in itertools.product(
        [d for d in get_args(Direction) if d not in DECODING], ("none", "causal"), FEATURES, ("pointer", "descriptor"),
        (("bfloat16", "ieee"), ("float32", "tf32")), ((64, 64), (40, 96)),
    ):  # fmt: skip
        if ((loads == "descriptor") + (dtype == "float32") + (dims == (64, 64))) % 2 == 0:
            continue
        if direction == "backward_dbias" and features.get("bias") != "additive":
            continue
        if features.get("block_mask") and (mask == "causal" or direction in OF_DS):
            continue  # the mask says it, or none has it
        if direction == "backward_dq_of_ds" and not features.keys() <= {"window", "varlen"}:
            continue  # the plain kernel
        if direction != "forward" and features == {"sink": True}:
            continue  # the plain kernel
        if direction == "backward_delta" and (features or mask == "causal" or precision == "tf32"):
            continue
        base = make_spec(dtype, dims[0], mask, head_dim_v=dims[1], precision=precision, **features)
        spec = base.for_direction(direction)
        delta = direction == "backward_delta"
        config = make_config(64, 16 if delta else 32, num_stages=1 if delta else 2, loads=loads)
        plain = direction == "forward" and not features  # is among those above
        if not plain and why_illegal(spec, config, H200) is None:
            found.append((spec, config))
            if loads == "pointer" and dims == (64, 64):
                found.append((spec, replace(config, head_dims="padded")))
    return found


def appends(decode: AttentionSpec) -> list[AttentionSpec]:
    if decode.dtype == "float32":
        return []
    append = decode.for_direction("append")
    return [replace(append, rotary=rotary) for rotary in ("none", "halves", "interleaved")]


def narrow_caches(decode: AttentionSpec) -> list[dict[str, Any]]:
    if decode.dtype == "float32" or decode.causal:
        return []
    scales = ("head", "page") if decode.paged else ("head",)
    return [{"kv_dtype": kv, "kv_scales": s} for kv in ("float8_e4m3", "int8") for s in scales]


def decoding_variants() -> list[tuple[AttentionSpec, KernelConfig]]:
    """The kernels of a cache."""
    found = []
    for (dtype, precision), dims, mask, paged, head_dims in itertools.product(
        (("bfloat16", "ieee"), ("float32", "tf32")), ((64, 64), (40, 96)), ("none", "causal"),
        (False, True), ("exact", "padded"),
    ):  # fmt: skip
        attention = make_spec(dtype, dims[0], mask, head_dim_v=dims[1], precision=precision)
        decode = replace(attention.for_direction("decode"), paged=paged)
        one_stage = make_config(16, 16, num_stages=1, head_dims=head_dims)
        for spec, config in (
            (decode, make_config(16, 32, head_dims=head_dims, split_keys=256 if paged else 1)),
            (replace(decode, sink=True, alibi=True, leftpad=True), make_config(16, 32)),
            *(
                (replace(s, **kv), c)
                for kv in narrow_caches(decode)
                for s, c in (
                    (decode, make_config(16, 32, head_dims=head_dims)),
                    (decode.for_direction("append"), one_stage),
                )
            ),
            (replace(decode, bias="boolean", window=True, indexed=not paged), make_config(16, 32)),
            (decode.for_direction("combine"), one_stage),
            *((append, one_stage) for append in appends(decode)),
        ):
            if why_illegal(spec, config, H200) is None and (spec, config) not in found:
                found.append((spec, config))
    return found


GOLDENS = [
    (make_spec("bfloat16", 64, direction="append", paged=True, kv_dtype="float8_e4m3", kv_scales="page"), make_config(16, 16, num_stages=1)),
    (make_spec("bfloat16", 64, direction="append", kv_dtype="int8"), make_config(16, 16, num_stages=1)),
    (make_spec("bfloat16", 128, direction="combine"), make_config(16, 32, num_stages=1)),
    (make_spec("bfloat16", 128, direction="append", paged=True, rotary="halves"), make_config(16, 16, num_stages=1)),
    (make_spec("bfloat16", 128, "causal"), make_config(128, 128, num_warps=8, schedule="hopper", loads="descriptor", order="longest_first")),
    (make_spec("bfloat16", 128, "causal"), make_config(256, 128, num_warps=8, num_stages=4, schedule="blackwell", loads="descriptor", order="longest_first", exp2_by_fma=4, rescale_log2=8)),
    (make_spec("bfloat16", 256, "none"), make_config(128, 64, num_warps=4, num_stages=3, schedule="blackwell", loads="descriptor", persistent=True)),
    (make_spec("bfloat16", 192, "causal", head_dim_v=128), make_config(256, 128, num_warps=8, schedule="blackwell", loads="descriptor", order="longest_first")),
    (make_spec("bfloat16", 64, "causal").for_direction("backward_dkv"), make_config(128, 128, num_warps=8, num_stages=4, schedule="blackwell", loads="descriptor")),
    (make_spec("bfloat16", 128, "none").for_direction("backward_dkv"), make_config(128, 128, num_warps=8, schedule="blackwell", loads="descriptor")),
    (make_spec("bfloat16", 128, "causal").for_direction("backward_dq"), make_config(128, 128, num_warps=8, schedule="blackwell", loads="descriptor", order="longest_first")),
    (make_spec("bfloat16", 256, "causal"), make_config(128, 64, num_warps=8, num_stages=1, schedule="ampere", order="longest_first")),
    (make_spec("bfloat16", 64, "causal"), make_config(64, 64, schedule="fa1")),
    (make_spec("bfloat16", 128, "causal", dropout=True).for_direction("backward_dq"), make_config(128, 64, num_warps=8, loads="descriptor", order="longest_first")),
    (make_spec("bfloat16", 64, "none", bias="additive").for_direction("backward_dbias"), make_config(64, 64)),
    (make_spec("bfloat16", 64, "none", block_mask=True).for_direction("backward_dkv"), make_config(64, 64)),
    (make_spec("bfloat16", 64, "causal", varlen=True).for_direction("backward_dkv"), make_config(64, 64)),
    (make_spec("bfloat16", 128, "causal").for_direction("backward_dq_of_ds"), make_config(128, 64, num_warps=8, num_stages=4, loads="descriptor", order="longest_first")),
    (make_spec("bfloat16", 64, "causal", varlen=True).for_direction("backward_dq_of_ds"), make_config(64, 64)),
]  # fmt: skip


def committed(name: str) -> Path:
    """Where the text of a kernel is committed: with those that ship, or, where it does not, here."""
    shipped = paths.generated_dir(paths.ROOT) / "kernels" / f"{name}.py"
    return shipped if shipped.is_file() else GOLDEN / f"{name}.py"


@pytest.mark.parametrize(("spec", "config"), GOLDENS, ids=lambda x: getattr(x, "name", ""))
def test_golden(spec: AttentionSpec, config: KernelConfig, update_golden: bool) -> None:
    rendered = render.render(spec, config)
    golden = committed(rendered.text_name)
    if update_golden and golden.parent == GOLDEN:
        golden.write_text(rendered.source)
    assert golden.is_file(), (
        "no golden kernel yet; run: pytest tests/cpu/kernels/test_render.py --update-golden"
    )
    assert rendered.source == golden.read_text(), (
        "the emitted text changed; if that is meant, run: flashgen generate, and pytest tests/cpu/kernels/test_render.py --update-golden"
    )


def test_every_golden_is_tested() -> None:
    expected = {name for s, c in GOLDENS if committed(name := text_name(s, c)).parent == GOLDEN}
    assert {f.stem for f in GOLDEN.glob("*.py")} == expected


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("emitted")
    for rendered in texts().values():
        (folder / f"{rendered.text_name}.py").write_text(rendered.source)
    return folder


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """The emitted modules by name."""
    return {name: ast.parse(rendered.source) for name, rendered in texts().items()}


def width_of(name: str) -> int:
    """Of the lines of a text: a plain persistent one is another, four columns to the right."""
    return 104 if name.endswith("_pers") else 100


def test_emitted_files_are_clean_and_formatted(emitted: Path) -> None:
    assert len(list(emitted.iterdir())) >= 30
    files = sorted(emitted.iterdir(), key=lambda path: width_of(path.stem))
    for width, group in itertools.groupby(files, lambda path: width_of(path.stem)):
        names, rules = [str(path) for path in group], ["--isolated", "--line-length", str(width)]
        for command in (
            ["format", "--check", *rules],
            ["check", *rules, "--select", "E,F,W,I,B,UP", "--ignore", "B007"],
        ):
            done = subprocess.run(
                [sys.executable, "-m", "ruff", *command, *names], capture_output=True, text=True
            )
            assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow("renders every variant: 8 s")
def test_the_last_function_is_named_as_the_file_and_uses_those_before_it(
    trees: dict[str, ast.Module],
) -> None:
    for name, tree in trees.items():
        *helpers, kernel = [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]
        assert kernel == name
        if helpers:
            read = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name)]
            assert set(helpers) <= set(read), name


def body_of(source: str) -> str:
    """The text below the header of an emitted file."""
    return "".join(source.splitlines(keepends=True)[HEADER_LINES:])


def test_header_is_five_lines_with_the_digest_of_the_code_below() -> None:
    for rendered in texts().values():
        lines = rendered.source.splitlines()
        assert all(line.startswith("# ") for line in lines[:HEADER_LINES])
        assert not lines[HEADER_LINES].startswith("#")
        assert lines[0] == f"# {rendered.text_name}"
        assert (
            lines[HEADER_LINES - 1]
            == f"# {rendered.text_digest}"
            == f"# {digest_of(body_of(rendered.source))}"
        )
        assert max(map(len, lines)) <= width_of(rendered.text_name), rendered.name


def test_code_is_a_text_without_comments_and_blank_lines() -> None:
    text = """# words

import triton  # more


def f(
    x,  # of one
    # of the next
    y: '#',

):
    z = f"# {x} #"  # "no string"

    # the last
    return '''a

    # assembly''', z
# end
"""
    left = """import triton
def f(
    x,
    y: '#',
):
    z = f"# {x} #"
    return '''a

    # assembly''', z
"""
    assert code_of(text) == code_of(left) == left
    assert digest_of(text) == digest_of(left) != digest_of(left.replace("z =", "w ="))


@pytest.mark.parametrize("comment", ["# words", "# (", '# "words"', "# it's"])
@pytest.mark.parametrize("value", ["1", '"#"', "'''\n#\n'''", "f(\n    2,\n)"])
def test_what_is_code_does_not_depend_on_how_it_is_found(comment: str, value: str) -> None:
    """Texts in which no string can hold the sign of a comment are cut without tokens."""
    code = f"x = {value}\ny = x\n"
    assert code_of(f"{comment}\n\nx = {value}  {comment}\n  {comment}\ny = x\n") == code
    assert code_of(code) == code


EDITS = {
    "a comment and a blank line": (r"^(import triton\b.*)$", r"\1  # words\n\n# more\n"),
    "a comment in the kernel": (r"^( *)(tl|gl)\.store\(", r"\1# words\n\n\g<0>"),
    "a constant": (r"""float\("-inf"\)""", "-1e30"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_digest_is_of_the_code(
    edit: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forward = make_spec("bfloat16", 64, "causal")
    kernels = [
        (forward, make_config(64, 64)),
        (forward.for_direction("backward_dkv"), make_config(64, 64)),
        (forward.for_direction("decode"), make_config(16, 64, num_stages=3)),
    ]
    before = [render.render(*kernel) for kernel in kernels]
    for file in template_files():
        edited = re.sub(*EDITS[edit], file.read_text(), flags=re.MULTILINE)
        (tmp_path / file.name).write_text(edited)
    monkeypatch.setattr(paths, "templates_dir", lambda: tmp_path)
    render._environment.cache_clear()
    try:
        after = [render._rendered.__wrapped__(*kernel) for kernel in kernels]
    finally:
        render._environment.cache_clear()
    for old, new in zip(before, after, strict=True):
        assert body_of(old.source) != body_of(new.source)
        assert (old.digest == new.digest) == (edit != "a constant")
        assert (old.text_digest == new.text_digest) == (edit != "a constant")


def test_a_template_that_renders_no_python_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for file in template_files():
        (tmp_path / file.name).write_text(f"{file.read_text()}\nbroken = (\n")
    monkeypatch.setattr(paths, "templates_dir", lambda: tmp_path)
    render._environment.cache_clear()
    try:
        with pytest.raises(
            FlashgenError, match=r"renders no Python: '\(' was never closed: broken = \("
        ):
            render._rendered.__wrapped__(make_spec("bfloat16", 64), make_config(64, 64))
    finally:
        render._environment.cache_clear()


def test_a_template_with_an_error_is_named_with_its_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for file in template_files():
        (tmp_path / file.name).write_text(f"{file.read_text()}{{% endiff %}}\n")
    lines = (tmp_path / "attention_fwd.py.jinja").read_text().count("\n")
    monkeypatch.setattr(paths, "templates_dir", lambda: tmp_path)
    render._environment.cache_clear()
    try:
        with pytest.raises(FlashgenError, match=rf"templates/\S+, line {lines}: .*endiff"):
            render.render_text("attention_fwd.py.jinja")
    finally:
        render._environment.cache_clear()


def test_names_and_digests_are_distinct() -> None:
    rendered = rendered_variants()
    assert len({r.name for r in rendered}) == len({r.digest for r in rendered}) == len(rendered)


def shipped_and_in_the_spaces() -> Iterator[tuple[AttentionSpec, KernelConfig]]:
    """What tables name, the defaults, what is proven, and what is searched for those on two GPUs."""
    for shipped in map(paths.shipped_table, SHIPPED):
        for entry in load(shipped).entries:
            yield from ((entry.spec, config) for config in kernels_of(entry))
    yield from (*alone(), *in_pairs(), *variants(), *GOLDENS)
    for spec in specs_with_default():
        yield from ((spec, config) for config in default_configs(spec))
    for slug, spec in (
        ("nvidia_h200", make_spec("bfloat16", 64)),
        ("nvidia_h200", make_spec("float16", 128, "causal")),
        ("nvidia_h200", make_spec("bfloat16", 256, "causal")),
        ("nvidia_h200", make_spec("bfloat16", 192, "causal", head_dim_v=128)),
        ("nvidia_h200", make_spec("bfloat16", 128, "causal", direction="backward_fused")),
        ("nvidia_h200", make_spec("bfloat16", 256, direction="backward_dkv")),
        ("nvidia_h200", make_spec("float16", 96, "causal", direction="backward_dq")),
        ("nvidia_a100_sxm4_80gb", make_spec("bfloat16", 160, "causal")),
        ("nvidia_a100_sxm4_80gb", make_spec("float32", 80, precision="tf32")),
        ("nvidia_a100_sxm4_80gb", make_spec("bfloat16", 128, direction="decode", paged=True)),
    ):
        yield from ((spec, config) for config in legal_configs(spec, TARGETS[slug]))


@pytest.mark.slow("renders the kernels of ten spaces")
def test_kernels_have_one_name_where_they_have_one_text() -> None:
    of_name: dict[str, dict[AttentionSpec, KernelConfig]] = {}
    for spec, config in shipped_and_in_the_spaces():
        held = of_name.setdefault(text_name(spec, config), {})
        if len(held) < 8:  # kernels of several specs are as unlike as those of one name may be
            held[spec] = config
    assert len(of_name) > 30
    names: dict[str, str] = {}
    for name, held in of_name.items():
        rendered = [render.render(spec, config) for spec, config in held.items()]
        assert {each.text_name for each in rendered} == {name}
        assert len({each.source for each in rendered}) == 1, name
        # The name stands in the text: it must not be all that differs.
        text = body_of(rendered[0].source).replace(name, "kernel")
        assert text not in names, (name, names[text])
        names[text] = name


def test_no_name_of_a_text_has_a_number() -> None:
    for name in texts():
        words = set(name.split("_")) - {"fa1", "fa2", "fp8", "tf32", "int8", "kvf8", "kvi8"}
        assert not [word for word in words if re.search("[0-9]", word)], name


def test_a_kernel_in_place_has_its_numbers_and_nothing_else_differs() -> None:
    for rendered in list(texts().values())[::20]:
        shown = render.in_place(rendered)
        assert shown.splitlines()[0] == f"# {rendered.name}"
        tree = ast.parse(shown)
        kernel = [node for node in tree.body if isinstance(node, ast.FunctionDef)][-1]
        assert kernel.name == rendered.name
        language = "gl" if "gluon" in shown else "tl"
        for number, statement in zip(rendered.constants, kernel.body, strict=False):
            assert ast.unparse(statement) == f"{number[0]}: {language}.constexpr = {number[1]!r}"
        assert not [a.arg for a in kernel.args.args if a.annotation is not None]
        whole = ast.parse(rendered.source)
        other = [node for node in whole.body if isinstance(node, ast.FunctionDef)][-1]
        given = {a.arg for a in kernel.args.args}
        assert given == {a.arg for a in other.args.args} - {n for n, _ in rendered.constants}
        left = kernel.body[len(rendered.constants) :]
        assert [ast.dump(node) for node in left] == [ast.dump(node) for node in other.body]


def test_rendering_is_deterministic_across_processes() -> None:
    program = (
        "from tests.cpu.kernels.test_render import variants\n"
        "from flashgen.kernels.render import render\n"
        "print([render(s, c).digest for s, c in variants()])"
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    other = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, check=True, cwd=paths.ROOT,
        env={"PYTHONPATH": str(paths.ROOT), "PYTHONHASHSEED": seed, "PATH": ""},
    )  # fmt: skip
    assert other.stdout == f"{[rendered.digest for rendered in rendered_variants()]}\n"


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken.py.jinja").write_text("BR = {{ config.block_rows }}\n")
    (tmp_path / "wrong_type.py.jinja").write_text("X = {{ value | py }}\n")
    monkeypatch.setattr(paths, "templates_dir", lambda: tmp_path)
    render._environment.cache_clear()
    try:
        with pytest.raises(FlashgenError, match="block_rows"):
            render.render_text("broken.py.jinja", config=make_config())
        with pytest.raises(FlashgenError, match="float"):
            render.render_text("wrong_type.py.jinja", value=0.5)
        with pytest.raises(FlashgenError, match="missing"):
            render.render_text("missing.py.jinja")
    finally:
        render._environment.cache_clear()


def template_files() -> list[Path]:
    return sorted(paths.templates_dir().glob("*.jinja"))


@pytest.mark.parametrize("file", template_files(), ids=lambda f: f.name)
def test_no_hole_in_strictness(file: Path) -> None:
    text = file.read_text()
    assert not re.search(r"is\s+(not\s+)?defined|default\s*\(|\|\s*d\s*\(", text)


@pytest.mark.parametrize(
    "file",
    [f for f in template_files() if f.name.startswith("_") and "header" not in f.name],
    ids=lambda f: f.name,
)
def test_macro_files_open_with_a_comment_and_so_does_every_macro(file: Path) -> None:
    text = file.read_text()
    assert text.startswith("{#")
    for macro in re.finditer(r"\{% macro ", text):
        assert text[: macro.start()].rstrip().endswith("#}"), text[macro.start() :][:60]


def test_only_kernels_and_the_report_are_made_by_jinja2() -> None:
    users = [
        file.relative_to(paths.ROOT / "flashgen").as_posix()
        for file in (paths.ROOT / "flashgen").rglob("*.py")
        if re.search(r"^\s*(import|from) jinja2", file.read_text(), re.M)
    ]
    assert sorted(users) == ["kernels/render.py", "report/html.py"]
