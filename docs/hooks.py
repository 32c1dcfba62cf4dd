"""What the documentation site shows besides docs/, made when it is built: a hook of mkdocs.yml.

The site has the repository's paths, without docs/: README.md is its first page.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from flashgen.kernels.resolve import variant
from flashgen.table import show
from flashgen.table.emit import kernels_by_name
from flashgen.table.table_file import load, load_with_evidence

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results"
COPIED = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "LICENSE",
    "examples/tour.ipynb",
    f"{RESULTS}/engine_kernels.md",
    f"{RESULTS}/machine_code.md",
    f"{RESULTS}/nvidia_h200/README.md",
    f"{RESULTS}/nvidia_h200/measured.svg",
    f"{RESULTS}/machine_code_sm100.md",
    f"{RESULTS}/sass_facts.md",
    f"{RESULTS}/search_efficiency.md",
    f"{RESULTS}/search_peers.md",
    f"{RESULTS}/search_race.md",
)
RATES = {"tflops": "TFLOP/s", "gbs": "GB/s"}
WIDE = "---\nhide: [toc]\nsearch: {boost: 0.0001}\n---\n"
"""No table of contents; and what people wrote comes first among the hits of a search."""

DOCUMENTED = re.compile(r"^\| `(flashgen\.[\w.]+)` \| (?!the same as|module:)", re.MULTILINE)
"""The names of docs/api.md that have an entry in the reference."""

Pages = dict[str, str]


def on_files(files: Files, config: Any) -> Files:
    """Add the files from outside docs/, and the pages that are made."""
    for path in COPIED:
        files.append(File.generated(config, path, content=(ROOT / path).read_bytes()))
    for path, text in (reference() | gallery() | tables()).items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as the site has the files. `no-run` after a fence's language is for tests alone."""
    markdown = re.sub(r"\[([^\]]*)\]\((?:docs/)?notes\b[^)]*\)", r"\1", markdown)  # not there
    markdown = re.sub(r"\]\(((?:\.\./)*)docs/", r"](\1", markdown)
    if page.file.src_uri == "api.md":
        markdown = DOCUMENTED.sub(lambda row: f"| {link(row[1], 'reference/')} | ", markdown)
    if "/" not in page.file.src_uri:
        markdown = re.sub(r"\]\(\.\./", "](", markdown)
    return re.sub(r"^(\s*```\w+) no-run$", r"\1", markdown, flags=re.MULTILINE)


def on_page_content(html: str, **_: Any) -> str:
    """Names in code may be broken after each underscore, and a copy of them stays the same."""
    inline = r"(?<!</span>)<code>[^<]*</code>"
    return re.sub(inline, lambda code: code[0].replace("_", "_<wbr>"), html)


def reference() -> Pages:
    """The docstrings of the public names, a page a module, in the order of docs/api.md."""
    modules: dict[str, list[str]] = {}
    for name in DOCUMENTED.findall((ROOT / "docs" / "api.md").read_text()):
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    pages, index = {}, ["# API reference\n\n[Public names](../api.md) has a line on each.\n"]
    for module, names in modules.items():
        pages[f"reference/{module}.md"] = "\n\n".join([f"# {module}", *map(directive, names)])
        shown = ", ".join(link(name).replace(f"`{module}.", "`") for name in names)
        index.append(f"- [{module}]({module}.md): {shown}")
    return pages | {"reference/index.md": "\n".join(index)}


def link(name: str, folder: str = "") -> str:
    """A public name with a link to its docstring, for a page beside or above those of modules."""
    return f"[`{name}`]({folder}{name.rpartition('.')[0]}.md#{name})"


def directive(name: str) -> str:
    """What makes mkdocstrings show a public name, which may be defined elsewhere."""
    package, _, last = name.rpartition(".")
    given = getattr(pkgutil.resolve_name(package), last)
    value = inspect.unwrap(given)
    place = name
    if inspect.isroutine(value) or inspect.isclass(value):
        place = f"{value.__module__}.{value.__qualname__}"
    anchor = f"[](){{#{name}}}\n\n" if place != name else ""
    inspected = ", force_inspection: true" * (value is not given)  # a derived signature
    options = f"    options: {{heading: {name}, toc_label: {name}{inspected}}}"
    return f"{anchor}::: {place}\n{options}"


def gallery() -> Pages:
    """The shipped bfloat16 kernels of head dim 128 for Hopper, with facts of their machine code."""
    pins = (ROOT / "constraints.txt").read_text()
    (triton,) = re.findall(r"^triton==(\S+)$", pins, re.MULTILINE)
    facts_of = (ROOT / RESULTS / "sass_facts.md").read_text()
    part = facts_of.split(f"### sm_90, Triton {triton}\n")[1].split("\n#")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    heads, _, *rows = (line.strip("| ").split(" | ") for line in lines)
    tables = [load(path) for path in sorted((ROOT / "configs").glob("*.yaml"))]
    kernels = kernels_by_name(tables, defaults=False)
    pages, index = {}, []
    for name, *facts in rows:
        kernel = kernels.get(name.strip("`"))
        if "_bf16_d128_" not in name or kernel is None:
            continue
        index.append([f"[{name}]({kernel.name}.md)", *facts])
        pages[f"gallery/{kernel.name}.md"] = (
            f"{WIDE}# {kernel.name}\n\nCompiled for sm_90 with Triton {triton}, without a GPU. "
            f"[What the columns mean](index.md).\n\n{grid(heads[1:], [facts])}\n\n"
            f"```python\n{variant(kernel)}```\n"
        )
    pages["gallery/index.md"] = (
        f"{WIDE}# Gallery of kernels\n\nThe bfloat16 kernels of head dim 128 that ship for "
        f"Hopper, with facts of their machine code, compiled for sm_90 with Triton {triton}, "
        "without a GPU.\n\nRegisters are per thread, shared memory in bytes. Instructions "
        "and arrives are those of one tile of the steady main loop. `exp2 under` is the share of "
        "exp2 that is issued while a matrix product runs. Spills are loads and stores of spilled "
        f"registers. [All kernels, and other versions of Triton](../{RESULTS}/sass_facts.md)."
        f"\n\n{grid(heads, index)}\n"
    )
    return pages


COLUMNS = (
    "`keys` is the range of key lengths that the row serves, `config` the chosen tile, warps, "
    "stages, schedule and loads. `from` says whether `us`, microseconds, is measured or estimated. "
    "`x default` is how many times as fast as the default kernel it is, `floors` its "
    "[error](../numerics.md). What was not measured is folded, by its spec without features. "
    "[How to read a table](../tables.md)."
)


def tables() -> Pages:
    """The tables of configs/: the entries that `flashgen show` prints."""
    heads = ["spec", "keys", "config", "from", "us", "rate", "x default", "floors"]
    pages, index = {}, []
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        table = load_with_evidence(path)
        measured: list[list[str]] = []
        folds: dict[tuple[str, str], list[list[str]]] = {}
        records = show.record_of(table, table.entries)["entries"]
        for entry, record in zip(table.entries, records, strict=True):
            fold = entry.spec.plain_name, entry.result.source
            rows = measured if fold[1] == "measured" else folds.setdefault(fold, [])
            rows.append(cells(record))
        parts = [grid(heads, measured)] if measured else []
        for (name, source), rows in folds.items():
            summary = f"<summary><code>{name}</code> {len(rows)} {source}</summary>"
            parts.append(f'<details markdown="1">{summary}\n\n{grid(heads, rows)}\n\n</details>')
        heading = show.table_heading(table)
        index.append([f"[{path.stem}]({path.stem}.md)", heading])
        pages[f"configs/{path.stem}.md"] = (
            f"{WIDE}# {table.gpu.name}\n\n{heading}. `flashgen show {path.stem}` prints the same. "
            f"{COLUMNS}\n\n" + "\n\n".join(parts) + "\n"
        )
    pages["configs/index.md"] = (
        "# Shipped tables\n\nWhat flashgen chose for each GPU, spec and number of keys. "
        f"[Estimates](../estimates.md) says what estimated times are worth.\n\n"
        f"{grid(['slug', 'table'], index)}\n"
    )
    return pages


def cells(entry: dict[str, Any]) -> list[str]:
    """An entry of show.record_of as a row."""
    low, high = entry["seq_k"]
    rates = [f"{entry[name]:.0f} {unit}" for name, unit in RATES.items() if name in entry]
    us, default = entry.get("us"), entry.get("default_us")
    return [
        f"`{entry['name']}`",
        f"{low} to {high - 1}" if high else f"from {low}",
        f"`{entry['config']}`",
        entry["source"],
        f"{us:.1f}" if us else "-",
        *(rates or ["-"]),
        f"{default / us:.2f}" if us and default else "-",
        f"{entry['floors']:.2f}" if "floors" in entry else "-",
    ]


def grid(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows])
