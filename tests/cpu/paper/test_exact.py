"""Claims shown with exact numbers, which a hand can check; and what must break them."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch

from examples.papers import gpt2, gradients, memories, parallel, scan, tiles
from examples.papers.finding import Check, Finding
from flashgen.spec.data_sheets import DATA_SHEETS, SOURCES
from flashgen.spec.gpu import TARGETS


def test_the_gradients_of_two_queries_and_keys_by_hand() -> None:
    f = Fraction
    found = gradients.steps(gradients.Q, gradients.K, gradients.V, gradients.DO)
    expected = {
        "p": [[f(3, 4), f(1, 4)], [f(1, 2), f(1, 2)]],
        "o": [[3, 2], [2, 4]],
        "dv": [[f(5, 4), f(1, 2)], [f(3, 4), f(1, 2)]],
        "dp": [[4, 0], [4, 8]],
        "d": [[3], [6]],
        "d_of_p": [[3], [6]],
        "ds": [[f(3, 4), f(-3, 4)], [-1, 1]],
        "dq": [[f(3, 4), f(-3, 4)], [-1, 1]],
        "dk": [[f(-1, 4), -1], [f(1, 4), 1]],
    }
    assert {name: getattr(found, name).tolist() for name in expected} == expected


@pytest.mark.parametrize("seed", range(5))
def test_the_exact_gradients_are_those_of_autograd(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    whole = [torch.randint(-2, 3, (3, 2), generator=draw).tolist() for _ in range(4)]
    found = gradients.steps(*(gradients.matrix(rows) for rows in whole))
    q, k, v = (torch.tensor(rows, dtype=torch.float64).requires_grad_() for rows in whole[:3])
    o = (q @ k.T * gradients.SCALE).softmax(-1) @ v
    grads = torch.autograd.grad(o, (q, k, v), torch.tensor(whole[3], dtype=torch.float64))
    exact = (found.dq, gradients.SCALE), (found.dk, gradients.SCALE), (found.dv, 1.0)
    for got, (want, unit) in zip(grads, exact, strict=True):
        assert (got - gradients.tensor(want, unit)).abs().max() < 1e-12


def test_a_merge_is_associative_commutative_and_right_and_one_without_rescaling_is_not() -> None:
    scores, values = (4, -2, 0, 3), (1, 5, -3, 2)
    states = [scan.state_of(score, value) for score, value in zip(scores, values, strict=True)]
    weights = [Fraction(2) ** score for score in scores]
    direct = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    orders = list(itertools.permutations(states))
    found = [state for order in orders for state in scan.bracketings(order, scan.merged)]
    assert len(found) == 24 * 5
    assert {state.result for state in found} == {direct}
    wrong = {s.result for order in orders for s in scan.bracketings(order, scan.averaged)}
    assert len(wrong) > 1


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_a_scan_gives_every_prefix(count: int) -> None:
    states = [scan.state_of(n % 3, n) for n in range(count)]
    found, rounds = scan.prefixes(states)
    assert found == list(itertools.accumulate(states, scan.merged))
    assert rounds == (count - 1).bit_length()


def test_a_softmax_of_each_tile_is_shown_to_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiles.tile_softmax().holds
    # Equal tiles: each has half of the row, so dividing by their number would do.
    monkeypatch.setattr(tiles, "SCORES", ((1, 2, 3, 1, 2, 3),) * 3)
    assert not tiles.tile_softmax().holds


def test_busy_sms_by_hand() -> None:
    assert parallel.busy(54, 108) == 0.5
    assert parallel.busy(108, 108) == 1.0
    assert parallel.busy(109, 108) == pytest.approx(109 / 216)


def test_both_ways_to_split_a_tile_compute_attention() -> None:
    q, k, v = (torch.randn(n, 8, dtype=torch.float64) for n in (8, 128, 128))
    exact = (q @ k.T).softmax(-1) @ v
    for way in (parallel.by_rows, parallel.by_keys):
        assert (way(q, k, v, parallel.Shared()) - exact).abs().max() < 1e-12


def test_the_memories_of_the_papers_gpu_are_those_of_its_figure_1() -> None:
    registers, shared, l2, hbm = memories.memories(memories.PAPERS_GPU)
    assert shared.tbs == pytest.approx(19.0, rel=0.05)  # printed: 19 TB/s
    assert hbm.tbs == pytest.approx(1.5, rel=0.05)  # printed: 1.5 TB/s
    assert hbm.bytes == 40e9
    assert registers.tbs > shared.tbs > l2.tbs > hbm.tbs  # type: ignore[operator]


@pytest.mark.parametrize("slug", TARGETS)
def test_every_known_gpu_has_sizes_and_sources(slug: str) -> None:
    gpu = TARGETS[slug]
    levels = memories.memories(gpu)
    assert all(level.bytes > 0 for level in levels)
    assert levels[-1].bytes > 10 * levels[-2].bytes  # HBM is larger than L2
    assert SOURCES[gpu.arch]


def test_the_memory_in_a_products_name_is_its_own() -> None:
    for sheet in DATA_SHEETS:
        if sheet.name.endswith(("-80GB", "-40GB")) or " 80GB" in sheet.name:
            assert f"{sheet.memory_gb}GB" in sheet.name


def test_a_step_of_gpt_2_by_hand() -> None:
    small, medium = gpt2.MODELS
    # 12 layers of 12 * 768^2 weights and 50,257 words of 768: 124 million.
    assert small.step_flops == 6 * 1024 * (12 * 12 * 768**2 + 50257 * 768)
    assert medium.width == 1024
    assert gpt2.standard_ms() == pytest.approx(40.265 / 1.555, rel=1e-3)
    step = gpt2.step_of(small, tiled_ms=gpt2.standard_ms())
    assert step.speedup == 1.0
    assert step.products == pytest.approx(small.step_flops / 312e12 * 1e3, rel=1e-3)
    assert gpt2.step_of(small, tiled_ms=0.0).speedup == pytest.approx(
        1 + step.standard / step.products
    )


def test_a_finding_has_the_verdict_of_its_weakest_check() -> None:
    full = Check(text="a", how="counted", holds=True)
    partly = Check(text="b", how="counted", holds=True, points=(20, 21))
    wrong = Check(text="c", how="counted", holds=False, points=(1, 21))
    assert Finding(checks=(full,), figures=()).verdict == "holds"
    assert Finding(checks=(full, partly), figures=()).verdict == "holds at 20 of 21"
    assert Finding(checks=(partly, wrong), figures=()).verdict == "fails"
    assert Check(text="d", how="counted", holds=True, points=(3, 3)).verdict == "holds"
