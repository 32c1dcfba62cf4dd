"""The code of README.md, CONTRIBUTING.md and docs/ runs, and names only options there are.

```python     each block runs in a process of its own, as when it is pasted alone
```bash       runs in an empty folder, where `flashgen` is this checkout's; must be quick
              Both are forks of one process (tests/programs.py).
... no-run    after the language: shown only; its flashgen commands must still be ones flashgen takes
```console, ```text, ```bibtex, ```yaml   shown only
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from flashgen import attention
from tests import programs

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SHOWN_ONLY = {"console", "text", "bibtex", "yaml"}


@dataclass(frozen=True, kw_only=True)
class Block:
    page: str
    line: int
    language: str
    runs: bool
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page. A fence without a language is an error: nobody knows what it is."""
    found, opened, lines = [], None, page.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if not line.lstrip().startswith("```"):
            continue
        if opened is None:
            opened = number
            continue
        language, *flags = lines[opened - 1].strip().removeprefix("```").split()
        text = "\n".join(lines[opened : number - 1]) + "\n"
        runs = "no-run" not in flags
        found.append(Block(page=page.name, line=opened, language=language, runs=runs, text=text))
        opened = None
    assert opened is None, f"{page.name}:{opened}: the fence is never closed"
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language == "python" and block.runs]
BASH = [block for block in BLOCKS if block.language == "bash"]


def environment(tmp_path: Path) -> dict[str, str]:
    """This checkout importable from anywhere, and its program first on the path."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    programs.link(bin_folder / "flashgen", "-m", "flashgen")
    programs.link(bin_folder / "python")
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("FLASHGEN_")
    }
    path = os.pathsep.join([str(bin_folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    return inherited | {"PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}


def test_every_block_says_what_it_is() -> None:
    unknown = [
        f"{block}: {block.language}"
        for block in BLOCKS
        if block.language not in {"python", "bash"} | SHOWN_ONLY
    ]
    assert unknown == []
    assert PYTHON
    assert any(block.runs for block in BASH)


SLOW = pytest.mark.slow("starts programs; make test has those of the first pages")
FIRST = ("README.md", "using-attention.md")


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, marks=() if block.page in FIRST else SLOW, id=str(block))
        for block in PYTHON
    ],
)
def test_python_block_runs_alone(block: Block, tmp_path: Path) -> None:
    """As whoever pastes it runs it."""
    file = tmp_path / f"{block.page}.py"
    file.write_text("\n" * block.line + block.text)  # a traceback has the lines of the page
    done = programs.run([file], cwd=tmp_path, env=environment(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "block",
    [pytest.param(b, marks=() if b.page in FIRST else SLOW) for b in BASH if b.runs],
    ids=str,
)
def test_bash_block_runs(block: Block, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=here, env=environment(tmp_path), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def commands() -> list[tuple[Block, list[str]]]:
    """Every flashgen command of a bash block, without comments, assignments before it and pipes after."""
    found = []
    for block in BASH:
        for line in block.text.replace("\\\n", " ").splitlines():
            command = re.match(r"\s*(?:[A-Z_]+=\S+\s+)*flashgen\s+(.*)", line)
            if command is None:
                continue
            text = command.group(1)
            if text.count("'") % 2:  # the last command of a script in quotes
                text = text.removesuffix("'")
            words = shlex.split(text, comments=True)
            end = next((i for i, word in enumerate(words) if word in ("|", ">", "&&", ";")), None)
            found.append((block, words[:end]))
    return found


@pytest.mark.parametrize(
    ("block", "words"), commands(), ids=lambda value: value if isinstance(value, str) else None
)
def test_shown_commands_are_ones_there_are(block: Block, words: list[str]) -> None:
    """Parsed, not run: a renamed option must not live on in the documentation."""
    import typer.main

    from flashgen.cli import app

    words = [word for word in words if word not in ("--debug", "--help")]
    group = typer.main.get_command(app)
    with group.make_context("flashgen", list(words), resilient_parsing=True) as context:
        name, command, rest = group.resolve_command(context, words)  # type: ignore[attr-defined]
    assert command is not None, f"{block}: flashgen has no command {name}"
    command.make_context(name, list(rest)).close()


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_within_the_repository_lead_somewhere() -> None:
    broken = []
    results = [
        *(ROOT / "benchmarks" / "results").glob("*.md"),
        *(ROOT / "docs" / "notes").glob("*.md"),
    ]
    for page in [*PAGES, ROOT / "SECURITY.md", ROOT / "CHANGELOG.md", *results]:
        for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", page.read_text()):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            if "://" in target:
                continue
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append(f"{page.name}: {target}")
    assert broken == []


def test_every_page_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    pages = [page.name for page in (ROOT / "docs").glob("*.md")]
    assert [name for name in sorted(pages) if f"(docs/{name}" not in text] == []


def test_the_page_on_tuning_has_every_option_and_its_words() -> None:
    import typer

    from flashgen.cli import app
    from flashgen.spec.features import FEATURE_WORDS, KV_WORDS

    text = (ROOT / "docs" / "tuning.md").read_text()
    command = typer.main.get_command(app).commands["tune"]  # type: ignore[attr-defined]
    options = {name for each in command.params for name in each.opts if name != "--help"}
    assert sorted(name for name in options if f"`{name}" not in text) == []
    rows = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    for option, words in (("--feature", FEATURE_WORDS), ("--kv", KV_WORDS)):
        told = rows[option].replace("`", "").replace(",", " ").split()
        assert [word for word in words if word not in told] == []


def test_the_call_that_is_shown_has_the_arguments_and_defaults_of_attention() -> None:
    text = (ROOT / "docs" / "using-attention.md").read_text()
    (shown,) = re.findall(r"```python no-run\n(attention\(.*?)```", text, re.DOTALL)
    call = ast.parse(shown).body[0].value  # type: ignore[attr-defined]
    known = inspect.signature(attention).parameters
    assert [name.id for name in call.args] == [n for n, p in known.items() if p.default is p.empty]
    for given in call.keywords:
        assert known[given.arg].default == ast.literal_eval(given.value)


@pytest.mark.parametrize("line", ["tune --gpuz", "generat --check", "explain --head-dim 64"])
def test_a_command_there_is_not_is_noticed(line: str) -> None:
    block = Block(page="made.md", line=1, language="bash", runs=False, text=line)
    with pytest.raises(Exception, match=r"(?i)no such option|has no command|missing"):
        test_shown_commands_are_ones_there_are(block, line.split())


def sentences() -> set[str]:
    """Every string of flashgen/ as the compiler joins it, values of f-strings left out."""
    found = set()
    for path in (ROOT / "flashgen").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        for node in nodes:
            if id(node) in prose:
                continue
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [part.value for part in parts if isinstance(part, ast.Constant)]
            found.add(" ... ".join(text for text in texts if isinstance(text, str)))
    return found


def test_messages_that_the_faq_explains_are_ones_flashgen_gives() -> None:
    page = (ROOT / "docs" / "faq.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    quoted = [
        text for row in rows for text in re.findall(r"`([^`]+)`", row) if text != "TRITON_INTERPRET"
    ]
    known = "\n".join(sentences())
    missing = [
        part for text in quoted for part in text.split(" ... ") if part.strip(". ") not in known
    ]
    assert quoted
    assert missing == []
