"""Repeats of decode(): launched as the first call was, and only where they are like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen.runtime.flash_attn as flash_attn
from flashgen.errors import InvalidArgument
from flashgen.inputs.features import heads_given
from flashgen.kernels.launch_cache import Decode
from flashgen.runtime import Dispatcher
from flashgen.runtime.launcher import _Steps
from tests.cpu.runtime.test_call_cache import last, moved, seq_first
from tests.launches import Written, dispatcher
from tests.serving import make_current

BF16 = torch.bfloat16


def flat(
    *, seq_q: int = 1, capacity: int = 4096, heads: int = 8, kv_heads: int = 2, dim: int = 64,
    dim_v: int = 64, batch: int = 2, dtype: torch.dtype = BF16,
) -> dict[str, Any]:  # fmt: skip
    """A call over a contiguous cache."""
    return {
        "q": torch.zeros((batch, heads, seq_q, dim), dtype=dtype),
        "k": torch.zeros((batch, kv_heads, capacity, dim), dtype=dtype),
        "v": torch.zeros((batch, kv_heads, capacity, dim_v), dtype=dtype),
        "lengths": torch.full((batch,), 9, dtype=torch.int32),
    }


def paged(*, size: int = 16, pages: int = 64, wide: int = 0, **sizes: Any) -> dict[str, Any]:
    """A call over a cache in pages; wide: how much longer the rows of the table lie apart."""
    made = flat(capacity=size * pages, **sizes)
    for name in ("k", "v"):
        made[name] = torch.zeros((100, size, 2, made[name].shape[3]), dtype=made["q"].dtype)
    table = torch.zeros((2, pages + wide), dtype=torch.int32)[:, :pages]
    return made | {"block_table": table}


def but(call: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The call with arguments changed: by a function, or to a value."""
    return call | {
        name: change(call[name]) if callable(change) else change for name, change in changes.items()
    }


CALLS: dict[str, dict[str, Any]] = {
    "flat": flat(),
    "one split": flat(capacity=64, batch=64, heads=32, kv_heads=32),
    "two splits": flat(batch=64),
    "seq_q": flat(seq_q=4),
    "a default of few rows": but(flat(seq_q=4), softcap=5.0),
    "a default of many rows": but(flat(seq_q=32), softcap=5.0),
    "not causal": but(flat(seq_q=4), causal=False),
    "capacity": flat(capacity=2048),
    "heads": flat(heads=4),
    "kv_heads": flat(kv_heads=4),
    "dim": flat(dim=128),
    "dim_v": flat(dim_v=128),
    "any dim": flat(dim=24, dim_v=24),
    "float16": flat(dtype=torch.float16),
    "q cut": but(flat(seq_q=4), q=lambda x: x[:, :, :2]),  # of the same strides
    "scale 0.25": but(flat(), scale=0.25),
    "q strides": but(flat(seq_q=4), q=seq_first),
    "k strides": but(flat(), k=seq_first),
    "v strides": but(flat(), v=seq_first),
    "scale": but(flat(), scale=0.5),
    "paged": paged(),
    "page size": paged(size=32),
    "pages": paged(pages=128),
    "table strides": paged(wide=4),
    "window": but(flat(), window=(5, 0)),
    "another window": but(flat(), window=(3000, 0)),
    "window of pages": but(paged(), window=(5, 0)),
    "softcap": but(flat(), softcap=5.0),
    "another softcap": but(flat(), softcap=6.0),
    "window and softcap": but(flat(), window=(5, 0), softcap=5.0),
    "sinks": but(flat(), sinks=torch.zeros(8)),
    "sinks of q's dtype": but(flat(), sinks=torch.zeros(8, dtype=BF16)),
    "sinks beside pages and a window": but(paged(), sinks=torch.zeros(8), window=(5, 0)),
    "slopes": but(flat(), alibi_slopes=torch.zeros(8)),
    "slopes of the batch": but(flat(), alibi_slopes=torch.zeros(2, 8)),
    "slopes and sinks": but(paged(), alibi_slopes=torch.zeros(8), sinks=torch.zeros(8)),
}
ONE_SPLIT = (  # five keys are few
    "one split", "window", "window of pages", "window and softcap",
    "sinks beside pages and a window",
)  # fmt: skip
NEVER: dict[str, dict[str, Any]] = {
    "q base": but(flat(), q=moved),
    "k base": but(flat(), k=moved),
    "v base": but(flat(), v=moved),
    "lengths base": but(flat(), lengths=moved),
    "lengths base beside pages": but(paged(), lengths=moved),
    "table base": but(paged(), block_table=moved),
    "scale": but(flat(), scale=-1.0),
    "whole scale": but(flat(), scale=1),
    "lengths": but(flat(), lengths=None),
    "rows": but(flat(), cache_batch_idx=torch.zeros(2, dtype=torch.int32)),
    "leftpad": but(flat(), cache_leftpad=torch.zeros(2, dtype=torch.int32)),
    "lengths apart": but(flat(), lengths=lambda x: torch.stack([x, x], 1)[:, 0]),
    "table turned": but(paged(), block_table=lambda x: x.t().contiguous().t()),
    "every second column of a table": but(
        paged(), block_table=lambda x: torch.zeros((2, 2 * x.shape[1]), dtype=torch.int32)[:, ::2]
    ),
    "sinks apart": but(flat(), sinks=torch.zeros(16)[::2]),
    "sinks base": but(flat(), sinks=moved(torch.zeros(8))),
    "slopes base beside sinks": but(
        flat(), alibi_slopes=moved(torch.zeros(8)), sinks=torch.zeros(8)
    ),
    "chunk": but(flat(), chunk=64),
    "bias": but(flat(), bias=torch.zeros(1, 1, 1, 4096)),
    "int8": but(
        flat(), k=lambda x: x.to(torch.int8), v=lambda x: x.to(torch.int8),
        k_scale=torch.ones(2), v_scale=torch.ones(2),
    ),
}  # fmt: skip


def by_launch(
    driver: Written, own: Dispatcher, call: dict[str, Any], times: int
) -> tuple[list[Any], int]:
    """What `times` calls launch, each a list, and how many of them were repeats."""
    made, runs = [], 0
    run = _Steps.run

    def counted(*arguments: Any) -> Any:
        nonlocal runs
        runs += isinstance(arguments[1], Decode)
        return run(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Steps, "run", counted)
        for _ in range(times):
            before = len(driver.launches)
            results = own.decode(**call, return_lse=True)
            made.append(chain(driver.launches[before:], results))
    return made, times - runs


def chain(launches: list[Any], results: tuple[Tensor, ...]) -> Any:
    """The launches of one call; what one leaves for the next is named by where it is taken up."""
    *first, final = launches
    named = last_of(final, results)
    if not first:
        return [named]
    (split,) = first
    function, stream, grid, arguments = split
    parts = final[3][:2]
    assert arguments[3:5] == parts  # what combine merges
    return [(function, stream, grid, [*arguments[:3], *arguments[5:]]), (*named[:3], named[3][2:])]


def last_of(launched: Any, results: tuple[Tensor, ...]) -> Any:
    holder = Written()
    holder.launches = [launched]
    return last(holder, results)


@pytest.mark.parametrize("name", CALLS)
def test_a_repeat_is_launched_as_the_first_call_was(
    name: str, driver: Written, own: Dispatcher
) -> None:
    made, repeated = by_launch(driver, own, CALLS[name], 4)
    assert repeated == 2
    assert made[1:] == [made[0]] * 3
    assert len(made[0]) == (1 if name in ONE_SPLIT else 2)


def test_calls_are_told_apart_by_all_that_their_launches_follow_from(
    driver: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = dispatcher(monkeypatch)
    for _ in range(3):
        for call in CALLS.values():
            own.decode(**call)
    for name, call in CALLS.items():
        (met,), repeated = by_launch(driver, own, call, 1)
        (fresh,), _ = by_launch(driver, dispatcher(monkeypatch), call, 1)
        assert (met, repeated) == (fresh, 1), name


@pytest.mark.parametrize("name", NEVER)
def test_what_no_launch_can_repeat_is_made_anew(
    name: str, driver: Written, own: Dispatcher
) -> None:
    for call in (flat(), paged()):
        assert by_launch(driver, own, call, 3)[1] == 1
    assert by_launch_count(own, NEVER[name], 3) == 3


def by_launch_count(own: Dispatcher, call: dict[str, Any], times: int) -> int:
    runs: list[int] = []
    run = _Steps.run

    def counted(*arguments: Any) -> Any:
        runs.extend([1] * isinstance(arguments[1], Decode))
        return run(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Steps, "run", counted)
        for _ in range(times):
            own.decode(**call)
    return len(runs)


@pytest.mark.parametrize("name", ["flat", "paged", "seq_q", "slopes"])
def test_flash_attn_with_kvcache_is_kept(
    name: str, driver: Written, own: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And launches what decode() does. Where another number of splits is asked for, it is not."""
    make_current(monkeypatch, own)
    call = CALLS[name]
    turned = {x: call[x].transpose(1, 2) for x in ("q", "k", "v")}
    if name == "paged":
        turned |= {x: call[x] for x in ("k", "v")}

    def step(**options: Any) -> tuple[list[Any], int]:
        before, runs = len(driver.launches), []
        run = _Steps.run

        def counted(*arguments: Any) -> Any:
            runs.extend([1] * isinstance(arguments[1], Decode))
            return run(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Steps, "run", counted)
            results = flash_attn.flash_attn_with_kvcache(
                turned["q"], turned["k"], turned["v"], cache_seqlens=call["lengths"],
                block_table=call.get("block_table"), causal=True, return_softmax_lse=True,
                alibi_slopes=call.get("alibi_slopes"),
                **options,
            )  # fmt: skip
        return chain(driver.launches[before:], results), len(runs)  # type: ignore[arg-type]

    made = [step(**options) for options in ({}, {}, {}, {"window_size": (4096, 5000)})]
    assert [runs for _, runs in made] == [1, 1, 0, 0]
    assert [launched for launched, _ in made] == [made[0][0]] * 4
    assert step(num_splits=3)[1] == 1
    plain, repeated = by_launch(driver, own, but(call, scale=0.125), 1)
    assert repeated == 1
    # O lies in memory as q, which of one query is the same in both.
    assert [each[:3] for each in plain[0]] == [each[:3] for each in made[0][0]]


def test_numbers_of_heads_that_a_caller_lacks_are_none() -> None:
    sinks = torch.zeros(8)
    assert heads_given(sinks=sinks) == heads_given(alibi_slopes=None, sinks=sinks)
    assert heads_given(alibi_slopes=sinks) == heads_given(sinks=None, alibi_slopes=sinks)
    assert heads_given(sinks=None) == heads_given() == ()


def per_head() -> dict[str, Any]:
    """A call with all that the heads may bring."""
    return but(paged(), sinks=torch.zeros(8), alibi_slopes=torch.zeros(8))


@pytest.mark.parametrize("name", ["q", "k", "v", "lengths", "block_table", "sinks", "alibi_slopes"])
def test_a_view_of_negatives_is_made_plain(name: str, driver: Written, own: Dispatcher) -> None:
    by_launch(driver, own, per_head(), 3)
    call = per_head()
    by_launch(driver, own, call, 1)
    before = len(driver.launches)
    _, repeated = by_launch(driver, own, but(call, **{name: torch._neg_view}), 1)
    assert repeated == 0
    assert call[name].data_ptr() not in driver.launches[before][3]


@pytest.mark.parametrize("option", [{"window": (-1, -1)}, {"softcap": 0.0}], ids=str)
def test_a_feature_that_changes_nothing_is_none(
    option: dict[str, Any], driver: Written, own: Dispatcher
) -> None:
    assert by_launch(driver, own, but(flat(), **option), 3)[1] == 1


WRONG: dict[str, Callable[[], dict[str, Any]]] = {
    "top_left": lambda: but(flat(), causal="top_left"),
    "precision": lambda: but(flat(), precision="half"),
    "nan": lambda: but(flat(), scale=float("nan")),
    "lengths": lambda: but(flat(), lengths=lambda x: x.long()),
    "lengths shape": lambda: but(flat(), lengths=lambda x: x[:1]),
    "lengths device": lambda: but(flat(), lengths=lambda x: x.to("meta")),
    "lengths list": lambda: but(flat(), lengths=lambda x: x.tolist()),
    "table": lambda: but(paged(), block_table=lambda x: x.long()),
    "k": lambda: but(flat(), k=lambda x: x.half()),
    "k gradient": lambda: but(flat(), k=lambda x: x.requires_grad_()),
    "q gradient": lambda: but(flat(), q=lambda x: x.requires_grad_()),
    "v gradient": lambda: but(flat(), v=lambda x: x.requires_grad_()),
    "q list": lambda: but(flat(), q=lambda x: x.tolist()),
    "sinks": lambda: but(per_head(), sinks=lambda x: x[:4]),
    "sinks list": lambda: but(per_head(), sinks=lambda x: x.tolist()),
    "sinks gradient": lambda: but(per_head(), sinks=lambda x: x.requires_grad_()),
    "slopes dtype": lambda: but(per_head(), alibi_slopes=lambda x: x.half()),
    "slopes gradient": lambda: but(per_head(), alibi_slopes=lambda x: x.requires_grad_()),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused_as_ever(
    name: str, driver: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = dispatcher(monkeypatch)
    for call in (flat(), paged(), per_head()):
        for _ in range(3):
            own.decode(**call)
    said = []
    for each in (own, dispatcher(monkeypatch)):
        with pytest.raises(InvalidArgument) as raised:
            each.decode(**WRONG[name]())
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_traced_and_transformed_calls_are_refused_as_ever(
    own: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = flat()
    for _ in range(3):
        own.decode(**call)
    with pytest.raises(InvalidArgument, match="traced or transformed"):
        torch.func.vjp(lambda q: own.decode(**but(call, q=q)), call["q"])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(InvalidArgument, match="traced or transformed"):
        own.decode(**call)


def test_what_asks_for_gradients_is_decoded_where_none_are_recorded(
    driver: Written, own: Dispatcher
) -> None:
    call = but(flat(), q=lambda x: x.requires_grad_())
    with torch.no_grad():
        assert by_launch(driver, own, call, 3)[1] == 1


def test_environment_stream_and_device_are_asked_for_at_every_call(
    driver: Written, own: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = flat()
    (first, *_), _ = by_launch(driver, own, call, 3)
    monkeypatch.setenv("FLASHGEN_GPU", "nvidia_l4")
    (there, *_), repeated = by_launch(driver, own, call, 2)
    assert repeated == 0
    assert there != first
    monkeypatch.setenv("FLASHGEN_GPU", "nvidia_h200")
    monkeypatch.setenv("FLASHGEN_DIRECT", "0")
    before = driver.by_triton
    assert by_launch(driver, own, call, 3)[1] == 0
    assert driver.by_triton - before == 6
    monkeypatch.delenv("FLASHGEN_DIRECT")
    driver.stream = 78
    (made,), repeated = by_launch(driver, own, call, 1)
    assert ([each[1] for each in made], repeated) == ([78, 78], 1)
    driver.device += 10**6
    assert by_launch(driver, own, call, 1)[1] == 0


def test_a_default_has_as_many_rows_as_the_call(driver: Written, own: Dispatcher) -> None:
    for name, rows in (("few", "_br16_"), ("many", "_br64_")):
        ((split, *_),), _ = by_launch(driver, own, CALLS[f"a default of {name} rows"], 1)
        assert rows in split[0][0]
