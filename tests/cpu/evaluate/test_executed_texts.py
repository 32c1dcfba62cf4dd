"""Every kernel text of the tables, compiled for each architecture that uses it, and executed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import triton

from flashgen import paths, ptx
from flashgen.evaluate.sanitize import sanitize
from flashgen.kernels.render import Rendered, render
from flashgen.reference.cases import CheckCase
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import Problem
from flashgen.table.entry import Entry
from flashgen.table.table_file import load
from tests.tables import SHIPPED

SQUARE = ("forward", "backward_delta", "backward_dkv", "backward_dq", "backward_fused")
"""Directions that run two small cases; the others run those of the check."""

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""Of the GPUs that have a table."""


def texts(arch: str) -> dict[str, tuple[Rendered, Entry]]:
    """The first entry with each text, of the tables of an architecture."""
    found: dict[str, tuple[Rendered, Entry]] = {}
    for slug in SHIPPED:
        if TARGETS[slug].arch == arch:
            for entry in load(paths.shipped_table(slug)).everything:
                rendered = render(entry.spec, entry.config)
                found.setdefault(rendered.text_name, (rendered, entry))
    return found


def executor() -> str:
    """A digest of flashgen.ptx and of the compiler, so that results of others do not count."""
    digest = hashlib.sha256(triton.__version__.encode())
    for path in sorted(Path(ptx.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def case(seq_q: int, seq_k: int) -> CheckCase:
    return CheckCase(problem=Problem(batch=1, heads=1, kv_heads=1, seq_q=seq_q, seq_k=seq_k))


@pytest.mark.slow("executes 20 to 60 kernels; what was right before is not executed again")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_text_is_right_as_it_was_compiled(arch: str, pytestconfig: pytest.Config) -> None:
    made_by, wrong = executor(), []
    assert pytestconfig.cache is not None
    for name, (rendered, entry) in texts(arch).items():
        if entry.tritons and not entry.serves_under(triton.__version__):
            continue
        key, stamp = f"executed/{arch}/{name}", f"{rendered.digest} {made_by}"
        if pytestconfig.cache.get(key, "") == stamp:
            continue
        cases = [case(128, 128), case(200, 300)] if entry.spec.direction in SQUARE else None
        result = sanitize(entry.spec, entry.config, arch, cases=cases)
        if result.holds:
            pytestconfig.cache.set(key, stamp)
        else:
            wrong.append("\n".join(result.lines()))
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow("reads all tables")
def test_the_tables_use_every_text() -> None:
    used = {name for arch in ARCHITECTURES for name in texts(arch)}
    committed = {path.stem for path in (paths.shipped_generated_dir() / "kernels").glob("[!_]*.py")}
    assert used == committed
