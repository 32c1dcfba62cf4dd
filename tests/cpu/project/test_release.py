"""What people see of the project outside of its code agrees with it: workflows, issue forms, citation, classifiers."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import flashgen

ROOT = Path(__file__).resolve().parents[3]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SESSIONS = "-f tests/sessions.mk "
TARGETS, SESSION_TARGETS = (
    set(re.findall(r"^([a-z][a-z-]*):", (ROOT / name).read_text(), re.MULTILINE))
    for name in ("Makefile", "tests/sessions.mk")
)


def steps(workflow: Any) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_targets_that_exist_and_write_nothing(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert True in workflow  # "on", as YAML 1.1 has it
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())
    named = re.findall(rf"\bmake ({SESSIONS})?([a-z][a-z-]*)", path.read_text())
    assert named
    assert all(name in (SESSION_TARGETS if session else TARGETS) for session, name in named)
    assert all(("uses" in step) != ("run" in step) for step in steps(workflow))


def test_every_python_that_is_claimed_is_tested() -> None:
    text = next(path for path in WORKFLOWS if path.stem == "ci").read_text()
    matrix = yaml.safe_load(text)["jobs"]["test"]["strategy"]["matrix"]["python-version"]
    claimed = [x.split()[-1] for x in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", x)]
    assert matrix == claimed
    assert PROJECT["requires-python"] == f">={matrix[0]}"


def required(form: Any) -> str:
    return " ".join(
        part["attributes"]["label"] for part in form["body"]
        if part.get("validations", {}).get("required")
    )  # fmt: skip


def test_actions_are_pinned_by_commit() -> None:
    """A tag may be moved to other code."""
    used = [
        line.split("uses:")[1].strip()
        for path in (ROOT / ".github" / "workflows").glob("*.yml")
        for line in path.read_text().splitlines()
        if "uses:" in line
    ]
    assert len(used) > 10
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", each) for each in used)


def test_a_release_has_the_date_of_its_commit() -> None:
    (build,) = [x for x in (ROOT / "Makefile").read_text().splitlines() if "-m build" in x]
    assert "SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct)" in build


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (flashgen.__version__, PROJECT["license"])
    assert citation["title"] == PROJECT["name"]
    assert {"cff-version", "message", "authors", "type"} <= set(citation)


def test_the_changelog_begins_with_what_comes_next_or_with_this_version() -> None:
    """A release renames the section Unreleased, so that a tag finds its own text on top."""
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = [each for each in headings if each != "Unreleased"]
    assert headings in (released, ["Unreleased", *released])
    assert re.fullmatch(rf"{re.escape(flashgen.__version__)} - \d{{4}}-\d\d-\d\d", released[0])
