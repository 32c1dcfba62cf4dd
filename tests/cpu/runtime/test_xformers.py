"""The drop-in for xformers, with stand-ins for its biases: tests/engines/test_xformers.py has the
classes themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.errors import InvalidArgument
from flashgen.runtime import xformers as xops
from flashgen.runtime.xformers import memory_efficient_attention as attend
from tests import xformers_biases as biases
from tests.serving import leaves

MODULE = biases.StandIns()


def draw(queries: int, keys: int, *, batch: int = 1, heads: int = 4, dim: int = 16) -> Any:
    torch.manual_seed(0)
    rest = (batch, keys, heads)
    return (
        torch.randn(batch, queries, heads, dim), torch.randn(*rest, dim), torch.randn(*rest, 24),
    )  # fmt: skip


def compare(bias: Any, added: Tensor, tensors: tuple[Tensor, ...], *, trains: bool) -> None:
    """O and the gradients of q, k and v beside float64."""
    own, theirs = leaves(*tensors), leaves(*tensors)
    o, wanted = attend(*own, bias), biases.exact(*theirs, added)
    torch.testing.assert_close(o.double(), wanted, rtol=1e-5, atol=1e-5)
    if trains:
        grads = torch.autograd.grad(o.square().sum(), own)
        torch.testing.assert_close(
            grads, torch.autograd.grad(wanted.square().sum(), theirs), rtol=1e-4, atol=1e-4
        )


def test_there_is_a_case_of_each_class() -> None:
    assert {*biases.DENSE, "LowerTriangularMaskWithTensorBias"} == set(xops.DENSE)
    assert set(biases.PACKED) == set(xops.PACKED)


@pytest.mark.parametrize("sizes", [(5, 5), (4, 9), (6, 3)])
@pytest.mark.parametrize("name", [None, *biases.DENSE])
def test_a_batch_is_as_of_float64(name: str | None, sizes: tuple[int, int]) -> None:
    shown, fields = biases.DENSE[name] if name else (biases.Shown(), {})
    bias = getattr(MODULE, name)(**fields) if name else None
    compare(bias, biases.hiding(shown.block(*sizes)), draw(*sizes, batch=2), trains=True)


@pytest.mark.parametrize("causal", [False, True])
def test_a_tensor_is_added_and_has_gradients(causal: bool) -> None:
    q, k, v = draw(4, 9, batch=2)
    bias = torch.randn(2, 4, 4, 9, requires_grad=True)
    hidden = biases.hiding(biases.Shown(diagonal="top" if causal else "").block(4, 9))
    given = MODULE.LowerTriangularMaskWithTensorBias(_bias=bias) if causal else bias
    compare(given, bias.detach() + hidden, (q, k, v), trains=True)
    found, wanted = attend(q, k, v, given, scale=0.5), biases.exact(q, k, v, bias + hidden, 0.5)
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), bias), torch.autograd.grad(wanted.sum(), bias)
    )


@pytest.mark.parametrize("name", biases.PACKED)
def test_packed_sequences_are_as_of_float64(name: str) -> None:
    bias, mask = biases.packed(name, MODULE)
    compare(bias, biases.hiding(mask), draw(*mask.shape), trains="Paged" not in name)


@pytest.mark.parametrize(
    ("name", "trains"),
    [
        (None, False),
        (None, True),
        ("BlockDiagonalCausalMask", True),
        ("PagedBlockDiagonalPaddedKeysMask", False),
    ],
)
def test_groups_of_heads(name: str | None, trains: bool) -> None:
    """(batch, seq, groups, heads, dim), of which keys and values are expanded: also their gradients."""
    bias, mask = biases.packed(name, MODULE) if name else (None, torch.ones(5, 7).bool())
    q, k, v = draw(*mask.shape, heads=6)
    q, k, v = q.unflatten(2, (2, 3)), k[:, :, :2, None], v[:, :, :2, None]
    k, v = (x.expand(-1, -1, -1, 3, -1) for x in (k, v))
    q, k, v = (x.requires_grad_(trains) for x in (q, k, v))
    o = attend(q, k, v, bias)
    wanted = biases.exact(*(x.flatten(2, 3) for x in (q, k, v)), biases.hiding(mask))
    torch.testing.assert_close(o.flatten(2, 3).double(), wanted, rtol=1e-5, atol=1e-5)
    if trains:
        found, theirs = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (o, wanted))
        torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [None, MODULE.LowerTriangularMask(), torch.randn(2, 5, 7)])
def test_one_head_may_be_left_out(bias: Any) -> None:
    q, k, v = (x.squeeze(2) for x in draw(5, 7, batch=2, heads=1))
    added = bias[:, None] if isinstance(bias, Tensor) else torch.zeros(5, 7)
    if bias is not None and not isinstance(bias, Tensor):
        added = biases.hiding(biases.Shown(diagonal="top").block(5, 7))
    wanted = biases.exact(*(x[:, :, None] for x in (q, k, v)), added)[:, :, 0]
    torch.testing.assert_close(attend(q, k, v, bias).double(), wanted, rtol=1e-5, atol=1e-5)


def test_head_dims_of_no_kernel_and_places_of_no_sequence() -> None:
    bias, mask = biases.packed("BlockDiagonalMask", MODULE)
    q, k, v = draw(*mask.shape, dim=11)
    spare = torch.cat([q, torch.ones(1, 2, 4, 11)], 1)  # a graph's padding
    o = attend(spare, k, v, bias)
    wanted = biases.exact(q, k, v, biases.hiding(mask))
    torch.testing.assert_close(o[:, :-2].double(), wanted, rtol=1e-5, atol=1e-5)
    assert not o[:, -2:].any()


def test_dropout_drops_and_scales() -> None:
    q, k, v = draw(64, 64)
    torch.manual_seed(1)
    dropped = attend(q, k, torch.ones_like(v), p=0.5)
    assert dropped.std() > 0.01
    assert abs(dropped.mean() - 1.0) < 0.1


def test_the_forward_alone_has_no_gradients() -> None:
    q, k, v = leaves(*draw(5, 7))
    o = xops.memory_efficient_attention_forward(q, k, v, op=object(), output_dtype=torch.float32)
    assert not o.requires_grad
    torch.testing.assert_close(o, attend(q, k, v).detach())


def changed(name: str, part: str | None = None, **fields: Any) -> Any:
    """A packed bias with other fields, of itself or a part."""
    bias, _ = biases.packed(name, MODULE)
    vars(getattr(bias, part) if part else bias).update(fields)
    return bias


Q, K, V = draw(9, 15)
PAGED = "PagedBlockDiagonalPaddedKeysMask"


@pytest.mark.parametrize(
    ("arguments", "options", "named"),
    [
        ((Q, K, V, MODULE.PagedBlockDiagonalGappyKeysMask()), {}, "got PagedBlockDiagonalGappyKeysMask, which"),
        ((Q, K, V, MODULE.OwnMask()), {}, "attn_bias must be None, a floating tensor, or one of Lower"),
        ((Q, K, V), {"p": 1.5}, "p must be from 0"),
        ((Q, K, V), {"output_dtype": torch.float64}, "output_dtype must be None"),
        ((Q, K.int(), V), {}, "key must be torch.float32 on cpu"),
        ((Q, K, V[:, :-1]), {}, "value must have shape"),
        ((Q, K[..., :8], V), {}, "key must have shape"),
        ((Q, K[:, :, :1], V[:, :, :1]), {}, "key must have shape"),
        ((Q[0], K, V), {}, "key must have 3, 4 or 5 dimensions, as many as query"),
        ((None, K, V), {}, "query must be a plain tensor: got NoneType"),
        ((Q, K, V, torch.ones(9, 15)), {}, "attn_bias must have shape"),
        ((Q, K, V, torch.ones(1, 4, 9, 15, dtype=torch.bool)), {}, "attn_bias must be torch.float32"),
        ((Q[:, :, 0], K[:, :, 0], V[:, :, 0], changed("BlockDiagonalMask")), {}, "query must have 4 or 5 dimensions"),
        ((*(x.expand(2, -1, -1, -1) for x in (Q, K, V)), changed("BlockDiagonalMask")), {}, "query must have a batch of 1"),
        ((Q[:, :-1], K, V, changed("BlockDiagonalMask")), {}, "in the 8 places of query"),
        ((Q, K[:, :-1], V[:, :-1], changed("BlockDiagonalMask")), {}, "in the 14 places of key"),
        ((Q, *draw(9, 24)[1:], changed("BlockDiagonalPaddedKeysMask", "k_seqinfo", seqlen_py=[4, 9, 5])), {}, "in the 24 places of key"),
        ((Q, *draw(9, 23)[1:], changed(PAGED)), {}, "key must have whole pages of 4"),
        ((Q, *draw(9, 24)[1:], changed(PAGED, block_tables=biases.TABLE[:, :1])), {}, "must have pages for all keys"),
        ((Q, *draw(9, 24)[1:], changed(PAGED)), {"p": 0.5}, "dropout_p must be 0 with block_table"),
        ((Q, K, V, changed("BlockDiagonalMask", "q_seqinfo", seqstart=torch.empty(4, device="meta"))), {}, "use its to()"),
        ((Q, K, V, changed("BlockDiagonalMask", "q_seqinfo", seqstart=(0, 3))), {}, "must have the fields of BlockDiagonalMask"),
        ((Q, K, V, changed("BlockDiagonalMask", "k_seqinfo", seqstart_py=None)), {}, "must have the fields of BlockDiagonalMask"),
        ((Q, K, V, changed("BlockDiagonalCausalLocalAttentionMask", _window_size="3")), {}, "must have the fields of BlockDiagonalCausalLocal"),
        ((Q, K, V), {"output_dtype": Q}, "tensor(["),
    ],
)  # fmt: skip
def test_what_it_lacks_is_refused(arguments: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        attend(*arguments, **options)
    assert named in str(refused.value)
    assert isinstance(refused.value, NotImplementedError)


def test_a_subclass_is_another_bias() -> None:
    class Mine(MODULE.LowerTriangularMask):  # type: ignore[misc]
        pass

    with pytest.raises(InvalidArgument, match="got Mine, which flashgen does not serve"):
        attend(Q, K, V, Mine())
    assert isinstance(Mine(), SimpleNamespace)
