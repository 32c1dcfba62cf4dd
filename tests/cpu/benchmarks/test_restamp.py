"""benchmarks/restamp.py: an entry gets the digest of today only where the machine code is equal."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import restamp
from benchmarks.restamp import Code
from flashgen import paths
from flashgen.kernels.render import render
from flashgen.spec.gpu import TARGETS
from flashgen.table.entry import short_digest
from flashgen.table.table import Table
from flashgen.table.table_file import load_with_evidence, save
from tests.makers import make_config, make_spec
from tests.tables import made_entry, made_run, with_evidence

SPEC, CONFIG = make_spec("bfloat16", 64), make_config(64, 64)
NOW = render(SPEC, CONFIG)
OLD = "sha256:" + "0123" * 16


def code(digest: str, code: str, **fields: object) -> Code:
    made = Code(
        kernel=NOW.name, arch="sm_90", whole=False, digest=digest, code=code, registers=100,
        spill_bytes=0, shared=1024,
    )  # fmt: skip
    return replace(made, **fields)  # type: ignore[arg-type]


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table whose entry names the kernel of before."""
    entry = made_entry(spec=SPEC, config=CONFIG, source="untimed", digest=OLD)
    table = Table(gpu=TARGETS["nvidia_h200"]).with_entry(entry, made_run("a"))
    save(table, tmp_path / "nvidia_h200.yaml")
    monkeypatch.setattr(paths, "shipped_table", lambda slug: tmp_path / f"{slug}.yaml")


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (code(NOW.digest, "a"), ""),
        (code(NOW.digest, "b"), "code"),
        (code(NOW.digest, "a", registers=90, shared=0), "registers, shared"),
        (code(NOW.digest, "a", arch="sm_80"), "the files lack it"),
        (code(OLD, "a"), "the files lack it"),
    ],
)
def test_an_entry_is_stamped_where_the_code_is_equal(
    tables: None, now: Code, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (before,) = load_with_evidence(paths.shipped_table("nvidia_h200")).entries
    left = restamp.stamp("nvidia_h200", [code(OLD, "a")], [now], write=True)
    assert left == [f"nvidia_h200: {NOW.name}: {reason}"] * bool(reason)
    (entry,) = load_with_evidence(paths.shipped_table("nvidia_h200")).entries
    digest = short_digest(OLD if reason else NOW.digest)
    assert entry == with_evidence(before, digest=digest)
    assert f"{int(not reason)} of 1 entries" in capsys.readouterr().out


def test_nothing_is_written_unless_asked_for(tables: None) -> None:
    same = [code(OLD, "a")], [code(NOW.digest, "a")]
    assert restamp.stamp("nvidia_h200", *same, write=False) == []
    (entry,) = load_with_evidence(paths.shipped_table("nvidia_h200")).entries
    assert entry.evidence.digest == short_digest(OLD)


def test_a_kernel_that_is_nowhere_is_reported(tables: None) -> None:
    (line,) = restamp.stamp("nvidia_h200", [], [code(NOW.digest, "a")], write=True)
    assert short_digest(OLD) in line


def test_a_comparison_names_what_is_worse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = tmp_path / "before.jsonl", tmp_path / "after.jsonl"
    old = [code(OLD, "a"), code(OLD, "a", arch="sm_80"), code(OLD, "a", arch="sm_89")]
    new = [
        old[0],
        replace(old[1], code="b", registers=99),
        replace(old[2], code="b", spill_bytes=4),
    ]
    for path, codes in ((before, old), (after, new)):
        path.write_text("".join(f"{json.dumps(asdict(each))}\n" for each in codes))
    assert restamp.main(["compare", str(before), str(after)]) == 1
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("3 compilations of 1 kernels: 1 have equal machine code, 2 do not, 1 ")
    assert [line.endswith("(worse)") for line in others] == [False, True]
    after.write_text("".join(f"{json.dumps(asdict(each))}\n" for each in new[:2]))
    assert restamp.main(["compare", str(before), str(after)]) == 1  # one is missing
    before.write_text("".join(f"{json.dumps(asdict(each))}\n" for each in old[:2]))
    assert restamp.main(["compare", str(before), str(after)]) == 0
