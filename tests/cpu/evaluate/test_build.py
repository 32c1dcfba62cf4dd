"""evaluate/build.py: which variant of a kernel is compiled and judged."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from flashgen.evaluate.build import Builder
from flashgen.evaluate.tasks import Tasks
from flashgen.evaluate.workers.answers import Task
from flashgen.evaluate.workers.pool import Workers
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import Problem
from tests.makers import make_config, make_spec


@pytest.mark.parametrize(("batch", "whole"), [(1, False), (256, True)])
def test_a_decode_is_judged_by_the_variant_that_its_problem_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, whole: bool
) -> None:
    """A large batch fills the GPU with one split, whose O is the result and not float32."""
    sent: list[dict[str, Any]] = []

    def submit(self: Workers, task: Task) -> Future[Any]:
        sent.append(task.payload)
        return Future()

    monkeypatch.setattr(Workers, "submit", submit)
    workers = Workers(1)
    builder = Builder(TARGETS["nvidia_h200"], tmp_path, workers, Tasks())
    spec, config = make_spec(head_dim=64, direction="decode"), make_config(16, 64)
    problem = Problem(batch=batch, heads=8, kv_heads=8, seq_q=1, seq_k=4096)
    builder.start(spec, problem, config)
    builder.start(spec, problem, config)
    workers.close()
    assert [payload["whole"] for payload in sent] == [whole]
