"""A dozen model types of the sweep over all; the list in docs/integrations.md is what the sweep prints,
and tests/cpu/project/test_docs_output.py compares it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgen.runtime import transformers as backend
from flashgen.runtime.adapters import transformers_models
from tests import transformers_sweep as sweep
from tests.makers import each
from tests.transformers_sweep import Result

pytest.importorskip("transformers")

EXPECTED = {
    "llama": sweep.EQUAL,
    "bert": sweep.EQUAL,
    "t5": sweep.EQUAL,  # a position bias
    "gemma4_text": sweep.EQUAL,  # layers that share keys
    "paligemma": sweep.EQUAL,  # is_causal=False, and a causal mask
    "bigbird_pegasus": sweep.EQUAL,  # declares no implementation
    "splinter": sweep.EQUAL,  # nor does it, and sees all keys
    "pegasus_x": sweep.EQUAL,  # declares flash attention, and is_causal=False
    "mamba": sweep.UNREACHED,
    "falcon": "refused: takes its attention from a table of its own",
    "trocr": "refused: computes its own attention, and would add up a boolean mask",
    "blip": "refused: computes its own attention, and would add up a boolean mask",
    "deepseek_v32": "refused: passes indices",
    "inkling2_text": "refused: passes sinks",
    "aimv2_text_model": sweep.EQUAL,  # is_causal=False, and a causal mask that ones leave out
    "llama4_text": sweep.EQUAL,  # chunks of packed sequences
    "doge": sweep.EQUAL,  # a dynamic mask, with which packed sequences are refused
}


@pytest.fixture(autouse=True)
def _silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from transformers import logging

    before = logging.get_verbosity()
    sweep.prepare()
    yield
    logging.set_verbosity(before)


def outcome(model_type: str, name: str) -> str:
    """Of one of our names, as the list has it."""
    result = next(x for x in sweep.compare(model_type, (name,)))
    (title,) = sweep.titles([result])
    return title


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", each(EXPECTED, 2, "make test has every other model"))
def test_a_model_is_equal_to_eager_or_refused(model_type: str) -> None:
    name = backend.NAMES[list(EXPECTED).index(model_type) % 2]
    assert outcome(model_type, name) == EXPECTED[model_type]


@pytest.mark.filterwarnings("ignore")
def test_docs_show_the_ways_in_which_models_are_called() -> None:
    model = sweep.tiny_models.make_model(sweep.tiny_models.make_config("llama"), "eager")
    assert {name for name, _ in sweep._ways(model, 0)} == set(sweep.WAYS)
    page = Path(__file__).parents[3] / "docs" / "integrations.md"
    assert f"{sweep.ways()}\n" in page.read_text(), (
        "run python -m tests.docs_output integrations.md"
    )


def _without_mask(attend: Any) -> Any:
    return lambda *given, **options: attend(*given[:4], None, **options)


def _without_bias(attend: Any) -> Any:
    return lambda *given, position_bias=None, **options: attend(*given, **options)


def _without_gradient(attend: Any) -> Any:
    def wrong(*given: Any, position_bias: Any = None, **options: Any) -> Any:
        detached = None if position_bias is None else position_bias.detach()
        return attend(*given, position_bias=detached, **options)

    return wrong


def _scaled(attend: Any) -> Any:
    return lambda *given, scaling=1.0, **options: attend(*given, scaling=scaling * 1.001, **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "broken", [_without_mask, _without_bias, _without_gradient, _scaled], ids=lambda x: x.__name__
)
def test_an_attention_that_is_wrong_differs(monkeypatch: pytest.MonkeyPatch, broken: Any) -> None:
    monkeypatch.setattr(backend, "attention_forward", broken(backend.attention_forward))
    assert outcome("t5", "FlashGen") == sweep.DIFFERS


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_takes_output_attentions_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_models, "refuse_weights", lambda model: None)
    assert outcome("gpt2", "FlashGen") == sweep.DIFFERS


def test_what_is_allowed_is_in_relation_to_a_tensors_largest_element() -> None:
    def run(x: float) -> dict[str, sweep.Run]:
        return {"plain": sweep.Run(outputs={"x": torch.tensor([100.0, x])}, grads={})}

    assert not sweep.differences(run(0.009), run(0.0))
    assert "x by 0.011, of which 0.01 is allowed" in sweep.differences(run(0.011), run(0.0))
    assert "other infinities" in sweep.differences(run(torch.nan), run(0.0))


def test_the_list_says_which_name_is_meant_where_they_differ() -> None:
    results = [
        Result(model_type=model_type, attention=name, outcome=outcome, detail=detail)
        for model_type, name, outcome, detail in (
            ("a", "flashgen", sweep.REFUSED, "indices must not be given: ..."),
            ("a", "FlashGen", sweep.EQUAL, ""),
            ("b", "flashgen", sweep.EQUAL, ""),
            ("b", "FlashGen", sweep.EQUAL, ""),
            ("c", "flashgen", sweep.NOT_BUILT, ""),
            ("c", "FlashGen", sweep.NOT_BUILT, ""),
        )
    ]
    text = sweep.table(results)
    assert "3 model types, of which 2 were built tiny" in text
    assert 'equal (2)\n    a (as "FlashGen"), b' in text
    assert 'refused: passes indices (1)\n    a (as "flashgen")' in text
