"""Kept calls of packed sequences and of backwards, and inputs that share their memory."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.errors import InvalidArgument, NotDifferentiable
from flashgen.inputs.packed import OF_PLACES
from flashgen.kernels import stream_memory
from flashgen.runtime import Dispatcher
from flashgen.runtime.call import Call, Saved, WantedGradients
from flashgen.runtime.call_cache import KeptCall
from flashgen.runtime.choice import Choice, by_spec
from flashgen.runtime.launcher import _Steps
from flashgen.runtime.varlen import attention_varlen
from flashgen.spec.problem import BUCKETS, bucket_of
from tests.cpu.runtime.test_call_cache import attention, by_launch, moved, tensors
from tests.launches import Written, dispatcher
from tests.makers import make_config, make_spec
from tests.serving import SHIPPED, make_current

BF16 = torch.bfloat16


@pytest.fixture
def own(driver: Written, monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    made = dispatcher(monkeypatch)
    make_current(monkeypatch, made)
    return made


def bounds(*lengths: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def packed(*lengths: int, **changes: Any) -> dict[str, Any]:
    q, k, v = torch.zeros(3, sum(lengths), 4, 64, dtype=BF16).unbind()
    most = {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    cu = {"cu_seqlens_q": bounds(*lengths), "cu_seqlens_k": bounds(*lengths)}
    return {"q": q, "k": k, "v": v, **cu, **most, "causal": True} | changes


def in_pages(*lengths: int, **changes: Any) -> dict[str, Any]:
    pools = torch.zeros(2, 16, 16, 4, 64, dtype=BF16).unbind()
    table = torch.zeros(len(lengths), 4, dtype=torch.int32)
    keys = torch.full((len(lengths),), 9, dtype=torch.int32)
    of_pages = {"k": pools[0], "v": pools[1], "seqused_k": keys, "block_table": table}
    return packed(*lengths, **{"cu_seqlens_k": None} | of_pages | changes)


CALLS: dict[str, dict[str, Any]] = {
    "plain": packed(40, 24),
    "another number of sequences": packed(20, 20, 24),
    "other lengths": packed(40, 28),
    "shorter": packed(40, 24, max_seqlen_q=32, max_seqlen_k=32),
    "longer keys": packed(40, 24, max_seqlen_k=48),
    "int64": packed(40, 24, cu_seqlens_q=bounds(40, 24, dtype=torch.int64)),
    "no mask": packed(40, 24, causal=False),
    "top left": packed(40, 24, causal="top_left"),
    "scale": packed(40, 24, scale=0.5),
    "window": packed(40, 24, window=(5, 0)),
    "sinks": packed(40, 24, sinks=torch.zeros(4)),
    "slopes": packed(40, 24, alibi_slopes=torch.zeros(2, 4)),
    "slopes and sinks": packed(40, 24, alibi_slopes=torch.zeros(4), sinks=torch.zeros(4)),
    "bounds from anywhere": packed(40, 24, cu_seqlens_q=bounds(1, 40, 24)[1:] - 1),
    "pages": in_pages(5, 3),
    "other pages": in_pages(5, 2, 1),
    "pages by bounds": in_pages(5, 3, cu_seqlens_k=bounds(9, 9), seqused_k=None),
    "other pages by bounds": in_pages(5, 2, 1, cu_seqlens_k=bounds(9, 9, 9), seqused_k=None),
    "many pages": in_pages(6000, 3, block_table=torch.zeros(2, 400, dtype=torch.int32)),
    "many places": packed(5000, 24),
}  # fmt: skip
NEVER = {
    "q base": packed(40, 24, q=moved(torch.zeros(64, 4, 64, dtype=BF16))),
    "sinks base": packed(40, 24, sinks=torch.zeros(5)[1:]),
    "negative scale": packed(40, 24, scale=-0.5),
    "chunk": packed(40, 24, chunk=16),
}


def calling(call: dict[str, Any]) -> Callable[[Dispatcher], Any]:
    return lambda _: attention_varlen(**call, return_lse=True)


@pytest.mark.parametrize("name", CALLS)
def test_a_repeat_is_launched_as_the_first_call_was(
    name: str, driver: Written, own: Dispatcher
) -> None:
    made, repeated = by_launch(driver, own, calling(CALLS[name]), 5)
    assert repeated == 3
    assert made[1:] == [made[0]] * 4


def test_calls_are_told_apart_by_all_that_their_launch_follows_from(
    driver: Written, own: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):
        for call in CALLS.values():
            attention_varlen(**call)
    for name, call in CALLS.items():
        (met,), repeated = by_launch(driver, own, calling(call), 1)
        with monkeypatch.context() as patch:
            make_current(patch, dispatcher(monkeypatch))
            (fresh,), _ = by_launch(driver, own, calling(call), 1)
        assert (met, repeated) == (fresh, 1), name


@pytest.mark.parametrize("name", NEVER)
def test_what_no_launch_can_repeat_is_made_anew(
    name: str, driver: Written, own: Dispatcher
) -> None:
    for call in CALLS.values():
        for _ in range(4):
            attention_varlen(**call)
    before = len(driver.launches)
    assert by_launch(driver, own, calling(NEVER[name]), 6)[1] == 0
    assert len(driver.launches) - before == 6


def test_bounds_that_changed_in_place_are_read(driver: Written, own: Dispatcher) -> None:
    """Nothing of their values is kept: kernels get their addresses."""
    call = packed(40, 24)
    (first, *_), _ = by_launch(driver, own, calling(call), 4)
    call["cu_seqlens_q"].copy_(bounds(24, 40))
    assert by_launch(driver, own, calling(call), 1) == ([first], 1)


def test_lengths_in_use_are_read_at_each_call(
    driver: Written, own: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where sequences end is computed of them, and the launch is repeated."""
    used = torch.tensor([5, 6], dtype=torch.int32)
    call = packed(40, 24, seqused_k=used)
    assert by_launch(driver, own, calling(call), 5)[1] == 3
    used.copy_(torch.tensor([3, 30]))
    kept, ends = KeptCall.call, []

    def seen(self: KeptCall, *given: Any) -> Any:
        ends.append(given[4 + OF_PLACES.index("k_ends")].tolist())
        return kept(self, *given)

    monkeypatch.setattr(KeptCall, "call", seen)
    assert by_launch(driver, own, calling(call), 1)[1] == 1
    assert ends == [[3, 64]]


def test_zeros_are_of_one_address_and_longer_ones_are_added(own: Dispatcher) -> None:
    like = torch.zeros(3, dtype=torch.int32)
    first, second = stream_memory.zeros(4, like), stream_memory.zeros(7, like)
    assert first.data_ptr() == second.data_ptr()
    many = stream_memory.zeros(5000, like)
    assert (many.shape, many.any()) == ((5000,), False)
    assert stream_memory.zeros(4, like).data_ptr() == many.data_ptr()


def test_one_tensor_that_was_all_three_binds_none_to_another(
    driver: Written, own: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = tensors()[0]
    by_launch(driver, own, attention([x, x, x], causal=True), 3)
    for qkv in (tensors(), [x, *tensors()[1:]]):
        (met,), repeated = by_launch(driver, own, attention(qkv, causal=True), 1)
        (fresh,), _ = by_launch(driver, dispatcher(monkeypatch), attention(qkv, causal=True), 1)
        assert (met, repeated) == (fresh, 1)


def gradients(attend: Callable[[list[Tensor]], Tensor], wanted: str = "qkv") -> list[Tensor]:
    """Those of one call, whose O and dO are new."""
    leaves = [x.requires_grad_(name in wanted) for name, x in zip("qkv", tensors(), strict=True)]
    o = attend(leaves)
    return list(torch.autograd.grad(o, [x for x in leaves if x.requires_grad], torch.ones_like(o)))


def launched_by_steps(call: Callable[[], object]) -> int:
    """How many launches of a call are no repeats."""
    runs: list[int] = []
    run = _Steps.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Steps, "run", lambda *given: (runs.append(1), run(*given))[1])
        call()
    return len(runs)


@pytest.mark.parametrize("options", [{}, {"window": (5, 0)}, {"softcap": 5.0}], ids=str)
def test_a_backward_is_repeated(options: dict[str, Any], driver: Written, own: Dispatcher) -> None:
    def call() -> list[Tensor]:
        return gradients(lambda qkv: own.attention(*qkv, causal=True, **options))

    assert [launched_by_steps(call) for _ in range(4)] == [4, 4, 0, 0]
    before = len(driver.launches)
    dq, dk, dv = call()
    names = [each[0][0].split("_bf16")[0] for each in driver.launches[before:]]
    assert names == ["fwd", "bwd_delta", "bwd_dkv", "bwd_dq"]
    assert dq.shape == dk.shape == dv.shape


@pytest.mark.parametrize("deterministic", [True, False])
def test_gradients_that_are_not_wanted_are_told_apart(
    deterministic: bool, driver: Written, own: Dispatcher
) -> None:
    found = []
    for wanted in ("qkv", "q", "kv", "v"):
        for _ in range(4):
            before = len(driver.launches)
            gradients(
                lambda qkv: own.attention(*qkv, causal=True, deterministic=deterministic), wanted
            )
            names = [each[0][0] for each in driver.launches[before:]]
        found.append([name.split("_")[1] for name in names if name.startswith("bwd")])
    both = (
        ["delta", "dkv", "dq"] if deterministic or "fused" not in found[0] else ["delta", "fused"]
    )
    assert found == [both, ["delta", "dq"], ["delta", "dkv"], ["delta", "dkv"]]


def test_a_backward_whose_gradient_lies_otherwise_is_no_repeat_of_it(
    driver: Written, own: Dispatcher
) -> None:
    def call(turn: Callable[[Tensor], Tensor]) -> int:
        leaves = [x.requires_grad_() for x in tensors()]
        o = own.attention(*leaves, causal=True)
        return launched_by_steps(lambda: torch.autograd.grad(o, leaves, turn(torch.ones_like(o))))

    assert [call(lambda x: x) for _ in range(3)] == [3, 3, 0]
    assert [call(lambda x: x[:, :, :1].expand_as(x)) for _ in range(3)] == [3, 3, 0]
    assert call(moved) == 3
    assert call(torch._neg_view) == 3
    assert call(lambda x: torch.ones((), dtype=BF16).expand_as(x)) == 3
    assert call(lambda x: x) == 0


def test_packed_sequences_with_gradients_are_repeated(driver: Written, own: Dispatcher) -> None:
    def call(**changes: Any) -> None:
        given = packed(40, 24, **changes)
        leaves = [given[name].requires_grad_() for name in "qkv"]
        o = attention_varlen(**given)
        dq, dk, dv = torch.autograd.grad(o, leaves, torch.ones_like(o))
        assert dq.shape == dk.shape == dv.shape == (64, 4, 64)

    assert [launched_by_steps(call) for _ in range(6)][-2:] == [0, 0]
    assert launched_by_steps(lambda: call(max_seqlen_q=32, max_seqlen_k=32)) == 4
    slopes = torch.zeros(4)
    assert [launched_by_steps(lambda: call(alibi_slopes=slopes)) for _ in range(6)][-1] == 0
    assert launched_by_steps(lambda: call(sinks=torch.zeros(4, requires_grad=True))) == 4


def test_a_gradient_of_lse_reaches_the_kernels_of_a_repeat(
    driver: Written, own: Dispatcher
) -> None:
    for _ in range(6):
        given = packed(40, 24)
        leaves = [given[name].requires_grad_() for name in "qkv"]
        o, lse = attention_varlen(**given, return_lse=True)
        of_lse = torch.ones_like(lse)
        torch.autograd.grad((o, lse), leaves, (torch.ones_like(o), of_lse))
        (delta,) = (each for each in driver.launches[-4:] if each[0][0].startswith("bwd_delta"))
        assert of_lse.data_ptr() in delta[3]


def test_other_sizes_over_pages_are_split_as_they_would_be(
    driver: Written, own: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether keys are split follows from the longest length that the rows of pages hold."""

    def launched(queries: int) -> list[Any]:
        table, before = torch.zeros(2, 400, dtype=torch.int32), len(driver.launches)
        attention_varlen(**in_pages(queries, 3, block_table=table, max_seqlen_k=6000))
        return [(each[0][0], each[2]) for each in driver.launches[before:]]

    launched(5)
    met = launched(6)
    make_current(monkeypatch, dispatcher(monkeypatch))
    assert met == launched(6)
    assert met[0][0].startswith("decode")


def test_a_backward_in_chunks_is_made_anew(driver: Written, own: Dispatcher) -> None:
    """Nobody gave the starts of its chunks, which are made at each launch."""

    def call() -> list[Tensor]:
        return gradients(lambda qkv: own.attention(*qkv, causal=True, chunk=16))

    assert [launched_by_steps(call) for _ in range(4)] == [4] * 4


def test_packed_gradients_with_seqused_are_repeated(driver: Written, own: Dispatcher) -> None:
    """Both passes read the ends of sequences that the forward computed, whatever becomes of seqused."""

    def call() -> None:
        used = torch.tensor([5, 6], dtype=torch.int32)
        given = packed(40, 24, seqused_k=used)
        leaves = [given[name].requires_grad_() for name in "qkv"]
        o = attention_varlen(**given)
        used.zero_()
        torch.autograd.grad(o, leaves, torch.ones_like(o))

    assert [launched_by_steps(call) for _ in range(6)][-2:] == [0, 0]


def test_pages_have_no_gradient_however_often_they_were_attended(own: Dispatcher) -> None:
    for _ in range(3):
        attention_varlen(**in_pages(5, 3))
    call = in_pages(5, 3)
    o = attention_varlen(**call | {"q": call["q"].requires_grad_()})
    with pytest.raises(NotDifferentiable):
        o.sum().backward()


def a_decode(**changes: Any) -> dict[str, Any]:
    q, k, v = tensors(seq_q=1, batch=4)
    return {"q": q, "k": k, "v": v, "lengths": torch.full((4,), 9, dtype=torch.int32)} | changes


def test_calls_of_two_functions_are_told_apart(own: Dispatcher) -> None:
    """Whose tensors and options agree: the second is refused, as it is of a dispatcher that met none."""
    qkv = tensors(seq_q=1, batch=4)
    for _ in range(4):
        own.attention(*qkv, causal=True, alibi_slopes=torch.zeros(4))
    with pytest.raises(InvalidArgument, match="lengths must be"):
        own.decode(*qkv, lengths=torch.zeros(4))
    for _ in range(4):
        own.decode(**a_decode())
    with pytest.raises(InvalidArgument, match="alibi_slopes must be"):
        own.attention(*qkv, causal=True, alibi_slopes=torch.zeros(4, dtype=torch.int32))


KEPT_ALIVE: dict[str, Callable[[], dict[str, Any]]] = {
    "packed": lambda: packed(40, 24, alibi_slopes=torch.zeros(4)),
    "packed over pages": lambda: in_pages(5, 3),
    "packed, used": lambda: packed(40, 24, seqused_k=torch.tensor([5, 6], dtype=torch.int32)),
}


@pytest.mark.parametrize("times", [1, 2, 3, 5])
@pytest.mark.parametrize("name", KEPT_ALIVE)
def test_no_tensor_of_packed_sequences_is_kept_alive(
    name: str, times: int, own: Dispatcher
) -> None:
    given = KEPT_ALIVE[name]()
    for _ in range(times):
        attention_varlen(**given)
    alive = {x: weakref.ref(y) for x, y in given.items() if isinstance(y, Tensor)}
    del given
    assert [x for x, ref in alive.items() if ref() is not None] == []


@pytest.mark.parametrize("times", [1, 2, 4])
def test_no_tensor_of_a_decode_or_a_backward_is_kept_alive(times: int, own: Dispatcher) -> None:
    given = a_decode(sinks=torch.zeros(4))
    leaves = [x.requires_grad_() for x in tensors()]
    for _ in range(times):
        own.decode(**given)
        o = own.attention(*leaves, causal=True)
        torch.autograd.grad(o, leaves, torch.ones_like(o))
    alive = [weakref.ref(x) for x in (o, *given.values(), *leaves)]
    del o, given, leaves
    assert [ref() for ref in alive] == [None] * len(alive)


def test_a_tensor_that_left_its_transform_is_unwrapped(driver: Written, own: Dispatcher) -> None:
    """torch's apply() does so too; its wrapper has no memory."""

    def left(x: Tensor) -> Tensor:
        found: list[Tensor] = []
        torch.func.grad(lambda y: (found.append(y * 1), y.sum())[1])(x)
        return found[0]

    for _ in range(4):
        q, k, v = (left(x) for x in tensors())
        own.attention(q, k, v, causal=True)
        attention_varlen(**packed(40, 24, q=left(torch.zeros(64, 4, 64, dtype=BF16))))


@pytest.mark.parametrize("change", [moved, torch._neg_view], ids=["moved", "negative"])
def test_what_cannot_be_replayed_is_launched_without_being_resolved_again(
    change: Callable[[Tensor], Tensor],
    driver: Written,
    own: Dispatcher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def call(change: Callable[[Tensor], Tensor]) -> None:
        q, k, v = tensors()
        own.attention(change(q), k, v, causal=True)
        given = packed(40, 24)
        attention_varlen(**given | {"q": change(given["q"])})
        given = a_decode()
        own.decode(**given | {"k": change(given["k"])})

    for _ in range(3):
        call(lambda x: x)
    for path, name in (
        (own.general, "serve"),
        (own.general, "serve_eager"),
        (own.decoder, "decode"),
    ):
        monkeypatch.setattr(path, name, None)
    assert launched_by_steps(lambda: call(change)) >= 3
    assert launched_by_steps(lambda: call(lambda x: x)) == 0


WRONG: dict[str, dict[str, Any]] = {
    "a mask of 1": packed(30, 34, causal=1),
    "a negative length": packed(30, 34, max_seqlen_q=-1),
    "keys of other sequences": packed(30, 34, cu_seqlens_k=bounds(30, 20, 14)),
    "slopes of fewer sequences": packed(30, 20, 14, alibi_slopes=torch.zeros(2, 4)),
    "V of fewer places": packed(30, 34, v=torch.zeros(63, 4, 64, dtype=BF16)),
    "a length of True": packed(30, 34, max_seqlen_k=True),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused_although_one_like_it_is_kept(
    name: str, own: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        for call in CALLS.values():
            attention_varlen(**call)
    with pytest.raises(InvalidArgument) as here:
        attention_varlen(**WRONG[name])
    make_current(monkeypatch, dispatcher(monkeypatch))
    with pytest.raises(InvalidArgument) as there:
        attention_varlen(**WRONG[name])
    assert str(here.value) == str(there.value)


def test_other_lengths_are_served_by_the_environment_of_their_call(
    driver: Written, own: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, *_), _ = by_launch(driver, own, calling(packed(40, 24)), 3)
    monkeypatch.setenv("FLASHGEN_GPU", "nvidia_l4")
    (there,), _ = by_launch(driver, own, calling(packed(44, 20)), 1)
    assert there[0][0] != first[0][0]


def test_lengths_of_another_bucket_are_served_by_its_entry(
    driver: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec("bfloat16", 64, "causal", varlen=True)
    short, long = make_config(64, 32), make_config(128, 64, num_warps=8)
    entries = [
        Choice(spec=spec, bucket=bucket, config=config, source="measured", median_us=1.0)
        for bucket, config in ((BUCKETS[0], short), (bucket_of(5000), long))
    ]
    choices = {"nvidia_h200": by_spec(entries)}
    own = Dispatcher(package="generated", archs=SHIPPED.archs, choices=choices)
    make_current(monkeypatch, own)
    met = []
    for call in (packed(40, 24), packed(40, 24), packed(5000, 24), packed(44, 20)):
        made, _ = by_launch(driver, own, calling(call), 2)
        met += [name for (name, _), *_ in made]
    assert [short.label in name for name in met] == [True] * 4 + [False] * 2 + [True] * 2
    assert all(long.label in name for name in met[4:6])


def workspaces() -> list[int]:
    """The bytes of all workspaces that are in memory."""
    gc.collect()
    every = stream_memory._every.values()
    return sorted(each.tensor.numel() for each in every if each.thread is not None)


def backward_of(keys: int, own: Dispatcher, times: int = 3) -> None:
    q, k, v, o, do = (torch.zeros(1, 2, keys, 128, dtype=BF16) for _ in range(5))
    saved = Saved(q, k, v, o, torch.zeros(1, 2, keys))
    for _ in range(times):
        own.passes.backward(
            Call(), saved, do, None, WantedGradients(True, True, True, False, False)
        )


def test_a_kept_backward_does_not_keep_a_workspace_for_which_there_is_a_longer_one(
    driver: Written, own: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_memory, "_workspaces", stream_memory._OfThread())
    before = workspaces()
    for keys in (256, 512, 1000):
        backward_of(keys, own)
        (mine,) = stream_memory._workspaces.longest.values()
        assert workspaces() == sorted([*before, mine.tensor.numel()])
    assert mine.tensor.numel() >= 2 * 2 * 1000 * 1000
    # Those that were bound to a shorter one are bound to the longest, and repeated.
    backward_of(256, own, times=1)
    launched = len(driver.launches)
    with monkeypatch.context() as patch:
        patch.setattr(_Steps, "run", lambda *_: pytest.fail("resolved again"))
        backward_of(256, own)
    assert len(driver.launches) == launched + 9


def test_a_workspace_is_gone_with_its_thread() -> None:
    before, found = workspaces(), []

    def work() -> None:
        stream_memory.workspace(1 << 16, torch.zeros(1))
        found.append(len(workspaces()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [len(before) + 1]
    assert workspaces() == before
