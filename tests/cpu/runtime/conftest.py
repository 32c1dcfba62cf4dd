from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashgen.runtime import Dispatcher
from tests.launches import Written, dispatcher, served


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Written]:
    with served(monkeypatch) as made:
        yield made


@pytest.fixture
def own(driver: Written, monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    return dispatcher(monkeypatch)
