"""CPU tensors: torch serves, exactly, with flashgen's contract; bad arguments are named."""

from __future__ import annotations

import importlib.util
import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashgen import paths
from flashgen.errors import InvalidArgument
from flashgen.inputs.features import Features
from flashgen.runtime import Dispatcher, explanation, torch_modes
from flashgen.runtime.block_mask import from_boolean
from flashgen.runtime.eager import attention as eager
from flashgen.spec.problem import BUCKETS
from tests.makers import make_config, make_spec
from tests.package import make_choice, make_dispatcher


@pytest.fixture(scope="module")
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Dispatcher:
    folder: Path = tmp_path_factory.mktemp("package")
    return make_dispatcher(folder, "nvidia_h200", "sm_90")


def draw(sq: int, sk: int, heads: int = 4, kv: int = 2) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(sq * 100 + sk)
    return torch.randn(2, heads, sq, 32), torch.randn(2, kv, sk, 32), torch.randn(2, kv, sk, 48)


@pytest.mark.parametrize("causal", [False, True, "top_left", "bottom_right"])
@pytest.mark.parametrize(("sq", "sk"), [(8, 8), (5, 9), (9, 5), (3, 0), (0, 3)])
@pytest.mark.parametrize("return_lse", [False, True])
def test_cpu_attention(
    dispatcher: Dispatcher, causal: object, sq: int, sk: int, return_lse: bool
) -> None:
    q, k, v = draw(sq, sk)
    result = dispatcher.attention(q, k, v, causal=causal, scale=0.3, return_lse=return_lse)  # type: ignore[call-overload]
    diagonal = None if causal is False else 0 if causal == "top_left" else sk - sq
    o, lse = eager.attention(q.double(), k.double(), v.double(), scale=0.3, diagonal=diagonal)
    torch.testing.assert_close(result[0] if return_lse else result, o.float(), rtol=1e-5, atol=1e-5)
    if return_lse:
        torch.testing.assert_close(result[1], lse.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"scale": float("nan")}, "scale"),
        ({"causal": "diagonal"}, "causal"),
        ({"scale": "x"}, "scale must be a finite number: got 'x'"),
        ({"scale": "0.5"}, "scale must be a finite number: got '0.5'"),
        ({"scale": [1]}, r"scale must be a finite number: got \[1\]"),
        ({"scale": 1j}, "scale must be a finite number: got 1j"),
        ({"scale": 10**400}, "scale must be a finite number: got 1000"),
        ({"scale": torch.ones(3)}, "scale must be a finite number: got tensor"),
        ({"scale": torch.ones(1, requires_grad=True)}, "scale has no gradient: detach it"),
        ({"causal": np.array([1, 2])}, "causal must be True, False, 'top_left'"),
        ({"precision": "bf16x3"}, "precision"),
        ({"precision": ["ieee"]}, r"precision must be ieee or tf32: got \['ieee'\]"),
    ],
)
def test_a_bad_option_is_named(
    dispatcher: Dispatcher, options: dict[str, object], named: str
) -> None:
    for feature in ({}, {"softcap": 2.0}):
        with pytest.raises(InvalidArgument, match=named):
            dispatcher.attention(*draw(4, 4), **options, **feature)  # type: ignore[call-overload]
        with pytest.raises(InvalidArgument, match=named):
            dispatcher.explain(*draw(4, 4), **options, **feature)  # type: ignore[arg-type]


def test_a_scale_may_be_a_parameter_where_no_gradient_is_asked_for(dispatcher: Dispatcher) -> None:
    with torch.no_grad():
        found = dispatcher.attention(*draw(4, 4), scale=torch.nn.Parameter(torch.tensor(0.5)))  # type: ignore[call-overload]
    torch.testing.assert_close(found, dispatcher.attention(*draw(4, 4), scale=0.5))


@pytest.mark.parametrize("feature", [{}, {"softcap": 2.0}], ids=["plain", "softcap"])
def test_sizes_that_no_kernel_has_are_named(
    dispatcher: Dispatcher, feature: dict[str, float]
) -> None:
    q, k, v = draw(4, 4)
    for bad in (q[0, 0, 0, 0], q[0]):
        with pytest.raises(InvalidArgument, match=r"q must have shape"):
            dispatcher.attention(bad, k, v, **feature)
    with pytest.raises(InvalidArgument, match=r"the head_dim of q must be a multiple of 8"):
        dispatcher.attention(q[..., :0], k[..., :0], v, **feature)
    with pytest.raises(
        InvalidArgument, match=r"q must have a multiple of the heads .*: got 0 and 2"
    ):
        dispatcher.attention(q[:, :0], k, v, **feature)


def test_a_device_that_autocast_does_not_know_is_named(dispatcher: Dispatcher) -> None:
    q, k, v = (x.to("meta") for x in draw(4, 4))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InvalidArgument, match="device meta"):
        dispatcher.attention(q, k, v)


def test_a_window_may_be_wider_than_64_bits(dispatcher: Dispatcher) -> None:
    q, k, v = draw(5, 9)
    found = dispatcher.attention(q, k, v, window=(2**70, 1))
    torch.testing.assert_close(found, dispatcher.attention(q, k, v, window=(None, 1)))
    torch.testing.assert_close(
        dispatcher.attention(q, k, v, window=(2**70, 2**70)), dispatcher.attention(q, k, v)
    )


def leaves(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.detach().clone().requires_grad_() for x in tensors)


@pytest.mark.parametrize("return_lse", [False, True])
def test_cpu_tensors_are_differentiable(dispatcher: Dispatcher, return_lse: bool) -> None:
    q, k, v = leaves(*draw(5, 9))
    found = dispatcher.attention(q, k, v, causal=True, return_lse=return_lse)  # type: ignore[call-overload]
    exact = leaves(*(x.double() for x in (q, k, v)))
    o, lse = eager.attention(*exact, scale=32**-0.5, diagonal=4)
    o, found_o = (o, found[0]) if return_lse else (o, found)
    loss = o.square().sum() + (lse.sum() if return_lse else 0)
    found_loss = found_o.square().sum() + (found[1].sum() if return_lse else 0)
    grads = torch.autograd.grad(found_loss, (q, k, v))
    for got, want in zip(grads, torch.autograd.grad(loss, exact), strict=True):
        torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("return_lse", [False, True])
def test_vmap_is_refused_on_a_cpu(dispatcher: Dispatcher, return_lse: bool) -> None:
    """As the kernels refuse it, with gradients and without; other transforms, and tensors that are not mapped, are not."""
    q, k, v = (torch.randn(1, 2, 4, 16) for _ in range(3))

    def total(x: torch.Tensor) -> torch.Tensor:
        found = dispatcher.attention(x, k, v, return_lse=return_lse)
        return (found[0] if isinstance(found, tuple) else found).sum()

    for mapped in (total, torch.func.grad(total)):
        with pytest.raises(InvalidArgument, match=r"torch\.vmap: fold the mapped dimension"):
            torch.vmap(mapped)(q[None])
    assert torch.func.grad(total)(q).shape == q.shape
    assert torch.vmap(lambda x: x + total(q))(v[None]).shape == (1, *v.shape)


def test_rows_that_see_nothing_have_finite_gradients(dispatcher: Dispatcher) -> None:
    q, k, v = leaves(*draw(9, 5))
    o, lse = dispatcher.attention(q, k, v, causal=True, return_lse=True)
    (o.sum() + lse[:, :, 4:].sum()).backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.isfinite().all()
    assert (q.grad[:, :, :4] == 0).all()  # type: ignore[index]


def test_features_on_a_cpu(dispatcher: Dispatcher) -> None:
    q, k, v = draw(5, 9)
    bias, slopes = torch.randn(5, 9), torch.rand(4)
    found = dispatcher.attention(q, k, v, bias=bias, alibi_slopes=slopes)
    features = Features(bias=bias[None, None].double(), slopes=slopes)
    o, _ = eager.attention(
        q.double(), k.double(), v.double(), scale=32**-0.5, diagonal=None, features=features
    )
    torch.testing.assert_close(found, o.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("window", [None, (2, 3), (0, None), (-1, 1), (100, 100)])
def test_windows_caps_and_sinks_on_a_cpu(dispatcher: Dispatcher, causal: Any, window: Any) -> None:
    """Beside scores written out here: what a window is, is said twice."""
    q, k, v, sinks = leaves(*draw(6, 9), torch.randn(4))
    found, lse = dispatcher.attention(
        q, k, v, causal=causal, window=window, softcap=2.0, sinks=sinks, return_lse=True
    )
    x = [t.detach().double().requires_grad_() for t in (q, k, v, sinks)]
    s = 32**-0.5 * x[0] @ x[1].repeat_interleave(2, 1).transpose(2, 3)
    s = 2.0 * torch.tanh(s / 2.0)
    left, right = (1000 if side in (None, -1) else side for side in window or (None, None))
    diagonal = 0 if causal == "top_left" else 3
    for i in range(6):
        for j in range(9):
            distance = j - (i + diagonal)
            if distance < -left or distance > (0 if causal else right):
                s[:, :, i, j] = float("-inf")
    s = torch.cat([s, x[3][:, None, None].expand(*s.shape[:3], 1)], -1)
    o = s.softmax(-1)[..., :-1] @ x[2].repeat_interleave(2, 1)
    torch.testing.assert_close(found, o.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, s.logsumexp(-1).float(), rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(found.square().sum() + lse.sum(), (q, k, v, sinks))
    wanted = torch.autograd.grad(o.square().sum() + s.logsumexp(-1).sum(), x)
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want.float(), rtol=1e-4, atol=1e-5)


def test_a_row_that_sees_nothing_has_its_sink(dispatcher: Dispatcher) -> None:
    q, k, v = draw(9, 5)
    sinks = torch.randn(4)
    o, lse = dispatcher.attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    assert (o[:, :, :4] == 0).all()
    torch.testing.assert_close(lse[:, :, :4], sinks[:, None].expand(2, 4, 4))
    o, lse = dispatcher.attention(q, k, v, window=(0, 0), return_lse=True)
    assert (o[:, :, :4] == 0).all()
    assert (lse[:, :, :4] == float("-inf")).all()
    empty = dispatcher.attention(q, k[:, :, :0], v[:, :, :0], sinks=sinks, return_lse=True)
    torch.testing.assert_close(empty[1], sinks[:, None].expand(2, 4, 9))


def test_dropout_follows_torchs_generator_on_a_cpu(dispatcher: Dispatcher) -> None:
    q, k, v = draw(5, 9)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(dispatcher.attention(q, k, v, dropout_p=0.5))
        outputs.append(dispatcher.attention(q, k, v, dropout_p=0.5))
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[4])


class Marked(torch.Tensor):
    """A subclass, as a user may make one."""


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"bias": torch.zeros(5, 8)}, "bias"),
        ({"bias": torch.zeros(5, 9, dtype=torch.int32)}, "bias"),
        ({"bias": [1]}, "bias must be a tensor: got list"),
        ({"bias": torch.zeros(5, 9).as_subclass(Marked)}, "bias must be a plain tensor.* Marked"),
        ({"alibi_slopes": torch.zeros(3)}, "^alibi_slopes must be float32"),
        ({"alibi_slopes": torch.zeros(4, device="meta")}, "^alibi_slopes must be on the device"),
        ({"alibi_slopes": [1.0]}, "alibi_slopes must be a tensor: got list"),
        ({"alibi_slopes": torch.zeros(4, requires_grad=True)}, "alibi_slopes"),
        ({"window": 3}, r"window must be \(left, right\)"),
        ({"window": (-3, 0)}, r"window must be .* got \(-3, 0\)"),
        ({"softcap": -2.0}, "softcap must be finite and 0 or more, 0 for none: got -2.0"),
        ({"softcap": "a"}, "softcap must be"),
        ({"sinks": torch.zeros(3)}, r"sinks must be of shape \(4,\)"),
        ({"sinks": [0.0] * 4}, "sinks must be a tensor: got list"),
        ({"sinks": torch.zeros(4, dtype=torch.bfloat16)}, "sinks must be .*bfloat16"),
        ({"sinks": torch.zeros(4, device="meta")}, "^sinks must be on the device"),
        ({"dropout_p": 1.5}, "dropout_p must be from 0 to 1: got 1.5"),
        ({"dropout_p": "a"}, "dropout_p must be a number from 0 to 1: got 'a'"),
        ({"dropout_p": None}, "dropout_p must be a number from 0 to 1: got None"),
    ],
)
def test_a_bad_feature_is_named(
    dispatcher: Dispatcher, options: dict[str, object], named: str
) -> None:
    with pytest.raises(InvalidArgument, match=named):
        dispatcher.attention(*draw(5, 9), **options)  # type: ignore[call-overload]


def nested(x: torch.Tensor, layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor(list(x), layout=layout)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize(
    ("odd", "named"),
    [
        (torch.Tensor.to_sparse, "must be dense: got torch.sparse_coo"),
        (lambda x: nested(x, torch.strided), "must not be nested"),
        (lambda x: nested(x, torch.jagged), "must not be nested"),
        (torch.Tensor.tolist, "must be a tensor: got list"),
        (lambda x: None, "must be a tensor: got NoneType"),
    ],
    ids=["sparse", "nested", "jagged", "list", "none"],
)
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.5}], ids=["plain", "dropout"])
def test_what_is_no_tensor_is_named(
    dispatcher: Dispatcher,
    name: str,
    odd: Callable[[torch.Tensor], object],
    named: str,
    options: dict[str, float],
) -> None:
    tensors = dict(zip("qkv", draw(5, 9), strict=True))
    dispatcher.attention(*tensors.values())
    given = {**tensors, name: odd(tensors[name])}
    for function in (dispatcher.attention, dispatcher.explain):
        with pytest.raises(InvalidArgument, match=f"^{name} {named}"):
            function(*given.values(), **options)  # type: ignore[operator]


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.5}], ids=["plain", "dropout"])
def test_a_subclass_beside_a_plain_q_is_named(
    dispatcher: Dispatcher, name: str, options: dict[str, float]
) -> None:
    tensors = dict(zip("qkv", draw(5, 9), strict=True))
    given = {**tensors, name: tensors[name].as_subclass(Marked)}
    with pytest.raises(InvalidArgument, match=f"^{name} must be a plain tensor.* got Marked"):
        dispatcher.attention(*given.values(), **options)  # type: ignore[call-overload]
    parameters = {x: torch.nn.Parameter(tensors[x]) if x == name else tensors[x] for x in "qkv"}
    dispatcher.attention(*parameters.values(), **options)  # type: ignore[call-overload]


def test_explain_says_that_torch_serves(dispatcher: Dispatcher) -> None:
    assert "torch" in str(dispatcher.explain(*draw(4, 4)))


def test_explain_takes_what_attention_takes(dispatcher: Dispatcher) -> None:
    """All its arguments, with their defaults; no random number is drawn."""
    taken, explained = (
        dict(inspect.signature(function).parameters)
        for function in (Dispatcher.attention, Dispatcher.explain)
    )
    assert explained.pop("direction").default == "forward"
    assert taken == explained
    qkv, slopes, state = draw(5, 9), torch.rand(4), torch.get_rng_state()
    said = dispatcher.explain(
        *qkv, causal=True, bias=torch.zeros(5, 9), alibi_slopes=slopes, dropout_p=0.5,
        window=(2, 0), softcap=2.0, sinks=torch.zeros(4), scale=0.5, return_lse=True,
    )  # fmt: skip
    assert torch.equal(torch.get_rng_state(), state)
    spec = said.spec
    assert (spec.mask, spec.bias, spec.alibi, spec.dropout) == ("causal", "additive", True, True)
    assert (spec.window, spec.softcap, spec.sink) == (True, True, True)
    blocks = from_boolean(torch.ones(5, 9, dtype=torch.bool))
    assert dispatcher.explain(*draw(5, 9), block_mask=blocks).spec.block_mask


GONE = {
    "transforms": [(torch._C, "_are_functorch_transforms_active")],
    "dispatch modes": [(torch._C, "_len_torch_dispatch_stack")],
    "tangents": [(torch.autograd.forward_ad, "_current_level")],
    "autocast": [(torch._C, "_is_any_autocast_enabled")],
    "batched gradients": [(torch._C, "_functorch")],
}


@pytest.mark.parametrize("names", [*GONE, "all"])
def test_a_torch_without_a_name_is_asked_otherwise(
    names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call then goes by the registered operators where it is not known what is around it."""
    q = torch.zeros(1, 1, 4, 16)
    assert not torch_modes.special(q)
    gone = [each for given in GONE.values() for each in given] if names == "all" else GONE[names]
    found = importlib.util.find_spec("flashgen.runtime.torch_modes")
    assert found is not None
    assert found.loader is not None
    without = importlib.util.module_from_spec(found)
    unsure = names not in ("autocast", "batched gradients")
    with monkeypatch.context() as patch:
        for module, name in gone:
            patch.delattr(module, name)
        found.loader.exec_module(without)
        assert without.special(q) == without.traced(q) == unsure
        assert not without.autocasts()
    without.check_gradients(q)
    with torch.autocast("cpu", torch.bfloat16):
        assert without.autocasts()
        assert without.special(q)


def test_digest_tells_tables_apart(dispatcher: Dispatcher, tmp_path: Path) -> None:
    choice = make_choice(make_spec(head_dim=128), make_config(64, 64), BUCKETS[1])
    other = make_dispatcher(tmp_path, "nvidia_h200", "sm_90", [choice])
    assert dispatcher.digest() != other.digest()
    assert dispatcher.digest() == dispatcher.digest()


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ("template", ""), ("gpu", ""), ("version", ""), ("rule", "runtime/selection.py"),
        ("rule", "schedules/defaults.py"), ("rule", "kernels/parameters.py"),
        ("rule", "spec/attention.py"),
    ],
)  # fmt: skip
def test_digest_tells_templates_and_rules_apart(
    dispatcher: Dispatcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, rule: str
) -> None:
    monkeypatch.delenv("FLASHGEN_GPU", raising=False)
    before = dispatcher.digest()
    if changed == "template":
        folder = tmp_path / "templates"
        shutil.copytree(paths.templates_dir(), folder)
        monkeypatch.setattr(paths, "templates_dir", lambda: folder)
        assert dispatcher.digest() == before
        file = folder / "attention_fwd.py.jinja"
        file.write_text(file.read_text() + "{# another #}\n")
    elif changed == "rule":
        package = tmp_path / "flashgen"
        shutil.copytree(paths.PACKAGE, package)
        named = [path.relative_to(paths.PACKAGE) for path in explanation._rules()]
        monkeypatch.setattr(explanation, "_rules", lambda: [package / name for name in named])
        assert dispatcher.digest() == before
        (package / rule).write_text("# another\n")
    elif changed == "gpu":
        monkeypatch.setenv("FLASHGEN_GPU", "nvidia_l4")
    else:
        monkeypatch.setattr(explanation, "VERSION", "99")
    assert dispatcher.digest() != before


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_scale_not_above_zero_under_a_mask(dispatcher: Dispatcher, scale: float) -> None:
    q, k, v = draw(6, 6)
    o, _ = eager.attention(q.double(), k.double(), v.double(), scale=scale, diagonal=0)
    torch.testing.assert_close(dispatcher.attention(q, k, v, causal=True, scale=scale), o.float())
