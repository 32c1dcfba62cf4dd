"""invariant=True: the bits of a row depend on its own query and the keys it sees alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen.errors import InvalidArgument
from flashgen.kernels import constants, launch_cache, render
from flashgen.runtime import Dispatcher, selection
from flashgen.runtime.api import attention, decode, explain, explain_decode
from flashgen.schedules import numeric_class
from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec
from tests import invariance
from tests.invariance import differing, drawn_of, free_choices, pairs_of
from tests.serving import make_current

Seeded = Callable[..., None]
GPUS = "nvidia_h200", "nvidia_a100_sxm4_80gb"
"""The second has mma.sync alone, and above head dim 128 kernels that multiply in parts."""


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Seeded:
    """Serves from here on with the segment and the tiles that a seed draws, as a GPU."""
    monkeypatch.setenv("FLASHGEN_LOG", "error")

    def seeded(seed: int, gpu: str = GPUS[0], package: str = "generated") -> None:
        monkeypatch.setenv("FLASHGEN_GPU", gpu)
        monkeypatch.setattr(numeric_class, "SEGMENT", drawn_of(seed).segment)
        monkeypatch.setattr(selection, "default_configs", free_choices(seed))
        dispatcher = Dispatcher(package=package, archs={}, choices={})
        dispatcher.resolver.advises = False
        make_current(monkeypatch, dispatcher)

    return seeded


@pytest.mark.parametrize("seed", invariance.quick_seeds())
def test_the_same_bits(serve: Seeded, seed: int) -> None:
    serve(seed, GPUS[drawn_of(seed).gpu])
    assert differing(pairs_of(seed)) == 0


@pytest.mark.slow("1,000 cases")
@pytest.mark.parametrize("first", range(0, 1104, 48))
def test_the_same_bits_of_many(serve: Seeded, first: int) -> None:
    for seed in invariance.seeds(first, 48):
        serve(seed, GPUS[drawn_of(seed).gpu])
        assert differing(pairs_of(seed)) == 0, f"seed {seed}"


@pytest.mark.parametrize("seed", [3, 6, 8])
def test_decodes_of_wide_heads_on_gpus_with_mma_sync(serve: Seeded, seed: int) -> None:
    """They multiply Q and K in parts of the head dim, and the prefill in one."""
    serve(seed, GPUS[1])
    assert differing(invariance.by_decode(invariance.case_of(seed, wide=True))) == 0


def test_drop_ins_give_the_same_bits(serve: Seeded) -> None:
    serve(1)
    assert differing(invariance.by_drop_ins()) == 0


def test_the_true_segment(serve: Seeded, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(0)
    monkeypatch.setattr(numeric_class, "SEGMENT", 1024)
    assert differing(last_as_decode(invariance.case_of(4), 1100)) == 0


def test_plain_kernels_differ(serve: Seeded) -> None:
    serve(0)
    q, k, v = torch.randn(3, 1, 2, 200, 64, generator=torch.Generator().manual_seed(0)).half()
    o, step = attention(q, k, v, causal=True), decode(q[:, :, -1:], k, v)
    assert differing([(o[:, :, -1:], step)]) > 0


def test_the_variable_of_the_environment(serve: Seeded, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(0)
    monkeypatch.setenv("FLASHGEN_INVARIANT", "1")
    q, k, v = torch.randn(3, 1, 2, 200, 64, generator=torch.Generator().manual_seed(0)).half()
    o, step = attention(q, k, v, causal=True), decode(q[:, :, -1:], k, v)
    assert differing([(o[:, :, -1:], step)]) == 0
    with pytest.raises(InvalidArgument, match="invariant excludes dropout"):
        attention(q, k, v, dropout_p=0.5)


def test_explain_names_the_class(serve: Seeded) -> None:
    serve(0)
    q = torch.zeros(1, 1, 1, 64).half()
    words = "numeric class: tiles of 64 keys, sums closed each 64 keys, whole rows a warp"
    assert words in str(explain(q, q, q, causal=True, invariant=True))
    assert words in str(explain_decode(q, q, q, invariant=True))
    assert "numeric class" not in str(explain(q, q, q))


@pytest.mark.parametrize("given", [None, 0, 1, "yes"])
def test_it_is_true_or_false(serve: Seeded, given: Any) -> None:
    serve(0)
    q = torch.zeros(1, 1, 1, 16)
    for call in (attention, decode):
        with pytest.raises(InvalidArgument, match="invariant must be True or False"):
            call(q, q, q, invariant=given)


@pytest.mark.parametrize("gpu", ["amd_instinct_mi300x", "amd_radeon_rx_9070_xt"])
def test_gpus_of_amd_are_refused_by_name(
    serve: Seeded, monkeypatch: pytest.MonkeyPatch, gpu: str
) -> None:
    serve(0)
    monkeypatch.setenv("FLASHGEN_GPU", gpu)
    q = torch.zeros(1, 1, 8, 64).half()
    for call in (attention, decode, explain, explain_decode):
        with pytest.raises(InvalidArgument, match=f"invariant needs a GPU of NVIDIA.*{gpu}"):
            call(q, q, q, invariant=True)


MUTANTS: dict[str, tuple[str, str]] = {
    # What is replaced in the text of a template, and by what.
    "parts merge from the last on": ("+ number\n", "+ (count - 1 - number)\n"),
    "a row is summed in two halves": (
        "tl.sum(p, 1)",
        "tl.sum(tl.sum(p.reshape([p.shape[0], 2, p.shape[1] // 2]), 2), 1)",
    ),
    "a prefill closes segments in their middle": (
        "key_begin // SEGMENT * SEGMENT if",
        "key_begin // SEGMENT * SEGMENT - SEGMENT // 2 if",
    ),
    "a segment joins without the maximum of those before it": (
        "= tl.exp2(total_max - new_max)",
        "= tl.exp2(total_max * 0.999999 - new_max)",
    ),
    "dK and dV begin with another tile of rows": ("shift = (diagonal % BR + BR) % BR", "shift = 3"),
}
"""Each changes kernels of one direction alone: a rule of the class that these break."""
ONLY = {
    "parts": "combine",
    "a row": "decode",
    "a prefill": "forward",
    "a segment": "forward",
    "dK": "backward_dkv",
}


SLOW = pytest.mark.slow("one mutant of a text and those of rules are in make test")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name.startswith("dK") else SLOW) for name in MUTANTS],
)
def test_mutants_of_a_text_are_found(
    serve: Seeded, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    old, new = MUTANTS[name]
    direction = next(each for start, each in ONLY.items() if name.startswith(start))
    made, changed = render.render_text, []

    def mutated(template: str, /, **values: Any) -> str:
        text = made(template, **values)
        if getattr(values.get("text"), "direction", None) == direction and old in text:
            changed.append(template)
            text = text.replace(old, new)
        return text

    monkeypatch.setattr(render, "render_text", mutated)
    render._rendered.cache_clear()
    try:
        assert first_found(serve, direction) is not None
        assert changed
    finally:
        render._rendered.cache_clear()


def first_found(serve: Seeded, direction: str) -> int | None:
    """The first seed whose case finds a difference, of ways that have the direction. Kernels are
    rendered: of those that ship none is taken.
    """
    wanted = {
        "combine": of_four_parts, "decode": invariance.by_decode,
        "forward": invariance.by_decode, "backward_dkv": later_queries,
    }[direction]  # fmt: skip
    for seed in range(40):
        serve(seed, package="without_kernels")
        if differing(wanted(invariance.case_of(seed))):
            return seed
    return None


def of_four_parts(case: invariance.Case) -> invariance.Pairs:
    """The last row of 250 keys in float32."""
    case.dtype = torch.float32
    return last_as_decode(case, 250)


def last_as_decode(case: invariance.Case, n: int) -> invariance.Pairs:
    """The last row of n keys in a prefill, and as decode."""
    own = case.rows(n)
    o, lse = invariance.alone(case, own)
    step = invariance.batched(own[0][-1:], own[1], own[2])
    again, lse_again = decode(*step, invariant=True, return_lse=True, **case.features)
    return [(o[-1:], again[0].transpose(0, 1)), (lse[-1:], lse_again[0].T)]


def later_queries(case: invariance.Case) -> invariance.Pairs:
    """DK and dV of the keys that only later queries see: of all queries, and of those alone."""
    own = case.rows(150)
    first = 100
    do = torch.randn(150, case.heads, case.dims[1], generator=case.generator).to(case.dtype)
    found = []
    for begin in (0, first):
        leaves = [x.clone().requires_grad_() for x in (own[0][begin:], own[1], own[2])]
        o, _ = invariance.alone(case, tuple(leaves))  # type: ignore[arg-type]
        _, dk, dv = torch.autograd.grad(o, leaves, do[begin:])
        found.append((dk[first:], dv[first:]))
    return list(zip(*found, strict=True))


def test_gradients_of_keys_that_only_later_queries_see(serve: Seeded) -> None:
    for seed in (0, 1, 6):
        serve(seed)
        assert differing(later_queries(invariance.case_of(seed))) == 0


def test_mutants_of_a_rule_are_found(serve: Seeded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of other width, and splits that depend on the batch."""
    chosen = free_choices(3)

    def narrower(spec: AttentionSpec) -> tuple[KernelConfig, ...]:
        first, *_ = chosen(spec)
        return (replace(first, bc=32) if spec.direction == "decode" else first,)

    serve(3)
    monkeypatch.setattr(selection, "default_configs", narrower)
    monkeypatch.setattr(selection, "why_illegal", lambda *_: None)
    assert any(differing(invariance.by_decode(invariance.case_of(s))) for s in range(3, 23))

    serve(3)
    monkeypatch.setattr(selection, "default_configs", chosen)
    numbers = constants.numbers

    def by_batch(spec: AttentionSpec, config: KernelConfig) -> dict[str, int]:
        return numbers(spec, config) | ({"SEGMENT": 64} if spec.direction == "decode" else {})

    monkeypatch.setattr(numeric_class, "SEGMENT", 128)
    monkeypatch.setattr(constants, "numbers", by_batch)
    monkeypatch.setattr(launch_cache, "segments", lambda capacity, _: -(-capacity // 64))
    assert any(differing(invariance.by_decode(invariance.case_of(s))) for s in range(3, 23))
