"""What is asked: the kind of attention, an AttentionSpec. It decides which kernels are possible."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from flashgen.errors import InvalidArgument
from flashgen.features import Bias

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
KvDType = Literal["same", "float8_e4m3", "int8"]
"""What a cache holds: elements of Q's type, or 8-bit ones with a scale."""
KvScales = Literal["head", "page"]
"""What has a scale of its own in an 8-bit cache: a head of K or V, or a head of it in each page."""
Rotary = Literal["none", "halves", "interleaved"]
"""Which elements of a head rotate together (RoFormer, arXiv 2104.09864): i and i + dim / 2, or 2i
and 2i + 1."""
DTYPE_BYTES: dict[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4}
SHORT_DTYPE: dict[str, str] = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
FEATURES = (
    "dropout", "bias", "alibi", "window", "softcap", "sink", "varlen", "block_mask",
    "paged", "rotary", "indexed", "leftpad", "kv_dtype", "kv_scales", "fp8",
)  # fmt: skip
"""Fields of a spec that tables write out only where they are on."""
FEATURE_WORDS: dict[str, tuple[str, bool | str]] = {
    "bias": ("bias", "additive"),
    "boolean-mask": ("bias", "boolean"),
    "alibi": ("alibi", True),
    "dropout": ("dropout", True),
    "window": ("window", True),
    "softcap": ("softcap", True),
    "sink": ("sink", True),
    "varlen": ("varlen", True),
    "fp8": ("fp8", True),
    "block-mask": ("block_mask", True),
}
"""What --feature calls the features: the field of a spec, and its value."""
UNMASKED = ("block-mask",)
"""Those that go with mask none alone."""
KV_WORDS: dict[str, tuple[KvDType, KvScales]] = {
    "fp8": ("float8_e4m3", "head"),
    "fp8-page": ("float8_e4m3", "page"),
    "int8": ("int8", "head"),
    "int8-page": ("int8", "page"),
}
"""What --kv calls 8-bit caches: kv_dtype and kv_scales."""

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
_KV_SUFFIX: dict[str, str] = {"same": "", "float8_e4m3": "_kv_fp8", "int8": "_kv_int8"}
_DTYPE_NAMES = {short: name for name, short in SHORT_DTYPE.items()} | {n: n for n in SHORT_DTYPE}

MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 16, 512, 8
MAX_BACKWARD_HEAD_DIM = 256
"""The largest head dim that has gradients: beyond, dK and dV of a tile fill the registers."""


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


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One kind of attention: whatever may change the text of a kernel, and no sizes.

    head_dim is the last dimension of Q and K, head_dim_v that of V and O. precision says how
    float32 operands are multiplied (16-bit ones have one way, "ieee"). dropout, bias, alibi,
    window, softcap and sink are the features of features.py, each a kernel of its own; how wide the
    window is and where the cap lies, a kernel is told when it runs. varlen: sequences of several
    lengths are packed one behind the other, as sequences.py says. block_mask: tiles are those that
    a block mask lists, as block_mask.py says. paged: the cache that decode, or
    a forward with varlen, reads, or append writes, lies in pages; rotary: append rotates new keys,
    and queries; indexed: a tensor says which row of the cache is whose; leftpad: another, where the
    keys that decode reads begin; kv_dtype and kv_scales: the elements of the cache, and what of it
    has a scale. fp8: Q, K and V of a forward are float8_e4m3, and dtype is that of O. Raises
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
    varlen: bool = False
    block_mask: bool = False
    paged: bool = False
    rotary: Rotary = "none"
    indexed: bool = False
    leftpad: bool = False
    fp8: bool = False
    kv_dtype: KvDType = "same"
    kv_scales: KvScales = "head"

    def __post_init__(self) -> None:
        for field, values in (
            ("direction", get_args(Direction)),
            ("dtype", get_args(DType)),
            ("mask", get_args(Mask)),
            ("precision", get_args(Precision)),
            ("bias", get_args(Bias)),
            ("rotary", get_args(Rotary)),
            ("kv_dtype", get_args(KvDType)),
            ("kv_scales", get_args(KvScales)),
        ):
            if getattr(self, field) not in values:
                raise InvalidArgument(
                    f"{field} must be one of {', '.join(values)}: got {getattr(self, field)!r}"
                )
        for field in ("head_dim", "head_dim_v"):
            check_head_dim(getattr(self, field), field)
        if self.precision == "tf32" and self.dtype != "float32":
            raise InvalidArgument(f"precision tf32 goes with dtype float32: got {self.dtype}")
        for field in (
            "dropout", "alibi", "window", "softcap", "sink", "varlen", "block_mask",
            "paged", "indexed", "leftpad", "fp8",
        ):  # fmt: skip
            if not isinstance(getattr(self, field), bool):
                raise InvalidArgument(
                    f"{field} must be true or false: got {getattr(self, field)!r}"
                )
        self._check_direction()

    def _check_direction(self) -> None:
        """Raise InvalidArgument for what the direction's kernel cannot be asked."""
        widest = max(self.head_dim, self.head_dim_v)
        if self.direction not in ("forward", *DECODING) and widest > MAX_BACKWARD_HEAD_DIM:
            raise InvalidArgument(no_gradient(widest))
        if self.direction == "backward_dbias" and self.bias != "additive":
            raise InvalidArgument(f"direction backward_dbias needs bias additive: got {self.bias}")
        if self.direction not in ("forward", "decode") and self.sink:
            raise InvalidArgument(
                "sink goes with direction forward and decode: "
                "a backward kernel knows a sink by its LSE alone"
            )
        if self.fp8 and (self.direction != "forward" or self.dtype == "float32"):
            raise InvalidArgument(
                "fp8 goes with direction forward, for it has no gradient, and with O of dtype "
                f"float16 or bfloat16: got {self.direction} and {self.dtype}"
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
        if self.varlen and max(self.head_dim, self.head_dim_v) > MAX_BACKWARD_HEAD_DIM:
            raise InvalidArgument(
                f"varlen goes with head dims to {MAX_BACKWARD_HEAD_DIM}: "
                f"got {self.head_dim} and {self.head_dim_v}"
            )
        if self.varlen and self.fp8:
            raise InvalidArgument(
                "varlen goes without fp8, whose factors are those of a batch: "
                "use float16 or bfloat16"
            )
        if self.varlen and self.bias != "none":
            raise InvalidArgument(
                f"varlen goes with bias none, for packed sequences share no scores: got {self.bias}"
            )
        if self.block_mask and (self.causal or self.window or self.varlen or self.bias != "none"):
            raise InvalidArgument(
                "block_mask goes with mask none, and without window, varlen and bias: it says "
                f"itself who sees whom: got {self.name}"
            )
        self._check_decoding()

    def _check_decoding(self) -> None:
        """Raise InvalidArgument for what a kernel of a cache cannot be asked."""
        packed = self.direction == "forward" and self.varlen
        if self.paged and not packed and self.direction not in ("decode", "append"):
            raise InvalidArgument(
                "paged goes with direction decode and append, and with forward and varlen: "
                f"got {self.direction}"
            )
        if self.paged and self.dropout:
            raise InvalidArgument("paged goes without dropout: a cache is for inference")
        if self.rotary != "none" and self.direction != "append":
            raise InvalidArgument(f"rotary goes with direction append: got {self.direction}")
        if self.leftpad and self.direction != "decode":
            raise InvalidArgument(f"leftpad goes with direction decode: got {self.direction}")
        if self.indexed and (self.direction not in ("decode", "append") or self.paged):
            raise InvalidArgument(
                "indexed goes with direction decode and append of a cache that is not paged, whose "
                f"block table names the pages: got {self.direction}{', paged' * self.paged}"
            )
        self._check_kv()
        if self.direction not in DECODING:
            return
        if self.varlen or self.block_mask:
            raise InvalidArgument(
                f"{'varlen' if self.varlen else 'block_mask'} goes with attention and its "
                f"gradients: direction {self.direction} has the lengths of its cache"
            )
        if self.dropout:
            raise InvalidArgument(
                f"dropout goes with training: direction {self.direction} serves a cache, without"
            )
        if self.direction != "decode" and self.featured:
            raise InvalidArgument(
                f"direction {self.direction} has no scores, so it goes with no feature: "
                f"got {' and '.join(self.feature_words)}"
            )
        if self.direction != "decode" and (self.causal or self.precision != "ieee"):
            raise InvalidArgument(
                f"direction {self.direction} has no scores, so it goes with mask none and "
                f"precision ieee: got {self.mask} and {self.precision}"
            )

    def _check_kv(self) -> None:
        """Raise InvalidArgument for what no 8-bit cache is asked."""
        if self.kv_dtype != "same" and (
            self.direction not in ("decode", "append") or self.dtype == "float32"
        ):
            raise InvalidArgument(
                f"kv_dtype {self.kv_dtype} goes with direction decode and append, and with dtype "
                f"float16 and bfloat16: got {self.direction} and {self.dtype}"
            )
        if self.kv_scales == "page" and not (self.paged and self.kv_dtype != "same"):
            raise InvalidArgument(
                "kv_scales page goes with paged and an 8-bit kv_dtype: "
                f"got {'' if self.paged else 'not '}paged, {self.kv_dtype}"
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
                indexed=self.indexed and direction == "append",
                kv_dtype=self.kv_dtype if direction == "append" else "same",
                kv_scales=self.kv_scales if direction == "append" else "head",
            )
        sink = self.sink and direction in ("forward", "decode")
        return replace(self, direction=direction, sink=sink)

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
        features += "_softcap" * self.softcap + "_sink" * self.sink + "_varlen" * self.varlen
        features += "_blockmask" * self.block_mask + "_paged" * self.paged
        features += "" if self.rotary == "none" else f"_rotary_{self.rotary}"
        features += "_indexed" * self.indexed + "_leftpad" * self.leftpad
        features += "_fp8" * self.fp8
        features += _KV_SUFFIX[self.kv_dtype] + "_page_scales" * (self.kv_scales == "page")
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
            self.varlen,
            self.block_mask,
            self.paged,
            self.rotary,
            self.indexed,
            self.leftpad,
            self.fp8,
            self.kv_dtype != "same",
            self.kv_dtype,
            self.kv_scales,
        )

    @property
    def products(self) -> int:
        """Matrix products of one tile of scores; 0 where there are no scores."""
        return sum(PRODUCTS.get(self.direction, ()))

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of Q, K, V and O."""
        return DTYPE_BYTES[self.dtype]

    @property
    def kv_bytes(self) -> int:
        """Bytes of one element of K and V."""
        return self.operand_bytes if self.kv_dtype == "same" else 1

    @property
    def operand_bytes(self) -> int:
        """Bytes of one element of Q."""
        return 1 if self.fp8 else self.element_bytes

    @property
    def operand_dtype(self) -> str:
        """The elements of Q, and of K and V unless kv_dtype says another, as torch calls them."""
        return "float8_e4m3fn" if self.fp8 else self.dtype

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
    def counts_keys(self) -> bool:
        """Whether a kernel of packed sequences is told the places of all keys: dropout counts them,
        and a program that owns keys zeroes those of no sequence.
        """
        return self.dropout or self.direction in ("backward_dkv", "backward_fused")

    @property
    def feature_words(self) -> tuple[str, ...]:
        """The features that are on, as --feature calls them."""
        return tuple(
            word for word, (field, value) in FEATURE_WORDS.items() if getattr(self, field) == value
        )

    @property
    def cache_options(self) -> str:
        """What a cache is, as the command line has it: " --paged --kv fp8", or nothing."""
        kv = (self.kv_dtype, self.kv_scales)
        words = "".join(f" --kv {word}" for word, means in KV_WORDS.items() if means == kv)
        return " --paged" * self.paged + words

    @property
    def featured(self) -> bool:
        """Whether any feature is on."""
        return self.scores_featured or self.varlen or self.block_mask

    @property
    def scores_featured(self) -> bool:
        """Whether a feature changes the scores of a query and a key, or the sum of a row."""
        positions = self.bias != "none" or self.alibi or self.dropout or self.window
        return positions or self.softcap or self.sink or self.fp8

    @property
    def masked_by_feature(self) -> bool:
        """Whether a feature asks for the positions of queries or keys."""
        return self.bias != "none" or self.alibi or self.dropout or self.window or self.block_mask

    @property
    def masked(self) -> bool:
        """Whether anything but the lengths comes between a query and a key."""
        return self.causal or self.masked_by_feature


def no_gradient(head_dim: int) -> str:
    """Why a head dim has no backward kernel, in one sentence."""
    return (
        f"head dims above {MAX_BACKWARD_HEAD_DIM} have no backward kernel: got {head_dim}; "
        "detach the tensors, or call attention under torch.no_grad"
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
    "decode": (1, 1),
}
