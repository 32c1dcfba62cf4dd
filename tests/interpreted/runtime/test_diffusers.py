"""The backend of diffusers, by kernels, beside diffusers' own backend "native"."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models import attention_dispatch
from torch import Tensor

from flashgen.errors import InvalidArgument, ToolchainError
from flashgen.runtime import diffusers as backend
from tests.serving import leaves, record_directions, serve

pytestmark = pytest.mark.filterwarnings("ignore")
BATCH, QUERIES, KEYS, HEADS = 2, 5, 20, 4
NATIVE = attention_dispatch.AttentionBackendName.NATIVE


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directions launched by the dispatcher that serves the backend."""
    directions = record_directions(monkeypatch)
    serve(monkeypatch)
    return directions


def draw(kv_heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    kv = BATCH, KEYS, kv_heads, 32
    return torch.randn(BATCH, QUERIES, HEADS, 32), torch.randn(kv), torch.randn(kv)


def mask(*shape: int) -> Tensor:
    """Boolean, with a key for each query."""
    torch.manual_seed(1)
    visible = torch.rand(shape) > 0.4
    visible[..., 3] = True
    return visible


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal, scale": {"is_causal": True, "scale": 0.3},
    "padding": {"attn_mask": mask(BATCH, KEYS)},
    "padding that is added": {"attn_mask": torch.where(mask(BATCH, KEYS), 0.0, -torch.inf)},
    "one for all": {"attn_mask": mask(QUERIES, KEYS)},
    "three dimensions": {"attn_mask": mask(1, QUERIES, KEYS)},
    "four dimensions": {"attn_mask": mask(BATCH, 1, QUERIES, KEYS)},
    "biases of heads": {"attn_mask": torch.linspace(-2, 2, HEADS * KEYS).reshape(1, HEADS, 1, KEYS)},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_as_of_native(launched: list[str], name: str) -> None:
    """Outputs and gradients."""
    found = []
    for each in (NATIVE, backend.register()):
        tensors = leaves(*draw())
        o = attention_dispatch.dispatch_attention_fn(*tensors, **CALLS[name], backend=each)
        found.append((o, *torch.autograd.grad(o.square().sum(), tensors)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    assert launched[0] == "forward"
    assert len(launched) > 1


def test_heads_that_share_keys(launched: list[str]) -> None:
    own, theirs = (
        attention_dispatch.dispatch_attention_fn(*draw(2), enable_gqa=True, backend=each)
        for each in (backend.register(), NATIVE)
    )
    torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-5)
    assert launched == ["forward"]


def model() -> Any:
    torch.manual_seed(0)
    return diffusers.QwenImageTransformer2DModel(
        in_channels=8, out_channels=4, num_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def trained(transformer: Any) -> tuple[Tensor, ...]:
    """The output and gradients of a model that masks the padding of its texts."""
    torch.manual_seed(2)
    (o,) = transformer(
        hidden_states=torch.randn(2, 16, 8), encoder_hidden_states=torch.randn(2, 6, 16),
        encoder_hidden_states_mask=torch.arange(6) < torch.tensor([[6], [3]]),
        timestep=torch.tensor([0.5, 0.5]), img_shapes=[[(1, 4, 4)]] * 2, return_dict=False,
    )  # fmt: skip
    return o, *torch.autograd.grad(o.square().sum(), list(transformer.parameters()), allow_unused=True)  # fmt: skip


def test_a_model_with_masks_trains_as_with_native(launched: list[str]) -> None:
    transformer = model()
    wanted = trained(transformer)
    assert launched == []
    with diffusers.attention_backend(backend.register()):
        found = trained(transformer)
    assert launched[0] == "forward"
    assert len(launched) > 1
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    trained(transformer)
    assert "forward" not in launched[1:]  # the backend is native again


def test_diffusers_own_names_stay_as_they_are() -> None:
    """The enum is closed: were it not, set_attention_backend("flashgen") would be the way."""
    members = list(attention_dispatch.AttentionBackendName)
    name = backend.register()
    assert backend.register() is name
    assert list(attention_dispatch.AttentionBackendName) == members
    with pytest.raises(ValueError, match="must be one of the following"):
        model().set_attention_backend("flashgen")


def test_a_backend_survives_copies_and_pickles() -> None:
    name = backend.register()
    assert copy.deepcopy([name]) == [name]
    assert pickle.loads(pickle.dumps(name)) is name


def test_the_model_is_one_graph() -> None:
    q, k, v = draw()
    run = torch.compile(
        attention_dispatch.dispatch_attention_fn, fullgraph=True, backend="aot_eager"
    )
    with diffusers.attention_backend(backend.register()):
        found = run(q, k, v, attn_mask=mask(BATCH, KEYS))
    wanted = attention_dispatch.dispatch_attention_fn(
        q, k, v, attn_mask=mask(BATCH, KEYS), backend=NATIVE
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"attention_kwargs": {"return_lse": True}}, "return_lse must be False"),
        ({"parallel_config": object()}, "enable_parallelism must not"),
        ({"attn_mask": mask(BATCH, QUERIES, KEYS)}, "attn_mask must have 2 or 4 dimensions"),
        ({"attn_mask": mask(BATCH, 1, 1, KEYS), "is_causal": True}, "attn_mask must be None where"),
        ({"attn_mask": mask(BATCH, KEYS).int()}, "attn_mask must be bool or floating"),
    ],
)
def test_what_it_lacks_is_refused(launched: list[str], options: Any, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        attention_dispatch.dispatch_attention_fn(*draw(), **options, backend=backend.register())
    assert launched == []


def test_an_old_diffusers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(attention_dispatch, "_AttentionBackendRegistry")
    with pytest.raises(ToolchainError, match="diffusers with attention backends is needed"):
        backend.register()
