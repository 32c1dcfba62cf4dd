from __future__ import annotations

import random

import pytest


@pytest.fixture(scope="session")
def seed() -> int:
    """Fresh for every session, printed by every failure through CheckResult.detail."""
    return random.SystemRandom().randrange(1 << 30)
