"""benchmarks/restamp.py: an entry gets the digest of today only where the machine code is equal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import restamp
from flashgen import paths
from flashgen.kernels.render import Rendered, digest_of, render
from flashgen.spec.gpu import TARGETS
from flashgen.table.table import Table, load, save
from tests.makers import make_config, make_spec
from tests.tables import made_entry, made_run

SPEC, CONFIG = make_spec("bfloat16", 64), make_config(64, 64)
NOW = render(SPEC, CONFIG)


def before() -> Rendered:
    """The kernel of today with a comment more, under another name."""
    header, body = NOW.source.split("import triton\n", 1)
    body = "import triton\n" + body.replace(NOW.name, "old_name") + "# The end.\n"
    lines = header.splitlines(keepends=True)
    lines[-1] = f"# {digest_of(body)}\n"
    source = "".join(lines) + body
    return Rendered(name="old_name", source=source, digest=digest_of(body), template="")


def tables(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table whose entry names the text before; the folder with that text."""
    kernels = folder / "before" / "generated" / "kernels"
    kernels.mkdir(parents=True)
    (kernels / "old_name.py").write_text(before().source)
    entry = made_entry(spec=SPEC, config=CONFIG, source="untimed")
    table = Table(gpu=TARGETS["nvidia_h200"])
    table = table.with_entry(replace(entry, digest=short(before().digest)), made_run("a"))
    save(table, folder / "nvidia_h200.yaml")
    monkeypatch.setattr(paths, "shipped_table", lambda slug: folder / f"{slug}.yaml")
    return folder / "before"


def short(digest: str) -> str:
    return restamp.short_digest(digest)


@pytest.mark.parametrize("same", [True, False])
def test_an_entry_is_stamped_where_the_code_is_equal(
    same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = restamp.texts_by_digest(tables(tmp_path, monkeypatch) / "generated" / "kernels")
    jobs, missing = restamp.jobs_of(["nvidia_h200"], texts)
    assert [job.before.name for job in jobs] == ["old_name"]
    assert not missing
    # A text has one of two codes, at random: here the second compilation of both agrees.
    codes = {"old_name": "abbb" if same else "aaaa", NOW.name: "cbcc"}
    monkeypatch.setattr(
        restamp, "code_of", lambda text, job, cache, n: {"code": codes[text.name][n]}
    )
    difference = restamp.same_code(jobs[0], tmp_path)
    assert difference == ("" if same else "code")
    count = restamp.stamp(["nvidia_h200"], {job for job in jobs if not difference})
    (entry,) = load(paths.shipped_table("nvidia_h200")).entries
    assert count == same
    assert entry.digest == short(NOW.digest if same else before().digest)


def test_a_text_that_is_nowhere_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables(tmp_path, monkeypatch)
    jobs, missing = restamp.jobs_of(["nvidia_h200"], {})
    assert not jobs
    assert len(missing) == 1
    assert short(before().digest) in missing[0]


def test_a_constant_may_have_another_value() -> None:
    old, new = restamp.float32_pair("-1e30=-3.4028234663852886e38")
    assert (old.hex(), new.hex()) == ("caf249f1", "ffff7fff")
