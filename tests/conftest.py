"""Shared by all tests: the --update-golden option, and small makers."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden from the templates"
    )
    parser.addoption(
        "--need-postgres", action="store_true", help="fail, not skip, where there is no PostgreSQL"
    )


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))
