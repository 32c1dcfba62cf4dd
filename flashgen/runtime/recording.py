"""Records the attention of a program as a workload, which `flashgen tune --workload` takes."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from flashgen.errors import InvalidArgument
from flashgen.files import write_whole
from flashgen.runtime import decode
from flashgen.runtime.call import Call
from flashgen.runtime.call_cache import CallCache
from flashgen.runtime.general_path import GeneralPath, asked_features, differentiates
from flashgen.runtime.resolver import spec_of_call
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.features import OFF
from flashgen.spec.problem import bucket_of


@dataclass(frozen=True, kw_only=True)
class Noted:
    """What calls have in common: the spec of forward or decode, and whether gradients follow."""

    spec: AttentionSpec
    gradients: bool


class Recorder:
    """Counts calls. others: calls that no workload can hold, by the reason. serving: whether one of
    flashgen's is under way.
    """

    def __init__(self) -> None:
        self._calls: dict[Noted, Counter[tuple[int, int, int]]] = defaultdict(Counter)
        self.others: Counter[str] = Counter()
        self.serving = False

    def note(
        self, spec: AttentionSpec, seq_k: int, heads: int, kv_heads: int, *, gradients: bool
    ) -> None:
        """One call of seq_k keys."""
        self._calls[Noted(spec=spec, gradients=gradients)][seq_k, heads, kv_heads] += 1

    @property
    def count(self) -> int:
        """How many calls were noted."""
        return sum(sum(calls.values()) for calls in self._calls.values())

    def text(self, name: str) -> str:
        """The workload: the weight of a length is the keys of all its calls. Of the lengths of a
        bucket, and of the numbers of heads of a spec, the heaviest stands for all.
        """
        lines = [f"name: {name}", "specs:"]
        for noted, calls in self._calls.items():
            weights: Counter[tuple[int, int]] = Counter()
            lengths: dict[Any, Counter[int]] = defaultdict(Counter)
            for (seq_k, heads, kv_heads), count in calls.items():
                weights[heads, kv_heads] += count * seq_k
                lengths[bucket_of(seq_k)][seq_k] += count * seq_k
            (heads, kv_heads), _ = weights.most_common(1)[0]
            seqs = {each.most_common(1)[0][0]: each.total() for each in lengths.values()}
            told = ", ".join(f"{seq}: {weight}" for seq, weight in sorted(seqs.items()))
            fields = _fields(noted) | {"heads": heads, "kv_heads": kv_heads, "seqs": f"{{{told}}}"}
            first, *others = (f"{key}: {value}" for key, value in fields.items())
            lines += [f"- {first}", *(f"  {other}" for other in others)]
        return "\n".join([*lines, ""])


def _fields(noted: Noted) -> dict[str, object]:
    """The keys of a spec of a workload, without heads and lengths."""
    spec = noted.spec
    found: dict[str, object] = {"dtype": spec.dtype, "head_dim": spec.head_dim}
    if spec.head_dim_v != spec.head_dim:
        found["head_dim_v"] = spec.head_dim_v
    found |= {"mask": spec.mask, "precision": spec.precision}
    if spec.direction == "forward" and spec.paged:
        directions, spec = "[paged_prefill]", replace(spec, varlen=False, paged=False)
    elif spec.direction == "decode":
        directions = "[decode]"
    else:
        directions = "[forward, backward]" if noted.gradients else "[forward]"
    found["directions"] = directions
    for name, off in OFF.items():
        value = getattr(spec, name)
        if value != off:
            found[name] = str(value).lower() if isinstance(value, bool) else value
    return found


class _OfTorch(TorchFunctionMode):
    """Notes calls of torch's scaled_dot_product_attention, those of nn.MultiheadAttention too."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if function is scaled_dot_product_attention:
            return self._noted(*args, **given)
        if function is multi_head_attention_forward:  # calls inside of it do not come here
            with _replaced(functional, "scaled_dot_product_attention", self._noted):
                return function(*args, **given)
        return function(*args, **given)

    def _noted(self, *args: Any, **given: Any) -> Tensor:
        if not self._recorder.serving:
            _note_sdpa(self._recorder, *args, **given)
        return scaled_dot_product_attention(*args, **given)


def _note_sdpa(
    recorder: Recorder,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: object,
) -> None:
    try:
        features = asked_features(
            query, causal=is_causal, bias=attn_mask, dropout_p=dropout_p, draws=False
        )
        _note(recorder, Call(causal=is_causal, features=features), query, key, value)
    except InvalidArgument as error:
        recorder.others[str(error)] += 1


def _note(recorder: Recorder, call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
    spec, problem = spec_of_call(call, q, k, v)
    recorder.note(
        spec, problem.seq_k, problem.heads, problem.kv_heads,
        gradients=differentiates(call, q, k, v),
    )  # fmt: skip


@contextlib.contextmanager
def _replaced(owner: Any, attribute: str, new: object) -> Iterator[None]:
    """The attribute of a class or module is another one meanwhile."""
    before = getattr(owner, attribute)
    setattr(owner, attribute, new)
    try:
        yield
    finally:
        setattr(owner, attribute, before)


@contextlib.contextmanager
def recording(path: str | Path, name: str = "recorded") -> Iterator[Recorder]:
    """Record the attention of a program, and write it as a workload to `path` at the end, also that
    of an exception. Where nothing was recorded, nothing is written, and a UserWarning says why.

    Calls of flashgen and of torch's scaled_dot_product_attention count, on any device; those inside
    of torch.compile or a CUDA graph's replay do not. Calls take longer meanwhile. One at a time.

    Args:
        path: the YAML file to write.
        name: of the workload.

    Raises:
        OSError: if the file cannot be written.

    Examples:
        >>> import tempfile, torch
        >>> from flashgen import attention
        >>> from flashgen.runtime.recording import recording
        >>> q = torch.randn(1, 2, 8, 64, dtype=torch.bfloat16)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with recording(f"{folder}/workload.yaml") as recorder:
        ...         _ = attention(q, q, q, causal=True)
        >>> recorder.count
        1
    """
    recorder = Recorder()
    serve, plain, decoded = GeneralPath.serve, GeneralPath.serve_eager, decode.decode_spec

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(self: GeneralPath, call: Call, q: Tensor, k: Tensor, v: Tensor, **o: Any) -> Any:
            if recorder.serving:  # serve() calls serve_eager(), and on a CPU SDPA may serve
                return function(self, call, q, k, v, **o)
            recorder.serving = True
            try:
                result = function(self, call, q, k, v, **o)
                _note(recorder, call, q, k, v)
                return result
            finally:
                recorder.serving = False

        return called

    def of_decode(call: Call, q: Tensor, cache: Any) -> AttentionSpec:
        spec = decoded(call, q, cache)
        recorder.note(spec, cache.capacity, q.shape[1], cache.k.shape[1], gradients=False)
        return spec

    with contextlib.ExitStack() as stack:
        for owner, attribute, new in (
            (CallCache, "find", lambda *_: (None, None)),  # or a kept call would not be seen
            (GeneralPath, "serve", noting(serve)),
            (GeneralPath, "serve_eager", noting(plain)),
            (decode, "decode_spec", of_decode),
        ):
            stack.enter_context(_replaced(owner, attribute, new))
        stack.enter_context(_OfTorch(recorder))
        try:
            yield recorder
        finally:  # an interrupted program keeps what was recorded
            if recorder.count:
                write_whole(Path(path), recorder.text(name))
    if not recorder.count:
        warnings.warn(
            f"no attention was recorded: {path} is not written; {_why(recorder)}", stacklevel=3
        )


def _why(recorder: Recorder) -> str:
    """Why nothing was recorded."""
    for reason, count in recorder.others.most_common(1):
        return f"of {recorder.others.total()} calls {count} cannot be: {reason}"
    return "calls inside of torch.compile, and of a graph's replay, are not seen"
