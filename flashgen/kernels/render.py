"""(spec, config) -> Rendered: the kernel's text and its digest. The only importer of jinja2."""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import re
import textwrap
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass

from jinja2 import (
    Environment,
    FileSystemLoader,
    StrictUndefined,
    TemplateNotFound,
    TemplateSyntaxError,
    UndefinedError,
)

from flashgen import paths
from flashgen.errors import FlashgenError, ToolchainError
from flashgen.kernels.constants import Constant, constants_of
from flashgen.kernels.head import Parameter, head
from flashgen.kernels.parameters import parameters
from flashgen.kernels.text import text_of
from flashgen.schedules.config import SCHEDULES, KernelConfig, kernel_name
from flashgen.spec.attention import AttentionSpec

HEADER_LINES = 5
KEPT = 4096
"""Kernels that a process keeps: more than generated/ has, which tune makes after every search."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A kernel: its text, and its numbers as (name, value) pairs.

    name is the kernel's full name, text_name that of the text's function and file. text_digest is
    the digest of the code below the header, which other kernels share; digest that of name, code
    and numbers. Neither depends on comments or blank lines. parameters are those of the text,
    language is tl or, in Gluon, gl.
    """

    name: str
    text_name: str
    source: str
    digest: str
    text_digest: str
    template: str
    parameters: tuple[Parameter, ...] = ()
    language: str = "tl"
    constants: tuple[tuple[str, Constant], ...] = ()


def render(spec: AttentionSpec, config: KernelConfig) -> Rendered:
    """Render the kernel of (spec, config): a pure function of both and of the templates.

    It is cached per process.

    Args:
        spec: what is computed.
        config: how it is computed.

    Returns:
        The text, its name and its digest.

    Raises:
        FlashgenError: naming the template, if it uses an undefined name or renders no Python.

    Examples:
        >>> from flashgen.kernels.render import render
        >>> from flashgen.spec import AttentionSpec
        >>> from flashgen.schedules.defaults import default_config
        >>> spec = AttentionSpec(dtype="bfloat16", head_dim=64, head_dim_v=64, mask="causal")
        >>> "@triton.jit" in render(spec, default_config(spec)).source
        True
    """
    return _rendered(spec, config)


def _no_python(text: str) -> str:
    """What is wrong with a text, and its line."""
    try:
        ast.parse(text)
    except SyntaxError as error:
        return f"{error.msg}: {(error.text or '').strip()}"
    return "its lines have no order of indents"


@functools.lru_cache(KEPT)
def _rendered(spec: AttentionSpec, config: KernelConfig) -> Rendered:
    text, template = text_of(spec, config), template_of(spec, config)
    language = "tl" if config.interpretable else "gl"
    taken = parameters(spec, config)
    body = render_text(template, text=text, head=head(text.name, taken, language))
    try:
        text_digest = digest_of(body)
    except (tokenize.TokenError, SyntaxError) as error:
        why = _no_python(body)
        raise FlashgenError(f"templates/{template} renders no Python: {why}") from error
    header = render_text(
        "_header.py.jinja",
        name=text.name,
        template=template,
        serves=text.serves,
        digest=text_digest,
    )
    name = kernel_name(spec, config)
    constants = tuple(constants_of(spec, config, [each.name for each in taken]).items())
    return Rendered(
        name=name,
        text_name=text.name,
        source=header + body,
        digest=_sha256(repr((name, constants, text_digest))),
        text_digest=text_digest,
        template=template,
        parameters=taken,
        language=language,
        constants=constants,
    )


def in_place(rendered: Rendered) -> str:
    """A kernel to be read, or run, by itself: its text under its full name, with its numbers in
    place of the parameters.
    """
    rows, language = rendered.parameters, rendered.language
    written = head(rendered.text_name, rows, language)
    lines = rendered.source.splitlines(keepends=True)
    before, after = "".join(lines[HEADER_LINES:]).split(written)
    numbers = dict(rendered.constants)
    heading = [
        f"# {rendered.name}\n",
        f"# flashgen's {rendered.text_name}.py, with the numbers of this kernel in place.\n",
        lines[2],
    ]
    own = head(rendered.name, (each for each in rows if each.name not in numbers), language)
    assigned = (
        f"\n    {each.name}: {language}.constexpr = {_py(numbers[each.name])}{each.comment}"
        for each in rows
        if each.name in numbers
    )
    return "".join([*heading, before, own, *assigned, after])


def template_of(spec: AttentionSpec, config: KernelConfig) -> str:
    """The file of templates/ that (spec, config) is rendered from."""
    return SCHEDULES[config.schedule].template(spec.direction)


def render_text(template: str, /, **values: object) -> str:
    """Render one template with these values, strictly."""
    try:
        return _environment().get_template(template).render(**values)
    except TemplateSyntaxError as error:
        where = f"templates/{error.name or template}, line {error.lineno}"
        raise FlashgenError(f"{where}: {error.message}") from error
    except (UndefinedError, TemplateNotFound) as error:
        raise FlashgenError(f"templates/{template} cannot be rendered: {error}") from error


@functools.lru_cache(KEPT)  # many kernels share a text, and reading its tokens takes longest
def digest_of(body: str) -> str:
    """sha256 of a text's code, as headers carry it: a comment changes no machine code.

    Raises tokenize.TokenError or SyntaxError where the text is no Python.
    """
    return _sha256(code_of(body))


def code_of(text: str) -> str:
    """A Python text without its comments and blank lines. Strings stay as they are: they may be
    assembly. Lines are cut, not printed from tokens, so all versions of Python agree.

    Raises tokenize.TokenError or SyntaxError where the text is no Python.
    """
    if code := _by_quotes(text):
        return code
    lines, held = text.split("\n"), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        (first, column), (last, _) = token.start, token.end
        if token.type == tokenize.COMMENT:
            lines[first - 1] = lines[first - 1][:column].rstrip()
        elif token.string.strip():  # not the end of a line, of a block or of the text
            held.update(range(first - 1, last))
    return "".join(f"{lines[n]}\n" for n in sorted(held))


_STRING = "|".join(
    rf"{quote}(?:\\.|[^\\{end}])*?{quote}"
    for quote, end in (('"""', ""), ("'''", ""), ('"', r"\n"), ("'", r"\n"))
)
_STRING_OR_COMMENT = re.compile(rf"""({_STRING})|[ \t]*\#[^\n]*|(["'])""", re.DOTALL)


def _by_quotes(text: str) -> str:
    """code_of without tokens, which take ten times as long; "" where a quote or a bracket is left
    open, of which tokens know more.
    """
    left_open = False

    def cut(found: re.Match[str]) -> str:
        nonlocal left_open
        left_open |= bool(found[2])
        return (found[1] or "").replace("\n", "\0")  # lines of a string are no lines of code

    lines = _STRING_OR_COMMENT.sub(cut, text).split("\n")
    code = "".join(f"{line}\n" for line in lines if line.strip()).replace("\0", "\n")
    left_open |= any(code.count(one) != code.count(other) for one, other in ("()", "[]", "{}"))
    return "" if left_open else code


def _sha256(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _environment() -> Environment:
    folder = paths.templates_dir()
    if not folder.is_dir():
        raise ToolchainError(
            f"the templates are missing: {folder} is no folder; reinstall flashgen"
        )
    environment = Environment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        auto_reload=False,
    )
    environment.globals.clear()
    environment.filters["block"] = _block
    environment.filters["functions"] = _functions
    environment.filters["py"] = _py
    return environment


def _block(text: str, width: int = 0) -> str:
    """A block of statements, every line that has text indented, without its last line break.

    So a macro call on a line of its own stands for the macro's lines and nothing more.
    """
    return textwrap.indent(text, " " * width).removesuffix("\n")


def _functions(texts: Iterable[str]) -> str:
    """Functions one behind the other, as Python has them; an empty one is left out."""
    return "\n\n\n".join(_block(text) for text in texts if text.strip())


def quoted(text: str) -> str:
    """repr(text), in double quotes where ruff format wants them."""
    literal = repr(text)
    return literal if '"' in literal else f'"{literal[1:-1]}"'


def _py(value: object) -> str:
    """A Python literal of the few types a kernel is made of."""
    if isinstance(value, str):
        return quoted(value)
    if value is None or isinstance(value, bool | int):
        return repr(value)
    raise FlashgenError(f"a template may print bool, int, str and None: got {type(value).__name__}")
