"""examples/engine_kernels: a tile is interpreted, and compared with float64 beside the engine's own."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from tests.engine_examples import EDIT, POINT, WORK, engines, launches, standin


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", torch.cuda.get_device_capability)


@pytest.mark.parametrize("broken", [False, True])
def test_a_wrong_tile_is_found(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = ("range(0, tokens, BLOCK_N)", "range(0, tokens - BLOCK_N, BLOCK_N)")
    monkeypatch.setitem(engines.KERNELS, "engine", standin(EDIT, *[wrong] * broken))
    asked = {"kernel": "engine", "work": asdict(WORK), "target": "nvidia_h200", "point": POINT}
    found = launches.check(asked)
    (floors, rms), own = found["errors"]
    assert found["found"] != broken
    assert max(own) < 1.2
    assert (max(floors, rms) > 10) == broken
