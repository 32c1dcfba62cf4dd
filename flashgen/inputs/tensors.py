"""Checks of the tensors of a call. torch is not imported: they are read by their attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flashgen.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor


def check_form(
    name: str, x: Tensor, dtypes: tuple[str, ...], *shapes: tuple[int | str, ...]
) -> None:
    """Raise InvalidArgument, naming the argument, unless x has one of these dtypes and one of these
    shapes, in which a word stands for any size.
    """
    own = tuple(x.shape)

    def fits(shape: tuple[int | str, ...]) -> bool:
        known = tuple(
            n if isinstance(n, int) else size for n, size in zip(shape, own, strict=False)
        )
        return len(shape) == len(own) and known == own

    if not any(map(fits, shapes)) or str(x.dtype).removeprefix("torch.") not in dtypes:
        wanted = " or ".join(f"({', '.join(map(str, s))}{',' * (len(s) == 1)})" for s in shapes)
        raise InvalidArgument(
            f"{name} must be {' or '.join(dtypes)} of shape {wanted}: got {x.dtype} {own}"
        )


def check_device(name: str, x: Tensor, q: Tensor, of: str = "q") -> None:
    """Raise InvalidArgument, naming the argument, unless x is on the device of q, called `of`."""
    if x.device != q.device:
        raise InvalidArgument(f"{name} must be on the device of {of}, {q.device}: got {x.device}")


def broadcasts(own: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a tensor of the shape `own` can be expanded to a shape."""
    sizes = zip(reversed(own), reversed(shape), strict=False)
    return len(own) <= len(shape) and all(size in (1, wanted) for size, wanted in sizes)
