"""Repeats: a call like an earlier one is launched again as the earlier one was, and only if it is like it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from flashgen.errors import InvalidArgument, NotDifferentiable
from flashgen.runtime import Dispatcher, call_cache, flash_attn, flash_attn_3, flash_attn_4, sdpa
from flashgen.runtime.call import Call
from flashgen.runtime.call_cache import CallCache
from flashgen.runtime.launcher import _Steps
from flashgen.runtime.resolver import key
from tests.launches import Written, dispatcher
from tests.serving import make_current

BF16 = torch.bfloat16


def tensors(
    *, seq_q: int = 48, seq_k: int = 48, heads: int = 4, kv_heads: int = 4, dim: int = 64,
    dim_v: int = 64, batch: int = 2, dtype: torch.dtype = BF16,
) -> list[Tensor]:  # fmt: skip
    shapes = ((heads, seq_q, dim), (kv_heads, seq_k, dim), (kv_heads, seq_k, dim_v))
    return [torch.zeros((batch, *shape), dtype=dtype) for shape in shapes]


def seq_first(x: Tensor) -> Tensor:
    """The same shape, (batch, seq, heads, dim) in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def spaced(x: Tensor, by: int = 8) -> Tensor:
    """The same shape, with room between rows."""
    return torch.zeros((*x.shape[:3], x.shape[3] + by), dtype=x.dtype)[..., : x.shape[3]]


def moved(x: Tensor) -> Tensor:
    """The same shape and strides, with an unaligned base."""
    return torch.zeros(x.numel() + 8, dtype=x.dtype)[1:-7].view(x.shape)


def with_(index: int, change: Callable[[Tensor], Tensor], **sizes: Any) -> list[Tensor]:
    found = tensors(**sizes)
    found[index] = change(found[index])
    return found


def last(driver: Written, results: tuple[Tensor, ...]) -> Any:
    """The launch made last, its outputs by their place among the results."""
    function, stream, grid, arguments = driver.launches[-1]
    where = {x.data_ptr(): ("result", i) for i, x in enumerate(results)}

    def named(argument: Any) -> Any:
        if isinstance(argument, tuple) and isinstance(argument[-1], dict):  # a descriptor
            kind, fields = argument
            return kind, {name: named(value) for name, value in fields.items()}
        return where.get(argument, argument) if isinstance(argument, int) else argument

    layout = [(x.shape, x.stride(), x.dtype) for x in results]
    return function, stream, grid, [named(x) for x in arguments], layout


def by_launch(driver: Written, own: Dispatcher, call: Any, times: int) -> tuple[list[Any], int]:
    """What `times` calls are launched with, and how many of them were repeats."""
    made, runs = [], 0
    run = _Steps.run

    def counted(*arguments: Any) -> Any:
        nonlocal runs
        runs += 1
        return run(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Steps, "run", counted)
        made = [last(driver, call(own)) for _ in range(times)]
    return made, times - runs


def attention(qkv: list[Tensor], **options: Any) -> Callable[[Dispatcher], Any]:
    return lambda own: own.attention(*qkv, return_lse=True, **options)


CALLS: dict[str, tuple[list[Tensor], dict[str, Any]]] = {
    "base": (tensors(), {"causal": True}),
    "parameter": (with_(1, lambda x: torch.nn.Parameter(x, requires_grad=False)), {"causal": True}),
    "seq_q": (tensors(seq_q=32), {"causal": True}),
    "seq_k": (tensors(seq_k=64), {"causal": True}),
    "batch": (tensors(batch=3), {"causal": True}),
    "heads": (tensors(heads=8), {"causal": True}),
    "kv_heads": (tensors(kv_heads=2), {"causal": True}),
    "dim": (tensors(dim=128, dim_v=128), {"causal": True}),
    "dim_v": (tensors(dim_v=128), {"causal": True}),
    "any dim": (tensors(dim=24, dim_v=24), {"causal": True}),
    "float16": (tensors(dtype=torch.float16), {"causal": True}),
    "float32": (tensors(dtype=torch.float32), {"causal": True}),
    "tf32": (tensors(dtype=torch.float32), {"causal": True, "precision": "tf32"}),
    "q cut": (with_(0, lambda x: x[:, :, :32]), {"causal": True}),  # of the same strides
    "q strides": (with_(0, seq_first), {"causal": True}),
    "q rows": (with_(0, spaced), {"causal": True}),
    "k strides": (with_(1, seq_first), {"causal": True}),
    "v strides": (with_(2, seq_first), {"causal": True}),
    "long": (  # not split, as the diagonal is another
        tensors(seq_q=1, seq_k=70000, batch=1, heads=1, kv_heads=1),
        {"causal": "top_left"},
    ),
    "mask": (tensors(), {"causal": False}),
    "top_left": (tensors(seq_k=64), {"causal": "top_left"}),
    "bottom_right": (tensors(seq_k=64), {"causal": "bottom_right"}),
    "scale": (tensors(), {"causal": True, "scale": 0.5}),
    "another scale": (tensors(), {"causal": True, "scale": 0.25}),
    "window": (tensors(), {"causal": True, "window": (5, 0)}),
    "another window": (tensors(), {"causal": True, "window": (6, 0)}),
    "window, no mask": (tensors(), {"window": (5, 0)}),
    "window to the right": (tensors(), {"window": (5, 1)}),
    "softcap": (tensors(), {"causal": True, "softcap": 5.0}),
    "another softcap": (tensors(), {"causal": True, "softcap": 6.0}),
    "window and softcap": (tensors(), {"causal": True, "window": (5, 0), "softcap": 5.0}),
    "sinks": (tensors(), {"causal": True, "sinks": torch.zeros(4)}),
    "sinks of bfloat16": (tensors(), {"causal": True, "sinks": torch.zeros(4, dtype=BF16)}),
    "sinks and window": (tensors(), {"causal": True, "window": (5, 0), "sinks": torch.zeros(4)}),
    "slopes": (tensors(), {"causal": True, "alibi_slopes": torch.zeros(4)}),
    "slopes of a batch": (tensors(), {"causal": True, "alibi_slopes": torch.zeros(2, 4)}),
    "slopes, strides": (tensors(), {"causal": True, "alibi_slopes": torch.zeros(4, 4).t()[:2]}),
    "sinks and slopes": (
        tensors(),
        {"causal": True, "sinks": torch.zeros(4), "alibi_slopes": torch.ones(4)},
    ),
    "slopes, tf32": (
        tensors(dtype=torch.float32),
        {"causal": True, "precision": "tf32", "alibi_slopes": torch.zeros(4)},
    ),
}
NEVER: dict[str, tuple[list[Tensor], dict[str, Any]]] = {
    "q base": (with_(0, moved), {"causal": True}),
    "q base of pointers": (with_(0, moved, dim=24, dim_v=24), {"causal": True}),
    "k base": (with_(1, moved), {"causal": True}),
    "v base": (with_(2, moved), {"causal": True}),
    "no query": (tensors(seq_q=0), {"causal": True}),
    "copied": (with_(2, lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)), {}),
    "scale < 0": (tensors(), {"causal": True, "scale": -0.5}),
    "scale = 0": (tensors(), {"causal": True, "scale": 0.0}),
    "whole scale": (tensors(), {"causal": True, "scale": 1}),
    "bias": (tensors(), {"causal": True, "bias": torch.zeros(1, 1, 48, 48)}),
    "sinks, copied": (tensors(), {"causal": True, "sinks": torch.zeros(8)[::2]}),
    "sinks, negative": (tensors(), {"causal": True, "sinks": torch._neg_view(torch.zeros(4))}),
    "sinks base": (tensors(), {"causal": True, "sinks": torch.zeros(5)[1:]}),
    "slopes base": (tensors(), {"causal": True, "alibi_slopes": torch.zeros(5)[1:]}),
    "chunk": (tensors(), {"causal": True, "chunk": 16}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_repeat_is_launched_as_the_first_call_was(
    name: str, driver: Written, own: Dispatcher
) -> None:
    qkv, options = CALLS[name]
    made, repeated = by_launch(driver, own, attention(qkv, **options), 4)
    assert repeated == 2
    assert made[1:] == [made[0]] * 3


def test_calls_are_told_apart_by_all_that_their_launch_follows_from(
    driver: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One dispatcher that has met all of them launches each as one does that has met none."""
    own = dispatcher(monkeypatch)
    for _ in range(3):
        for qkv, options in CALLS.values():
            attention(qkv, **options)(own)
    for name, (qkv, options) in (CALLS | NEVER).items():
        lies_elsewhere = ("copied", "sinks, copied", "sinks, negative", "chunk")
        if qkv[0].numel() == 0 or name in (*lies_elsewhere, "scale < 0", "scale = 0"):
            continue  # nothing is launched, or of a tensor that lies elsewhere each time
        (met,), _ = by_launch(driver, own, attention(qkv, **options), 1)
        (fresh,), _ = by_launch(driver, dispatcher(monkeypatch), attention(qkv, **options), 1)
        assert met == fresh, name


@pytest.mark.parametrize("name", NEVER)
def test_what_no_launch_can_repeat_is_made_anew(
    name: str, driver: Written, own: Dispatcher
) -> None:
    for _ in range(3):
        attention(*CALLS["base"][:1], causal=True)(own)
    qkv, options = NEVER[name]
    launches = len(driver.launches)
    runs: list[int] = []
    run = _Steps.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Steps, "run", lambda *arguments: (runs.append(1), run(*arguments))[1])
        for _ in range(4):
            attention(qkv, **options)(own)
    assert len(runs) == 4
    assert len(driver.launches) - launches == (0 if name == "no query" else 4)


class Tagged(Tensor):
    """A subclass of Tensor."""


WRONG: dict[str, tuple[Callable[[], list[Any]], dict[str, Any]]] = {
    "causal 1": (tensors, {"causal": 1}),
    "causal 1.0": (tensors, {"causal": 1.0}),
    "causal word": (tensors, {"causal": "left"}),
    "precision": (tensors, {"causal": True, "precision": "half"}),
    "nan": (tensors, {"causal": True, "scale": float("nan")}),
    "huge": (tensors, {"causal": True, "scale": 1e300}),
    "window of one": (tensors, {"causal": True, "window": (5,)}),
    "window of bool": (tensors, {"causal": True, "window": (True, 0)}),
    "negative softcap": (tensors, {"causal": True, "softcap": -5.0}),
    "k device beside a window": (
        lambda: with_(1, lambda x: x.to("meta")),
        {"causal": True, "window": (1, 0)},
    ),
    "slopes of five heads": (tensors, {"causal": True, "alibi_slopes": torch.zeros(5)}),
    "slopes of three": (tensors, {"causal": True, "alibi_slopes": torch.zeros(3, 4)}),
    "slopes dtype": (tensors, {"causal": True, "alibi_slopes": torch.zeros(4, dtype=BF16)}),
    "slopes device": (tensors, {"causal": True, "alibi_slopes": torch.zeros(4, device="meta")}),
    "slopes with a gradient": (
        tensors,
        {"causal": True, "alibi_slopes": torch.zeros(4, requires_grad=True)},
    ),
    "slopes, a list": (tensors, {"causal": True, "alibi_slopes": [0.0] * 4}),
    "sinks of five heads": (tensors, {"causal": True, "sinks": torch.zeros(5)}),
    "sinks dtype": (tensors, {"causal": True, "sinks": torch.zeros(4).half()}),
    "sinks kind": (tensors, {"causal": True, "sinks": torch.zeros(4).as_subclass(Tagged)}),
    "q dtype": (lambda: with_(0, lambda x: x.half()), {"causal": True}),
    "q device": (lambda: with_(0, lambda x: x.to("meta")), {"causal": True}),
    "k dtype": (lambda: with_(1, lambda x: x.half()), {"causal": True}),
    "v dtype": (lambda: with_(2, lambda x: x.half()), {"causal": True}),
    "k device": (lambda: with_(1, lambda x: x.to("meta")), {"causal": True}),
    "v device": (lambda: with_(2, lambda x: x.to("meta")), {"causal": True}),
    "k kind": (lambda: with_(1, lambda x: x.as_subclass(Tagged)), {"causal": True}),
    "v kind": (lambda: with_(2, lambda x: x.as_subclass(Tagged)), {"causal": True}),
    "k none": (lambda: [tensors()[0], None, tensors()[2]], {"causal": True}),
    "k shape": (lambda: with_(1, lambda x: x[:, :, :-1]), {"causal": True}),
    "v heads": (lambda: with_(2, lambda x: x[:, :2]), {"causal": True}),
    "rank": (lambda: with_(0, lambda x: x[0]), {"causal": True}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused_as_ever(
    name: str, driver: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = dispatcher(monkeypatch)
    for _ in range(3):
        own.attention(*tensors(), causal=True)
        own.attention(*tensors(), causal=True, window=(1, 0))
        own.attention(*tensors(), causal=True, alibi_slopes=torch.zeros(4))
        own.attention(*tensors(), causal=True, sinks=torch.zeros(4))
    given, options = WRONG[name]
    said = []
    for each in (own, dispatcher(monkeypatch)):
        with pytest.raises(InvalidArgument) as raised:
            each.attention(*given(), **options)
        said.append(str(raised.value))
    assert said[0] == said[1]


@pytest.fixture
def met(own: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Tensors of a kind of call that was met; a repeat of one is an error from now on."""
    qkv = tensors()
    for _ in range(3):
        own.attention(*qkv, causal=True)

    def repeated(*_: Any) -> None:
        raise AssertionError("a call was repeated")

    monkeypatch.setattr(call_cache.KeptCall, "call", repeated)
    with pytest.raises(AssertionError, match="repeated"):
        own.attention(*qkv, causal=True)
    return qkv


class Passing(TorchDispatchMode):
    """A dispatch mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_are_asked_first(
    own: Dispatcher, met: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = met
    with torch.autocast("cpu", torch.float16):
        assert own.attention(q, k, v, causal=True).dtype is torch.float16
    monkeypatch.setattr("flashgen.runtime.custom_ops._passes_of", lambda package: own.passes)
    with Passing():
        own.attention(q, k, v, causal=True)
    own.attention(q.as_subclass(Tagged), k.as_subclass(Tagged), v.as_subclass(Tagged), causal=True)
    torch.func.vjp(lambda q: own.attention(q, k, v, causal=True), q)
    with pytest.raises(InvalidArgument, match="vmap"):
        torch.func.vmap(lambda q: own.attention(q, k, v, causal=True))(q[None])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotDifferentiable, match="forward-mode"):
            own.attention(dual, k, v, causal=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        own.attention(q, k, v, causal=True)


@pytest.mark.parametrize(
    "feature",
    [
        {"bias": torch.zeros(1, 1, 48, 48)}, {"alibi_slopes": torch.zeros(4)}, {"dropout_p": 0.5},
        {"window": (3, 3)}, {"softcap": 5.0}, {"sinks": torch.zeros(4)},
    ],
    ids=lambda feature: next(iter(feature)),
)  # fmt: skip
def test_features_are_no_part_of_a_plain_call(
    feature: dict[str, Any], own: Dispatcher, met: list[Tensor]
) -> None:
    o, lse = own.attention(*met, causal=True, return_lse=True, **feature)  # no kept call
    assert (o.shape, lse.shape) == (met[0].shape, met[0].shape[:3])


@pytest.mark.parametrize(
    "limits", [{}, {"window": (5, 0), "softcap": 5.0}], ids=["plain", "limits"]
)
def test_gradients_are_recorded_and_only_where_they_are_asked_for(
    limits: dict[str, Any], driver: Written, own: Dispatcher
) -> None:
    qkv = tensors()
    made = by_launch(driver, own, attention(qkv, causal=True, **limits), 3)[0]
    for i in range(3):
        asked = [x.clone().requires_grad_(j == i) for j, x in enumerate(qkv)]
        for deterministic in (True, False, True):
            call = attention(asked, causal=True, deterministic=deterministic, **limits)
            (one,), repeated = by_launch(driver, own, call, 1)
            assert (one[0], one[2], one[4]) == (made[0][0], made[0][2], made[0][4])
            assert repeated == 1
            o, lse = call(own)
            assert o.requires_grad
            assert lse.requires_grad
            assert o.grad_fn.asked[1].deterministic is deterministic
            assert o.grad_fn.next_functions[i][0] is not None
            features = o.grad_fn.asked[1].features  # what the backward takes
            assert (features.window, features.softcap) == (
                (5, -1) if limits else None,
                5.0 if limits else 0.0,
            )
        with torch.no_grad():
            assert not own.attention(*asked, causal=True).requires_grad
    assert not own.attention(*qkv, causal=True).requires_grad
    with torch.inference_mode():
        assert own.attention(*qkv, causal=True).is_inference()


@pytest.mark.parametrize("name", ["q", "sinks"])
def test_gradients_beside_sinks_are_recorded(name: str, driver: Written, own: Dispatcher) -> None:
    """Such a call is a repeat unless the sinks require gradients; its like without gradients is one."""
    qkv, sinks = tensors(), torch.zeros(4)
    made = by_launch(driver, own, attention(qkv, causal=True, sinks=sinks), 3)[0]
    wanted = (qkv[0] if name == "q" else sinks).clone().requires_grad_()
    qkv, sinks = ([wanted, *qkv[1:]], sinks) if name == "q" else (qkv, wanted)
    call = attention(qkv, causal=True, sinks=sinks)
    (one,), repeated = by_launch(driver, own, call, 1)
    assert repeated == (name == "q")
    assert (one[0], one[2], one[4]) == (made[0][0], made[0][2], made[0][4])
    o, lse = call(own)
    assert o.requires_grad
    assert lse.requires_grad
    with torch.no_grad():
        assert by_launch(driver, own, call, 1)[1] == 1


@pytest.mark.parametrize("dim", [64, 512])
def test_head_dims_without_a_backward_are_refused_when_gradients_are_asked_for(
    dim: int, own: Dispatcher
) -> None:
    qkv = tensors(dim=dim, dim_v=512, dtype=torch.float32)
    with torch.no_grad():
        for _ in range(3):
            own.attention(*qkv)
    with pytest.raises(InvalidArgument, match="head"):
        own.attention(qkv[0].requires_grad_(), *qkv[1:])


def test_the_environment_is_read_at_every_call(
    driver: Written, own: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = attention(tensors(), causal=True)
    (first, *_), _ = by_launch(driver, own, call, 3)
    monkeypatch.setenv("FLASHGEN_GPU", "nvidia_l4")
    (there, again, *_), _ = by_launch(driver, own, call, 3)
    assert there[0] != first[0]
    assert again == there
    monkeypatch.setenv("FLASHGEN_GPU", "nvidia_h200")
    assert by_launch(driver, own, call, 1) == ([first], 1)
    before = driver.by_triton
    monkeypatch.setenv("FLASHGEN_DIRECT", "0")
    _, repeated = by_launch(driver, own, call, 3)
    assert (repeated, driver.by_triton - before) == (0, 3)
    monkeypatch.delenv("FLASHGEN_DIRECT")
    assert by_launch(driver, own, call, 1) == ([first], 1)
    assert driver.by_triton - before == 3


def test_streams_and_devices_are_asked_for_at_every_call(driver: Written, own: Dispatcher) -> None:
    call = attention(tensors(), causal=True)
    by_launch(driver, own, call, 3)
    driver.stream = 78
    made, repeated = by_launch(driver, own, call, 1)
    assert (made[0][1], repeated) == (78, 1)
    driver.device += 10**6
    assert by_launch(driver, own, call, 1)[1] == 0  # of another device nothing is known


@pytest.mark.parametrize("what", ["launch_enter_hook", "debug", "add_stages_inspection_hook"])
def test_who_listens_is_heard(what: str, driver: Written, own: Dispatcher) -> None:
    call = attention(tensors(), causal=True)
    by_launch(driver, own, call, 3)
    before = driver.by_triton
    with knobs.runtime.scope():
        if what == "debug":
            knobs.runtime.debug = True
        elif what == "add_stages_inspection_hook":
            knobs.runtime.add_stages_inspection_hook = lambda *_: ("key", "hash")
        else:
            knobs.runtime.launch_enter_hook.add(print)
        try:
            by_launch(driver, own, call, 2)
        finally:
            knobs.runtime.launch_enter_hook.remove(print)
    assert driver.by_triton - before == 2
    assert by_launch(driver, own, call, 1)[1] == 1


@pytest.mark.parametrize("place", [0, 1])
def test_outputs_that_are_not_aligned_are_launched_anew(
    place: int, driver: Written, own: Dispatcher
) -> None:
    """As torch's allocator never has them; another may."""
    call = attention(tensors(dim=24, dim_v=24), causal=True)
    by_launch(driver, own, call, 3)
    empty = torch.empty_strided
    given: list[Tensor] = []

    def unaligned(shape: Any, strides: Any, **kind: Any) -> Tensor:
        given.append(empty(shape, strides, **kind))
        return moved(given[-1]) if len(given) == place + 1 else given[-1]

    own.calls.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_strided", unaligned)
        by_launch(driver, own, call, 2)
        launches = len(driver.launches)
        _, repeated = by_launch(driver, own, call, 1)
    assert (repeated, len(driver.launches) - launches) == (0, 1)
    assert len(given) == 2


def test_a_kernel_that_lost_its_place_is_not_launched_again(
    driver: Written, own: Dispatcher
) -> None:
    q, k, v = tensors()
    call = attention([q, k, v], causal=True)
    (first, *_), _ = by_launch(driver, own, call, 3)
    launcher = own.resolver.launchers[key(Call(causal=True), q, v)]
    steps = launcher._aligned
    config = steps.config
    while steps.config == config:  # the same may serve two buckets
        assert steps.plan is not None
        steps._next(steps.plan, RuntimeError("shared memory"))
    made, repeated = by_launch(driver, own, call, 1)
    assert repeated == 0
    assert made[0][0] != first[0]


def test_no_tensor_is_kept_alive(own: Dispatcher) -> None:
    qkv = tensors()
    for _ in range(3):
        own.attention(*qkv, causal=True)
    alive = [weakref.ref(x) for x in qkv]
    del qkv
    assert [ref() for ref in alive] == [None] * 3


DEFAULTS_OF_DROP_INS: list[dict[str, Any]] = [
    {}, {"window": (-1, -1)}, {"window": (None, -1)}, {"window": [-1, -1]}, {"softcap": 0.0},
    {"window": (-1, 0)}, {"window": (-1, -1), "softcap": 0, "dropout_p": 0},
]  # fmt: skip


@pytest.mark.parametrize("options", DEFAULTS_OF_DROP_INS, ids=str)
def test_a_feature_that_changes_nothing_is_none(
    options: dict[str, Any], driver: Written, own: Dispatcher
) -> None:
    qkv = tensors()
    (plain, *_), _ = by_launch(driver, own, attention(qkv, causal=True), 2)
    assert by_launch(driver, own, attention(qkv, causal=True, **options), 1) == ([plain], 1)


@pytest.mark.parametrize("window", [(-1, -1), (48, 60)])
def test_flash_attn_func_is_kept(
    window: tuple[int, int], driver: Written, own: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its defaults, and with a window that is as wide as the keys."""
    make_current(monkeypatch, own)
    q, k, v = (x.transpose(1, 2).contiguous() for x in tensors())

    def call(_: Dispatcher) -> Any:
        o, lse, _ = flash_attn.flash_attn_func(
            q, k, v, causal=True, window_size=window, return_attn_probs=True
        )
        return o, lse

    made, repeated = by_launch(driver, own, call, 4)
    assert repeated == 2
    assert made[1:] == [made[0]] * 3


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("before", [1, 3], ids=["when it would be bound", "after that"])
@pytest.mark.parametrize("dim", [64, 24], ids=["descriptor", "pointer"])
def test_a_view_of_negatives_is_made_plain(
    index: int, before: int, dim: int, driver: Written, own: Dispatcher
) -> None:
    """Of the same shape, strides and memory as a tensor of a kind that is kept."""
    qkv = tensors(dim=dim, dim_v=dim)
    by_launch(driver, own, attention(qkv, causal=True), before)
    at = qkv[index].data_ptr()
    qkv[index] = torch._neg_view(qkv[index])
    _, repeated = by_launch(driver, own, attention(qkv, causal=True), 1)
    launched = driver.launches[-1][3][index]
    assert repeated == 0
    assert at not in (launched, launched[1]["base"] if isinstance(launched, tuple) else None)


def test_what_is_kept_is_bounded_and_what_is_used_stays() -> None:
    kinds = CallCache(most=4)
    kinds.keep(("used",), 7)
    for i in range(100):
        assert kinds.get((i,)) is None
        kinds.keep((i,), i)
        assert len(kinds) <= 8
        assert kinds.get(("used",)) == 7
    assert kinds.get((99,)) == 99
    assert kinds.get((1,)) is None
    for i in range(100, 110):
        kinds.keep((i,), i)
    assert kinds.get(("used",)) is None


def test_only_a_few_kept_calls_are_compared_before_their_key_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[int] = []

    def likeness(given: Any) -> Any:
        length = given[0].shape[0]
        return lambda *tensors: compared.append(length) or tensors[0].shape[0] == length

    monkeypatch.setattr(call_cache, "likeness", likeness)
    kinds = CallCache()
    for length in range(20):
        found, key = kinds.find((), torch.zeros(length))
        assert found is None
        assert key is not None
        kinds.keep(key, SimpleNamespace(is_like=None))
        kinds.find((), torch.zeros(length))
    compared.clear()
    assert kinds.find((), torch.zeros(20))[0] is None
    assert compared == [19, 18, 17, 16]


@pytest.mark.parametrize("drop_in", [flash_attn, flash_attn_3, flash_attn_4, sdpa])
def test_a_drop_in_repeats_what_attention_kept(
    drop_in: Any, driver: Written, own: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the rest of attention(), which took them 10 microseconds, and refuses what it did."""
    make_current(monkeypatch, own)
    monkeypatch.setattr(own.resolver, "left_to_torch", lambda _: False)
    q, k, v = (seq_first(x) for x in tensors(kv_heads=2))

    def call(**more: Any) -> None:
        if drop_in is sdpa:
            sdpa.scaled_dot_product_attention(q, k, v, **more)
        else:
            drop_in.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)))

    grouped = {"enable_gqa": True}
    for _ in range(2):
        call(**grouped)
    monkeypatch.setattr(own, "attention", None)
    call(**grouped)
    assert len({function for function, *_ in driver.launches}) == 1
    assert len(driver.launches) == 3
    if drop_in is sdpa:
        with pytest.raises(InvalidArgument, match="enable_gqa must be True"):
            call()
