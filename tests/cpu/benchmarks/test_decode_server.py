"""The scheduling of examples/decode_server, with torch for attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.decode_servers import expected, load, requests_of


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load(monkeypatch, "engine")


def made(engine: Any, monkeypatch: pytest.MonkeyPatch, pages: int, **options: int) -> Any:
    tiny, pool = load(monkeypatch, "tiny_model"), load(monkeypatch, "page_pool")
    sizes = tiny.Sizes(positions=64)
    return engine.Engine(
        tiny.TinyModel(sizes).eval(),
        pool.PagePool(
            sizes, pages=pages, page_size=4, dtype=torch.float32, device=torch.device("cpu")
        ),
        **options,
    )


def test_answers_are_those_of_the_run_alone(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where pages run out, so that sequences begin anew."""
    served = made(engine, monkeypatch, pages=17, sequences=4, tokens_per_step=9)
    requests = requests_of(engine, [1, 13, 30, 2, 21, 8, 40], new_tokens=12)
    served.submit(requests)
    steps = []
    while len(served.results) < len(requests):
        steps.append(served.step())
        assert steps[-1].decoded + steps[-1].prefilled <= 9
    assert served.results == {each.name: expected(served.model, each) for each in requests}
    assert any(step.decoded and step.prefilled for step in steps)
    assert any(step.preempted for step in steps)
    assert served.pool.free == 17


def test_requests_may_come_at_any_time(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = made(engine, monkeypatch, pages=32)
    first, second = requests_of(engine, [5, 6], new_tokens=4)
    served.submit([first])
    served.step()
    served.submit([second])
    assert served.run() == {each.name: expected(served.model, each) for each in (first, second)}
    assert served.step().decoded == 0  # nothing is left to do


def test_a_page_has_one_holder(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = made(engine, monkeypatch, pages=20, sequences=4)
    served.submit(requests_of(engine, [9, 17, 3, 30], new_tokens=10))
    while len(served.results) < 4:
        served.step()
        held = [page for sequence in served._running for page in sequence.pages]
        assert len(set(held)) == len(held) == 20 - served.pool.free


@pytest.mark.parametrize(("prompt", "new_tokens"), [(0, 1), (1, 0), (40, 9)])
def test_what_can_never_be_served_is_refused(
    engine: Any, monkeypatch: pytest.MonkeyPatch, prompt: int, new_tokens: int
) -> None:
    served = made(engine, monkeypatch, pages=12)  # 48 tokens
    with pytest.raises(ValueError, match=r"'r0' must .* of 48 tokens in all at most"):
        served.submit(requests_of(engine, [prompt], new_tokens))
