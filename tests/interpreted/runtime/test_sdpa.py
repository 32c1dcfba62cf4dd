"""The drop-in for scaled_dot_product_attention, by kernels, beside torch's own."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flashgen.errors import InvalidArgument
from flashgen.runtime import Dispatcher, sdpa
from flashgen.runtime.sdpa import scaled_dot_product_attention
from tests.serving import autocast_of_a_gpu, leaves, record_directions, serve

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directions launched by the dispatcher that serves the drop-in."""
    directions = record_directions(monkeypatch)
    assert isinstance(serve(monkeypatch), Dispatcher)
    return directions


@pytest.fixture
def reasons(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the drop-in says of the calls it leaves to torch, from here on."""
    monkeypatch.setattr(sdpa, "_said", set())
    said: list[str] = []

    def info(text: str, *words: object) -> None:
        if text.startswith("torch's own"):  # and not what is said of a kernel
            said.append(text % words)

    monkeypatch.setattr(sdpa.logger, "info", info)
    return said


class Marked(Tensor):
    """Of a subclass nobody knows what it adds."""


def draw(*leading: int, kv: int | None = None, sq: int = 20, sk: int = 33) -> tuple[Tensor, ...]:
    torch.manual_seed(sq)
    rest = (*leading[:-1], kv) if kv else leading
    return (
        torch.randn(*leading, sq, 32),
        torch.randn(*rest, sk, 32),
        torch.randn(*rest, sk, 24),
    )


def outcome(function: Any, tensors: tuple[Tensor, ...], **options: Any) -> tuple[Tensor, ...]:
    """O and the gradients of all tensors and of a floating mask."""
    x = leaves(*tensors)
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        options["attn_mask"] = mask = mask.detach().clone().requires_grad_()
        x = (*x, mask)
    o = function(*x[:3], **options)
    return (o.detach(), *torch.autograd.grad(o.square().sum(), x))


BOOLEAN = torch.rand(20, 33, generator=torch.Generator().manual_seed(1)) > 0.5
NAMES = ("query", "key", "value")
MASK_DIMS = "a mask of fewer than two dimensions"
FLOATING = torch.randn(2, 1, 20, 33, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("tensors", "options"),
    [
        (draw(2, 4), {}),
        (draw(2, 4), {"is_causal": True}),
        (draw(2, 4, sq=40), {"is_causal": True, "scale": 0.3}),
        (draw(2, 4, kv=2), {"enable_gqa": True}),
        (draw(2, 4), {"attn_mask": BOOLEAN}),
        (draw(2, 4), {"attn_mask": FLOATING}),
        (draw(2, 4), {"attn_mask": FLOATING[:1].expand(2, 4, 20, 33)}),
        (draw(3), {"attn_mask": BOOLEAN[None]}),
        (draw(), {"is_causal": True}),
    ],
)
def test_it_is_torchs_function(
    launched: list[str], tensors: tuple[Tensor, ...], options: dict[str, Any]
) -> None:
    found = outcome(scaled_dot_product_attention, tensors, **options)
    want = outcome(functional.scaled_dot_product_attention, tensors, **options)
    assert launched[0] == "forward"
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)


def test_rows_that_a_mask_empties_are_0_as_torchs_are(launched: list[str]) -> None:
    mask = BOOLEAN.clone()
    mask[3:9] = False
    found = outcome(scaled_dot_product_attention, draw(1, 2), attn_mask=mask)
    want = outcome(functional.scaled_dot_product_attention, draw(1, 2), attn_mask=mask)
    assert (found[0][:, :, 3:9] == 0).all()
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)


def test_the_arguments_are_torchs_in_name_and_order() -> None:
    torchs = functional.scaled_dot_product_attention.__doc__ or ""
    shown = torchs.split("(", 1)[1].split(")", 1)[0].replace("\n", " ")
    names = [word.split("=")[0].strip() for word in shown.split(",")]
    parameters = inspect.signature(scaled_dot_product_attention).parameters
    assert list(parameters) == [*names, "invariant"]
    assert parameters["invariant"].kind is inspect.Parameter.KEYWORD_ONLY


def test_dropout_drops(launched: list[str]) -> None:
    q, k, v = draw(1, 2)
    torch.manual_seed(0)
    first = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(first, scaled_dot_product_attention(q, k, v, None, 0.5))
    assert not torch.equal(first, scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize(
    ("tensors", "options", "named"),
    [
        (draw(2, 4), {"attn_mask": BOOLEAN, "is_causal": True}, "attn_mask"),
        (draw(2, 4), {"attn_mask": BOOLEAN.int()}, "attn_mask"),
        (draw(2, 4), {"attn_mask": BOOLEAN[:, :5]}, "attn_mask must be broadcastable"),
        (draw(2, 4), {"attn_mask": FLOATING[None]}, "attn_mask must be broadcastable"),
        (draw(3), {"attn_mask": BOOLEAN.expand(2, 20, 33)}, "attn_mask must be broadcastable"),
        (draw(3), {"attn_mask": torch.zeros(1, 3, 20, 33)}, "attn_mask must be broadcastable"),
        (draw(2, 4), {"attn_mask": BOOLEAN.to("meta")}, "attn_mask must be on the device"),
        (draw(2, 4), {"attn_mask": [[True]]}, "attn_mask must be a tensor: got list"),
        (draw(2, 4, kv=2), {}, "enable_gqa"),
        (draw(2, 4), {"dropout_p": -0.1}, "dropout_p"),
        ((draw(2, 4)[0], None, draw(2, 4)[2]), {}, "key must be a tensor: got NoneType"),
        (([1.0], *draw(2, 4)[1:]), {}, "query must be a tensor: got list"),
        (
            (draw(2, 4)[0], draw(2, 4)[1][..., :24], draw(2, 4)[2]), {},
            "key must have the head dim of query, 32: got 24",
        ),
        (
            (*draw(2, 4)[:2], draw(2, 4, sk=30)[2]), {},
            "value must have the length of key, 33: got 30",
        ),
        (
            (*draw(2, 4)[:2], draw(2, 3)[2]), {},
            r"value must have the batch and heads of query, \(2, 4\), .*: got \(2, 3\)",
        ),
        (
            draw(2, 4, kv=3), {"enable_gqa": True},
            "query must have a multiple of the heads of key and value: got 4 and 3",
        ),
        (
            tuple(x[:, :h] for x, h in zip(draw(2, 4), (4, 0, 0), strict=True)),
            {"enable_gqa": True}, "query must have a multiple of .*: got 4 and 0",
        ),
    ],
)  # fmt: skip
def test_contradictions_are_named(
    launched: list[str], tensors: tuple[Tensor, ...], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidArgument, match=named):
        scaled_dot_product_attention(*tensors, **options)
    assert launched == []


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (tuple(x.double() for x in draw(2, 4)), "dtype float64"),
        (tuple(x[..., :20] for x in draw(2, 4)), "head dim 20"),
        (draw(2, 1, 2), "tensors of other than two to four dimensions"),
        ((draw(2, 4)[0], *draw(1, 4, sq=20)[1:]), "batches or heads that broadcast"),
        (draw(2, 4, kv=1), "batches or heads that broadcast"),
        (draw(4, kv=1), "batches or heads that broadcast"),
        (tuple(x.to("meta") for x in draw(2, 4)), "tensors on device meta"),
        (
            (draw(2, 4)[0], draw(2, 4)[1].as_subclass(Marked), draw(2, 4)[2]),
            "a plain query beside Marked",
        ),
        ((draw(2, 1)[0], *draw(2, 4)[1:]), "batches or heads that broadcast"),
    ],
    ids=[
        "float64", "head dim 20", "five dimensions", "a batch that broadcasts",
        "keys of one head", "keys of one head in three dimensions", "another device",
        "a subclass of tensors", "queries of one head",
    ],
)  # fmt: skip
def test_what_no_kernel_takes_is_left_to_torch(
    launched: list[str],
    reasons: list[str],
    tensors: tuple[Tensor, ...],
    reason: str,
) -> None:
    want = functional.scaled_dot_product_attention(*tensors)
    found = scaled_dot_product_attention(*tensors)
    assert found.shape == want.shape
    assert want.is_meta or torch.equal(found, want)
    assert launched == []
    assert reasons == [f"torch's own scaled_dot_product_attention serves {reason}"]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"attn_mask": FLOATING.half()}, "a mask of dtype float16"),
        ({"attn_mask": FLOATING.double()}, "a mask of dtype float64"),
        ({"key": draw(2, 4)[1].half()}, "tensors of several dtypes"),
        ({"key": draw(2, 4)[1].to("meta")}, "tensors of several devices"),
        ({"attn_mask": torch.tensor(0.5)}, MASK_DIMS),
        ({"attn_mask": FLOATING[0, 0, 0]}, MASK_DIMS),
        (dict(zip(NAMES, draw(), strict=True)) | {"enable_gqa": True}, "enable_gqa without heads"),
        ({"is_causal": "x"}, "is_causal that is no bool"),
        ({"key": draw(2, 4)[1].to_sparse()}, "sparse tensors"),
        ({"attn_mask": torch.nested.nested_tensor(list(FLOATING))}, "nested tensors"),
    ],
    ids=[
        "mask of float16", "mask of float64", "dtypes", "devices", "a number for a mask",
        "mask of one dimension", "enable_gqa", "is_causal", "sparse",
        "nested mask",
    ],
)  # fmt: skip
def test_what_torch_refuses_is_refused_in_its_words(
    launched: list[str], reasons: list[str], changed: dict[str, Any], reason: str
) -> None:
    given = dict(zip(NAMES, draw(2, 4), strict=True)) | changed
    with pytest.raises((RuntimeError, IndexError, TypeError)) as torchs:
        functional.scaled_dot_product_attention(**given)
    with pytest.raises(type(torchs.value)) as ours:
        scaled_dot_product_attention(**given)
    assert str(ours.value).replace(" (position 6)", "") == str(torchs.value)  # it is passed on so
    assert launched == []
    assert reasons == [f"torch's own scaled_dot_product_attention serves {reason}"]


def test_under_autocast_the_cast_dtypes_decide(launched: list[str], reasons: list[str]) -> None:
    q, k, v = draw(2, 4)
    double = (q.double(), k.double(), v.double())
    want = functional.scaled_dot_product_attention(*double)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(scaled_dot_product_attention(*double), want)
        with pytest.raises(RuntimeError, match="same dtype"):  # torch's own words
            scaled_dot_product_attention(q, *double[1:])
        assert launched == []
        assert scaled_dot_product_attention(q, k.half(), v.bfloat16()).dtype == torch.bfloat16
    assert launched == ["forward"]
    assert [reason.split("serves ")[1] for reason in reasons] == [
        "dtype float64",
        "tensors of several dtypes",
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_autocast_casts_a_floating_mask_too(launched: list[str], dtype: torch.dtype) -> None:
    """bfloat16 moves a mask of this size by up to 2: uncast it would give another softmax."""
    tensors, mask = draw(2, 4), (256 * FLOATING).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        found = outcome(scaled_dot_product_attention, tensors, attn_mask=mask)
        torchs = functional.scaled_dot_product_attention(*tensors, attn_mask=mask)
    assert launched[-1] == "backward_dbias"
    torch.testing.assert_close(found[0], torchs, rtol=2e-2, atol=5e-2)
    cast = tuple(x.bfloat16() for x in tensors)
    want = outcome(scaled_dot_product_attention, cast, attn_mask=mask.bfloat16())
    for a, b, given in zip(found[1:], want[1:], (*tensors, mask), strict=True):
        assert a.dtype == given.dtype
        assert torch.equal(a, b.to(given.dtype))


def test_autocast_of_another_device_casts_nothing(launched: list[str]) -> None:
    q, k, v = draw(2, 4)
    with autocast_of_a_gpu():
        assert scaled_dot_product_attention(q, k, v).dtype == torch.float32
        assert launched == ["forward"]
        with pytest.raises(RuntimeError, match="same dtype"):
            scaled_dot_product_attention(q, k.half(), v)
    assert launched == ["forward"]


def test_it_compiles(launched: list[str]) -> None:
    tensors = draw(1, 2)
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    found = outcome(compiled, tensors, is_causal=True)
    for a, b in zip(
        found, outcome(scaled_dot_product_attention, tensors, is_causal=True), strict=True
    ):
        assert torch.equal(a, b)
    assert launched.count("forward") == 2
