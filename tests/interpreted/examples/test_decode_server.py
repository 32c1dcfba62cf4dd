"""examples/decode_server on flashgen's kernels: append, decode and prefill in one step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flashgen.kernels.launch_cache import Append, Decode
from flashgen.runtime.launcher import Launcher
from tests.decode_servers import expected, load, requests_of
from tests.serving import SLUG


def test_answers_are_those_of_the_run_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLASHGEN_GPU", SLUG)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    launched: list[tuple[str, int]] = []
    original = Launcher.__call__

    def recorded(self: Launcher, call: Any) -> Any:
        if isinstance(call, Decode):
            launched.append(("decode", call.q.shape[2]))
        elif isinstance(call, Append):
            launched.append(("append", call.k.shape[2]))
        return original(self, call)

    monkeypatch.setattr(Launcher, "__call__", recorded)
    engine, tiny = load(monkeypatch, "engine"), load(monkeypatch, "tiny_model")
    pool = load(monkeypatch, "page_pool")
    sizes = tiny.Sizes(positions=64)
    pages = pool.PagePool(
        sizes, pages=9, page_size=4, dtype=torch.float32, device=torch.device("cpu")
    )
    served = engine.Engine(tiny.TinyModel(sizes).eval(), pages, sequences=3, tokens_per_step=8)
    requests = requests_of(engine, [1, 13, 6, 9], new_tokens=5)
    served.submit(requests)
    steps = []
    while len(served.results) < len(requests):
        steps.append(served.step())
    assert served.results == {each.name: expected(served.model, each) for each in requests}
    assert any(step.decoded and step.prefilled for step in steps)
    prefills = {rows for what, rows in launched if rows > 1}
    assert ("decode", 1) in launched
    assert ("append", 1) in launched
    assert prefills, "every prompt was run token by token"
