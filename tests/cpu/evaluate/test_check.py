"""The check itself: which cases there are, and what of results passes. No kernel runs: torch computes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.evaluate.check import cases_of, compared, poisoned_outputs, trial_of, verdict_of
from flashgen.evaluate.check_cache import DecodeCase
from flashgen.evaluate.check_sampled import SampledCase
from flashgen.evaluate.surroundings import Surroundings
from flashgen.inputs.cache import Cache
from flashgen.kernels.launch_cache import Append
from flashgen.reference import attention as reference
from flashgen.reference import gradients
from flashgen.reference.attention import RMS_ELEMENTS, Comparison, pooled, worst
from flashgen.reference.cases import (
    LARGEST_SCORES,
    MARGIN,
    CheckCase,
    draw,
    make_inputs,
    moved,
)
from flashgen.spec.problem import Problem
from tests.makers import make_config, make_spec

SPEC = make_spec("bfloat16", 64, "none")
CASE = CheckCase(problem=Problem(batch=1, heads=2, kv_heads=1, seq_q=40, seq_k=70))
OF_TORCH = {"scale": 0.125, "diagonal": None}

WALKED = {
    **dict.fromkeys(("forward", "backward_dq", "backward_dbias", "backward_dq_of_ds"), "seq_k"),
    **dict.fromkeys(("backward_dkv", "backward_fused", "backward_ds"), "seq_q"),
}
"""What the programs of a direction walk."""


def ideal(call: Any) -> tuple[Tensor, Tensor]:
    """A forward kernel that rounds as it must."""
    return reference.rounded_attention(call.q, call.k, call.v, precision="ieee", **OF_TORCH)


@pytest.mark.parametrize("direction", WALKED)
@pytest.mark.parametrize(
    "features", [{}, {"varlen": True}, {"window": True}, {"chunk": True}], ids=str
)
def test_a_case_fills_the_ring_twice(direction: Any, features: dict[str, Any]) -> None:
    if "varlen" in features and direction == "backward_dbias":
        pytest.skip("packed sequences have no bias")
    config = make_config(32, 16, num_stages=5)
    of_bias = {"bias": "additive"} if direction == "backward_dbias" else {}
    spec = make_spec("bfloat16", 64, "causal", **of_bias, **features).for_direction(direction)
    tile = config.bc if WALKED[direction] == "seq_k" else config.br
    found = []
    for number, case in enumerate(cases_of(spec, config)):
        assert isinstance(case, CheckCase)
        drawn = trial_of(spec, case, number).call.features
        sizes = case.longest
        whole = drawn.window is None or drawn.window[0] > sizes.seq_q + sizes.seq_k
        whole = whole and not 0 < drawn.chunk < sizes.seq_k
        if of_bias:
            whole = whole and drawn.bias.shape[3] == 1
        found.append(whole and getattr(sizes, WALKED[direction]) >= 12 * tile)
    assert any(found)


@pytest.mark.parametrize("direction", ["forward", "backward_dkv"])
def test_block_masks_have_blocks_for_the_ring(direction: Any) -> None:
    config = make_config(64, 128, num_stages=3)
    spec = replace(SPEC, block_mask=True).for_direction(direction)
    tile, walked = (64, "seq_q") if direction == "backward_dkv" else (128, "seq_k")
    longest = max(getattr(case.problem, walked) for case in cases_of(spec, config))
    assert 2 / 3 * longest >= 8 * tile


@pytest.mark.parametrize("stages", [1, 3])
def test_a_decode_and_its_combine_fill_theirs(stages: int) -> None:
    config = make_config(16, 64, num_stages=stages)
    cases = cases_of(SPEC.for_direction("decode"), config)
    assert all(isinstance(case, DecodeCase) for case in cases)
    assert any(max(c.lengths) / c.splits >= (2 * stages + 2) * 64 for c in cases)
    parts = cases_of(SPEC.for_direction("combine"), config)
    assert max(case.splits for case in parts) >= (2 * stages + 2) * 64


@pytest.mark.parametrize(
    "direction", ["forward", "backward_dq", "backward_dkv", "decode", "combine"]
)
@pytest.mark.parametrize("features", [{}, {"varlen": True}, {"block_mask": True}], ids=str)
def test_scores_grow_and_fall_in_every_direction(direction: Any, features: dict[str, Any]) -> None:
    if features and direction in ("decode", "combine"):
        pytest.skip("a cache has neither")
    spec = replace(SPEC, **features).for_direction(direction)
    assert {case.scores for case in cases_of(spec, make_config(16, 16))} == {
        "even",
        "growing",
        "falling",
    }


@pytest.mark.parametrize("scores", ["growing", "falling"])
def test_uneven_scores_overflow_without_a_maximum(scores: Any) -> None:
    """And jump by more than 8 from tile to tile, up or down."""
    case = replace(CASE, problem=replace(CASE.problem, seq_q=16, seq_k=64), scores=scores)
    q, k, _ = make_inputs(SPEC, case, 1, "cpu")
    s = 0.125 * q.float() @ k.float().transpose(-1, -2).repeat_interleave(2, 1)
    assert s.std() > LARGEST_SCORES / 3
    tiles = s.unflatten(-1, (4, 16)).amax(-1) / math.log(2)
    jumps = tiles.diff(dim=-1) * (1 if scores == "growing" else -1)
    assert (tiles.amax(-1) > 128).float().mean() > 0.5
    assert jumps.mean() > 8


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_bias_beneath_the_floor_is_seen_by_the_rms(dtype: Any) -> None:
    spec = replace(SPEC, dtype=dtype)
    trial = trial_of(spec, CASE, 0)
    verdict = compared(ideal, trial)
    assert verdict.passed
    assert verdict.rms == 1.0
    o, lse = ideal(trial.call)
    factor = 1.003 if dtype == "bfloat16" else 1.0004
    biased = trial.compare(((o.float() * factor).to(o.dtype), lse))
    assert biased.floors < 2
    assert biased.rms > 1.3
    assert not biased.passed


def test_each_figure_has_its_limit() -> None:
    """Those of docs/numerics.md: 2 floors, an rms of 1.15, and LSE within its tolerance."""
    right = Comparison(floors=1.99, rms=1.14, elements=RMS_ELEMENTS, lse=0.99)
    assert right.passed
    for figure in ({"floors": 2.01}, {"rms": 1.16}, {"lse": 1.01}):
        assert not replace(right, **figure).passed


SAMPLED = SampledCase(problem=Problem(batch=2, heads=8, kv_heads=4, seq_q=48, seq_k=64))


@pytest.mark.parametrize(("biased", "passed"), [([True], True), ([True] * 3, False)], ids=str)
def test_a_bias_stays_where_the_case_is_drawn_again(biased: list[bool], passed: bool) -> None:
    drawn: list[float] = []

    def run(call: Any) -> tuple[Tensor, Tensor]:
        drawn.append(float(call.q.sum()))
        o, lse = ideal(call)
        o[:, :, ::5] *= 1.003 if biased[len(drawn) - 1 :] else 1.0
        return o, lse

    verdict = verdict_of(run, SPEC, CASE, 0, "cpu")
    assert verdict.passed == passed
    assert len(set(drawn)) == 3


def gradients_of(direction: Any) -> Any:
    """A backward kernel that rounds as it must."""

    def run(call: Any) -> tuple[Tensor, ...]:
        given = {
            name: getattr(call, name)
            for name in ("q", "k", "v", "do", "scale", "diagonal", "features")
        }
        inputs = gradients.GradientInputs(**given, dlse=torch.zeros_like(call.lse))
        found = gradients.rounded_gradients(inputs, call.lse, call.delta)
        return tuple(found[name] for name in gradients.OUTPUTS[direction])

    return run


def attention_of(call: Any) -> tuple[Tensor, Tensor]:
    return reference.rounded_attention(
        call.q,
        call.k,
        call.v,
        scale=call.scale,
        diagonal=call.diagonal,
        precision="ieee",
        features=call.features,
    )


@pytest.mark.parametrize("direction", ["forward", "backward_dq", "backward_dkv", "backward_fused"])
@pytest.mark.parametrize(
    "features",
    [{}, {"bias": "additive", "alibi": True}, {"window": True, "softcap": True}, {"chunk": True}],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 1])
def test_some_heads_stand_for_all(direction: Any, features: dict[str, Any], seed: int) -> None:
    spec = make_spec("bfloat16", 64, "causal", **features).for_direction(direction)
    run = attention_of if direction == "forward" else gradients_of(direction)
    trial = trial_of(spec, SAMPLED, seed)
    found = run(trial.call)
    assert trial.compare(found).passed
    for batch, head, seen in ((0, 0, True), (1, 0, True), (1, 3, True), (0, 1, False)):
        wrong = [x.clone() for x in found]
        wrong[0][batch, head * wrong[0].shape[1] // 4, 5] += 1.0
        assert trial.compare(tuple(wrong)).passed != seen


def test_only_a_gpu_checks_lengths_that_are_timed() -> None:
    config = make_config(64, 64)
    assert cases_of(SPEC, config, "cuda")[:-2] == cases_of(SPEC, config, "cpu")
    sampled = [case for case in cases_of(SPEC, config, "cuda") if isinstance(case, SampledCase)]
    assert [case.problem for case in sampled] == [
        Problem(batch=1, heads=32, kv_heads=8, seq_q=2048, seq_k=2048),
        Problem(batch=1, heads=16, kv_heads=16, seq_q=1024, seq_k=1024),
    ]
    assert [case.heads() for case in sampled] == [
        [(0, 0), (0, 4), (0, 7)],
        [(0, 0), (0, 8), (0, 15)],
    ]
    for fields in ({"dropout": True}, {"varlen": True}, {"block_mask": True}):
        cases = cases_of(replace(SPEC, **fields), config, "cuda")
        assert not any(isinstance(case, SampledCase) for case in cases)


def test_a_result_that_differs_from_run_to_run_is_wrong() -> None:
    """Within rounding each time."""
    runs: list[Tensor] = []

    def unsteady(call: Any) -> tuple[Tensor, Tensor]:
        o, lse = ideal(call)
        runs.append(o)
        if len(runs) % 2 == 0:
            o[0, 0, 0, 0] = torch.nextafter(o[0, 0, 0, 0], o.new_tensor(9.0))
        return o, lse

    trial = trial_of(SPEC, CASE, 0)
    assert compared(unsteady, trial).passed
    runs.clear()
    assert compared(unsteady, trial, twice=True).floors == math.inf
    assert compared(ideal, trial, twice=True).passed
    one = verdict_of(unsteady, SPEC, replace(CASE, scores="falling"), 0, "cpu")
    assert one.floors == math.inf


@pytest.mark.parametrize("place", ["before", "behind", "input", "nowhere"])
def test_what_lies_around_the_tensors_must_stay(place: str) -> None:
    def writes(call: Any) -> tuple[Tensor, Tensor]:
        o, lse = ideal(call)
        found = torch.empty(o.shape, dtype=o.dtype).copy_(o)
        start = found.storage_offset()
        if place == "input":
            call.k[0, 0, 0, 0] += 1.0
        elif place != "nowhere":
            at = start - 1 if place == "before" else start + found.numel()
            found.as_strided((1,), (1,), at).fill_(1.0)
        return found, lse

    verdict = compared(writes, trial_of(SPEC, CASE, 0))
    assert verdict.passed == (place == "nowhere")


@pytest.mark.parametrize(
    ("name", "kept"),
    [("k", True), ("v", True), ("lengths", False), ("block_table", False), ("k_scale", False)],
)
def test_an_append_may_write_keys_and_values_of_the_cache_alone(name: str, kept: bool) -> None:
    new = torch.zeros(1, 1, 1, 16)
    cache = Cache(
        k=torch.zeros(2, 1, 16, 16),
        v=torch.zeros(2, 1, 16, 16),
        lengths=torch.zeros(1, dtype=torch.int32),
        block_table=torch.zeros(1, 2, dtype=torch.int32),
        k_scale=torch.ones(1),
        v_scale=torch.ones(1),
    )
    with Surroundings(Append(k=new, v=new, cache=cache)) as around:
        getattr(cache, name)[...] += 1
    assert around.kept is kept


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sliced"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_is_moved_again_has_no_more_margins(layout: str, dtype: torch.dtype) -> None:
    drawn = draw((2, 3, 5, 17), layout, torch.Generator().manual_seed(0), 3)
    once = moved(drawn, dtype, "cpu")
    again = moved(once, dtype, "cpu")
    for x in (once, again):
        assert torch.equal(x, drawn.to(dtype))
        assert x.stride() == drawn.stride()
        assert x.storage_offset() % 16 % (16 // x.itemsize) == drawn.storage_offset() % (
            16 // x.itemsize
        )
    assert again.untyped_storage().nbytes() == once.untyped_storage().nbytes()
    assert once.untyped_storage().nbytes() < (2 * MARGIN + drawn.untyped_storage().nbytes()) * 4


def test_few_elements_and_uneven_scores_have_no_rms() -> None:
    assert not Comparison(rms=1.2, elements=RMS_ELEMENTS).passed
    assert Comparison(rms=1.2, elements=RMS_ELEMENTS - 1).passed
    trial = trial_of(SPEC, replace(CASE, scores="growing"), 0)
    assert compared(ideal, trial).elements == 0


def test_comparisons_together() -> None:
    one, two = (
        Comparison(floors=1.0, rms=1.0, elements=3000),
        Comparison(rms=2.0, elements=200, lse=0.5),
    )
    mean = math.sqrt((3000 + 4 * 200) / 3200)
    assert pooled([one, two]) == Comparison(floors=1.0, rms=mean, elements=3200, lse=0.5)
    assert worst([one, two]) == Comparison(floors=1.0, rms=1.0, elements=3000, lse=0.5)
    assert pooled([]) == worst([]) == Comparison()
    for together in (pooled, worst):
        assert math.isnan(together([one, Comparison(floors=math.nan)]).floors)
        assert not together([Comparison(lse=math.nan), two]).passed


def test_an_element_that_is_not_written_is_nan() -> None:
    """Whatever was in memory before: a kernel that leaves an element out finds NaN in it."""

    def leaves_one_out(call: Any) -> tuple[Tensor, Tensor]:
        o, lse = ideal(call)
        found = torch.empty_like(o)
        found[..., :-1] = o[..., :-1]
        return found, lse

    trial = trial_of(SPEC, CASE, 0)
    verdict = compared(leaves_one_out, trial)
    assert math.isnan(verdict.floors)
    assert not verdict.passed


@pytest.mark.parametrize("mode", ["default", "warn", "error"])
def test_poisoning_ends_as_it_began(mode: str) -> None:
    def failing() -> None:
        with poisoned_outputs():
            assert torch.empty(4).isnan().all()
            raise ZeroDivisionError

    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(mode)
    modes = torch.get_deterministic_debug_mode()
    try:
        with pytest.raises(ZeroDivisionError):
            failing()
        assert torch.get_deterministic_debug_mode() == modes
    finally:
        torch.set_deterministic_debug_mode(before)
