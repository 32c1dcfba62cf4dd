"""What is asked: the kind of attention (AttentionSpec), the sizes (Problem), the interval of
lengths (Bucket).

A spec decides which kernels are possible; a problem only how long they run. Neither touches torch:
the tensors of a call are read by their attributes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from flashgen.errors import InvalidArgument
from flashgen.features import PLAIN, Bias, Features, check_features

if TYPE_CHECKING:
    from torch import Tensor

Direction = Literal[
    "forward", "backward_delta", "backward_dkv", "backward_dq", "backward_fused", "backward_dbias",
    "decode", "combine", "append",
]  # fmt: skip
"""What a kernel computes: O and LSE; delta = rowsum(dO * O) - dLSE; dK and dV; dQ; all three, dQ by
atomic addition; the gradient of the bias. And of decoding: O and LSE of parts of the keys; those of
all parts; a cache with new keys and values."""
DECODING: tuple[Direction, ...] = ("decode", "combine", "append")
"""The kernels that serve a cache of keys and values."""
BACKWARD: tuple[Direction, ...] = (
    "backward_delta",
    "backward_dkv",
    "backward_dq",
    "backward_fused",
)
"""What the word backward stands for: the kernels that a training step without a bias may run."""
DType = Literal["float16", "bfloat16", "float32"]
Mask = Literal["none", "causal"]
Precision = Literal["ieee", "tf32"]
Rotary = Literal["none", "halves", "interleaved"]
"""Which elements of a head rotate together (RoFormer, arXiv 2104.09864): i and i + dim / 2, or 2i
and 2i + 1."""
DTYPE_BYTES: dict[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4}
SHORT_DTYPE: dict[str, str] = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
FEATURES = ("dropout", "bias", "alibi", "window", "softcap", "sink", "paged", "rotary")
"""Fields of a spec that tables write out only where they are on."""
FEATURE_WORDS: dict[str, tuple[str, bool | str]] = {
    "bias": ("bias", "additive"),
    "boolean-mask": ("bias", "boolean"),
    "alibi": ("alibi", True),
    "dropout": ("dropout", True),
    "window": ("window", True),
    "softcap": ("softcap", True),
    "sink": ("sink", True),
}
"""What --feature calls the features: the field of a spec, and its value."""

_PREFIX: dict[str, str] = {
    "forward": "fwd",
    "backward_delta": "bwd_delta",
    "backward_dkv": "bwd_dkv",
    "backward_dq": "bwd_dq",
    "backward_fused": "bwd_fused",
    "backward_dbias": "bwd_dbias",
    "decode": "decode",
    "combine": "combine",
    "append": "append",
}
_BIAS_SUFFIX: dict[str, str] = {"none": "", "additive": "_bias", "boolean": "_boolmask"}
_DTYPE_NAMES = {short: name for name, short in SHORT_DTYPE.items()} | {n: n for n in SHORT_DTYPE}

MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 16, 256, 8


def parse_dtype(text: str) -> str:
    """The dtype's full name for `text`, which may also be fp16, bf16 or fp32.

    Raises InvalidArgument for any other text.
    """
    try:
        return _DTYPE_NAMES[text]
    except KeyError:
        known = ", ".join(sorted(SHORT_DTYPE.values()))
        raise InvalidArgument(f"dtype must be one of {known}: got {text!r}") from None


def padded(head_dim: int) -> int:
    """The power of two a head dim is padded to inside a tile (never in memory)."""
    return max(MIN_HEAD_DIM, 1 << (head_dim - 1).bit_length())


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One kind of attention: whatever may change the text of a kernel, and no sizes.

    head_dim is the last dimension of Q and K, head_dim_v that of V and O. precision says how
    float32 operands are multiplied (16-bit ones have one way, "ieee"). dropout, bias, alibi,
    window, softcap and sink are the features of features.py, each a kernel of its own; how wide the
    window is and where the cap lies, a kernel is told when it runs. paged: the cache that decode
    reads, or append writes, lies in pages; rotary: append rotates new keys, and queries. Raises
    InvalidArgument, naming the field.
    """

    direction: Direction = "forward"
    dtype: DType
    head_dim: int
    head_dim_v: int
    mask: Mask
    precision: Precision = "ieee"
    dropout: bool = False
    bias: Bias = "none"
    alibi: bool = False
    window: bool = False
    softcap: bool = False
    sink: bool = False
    paged: bool = False
    rotary: Rotary = "none"

    def __post_init__(self) -> None:
        for field, values in (
            ("direction", get_args(Direction)),
            ("dtype", get_args(DType)),
            ("mask", get_args(Mask)),
            ("precision", get_args(Precision)),
            ("bias", get_args(Bias)),
            ("rotary", get_args(Rotary)),
        ):
            if getattr(self, field) not in values:
                raise InvalidArgument(
                    f"{field} must be one of {', '.join(values)}: got {getattr(self, field)!r}"
                )
        for field in ("head_dim", "head_dim_v"):
            check_head_dim(getattr(self, field), field)
        if self.precision == "tf32" and self.dtype != "float32":
            raise InvalidArgument(f"precision tf32 goes with dtype float32: got {self.dtype}")
        for field in ("dropout", "alibi", "window", "softcap", "sink", "paged"):
            if not isinstance(getattr(self, field), bool):
                raise InvalidArgument(
                    f"{field} must be true or false: got {getattr(self, field)!r}"
                )
        self._check_direction()

    def _check_direction(self) -> None:
        """Raise InvalidArgument for what the direction's kernel cannot be asked."""
        if self.direction == "backward_dbias" and self.bias != "additive":
            raise InvalidArgument(f"direction backward_dbias needs bias additive: got {self.bias}")
        if self.direction != "forward" and self.sink:
            raise InvalidArgument(
                "sink goes with direction forward: a backward kernel knows a sink by its LSE alone"
            )
        if self.direction == "backward_delta" and (
            self.causal
            or self.featured
            or self.precision != "ieee"
            or self.head_dim != self.head_dim_v
        ):
            raise InvalidArgument(
                "direction backward_delta reads O and dO alone, so it goes with mask none, "
                "precision ieee, no feature and head_dim that of V: "
                f"got {self.mask}, {self.precision}, {self.head_dim} and {self.head_dim_v}"
            )
        self._check_decoding()

    def _check_decoding(self) -> None:
        """Raise InvalidArgument for what a kernel of a cache cannot be asked."""
        if self.paged and self.direction not in ("decode", "append"):
            raise InvalidArgument(
                f"paged goes with direction decode and append: got {self.direction}"
            )
        if self.rotary != "none" and self.direction != "append":
            raise InvalidArgument(f"rotary goes with direction append: got {self.direction}")
        if self.direction not in DECODING:
            return
        if self.featured:
            raise InvalidArgument(
                f"direction {self.direction} goes with no feature of --feature yet: "
                "ask for the attention without them"
            )
        if self.direction != "decode" and (self.causal or self.precision != "ieee"):
            raise InvalidArgument(
                f"direction {self.direction} has no scores, so it goes with mask none and "
                f"precision ieee: got {self.mask} and {self.precision}"
            )

    def for_direction(self, direction: Direction) -> AttentionSpec:
        """The spec of another kernel of the same attention, a forward or a backward one.

        Backward kernels have no sink: LSE includes it, and its own gradient is no kernel's.
        """
        if direction == "backward_delta":
            return AttentionSpec(
                direction=direction,
                dtype=self.dtype,
                head_dim=self.head_dim_v,
                head_dim_v=self.head_dim_v,
                mask="none",
            )
        if direction in ("combine", "append"):
            head_dim = self.head_dim_v if direction == "combine" else self.head_dim
            paged = self.paged and direction == "append"
            return AttentionSpec(
                direction=direction,
                dtype=self.dtype,
                head_dim=head_dim,
                head_dim_v=self.head_dim_v,
                mask="none",
                paged=paged,
            )
        return replace(self, direction=direction, sink=self.sink and direction == "forward")

    def with_features(self, words: Iterable[str]) -> AttentionSpec:
        """The spec with these features on, by FEATURE_WORDS. Raises InvalidArgument."""
        found = self
        for word in words:
            if word not in FEATURE_WORDS:
                known = ", ".join(FEATURE_WORDS)
                raise InvalidArgument(f"--feature must be one of {known}: got {word!r}")
            field, value = FEATURE_WORDS[word]
            if field == "bias" and found.bias not in ("none", value):
                raise InvalidArgument("--feature takes one of bias and boolean-mask: got both")
            found = replace(found, **{field: value})  # type: ignore[arg-type]  # as the table says
        return found

    @property
    def name(self) -> str:
        """The spec in one word, as it stands in kernel names: fwd_bf16_d128_causal."""
        dtype = "tf32" if self.precision == "tf32" else SHORT_DTYPE[self.dtype]
        dims = f"d{self.head_dim}"
        if self.head_dim_v != self.head_dim:
            dims += f"v{self.head_dim_v}"
        mask = "" if self.mask == "none" else f"_{self.mask}"
        features = _BIAS_SUFFIX[self.bias]
        features += "_alibi" * self.alibi + "_dropout" * self.dropout + "_window" * self.window
        features += "_softcap" * self.softcap + "_sink" * self.sink + "_paged" * self.paged
        features += "" if self.rotary == "none" else f"_rotary_{self.rotary}"
        return f"{_PREFIX[self.direction]}_{dtype}_{dims}{mask}{features}"

    @property
    def sort_key(self) -> tuple[object, ...]:
        """Order of specs in tables and listings."""
        return (
            list(_PREFIX).index(self.direction),
            self.dtype,
            self.precision,
            self.head_dim,
            self.head_dim_v,
            self.mask != "none",
            self.bias,
            self.alibi,
            self.dropout,
            self.window,
            self.softcap,
            self.sink,
            self.paged,
            self.rotary,
        )

    @property
    def products(self) -> int:
        """Matrix products of one tile of scores; 0 where there are no scores."""
        return sum(_PRODUCTS.get(self.direction, ()))

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of Q, K, V and O."""
        return DTYPE_BYTES[self.dtype]

    @property
    def causal(self) -> bool:
        """Whether the mask is causal."""
        return self.mask == "causal"

    @property
    def takes_diagonal(self) -> bool:
        """Whether the kernel is told the diagonal: a causal mask ends there, ALiBi and windows
        count from there.
        """
        return self.causal or self.alibi or self.window

    @property
    def feature_words(self) -> tuple[str, ...]:
        """The features that are on, as --feature calls them."""
        return tuple(
            word for word, (field, value) in FEATURE_WORDS.items() if getattr(self, field) == value
        )

    @property
    def featured(self) -> bool:
        """Whether any feature is on."""
        return self.masked_by_feature or self.softcap or self.sink

    @property
    def masked_by_feature(self) -> bool:
        """Whether a feature asks for the positions of queries or keys."""
        return self.bias != "none" or self.alibi or self.dropout or self.window

    @property
    def masked(self) -> bool:
        """Whether anything but the lengths comes between a query and a key."""
        return self.causal or self.masked_by_feature


def check_head_dim(value: int, field: str = "head_dim") -> None:
    """Raise InvalidArgument, naming `field`, unless kernels can be made for this head dim."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value % HEAD_DIM_STEP or not MIN_HEAD_DIM <= value <= MAX_HEAD_DIM:
        raise InvalidArgument(
            f"{field} must be a multiple of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}: "
            f"got {value!r}"
        )


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The sizes one run has. Any may be 0; kv_heads must divide heads."""

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int

    def __post_init__(self) -> None:
        for field in ("batch", "heads", "kv_heads", "seq_q", "seq_k"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InvalidArgument(f"{field} must be a whole number >= 0: got {value!r}")
        if self.kv_heads == 0 and self.heads == 0:
            return
        if self.kv_heads == 0 or self.heads % self.kv_heads:
            raise InvalidArgument(
                f"heads must be a multiple of kv_heads: got {self.heads} and {self.kv_heads}"
            )

    @property
    def group(self) -> int:
        """Query heads that share one head of K and V."""
        return self.heads // self.kv_heads if self.kv_heads else 1

    @property
    def empty(self) -> bool:
        """Whether there is no query at all, so that nothing need be computed."""
        return 0 in (self.batch, self.heads, self.seq_q)


@dataclass(frozen=True, kw_only=True, order=True)
class Bucket:
    """A half-open interval of seq_k, [low, high); high None has no end."""

    low: int
    high: int | None

    def __str__(self) -> str:
        return f"[{self.low}, {'inf' if self.high is None else self.high})"

    def __contains__(self, seq_k: int) -> bool:
        return self.low <= seq_k and (self.high is None or seq_k < self.high)


BUCKETS = (
    Bucket(low=1, high=1024),
    Bucket(low=1024, high=4096),
    Bucket(low=4096, high=16384),
    Bucket(low=16384, high=None),
)
"""The only buckets there are. Coarse on purpose: a reviewer can read a table of four rows a
spec.
"""

BUCKET_SEQ = dict(zip(BUCKETS, (512, 2048, 8192, 16384), strict=True))
"""The length that stands for a bucket when none is asked for."""


def bucket_of(seq_k: int) -> Bucket:
    """The bucket that holds seq_k; 0 keys belong to the first."""
    for bucket in BUCKETS:
        if bucket.high is None or seq_k < bucket.high:
            return bucket
    raise AssertionError("the last bucket has no end")


LONGEST_SEQ = 1 << 24
"""Of what is tuned. An estimate counts every tile of a head, and one of so many takes seconds."""


def workload(spec: AttentionSpec, seq: int) -> Problem:
    """The problem that tuning runs at length `seq`: 16384 tokens and a model width of 2048.

    That is the setting of the FlashAttention-2 paper (arXiv 2307.08691, section 4.1). It fills a
    GPU at every length up to 16384; longer sequences run with a batch of one.
    """
    if not 1 <= seq <= LONGEST_SEQ:
        raise InvalidArgument(f"seq must be from 1 to {LONGEST_SEQ}: got {seq}")
    if spec.direction in DECODING:
        return _decoding_workload(spec, seq)
    heads = max(1, 2048 // spec.head_dim)
    return Problem(batch=max(1, 16384 // seq), heads=heads, kv_heads=heads, seq_q=seq, seq_k=seq)


def _decoding_workload(spec: AttentionSpec, seq: int) -> Problem:
    """64 sequences of `seq` keys, 32 query heads to 8 of K and V: Llama 3 8B at a usual batch.

    One query each; under a causal mask four, as speculative decoding has: one is as without a mask.
    combine merges `seq` parts; append adds one key.
    """
    heads = 32 if spec.direction == "combine" else 8
    queries = 4 if spec.causal else 1
    return Problem(batch=64, heads=32, kv_heads=heads, seq_q=queries, seq_k=seq)


TUNED_WINDOW = 4096
"""Keys on each side of the window that a windowed spec is measured and estimated with, to the left
alone under a causal mask; that of Mistral 7B and Gemma 2. A Problem names none, so shorter lengths
are tuned as if unmasked on that side.
"""


def flops(spec: AttentionSpec, problem: Problem) -> float:
    """Floating-point operations of the kernel's matrix products, halved for a causal mask; of a
    windowed spec those inside a window of TUNED_WINDOW.

    Forward: 4 * batch * heads * seq_q * seq_k * head_dim (FlashAttention-2, section 4.1). The
    backward kernels count every product they make, recomputed ones too: S and dP in each, so the
    sum over a pass of two kernels is 3.5 forwards where the papers count 2.5.
    """
    rows = 2.0 * problem.batch * problem.heads * problem.seq_q
    if spec.direction == "backward_delta":
        return rows * spec.head_dim_v
    if spec.direction in ("combine", "append"):  # O times a weight, for each of seq_k parts
        return rows * problem.seq_k * spec.head_dim_v if spec.direction == "combine" else 0.0
    dims, dims_v = _PRODUCTS[spec.direction]
    full = rows * problem.seq_k * (dims * spec.head_dim + dims_v * spec.head_dim_v)
    if spec.window:
        full *= 1 - _share_outside(spec, problem)
    # The few queries of a decode stand at the end, and see nearly all keys.
    halved = spec.causal and not spec.window and spec.direction != "decode"
    return full / 2 if halved else full


def _share_outside(spec: AttentionSpec, problem: Problem) -> float:
    """The share of all pairs of a query and a key that lie outside the tuned window: triangles, the
    upper one under a causal mask being half, as flops counts it.
    """
    seq_q, seq_k = problem.seq_q, problem.seq_k
    if 0 in (seq_q, seq_k):
        return 0.0

    def triangle(edge: int) -> float:
        return max(edge, 0) ** 2 / 2

    before = triangle(seq_k - TUNED_WINDOW) - triangle(seq_k - seq_q - TUNED_WINDOW)
    behind = triangle(seq_q - TUNED_WINDOW) - triangle(seq_q - seq_k - TUNED_WINDOW)
    return before / (seq_q * seq_k) + (0.5 if spec.causal else behind / (seq_q * seq_k))


_PRODUCTS: dict[str, tuple[int, int]] = {
    # How many products have the head dim of Q and K, and how many that of V.
    "forward": (1, 1),  # QK^T; PV
    "backward_dkv": (2, 2),  # QK^T, dS^T Q; dO V^T, P^T dO
    "backward_dq": (2, 1),  # QK^T, dS K; dO V^T
    "backward_fused": (3, 2),
    "backward_dbias": (1, 1),  # QK^T; dO V^T
    "decode": (1, 1),
}


def diagonal_of(causal: bool | str, seq_q: int, seq_k: int) -> int | None:
    """The offset of the causal diagonal: query i sees key j where j <= i + offset; None without a
    mask.

    causal is True or "bottom_right" (the last query sees the last key), "top_left" (the first query
    sees only the first key) or False. Raises InvalidArgument for anything else.
    """
    if causal is False:
        return None
    if causal is True or causal == "bottom_right":
        return seq_k - seq_q
    if causal == "top_left":
        return 0
    raise InvalidArgument(
        f"causal must be True, False, 'top_left' or 'bottom_right': got {causal!r}"
    )


def check_scale(scale: float | None, head_dim: int) -> float:
    """The softmax scale to use: `scale`, or 1/sqrt(head_dim). Raises InvalidArgument if not
    finite.
    """
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    value = float(scale)
    if not math.isfinite(value):
        raise InvalidArgument(f"scale must be a finite number: got {scale!r}")
    if value and not 2.0**-120 <= abs(value) <= 2.0**120:  # times log2(e) it is a float32 too
        raise InvalidArgument(f"scale must be 0 or from 2^-120 to 2^120 in size: got {scale!r}")
    return value


def from_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str,
    precision: str = "ieee",
    features: Features = PLAIN,
) -> tuple[AttentionSpec, Problem]:
    """Read the forward spec and the problem off tensors of shape (batch, heads, seq, head_dim).

    Raises InvalidArgument, naming the argument, for wrong ranks, sizes that disagree, mixed dtypes
    or devices, head counts that do not divide, head dims or dtypes that no kernel serves, and
    features that do not fit.
    """
    _check_shapes(q, k, v)
    if features is not PLAIN:
        check_features(features, q, k)
    batch, heads, seq_q, head_dim = q.shape
    _, kv_heads, seq_k, head_dim_v = v.shape
    if (kv_heads == 0 or heads % kv_heads) and (heads or kv_heads):
        raise InvalidArgument(
            f"q must have a multiple of the heads of k and v: got {heads} and {kv_heads}"
        )
    dtype = str(q.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise InvalidArgument(f"q must be float16, bfloat16 or float32: got {dtype}")
    check_head_dim(head_dim, "the head_dim of q")
    check_head_dim(head_dim_v, "the head_dim of v")
    diagonal_of(causal, 0, 0)
    if precision not in get_args(Precision):
        raise InvalidArgument(f"precision must be ieee or tf32: got {precision!r}")
    spec = AttentionSpec(
        dtype=dtype,  # type: ignore[arg-type]  # narrowed by the look-up above
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        mask="none" if causal is False else "causal",
        precision=precision if dtype == "float32" else "ieee",  # type: ignore[arg-type]
        dropout=features.dropout_p > 0.0,
        bias=features.bias_kind,
        alibi=features.slopes is not None,
        window=features.window is not None,
        softcap=features.softcap > 0.0,
        sink=features.sinks is not None,
    )
    problem = Problem(batch=batch, heads=heads, kv_heads=kv_heads, seq_q=seq_q, seq_k=seq_k)
    return spec, problem


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise InvalidArgument unless q, k and v fit together."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise InvalidArgument(
                f"{name} must have shape (batch, heads, seq, head_dim): got {tuple(tensor.shape)}"
            )
        if tensor.dtype != q.dtype:
            raise InvalidArgument(f"{name} must have the dtype of q, {q.dtype}: got {tensor.dtype}")
        if tensor.device != q.device:
            raise InvalidArgument(
                f"{name} must be on the device of q, {q.device}: got {tensor.device}"
            )
        if tensor.shape[0] != q.shape[0]:
            raise InvalidArgument(
                f"{name} must have the batch size of q, {q.shape[0]}: got {tensor.shape[0]}"
            )
    if k.shape[1:3] != v.shape[1:3]:
        raise InvalidArgument(
            f"v must have the heads and length of k, {tuple(k.shape[1:3])}: "
            f"got {tuple(v.shape[1:3])}"
        )
    if k.shape[3] != q.shape[3]:
        raise InvalidArgument(f"k must have the head_dim of q, {q.shape[3]}: got {k.shape[3]}")
