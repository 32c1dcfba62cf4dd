"""The values that the fields of a spec take, their names on the command line, and their limits."""

from __future__ import annotations

from typing import Literal

from flashgen.errors import InvalidArgument

Direction = Literal[
    "forward", "backward_delta", "backward_dkv", "backward_dq", "backward_fused", "backward_dbias",
    "backward_ds", "backward_dq_of_ds", "decode", "combine", "append",
]  # fmt: skip
"""What a kernel computes: O and LSE; delta = rowsum(dO * O) - dLSE; dK and dV; dQ; all three, dQ by
atomic addition; the gradient of the bias; dK, dV and dS, the gradient of the scores; dQ = dS K. And
of decoding: O and LSE of parts of the keys; those of all parts; a cache with new keys and
values."""
DECODING: tuple[Direction, ...] = ("decode", "combine", "append")
"""The kernels that serve a cache of keys and values."""
BACKWARD: tuple[Direction, ...] = (
    "backward_delta",
    "backward_dkv",
    "backward_dq",
    "backward_fused",
)
"""What the word backward stands for: the kernels that a training step without a bias may run."""
OF_DS: tuple[Direction, ...] = ("backward_ds", "backward_dq_of_ds")
"""The kernels of gradients by dS in memory."""
DType = Literal["float16", "bfloat16", "float32"]
Mask = Literal["none", "causal"]
Bias = Literal["none", "additive", "boolean"]
Precision = Literal["ieee", "tf32"]
Source = Literal["measured", "estimated", "untimed", "replayed"]
"""How a table knows the time of an entry; outcome.STRENGTH orders them."""
KvDType = Literal["same", "float8_e4m3", "int8"]
"""What a cache holds: elements of Q's type, or 8-bit ones with a scale."""
KvScales = Literal["head", "page"]
"""What has a scale of its own in an 8-bit cache: a head of K or V, or a head of it in each page."""
Rotary = Literal["none", "halves", "interleaved"]
"""Which elements of a head rotate together (RoFormer, arXiv 2104.09864): i and i + dim / 2, or 2i
and 2i + 1."""
DTYPE_BYTES: dict[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4}
SHORT_DTYPE: dict[str, str] = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}

PREFIX: dict[str, str] = {
    "forward": "fwd",
    "backward_delta": "bwd_delta",
    "backward_dkv": "bwd_dkv",
    "backward_dq": "bwd_dq",
    "backward_fused": "bwd_fused",
    "backward_dbias": "bwd_dbias",
    "backward_ds": "bwd_ds",
    "backward_dq_of_ds": "bwd_dq_of_ds",
    "decode": "decode",
    "combine": "combine",
    "append": "append",
}
_DTYPE_NAMES = {short: name for name, short in SHORT_DTYPE.items()} | {n: n for n in SHORT_DTYPE}

MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 16, 512, 8
LONGEST = 1 << 29
"""Queries or keys of a sequence at most: kernels add positions, windows and chunks in 32 bits."""
BLOCK = 128
"""Queries and keys of a block of a block mask; tiles of kernels divide it."""
MAX_BACKWARD_HEAD_DIM = {2: MAX_HEAD_DIM, 4: 256}
"""The largest head dim that has gradients, by the bytes of an element: beyond, dK and dV of a tile
of float32 fill the registers."""


def parse_dtype(text: str, *, beside: tuple[str, ...] = ()) -> str:
    """The dtype's full name for `text`, which may also be fp16, bf16 or fp32.

    Raises InvalidArgument for any other text, naming what the caller takes beside these, too.
    """
    try:
        return _DTYPE_NAMES[text]
    except KeyError:
        known = ", ".join(sorted((*SHORT_DTYPE.values(), *beside)))
        raise InvalidArgument(f"dtype must be one of {known}: got {text!r}") from None


def padded(head_dim: int) -> int:
    """The power of two a head dim is padded to inside a tile (never in memory)."""
    return max(MIN_HEAD_DIM, 1 << (head_dim - 1).bit_length())


def why_no_gradient(head_dim: int, element_bytes: int) -> str | None:
    """Why a head dim has no backward kernel, in one sentence; None where it has."""
    most = MAX_BACKWARD_HEAD_DIM[element_bytes]
    if head_dim <= most:
        return None
    return (
        f"head dims above {most} have no backward kernel in float32: got {head_dim}; "
        "detach the tensors, call attention under torch.no_grad, or take 16 bits"
    )


def check_head_dim(value: int, field: str = "head_dim") -> None:
    """Raise InvalidArgument, naming `field`, unless kernels can be made for this head dim."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value % HEAD_DIM_STEP or not MIN_HEAD_DIM <= value <= MAX_HEAD_DIM:
        raise InvalidArgument(
            f"{field} must be a multiple of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}: "
            f"got {value!r}"
        )


PRODUCTS: dict[str, tuple[int, int]] = {
    # How many products have the head dim of Q and K, and how many that of V.
    "forward": (1, 1),  # QK^T; PV
    "backward_dkv": (2, 2),  # QK^T, dS^T Q; dO V^T, P^T dO
    "backward_dq": (2, 1),  # QK^T, dS K; dO V^T
    "backward_fused": (3, 2),
    "backward_dbias": (1, 1),  # QK^T; dO V^T
    "backward_ds": (2, 2),  # as backward_dkv
    "backward_dq_of_ds": (1, 0),  # dS K
    "decode": (1, 1),
}
