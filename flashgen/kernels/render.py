"""(spec, config) -> Rendered: the kernel's text and its digest. The only importer of jinja2."""

from __future__ import annotations

import functools
import hashlib
import textwrap
from dataclasses import dataclass

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateNotFound, UndefinedError

from flashgen import paths
from flashgen.errors import FlashgenError, ToolchainError
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig, kernel_name, o_apart, rows_of_eight, shares_keys
from flashgen.spec.features import features_on
from flashgen.spec.vocabulary import padded
from flashgen.spec.whole_rows import k_parts, o_parts

HEADER_LINES = 5
LINE_LENGTH = 100
KEPT = 4096
"""Kernels that a process keeps: more than generated/ has, which tune makes after every search."""
SERVES = LINE_LENGTH - len("# Serves: .")
"""The most characters of what a header says of a kernel; all features at once take more."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A kernel as text. name is the function's and the file's; digest that of the text below the
    header.
    """

    name: str
    source: str
    digest: str
    template: str


def render(spec: AttentionSpec, config: KernelConfig) -> Rendered:
    """Render the kernel of (spec, config): a pure function of both and of the templates.

    It is cached per process.

    Args:
        spec: what is computed.
        config: how it is computed.

    Returns:
        The text, its name and its digest.

    Raises:
        FlashgenError: naming the template, if it uses an undefined name.

    Examples:
        >>> from flashgen.kernels.render import render
        >>> from flashgen.spec import AttentionSpec
        >>> from flashgen.spec.defaults import default_config
        >>> spec = AttentionSpec(dtype="bfloat16", head_dim=64, head_dim_v=64, mask="causal")
        >>> "@triton.jit" in render(spec, default_config(spec)).source
        True
    """
    return _rendered(spec, config)


@functools.lru_cache(KEPT)
def _rendered(spec: AttentionSpec, config: KernelConfig) -> Rendered:
    name = kernel_name(spec, config)
    template = template_of(spec, config)
    body = render_text(
        template,
        name=name,
        spec=spec,
        config=config,
        rows_of_eight=rows_of_eight(spec, config),
        o_apart=o_apart(spec, config),
        wide=shares_keys(spec),
        head_dim_pad=padded(spec.head_dim),
        head_dim_v_pad=padded(spec.head_dim_v) // config.v_parts,
        k_parts=k_parts(spec, config),
        o_parts=o_parts(spec, config),
    )
    digest = digest_of(body)
    header = render_text(
        "_header.py.jinja",
        name=name,
        template=template,
        serves=_serves(spec, config),
        digest=digest,
    )
    return Rendered(name=name, source=header + body, digest=digest, template=template)


_TEMPLATES: dict[str, str] = {
    "forward": "attention_fwd.py.jinja",
    "backward_delta": "attention_bwd_delta.py.jinja",
    "backward_dkv": "attention_bwd_dkv.py.jinja",
    "backward_dq": "attention_bwd_dq.py.jinja",
    "backward_fused": "attention_bwd_dkv.py.jinja",
    "backward_dbias": "attention_bwd_dbias.py.jinja",
    "decode": "attention_decode.py.jinja",
    "combine": "attention_combine.py.jinja",
    "append": "append_kv.py.jinja",
}


def template_of(spec: AttentionSpec, config: KernelConfig) -> str:
    """The file of templates/ that (spec, config) is rendered from."""
    if config.schedule == "fa1":
        return "attention_fwd_fa1.py.jinja"
    if config.schedule == "ampere":
        return "attention_fwd_ampere.py.jinja"
    if config.schedule == "hopper":
        return _TEMPLATES[spec.direction].replace(".py", "_hopper.py")
    return _TEMPLATES[spec.direction]


def render_text(template: str, /, **values: object) -> str:
    """Render one template with these values, strictly."""
    try:
        return _environment().get_template(template).render(**values)
    except (UndefinedError, TemplateNotFound) as error:
        raise FlashgenError(f"templates/{template} cannot be rendered: {error}") from error


def digest_of(body: str) -> str:
    """sha256 of a kernel's text below the header, as header, log and entries carry it."""
    return "sha256:" + hashlib.sha256(body.encode()).hexdigest()


def body_of(source: str) -> str:
    """The text below the header of an emitted file."""
    return "".join(source.splitlines(keepends=True)[HEADER_LINES:])


def _serves(spec: AttentionSpec, config: KernelConfig) -> str:
    mask = "causal" if spec.causal else "no mask"
    precision = f" ({spec.precision})" if spec.dtype == "float32" else ""
    if config.head_dims == "padded":
        dims = f"any head_dim and head_dim_v up to {spec.head_dim}"
    else:
        dims = f"head_dim {spec.head_dim}, head_dim_v {spec.head_dim_v}"
    features = "".join(row.header for row in features_on(spec))
    if features:
        dims = dims.replace("any head_dim and head_dim_v up", "head dims up")
    serves = f"{spec.direction}, {spec.dtype}{precision}, {dims}, {mask}"
    return serves + (features if len(serves + features) <= SERVES else ", features as named")


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
    environment.filters["deeper"] = _deeper
    environment.filters["py"] = _py
    return environment


def _block(text: str, width: int = 0) -> str:
    """A block of statements, every line that has text indented, without its last line break.

    So a macro call on a line of its own stands for the macro's lines and nothing more.
    """
    return textwrap.indent(text, " " * width).removesuffix("\n")


def _deeper(text: str, width: int) -> str:
    """A block of statements, made for the level it stands at, moved to the right as _block does;
    its comments are broken anew where they would pass LINE_LENGTH.
    """
    lines: list[str] = []
    for line in text.splitlines():
        comment = line.lstrip()
        if not comment.startswith("# ") or len(line) + width <= LINE_LENGTH:
            lines.append(line)
            continue
        margin = " " * (len(line) - len(comment)) + "# "
        lines += textwrap.wrap(
            comment.removeprefix("# "),
            LINE_LENGTH - width,
            initial_indent=margin,
            subsequent_indent=margin,
        )
    return _block("\n".join(lines), width)


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
