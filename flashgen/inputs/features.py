"""Features: the tensors and numbers that one call brings besides q, k and v, and their checks."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

from flashgen.errors import InvalidArgument, shown
from flashgen.inputs import packed
from flashgen.inputs.block_mask import BlockMask, check_block_mask
from flashgen.inputs.packed import OF_PLACES, Sequences, check_sequences
from flashgen.inputs.tensors import broadcasts, check_device, check_form
from flashgen.spec.features import FEATURES, PER_HEAD
from flashgen.spec.vocabulary import LONGEST, Bias, Mask

if TYPE_CHECKING:
    from torch import Tensor

_OF_CALLS = tuple(row for row in FEATURES if row.word or row.field == "paged")
_GIVEN = tuple(row.given for row in _OF_CALLS)
_beyond_limits = operator.itemgetter(*(i for i, row in enumerate(_OF_CALLS) if not row.limit))
"""Of a key of Features, what says which features are on that are no limits."""
_per_head = operator.itemgetter(*(i for i, row in enumerate(_OF_CALLS) if row.per_head))

FLOAT32_MAX = 3.4028234663852886e38
MASKED_BELOW = -FLOAT32_MAX / 1.4426950408889634
"""A bias at or below this masks its element, as -inf does: times log2(e), as the kernels add it, it
is beyond float32. Masks made of the most negative finite bfloat16 or float32 are such. Of the other
sign it counts as inf."""


def as_kernels_add(x: Tensor) -> Tensor:
    """A bias or sinks, float32 at least, as the kernels add them: infinite where times log2(e) they
    are beyond float32.
    """
    infinite = float("inf")
    return x.masked_fill(x <= MASKED_BELOW, -infinite).masked_fill(x >= -MASKED_BELOW, infinite)


FLOAT_BIAS = ("float16", "bfloat16", "float32")


@dataclass(frozen=True, kw_only=True, eq=False)
class Fp8:
    """What a forward of float8_e4m3 Q, K and V brings: float32 factors of each, (B, Hkv), by which
    elements are multiplied, in any strides; and the dtype of O, float16 or bfloat16.
    """

    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor
    dtype: str = "bfloat16"

    @property
    def factors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Those of Q, K and V."""
        return self.q_descale, self.k_descale, self.v_descale


FACTORS = ("q_descale", "k_descale", "v_descale")
"""The tensors of Fp8."""

UNBOUNDED = -1
"""A side of a window without an end."""

FAR = 1 << 62
"""Keys to a side that no call has, and that torch's 64 bits would not hold beside a place."""

Window = tuple[int | None, int | None]
"""(left, right) as calls are given it; window_of() says what that is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Features:
    """The tensors and numbers of a call's features; all are off by default.

    bias        broadcastable to (B, H, Sq, Sk), four dimensions. float16, bfloat16 or float32: it
                is added to scale * Q K^T. bool: True where a query may attend to a key
    slopes      float32 (H,) or (B, H): ALiBi (arXiv 2108.12409); slope * |i + diagonal - j| is
                taken from the score of query i and key j, diagonal being Sk - Sq without a causal
                mask
    dropout_p   the probability with which an element of P is dropped, 0 to 1; the others are
                divided by 1 - dropout_p. LSE is that of P undropped
    rng         int64 (2,), seed and offset of the Philox generator that decides which, on the
                device of q: a kernel reads them when it runs, so a CUDA graph sees new values
    window      keys to the left and to the right that a query sees, UNBOUNDED for all: query i sees
                key j where i + diagonal - left <= j <= i + diagonal + right, diagonal as for
                slopes. A causal mask holds beside it
    softcap     0 for none, or the cap of the scores, before bias, slopes and masks: a score s, with
                its scale, becomes softcap * tanh(s / softcap) (Gemma 2, arXiv 2408.00118)
    chunk       0 for none, or the keys of a chunk: query i sees key j where both lie in one, that
                is where (i + diagonal - chunk_start) // chunk and (j - chunk_start) // chunk are
                equal. A causal mask holds too (Llama 4)
    chunk_start int32 (B,), the key at which chunk 0 of each sequence begins, 0 where it is None
    sinks       (H,) float32 or of q's dtype: the score of a key without a value, which each row of
                a head sees, whatever its masks (gpt-oss). LSE includes it
    sequences   where the sequences of packed q, k and v are: a query sees the keys of its own one
                alone, and diagonal is that of its sequence; B of slopes counts sequences
    fp8         the factors of float8_e4m3 Q, K and V
    block_mask  which queries see which keys, in place of a causal mask, window and bias
    invariant   a row's bits depend on its query and the keys it sees alone
    """

    bias: Tensor | None = None
    slopes: Tensor | None = None
    dropout_p: float = 0.0
    rng: Tensor | None = None
    window: tuple[int, int] | None = None
    chunk: int = 0
    chunk_start: Tensor | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    sequences: Sequences | None = None
    fp8: Fp8 | None = None
    block_mask: BlockMask | None = None
    invariant: bool = False
    key: tuple[object, ...] = field(init=False, repr=False)
    """What decides the spec of a call, as a key of dictionaries."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.dropout_p <= 1.0:
            raise InvalidArgument(f"dropout_p must be from 0 to 1: got {shown(self.dropout_p)}")
        if self.window is not None and self.window != window_of(self.window):
            raise InvalidArgument(f"window must have a bounded side, or be None: got {self.window}")
        if self.chunk:
            check_chunk(self.chunk)
        if self.chunk_start is not None and not self.chunk:
            raise InvalidArgument("chunk_start needs chunk: got no chunk")
        check_softcap(self.softcap)
        of_o = None if self.fp8 is None else self.fp8.dtype
        object.__setattr__(self, "key", (*[given(self) for given in _GIVEN], of_o))

    @property
    def bias_kind(self) -> Bias:
        """Whether there is a bias to add, a boolean mask, or none."""
        if self.bias is None:
            return "none"
        return "boolean" if str(self.bias.dtype) == "torch.bool" else "additive"

    @property
    def needs_mask(self) -> Mask | None:
        """The mask that a feature of these needs, if one does."""
        on = zip(_OF_CALLS, self.key, strict=False)
        return next((row.mask for row, is_on in on if is_on and row.mask), None)

    @property
    def dropout_threshold(self) -> int:
        """The least random word, read as a signed 32-bit integer, that keeps an element.

        An element is dropped with probability round(p * 2^32) / 2^32; of p = 1 see keep_scale.
        """
        return min(round(self.dropout_p * 2.0**32), 2**32 - 1) - 2**31

    @property
    def keep_scale(self) -> float:
        """What kept elements are multiplied by, 1 / (1 - p); 0 where p is 1."""
        return 1.0 / (1.0 - self.dropout_p) if self.dropout_p < 1.0 else 0.0

    @property
    def per_head(self) -> bool:
        """Whether a feature is on that brings a number for each head."""
        return any(_per_head(self.key))

    @property
    def only_limits(self) -> bool:
        """Whether nothing is on but limits: numbers, which a repeated launch keeps."""
        return not any(_beyond_limits(self.key))

    @property
    def parts(self) -> tuple[Features, tuple[Tensor | None, ...]]:
        """The same without tensors, and the tensors: TENSORS, then those of packed sequences or the
        factors of fp8; none at all where there is not one.
        """
        tensors = tensors_of(self)
        if self.sequences is not None:
            tensors += self.sequences.tensors
        elif self.fp8 is not None:
            tensors += self.fp8.factors
        elif all(x is None for x in tensors):
            return self, ()
        return self.with_tensors((None,) * len(tensors)), tensors

    def with_tensors(
        self, tensors: Sequence[Any], longest: tuple[int, int] | None = None
    ) -> Features:
        """The features of which `parts` made these. They were checked, so this is a plain copy.
        longest: the max_q and max_k of other packed sequences.
        """
        made = object.__new__(Features)
        made.__dict__.update(self.__dict__, **dict(zip(TENSORS, tensors, strict=False)))
        if self.sequences is not None:
            made.__dict__["sequences"] = self.sequences.with_tensors(
                tensors[len(TENSORS) :], longest
            )
        elif self.fp8 is not None:
            factors = dict(zip(FACTORS, tensors[len(TENSORS) :], strict=True))
            made.__dict__["fp8"] = replace(self.fp8, **factors)
        return made

    def of_sequence(self, number: int) -> Features:
        """The same for one sequence of the batch, apart from bias and sequences."""
        slopes, start = self.slopes, self.chunk_start
        if slopes is not None and slopes.ndim == 2:
            slopes = slopes[min(number, slopes.shape[0] - 1)]
        start = None if start is None else start[number : number + 1]
        return replace(self, slopes=slopes, chunk_start=start)

    def bounds(self, seq_q: int, seq_k: int) -> tuple[int, int]:
        """The most keys that a query sees to the left and right, clamped to these lengths: never
        UNBOUNDED.
        """
        far = min(seq_q + seq_k, 2 * LONGEST)
        left, right = self.window or (self.chunk - 1 if self.chunk else UNBOUNDED, UNBOUNDED)
        return far if left < 0 else min(left, far), far if right < 0 else min(right, far)


def window_of(window: object, *, causal: bool = False) -> tuple[int, int] | None:
    """The window as Features holds it, from (left, right), each an integer number of keys, or None
    or -1 for all; None if it hides nothing: a causal mask ends the right side itself.

    Raises InvalidArgument for anything else.
    """
    if window is None:
        return None
    sides = tuple(window) if isinstance(window, tuple | list) else ()
    if len(sides) != 2 or not all(map(_is_side, sides)):
        raise InvalidArgument(
            "window must be (left, right), whole numbers of keys, each None or -1 for no end: "
            f"got {shown(window)}"
        )
    left, right = (UNBOUNDED if side is None or side >= FAR else int(side) for side in sides)
    if causal:
        right = UNBOUNDED
    return None if left == right == UNBOUNDED else (left, right)


ScoreLimits = tuple[object, ...]
"""A window and a softcap, each None where it changes nothing; True behind them for invariant."""
NO_LIMITS: ScoreLimits = (None, None)


def limits_of(
    window: object, softcap: object, invariant: object = False, *, causal: bool
) -> ScoreLimits:
    """The limits of a call, as its arguments give them: a drop-in's (-1, -1) and 0.0 are none.
    Raises InvalidArgument.
    """
    limits: ScoreLimits = window_of(window, causal=causal), check_softcap(softcap) or None
    return limits if invariant is False else (*limits, check_invariant(invariant))


def _is_side(side: object) -> bool:
    return side is None or (isinstance(side, int) and not isinstance(side, bool) and side >= -1)


def check_softcap(softcap: object) -> float:
    """The cap as Features holds it; None is 0, no cap. Raises InvalidArgument for what is no number
    of 0 or more.
    """
    if softcap is None:
        return 0.0
    number = math.nan
    if type(softcap) is float or (isinstance(softcap, Real) and not isinstance(softcap, bool)):
        try:
            number = float(softcap)
        except OverflowError:
            number = math.inf
    if not 0.0 <= number < math.inf:
        raise InvalidArgument(
            f"softcap must be finite and 0 or more, 0 for none: got {shown(softcap)}"
        )
    return number


def check_invariant(invariant: object) -> bool:
    """Whether a call is invariant. Raises InvalidArgument for anything but True and False."""
    if not isinstance(invariant, bool):
        raise InvalidArgument(f"invariant must be True or False: got {shown(invariant)}")
    return invariant


LARGEST_CHUNK = 1 << 30
"""Beyond, the sum of a chunk and a position would not fit in 32 bits."""


def check_chunk(chunk: object) -> int:
    """The keys of a chunk as Features holds it; None is 0, no chunks. Raises InvalidArgument for
    what is no whole number from 1 to LARGEST_CHUNK.
    """
    if chunk is None:
        return 0
    if not isinstance(chunk, int) or isinstance(chunk, bool) or not 1 <= chunk <= LARGEST_CHUNK:
        raise InvalidArgument(
            f"chunk must be a whole number of keys from 1 to {LARGEST_CHUNK}, or None: "
            f"got {shown(chunk)}"
        )
    return chunk


PLAIN = Features()
"""No feature."""


TENSORS = ("bias", "slopes", "rng", "sinks", "chunk_start")
"""The fields of Features that are tensors, those of packed sequences apart. Autograd and operators
take them in this order."""
BIAS, SINKS = TENSORS.index("bias"), TENSORS.index("sinks")
"""The places of those that have gradients."""
_ARGUMENT = {"slopes": "alibi_slopes"}
"""What calls name differently."""
TENSOR_ARGUMENTS = tuple(_ARGUMENT.get(name, name) for name in TENSORS if name != "rng")
"""What calls name those that they give."""
WITHOUT_GRADIENT = {name: _ARGUMENT.get(name, name) for name in PER_HEAD if name != "sinks"}
"""Those of floats that have no gradient, and what calls name them."""
NUMBERS = {
    "dropout_p": "float",
    "window_left": "int",
    "window_right": "int",
    "softcap": "float",
    "chunk": "int",
    "invariant": "bool",
}
"""The numbers of features with their types, as operators take them."""


def tensors_of(features: Features) -> tuple[Tensor | None, ...]:
    """TENSORS of a call."""
    return tuple([getattr(features, name) for name in TENSORS])


_HEADS = tuple(_ARGUMENT.get(name, name) for name in PER_HEAD)


def heads_given(**given: Tensor | None) -> tuple[Tensor | None, ...]:
    """The arguments of a call that bring a number for each head, in the order of PER_HEAD; none
    where it brings none of them.
    """
    for x in given.values():
        if x is not None:
            return tuple([given.get(name) for name in _HEADS])
    return ()


def tensors_of_heads(given: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """TENSORS of a call that has these alone, in the order of PER_HEAD; None for what is left out
    behind them.
    """
    return tuple(map(dict(zip(PER_HEAD, given, strict=False)).get, TENSORS))


def numbers_of(features: Features) -> tuple[float, ...]:
    """NUMBERS of a call."""
    left, right = features.window or (UNBOUNDED, UNBOUNDED)
    return features.dropout_p, left, right, features.softcap, features.chunk, features.invariant


ALL_TENSORS = (*TENSORS, *OF_PLACES, packed.SIZES)
ALL_NUMBERS = NUMBERS | packed.NUMBERS
"""What operators take, packed sequences included."""


def all_parts_of(features: Features) -> tuple[Any, ...]:
    """ALL_TENSORS and ALL_NUMBERS of a call."""
    of_places: tuple[Any, ...] = (None,) * (len(OF_PLACES) + 1)
    numbers = 0, 0, True, 1
    if (where := features.sequences) is not None:
        of_places, numbers = (*where.tensors, where.sizes), where.numbers
    return *tensors_of(features), *of_places, *numbers_of(features), *numbers


def from_parts(tensors: Sequence[Tensor | None], numbers: Sequence[Any]) -> Features:
    """The features of all_parts_of(); PLAIN where there are none."""
    dropout_p, left, right, softcap, chunk, invariant, *of_places = numbers
    window = None if left == right == UNBOUNDED else (int(left), int(right))
    where = dict(zip((*OF_PLACES, packed.SIZES), tensors[len(TENSORS) :], strict=True))
    sequences = None
    if where["q_begins"] is not None:
        sequences = Sequences(**where, **dict(zip(packed.NUMBERS, of_places, strict=True)))  # type: ignore[arg-type]
    found = Features(
        **dict(zip(TENSORS, tensors, strict=False)),  # type: ignore[arg-type]  # tensors
        dropout_p=dropout_p,
        window=window,
        softcap=softcap,
        chunk=int(chunk),
        invariant=bool(invariant),
        sequences=sequences,
    )
    return found if any(found.key) else PLAIN


def features_of(
    *,
    causal: bool,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    **others: Any,
) -> Features:
    """The features of a call under a causal mask or none, as its arguments give them; PLAIN where
    nothing is on. others: fields of Features. Raises InvalidArgument, naming the argument.
    """
    if bias is not None and bias.ndim < 4:
        bias = bias[(None,) * (4 - bias.ndim)]
    found = Features(
        bias=bias, slopes=alibi_slopes, window=window_of(window, causal=causal),
        softcap=check_softcap(softcap), chunk=check_chunk(chunk), **others,
    )  # fmt: skip
    return found if any(found.key) else PLAIN


def named_tensors(tensors: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Those of TENSORS that a caller gave, by the names of arguments."""
    named = zip(TENSORS, tensors, strict=False)
    return {_ARGUMENT.get(name, name): x for name, x in named if x is not None and name != "rng"}


def fields_of(key: tuple[object, ...]) -> dict[str, Any]:
    """The fields of a spec that a call's features, by their key, turn on."""
    return {row.field: row.value for row, on in zip(_OF_CALLS, key, strict=False) if on}


def check_features(features: Features, q: Tensor, k: Tensor) -> None:
    """Raise InvalidArgument, naming the argument, unless the features fit q and k."""
    keys = k.shape[2]
    if features.sequences is not None:
        check_sequences(features.sequences, q, k)
    if features.block_mask is not None:
        check_block_mask(features.block_mask, q, k)
    check_for_keys(features, q, keys)


def check_for_keys(features: Features, q: Tensor, keys: int) -> None:
    """check_features for so many keys, in a tensor or in a cache that has room for them."""
    shape = (*q.shape[:3], keys)
    if features.sequences is not None:
        shape = (features.sequences.count, *shape[1:])
    for name, tensor in zip(TENSORS, tensors_of(features), strict=True):
        if tensor is not None:
            check_device(_ARGUMENT.get(name, name), tensor, q)
    if features.bias is not None:
        _check_bias(features.bias, shape)
    if features.slopes is not None:
        check_form("alibi_slopes", features.slopes, ("float32",), shape[1:2], shape[:2])
    if features.chunk_start is not None:
        check_form("chunk_start", features.chunk_start, ("int32",), shape[:1])
    if features.sinks is not None:
        _check_sinks(features.sinks, q)
    if features.dropout_p > 0.0 and features.rng is None:
        raise InvalidArgument("dropout_p above 0 needs rng, a seed and an offset: got none")
    if features.rng is not None:
        check_form("rng, seed and offset,", features.rng, ("int64",), (2,))


def _check_bias(bias: Tensor, shape: tuple[int, ...]) -> None:
    dtype = str(bias.dtype).removeprefix("torch.")
    if dtype not in (*FLOAT_BIAS, "bool"):
        raise InvalidArgument(
            f"bias must be bool, float16, bfloat16 or float32: got {dtype}; convert it"
        )
    if bias.ndim != 4 or not broadcasts(bias.shape, shape):
        raise InvalidArgument(
            f"bias must have four dimensions, each 1 or that of {shape}: got {tuple(bias.shape)}"
        )


def _check_sinks(sinks: Tensor, q: Tensor) -> None:
    heads = q.shape[1]
    if tuple(sinks.shape) != (heads,) or str(sinks.dtype) not in ("torch.float32", str(q.dtype)):
        raise InvalidArgument(
            f"sinks must be of shape ({heads},), float32 or of the dtype of q, {q.dtype}: "
            f"got {sinks.dtype} {tuple(sinks.shape)}"
        )
