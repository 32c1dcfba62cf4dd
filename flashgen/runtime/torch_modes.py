"""What torch may do around a call: trace it, transform it, cast for it, or draw random numbers.

The only file that asks torch for its modes. Those asked of torch._C have no public name that is as
cheap: they are asked at every call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from numbers import Real
from typing import NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from flashgen.errors import InvalidArgument, NotDifferentiable, shown

_forward_ad = torch.autograd.forward_ad
Given = ParamSpec("Given")
Result = TypeVar("Result")


def _autocasts_anywhere() -> bool:
    """What torch._C says at once, device by device."""
    return any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


# Every call of a torch that does not say what is around it takes the registered operators, which
# are right under all modes, and slower: as if there were a dispatch mode.
_says_all = (
    hasattr(torch._C, "_are_functorch_transforms_active")
    and hasattr(torch._C, "_len_torch_dispatch_stack")
    and hasattr(_forward_ad, "_current_level")
)
_are_transforms_active: Callable[[], bool] = getattr(
    torch._C, "_are_functorch_transforms_active", lambda: False
)
_count_dispatch_modes: Callable[[], int] = (
    torch._C._len_torch_dispatch_stack if _says_all else lambda: 1
)
_is_any_autocast_enabled: Callable[[], bool] = getattr(
    torch._C, "_is_any_autocast_enabled", _autocasts_anywhere
)
_is_batched_by_autograd: Callable[[Tensor], bool] = getattr(
    getattr(torch._C, "_functorch", None), "is_legacy_batchedtensor", lambda x: False
)
unwrap_if_dead: Callable[[Tensor], Tensor] = getattr(
    getattr(torch._C, "_functorch", None), "unwrap_if_dead", lambda x: x
)
"""Of a tensor that left its transform of torch.func what its wrapper holds; of another itself."""


def without_gradients(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """torch.no_grad() around a function. Where no gradients are recorded, as in most that serve,
    nothing: torch's takes 5 microseconds there, too.
    """

    @functools.wraps(function)
    def called(*arguments: Given.args, **options: Given.kwargs) -> Result:
        if not torch.is_grad_enabled():
            return function(*arguments, **options)
        with torch.no_grad():
            return function(*arguments, **options)

    return called


def special(q: Tensor) -> bool:
    """Whether anything is between the call and its kernel: what the functions below tell apart."""
    return (
        torch.compiler.is_compiling()
        or _are_transforms_active()
        or _count_dispatch_modes() > 0
        or _is_any_autocast_enabled()
        or _forward_ad._current_level >= 0
        or (type(q) is not Tensor and type(q) is not Parameter)
    )


def transformed() -> bool:
    """Whether the call is under a transform of torch.func: grad, vjp, vmap and the like."""
    return _are_transforms_active()


def traced(q: Tensor) -> bool:
    """Whether the call must go through the registered operators: under torch.compile and
    torch.export, under dispatch modes, or with a subclass of Tensor.
    """
    if torch.compiler.is_compiling() or _count_dispatch_modes() > 0:
        return True
    return type(q) is not Tensor and type(q) is not Parameter and not _are_transforms_active()


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Raise NotDifferentiable if one of them carries a tangent of forward-mode differentiation,
    which a kernel would drop.
    """
    if getattr(_forward_ad, "_current_level", 0) < 0:
        return
    parts = (_forward_ad.unpack_dual(x) for x in tensors if x is not None)  # type: ignore[no-untyped-call]
    if any(part.tangent is not None for part in parts):
        refuse_forward_mode()


def refuse_forward_mode() -> NoReturn:
    """Raise NotDifferentiable: what forward-mode differentiation meets on every road."""
    raise NotDifferentiable(
        "attention has no forward-mode derivative: use torch.func.vjp, or what "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) makes of scaled_dot_product_attention"
    )


def check_gradients(*gradients: Tensor | None) -> None:
    """Raise for gradients that no kernel can take: NotDifferentiable where one carries a tangent,
    InvalidArgument where torch.autograd.grad(is_grads_batched=True) hands over many as one.
    """
    if torch.compiler.is_compiling():
        return
    refuse_tangents(*gradients)
    for x in gradients:
        if x is not None and _is_batched_by_autograd(x):
            raise InvalidArgument(
                "attention takes one gradient at a time, not is_grads_batched=True or "
                "vectorize=True: call torch.autograd.grad once for each"
            )


def refuse_batched(*tensors: Tensor | None) -> None:
    """Raise InvalidArgument if torch.vmap maps one of them, beneath whatever other transforms."""
    functorch = torch._C._functorch
    for x in tensors:
        while x is not None and functorch.is_functorch_wrapped_tensor(x):
            if functorch.is_batchedtensor(x):
                refuse_vmap()
            x = functorch.get_unwrapped(x)


def refuse_vmap(*_: object) -> NoReturn:
    """Raise InvalidArgument: what torch.vmap meets on every road."""
    raise InvalidArgument(
        "attention does not run under torch.vmap: fold the mapped dimension into the batch of q, k "
        "and v, and call it once"
    )


def autocast(x: Tensor) -> Tensor:
    """The tensor as autocast hands it to scaled_dot_product_attention: in autocast_dtype(x)."""
    return x.to(autocast_dtype(x))


def autocasts() -> bool:
    """Whether autocast is on, for any kind of device."""
    return _is_any_autocast_enabled()


def autocast_all(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors as autocast has them, if it is on."""
    if not autocasts():
        return q, k, v
    return autocast(q), autocast(k), autocast(v)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype of x once autocast of its device has cast it, as torch's rule has it: float64 and
    what is not floating stay.
    """
    device = x.device.type
    cast = x.is_floating_point() and x.dtype is not torch.float64
    if not cast or device == "meta" or not torch.is_autocast_enabled(device):
        return x.dtype  # meta is no device to torch's autocast, which raises for it
    return torch.get_autocast_dtype(device)


def draw_rng(dropout_p: float, device: torch.device) -> Tensor | None:
    """The Philox seed and offset of one call with dropout, int64 (2,); None without dropout.

    Drawn on the device from torch's generator of that device, so torch.manual_seed fixes them,
    activation checkpointing draws them again, and a replayed CUDA graph draws new ones. The
    generator advances by what torch.randint takes. Raises as check_dropout.
    """
    if check_dropout(dropout_p) == 0.0:
        return None
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)


def check_dropout(dropout_p: float) -> float:
    """The probability. Raises InvalidArgument unless 0 <= dropout_p <= 1."""
    if not isinstance(dropout_p, Real):
        raise InvalidArgument(f"dropout_p must be a number from 0 to 1: got {shown(dropout_p)}")
    if not 0.0 <= dropout_p <= 1.0:
        raise InvalidArgument(f"dropout_p must be from 0 to 1: got {shown(dropout_p)}")
    return dropout_p
