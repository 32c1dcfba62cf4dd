"""The tests of this folder need the recording driver: make -f tests/sessions.mk test-driver sets its environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.driver.events import Fault, Recording, Unmodelled

HERE = Path(__file__).parent
REASON = "needs the recording driver: make -f tests/sessions.mk test-driver"


def pytest_configure() -> None:
    if "RECORDING_CUDA_LOG" in os.environ:
        from tests.driver import executing

        executing.remember()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "RECORDING_CUDA_LOG" not in os.environ:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(autouse=True)
def recording() -> Iterator[Recording]:
    """What the test does. Afterwards, no rule of CUDA is broken."""
    made = Recording()
    # torch 2.11's Inductor names its own ptxas in the environment. Triton asks for the version of a
    # ptxas once a process, so children would compile under another key than this process looks for.
    with mock.patch.dict(os.environ):
        yield made
    assert [event.broken for event in made.of(Fault)] == []
    assert [event.function for event in made.of(Unmodelled)] == []
