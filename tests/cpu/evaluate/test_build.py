"""evaluate/build.py: which variant of a kernel is compiled and judged."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from flashgen.evaluate.build import Builder
from flashgen.evaluate.payloads import Tasks
from flashgen.evaluate.workers.answers import Task
from flashgen.evaluate.workers.pool import Workers
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import Problem
from tests.makers import make_config, make_spec


@pytest.mark.parametrize(
    ("batch", "heads", "variants"), [(1, 8, [False]), (1, 1056, [True]), (64, 8, [False, True])]
)
def test_a_decode_is_judged_by_the_variants_that_its_problems_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, heads: int, variants: list[bool]
) -> None:
    """A large batch fills the GPU with one split, whose O is the result and not float32. 64
    sequences are timed beside one, of several splits.
    """
    sent: list[dict[str, Any]] = []

    def submit(self: Workers, task: Task) -> Future[Any]:
        sent.append(task.payload)
        return Future()

    monkeypatch.setattr(Workers, "submit", submit)
    workers = Workers(1)
    builder = Builder(TARGETS["nvidia_h200"], tmp_path, workers, Tasks())
    spec, config = make_spec(head_dim=64, direction="decode"), make_config(16, 64)
    problem = Problem(batch=batch, heads=heads, kv_heads=heads, seq_q=1, seq_k=512)
    builder.start(spec, problem, config)
    builder.start(spec, problem, config)
    workers.close()
    assert [payload["whole"] for payload in sent] == variants
