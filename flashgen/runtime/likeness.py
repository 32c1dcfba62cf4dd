"""Whether tensors are like those of an earlier call, by one function of torch.

A key of their shapes, strides and types takes Python 1 us a tensor to make and compare.
torch.compile asks the same before it runs a graph again, and torch has a class for it in C++. The
class has no public name, so what it tells apart is tried before it is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashgen.kernels.bound_call import compiled

IsLike = Callable[..., bool]
"""Takes as many tensors, or None, as it was made of."""


def likeness(tensors: Sequence[Tensor | None]) -> IsLike | None:
    """A function that is True for tensors of these types, devices, dtypes, shapes, strides and
    requires_grad, where the same ones are None, and the same ones are one tensor. It may be False
    for such tensors under another mode of torch. None where torch cannot say.
    """
    own = list({id(x): x for x in tensors if x is not None}.values())
    if not own or not _is_known():
        return None
    numbers = {id(x): place for place, x in reversed(list(enumerate(tensors)))}
    firsts = [None if x is None else numbers[id(x)] for x in tensors]
    tests = [
        f"x{place} is {None if first is None else f'x{first}'}"
        for place, first in enumerate(firsts)
        if first != place
    ]
    given = ", ".join(f"x{place}" for place, first in enumerate(firsts) if first == place)
    names = ", ".join(f"x{place}" for place in range(len(firsts)))
    test = " and ".join([*tests, f"is_like({given})"])
    found: IsLike = compiled(f"def holding(is_like): return lambda {names}: {test}")(_guard(*own))
    return found


def _guard(*tensors: Tensor) -> IsLike:
    """The function of torch. It is False where one of the tensors is given twice."""
    made: Any = torch._C._dynamo.guards.TensorGuards(
        *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
    )
    found: IsLike = made.check
    return found


@functools.cache
def _is_known() -> bool:
    """Whether torch has the function, and it tells apart what it must."""
    x = torch.empty(2, 3, 4)
    others = (
        x[:1], x[..., 0], x.transpose(0, 1), torch.empty_strided((2, 3, 4), (24, 8, 1)), x.double(),
        x.to("meta"), x.detach().requires_grad_(), torch.nn.Parameter(x, requires_grad=False),
        torch._neg_view(x), None,
    )  # fmt: skip
    try:
        is_like = _guard(x, x.clone())
        return is_like(x.clone(), x) and not any(is_like(x, other) for other in others)
    except (AttributeError, RuntimeError, TypeError):
        return False
