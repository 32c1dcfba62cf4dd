"""The documentation site: each page has one place in its navigation, and it builds without a warning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import flashgen

ROOT = Path(__file__).resolve().parents[3]
CONFIG = (ROOT / "mkdocs.yml").read_text()
MADE = {"reference/index.md", "gallery/index.md", "configs/index.md"}
LINKING = ("a", "img", "source", "script", "link")
OF_THE_ROOT = {"README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"}


def test_each_page_is_once_in_the_navigation() -> None:
    listed = re.findall(r"- [^:\n]+: (\S+\.md)$", CONFIG.partition("\nnav:\n")[2], re.MULTILINE)
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert sorted(listed) == sorted(pages | MADE | OF_THE_ROOT)


def test_pages_that_are_made_of_tables_need_no_place_in_the_navigation() -> None:
    patterns = re.findall(r"^  /(configs/\S+)$", CONFIG, re.MULTILINE)
    made = [f"configs/{path.stem}.md" for path in (ROOT / "configs").glob("*.yaml")]
    assert made
    assert [page for page in made if not any(fnmatchcase(page, each) for each in patterns)] == []


def test_the_site_has_what_pages_link_to_outside_of_docs() -> None:
    """Seen without the packages of the site: mkdocs.yml makes a missing file an error."""
    hooks = (ROOT / "docs" / "hooks.py").read_text()
    results = re.search(r'^RESULTS = "(.+)"$', hooks, re.MULTILINE)
    listed = re.search(r"^COPIED = \((.+?)^\)", hooks, re.MULTILINE | re.DOTALL)
    assert results
    assert listed
    copied = set(re.findall(r'"(.+?)"', listed[1].replace("{RESULTS}", results[1])))
    pages = [ROOT / name for name in sorted(OF_THE_ROOT)] + sorted((ROOT / "docs").glob("*.md"))
    missing = []
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text()):
            path = (page.parent / target).resolve().relative_to(ROOT)
            if path.parts[0] != "docs" and str(path) not in copied:
                missing.append(f"{page.name}: {target}")
    assert missing == []


class Links(HTMLParser):
    """The places of a page, and what it links to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.targets: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.ids.add(value)
            if name in ("href", "src", "srcset") and value and tag in LINKING:
                self.targets.append(value)


def broken(site: Path) -> list[str]:
    """The links of a site that lead to no file or no place within it. 404.html has absolute ones.

    A folder is no file: a browser that opens the site without a server would list it.
    """
    pages = {
        path: Links(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"
    }
    found = []
    for page, links in pages.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            place = unquote(parts.fragment)
            if not file.is_file() or (place and file in pages and place not in pages[file].ids):
                found.append(f"{page.relative_to(site)}: {target}")
    return found


def fetched(site: Path) -> list[str]:
    """What a browser would fetch from elsewhere: scripts, styles, pictures, and the script of
    Mermaid, which the theme fetches where a page has a diagram of it.
    """
    texts = {path: path.read_text() for path in site.rglob("*.html")}
    elsewhere = r'<(?:script|img|source|link|iframe)[^>]+(?:src|href|srcset)="https?://[^"]+"'
    found = {
        (path.name, each) for path, text in texts.items() for each in re.findall(elsewhere, text)
    }
    diagrams = {(path.name, "mermaid") for path, text in texts.items() if 'class="mermaid"' in text}
    return sorted(map(" ".join, found | diagrams))


def test_what_a_site_fetches_from_elsewhere_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="https://a.com">a</a><img src="b.png">')
    assert fetched(tmp_path) == []
    (tmp_path / "a.html").write_text(
        '<script src="https://a.com/x.js"></script><pre class="mermaid">'
    )
    assert len(fetched(tmp_path)) == 2


def test_a_broken_link_of_a_site_is_seen(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a.html").write_text('<h1 id="a">A</h1>')
    good = (
        '<a href="there/a.html"></a> <a href="there/a.html#a"></a> <a href="https://a.com/x"></a>'
    )
    (tmp_path / "index.html").write_text(good)
    assert broken(tmp_path) == []
    bad = ["x.png", "there/a.html#b", "there/"]
    (tmp_path / "index.html").write_text(good + "".join(f'<img src="{each}">' for each in bad))
    assert broken(tmp_path) == [f"index.html: {each}" for each in bad]


@pytest.mark.slow("builds the site: 6 CPU-seconds, and needs the packages of the extra docs")
def test_the_site_builds_strictly_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the extra docs: make docs installs it")
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert broken(site) == []
    assert fetched(site) == []
    made = {path.stem.split("_")[0] for path in site.glob("gallery/*.html")}
    assert made == {"fwd", "bwd", "decode", "index"}
    tables = list((ROOT / "configs").glob("*.yaml"))
    assert len(list(site.glob("configs/*.html"))) == len([*tables, "index"])
    menu = re.findall(r'<span class="md-ellipsis">\s*(.+?)\s*<', (site / "index.html").read_text())
    assert set(re.findall(r"- (.+): \S+\.md$", CONFIG, re.MULTILINE)) <= set(menu)
    modules = list(site.glob("reference/flashgen*.html"))
    assert len(modules) > 20
    assert all(f"reference/{page.name}" in (site / "api.html").read_text() for page in modules)
    text = (site / "reference" / "flashgen.html").read_text()
    shown = " ".join(re.sub(r"<[^>]+>", "", text).split())
    for name in sorted(set(flashgen.__all__) - {"block_mask"}):
        first = " ".join(getattr(flashgen, name).__doc__.split("`")[0].split()[:4])
        assert f'id="flashgen.{name}"' in text
        assert first in shown, f"{name} is shown without its docstring"
