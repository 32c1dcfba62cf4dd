"""Steps of bench's backward ladder as contenders: their gradients are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashgen.bench import race
from flashgen.bench.case import Sizes, cases, make_inputs
from flashgen.bench.ladder import LadderSteps
from flashgen.runtime.selection import Served
from flashgen.spec.gpu import TARGETS


@pytest.mark.parametrize("name", ["pair: fa2", "ds: fa2", "fused: fa2"])
def test_a_backward_step_is_right(tmp_path: Path, name: str) -> None:
    sizes = Sizes(
        directions=["backward"],
        dtype="float16",
        head_dims=[16],
        seqs=[150],
        masks=["causal"],
        batches=[1],
        smoke=True,
    )
    case = next(iter(cases(sizes)))
    served = Served(archs={}, choices={})
    ladder = LadderSteps(gpu=TARGETS["nvidia_h200"], served=served, evaluator=None, folder=tmp_path)
    contenders = {each.name: each for each in ladder.contenders(case)}
    line, ready = race.judged(contenders[f"ladder: {name}"], case, make_inputs(case, "cpu"))
    assert line.status == "ok", line
    assert ready is not None
    assert ("fused" in line.detail) == ("fused" in name)
    assert ("bwd_dq_of_ds" in line.detail) == ("ds" in name.split(":"))
