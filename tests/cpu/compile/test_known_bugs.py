"""compile/known_bugs.py: which Triton is known to be wrong where."""

from __future__ import annotations

import pytest

from flashgen.compile.known_bugs import warnings_of


@pytest.mark.parametrize(
    ("arch", "triton", "issues"),
    [
        ("sm_100", "3.5.1", []),
        ("sm_100", "3.6.0", ["#9871"]),
        ("sm_100a", "3.6.0", ["#9871"]),
        ("sm_100", "3.7.1", ["#181248"]),
        ("sm_100", "3.8.0", []),
        ("sm_103", "3.6.0", ["#9871", "#10590", "#10821"]),
        ("sm_103", "3.7.0", ["#10590", "#10821"]),
        ("sm_103", "3.9.0+git", ["#10821"]),
        ("sm_90", "3.6.0", []),
        ("sm_120", "3.7.1", []),
        ("gfx942", "3.7.1", []),
    ],
)
def test_warnings(arch: str, triton: str, issues: list[str]) -> None:
    found = warnings_of(arch, triton)
    assert len(found) == len(issues)
    assert all(issue in warning for issue, warning in zip(issues, found, strict=True))
    assert all(f"Triton {triton} on {arch}: " in warning for warning in found)
