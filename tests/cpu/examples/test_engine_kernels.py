"""examples/engine_kernels: what a patch is, what is compiled, and how many trips programs do."""

from __future__ import annotations

import pytest
import torch
import triton

from flashgen.errors import InvalidArgument
from tests.engine_examples import EDIT, POINT, WORK, engines, launches, standin


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the functions change for the rest of their child process."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", torch.cuda.get_device_capability)
    monkeypatch.setattr(triton.runtime.driver, "_active", None)


def compiled(kernel: engines.EngineKernel, point: dict[str, int] | None) -> launches.StandIn:
    given = engines.inputs(WORK, filled=False)
    stand_in, _ = launches.launched(
        kernel, point, WORK, capability=(8, 0), arch="sm_80", given=given
    )
    return stand_in


def test_the_engine_itself_chooses_and_triton_compiles_what_it_launched() -> None:
    own, chosen = compiled(standin(), None), compiled(standin(), POINT)
    assert (own.grid, chosen.grid) == ((5, 4), (3, 4))
    assert own.numbers["BLOCK_M"] == 16
    assert {name: chosen.numbers[name] for name in POINT} == POINT
    assert chosen.compiled.metadata.num_warps == 8
    assert own.compiled.metadata.num_warps == 4
    assert chosen.compiled.metadata.target.arch == 80
    assert chosen.compiled.asm["cubin"] != own.compiled.asm["cubin"]


def test_a_patch_that_changes_no_launch_is_refused() -> None:
    idle = standin((EDIT[0], EDIT[0] + "    tuned = {BLOCK_M}\n"))
    with pytest.raises(InvalidArgument, match=r"must choose .*'BLOCK_M': 32.* launched .*16"):
        compiled(idle, POINT)


@pytest.mark.parametrize("old", ["    BLOCK = 17\n", "tl.load("])
def test_a_line_that_another_release_lacks_or_repeats_is_refused(old: str) -> None:
    with pytest.raises(InvalidArgument, match="must have this line once"):
        compiled(standin((old, "")), POINT)


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(InvalidArgument, match=r"no_engine\.ops must be installed"):
        launches.installed("no_engine.ops")


def test_trips_by_hand() -> None:
    work = engines.Work(heads=8, kv_heads=2, dim=128, queries=(5, 3), keys=(40, 3))
    point = {"BLOCK_M": 16, "TILE_SIZE": 16, "BLOCK_H": 16, "BLOCK_N": 16}
    # Tiles of 4 rows: those of 40 keys see 39 and 40, then one of 3; the fourth is launched in vain.
    assert engines.trips_vllm_prefill(point, work) == [3, 3, 1, 0] * 2
    decode = engines.Work(heads=8, kv_heads=2, dim=128, queries=(1, 1), keys=(600, 20))
    # In 16 parts of three tiles: 38 tiles are twelve parts and two tiles. The 20 keys are two tiles.
    found = engines.trips_vllm_decode(point, decode)
    assert [found[4 * n : 4 * n + 2] for n in (0, 1, 11, 12, 13)] == [
        [3, 1], [3, 1], [3, 0], [2, 0], [0, 0],
    ]  # fmt: skip
    # Splits of 96 and of 32 keys, two tiles of heads.
    assert engines.trips_sglang_decode(point, decode)[:4] == [6, 2, 6, 2]
    assert engines.trips_sglang_decode(point, decode)[24:] == [2, 0, 2, 0, 0, 0, 0, 0]
    prefill = engines.Work(heads=2, kv_heads=1, dim=128, queries=(40, 3), keys=(40, 3))
    assert engines.trips_sglang_prefill(point, prefill) == [1, 1] * 2 + [2, 0] * 2 + [3, 0] * 2
