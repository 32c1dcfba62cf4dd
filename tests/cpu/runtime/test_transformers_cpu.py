"""The backend of transformers on CPU tensors, where torch and the reference serve: the kernels are in
tests/interpreted.
"""

from __future__ import annotations

import pytest
import torch

from flashgen.errors import InvalidArgument
from flashgen.runtime import transformers as backend
from tests.language_models import batch, generated, make_model, trained
from tests.serving import serve

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch)
    backend.register()


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_a_model_trains_as_with_eager(name: str, padding: str) -> None:
    logits, loss, grads = trained(make_model(name, backend.NAMES[1]), batch(padding))
    wanted_logits, wanted_loss, wanted = trained(make_model(name, "eager"), batch(padding))
    torch.testing.assert_close(logits, wanted_logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-5, atol=1e-6)
    assert grads.keys() == wanted.keys()
    assert name != "gpt_oss" or any("sinks" in parameter for parameter in grads)
    for parameter, grad in grads.items():
        torch.testing.assert_close(
            grad, wanted[parameter], rtol=1e-4, atol=1e-5, msg=lambda m, p=parameter: f"{p}: {m}"
        )


@pytest.mark.parametrize("name", backend.UNSUPPORTED)
def test_what_no_kernel_computes_is_refused_by_name(name: str) -> None:
    assert "head_mask" in backend.UNSUPPORTED
    x = torch.zeros(1, 2, 4, 16)
    with pytest.raises(InvalidArgument, match=f"{name} must not be given: this model"):
        backend.attention_forward(torch.nn.Module(), x, x, x, None, **{name: torch.ones(2)})
    backend.attention_forward(torch.nn.Module(), x, x, x, None, **{name: None})


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_32_tokens_are_eagers(name: str, cache: str) -> None:
    found = generated(name, backend.NAMES[1], cache)
    assert torch.equal(found, generated(name, "eager", cache))
